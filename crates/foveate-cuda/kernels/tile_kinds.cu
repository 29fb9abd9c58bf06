// What lists of tiles make of each tile: fv_tile_kinds<<<rows of all heads and batch entries / 4, 128>>>
//
// A warp owns a row of tiles: it writes 0, then 1 where the row's list of partial tiles names one, then 2 where that
// of full tiles does. Of a list the first `counts` entries count; what they name outside of the row is left out.
//
//   partial 2: 5 0 ..    full 1: 5 ..    of 7 columns: 1 0 0 0 0 2 0
//
// No shared memory, no barriers but of a warp.

using i64 = long long;

struct TileList {
    const int* counts;          // [batch, heads, rows]
    const int* tiles;           // [batch, heads, rows, most]
    i64 count_strides[3];
    i64 tile_strides[4];
    i64 most;
};

struct TileKindsParams {
    TileList partial;
    TileList full;              // none: no tile is full
    unsigned char* kinds;       // output [batch, heads, rows, columns]
    i64 heads, rows, columns;
    i64 lines;                  // batch * heads * rows
};

__device__ void write_listed(const TileList& list, i64 b, i64 h, i64 row, unsigned char kind, unsigned char* kinds,
                             i64 columns) {
    const i64* by = list.count_strides;
    const i64 count = list.counts[b * by[0] + h * by[1] + row * by[2]];
    const int* tiles = list.tiles + b * list.tile_strides[0] + h * list.tile_strides[1] + row * list.tile_strides[2];
    const i64 end = count < list.most ? count : list.most;
    for (i64 i = threadIdx.x % 32; i < end; i += 32) {
        const int tile = tiles[i * list.tile_strides[3]];
        if (0 <= tile && tile < columns) kinds[tile] = kind;
    }
}

extern "C" __global__ void __launch_bounds__(128)
fv_tile_kinds(const __grid_constant__ TileKindsParams p) {
    const i64 line = i64(blockIdx.x) * 4 + threadIdx.x / 32;
    if (line >= p.lines) return;
    const i64 row = line % p.rows, h = line / p.rows % p.heads, b = line / p.rows / p.heads;
    unsigned char* kinds = p.kinds + line * p.columns;
    for (i64 column = threadIdx.x % 32; column < p.columns; column += 32) kinds[column] = 0;
    __syncwarp();
    write_listed(p.partial, b, h, row, 1, kinds, p.columns);
    __syncwarp();
    if (p.full.counts) write_listed(p.full, b, h, row, 2, kinds, p.columns);
}
