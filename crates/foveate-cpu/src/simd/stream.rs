//! Products of a few query rows with many key or value rows, read in place in any dtype.
//!
//! Decoding has a handful of queries for each KV head, so memory bandwidth bounds it, and packing
//! would read and write every key and value once more. Here a row of keys or values is loaded in
//! its dtype, converted in registers, and multiplied with all query rows of its head while it is in
//! L1.

use foveate_tensor::Slice;
use half::{bf16, f16};

use super::group::{LANES, Lanes, Simd};
use super::level::for_each_level;

/// `count` rows of whole groups, `stride` elements apart: row `i` begins at
/// `data[first + i * stride]`.
#[derive(Clone, Copy, Debug)]
pub struct Rows<'a> {
    pub data: Slice<'a>,
    pub first: usize,
    pub stride: usize,
    pub count: usize,
}

/// Rows of one dtype.
#[derive(Clone, Copy)]
struct Typed<'a, E> {
    data: &'a [E],
    first: usize,
    stride: usize,
    count: usize,
}

impl<'a, E> Typed<'a, E> {
    /// The first `dim` elements of row `i`, in groups.
    #[inline(always)]
    fn row(&self, i: usize, dim: usize) -> &'a [[E; LANES]] {
        self.data[self.first + i * self.stride..][..dim].as_chunks().0
    }
}

/// An element that is converted to f32 in registers.
trait Element: Copy {
    fn load<S: Simd>(s: S, from: &[Self; LANES]) -> S::V;
}

impl Element for f32 {
    #[inline(always)]
    fn load<S: Simd>(s: S, from: &Lanes) -> S::V {
        s.load(from)
    }
}

impl Element for bf16 {
    #[inline(always)]
    fn load<S: Simd>(s: S, from: &[Self; LANES]) -> S::V {
        s.load(&from.map(|x| f32::from_bits(u32::from(x.to_bits()) << 16)))
    }
}

impl Element for f16 {
    #[inline(always)]
    fn load<S: Simd>(s: S, from: &[Self; LANES]) -> S::V {
        s.load_f16(from)
    }
}

for_each_level! {
    /// `scores[r * stride + j] = q[r] · keys[j]` for every row `q[r]` of `dim` floats, whole
    /// groups.
    pub scores_in_place / scores_in_place_on = scores_body(
        scores: &mut [f32],
        stride: usize,
        q: &[f32],
        dim: usize,
        keys: Rows<'_>,
    )
}

for_each_level! {
    /// `out[r] += Σ_j p[r * stride + j] · values[j]` for every row `out[r]` of `dim` floats, whole
    /// groups.
    pub add_in_place / add_in_place_on = add_body(
        out: &mut [f32],
        dim: usize,
        p: &[f32],
        stride: usize,
        values: Rows<'_>,
    )
}

/// Calls a function generic over the dtype of `$rows`.
macro_rules! typed {
    ($rows:expr, |$typed:ident| $call:expr) => {{
        let Rows { data, first, stride, count } = $rows;
        macro_rules! of {
            ($of:expr) => {{
                let $typed = Typed { data: $of, first, stride, count };
                $call
            }};
        }
        match data {
            Slice::F32(data) => of!(data),
            Slice::F16(data) => of!(data),
            Slice::BF16(data) => of!(data),
            Slice::F8E4M3(_) | Slice::F64(_) => unreachable!("a plan refuses them"),
        }
    }};
}

#[inline(always)]
fn scores_body<S: Simd>(
    s: S,
    scores: &mut [f32],
    stride: usize,
    q: &[f32],
    dim: usize,
    keys: Rows<'_>,
) {
    typed!(keys, |keys| {
        // Four rows at a time; what is left of them one by one.
        for (q, scores) in q.chunks(4 * dim).zip(scores.chunks_mut(4 * stride)) {
            if q.len() == 4 * dim {
                dots::<S, _, 4>(s, q, scores, stride, dim, keys);
            } else {
                for (q, scores) in q.chunks_exact(dim).zip(scores.chunks_mut(stride)) {
                    dots::<S, _, 1>(s, q, scores, stride, dim, keys);
                }
            }
        }
    });
}

/// Dot products of `R` queries with every key, two keys at a time.
#[inline(always)]
fn dots<S: Simd, E: Element, const R: usize>(
    s: S,
    q: &[f32],
    scores: &mut [f32],
    stride: usize,
    dim: usize,
    keys: Typed<'_, E>,
) {
    let q: [&[Lanes]; R] = std::array::from_fn(|r| q[r * dim..][..dim].as_chunks().0);
    let mut j = 0;
    while j < keys.count {
        // The last key stands in for the one after it.
        let pair = [keys.row(j, dim), keys.row((j + 1).min(keys.count - 1), dim)];
        let mut sums = [[s.splat(0.0); 2]; R];
        for d in 0..dim / LANES {
            let k = [E::load(s, &pair[0][d]), E::load(s, &pair[1][d])];
            for r in 0..R {
                let q = s.load(&q[r][d]);
                sums[r] = [s.mul_add(q, k[0], sums[r][0]), s.mul_add(q, k[1], sums[r][1])];
            }
        }
        for r in 0..R {
            scores[r * stride + j] = s.sum(sums[r][0]);
            if j + 1 < keys.count {
                scores[r * stride + j + 1] = s.sum(sums[r][1]);
            }
        }
        j += 2;
    }
}

