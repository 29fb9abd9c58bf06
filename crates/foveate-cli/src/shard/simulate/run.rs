//! The tasks of a step: blocks in their order, the transfers of the proven step beside them, and the update.

use foveate_nn::ParameterState;
use foveate_shard::MeshAxis;
use foveate_shard::simulate::{Queue, Span, Task, TaskId, Timeline, Timing};
use foveate_shard::step::{Edge, EdgeKind, StepPlan};

use super::step::{Moves, Pass, Product, Step};
use super::transfers::{Transfers, group_of};
use crate::shard::plan::keys_first;

/// Tasks of a step so far.
pub(super) struct Run<'a> {
    pub(super) step: &'a Step<'a>,
    pub(super) line: Timeline,
    /// What the next block of each rank follows.
    pub(super) before: Vec<Vec<TaskId>>,
    /// The last kernels of every group that was computed so far, on all ranks.
    pub(super) computed: Vec<Vec<TaskId>>,
    /// What moves beside keys, and is not taken yet.
    pub(super) moves: Transfers<'a>,
    /// The gather that each group's weights last came by.
    gathered: Vec<Option<TaskId>>,
    /// The groups whose gradients of the batch are there.
    is_there: Vec<bool>,
    /// Names of the groups.
    groups: Vec<&'a str>,
    plan: &'a StepPlan,
}

/// When the tasks of the batches of `plan` and of the update behind them run.
pub fn timing(step: &Step, plan: &StepPlan) -> Timing {
    let mut run = Run::new(step, plan);
    run.all();
    run.line.run()
}

impl<'a> Run<'a> {
    fn new(step: &'a Step<'a>, plan: &'a StepPlan) -> Self {
        let before = vec![Vec::new(); step.reps.len()];
        let groups = plan.shape.groups[0].iter().map(|group| &*group.name).collect::<Vec<_>>();
        Self {
            step,
            line: Timeline::default(),
            before,
            computed: Vec::new(),
            moves: Transfers::of(plan),
            gathered: vec![None; groups.len()],
            is_there: vec![false; groups.len()],
            groups,
            plan,
        }
    }
}

