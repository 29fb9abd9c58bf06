//! Random data for a case, and where it lies in memory.

use foveate_mods::{AnyBuffer, BufferData};
use foveate_tensor::{DType, Data, Layout, Order, PackedShape, QkvPacked, indices};

use crate::case::{BufferSpec, Case, CaseError};

/// A small deterministic generator (PCG output over a 64-bit congruence).
#[derive(Clone, Debug)]
pub struct Random(u64);

impl Random {
    /// Starts from `seed`.
    pub fn new(seed: u64) -> Self {
        let mut random = Self(seed ^ 0x9E37_79B9_7F4A_7C15);
        random.bits();
        random
    }

    /// 32 random bits.
    pub fn bits(&mut self) -> u32 {
        let x = self.0;
        self.0 = x.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        let word = (x >> ((x >> 59) + 5) ^ x).wrapping_mul(12_605_985_483_714_917_081);
        (word >> 43 ^ word) as u32
    }

    /// In `[0, 1)`.
    pub fn unit(&mut self) -> f64 {
        f64::from(self.bits()) / 4_294_967_296.0
    }

    /// About normal, with mean 0 and variance 1: the sum of twelve.
    pub fn normal(&mut self) -> f64 {
        (0..12).map(|_| self.unit()).sum::<f64>() - 6.0
    }

    /// Below `n`, which is above 0.
    pub fn below(&mut self, n: usize) -> usize {
        (self.unit() * n as f64) as usize
    }
}

/// A captured buffer of a case.
pub(crate) fn buffer(
    at: &str,
    name: &str,
    spec: &BufferSpec,
    random: &mut Random,
) -> Result<AnyBuffer, CaseError> {
    let elems: usize = spec.shape.iter().product();
    let last = spec.shape.last().copied().unwrap_or(0);
    let BufferSpec { ints, floats, doc_lens, below, normal, chance, .. } = spec;
    let mut all = Vec::new();
    all.extend(ints.clone().map(BufferData::I32));
    all.extend(floats.clone().map(BufferData::F32));
    all.extend(doc_lens.as_ref().map(|lens| {
        let ends: Vec<usize> = lens
            .iter()
            .scan(0, |end, n| {
                Some({
                    *end += n;
                    *end
                })
            })
            .collect();
        let last_id = lens.len().saturating_sub(1);
        let of = |i: usize| ends.iter().filter(|&&end| end <= i).count().min(last_id);
        BufferData::I32((0..elems).map(|i| of(i % last.max(1)) as i32).collect())
    }));
    all.extend(below.map(|n| {
        BufferData::I32((0..elems).map(|_| random.below(n.max(1) as usize) as i32).collect())
    }));
    all.extend(
        normal.map(|x| BufferData::F32((0..elems).map(|_| random.normal() as f32 * x).collect())),
    );
    all.extend(chance.map(|p| BufferData::Bool((0..elems).map(|_| random.unit() < p).collect())));
    let fail = |e: &dyn std::fmt::Display| CaseError::new(at, format!("buffer `{name}`: {e}"));
    let [data] = <[BufferData; 1]>::try_from(all)
        .map_err(|all| fail(&format!("{} ways to fill it, not one", all.len())))?;
    AnyBuffer::new(name, &spec.shape, data, spec.learned).map_err(|e| fail(&e))
}

