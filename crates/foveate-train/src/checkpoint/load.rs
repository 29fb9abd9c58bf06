//! Reading weights and states, each tensor held to its checksum.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use foveate_nn::moments::{Filler, Moment};
use foveate_nn::{Blocks, Model, Moments, Rule};
use serde_json::Value;

use super::checksums::{Checksums, Manifest};
use super::{INDEX, MASTERS, PICKLED_INDEX, SINGLE, STATE, State, name_of, read_json, unreadable};
use crate::error::TrainError;
use crate::safetensors::Tensors;
use crate::whole;

fn open(file: &Path, sums: Option<&Manifest>) -> Result<Tensors, TrainError> {
    let tensors = Tensors::open(file)?;
    match sums {
        Some(sums) => Ok(tensors.verified_by(sums.tensors(file)?)),
        None => Ok(tensors),
    }
}

/// Reads weights into `model`. Learned attention buffers that the files do not have stay as they
/// are; their names are returned.
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
    let index = folder.join(INDEX);
    let files: Vec<PathBuf> = if index.exists() {
        let json = read_json(&index)?;
        let Some(map) = json.get("weight_map").and_then(Value::as_object) else {
            return Err(TrainError::checkpoint(&index, "has no `weight_map`"));
        };
        let mut names: Vec<&str> = map.values().filter_map(Value::as_str).collect();
        names.sort_unstable();
        names.dedup();
        names.into_iter().map(|n| folder.join(n)).collect()
    } else {
        let file = folder.join(SINGLE);
        let pickled = || ["pytorch_model.bin", PICKLED_INDEX].map(|n| folder.join(n));
        if !file.exists() && pickled().iter().any(|other| other.exists()) {
            let message =
                "is missing; only safetensors are read, so convert pytorch_model.bin first";
            return Err(TrainError::checkpoint(&file, message));
        }
        whole::check_regular(&file).map_err(|e| unreadable(&file, &e))?;
        vec![file]
    };
    let tied = model.config().tie_word_embeddings;
    let mut missing: BTreeMap<String, usize> =
        model.parameters().iter().enumerate().map(|(i, p)| (p.name.clone(), i)).collect();
    for file in &files {
        let mut tensors = open(file, sums.as_ref())?;
        let names: Vec<String> = tensors.names().map(str::to_owned).collect();
        for name in names {
            let derived =
                name.ends_with("rotary_emb.inv_freq") || (tied && name == "lm_head.weight");
            if derived {
                continue;
            }
            let Some(i) = missing.remove(&name) else {
                let message =
                    format!("tensor `{name}` is not one of this model's, or stands twice");
                return Err(TrainError::checkpoint(file, message));
            };
            let parameter = &model.parameters()[i];
            let shape = tensors.shape(&name).expect("it is one of the names");
            if parameter.shape != shape {
                let message = format!(
                    "tensor `{name}` has shape {shape:?}, but config.json makes it {:?}",
                    parameter.shape
                );
                return Err(TrainError::checkpoint(file, message));
            }
            let elems = parameter.place.len();
            model.fill(i, |put| tensors.read(&name, elems, put))?;
        }
    }
    let standard = |name: &str| name.ends_with(".weight") || name.ends_with("_proj.bias");
    if let Some(name) = missing.keys().find(|n| standard(n)) {
        let file = files.last().expect("there is a file");
        return Err(TrainError::checkpoint(file, format!("tensor `{name}` is missing")));
    }
    Ok(missing.into_keys().collect())
}

/// Reads f32 masters, moments and state of one of our own checkpoints.
///
/// # Errors
/// Names the file and the tensor that is missing, damaged or not finite.
pub fn load_state<B: Blocks>(
    folder: &Path,
    model: &mut Model<B>,
    rule: &Rule,
    checksums: Checksums,
) -> Result<(Moments<B::Array>, State), TrainError> {
    let path = folder.join(STATE);
    let masters = masters_of(folder);
    if let Some(missing) = [&path, &masters[0]].into_iter().find(|file| !file.exists()) {
        let message =
            "is missing; put it back, or remove this checkpoint and resume from an earlier one";
        return Err(TrainError::checkpoint(missing, message));
    }
    let sums = checksums.of_ours(folder)?;
    let text = whole::read(&path).map_err(|e| unreadable(&path, &e))?;
    if let Some(sums) = &sums {
        sums.check(&path, &text)?;
    }
    let state: State = serde_json::from_slice(&text)
        .map_err(|e| TrainError::checkpoint(&path, format!("is not a training state: {e}")))?;
    let mut files = Vec::new();
    for path in masters {
        files.push((open(&path, sums.as_ref())?, path));
    }
    let mut moments = model.moments(rule)?;
    // Blocks of moments are whole where they are of several parameters.
    let mut fillers = [Filler::default(), Filler::default()];
    for (i, p) in model.parameters().to_vec().iter().enumerate() {
        let mut read = |kind: &str, put: &mut dyn FnMut(&[f32]) -> Result<(), TrainError>| {
            let name = format!("{kind}:{}", p.name);
            let holds = |(tensors, _): &(Tensors, PathBuf)| tensors.shape(&name).is_some();
            let file = files.iter().position(holds).unwrap_or(0);
            let (tensors, path) = &mut files[file];
            match tensors.shape(&name) {
                Some(shape) if shape != p.shape => {
                    let message = format!("tensor `{name}` has shape {shape:?}, not {:?}", p.shape);
                    Err(TrainError::checkpoint(path, message))
                }
                _ => tensors.read(&name, p.place.len(), put),
            }
        };
        model.fill(i, |put| read("weight", put))?;
        if !model.layout().trains(&p.place) {
            continue;
        }
        for ((moment, array), filler) in kept(&mut moments, rule).into_iter().zip(&mut fillers) {
            let mut first = p.place.start;
            read(name_of(moment), &mut |values| {
                let put = |at, some: &[f32]| model.upload_moment(moment, array, at, some);
                filler.put(first, values, put)?;
                first += values.len();
                Ok(())
            })?;
        }
    }
    for ((moment, array), filler) in kept(&mut moments, rule).into_iter().zip(&mut fillers) {
        filler.finish(|at, some| model.upload_moment(moment, array, at, some))?;
    }
    Ok((moments, state))
}

/// The moments that `rule` keeps.
fn kept<'a, A>(moments: &'a mut Moments<A>, rule: &Rule) -> Vec<(Moment, &'a mut A)> {
    let Moments { mean, square } = moments;
    let all = [(Moment::Mean, mean), (Moment::Square, square)];
    all.into_iter().take(1 + usize::from(rule.keeps_squares())).collect()
}

/// The files with masters and moments, in order; the one of a small model where there is none.
fn masters_of(folder: &Path) -> Vec<PathBuf> {
    let entries = fs::read_dir(folder).into_iter().flatten().flatten();
    let is_part = |name: &str| name.starts_with("masters-") && name.ends_with(".safetensors");
    let parts = entries
        .map(|entry| entry.path())
        .filter(|path| path.file_name().and_then(|name| name.to_str()).is_some_and(is_part));
    let mut parts: Vec<PathBuf> = parts.collect();
    parts.sort();
    if parts.is_empty() { vec![folder.join(MASTERS)] } else { parts }
}
