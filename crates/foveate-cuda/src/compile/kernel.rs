//! Kernels, and their entry points.

use std::fmt;

/// An entry point. Each has a file of its own under `kernels/`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, serde::Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Kernel {
    /// `out`, `lse` and `max_score` from q, k, v; partial results of them with
    /// [`Config::kv_split`](super::config::Config::kv_split).
    Forward,
    /// Joins the partial results of KV splits.
    Combine,
    /// `Σ out·d_out − d_lse` of each row, and the gradient of the sink.
    Delta,
    /// What the weights of rows add up to whose lse is too large to hold it.
    RowWeightSum,
    /// dk, dv, captured-buffer gradients, and the sums of dq unless
    /// [`Config::separate_dq`](super::config::Config::separate_dq).
    Backward,
    /// dq in a fixed order, of a backward that leaves it out.
    BackwardDq,
    /// dq from its sums.
    Dq,
    /// dk and dv of key/value heads from those of their query heads, with
    /// [`Config::split_gqa`](super::config::Config::split_gqa).
    GroupSums,
    /// The runs of live tiles, from the mask.
    BlockLists,
    /// Smallest and largest elements of stretches of a captured buffer.
    RangeTable,
    /// Sequences and tiles from offsets in device memory.
    Sequences,
    /// Values of e4m3 with keys along their rows, for the forward.
    TransposeValues,
}

impl Kernel {
    /// Every kernel.
    pub const ALL: [Self; 12] = [
        Self::Forward,
        Self::Combine,
        Self::Delta,
        Self::RowWeightSum,
        Self::Backward,
        Self::BackwardDq,
        Self::Dq,
        Self::GroupSums,
        Self::BlockLists,
        Self::RangeTable,
        Self::Sequences,
        Self::TransposeValues,
    ];

    /// Its name without prefix, that of its file.
    pub fn name(self) -> &'static str {
        match self {
            Self::Forward => "forward",
            Self::Combine => "combine",
            Self::Delta => "delta",
            Self::RowWeightSum => "row_weight_sum",
            Self::Backward => "backward",
            Self::BackwardDq => "backward_dq",
            Self::Dq => "dq",
            Self::GroupSums => "group_sums",
            Self::BlockLists => "block_lists",
            Self::RangeTable => "range_table",
            Self::Sequences => "sequences",
            Self::TransposeValues => "transpose_values",
        }
    }

    /// Its own entry point, beside which its file may have others.
    pub fn entry(self) -> Entry {
        match self {
            Self::Forward => Entry::Forward,
            Self::Combine => Entry::Combine,
            Self::Delta => Entry::Delta,
            Self::RowWeightSum => Entry::RowWeightSum,
            Self::Backward => Entry::Backward,
            Self::BackwardDq => Entry::BackwardDq,
            Self::Dq => Entry::Dq,
            Self::GroupSums => Entry::GroupSums,
            Self::BlockLists => Entry::BlockLists,
            Self::RangeTable => Entry::RangeTable,
            Self::Sequences => Entry::Sequences,
            Self::TransposeValues => Entry::TransposeValues,
        }
    }

    /// Whether its CTAs own tiles of keys, and their main loop runs over the queries; those of others
    /// own tiles of queries.
    pub fn owns_keys(self) -> bool {
        match self {
            Self::Backward => true,
            Self::Forward
            | Self::Combine
            | Self::Delta
            | Self::RowWeightSum
            | Self::BackwardDq
            | Self::Dq
            | Self::GroupSums
            | Self::BlockLists
            | Self::RangeTable
            | Self::Sequences
            | Self::TransposeValues => false,
        }
    }

    /// Whether it makes dq and nothing else, from all operands of a backward.
    pub(crate) fn makes_dq_alone(self) -> bool {
        match self {
            Self::BackwardDq => true,
            Self::Forward
            | Self::Combine
            | Self::Delta
            | Self::RowWeightSum
            | Self::Backward
            | Self::Dq
            | Self::GroupSums
            | Self::BlockLists
            | Self::RangeTable
            | Self::Sequences
            | Self::TransposeValues => false,
        }
    }

    /// Whether it is a kernel of the forward alone.
    pub fn is_of_forward(self) -> bool {
        match self {
            Self::Forward | Self::Combine => true,
            Self::Delta
            | Self::RowWeightSum
            | Self::Backward
            | Self::BackwardDq
            | Self::Dq
            | Self::GroupSums
            | Self::BlockLists
            | Self::RangeTable
            | Self::Sequences
            | Self::TransposeValues => false,
        }
    }

    /// Whether several CTAs can have the keys of a tile of queries among them, as KV splits, and one
    /// CTA the query heads of a key/value head, as packed GQA.
    pub fn shares_keys(self) -> bool {
        match self {
            Self::Forward => true,
            Self::Combine
            | Self::Delta
            | Self::RowWeightSum
            | Self::Backward
            | Self::BackwardDq
            | Self::Dq
            | Self::GroupSums
            | Self::BlockLists
            | Self::RangeTable
            | Self::Sequences
            | Self::TransposeValues => false,
        }
    }

    /// Whether its shared memory follows from its configuration. That of block lists is as long as a
    /// row of tiles, which a launch knows.
    pub(crate) fn has_planned_shared_memory(self) -> bool {
        match self {
            Self::BlockLists => false,
            Self::Forward
            | Self::Combine
            | Self::Delta
            | Self::RowWeightSum
            | Self::Backward
            | Self::BackwardDq
            | Self::Dq
            | Self::GroupSums
            | Self::RangeTable
            | Self::Sequences
            | Self::TransposeValues => true,
        }
    }

    /// Whether it multiplies tiles, whose sizes the planner chooses. The others are passes over
    /// rows with one configuration.
    pub fn has_tiles(self) -> bool {
        match self {
            Self::Forward | Self::Backward | Self::BackwardDq => true,
            Self::Combine
            | Self::Delta
            | Self::RowWeightSum
            | Self::Dq
            | Self::GroupSums
            | Self::BlockLists
            | Self::RangeTable
            | Self::Sequences
            | Self::TransposeValues => false,
        }
    }
}