/// Where the operands of a case lie: buffers, and for q, k, v the buffer and layout of each.
/// Gradients have the layouts of what they are gradients of.
#[derive(Clone, Debug)]
pub struct Place {
    /// Elements of each buffer.
    pub sizes: Vec<usize>,
    /// Buffer and layout of q, k, v.
    pub operands: [(usize, Layout); 3],
    /// The packing, when one buffer holds all three.
    pub packed: Option<QkvPacked>,
    /// Layouts of dk and dv when k and v repeat a head, which no destination can.
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

/// Lays the operands of a case out.
///
/// An order of axes (`bshd`, `sbhd`, `bhsd`, `thd`) alone is dense storage. A packing
/// (`interleaved`, `stacked`, `per_head`, `gated_per_head`, `gated_interleaved`, `gated_stacked`)
/// before it is one buffer for all three. `cache` puts k and v in front of a longer cache,
/// `sliced` cuts every vector from a longer one, `expanded` repeats one key/value head with
/// stride 0, `odd` gives axes of length 1 meaningless strides and starts inside the buffer,
/// `columns` makes the dim the slowest axis.
///
/// # Errors
/// When the words mean nothing, or the packing cannot hold the case.
pub fn place(case: &Case) -> Result<Place, CaseError> {
    let fail = |e: &dyn std::fmt::Display| CaseError::new(&case.name, e);
    let words: Vec<&str> = case.layout.split_whitespace().collect();
    let (how, order) = match words[..] {
        [order] => ("", order),
        [how, order] => (how, order),
        _ => return Err(fail(&format!("layout `{}`", case.layout))),
    };
    let Case { batch, heads: [heads_q, heads_kv], dim: [dim, dim_v], .. } = *case;
    let [rows_q, rows_k] = case.len.map(|n| n + case.tail);
    let kv_batch = if case.shared_kv { 1 } else { batch };
    let dense = |b: usize, h: usize, s: usize, d: usize| match order {
        "bshd" => Ok(Layout::bshd(b, s, h, d)),
        "sbhd" => Ok(Layout::sbhd(s, b, h, d)),
        "bhsd" => Ok(Layout::bhsd(b, h, s, d)),
        "thd" if b == 1 => Ok(Layout::thd(s, h, d)),
        _ => Err(fail(&format!("layout `{}` for batch {b}", case.layout))),
    };
    let out = dense(batch, heads_q, rows_q, dim_v)?;
    let out = (out, out.elems());
    let mut place = Place {
        sizes: Vec::new(),
        operands: [(0, out.0); 3],
        packed: None,
        dense_gradients: how == "expanded",
        out,
        pages: None,
    };
    if let Some(page_size) = case.pages.filter(|&n| n > 0) {
        let lengths = case.key_lens.clone().unwrap_or_else(|| vec![rows_k; batch]);
        if lengths.len() != batch || lengths.iter().any(|&len| len > rows_k) {
            return Err(fail(&"key_lens has a number up to len for each batch entry"));
        }
        place.pages = Some(PageTable::new(&lengths, page_size, &mut Random::new(case.seed())));
    }
    let shape = PackedShape {
        order: match order {
            "sbhd" => Order::Sbhd,
            "bhsd" => Order::Bhsd,
            _ => Order::Bshd,
        },
        batch,
        len: rows_q,
        heads_q,
        heads_kv,
        dim,
        dim_v,
    };
    let packing = match how {
        "interleaved" => Some(QkvPacked::interleaved(&shape)),
        "stacked" => Some(QkvPacked::stacked(&shape)),
        "per_head" => Some(QkvPacked::per_head(&shape)),
        "gated_per_head" => Some(QkvPacked::gated_per_head(&shape)),
        "gated_interleaved" => Some(QkvPacked::gated_interleaved(&shape)),
        "gated_stacked" => Some(QkvPacked::gated_stacked(&shape)),
        _ => None,
    };
    if let Some(packing) = packing {
        let packing = packing.map_err(|e| fail(&e))?;
        if rows_q != rows_k || kv_batch != batch {
            return Err(fail(&"one projection holds as many rows of q as of k and v"));
        }
        place.sizes = vec![packing.elems()];
        place.operands = [packing.q(), packing.k(), packing.v()].map(|l| (0, *l));
        place.packed = Some(packing);
        return Ok(place);
    }
    let [kv_batch, rows_k] = match &place.pages {
        None => [kv_batch, rows_k],
        Some(pages) => [pages.used.len(), case.pages.unwrap_or(1)],
    };
    let kinds = [
        (batch, heads_q, rows_q, dim),
        (kv_batch, heads_kv, rows_k, dim),
        (kv_batch, heads_kv, rows_k, dim_v),
    ];
    for (i, (b, h, s, d)) in kinds.into_iter().enumerate() {
        let (layout, size) = match how {
            "" => (dense(b, h, s, d)?, b * h * s * d),
            "cache" => {
                let longer = if i == 0 { s } else { s + 5 };
                let whole = dense(b, h, longer, d)?;
                (whole.narrowed(2, 0, s).map_err(|e| fail(&e))?, whole.elems())
            }
            "sliced" => {
                let whole = dense(b, h, s, d + 3)?;
                (whole.narrowed(3, i, d).map_err(|e| fail(&e))?, whole.elems())
            }
            "expanded" if i > 0 => {
                let one = dense(b, 1, s, d)?;
                (one.expanded(1, h).map_err(|e| fail(&e))?, one.elems())
            }
            "expanded" => (dense(b, h, s, d)?, b * h * s * d),
            "odd" => {
                let mut odd = dense(b, h, s, d)?;
                for axis in (0..4).filter(|&a| odd.shape[a] == 1) {
                    odd.strides[axis] = 977 + 13 * axis;
                }
                odd.offset = 3 + i;
                (odd, b * h * s * d + 3 + i)
            }
            "columns" => {
                (Layout::strided([b, h, s, d], [h * s, s, 1, b * h * s], 0), b * h * s * d)
            }
            _ => return Err(fail(&format!("layout `{}`", case.layout))),
        };
        place.operands[i] = (i, layout);
        place.sizes.push(size);
    }
    Ok(place)
}

/// The buffers of a case: `value` of a layout and a place in it where `used` says so of the layout,
/// the place on its batch axis and the row, and NaN elsewhere.
pub fn fill(
    dtype: DType,
    sizes: &[usize],
    layouts: &[(usize, Layout)],
    used: impl Fn(usize, usize, usize) -> bool,
    mut value: impl FnMut(usize, [usize; 4]) -> f64,
) -> Vec<Data> {
    let mut values: Vec<Vec<f64>> = sizes.iter().map(|&n| vec![f64::NAN; n]).collect();
    for (operand, (buffer, layout)) in layouts.iter().enumerate() {
        for index in indices(layout.shape).filter(|index| used(operand, index[0], index[2])) {
            let x = value(operand, index);
            let old = &mut values[*buffer][layout.at(index)];
            if old.is_nan() {
                *old = x;
            }
        }
    }
    values.into_iter().map(|v| Data::from_f64(dtype, v)).collect()
}
