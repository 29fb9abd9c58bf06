//! What steps of a model queue, on a driver made for tests that loads kernels and runs none
//! (`driver/cuda.c`), with products by a cuBLASLt made for tests: their order, and what they do with
//! memory. The kernels are compiled, so there is nothing to see on a machine without NVRTC.

#[path = "ranks/context.rs"]
mod context;
#[path = "../../foveate-gpu/tests/driver/mod.rs"]
mod driver;
mod graphs;
mod labelled;
mod lost_rank;
mod memory;
mod offload;
mod order;
mod ranks;
mod state_copies;

use std::collections::BTreeMap;
use std::sync::Arc;
use std::{env, fs};

use context::{Held, How, Planned, plans};
use foveate_gpu::trace::{self, Noted};
use foveate_nn::{
    AdamW, AttentionConfig, Batch, Carrier, ContextAttention, ContextMoves, ContextPlan, Cutting,
    Gradients, IGNORE, KEYS_WAIT, LearnedBuffer, Model, ModelConfig, Moment, Moments, NnError,
    OptimizerStep, ParameterState, Peers, ProgramConfig, Recomputation, Recompute, RopePairing,
    Rule, StepKind, StepRanks, TensorPart, Treatment,
};
use foveate_nn_cuda::{Cuda, CudaArray, CudaSpans, CudaTotals};
use foveate_tensor::DType;
use order::flow::flow;
use order::trouble;
use ranks::TestRank;

/// Whether this is the process with the libraries; otherwise starts it for the test `name`.
fn inside(name: &str) -> bool {
    inside_with(name, &[])
}

/// The same, with variables for the libraries.
fn inside_with(name: &str, variables: &[(&str, &str)]) -> bool {
    // Kernels that have not changed are not compiled again.
    let cache = concat!(env!("CARGO_TARGET_TMPDIR"), "/kernels");
    let libraries = ["nvrtc", "cublaslt", "nccl"];
    // Communicators have to be made with so many blocks.
    let always = [("FOVEATE_CACHE_DIR", cache), ("BLOCKS", "6")];
    let variables = [&always[..], variables].concat();
    driver::inside(name, &libraries, &["-DLOADS"], &variables)
}

const RULE: Rule = Rule::AdamW(AdamW { beta1: 0.9, beta2: 0.95, eps: 1e-8, weight_decay: 0.1 });
const VOCAB: usize = 70;
const ROWS: usize = 2;
const LEN: usize = 33;

/// [`unfilled`], with its first values.
fn model() -> Model<Cuda> {
    filled(unfilled(cuda()))
}

fn filled(mut model: Model<Cuda>) -> Model<Cuda> {
    model.draw_missing(1).unwrap();
    model
}

fn cuda() -> Cuda {
    Cuda::new(0, ParameterState::Exact.into(), true).unwrap()
}

/// Two layers, a learned bias.
fn sizes() -> (ModelConfig, AttentionConfig) {
    let config = ModelConfig {
        vocab_size: VOCAB,
        hidden_size: 40,
        intermediate_size: 56,
        num_hidden_layers: 2,
        num_attention_heads: 4,
        num_key_value_heads: Some(2),
        head_dim: Some(64),
        rms_norm_eps: 1e-5,
        rope_theta: 10_000.0,
        rope_scaling: None,
        rope_pairing: RopePairing::default(),
        max_position_embeddings: 128,
        tie_word_embeddings: false,
        architecture: Default::default(),
    };
    let bias = LearnedBuffer { shape: vec![4], init: 0.0, std: 0.0 };
    let attention = ProgramConfig {
        mask: "causal & document".into(),
        score: Some("score + bias[h]".into()),
        learned: BTreeMap::from([("bias".to_owned(), bias)]),
        ..ProgramConfig::default()
    };
    (config, attention.into())
}

fn unfilled(cuda: Cuda) -> Model<Cuda> {
    let (config, attention) = sizes();
    Model::unfilled_on(cuda, config, &attention).unwrap()
}

/// A model and the state of its optimiser.
struct Steps {
    model: Model<Cuda>,
    state: State,
    /// Of a step.
    batches: usize,
    /// Keys that a query of them sees.
    mean_kv_len: usize,
    count: u64,
    /// The rank of those that share rows, of how many, and how their keys and queries meet.
    context: Option<(usize, usize, How)>,
    /// Whether stages of batches have other numbers of queries and keys.
    varies: bool,
    /// Whether gradients are summed over ranks with the same parameters.
    replicas: bool,
    /// Of eleven tokens so many have a label.
    labelled: usize,
}

