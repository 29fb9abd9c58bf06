//! Runs of several ranks, which are threads here: beside one rank, and when one of them goes wrong.

use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use foveate_nn::{
    Cpu, Cutting, ModelConfig, OptimizerStep, Recompute, Reshard, StepKind, Training, Treatment,
};
use foveate_shard::ShardError;
use foveate_shard::collectives::{Meeting, connect, run_threads};

use super::*;
use crate::checkpoint::State;
use crate::transfers::ParameterRanks;

/// What every rank came to.
pub(super) fn on_ranks(
    ranks: usize,
    place: &Place,
    recipe: impl Fn(usize) -> Recipe + Sync,
    options: impl Fn() -> Options + Sync,
    log: impl Fn(usize) -> Log + Sync,
) -> Vec<Result<(Summary, Log), TrainError>> {
    let results = Mutex::new((0..ranks).map(|_| None).collect::<Vec<_>>());
    let _ = run_threads(ranks, Duration::from_secs(60), |world| {
        let rank = world.rank();
        let (recipe, mut log) = (recipe(rank), log(rank));
        let done = train_on(world, &recipe, &place.file(), options(), &mut log);
        results.lock().unwrap()[rank] = Some(done.map(|summary| (summary, log)));
        Ok(())
    });
    results.into_inner().unwrap().into_iter().map(|r| r.expect("every rank came back")).collect()
}

pub(super) fn all_well(
    ranks: usize,
    place: &Place,
    recipe: &Recipe,
    start: Start,
) -> Vec<(Summary, Log)> {
    let done = on_ranks(ranks, place, |_| recipe.clone(), || start.into(), |_| Log::default());
    done.into_iter().map(Result::unwrap).collect()
}

pub(super) fn values(bits: &[u64]) -> Vec<f64> {
    bits.iter().map(|&bits| f64::from_bits(bits)).collect()
}

/// All weights.
pub(super) fn values_of(checkpoint: &Path) -> Vec<f32> {
    let read = checkpoint::read_config(checkpoint, Checksums::Verify).unwrap();
    let mut model = Model::unfilled(read.model, &read.attention).unwrap();
    checkpoint::load_weights(checkpoint, &mut model, Checksums::Verify).unwrap();
    model.weights().to_vec()
}

/// The bits of all weights.
fn weights(checkpoint: &Path) -> Vec<u32> {
    values_of(checkpoint).into_iter().map(f32::to_bits).collect()
}

#[test]
fn ranks_share_rows_and_reach_what_one_rank_reaches() {
    let (place, sets) = (Place::new(), ["train.accumulate=2", "train.batch_rows=5"]);
    let recipe = place.recipe(&sets);
    let (one, alone) = place.run(&recipe, Start::New).unwrap();
    for ranks in [2, 3, 5] {
        let place = Place::new();
        let recipe = place.recipe(&sets);
        let runs = all_well(ranks, &place, &recipe, Start::New);
        for (summary, log) in &runs {
            assert_eq!(log, &runs[0].1, "all ranks see the same");
            assert_eq!(log.tokens, alone.tokens);
            assert_eq!(summary.checkpoint, runs[0].0.checkpoint);
            for (got, want) in [(&log.losses, &alone.losses), (&log.held_out, &alone.held_out)] {
                assert_eq!(got.len(), want.len());
                for (got, want) in values(got).into_iter().zip(values(want)) {
                    assert!((got - want).abs() < 1e-5, "{got} {want}");
                }
            }
        }
        let again = {
            let place = Place::new();
            let recipe = place.recipe(&sets);
            let runs = all_well(ranks, &place, &recipe, Start::New);
            (weights(&runs[0].0.checkpoint), runs[0].1.losses.clone())
        };
        let first = (weights(&runs[0].0.checkpoint), runs[0].1.losses.clone());
        assert!(again == first, "the same bits every time");
        let [ours, theirs] = [&runs[0].0.checkpoint, &one.checkpoint].map(|path| values_of(path));
        let off = ours.iter().zip(&theirs).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
        assert!(ours.len() == theirs.len() && off < 1e-4, "a weight is {off} off");
    }
}

/// What a run of ranks says that it takes.
struct Takes(MemoryEstimate);

impl Observer for Takes {
    fn started(&mut self, run: &Started) {
        self.0 = run.memory;
    }
}

