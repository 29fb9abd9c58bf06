//! The stream between products, which moves over `tensor` before and behind them.

use foveate_shard::MeshAxis;
use foveate_shard::simulate::{Queue, Span, Task, TaskId};

use super::run::Run;
use super::step::Moves;

impl Run<'_> {
    /// The ranks of `tensor` that share a rank's tokens, and the bytes of the stream of all of these.
    fn stream(&self) -> (Vec<usize>, f64) {
        let step = self.step;
        let group = step.mesh().group(step.reps[0], &[MeshAxis::Tensor]);
        (group, 2.0 * (step.rows * step.len * step.config.hidden_size) as f64)
    }

    /// Gathers the stream, or sums it, in one piece, behind what each rank has computed.
    pub(super) fn stream_of_all(&mut self, name: &str) -> Vec<Option<TaskId>> {
        let (group, stream) = self.stream();
        let taken = self.step.machine.gather_seconds(&group, stream);
        let moved = |rank: usize| self.moved(rank, name, taken, self.before[rank].clone());
        if group.len() < 2 {
            return vec![None; self.before.len()];
        }
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
        let (group, stream) = self.stream();
        let parts = group.len();
        let cut = |moves: Option<Moves>| moves.filter(|_| parts > 1);
        let [before, behind] = [before, behind].map(cut);
        let beside = [before, behind].contains(&Some(Moves::Beside));
        let slices = if beside { parts } else { 1 };
        let part = |turn: usize| {
            machine.exchange_seconds(group[0], &[(group[turn], stream / parts as f64)])
        };
        let whole = machine.gather_seconds(&group, stream);
        // Terms of all ranks are read, and the sums of a rank's tokens written.
        let sum = machine.moving_seconds("sum of terms", stream * (1.0 + 1.0 / parts as f64));
        let (gathers, sums) = (format!("{name}: gather tokens"), format!("{name}: send terms"));
        for rank in self.ranks() {
            let earlier = std::mem::take(&mut self.before[rank]);
            let moved = |run: &mut Self, what, taken, after: &[TaskId]| {
                let task = run.moved(rank, what, taken, after.to_vec());
                run.line.add(task)
            };
            let arrive: Vec<Option<TaskId>> = (0..slices)
                .map(|slice| match (before, slice) {
                    (Some(Moves::Waited), _) => Some(moved(self, &gathers, whole, &earlier)),
                    (None, _) | (Some(Moves::Beside), 0) => None,
                    (Some(Moves::Beside), turn) => {
                        Some(moved(self, &gathers, part(turn), &earlier))
                    }
                })
                .collect();
            let (mut ends, mut last) = (Vec::new(), None);
            for (slice, arrived) in arrive.into_iter().enumerate() {
                let after = earlier.iter().chain(needs).copied().chain(arrived).collect();
                let kernels = self.compute(rank, name, seconds / slices as f64, after);
                match behind {
                    Some(Moves::Waited) => ends.push(moved(self, &sums, whole, &[kernels])),
                    Some(Moves::Beside) if slice + 1 < slices => {
                        ends.push(moved(self, &sums, part(slice + 1), &[kernels]));
                    }
                    _ => {}
                }
                last = Some(kernels);
            }
            ends.extend(last);
            self.before[rank] = match behind {
                Some(_) => vec![self.compute(rank, &format!("{name}: sum terms"), sum, ends)],
                None => ends,
            };
        }
    }
}
