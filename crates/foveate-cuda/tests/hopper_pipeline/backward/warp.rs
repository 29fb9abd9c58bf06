//! What a warp of a consumer of the backward does, step by step.

use super::*;

/// A warp of a consumer, as it goes through the kernel.
pub(super) struct Warp {
    shape: Shape,
    warp: usize,
    ops: Vec<Op>,
    place: Ring,
    stage: Ring,
    item: i64,
    /// Of the CTA's steps with a tile.
    number: i64,
    together: i64,
    /// Groups of products that were started.
    products: usize,
    /// The step before, if the warp has queries of it.
    target: Option<Content>,
    /// The step before, and who must have cleared its operands.
    before: Option<(Step, usize, usize)>,
}

impl Warp {
    pub(super) fn new(shape: Shape, warp: usize) -> Self {
        Self {
            shape,
            warp,
            ops: Vec::new(),
            place: Ring::new(STEPS),
            stage: Ring::new(shape.stages),
            item: -1,
            number: 0,
            together: 0,
            products: 0,
            target: None,
            before: None,
        }
    }

    fn push(&mut self, op: Op) {
        self.ops.push(op);
    }

    /// Arrives as the first warp of its consumer.
    fn lead(&mut self, barrier: Barrier) {
        if self.warp.is_multiple_of(4) {
            self.push(Arrive(barrier));
        }
    }

    /// Starts a group of products.
    fn start(&mut self, operands: Vec<Operand>) {
        self.ops
            .extend(operands.into_iter().map(|(buffer, of, clear)| Multiply(buffer, of, clear)));
        self.push(Start);
        self.products += 1;
    }

    /// Waits until at most `left` groups are under way.
    fn wait(&mut self, left: usize) {
        self.push(AwaitProducts(self.products - left));
    }

    fn clear(&mut self, buffer: Buffer, content: Content) {
        self.push(Clear(buffer, content));
        self.push(Fence);
        self.push(Arrive(Barrier::Together));
        self.push(Wait(Barrier::Together, self.together));
        self.together += 1;
    }

    fn await_step(&mut self, step: &Step) {
        self.push(Wait(Barrier::StepFull(self.place.stage()), self.place.round()));
        self.push(Read(Buffer::Step(self.place.stage()), step.content));
    }

    fn await_full(&mut self) {
        self.push(Wait(Barrier::Full(self.stage.stage()), self.stage.round()));
    }

    fn release_step(&mut self, step: &Step) {
        self.push(Read(Buffer::Step(self.place.stage()), step.content));
        self.push(Arrive(Barrier::StepEmpty(self.place.stage())));
        self.place.advance();
    }

    /// dQ, dK and the end of dV of the step before.
    fn start_pending(&mut self) {
        let (step, of_keys, of_queries) = self.before.expect("there is a step before");
        let (stage, content) = (self.stage.before().stage(), step.content);
        let parity = ((self.number - 1) & 1) as usize;
        self.push(Wait(Barrier::DsFull(parity), (self.number - 1) >> 1));
        let ds =
            |warps: std::ops::Range<usize>| warps.map(move |w| (Buffer::Ds(parity, w), content, 0));
        let mut first = Vec::new();
        if self.shape.dq != Dq::Separate {
            first.extend(ds(0..WARPS).chain([(Buffer::K, (content.0, 0), of_keys)]));
        }
        if self.shape.sums.joins_dv() {
            first.push((Buffer::DOut(stage), content, of_queries));
        }
        if !first.is_empty() {
            self.start(first);
        }
        let own = self.warp / 4 * 4;
        let dk = ds(own..own + 4).chain([(Buffer::Q(stage), content, of_queries)]);
        self.start(dk.collect());
    }

    fn finish_dq(&mut self) {
        let (step, ..) = self.before.expect("there is a step before");
        match self.shape.dq {
            Dq::Warps => self.push(AwaitSent),
            Dq::Ordered => self.push(Wait(Barrier::DqEmpty, self.number - 2)),
            Dq::Separate => return,
        }
        self.push(Write(Buffer::Dq(self.warp), step.content));
    }

    fn send_dq(&mut self) {
        match (self.shape.dq, self.target) {
            (Dq::Ordered, _) => self.push(Arrive(Barrier::DqFull)),
            (_, Some(content)) => self.push(Send(Buffer::Dq(self.warp), content)),
            (_, None) => {}
        }
    }

    fn finish_dk(&mut self) {
        let stage = self.stage.before().stage();
        self.lead(Barrier::QEmpty(stage));
        if self.shape.sums.joins_dv() {
            self.lead(Barrier::DOutEmpty(stage));
        }
    }

