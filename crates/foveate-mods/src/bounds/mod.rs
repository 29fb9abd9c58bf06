//! What a mask or a score can be over a whole rectangle of queries and keys.
//!
//! Interval arithmetic over the graph: each node gets a range that holds every value it takes
//! for the queries and keys of the rectangle. If the mask's range is only `true` or only
//! `false` the rectangle is decided without looking at its points. Captured buffers take part
//! through tables of range minima and maxima, made once and kept with the buffer. The answer is
//! always sound and may be undecided: the two sides of `x - x` are not known to be equal. A rectangle
//! that may read a captured buffer outside its axes is never decided, so whoever evaluates what
//! bounds leave open meets every index out of range, however the plane is cut.

#[cfg(test)]
pub(crate) mod random;

use std::ops::{Range, RangeInclusive};

use crate::interval::{self, Interval};
use crate::ir::{Leaf, Node, NodeId};
use crate::point::Head;
use crate::program::Program;
use crate::value::{ScalarValue, Type};

/// What a mask is over a rectangle.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Cover {
    /// False everywhere.
    Empty,
    /// True everywhere.
    Full,
    /// Not decided by bounds.
    Undecided,
}

/// A mask or score program ready to be bounded.
#[derive(Clone, Debug)]
pub struct Bounds {
    program: Program,
}

impl Bounds {
    /// Prepares a program. A captured buffer that was in no bounds before takes time and memory
    /// linear in its length, all others none.
    pub fn new(program: &Program) -> Self {
        program.graph().buffers().iter().for_each(|buffer| {
            buffer.ranges();
        });
        Self { program: program.clone() }
    }

    /// What root 0 is over the queries and keys of a rectangle that is not empty.
    ///
    /// # Panics
    /// When root 0 is not bool.
    pub fn cover(&self, head: &Head, q: Range<i32>, kv: Range<i32>) -> Cover {
        let (range, inside) = self.root(head, q, kv, Interval::ANY_F32);
        match range {
            Interval::Bool { .. } if !inside => Cover::Undecided,
            Interval::Bool { yes: true, no: false } => Cover::Full,
            Interval::Bool { yes: false, no: true } => Cover::Empty,
            Interval::Bool { .. } => Cover::Undecided,
            _ => panic!("the root of a mask is bool"),
        }
    }

    /// Whether the program surely reads its captured buffers inside their axes, at every point of
    /// a rectangle that is not empty.
    pub fn reads_inside(&self, head: &Head, q: Range<i32>, kv: Range<i32>) -> bool {
        self.program.graph().buffers().is_empty() || self.root(head, q, kv, Interval::ANY_F32).1
    }

    /// What no value of root 0, an f32, is above over a rectangle that is not empty, whatever the
    /// raw scores there are between `-magnitude` and `magnitude`. `+∞` where it may be NaN or an
    /// index outside its axis.
    ///
    /// # Panics
    /// When root 0 is not f32.
    pub fn highest(&self, head: &Head, q: Range<i32>, kv: Range<i32>, magnitude: f32) -> f32 {
        let raw = if magnitude.is_nan() {
            Interval::ANY_F32
        } else {
            Interval::F32 { lo: -magnitude, hi: magnitude, nan: false }
        };
        match self.root(head, q, kv, raw) {
            (Interval::F32 { hi, nan: false, .. }, true) => hi,
            (Interval::F32 { .. }, _) => f32::INFINITY,
            _ => panic!("the root of a score is f32"),
        }
    }