/// Later stages have some queries more, as they would where others see their keys.
fn with_more_queries(plan: &mut ContextPlan, turn: usize) {
    let ContextMoves::Keys(stages) = &mut plan.moves else { return };
    for stage in stages.iter_mut().skip(1).filter(|stage| !stage.queries.is_empty()) {
        stage.queries.start -= turn * 5 % (stage.queries.start + 1);
    }
}

type State = (Gradients<CudaArray>, Moments<CudaArray>, CudaSpans);

impl Steps {
    fn new() -> Self {
        Self::of(model())
    }

    /// Of a rank that shares parameters.
    fn of_rank(rank: &TestRank) -> Self {
        let mut model = unfilled(cuda());
        let cutting = Cutting { parts: rank.ranks(), ..Cutting::WHOLE };
        model.cut(cutting, rank.rank(), rank).unwrap();
        model.step_with(rank.step_ranks(true));
        model.draw_missing(1).unwrap();
        Self::of(model)
    }

    /// Of a rank that shares parameters and rows.
    fn of_context(rank: &TestRank, how: How) -> Self {
        let mut steps = Self::of_rank(rank);
        assert!(steps.model.context(Box::new(rank.clone()), rank.carrier).unwrap());
        steps.context = Some((rank.rank(), rank.ranks(), how));
        steps
    }

    /// Of a rank of `tensor`.
    fn of_part(rank: &TestRank) -> Self {
        Self::of_part_of(sizes(), rank)
    }

    fn of_part_of((config, attention): (ModelConfig, AttentionConfig), rank: &TestRank) -> Self {
        let part = TensorPart::of(&config, rank.rank(), rank.ranks()).unwrap();
        let rank = rank.with_kv_holders(part.kv_holders.clone());
        let mut model = Model::unfilled_part(cuda(), config, &attention, &|_| false, part).unwrap();
        model.tensor(&rank).unwrap();
        model.step_with(rank.step_ranks(rank.rank() == 0));
        model.draw_missing(1).unwrap();
        Self::of(model)
    }

    /// Of a rank that holds a copy of the parameters.
    fn of_replica(rank: &TestRank) -> Self {
        let mut steps = Self::of(model());
        steps.model.replicas(Box::new(rank.clone()), rank.carrier).unwrap();
        let counts_parameters = rank.rank() == 0;
        let ranks = StepRanks { counts_parameters, cut: false, ..rank.step_ranks(true) };
        steps.model.step_with(ranks);
        Self { replicas: true, ..steps }
    }

    /// With one batch a step, whose arrays share memory, that of gradients among it; or with two, or with
    /// memory of its own for each array.
    fn sharing(batches: usize, apart: bool) -> Self {
        let cuda = if apart { cuda().with_arrays_apart() } else { cuda() };
        let model = filled(unfilled(cuda));
        if batches == 1 { Self::of_one_batch(model) } else { Self { batches, ..Self::of(model) } }
    }

    /// With two batches a step.
    fn of(model: Model<Cuda>) -> Self {
        let gradients = model.gradients().unwrap();
        Self::with(model, gradients, 2)
    }

    fn of_one_batch(model: Model<Cuda>) -> Self {
        let gradients = model.gradients_of_one_batch().unwrap();
        Self::with(model, gradients, 1)
    }

    fn with(model: Model<Cuda>, gradients: Gradients<CudaArray>, batches: usize) -> Self {
        let state = (gradients, model.moments(&RULE).unwrap(), model.spans(Treatment::of).unwrap());
        let (mean_kv_len, count) = (8, 0);
        let (context, varies, replicas, labelled) = (None, false, false, 11);
        Self { model, state, batches, mean_kv_len, count, context, varies, replicas, labelled }
    }

    /// Queues a step and reads its totals; gives what was noted of both.
    fn run(&mut self, recompute: impl Into<Recomputation>) -> [Vec<Noted>; 2] {
        trace::start();
        let totals = self.queue(recompute);
        let queued = trace::stop();
        trace::start();
        self.model.read(totals).unwrap();
        [queued, trace::stop()]
    }

    /// Queues a step.
    fn queue(&mut self, recompute: impl Into<Recomputation>) -> CudaTotals {
        self.try_queue(recompute).unwrap()
    }