#[test]
fn a_rank_takes_memory_for_its_tokens_and_for_the_keys_that_it_keeps() {
    let takes = |ranks: usize, sets: &[&str]| {
        let place = Place::new();
        let sets = [&["train.steps=1", "train.batch_rows=4", "data.len=64"][..], sets].concat();
        let recipe = place.recipe(&sets);
        let taken = run_threads(ranks, Duration::from_secs(60), |world| {
            let mut takes = Takes(MemoryEstimate::default());
            train_on(world, &recipe, &place.file(), Start::New, &mut takes)
                .map_err(|e| ShardError::new(e.to_string()))?;
            Ok(takes.0)
        });
        taken.unwrap().remove(0)
    };
    let one = takes(1, &[]);
    let context = takes(4, &["mesh.context=4", "mesh.strategy=gather"]);
    // Ranks of context share the parameters, too. Of each of 4 groups a rank owns a quarter, in whole
    // 256 elements, with two moments in f32.
    assert!(context.optimizer <= one.optimizer / 4 + 4 * 256 * 8, "{context:?} {one:?}");
    assert!(context.weights < one.weights, "{context:?} {one:?}");
    assert!(context.activations < one.activations / 2, "{context:?} {one:?}");
    // Keys and values of 64 tokens of 4 rows, 2 heads of 4, in f32, of each of 2 layers or of one.
    let keys = 2 * 4 * 64 * 2 * 4 * 4;
    assert!(context.attention > 2 * keys, "{context:?}");
    let again = takes(4, &["mesh.context=4", "mesh.strategy=gather", "train.recompute=attention"]);
    assert!(again.attention + keys <= context.attention, "{again:?} {context:?}");
}

/// Rows that a mask tells apart are on other ranks the rows that they are on one.
#[test]
fn a_rank_knows_which_rows_of_the_batch_it_has() {
    let prefixes = "buffers = { prefixes = { shape = [3], values = [2, 9, 20] } }";
    let attention = format!("attention={{ mask = \"prefix & document\", {prefixes} }}");
    let sets = [attention.as_str(), "train.steps=3"];
    let place = Place::new();
    let (_, alone) = place.run(&place.recipe(&sets), Start::New).unwrap();
    let place = Place::new();
    let (_, log) = all_well(3, &place, &place.recipe(&sets), Start::New).remove(0);
    assert_eq!(log.losses.len(), 3);
    for (got, want) in values(&log.losses).into_iter().zip(values(&alone.losses)) {
        assert!((got - want).abs() < 1e-5, "{got} {want}");
    }
}

/// Held-out rows that are shorter than the ranks are many are among those that are looked at.
#[test]
fn ranks_of_context_share_the_tokens_of_rows_and_reach_what_one_rank_reaches() {
    let bias = "learned = { bias = { shape = [4, 4], init = 0.1, std = 0.5 } }";
    let score = "score = \"score + bias[h, max(min(q - kv, 3), 0)]\"";
    let attention = format!("attention={{ mask = \"causal & document\", {score}, {bias} }}");
    let sets = [&attention, "train.accumulate=2", "train.steps=5", "data.held_out=0.1"];
    let place = Place::new();
    let (one, alone) = place.run(&place.recipe(&sets), Start::New).unwrap();
    for (ranks, mesh) in [
        (2, "mesh={ context = 2, strategy = \"heads\" }"),
        (3, "mesh={ context = \"auto\", strategy = \"gather\" }"),
        (4, "mesh={ context = 4 }"),
        (4, "mesh={ context = 2, shard = 2 }"),
        (6, "mesh={ context = 2, replicate = 3, strategy = \"exchange:4\" }"),
    ] {
        let sets: Vec<&str> = sets.into_iter().chain([mesh]).collect();
        let run = || {
            let place = Place::new();
            let mut runs = all_well(ranks, &place, &place.recipe(&sets), Start::New);
            for (_, log) in &runs {
                assert_eq!(log, &runs[0].1, "all ranks see the same");
            }
            let (summary, log) = runs.swap_remove(0);
            (values_of(&summary.checkpoint), log)
        };
        let first = run();
        assert!(first == run(), "{mesh}: the same bits every time");
        let (weights, log) = first;
        assert_eq!(log.tokens, alone.tokens);
        for (got, want) in [(&log.losses, &alone.losses), (&log.held_out, &alone.held_out)] {
            assert_eq!(got.len(), want.len());
            for (got, want) in values(got).into_iter().zip(values(want)) {
                assert!((got - want).abs() < 1e-5, "{mesh}: {got} {want}");
            }
        }
        let theirs = values_of(&one.checkpoint);
        let off = weights.iter().zip(&theirs).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
        assert!(weights.len() == theirs.len() && off < 1e-4, "{mesh}: a weight is {off} off");
    }
}

/// Plans of attention over ranks that the thread of the steps has made, at each of its steps.
#[derive(Default)]
struct Plans {
    before: usize,
    at_steps: Vec<usize>,
    at_evaluations: Vec<usize>,
}

impl Plans {
    fn so_far(&self) -> usize {
        crate::context::tests::PLANS.get() - self.before
    }
}