    /// Range of root 0 over a rectangle for raw scores in `raw`, and whether every index is surely
    /// inside its axis.
    fn root(&self, head: &Head, q: Range<i32>, kv: Range<i32>, raw: Interval) -> (Interval, bool) {
        let graph = self.program.graph();
        let point = head.at(0, 0);
        let mut inside = true;
        let mut ranges: Vec<Interval> = Vec::with_capacity(graph.nodes().len());
        for node in graph.nodes() {
            let range = match node {
                Node::Leaf(Leaf::Q) => Interval::I32 { lo: q.start, hi: q.end - 1 },
                Node::Leaf(Leaf::Kv) => Interval::I32 { lo: kv.start, hi: kv.end - 1 },
                Node::Leaf(Leaf::Score) => raw,
                Node::Leaf(leaf) => Interval::one(point.leaf(*leaf)),
                Node::Load { buffer, index, from_end } => {
                    let buffer = &graph.buffers()[*buffer as usize];
                    let of =
                        |(id, &len): (&NodeId, &usize)| ranges[id.index()].position(len, *from_end);
                    let axes = || index.iter().zip(buffer.shape());
                    inside &= axes().all(|axis| of(axis).within(*axis.1));
                    let table = buffer.ranges();
                    inside &= !table.has_too_wide();
                    table.range(buffer.placed(), axes().map(of))
                }
                node => computed(&self.program, node, &ranges),
            };
            ranges.push(range);
        }
        (ranges[self.program.roots()[0].index()], inside)
    }
}

/// Range of a node that is neither a leaf nor a load, from those of its operands.
fn computed(program: &Program, node: &Node, ranges: &[Interval]) -> Interval {
    let of = |id: &NodeId| ranges[id.index()];
    match node {
        Node::Bool(v) => Interval::one(ScalarValue::Bool(*v)),
        Node::I32(v) => Interval::one(ScalarValue::I32(*v)),
        Node::F32(v) => Interval::one(ScalarValue::F32(f32::from_bits(*v))),
        Node::Scalar(slot) => Interval::one(program.graph().scalars()[*slot as usize].value),
        Node::Unary(op, x) => interval::unary(*op, of(x)),
        Node::Binary(op, x, y) => interval::binary(*op, of(x), of(y)),
        Node::Select { cond, then, other } => match of(cond) {
            Interval::Bool { yes: true, no: false } => of(then),
            Interval::Bool { yes: false, no: true } => of(other),
            _ => of(then).union(of(other)),
        },
        Node::Cast(to, x) => interval::cast(*to, of(x)),
        Node::Leaf(_) | Node::Load { .. } => unreachable!("the caller's own"),
    }
}

impl Program {
    /// For each node that is a load, whether each of its indices is surely an index of its axis
    /// while every coordinate is in the range that `coordinate` gives for it; empty for other
    /// nodes. Run-time scalars have the values they have now. What buffers hold is not looked
    /// at, so that their contents may be replaced.
    pub fn indices_within(
        &self,
        coordinate: &dyn Fn(Leaf) -> RangeInclusive<i32>,
    ) -> Vec<Vec<bool>> {
        let (graph, ranges) = (self.graph(), self.ranges(coordinate));
        let within = graph.nodes().iter().map(|node| match node {
            Node::Load { buffer, index, .. } => {
                let shape = graph.buffers()[*buffer as usize].shape();
                let axes = index.iter().zip(shape);
                axes.map(|(i, &len)| ranges[i.index()].within(len)).collect()
            }
            _ => Vec::new(),
        });
        within.collect()
    }

    /// For each node, whether it is surely a positive f32 that is finite and not subnormal, on the
    /// same conditions.
    pub fn positive_normals(&self, coordinate: &dyn Fn(Leaf) -> RangeInclusive<i32>) -> Vec<bool> {
        let normal = |range: &Interval| {
            matches!(range, Interval::F32 { lo, hi, nan: false }
                if *lo >= f32::MIN_POSITIVE && hi.is_finite())
        };
        self.ranges(coordinate).iter().map(normal).collect()
    }

