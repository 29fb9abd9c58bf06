//! dK and dV of head dims above 128: `kernels/hopper/backward_wide.cu`.

use super::model::Op::*;
use super::model::{BYTES, Ring};
use super::steps::{CONSUMERS, Kernel, STEPS, Step, StepRing, WARPS, check_counts, prove};

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Barrier {
    StepFull(usize),
    StepEmpty(usize),
    KFull,
    KEmpty,
    VFull,
    VEmpty,
    PFull,
    PEmpty,
    QFull(usize),
    QEmpty(usize),
    DOutFull(usize),
    DOutEmpty(usize),
    Cleared,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Buffer {
    Step(usize),
    K,
    V,
    Q(usize),
    DOut(usize),
    Lse(usize),
    Delta(usize),
    /// What a warp hands to its like of the other consumer.
    P(usize),
}

type Op = super::model::Op<Barrier, Buffer>;
type Role = super::model::Role<Barrier, Buffer>;

const RING: StepRing<Barrier, Buffer> =
    StepRing { full: Barrier::StepFull, empty: Barrier::StepEmpty, place: Buffer::Step };

/// A tile of keys, and one of queries of each step.
#[derive(Clone, Copy)]
struct Copied {
    fixed: Buffer,
    fixed_full: Barrier,
    fixed_empty: Barrier,
    buffer: fn(usize) -> Buffer,
    full: fn(usize) -> Barrier,
    empty: fn(usize) -> Barrier,
}

const K_AND_Q: Copied = Copied {
    fixed: Buffer::K,
    fixed_full: Barrier::KFull,
    fixed_empty: Barrier::KEmpty,
    buffer: Buffer::Q,
    full: Barrier::QFull,
    empty: Barrier::QEmpty,
};
const V_AND_D_OUT: Copied = Copied {
    fixed: Buffer::V,
    fixed_full: Barrier::VFull,
    fixed_empty: Barrier::VEmpty,
    buffer: Buffer::DOut,
    full: Barrier::DOutFull,
    empty: Barrier::DOutEmpty,
};

fn kernel(stages: usize, steps: &[Step]) -> Kernel<Barrier, Buffer> {
    let mut barriers: Vec<_> = RING.barriers().collect();
    let single = [Barrier::KFull, Barrier::KEmpty, Barrier::VFull, Barrier::VEmpty];
    barriers.extend(single.map(|barrier| (barrier, 1)));
    barriers.extend([(Barrier::PFull, 4), (Barrier::PEmpty, 4), (Barrier::Cleared, WARPS)]);
    for s in 0..stages {
        barriers.extend([(Barrier::QFull(s), 2), (Barrier::DOutFull(s), 2)]);
        barriers.extend([(Barrier::QEmpty(s), CONSUMERS), (Barrier::DOutEmpty(s), CONSUMERS)]);
    }
    let role = |name: &str, ops| Role { name: name.to_owned(), team: CONSUMERS, ops };
    let mut roles = vec![
        role("scheduler", RING.scheduler(steps)),
        role("producer of K and Q", copies(stages, steps, &K_AND_Q)),
        role("producer of V and dO", copies(stages, steps, &V_AND_D_OUT)),
        role("producer of lse and delta", rows(stages, steps)),
    ];
    for warp in 0..WARPS {
        let name = match (warp / 4, warp % 4) {
            (0, 0) => "first warp of values",
            (0, _) => "warp of values",
            (_, 0) => "first warp of keys",
            (..) => "warp of keys",
        };
        roles.push(Role { team: warp / 4, ..role(name, consume(stages, steps, warp)) });
    }
    Kernel { barriers, roles }
}

/// `copy_k_and_q`, `copy_v_and_d_out`.
fn copies(stages: usize, steps: &[Step], copied: &Copied) -> Vec<Op> {
    let (mut ring, mut item) = (Ring::new(stages), -1);
    RING.walk(steps, |ops, step| {
        if !step.some {
            return;
        }
        if step.first {
            ops.push(Wait(copied.fixed_empty, item));
            ops.push(Expect(copied.fixed_full, BYTES));
            ops.push(Load(copied.fixed_full, copied.fixed, (step.content.0, 0)));
            item += 1;
        }
        let full = (copied.full)(ring.stage());
        ops.push(Wait((copied.empty)(ring.stage()), ring.round() - 1));
        ops.push(Expect(full, BYTES));
        ops.push(Load(full, (copied.buffer)(ring.stage()), step.content));
        ring.advance();
    })
}

/// `copy_rows`.
fn rows(stages: usize, steps: &[Step]) -> Vec<Op> {
    let mut ring = Ring::new(stages);
    RING.walk(steps, |ops, step| {
        if !step.some {
            return;
        }
        let stage = ring.stage();
        ops.push(Wait(Barrier::QEmpty(stage), ring.round() - 1));
        ops.push(Write(Buffer::Lse(stage), step.content));
        ops.push(Write(Buffer::Delta(stage), step.content));
        ops.push(Arrive(Barrier::QFull(stage)));
        ops.push(Arrive(Barrier::DOutFull(stage)));
        ring.advance();
    })
}

/// A warp of `consume_values` or `consume_keys`.
fn consume(stages: usize, steps: &[Step], warp: usize) -> Vec<Op> {
    let values = warp < 4;
    let (begins, ends) = if values { (K_AND_Q, V_AND_D_OUT) } else { (V_AND_D_OUT, K_AND_Q) };
    let mut ring = Ring::new(stages);
    let (mut item, mut number, mut meetings, mut products) = (-1, 0, 0, 0);
    let lead = |ops: &mut Vec<Op>, barrier| {
        if warp.is_multiple_of(4) {
            ops.push(Arrive(barrier));
        }
    };
    RING.walk(steps, |ops, step| {
        if !step.some {
            return;
        }
        let (content, stage) = (step.content, ring.stage());
        if step.first {
            item += 1;
            ops.push(Wait(begins.fixed_full, item));
        }
        let cleared = if step.ragged { WARPS } else { 0 };
        if step.ragged {
            ops.push(Wait(Barrier::QFull(stage), ring.round()));
            ops.push(Wait(Barrier::DOutFull(stage), ring.round()));
            for buffer in [Buffer::Q(stage), Buffer::DOut(stage)] {
                ops.push(Clear(buffer, content));
                ops.push(Fence);
            }
            ops.push(Arrive(Barrier::Cleared));
            ops.push(Wait(Barrier::Cleared, meetings));
            meetings += 1;
        }
        ops.push(Wait((begins.full)(stage), ring.round()));
        ops.push(Multiply(begins.fixed, (content.0, 0), 0));
        ops.push(Multiply((begins.buffer)(stage), content, cleared));
        ops.push(Start);
        products += 1;
        let of_rows = if values { Buffer::Lse(stage) } else { Buffer::Delta(stage) };
        ops.push(Read(of_rows, content));
        ops.push(AwaitProducts(products));
        lead(ops, (begins.empty)(stage));
        if step.last {
            lead(ops, begins.fixed_empty);
        }
        if values {
            // Of a huge lse.
            ops.push(Read(of_rows, content));
            ops.push(Wait(Barrier::PEmpty, number - 1));
            ops.push(Write(Buffer::P(warp), content));
            ops.push(Arrive(Barrier::PFull));
        } else {
            ops.push(Wait(Barrier::PFull, number));
            ops.push(Read(Buffer::P(warp - 4), content));
            ops.push(Arrive(Barrier::PEmpty));
        }
        ops.push(Wait((ends.full)(stage), ring.round()));
        ops.push(Multiply((ends.buffer)(stage), content, cleared));
        ops.push(Start);
        products += 1;
        ops.push(AwaitProducts(products));
        lead(ops, (ends.empty)(stage));
        ring.advance();
        number += 1;
    })
}

#[test]
fn no_order_of_the_roles_stops_them_and_every_wait_is_needed() {
    for stages in [2, 3] {
        prove(|steps| kernel(stages, steps));
    }
}

#[test]
fn the_kernel_has_the_barriers_of_the_model() {
    let own = include_str!("../../kernels/hopper/backward_wide.cu");
    let steps = include_str!("../../kernels/hopper/backward_steps.cuh");
    let names = [
        ("step_full", 1),
        ("step_empty", 3 + WARPS),
        ("k_full", 1),
        ("v_full", 1),
        ("k_empty", 1),
        ("v_empty", 1),
        ("p_full", 4),
        ("p_empty", 4),
        ("cleared", WARPS),
        ("q_full", 2),
        ("d_out_full", 2),
        ("q_empty", CONSUMERS),
        ("d_out_empty", CONSUMERS),
    ];
    check_counts(&[(steps, "init_steps"), (own, "init")], &names, &[("CONSUMERS", CONSUMERS)]);
    let layout = include_str!("../../kernels/hopper/backward_wide_layout.cuh");
    assert!(layout.contains(&format!("constexpr int STEPS = {STEPS};")));
}
