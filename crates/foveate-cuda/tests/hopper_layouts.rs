//! Where the operands of `wgmma` lie in shared memory and its accumulators in registers, by models of
//! what the PTX manual says ("Asynchronous warpgroup level matrix shared memory layout", "Register
//! fragments", "Swizzling modes"): that a product reads what a copy by tensor map wrote where the
//! kernels' descriptors and steps lead it, and that weights are operands as they stand.

/// A pattern of 8 rows of `span` bytes in which 16-byte chunks change places.
#[derive(Clone, Copy, Debug)]
struct Swizzle {
    span: usize,
    /// Its number in a descriptor.
    layout: u64,
}

const SWIZZLE_128: Swizzle = Swizzle { span: 128, layout: 1 };
const SWIZZLE_64: Swizzle = Swizzle { span: 64, layout: 2 };

impl Swizzle {
    /// Where a byte really is: the bits of its chunk, turned by those three above.
    fn place(self, address: usize) -> usize {
        address ^ (address >> 3 & (self.span - 16))
    }

    /// Elements of 16 bits in a row of a panel.
    fn columns(self) -> usize {
        self.span / 2
    }

    /// Where a copy by tensor map puts an element of a tile of `rows`, panel by panel from `base` on.
    fn copied(self, base: usize, rows: usize, row: usize, column: usize) -> usize {
        let panel = base + column / self.columns() * rows * self.span;
        self.place(panel + row * self.span + column % self.columns() * 2)
    }
}

/// A descriptor of shared memory.
#[derive(Clone, Copy, Debug)]
struct Descriptor(u64);

impl Descriptor {
    /// As `Operand` of `kernels/hopper/hopper.cuh`: start, distance between panels (leading) and
    /// between groups of 8 rows (stride), all over 16.
    fn new(swizzle: Swizzle, start: usize, leading: usize) -> Self {
        let stride = 8 * swizzle.span;
        let field = |bytes: usize| ((bytes & 0x3ffff) >> 4) as u64;
        Self(swizzle.layout << 62 | field(stride) << 32 | field(leading) << 16 | field(start))
    }

    /// The same `bytes` further on: what the kernels add to the start.
    fn plus(self, bytes: usize) -> Self {
        Self(self.0 + (bytes >> 4) as u64)
    }

    fn field(self, shift: u32) -> usize {
        ((self.0 >> shift & 0x3fff) << 4) as usize
    }

    /// Where the hardware looks for element (`mn`, `k`) of an operand whose rows run along k.
    fn along_k(self, swizzle: Swizzle, mn: usize, k: usize) -> usize {
        let group = mn / 8 * self.field(32);
        swizzle.place(self.field(0) + group + mn % 8 * swizzle.span + 2 * k)
    }

    /// The same where they run along m or n.
    fn along_mn(self, swizzle: Swizzle, mn: usize, k: usize) -> usize {
        let panel = mn / swizzle.columns() * self.field(16);
        let group = k / 8 * self.field(32);
        let within = k % 8 * swizzle.span + 2 * (mn % swizzle.columns());
        swizzle.place(self.field(0) + panel + group + within)
    }
}

/// Rows of tiles, head dims, and the swizzle that suits them; tiles begin where others end.
fn tiles() -> impl Iterator<Item = (Swizzle, usize, usize, usize)> {
    let sizes = [64usize, 80, 112, 128, 176, 192]
        .into_iter()
        .flat_map(|rows| [64usize, 96, 128, 192, 256].into_iter().map(move |dim| (rows, dim)));
    sizes.flat_map(|(rows, dim)| {
        let fits = move |swizzle: &Swizzle| dim.is_multiple_of(swizzle.columns());
        let swizzles = [SWIZZLE_128, SWIZZLE_64].into_iter().filter(fits);
        swizzles.map(move |swizzle| (swizzle, rows, dim, rows * dim * 2))
    })
}