    /// dP before P, and the wait for it, which the first of dV may join.
    fn start_early_dp(&mut self, delta: Op, dp: Vec<Operand>, dv: &[Operand]) {
        let plain = self.shape.sums == Sums::Plain;
        if plain {
            self.push(delta);
        }
        self.start(dp);
        if plain {
            self.start(dv.to_vec());
        }
        self.wait(usize::from(plain));
    }

    pub(super) fn run(mut self, steps: &[Step]) -> Vec<Op> {
        for (i, step) in steps.iter().enumerate() {
            if step.first {
                self.await_step(step);
            }
            match step.tile {
                Some(tile) => self.step(step, tile, steps.get(i + 1)),
                None => self.release_step(step),
            }
        }
        self.push(Wait(Barrier::StepFull(self.place.stage()), self.place.round()));
        self.push(Read(Buffer::Step(self.place.stage()), STOP));
        if self.shape.dq == Dq::Warps {
            self.push(AwaitSent);
        }
        self.ops
    }

    fn step(&mut self, step: &Step, tile: Tile, next: Option<&Step>) {
        let Shape { tile_q, sums, overlap, .. } = self.shape;
        let lse_early = tile_q == 64 || sums == Sums::Plain;
        let of_keys = if step.keys < TILE_KV { WARPS } else { 0 };
        let of_queries = if tile.queries < tile_q { WARPS } else { 0 };
        let (content, of_item) = (step.content, (step.content.0, 0));
        if step.first {
            self.begin_item(of_item, of_keys > 0);
        }
        let (stage, parity) = (self.stage.stage(), (self.number & 1) as usize);
        let rows = self.number as usize % row_stages(self.shape);
        let (q, d_out) = (Buffer::Q(stage), Buffer::DOut(stage));
        let s = vec![(Buffer::K, of_item, of_keys), (q, content, of_queries)];
        let dp = vec![(Buffer::V, of_item, 0), (d_out, content, of_queries)];
        let dv = vec![(d_out, content, of_queries)];
        let delta = Read(Buffer::Delta(rows), content);
        self.push(Read(Buffer::Step(self.place.stage()), content));
        let evaluates = tile.partial || of_keys > 0 || of_queries > 0;
        if overlap && !step.first && !evaluates {
            self.start(s);
            self.start_pending();
            let lse = Read(Buffer::Lse(rows), content);
            if lse_early {
                self.push(lse);
            }
            if sums == Sums::Plain {
                self.wait(2);
            }
            self.wait(1);
            if sums == Sums::Plain {
                self.push(lse);
            }
            self.finish_dq();
            if !lse_early {
                self.push(lse);
            }
            if sums == Sums::Wide {
                self.wait(0);
            } else {
                self.start_early_dp(delta, dp.clone(), &dv);
            }
            self.finish_dk();
        } else {
            if of_queries > 0 {
                self.clear(q, content);
                self.clear(d_out, content);
            }
            self.start(s);
            if step.first {
                self.wait(0);
            } else {
                self.start_pending();
                self.wait(0);
                self.finish_dq();
                self.finish_dk();
            }
            self.push(Read(Buffer::Lse(rows), content));
            if sums != Sums::Wide {
                self.start_early_dp(delta, dp.clone(), &dv);
            }
        }
        if sums != Sums::Plain {
            self.push(delta);
        }
        if sums == Sums::Wide {
            self.start(dp);
            self.start(dv.clone());
            self.wait(1);
        }
        if step.last {
            self.lead(Barrier::VEmpty);
        }
        self.push(Write(Buffer::Ds(parity, self.warp), content));
        if sums == Sums::Plain {
            self.start(dv.clone());
            self.start(dv.clone());
        }
        self.push(Fence);
        self.push(Arrive(Barrier::DsFull(parity)));
        if !step.first {
            self.send_dq();
        }
        self.target = sends(self.shape, self.warp, step).then_some(content);
        if sums != Sums::Plain {
            self.start(dv);
        }
        self.stage.advance();
        self.number += 1;
        self.before = Some((*step, of_keys, of_queries));
        if let Some(next) = next.filter(|_| !step.last) {
            self.release_step(step);
            self.await_step(next);
            self.await_full();
        }
        self.wait(0);
        if !sums.joins_dv() {
            self.lead(Barrier::DOutEmpty(stage));
        }
        if step.last {
            self.finish_item(step);
        }
    }

    fn begin_item(&mut self, content: Content, clears: bool) {
        self.target = None;
        self.item += 1;
        self.push(Wait(Barrier::KFull, self.item));
        self.push(Wait(Barrier::VFull, self.item));
        if clears {
            self.clear(Buffer::K, content);
        }
        self.await_full();
    }

    fn finish_item(&mut self, step: &Step) {
        self.start_pending();
        self.wait(0);
        self.finish_dq();
        self.push(Fence);
        self.send_dq();
        self.finish_dk();
        self.lead(Barrier::KEmpty);
        self.release_step(step);
    }
}