#[inline(always)]
fn add_body<S: Simd>(
    s: S,
    out: &mut [f32],
    dim: usize,
    p: &[f32],
    stride: usize,
    values: Rows<'_>,
) {
    typed!(values, |values| {
        let mut outs = out.chunks_exact_mut(2 * dim);
        let mut first = 0;
        for two in outs.by_ref() {
            let (a, b) = two.split_at_mut(dim);
            let p = [&p[first * stride..], &p[(first + 1) * stride..]];
            sum_rows(s, [a, b], p, dim, values);
            first += 2;
        }
        let last = outs.into_remainder();
        if !last.is_empty() {
            sum_rows(s, [last], [&p[first * stride..]], dim, values);
        }
    });
}

/// Adds the weighted values to `R` rows, as many groups at a time as accumulators fit the registers.
#[inline(always)]
fn sum_rows<S: Simd, E: Element, const R: usize>(
    s: S,
    mut out: [&mut [f32]; R],
    p: [&[f32]; R],
    dim: usize,
    values: Typed<'_, E>,
) {
    let groups = dim / LANES;
    let mut at = 0;
    while at + 8 <= groups {
        sum_groups::<S, E, R, 8>(s, &mut out, p, at, dim, values);
        at += 8;
    }
    while at + 4 <= groups {
        sum_groups::<S, E, R, 4>(s, &mut out, p, at, dim, values);
        at += 4;
    }
    while at < groups {
        sum_groups::<S, E, R, 1>(s, &mut out, p, at, dim, values);
        at += 1;
    }
}

#[inline(always)]
fn sum_groups<S: Simd, E: Element, const R: usize, const G: usize>(
    s: S,
    out: &mut [&mut [f32]; R],
    p: [&[f32]; R],
    at: usize,
    dim: usize,
    values: Typed<'_, E>,
) {
    let mut sums = [[s.splat(0.0); G]; R];
    for r in 0..R {
        let out = &out[r].as_chunks().0[at..at + G];
        sums[r] = std::array::from_fn(|g| s.load(&out[g]));
    }
    for (j, row) in (0..values.count).map(|j| values.row(j, dim)).enumerate() {
        let row = &row[at..at + G];
        let weights: [S::V; R] = std::array::from_fn(|r| s.splat(p[r][j]));
        for g in 0..G {
            let v = E::load(s, &row[g]);
            for r in 0..R {
                sums[r][g] = s.mul_add(weights[r], v, sums[r][g]);
            }
        }
    }
    for r in 0..R {
        let out = &mut out[r].as_chunks_mut().0[at..at + G];
        for g in 0..G {
            s.store(sums[r][g], &mut out[g]);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::simd::level::Level;

    #[test]
    fn products_in_place_are_those_of_plain_loops_on_every_level() {
        let number = |i: usize| ((i * 37 + 11) % 23) as f32 * 0.25 - 2.5;
        for (rows, dim, count) in [(1, 16, 1), (3, 80, 5), (4, 128, 8), (7, 208, 19)] {
            let (stride, step, first) = (count + 3, dim + 7, 5);
            let q: Vec<f32> = (0..rows * dim).map(number).collect();
            let elems: Vec<f32> = (0..first + count * step).map(|i| number(3 * i)).collect();
            let f16s: Vec<f16> = elems.iter().map(|&x| f16::from_f32(x)).collect();
            let bf16s: Vec<bf16> = elems.iter().map(|&x| bf16::from_f32(x)).collect();
            // The numbers are exact in all three.
            for data in [Slice::F32(&elems), Slice::F16(&f16s), Slice::BF16(&bf16s)] {
                let of = Rows { data, first, stride: step, count };
                for &level in Level::available() {
                    let mut scores = vec![f32::NAN; rows * stride];
                    scores_in_place_on(level, &mut scores, stride, &q, dim, of);
                    let mut out = vec![1.0; rows * dim];
                    add_in_place_on(level, &mut out, dim, &scores, stride, of);
                    for r in 0..rows {
                        let at = |j: usize, d: usize| elems[first + j * step + d];
                        let mut want = vec![1.0; dim];
                        for j in 0..count {
                            let dot: f32 = (0..dim).map(|d| q[r * dim + d] * at(j, d)).sum();
                            assert_eq!(scores[r * stride + j], dot, "{level:?} {rows} {dim}");
                            want.iter_mut().enumerate().for_each(|(d, x)| *x += dot * at(j, d));
                        }
                        let got = &out[r * dim..][..dim];
                        let near = |a: f32, b: f32| (a - b).abs() <= 1e-5 * b.abs().max(1.0);
                        assert!(got.iter().zip(&want).all(|(&a, &b)| near(a, b)), "{level:?}");
                    }
                }
            }
        }
    }
}
