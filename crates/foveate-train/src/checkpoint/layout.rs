//! `layout.json`: which elements of which tensor lie in which file, where several ranks wrote them.
//!
//! ```json
//! { "version": 1, "tensors": { "weight:model.norm.weight": { "dtype": "F32", "shape": [16],
//!     "ranges": [{ "first": 0, "elems": 9, "file": "part-00000-00000.safetensors" },
//!                { "first": 9, "elems": 7, "file": "part-00001-00000.safetensors" }] } } }
//! ```
//!
//! A range with `"columns": [8, 16]` is of those columns of the tensor, which is then in version 2: `first`
//! and `elems` count in the matrix of these columns. Version 3 has parts on several disks, and says by
//! `"disks"` which ranks wrote to which: the files of these ranks are there.
//!
//! Elements are counted in the tensor, row-major. A file has a range as a tensor of one axis called `NAME@FIRST`,
//! with a checksum of its own. Ranges have at most [`PIECE`] elements and are cut at its multiples, so a
//! rank that needs a part of a tensor reads, and holds to their checksums, the ranges with its part and few others.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::ops::Range;
use std::path::{Path, PathBuf};

use foveate::tensor::count::Count;
use foveate_nn::Parameter;
use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::content::{Content, Kept};
use crate::error::TrainError;
use crate::safetensors::RESTORE;

/// Its name.
pub(crate) const FILE: &str = "layout.json";

/// The version of the format, that of one with ranges of columns, and that of one on several disks.
const VERSIONS: [u32; 3] = [1, 2, 3];

/// The dtype of all tensors.
pub(super) const DTYPE: &str = "F32";

/// Elements of a range at most: 16 MiB.
pub(super) const PIECE: usize = 4 << 20;

/// Some elements of a tensor that stand in one file.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Piece {
    /// The tensor's name.
    pub tensor: String,
    /// Its first element that is here.
    pub first: usize,
    /// Elements here.
    pub elems: usize,
    /// The columns of which they are elements; all where there are none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub columns: Option<Columns>,
}

/// The first column and the one behind the last.
pub(super) type Columns = [usize; 2];

impl Piece {
    /// Its name in the file.
    pub fn name(&self) -> String {
        match self.columns {
            None => format!("{}@{}", self.tensor, self.first),
            Some([from, to]) => format!("{}[:,{from}:{to}]@{}", self.tensor, self.first),
        }
    }
}

/// A file that a rank has written.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Part {
    /// Its name.
    pub file: String,
    /// What it holds, in order.
    pub pieces: Vec<Piece>,
}

/// A disk that has the files of some ranks, where not all ranks write to one.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Disk {
    /// The host that wrote to it.
    pub host: String,
    /// The folder of the run's checkpoints there.
    pub folder: PathBuf,
    /// The ranks that wrote to it, in order; the first of them wrote what is no tensor, too.
    pub ranks: Vec<usize>,
}

impl fmt::Display for Disk {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let ranks: Vec<String> = self.ranks.iter().map(usize::to_string).collect();
        let s = if ranks.len() > 1 { "s" } else { "" };
        write!(f, "rank{s} {} of host {}", ranks.join(", "), self.host)
    }
}

/// The name of a file with ranges of a rank.
pub(super) fn file_of(rank: usize, number: usize) -> String {
    format!("part-{rank:05}-{number:05}.safetensors")
}

/// Whether a folder has a file with ranges of a rank.
pub(super) fn has_parts(folder: &Path) -> bool {
    let mut entries = std::fs::read_dir(folder).into_iter().flatten().flatten();
    entries.any(|entry| entry.file_name().to_string_lossy().starts_with("part-"))
}

/// The name of the tensor of what is kept of a parameter.
pub(super) fn tensor(kept: Kept, parameter: &Parameter) -> String {
    format!("{}:{}", kept.name(), parameter.name)
}

/// All tensors of a checkpoint and their shapes.
pub(super) fn tensors(content: &Content) -> BTreeMap<String, Vec<usize>> {
    let of = |p| content.kept(p).map(move |kept| (tensor(kept, p), p.shape.clone()));
    content.parameters.iter().flat_map(of).collect()
}

