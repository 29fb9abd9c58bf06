//! The mesh: ranks arranged along four axes.

use std::fmt;

use crate::error::{ShardError, refused};
use foveate::tensor::count::Count;

/// An axis of the mesh, outermost first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum MeshAxis {
    /// Copies of everything that cut the batch.
    Replicate,
    /// Parameters and the batch are cut.
    Shard,
    /// Tokens of a row are cut.
    Context,
    /// Heads, feed-forward columns and the vocabulary are cut.
    Tensor,
}

impl MeshAxis {
    /// Every axis, outermost first.
    pub const ALL: [Self; 4] = [Self::Replicate, Self::Shard, Self::Context, Self::Tensor];

    /// Its name in recipes and layouts.
    pub fn name(self) -> &'static str {
        match self {
            Self::Replicate => "replicate",
            Self::Shard => "shard",
            Self::Context => "context",
            Self::Tensor => "tensor",
        }
    }

    /// The axis of this name.
    ///
    /// # Errors
    /// When there is none; the message lists those that there are.
    pub fn parse(name: &str) -> Result<Self, ShardError> {
        match Self::ALL.into_iter().find(|a| a.name() == name) {
            Some(axis) => Ok(axis),
            None => refused(format!(
                "`{name}` is no axis of a mesh; the axes are replicate, shard, context and tensor"
            )),
        }
    }
}

impl fmt::Display for MeshAxis {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// The most ranks of a run: more than anybody has.
pub(crate) const MOST_RANKS: usize = 1 << 16;

/// Ranks arranged as `replicate × shard × context × tensor`, rank 0 first and the last axis the
/// fastest.
///
/// ```
/// use foveate_shard::{Mesh, MeshAxis};
///
/// let mesh = Mesh::parse("shard=2, context=auto", 8)?;
/// assert_eq!(mesh.to_string(), "replicate=1,shard=2,context=4,tensor=1");
/// assert_eq!(mesh.index(6, MeshAxis::Context), 2);
/// assert_eq!(mesh.group(6, &[MeshAxis::Context]), [4, 5, 6, 7]);
/// # Ok::<(), foveate_shard::ShardError>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Mesh {
    sizes: [usize; 4],
}

impl Mesh {
    /// A mesh of these sizes, outermost first.
    ///
    /// # Errors
    /// When an axis has no rank, or there are more than 65,536 ranks.
    pub fn new(sizes: [usize; 4]) -> Result<Self, ShardError> {
        if let Some(i) = sizes.iter().position(|&n| n == 0) {
            return refused(format!("mesh axis {} has size 0; give 1 or more", MeshAxis::ALL[i]));
        }
        let ranks = sizes.iter().try_fold(1usize, |n, &size| n.checked_mul(size));
        match ranks {
            Some(n) if n <= MOST_RANKS => Ok(Self { sizes }),
            _ => refused(format!(
                "a mesh of {} has more than {MOST_RANKS} ranks; give smaller sizes",
                Self { sizes }
            )),
        }
    }

    /// A mesh of one rank.
    pub fn single() -> Self {
        Self { sizes: [1; 4] }
    }

    /// The mesh of a line such as `replicate=1,shard=2,context=auto`, for `ranks` ranks. An axis that
    /// is left out has size 1; `auto` is what the other axes leave of the ranks.
    ///
    /// # Errors
    /// When there is no part, one is no `axis=size`, an axis is there twice or `auto` twice, or the product
    /// of the sizes is not `ranks`.
    pub fn parse(text: &str, ranks: usize) -> Result<Self, ShardError> {
        let (sizes, auto) = parts(text)?;
        let product = sizes.iter().fold(1usize, |n, &size| n.saturating_mul(size));
        let mut sizes = sizes;
        if let Some(auto) = auto {
            if product == 0 || ranks == 0 || !ranks.is_multiple_of(product) {
                return refused(format!(
                    "mesh `{text}`: {} cannot be divided by {product}, the product of the other \
                     axes, so `auto` has no size; change a size or the number of ranks",
                    Count(ranks, "rank")
                ));
            }
            sizes[auto as usize] = ranks / product;
        } else if product != ranks {
            return refused(format!(
                "mesh `{text}` has {}, but {ranks} run; change a size, or make one axis `auto`",
                Count(product, "rank")
            ));
        }
        Self::new(sizes)
    }

