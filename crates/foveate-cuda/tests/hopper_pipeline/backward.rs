//! The backward: `kernels/hopper/backward.cu`. Its consumers are warps here: a warp releases what it
//! alone has read, and its warpgroup's first warp what their products have read.

mod warp;

use foveate_tensor::random::Random;

use super::model::Op::*;
use super::model::{BYTES, Content, Fault, Ring, STOP, run};
use warp::Warp;

const CONSUMERS: usize = 2;
/// Warps of consumers.
const WARPS: usize = 4 * CONSUMERS;
/// Keys of a tile.
const TILE_KV: usize = 64 * CONSUMERS;
/// Steps that are announced ahead.
const STEPS: usize = 8;

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Barrier {
    KFull,
    VFull,
    KEmpty,
    VEmpty,
    DsFull(usize),
    StepFull(usize),
    StepEmpty(usize),
    Full(usize),
    QEmpty(usize),
    DOutEmpty(usize),
    DqFull,
    DqEmpty,
    /// Named barrier 1, of both consumers.
    Together,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Buffer {
    K,
    V,
    Q(usize),
    DOut(usize),
    Lse(usize),
    Delta(usize),
    /// What a warp writes of dS in a step of this parity.
    Ds(usize, usize),
    /// A warp's part of dQ.
    Dq(usize),
    Step(usize),
}

type Op = super::model::Op<Barrier, Buffer>;
type Role = super::model::Role<Barrier, Buffer>;
/// An operand of a product, and how many must have cleared it.
type Operand = (Buffer, Content, usize);

/// How the kernel is configured.
#[derive(Clone, Copy, Debug)]
struct Shape {
    stages: usize,
    /// `FV_BM`.
    tile_q: usize,
    sums: Sums,
    /// `FV_OVERLAP`.
    overlap: bool,
    dq: Dq,
}

/// What the registers beside dK and dV allow.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Sums {
    /// `WIDE_SUMS`: dP is started after P, and the end of dV joins the next step.
    Wide,
    /// dP is started before P.
    Narrow,
    /// `SUBTRACTS_FIRST`: the same, from delta, and the end of dV joins the next step.
    Plain,
}

impl Sums {
    /// `JOINS_DV`.
    fn joins_dv(self) -> bool {
        self != Self::Narrow
    }
}

/// Who adds dQ to memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Dq {
    /// Each warp its part.
    Warps,
    /// `FV_ORDERED_DQ`: a thread of its own, tile by tile.
    Ordered,
    /// `FV_SEPARATE_DQ`: another kernel.
    Separate,
}

/// A tile of keys, and the tiles of queries that see it.
#[derive(Clone, Debug)]
struct Item {
    keys: usize,
    tiles: Vec<Tile>,
}

#[derive(Clone, Copy, Debug)]
struct Tile {
    /// Of the sequence, from the tile's first on.
    queries: usize,
    /// Whether its mask is evaluated.
    partial: bool,
}

/// `Step` of the kernel. An item that nobody sees has one without a tile.
#[derive(Clone, Copy, Debug)]
struct Step {
    content: Content,
    tile: Option<Tile>,
    keys: usize,
    first: bool,
    last: bool,
}

fn steps(items: &[Item]) -> Vec<Step> {
    let of_item = |(number, item): (usize, &Item)| {
        let count = item.tiles.len().max(1);
        let step = |i| Step {
            content: (number, i),
            tile: item.tiles.get(i).copied(),
            keys: item.keys,
            first: i == 0,
            last: i + 1 == count,
        };
        (0..count).map(step).collect::<Vec<_>>()
    };
    items.iter().enumerate().flat_map(of_item).collect()
}

