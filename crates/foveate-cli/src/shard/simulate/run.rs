//! The tasks of a step: groups that are gathered and reduced beside layers, and the update.

use foveate_nn::{ParameterState, Reshard};
use foveate_shard::MeshAxis;
use foveate_shard::simulate::{Queue, Span, Task, TaskId, Timeline, Timing};

use super::step::{Moves, Pass, Product, Step};

/// Tasks of a step so far.
pub(super) struct Run<'a> {
    pub(super) step: &'a Step<'a>,
    pub(super) line: Timeline,
    /// What the next block of each rank follows.
    pub(super) before: Vec<Vec<TaskId>>,
    /// The last kernels of every group that was computed so far, on all ranks.
    pub(super) computed: Vec<Vec<TaskId>>,
}

/// When the tasks of so many batches of a step and of the update behind them run.
pub fn timing(step: &Step, batches: usize) -> Timing {
    let (forward, head, backward) = step.passes();
    let mut run = Run::new(step);
    for batch in 0..batches {
        run.batch(batch, forward, head, backward);
    }
    run.update();
    run.line.run()
}

impl<'a> Run<'a> {
    fn new(step: &'a Step<'a>) -> Self {
        let before = vec![Vec::new(); step.reps.len()];
        Self { step, line: Timeline::default(), before, computed: Vec::new() }
    }
}