    fn try_queue(&mut self, recompute: impl Into<Recomputation>) -> Result<CudaTotals, NnError> {
        let recompute = recompute.into();
        self.count += 1;
        let Self { model, state, batches, mean_kv_len, count, context, varies, .. } = self;
        let label_of = |i: usize, n: usize| if i % 11 < self.labelled { n as i32 } else { IGNORE };
        let (gradients, moments, spans) = state;
        let mut totals = model.totals()?;
        model.clear(gradients);
        for number in 0..*batches {
            // Other words and documents in every batch.
            let at = |i: usize| i * 7 + number * 5 + *count as usize;
            let tokens: Vec<u32> = (0..ROWS * LEN).map(|i| (at(i * i) % VOCAB) as u32).collect();
            let labels: Vec<i32> = (0..ROWS * LEN).map(|i| label_of(i, at(i) % VOCAB)).collect();
            let len = 8 + number + *count as usize;
            let documents: Vec<i32> = (0..ROWS * LEN).map(|i| (i % LEN / len) as i32).collect();
            let positions: Vec<i32> = (0..ROWS * LEN).map(|i| (i % LEN % len) as i32).collect();
            let batch = Batch {
                rows: ROWS,
                len: LEN,
                tokens: &tokens,
                labels: &labels,
                documents: &documents,
                positions: &positions,
                live_pairs: &[(*mean_kv_len * ROWS * LEN) as f64],
                order: &[],
            };
            let Some((rank, ranks, how)) = *context else {
                model.accumulate(&batch, gradients, recompute, &mut totals)?;
                continue;
            };
            let turn = *count as usize * 2 + number;
            let chunk = if *varies { [1, 4, 11][turn % 3] } else { 5 };
            let mut plan =
                plans(ranks, how, [ROWS, LEN], chunk, &documents, [4, 2]).swap_remove(rank);
            if *varies {
                let plan = Arc::get_mut(&mut plan).unwrap();
                with_more_queries(plan, turn);
                plan.mean_kv_len = 9 + turn * turn * 7 % 22;
            }
            let (held, mut planned) = (Held::of(&batch, &plan), Planned(plan));
            let attention = Some(&mut planned as &mut dyn ContextAttention);
            let batch = held.batch();
            model.accumulate_over(&batch, attention, gradients, recompute, &mut totals)?;
        }
        if self.replicas {
            let by_host =
                |_: &mut [f32]| -> Result<(), NnError> { unreachable!("the device sums") };
            model.reduce(gradients, by_host)?;
        }
        let step = OptimizerStep { rule: RULE, step: *count, rate: 1e-3, clip_norm: 1.0, seed: 0 };
        model.update(&step, spans, gradients, moments, &mut totals)?;
        Ok(totals)
    }
}

#[test]
fn steps_read_what_was_written_wait_for_nothing_and_take_no_more_memory() {
    let name = "steps_read_what_was_written_wait_for_nothing_and_take_no_more_memory";
    if !inside(name) {
        return;
    }
    for recompute in Recompute::ALL {
        trace::start();
        let mut steps = Steps::new();
        let mut notes = trace::stop();
        for number in 0..4 {
            let [of_step, read] = steps.run(recompute);
            assert!(!of_step.iter().any(|n| matches!(n, Noted::Waited { .. })), "step {number}");
            let more: Vec<&Noted> =
                of_step.iter().filter(|n| matches!(n, Noted::Allocated { .. })).collect();
            assert!(number == 0 || more.is_empty(), "step {number}: {more:?}");
            notes.extend(of_step.into_iter().chain(read));
        }
        assert_eq!(trouble(&notes), [""; 0], "{recompute:?}");
    }
}