/// `Barriers::init`.
fn barriers(shape: Shape) -> Vec<(Barrier, usize)> {
    let mut barriers = vec![
        (Barrier::KFull, 1),
        (Barrier::VFull, 1),
        (Barrier::KEmpty, CONSUMERS),
        (Barrier::VEmpty, CONSUMERS),
        (Barrier::DsFull(0), WARPS),
        (Barrier::DsFull(1), WARPS),
        (Barrier::Together, WARPS),
    ];
    for i in 0..STEPS {
        barriers.extend([(Barrier::StepFull(i), 1), (Barrier::StepEmpty(i), 3 + WARPS)]);
    }
    for s in 0..shape.stages {
        barriers.push((Barrier::Full(s), 3));
        barriers.extend([(Barrier::QEmpty(s), CONSUMERS), (Barrier::DOutEmpty(s), CONSUMERS)]);
    }
    if shape.dq == Dq::Ordered {
        barriers.extend([(Barrier::DqFull, WARPS), (Barrier::DqEmpty, 1)]);
    }
    barriers
}

fn roles(shape: Shape, items: &[Item]) -> Vec<Role> {
    let steps = steps(items);
    let role = |name: &str, ops| Role { name: name.to_owned(), team: CONSUMERS, ops };
    let mut roles = vec![
        role("scheduler", scheduler(&steps)),
        role("producer of K and Q", copies(shape, &steps, &K_AND_Q)),
    ];
    roles.extend(match shape.dq {
        Dq::Ordered => [
            role("producer of V, dO, lse and delta", values_and_rows(shape, &steps)),
            role("adder of dQ", adds(shape, &steps)),
        ],
        Dq::Warps | Dq::Separate => [
            role("producer of V and dO", copies(shape, &steps, &V_AND_D_OUT)),
            role("producer of lse and delta", rows(shape, &steps)),
        ],
    });
    roles.extend((0..WARPS).map(|warp| Role {
        team: warp / 4,
        ..role(&format!("consumer's warp {warp}"), Warp::new(shape, warp).run(&steps))
    }));
    roles
}

/// `schedule`.
fn scheduler(steps: &[Step]) -> Vec<Op> {
    let mut ring = Ring::new(STEPS);
    let mut ops = Vec::new();
    for content in steps.iter().map(|step| step.content).chain([STOP]) {
        ops.push(Wait(Barrier::StepEmpty(ring.stage()), ring.round() - 1));
        ops.push(Write(Buffer::Step(ring.stage()), content));
        ops.push(Arrive(Barrier::StepFull(ring.stage())));
        ring.advance();
    }
    ops
}

/// What a producer does with each step between its announcement and its release: `for_each_step`.
fn for_each_step(
    steps: &[Step],
    mut each: impl FnMut(&mut Vec<Op>, &Step, Buffer, Barrier),
) -> Vec<Op> {
    let mut ring = Ring::new(STEPS);
    let mut ops = Vec::new();
    for step in steps {
        ops.push(Wait(Barrier::StepFull(ring.stage()), ring.round()));
        ops.push(Read(Buffer::Step(ring.stage()), step.content));
        each(&mut ops, step, Buffer::Step(ring.stage()), Barrier::StepEmpty(ring.stage()));
        ring.advance();
    }
    ops.push(Wait(Barrier::StepFull(ring.stage()), ring.round()));
    ops.push(Read(Buffer::Step(ring.stage()), STOP));
    ops
}

/// What a producer copies: of keys with the first step of an item, of queries with every one.
struct Copied {
    keys: Buffer,
    keys_full: Barrier,
    keys_empty: Barrier,
    queries: fn(usize) -> Buffer,
    queries_empty: fn(usize) -> Barrier,
}

const K_AND_Q: Copied = Copied {
    keys: Buffer::K,
    keys_full: Barrier::KFull,
    keys_empty: Barrier::KEmpty,
    queries: Buffer::Q,
    queries_empty: Barrier::QEmpty,
};
const V_AND_D_OUT: Copied = Copied {
    keys: Buffer::V,
    keys_full: Barrier::VFull,
    keys_empty: Barrier::VEmpty,
    queries: Buffer::DOut,
    queries_empty: Barrier::DOutEmpty,
};

/// A copying thread, with the steps and items that it has copied.
struct Copier<'a> {
    copied: &'a Copied,
    ring: Ring,
    item: i64,
}

