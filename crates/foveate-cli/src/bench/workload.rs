//! What a benchmark runs: a mask, a score, sizes, and numbers that depend on nothing else.
//!
//! A [`Workload`] goes as JSON to the scripts in `benches/`, which make the same mods and, from
//! the same hash, the same numbers for PyTorch. So peers are timed, and compared, on the same
//! data.

use foveate::mask::{BlockMask, Stats, Tile};
use foveate::mods::ir::mix;
use foveate::mods::{Head, MaskMod, ScoreMod, expr};
use foveate::{Attention, Buffer, DType, masks, scores};
use serde::{Deserialize, Serialize};

/// The bound of the soft cap.
const CAP: f32 = 30.0;
/// Columns of the grid of neighbourhoods.
const COLUMNS: usize = 64;
/// Queries, and keys, of a block of those that are seen or not.
const BLOCK: usize = 128;
/// Queries, and keys, of the tiles that a mask is counted in.
const TILE: u32 = 128;
/// Name of the relative bias.
pub const BIAS: &str = "rel_bias";

/// What a query sees.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Mask {
    Full,
    Causal,
    /// The last `width` keys, its own among them.
    Window,
    /// The first `width` keys, and those before its own.
    Prefix,
    /// The keys before its own that are of the same one of `width` documents.
    Documents,
    /// The same of documents of 128 to 2,048 positions.
    Ragged,
    /// The `width` by `width` keys around its own, on a grid of 64 columns.
    Neighbourhood,
    /// One of `width` blocks of 128 by 128, and the block of its own position.
    Blocks,
}

/// What becomes of a score.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Score {
    None,
    Alibi,
    Softcap,
    /// A learned bias for each head and distance, up to `reach`.
    Relative,
}

/// Which passes are timed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Direction {
    #[serde(rename = "forward")]
    Forward,
    #[serde(rename = "backward")]
    Backward,
    #[serde(rename = "forward+backward")]
    Both,
}

impl Direction {
    /// `forward`, `backward` or `forward+backward`.
    pub fn name(self) -> &'static str {
        match self {
            Direction::Forward => "forward",
            Direction::Backward => "backward",
            Direction::Both => "forward+backward",
        }
    }

    /// Products of the size of the scores.
    fn products(self) -> f64 {
        match self {
            Direction::Forward => 2.0,
            Direction::Backward => 5.0,
            Direction::Both => 7.0,
        }
    }
}

/// An attention problem with its program. Operands are contiguous `[batch, heads, length, dim]`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Workload {
    pub mask: Mask,
    /// Keys of the window or the prefix, number of documents, side of a neighbourhood, or of how many blocks one is
    /// seen.
    pub width: usize,
    pub score: Score,
    /// Largest distance that the relative bias tells apart.
    pub reach: usize,
    pub batch: usize,
    pub heads: usize,
    pub heads_kv: usize,
    pub q_len: usize,
    /// Number of keys.
    pub len: usize,
    pub dim: usize,
    /// The head dim of v, where it is another.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub dim_v: Option<usize>,
    #[serde(with = "dtype_name")]
    pub dtype: DType,
    pub pass: Direction,
}

/// Dtypes by the names that users write.
mod dtype_name {
    use foveate::DType;
    use serde::{Deserialize, Deserializer, Serializer, de::Error};

    pub fn serialize<S: Serializer>(dtype: &DType, to: S) -> Result<S::Ok, S::Error> {
        to.serialize_str(dtype.name())
    }

    pub fn deserialize<'de, D: Deserializer<'de>>(from: D) -> Result<DType, D::Error> {
        let name = String::deserialize(from)?;
        let all = [DType::F32, DType::F16, DType::BF16, DType::F8E4M3];
        let found = all.into_iter().find(|d| d.name() == name);
        found
            .ok_or_else(|| D::Error::custom(format!("no dtype `{name}`; f32, f16, bf16 or f8e4m3")))
    }
}

impl Workload {
    /// Causal self-attention in f32.
    pub fn causal(heads: usize, heads_kv: usize, len: usize, dim: usize) -> Self {
        Self {
            mask: Mask::Causal,
            width: 0,
            score: Score::None,
            reach: 128,
            batch: 1,
            heads,
            heads_kv,
            q_len: len,
            len,
            dim,
            dim_v: None,
            dtype: DType::F32,
            pass: Direction::Forward,
        }
    }

