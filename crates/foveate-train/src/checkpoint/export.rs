//! Looking into a checkpoint, and writing its weights as Hugging Face's tools read them.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::ops::Range;
use std::path::{Path, PathBuf};

use foveate_nn::Parameter;
use serde::Serialize;

use super::checksums::Checksums;
use super::config::expect_checkpoint;
use super::content::{Carried, Content, Kept, Values};
use super::load::{masters, masters_of, state, weights};
use super::save::Save;
use super::store::{Found, Store};
use super::{COMPANIONS, CONFIG, STATE, State, layout, read_json, within_a_run};
use crate::error::TrainError;
use crate::recipe::SaveDtype;

/// What a checkpoint holds.
#[derive(Clone, Debug, Serialize)]
pub struct Contents {
    /// Its folder.
    pub folder: PathBuf,
    /// What the run had reached; none where no run continues from it.
    pub state: Option<State>,
    /// Whether several ranks wrote it, in ranges that `layout.json` lists.
    pub sharded: bool,
    /// All tensors, weights first, by name.
    pub tensors: Vec<TensorContents>,
    /// Files with tensors that are not here, because ranks of other hosts wrote them to disks of their own.
    pub elsewhere: Vec<ElsewhereContents>,
}

/// A file of a checkpoint that is on another disk.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct ElsewhereContents {
    /// The file's name.
    pub file: String,
    /// What is in it, who wrote it, and how to bring it.
    pub why: String,
}

/// A tensor of a checkpoint.
#[derive(Clone, Debug, Serialize)]
pub struct TensorContents {
    /// Its name; `weight:`, `mean:` and `square:` are what a resume reads.
    pub name: String,
    /// Its dtype, as safetensors calls it.
    pub dtype: String,
    /// Length of each axis.
    pub shape: Vec<usize>,
    /// Where its elements are, those that are here.
    pub ranges: Vec<RangeContents>,
}

/// Elements of a tensor in a file.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct RangeContents {
    /// The file's name.
    pub file: String,
    /// The first element, counted in the tensor, row-major, or in the columns of it.
    pub first: usize,
    /// Elements.
    pub elems: usize,
    /// The first column of which they are elements, and the one behind the last; all where there are none.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub columns: Option<[usize; 2]>,
    /// The bytes of the file that they are.
    pub bytes: Range<u64>,
}

/// Lists what a checkpoint holds, or the part of it that is on this disk. With `read_all` everything that is here is
/// read and held to its checksum, where there is one.
///
/// # Errors
/// Names the file, and the tensor, that is missing, damaged or not finite.
pub fn contents(
    folder: &Path,
    checksums: Checksums,
    read_all: bool,
) -> Result<Contents, TrainError> {
    expect_checkpoint(folder)?;
    let sums = checksums.of(folder)?;
    let sharded = folder.join(layout::FILE).exists();
    let mut stores = vec![weights(folder, sums.as_ref())?.0];
    if !sharded && masters_of(folder).iter().all(|file| file.exists()) {
        stores.push(masters(folder, sums.as_ref())?);
    }
    let (mut tensors, mut elsewhere) = (Vec::new(), Vec::new());
    for mut store in stores {
        elsewhere.extend(store.elsewhere().map(|(path, why)| ElsewhereContents {
            file: path.file_name().unwrap_or_default().to_string_lossy().into_owned(),
            why: why.to_owned(),
        }));
        for name in store.names().map(str::to_owned).collect::<Vec<_>>() {
            let shape = store.shape(&name).expect("it is one of the names").to_vec();
            if read_all {
                store.verify(&name)?;
            }
            let (dtype, found) = store.find(&name)?;
            let range = |Found { path, first, elems, columns, bytes }: Found| {
                let file = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
                RangeContents { file, first, elems, columns, bytes }
            };
            let ranges = found.into_iter().map(range).collect();
            tensors.push(TensorContents { name, dtype, shape, ranges });
        }
    }
    let state = folder.join(STATE).exists().then(|| state(folder, sums.as_ref())).transpose()?;
    Ok(Contents { folder: folder.to_owned(), state, sharded, tensors, elsewhere })
}

/// Writes the weights of the checkpoint in `folder` to the new folder `to`, in Hugging Face's layout:
/// `config.json`, tokenizer files, `model.safetensors` or shards of at most 5 GB with an index, in `dtype`.
/// Tensors are read and written in pieces, so memory does not grow with the model. The folder is whole or
/// absent.
///
/// # Errors
/// When `to` is there already, lies among the checkpoints of a run or cannot be written, a tensor is missing or on
/// another disk, damaged or not finite, or a value has no finite form in `dtype`.
pub fn export(
    folder: &Path,
    to: &Path,
    dtype: SaveDtype,
    checksums: Checksums,
) -> Result<(), TrainError> {
    expect_checkpoint(folder)?;
    if let Some(within) = within_a_run(to) {
        return Err(TrainError::checkpoint(to, format!("{within}; choose another folder")));
    }
    exported(folder, to, dtype, checksums).map_err(TrainError::of_command)
}

/// [`export`] of a checkpoint to a folder that is no run's.
fn exported(
    folder: &Path,
    to: &Path,
    dtype: SaveDtype,
    checksums: Checksums,
) -> Result<(), TrainError> {
    let sums = checksums.of(folder)?;
    let mut config = read_json(&folder.join(CONFIG))?;
    if let Some(fields) = config.as_object_mut() {
        // The newer name is of transformers 5; where it is there, it is the one that is read.
        let key = if fields.contains_key("dtype") { "dtype" } else { "torch_dtype" };
        fields.insert(key.to_owned(), dtype.torch_name().into());
    }
    let (store, names) = weights(folder, sums.as_ref())?;
    store.is_here()?;
    let (mut parameters, mut elems) = (Vec::new(), 0);
    for (name, tensor) in &names {
        let shape = store.shape(tensor).expect("it is one of the names").to_vec();
        let end = elems + shape.iter().product::<usize>();
        parameters.push(Parameter { name: name.clone(), shape, place: elems..end, cut: None });
        elems = end;
    }
    let files =
        ["tokenizer.json"].into_iter().chain(COMPANIONS).map(|name| (name, folder.join(name)));
    let files = files.filter(|(_, path)| path.is_file());
    let content = Content {
        config,
        files: files.map(|(name, path)| (name.to_owned(), Carried::Copy(path))).collect(),
        parameters,
        moments: Vec::new(),
        trained: 0,
        dtype,
        state: None,
    };
    let save = Save::to_new(to)?;
    let values = Stored { store: RefCell::new(store), names, parameters: &content.parameters };
    match save.write(&content, &values) {
        Ok(written) => save.commit(vec![written]).map(|_| ()),
        Err(e) => Err(save.abandon(e)),
    }
}

/// The weights of a store, one after another.
struct Stored<'a> {
    store: RefCell<Store>,
    /// Tensors by parameter.
    names: BTreeMap<String, String>,
    parameters: &'a [Parameter],
}

impl Values for Stored<'_> {
    fn read(&self, _: Kept, first: usize, into: &mut [f32]) -> Result<(), TrainError> {
        let at = self.parameters.partition_point(|p| p.place.end <= first);
        let Parameter { name, place, .. } = &self.parameters[at];
        let part = first - place.start..first - place.start + into.len();
        let mut done = 0;
        self.store.borrow_mut().read(&self.names[name], place.len(), part, &mut |values| {
            into[done..done + values.len()].copy_from_slice(values);
            done += values.len();
            Ok(())
        })
    }
}
