//! Reading weights and states, each tensor held to its checksum.

use std::collections::BTreeMap;
use std::fs;
use std::ops::Range;
use std::path::{Path, PathBuf};

use foveate_nn::moments::{Filler, Moment};
use foveate_nn::{Blocks, Model, Moments, Parameter, Rule};
use serde_json::Value;

use super::checksums::{Checksums, Manifest};
use super::content::Kept;
use super::store::Store;
use super::{INDEX, MASTERS, PICKLED_INDEX, SINGLE, STATE, State, layout, read_json, unreadable};
use crate::error::TrainError;
use crate::whole;

/// The weights of a checkpoint, and the names of their tensors by those of the parameters.
pub(super) fn weights(
    folder: &Path,
    sums: Option<&Manifest>,
) -> Result<(Store, BTreeMap<String, String>), TrainError> {
    if let Some(store) = Store::of_layout(folder, sums)? {
        let prefix = format!("{}:", Kept::Weight.name());
        let weights = store.names().filter_map(|name| Some((name.strip_prefix(&prefix)?, name)));
        let names = weights.map(|(name, tensor)| (name.to_owned(), tensor.to_owned())).collect();
        return Ok((store, names));
    }
    let store = Store::of_files(weight_files(folder)?, sums.cloned())?;
    let names = store.names().map(|name| (name.to_owned(), name.to_owned())).collect();
    Ok((store, names))
}

/// The files with the weights of a checkpoint of Hugging Face's layout.
fn weight_files(folder: &Path) -> Result<Vec<PathBuf>, TrainError> {
    let index = folder.join(INDEX);
    if index.exists() {
        let json = read_json(&index)?;
        let Some(map) = json.get("weight_map").and_then(Value::as_object) else {
            return Err(TrainError::checkpoint(&index, "has no `weight_map`"));
        };
        let mut names: Vec<&str> = map.values().filter_map(Value::as_str).collect();
        names.sort_unstable();
        names.dedup();
        return Ok(names.into_iter().map(|n| folder.join(n)).collect());
    }
    let file = folder.join(SINGLE);
    let pickled = || ["pytorch_model.bin", PICKLED_INDEX].map(|n| folder.join(n));
    if !file.exists() && pickled().iter().any(|other| other.exists()) {
        let message = "is missing; only safetensors are read, so convert pytorch_model.bin first";
        return Err(TrainError::checkpoint(&file, message));
    }
    whole::check_regular(&file).map_err(|e| unreadable(&file, &e))?;
    Ok(vec![file])
}

/// Whether a tensor follows from others.
pub(super) fn is_derived(name: &str, tied: bool) -> bool {
    name.ends_with("rotary_emb.inv_freq") || (tied && name == "lm_head.weight")
}

/// Reads weights into `model`; of parameters that are cut over ranks, the elements of its share. Learned
/// attention buffers that the files do not have stay as they are; their names are returned.
///
/// # Errors
/// Names the file, and the tensor, that is missing, damaged, not finite, of another shape or not
/// known.
pub fn load_weights<B: Blocks>(
    folder: &Path,
    model: &mut Model<B>,
    checksums: Checksums,
) -> Result<Vec<String>, TrainError> {
    let sums = checksums.of(folder)?;
    let (mut store, names) = weights(folder, sums.as_ref())?;
    store.is_here()?;
    let tied = model.config().tie_word_embeddings;
    let mut missing: BTreeMap<String, usize> =
        model.parameters().iter().enumerate().map(|(i, p)| (p.name.clone(), i)).collect();
    for (name, tensor) in names.iter().filter(|(name, _)| !is_derived(name, tied)) {
        let refuse = |message: String| Err(TrainError::checkpoint(store.path(tensor), message));
        let Some(i) = missing.remove(name) else {
            return refuse(format!("tensor `{name}` is not one of this model's"));
        };
        let parameter = &model.parameters()[i];
        let shape = store.shape(tensor).expect("it is one of the names");
        if parameter.shape != shape {
            return refuse(format!(
                "tensor `{name}` has shape {shape:?}, but config.json makes it {:?}",
                parameter.shape
            ));
        }
        let (elems, own) = (parameter.elems(), own(model, parameter));
        model.fill(i, |put| read_own(&mut store, tensor, elems, &own, put))?;
    }
    let standard = |name: &str| name.ends_with(".weight") || name.ends_with("_proj.bias");
    if let Some(name) = missing.keys().find(|n| standard(n)) {
        let message = format!("tensor `{name}` is missing");
        return Err(TrainError::checkpoint(store.path(name), message));
    }
    Ok(missing.into_keys().collect())
}