/// An entry point. Those that are not a kernel's own stand in another's file.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Entry {
    /// Of [`Kernel::Forward`].
    Forward,
    /// Of [`Kernel::Combine`].
    Combine,
    /// Of [`Kernel::Delta`].
    Delta,
    /// The gradient of the sink, in the file of [`Kernel::Delta`].
    SinkGradient,
    /// Of [`Kernel::RowWeightSum`].
    RowWeightSum,
    /// Of [`Kernel::Backward`].
    Backward,
    /// Of [`Kernel::BackwardDq`].
    BackwardDq,
    /// Adds deterministic sums to gradients of captured buffers, in the file of
    /// [`Kernel::BackwardDq`] compiled with [`Config::captures`](super::config::Config::captures).
    CaptureSums,
    /// Of [`Kernel::Dq`].
    Dq,
    /// Of [`Kernel::GroupSums`].
    GroupSums,
    /// Of [`Kernel::BlockLists`].
    BlockLists,
    /// The order of sums of dq, in the file of [`Kernel::BlockLists`].
    DqRanks,
    /// The mask of partial tiles, a bit a pair, in the same file.
    MaskBits,
    /// Of [`Kernel::RangeTable`].
    RangeTable,
    /// Of [`Kernel::Sequences`].
    Sequences,
    /// Of [`Kernel::TransposeValues`].
    TransposeValues,
}

impl Entry {
    /// Every entry point.
    pub const ALL: [Self; 16] = [
        Self::Forward,
        Self::Combine,
        Self::Delta,
        Self::SinkGradient,
        Self::RowWeightSum,
        Self::Backward,
        Self::BackwardDq,
        Self::CaptureSums,
        Self::Dq,
        Self::GroupSums,
        Self::BlockLists,
        Self::DqRanks,
        Self::MaskBits,
        Self::RangeTable,
        Self::Sequences,
        Self::TransposeValues,
    ];

    /// The kernel whose file has it.
    pub fn kernel(self) -> Kernel {
        match self {
            Self::Forward => Kernel::Forward,
            Self::Combine => Kernel::Combine,
            Self::Delta | Self::SinkGradient => Kernel::Delta,
            Self::RowWeightSum => Kernel::RowWeightSum,
            Self::Backward => Kernel::Backward,
            Self::BackwardDq | Self::CaptureSums => Kernel::BackwardDq,
            Self::Dq => Kernel::Dq,
            Self::GroupSums => Kernel::GroupSums,
            Self::BlockLists | Self::DqRanks | Self::MaskBits => Kernel::BlockLists,
            Self::RangeTable => Kernel::RangeTable,
            Self::Sequences => Kernel::Sequences,
            Self::TransposeValues => Kernel::TransposeValues,
        }
    }

    /// Its name in the machine code.
    pub fn name(self) -> &'static str {
        match self {
            Self::Forward => "fv_forward",
            Self::Combine => "fv_combine",
            Self::Delta => "fv_delta",
            Self::SinkGradient => "fv_sink_gradient",
            Self::RowWeightSum => "fv_row_weight_sum",
            Self::Backward => "fv_backward",
            Self::BackwardDq => "fv_backward_dq",
            Self::CaptureSums => "fv_capture_sums",
            Self::Dq => "fv_dq",
            Self::GroupSums => "fv_group_sums",
            Self::BlockLists => "fv_block_lists",
            Self::DqRanks => "fv_dq_ranks",
            Self::MaskBits => "fv_mask_bits",
            Self::RangeTable => "fv_range_table",
            Self::Sequences => "fv_sequences",
            Self::TransposeValues => "fv_transpose_values",
        }
    }

    /// The entry point of this name.
    pub fn named(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|entry| entry.name() == name)
    }
}

impl fmt::Display for Kernel {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}