/// The pieces, of at most `piece` elements, that hold the elements `owned` of all parameters: what is kept of which
/// element in the array of all parameters on.
pub(super) fn pieces(
    content: &Content,
    owned: &[Range<usize>],
    piece: usize,
) -> Vec<(Piece, Kept, usize)> {
    let mut pieces = Vec::new();
    for p in &content.parameters {
        for kept in content.kept(p) {
            for range in owned {
                let held = range.start.max(p.place.start)..range.end.min(p.place.end);
                for (mut first, run, columns) in runs(p, &held) {
                    let mut at = run.start;
                    while at < run.end {
                        let elems = (piece - first % piece).min(run.end - at);
                        let tensor = tensor(kept, p);
                        pieces.push((Piece { tensor, first, elems, columns }, kept, at));
                        (at, first) = (at + elems, first + elems);
                    }
                }
            }
        }
    }
    pieces
}

/// The elements `held` of all that a rank holds, which are of `parameter`: the first one's index in the
/// tensor, or in the columns of it that the rank holds.
fn runs(parameter: &Parameter, held: &Range<usize>) -> Vec<(usize, Range<usize>, Option<Columns>)> {
    let place = &parameter.place;
    match &parameter.cut {
        _ if held.is_empty() => Vec::new(),
        None => vec![(held.start - place.start, held.clone(), None)],
        Some(cut) if cut.axis == 1 => {
            let columns = &cut.ranges[0];
            let columns = Some([columns.start, columns.end]);
            vec![(held.start - place.start, held.clone(), columns)]
        }
        Some(_) => {
            let here = |(whole, first): (Range<usize>, usize)| {
                let run = first.max(held.start)..(first + whole.len()).min(held.end);
                (!run.is_empty()).then(|| (whole.start + run.start - first, run, None))
            };
            parameter.held(0..parameter.elems()).into_iter().filter_map(here).collect()
        }
    }
}

/// What is where.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Layout {
    version: u32,
    /// Where not all ranks wrote to one disk, which did to which.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub disks: Vec<Disk>,
    /// By name.
    pub tensors: BTreeMap<String, Tensor>,
}

/// Where a tensor is.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Tensor {
    pub dtype: String,
    pub shape: Vec<usize>,
    /// In order, without gaps.
    pub ranges: Vec<Stored>,
}

/// Where elements of a tensor are.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Stored {
    pub first: usize,
    pub elems: usize,
    pub file: String,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub columns: Option<Columns>,
}

impl Layout {
    /// That of `parts` of `tensors`, which is at `path`, on these disks; on one where there are none.
    ///
    /// # Errors
    /// When an element of a tensor is missing or there twice.
    pub fn of(
        tensors: BTreeMap<String, Vec<usize>>,
        parts: Vec<Part>,
        disks: Vec<Disk>,
        path: &Path,
    ) -> Result<Self, TrainError> {
        let empty = |shape| Tensor { dtype: DTYPE.to_owned(), shape, ranges: Vec::new() };
        let tensors = tensors.into_iter().map(|(name, shape)| (name, empty(shape)));
        let version = VERSIONS[if disks.is_empty() { 0 } else { 2 }];
        let mut layout = Self { version, disks, tensors: tensors.collect() };
        for Part { file, pieces } in parts {
            for Piece { tensor, first, elems, columns } in pieces {
                let Some(found) = layout.tensors.get_mut(&tensor) else {
                    let message = format!("tensor `{tensor}` of {file} is not one of this model's");
                    return Err(TrainError::checkpoint(path, message));
                };
                if columns.is_some() {
                    layout.version = layout.version.max(VERSIONS[1]);
                }
                found.ranges.push(Stored { first, elems, file: file.clone(), columns });
            }
        }
        layout.tensors.values_mut().for_each(Tensor::sort);
        layout.check(path)?;
        Ok(layout)
    }

    /// What `json`, of the file at `path`, says.
    ///
    /// # Errors
    /// When it is no layout, of another version, or has an element of a tensor not at all or twice.
    pub fn from_json(json: Value, path: &Path) -> Result<Self, TrainError> {
        let refuse = |message: String| TrainError::checkpoint(path, message);
        let mut layout: Self = serde_json::from_value(json)
            .map_err(|e| refuse(format!("is not the layout of a checkpoint: {e}; {RESTORE}")))?;
        if !VERSIONS.contains(&layout.version) {
            let (version, [first, .., last]) = (layout.version, VERSIONS);
            let message = format!(
                "is a layout of version {version}, and {first} to {last} are read; use the foveate that \
                 wrote it"
            );
            return Err(refuse(message));
        }
        layout.tensors.values_mut().for_each(Tensor::sort);
        layout.check(path)?;
        Ok(layout)
    }