#[test]
fn arrays_that_share_memory_are_read_as_they_were_written() {
    let name = "arrays_that_share_memory_are_read_as_they_were_written";
    if !inside(name) {
        return;
    }
    let written = |from, to| Noted::Written { name: "y".into(), span: (from, to), stream: 1 };
    let read = |from, to| Noted::Read { name: "x".into(), span: (from, to), stream: 1 };
    let notes = [written(0, 9), written(4, 6), read(0, 9), written(0, 5), read(3, 6), read(7, 8)];
    let expected = [("x", vec![0, 1, 0]), ("x", vec![2, 1]), ("x", vec![0])];
    assert_eq!(flow(&notes), expected);
    for (batches, recompute) in [1, 2].into_iter().flat_map(|n| Recompute::ALL.map(|r| (n, r))) {
        let [shared, apart] = [false, true].map(|apart| {
            trace::start();
            let mut steps = Steps::sharing(batches, apart);
            let mut notes = trace::stop();
            for number in 0..3 {
                let [of_step, read] = steps.run(recompute);
                let more = of_step.iter().filter(|n| matches!(n, Noted::Allocated { .. })).count();
                assert!(number == 0 || more == 0, "step {number} allocates {more} times");
                notes.extend(of_step.into_iter().chain(read));
            }
            notes
        });
        assert_eq!(trouble(&shared), [""; 0], "{batches} {recompute:?}");
        let (found, expected) = (flow(&shared), flow(&apart));
        assert_eq!(found.len(), expected.len());
        for (i, (found, expected)) in found.iter().zip(&expected).enumerate() {
            assert_eq!(found, expected, "read {i}, {batches} batches, {recompute:?}");
        }
        let taken = |notes: &[Noted]| -> usize {
            let bytes = notes.iter().map(|noted| match noted {
                Noted::Allocated { bytes, .. } => *bytes,
                _ => 0,
            });
            bytes.sum()
        };
        println!("{batches} {recompute:?}: {} B, apart {}", taken(&shared), taken(&apart));
        assert!(taken(&shared) < taken(&apart));
    }
}

#[test]
fn an_evaluation_between_steps_takes_no_memory_and_reads_what_it_wrote() {
    if !inside("an_evaluation_between_steps_takes_no_memory_and_reads_what_it_wrote") {
        return;
    }
    let frozen: [fn(&str) -> bool; 3] = [
        |_| false,
        |name| name.contains("layers.0.mlp") || name.contains("embed"),
        |name| !(name.ends_with("layernorm.weight") || name.ends_with("bias")),
    ];
    // The last rows of an evaluation are fewer.
    let numbers: Vec<i32> = (0..(ROWS * LEN) as i32).map(|i| i % LEN as i32).collect();
    let evaluate = |steps: &mut Steps, rows: usize| {
        let all = rows * LEN;
        let tokens: Vec<u32> = numbers[..all].iter().map(|&i| i as u32 % 50).collect();
        let batch = Batch {
            rows,
            len: LEN,
            tokens: &tokens,
            labels: &numbers[..all],
            documents: &vec![0; all],
            positions: &numbers[..all],
            live_pairs: &[(all * LEN) as f64],
            order: &[],
        };
        let between = Some(&mut steps.state.0);
        steps.model.loss_over(&batch, None, between).unwrap();
    };
    for (number, recompute) in Recompute::ALL.into_iter().enumerate() {
        for (batches, frozen) in [(1, frozen[number % 3]), (2, frozen[(number + 1) % 3])] {
            trace::start();
            // All of a pass fits in the gradients of so many words.
            let (config, attention) = sizes();
            let config = ModelConfig { vocab_size: 4000, intermediate_size: 400, ..config };
            let model = Model::unfilled_with(cuda(), config, &attention, &frozen).unwrap();
            let mut steps = Steps { batches, ..Steps::of(filled(model)) };
            if batches == 1 {
                steps.state.0 = steps.model.gradients_of_one_batch().unwrap();
            }
            let mut notes = trace::stop();
            let arena = steps.model.dry_run(ROWS, LEN, StepKind::Loss).unwrap().activation_bytes();
            for number in 0..3 {
                let [of_step, read] = steps.run(recompute);
                trace::start();
                evaluate(&mut steps, ROWS);
                evaluate(&mut steps, 1);
                let of_losses = trace::stop();
                let allocated = of_losses.iter().filter_map(|noted| match noted {
                    Noted::Allocated { bytes, .. } => Some(*bytes as u64),
                    _ => None,
                });
                // The first makes its plans.
                let allowed = if number == 0 { arena / 4 } else { 0 };
                let most = allocated.max().unwrap_or(0);
                assert!(most <= allowed, "{number}: {most} B, {batches} {recompute:?}");
                notes.extend(of_step.into_iter().chain(read).chain(of_losses));
            }
            assert_eq!(trouble(&notes), [""; 0], "{batches} {recompute:?}");
        }
    }
}

