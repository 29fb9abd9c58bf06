//! Layouts: which part of an array each rank holds.
//!
//! A [`Sharding`] holds the map and the stored length of every part of every axis. A
//! [`ShardLayout`] follows from it and the list of an array's names ([`Sharding::layout`]). Lengths
//! are stored, never computed as local × ranks, so shards may be uneven and nothing has to divide
//! anything.

use std::fmt;
use std::ops::Range;

use foveate::tensor::ElementType;
use foveate::tensor::count::Count;

use crate::error::{ShardError, refused};
use crate::map::{Axis, Map};
use crate::mesh::MeshAxis;
use crate::permutation::PermutationId;

/// An axis cut into parts, in order; parts may be empty and of different lengths.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Cut {
    /// `parts + 1` offsets, from 0 to the length.
    offsets: Vec<usize>,
}

impl Cut {
    /// `len` in `parts` parts that differ by 1 at most, the longer ones first.
    ///
    /// # Panics
    /// When there is no part.
    pub fn even(len: usize, parts: usize) -> Self {
        assert!(parts > 0, "a cut has a part at least");
        let (each, longer) = (len / parts, len % parts);
        Self { offsets: (0..=parts).map(|i| i * each + i.min(longer)).collect() }
    }

    /// Parts of these lengths.
    ///
    /// # Errors
    /// When there is no part, or the sum of the lengths overflows.
    pub fn of_lengths(lengths: &[usize]) -> Result<Self, ShardError> {
        if lengths.is_empty() {
            return refused("an axis is cut into no parts; give the length of one at least");
        }
        let mut offsets = vec![0usize];
        for &len in lengths {
            let end = offsets[offsets.len() - 1].checked_add(len);
            offsets.push(end.ok_or_else(|| ShardError::new("the parts of an axis overflow"))?);
        }
        Ok(Self { offsets })
    }

    /// Length of the whole axis.
    pub fn len(&self) -> usize {
        self.offsets[self.offsets.len() - 1]
    }

    /// True when the axis has no element.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Number of parts.
    pub fn parts(&self) -> usize {
        self.offsets.len() - 1
    }

    /// The elements of a part.
    ///
    /// # Panics
    /// When there is no such part.
    pub fn range(&self, part: usize) -> Range<usize> {
        self.offsets[part]..self.offsets[part + 1]
    }

    /// Lengths of the parts.
    pub fn lengths(&self) -> Vec<usize> {
        (0..self.parts()).map(|i| self.range(i).len()).collect()
    }

    /// The same parts with `times` elements for each one.
    fn scaled(&self, times: usize) -> Self {
        Self { offsets: self.offsets.iter().map(|&o| o * times).collect() }
    }
}

/// Lengths of the axes of a model's arrays.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Lengths {
    /// Rows of tokens.
    pub batch: usize,
    /// Tokens of a row.
    pub seq: usize,
    /// Keys of a row; as `seq` in self-attention.
    pub kv_seq: usize,
    /// Query heads; a multiple of `kv_heads`.
    pub heads: usize,
    /// Key/value heads.
    pub kv_heads: usize,
    /// Length of a query or key vector.
    pub dim: usize,
    /// Length of a value vector.
    pub dim_v: usize,
    /// Width of the residual stream.
    pub hidden: usize,
    /// Columns of the feed-forward block.
    pub ffn: usize,
    /// Entries of the vocabulary.
    pub vocab: usize,
}

/// The map with the stored cut of every axis: the one place that layouts come from.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Sharding {
    map: Map,
    cuts: Vec<Cut>,
    order: Option<PermutationId>,
}

impl Sharding {
    /// Even cuts of every axis. Query heads are cut where their key/value heads are. Elements of a
    /// parameter group and axes of captures have length 0 until [`Self::with_length`] says another.
    ///
    /// # Errors
    /// When heads are no multiple of kv_heads, or kv_heads are fewer than the ranks that they are
    /// cut over.
    pub fn new(map: Map, lengths: &Lengths) -> Result<Self, ShardError> {
        let Lengths { heads, kv_heads, .. } = *lengths;
        if kv_heads == 0 || !heads.is_multiple_of(kv_heads) {
            return refused(format!(
                "{heads} query heads cannot share {kv_heads} key/value heads; the first must be a \
                 multiple of the second"
            ));
        }
        let over = map.parts(Axis::KvHeads);
        if kv_heads < over {
            return refused(format!(
                "{} cannot be cut over {}; use {} or fewer on {}",
                Count(kv_heads, "key/value head"),
                Count(over, "rank"),
                Count(kv_heads, "rank"),
                names(map.of(Axis::KvHeads))
            ));
        }
        let len = |axis| match axis {
            Axis::Batch => lengths.batch,
            Axis::Seq => lengths.seq,
            Axis::KvSeq => lengths.kv_seq,
            Axis::Heads => heads,
            Axis::KvHeads => kv_heads,
            Axis::Dim => lengths.dim,
            Axis::DimV => lengths.dim_v,
            Axis::Hidden => lengths.hidden,
            Axis::Ffn => lengths.ffn,
            Axis::Vocab => lengths.vocab,
            Axis::Elements | Axis::Captured => 0,
        };
        let cut = |axis: &Axis| match axis {
            Axis::Heads => Cut::even(kv_heads, over).scaled(heads / kv_heads),
            axis => Cut::even(len(*axis), map.parts(*axis)),
        };
        let cuts = Axis::ALL.iter().map(cut).collect();
        Ok(Self { map, cuts, order: None })
    }

