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

/// A descriptor of shared memory.
#[derive(Clone, Copy, Debug)]
pub struct Descriptor(pub u64);

impl Descriptor {
    /// As `Operand` of `kernels/hopper/hopper.cuh`: start, distance between panels (leading) and
    /// between groups of 8 rows (stride), all over 16.
    pub fn new(swizzle: Swizzle, start: usize, leading: usize) -> Self {
        let stride = 8 * swizzle.span;
        let field = |bytes: usize| ((bytes & 0x3ffff) >> 4) as u64;
        Self(swizzle.layout << 62 | field(stride) << 32 | field(leading) << 16 | field(start))
    }

    /// The same `bytes` further on: what the kernels add to the start.
    pub fn plus(self, bytes: usize) -> Self {
        Self(self.0 + (bytes >> 4) as u64)
    }

    fn field(self, shift: u32) -> usize {
        ((self.0 >> shift & 0x3fff) << 4) as usize
    }

    /// The swizzle that it states.
    pub fn swizzle(self) -> Swizzle {
        let known = [SWIZZLE_128, SWIZZLE_64].into_iter().find(|s| s.layout == self.0 >> 62);
        known.expect("a swizzle of the kernels")
    }

    /// Where the hardware looks for element (`mn`, `k`) of an operand whose rows run along k.
    pub fn along_k(self, swizzle: Swizzle, mn: usize, k: usize) -> usize {
        self.along_k_byte(swizzle, mn, 2 * k)
    }

    /// The same of a byte of a row.
    pub fn along_k_byte(self, swizzle: Swizzle, mn: usize, byte: usize) -> usize {
        let group = mn / 8 * self.field(32);
        swizzle.place(self.field(0) + group + mn % 8 * swizzle.span + byte)
    }

    /// The same where they run along m or n.
    pub fn along_mn(self, swizzle: Swizzle, mn: usize, k: usize) -> usize {
        let panel = mn / swizzle.columns() * self.field(16);
        let group = k / 8 * self.field(32);
        let within = k % 8 * swizzle.span + 2 * (mn % swizzle.columns());
        swizzle.place(self.field(0) + panel + group + within)
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
