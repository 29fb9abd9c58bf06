//! Where the operands of a case lie in memory: buffers and layouts, before there is any data.

#[cfg(test)]
mod tests;

use foveate_tensor::{Layout, Order, PackedShape, QkvPacked};

use crate::case::Case;
use crate::error::CaseError;
use foveate_tensor::random::Random;

/// Buffers, and the buffer and layout of each operand. Gradients have the layouts of what they are
/// gradients of.
#[derive(Clone, Debug)]
pub struct Storage {
    /// Elements of each buffer.
    pub sizes: Vec<usize>,
    /// Buffer and layout of q, k, v.
    pub operands: [(usize, Layout); 3],
    /// The packing, when one buffer holds all three.
    pub packed: Option<QkvPacked>,
    /// Whether k and v repeat a head, which no destination can: dk and dv are dense then.
    pub dense_gradients: bool,
    /// Layout and size of out and d_out.
    pub out: (Layout, usize),
    /// The table of keys and values in pages.
    pub pages: Option<PageTable>,
}

/// Where the keys of each batch entry lie in pages.
#[derive(Clone, Debug)]
pub struct PageTable {
    /// `[B, entries]`; the last of each batch entry, which no key needs, is −1.
    pub table: Vec<i32>,
    /// Number of keys of each batch entry.
    pub lengths: Vec<i32>,
    /// Rows of a page that hold keys, page by page; 0 for those of nobody.
    pub used: Vec<usize>,
}

impl PageTable {
    /// The pages of a case, if it has any.
    fn of(case: &Case) -> Result<Option<Self>, CaseError> {
        let Some(page_size) = case.pages.filter(|&n| n > 0) else { return Ok(None) };
        let rows = case.rows()[1];
        let lengths = case.key_lens.clone().unwrap_or_else(|| vec![rows; case.batch]);
        if lengths.len() != case.batch || lengths.iter().any(|&len| len > rows) {
            let message = "key_lens has a number up to len for each batch entry";
            return Err(CaseError::new(&case.name, message));
        }
        Ok(Some(Self::new(&lengths, page_size, &mut Random::new(case.seed()))))
    }

    /// Pages of `page_size` rows for `lengths` keys, in random order, and two of nobody.
    fn new(lengths: &[usize], page_size: usize, random: &mut Random) -> Self {
        let needed = |len: &usize| len.div_ceil(page_size);
        let pages = lengths.iter().map(needed).sum::<usize>() + 2;
        let entries = lengths.iter().map(needed).max().unwrap_or(0) + 1;
        let mut free: Vec<usize> = (0..pages).collect();
        let mut used = vec![0; pages];
        let mut table = vec![-1; lengths.len() * entries];
        for (&len, row) in lengths.iter().zip(table.chunks_exact_mut(entries)) {
            for (i, entry) in row.iter_mut().enumerate().take(needed(&len)) {
                let page = free.swap_remove(random.below(free.len()));
                used[page] = page_size.min(len - i * page_size);
                *entry = page as i32;
            }
        }
        Self { table, lengths: lengths.iter().map(|&len| len as i32).collect(), used }
    }

    /// The batch entry and the key that row `row` of page `page`, of `page_size` rows, holds.
    pub fn key(&self, page: usize, row: usize, page_size: usize) -> Option<[usize; 2]> {
        let at = self.table.iter().position(|&entry| entry == page as i32)?;
        let entries = self.table.len() / self.lengths.len();
        Some([at / entries, at % entries * page_size + row])
    }
}

/// The layout of a case: what is before the order of axes, and the order.
#[derive(Clone, Copy)]
struct Words<'a> {
    how: &'a str,
    order: &'a str,
}

impl<'a> Words<'a> {
    fn of(case: &'a Case) -> Result<Self, CaseError> {
        let words: Vec<&str> = case.layout.split_whitespace().collect();
        match words[..] {
            [order] => Ok(Self { how: "", order }),
            [how, order] => Ok(Self { how, order }),
            _ => Err(CaseError::new(&case.name, format!("layout `{}`", case.layout))),
        }
    }

    /// Dense storage of `[b, h, s, d]`, if the order can hold it.
    fn dense(self, [b, h, s, d]: [usize; 4]) -> Option<Layout> {
        match self.order {
            "bshd" => Some(Layout::bshd(b, s, h, d)),
            "sbhd" => Some(Layout::sbhd(s, b, h, d)),
            "bhsd" => Some(Layout::bhsd(b, h, s, d)),
            "thd" if b == 1 => Some(Layout::thd(s, h, d)),
            _ => None,
        }
    }