impl Observer for Plans {
    fn started(&mut self, _: &Started) {
        self.before = crate::context::tests::PLANS.get();
    }

    fn step(&mut self, _: &StepMetrics) {
        self.at_steps.push(self.so_far());
    }

    fn evaluated(&mut self, _: &EvalMetrics) {
        self.at_evaluations.push(self.so_far());
    }
}

#[test]
fn the_thread_of_the_steps_plans_nothing_for_evaluations_either() {
    for mesh in ["mesh={ context = 2 }", "mesh={ context = 2, shard = 2 }"] {
        let (place, ranks) = (Place::new(), if mesh.contains("shard") { 4 } else { 2 });
        let recipe = place.recipe(&[mesh, "train.accumulate=2"]);
        run_threads(ranks, Duration::from_secs(60), |world| {
            let mut plans = Plans::default();
            train_on(world, &recipe, &place.file(), Start::New, &mut plans)
                .map_err(|e| ShardError::new(e.to_string()))?;
            assert_eq!((plans.at_steps, plans.at_evaluations), (vec![0; 6], vec![0; 2]), "{mesh}");
            Ok(())
        })
        .unwrap();
    }
}

#[test]
fn a_run_of_ranks_goes_on_with_another_number_of_them() {
    let place = Place::new();
    let recipe = place.recipe(&["train.steps=2"]);
    all_well(3, &place, &recipe, Start::New);
    let recipe = place.recipe(&[]);
    let (_, rest) = all_well(2, &place, &recipe, Start::Resume).remove(0);
    let whole = Place::new();
    let (_, alone) = whole.run(&whole.recipe(&[]), Start::New).unwrap();
    assert_eq!(rest.losses.len(), 4);
    for (got, want) in values(&rest.losses).into_iter().zip(values(&alone.losses[2..])) {
        assert!((got - want).abs() < 1e-5, "{got} {want}");
    }
}

#[test]
fn any_rank_can_end_a_run_which_all_end_after_the_same_step() {
    let place = Place::new();
    let recipe = place.recipe(&[]);
    let stops = |rank| Log { stop_after: (rank == 1).then_some(3), ..Log::default() };
    let runs = on_ranks(2, &place, |_| recipe.clone(), || Start::New.into(), stops);
    for run in runs {
        let (summary, log) = run.unwrap();
        assert!(summary.interrupted && summary.checkpoint.ends_with("step-000003"));
        assert_eq!((summary.steps, log.losses.len()), (3, 3));
    }
    let (_, rest) = all_well(2, &place, &recipe, Start::Resume).remove(0);
    assert_eq!(rest.losses.len(), 3);
}

/// What the ranks say when the recipes are `sets`, the folder's state unchanged.
fn refused(sets: [&[&str]; 2], before: impl FnOnce(&Place)) -> [String; 2] {
    let place = Place::new();
    before(&place);
    let recipe = |rank: usize| place.recipe(sets[rank]);
    let runs = on_ranks(2, &place, recipe, || Start::New.into(), |_| Log::default());
    assert!(!place.0.path().join("run/checkpoints").exists());
    let said = runs.into_iter().map(|run| run.unwrap_err());
    let said: Vec<_> = said.map(|e| (e.to_string(), e)).collect();
    assert!(matches!(
        said[1].1.kind(),
        TrainErrorKind::Elsewhere { .. } | TrainErrorKind::Ranks { .. }
    ));
    said.into_iter().map(|(text, _)| text).collect::<Vec<_>>().try_into().unwrap()
}

#[test]
fn what_is_wrong_on_one_rank_ends_all_before_anything_is_written() {
    let same: &[&str] = &[];
    let [one, other] = refused([same, &["optimizer.lr=2e-2"]], |_| {});
    // All find it, and the first says it.
    for said in [one, other] {
        assert!(said.contains("ranks [1] have another recipe than rank 0"), "{said}");
    }
    let few: &[&str] = &["train.batch_rows=1"];
    let [one, other] = refused([few, few], |_| {});
    assert_eq!(
        one,
        "train.batch_rows: is 1, and 2 ranks share the rows of a batch; raise it to 2, or start \
         fewer ranks"
    );
    assert_eq!(other, format!("rank 0: {one}"));
    let short: &[&str] = &["mesh.context=2", "data.len=1"];
    let [one, other] = refused([short, short], |_| {});
    assert_eq!(
        one,
        "[mesh]: a row of 1 token is 1 chunk of 1, and 2 ranks need one each; use 1 rank of context \
         or fewer, or longer rows"
    );
    assert_eq!(other, format!("rank 0: {one}"));
    let heads: &[&str] = &["mesh.context=2", "mesh.strategy=heads", "model.num_key_value_heads=1"];
    let [one, _] = refused([heads, heads], |_| {});
    assert!(
        one.starts_with(
            "[mesh]: heads for tokens: 1 key/value head of a rank cannot be cut over 2"
        ),
        "{one}"
    );
    let none: &[&str] = &["data.files=[\"*.none\"]"];
    let [one, other] = refused([none, same], |_| {});
    assert!(one.contains("no file matches") && other == format!("rank 0: {one}"), "{one}; {other}");
}