    pub fn to_json(&self) -> Value {
        serde_json::to_value(self).expect("plain text and numbers")
    }

    /// The names of all files with ranges.
    pub fn files(&self) -> BTreeSet<&str> {
        self.tensors.values().flat_map(|tensor| &tensor.ranges).map(|range| &*range.file).collect()
    }

    /// That `file` is not in `folder`: which elements are in it, and where it is.
    pub fn missing(&self, file: &str, folder: &Path) -> String {
        let ranges = self.tensors.iter().flat_map(|(name, tensor)| {
            tensor.ranges.iter().filter(|range| range.file == file).map(move |range| (name, range))
        });
        let ranges: Vec<_> = ranges.collect();
        let what = match ranges.first() {
            None => String::new(),
            Some((name, Stored { first, elems, .. })) => {
                let others = match ranges.len() - 1 {
                    0 => String::new(),
                    others => format!(" and {}", Count(others, "other range")),
                };
                format!(
                    ", where elements {first}..{} of tensor `{name}`{others} are",
                    first + elems
                )
            }
        };
        let rank = file.strip_prefix("part-").and_then(|rest| rest.split('-').next()?.parse().ok());
        let has = |disk: &&Disk| rank.is_some_and(|rank| disk.ranks.contains(&rank));
        let Some(disk) = self.disks.iter().find(has) else {
            return format!("is missing{what}; put it back, or use another checkpoint");
        };
        let step = folder.file_name().unwrap_or_default().to_string_lossy();
        format!(
            "is missing{what}, by {disk}; bring it here by `rsync -a {}:{}/ {}/`, or use another \
             checkpoint",
            disk.host,
            disk.folder.join(&*step).display(),
            folder.display()
        )
    }

    fn check(&self, path: &Path) -> Result<(), TrainError> {
        for (name, Tensor { dtype, shape, ranges }) in &self.tensors {
            let refuse = |message: String| {
                let message = format!("{message} of tensor `{name}`; {RESTORE}");
                Err(TrainError::checkpoint(path, message))
            };
            let elems = shape.iter().try_fold(1usize, |n, &d| n.checked_mul(d));
            let Some(elems) = elems else {
                return refuse(format!("no memory holds the shape {shape:?}"));
            };
            if dtype != DTYPE {
                return refuse(format!("{DTYPE} is read, not the dtype {dtype},"));
            }
            let width = shape.last().copied().unwrap_or(1);
            let mut column = 0;
            for slab in ranges.chunk_by(|a, b| a.columns == b.columns) {
                let [from, to] = slab[0].columns.unwrap_or([0, width]);
                if slab[0].columns.is_some() && (shape.len() != 2 || from >= to || to > width) {
                    return refuse(format!(
                        "columns {from}..{to} are not within the shape {shape:?}"
                    ));
                }
                if from != column {
                    let (what, end) = match from > column {
                        true => ("missing", from),
                        false => ("there twice", column.min(to)),
                    };
                    return refuse(format!("columns {}..{end} are {what}", column.min(from)));
                }
                column = to;
                let elems = if to - from == width { elems } else { shape[0] * (to - from) };
                self::check(slab, elems, shape).or_else(refuse)?;
            }
            if column < width || ranges.is_empty() && elems > 0 {
                return refuse(match column {
                    0 => format!("elements 0..{elems} are missing"),
                    column => format!("columns {column}..{width} are missing"),
                });
            }
        }
        Ok(())
    }
}

