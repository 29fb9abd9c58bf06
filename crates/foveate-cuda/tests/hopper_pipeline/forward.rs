//! The forward: `kernels/hopper/forward.cu`.

use foveate_tensor::random::Random;

use super::model::Op::*;
use super::model::{BYTES, Content, Fault, Ring, STOP, run};

/// Places of the ring of items: the one that is finished, the one at work, and the next one.
const PLACES: usize = 3;

type Op = super::model::Op<Barrier, Buffer>;
type Role = super::model::Role<Barrier, Buffer>;

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
    /// The producer of keys has come to the last step of an item.
    ItemEnds,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Buffer {
    K(usize),
    V(usize),
    Q(usize, usize),
    /// What the producer tells with a stage of K.
    Step(usize),
    /// The scales of its keys' blocks, at [`scales`].
    Scales(usize),
    Item(usize),
}

/// Where a step's scales are, which are read after its stage of K is free: `key_scales`.
fn scales(k: Ring) -> Buffer {
    Buffer::Scales(k.stage() * 2 + k.round().rem_euclid(2) as usize)
}

/// How the kernel is configured.
#[derive(Clone, Copy, Debug)]
struct Shape {
    consumers: usize,
    /// Consumers take turns in starting their products; two may, and more do.
    takes_turns: bool,
    stages: usize,
    q_stages: usize,
    /// Warps copy Q, K and V row by row (`FV_COPIED`): stages fill when all of their lanes' copies have
    /// landed, and those of K when the step is written, too.
    copied: bool,
}

