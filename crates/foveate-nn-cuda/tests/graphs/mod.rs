//! Steps whose passes are recorded as graphs, and passes that cannot be.

use std::path::PathBuf;
use std::{env, fs};

use foveate_gpu::trace::{self, Noted};
use foveate_nn::{
    Array, Batch, Blocks, ModelConfig, NnError, NnErrorKind, Part, PassIdentity, Recompute,
    Recording, RopeTable,
};
use foveate_nn_cuda::{Cuda, CudaArray, CudaTotals};
use foveate_tensor::DType;

use super::order::trouble;
use super::{LEN, ROWS, Steps, cuda, filled, inside, sizes, unfilled};

fn log() -> PathBuf {
    PathBuf::from(env::var_os("HOME").unwrap()).join("launches")
}

/// What `work` launched.
pub fn launched(work: impl FnOnce()) -> Vec<String> {
    let _ = fs::remove_file(log());
    work();
    let text = fs::read_to_string(log()).unwrap();
    text.lines().map(str::to_owned).collect()
}

pub fn recorded(steps: Steps) -> Steps {
    steps.model.record_passes();
    assert_eq!(steps.model.recording(), Recording::On);
    steps
}

/// How many kernels each graph among these lines has.
fn graphs(lines: &[String]) -> Vec<usize> {
    let kernels =
        |line: &String| line.strip_prefix("graph of ")?.strip_suffix(" kernels")?.parse().ok();
    lines.iter().filter_map(kernels).collect()
}

#[test]
fn recorded_steps_queue_one_graph_a_batch_with_the_work_of_steps_that_are_not() {
    let name = "graphs::recorded_steps_queue_one_graph_a_batch_with_the_work_of_steps_that_are_not";
    if !inside(name) {
        return;
    }
    for (batches, recompute) in [(2, Recompute::None), (1, Recompute::Mlp), (3, Recompute::Full)] {
        trace::start();
        let mut steps = recorded(Steps::sharing(batches, false));
        // Rotations of all positions are there, so none come later.
        evaluate(&mut steps, 1);
        let mut notes = trace::stop();
        let mut lines = Vec::new();
        for number in 0..20 {
            lines.push(launched(|| {
                let [of_step, read] = steps.run(recompute);
                let waits = of_step.iter().filter(|n| matches!(n, Noted::Waited { .. })).count();
                let more = of_step.iter().filter(|n| matches!(n, Noted::Allocated { .. })).count();
                assert!(waits == 0 && (number == 0 || more == 0), "step {number}: {waits}, {more}");
                notes.extend(of_step.into_iter().chain(read));
            }));
        }
        assert_eq!(steps.model.recording(), Recording::On);
        assert_eq!(trouble(&notes), [""; 0], "{batches} {recompute:?}");
        // The first step makes what plans keep, and blocks of the second are timed, as those of every sixteenth.
        let [by_block, timed, once, twice, replayed, ..] = &lines[..] else { unreachable!() };
        assert!(graphs(by_block).is_empty());
        assert_eq!(timed, by_block);
        // What is recorded is what steps queue that are not recorded, in their order.
        let kernels = |lines: &[String]| -> Vec<String> {
            lines.iter().filter(|line| !line.starts_with("graph of")).cloned().collect()
        };
        assert_eq!(kernels(once), *by_block);
        // The second and the third batch of a step are of one pass, and it was recorded twice before.
        assert!(batches == 3 || kernels(twice) == *by_block);
        assert_eq!([once, twice].map(|lines| graphs(lines).len()), [batches; 2]);
        let update = ["fv_squares", "fv_factor", "fv_update"];
        let all = graphs(once).iter().sum::<usize>();
        assert_eq!(all + update.len(), by_block.len());
        for (number, lines) in lines.iter().enumerate().skip(4) {
            if number % 16 == 1 {
                assert_eq!(lines, by_block, "step {number}");
                continue;
            }
            assert_eq!(lines, replayed, "step {number}");
            assert_eq!(graphs(lines), graphs(once), "step {number}");
            let rest = &lines[batches..];
            assert!(rest.len() == 3 && rest.iter().zip(update).all(|(l, u)| l.starts_with(u)));
        }
    }
}