    /// The same with another length of an axis, cut evenly.
    pub fn with_length(mut self, axis: Axis, len: usize) -> Self {
        self.cuts[axis as usize] = Cut::even(len, self.map.parts(axis));
        self
    }

    /// The same with another cut of an axis.
    ///
    /// # Errors
    /// When the cut has not a part for each of the ranks that the axis goes to.
    pub fn with_cut(mut self, axis: Axis, cut: Cut) -> Result<Self, ShardError> {
        let wanted = self.map.parts(axis);
        if cut.parts() != wanted {
            return refused(format!(
                "{axis} is cut into {} parts, but the map sends it to {wanted} ranks; give one part \
                 for each",
                cut.parts()
            ));
        }
        self.cuts[axis as usize] = cut;
        Ok(self)
    }

    /// The same with tokens in the order of a permutation: arrays with an axis `seq` carry its
    /// identity, so arrays of two orders cannot be mixed.
    pub fn in_order(mut self, order: Option<PermutationId>) -> Self {
        self.order = order;
        self
    }

    /// The map.
    pub fn map(&self) -> &Map {
        &self.map
    }

    /// The cut of an axis.
    pub fn cut(&self, axis: Axis) -> &Cut {
        &self.cuts[axis as usize]
    }

    /// What a rank holds of an axis.
    ///
    /// # Panics
    /// When there is no such rank.
    pub fn range(&self, axis: Axis, rank: usize) -> Range<usize> {
        self.cut(axis).range(self.map.part(axis, rank))
    }

    /// The layout of an array of these names.
    ///
    /// # Errors
    /// When two of its axes go to one axis of the mesh.
    pub fn layout(&self, element: ElementType, array: &[Axis]) -> Result<ShardLayout, ShardError> {
        let mut used: Vec<(MeshAxis, Axis)> = Vec::new();
        let mut axes = Vec::new();
        for &axis in array {
            let large = |m: &&MeshAxis| self.map.mesh().size(**m) > 1;
            let on: Vec<MeshAxis> = self.map.of(axis).iter().filter(large).copied().collect();
            for &m in &on {
                if let Some((_, other)) = used.iter().find(|(taken, _)| *taken == m) {
                    return refused(format!(
                        "an array of {} would be cut twice over {m}, by {other} and by {axis}; send \
                         one of them elsewhere in the map",
                        array.iter().map(|a| a.name()).collect::<Vec<_>>().join(", ")
                    ));
                }
                used.push((m, axis));
            }
            axes.push(CutAxis { axis, on, cut: self.cut(axis).clone() });
        }
        let ordered = array.iter().any(|a| matches!(a, Axis::Seq | Axis::KvSeq));
        let order = if ordered { self.order } else { None };
        Ok(ShardLayout { element, axes, order })
    }
}

/// One axis of a layout.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct CutAxis {
    /// Its name.
    pub axis: Axis,
    /// The mesh axes that cut it, those of size 1 left out; empty when it is whole everywhere.
    pub on: Vec<MeshAxis>,
    /// Its parts.
    pub cut: Cut,
}

impl fmt::Display for CutAxis {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.on.as_slice() {
            [] => write!(f, "{}", self.axis),
            [one] => write!(f, "{}@{one}", self.axis),
            several => write!(f, "{}@({})", self.axis, names(several)),
        }
    }
}

fn names(axes: &[MeshAxis]) -> String {
    axes.iter().map(|a| a.name()).collect::<Vec<_>>().join(",")
}

/// The layout of an array over a mesh, as a value: printed like `bf16[batch@shard, seq@context, hidden]`.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct ShardLayout {
    pub(crate) element: ElementType,
    pub(crate) axes: Vec<CutAxis>,
    pub(crate) order: Option<PermutationId>,
}

impl ShardLayout {
    /// Type of the elements.
    pub fn element(&self) -> ElementType {
        self.element
    }

    /// The axes, in order.
    pub fn axes(&self) -> &[CutAxis] {
        &self.axes
    }