impl Run<'_> {
    pub(super) fn ranks(&self) -> Vec<usize> {
        (0..self.step.reps.len()).collect()
    }

    fn all(&mut self) {
        let (forward, head, backward) = self.step.passes();
        for _ in 0..self.plan.shape.batches {
            self.batch(forward, head, backward);
        }
        self.update();
    }

    fn batch(&mut self, forward: Pass, head: f64, backward: Pass) {
        let groups = self.groups.len();
        self.is_there.fill(false);
        for group in 0..groups {
            let needs = self.weights(group);
            match group {
                0 => self.products("embed", forward.embedding, [None, Some(Moves::Waited)], &needs),
                _ if group + 1 == groups => {
                    self.products("head and loss", head, [Some(Moves::Waited); 2], &needs);
                }
                _ => self.layer(&format!("layer {}", group - 1), forward, &needs),
            }
            self.ends_group();
        }
        self.reduce(groups - 1);
        for group in (0..groups - 1).rev() {
            let needs = self.weights(group);
            match group {
                0 => {
                    let moves = [Some(Moves::Waited), None];
                    self.products("embed backward", backward.embedding, moves, &needs);
                }
                _ => self.layer_backward(group - 1, backward, &needs),
            }
            self.ends_group();
            self.reduce(group);
        }
        for edge in self.moves.end_batch() {
            self.wait_for(edge);
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

    /// What the stage of a group waits for: its weights. Those that are gathered for it are, while the group before
    /// is computed.
    fn weights(&mut self, group: usize) -> Vec<TaskId> {
        let is_head = group + 1 == self.groups.len();
        let used = if is_head && self.plan.shape.tied { vec![0, group] } else { vec![group] };
        while let Some(edge) = self.moves.gather(&used) {
            let of = group_of(edge).expect("weights are elements of a group");
            // What begins beside no other stage is waited for.
            let ended = if edge.beside.is_some() { 2 } else { 1 };
            let ahead = self.computed.len().checked_sub(ended).map(|at| self.computed[at].clone());
            let name = format!("gather {}", self.groups[of]);
            let task = self.transfer(edge, name, Queue::Parameters, ahead.unwrap_or_default());
            self.gathered[of] = task;
        }
        used.iter().filter_map(|&group| self.gathered[group]).collect()
    }

    /// Sums what can be summed now that the gradients of a group are there.
    fn reduce(&mut self, group: usize) {
        self.is_there[group] = true;
        let after = self.computed.last().cloned().unwrap_or_default();
        while let Some(edge) = self.moves.sum(&self.is_there) {
            let name = match group_of(edge).map(|group| self.groups[group]) {
                None => "sum the norms".to_owned(),
                Some(named) if edge.kind == EdgeKind::ReduceScatter => format!("reduce {named}"),
                Some(named) if self.moves.is_of_copies(edge) => format!("all-reduce {named}"),
                Some(named) => format!("sum copies of {named}"),
            };
            self.transfer(edge, name, Queue::Gradients, after.clone());
        }
    }

    /// An edge that all ranks do at once.
    fn transfer(
        &mut self,
        edge: &Edge,
        name: String,
        queue: Queue,
        after: Vec<TaskId>,
    ) -> Option<TaskId> {
        let taken = self.moves.seconds(self.step.machine, edge, self.step.reps[0]);
        self.together(name, queue, taken, after)
    }

    /// A layer forward.
    fn layer(&mut self, name: &str, pass: Pass, needs: &[TaskId]) {
        let each = self.step.seconds_per_weight(pass, false);
        for product in Product::ALL {
            match product {
                Product::Qkv => self.attend(name, "attention", each, needs),
                _ => self.product(name, product, each, needs),
            }
        }
    }

    /// The product before attention, and attention, which is called `what`.
    fn attend(&mut self, name: &str, what: &str, each: f64, needs: &[TaskId]) {
        let (config, attention) = (self.step.config, format!("{name}: {what}"));
        let arrive = match keys_first(self.step.proven.plan(), config) {
            true => {
                let queries = config.attention_width() as f64 / config.qkv_width() as f64;
                let seconds = each * Product::Qkv.weight(config);
                let parts = [("keys, values", 1.0 - queries), ("queries", queries)];
                let [keys, queries] =
                    parts.map(|(of, share)| (format!("{name}: {of}"), seconds * share));
                self.products(&keys.0, keys.1, [None, None], needs);
                let arrive = self.keys(&attention);
                self.products(&queries.0, queries.1, [None, None], needs);
                arrive
            }
            false => {
                self.product(name, Product::Qkv, each, needs);
                self.keys(&attention)
            }
        };
        self.attention(&attention, &arrive);
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
            let again = format!("{name}, again");
            match product {
                Product::Qkv => self.attend(&again, "attention", each, needs),
                _ => self.product(&again, product, each, needs),
            }
        }
        self.gradients(&name, [Product::Down, Product::GateUp], each, needs, |_| None);
        let attention = |run: &mut Self| run.attention_backward(&format!("{name}: attention"));
        self.gradients(&name, [Product::Out, Product::Qkv], each, needs, attention);
    }

    /// From the gradient behind the second of two products of a layer to that before the first. `between` are
    /// the blocks between them; what it begins goes on while the gradient of the second's weight is computed.
    fn gradients(
        &mut self,
        name: &str,
        [last, first]: [Product; 2],
        each: f64,
        needs: &[TaskId],
        between: impl FnOnce(&mut Self) -> Option<TaskId>,
    ) {
        let product = |of: Product, what: &str| {
            (
                format!("{name}: gradient of {} {}", what, of.name()),
                each * of.weight(self.step.config),
            )
        };
        let [of_input, of_weight] = ["before", "weights,"].map(|what| product(last, what));
        let [weight_of_first, before_first] =
            ["weights,", "before"].map(|what| product(first, what));
        self.products(&of_input.0, of_input.1, [Some(Moves::Beside), None], needs);
        // The normalised stream that gradients of the first's weights read.
        let ahead = self.stream_of_all(&format!("{name}: stream again"));
        let moves = between(self);
        self.products(&of_weight.0, of_weight.1, [None, None], needs);
        self.all_after(moves);
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
        let (of_copies, totals): (Vec<&Edge>, Vec<&Edge>) =
            self.moves.last().into_iter().partition(|edge| group_of(edge).is_some());
        if let Some(&first) = of_copies.first() {
            let queues = [Queue::Compute, Queue::Gradients];
            let ranks = self.ranks().into_iter();
            let all = ranks.flat_map(|rank| queues.map(|queue| self.line.last(rank, queue)));
            let all = all.flatten().collect();
            // All groups at once.
            let own = |edge: &&Edge| self.moves.parts(edge, step.reps[0]).1.first().copied();
            let bytes = of_copies.iter().filter_map(own).sum();
            let members = self.moves.parts(first, step.reps[0]).0;
            let (seconds, span) = step.machine.gather_seconds(&members, bytes);
            let taken = (2.0 * seconds, span);
            self.together("all-reduce gradients".to_owned(), Queue::Gradients, taken, all);
        }
        let over = [MeshAxis::Shard, MeshAxis::Context];
        let parts = step.mesh().size_of(&over) as f64;
        let memory = step.account.memory();
        let moved = 2.0 * (memory.weights + memory.optimizer) as f64 + memory.gradients as f64;
        let rounds = !matches!(step.state, ParameterState::F32 | ParameterState::Exact);
        let block = if rounds { "update, rounded" } else { "update" };
        let norm = step.machine.moving_seconds("clip", memory.gradients as f64 / parts);
        let update = step.machine.moving_seconds(block, moved / parts);
        let summed: Vec<TaskId> =
            self.ranks().into_iter().filter_map(|r| self.line.last(r, Queue::Gradients)).collect();
        for rank in self.ranks() {
            let after = [&self.before[rank][..], &summed].concat();
            self.before[rank] = vec![self.compute(rank, "norm of gradients", norm, after)];
        }
        for edge in totals {
            let after = self.before.concat();
            let name = "sum the norms".to_owned();
            let agreed = self.transfer(edge, name, Queue::Gradients, after);
            self.all_after(agreed);
        }
        for rank in self.ranks() {
            let after = std::mem::take(&mut self.before[rank]);
            self.compute(rank, "update", update, after);
        }
    }
}
