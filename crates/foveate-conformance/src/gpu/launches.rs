//! What a launch can carry on a real GPU: a tensor map, a cluster, programmatic dependence.
//!
//! One kernel writes a tensor, and lets the next one start before it ends. That one waits for it,
//! loads a tile in each CTA of a cluster by the copy engine, through a tensor map, and gives the
//! cluster's other CTA what it has loaded. Rows and columns past the tensor's end are filled.

use std::sync::Arc;

use foveate_gpu::driver::{Fill, L2Promotion, Launch, Swizzle, TensorMap, Tiled, default_timeout};
use foveate_gpu::kernel::{Expected, KernelSource, LoadedKernel};
use foveate_gpu::{Arch, ElementType, Engine, GpuError};

use super::checks::{Outcome, on_gpu};

/// Rows and columns of the tensor, which tiles do not divide; elements from row to row.
const ROWS: usize = 50;
const COLUMNS: usize = 40;
const STRIDE: usize = 48;
/// Rows and columns of a tile: a CTA has one, a cluster of two those side by side.
const TILE: usize = 32;
const TILES: [usize; 2] = [ROWS.div_ceil(TILE), COLUMNS.div_ceil(TILE)];

const SOURCE: &str = r#"
typedef unsigned u32;
typedef unsigned long long u64;
struct alignas(64) Map { u64 words[16]; };
const int TILE = 32;
extern "C" __device__ const int fv_shared_bytes = TILE * TILE * 4 + 1024 + 16;

// x[row][column] = row * 1000 + column, row by row.
extern "C" __global__ void fill(float* x, int columns, int stride) {
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
    for (u64 began = clock64(); clock64() - began < 100000;) {}
    if (threadIdx.x < columns) x[blockIdx.x * stride + threadIdx.x] = blockIdx.x * 1000.0f + threadIdx.x;
}

__device__ u32 shared(const void* p) { return (u32)__cvta_generic_to_shared(p); }

// out[tile row][tile column][TILE][TILE]: the tile that the other CTA of the cluster has loaded.
extern "C" __global__ void exchange(const __grid_constant__ Map map, float* out) {
    extern __shared__ char memory[];
    // The pattern of a swizzle starts at multiples of 1024 bytes, at the same place in both CTAs.
    char* tile = memory + (1024 - shared(memory) % 1024) % 1024;
    u64* loaded = (u64*)(tile + TILE * TILE * 4);
    const u32 bar = shared(loaded);
    if (threadIdx.x == 0) {
        asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" :: "r"(bar) : "memory");
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    __syncthreads();
    asm volatile("griddepcontrol.wait;" ::: "memory");
    if (threadIdx.x == 0) {
        // The tensor was written by ordinary stores of another kernel.
        asm volatile("fence.proxy.async.global;" ::: "memory");
        asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;"
                     :: "r"(bar), "r"(TILE * TILE * 4) : "memory");
        asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes "
                     "[%0], [%1, {%2, %3}], [%4];"
                     :: "r"(shared(tile)), "l"((u64)&map), "r"(blockIdx.x * TILE),
                        "r"(blockIdx.y * TILE), "r"(bar) : "memory");
    }
    for (u32 done = 0; !done;)
        asm volatile("{ .reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], 0; "
                     "selp.u32 %0, 1, 0, p; }" : "=r"(done) : "r"(bar) : "memory");
    asm volatile("barrier.cluster.arrive.release.aligned; barrier.cluster.wait.acquire.aligned;" ::: "memory");
    const u32 other = blockIdx.x ^ 1;
    float* to = out + (blockIdx.y * gridDim.x + blockIdx.x) * TILE * TILE;
    for (int i = threadIdx.x; i < TILE * TILE; i += blockDim.x) {
        // Rows of 128 bytes; their 16-byte parts change places by the row.
        const u32 row = i / TILE, column = i % TILE;
        const u32 at = shared(tile) + row * 128 + ((column / 4 ^ row % 8) * 16 + column % 4 * 4);
        u32 there;
        float value;
        asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(at), "r"(other % 2));
        asm volatile("ld.shared::cluster.f32 %0, [%1];" : "=f"(value) : "r"(there) : "memory");
        to[i] = value;
    }
    // Nobody leaves while the other still reads its tile.
    asm volatile("barrier.cluster.arrive.release.aligned; barrier.cluster.wait.acquire.aligned;" ::: "memory");
}
"#;