#[test]
fn totals_read_behind_the_next_step_are_waited_for_once_a_step() {
    let name = "totals_read_behind_the_next_step_are_waited_for_once_a_step";
    if !inside(name) {
        return;
    }
    let mut steps = Steps::new();
    assert!(steps.model.queues());
    let mut before = steps.queue(Recompute::None);
    for number in 0..6 {
        trace::start();
        let totals = steps.queue(Recompute::None);
        let sums = steps.model.read(std::mem::replace(&mut before, totals)).unwrap();
        let notes = trace::stop();
        let waits = notes.iter().filter(|n| matches!(n, Noted::Waited { .. })).count();
        assert_eq!(waits, 1, "step {number}: {notes:?}");
        assert!(sums.grad_norm.is_finite());
        // Memory for two steps is taken once.
        let more = notes.iter().filter(|n| matches!(n, Noted::Allocated { .. })).count();
        assert!(number == 0 || more == 0, "step {number}: {notes:?}");
    }
    steps.model.read(before).unwrap();
}

/// Moments in the memory of the host, in pieces of so many elements.
fn with_host_moments(piece: usize) -> Cuda {
    let cuda = Cuda::new(0, ParameterState::HostMoments.into(), true).unwrap();
    cuda.with_moments_in_pieces_of(piece)
}

#[test]
fn moments_of_the_host_pass_through_the_device_in_order_and_nothing_waits() {
    if !inside("moments_of_the_host_pass_through_the_device_in_order_and_nothing_waits") {
        return;
    }
    // Pieces that end within groups of parameters, fewer than there are slots, and one.
    for piece in [2056, 16_384, 1 << 20] {
        trace::start();
        let mut steps = Steps::of(filled(unfilled(with_host_moments(piece))));
        let mut notes = trace::stop();
        let mut second = 0..0;
        for number in 0..3 {
            let [of_step, read] = steps.run(Recompute::None);
            let waits = of_step.iter().filter(|n| matches!(n, Noted::Waited { .. })).count();
            let more = of_step.iter().filter(|n| matches!(n, Noted::Allocated { .. })).count();
            assert!(waits == 0 && (number == 0 || more == 0), "step {number}: {waits}, {more}");
            if number == 1 {
                second = notes.len()..notes.len() + of_step.len();
            }
            notes.extend(of_step.into_iter().chain(read));
        }
        assert_eq!(trouble(&notes), [""; 0], "{piece}");
        let trained = steps.model.layout().trained();
        let out = notes
            .iter()
            .filter(|noted| matches!(noted, Noted::Read { name, .. } if name == "a copy out"));
        assert_eq!(out.count(), 3 * 2 * trained.div_ceil(piece));
        // Every event that a stream waits for is needed: that a slot is free, that a piece has come, that it is
        // updated. Where slots end a step in another order than they begin one, some are free anyhow.
        let follows = second.filter(|&at| matches!(notes[at], Noted::Follows { .. }));
        let follows: Vec<usize> = follows.collect();
        assert_eq!(follows.len(), 3 * trained.div_ceil(piece));
        let in_turn = trained.div_ceil(piece).is_multiple_of(3) || trained <= piece;
        for &at in follows.iter().skip(if in_turn { 0 } else { 9 }).take(30) {
            let without = [&notes[..at], &notes[at + 1..]].concat();
            assert_ne!(trouble(&without), [""; 0], "{piece}: without {:?}", notes[at]);
        }
    }
}

#[test]
fn moments_come_back_to_the_host_where_they_were() {
    if !inside("moments_come_back_to_the_host_where_they_were") {
        return;
    }
    let mut steps = Steps::of(filled(unfilled(with_host_moments(2056))));
    let trained = steps.model.layout().trained();
    let numbers =
        |first: usize| -> Vec<f32> { (first..first + trained).map(|i| i as f32).collect() };
    let (means, squares) = (numbers(1), numbers(trained));
    let moments = &mut steps.state.1;
    steps.model.upload_moment(Moment::Mean, &mut moments.mean, 0, &means).unwrap();
    steps.model.upload_moment(Moment::Square, &mut moments.square, 0, &squares).unwrap();
    // The update of this driver changes nothing of what comes to the device.
    for _ in 0..2 {
        let totals = steps.queue(Recompute::None);
        steps.model.read(totals).unwrap();
    }
    let moments = &steps.state.1;
    let mut found = vec![f32::NAN; trained];
    steps.model.download_moment(Moment::Mean, &moments.mean, 0, &mut found).unwrap();
    assert!(found == means);
    steps.model.download_moment(Moment::Square, &moments.square, 0, &mut found).unwrap();
    assert!(found == squares);
}

