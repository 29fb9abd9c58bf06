//! What one kernel is compiled for: its family, and the macros of its source, as a struct.
//!
//! Two kernels with equal configurations and equal mods have equal source. Lengths, strides,
//! batch size, the number of heads, and what captured buffers hold are arguments of the launch,
//! so they are not here.

use std::fmt;

use foveate_gpu::Arch;
use foveate_tensor::DType;

use super::cells::Cells;
pub use super::kernel::{Entry, Kernel};

/// The type of an operand's or a destination's elements.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, serde::Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Elem {
    /// IEEE half precision.
    F16,
    /// bfloat16.
    Bf16,
    /// IEEE single precision. Products are made of three products of tf32 halves.
    F32,
    /// e4m3, of 8 bits: operands of the Hopper family's forward alone, never results.
    E4m3,
}

impl Elem {
    /// Every type that every kernel takes.
    pub const ALL: [Self; 3] = [Self::F16, Self::Bf16, Self::F32];

    /// The type that stands for `dtype`; `None` for f64, which no kernel takes.
    pub fn of(dtype: DType) -> Option<Self> {
        match dtype {
            DType::F16 => Some(Self::F16),
            DType::BF16 => Some(Self::Bf16),
            DType::F32 => Some(Self::F32),
            DType::F8E4M3 => Some(Self::E4m3),
            DType::F64 => None,
        }
    }

    /// Bytes of an element.
    pub fn bytes(self) -> usize {
        match self {
            Self::F16 | Self::Bf16 => 2,
            Self::F32 => 4,
            Self::E4m3 => 1,
        }
    }

    /// `f16`, `bf16`, `f32` or `f8e4m3`.
    pub fn name(self) -> &'static str {
        match self {
            Self::F16 => "f16",
            Self::Bf16 => "bf16",
            Self::F32 => "f32",
            Self::E4m3 => "f8e4m3",
        }
    }

    /// The type of results of operands of this type, where nothing else is said.
    pub fn result(self) -> Self {
        if self == Self::E4m3 { Self::Bf16 } else { self }
    }

    /// The value of the `FV_DTYPE` macros.
    fn number(self) -> usize {
        match self {
            Self::F16 => 0,
            Self::Bf16 => 1,
            Self::F32 => 2,
            Self::E4m3 => 3,
        }
    }
}

/// Kernels that are written for the same instructions and the same tiles. Kernels without matrix
/// products are shared by all families.
#[derive(
    Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, serde::Serialize, serde::Deserialize,
)]
#[serde(rename_all = "snake_case")]
pub enum Family {
    /// `cp.async`, `ldmatrix` and `mma.sync`: compute capability 8.0 and newer.
    Portable,
    /// Tensor maps, `wgmma` and warps with roles: compute capability 9.0.
    Hopper,
}

impl Family {
    /// Every family.
    pub const ALL: [Self; 2] = [Self::Portable, Self::Hopper];

    /// Its name, that of its folder under `kernels/`.
    pub fn name(self) -> &'static str {
        match self {
            Self::Portable => "portable",
            Self::Hopper => "hopper",
        }
    }

    /// The family of this name.
    pub fn named(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|family| family.name() == name)
    }

    /// Whether it has a kernel of its own for this one; where not, the portable family's runs.
    pub fn has(self, kernel: Kernel) -> bool {
        match (self, kernel) {
            (Self::Portable, _)
            | (Self::Hopper, Kernel::Forward | Kernel::Backward | Kernel::BackwardDq) => true,
            (
                Self::Hopper,
                Kernel::Combine
                | Kernel::Delta
                | Kernel::RowWeightSum
                | Kernel::Dq
                | Kernel::GroupSums
                | Kernel::BlockLists
                | Kernel::RangeTable
                | Kernel::Sequences
                | Kernel::TransposeValues,
            ) => false,
        }
    }

    /// Whether its kernels take all operands that those of `other` take, and can run in their place.
    pub(crate) fn stands_in_for(self, other: Self) -> bool {
        match (self, other) {
            (Self::Portable, Self::Portable | Self::Hopper) | (Self::Hopper, Self::Hopper) => true,
            // It needs tensor maps of them.
            (Self::Hopper, Self::Portable) => false,
        }
    }

    /// What its kernels with matrix products are compiled for on a device of the plain
    /// architecture `device`.
    pub fn arch(self, device: Arch) -> Arch {
        match self {
            Self::Portable => device,
            Self::Hopper => device.specific(),
        }
    }
}

