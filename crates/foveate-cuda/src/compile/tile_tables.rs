//! The kernel that makes the tables of other libraries' block masks: it evaluates no mods, so one serves
//! all programs.

use foveate_gpu::Arch;
use foveate_gpu::kernel::{Expected, KernelSource};

use super::params::Address;

foveate_gpu::abi_structs! {
    /// What the kernel is launched with; `kernels/tile_tables.cu` says what each is.
    pub struct TileTablesParams {
        /// Runs of each row.
        pub counts: Address,
        /// The runs.
        pub runs: Address,
        /// Counts by rows and by columns, tiles by rows and by columns, of partial tiles.
        pub partial: [Address; 4],
        /// The same of full tiles; 0 counts them as partial ones.
        pub full: [Address; 4],
        /// Rows from one head to the next.
        pub head_rows: i64,
        /// Rows from one batch entry to the next.
        pub batch_rows: i64,
        /// Batch entries of the tables.
        pub batch: i32,
        /// Heads of the tables.
        pub heads: i32,
        /// Rows of tiles.
        pub rows: i32,
        /// Columns of tiles.
        pub columns: i32,
        /// 1 where the last row is cut.
        pub cut_row: i32,
        /// 1 where the last column is cut.
        pub cut_column: i32,
    }
}

/// Threads of a CTA.
pub(crate) const THREADS: u32 = 128;

/// Lines of tiles that a CTA owns, one a warp.
pub(crate) const LINES: usize = THREADS as usize / 32;

pub(crate) const EXPECTED: Expected<'static> = Expected {
    name: "tile tables",
    entry: "fv_tile_tables",
    registers: 96,
    local_bytes: 0,
    static_shared_bytes: 0,
    shared_bytes: None,
};

pub(crate) const TEXT: &str = include_str!("../../kernels/tile_tables.cu");

pub(crate) fn source(arch: Arch) -> KernelSource {
    KernelSource { text: TEXT.to_owned(), arch }
}

#[cfg(test)]
pub(super) mod tests {
    use std::fmt::Write;

    use foveate_gpu::cache::Cache;
    use foveate_gpu::nvrtc::Compiler;

    use super::*;

    /// A struct's name, its size, and names and offsets of its fields.
    type Struct<'a> = (&'a str, usize, &'a [(&'a str, usize)]);

    /// Compiles a kernel that stands alone, and whose structs are laid out as `structs`.
    pub fn compiles_as_planned(text: &str, structs: &[Struct<'_>], expected: &Expected<'_>) {
        let compiler = match Compiler::get() {
            Ok(compiler) => compiler,
            Err(e) => return println!("skipped: {e}"),
        };
        let mut text = String::from(text);
        for (name, size, fields) in structs {
            writeln!(text, "static_assert(sizeof({name}) == {size});").unwrap();
            for (field, offset) in *fields {
                let at = format!("__INTADDR__(&((({name}*)0)->{field}))");
                writeln!(text, "static_assert({at} == {offset});").unwrap();
            }
        }
        for capability in [(8, 0), (9, 0)] {
            let compiled = Cache::at(None).compile(compiler, &text, Arch::new(capability)).unwrap();
            assert_eq!(expected.compare(&compiled).unwrap(), Ok(()));
        }
    }

    #[test]
    fn the_kernel_compiles_as_planned_and_declares_the_same_sizes_and_offsets() {
        compiles_as_planned(TEXT, STRUCTS, &EXPECTED);
    }
}