#[test]
fn what_bits_depend_on_names_libraries_and_the_kernels_of_attention() {
    if !inside("what_bits_depend_on_names_libraries_and_the_kernels_of_attention") {
        return;
    }
    let all = model().bits_depend_on(ROWS, LEN).unwrap();
    let names: Vec<&str> = all.keys().map(String::as_str).collect();
    assert_eq!(names, ["GPU", "NVRTC", "attention", "cuBLASLt", "driver", "order of sums"]);
    assert_eq!(all["driver"], "CUDA 13.0");
    assert_eq!(all["order of sums"], "fixed");
    let attention = &all["attention"];
    let kernels: Vec<&str> = attention.split("; ").collect();
    assert!(kernels[0].starts_with("forward") && attention.contains("backward"), "{attention}");
    assert!(kernels.iter().all(|kernel| kernel.contains("tile")), "{attention}");
    // The same twice, and another one for other sizes.
    assert_eq!(model().bits_depend_on(ROWS, LEN).unwrap(), all);
    assert_ne!(model().bits_depend_on(ROWS, 100).unwrap()["attention"], "");
}

#[test]
fn a_profile_has_the_times_of_every_block_of_its_steps() {
    if !inside("a_profile_has_the_times_of_every_block_of_its_steps") {
        return;
    }
    let mut steps = Steps::new();
    steps.run(Recompute::None);
    assert_eq!(steps.model.block_times(), []);
    steps.model.profile(true).unwrap();
    for _ in 0..2 {
        steps.run(Recompute::None);
    }
    let times = steps.model.block_times();
    steps.model.profile(false).unwrap();
    steps.run(Recompute::None);
    assert_eq!(steps.model.block_times(), []);
    let calls = |block| times.iter().filter(|time| time.block == block).count();
    // Two steps of two batches of two layers.
    assert_eq!(["attention", "attention backward", "linear", "update"].map(calls), [8, 8, 32, 2]);
}

/// Forward attention waits for the keys of its one stage, backward attention for gradients of keys that return. Keys
/// leave before queries are computed, and gradients come behind a product.
#[test]
fn a_profile_of_ranks_that_share_rows_says_when_attention_waits() {
    if !inside("a_profile_of_ranks_that_share_rows_says_when_attention_waits") {
        return;
    }
    for (how, sends, waits) in [(How::Exchange(1), 4, 8), (How::Heads, 0, 16)] {
        let made = |rank: &TestRank| Steps::of_context(rank, how);
        let profiled = |_: &TestRank, steps: &mut Steps, step| match step {
            0 => steps.model.profile(true).unwrap(),
            _ => {
                let times = steps.model.block_times();
                let calls = |block| times.iter().filter(|time| time.block == block).count();
                // Of two batches of two layers.
                let found = ["attention", "attention backward", KEYS_WAIT].map(calls);
                assert_eq!(found, [4, 4, waits], "{how:?}");
                assert_eq!(["keys send", "gradients return"].map(calls), [sends, 4], "{how:?}");
            }
        };
        on_ranks_with(2, made, Carrier::Auto, Recompute::None, 2, profiled);
    }
}

#[test]
fn a_step_of_two_layers_queues_its_blocks_in_order() {
    if !inside("a_step_of_two_layers_queues_its_blocks_in_order") {
        return;
    }
    let mut steps = Steps::new();
    steps.run(Recompute::None);
    let log = std::path::Path::new(&env::var_os("HOME").unwrap()).join("launches");
    fs::remove_file(&log).unwrap();
    steps.run(Recompute::None);
    let queued = fs::read_to_string(log).unwrap();
    let expected = include_str!("step.txt");
    assert_eq!(queued, expected, "{queued}");
}

/// Whether anything whose name starts with `what` was read.
fn is_read(notes: &[Noted], what: &str) -> bool {
    notes.iter().any(|n| matches!(n, Noted::Read { name, .. } if name.starts_with(what)))
}

/// Whether anything but three numbers was copied within the device, as between ranks.
fn is_copied(notes: &[Noted]) -> bool {
    let is_copy = |noted: &Noted| match noted {
        Noted::Read { name, span, .. } => name == "a copy" && span.1 - span.0 > 24,
        _ => false,
    };
    notes.iter().any(is_copy)
}

/// How often the host waited for the device; a copy of what it has waited for is waited for by another name.
fn waits_for_work(notes: &[Noted]) -> usize {
    let is_wait =
        |noted: &&Noted| matches!(noted, Noted::Waited { what } if what == "work on the device");
    notes.iter().filter(is_wait).count()
}

