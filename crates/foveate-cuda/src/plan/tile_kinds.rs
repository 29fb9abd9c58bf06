//! Lists of tiles in device memory as a table of what each tile is, as
//! [`block_table`](foveate_mods::block_table) reads it. The host reads none of it.

use std::sync::{Arc, Mutex};

use foveate_gpu::driver::Launch;
use foveate_gpu::kernel::LoadedKernel;
use foveate_gpu::sync::lock;
use foveate_gpu::{DeviceArray, ElementType, Engine, Queue};

use super::resident::count;
use crate::compile::tile_kinds::{self, TileKindsParams, TileList};
use crate::error::CudaError;

/// Lists of key tiles of each row of tiles, i32 in device memory, of any strides.
#[derive(Clone, Copy, Debug)]
pub struct DeviceBlockLists<'a> {
    /// How many entries of each list count: `[B|1, H|1, rows]`.
    pub counts: DeviceArray<'a>,
    /// The lists, `[B|1, H|1, rows, most]`. Entries behind the count are not read.
    pub tiles: DeviceArray<'a>,
}

/// Queues the making of the table of tiles `into`, row-major u8 `[B, H, rows, columns]`, that the lists stand for:
/// 2 where `full` names a tile, else 1 where `partial` does, else 0. Tiles beyond the columns are left out.
/// Nothing waits.
///
/// # Errors
/// When shapes or types do not fit each other, or the kernel cannot be compiled.
pub fn tile_kinds_on(
    engine: &Arc<Engine>,
    queue: &Queue,
    partial: &DeviceBlockLists<'_>,
    full: Option<&DeviceBlockLists<'_>>,
    into: &DeviceArray<'_>,
) -> Result<(), CudaError> {
    engine.check_queue(queue)?;
    let &[batch, heads, rows, columns] = into.shape else {
        return Err(unfit("the table", "[B, H, rows, columns]", into.shape));
    };
    if into.element != ElementType::U8 || into.strides.is_some() {
        return Err(CudaError::argument("a table of tiles is a row-major u8 array"));
    }
    let table = [batch, heads, rows];
    let params = TileKindsParams {
        partial: list(partial, table)?,
        full: full.map_or(Ok(TileList::default()), |full| list(full, table))?,
        kinds: into.address,
        heads: heads as i64,
        rows: rows as i64,
        columns: columns as i64,
        lines: (batch * heads * rows) as i64,
    };
    if batch * heads * rows * columns == 0 {
        return Ok(());
    }
    let ctas = count((batch * heads * rows).div_ceil(tile_kinds::LINES))? as u32;
    let launch = Launch::new([ctas, 1, 1], tile_kinds::THREADS);
    let kept = engine.keep(KindsKernel::default);
    let mut kernel = lock(&kept.0);
    if kernel.is_none() {
        let source = tile_kinds::source(engine.device().info().arch());
        *kernel = Some(engine.kernel(&source, &tile_kinds::EXPECTED)?);
    }
    let kernel = kernel.clone().expect("it was just loaded");
    // SAFETY: the arrays have the shapes that the kernel goes by, checked above, and are the caller's until
    // the work is done.
    unsafe { kernel.launch(queue, &launch, (params,))? };
    Ok(())
}

/// The kernel, once it is loaded.
#[derive(Default)]
struct KindsKernel(Mutex<Option<LoadedKernel>>);

/// Lists for the rows of a table of `[batch, heads, rows]`.
fn list(of: &DeviceBlockLists<'_>, table: [usize; 3]) -> Result<TileList, CudaError> {
    for (name, array) in [("counts", &of.counts), ("tiles", &of.tiles)] {
        if array.element != ElementType::I32 {
            return Err(CudaError::argument(format!("{name} of a block mask must be i32")));
        }
    }
    let (counts, tiles) = (of.counts.shape, of.tiles.shape);
    let fits = |shape: &[usize]| {
        shape[2] >= table[2] && [0, 1].iter().all(|&a| shape[a] == 1 || shape[a] == table[a])
    };
    if counts.len() != 3 || !fits(counts) {
        return Err(unfit("counts", "[B|1, H|1, rows]", counts));
    }
    if tiles.len() != 4 || !fits(tiles) {
        return Err(unfit("tiles", "[B|1, H|1, rows, most]", tiles));
    }
    Ok(TileList {
        counts: of.counts.address,
        tiles: of.tiles.address,
        count_strides: strides(&of.counts),
        tile_strides: strides(&of.tiles),
        most: tiles[3] as i64,
    })
}

/// Strides as kernels take them: 0 along an axis that is shared.
fn strides<const N: usize>(of: &DeviceArray<'_>) -> [i64; N] {
    let mut dense = [1; N];
    for axis in (1..N).rev() {
        dense[axis - 1] = dense[axis] * of.shape[axis] as i64;
    }
    std::array::from_fn(|axis| match (of.shape[axis], of.strides) {
        (1, _) => 0,
        (_, Some(strides)) => strides[axis] as i64,
        (_, None) => dense[axis],
    })
}

fn unfit(what: &str, wanted: &str, shape: &[usize]) -> CudaError {
    CudaError::argument(format!("{what} of a block mask must be {wanted}, not {shape:?}"))
}