/// Operands that are copied row by row, as no tensor map has them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, serde::Serialize)]
pub struct Copied {
    /// Queries.
    pub q: bool,
    /// Keys.
    pub k: bool,
    /// Values.
    pub v: bool,
}

impl Copied {
    fn operands(self) -> [(&'static str, bool); 3] {
        [("q", self.q), ("k", self.k), ("v", self.v)]
    }

    /// Whether there is one.
    pub fn any(self) -> bool {
        self.bits() != 0
    }

    /// The value of `FV_COPIED`: a bit for each of q, k and v.
    fn bits(self) -> usize {
        usize::from(self.q) | usize::from(self.k) << 1 | usize::from(self.v) << 2
    }
}

/// `k, v`.
impl fmt::Display for Copied {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let copied = self.operands().into_iter().filter(|(_, copied)| *copied);
        let names: Vec<&str> = copied.map(|(name, _)| name).collect();
        f.write_str(&names.join(", "))
    }
}

/// What one kernel is compiled for. Every field but the first two and `deterministic` is a macro; [`Self::defines`]
/// prints them.
#[derive(Clone, Debug, PartialEq, Eq, Hash, serde::Serialize)]
pub struct Config {
    /// The family that its source is of.
    pub family: Family,
    /// The kernel.
    pub kernel: Kernel,
    /// The type of q, k and v. `FV_DTYPE`
    pub dtype: Elem,
    /// The type of out. `FV_OUT_DTYPE`
    pub out_dtype: Elem,
    /// The type of what it writes: dk and dv, or dq where it makes dq alone. `FV_GRAD_DTYPE`
    pub grad_dtype: Elem,
    /// Elements of a row of q and k. `FV_D`
    pub dim: usize,
    /// Elements of a row of v. `FV_DV`
    pub dim_v: usize,
    /// Rows of a tile of queries, a multiple of 16. `FV_BM`
    pub tile_q: usize,
    /// Keys of a tile, a multiple of 16. `FV_BN`
    pub tile_kv: usize,
    /// Warps of a CTA; on Hopper four of them produce. `FV_WARPS`
    pub warps: usize,
    /// Tiles of the main loop's axis that smem holds. `FV_STAGES`
    pub stages: usize,
    /// Hopper: softmax runs beside the product of the step before, within each consumer.
    /// `FV_OVERLAP`
    pub overlap: bool,
    /// Query heads for each key/value head. `FV_GROUP`
    pub group: usize,
    /// Bytes that every row of every operand and destination is aligned to, with unit stride of
    /// its elements: 16, 8, 4 or 2. 0 for any stride of elements. `FV_ALIGN`
    pub align: usize,
    /// A mask decides. `FV_MASK`
    pub mask: bool,
    /// Scores are modified. `FV_SCORE`
    pub score: bool,
    /// The modified score's derivative is not constant 1. `FV_DSCORE`
    pub dscore: bool,
    /// Dropout. `FV_DROPOUT`
    pub dropout: bool,
    /// Captured buffers have gradients. `FV_CAPTURES`
    pub captures: bool,
    /// Every row has a sink in its denominator. `FV_SINK`
    pub sink: bool,
    /// Scales of e4m3 operands are those of blocks of rows. `FV_SCALE_BLOCKS`
    pub scale_blocks: bool,
    /// Split-KV: CTAs divide the live tiles of keys of a tile of queries. `FV_KV_SPLIT`
    pub kv_split: bool,
    /// Packed GQA: the rows of a tile are those of all query heads of a KV head. `FV_PACK_GQA`
    pub pack_gqa: bool,
    /// Hopper's backward: every query head has dk and dv of its own, which [`Kernel::GroupSums`] adds up, so that
    /// there are items for more CTAs. `FV_SPLIT_GQA`
    pub split_gqa: bool,
    /// Keys and values lie in pages. `FV_PAGED`
    pub paged: bool,
    /// Operands of the Hopper family's forward that its producers copy row by row. `FV_COPIED`
    pub copied: Copied,
    /// Every sum is in a fixed order, those of captured buffers by the mods.
    pub deterministic: bool,
    /// The backward leaves dq to [`Kernel::BackwardDq`]. `FV_SEPARATE_DQ`
    pub separate_dq: bool,
    /// Hopper: the backward adds dq in a fixed order, that of the tiles of keys. `FV_ORDERED_DQ`
    pub ordered_dq: bool,
    /// Hopper: partial tiles read the mask's bits, made beforehand, where there is room for them. `FV_MASK_BITS`
    pub mask_bits: bool,
    /// A captured index outside its axis is reported. `FV_CHECKED`
    pub checked: bool,
}