/// Steps of `ranks` ranks, threads called `rank-0` and so on, each of which `made` makes.
fn on_ranks(
    ranks: usize,
    made: impl Fn(&TestRank) -> Steps + Sync,
    carrier: Carrier,
    recompute: Recompute,
    steps: usize,
    between: impl Fn(&TestRank) + Sync,
) {
    on_ranks_with(ranks, made, carrier, recompute, steps, |rank, _, _| between(rank));
}

/// [`on_ranks`], whose `between` is given the steps of its rank, and how many have been run.
fn on_ranks_with(
    ranks: usize,
    made: impl Fn(&TestRank) -> Steps + Sync,
    carrier: Carrier,
    recompute: Recompute,
    steps: usize,
    between: impl Fn(&TestRank, &mut Steps, usize) + Sync,
) {
    // What threads share is there before them.
    Cuda::available(0).unwrap();
    std::thread::scope(|scope| {
        for rank in TestRank::all(ranks, carrier, DType::F32) {
            let (between, made, name) = (&between, &made, format!("rank-{}", rank.rank()));
            let run = move || {
                let mut own = made(&rank);
                for step in 0..steps {
                    between(&rank, &mut own, step);
                    let totals = own.queue(recompute);
                    own.model.read(totals).unwrap();
                }
                // No rank goes while another reads what it has.
                rank.all_gather(&[]).unwrap();
            };
            std::thread::Builder::new().name(name).spawn_scoped(scope, run).unwrap();
        }
    });
}

/// What the second of two ranks launches in its second step: what the first does once is no matter.
fn launches_of_rank_1(made: impl Fn(&TestRank) -> Steps + Sync) -> String {
    let log = std::path::Path::new(&env::var_os("HOME").unwrap()).join("launches-rank-1");
    on_ranks(2, made, Carrier::Auto, Recompute::None, 2, |rank| {
        if rank.rank() == 1 {
            let _ = fs::remove_file(&log);
        }
    });
    fs::read_to_string(log).unwrap()
}

#[test]
fn ranks_read_what_others_wrote_and_keep_what_others_read() {
    if !inside("ranks_read_what_others_wrote_and_keep_what_others_read") {
        return;
    }
    for carrier in [Carrier::Auto, Carrier::Nccl, Carrier::Host] {
        trace::start();
        on_ranks(2, Steps::of_rank, carrier, Recompute::None, 3, |_| {});
        let notes = trace::stop();
        assert_eq!(is_copied(&notes), carrier != Carrier::Host);
        assert_eq!(is_read(&notes, "send of"), carrier == Carrier::Nccl);
        assert_eq!(trouble(&notes), [""; 0], "{carrier:?}");
    }
}

#[test]
fn a_step_of_two_ranks_moves_groups_beside_its_blocks() {
    if !inside("a_step_of_two_ranks_moves_groups_beside_its_blocks") {
        return;
    }
    let queued = launches_of_rank_1(Steps::of_rank);
    let expected = include_str!("step_of_ranks.txt");
    assert_eq!(queued, expected, "{queued}");
}

#[test]
fn ranks_that_share_rows_read_what_others_wrote_and_keep_what_others_read() {
    if !inside("ranks_that_share_rows_read_what_others_wrote_and_keep_what_others_read") {
        return;
    }
    for (carrier, how, recompute) in [
        (Carrier::Auto, How::Gather, Recompute::None),
        (Carrier::Auto, How::Exchange(2), Recompute::Attention),
        (Carrier::Auto, How::Heads, Recompute::Full),
        (Carrier::Nccl, How::Exchange(1), Recompute::None),
        (Carrier::Nccl, How::Heads, Recompute::Mlp),
    ] {
        trace::start();
        let made = |rank: &TestRank| Steps::of_context(rank, how);
        on_ranks(2, made, carrier, recompute, 3, |_| {});
        let notes = trace::stop();
        assert_eq!(is_read(&notes, "send of"), carrier == Carrier::Nccl);
        assert_eq!(trouble(&notes), [""; 0], "{carrier:?} {how:?}");
    }
}