    /// For each node, whether it is an i32 that surely has the value that its expression has over
    /// the integers, on the same conditions: no sum or product in it wraps.
    pub(crate) fn never_wraps(
        &self,
        coordinate: &dyn Fn(Leaf) -> RangeInclusive<i32>,
    ) -> Vec<bool> {
        let ranges = self.ranges(coordinate);
        ranges
            .iter()
            .map(|r| matches!(r, Interval::I32 { .. }) && *r != Interval::ANY_I32)
            .collect()
    }

    /// Ranges of all nodes for coordinates in ranges; a load can be anything.
    fn ranges(&self, coordinate: &dyn Fn(Leaf) -> RangeInclusive<i32>) -> Vec<Interval> {
        let graph = self.graph();
        let mut ranges: Vec<Interval> = Vec::with_capacity(graph.nodes().len());
        for (node, ty) in graph.nodes().iter().zip(graph.types()) {
            ranges.push(match node {
                Node::Leaf(Leaf::Score) => Interval::ANY_F32,
                Node::Leaf(leaf) => {
                    let range = coordinate(*leaf);
                    Interval::I32 { lo: *range.start(), hi: *range.end() }
                }
                Node::Load { .. } => match ty {
                    Type::Bool => Interval::ANY_BOOL,
                    Type::I32 => Interval::ANY_I32,
                    Type::F32 => Interval::ANY_F32,
                },
                node => computed(self, node, &ranges),
            });
        }
        ranges
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::capture::Buffer;
    use crate::expr::{self, Expr};
    use crate::point::Point;
    use crate::program::MaskMod;

    const LEN: i32 = 24;

    fn exact(program: &Program, q: &Range<i32>, kv: &Range<i32>) -> Cover {
        let mut seen = [false; 2];
        for q in q.clone() {
            for kv in kv.clone() {
                let point = Point { q, kv, q_len: LEN, kv_len: LEN, ..Default::default() };
                let value = program.eval(&point).unwrap()[0];
                seen[usize::from(value == ScalarValue::Bool(true))] = true;
            }
        }
        match seen {
            [false, true] => Cover::Full,
            [true, false] => Cover::Empty,
            _ => Cover::Undecided,
        }
    }

    fn agrees(mask: &MaskMod, must_be_exact: bool) {
        let bounds = Bounds::new(mask.program());
        let head = Head { q_len: LEN, kv_len: LEN, ..Default::default() };
        for size in [1, 3, 5, 8] {
            for q in (0..LEN).step_by(size) {
                for kv in (0..LEN).step_by(size) {
                    let rect = (q..(q + size as i32).min(LEN), kv..(kv + size as i32).min(LEN));
                    let want = exact(mask.program(), &rect.0, &rect.1);
                    let got = bounds.cover(&head, rect.0.clone(), rect.1.clone());
                    let sound = got == want || got == Cover::Undecided;
                    assert!(sound, "{rect:?}: bounds say {got:?}, the points {want:?}");
                    assert!(!must_be_exact || got == want, "{rect:?}: {got:?} for {want:?}");
                }
            }
        }
    }

    fn mask(e: Expr<bool>) -> MaskMod {
        MaskMod::new(e.dynamic()).unwrap()
    }

    #[test]
    fn the_masks_people_use_are_decided_exactly() {
        let (q, kv) = (expr::q, expr::kv);
        agrees(&mask(q().ge(kv())), true);
        agrees(&mask(q().ge(kv()) & (q() - kv()).lt(5)), true);
        agrees(&mask(q().ge(kv()) | kv().lt(7)), true);
        agrees(&mask((q() / 6).eq(kv() / 6)), true);
        let doc = Buffer::vector("doc", (0..LEN).map(|i| (i * i) / 90).collect());
        agrees(&mask(doc.at([q()]).eq(doc.at([kv()]))), true);
        let tiles = Buffer::new("tiles", &[4, 4], (0..16).map(|i| i % 3 == 0).collect()).unwrap();
        agrees(&mask(tiles.at([q() / 6, kv() / 6])), true);
    }

    #[test]
    fn a_buffer_keeps_its_ranges_for_every_mask_that_reads_it() {
        let ids = Buffer::vector("ids", (0..1000).collect::<Vec<i32>>());
        let shared = mask(ids.at([expr::q()]).eq(3));
        let buffer = &shared.program().graph().buffers()[0];
        assert!(std::ptr::eq(ids.any().ranges(), buffer.ranges()));
        let other = Buffer::vector("ids", vec![7; 1000]);
        let rebound = shared.map(|p| p.rebind(other.any())).unwrap();
        let head = Head { q_len: 1000, kv_len: 1, ..Default::default() };
        assert_eq!(Bounds::new(shared.program()).cover(&head, 4..1000, 0..1), Cover::Empty);
        assert_eq!(Bounds::new(shared.program()).cover(&head, 0..4, 0..1), Cover::Undecided);
        assert_eq!(Bounds::new(rebound.program()).cover(&head, 0..1000, 0..1), Cover::Empty);
    }

    #[test]
    fn a_rectangle_that_may_read_outside_a_buffer_is_never_decided() {
        let ids = Buffer::vector("ids", vec![7; 10]);
        let bounds = Bounds::new(mask(ids.at([expr::kv()]).eq(7)).program());
        let head = Head { q_len: LEN, kv_len: LEN, ..Default::default() };
        assert_eq!(bounds.cover(&head, 0..4, 0..10), Cover::Full);
        assert_eq!(bounds.cover(&head, 0..4, 0..11), Cover::Undecided);
        assert_eq!(bounds.cover(&head, 0..4, 10..11), Cover::Undecided);
        let hidden = Bounds::new(mask(ids.at([expr::kv() - 1]).eq(7) & expr::q().lt(0)).program());
        assert_eq!(hidden.cover(&head, 0..4, 1..11), Cover::Empty);
        assert_eq!(hidden.cover(&head, 0..4, 0..11), Cover::Undecided);
    }

    #[test]
    fn no_score_is_above_the_highest() {
        let head = Head { h: 1, q_len: LEN, kv_len: LEN, ..Default::default() };
        let wave = Buffer::vector("wave", (0..LEN).map(|i| (i as f32).sin()).collect::<Vec<_>>());
        let relative = expr::score() + wave.at([(expr::q() - expr::kv()).abs()]);
        let scores = [
            crate::scores::alibi(4).unwrap(),
            crate::scores::soft_cap(3.0).unwrap(),
            crate::scores::alibi(4).unwrap().then(&crate::scores::soft_cap(30.0).unwrap()),
            crate::ScoreMod::new(relative.dynamic()).unwrap(),
        ];
        for score in scores {
            let bounds = Bounds::new(score.program());
            for (q, kv) in [(3..9, 0..4), (20..24, 2..7), (0..24, 0..24), (5..6, 5..6)] {
                let highest = bounds.highest(&head, q.clone(), kv.clone(), 2.5);
                let mut exact = f32::NEG_INFINITY;
                for (q, kv) in q.flat_map(|q| kv.clone().map(move |kv| (q, kv))) {
                    for raw in [-2.5, 0.0, 1.0, 2.5] {
                        let point = Point { q, kv, h: 1, score: raw, ..Default::default() };
                        let ScalarValue::F32(x) = score.program().eval(&point).unwrap()[0] else {
                            unreachable!("a score is f32")
                        };
                        exact = exact.max(x);
                    }
                }
                assert!(exact <= highest && highest.is_finite(), "{exact} above {highest}");
            }
        }
    }

    #[test]
    fn nothing_is_known_of_a_score_that_may_be_nan_or_read_outside() {
        let head = Head { q_len: LEN, kv_len: LEN, ..Default::default() };
        let highest = |score: Expr<f32>, magnitude| {
            let score = crate::ScoreMod::new(score.dynamic()).unwrap();
            Bounds::new(score.program()).highest(&head, 0..4, 0..8, magnitude)
        };
        assert_eq!(highest(expr::score() * 2.0, 4.0), 8.0);
        assert_eq!(highest(expr::score(), f32::INFINITY), f32::INFINITY);
        assert_eq!(highest(expr::score(), f32::NAN), f32::INFINITY);
        assert_eq!(highest(expr::score().sqrt(), 1.0), f32::INFINITY);
        let short = Buffer::vector("short", vec![-1000.0; 7]);
        assert_eq!(highest(short.at([expr::kv()]) + expr::score(), 1.0), f32::INFINITY);
    }

    #[test]
    fn hard_masks_are_bounded_soundly() {
        let (q, kv) = (expr::q, expr::kv);
        agrees(&mask(((q() - kv()) % 4).eq(0)), false);
        agrees(&mask(((q() * kv()) % 7).lt(3) ^ q().lt(kv())), false);
        agrees(&mask((q() - 9).abs().lt((kv() - 4).abs())), false);
        agrees(&mask(((q() - 5) / (kv() - 8)).gt(1)), false);
        agrees(&mask(((q() - 11) % (kv() - 8)).gt(1)), false);
        agrees(&mask(q().to_f32().sin().gt(kv().to_f32() * 0.1)), false);
        agrees(&mask((q().to_f32() / kv().to_f32()).exp().lt(3.0)), false);
        agrees(&mask(q().mix(kv()).unit().lt(0.5)), false);
        agrees(&mask((q() * 200_000_000).lt(kv() * 100_000_000)), false);
        agrees(&mask((kv().to_f32() - 3.0).log().max(0.5).lt(q().to_f32().sqrt())), false);
        let wave = Buffer::vector("wave", (0..LEN).map(|i| (i as f32).sin()).collect::<Vec<_>>());
        agrees(&mask(wave.at([q()]).lt(wave.at([kv()]).abs())), false);
        agrees(&mask(q().lt(8).select(wave.at([q()]), 0.3f32).le(wave.at([kv()]))), false);
    }

    #[test]
    fn an_index_is_within_its_axis_when_bounds_say_so() {
        let table = Buffer::new("table", &[3, 9], vec![0.0; 27]).unwrap();
        let doc = Buffer::vector("doc", vec![0; 20]);
        let column = (expr::q() - expr::kv()).max(-expr::scalar("reach", 4)).min(4) + 4;
        let mask = table.at([expr::h(), column]).lt(0.5) & doc.at([expr::kv()]).eq(1);
        let program = Program::build(&[mask.dynamic().clone()]);
        let within = |keys: i32| {
            let found = program.indices_within(&|leaf| match leaf {
                Leaf::H => 0..=2,
                Leaf::Kv => 0..=keys - 1,
                _ => 0..=100,
            });
            found.into_iter().filter(|axes| !axes.is_empty()).collect::<Vec<_>>()
        };
        let sorted = |mut found: Vec<Vec<bool>>| {
            found.sort_by_key(Vec::len);
            found
        };
        assert_eq!(sorted(within(20)), [vec![true], vec![true, true]]);
        assert_eq!(sorted(within(21)), [vec![false], vec![true, true]]);
    }

    #[test]
    fn a_float_is_positive_and_normal_when_bounds_say_so() {
        let of = |x: Expr<f32>, keys: i32| {
            let program = Program::build(&[x.dynamic().clone()]);
            let coordinate = |leaf| if leaf == Leaf::Kv { 0..=keys } else { 0..=100 };
            program.positive_normals(&coordinate)[program.roots()[0].index()]
        };
        let from_one = || expr::kv().max(1).to_f32();
        assert!(of(from_one() / 8.0, 1000));
        assert!(!of(expr::kv().to_f32(), 1000));
        assert!(!of(from_one() * 1e-38, 1000));
        assert!(of(from_one() * 1e30, 1000) && !of(from_one() * 1e36, 1000));
        assert!(!of(expr::score(), 1000));
    }
}