impl<'a> Copier<'a> {
    fn new(shape: Shape, copied: &'a Copied) -> Self {
        Self { copied, ring: Ring::new(shape.stages), item: -1 }
    }

    fn copy(&mut self, ops: &mut Vec<Op>, step: &Step) {
        let Self { copied, ring, item } = self;
        if step.tile.is_none() {
            return;
        }
        if step.first {
            ops.push(Wait(copied.keys_empty, *item));
            ops.push(Expect(copied.keys_full, BYTES));
            ops.push(Load(copied.keys_full, copied.keys, (step.content.0, 0)));
            *item += 1;
        }
        let full = Barrier::Full(ring.stage());
        ops.push(Wait((copied.queries_empty)(ring.stage()), ring.round() - 1));
        ops.push(Expect(full, BYTES));
        ops.push(Load(full, (copied.queries)(ring.stage()), step.content));
        ring.advance();
    }
}

/// `copy_k_and_q`, `copy_v_and_d_out`.
fn copies(shape: Shape, steps: &[Step], copied: &Copied) -> Vec<Op> {
    let mut copier = Copier::new(shape, copied);
    for_each_step(steps, |ops, step, place, release| {
        copier.copy(ops, step);
        ops.push(Read(place, step.content));
        ops.push(Arrive(release));
    })
}

/// `ROW_STAGES`.
fn row_stages(shape: Shape) -> usize {
    if shape.tile_q == 64 { shape.stages } else { 2 }
}

/// `RowWriter`.
struct Rows {
    shape: Shape,
    ring: Ring,
    number: usize,
}

impl Rows {
    fn new(shape: Shape) -> Self {
        Self { shape, ring: Ring::new(shape.stages), number: 0 }
    }

    fn write(&mut self, ops: &mut Vec<Op>, step: &Step) {
        if step.tile.is_none() {
            return;
        }
        let stages = row_stages(self.shape);
        let before = (0..stages).fold(self.ring, |ring, _| ring.before());
        ops.push(Wait(Barrier::DOutEmpty(before.stage()), before.round()));
        let place = self.number % stages;
        ops.push(Write(Buffer::Lse(place), step.content));
        ops.push(Write(Buffer::Delta(place), step.content));
        ops.push(Arrive(Barrier::Full(self.ring.stage())));
        self.ring.advance();
        self.number += 1;
    }
}

/// `copy_rows`.
fn rows(shape: Shape, steps: &[Step]) -> Vec<Op> {
    let mut rows = Rows::new(shape);
    for_each_step(steps, |ops, step, _, release| {
        ops.push(Arrive(release));
        rows.write(ops, step);
    })
}

/// `copy_values_and_rows`.
fn values_and_rows(shape: Shape, steps: &[Step]) -> Vec<Op> {
    let (mut copier, mut rows) = (Copier::new(shape, &V_AND_D_OUT), Rows::new(shape));
    for_each_step(steps, |ops, step, place, release| {
        copier.copy(ops, step);
        rows.write(ops, step);
        ops.push(Read(place, step.content));
        ops.push(Arrive(release));
    })
}

/// `add_dq`. What it waits for in memory is not the CTA's.
fn adds(shape: Shape, steps: &[Step]) -> Vec<Op> {
    let mut ring = Ring::new(STEPS);
    let mut number = 0;
    let mut ops = vec![Wait(Barrier::StepFull(0), 0)];
    let next = steps.iter().skip(1).map(|step| step.content).chain([STOP]);
    for (step, next) in steps.iter().zip(next) {
        let place = ring;
        ring.advance();
        ops.push(Read(Buffer::Step(place.stage()), step.content));
        let look_up = [
            Wait(Barrier::StepFull(ring.stage()), ring.round()),
            Read(Buffer::Step(ring.stage()), next),
        ];
        if step.tile.is_some() {
            ops.push(Wait(Barrier::DqFull, number));
            let parts = (0..WARPS).filter(|&warp| sends(shape, warp, step));
            ops.extend(parts.map(|warp| Send(Buffer::Dq(warp), step.content)));
            ops.extend(look_up);
            ops.push(AwaitSent);
            ops.push(Arrive(Barrier::DqEmpty));
            number += 1;
        } else {
            ops.extend(look_up);
        }
        ops.push(Read(Buffer::Step(place.stage()), step.content));
        ops.push(Arrive(Barrier::StepEmpty(place.stage())));
    }
    ops.push(Read(Buffer::Step(ring.stage()), STOP));
    ops
}