/// Whether every one of `elems` elements, of a tensor of `shape` or of columns of it, is in one of `ranges`; or
/// what is wrong.
fn check(ranges: &[Stored], elems: usize, shape: &[usize]) -> Result<(), String> {
    let mut end = 0;
    for Stored { first, elems: some, file, columns } in ranges {
        let of = columns.map_or(String::new(), |[from, to]| format!(" of columns {from}..{to}"));
        let stop = first.checked_add(*some).filter(|&stop| stop <= elems && *some > 0);
        let Some(stop) = stop else {
            return Err(format!(
                "{some} elements from {first} on{of}, in {file}, are not within the shape {shape:?}"
            ));
        };
        if *first > end {
            return Err(format!("elements {end}..{first}{of} are missing"));
        }
        if *first < end {
            return Err(format!("elements {first}..{}{of} are there twice", end.min(stop)));
        }
        if file.contains(['/', '\\']) {
            return Err(format!("`{file}` is not the name of a file here; it is a part"));
        }
        end = stop;
    }
    if end < elems {
        let of = ranges.first().and_then(|range| range.columns);
        let of = of.map_or(String::new(), |[from, to]| format!(" of columns {from}..{to}"));
        return Err(format!("elements {end}..{elems}{of} are missing"));
    }
    Ok(())
}

impl Tensor {
    fn sort(&mut self) {
        self.ranges.sort_by_key(|range| (range.columns, range.first));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn layout(ranges: &[(usize, usize)]) -> Result<Layout, String> {
        let pieces = ranges.iter().map(|&(first, elems)| Piece {
            tensor: "a".to_owned(),
            first,
            elems,
            columns: None,
        });
        let parts = vec![Part { file: "part".to_owned(), pieces: pieces.collect() }];
        let tensors = [("a".to_owned(), vec![3, 5])].into();
        Layout::of(tensors, parts, Vec::new(), Path::new("layout.json")).map_err(|e| e.to_string())
    }

    #[test]
    fn every_element_is_there_once() {
        let whole = layout(&[(7, 8), (0, 4), (4, 3)]).unwrap();
        let firsts: Vec<usize> =
            whole.tensors["a"].ranges.iter().map(|range| range.first).collect();
        assert_eq!(firsts, [0, 4, 7]);
        let path = Path::new("layout.json");
        assert_eq!(Layout::from_json(whole.to_json(), path).unwrap(), whole);
        for (ranges, wrong) in [
            (&[(0, 4), (5, 10)][..], "elements 4..5 are missing of tensor `a`"),
            (&[(0, 14)], "elements 14..15 are missing of tensor `a`"),
            (&[(1, 14)], "elements 0..1 are missing of tensor `a`"),
            (&[], "elements 0..15 are missing of tensor `a`"),
            (&[(0, 15), (3, 2)], "elements 3..5 are there twice of tensor `a`"),
            (&[(0, 8), (7, 8)], "elements 7..8 are there twice of tensor `a`"),
            (&[(0, 8), (8, 8)], "8 elements from 8 on, in part, are not within the shape [3, 5]"),
            (&[(0, 15), (usize::MAX, 2)], "are not within the shape"),
        ] {
            let told = layout(ranges).unwrap_err();
            assert!(told.contains(wrong), "{ranges:?}: {told}");
            // What was changed by hand is refused alike.
            let mut json = whole.to_json();
            json["tensors"]["a"]["ranges"] = (ranges.iter())
                .map(|&(first, elems)| serde_json::json!({ "first": first, "elems": elems, "file": "part" }))
                .collect();
            let read = Layout::from_json(json, path).unwrap_err().to_string();
            assert!(read.contains(wrong), "{ranges:?}: {read}");
        }
    }

    #[test]
    fn a_layout_of_another_kind_is_refused() {
        let whole = layout(&[(0, 15)]).unwrap().to_json();
        let told = |at: &str, value: Value| {
            let mut json = whole.clone();
            *json.pointer_mut(at).unwrap() = value;
            Layout::from_json(json, Path::new("layout.json")).unwrap_err().to_string()
        };
        assert!(told("/version", 4.into()).contains("a layout of version 4, and 1 to 3 are read"));
        assert!(told("/tensors/a/dtype", "BF16".into()).contains("not the dtype BF16"));
        let file = told("/tensors/a/ranges/0/file", "../part".into());
        assert!(file.contains("`../part` is not the name of a file here"), "{file}");
        let shape = told("/tensors/a/shape", vec![u64::MAX, 3].into());
        assert!(shape.contains("no memory holds the shape"), "{shape}");
        assert!(told("/tensors", 3.into()).contains("is not the layout of a checkpoint"));
    }
}
