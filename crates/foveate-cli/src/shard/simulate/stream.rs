//! The stream between products, which moves over `tensor` before and behind them.

use foveate_shard::simulate::{Queue, Span, Task, TaskId};
use foveate_shard::step::{Edge, EdgeKind};

use super::run::Run;
use super::step::Moves;
use super::transfers::Parts;

impl<'a> Run<'a> {
    /// The next transfer of the stream that is of this kind. Others before it are waited for, in one piece.
    fn next(&mut self, kind: EdgeKind) -> Option<&'a Edge> {
        loop {
            let edge = self.moves.stream()?;
            if edge.kind == kind {
                return Some(edge);
            }
            self.wait_for(edge);
        }
    }

    /// A transfer in one piece, behind all that is computed so far and before what comes.
    pub(super) fn wait_for(&mut self, edge: &Edge) {
        for rank in self.ranks() {
            let taken = self.moves.seconds(self.step.machine, edge, self.step.reps[rank]);
            let after = std::mem::take(&mut self.before[rank]);
            let task = self.moved(rank, &edge.values[0], taken, after);
            self.before[rank] = vec![self.line.add(task)];
        }
    }

    /// Gathers the stream in one piece, behind what each rank has computed.
    pub(super) fn stream_of_all(&mut self, name: &str) -> Vec<Option<TaskId>> {
        let Some(edge) = self.next(EdgeKind::AllGather) else {
            return vec![None; self.before.len()];
        };
        let moved = |rank: usize| {
            let taken = self.moves.seconds(self.step.machine, edge, self.step.reps[rank]);
            self.moved(rank, name, taken, self.before[rank].clone())
        };
        let tasks: Vec<Task> = self.ranks().into_iter().map(moved).collect();
        tasks.into_iter().map(|task| Some(self.line.add(task))).collect()
    }

    fn moved(
        &self,
        rank: usize,
        name: &str,
        (seconds, span): (f64, Span),
        after: Vec<TaskId>,
    ) -> Task {
        let (name, ranks, span) = (name.to_owned(), vec![rank], Some(span));
        Task { name, ranks, queue: Queue::Stream, seconds, span, after }
    }

    /// Products, and what moves of the stream before and behind them where it is cut.
    pub(super) fn products(
        &mut self,
        name: &str,
        seconds: f64,
        [before, behind]: [Option<Moves>; 2],
        needs: &[TaskId],
    ) {
        let machine = self.step.machine;
        let gather = before.and_then(|moves| Some((moves, self.next(EdgeKind::AllGather)?)));
        let sum = behind.and_then(|moves| Some((moves, self.next(EdgeKind::ReduceScatter)?)));
        let (gathers, sums) = (format!("{name}: gather tokens"), format!("{name}: send terms"));
        for rank in self.ranks() {
            let own = self.step.reps[rank];
            let parts = |moves: &Self, of: Option<(Moves, &Edge)>| {
                of.map(|(how, edge)| (how, moves.moves.parts(edge, own)))
            };
            let (before, behind) = (parts(self, gather), parts(self, sum));
            let in_slices = |of: &Option<(Moves, Parts)>| match of {
                Some((Moves::Beside, (members, _))) => members.len(),
                _ => 1,
            };
            let slices = in_slices(&before).max(in_slices(&behind));
            let whole = |of: &Parts| machine.gather_seconds(&of.0, of.1.iter().sum());
            // Those of this rank are at hand, or come last.
            let part = |of: &Parts, turn: usize| {
                let place = of.0.iter().position(|&member| member == own).unwrap_or(0);
                let other = (place + turn) % of.0.len();
                machine.exchange_seconds(own, &[(of.0[other], of.1[other])])
            };
            let earlier = std::mem::take(&mut self.before[rank]);
            let moved = |run: &mut Self, what, taken, after: &[TaskId]| {
                let task = run.moved(rank, what, taken, after.to_vec());
                run.line.add(task)
            };
            let arrive: Vec<Option<TaskId>> = (0..slices)
                .map(|slice| match (&before, slice) {
                    (Some((Moves::Waited, all)), _) => {
                        Some(moved(self, &gathers, whole(all), &earlier))
                    }
                    (None, _) | (Some((Moves::Beside, _)), 0) => None,
                    (Some((Moves::Beside, all)), turn) => {
                        Some(moved(self, &gathers, part(all, turn), &earlier))
                    }
                })
                .collect();
            let (mut ends, mut last) = (Vec::new(), None);
            for (slice, arrived) in arrive.into_iter().enumerate() {
                let after = earlier.iter().chain(needs).copied().chain(arrived).collect();
                let kernels = self.compute(rank, name, seconds / slices as f64, after);
                match &behind {
                    Some((Moves::Waited, all)) => {
                        ends.push(moved(self, &sums, whole(all), &[kernels]));
                    }
                    Some((Moves::Beside, all)) if slice + 1 < slices => {
                        ends.push(moved(self, &sums, part(all, slice + 1), &[kernels]));
                    }
                    _ => {}
                }
                last = Some(kernels);
            }
            ends.extend(last);
            self.before[rank] = match &behind {
                // Terms of all ranks are read, and the sums of a rank's tokens written.
                Some((_, (members, parts))) => {
                    let stream: f64 = parts.iter().sum();
                    let bytes = stream * (1.0 + 1.0 / members.len() as f64);
                    let sum = machine.moving_seconds("sum of terms", bytes);
                    vec![self.compute(rank, &format!("{name}: sum terms"), sum, ends)]
                }
                None => ends,
            };
        }
    }
}