/// The first query of a warp's part of dQ: `dq_row`.
fn dq_row(shape: Shape, warp: usize) -> usize {
    let of_consumer = if shape.tile_q == TILE_KV { warp / 4 * 64 } else { 0 };
    of_consumer + warp % 4 * 16
}

/// Whether a warp has queries of a tile in its part of dQ.
fn sends(shape: Shape, warp: usize, step: &Step) -> bool {
    shape.dq != Dq::Separate && step.tile.is_some_and(|tile| dq_row(shape, warp) < tile.queries)
}

fn shapes() -> impl Iterator<Item = Shape> {
    let all = (2..5).flat_map(|stages| [64, 128].map(move |tile_q| (stages, tile_q)));
    all.flat_map(|(stages, tile_q)| {
        let kinds =
            [Sums::Wide, Sums::Narrow, Sums::Plain].map(|sums| [(sums, false), (sums, true)]);
        kinds.into_iter().flatten().map(move |(sums, overlap)| {
            let dq = if overlap && stages == 4 { Dq::Separate } else { Dq::Warps };
            Shape { stages, tile_q, sums, overlap, dq }
        })
    })
    .flat_map(|shape| [shape, Shape { dq: Dq::Ordered, ..shape }])
}

/// Items with and without tiles, partial tiles, and ends of sequences.
fn random_items(shape: Shape, random: &mut Random) -> Vec<Item> {
    let ragged = |whole: usize, random: &mut Random| match random.below(4) {
        0 => 1 + random.below(whole - 1),
        _ => whole,
    };
    let tile = |random: &mut Random| Tile {
        queries: ragged(shape.tile_q, random),
        partial: random.below(3) == 0,
    };
    (0..random.below(8))
        .map(|_| Item {
            keys: ragged(TILE_KV, random),
            tiles: (0..random.below(6)).map(|_| tile(random)).collect(),
        })
        .collect()
}

/// What all warps together send, in order.
fn expected(shape: Shape, items: &[Item]) -> Vec<(Buffer, Content)> {
    let steps = steps(items);
    let of_warp = |warp| steps.iter().filter(move |step| sends(shape, warp, step));
    let mut all: Vec<_> = (0..WARPS)
        .flat_map(|warp| of_warp(warp).map(move |step| (Buffer::Dq(warp), step.content)))
        .collect();
    all.sort_unstable();
    all
}

#[test]
fn no_order_of_the_roles_stops_them_or_lets_them_read_another_tile() {
    for seed in 0..20 {
        for shape in shapes() {
            let mut random = Random::stream(seed, shape.stages as u64);
            let items = random_items(shape, &mut random);
            let mut sent = run(&barriers(shape), &roles(shape, &items), &mut random)
                .unwrap_or_else(|fault| panic!("seed {seed}, {shape:?}, {items:?}: {fault:?}"));
            sent.sort_unstable();
            assert_eq!(sent, expected(shape, &items), "seed {seed}, {shape:?}, {items:?}");
        }
    }
}