/// A batch of `rows` rows, for an evaluation.
fn evaluate(steps: &mut Steps, rows: usize) {
    let all = rows * LEN;
    let numbers: Vec<i32> = (0..all as i32).map(|i| i % LEN as i32).collect();
    let tokens: Vec<u32> = numbers.iter().map(|&i| i as u32 % 50).collect();
    let batch = Batch {
        rows,
        len: LEN,
        tokens: &tokens,
        labels: &numbers,
        documents: &vec![0; all],
        positions: &numbers,
        live_pairs: &[(all * LEN) as f64],
        order: &[],
    };
    steps.model.loss_over(&batch, None, Some(&mut steps.state.0)).unwrap();
}

#[test]
fn evaluations_and_other_lengths_of_documents_between_steps_leave_graphs_right() {
    let name =
        "graphs::evaluations_and_other_lengths_of_documents_between_steps_leave_graphs_right";
    if !inside(name) {
        return;
    }
    trace::start();
    let mut steps = recorded(Steps::new());
    let mut notes = trace::stop();
    let mut replays = 0;
    for number in 0..40 {
        // Queries see more keys now and then, for which attention is planned anew.
        steps.mean_kv_len = if number % 7 == 3 { 30 } else { 8 };
        if number % 5 == 2 {
            trace::start();
            // As many rows as steps have, fewer, and more, for which the arena grows.
            let rows = [ROWS, 1, ROWS + 2][number / 5 % 3];
            evaluate(&mut steps, rows);
            notes.extend(trace::stop());
        }
        let lines = launched(|| notes.extend(steps.run(Recompute::None).into_iter().flatten()));
        replays += usize::from(lines.len() == 2 + 3);
    }
    assert_eq!(steps.model.recording(), Recording::On);
    assert_eq!(trouble(&notes), [""; 0]);
    assert!(replays > 20, "{replays}");
}

#[test]
fn a_profile_and_arrays_apart_run_block_by_block() {
    if !inside("graphs::a_profile_and_arrays_apart_run_block_by_block") {
        return;
    }
    let mut steps = recorded(Steps::new());
    for _ in 0..5 {
        steps.run(Recompute::None);
    }
    steps.model.profile(true).unwrap();
    let lines = launched(|| drop(steps.run(Recompute::None)));
    assert!(graphs(&lines).is_empty(), "{lines:?}");
    let times = steps.model.block_times();
    assert_eq!(times.iter().filter(|time| time.block == "attention").count(), 4);
    steps.model.profile(false).unwrap();
    let lines = launched(|| drop(steps.run(Recompute::None)));
    assert_eq!(graphs(&lines).len(), 2);

    let mut apart = Steps::of(filled(unfilled(cuda().with_arrays_apart())));
    apart.model.record_passes();
    let Recording::Off(reason) = apart.model.recording() else { panic!("they are recorded") };
    assert_eq!(reason, "arrays of a pass have memory of their own");
    apart.run(Recompute::None);
}

/// Passes over batches whose `work` is given the batch's number.
struct Passes {
    cuda: Cuda,
    table: CudaArray,
    out: CudaArray,
    count: usize,
}

fn no_kind() -> NnError {
    NnErrorKind::Device("a pass of no kind".into()).into()
}

type Work<'a> = &'a dyn Fn(&mut Cuda, &mut CudaArray, usize) -> Result<(), NnError>;

impl Passes {
    const WIDTH: usize = 40;

    fn new() -> Self {
        let (mut cuda, mut table, mut out) = (cuda(), CudaArray::default(), CudaArray::default());
        cuda.resize("a table", &mut table, DType::BF16, 70 * Self::WIDTH).unwrap();
        cuda.resize("rows", &mut out, DType::BF16, ROWS * LEN * Self::WIDTH).unwrap();
        cuda.clear(&mut table).unwrap();
        cuda.record_passes();
        Self { cuda, table, out, count: 0 }
    }