#[test]
fn ranks_of_other_builds_end_all_before_the_first_step() {
    let (place, started) = (Place::new(), AtomicUsize::new(0));
    let recipe = place.recipe(&[]);
    let build = || {
        let commit = Some(["abc", "abd"][started.fetch_add(1, Ordering::Relaxed)]);
        Options { commit, ..Start::New.into() }
    };
    let runs = on_ranks(2, &place, |_| recipe.clone(), build, |_| Log::default());
    for run in runs {
        let told = run.unwrap_err().to_string();
        let why = "ranks [1] have another version than rank 0; give every rank the same recipe, data and binary";
        assert!(told.ends_with(why), "{told}");
    }
    assert!(!place.0.path().join("run").exists());
}

#[test]
fn gpus_that_differ_are_told_and_cpus_beside_them_refused_on_all_ranks() {
    let told = |gpus: [Option<&str>; 3]| {
        let told = run_threads(3, Duration::from_secs(60), |world| {
            let ranks = Ranks::in_mesh(world, &Default::default()).unwrap();
            let told = super::super::setup::mixed_devices(ranks, gpus[world.rank()]);
            Ok(told.map_err(|e| e.to_string()))
        });
        told.unwrap()
    };
    let alike = [Some("H100"); 3];
    assert_eq!(told(alike), [Ok(None), Ok(None), Ok(None)]);
    assert_eq!(told([None; 3]), [Ok(None), Ok(None), Ok(None)]);
    let both = Ok(Some("1 × A100, 2 × H100".to_owned()));
    assert_eq!(told([Some("H100"), Some("A100"), Some("H100")]), [&both; 3].map(Clone::clone));
    let why = "run.device: ranks [0, 2] compute on the CPU, and rank 1 on H100; give every rank a GPU, or \
               set run.device = \"cpu\"";
    let [first, other, last] = told([None, Some("H100"), None]).try_into().unwrap();
    assert_eq!(first.unwrap_err(), why);
    for other in [other, last] {
        assert_eq!(other.unwrap_err(), format!("rank 0: {why}"));
    }
}

#[test]
fn a_rank_that_fails_in_a_step_ends_all_and_what_was_saved_stays() {
    for mesh in ["mesh.shard=2", "mesh.context=2"] {
        let place = Place::new();
        let recipe = place.recipe(&[mesh]);
        let log = |rank| Log { panics_after: (rank == 1).then_some(3), ..Log::default() };
        let told = Mutex::new(String::new());
        let ended = run_threads(2, Duration::from_secs(60), |world| {
            let done = train_on(world, &recipe, &place.file(), Start::New, &mut log(world.rank()));
            let error = done.expect_err("rank 1 is gone").to_string();
            *told.lock().unwrap() = error.clone();
            Err::<(), _>(ShardError::new(error))
        });
        assert!(ended.is_err());
        let told = told.into_inner().unwrap();
        assert_eq!(told, "rank 1: it panicked: planted", "{mesh}");
        let (_, rest) = all_well(2, &place, &recipe, Start::Resume).remove(0);
        assert_eq!(rest.losses.len(), 4);
    }
}

#[test]
fn ranks_count_the_tokens_once_and_keep_the_counts() {
    let place = Place::new();
    let recipe = place.recipe(&["train.steps=2"]);
    all_well(3, &place, &recipe, Start::New);
    let cache = place.0.path().join("run/cache");
    let kept = || {
        let files = std::fs::read_dir(&cache).unwrap().map(|e| e.unwrap().path());
        files.map(|file| (std::fs::read(&file).unwrap(), file)).collect::<Vec<_>>()
    };
    let first = kept();
    assert_eq!(first.len(), 1);
    // A resume takes what is kept; what was changed is found out.
    let counted = |observed: &(Summary, Log)| observed.1.counted;
    let resumed = all_well(2, &place, &place.recipe(&["train.steps=4"]), Start::Resume);
    assert!(resumed.iter().all(|run| !counted(run)));
    std::fs::write(&first[0].1, b"not what was kept").unwrap();
    let resumed = all_well(2, &place, &place.recipe(&["train.steps=5"]), Start::Resume);
    assert!(resumed.iter().all(counted));
    assert_eq!(kept(), first);
    let over = all_well(2, &place, &recipe, Start::Over);
    assert!(over.iter().all(|run| !counted(run)), "another start needs no other counts");
}

