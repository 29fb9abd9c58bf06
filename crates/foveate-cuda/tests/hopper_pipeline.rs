//! The mbarriers of the Hopper forward kernel as a model: the roles of `kernels/hopper/forward.cu` as
//! lists of what they do to barriers and buffers, carried out in random order.
//!
//! The model finds what no compiler does: a deadlock, a wait that takes one phase for another, an
//! arrival that nobody expects, a copy that lands in a buffer that is still read. It knows no data but
//! which tile a buffer holds.

use std::collections::BTreeMap;

use foveate_tensor::random::Random;

/// Bytes that a copy delivers; the real number does not matter.
const BYTES: i64 = 4096;
/// Places of the ring of items: the one that is finished, the one at work, and the next one.
const PLACES: usize = 3;

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Barrier {
    KFull(usize),
    KEmpty(usize),
    VFull(usize),
    VEmpty(usize),
    /// Of a stage of Q and a consumer.
    QFull(usize, usize),
    QEmpty(usize, usize),
    ItemFull(usize),
    ItemEmpty(usize),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Buffer {
    K(usize),
    V(usize),
    Q(usize, usize),
    /// What the producer tells with a stage of K.
    Step(usize),
    Item(usize),
}

/// What a buffer holds: item, and tile of keys in it.
type Content = (usize, usize);
/// The item after the last one, and the step that says so.
const STOP: Content = (usize::MAX, 0);

#[derive(Clone, Copy, Debug)]
enum Op {
    /// Waits for a round of a barrier, -1 of a fresh one.
    Wait(Barrier, i64),
    Arrive(Barrier),
    /// Arrives and announces bytes.
    Expect(Barrier, i64),
    /// Starts a copy, which lands later.
    Copy(Barrier, Buffer, Content),
    Write(Buffer, Content),
    Read(Buffer, Content),
    /// Waits for, and passes on, the turn of a consumer (named barriers).
    TakeTurn(usize),
    GiveTurn(usize),
}
use Op::*;

/// How the kernel is configured.
#[derive(Clone, Copy, Debug)]
struct Shape {
    consumers: usize,
    stages: usize,
    q_stages: usize,
}

/// A position in a ring, as in `forward_device.cuh`.
#[derive(Clone, Copy)]
struct Ring {
    stages: usize,
    turn: i64,
}

impl Ring {
    fn new(stages: usize) -> Self {
        Self { stages, turn: 0 }
    }
    fn stage(self) -> usize {
        self.turn.rem_euclid(self.stages as i64) as usize
    }
    fn round(self) -> i64 {
        self.turn.div_euclid(self.stages as i64)
    }
    fn advance(&mut self) {
        self.turn += 1;
    }
    fn before(self) -> Self {
        Self { turn: self.turn - 1, ..self }
    }
}

/// The live tiles of an item, from the last one, out of its runs `(first, count)`: `LiveKeys`.
fn walk(runs: &[(usize, usize)]) -> Vec<usize> {
    let (mut left, mut tile, mut first) = (runs.len(), 0, 0);
    let mut walked = Vec::new();
    loop {
        while tile == first {
            if left == 0 {
                return walked;
            }
            left -= 1;
            first = runs[left].0;
            tile = first + runs[left].1;
        }
        tile -= 1;
        walked.push(tile);
    }
}

/// The roles' lists. `items` are the tiles of keys of each item, none of them empty.
fn roles(shape: Shape, items: &[Vec<usize>]) -> Vec<(String, Vec<Op>)> {
    let mut roles = vec![
        ("scheduler".to_owned(), scheduler(items)),
        ("producer of keys".to_owned(), keys(shape, items)),
        ("producer of values".to_owned(), values(shape, items)),
    ];
    roles
        .extend((0..shape.consumers).map(|c| (format!("consumer {c}"), consumer(shape, c, items))));
    roles
}

fn scheduler(items: &[Vec<usize>]) -> Vec<Op> {
    let mut ring = Ring::new(PLACES);
    let mut ops = Vec::new();
    for content in (0..items.len()).map(|item| (item, 0)).chain([STOP]) {
        ops.push(Wait(Barrier::ItemEmpty(ring.stage()), ring.round() - 1));
        ops.push(Write(Buffer::Item(ring.stage()), content));
        ops.push(Arrive(Barrier::ItemFull(ring.stage())));
        ring.advance();
    }
    ops
}

/// What both producers do around the tiles of each item.
fn for_each_tile(
    items: &[Vec<usize>],
    ops: &mut Vec<Op>,
    mut each: impl FnMut(&mut Vec<Op>, Content, bool),
) {
    let mut ring = Ring::new(PLACES);
    for (item, tiles) in items.iter().enumerate() {
        let place = ring.stage();
        ops.push(Wait(Barrier::ItemFull(place), ring.round()));
        for (i, &tile) in tiles.iter().enumerate() {
            ops.push(Read(Buffer::Item(place), (item, 0)));
            each(ops, (item, tile), i == 0);
        }
        ops.push(Arrive(Barrier::ItemEmpty(place)));
        ring.advance();
    }
    ops.push(Wait(Barrier::ItemFull(ring.stage()), ring.round()));
    ops.push(Read(Buffer::Item(ring.stage()), STOP));
}

fn keys(shape: Shape, items: &[Vec<usize>]) -> Vec<Op> {
    let (mut k, mut q) = (Ring::new(shape.stages), Ring::new(shape.q_stages));
    let announce = |ops: &mut Vec<Op>, k: Ring, content, bytes| {
        ops.push(Wait(Barrier::KEmpty(k.stage()), k.round() - 1));
        ops.push(Write(Buffer::Step(k.stage()), content));
        ops.push(Expect(Barrier::KFull(k.stage()), bytes));
    };
    let mut ops = Vec::new();
    for_each_tile(items, &mut ops, |ops, content, first| {
        announce(ops, k, content, BYTES);
        ops.push(Copy(Barrier::KFull(k.stage()), Buffer::K(k.stage()), content));
        k.advance();
        if !first {
            return;
        }
        for c in 0..shape.consumers {
            ops.push(Wait(Barrier::QEmpty(q.stage(), c), q.round() - 1));
            ops.push(Expect(Barrier::QFull(q.stage(), c), BYTES));
            ops.push(Copy(Barrier::QFull(q.stage(), c), Buffer::Q(q.stage(), c), (content.0, 0)));
        }
        q.advance();
    });
    announce(&mut ops, k, STOP, 0);
    ops
}

fn values(shape: Shape, items: &[Vec<usize>]) -> Vec<Op> {
    let mut v = Ring::new(shape.stages);
    let mut ops = Vec::new();
    for_each_tile(items, &mut ops, |ops, content, _| {
        ops.push(Wait(Barrier::VEmpty(v.stage()), v.round() - 1));
        ops.push(Expect(Barrier::VFull(v.stage()), BYTES));
        ops.push(Copy(Barrier::VFull(v.stage()), Buffer::V(v.stage()), content));
        v.advance();
    });
    ops
}

/// A consumer: its steps, and after them the one that stops it. A product reads its operands from
/// its start to the wait for it, so each is read twice.
fn consumer(shape: Shape, c: usize, items: &[Vec<usize>]) -> Vec<Op> {
    let last = |tiles: &[usize], i: usize| i + 1 == tiles.len();
    let steps = items.iter().enumerate().flat_map(|(item, tiles)| {
        tiles.iter().enumerate().map(move |(i, &tile)| ((item, tile), i == 0, last(tiles, i)))
    });
    let mut k = Ring::new(shape.stages);
    let mut q = Ring::new(shape.q_stages).before();
    let mut place = Ring::new(PLACES).before();
    let mut before: Option<Content> = None;
    let mut ops = Vec::new();
    if shape.consumers > 1 && c + 1 == shape.consumers {
        ops.push(GiveTurn(0));
    }
    for (content, first, last) in steps.chain([(STOP, false, false)]) {
        ops.push(Wait(Barrier::KFull(k.stage()), k.round()));
        ops.push(Read(Buffer::Step(k.stage()), content));
        if first {
            q.advance();
            ops.push(Wait(Barrier::QFull(q.stage(), c), q.round()));
        }
        let v = k.before();
        if before.is_some() {
            ops.push(Wait(Barrier::VFull(v.stage()), v.round()));
        }
        let mut reads = Vec::new();
        if content != STOP {
            reads.push(Read(Buffer::K(k.stage()), content));
            reads.push(Read(Buffer::Q(q.stage(), c), (content.0, 0)));
        }
        let reads_values = before.map(|content| Read(Buffer::V(v.stage()), content));
        if shape.consumers > 1 {
            ops.push(TakeTurn(c));
        }
        ops.extend(reads.iter().chain(&reads_values).copied());
        if shape.consumers > 1 {
            ops.push(GiveTurn((c + 1) % shape.consumers));
        }
        ops.append(&mut reads);
        ops.push(Arrive(Barrier::KEmpty(k.stage())));
        if last {
            ops.push(Arrive(Barrier::QEmpty(q.stage(), c)));
        }
        ops.extend(reads_values);
        if let Some((item, _)) = before.filter(|_| first || content == STOP) {
            ops.push(Read(Buffer::Item(place.stage()), (item, 0)));
            ops.push(Arrive(Barrier::ItemEmpty(place.stage())));
        }
        if content == STOP {
            break;
        }
        if first {
            place.advance();
            ops.push(Wait(Barrier::ItemFull(place.stage()), place.round()));
        }
        ops.push(Read(Buffer::Item(place.stage()), (content.0, 0)));
        if before.is_some() {
            ops.push(Arrive(Barrier::VEmpty(v.stage())));
        }
        before = Some(content);
        k.advance();
    }
    ops
}

/// An mbarrier as PTX has it: a phase is complete when as many have arrived as were initialised and
/// all announced bytes have come.
struct Mbarrier {
    count: usize,
    pending: usize,
    bytes: i64,
    phase: i64,
}

impl Mbarrier {
    fn new(count: usize) -> Self {
        Self { count, pending: count, bytes: 0, phase: 0 }
    }
    fn complete(&mut self) {
        if self.pending == 0 && self.bytes == 0 {
            self.phase += 1;
            self.pending = self.count;
        }
    }
    fn arrive(&mut self, bytes: i64) {
        assert!(self.pending > 0, "an arrival that nobody expects");
        self.bytes += bytes;
        self.pending -= 1;
        self.complete();
    }
    /// A wait sees the parity of the phase alone.
    fn is_over(&self, round: i64) -> bool {
        let ahead = self.phase - round;
        assert!(
            (0..=1).contains(&ahead),
            "a wait for round {round} takes phase {} for it",
            self.phase
        );
        self.phase.rem_euclid(2) != round.rem_euclid(2)
    }
}

/// Carries the lists out in an order drawn from `random`; says where they stand when none can go on.
fn run(shape: Shape, roles: &[(String, Vec<Op>)], random: &mut Random) -> Result<(), String> {
    let mut barriers = BTreeMap::new();
    let mut init = |barrier, count| barriers.insert(barrier, Mbarrier::new(count));
    for s in 0..shape.stages {
        init(Barrier::KFull(s), 1);
        init(Barrier::KEmpty(s), shape.consumers);
        init(Barrier::VFull(s), 1);
        init(Barrier::VEmpty(s), shape.consumers);
    }
    for s in 0..shape.q_stages {
        for c in 0..shape.consumers {
            init(Barrier::QFull(s, c), 1);
            init(Barrier::QEmpty(s, c), 1);
        }
    }
    for place in 0..PLACES {
        init(Barrier::ItemFull(place), 1);
        init(Barrier::ItemEmpty(place), 2 + shape.consumers);
    }
    let mut contents: BTreeMap<Buffer, Content> = BTreeMap::new();
    let mut landing: Vec<(Barrier, Buffer, Content)> = Vec::new();
    let mut turns = vec![0; shape.consumers];
    let mut at = vec![0; roles.len()];
    let mut stuck = 0;
    while at.iter().zip(roles).any(|(&at, (_, ops))| at < ops.len()) {
        // One of the roles, or of the copies.
        let drawn = random.below(roles.len() + landing.len());
        if let Some(copy) = drawn.checked_sub(roles.len()) {
            let (barrier, buffer, content) = landing.swap_remove(copy);
            contents.insert(buffer, content);
            let full = barriers.get_mut(&barrier).expect("it was made");
            full.bytes -= BYTES;
            full.complete();
            stuck = 0;
            continue;
        }
        let Some(&op) = roles[drawn].1.get(at[drawn]) else { continue };
        let mut goes = true;
        match op {
            Wait(barrier, round) => goes = barriers[&barrier].is_over(round),
            Arrive(barrier) => barriers.get_mut(&barrier).expect("it was made").arrive(0),
            Expect(barrier, bytes) => {
                barriers.get_mut(&barrier).expect("it was made").arrive(bytes)
            }
            Copy(barrier, buffer, content) => landing.push((barrier, buffer, content)),
            Write(buffer, content) => drop(contents.insert(buffer, content)),
            Read(buffer, content) => assert_eq!(
                contents.get(&buffer),
                Some(&content),
                "{} reads {buffer:?}",
                roles[drawn].0
            ),
            TakeTurn(consumer) => {
                goes = turns[consumer] > 0;
                turns[consumer] -= i32::from(goes);
            }
            GiveTurn(consumer) => {
                turns[consumer] += 1;
                assert_eq!(turns[consumer], 1, "a turn is given before the last one was taken");
            }
        }
        at[drawn] += usize::from(goes);
        stuck = if goes { 0 } else { stuck + 1 };
        if stuck > 100 * roles.len() && landing.is_empty() {
            let waiting = roles
                .iter()
                .zip(&at)
                .filter_map(|((name, ops), &at)| Some(format!("{name} at {:?}", ops.get(at)?)));
            return Err(waiting.collect::<Vec<_>>().join("; "));
        }
    }
    Ok(())
}

/// Runs of live tiles of some items, items and runs without tiles among them.
fn random_runs(random: &mut Random) -> Vec<Vec<(usize, usize)>> {
    let items = random.below(9);
    let run = |first: &mut usize, random: &mut Random| {
        let (start, count) = (*first + random.below(3), random.below(4));
        *first = start + count + 1;
        (start, count)
    };
    (0..items)
        .map(|_| {
            let mut first = 0;
            (0..random.below(4)).map(|_| run(&mut first, random)).collect()
        })
        .collect()
}

fn shapes() -> impl Iterator<Item = Shape> {
    let all = (1..4).flat_map(|consumers| (2..5).map(move |stages| (consumers, stages)));
    all.flat_map(|(consumers, stages)| {
        (1..3).map(move |q_stages| Shape { consumers, stages, q_stages })
    })
}

#[test]
fn live_tiles_are_walked_from_the_last_one_whatever_runs_there_are() {
    let mut random = Random::new(1);
    for runs in (0..500).flat_map(|_| random_runs(&mut random)) {
        let mut expected: Vec<_> =
            runs.iter().flat_map(|&(first, count)| first..first + count).collect();
        expected.reverse();
        assert_eq!(walk(&runs), expected, "{runs:?}");
    }
}

#[test]
fn no_order_of_the_roles_stops_them_or_lets_them_read_another_tile() {
    for seed in 0..400 {
        let mut random = Random::new(seed);
        // The scheduler finishes items without tiles itself.
        let items: Vec<_> = random_runs(&mut random).iter().map(|runs| walk(runs)).collect();
        let items: Vec<_> = items.into_iter().filter(|tiles| !tiles.is_empty()).collect();
        for shape in shapes() {
            let done = run(shape, &roles(shape, &items), &mut random);
            assert_eq!(done, Ok(()), "seed {seed}, {shape:?}, {items:?}");
        }
    }
}

#[test]
fn the_model_sees_a_release_too_early_and_one_that_is_missing() {
    let shape = Shape { consumers: 2, stages: 2, q_stages: 1 };
    let items = [vec![4, 3, 2, 1, 0], vec![2, 1, 0]];
    // Keys are given free before the product that reads them has ended: its second read comes after.
    let early = |ops: &mut Vec<Op>| {
        let is_release = |op: &Op| matches!(op, Arrive(Barrier::KEmpty(_)));
        let at = ops.iter().position(is_release).expect("keys are released");
        let release = ops.remove(at);
        let start = ops.iter().position(|op| matches!(op, Read(Buffer::K(_), _)));
        ops.insert(start.expect("keys are read"), release);
    };
    let missing = |ops: &mut Vec<Op>| {
        let at = ops.iter().rposition(|op| matches!(op, Arrive(Barrier::QEmpty(..))));
        // The last release has no reader; the one before lets the next item in.
        let at = ops[..at.expect("Q is released")]
            .iter()
            .rposition(|op| matches!(op, Arrive(Barrier::QEmpty(..))));
        ops.remove(at.expect("Q is released by every item"));
    };
    let outcomes = |change: &dyn Fn(&mut Vec<Op>)| {
        let found = (0..200).map(|seed| {
            let mut changed = roles(shape, &items);
            for (name, ops) in &mut changed {
                if name.starts_with("consumer") {
                    change(ops);
                }
            }
            std::panic::catch_unwind(|| run(shape, &changed, &mut Random::new(seed)))
        });
        found.collect::<Vec<_>>()
    };
    assert!(outcomes(&early).iter().any(Result::is_err), "another tile is read");
    assert!(outcomes(&missing).iter().all(|done| matches!(done, Ok(Err(_)))), "it stops");
}