    /// Queues the embedding of a batch, with a scale of its own if so asked, and `more`.
    fn queue(&mut self, scale: f32, more: Work<'_>) -> Result<(), NnError> {
        let Self { cuda, table, out, count } = self;
        *count += 1;
        let all = ROWS * LEN;
        let tokens: Vec<u32> = (0..all).map(|i| ((i * *count) % 70) as u32).collect();
        let numbers = vec![0; all];
        let batch = Batch {
            rows: ROWS,
            len: LEN,
            tokens: &tokens,
            labels: &numbers,
            documents: &numbers,
            positions: &numbers,
            live_pairs: &[],
            order: &[],
        };
        let tables: [std::sync::Arc<RopeTable>; 0] = [];
        let batch = cuda.upload(&batch, &tables)?;
        let identity = PassIdentity::new(vec![7, table.address(), out.address()], &batch, &[]);
        let (table, number) = (&*table, *count);
        let mut work = |cuda: &mut Cuda, _: &mut CudaTotals| {
            cuda.embed(&batch, None, Part::whole(table), Self::WIDTH, scale, out)?;
            more(cuda, out, number)
        };
        let mut totals = cuda.totals()?;
        cuda.queue_pass(&identity, &mut totals, &mut work)?;
        cuda.read(totals).map(drop)
    }

    fn reason(&self) -> String {
        match self.cuda.recording() {
            Recording::On => "recorded".into(),
            Recording::Off(reason) => reason,
        }
    }
}

#[test]
fn passes_that_give_kernels_numbers_of_a_batch_are_never_replayed() {
    if !inside("graphs::passes_that_give_kernels_numbers_of_a_batch_are_never_replayed") {
        return;
    }
    let nothing: Work<'_> = &|_, _, _| Ok(());
    let mut passes = Passes::new();
    for _ in 0..20 {
        let scale = 1.0 + passes.count as f32;
        let lines = launched(|| passes.queue(scale, nothing).unwrap());
        // Each batch is embedded as it is: its graph is new, or there is none.
        assert_eq!(lines[0], "fv_embedding [66, 1, 1] x 128");
    }
    let reason = passes.reason();
    let start = "what batches queue differs: operation 0 fv_embedding has 0x";
    assert!(reason.starts_with(start), "{reason}");
    // The same scale each time is replayed.
    let mut passes = Passes::new();
    let lines: Vec<Vec<String>> =
        (0..10).map(|_| launched(|| passes.queue(1.0, nothing).unwrap())).collect();
    assert_eq!(passes.reason(), "recorded");
    assert_eq!(lines[9], ["graph of 1 kernels"]);
}

#[test]
fn a_pass_that_is_other_than_its_record_ends_the_run() {
    if !inside("graphs::a_pass_that_is_other_than_its_record_ends_the_run") {
        return;
    }
    let nothing: Work<'_> = &|_, _, _| Ok(());
    let mut passes = Passes::new();
    for number in 1..=17 {
        passes.queue(1.0, nothing).unwrap_or_else(|e| panic!("{number}: {e}"));
    }
    // Blocks of the eighteenth are timed, and so it runs.
    let said = passes.queue(2.0, nothing).unwrap_err().to_string();
    assert!(said.contains("a recorded pass is not what its blocks queue"), "{said}");
    assert!(said.contains("operation 0 fv_embedding has 0x"), "{said}");
}

/// Passes without an update are no steps, so none of these is timed.
#[test]
fn a_record_is_compared_where_no_step_is_timed_too() {
    if !inside("graphs::a_record_is_compared_where_no_step_is_timed_too") {
        return;
    }
    let nothing: Work<'_> = &|_, _, _| Ok(());
    let mut passes = Passes::new();
    for number in 1..=3 + 256 {
        passes.queue(1.0, nothing).unwrap_or_else(|e| panic!("{number}: {e}"));
        drop(passes.cuda.totals().unwrap());
    }
    let said = passes.queue(2.0, nothing).unwrap_err().to_string();
    assert!(said.contains("a recorded pass is not what its blocks queue"), "{said}");
    assert!(passes.reason().starts_with("a pass failed: "), "{}", passes.reason());
}

#[test]
fn what_cannot_be_recorded_runs_and_says_why() {
    if !inside("graphs::what_cannot_be_recorded_runs_and_says_why") {
        return;
    }
    // The host waits for what it reads.
    let waits: Work<'_> = &|cuda, out, _| {
        let mut read = [0.0];
        cuda.download(Part { array: out, place: 0..1 }, &mut read)
    };
    let mut passes = Passes::new();
    for number in 0..8 {
        let lines = launched(|| passes.queue(1.0, waits).unwrap());
        // Those that are tried in vain are listed twice; the second is timed, and others run in between.
        let tried = [2, 4, 6].contains(&number);
        assert_eq!(lines, vec!["fv_embedding [66, 1, 1] x 128"; if tried { 2 } else { 1 }]);
    }
    assert!(passes.reason().starts_with("waiting for the device cannot be recorded in a graph"));

    // Work that fails does so, too, where it is recorded.
    let fails: Work<'_> = &|_, _, number| match number {
        4.. => Err(no_kind()),
        _ => Ok(()),
    };
    let mut passes = Passes::new();
    for _ in 0..3 {
        passes.queue(1.0, fails).unwrap();
    }
    assert_eq!(passes.queue(1.0, fails).unwrap_err().to_string(), no_kind().to_string());
}