    /// [`Self::parse`] of a line that gives every size: the number of ranks is the product.
    ///
    /// # Errors
    /// Those of [`Self::parse`], and an `auto`, for which the number of ranks would have to be known.
    pub fn parse_whole(text: &str) -> Result<Self, ShardError> {
        match parts(text)? {
            (sizes, None) => Self::new(sizes),
            (_, Some(axis)) => refused(format!(
                "mesh `{text}`: {axis} is auto, but the number of ranks is not known; give its size"
            )),
        }
    }

    /// Number of ranks.
    pub fn ranks(&self) -> usize {
        self.sizes.iter().product()
    }

    /// Size of an axis.
    pub fn size(&self, axis: MeshAxis) -> usize {
        self.sizes[axis as usize]
    }

    /// Product of the sizes of several axes.
    pub fn size_of(&self, axes: &[MeshAxis]) -> usize {
        axes.iter().map(|&a| self.size(a)).product()
    }

    /// The place of a rank on every axis.
    ///
    /// # Panics
    /// When there is no such rank.
    pub fn place(&self, rank: usize) -> [usize; 4] {
        assert!(rank < self.ranks(), "rank {rank} of a mesh of {}", self.ranks());
        let mut rest = rank;
        let mut place = [0; 4];
        for axis in (0..4).rev() {
            place[axis] = rest % self.sizes[axis];
            rest /= self.sizes[axis];
        }
        place
    }

    /// The place of a rank on one axis.
    ///
    /// # Panics
    /// When there is no such rank.
    pub fn index(&self, rank: usize, axis: MeshAxis) -> usize {
        self.place(rank)[axis as usize]
    }

    /// The place of a rank on several axes taken as one, the first the outermost.
    ///
    /// # Panics
    /// When there is no such rank.
    pub fn index_of(&self, rank: usize, axes: &[MeshAxis]) -> usize {
        let place = self.place(rank);
        axes.iter().fold(0, |i, &a| i * self.size(a) + place[a as usize])
    }

    /// The rank at a place; `None` outside of the mesh.
    pub fn rank_at(&self, place: [usize; 4]) -> Option<usize> {
        let mut rank = 0;
        for (at, size) in place.into_iter().zip(self.sizes) {
            if at >= size {
                return None;
            }
            rank = rank * size + at;
        }
        Some(rank)
    }

    /// The ranks that differ from `rank` on `axes` alone, in order, `rank` among them.
    ///
    /// # Panics
    /// When there is no such rank.
    pub fn group(&self, rank: usize, axes: &[MeshAxis]) -> Vec<usize> {
        let own = self.place(rank);
        let mut group = vec![0];
        for axis in MeshAxis::ALL {
            let (size, own) = (self.size(axis), own[axis as usize]);
            let places = if axes.contains(&axis) { 0..size } else { own..own + 1 };
            let under = |&outer: &usize| places.clone().map(move |at| outer * size + at);
            group = group.iter().flat_map(under).collect();
        }
        group
    }
}

impl fmt::Display for Mesh {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let part = |a: &MeshAxis| format!("{a}={}", self.size(*a));
        f.write_str(&MeshAxis::ALL.iter().map(part).collect::<Vec<_>>().join(","))
    }
}

/// The sizes in a line, 1 for what is `auto` or left out, and the axis that is `auto`.
fn parts(text: &str) -> Result<([usize; 4], Option<MeshAxis>), ShardError> {
    let (mut sizes, mut given, mut auto) = ([1; 4], [false; 4], None);
    for part in text.split(',').map(str::trim).filter(|p| !p.is_empty()) {
        let Some((name, size)) = part.split_once('=') else {
            return refused(format!("mesh: `{part}` is not axis=size, such as context=4"));
        };
        let axis = MeshAxis::parse(name.trim())?;
        if std::mem::replace(&mut given[axis as usize], true) {
            return refused(format!("mesh `{text}`: {axis} is given twice"));
        }
        match size.trim() {
            "auto" if auto.is_some() => {
                return refused(format!("mesh `{text}`: only one axis can be auto"));
            }
            "auto" => auto = Some(axis),
            size => match size.parse::<usize>() {
                Ok(n) if n > 0 => sizes[axis as usize] = n,
                _ => {
                    return refused(format!(
                        "mesh `{text}`: {axis} has size `{size}`; give 1 or more, or auto"
                    ));
                }
            },
        }
    }
    if given == [false; 4] {
        return refused(format!("mesh `{text}`: no axis is given; name one, such as context=4"));
    }
    Ok((sizes, auto))
}
