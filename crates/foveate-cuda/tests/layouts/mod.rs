//! Where tensor maps put elements in shared memory, and `wgmma` and `stmatrix` those in registers, by what
//! the PTX manual says ("Swizzling modes", "Register fragments"). Host tests follow the kernels by it, probes
//! compare a GPU with it.

#![allow(dead_code)] // Not every file of tests needs all of it.

/// A pattern of 8 rows of `span` bytes in which 16-byte chunks change places.
#[derive(Clone, Copy, Debug)]
pub struct Swizzle {
    pub span: usize,
    /// Its number in a descriptor.
    pub layout: u64,
}

pub const SWIZZLE_128: Swizzle = Swizzle { span: 128, layout: 1 };
pub const SWIZZLE_64: Swizzle = Swizzle { span: 64, layout: 2 };

impl Swizzle {
    /// Where a byte really is: the bits of its chunk, turned by those three above.
    pub fn place(self, address: usize) -> usize {
        address ^ (address >> 3 & (self.span - 16))
    }

    /// Elements of 16 bits in a row of a panel.
    pub fn columns(self) -> usize {
        self.span / 2
    }

    /// Where a copy by tensor map puts an element of a tile of `rows`, panel by panel from `base` on.
    pub fn copied(self, base: usize, rows: usize, row: usize, column: usize) -> usize {
        self.copied_byte(base, rows, row, 2 * column)
    }

    /// The same of a byte of a row.
    pub fn copied_byte(self, base: usize, rows: usize, row: usize, byte: usize) -> usize {
        let panel = base + byte / self.span * rows * self.span;
        self.place(panel + row * self.span + byte % self.span)
    }
}

/// Row and column of accumulator `i` of a thread, of 64 x N: element `i % 4` of `[i / 4]` in the
/// kernels' `float (&)[N / 8][4]`.
pub fn accumulator(thread: usize, i: usize) -> (usize, usize) {
    let (warp, lane) = (thread / 32, thread % 32);
    (16 * warp + lane / 4 + i % 4 / 2 * 8, i / 4 * 8 + lane % 4 * 2 + i % 2)
}

/// Row, and first element along the summed axis of a product, of register `x` of a left operand whose elements have so
/// many bytes: a register has neighbours of row r or r + 8, in the first or the second half of the product's 32 bytes.
pub fn left_register(thread: usize, x: usize, bytes: usize) -> (usize, usize) {
    let (warp, lane) = (thread / 32, thread % 32);
    (16 * warp + lane / 4 + x % 2 * 8, (x / 2 * 16 + lane % 4 * 4) / bytes)
}

/// `stmatrix.x4.trans` of 8x8 matrices of 16 bits: lane 8 m + r has the address of row r of matrix m,
/// and of matrix m lane l holds, in register m, elements (2 (l % 4), l / 4) and the one below. Returns
/// (lane, register, half) and the byte it goes to.
pub fn stored_transposed(address: impl Fn(usize) -> usize) -> Vec<((usize, usize, usize), usize)> {
    let register = |lane: usize, matrix: usize, half: usize| {
        let (row, column) = (lane % 4 * 2 + half, lane / 4);
        ((lane, matrix, half), address(8 * matrix + row) + 2 * column)
    };
    let lanes = (0..32).flat_map(|lane| (0..4).map(move |matrix| (lane, matrix)));
    lanes.flat_map(|(lane, m)| [register(lane, m, 0), register(lane, m, 1)]).collect()
}