/// An array of so many MiB, and back.
fn takes(cuda: &mut Cuda, mib: usize) -> Result<(), NnError> {
    cuda.resize("an array", &mut CudaArray::default(), DType::F32, mib << 18)
}

#[test]
fn a_pass_that_lacked_memory_when_it_was_recorded_runs_and_is_recorded_again() {
    let name = "graphs::a_pass_that_lacked_memory_when_it_was_recorded_runs_and_is_recorded_again";
    if !inside(name) {
        return;
    }
    let grows: Work<'_> = &|cuda, _, number| takes(cuda, if number < 3 { 1 } else { 9 });
    let mut passes = Passes::new();
    let lines: Vec<Vec<String>> =
        (0..9).map(|_| launched(|| passes.queue(1.0, grows).unwrap())).collect();
    assert_eq!(passes.reason(), "recorded");
    assert_eq!(lines[2].len(), 2, "its recording failed, and it ran");
    assert_eq!(lines[8], ["graph of 1 kernels"]);
}

#[test]
fn passes_that_are_forgotten_leave_their_memory_to_others() {
    if !inside("graphs::passes_that_are_forgotten_leave_their_memory_to_others") {
        return;
    }
    // Of 64 MiB.
    let large: Work<'_> = &|cuda, _, _| takes(cuda, 30);
    let mut passes = Passes::new();
    for _ in 0..6 {
        passes.queue(1.0, large).unwrap();
    }
    assert_eq!(passes.reason(), "recorded");
    let mut array = CudaArray::default();
    let mut take = |cuda: &mut Cuda| cuda.resize("more", &mut array, DType::F32, 40 << 18);
    assert!(take(&mut passes.cuda).is_err(), "graphs name the memory");
    passes.cuda.forget_passes();
    take(&mut passes.cuda).unwrap();
    assert_eq!(passes.reason(), "recorded");
}

#[test]
fn blocks_of_every_sixteenth_step_are_timed_whatever_evaluations_lie_between() {
    let name = "graphs::blocks_of_every_sixteenth_step_are_timed_whatever_evaluations_lie_between";
    if !inside(name) {
        return;
    }
    let mut steps = recorded(Steps::new());
    let mut by_block = Vec::new();
    for number in 0..34 {
        let (mut seconds, steps) = (None, &mut steps);
        let lines = launched(|| {
            let totals = steps.queue(Recompute::None);
            evaluate(steps, 1);
            seconds = steps.model.read(totals).unwrap().seconds;
        });
        if graphs(&lines).is_empty() {
            by_block.push(number);
        }
        // Those of a step are its own: none where it was not timed.
        assert_eq!(seconds.is_some(), number % 16 == 1, "step {number}");
        assert!(seconds.is_none_or(|seconds| seconds.optimizer > 0.0), "step {number}");
    }
    assert_eq!(by_block, [0, 1, 17, 33]);
}

#[test]
fn a_model_too_large_for_its_places_grows_and_records_anew() {
    if !inside("graphs::a_model_too_large_for_its_places_grows_and_records_anew") {
        return;
    }
    let (config, attention) = sizes();
    let config = ModelConfig { intermediate_size: 400, ..config };
    let model = foveate_nn::Model::unfilled_on(cuda(), config, &attention).unwrap();
    trace::start();
    let mut steps = recorded(Steps::of(filled(model)));
    let mut notes = trace::stop();
    // Less is kept at first, so the arena grows when more is.
    for recompute in [Recompute::Full, Recompute::None, Recompute::Full] {
        for _ in 0..6 {
            notes.extend(steps.run(recompute).into_iter().flatten());
        }
        let lines = launched(|| drop(steps.run(recompute)));
        assert_eq!(graphs(&lines).len(), 2, "{recompute:?}: {lines:?}");
    }
    assert_eq!(trouble(&notes), [""; 0]);
}
