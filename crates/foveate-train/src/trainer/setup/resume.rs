//! What a run that goes on has to have in common with the run that was.

use std::collections::BTreeMap;
use std::path::Path;

use foveate::DType;
use foveate::tensor::count::Count;
use foveate_nn::{Blocks, Model, MomentDtype, ParameterState, Precision, Rule};
use serde::Serialize;

use super::super::Anew;
use super::super::disks::{Disks, Newest, Whole};
use super::super::folder::{Folder, Reached};
use super::Began;
use crate::checkpoint::{self, Checksums, State};
use crate::error::{TrainError, TrainErrorKind};
use crate::ranks::Ranks;
use crate::recipe::{DataSection, Recipe};

/// What a run that is to be resumed goes on from: the checkpoint that is whole over several disks, that of the one
/// disk, or none and why. All ranks call it, and find the same.
///
/// # Errors
/// When a log has a checkpoint and none is there, or one of several disks has a part of one that is not whole.
pub(super) fn found(
    ranks: Ranks<'_>,
    disks: &mut Disks,
    folder: Folder<'_>,
) -> Result<(Option<Whole>, Option<Anew>), TrainError> {
    let checkpoints = folder.checkpoints();
    let own = (ranks.together(folder.reached())?, checkpoint::latest(&checkpoints).is_some());
    let all = ranks.all(&serde_json::to_vec(&own).expect("numbers"))?;
    let parse = |own: &Vec<u8>| serde_json::from_slice::<(Option<Reached>, bool)>(own).ok();
    let all: Vec<_> = all.iter().filter_map(parse).collect();
    if disks.are_several() {
        let unsaved = all.iter().all(|(reached, _)| reached.is_some_and(|run| !run.saved));
        match disks.newest(ranks, &checkpoints, unsaved)? {
            Newest::Whole(whole) => return Ok((Some(whole), None)),
            Newest::Torn(lacks) => return Ok((None, Some(Anew::Torn { lacks }))),
            Newest::Nothing => {}
        }
    } else if all.iter().any(|(_, saved)| *saved) {
        return Ok((None, None));
    }
    if let Some(rank) = all.iter().position(|(reached, _)| reached.is_some_and(|run| run.saved)) {
        let own = if ranks.rank() == rank { Err(folder.lost_checkpoints()) } else { Ok(()) };
        ranks.together(own)?;
    }
    let step = all.iter().filter_map(|(reached, _)| Some((*reached)?.step)).max();
    Ok((None, Some(step.map_or(Anew::NoRun, |step| Anew::Unsaved { step }))))
}

/// Notes what steps run on from here on. Of a resumed run, what they ran on before where that was
/// another device, or else what was other of what their bits depend on.
pub(super) fn moved(
    state: &mut State,
    resumed: bool,
    gpu: Option<String>,
    depends: BTreeMap<String, String>,
) -> (Option<String>, Vec<String>) {
    let before = std::mem::replace(&mut state.gpu, gpu);
    let depended = std::mem::replace(&mut state.bits_depend_on, depends);
    if resumed && before != state.gpu {
        return (Some(before.unwrap_or_else(|| "the CPU".to_owned())), Vec::new());
    }
    let changed = if resumed { differences(&depended, &state.bits_depend_on) } else { Vec::new() };
    (None, changed)
}

/// What is other than it was, in words; nothing of what was not recorded.
fn differences(before: &BTreeMap<String, String>, now: &BTreeMap<String, String>) -> Vec<String> {
    let differs = |(name, was): (&String, &String)| {
        let is = now.get(name).map_or("nothing", String::as_str);
        (was != is).then(|| format!("{name}: {was} before, {is} now"))
    };
    before.iter().filter_map(differs).collect()
}

/// Moments and state of the checkpoint `last`, whose weights go into `model`. No buffer is fresh.
pub(super) fn resumed<B: Blocks>(
    asked: u64,
    last: &Path,
    model: &mut Model<B>,
    rule: &Rule,
    fingerprint: u64,
    checksums: Checksums,
) -> Result<Began<B>, TrainError> {
    let loaded = checkpoint::load_state(last, model, rule, checksums);
    let (moments, state) = loaded.map_err(|e| instead_of(last, e))?;
    if state.fingerprint != fingerprint {
        let message =
            "the documents are not those this run was trained on; restore them, or start a new run";
        return Err(TrainError::checkpoint(last, message));
    }
    let done = state.step;
    if done > asked {
        let message = format!(
            "the run has taken {}, but {asked} are asked for; ask for more with train.steps or \
             train.epochs",
            Count(done as usize, "step")
        );
        return Err(TrainError::checkpoint(last, message));
    }
    Ok((moments, state, Vec::new()))
}