/// What both kernels of the file may take.
const fn expected(entry: &'static str) -> Expected<'static> {
    Expected {
        name: entry,
        entry,
        registers: 64,
        local_bytes: 0,
        static_shared_bytes: 0,
        shared_bytes: Some((TILE * TILE * 4 + 1024 + 16) as u32),
    }
}

/// Runs it and prints a line for the check; whether it passed.
pub fn run() -> Result<bool, String> {
    on_gpu("launches", |engine, checks| {
        let name = "a tile by tensor map, cluster and programmatic launch";
        match engine.device().info().capability {
            (major, minor) if (major, minor) < (9, 0) => {
                checks.skip(name, format!("capability {major}.{minor} has no tensor maps"));
            }
            _ => checks.say(name, exchange(engine)),
        }
    })
}

fn exchange(engine: &Arc<Engine>) -> Outcome {
    let kernel = |entry: &'static str| -> Result<LoadedKernel, GpuError> {
        let arch: Arch = engine.device().info().arch().specific();
        engine.kernel(&KernelSource { text: SOURCE.to_owned(), arch }, &expected(entry))
    };
    let (fill, exchange) = (kernel("fill")?, kernel("exchange")?);
    let queue = engine.queue();
    let tensor = queue.pool().take(ROWS * STRIDE * 4)?;
    let out = queue.pool().take(TILES[0] * TILES[1] * TILE * TILE * 4)?;
    tensor.fill(0xff)?;
    out.fill(0xff)?;
    let map = TensorMap::tiled(
        engine.device(),
        &Tiled {
            element: ElementType::F32,
            address: tensor.address(),
            dims: &[COLUMNS as u64, ROWS as u64],
            strides: &[STRIDE as u64 * 4],
            tile: &[TILE as u32; 2],
            element_strides: &[1; 2],
            swizzle: Swizzle::Bytes128,
            l2_promotion: L2Promotion::Bytes128,
            fill: Fill::Zeros,
        },
    )?;
    let rows = Launch::new([ROWS as u32, 1, 1], 64);
    let tiles = Launch::new([TILES[1] as u32, TILES[0] as u32, 1], 128);
    let tiles = tiles.cluster([2, 1, 1]).programmatic();
    // SAFETY: the grids and the map keep both kernels inside of the allocations, which go back to
    // the pool of the same queue, behind the launches.
    unsafe {
        fill.launch(queue, &rows, (tensor.address(), COLUMNS as i32, STRIDE as i32))?;
        exchange.launch(queue, &tiles, (map, out.address()))?;
    }
    let mut bytes = vec![0; out.bytes()];
    out.read(&mut bytes, default_timeout())?;
    Ok(compare(&bytes))
}

/// Compares what the kernel wrote with the tensor, computed here.
fn compare(bytes: &[u8]) -> Result<(), String> {
    let found = bytes.chunks_exact(4).map(|b| f32::from_ne_bytes(b.try_into().expect("four")));
    for (i, found) in found.enumerate() {
        let (tile, inside) = (i / (TILE * TILE), i % (TILE * TILE));
        // The cluster's other tile.
        let (tile_row, tile_column) = (tile / TILES[1], (tile % TILES[1]) ^ 1);
        let row = tile_row * TILE + inside / TILE;
        let column = tile_column * TILE + inside % TILE;
        let there = row < ROWS && column < COLUMNS;
        let wanted = if there { row as f32 * 1000.0 + column as f32 } else { 0.0 };
        if found != wanted {
            return Err(format!("row {row}, column {column} is {found}, not {wanted}"));
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use foveate_gpu::cache::Cache;
    use foveate_gpu::nvrtc::Compiler;

    use super::*;

    #[test]
    fn the_kernels_compile_and_take_what_is_expected() {
        let compiler = match Compiler::get() {
            Ok(compiler) => compiler,
            Err(e) => return println!("skipped: {e}"),
        };
        let arch = Arch::new((9, 0)).specific();
        let compiled = Cache::at(None).compile(compiler, SOURCE, arch).unwrap();
        for entry in ["fill", "exchange"] {
            assert_eq!(expected(entry).compare(&compiled).unwrap(), Ok(()), "{entry}");
        }
    }
}
