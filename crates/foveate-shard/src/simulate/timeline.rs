//! Tasks on the queues of ranks, and when each would run.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BinaryHeap};

use serde::Serialize;

use super::machine::Span;

/// A queue of a rank.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Queue {
    /// Kernels.
    Compute,
    /// Weights that are gathered.
    Parameters,
    /// Gradients that are summed.
    Gradients,
    /// Keys, and their gradients, over `context`.
    Keys,
    /// The stream between blocks, over `tensor`.
    Stream,
}

impl Queue {
    /// All of them.
    pub const ALL: [Self; 5] =
        [Self::Compute, Self::Parameters, Self::Gradients, Self::Keys, Self::Stream];

    /// Its name.
    pub fn name(self) -> &'static str {
        match self {
            Self::Compute => "compute",
            Self::Parameters => "parameters",
            Self::Gradients => "gradients",
            Self::Keys => "keys",
            Self::Stream => "stream",
        }
    }
}

/// A task, by its number.
pub type TaskId = usize;

/// What some ranks do together.
#[derive(Clone, Debug, PartialEq)]
pub struct Task {
    /// What it is, for a trace.
    pub name: String,
    /// The ranks that take part, each with its queue.
    pub ranks: Vec<usize>,
    /// The queue.
    pub queue: Queue,
    /// How long it takes once all can begin.
    pub seconds: f64,
    /// The links that it takes alone, if any.
    pub span: Option<Span>,
    /// Tasks that end before it begins.
    pub after: Vec<TaskId>,
}

/// Tasks, in the order of their queues.
#[derive(Clone, Debug, Default)]
pub struct Timeline {
    tasks: Vec<Task>,
    last: BTreeMap<(usize, Queue), TaskId>,
}

/// When a task ran.
#[derive(Clone, Debug, PartialEq)]
pub struct Ran {
    /// The task.
    pub task: Task,
    /// When it began, in seconds.
    pub began: f64,
    /// When it ended.
    pub ended: f64,
    /// Of the tasks that it followed, the one that ended last.
    cause: Option<TaskId>,
}

/// Time in which a rank computes nothing, by the queue that it waits for.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Idle {
    /// The queue.
    pub queue: Queue,
    /// Seconds.
    pub seconds: f64,
}

/// When all tasks ran.
#[derive(Clone, Debug)]
pub struct Timing {
    /// Tasks, in the order in which they were given.
    pub ran: Vec<Ran>,
}

impl Timeline {
    /// Adds a task behind those of its queue, on every rank that takes part.
    pub fn add(&mut self, mut task: Task) -> TaskId {
        let id = self.tasks.len();
        for &rank in &task.ranks {
            task.after.extend(self.last.insert((rank, task.queue), id));
        }
        task.after.sort_unstable();
        task.after.dedup();
        self.tasks.push(task);
        id
    }

    /// The last task of a rank's queue so far.
    pub fn last(&self, rank: usize, queue: Queue) -> Option<TaskId> {
        self.last.get(&(rank, queue)).copied()
    }

    /// Runs the tasks.
    pub fn run(self) -> Timing {
        let Self { tasks, .. } = self;
        let mut left: Vec<usize> = tasks.iter().map(|task| task.after.len()).collect();
        let mut behind = vec![Vec::new(); tasks.len()];
        for (id, task) in tasks.iter().enumerate() {
            // A task follows earlier ones only, so none waits for itself.
            task.after.iter().for_each(|&before| behind[before].push(id));
        }
        // Seconds as ordered bits: all are 0 or more.
        let mut ready = BinaryHeap::new();
        let push = |ready: &mut BinaryHeap<_>, at: f64, id: TaskId| {
            ready.push(Reverse((at.to_bits(), id)));
        };
        (0..tasks.len()).filter(|&id| left[id] == 0).for_each(|id| push(&mut ready, 0.0, id));
        let mut ran: Vec<Option<Ran>> = vec![None; tasks.len()];
        let mut cause: Vec<(f64, Option<TaskId>)> = vec![(0.0, None); tasks.len()];
        let mut links: BTreeMap<(usize, Span), f64> = BTreeMap::new();
        while let Some(Reverse((at, id))) = ready.pop() {
            let task = tasks[id].clone();
            let mut began = f64::from_bits(at);
            let lanes =
                task.span.iter().flat_map(|&span| task.ranks.iter().map(move |&r| (r, span)));
            let lanes: Vec<(usize, Span)> = lanes.collect();
            for lane in &lanes {
                began = began.max(links.get(lane).copied().unwrap_or(0.0));
            }
            let ended = began + task.seconds;
            links.extend(lanes.into_iter().map(|lane| (lane, ended)));
            for &next in &behind[id] {
                if cause[next].1.is_none() || ended > cause[next].0 {
                    cause[next] = (ended, Some(id));
                }
                left[next] -= 1;
                if left[next] == 0 {
                    push(&mut ready, cause[next].0, next);
                }
            }
            ran[id] = Some(Ran { task, began, ended, cause: cause[id].1 });
        }
        Timing { ran: ran.into_iter().flatten().collect() }
    }
}