/// The error of reading the checkpoint `last`, with where to go on instead if `last` is damaged.
fn instead_of(last: &Path, e: TrainError) -> TrainError {
    let TrainErrorKind::Checkpoint { path, message } = e.kind() else { return e };
    if checkpoint::is_intact(last) {
        return e;
    }
    let (path, name) = (path.clone(), last.file_name().unwrap_or_default().display());
    let remedy = match checkpoint::intact_before(last) {
        Some(earlier) => format!(
            "; or go on from {}, which is intact: rename {name} to damaged-{name}, and give --resume again",
            earlier.display()
        ),
        None => "; no other checkpoint of this run is intact: without this one, start over with \
                 --start-over"
            .to_owned(),
    };
    TrainError::checkpoint(&path, format!("{message}{remedy}"))
}

/// Refuses to continue a run whose recipe, saved at `path`, made other steps of the same documents.
/// Steps, rates and what is saved when may change, and so may `data.exclude`: the fingerprint tells
/// whether the documents are the same, and files of the run may have to be left out of them.
pub(super) fn same_run(recipe: &Recipe, path: &Path) -> Result<(), TrainError> {
    if !path.exists() {
        let message = "is missing; put back the recipe that the run here was started with, or start \
                       a new run in another run.dir";
        return Err(TrainError::checkpoint(path, message));
    }
    let saved = Recipe::read(path, &[]).map_err(|e| {
        let remedy = "it is the recipe that the run here was started with: put it back, or start a new run \
                      in another run.dir";
        match e.kind() {
            TrainErrorKind::Recipe { place, position, message } => TrainErrorKind::Recipe {
                place: place.clone(),
                position: *position,
                message: format!("{message}; {remedy}"),
            }
            .into(),
            _ => e,
        }
    })?;
    let (old, new) = (&saved.train, &recipe.train);
    let data = DataSection { exclude: recipe.data.exclude.clone(), ..saved.data.clone() };
    let states = [saved.precision.state, recipe.precision.state];
    let is_kept = keeps(kept(recipe), kept(&saved));
    let changes = [
        change("run.seed", &saved.run.seed, &recipe.run.seed),
        change("[model]", &saved.model, &recipe.model),
        change("[attention]", &saved.attention, &recipe.attention),
        change("[data]", &data, &recipe.data),
        change("train.batch_rows", &old.batch_rows, &new.batch_rows),
        change("train.accumulate", &old.accumulate, &new.accumulate),
        change("train.z_loss", &old.z_loss, &new.z_loss),
        change("optimizer.kind", &saved.optimizer.kind, &recipe.optimizer.kind),
        change("optimizer.groups", &frozen(&saved), &frozen(recipe)),
        change("precision.state", &states[0], &states[1]).filter(|_| !is_kept),
    ];
    match changes.into_iter().flatten().next() {
        Some(change) => {
            let message = format!("{change}; restore it, or start a new run in another run.dir");
            Err(TrainError::checkpoint(path, message))
        }
        None => Ok(()),
    }
}

/// That a field, or a section in brackets, has another value than it had, and the first that differs in it.
fn change<T: PartialEq + Serialize>(key: &str, was: &T, is: &T) -> Option<String> {
    let [before, now] = [was, is].map(|value| toml::Value::try_from(value).ok());
    (was != is).then(|| {
        let values = difference(key.trim_matches(['[', ']']), before.as_ref(), now.as_ref());
        let values = values.map_or(String::new(), |values| format!(": {values}"));
        format!("{key} is not what this run was started with{values}")
    })
}