#[test]
fn products_along_rows_read_what_copies_wrote() {
    for (swizzle, rows, dim, base) in tiles() {
        let tile = Descriptor::new(swizzle, base, 16);
        let steps = swizzle.columns() / 16;
        for step in 0..dim / 16 {
            let panel = step / steps * rows * swizzle.span;
            let operand = tile.plus(panel + step % steps * 32);
            for (mn, k) in (0..rows).flat_map(|mn| (0..16).map(move |k| (mn, k))) {
                let expected = swizzle.copied(base, rows, mn, 16 * step + k);
                let found = operand.along_k(swizzle, mn, k);
                assert_eq!(
                    found, expected,
                    "{swizzle:?}, {rows}x{dim}: ({mn}, {k}) of step {step}"
                );
            }
        }
    }
}

#[test]
fn products_across_rows_read_what_copies_wrote() {
    for (swizzle, rows, dim, base) in tiles() {
        let tile = Descriptor::new(swizzle, base, rows * swizzle.span);
        for step in 0..rows / 16 {
            let operand = tile.plus(step * 16 * swizzle.span);
            for (mn, k) in (0..dim).flat_map(|mn| (0..16).map(move |k| (mn, k))) {
                let expected = swizzle.copied(base, rows, 16 * step + k, mn);
                let found = operand.along_mn(swizzle, mn, k);
                assert_eq!(
                    found, expected,
                    "{swizzle:?}, {rows}x{dim}: ({mn}, {k}) of step {step}"
                );
            }
        }
    }
}

/// The 128 threads of a warpgroup.
const THREADS: std::ops::Range<usize> = 0..128;

/// Row and column of accumulator `i` of a thread, of 64 x N: element `i % 4` of `[i / 4]` in the
/// kernels' `float (&)[N / 8][4]`.
fn accumulator(thread: usize, i: usize) -> (usize, usize) {
    let (warp, lane) = (thread / 32, thread % 32);
    (16 * warp + lane / 4 + i % 4 / 2 * 8, i / 4 * 8 + lane % 4 * 2 + i % 2)
}

#[test]
fn accumulators_are_those_of_m16n8_and_every_element_is_one() {
    for n in (8..=256).step_by(8) {
        // Rows of queries and columns of keys, and the other way round.
        for swapped in [false, true] {
            let (queries, keys) = if swapped { (n, 64) } else { (64, n) };
            let mut found = vec![0; queries * keys];
            for (thread, i) in THREADS.flat_map(|thread| (0..n / 2).map(move |i| (thread, i))) {
                let (row, column) = accumulator(thread, i);
                let (q, kv) = if swapped { (column, row) } else { (row, column) };
                found[q * keys + kv] += 1;
                // What differs between the elements of a thread: two rows, n / 4 columns.
                assert_eq!(row, accumulator(thread, i % 4).0);
                assert_eq!(column, accumulator(thread, i - i % 4 + i % 2).1);
            }
            assert!(found.iter().all(|&count| count == 1), "{n} columns, swapped: {swapped}");
        }
    }
}

#[test]
fn weights_stand_in_the_order_of_a_left_operand() {
    // Register x of k-step j has two neighbours along k, in row r or r + 8, in the first or the
    // second 8 of the 16.
    let operand = |thread: usize, step: usize, x: usize| {
        let (warp, lane) = (thread / 32, thread % 32);
        (16 * warp + lane / 4 + x % 2 * 8, 16 * step + x / 2 * 8 + lane % 4 * 2)
    };
    for (thread, i) in THREADS.flat_map(|thread| (0..64).map(move |i| (thread, i))) {
        // weights[i / 4][i % 4] = narrow2(s[i / 2][i % 2 * 2], s[i / 2][i % 2 * 2 + 1])
        let pair = [0, 1].map(|e| accumulator(thread, i / 2 * 4 + i % 2 * 2 + e));
        let (row, k) = operand(thread, i / 4, i % 4);
        assert_eq!(pair, [(row, k), (row, k + 1)], "register {i} of thread {thread}");
    }
}

#[test]
fn chunks_of_a_column_meet_each_bank_once_in_eight_rows() {
    for swizzle in [SWIZZLE_128, SWIZZLE_64] {
        for chunk in 0..swizzle.span / 16 {
            let banks = (0..8).map(|row| swizzle.place(row * swizzle.span + chunk * 16) / 16 % 8);
            let mut banks: Vec<_> = banks.collect();
            banks.sort_unstable();
            assert_eq!(banks, (0..8).collect::<Vec<_>>(), "{swizzle:?}, chunk {chunk}");
        }
    }
}