#[test]
fn the_kernel_has_the_barriers_of_the_model() {
    let body = |text: &'static str, function: &str| {
        let rest = text.split(&format!("void {function}() const {{")).nth(1);
        rest.and_then(|rest| rest.split("}\n    }").next()).expect("barriers are initialised")
    };
    let steps = include_str!("../../kernels/hopper/backward_steps.cuh");
    let device = include_str!("../../kernels/hopper/backward_device.cuh");
    let body = [body(steps, "init_steps"), body(device, "init")].concat();
    let count = |name: &str| {
        let said = body.split(&format!("{name}(")).nth(1).expect(name);
        said.split(".init(").nth(1).and_then(|rest| rest.split(");").next()).expect(name)
    };
    for (barrier, arrivals) in barriers(shapes().nth(1).expect("an ordered shape")) {
        let text = match barrier {
            Barrier::KFull => count("k_full"),
            Barrier::VFull => count("v_full"),
            Barrier::KEmpty => count("k_empty"),
            Barrier::VEmpty => count("v_empty"),
            Barrier::DsFull(_) => count("ds_full"),
            Barrier::StepFull(_) => count("step_full"),
            Barrier::StepEmpty(_) => count("step_empty"),
            Barrier::Full(_) => count(" full"),
            Barrier::QEmpty(_) => count("q_empty"),
            Barrier::DOutEmpty(_) => count("d_out_empty"),
            Barrier::DqFull => count("dq_full"),
            Barrier::DqEmpty => count("dq_empty"),
            Barrier::Together => continue,
        };
        let product = |term: &str| -> usize {
            let factor = |x: &str| x.trim().replace("CONSUMERS", "2").parse::<usize>();
            term.split('*').map(|x| factor(x).expect(text)).product()
        };
        let said: usize = text.split('+').map(product).sum();
        assert_eq!(said, arrivals, "{barrier:?}: {text}");
    }
    let layout = include_str!("../../kernels/hopper/backward_layout.cuh");
    assert!(layout.contains(&format!("constexpr int STEPS = {STEPS};")));
}

/// Items of every kind, and steps enough for each ring to go round twice.
fn every_kind_of_item(shape: Shape) -> Vec<Item> {
    let full = Tile { queries: shape.tile_q, partial: false };
    let (partial, ragged) = (Tile { partial: true, ..full }, Tile { queries: 20, ..full });
    let tiles = [
        vec![full; 3],
        vec![],
        vec![full],
        vec![full; 2],
        vec![full],
        vec![full, partial, ragged, full, full, full],
        vec![],
        vec![full],
        vec![full; 4],
    ];
    let keys = |i| if i == 3 { 70 } else { TILE_KV };
    tiles.into_iter().enumerate().map(|(i, tiles)| Item { keys: keys(i), tiles }).collect()
}

/// What an operation is and of which barrier or buffer, without numbers: `Wait DsFull`.
fn kind(op: &Op) -> String {
    let text = format!("{op:?}");
    let words = text.split(|c: char| !c.is_alphabetic()).filter(|word| !word.is_empty());
    words.take(2).collect::<Vec<_>>().join(" ")
}

/// The faults of some runs after `change` of the lists of the roles whose names begin so; `None` for
/// a run without one.
fn faults(
    shape: Shape,
    role: &str,
    runs: u64,
    change: impl Fn(&mut Vec<Op>),
) -> impl Iterator<Item = Option<Fault>> {
    let items = every_kind_of_item(shape);
    let mut changed = roles(shape, &items);
    for role in changed.iter_mut().filter(|of| of.name.starts_with(role)) {
        change(&mut role.ops);
    }
    let (barriers, expected) = (barriers(shape), expected(shape, &items));
    (0..runs).map(move |seed| match run(&barriers, &changed, &mut Random::new(seed)) {
        Ok(mut sent) => {
            sent.sort_unstable();
            (sent != expected).then(|| Fault::Hazard("dQ is not what was to be sent".to_owned()))
        }
        Err(fault) => Some(fault),
    })
}

/// The roles by the beginnings of their names, and the kinds of operations of each.
fn kinds(shape: Shape, of: &[&str]) -> Vec<(&'static str, String)> {
    let names = [
        "scheduler",
        "producer of K",
        "producer of V",
        "producer of lse",
        "adder of dQ",
        "consumer",
    ];
    let roles = roles(shape, &every_kind_of_item(shape));
    let mut kinds = Vec::new();
    for name in names {
        let Some(role) = roles.iter().find(|role| role.name.starts_with(name)) else { continue };
        let mut found: Vec<_> = role.ops.iter().map(kind).collect();
        found.retain(|kind| of.iter().any(|of| kind.starts_with(of)));
        found.sort_unstable();
        found.dedup();
        kinds.extend(found.into_iter().map(|kind| (name, kind)));
    }
    kinds
}