impl Run<'_> {
    pub(super) fn ranks(&self) -> Vec<usize> {
        (0..self.step.reps.len()).collect()
    }

    fn batch(&mut self, batch: usize, forward: Pass, head: f64, backward: Pass) {
        let step = self.step;
        let groups = step.proven.plan().shape.parameters.len();
        let tied = step.config.tie_word_embeddings;
        let keeps = step.moves.reshard != Reshard::Always;
        let gathers = step.moves.reshard != Reshard::Never || batch == 0;
        let mut whole = vec![None; groups];
        for (group, whole) in whole.iter_mut().enumerate() {
            // The head of a tied model is its embedding.
            if gathers && !(tied && group + 1 == groups) {
                *whole = self.gather(group, "gather");
            }
            let needs: Vec<TaskId> = whole.iter().copied().collect();
            match group {
                0 => self.products("embed", forward.embedding, [None, Some(Moves::Waited)], &needs),
                _ if group + 1 == groups => {
                    self.products("head and loss", head, [Some(Moves::Waited); 2], &needs);
                }
                _ => self.layer(&format!("layer {}", group - 1), forward, &needs),
            }
            self.ends_group();
        }
        for group in (0..groups - 1).rev() {
            let again = gathers && !keeps && group > 0;
            let whole = if again { self.gather(group, "gather again") } else { whole[group] };
            let needs: Vec<TaskId> = whole.iter().copied().collect();
            match group {
                0 => {
                    let moves = [Some(Moves::Waited), None];
                    self.products("embed backward", backward.embedding, moves, &needs);
                }
                _ => self.layer_backward(group - 1, backward, &needs),
            }
            self.ends_group();
            self.reduce(group);
            if group + 2 == groups {
                self.reduce(groups - 1);
            }
        }
    }

    /// The kernels of a group are queued.
    fn ends_group(&mut self) {
        let ranks = self.ranks().into_iter();
        self.computed.push(ranks.filter_map(|r| self.line.last(r, Queue::Compute)).collect());
    }

    pub(super) fn together(
        &mut self,
        name: String,
        queue: Queue,
        (seconds, span): (f64, Span),
        after: Vec<TaskId>,
    ) -> Option<TaskId> {
        let (ranks, span) = (self.ranks(), Some(span));
        (seconds > 0.0).then(|| self.line.add(Task { name, ranks, queue, seconds, span, after }))
    }

    /// Gathers the weights of a group, while the group before the last is computed.
    fn gather(&mut self, group: usize, name: &str) -> Option<TaskId> {
        let (plan, step) = (self.step.proven.plan(), self.step);
        let members = step.mesh().group(step.reps[0], &[MeshAxis::Shard, MeshAxis::Context]);
        let (named, elements) = &plan.shape.parameters[group];
        let taken = step.machine.gather_seconds(&members, 2.0 * *elements as f64);
        let ahead = self.computed.len().checked_sub(2).map(|at| self.computed[at].clone());
        self.together(
            format!("{name} {named}"),
            Queue::Parameters,
            taken,
            ahead.unwrap_or_default(),
        )
    }

    /// Sums the gradients of a group and cuts them over the ranks.
    fn reduce(&mut self, group: usize) {
        let (plan, step) = (self.step.proven.plan(), self.step);
        let after = self.computed.last().cloned().unwrap_or_default();
        let (named, elements) = &plan.shape.parameters[group];
        let members = step.mesh().group(step.reps[0], &[MeshAxis::Shard, MeshAxis::Context]);
        let taken =
            step.machine.gather_seconds(&members, step.gradient_bytes(true) * *elements as f64);
        self.together(format!("reduce {named}"), Queue::Gradients, taken, after.clone());
        if step.in_backward {
            self.sum_copies(named, *elements, after);
        }
    }

    /// Sums the gradients of `elements` parameters, of which a rank has its part, over ranks with copies of them.
    fn sum_copies(&mut self, named: &str, elements: usize, after: Vec<TaskId>) {
        let step = self.step;
        let parts = step.mesh().size_of(&[MeshAxis::Shard, MeshAxis::Context]);
        let copies = step.mesh().group(step.reps[0], &[MeshAxis::Replicate]);
        let bytes = step.gradient_bytes(false) * elements as f64 / parts as f64;
        let (seconds, span) = step.machine.gather_seconds(&copies, bytes);
        let taken = (2.0 * seconds, span);
        self.together(format!("all-reduce {named}"), Queue::Gradients, taken, after);
    }

    /// A layer forward.
    fn layer(&mut self, name: &str, pass: Pass, needs: &[TaskId]) {
        let each = self.step.seconds_per_weight(pass, false);
        for product in Product::ALL {
            self.product(name, product, each, needs);
            if product == Product::Qkv {
                self.attention(&format!("{name}: attention"));
            }
        }
    }

    /// A product, and what moves for it.
    fn product(&mut self, name: &str, product: Product, each: f64, needs: &[TaskId]) {
        let seconds = each * product.weight(self.step.config);
        self.products(&format!("{name}: {}", product.name()), seconds, product.moves(), needs);
    }

    /// A layer backward, with what is computed again.
    fn layer_backward(&mut self, layer: usize, pass: Pass, needs: &[TaskId]) {
        let (name, again) = (format!("layer {layer} backward"), self.step.again(layer));
        let each = self.step.seconds_per_weight(pass, true);
        for &product in Product::again(again) {
            self.product(&format!("{name}, again"), product, each, needs);
            if product == Product::Qkv {
                self.attention(&format!("{name}: attention again"));
            }
        }
        self.gradients(&name, [Product::Down, Product::GateUp], each, needs, |_| {});
        let attention = |run: &mut Self| run.attention_backward(&format!("{name}: attention"));
        self.gradients(&name, [Product::Out, Product::Qkv], each, needs, attention);
    }

    /// From the gradient behind the second of two products of a layer to that before the first. `between` are
    /// the blocks between them.
    fn gradients(
        &mut self,
        name: &str,
        [last, first]: [Product; 2],
        each: f64,
        needs: &[TaskId],
        between: impl FnOnce(&mut Self),
    ) {
        let product = |of: Product, what: &str| {
            (
                format!("{name}: gradient of {} {}", what, of.name()),
                each * of.weight(self.step.config),
            )
        };
        let [of_input, of_weight] = ["before", "of weights,"].map(|what| product(last, what));
        let [weight_of_first, before_first] =
            ["of weights,", "before"].map(|what| product(first, what));
        self.products(&of_input.0, of_input.1, [Some(Moves::Beside), None], needs);
        // The normalised stream that gradients of the first's weights read.
        let ahead = self.stream_of_all(&format!("{name}: stream again"));
        self.products(&of_weight.0, of_weight.1, [None, None], needs);
        between(self);
        for (before, ahead) in self.before.iter_mut().zip(ahead) {
            before.extend(ahead);
        }
        self.products(&weight_of_first.0, weight_of_first.1, [None, None], needs);
        self.products(&before_first.0, before_first.1, [None, Some(Moves::Beside)], needs);
    }

    pub(super) fn compute(
        &mut self,
        rank: usize,
        name: &str,
        seconds: f64,
        after: Vec<TaskId>,
    ) -> TaskId {
        let (name, ranks) = (name.to_owned(), vec![rank]);
        self.line.add(Task { name, ranks, queue: Queue::Compute, seconds, span: None, after })
    }

    pub(super) fn all_after(&mut self, task: Option<TaskId>) {
        if let Some(task) = task {
            self.before.iter_mut().for_each(|before| before.push(task));
        }
    }

    /// The sums over copies behind all batches, the norm of all gradients, and the update of a rank's part.
    fn update(&mut self) {
        let step = self.step;
        if !step.in_backward {
            let queues = [Queue::Compute, Queue::Gradients];
            let ranks = self.ranks().into_iter();
            let all = ranks.flat_map(|rank| queues.map(|queue| self.line.last(rank, queue)));
            let all = all.flatten().collect();
            let elements = step.proven.plan().shape.parameters.iter().map(|(_, n)| n).sum();
            self.sum_copies("gradients", elements, all);
        }
        let over = [MeshAxis::Shard, MeshAxis::Context];
        let parts = step.mesh().size_of(&over) as f64;
        let memory = step.account.memory();
        let moved = 2.0 * (memory.weights + memory.optimizer) as f64 + memory.gradients as f64;
        let rounds = !matches!(step.state, ParameterState::F32 | ParameterState::Exact);
        let block = if rounds { "update, rounded" } else { "update" };
        let norm = step.machine.moving_seconds("clip", memory.gradients as f64 / parts);
        let update = step.machine.moving_seconds(block, moved / parts);
        let everyone: Vec<usize> = (0..step.mesh().ranks()).collect();
        let summed: Vec<TaskId> =
            self.ranks().into_iter().filter_map(|r| self.line.last(r, Queue::Gradients)).collect();
        for rank in self.ranks() {
            let after = [&self.before[rank][..], &summed].concat();
            self.before[rank] = vec![self.compute(rank, "norm of gradients", norm, after)];
        }
        let taken = step.machine.gather_seconds(&everyone, 8.0);
        let after = self.before.concat();
        let agreed = self.together("sum the norms".to_owned(), Queue::Gradients, taken, after);
        self.all_after(agreed);
        for rank in self.ranks() {
            let after = std::mem::take(&mut self.before[rank]);
            self.compute(rank, "update", update, after);
        }
    }
}