/// The first place in the value of `field` where it is another one than it was. A value that is missing is none
/// that was given.
fn difference(field: &str, was: Option<&toml::Value>, is: Option<&toml::Value>) -> Option<String> {
    use toml::Value::{Array, String as Text, Table};
    if was == is {
        return None;
    }
    if let (Some(Table(was)), Some(Table(is))) = (was, is) {
        let of = |key: &String| difference(&format!("{field}.{key}"), was.get(key), is.get(key));
        return was.keys().chain(is.keys()).find_map(of);
    }
    // Tables of numbers and long masks are not for a line.
    const LONG: usize = 80;
    let shown = |value: Option<&toml::Value>| value.map_or("not given".into(), ToString::to_string);
    let (before, now) = (shown(was), shown(is));
    Some(match (was, is) {
        _ if before.len().max(now.len()) <= LONG => format!("{field} was {before} and is {now}"),
        (Some(Array(was)), Some(Array(is))) if was.len() == is.len() => {
            let of = |i: usize| difference(&format!("{field}[{i}]"), was.get(i), is.get(i));
            return (0..was.len()).find_map(of);
        }
        (Some(Array(was)), Some(Array(is))) => {
            format!("{field} had {} and has {}", Count(was.len(), "value"), is.len())
        }
        (Some(Text(was)), Some(Text(is))) => {
            let same = was.chars().zip(is.chars()).take_while(|(a, b)| a == b).count();
            let rest = |text: &str| text.chars().skip(same).take(LONG / 2).collect::<String>();
            let [was, is] = [was, is].map(|text| rest(text));
            format!("{field} from character {} on was {was:?} and is {is:?}", same + 1)
        }
        _ => format!("{field} was another"),
    })
}

/// Whether a recipe freezes what each of its groups names, in words; nothing where it freezes nothing.
fn frozen(recipe: &Recipe) -> Vec<String> {
    let groups = &recipe.optimizer.groups;
    // Groups before a frozen one may take parameters from it.
    let any = groups.iter().any(|group| group.frozen);
    let of = |frozen| if frozen { "frozen" } else { "trained" };
    groups.iter().filter(|_| any).map(|g| format!("{} {}", g.names, of(g.frozen))).collect()
}

/// What a recipe keeps of each parameter. What it keeps where it names no state, on a CPU or a GPU, is exact.
fn kept(recipe: &Recipe) -> Precision {
    recipe.precision.state.unwrap_or(ParameterState::Exact).into()
}

/// Whether `new` keeps masters and moments of `old` without rounding them: neither of bf16 moments and moments of
/// 8 bits has the numbers of the other.
fn keeps(new: Precision, old: Precision) -> bool {
    let has_masters = |of: Precision| of.weights == DType::F32 || of.remainders;
    (has_masters(new) || !has_masters(old))
        && (new.moments == MomentDtype::F32 || new.moments == old.moments)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_kept_is_not_rounded_in_the_middle_of_a_run() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("recipe.toml");
        let recipe = |state: Option<ParameterState>| {
            let text = "[run]\ndir = \"x\"\n[model]\ncheckpoint = \"c\"\n\
                        [data]\nfiles = [\"*.txt\"]\nlen = 8\n";
            let mut recipe = Recipe::parse(text, "r.toml", &[]).unwrap();
            recipe.precision.state = state;
            recipe
        };
        use ParameterState::{
            Bf16, Bf16Gradients, Bf16Moments, Exact, F32, HostMoments, Int8Moments,
        };
        let all: Vec<_> =
            std::iter::once(None).chain(ParameterState::ALL.into_iter().map(Some)).collect();
        let exact = [None, Some(F32), Some(Exact), Some(Bf16Gradients), Some(HostMoments)];
        for &saved in &all {
            std::fs::write(&path, recipe(saved).to_toml().unwrap()).unwrap();
            for &new in &all {
                let is_kept = new == saved
                    || exact.contains(&new)
                    || (saved, new) == (Some(Bf16), Some(Bf16Moments));
                let refused = same_run(&recipe(new), &path).map_err(|e| e.to_string());
                assert_eq!(refused.is_ok(), is_kept, "{saved:?} to {new:?}: {refused:?}");
            }
        }
        std::fs::write(&path, recipe(Some(Int8Moments)).to_toml().unwrap()).unwrap();
        let told = same_run(&recipe(Some(Bf16Moments)), &path).unwrap_err().to_string();
        let values = "precision.state was \"int8_moments\" and is \"bf16_moments\"; restore it";
        assert!(told.contains(values), "{told}");
    }
}
