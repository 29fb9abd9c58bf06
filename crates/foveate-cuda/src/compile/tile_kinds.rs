//! The kernel that makes tables of tiles from the lists of other libraries' block masks: one for all programs.

use foveate_gpu::Arch;
use foveate_gpu::kernel::{Expected, KernelSource};

use super::params::Address;

foveate_gpu::abi_structs! {
    /// Lists of tiles, one a row; `kernels/tile_kinds.cu` says what each field is.
    pub struct TileList {
        /// How many entries of each list count.
        pub counts: Address,
        /// Key tiles.
        pub tiles: Address,
        /// Of `counts`: batch entry, head, row.
        pub count_strides: [i64; 3],
        /// Of `tiles`: batch entry, head, row, entry.
        pub tile_strides: [i64; 4],
        /// Entries that a list has room for.
        pub most: i64,
    }

    /// What the kernel is launched with.
    pub struct TileKindsParams {
        /// Tiles of which some pairs count.
        pub partial: TileList,
        /// Tiles of which all count; counts at 0 where there are none.
        pub full: TileList,
        /// u8 `[batch, heads, rows, columns]`.
        pub kinds: Address,
        /// Heads of the table.
        pub heads: i64,
        /// Rows of tiles.
        pub rows: i64,
        /// Columns of tiles.
        pub columns: i64,
        /// Rows of all heads and batch entries.
        pub lines: i64,
    }
}

/// Threads of a CTA.
pub(crate) const THREADS: u32 = 128;

/// Rows of tiles that a CTA owns, one a warp.
pub(crate) const LINES: usize = THREADS as usize / 32;

pub(crate) const EXPECTED: Expected<'static> = Expected {
    name: "tile kinds",
    entry: "fv_tile_kinds",
    registers: 64,
    local_bytes: 0,
    static_shared_bytes: 0,
    shared_bytes: None,
};

pub(crate) const TEXT: &str = include_str!("../../kernels/tile_kinds.cu");

pub(crate) fn source(arch: Arch) -> KernelSource {
    KernelSource { text: TEXT.to_owned(), arch }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::compile::tile_tables::tests::compiles_as_planned;

    #[test]
    fn the_kernel_compiles_as_planned_and_declares_the_same_sizes_and_offsets() {
        compiles_as_planned(TEXT, STRUCTS, &EXPECTED);
    }
}
