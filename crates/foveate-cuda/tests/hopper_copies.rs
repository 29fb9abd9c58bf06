//! The row-by-row copies of `kernels/hopper/copies.cuh`, compiled for the host: a warp puts every element
//! of a tile where a copy by tensor map in the 128-byte swizzle puts it, zeros beside them, and nothing
//! else anywhere.

#[path = "../src/compile/on_host.rs"]
mod on_host;

const COPIES: &str = include_str!("../kernels/hopper/copies.cuh");

/// What the copies take of the other kernel files. Lanes run one after the other, and a copy ends at once.
const AROUND: &str = r#"
#include <cstdio>
#include <cstring>
#include <vector>
typedef long long i64;
typedef unsigned int u32;
#define __device__
constexpr int ELEM_BYTES = 2, PANEL_ROW = 128;
template <typename A, typename B> static auto min(A a, B b) { return a < b ? a : b; }
template <typename A, typename B> static auto max(A a, B b) { return a > b ? a : b; }
constexpr int min_of(int a, int b) { return a < b ? a : b; }
static struct { unsigned x; } threadIdx;
static std::vector<unsigned char> smem;
struct Rows { const char* data; i64 row, elem; int count; };
template <int BYTES> void copy_async(u32 target, const void* source, int valid) {
    if (target % BYTES != 0 || valid > 0 && reinterpret_cast<unsigned long>(source) % BYTES != 0) std::printf("misaligned\n");
    std::memset(&smem.at(target), 0, BYTES);
    if (valid > 0) std::memcpy(&smem.at(target), source, valid);
}
"#;

/// Copies tiles of every shape, and prints what is not as it should be.
const MAIN: &str = r#"
template <int ROWS, int DIM>
void check(int count, int stride) {
    constexpr int COLUMNS = (DIM + 15) / 16 * 16, PANELS = (DIM + 63) / 64;
    constexpr unsigned short UNTOUCHED = 0xffff, BESIDE = 0xabab;
    alignas(16) static unsigned short source[1 << 17];
    for (unsigned short& x : source) x = BESIDE;
    for (int row = 0; row < count; ++row)
        for (int column = 0; column < DIM; ++column) source[row * stride + column] = (stride == 0 ? 0 : row) * 256 + column + 1;
    const u32 base = 1024;
    smem.assign(base + PANELS * ROWS * PANEL_ROW + 1024, 0xff);
    for (threadIdx.x = 0; threadIdx.x < 32; ++threadIdx.x) {
        EvenRows rows(Rows{reinterpret_cast<const char*>(source), stride, 1, count});
        copy_rows<ROWS, DIM, COLUMNS>(base, count, rows);
    }
    std::vector<unsigned short> expected(smem.size() / 2, UNTOUCHED);
    for (int row = 0; row < ROWS; ++row)
        for (int column = 0; column < COLUMNS; ++column) {
            const int at = base + column / 64 * ROWS * 128 + row * 128 + (column % 64 / 8 ^ row % 8) * 16 + column % 8 * 2;
            expected[at / 2] = row < count && column < DIM ? source[row * stride + column] : 0;
        }
    int wrong = 0;
    for (size_t i = 0; i < expected.size(); ++i) wrong += std::memcmp(&expected[i], &smem[2 * i], 2) != 0;
    if (wrong > 0) std::printf("%d rows of %d, %d of them, %d apart: %d elements differ\n", ROWS, DIM, count, stride, wrong);
}
template <int ROWS, int DIM>
void check_all() {
    for (int count : {ROWS, ROWS - 1, 33, 1, 0, -5})
        for (int stride : {DIM, DIM + 24, 0})
            if (stride * 2 % FV_ALIGN == 0) check<ROWS, DIM>(min(count, ROWS), stride);
}
template <int DIM> void check_rows() { check_all<64, DIM>(); check_all<80, DIM>(); check_all<112, DIM>(); check_all<128, DIM>(); check_all<176, DIM>(); }
int main() {
    check_rows<16>(); check_rows<36>(); check_rows<64>(); check_rows<66>(); check_rows<80>(); check_rows<96>();
    check_rows<128>(); check_rows<132>(); check_rows<192>(); check_rows<256>();
    std::printf("checked\n");
}
"#;

fn part(from: &str, to: &str) -> &'static str {
    let at = COPIES.find(from).expect("the file has it");
    let end = COPIES[at..].find(to).expect("and what follows");
    &COPIES[at..at + end]
}

#[test]
fn a_warp_copies_rows_to_where_a_tensor_map_does() {
    // The barrier to the compiler names a register of another machine.
    let rows = part("struct EvenRows {", "// Rows of keys in pages");
    let rows = rows.replace("asm volatile(\"\" : \"+l\"(next));", "");
    let copies = part("template <int ROWS, int DIM", "// How a producer copies");
    for align in [4, 8, 16] {
        let code = [&format!("#define FV_ALIGN {align}"), AROUND, &rows, copies, MAIN].join("\n");
        let Some(said) = on_host::text(&code) else { return };
        assert_eq!(said, "checked\n", "by {align} bytes");
    }
}