    /// The mask with its width: `window1024`.
    pub fn mask_name(&self) -> String {
        match self.mask {
            Mask::Full => "full".to_owned(),
            Mask::Causal => "causal".to_owned(),
            Mask::Window => format!("window{}", self.width),
            Mask::Prefix => format!("prefix{}", self.width),
            Mask::Documents => format!("documents{}", self.width),
            Mask::Ragged => "ragged".to_owned(),
            Mask::Neighbourhood => format!("neighbourhood{}", self.width),
            Mask::Blocks => format!("blocks{}", self.width),
        }
    }

    /// Mask, score and heads: `window1024-alibi/h16-16`.
    pub fn program_name(&self) -> String {
        let mask = self.mask_name();
        let score = match self.score {
            Score::None => "",
            Score::Alibi => "-alibi",
            Score::Softcap => "-softcap",
            Score::Relative => "-relative",
        };
        format!("{mask}{score}/h{}-{}", self.heads, self.heads_kv)
    }

    /// Head dims: `d128`, and `d192-128` where that of v is another.
    pub fn dims_name(&self) -> String {
        let of_v = self.dim_v.map(|dim| format!("-{dim}")).unwrap_or_default();
        format!("d{}{of_v}", self.dim)
    }

    /// All that tells it from others: program, lengths, head dims, dtype, direction.
    pub fn name(&self) -> String {
        let Self { q_len, len, dtype, .. } = self;
        let queries = if q_len == len { String::new() } else { format!("q{q_len}-") };
        let pass = self.pass.name();
        let (program, dims) = (self.program_name(), self.dims_name());
        format!("{program}/{queries}s{len}/{dims}/{dtype}/{pass}")
    }

    /// The mask; `None` for everything.
    pub fn mask_mod(&self) -> Option<MaskMod> {
        let width = self.width as i32;
        let fits = "the width is one that the mask takes";
        match self.mask {
            Mask::Full => None,
            Mask::Causal => Some(masks::causal()),
            Mask::Window => Some(masks::sliding_window(width).expect(fits)),
            Mask::Prefix => Some(masks::prefix_lm(width).expect(fits)),
            Mask::Documents | Mask::Ragged => {
                let lengths = self.documents();
                Some(masks::causal() & masks::document_lengths(&lengths).expect(fits))
            }
            Mask::Neighbourhood => {
                let grid = [self.len / COLUMNS, COLUMNS].map(|n| n as i32);
                Some(masks::neighbourhood(&grid, &[width; 2]).expect(fits))
            }
            Mask::Blocks => {
                let [q, kv] = [expr::q(), expr::kv()].map(|x| x / BLOCK as i32);
                let random = (q.mix(&kv) % width).eq(0);
                Some(MaskMod::new((random | q.eq(kv)).dynamic()).expect(fits))
            }
        }
    }

    fn score_mod(&self) -> Option<ScoreMod> {
        let fits = "the program is one that the score takes";
        match self.score {
            Score::None => None,
            Score::Alibi => Some(scores::alibi(self.heads).expect(fits)),
            Score::Softcap => Some(scores::soft_cap(CAP).expect(fits)),
            Score::Relative => {
                let shape = [self.heads, 2 * self.reach + 1];
                let table = (0..shape[0] * shape[1]).map(|i| normal(5, i)).collect();
                let table = Buffer::learned(BIAS, &shape, table).expect(fits);
                Some(scores::relative_bias(&table).expect(fits))
            }
        }
    }

    /// The program to plan.
    pub fn program(&self) -> Attention {
        let masked = self.mask_mod().into_iter().fold(Attention::new(), Attention::mask);
        self.score_mod().into_iter().fold(masked, Attention::score)
    }

    /// The relative bias that the score learns: its name and number of elements.
    pub fn learned(&self) -> Option<(&'static str, usize)> {
        (self.score == Score::Relative).then_some((BIAS, self.heads * (2 * self.reach + 1)))
    }

