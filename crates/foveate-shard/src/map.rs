//! The one map: names of axes to axes of the mesh.
//!
//! A layout is never written for one operand. An array has a list of names, and its layout follows
//! from the map; so two operands of one call cannot be cut differently, and a cut by position
//! cannot be written.

use std::fmt;

use crate::error::{ShardError, refused};
use crate::mesh::{Mesh, MeshAxis};

/// What an axis of an array is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Axis {
    /// Rows of tokens.
    Batch,
    /// Tokens of a row.
    Seq,
    /// Tokens of a row in the stream between products.
    Stream,
    /// Keys of a row, where they are not the row's own tokens (cross-attention).
    KvSeq,
    /// Query heads.
    Heads,
    /// Key/value heads.
    KvHeads,
    /// Elements of a query or key vector.
    Dim,
    /// Elements of a value vector.
    DimV,
    /// The residual stream.
    Hidden,
    /// Columns of the feed-forward block.
    Ffn,
    /// Entries of the vocabulary.
    Vocab,
    /// Elements of a parameter group.
    Elements,
    /// An axis of a captured buffer. Mods index it with global coordinates, so it is whole on every
    /// rank.
    Captured,
}

impl Axis {
    /// Every name.
    pub const ALL: [Self; 13] = [
        Self::Batch,
        Self::Seq,
        Self::Stream,
        Self::KvSeq,
        Self::Heads,
        Self::KvHeads,
        Self::Dim,
        Self::DimV,
        Self::Hidden,
        Self::Ffn,
        Self::Vocab,
        Self::Elements,
        Self::Captured,
    ];

    /// Its name in layouts.
    pub fn name(self) -> &'static str {
        match self {
            Self::Batch => "batch",
            Self::Seq => "seq",
            Self::Stream => "stream",
            Self::KvSeq => "kv_seq",
            Self::Heads => "heads",
            Self::KvHeads => "kv_heads",
            Self::Dim => "dim",
            Self::DimV => "dim_v",
            Self::Hidden => "hidden",
            Self::Ffn => "ffn",
            Self::Vocab => "vocab",
            Self::Elements => "elements",
            Self::Captured => "captured",
        }
    }

    /// The axis of this name.
    ///
    /// # Errors
    /// When there is none; the message lists the names.
    pub fn parse(name: &str) -> Result<Self, ShardError> {
        match Self::ALL.into_iter().find(|a| a.name() == name) {
            Some(axis) => Ok(axis),
            None => {
                let names: Vec<_> = Self::ALL.iter().map(|a| a.name()).collect();
                refused(format!("`{name}` is no name of an axis; {} are", names.join(", ")))
            }
        }
    }

    /// Why the axis is whole on every rank; `None` when it may be cut.
    fn whole_because(self) -> Option<&'static str> {
        match self {
            Self::Dim => Some("a score is a sum over it"),
            Self::DimV => Some("a head's output is one vector"),
            Self::Captured => Some("mods read captured buffers in global coordinates"),
            Self::Hidden => Some("norms are taken over it"),
            _ => None,
        }
    }
}

impl fmt::Display for Axis {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// Names of axes to axes of a mesh.
///
/// ```
/// use foveate_shard::{Axis, Map, Mesh, MeshAxis};
///
/// let map = Map::new(Mesh::new([1, 2, 4, 1])?);
/// assert_eq!(map.of(Axis::Seq), [MeshAxis::Context]);
/// assert_eq!(map.of(Axis::Batch), [MeshAxis::Replicate, MeshAxis::Shard]);
/// # Ok::<(), foveate_shard::ShardError>(())
/// ```
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Map {
    mesh: Mesh,
    targets: [Vec<MeshAxis>; Axis::ALL.len()],
}

impl Map {
    /// The usual map: the batch over `replicate` and `shard`, tokens over `context`, those of the stream
    /// between products over `tensor`, too, heads, feed-forward columns and vocabulary over `tensor`,
    /// elements of parameters over `shard` and `context`.
    pub fn new(mesh: Mesh) -> Self {
        use MeshAxis::{Context, Replicate, Shard, Tensor};
        let target = |axis| match axis {
            Axis::Batch => vec![Replicate, Shard],
            Axis::Seq | Axis::KvSeq => vec![Context],
            Axis::Stream => vec![Context, Tensor],
            Axis::Heads | Axis::KvHeads | Axis::Ffn | Axis::Vocab => vec![Tensor],
            Axis::Elements => vec![Shard, Context],
            Axis::Dim | Axis::DimV | Axis::Hidden | Axis::Captured => vec![],
        };
        Self { mesh, targets: Axis::ALL.map(target) }
    }

    /// The same map with `axis` sent elsewhere. `heads` and `kv_heads` go together, because a query
    /// head is computed where its key/value head is, and so do `seq` and `kv_seq`; `stream` goes where
    /// `seq` goes, and to `tensor`.
    ///
    /// # Errors
    /// When the axis must be whole, is `stream`, a mesh axis is there twice, or the axes are not in the
    /// order of the mesh.
    pub fn with(mut self, axis: Axis, to: &[MeshAxis]) -> Result<Self, ShardError> {
        if let (Some(why), false) = (axis.whole_because(), to.is_empty()) {
            return refused(format!("map: {axis} is whole on every rank, because {why}"));
        }
        if !to.is_sorted_by(|a, b| a < b) {
            let names: Vec<_> = to.iter().map(|a| a.name()).collect();
            return refused(format!(
                "map: {axis} goes to {}; give each mesh axis once, in the order replicate, shard, \
                 context, tensor",
                names.join(", ")
            ));
        }
        if axis == Axis::Stream {
            return refused("map: stream follows seq; send that elsewhere");
        }
        if matches!(axis, Axis::Seq | Axis::KvSeq) {
            let tensor = Some(MeshAxis::Tensor).filter(|axis| !to.contains(axis));
            self.targets[Axis::Stream as usize] = to.iter().copied().chain(tensor).collect();
        }
        self.targets[axis as usize] = to.to_vec();
        let together = match axis {
            Axis::Heads => Some(Axis::KvHeads),
            Axis::KvHeads => Some(Axis::Heads),
            Axis::Seq => Some(Axis::KvSeq),
            Axis::KvSeq => Some(Axis::Seq),
            _ => None,
        };
        if let Some(other) = together {
            self.targets[other as usize] = to.to_vec();
        }
        Ok(self)
    }

    /// The mesh.
    pub fn mesh(&self) -> &Mesh {
        &self.mesh
    }

    /// The axes of the mesh that cut `axis`, outermost first.
    pub fn of(&self, axis: Axis) -> &[MeshAxis] {
        &self.targets[axis as usize]
    }

    /// In how many parts `axis` is cut.
    pub fn parts(&self, axis: Axis) -> usize {
        self.mesh.size_of(self.of(axis))
    }

    /// Which part of `axis` a rank holds.
    ///
    /// # Panics
    /// When there is no such rank.
    pub fn part(&self, axis: Axis, rank: usize) -> usize {
        self.mesh.index_of(rank, self.of(axis))
    }
}

impl fmt::Display for Map {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let sent = |axis: &Axis| {
            let to: Vec<_> = self.of(*axis).iter().map(|a| a.name()).collect();
            (!to.is_empty()).then(|| format!("{axis} -> {}", to.join(", ")))
        };
        f.write_str(&Axis::ALL.iter().filter_map(sent).collect::<Vec<_>>().join("; "))
    }
}