    /// The permutation that tokens are in the order of; `None` as they were read.
    pub fn order(&self) -> Option<PermutationId> {
        self.order
    }

    /// Lengths of the whole array.
    pub fn shape(&self) -> Vec<usize> {
        self.axes.iter().map(|a| a.cut.len()).collect()
    }

    /// What a rank holds of each axis.
    ///
    /// # Panics
    /// When the map's mesh has no such rank.
    pub fn ranges(&self, map: &Map, rank: usize) -> Vec<Range<usize>> {
        let part = |a: &CutAxis| a.cut.range(map.mesh().index_of(rank, &a.on));
        self.axes.iter().map(part).collect()
    }

    /// Bytes of a rank's part.
    ///
    /// # Panics
    /// As [`Self::ranges`].
    pub fn bytes(&self, map: &Map, rank: usize) -> u64 {
        let elems: u64 = self.ranges(map, rank).iter().map(|r| r.len() as u64).product();
        elems * self.element.bytes() as u64
    }

    /// Checks that an array that arrived with the layout `found` is one of this layout.
    ///
    /// # Errors
    /// Names the operand, the first axis that differs, what was expected and what was found. Nothing
    /// is moved to make it fit.
    pub fn expect(&self, operand: &str, found: &Self) -> Result<(), ShardError> {
        let differ = |axis: &dyn fmt::Display, wanted: String, got: String| {
            refused(format!(
                "operand `{operand}`, {axis}: expected {wanted}, found {got}; the map gives \
                 {self}, the array has {found}"
            ))
        };
        if self.axes.len() != found.axes.len() {
            let axes = |l: &Self| format!("{} axes", l.axes.len());
            return differ(&"number of axes", axes(self), axes(found));
        }
        for (wanted, got) in self.axes.iter().zip(&found.axes) {
            let at = format!("axis {}", wanted.axis);
            if (wanted.axis, &wanted.on) != (got.axis, &got.on) {
                return differ(&at, wanted.to_string(), got.to_string());
            }
            if wanted.cut != got.cut {
                let parts = |a: &CutAxis| format!("parts of {:?}", a.cut.lengths());
                return differ(&at, parts(wanted), parts(got));
            }
        }
        if self.element != found.element {
            return differ(&"elements", self.element.to_string(), found.element.to_string());
        }
        if self.order != found.order {
            let order = |o: Option<PermutationId>| match o {
                Some(id) => format!("tokens in order {id}"),
                None => "tokens as they were read".to_owned(),
            };
            return differ(&"order of tokens", order(self.order), order(found.order));
        }
        Ok(())
    }
}

impl fmt::Display for ShardLayout {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let axes: Vec<_> = self.axes.iter().map(ToString::to_string).collect();
        write!(f, "{}[{}]", self.element, axes.join(", "))
    }
}

/// A rank's part of an array, with the layout that says which part.
#[derive(Clone, Debug)]
pub struct Sharded<T> {
    value: T,
    layout: ShardLayout,
}

impl<T> Sharded<T> {
    /// Rank `rank`'s part of the operand called `name`, whose lengths are `shape` in the order of the
    /// layout's axes.
    ///
    /// # Errors
    /// When a length is not what the layout gives the rank.
    pub fn new(
        name: &str,
        value: T,
        shape: &[usize],
        layout: ShardLayout,
        map: &Map,
        rank: usize,
    ) -> Result<Self, ShardError> {
        let wanted: Vec<_> = layout.ranges(map, rank).into_iter().map(|r| r.len()).collect();
        if wanted.len() != shape.len() {
            return refused(format!(
                "operand `{name}` on rank {rank} has {} axes, but {layout} has {}",
                shape.len(),
                wanted.len()
            ));
        }
        for ((axis, wanted), got) in layout.axes.iter().zip(&wanted).zip(shape) {
            if wanted != got {
                return refused(format!(
                    "operand `{name}`, axis {} on rank {rank}: expected a part of {wanted}, found \
                     {got}; the array is {layout} of {:?}",
                    axis.axis,
                    layout.shape()
                ));
            }
        }
        Ok(Self { value, layout })
    }

    /// The part, once its layout is the one that the map gives.
    ///
    /// # Errors
    /// Those of [`ShardLayout::expect`].
    pub fn expect(&self, operand: &str, derived: &ShardLayout) -> Result<&T, ShardError> {
        derived.expect(operand, &self.layout)?;
        Ok(&self.value)
    }

    /// The layout.
    pub fn layout(&self) -> &ShardLayout {
        &self.layout
    }

    /// The part, whatever its layout.
    pub fn value(&self) -> &T {
        &self.value
    }

    /// The part, whatever its layout.
    pub fn into_value(self) -> T {
        self.value
    }
}