impl Config {
    /// A kernel for operands and results of one type, aligned rows and nothing special; with
    /// tiles of 64 queries and 64 keys, 4 warps and 2 stages.
    pub fn new(kernel: Kernel, dtype: Elem, dim: usize, dim_v: usize) -> Self {
        Self {
            family: Family::Portable,
            kernel,
            dtype,
            out_dtype: dtype.result(),
            grad_dtype: dtype.result(),
            dim,
            dim_v,
            tile_q: 64,
            tile_kv: 64,
            warps: 4,
            stages: 2,
            overlap: false,
            group: 1,
            align: 16,
            mask: false,
            score: false,
            dscore: false,
            dropout: false,
            captures: false,
            sink: false,
            scale_blocks: false,
            kv_split: false,
            pack_gqa: false,
            split_gqa: false,
            paged: false,
            copied: Copied::default(),
            deterministic: false,
            separate_dq: false,
            ordered_dq: false,
            mask_bits: false,
            checked: false,
        }
    }

    /// The same kernel with other tiles.
    pub(crate) fn tiled(self, tiles: Tiles) -> Self {
        let Tiles { family, tile_q, tile_kv, warps, stages, .. } = tiles;
        let Tiles { overlap, ordered_dq, split_gqa, mask_bits, .. } = tiles;
        let of_family = Self { family, overlap, ordered_dq, split_gqa, mask_bits, ..self };
        Self { tile_q, tile_kv, warps, stages, ..of_family }
    }

    /// The kernel that makes range tables of captured buffers.
    pub fn range_table() -> Self {
        Self { warps: 32, stages: 1, ..Self::new(Kernel::RangeTable, Elem::F16, 64, 64) }
    }

    /// The kernel that writes sequences from offsets in device memory.
    pub fn sequences() -> Self {
        Self { kernel: Kernel::Sequences, ..Self::range_table() }
    }

    /// The kernel that transposes values of e4m3, of `dim_v` elements.
    pub fn transpose_values(dim_v: usize) -> Self {
        let plain = Self::new(Kernel::TransposeValues, Elem::E4m3, dim_v, dim_v);
        Self { warps: 8, stages: 1, ..plain }
    }

    /// The kernel that makes block lists, of `threads` threads. Tiles are its parameters and
    /// elements are of no account, so one serves all.
    pub fn block_lists(threads: usize, checked: bool) -> Self {
        let (mask, warps, stages) = (true, threads / 32, 1);
        Self { mask, warps, stages, checked, ..Self::new(Kernel::BlockLists, Elem::F16, 64, 64) }
    }

    /// [`Self::dim`] as tiles have it: rounded up to a multiple of 16, of e4m3 to one of 32. `FV_DP`
    pub fn padded_dim(&self) -> usize {
        self.dim.next_multiple_of(if self.dtype == Elem::E4m3 { 32 } else { 16 })
    }

    /// [`Self::dim_v`] as tiles have it: rounded up to a multiple of 16. `FV_DVP`
    pub fn padded_dim_v(&self) -> usize {
        self.dim_v.next_multiple_of(16)
    }

