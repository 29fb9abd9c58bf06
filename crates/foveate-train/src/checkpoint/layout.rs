//! `layout.json`: which elements of which tensor lie in which file, where several ranks wrote them.
//!
//! ```json
//! { "version": 1, "tensors": { "weight:model.norm.weight": { "dtype": "F32", "shape": [16],
//!     "ranges": [{ "first": 0, "elems": 9, "file": "part-00000-00000.safetensors" },
//!                { "first": 9, "elems": 7, "file": "part-00001-00000.safetensors" }] } } }
//! ```
//!
//! Elements are counted in the tensor, row-major. A file has a range as a tensor of one axis called `NAME@FIRST`,
//! with a checksum of its own. Ranges have at most [`PIECE`] elements and are cut at its multiples, so a
//! rank that needs a part of a tensor reads, and holds to their checksums, the ranges with its part and few others.

use std::collections::BTreeMap;
use std::ops::Range;
use std::path::Path;

use foveate_nn::Parameter;
use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::content::{Content, Kept};
use crate::error::TrainError;
use crate::safetensors::RESTORE;

/// Its name.
pub(super) const FILE: &str = "layout.json";

/// The version of the format.
const VERSION: u32 = 1;

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
}

impl Piece {
    /// Its name in the file.
    pub fn name(&self) -> String {
        format!("{}@{}", self.tensor, self.first)
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
                let end = range.end.min(p.place.end);
                let mut at = range.start.max(p.place.start);
                while at < end {
                    let first = at - p.place.start;
                    let elems = (piece - first % piece).min(end - at);
                    pieces.push((Piece { tensor: tensor(kept, p), first, elems }, kept, at));
                    at += elems;
                }
            }
        }
    }
    pieces
}

/// What is where.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Layout {
    version: u32,
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
}

impl Layout {
    /// That of `parts` of `tensors`, which is at `path`.
    ///
    /// # Errors
    /// When an element of a tensor is missing or there twice.
    pub fn of(
        tensors: BTreeMap<String, Vec<usize>>,
        parts: Vec<Part>,
        path: &Path,
    ) -> Result<Self, TrainError> {
        let empty = |shape| Tensor { dtype: "F32".to_owned(), shape, ranges: Vec::new() };
        let tensors = tensors.into_iter().map(|(name, shape)| (name, empty(shape)));
        let mut layout = Self { version: VERSION, tensors: tensors.collect() };
        for Part { file, pieces } in parts {
            for Piece { tensor, first, elems } in pieces {
                let Some(found) = layout.tensors.get_mut(&tensor) else {
                    let message = format!("tensor `{tensor}` of {file} is not one of this model's");
                    return Err(TrainError::checkpoint(path, message));
                };
                found.ranges.push(Stored { first, elems, file: file.clone() });
            }
        }
        for tensor in layout.tensors.values_mut() {
            tensor.ranges.sort_by_key(|range| range.first);
        }
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
        if layout.version != VERSION {
            let version = layout.version;
            let message = format!(
                "is a layout of version {version}, and {VERSION} is read; use the foveate that wrote it"
            );
            return Err(refuse(message));
        }
        for tensor in layout.tensors.values_mut() {
            tensor.ranges.sort_by_key(|range| range.first);
        }
        layout.check(path)?;
        Ok(layout)
    }

    pub fn to_json(&self) -> Value {
        serde_json::to_value(self).expect("plain text and numbers")
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
            if dtype != "F32" {
                return refuse(format!("F32 is read, not the dtype {dtype},"));
            }
            let mut end = 0;
            for Stored { first, elems: some, file } in ranges {
                let stop = first.checked_add(*some).filter(|&stop| stop <= elems && *some > 0);
                let Some(stop) = stop else {
                    return refuse(format!(
                        "{some} elements from {first} on, in {file}, are not within the shape {shape:?}"
                    ));
                };
                if *first > end {
                    return refuse(format!("elements {end}..{first} are missing"));
                }
                if *first < end {
                    return refuse(format!("elements {first}..{} are there twice", end.min(stop)));
                }
                if file.contains(['/', '\\']) {
                    return refuse(format!(
                        "`{file}` is not the name of a file here; it is a part"
                    ));
                }
                end = stop;
            }
            if end < elems {
                return refuse(format!("elements {end}..{elems} are missing"));
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn layout(ranges: &[(usize, usize)]) -> Result<Layout, String> {
        let pieces =
            ranges.iter().map(|&(first, elems)| Piece { tensor: "a".to_owned(), first, elems });
        let parts = vec![Part { file: "part".to_owned(), pieces: pieces.collect() }];
        let tensors = [("a".to_owned(), vec![3, 5])].into();
        Layout::of(tensors, parts, Path::new("layout.json")).map_err(|e| e.to_string())
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
        assert!(told("/version", 2.into()).contains("a layout of version 2, and 1 is read"));
        assert!(told("/tensors/a/dtype", "BF16".into()).contains("not the dtype BF16"));
        let file = told("/tensors/a/ranges/0/file", "../part".into());
        assert!(file.contains("`../part` is not the name of a file here"), "{file}");
        let shape = told("/tensors/a/shape", vec![u64::MAX, 3].into());
        assert!(shape.contains("no memory holds the shape"), "{shape}");
        assert!(told("/tensors", 3.into()).contains("is not the layout of a checkpoint"));
    }
}