/// The elements of a parameter that this rank keeps, in order; of columns the rows that they are in.
pub(super) fn own<B: Blocks>(model: &Model<B>, parameter: &Parameter) -> Vec<Range<usize>> {
    let share = model.share();
    if parameter.cut.as_ref().is_some_and(|cut| cut.axis == 1) {
        let pieces = share.pieces(&parameter.place);
        let (Some((first, _)), Some((last, _))) = (pieces.first(), pieces.last()) else {
            return Vec::new();
        };
        let [rows, width] = [parameter.shape[0], parameter.shape[1]];
        let own = (parameter.place.len() / rows).max(1);
        let row = |place: usize| (place - parameter.place.start) / own;
        let rows = row(first.start)..row(last.end - 1) + 1;
        return std::iter::once(rows.start * width..rows.end * width).collect();
    }
    let runs = parameter.held(0..parameter.elems());
    let kept = |(whole, first): (Range<usize>, usize)| {
        let pieces = share.pieces(&(first..first + whole.len())).into_iter();
        pieces.map(move |(piece, _)| {
            let start = whole.start + (piece.start - first);
            start..start + piece.len()
        })
    };
    runs.into_iter().flat_map(kept).collect()
}

/// Gives the `elems` elements of a tensor to `put`. Those in `own` are read; of the others, which the rank does
/// not keep, zeros are given.
fn read_own(
    store: &mut Store,
    tensor: &str,
    elems: usize,
    own: &[Range<usize>],
    put: &mut dyn FnMut(&[f32]) -> Result<(), TrainError>,
) -> Result<(), TrainError> {
    let mut at = 0;
    for piece in own.iter().chain([&(elems..elems)]) {
        while at < piece.start {
            let zeros = &ZEROS[..(piece.start - at).min(ZEROS.len())];
            put(zeros)?;
            at += zeros.len();
        }
        store.read(tensor, elems, piece.clone(), put)?;
        at = piece.end;
    }
    Ok(())
}

/// What stands for elements that are not read.
static ZEROS: [f32; 1 << 14] = [0.0; 1 << 14];

/// What one of our own checkpoints has for a resume: f32 weights and moments.
pub(super) fn masters(folder: &Path, sums: Option<&Manifest>) -> Result<Store, TrainError> {
    match Store::of_layout(folder, sums)? {
        Some(store) => Ok(store),
        None => Store::of_files(masters_of(folder), sums.cloned()),
    }
}

/// What a run of ours had reached.
pub(super) fn state(folder: &Path, sums: Option<&Manifest>) -> Result<State, TrainError> {
    let path = folder.join(STATE);
    let text = whole::read(&path).map_err(|e| unreadable(&path, &e))?;
    if let Some(sums) = sums {
        sums.check(&path, &text)?;
    }
    serde_json::from_slice(&text)
        .map_err(|e| TrainError::checkpoint(&path, format!("is not a training state: {e}")))
}