    /// Hopper's backward of head dims above 128, whose consumers have dk and dv apart, and which leaves
    /// dq to another kernel.
    pub(crate) fn is_wide_backward(&self) -> bool {
        Tiles::of(self).are_wide_backward(self.kernel, self.dim.max(self.dim_v))
    }

    /// Query heads that share a tile of queries.
    pub fn heads(&self) -> usize {
        if self.pack_gqa { self.group } else { 1 }
    }

    /// Queries of a tile: its rows, divided between the heads that share it.
    pub fn queries(&self) -> usize {
        self.tile_q / self.heads()
    }

    /// The cells of a tile of queries by keys that its lists tell apart: a consumer of the Hopper
    /// family's forward has 64 queries of its own.
    pub fn cells(&self) -> Cells {
        match (self.family, self.kernel) {
            (Family::Hopper, Kernel::Forward) => Cells(self.warps / 4 - 1),
            (Family::Portable | Family::Hopper, _) => Cells::WHOLE,
        }
    }

    /// Threads of a CTA.
    pub fn threads(&self) -> usize {
        self.warps * 32
    }

    /// The macros and their values, in the order they are printed.
    pub fn macros(&self) -> [(&'static str, usize); 30] {
        [
            ("FV_DTYPE", self.dtype.number()),
            ("FV_OUT_DTYPE", self.out_dtype.number()),
            ("FV_GRAD_DTYPE", self.grad_dtype.number()),
            ("FV_D", self.dim),
            ("FV_DV", self.dim_v),
            ("FV_DP", self.padded_dim()),
            ("FV_DVP", self.padded_dim_v()),
            ("FV_BM", self.tile_q),
            ("FV_BN", self.tile_kv),
            ("FV_WARPS", self.warps),
            ("FV_STAGES", self.stages),
            ("FV_OVERLAP", self.overlap.into()),
            ("FV_GROUP", self.group),
            ("FV_ALIGN", self.align),
            ("FV_MASK", self.mask.into()),
            ("FV_SCORE", self.score.into()),
            ("FV_DSCORE", self.dscore.into()),
            ("FV_DROPOUT", self.dropout.into()),
            ("FV_CAPTURES", self.captures.into()),
            ("FV_SINK", self.sink.into()),
            ("FV_SCALE_BLOCKS", self.scale_blocks.into()),
            ("FV_KV_SPLIT", self.kv_split.into()),
            ("FV_PACK_GQA", self.pack_gqa.into()),
            ("FV_SPLIT_GQA", self.split_gqa.into()),
            ("FV_PAGED", self.paged.into()),
            ("FV_COPIED", self.copied.bits()),
            ("FV_SEPARATE_DQ", self.separate_dq.into()),
            ("FV_ORDERED_DQ", self.ordered_dq.into()),
            ("FV_MASK_BITS", self.mask_bits.into()),
            ("FV_CHECKED", self.checked.into()),
        ]
    }

    /// One `#define` line for each macro: how a kernel's source begins.
    pub fn defines(&self) -> String {
        self.macros().iter().map(|(name, value)| format!("#define {name} {value}\n")).collect()
    }
}

impl Entry {
    /// The configuration that it is compiled with, in the file of a kernel of `config`.
    pub fn config(self, config: Config) -> Config {
        match self {
            Self::CaptureSums => Config { captures: true, ..config },
            Self::Forward
            | Self::Combine
            | Self::Delta
            | Self::SinkGradient
            | Self::RowWeightSum
            | Self::Backward
            | Self::BackwardDq
            | Self::Dq
            | Self::GroupSums
            | Self::BlockLists
            | Self::DqRanks
            | Self::MaskBits
            | Self::RangeTable
            | Self::Sequences
            | Self::TransposeValues => config,
        }
    }
}

impl fmt::Display for Config {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {} D {}", self.kernel, self.dtype.name(), self.dim)?;
        if self.dim_v != self.dim {
            write!(f, "/{}", self.dim_v)?;
        }
        write!(f, ", {}, group {}, align {}", TilesOf(self), self.group, self.align)?;
        if self.out_dtype != self.dtype.result() {
            write!(f, ", out {}", self.out_dtype.name())?;
        }
        if self.grad_dtype != self.dtype.result() {
            write!(f, ", gradients {}", self.grad_dtype.name())?;
        }
        let flags = [
            (self.mask, "mask"),
            (self.score, "score"),
            (self.dscore, "dscore"),
            (self.dropout, "dropout"),
            (self.captures, "captures"),
            (self.sink, "sink"),
            (self.scale_blocks, "scales of blocks"),
            (self.kv_split, "split-KV"),
            (self.pack_gqa, "packed GQA"),
            (self.paged, "paged"),
            (self.deterministic, "deterministic"),
            (self.separate_dq && !self.deterministic, "separate dq"),
            (self.checked, "checked"),
        ];
        for (_, name) in flags.iter().filter(|(on, _)| *on) {
            write!(f, ", {name}")?;
        }
        if self.copied.any() {
            write!(f, ", {} by copies", self.copied)?;
        }
        Ok(())
    }
}