    /// Lengths of the documents that stand one after the other.
    pub fn documents(&self) -> Vec<i32> {
        let mut left = self.len;
        let mut next = |length: usize| {
            let length = length.min(left);
            left -= length;
            (length > 0).then_some(length as i32)
        };
        match self.mask {
            // Position i is of document i * width / len.
            Mask::Documents => {
                let start = |i: usize| (i * self.len).div_ceil(self.width);
                (0..self.width).map(|i| (start(i + 1) - start(i)) as i32).collect()
            }
            Mask::Ragged => {
                let random = |i| mix(6, i).cast_unsigned() as usize;
                (0..).map_while(|i| next(128 + random(i) % 1921)).collect()
            }
            _ => vec![self.len as i32],
        }
    }

    /// Whether positions `i` and `j` are of one document.
    fn share_document(&self, i: usize, j: usize) -> bool {
        if self.mask == Mask::Documents {
            return i * self.width / self.len == j * self.width / self.len;
        }
        let mut start = 0;
        for length in self.documents() {
            let document = start..start + length as usize;
            if document.contains(&i) || document.contains(&j) {
                return document.contains(&i) && document.contains(&j);
            }
            start = document.end;
        }
        false
    }

    /// Whether query `q` sees key `k`, computed without the mods.
    pub fn keeps(&self, q: usize, k: usize) -> bool {
        match self.mask {
            Mask::Full => true,
            Mask::Causal => k <= q,
            Mask::Window => k <= q && q - k < self.width,
            Mask::Prefix => k <= q || k < self.width,
            Mask::Documents | Mask::Ragged => k <= q && self.share_document(q, k),
            Mask::Neighbourhood => {
                let near = |q: usize, k: usize, size: usize| {
                    let half = self.width / 2;
                    q.clamp(half, size - 1 - half).abs_diff(k) <= half
                };
                near(q / COLUMNS, k / COLUMNS, self.len / COLUMNS)
                    && near(q % COLUMNS, k % COLUMNS, COLUMNS)
            }
            Mask::Blocks => {
                let [q, k] = [q, k].map(|x| (x / BLOCK) as i32);
                q == k || mix(q, k) % self.width as i32 == 0
            }
        }
    }

    /// What becomes of score `s` of query `q` and key `k` in head `h`, and its slope there,
    /// computed without the mods. The number of heads is a power of two for ALiBi.
    ///
    /// # Panics
    /// When the score is the relative bias.
    pub fn scored(&self, s: f32, [h, q, k]: [usize; 3]) -> (f32, f32) {
        match self.score {
            Score::None => (s, 1.0),
            Score::Alibi => {
                let slope = (-8.0 * (h + 1) as f32 / self.heads as f32).exp2();
                (s - slope * q.abs_diff(k) as f32, 1.0)
            }
            Score::Softcap => {
                let t = (s / CAP).tanh();
                (CAP * t, 1.0 - t * t)
            }
            Score::Relative => unreachable!("the relative bias is not written out here"),
        }
    }

    /// Operations on the pairs that the mask lets through.
    pub fn flops(&self) -> f64 {
        self.operations(|stats| stats.live_entries)
    }

    /// Operations on the tiles of 128 x 128 pairs of which the mask lets any through.
    pub fn tile_flops(&self) -> f64 {
        self.operations(|stats| (stats.full + stats.partial) * u64::from(TILE * TILE))
    }

    /// Operations on the pairs of a head, of which `pairs` counts those of a mask.
    fn operations(&self, pairs: impl Fn(&Stats) -> u64) -> f64 {
        let Self { q_len, len, .. } = *self;
        let pairs = match self.mask_mod() {
            None => (q_len * len) as f64,
            Some(mask) => {
                let (queries, keys) = (q_len as i32, len as i32);
                let head = Head { q_len: queries, kv_len: keys, ..Head::default() };
                let tile = Tile { q: TILE, kv: TILE };
                pairs(&BlockMask::build(&mask, head, q_len, len, tile).stats()) as f64
            }
        };
        // Products with v: one of the forward, two of the backward; the others are of q's and k's head dim.
        let with_v = match self.pass {
            Direction::Forward => 1.0,
            Direction::Backward => 2.0,
            Direction::Both => 3.0,
        };
        let [dim, dim_v] = [self.dim, self.dim_v.unwrap_or(self.dim)].map(|dim| dim as f64);
        let widths = (self.pass.products() - with_v) * dim + with_v * dim_v;
        2.0 * pairs * (self.batch * self.heads) as f64 * widths
    }