/// Documents differ from batch to batch, and with them which queries and keys a stage has, how many tokens of
/// an uneven row are a rank's, and how many keys a query sees.
#[test]
fn batches_of_other_documents_have_few_plans() {
    if !inside("batches_of_other_documents_have_few_plans") {
        return;
    }
    for how in [How::Gather, How::Exchange(1), How::Exchange(3), How::Heads] {
        trace::start();
        let made = |rank: &TestRank| {
            let mut steps = Steps::of_context(rank, how);
            steps.varies = true;
            steps
        };
        // There are two key/value heads.
        let ranks = if how == How::Heads { 2 } else { 3 };
        on_ranks(ranks, made, Carrier::Auto, Recompute::None, 25, |_| {});
        let notes = trace::stop();
        let bound: Vec<&Noted> =
            notes.iter().filter(|noted| matches!(noted, Noted::Bound { .. })).collect();
        assert!(bound.is_empty(), "{how:?}: {} plans, {:?}", bound.len(), bound[0]);
        // Of two numbers of keys, and of two numbers of tokens where queries stay with their ranks.
        let planned = notes.iter().filter(|noted| matches!(noted, Noted::Planned { .. })).count();
        let shapes = if how == How::Heads { 2 } else { 4 };
        assert_eq!(planned, ranks * shapes, "{how:?}");
        assert_eq!(trouble(&notes), [""; 0], "{how:?}");
    }
}

#[test]
fn ranks_of_tensor_read_what_others_wrote_and_keep_what_others_read() {
    if !inside("ranks_of_tensor_read_what_others_wrote_and_keep_what_others_read") {
        return;
    }
    // On four ranks two hold copies of a key/value head.
    for (ranks, carrier) in
        [(2, Carrier::Auto), (3, Carrier::Nccl), (2, Carrier::Host), (4, Carrier::Auto)]
    {
        trace::start();
        on_ranks(ranks, Steps::of_part, carrier, Recompute::None, 2, |_| {});
        let notes = trace::stop();
        assert_eq!(is_copied(&notes), carrier != Carrier::Host);
        assert_eq!(is_read(&notes, "send of"), carrier == Carrier::Nccl);
        assert_eq!(trouble(&notes), [""; 0], "{ranks} ranks, {carrier:?}");
    }
}

#[test]
fn ranks_with_copies_read_what_others_wrote_and_wait_once_for_the_norm() {
    if !inside("ranks_with_copies_read_what_others_wrote_and_wait_once_for_the_norm") {
        return;
    }
    for carrier in [Carrier::Auto, Carrier::Nccl] {
        let waits = [3, 5].map(|steps| {
            trace::start();
            on_ranks(2, Steps::of_replica, carrier, Recompute::None, steps, |_| {});
            let notes = trace::stop();
            assert!(is_copied(&notes));
            assert_eq!(is_read(&notes, "send of"), carrier == Carrier::Nccl);
            assert_eq!(trouble(&notes), [""; 0], "{carrier:?}");
            waits_for_work(&notes)
        });
        // Each of two ranks waits for the norm and for the totals of each of two steps.
        assert_eq!(waits[1] - waits[0], 2 * 2 * 2, "{waits:?}");
    }
}

/// What several ranks of `tensor` hold is counted once in the norm of gradients, and not waited for by itself.
#[test]
fn ranks_of_tensor_wait_once_for_the_norm_and_once_for_the_totals() {
    if !inside("ranks_of_tensor_wait_once_for_the_norm_and_once_for_the_totals") {
        return;
    }
    let waits = [2, 4].map(|steps| {
        trace::start();
        on_ranks(2, Steps::of_part, Carrier::Auto, Recompute::None, steps, |_| {});
        let notes = trace::stop();
        assert_eq!(trouble(&notes), [""; 0]);
        waits_for_work(&notes)
    });
    // Of two ranks in two steps.
    assert_eq!(waits[1] - waits[0], 2 * 2 * 2, "{waits:?}");
}

#[test]
fn a_step_of_ranks_that_share_rows_computes_on_own_keys_while_others_arrive() {
    if !inside("a_step_of_ranks_that_share_rows_computes_on_own_keys_while_others_arrive") {
        return;
    }
    let made = |rank: &TestRank| Steps::of_context(rank, How::Exchange(1));
    let queued = launches_of_rank_1(made);
    let expected = include_str!("step_of_context.txt");
    assert_eq!(queued, expected, "{queued}");
}

#[test]
fn a_step_of_two_ranks_of_tensor_moves_the_stream_around_its_products() {
    if !inside("a_step_of_two_ranks_of_tensor_moves_the_stream_around_its_products") {
        return;
    }
    let queued = launches_of_rank_1(Steps::of_part);
    let expected = include_str!("step_of_tensor.txt");
    assert_eq!(queued, expected, "{queued}");
}
