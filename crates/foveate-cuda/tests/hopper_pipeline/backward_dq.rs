//! dQ alone: `kernels/hopper/backward_dq.cu`.

use super::model::Op::*;
use super::model::{BYTES, Content, Ring};
use super::steps::{CONSUMERS, Kernel, STEPS, Step, StepRing, WARPS, check_counts, prove};

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Barrier {
    StepFull(usize),
    StepEmpty(usize),
    RowsFull,
    RowsEmpty,
    KFull(usize),
    KEmpty(usize),
    VFull(usize),
    VEmpty(usize),
    /// Named barrier 1, of both consumers.
    Together,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Buffer {
    Step(usize),
    Q,
    DOut,
    /// lse and delta.
    Rows,
    K(usize),
    V(usize),
}

type Op = super::model::Op<Barrier, Buffer>;
type Role = super::model::Role<Barrier, Buffer>;

const RING: StepRing<Barrier, Buffer> =
    StepRing { full: Barrier::StepFull, empty: Barrier::StepEmpty, place: Buffer::Step };

#[derive(Clone, Copy)]
struct Shape {
    stages: usize,
    stages_v: usize,
    /// `FV_OVERLAP`.
    overlap: bool,
}

fn kernel(shape: Shape, steps: &[Step]) -> Kernel<Barrier, Buffer> {
    let mut barriers: Vec<_> = RING.barriers().collect();
    barriers.extend([
        (Barrier::RowsFull, 3),
        (Barrier::RowsEmpty, WARPS),
        (Barrier::Together, WARPS),
    ]);
    for s in 0..shape.stages {
        barriers.extend([(Barrier::KFull(s), 1), (Barrier::KEmpty(s), CONSUMERS)]);
    }
    for s in 0..shape.stages_v {
        barriers.extend([(Barrier::VFull(s), 1), (Barrier::VEmpty(s), CONSUMERS)]);
    }
    let role = |name: &str, ops| Role { name: name.to_owned(), team: CONSUMERS, ops };
    let copy = |fixed: Buffer,
                stages,
                buffer: fn(usize) -> Buffer,
                full: fn(usize) -> Barrier,
                empty: fn(usize) -> Barrier| {
        let (mut ring, mut item) = (Ring::new(stages), -1);
        RING.walk(steps, |ops, step| {
            if !step.some {
                return;
            }
            if step.first {
                ops.push(Wait(Barrier::RowsEmpty, item));
                ops.push(Expect(Barrier::RowsFull, BYTES));
                ops.push(Load(Barrier::RowsFull, fixed, (step.content.0, 0)));
                item += 1;
            }
            ops.push(Wait(empty(ring.stage()), ring.round() - 1));
            ops.push(Expect(full(ring.stage()), BYTES));
            ops.push(Load(full(ring.stage()), buffer(ring.stage()), step.content));
            ring.advance();
        })
    };
    let mut item = -1;
    let rows = RING.walk(steps, |ops, step| {
        if step.some && step.first {
            ops.push(Wait(Barrier::RowsEmpty, item));
            ops.push(Write(Buffer::Rows, (step.content.0, 0)));
            ops.push(Arrive(Barrier::RowsFull));
            item += 1;
        }
    });
    let (k, v) = (
        copy(Buffer::Q, shape.stages, Buffer::K, Barrier::KFull, Barrier::KEmpty),
        copy(Buffer::DOut, shape.stages_v, Buffer::V, Barrier::VFull, Barrier::VEmpty),
    );
    let mut roles = vec![
        role("scheduler", RING.scheduler(steps)),
        role("producer of K and Q", k),
        role("producer of V and dO", v),
        role("producer of lse and delta", rows),
    ];
    roles.extend((0..WARPS).map(|warp| Role {
        team: warp / 4,
        ..role(if warp % 4 == 0 { "first warp" } else { "warp" }, consume(shape, steps, warp))
    }));
    // Roles of a name stand together.
    roles.sort_by(|a, b| a.name.cmp(&b.name));
    Kernel { barriers, roles }
}

/// A warp of a consumer.
fn consume(shape: Shape, steps: &[Step], warp: usize) -> Vec<Op> {
    let (mut k, mut v) = (Ring::new(shape.stages), Ring::new(shape.stages_v));
    let (mut item, mut together, mut products) = (-1, 0, 0);
    // The stage of K of the step before, what it holds, and who has cleared it.
    let mut before: Option<(usize, Content, usize)> = None;
    let lead = |ops: &mut Vec<Op>, barrier| {
        if warp.is_multiple_of(4) {
            ops.push(Arrive(barrier));
        }
    };
    RING.walk(steps, |ops, step| {
        if !step.some {
            return;
        }
        let (content, of_item) = (step.content, (step.content.0, 0));
        let mut start = |ops: &mut Vec<Op>, operands: &[(Buffer, Content, usize)]| {
            ops.extend(operands.iter().map(|&(buffer, of, clear)| Multiply(buffer, of, clear)));
            ops.push(Start);
            products += 1;
            products
        };
        if step.first {
            item += 1;
            ops.push(Wait(Barrier::RowsFull, item));
            ops.push(Read(Buffer::Rows, of_item));
        }
        let cleared = if step.ragged { WARPS } else { 0 };
        let s = [(Buffer::Q, of_item, 0), (Buffer::K(k.stage()), content, cleared)];
        let dp = [(Buffer::DOut, of_item, 0), (Buffer::V(v.stage()), content, 0)];
        let dq = |(stage, content, cleared)| [(Buffer::K(stage), content, cleared)];
        ops.push(Wait(Barrier::KFull(k.stage()), k.round()));
        let runs_beside = shape.overlap && !step.first && !step.partial;
        if !runs_beside {
            ops.push(Wait(Barrier::VFull(v.stage()), v.round()));
            if step.ragged {
                ops.push(Clear(Buffer::K(k.stage()), content));
                ops.push(Fence);
                ops.push(Arrive(Barrier::Together));
                ops.push(Wait(Barrier::Together, together));
                together += 1;
            }
        }
        match before.take() {
            None => {
                start(ops, &s);
            }
            Some(pending) => {
                let of_dq = start(ops, &dq(pending));
                start(ops, &s);
                ops.push(AwaitProducts(of_dq));
                lead(ops, Barrier::KEmpty(pending.0));
                if runs_beside {
                    ops.push(Wait(Barrier::VFull(v.stage()), v.round()));
                }
            }
        }
        let of_dp = start(ops, &dp);
        // Of a huge lse, between the two waits.
        ops.push(Read(Buffer::Rows, of_item));
        ops.push(AwaitProducts(of_dp));
        lead(ops, Barrier::VEmpty(v.stage()));
        if step.last {
            ops.push(Arrive(Barrier::RowsEmpty));
        }
        before = Some((k.stage(), content, cleared));
        k.advance();
        v.advance();
        if let Some(pending) = before.filter(|_| step.last) {
            let last = start(ops, &dq(pending));
            ops.push(AwaitProducts(last));
            lead(ops, Barrier::KEmpty(pending.0));
            before = None;
        }
    })
}

#[test]
fn no_order_of_the_roles_stops_them_and_every_wait_is_needed() {
    for (stages, stages_v, overlap) in [(2, 1, true), (2, 2, true), (3, 3, true), (2, 2, false)] {
        prove(|steps| kernel(Shape { stages, stages_v, overlap }, steps));
    }
}

#[test]
fn the_kernel_has_the_barriers_of_the_model() {
    let own = include_str!("../../kernels/hopper/backward_dq.cu");
    let steps = include_str!("../../kernels/hopper/backward_steps.cuh");
    let names = [
        ("step_full", 1),
        ("step_empty", 3 + WARPS),
        ("rows_full", 3),
        ("rows_empty", WARPS),
        ("k_full", 1),
        ("k_empty", CONSUMERS),
        ("v_full", 1),
        ("v_empty", CONSUMERS),
    ];
    check_counts(&[(steps, "init_steps"), (own, "init")], &names, &[("CONSUMERS", CONSUMERS)]);
    let layout = include_str!("../../kernels/hopper/backward_dq_layout.cuh");
    assert!(layout.contains(&format!("constexpr int STEPS = {STEPS};")));
}