/// Family, tiles, warps and stages of a configuration.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, serde::Serialize, serde::Deserialize)]
pub struct Tiles {
    /// The family of the kernel.
    pub family: Family,
    /// Queries of a tile.
    pub tile_q: usize,
    /// Keys of a tile.
    pub tile_kv: usize,
    /// Warps of a CTA.
    pub warps: usize,
    /// Tiles of the main loop's axis that smem holds.
    pub stages: usize,
    /// See [`Config::overlap`].
    pub overlap: bool,
    /// See [`Config::ordered_dq`].
    pub ordered_dq: bool,
    /// See [`Config::split_gqa`].
    pub split_gqa: bool,
    /// See [`Config::mask_bits`]. A record is of tiles whatever the mask costs, and does not have it.
    #[serde(skip)]
    pub mask_bits: bool,
}

impl Tiles {
    /// Tiles of the portable family.
    pub const fn portable(tile_q: usize, tile_kv: usize, warps: usize, stages: usize) -> Self {
        let (family, [overlap, ordered_dq, split_gqa, mask_bits]) = (Family::Portable, [false; 4]);
        Self { family, tile_q, tile_kv, warps, stages, overlap, ordered_dq, split_gqa, mask_bits }
    }

    /// Tiles of the Hopper family: 64 queries for each warpgroup that consumes, and one more that
    /// produces.
    pub const fn hopper(consumers: usize, tile_kv: usize, stages: usize) -> Self {
        let (tile_q, warps) = (64 * consumers, 4 * (consumers + 1));
        let (family, overlap) = (Family::Hopper, true);
        Self { family, overlap, ..Self::portable(tile_q, tile_kv, warps, stages) }
    }

    /// Tiles of the Hopper family's backward: two warpgroups that consume, with 64 keys each.
    pub const fn hopper_backward(tile_q: usize, stages: usize) -> Self {
        Self { tile_q, tile_kv: 128, ..Self::hopper(2, 128, stages) }
    }

    /// The same that add dq in a fixed order.
    pub const fn ordered(self) -> Self {
        Self { ordered_dq: true, ..self }
    }

    /// The same whose query heads have items of their own.
    pub const fn split(self) -> Self {
        Self { split_gqa: true, ..self }
    }

    /// Tiles of the same for head dims above 128: two warpgroups that consume, and share 64 keys.
    pub const fn hopper_wide_backward(stages: usize) -> Self {
        Self { tile_kv: 64, ..Self::hopper_backward(64, stages) }
    }

    /// Whether they are of [`Config::is_wide_backward`], for the larger of its head dims.
    pub(crate) fn are_wide_backward(&self, kernel: Kernel, dim: usize) -> bool {
        self.family == Family::Hopper && kernel.owns_keys() && dim > Self::MOST_DIM_OF_BOTH
    }

    /// The largest head dim of which a consumer of Hopper's backward has registers for both dk and dv.
    pub(crate) const MOST_DIM_OF_BOTH: usize = 128;

