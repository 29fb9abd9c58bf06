//! Attention over `context`: keys that arrive by stage, parts that are joined, and gradients of keys that return.

use foveate_shard::simulate::{JOIN, Queue, Span, TaskId};
use foveate_shard::{Part, Strategy};

use super::run::Run;

impl Run<'_> {
    /// Sends parts over `context`, when all ranks have what they send.
    fn exchange(
        &mut self,
        name: String,
        parts: impl Fn(usize) -> Vec<(usize, f64)>,
    ) -> Option<TaskId> {
        let step = self.step;
        let mut taken = (0.0, Span::Host);
        for &rank in step.reps {
            let (seconds, span) = step.machine.exchange_seconds(rank, &parts(rank));
            let span = if span == Span::Network { span } else { taken.1 };
            taken = (seconds.max(taken.0), span);
        }
        let after = self.before.concat();
        self.together(name, Queue::Keys, taken, after)
    }

    /// Seconds of a layer's attention on a rank.
    fn attention_seconds(&self, rank: usize, backward: bool) -> f64 {
        let step = self.step;
        let own = &step.proven.plan().ranks[step.reps[rank]];
        let entries = step.proven.proof().loads[step.reps[rank]] as f64 / step.layers as f64;
        let cells = &own.stages[0].compute;
        let queries = (cells.batch.len() * cells.heads.len() * cells.q.len()).max(1) as f64;
        let work = [entries, entries / queries];
        step.machine.attention_seconds(work, step.config.dim(), backward)
    }

    /// Seconds in which what a stage gives joins that of the stages before, in f32: the stage writes its part, and
    /// joining reads both and writes one, all queries in what is stored behind the last stage. Nothing with one stage.
    fn join_seconds(&self, rank: usize, stage: usize) -> f64 {
        let (step, plan) = (self.step, self.step.proven.plan());
        let stages = &plan.ranks[step.reps[rank]].stages;
        if stages.len() < 2 {
            return 0.0;
        }
        let numbers = |stage: usize| {
            let cells = &stages[stage].compute;
            (cells.batch.len() * cells.heads.len() * cells.q.len() * plan.shape.dim_v) as f64
        };
        let (all, stored) = (numbers(0), plan.shape.element.bytes() as f64);
        let bytes = match stage {
            // What one stage alone writes is in its rate.
            0 => (4.0 - stored) * all,
            _ if stage + 1 == stages.len() => 8.0 * numbers(stage) + (4.0 + stored) * all,
            _ => 16.0 * numbers(stage),
        };
        step.machine.moving_seconds(JOIN, bytes)
    }

    /// Sends the keys of each stage to the ranks whose queries see them.
    pub(super) fn keys(&mut self, name: &str) -> Vec<Option<TaskId>> {
        let plan = self.step.proven.plan();
        let arrive = |stage: usize| {
            self.exchange(format!("{name}: keys of stage {stage}"), |rank| {
                pairs(&plan.ranks[rank].stages[stage].receives)
            })
        };
        (0..plan.ranks[0].stages.len()).map(arrive).collect()
    }

    /// Attention forward, stage by stage, each behind its keys.
    pub(super) fn attention(&mut self, name: &str, arrive: &[Option<TaskId>]) {
        let step = self.step;
        for rank in self.ranks() {
            let all: u64 = step.tiles[rank].iter().sum();
            let seconds = self.attention_seconds(rank, false);
            let mut after = std::mem::take(&mut self.before[rank]);
            for (stage, &tiles) in step.tiles[rank].iter().enumerate() {
                after.extend(arrive[stage]);
                let part = seconds * tiles as f64 / all.max(1) as f64;
                let stage_name = format!("{name}, stage {stage}");
                after = vec![self.compute(rank, &stage_name, part, after)];
                let joined = self.join_seconds(rank, stage);
                if joined > 0.0 {
                    after =
                        vec![self.compute(rank, &format!("{name}, join {stage}"), joined, after)];
                }
            }
            self.before[rank] = after;
        }
        self.swap_back(name);
    }

    /// Attention backward; what returns of gradients is on its way.
    pub(super) fn attention_backward(&mut self, name: &str) -> Option<TaskId> {
        let plan = self.step.proven.plan();
        self.swap_back(name);
        for rank in self.ranks() {
            let seconds = self.attention_seconds(rank, true);
            let after = std::mem::take(&mut self.before[rank]);
            self.before[rank] = vec![self.compute(rank, name, seconds, after)];
        }
        self.exchange(format!("{name}: gradients of keys"), |rank| {
            pairs(&plan.ranks[rank].returned)
        })
    }

    /// With heads for tokens, results and their gradients move as queries do.
    fn swap_back(&mut self, name: &str) {
        let (step, plan) = (self.step, self.step.proven.plan());
        if plan.strategy != Strategy::HeadsForTokens {
            return;
        }
        let moved = self.exchange(format!("{name}: results"), |rank| {
            let own = &plan.ranks[rank].own;
            let rows = own.batch.len() * own.q.len() * own.heads.len() / step.reps.len();
            let bytes = (rows * plan.shape.dim_v * plan.shape.element.bytes()) as f64;
            let peers = step.reps.iter().filter(|&&peer| peer != rank);
            peers.map(|&peer| (peer, bytes)).collect()
        });
        self.all_after(moved);
    }
}

fn pairs(parts: &[Part]) -> Vec<(usize, f64)> {
    parts.iter().map(|part| (part.peer, part.bytes as f64)).collect()
}
