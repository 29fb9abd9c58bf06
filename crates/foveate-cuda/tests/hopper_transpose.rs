//! `kernels/hopper/transpose_values.cu` compiled for the host: values of e4m3 stand transposed in the order of keys in which
//! weights stand in registers, with zeros behind each sequence, whatever head dim, strides and lengths there are.

#[path = "../src/compile/on_host.rs"]
mod on_host;

const KERNEL: &str = include_str!("../kernels/hopper/transpose_values.cu");
const PARAMS: &str = include_str!("../kernels/params.cuh");

/// What the kernel takes of the device and of other files. Threads run one after the other; a CTA runs twice, so that in the
/// second run all of smem is there.
const AROUND: &str = r#"
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <vector>
typedef long long i64;
typedef unsigned int u32;
typedef unsigned char Elem;
#define __device__
#define __global__
#define __shared__
#define __grid_constant__
#define __launch_bounds__(...)
#define FV_GROUP 1
constexpr int THREADS = 256;
constexpr int ceil_div(int a, int b) { return (a + b - 1) / b; }
static int min(int a, int b) { return a < b ? a : b; }
static int max(int a, int b) { return a > b ? a : b; }
static struct { unsigned x; } threadIdx, blockIdx;
struct alignas(16) uint4 { u32 x, y, z, w; };
static uint4 make_uint4(u32 x, u32 y, u32 z, u32 w) { return {x, y, z, w}; }
static void __syncthreads() {}
template <typename T> T __ldg(const T* at) {
    if (reinterpret_cast<unsigned long>(at) % sizeof(T) != 0) std::printf("misaligned\n");
    return *at;
}
static u32 __byte_perm(u32 low, u32 high, u32 selector) {
    u32 bytes = 0;
    for (int i = 0; i < 4; ++i) {
        const int of = selector >> 4 * i & 7;
        bytes |= ((of < 4 ? low >> 8 * of : high >> 8 * (of - 4)) & 0xff) << 8 * i;
    }
    return bytes;
}
u32 keys[1 << 16];
"#;

/// Transposes packed and dense sequences of many lengths, and prints what is not as it should be.
const MAIN: &str = r#"
static void check(bool packed, std::vector<int> lengths, int tile_kv, int stride) {
    const int heads = 2, count = lengths.size();
    std::vector<Sequence> sequences;
    int start = 0, columns = 0, longest = 0;
    for (int b = 0; b < count; ++b) {
        Sequence s = {};
        s.b = b;
        s.k_batch = packed ? 0 : b;
        s.k_start = packed ? start : 0;
        s.k_len = lengths[b];
        sequences.push_back(s);
        start += lengths[b];
        longest = std::max(longest, lengths[b]);
        columns = std::max(columns, packed ? first_value(s, tile_kv, true) + ceil_div(lengths[b], tile_kv) * tile_kv : 0);
    }
    if (!packed) columns = ceil_div(longest, tile_kv) * tile_kv;
    const int unit = std::max(tile_kv, 64), batch = packed ? 1 : count, rows = packed ? start : longest;
    columns = std::max(ceil_div(columns, unit) * unit, unit);
    const i64 row = FV_DV + stride, head = row * rows, all = head * heads;
    std::vector<uint4> source((batch * all + 64) / 16 + 1);
    unsigned char* data = reinterpret_cast<unsigned char*>(source.data());
    for (i64 i = 0; i < i64(source.size()) * 16; ++i) data[i] = 1 + std::rand() % 255;
    std::vector<uint4> result((i64(batch) * heads * FV_DV * columns) / 16 + 2);
    unsigned char* values = reinterpret_cast<unsigned char*>(result.data());
    std::fill_n(values, result.size() * 16, 0xee);
    TransposeValuesParams p = {{data, all, head, row, 1, 0}, sequences.data(), values, count, packed, columns, tile_kv, heads};
    for (blockIdx.x = 0; blockIdx.x < unsigned(columns / KEYS * heads * batch); ++blockIdx.x)
        for (int run = 0; run < 2; ++run)
            for (threadIdx.x = 0; threadIdx.x < THREADS; ++threadIdx.x) fv_transpose_values(p);
    i64 wrong = 0, at = 0;
    for (int b = 0; b < batch; ++b)
        for (int h = 0; h < heads; ++h)
            for (int column = 0; column < FV_DV; ++column)
                for (int place = 0; place < columns; ++place, ++at) {
                    // Position 4c + e of 16 keys is key 2c + e, or 8 + 2c + e - 2.
                    const int c = place % 16 / 4, e = place % 4, key16 = e < 2 ? 2 * c + e : 8 + 2 * c + e - 2;
                    const int in_all = place / 16 * 16 + key16;
                    int expected = 0;
                    for (const Sequence& s : sequences) {
                        if (!packed && s.b != b) continue;
                        const int key = in_all - first_value(s, tile_kv, packed);
                        if (key >= 0 && key < s.k_len) expected = data[s.k_batch * all + h * head + (s.k_start + key) * row + column];
                    }
                    wrong += values[at] != expected;
                }
    for (i64 i = at; i < i64(result.size()) * 16; ++i) wrong += values[i] != 0xee;
    if (wrong > 0) std::printf("packed %d, %d sequences, tiles of %d, stride %d: %lld wrong\n", packed, count, tile_kv, stride, wrong);
}
int main() {
    for (int tile_kv : {64, 128, 192})
        for (int stride : {0, 16})
            for (bool packed : {false, true}) {
                check(packed, {64}, tile_kv, stride);
                check(packed, {1}, tile_kv, stride);
                check(packed, {191, 64, 3}, tile_kv, stride);
                check(packed, {5, 0, 130, 0, 65, 17}, tile_kv, stride);
            }
    std::printf("checked\n");
}
"#;

/// A struct or a function of the kernels' parameters.
fn part(from: &str) -> String {
    let at = PARAMS.find(from).unwrap_or_else(|| panic!("no `{from}`"));
    let length = PARAMS[at..].find("\n}").expect("it ends");
    format!("{}\n}};\n", &PARAMS[at..at + length])
}

#[test]
fn values_are_transposed_in_the_order_of_weights() {
    let needed = ["struct View {", "struct Sequence {", "struct TransposeValuesParams {"];
    let parts: String = needed.into_iter().map(part).collect();
    let first = part("__device__ inline int first_value(");
    for dim in [8, 16, 36, 48, 64, 100, 128, 130, 256] {
        let dims = format!("#define FV_DV {dim}");
        let code = [&dims, AROUND, &parts, &first, KERNEL, MAIN].join("\n");
        let Some(said) = on_host::output(&code, &["-O1"], Vec::new()) else { return };
        assert_eq!(said, b"checked\n", "head dim {dim}: {}", String::from_utf8_lossy(&said));
    }
}