/// Reads f32 masters, moments and state of one of our own checkpoints; of parameters that are cut over ranks, the
/// elements of the model's share.
///
/// # Errors
/// Names the file and the tensor that is missing, damaged or not finite.
pub fn load_state<B: Blocks>(
    folder: &Path,
    model: &mut Model<B>,
    rule: &Rule,
    checksums: Checksums,
) -> Result<(Moments<B::Array>, State), TrainError> {
    let needed = match folder.join(layout::FILE) {
        layout if layout.exists() || layout::has_parts(folder) => layout,
        _ => masters_of(folder).remove(0),
    };
    let is_sharded = needed.ends_with(layout::FILE);
    let weights = folder.join(if folder.join(INDEX).exists() { INDEX } else { SINGLE });
    let needed = [folder.join(STATE), needed, weights];
    let needed = &needed[..if is_sharded { 2 } else { 3 }];
    if let Some(missing) = needed.iter().find(|file| !file.exists()) {
        let message =
            "is missing; put it back, or remove this checkpoint and resume from an earlier one";
        return Err(TrainError::checkpoint(missing, message));
    }
    let sums = checksums.of_ours(folder)?;
    let state = state(folder, sums.as_ref())?;
    // Nothing of the saved weights is read, but a checkpoint without them is not whole, and an earlier one that is
    // may be removed at the next save.
    if !is_sharded {
        self::weights(folder, sums.as_ref())?;
    }
    let mut store = masters(folder, sums.as_ref())?;
    let mut moments = model.moments(rule)?;
    // Blocks of moments are whole where they are of several parameters.
    let mut fillers = [Filler::default(), Filler::default()];
    for (i, p) in model.parameters().to_vec().iter().enumerate() {
        let own = own(model, p);
        let mut read = |kept: Kept, put: &mut dyn FnMut(&[f32]) -> Result<(), TrainError>| {
            let name = layout::tensor(kept, p);
            match store.shape(&name) {
                Some(shape) if shape != p.shape => {
                    let message = format!("tensor `{name}` has shape {shape:?}, not {:?}", p.shape);
                    Err(TrainError::checkpoint(store.path(&name), message))
                }
                _ => read_own(&mut store, &name, p.elems(), &own, put),
            }
        };
        model.fill(i, |put| read(Kept::Weight, put))?;
        if !model.layout().trains(&p.place) {
            continue;
        }
        for ((moment, array), filler) in kept(&mut moments, rule).into_iter().zip(&mut fillers) {
            let mut at = 0;
            read(Kept::Moment(moment), &mut |values| {
                for (held, place) in p.held(at..at + values.len()) {
                    let put = |at, some: &[f32]| model.upload_moment(moment, array, at, some);
                    filler.put(place, &values[held.start - at..held.end - at], put)?;
                }
                at += values.len();
                Ok(())
            })?;
        }
    }
    for ((moment, array), filler) in kept(&mut moments, rule).into_iter().zip(&mut fillers) {
        filler.finish(|at, some| model.upload_moment(moment, array, at, some))?;
    }
    Ok((moments, state))
}

/// What a resume reads of a parameter.
pub(super) fn kept_of<B: Blocks>(
    model: &Model<B>,
    parameter: &Parameter,
    rule: &Rule,
) -> impl Iterator<Item = Kept> {
    let kept = [Kept::Weight, Kept::Moment(Moment::Mean), Kept::Moment(Moment::Square)];
    let count = match model.layout().trains(&parameter.place) {
        true => 2 + usize::from(rule.keeps_squares()),
        false => 1,
    };
    kept.into_iter().take(count)
}

/// The moments that `rule` keeps.
fn kept<'a, A>(moments: &'a mut Moments<A>, rule: &Rule) -> Vec<(Moment, &'a mut A)> {
    let Moments { mean, square } = moments;
    let all = [(Moment::Mean, mean), (Moment::Square, square)];
    all.into_iter().take(1 + usize::from(rule.keeps_squares())).collect()
}

/// The files with masters and moments, in order; the one of a small model where there is none.
pub(super) fn masters_of(folder: &Path) -> Vec<PathBuf> {
    let entries = fs::read_dir(folder).into_iter().flatten().flatten();
    let is_part = |name: &str| name.starts_with("masters-") && name.ends_with(".safetensors");
    let parts = entries
        .map(|entry| entry.path())
        .filter(|path| path.file_name().and_then(|name| name.to_str()).is_some_and(is_part));
    let mut parts: Vec<PathBuf> = parts.collect();
    parts.sort();
    if parts.is_empty() { vec![folder.join(MASTERS)] } else { parts }
}