#[test]
fn an_interruption_while_tokens_are_counted_ends_all_ranks_alike() {
    let place = Place::new();
    let stops = |rank: usize| Log { stop_at_counting: rank == 1, ..Log::default() };
    let recipe = place.recipe(&[]);
    let runs = on_ranks(2, &place, |_| recipe.clone(), || Start::New.into(), stops);
    for run in runs {
        let error = run.unwrap_err();
        assert!(matches!(error.kind(), TrainErrorKind::Interrupted), "{error}");
    }
    assert!(!place.0.path().join("run").exists());
}

#[test]
fn an_evaluation_that_one_rank_leaves_ends_all_ranks_after_the_same_step() {
    let place = Place::new();
    let recipe = place.recipe(&["data.held_out=0.7", "train.batch_rows=2"]);
    let stops = |rank: usize| Log { stop_at_share: (rank == 1).then_some(2), ..Log::default() };
    for run in on_ranks(2, &place, |_| recipe.clone(), || Start::New.into(), stops) {
        let (summary, log) = run.unwrap();
        assert!(summary.interrupted && summary.steps == 4 && log.held_out.is_empty());
    }
    for (_, log) in all_well(2, &place, &recipe, Start::Resume) {
        assert_eq!((log.losses.len(), log.held_out.len()), (2, 2));
    }
}

#[test]
fn a_cursor_and_the_held_out_loss_are_the_same_with_every_number_of_ranks() {
    let sets = ["train.steps=1", "train.batch_rows=5", "optimizer.lr=1e-30"];
    let seen = |ranks: usize| {
        let place = Place::new();
        let recipe = place.recipe(&sets);
        let (summary, log) = match ranks {
            0 => place.run(&recipe, Start::New).unwrap(),
            ranks => all_well(ranks, &place, &recipe, Start::New).remove(0),
        };
        let state = std::fs::read_to_string(summary.checkpoint.join("state.json")).unwrap();
        let held_out = f64::from_bits(*log.held_out.last().unwrap());
        (serde_json::from_str::<State>(&state).unwrap().cursor, log.tokens, held_out)
    };
    let (cursor, tokens, held_out) = seen(0);
    for ranks in [2, 3, 4, 5] {
        let found = seen(ranks);
        assert_eq!((found.0, found.1), (cursor, tokens), "{ranks} ranks");
        assert!((found.2 - held_out).abs() < 1e-12 * held_out, "{ranks} ranks: {}", found.2);
    }
}

/// The files of a folder, by their names.
fn files_of(dir: &Path) -> BTreeMap<PathBuf, Vec<u8>> {
    let named = |(path, bytes): (PathBuf, _)| (path.strip_prefix(dir).unwrap().to_owned(), bytes);
    files(dir).into_iter().map(named).collect()
}

#[test]
fn saves_beside_the_steps_are_those_that_steps_wait_for() {
    let beside = "train.async_save=true";
    let (place, other) = (Place::new(), Place::new());
    let (summary, log) = place.run(&place.recipe(&[]), Start::New).unwrap();
    let mut stopped = Log { stop_after: Some(3), ..Log::default() };
    let first = train(&other.recipe(&[beside]), &other.file(), Start::New, &mut stopped).unwrap();
    assert!(first.interrupted && first.checkpoint.ends_with("step-000003"));
    let (again, rest) = other.run(&other.recipe(&[beside]), Start::Resume).unwrap();
    assert_eq!([stopped.losses, rest.losses].concat(), log.losses);
    assert_eq!(files_of(&again.checkpoint), files_of(&summary.checkpoint));
    let saved = |place: &Place, step: u64| {
        files_of(&place.0.path().join(format!("run/checkpoints/step-{step:06}")))
    };
    assert_eq!(saved(&other, 4), saved(&place, 4));
    assert_eq!(rest.saved, [4, 6]);
    // Of ranks: in ranges, of the same values as without.
    let runs = [&[][..], &[beside]].map(|sets| {
        let place = Place::new();
        let recipe = place.recipe(sets);
        let (summary, log) = all_well(3, &place, &recipe, Start::New).remove(0);
        (files_of(&summary.checkpoint), log)
    });
    assert_eq!(runs[0], runs[1]);
    let names: Vec<String> = runs[0].0.keys().map(|path| path.display().to_string()).collect();
    assert!(names.iter().any(|name| name.ends_with("part-00002-00000.safetensors")), "{names:?}");
    assert!(names.iter().any(|name| name.ends_with("layout.json")), "{names:?}");
}

