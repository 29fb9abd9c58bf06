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

/// An axis cut into parts, in order; parts may be empty and of different lengths. Where an axis has fewer
/// elements than parts, several parts may be one element ([`Cut::copied`]).
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Cut {
    len: usize,
    parts: Vec<Range<usize>>,
}

impl Cut {
    /// `len` in `parts` parts that differ by 1 at most, the longer ones first.
    ///
    /// # Panics
    /// When there is no part.
    pub fn even(len: usize, parts: usize) -> Self {
        assert!(parts > 0, "a cut has a part at least");
        let (each, longer) = (len / parts, len % parts);
        let start = |i: usize| i * each + i.min(longer);
        Self { len, parts: (0..parts).map(|i| start(i)..start(i + 1)).collect() }
    }

    /// Parts of these lengths.
    ///
    /// # Errors
    /// When there is no part, or the sum of the lengths overflows.
    pub fn of_lengths(lengths: &[usize]) -> Result<Self, ShardError> {
        if lengths.is_empty() {
            return refused("an axis is cut into no parts; give the length of one at least");
        }
        let (mut parts, mut len) = (Vec::new(), 0usize);
        for &length in lengths {
            let end = len.checked_add(length);
            let end = end.ok_or_else(|| ShardError::new("the parts of an axis overflow"))?;
            parts.push(len..end);
            len = end;
        }
        Ok(Self { len, parts })
    }

    /// `len` elements in more parts than that, of which each has one: parts are dealt to elements as
    /// [`Self::even`] would cut them.
    ///
    /// # Panics
    /// When there is no element, or there are fewer parts.
    pub fn copied(len: usize, parts: usize) -> Self {
        assert!(len > 0 && len <= parts, "each of {parts} parts has one of {len} elements");
        let holders = Self::even(parts, len);
        let of =
            |(element, holders): (usize, &Range<usize>)| vec![element..element + 1; holders.len()];
        Self { len, parts: holders.parts.iter().enumerate().flat_map(of).collect() }
    }

    /// Length of the whole axis.
    pub fn len(&self) -> usize {
        self.len
    }

    /// True when the axis has no element.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Number of parts.
    pub fn parts(&self) -> usize {
        self.parts.len()
    }

    /// The elements of a part.
    ///
    /// # Panics
    /// When there is no such part.
    pub fn range(&self, part: usize) -> Range<usize> {
        self.parts[part].clone()
    }

    /// Lengths of the parts.
    pub fn lengths(&self) -> Vec<usize> {
        self.parts.iter().map(Range::len).collect()
    }

    /// The parts that have the same elements as a part, it among them; of an empty part it alone.
    ///
    /// # Panics
    /// When there is no such part.
    pub fn copies(&self, part: usize) -> Range<usize> {
        let own = &self.parts[part];
        let same = |i: &usize| *i == part || !own.is_empty() && self.parts[*i] == *own;
        let first = (0..=part).rev().take_while(same).last().unwrap_or(part);
        first..(part..self.parts()).take_while(same).last().unwrap_or(part) + 1
    }

    /// Each part cut evenly into `parts`.
    fn nested(&self, parts: usize) -> Self {
        let inner = |outer: &Range<usize>| {
            let first = outer.start;
            let cut = Self::even(outer.len(), parts);
            cut.parts.into_iter().map(move |part| first + part.start..first + part.end)
        };
        Self { len: self.len, parts: self.parts.iter().flat_map(inner).collect() }
    }

    /// The parts of `times` query heads for each of these key/value heads: those of a head that has several
    /// parts are cut evenly over them.
    fn of_queries(&self, times: usize) -> Self {
        let of = |part: usize| {
            let (own, copies) = (self.range(part), self.copies(part));
            let first = own.start * times;
            let all = Self::even(own.len() * times, copies.len()).range(part - copies.start);
            first + all.start..first + all.end
        };
        Self { len: self.len * times, parts: (0..self.parts()).map(of).collect() }
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
    /// Even cuts of every axis. Query heads are cut where their key/value heads are; of fewer key/value
    /// heads than ranks each is copied to some, which have a part of its query heads each. Elements of a
    /// parameter group and axes of captures have length 0 until [`Self::with_length`] says another.
    ///
    /// # Errors
    /// When heads are no multiple of kv_heads, or fewer than the ranks that they are cut over.
    pub fn new(map: Map, lengths: &Lengths) -> Result<Self, ShardError> {
        let Lengths { heads, kv_heads, .. } = *lengths;
        if kv_heads == 0 || !heads.is_multiple_of(kv_heads) {
            return refused(format!(
                "{heads} query heads cannot share {kv_heads} key/value heads; the first must be a \
                 multiple of the second"
            ));
        }
        let over = map.parts(Axis::KvHeads);
        if heads < over {
            return refused(format!(
                "{} cannot be cut over {}; use {} or fewer on {}",
                Count(heads, "query head"),
                Count(over, "rank"),
                Count(heads, "rank"),
                names(map.of(Axis::KvHeads))
            ));
        }
        let of_kv = match kv_heads >= over {
            true => Cut::even(kv_heads, over),
            false => Cut::copied(kv_heads, over),
        };
        let of_seq = |len| {
            let cut = Cut::even(len, map.parts(Axis::Seq));
            cut.nested(map.parts(Axis::Stream) / map.parts(Axis::Seq))
        };
        let len = |axis| match axis {
            Axis::Batch => lengths.batch,
            Axis::Seq | Axis::Stream => lengths.seq,
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
            Axis::Heads => of_kv.of_queries(heads / kv_heads),
            Axis::KvHeads => of_kv.clone(),
            Axis::Stream => of_seq(lengths.seq),
            axis => Cut::even(len(*axis), map.parts(*axis)),
        };
        let cuts = Axis::ALL.iter().map(cut).collect();
        Ok(Self { map, cuts, order: None })
    }

    /// The same with another length of an axis, cut evenly.
    pub fn with_length(mut self, axis: Axis, len: usize) -> Self {
        self.set(axis, Cut::even(len, self.map.parts(axis)));
        self
    }

    /// Takes a cut of an axis; the stream between products is cut within the tokens of a rank.
    fn set(&mut self, axis: Axis, cut: Cut) {
        if axis == Axis::Seq {
            let parts = self.map.parts(Axis::Stream) / self.map.parts(Axis::Seq);
            self.cuts[Axis::Stream as usize] = cut.nested(parts);
        }
        self.cuts[axis as usize] = cut;
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
        self.set(axis, cut);
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
        let ordered = array.iter().any(|a| matches!(a, Axis::Seq | Axis::Stream | Axis::KvSeq));
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