    /// Tiles of the Hopper family's kernel for dq alone: two warpgroups that consume, with 64
    /// queries each.
    pub const fn hopper_dq(tile_kv: usize, stages: usize) -> Self {
        Self::hopper(2, tile_kv, stages)
    }

    /// Those of a configuration.
    pub fn of(config: &Config) -> Self {
        let Config { family, tile_q, tile_kv, warps, stages, .. } = *config;
        let Config { overlap, ordered_dq, split_gqa, mask_bits, .. } = *config;
        Self { family, tile_q, tile_kv, warps, stages, overlap, ordered_dq, split_gqa, mask_bits }
    }
}

/// `tile 64x128, 8 warps, 2 stages`.
pub struct TilesOf<'a>(pub &'a Config);

impl fmt::Display for TilesOf<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        Tiles::of(self.0).fmt(f)
    }
}

impl fmt::Display for Tiles {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { family, tile_q, tile_kv, warps, stages, overlap, .. } = self;
        let Self { ordered_dq, split_gqa, mask_bits, .. } = self;
        let (warps, stages) = (Count(*warps, "warp"), Count(*stages, "stage"));
        let (family, overlap) = match (family, overlap) {
            (Family::Portable, _) => ("", ""),
            (Family::Hopper, true) => ("hopper, ", ", overlap"),
            (Family::Hopper, false) => ("hopper, ", ""),
        };
        let ordered = if *ordered_dq { ", ordered dq" } else { "" };
        let split = if *split_gqa { ", split GQA" } else { "" };
        let bits = if *mask_bits { ", mask bits" } else { "" };
        f.pad(&format!(
            "{family}tile {tile_q}x{tile_kv}, {warps}, {stages}{overlap}{ordered}{split}{bits}"
        ))
    }
}

/// `1 warp`, `2 warps`.
pub(crate) struct Count(pub usize, pub &'static str);

impl fmt::Display for Count {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {}{}", self.0, self.1, if self.0 == 1 { "" } else { "s" })
    }
}

/// `128`, or `192/128`.
pub struct HeadDims(pub usize, pub usize);

impl fmt::Display for HeadDims {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.0)?;
        if self.1 != self.0 {
            write!(f, "/{}", self.1)?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_configuration_prints_in_one_line() {
        let mut config = Config::new(Kernel::Backward, Elem::Bf16, 192, 128);
        assert_eq!(
            config.to_string(),
            "backward bf16 D 192/128, tile 64x64, 4 warps, 2 stages, group 1, align 16"
        );
        (config.mask, config.dropout, config.grad_dtype) = (true, true, Elem::F32);
        assert!(config.to_string().ends_with("align 16, gradients f32, mask, dropout"));
    }

    #[test]
    fn head_dims_are_rounded_up_to_what_an_instruction_takes() {
        let mut config = Config::new(Kernel::Forward, Elem::F16, 80, 33);
        config.sink = true;
        let defines = config.defines();
        for line in ["FV_D 80", "FV_DP 80", "FV_DV 33", "FV_DVP 48", "FV_SINK 1", "FV_DTYPE 0"] {
            assert!(defines.contains(&format!("#define {line}\n")), "{line} is not in\n{defines}");
        }
    }

    #[test]
    fn every_macro_that_kernels_read_is_defined() {
        let defined = Config::new(Kernel::Forward, Elem::Bf16, 64, 64).macros();
        let folder = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("kernels");
        let families = Family::ALL.map(|family| folder.join(family.name()));
        let folders = [folder.clone()].into_iter().chain(families);
        let files = folders.flat_map(|folder| std::fs::read_dir(folder).unwrap());
        let paths = files.map(|file| file.unwrap().path());
        for path in paths.filter(|path| path.is_file()) {
            let text = std::fs::read_to_string(&path).unwrap();
            let mut words = text.split(|c: char| !c.is_ascii_alphanumeric() && c != '_');
            let unknown =
                words.find(|w| w.starts_with("FV_") && !defined.iter().any(|(name, _)| name == w));
            assert_eq!(unknown, None, "{}", path.display());
        }
    }
}