#[test]
fn what_was_being_saved_when_a_run_diverges_is_whole() {
    for ranks in [1, 2] {
        let place = Place::new();
        let sets = ["optimizer.lr=1e30", "schedule.warmup_steps=0", "train.save_every=1"];
        let recipe = place.recipe(&[&sets[..], &["train.async_save=true"]].concat());
        let runs = match ranks {
            1 => vec![place.run(&recipe, Start::New)],
            _ => on_ranks(2, &place, |_| recipe.clone(), || Start::New.into(), |_| Log::default()),
        };
        let error = runs.into_iter().next().unwrap().unwrap_err();
        let TrainErrorKind::Diverged { earlier, .. } = error.kind() else {
            panic!("{ranks}: {error}")
        };
        let last = checkpoint::latest(&place.0.path().join("run/checkpoints"));
        let last = last.map(|path| Earlier { path, verified: true });
        assert!(last.is_some() && *earlier == last, "{ranks}: {error}");
    }
}

/// The recipe's model over every product of `replicate × shard`, beside one rank.
pub(super) fn beside_one_rank(ranks: usize, meshes: &[&str], sets: &[&str], allowed: f64) {
    let of = |mesh: &[&'static str]| [sets, mesh].concat();
    let (place, five) = (Place::new(), ["train.steps=5"]);
    let (one, alone) = place.run(&place.recipe(&of(&five)), Start::New).unwrap();
    for mesh in meshes {
        let run = || {
            let place = Place::new();
            let set = format!("mesh={mesh}");
            let recipe = place.recipe(&[&of(&five)[..], &[set.as_str()]].concat());
            let (summary, log) = all_well(ranks, &place, &recipe, Start::New).remove(0);
            (values_of(&summary.checkpoint), log, place)
        };
        let (weights, log, _) = run();
        let what = format!("{mesh} {sets:?}");
        for (got, want) in [(&log.losses, &alone.losses), (&log.held_out, &alone.held_out)] {
            assert_eq!(got.len(), want.len());
            for (got, want) in values(got).into_iter().zip(values(want)) {
                assert!((got - want).abs() < allowed, "{what}: {got} {want}");
            }
        }
        let want = values_of(&one.checkpoint);
        let off = weights.iter().zip(&want).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
        assert_eq!(weights.len(), want.len());
        assert!(f64::from(off) < 10.0 * allowed, "{what}: a weight is {off} off");
        let bits = |weights: &[f32]| weights.iter().map(|w| w.to_bits()).collect::<Vec<_>>();
        let (again, log_again, _) = run();
        assert!(bits(&again) == bits(&weights) && log_again == log, "{what}: the same every time");
    }
}

#[test]
fn parameters_that_are_cut_over_ranks_take_the_steps_of_one_rank() {
    let rows = ["train.batch_rows=16", "data.len=12"];
    for (ranks, meshes) in [
        (1, &["{shard=1}"][..]),
        (2, &["{shard=2}", "{replicate=2}"]),
        (3, &["{shard=3}", "{replicate=3}"]),
        (4, &["{shard=4, reshard=\"never\"}", "{replicate=2, reshard=\"after_backward\"}"]),
        (8, &["{replicate=2, shard=4}", "{replicate=4}"]),
        (16, &["{shard=16}", "{replicate=4}"]),
    ] {
        beside_one_rank(ranks, meshes, &rows, 1e-5);
    }
}

#[test]
fn every_state_rule_and_recomputation_works_on_parameters_that_are_cut() {
    let frozen = "optimizer.groups=[{ match = \"*.layers.0.*\", frozen = true }, \
                  { match = \"*norm*\", rate = 0.5, weight_decay = 0.2 }]";
    let no_embedding = "optimizer.groups=[{ match = \"*embed*\", frozen = true }]";
    let back = ["optimizer.in_backward=true", "optimizer.clip_norm=0"];
    let tied = "model.tie_word_embeddings=true";
    let meshes = ["{replicate=2, shard=2}", "{replicate=1, shard=4, reshard=\"never\"}"];
    for sets in [
        &["train.accumulate=2", "train.z_loss=0.1", tied][..],
        &["train.recompute=full", "optimizer.kind=sgd"],
        &[frozen, "train.recompute=mlp", "train.recompute_layers=1"],
        &[no_embedding, back[0], back[1]],
        &[back[0], back[1], tied],
        &[back[0], back[1], frozen],
    ] {
        beside_one_rank(4, &meshes, &[sets, &["train.batch_rows=4"]].concat(), 1e-5);
    }
    // What is rounded stochastically draws the bits of one rank, but sums of gradients differ in their
    // last bits, which a code may turn into a step of it.
    let int8 = "precision.state=int8_moments";
    for sets in [&[int8][..], &[int8, back[0], back[1]]] {
        beside_one_rank(4, &meshes, &[sets, &["train.batch_rows=4"]].concat(), 1e-4);
    }
    // Parameters that are whole are updated in the backward pass, too.
    beside_one_rank(2, &["{replicate=2}"], &[&back[..], &["train.batch_rows=4"]].concat(), 1e-5);
    let narrow = "mesh.reduce_dtype=bf16";
    beside_one_rank(4, &meshes[..1], &["train.batch_rows=4", narrow], 1e-3);
}

#[test]
fn a_run_goes_on_in_another_mesh() {
    let place = Place::new();
    let sets = ["train.batch_rows=6", "mesh.replicate=2"];
    all_well(6, &place, &place.recipe(&[&sets[..], &["train.steps=2"]].concat()), Start::New);
    let (_, rest) = all_well(3, &place, &place.recipe(&sets[..1]), Start::Resume).remove(0);
    let whole = Place::new();
    let (_, alone) = whole.run(&whole.recipe(&sets[..1]), Start::New).unwrap();
    assert_eq!(rest.losses.len(), 4);
    for (got, want) in values(&rest.losses).into_iter().zip(values(&alone.losses[2..])) {
        assert!((got - want).abs() < 1e-5, "{got} {want}");
    }
}

#[test]
fn a_mesh_has_the_same_bits_over_threads_and_tcp() {
    same_bits_over_threads_and_tcp(&["train.batch_rows=4", "mesh.replicate=2"]);
}

/// Holds a run of four ranks that connect by TCP to the bits of one whose ranks are threads.
pub(super) fn same_bits_over_threads_and_tcp(sets: &[&str]) {
    let recipe = |place: &Place| place.recipe(sets);
    let threads = Place::new();
    let (by_threads, log) = all_well(4, &threads, &recipe(&threads), Start::New).remove(0);
    let place = Place::new();
    let (by_tcp, tcp_log) = by_tcp(4, &place, &recipe(&place)).remove(0);
    assert_eq!(tcp_log, log);
    let [one, other] = [&by_threads, &by_tcp]
        .map(|run| values_of(&run.checkpoint).into_iter().map(f32::to_bits).collect::<Vec<_>>());
    assert!(one == other && !one.is_empty());
}

/// A run whose ranks connect by TCP.
pub(super) fn by_tcp(ranks: usize, place: &Place, recipe: &Recipe) -> Vec<(Summary, Log)> {
    over_tcp(ranks, |world| {
        let mut log = Log::default();
        let done = train_on(world, recipe, &place.file(), Start::New, &mut log);
        (done.unwrap(), log)
    })
}

/// What each of some ranks that connect by TCP does.
pub(super) fn over_tcp<T: Send>(
    ranks: usize,
    run: impl Fn(&dyn Collectives) -> T + Sync,
) -> Vec<T> {
    let port = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
    let of_rank = |rank: usize| {
        let world = connect(&Meeting {
            host: "127.0.0.1".to_owned(),
            port,
            rank,
            ranks,
            run: 1,
            attempt: 0,
            arrival: Duration::from_secs(60),
            deadline: Duration::from_secs(60),
            silence: Duration::from_secs(60),
        });
        run(&world.unwrap())
    };
    let of_rank = &of_rank;
    std::thread::scope(|scope| {
        let ranks: Vec<_> = (0..ranks).map(|rank| scope.spawn(move || of_rank(rank))).collect();
        ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
    })
}

/// A step of a model of some size on ranks that cut its parameters: bytes of weights, gradients and
/// moments that each holds, and the most of parameters that it gathered.
fn held(parts: usize, reshard: Reshard) -> Vec<[usize; 2]> {
    let section = crate::recipe::MeshSection { reshard, ..Default::default() };
    run_threads(parts, Duration::from_secs(60), |world| {
        let ranks = Ranks::in_mesh(world, &section).unwrap();
        let sharing = ParameterRanks { ranks, mesh: &section, replicated: false };
        let mut model = wide();
        model.cut(section.cutting(&ranks.mesh()), world.rank(), &sharing).unwrap();
        model.draw_missing(3).unwrap();
        let rule = foveate_nn::Rule::AdamW(foveate_nn::AdamW {
            beta1: 0.9,
            beta2: 0.95,
            eps: 1e-8,
            weight_decay: 0.1,
        });
        let step = OptimizerStep { rule, step: 1, rate: 1e-3, clip_norm: 1.0, seed: 0 };
        let mut gradients = model.gradients().unwrap();
        let mut moments = model.moments(&rule).unwrap();
        let spans = model.spans(Treatment::of).unwrap();
        let mut totals = model.totals().unwrap();
        let packed = Packed { labels: vec![1; 8], documents: vec![0; 8], ..Packed::empty_row(8) };
        let batch = batch(&packed);
        model.accumulate(&batch, &mut gradients, Recompute::None, &mut totals).unwrap();
        model.update(&step, &spans, &gradients, &mut moments, &mut totals).unwrap();
        let state = [&gradients.array, &moments.mean, &moments.square];
        let elems = model.weights().len() + state.map(Vec::len).iter().sum::<usize>();
        Ok([4 * elems, model.most_gathered_bytes()])
    })
    .unwrap()
}

fn wide() -> Model {
    let config = ModelConfig {
        vocab_size: 512,
        hidden_size: 128,
        intermediate_size: 384,
        num_hidden_layers: 5,
        num_attention_heads: 4,
        num_key_value_heads: None,
        head_dim: None,
        rms_norm_eps: 1e-6,
        rope_theta: 1e4,
        rope_scaling: None,
        rope_pairing: Default::default(),
        max_position_embeddings: 8,
        tie_word_embeddings: false,
        architecture: Default::default(),
    };
    let causal = ProgramConfig { mask: "causal".to_owned(), ..Default::default() };
    Model::unfilled_with(Cpu::default(), config, &causal.into(), &|_| false).unwrap()
}

#[test]
fn a_rank_holds_its_share_and_two_gathered_groups() {
    let model = wide();
    let (all, groups) = (model.layout().elems() * 16, model.layout().groups());
    let pairs = groups.windows(2).map(|pair| 4 * (pair[0].elems() + pair[1].elems()));
    let two = pairs.max().unwrap();
    for parts in [2, 4, 8, 16] {
        for [state, gathered] in held(parts, Reshard::Always) {
            let share = all as f64 / parts as f64;
            assert!(state as f64 <= 1.03 * share, "{parts} ranks: {state} of {share}");
            assert_eq!(gathered, two);
        }
        let training =
            Training { cutting: Cutting { parts, ..Cutting::WHOLE }, ..Recompute::None.into() };
        let planned = model.dry_run(1, 8, StepKind::Training(training)).unwrap().memory();
        let [state, gathered] = held(parts, Reshard::Always)[0];
        // Besides what is held, the gradients of a group that is computed and of one on its way.
        let passing = 2 * 4 * groups.iter().map(|group| group.place.len()).max().unwrap();
        let total = planned.weights + planned.gradients + planned.optimizer;
        assert_eq!(total as usize, state + gathered + passing);
    }
    // The backward pass does not read the embedding.
    let kept = all / 4 - 4 * groups[0].elems();
    for (reshard, most) in [(Reshard::AfterBackward, kept), (Reshard::Never, all / 4)] {
        assert!(held(4, reshard).iter().all(|&[_, gathered]| gathered == most), "{reshard:?}");
    }
}

/// A copy of the run in `from`, and of its documents.
pub(super) fn copied(from: &Place) -> Place {
    let to = Place::new();
    for (path, bytes) in files_of(&from.0.path().join("run")) {
        let path = to.0.path().join("run").join(path);
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(path, bytes).unwrap();
    }
    to
}

#[test]
fn a_run_goes_on_in_every_mesh_from_what_every_other_one_saved() {
    each_goes_on_from_every_other(&[
        (1, "mesh={}"),
        (2, "mesh={shard=2}"),
        (3, "mesh={shard=3}"),
        (2, "mesh={replicate=2}"),
        (4, "mesh={replicate=2, shard=2}"),
        (2, "mesh={context=2}"),
    ]);
}

/// Holds runs that a mesh began and another ends to the losses and weights of one rank, for every pair of
/// meshes, each with its ranks.
pub(super) fn each_goes_on_from_every_other(meshes: &[(usize, &str)]) {
    let sets = |steps, mesh| [steps, mesh, "train.batch_rows=4", "train.save_every=0"];
    let run = |place: &Place, ranks, steps, mesh, start| {
        all_well(ranks, place, &place.recipe(&sets(steps, mesh)), start).remove(0)
    };
    let straight = Place::new();
    let (whole, alone) = run(&straight, 1, "train.steps=3", "mesh={}", Start::New);
    let wanted = values_of(&whole.checkpoint);
    for &(ranks, wrote) in meshes {
        let first = Place::new();
        run(&first, ranks, "train.steps=2", wrote, Start::New);
        for &(ranks, reads) in meshes {
            let place = copied(&first);
            let (summary, log) = run(&place, ranks, "train.steps=3", reads, Start::Resume);
            let [loss] = values(&log.losses)[..] else { panic!("{wrote} to {reads}: {log:?}") };
            let off = (loss - values(&alone.losses)[2]).abs();
            assert!(off < 1e-5, "{wrote} to {reads}: the loss is {off} off");
            let found = values_of(&summary.checkpoint);
            let off = found.iter().zip(&wanted).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
            assert!(off < 1e-4, "{wrote} to {reads}: a weight is {off} off");
        }
    }
}