impl Timing {
    /// Seconds from the first task to the end of the last.
    pub fn seconds(&self) -> f64 {
        self.ran.iter().map(|ran| ran.ended).fold(0.0, f64::max)
    }

    /// Seconds that a queue of a rank is at work.
    pub fn busy(&self, rank: usize, queue: Queue) -> f64 {
        let own = self.ran.iter().filter(|r| r.task.queue == queue && r.task.ranks.contains(&rank));
        own.map(|ran| ran.ended - ran.began).sum()
    }

    /// What a rank's kernels wait for: the time between two of them, and behind the last, counts for
    /// the queue of the task that ended last before the next could begin. What waits for another
    /// rank's kernels counts for the transfer between them.
    pub fn idle(&self, rank: usize) -> Vec<Idle> {
        let mut idle = BTreeMap::<Queue, f64>::new();
        let mut at = 0.0;
        for ran in &self.ran {
            if ran.task.queue != Queue::Compute || !ran.task.ranks.contains(&rank) {
                continue;
            }
            let queue = ran.cause.map_or(Queue::Compute, |cause| self.ran[cause].task.queue);
            *idle.entry(queue).or_default() += (ran.began - at).max(0.0);
            at = ran.ended;
        }
        let end = self.ran.iter().max_by(|a, b| a.ended.total_cmp(&b.ended));
        if let Some(end) = end {
            *idle.entry(end.task.queue).or_default() += end.ended - at;
        }
        idle.into_iter().map(|(queue, seconds)| Idle { queue, seconds }).collect()
    }

    /// A trace for Chrome or ui.perfetto.dev: a process for each rank, a row for each queue.
    pub fn trace(&self) -> serde_json::Value {
        let events = self.ran.iter().filter(|ran| ran.ended > ran.began).flat_map(|ran| {
            ran.task.ranks.iter().map(|rank| {
                serde_json::json!({
                    "name": ran.task.name,
                    "ph": "X",
                    "pid": rank,
                    "tid": ran.task.queue.name(),
                    "ts": ran.began * 1e6,
                    "dur": (ran.ended - ran.began) * 1e6,
                })
            })
        });
        serde_json::json!({ "traceEvents": events.collect::<Vec<_>>() })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn task(queue: Queue, ranks: &[usize], seconds: f64, after: &[TaskId]) -> Task {
        let span = (queue != Queue::Compute).then_some(Span::Host);
        let (name, ranks, after) = (queue.name().to_owned(), ranks.to_vec(), after.to_vec());
        Task { name, ranks, queue, seconds, span, after }
    }

    #[test]
    fn a_transfer_hides_behind_kernels_until_one_needs_it() {
        let mut line = Timeline::default();
        let first = line.add(task(Queue::Compute, &[0], 2.0, &[]));
        let gather = line.add(task(Queue::Parameters, &[0], 5.0, &[]));
        line.add(task(Queue::Compute, &[0], 1.0, &[first, gather]));
        let timing = line.run();
        assert_eq!(timing.seconds(), 6.0);
        assert_eq!(timing.busy(0, Queue::Compute), 3.0);
        let idle = timing.idle(0);
        let waits: Vec<_> = idle.iter().filter(|i| i.seconds > 0.0).collect();
        assert_eq!(waits, [&Idle { queue: Queue::Parameters, seconds: 3.0 }]);
    }

    #[test]
    fn a_collective_begins_with_the_last_rank_and_links_carry_one_at_a_time() {
        let mut line = Timeline::default();
        let slow = line.add(task(Queue::Compute, &[1], 4.0, &[]));
        line.add(task(Queue::Compute, &[0], 1.0, &[]));
        let keys = line.add(task(Queue::Keys, &[0, 1], 1.0, &[slow]));
        // Given later, ready sooner: it has the link first.
        let weights = line.add(task(Queue::Parameters, &[0], 3.5, &[]));
        let next = line.add(task(Queue::Compute, &[0], 1.0, &[keys]));
        let timing = line.run();
        let began = |id: TaskId| timing.ran[id].began;
        assert_eq!([began(weights), began(keys), began(next)], [0.0, 4.0, 5.0]);
        let trace = timing.trace();
        assert_eq!(trace["traceEvents"].as_array().unwrap().len(), 6);
    }

    #[test]
    fn what_is_behind_the_last_kernel_counts_for_its_queue() {
        let mut line = Timeline::default();
        let kernel = line.add(task(Queue::Compute, &[0], 1.0, &[]));
        line.add(task(Queue::Gradients, &[0], 2.0, &[kernel]));
        let idle = line.run().idle(0);
        assert!(idle.contains(&Idle { queue: Queue::Gradients, seconds: 2.0 }), "{idle:?}");
    }
}