    /// Bytes that a pass has to move, each once: operands, results in 16 bits, and a number in f32 for each row.
    pub fn compulsory_bytes(&self) -> u64 {
        let [q, k, v, out] = self.shapes().map(|shape| shape.iter().product::<usize>());
        let (operands, rows) = (q + k + v, 4 * q / self.dim);
        let read = operands * self.dtype.bytes();
        let bytes = match self.pass {
            Direction::Forward => read + 2 * out + rows,
            Direction::Backward => read + 4 * out + rows + 2 * operands,
            // Both passes read operands, out and the numbers of rows.
            Direction::Both => 2 * (read + 2 * out + rows) + 2 * out + 2 * operands,
        };
        bytes as u64
    }

    /// Shapes of q, k, v and `out`.
    pub fn shapes(&self) -> [[usize; 4]; 4] {
        let Self { batch, heads, heads_kv, q_len, len, dim, .. } = *self;
        let dim_v = self.dim_v.unwrap_or(dim);
        [
            [batch, heads, q_len, dim],
            [batch, heads_kv, len, dim],
            [batch, heads_kv, len, dim_v],
            [batch, heads, q_len, dim_v],
        ]
    }
}

/// Number `i` of stream `seed` (1 is q, 2 k, 3 v, 4 the gradient of `out`, 5 the relative bias):
/// the sum of the four bytes of its hash, with mean 0 and variance 1.
pub fn normal(seed: i32, i: usize) -> f32 {
    let bytes = mix(seed, i as i32).to_le_bytes();
    let sum: i32 = bytes.iter().map(|&b| i32::from(b)).sum();
    // Four uniform bytes have the variance 4 (256² − 1) / 12.
    (sum - 510) as f32 / (4.0 * 65535.0 / 12.0f32).sqrt()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_have_mean_0_and_variance_1() {
        let numbers: Vec<f64> = (0..100_000).map(|i| f64::from(normal(1, i))).collect();
        let mean = numbers.iter().sum::<f64>() / 1e5;
        let variance = numbers.iter().map(|x| x * x).sum::<f64>() / 1e5 - mean * mean;
        assert!(mean.abs() < 0.01 && (variance - 1.0).abs() < 0.02, "{mean}, {variance}");
    }

    #[test]
    fn a_workload_is_the_same_after_a_trip_through_json() {
        let mut work = Workload::causal(4, 2, 33, 16);
        (work.mask, work.width, work.pass) = (Mask::Documents, 3, Direction::Both);
        let text = serde_json::to_string(&work).expect("it is plain data");
        assert_eq!(serde_json::from_str::<Workload>(&text).expect("it reads back"), work);
        let wrong = text.replace("f32", "f33");
        let said = serde_json::from_str::<Workload>(&wrong).unwrap_err().to_string();
        assert!(said.starts_with("no dtype `f33`; f32, f16, bf16 or f8e4m3"), "{said}");
    }

    #[test]
    fn operations_are_counted_where_the_mask_lets_through() {
        for (mask, width, len) in [
            (Mask::Full, 0, 45),
            (Mask::Causal, 0, 45),
            (Mask::Window, 9, 45),
            (Mask::Prefix, 7, 45),
            (Mask::Documents, 4, 45),
            (Mask::Ragged, 0, 700),
            (Mask::Neighbourhood, 5, 6 * COLUMNS),
            (Mask::Blocks, 4, 700),
        ] {
            let work = Workload { mask, width, ..Workload::causal(3, 1, len, 8) };
            let pairs = (0..len * len).filter(|i| work.keeps(i / len, i % len)).count();
            assert_eq!(work.flops(), 4.0 * (pairs * 3 * 8) as f64, "{}", work.name());
            let wide = Workload { dim_v: Some(16), pass: Direction::Backward, ..work };
            // Q·Kᵀ, dQ and dK of 8, dP and dV of 16.
            assert_eq!(wide.flops(), 2.0 * (pairs * 3 * (3 * 8 + 2 * 16)) as f64);
        }
    }
}
