// The tables of other libraries' block masks from runs of live tiles: fv_tile_tables<<<lines / 4, 128>>>
//
// A warp owns a line: a row of tiles, whose tables list key tiles, or a column, whose tables list query tiles. A table
// of a line has the number of its tiles, and all tiles: first its own, then the others, both in order.
//
//   runs of a row   (2, 2 full) (5, 1 partial) of 7 columns
//   partial         1: 5, 0 1 2 3 4 6
//   full            2: 2 3, 0 1 4 5 6
//
// Tiles that the lengths cut are not full. No shared memory, no barriers.

using i64 = long long;

// `[.., lines]` and `[.., lines, tiles of a line]`; of query tiles' rows, then of key tiles' columns.
struct Table { int* counts[2]; int* tiles[2]; };

struct TileTablesParams {
    const int* counts;      // runs of each row, [heads, batch, rows]
    const int2* runs;       // [heads, batch, rows, columns]: first tile, 2 * tiles + (some pair is hidden)
    Table partial;          // outputs of [batch, heads, ..]
    Table full;             // none: full tiles count as partial ones
    i64 head_rows;          // rows from one head to the next in `counts`, 0 where heads are alike
    i64 batch_rows;         // the same of batch entries
    int batch, heads, rows, columns;
    int cut_row, cut_column;    // whether the last row and column are cut
};

struct Line {
    const TileTablesParams& p;
    const int* counts;
    const int2* runs;

    // 0 empty, 1 partial, 2 full
    __device__ int kind(int row, int column) const {
        const int2* of_row = runs + i64(row) * p.columns;
        const int count = counts[row];
        int from = 0;       // the runs that begin up to the column are those before it
        for (int step = 1 << (31 - __clz(p.columns)); step > 0; step /= 2) {
            const int next = from + step;
            if (next <= count && of_row[next - 1].x <= column) from = next;
        }
        if (from == 0) return 0;
        int2 run = of_row[from - 1];
        if (column - run.x >= run.y / 2) return 0;
        bool cut = (p.cut_row && row == p.rows - 1) || (p.cut_column && column == p.columns - 1);
        return run.y % 2 || cut ? 1 : 2;
    }
};

extern "C" __global__ void __launch_bounds__(128)
fv_tile_tables(const __grid_constant__ TileTablesParams p) {
    const int lane = threadIdx.x % 32, lines = p.rows + p.columns;
    const i64 warp = i64(blockIdx.x) * 4 + threadIdx.x / 32, of = warp / lines;
    if (of >= i64(p.batch) * p.heads) return;
    const int at = int(warp % lines);
    const bool is_row = at < p.rows;
    const int number = is_row ? at : at - p.rows, length = is_row ? p.columns : p.rows;
    const i64 first = of % p.heads * p.head_rows + of / p.heads * p.batch_rows;
    const Line line{p, p.counts + first, p.runs + first * p.columns};
    const i64 place = of * (is_row ? p.rows : p.columns) + number;
    const bool apart = p.full.counts[0] != nullptr;
    auto kind = [&](int tile) {
        if (tile >= length) return 0;
        int kind = is_row ? line.kind(number, tile) : line.kind(tile, number);
        return apart ? kind : int(kind != 0);
    };
    int total[2] = {0, 0};
    for (int start = 0; start < length; start += 32) {
        int found = kind(start + lane);
        total[0] += __popc(__ballot_sync(~0u, found == 1));
        total[1] += __popc(__ballot_sync(~0u, found == 2));
    }
    int before[2] = {0, 0};     // tiles of the table up to `start`
    for (int start = 0; start < length; start += 32) {
        int tile = start + lane, found = kind(tile);
        for (int which = 0; which < (apart ? 2 : 1); ++which) {
            const Table& table = which ? p.full : p.partial;
            unsigned mine = __ballot_sync(~0u, found == which + 1);
            int own = before[which] + __popc(mine & ((1u << lane) - 1));
            before[which] += __popc(mine);
            if (tile >= length) continue;
            table.tiles[!is_row][place * length + (found == which + 1 ? own : total[which] + tile - own)] = tile;
        }
    }
    if (lane > 0) return;
    p.partial.counts[!is_row][place] = total[0];
    if (apart) p.full.counts[!is_row][place] = total[1];
}