/// The shapes in which changed lists run.
fn few_shapes() -> impl Iterator<Item = Shape> {
    shapes().filter(|shape| shape.overlap && shape.stages * 64 == shape.tile_q + 64)
}

#[test]
fn the_model_sees_every_wait_and_fence_that_is_missing() {
    for shape in few_shapes() {
        for (role, without) in kinds(shape, &["Wait", "Await", "Fence", "Clear"]) {
            let changed = |ops: &mut Vec<Op>| ops.retain(|op| kind(op) != without);
            let mut found = faults(shape, role, 400, changed);
            assert!(found.any(|fault| fault.is_some()), "{shape:?}: {role} without {without}");
        }
    }
}

#[test]
fn the_model_sees_every_arrival_that_is_missing() {
    for shape in few_shapes() {
        for (role, without) in kinds(shape, &["Arrive", "Expect"]) {
            // The first of each: what comes last has nobody who waits for it.
            let changed = |ops: &mut Vec<Op>| {
                let at = ops.iter().position(|op| kind(op) == without);
                at.map(|at| ops.remove(at));
            };
            let mut found = faults(shape, role, 4, changed);
            assert!(found.all(|fault| fault.is_some()), "{shape:?}: {role} without {without}");
        }
    }
}

#[test]
fn the_model_sees_every_release_that_is_too_early() {
    let early = [
        ("scheduler", "Arrive StepFull", "Write Step"),
        ("producer of lse", "Arrive StepEmpty", "Read Step"),
        ("producer of lse", "Arrive Full", "Write Lse"),
        ("producer of V", "Arrive Full", "Write Lse"),
        ("consumer", "Arrive DsFull", "Write Ds"),
        ("consumer", "Arrive StepEmpty", "Read Step"),
        ("consumer", "Arrive QEmpty", "AwaitProducts"),
        ("consumer", "Arrive DOutEmpty", "AwaitProducts"),
        ("consumer", "Arrive KEmpty", "AwaitProducts"),
        ("consumer", "Arrive VEmpty", "AwaitProducts"),
        ("consumer", "Arrive DqFull", "Write Dq"),
        ("adder of dQ", "Arrive DqEmpty", "AwaitSent"),
        ("adder of dQ", "Arrive StepEmpty", "Read Step"),
    ];
    for (shape, (role, release, before)) in
        few_shapes().flat_map(|shape| early.map(|early| (shape, early)))
    {
        // Who adds dQ, and who copies lse and delta, is another role in some shapes.
        if !kinds(shape, &[release]).iter().any(|(of, _)| *of == role) {
            continue;
        }
        let changed = |ops: &mut Vec<Op>| {
            for at in 0..ops.len() {
                if kind(&ops[at]) == release {
                    let to = ops[..at].iter().rposition(|op| kind(op) == before);
                    ops[to.expect("it comes before")..=at].rotate_right(1);
                }
            }
        };
        let mut found = faults(shape, role, 400, changed);
        assert!(found.any(|fault| fault.is_some()), "{shape:?}: {role}, {release} before {before}");
    }
}

/// The first warp of a consumer releases dO and delta after its own wait for the product. Another one
/// may be behind it, but not before its reads of delta: it has started the product.
#[test]
fn warps_need_to_multiply_together() {
    for shape in few_shapes().filter(|shape| shape.sums == Sums::Narrow) {
        let items = every_kind_of_item(shape);
        let mut apart = roles(shape, &items);
        for (team, role) in apart.iter_mut().enumerate() {
            role.team = team;
        }
        let run = |seed| run(&barriers(shape), &apart, &mut Random::new(seed));
        let behind = |done| matches!(done, Err(Fault::Hazard(what)) if what.contains("Delta("));
        assert!((0..400).map(run).any(behind), "{shape:?}");
    }
}