/// A live tile of an item, and which consumers see some of it: the others pass over it.
#[derive(Clone, Copy, Debug)]
struct Live {
    tile: usize,
    seen: [bool; 3],
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
fn roles(shape: Shape, items: &[Vec<Live>]) -> Vec<Role> {
    let role = |name: &str, ops| Role { name: name.to_owned(), team: 0, ops };
    let mut roles = vec![
        role("scheduler", scheduler(items)),
        role("producer of keys", keys(shape, items)),
        role("producer of values", values(shape, items)),
    ];
    roles.extend(
        (0..shape.consumers).map(|c| role(&format!("consumer {c}"), consumer(shape, c, items))),
    );
    roles
}

fn scheduler(items: &[Vec<Live>]) -> Vec<Op> {
    let mut ring = Ring::new(PLACES);
    let mut ops = Vec::new();
    for content in (0..items.len()).map(|item| (item, 0)).chain([STOP]) {
        ops.push(Wait(Barrier::ItemEmpty(ring.stage()), ring.round() - 1));
        ops.push(Write(Buffer::Item(ring.stage()), content));
        ops.push(Arrive(Barrier::ItemFull(ring.stage())));
        ring.advance();
        if content != STOP {
            ops.push(Wait(Barrier::ItemEnds, content.0 as i64));
        }
    }
    ops
}

/// What both producers do around the tiles of each item.
fn for_each_tile(
    items: &[Vec<Live>],
    ops: &mut Vec<Op>,
    mut each: impl FnMut(&mut Vec<Op>, Content, bool, bool),
) {
    let mut ring = Ring::new(PLACES);
    for (item, tiles) in items.iter().enumerate() {
        let place = ring.stage();
        ops.push(Wait(Barrier::ItemFull(place), ring.round()));
        for (i, &Live { tile, .. }) in tiles.iter().enumerate() {
            ops.push(Read(Buffer::Item(place), (item, 0)));
            each(ops, (item, tile), i == 0, i + 1 == tiles.len());
        }
        ops.push(Arrive(Barrier::ItemEmpty(place)));
        ring.advance();
    }
    ops.push(Wait(Barrier::ItemFull(ring.stage()), ring.round()));
    ops.push(Read(Buffer::Item(ring.stage()), STOP));
}

fn keys(shape: Shape, items: &[Vec<Live>]) -> Vec<Op> {
    let (mut k, mut q) = (Ring::new(shape.stages), Ring::new(shape.q_stages));
    let announce = |ops: &mut Vec<Op>, k: Ring, content, bytes| {
        ops.push(Wait(Barrier::KEmpty(k.stage()), k.round() - 1));
        ops.push(Write(Buffer::Step(k.stage()), content));
        ops.push(Write(scales(k), content));
        ops.push(match shape.copied {
            true => Arrive(Barrier::KFull(k.stage())),
            false => Expect(Barrier::KFull(k.stage()), bytes),
        });
    };
    let copy = |barrier, buffer, content| match shape.copied {
        true => CopyByLanes(barrier, buffer, content),
        false => Load(barrier, buffer, content),
    };
    let mut ops = Vec::new();
    for_each_tile(items, &mut ops, |ops, content, first, last| {
        if last {
            ops.push(Arrive(Barrier::ItemEnds));
        }
        announce(ops, k, content, BYTES);
        ops.push(copy(Barrier::KFull(k.stage()), Buffer::K(k.stage()), content));
        k.advance();
        if !first {
            return;
        }
        for c in 0..shape.consumers {
            ops.push(Wait(Barrier::QEmpty(q.stage(), c), q.round() - 1));
            if !shape.copied {
                ops.push(Expect(Barrier::QFull(q.stage(), c), BYTES));
            }
            ops.push(copy(Barrier::QFull(q.stage(), c), Buffer::Q(q.stage(), c), (content.0, 0)));
        }
        q.advance();
    });
    announce(&mut ops, k, STOP, 0);
    if shape.copied {
        // Of lanes that have nothing to copy.
        ops.push(Arrive(Barrier::KFull(k.stage())));
    }
    ops
}

fn values(shape: Shape, items: &[Vec<Live>]) -> Vec<Op> {
    let mut v = Ring::new(shape.stages);
    let mut ops = Vec::new();
    for_each_tile(items, &mut ops, |ops, content, _, _| {
        ops.push(Wait(Barrier::VEmpty(v.stage()), v.round() - 1));
        let (full, buffer) = (Barrier::VFull(v.stage()), Buffer::V(v.stage()));
        match shape.copied {
            true => ops.push(CopyByLanes(full, buffer, content)),
            false => ops.extend([Expect(full, BYTES), Load(full, buffer, content)]),
        }
        v.advance();
    });
    ops
}

/// A consumer: its steps, and after them the one that stops it. A product reads its operands from
/// its start to the wait for it, so each is read twice. A step that it passes over has no product of its
/// own, but takes its turn, gives the keys free, and with the next step the values.
fn consumer(shape: Shape, c: usize, items: &[Vec<Live>]) -> Vec<Op> {
    let steps = items.iter().enumerate().flat_map(|(item, tiles)| {
        let step = move |(i, live): (usize, &Live)| {
            ((item, live.tile), live.seen[c], i == 0, i + 1 == tiles.len())
        };
        tiles.iter().enumerate().map(step)
    });
    let mut k = Ring::new(shape.stages);
    let mut q = Ring::new(shape.q_stages).before();
    let mut place = Ring::new(PLACES).before();
    let mut before: Option<(Content, bool)> = None;
    let mut ops = Vec::new();
    if shape.takes_turns && c + 1 == shape.consumers {
        ops.push(GiveTurn(0));
    }
    for (content, sees, first, last) in steps.chain([(STOP, false, false, false)]) {
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
        if sees {
            reads.push(Read(Buffer::K(k.stage()), content));
            reads.push(Read(Buffer::Q(q.stage(), c), (content.0, 0)));
        }
        let weighted = before.filter(|&(_, seen)| seen);
        let reads_values = weighted.map(|(content, _)| Read(Buffer::V(v.stage()), content));
        if shape.takes_turns {
            ops.push(TakeTurn(c));
        }
        ops.extend(reads.iter().chain(&reads_values).copied());
        if shape.takes_turns {
            ops.push(GiveTurn((c + 1) % shape.consumers));
        }
        ops.append(&mut reads);
        ops.push(Arrive(Barrier::KEmpty(k.stage())));
        if last {
            ops.push(Arrive(Barrier::QEmpty(q.stage(), c)));
        }
        ops.extend(reads_values);
        if let Some(((item, _), _)) = before.filter(|_| first || content == STOP) {
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
        ops.push(Read(scales(k), content));
        before = Some((content, sees));
        k.advance();
    }
    ops
}

/// The barriers, and how many arrive at each: `Barriers::init`.
fn barriers(shape: Shape) -> Vec<(Barrier, usize)> {
    let mut barriers = Vec::new();
    for s in 0..shape.stages {
        // All lanes of a warp count as one.
        barriers.push((Barrier::KFull(s), 1 + usize::from(shape.copied)));
        barriers.push((Barrier::KEmpty(s), shape.consumers));
        barriers.push((Barrier::VFull(s), 1));
        barriers.push((Barrier::VEmpty(s), shape.consumers));
    }
    for (s, c) in (0..shape.q_stages).flat_map(|s| (0..shape.consumers).map(move |c| (s, c))) {
        barriers.push((Barrier::QFull(s, c), 1));
        barriers.push((Barrier::QEmpty(s, c), 1));
    }
    for place in 0..PLACES {
        barriers.push((Barrier::ItemFull(place), 1));
        barriers.push((Barrier::ItemEmpty(place), 2 + shape.consumers));
    }
    barriers.push((Barrier::ItemEnds, 1));
    barriers
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
    let consumers = [(1, false), (2, false), (2, true), (3, true)].into_iter();
    let all = consumers.flat_map(|consumers| (2..5).map(move |stages| (consumers, stages)));
    all.flat_map(|((consumers, takes_turns), stages)| {
        (1..3).map(move |q_stages| Shape {
            consumers,
            takes_turns,
            stages,
            q_stages,
            copied: false,
        })
    })
    .flat_map(|shape| [shape, Shape { copied: true, ..shape }])
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
        let mut live = |tile| Live { tile, seen: [(); 3].map(|()| random.below(3) > 0) };
        let items: Vec<Vec<Live>> = items
            .into_iter()
            .filter(|tiles| !tiles.is_empty())
            .map(|tiles| tiles.into_iter().map(&mut live).collect())
            .collect();
        for shape in shapes() {
            let done = run(&barriers(shape), &roles(shape, &items), &mut random);
            assert_eq!(done, Ok(vec![]), "seed {seed}, {shape:?}, {items:?}");
        }
    }
}

#[test]
fn the_model_sees_a_release_too_early_and_one_that_is_missing() {
    for copied in [false, true] {
        sees_faults(Shape { consumers: 2, takes_turns: true, stages: 2, q_stages: 1, copied });
    }
}

fn sees_faults(shape: Shape) {
    let live = |tile| Live { tile, seen: [true; 3] };
    let items = [vec![4, 3, 2, 1, 0].into_iter().map(live).collect(), [2, 1, 0].map(live).to_vec()];
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
            for role in &mut changed {
                if role.name.starts_with("consumer") {
                    change(&mut role.ops);
                }
            }
            run(&barriers(shape), &changed, &mut Random::new(seed))
        });
        found.collect::<Vec<_>>()
    };
    let reads_another = |done: &_| matches!(done, Err(Fault::Hazard(_)));
    assert!(outcomes(&early).iter().any(reads_another), "another tile is read");
    let stops = |done: &_| matches!(done, Err(Fault::Deadlock(_)));
    assert!(outcomes(&missing).iter().all(stops), "it stops");
}

/// The kernel's barriers expect as many arrivals as the model's: of lanes 32 for each.
#[test]
fn the_kernel_has_the_barriers_of_the_model() {
    let device = include_str!("../../kernels/hopper/forward_device.cuh");
    let copies = include_str!("../../kernels/hopper/copies.cuh");
    for made in [
        "k_full(s).init(Keys::ARRIVALS + COPIED_K);",
        "k_empty(s).init(CONSUMERS);",
        "v_full(s).init(Values::ARRIVALS);",
        "v_empty(s).init(CONSUMERS);",
        "q_full(s, c).init(COPIED_Q ? 32 : 1);",
        "q_empty(s, c).init(1);",
        "item_full(i).init(1);",
        "item_empty(i).init(2 + 4 * CONSUMERS);",
        "item_ends().init(1);",
    ] {
        assert!(device.contains(made), "{made}");
    }
    assert!(copies.contains("ARRIVALS = COPIED ? 32 : 1;"));
    assert!(device.contains(&format!("constexpr int ITEMS = {PLACES};")));
}