    /// Layout of operand `i` (q, k, v) of `[b, h, s, d]` in a buffer of its own, and the buffer's
    /// elements.
    fn operand(self, i: usize, [b, h, s, d]: [usize; 4]) -> Option<(Layout, usize)> {
        let elems = b * h * s * d;
        match self.how {
            "" => Some((self.dense([b, h, s, d])?, elems)),
            "cache" => {
                let longer = if i == 0 { s } else { s + 5 };
                let whole = self.dense([b, h, longer, d])?;
                Some((whole.narrowed(2, 0, s).expect("s of s + 5 rows"), whole.elems()))
            }
            "sliced" => {
                let whole = self.dense([b, h, s, d + 3])?;
                Some((whole.narrowed(3, i, d).expect("i + d <= d + 3"), whole.elems()))
            }
            "padded" => {
                let whole = self.dense([b, h, s, d.next_multiple_of(8)])?;
                Some((whole.narrowed(3, 0, d).expect("d of as many or more"), whole.elems()))
            }
            "shifted" => {
                let whole = self.dense([b, h, s, d + 8])?;
                Some((whole.narrowed(3, 4, d).expect("4 + d <= d + 8"), whole.elems()))
            }
            "repeated" if i > 0 => {
                let one = self.dense([b, h, 1, d])?;
                Some((one.expanded(2, s).expect("one row"), one.elems()))
            }
            "expanded" if i > 0 => {
                let one = self.dense([b, 1, s, d])?;
                Some((one.expanded(1, h).expect("one head"), one.elems()))
            }
            "expanded" | "repeated" => Some((self.dense([b, h, s, d])?, elems)),
            "odd" => {
                let mut odd = self.dense([b, h, s, d])?;
                for axis in (0..4).filter(|&a| odd.shape[a] == 1) {
                    odd.strides[axis] = 977 + 13 * axis;
                }
                odd.offset = 3 + i;
                Some((odd, elems + 3 + i))
            }
            "columns" => Some((Layout::strided([b, h, s, d], [h * s, s, 1, b * h * s], 0), elems)),
            _ => None,
        }
    }

    /// The packing of q, k and v in one buffer, where the layout is one.
    fn packing(
        self,
        case: &Case,
        len: usize,
    ) -> Option<Result<QkvPacked, foveate_tensor::TensorError>> {
        let Case { batch, heads: [heads_q, heads_kv], dim: [dim, dim_v], .. } = *case;
        let order = match self.order {
            "sbhd" => Order::Sbhd,
            "bhsd" => Order::Bhsd,
            _ => Order::Bshd,
        };
        let shape = PackedShape { order, batch, len, heads_q, heads_kv, dim, dim_v };
        let new = match self.how {
            "interleaved" => QkvPacked::interleaved,
            "stacked" => QkvPacked::stacked,
            "per_head" => QkvPacked::per_head,
            "gated_per_head" => QkvPacked::gated_per_head,
            "gated_interleaved" => QkvPacked::gated_interleaved,
            "gated_stacked" => QkvPacked::gated_stacked,
            _ => return None,
        };
        Some(new(&shape))
    }
}

impl Storage {
    /// Lays the operands of a case out as its `layout` says ([`Case::layout`]).
    ///
    /// # Errors
    /// When the words mean nothing, or the packing cannot hold the case.
    pub fn of(case: &Case) -> Result<Self, CaseError> {
        let fail = |e: &dyn std::fmt::Display| CaseError::new(&case.name, e);
        let unknown = || fail(&format!("layout `{}` for batch {}", case.layout, case.batch));
        let words = Words::of(case)?;
        let Case { batch, heads: [heads_q, heads_kv], dim: [dim, dim_v], .. } = *case;
        let [rows_q, rows_k] = case.rows();
        let of_out = [batch, heads_q, rows_q, dim_v];
        let (out, out_elems) = match words.how {
            "padded" => words.operand(0, of_out),
            _ => words.dense(of_out).map(|dense| (dense, dense.elems())),
        }
        .ok_or_else(unknown)?;
        let pages = PageTable::of(case)?;
        let mut storage = Self {
            sizes: Vec::new(),
            operands: [(0, out); 3],
            packed: None,
            dense_gradients: matches!(words.how, "expanded" | "repeated"),
            out: (out, out_elems),
            pages,
        };
        if let Some(packing) = words.packing(case, rows_q) {
            let packing = packing.map_err(|e| fail(&e))?;
            if rows_q != rows_k || (case.shared_kv && batch != 1) {
                return Err(fail(&"one projection holds as many rows of q as of k and v"));
            }
            storage.sizes = vec![packing.elems()];
            storage.operands = [packing.q(), packing.k(), packing.v()].map(|l| (0, *l));
            storage.packed = Some(packing);
            return Ok(storage);
        }
        let [kv_batch, kv_rows] = match (&storage.pages, case.shared_kv) {
            (Some(pages), _) => [pages.used.len(), case.pages.unwrap_or(1)],
            (None, true) => [1, rows_k],
            (None, false) => [batch, rows_k],
        };
        let shapes = [
            [batch, heads_q, rows_q, dim],
            [kv_batch, heads_kv, kv_rows, dim],
            [kv_batch, heads_kv, kv_rows, dim_v],
        ];
        for (i, shape) in shapes.into_iter().enumerate() {
            let (layout, size) = words.operand(i, shape).ok_or_else(unknown)?;
            storage.operands[i] = (i, layout);
            storage.sizes.push(size);
        }
        Ok(storage)
    }
}
