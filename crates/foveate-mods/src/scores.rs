//! Named score functions.
//!
//! Each takes the scaled dot product and gives another score; they chain with
//! [`ScoreMod::then`]. Buffers made with [`Buffer::learned`] receive gradients.
//!
//! ```
//! use foveate_mods::scores;
//! let score = scores::alibi(12)?.then(&scores::soft_cap(30.0)?);
//! # Ok::<(), foveate_mods::ModError>(())
//! ```

use foveate_macros::score_mod;

use crate::capture::Buffer;
use crate::error::ModError;
use crate::expr::{self, Expr};
use crate::parameter::{Parameter, along, argument, rank};
use crate::program::ScoreMod;

/// `cap · tanh(score / cap)` (Gemma 2). A larger cap bends less.
///
/// # Errors
/// When `cap` is not positive or not finite.
pub fn soft_cap(cap: impl Into<Parameter<f32>>) -> Result<ScoreMod, ModError> {
    #[score_mod]
    fn bent(score: f32, cap: Expr<f32>) -> f32 {
        cap * (score / cap).tanh()
    }
    Ok(bent(cap.into().positive("soft_cap", "cap")?))
}

/// `score - slope[h] · |q - kv|` with the slopes of [`alibi_slopes`] (Press et al. 2022,
/// arXiv 2108.12409). Under a causal mask this is the paper's `slope · (kv - q)`.
///
/// # Errors
/// When `heads` is 0, or more than 1,048,576, whose slopes would take more than 4 MiB.
pub fn alibi(heads: usize) -> Result<ScoreMod, ModError> {
    const MOST_HEADS: usize = 1 << 20;
    if heads == 0 {
        return Err(argument("alibi", "the number of heads must be at least 1"));
    }
    if heads > MOST_HEADS {
        let reason = format!("the number of heads must be at most {MOST_HEADS}, not {heads}");
        return Err(argument("alibi", reason));
    }
    alibi_with(&Buffer::vector("alibi_slopes", alibi_slopes(heads)))
}

/// ALiBi with slopes of one's own, `slopes [heads]`, learned or not.
///
/// # Errors
/// When `slopes` has not one axis.
pub fn alibi_with(slopes: &Buffer<f32>) -> Result<ScoreMod, ModError> {
    #[score_mod]
    fn distance_penalty(score: f32, h: i32, q: i32, kv: i32, slopes: &Buffer<f32>) -> f32 {
        score - slopes[h] * (q - kv).abs() as f32
    }
    table_of("alibi", slopes, 1)?;
    Ok(distance_penalty(slopes))
}

/// ALiBi's slopes: for a power of two the geometric sequence `2^(-8(i+1)/heads)`, otherwise that
/// of the power of two below, then every second one of the power of two above.
pub fn alibi_slopes(heads: usize) -> Vec<f32> {
    let geometric = |n: usize| (1..=n).map(move |i| (-8.0 * i as f64 / n as f64).exp2() as f32);
    if heads == 0 {
        return Vec::new();
    }
    let below = 1 << heads.ilog2();
    geometric(below).chain(geometric(2 * below).step_by(2)).take(heads).collect()
}

/// Refuses a table with another number of axes, or without elements.
fn table_of(of: &str, table: &Buffer<f32>, axes: usize) -> Result<(), ModError> {
    rank(of, table, &[axes])?;
    if table.shape().contains(&0) {
        let (name, shape) = (table.any().name(), table.shape());
        return Err(argument(of, format!("`{name}` has no elements: its shape is {shape:?}")));
    }
    Ok(())
}

/// `score + table[h, clamp(q - kv, -max, max) + max]` with `table [heads|1, 2·max + 1]` (Shaw et
/// al. 2018, arXiv 1803.02155, as a bias).
///
/// # Errors
/// When the table has not two axes, the second of odd length.
pub fn relative_bias(table: &Buffer<f32>) -> Result<ScoreMod, ModError> {
    #[score_mod]
    fn clamped(
        score: f32,
        q: i32,
        kv: i32,
        table: &Buffer<f32>,
        head: Expr<i32>,
        max_distance: i32,
    ) -> f32 {
        score + table[head][(q - kv).clamp(-max_distance, max_distance) + max_distance]
    }
    table_of("relative_bias", table, 2)?;
    let [heads, width] = [table.shape()[0], table.shape()[1]];
    if width % 2 == 0 {
        let reason = format!("the table's second axis is 2·max + 1, an odd number, not {width}");
        return Err(argument("relative_bias", reason));
    }
    Ok(clamped(table, along(expr::h(), heads), (width / 2) as i32))
}

/// T5's relative bias, `score + table[bucket(kv - q), h]` with `table [buckets, heads|1]`
/// (Raffel et al. 2020, arXiv 1910.10683).
///
/// Distances below half the buckets have one each; larger ones share the other half
/// logarithmically up to `max_distance` (128 in T5). `bidirectional` gives keys after the query
/// their own half of the buckets; otherwise they all fall into bucket 0.
///
/// # Errors
/// When the table has not two axes, has too few buckets (4, or 2 in one direction) or an odd
/// number of them in two directions, or `max_distance` is not beyond the exact buckets.
pub fn t5_buckets(
    table: &Buffer<f32>,
    bidirectional: bool,
    max_distance: i32,
) -> Result<ScoreMod, ModError> {
    table_of("t5", table, 2)?;
    let [buckets, heads] = [table.shape()[0], table.shape()[1]];
    let sides = if bidirectional { 2 } else { 1 };
    if buckets % sides != 0 || buckets / sides < 2 {
        let reason = format!("{buckets} buckets are too few or do not divide into {sides} sides");
        return Err(argument("t5", reason));
    }
    let count = (buckets / sides) as i32;
    let exact = count / 2;
    if max_distance <= exact {
        let reason = format!("max_distance must be above {exact}, not {max_distance}");
        return Err(argument("t5", reason));
    }
    let behind = expr::q() - expr::kv();
    let distance = if bidirectional { behind.abs() } else { behind.max(0) };
    let ratio =
        (distance.max(1).to_f32() / exact as f32).log() / (max_distance as f32 / exact as f32).ln();
    let far = (exact + (ratio * (count - exact) as f32).to_i32()).min(count - 1);
    let bucket = distance.lt(exact).select(&distance, far);
    let side = if bidirectional { behind.lt(0).to_i32() * count } else { Expr::from(0) };
    let bias = table.at([side + bucket, along(expr::h(), heads)]);
    ScoreMod::new((expr::score() + bias).dynamic())
}

/// `score + bias[b, h, q, kv]`, an axis of length 1 being broadcast. Fewer axes are the last
/// ones: `[h, q, kv]`, `[q, kv]`, `[kv]`.
///
/// # Errors
/// When the bias has more than four axes or is empty.
pub fn additive_bias(bias: &Buffer<f32>) -> Result<ScoreMod, ModError> {
    let axes = bias.shape().len();
    if axes > 4 {
        return Err(argument("bias", format!("1 to 4 axes [b, h, q, kv], not {axes}")));
    }
    table_of("bias", bias, axes)?;
    let leaves = [expr::b(), expr::h(), expr::q(), expr::kv()].into_iter().skip(4 - axes);
    let index: Vec<_> =
        leaves.zip(bias.shape()).map(|(leaf, &len)| along(leaf, len).dynamic().clone()).collect();
    let load = expr::DynExpr::load(bias.any(), index)?.typed::<f32>()?;
    ScoreMod::new((expr::score() + load).dynamic())
}

/// `score / temperature[h]` with `temperature [heads|1]`.
///
/// # Errors
/// When the buffer has not one axis.
pub fn temperature(temperature: &Buffer<f32>) -> Result<ScoreMod, ModError> {
    per_head("temperature", temperature, |score, value| score / value)
}

/// `score · scale[h]` with `scale [heads|1]`.
///
/// # Errors
/// When the buffer has not one axis.
pub fn head_scale(scale: &Buffer<f32>) -> Result<ScoreMod, ModError> {
    per_head("head_scale", scale, |score, value| score * value)
}

/// `score + bias[h]` with `bias [heads|1]`. It matters where a sink or the log-sum-exp does.
///
/// # Errors
/// When the buffer has not one axis.
pub fn head_bias(bias: &Buffer<f32>) -> Result<ScoreMod, ModError> {
    per_head("head_bias", bias, |score, value| score + value)
}

fn per_head(
    of: &str,
    values: &Buffer<f32>,
    f: impl Fn(Expr<f32>, Expr<f32>) -> Expr<f32>,
) -> Result<ScoreMod, ModError> {
    table_of(of, values, 1)?;
    let value = values.at([along(expr::h(), values.shape()[0])]);
    ScoreMod::new(f(expr::score(), value).dynamic())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::point::Point;
    use crate::value::ScalarValue;

    /// Compares a score function with a formula over a grid, to a few units in the last place.
    #[track_caller]
    fn is(score: &ScoreMod, formula: impl Fn(f64, [usize; 4]) -> f64) {
        for at in 0..2 * 3 * 5 * 7 {
            let i @ [b, h, q, kv] = [at / 105, at / 35 % 3, at / 7 % 5, at % 7];
            let s = (at as f32 * 0.37).sin() * 3.0;
            let [b, h, q, kv] = [b, h, q, kv].map(|x| x as i32);
            let point = Point { b, h, q, kv, score: s, ..Point::default() };
            let ScalarValue::F32(value) = score.program().eval(&point).unwrap()[0] else {
                panic!("a score is f32")
            };
            let wanted = formula(f64::from(s), i);
            assert!(
                (f64::from(value) - wanted).abs() <= 1e-6 * (1.0 + wanted.abs()),
                "at {i:?}: {value}, not {wanted}"
            );
        }
    }

    fn wave(name: &str, shape: &[usize]) -> (Buffer<f32>, impl Fn(usize) -> f64 + use<>) {
        let value = |i: usize| (i as f64 * 1.7).cos() as f32;
        let elems = (0..shape.iter().product()).map(value).collect();
        (Buffer::learned(name, shape, elems).unwrap(), move |i| f64::from(value(i)))
    }

    #[test]
    fn soft_cap_and_alibi_follow_their_formulas() {
        is(&soft_cap(2.5).unwrap(), |s, _| 2.5 * (s / 2.5).tanh());
        let slopes = [2f64.powi(-4), 2f64.powi(-8), 2f64.powi(-2)];
        is(&alibi(3).unwrap(), |s, [_, h, q, kv]| s - slopes[h] * q.abs_diff(kv) as f64);
    }

    #[test]
    fn alibi_slopes_are_the_papers() {
        assert_eq!(alibi_slopes(8), (1..=8).map(|i| 0.5f32.powi(i)).collect::<Vec<_>>());
        let of_12 = alibi_slopes(12);
        assert_eq!(of_12[..8], alibi_slopes(8));
        assert_eq!(of_12[8..], [0, 2, 4, 6].map(|i| alibi_slopes(16)[i]));
    }

    #[test]
    fn a_relative_bias_is_clamped_at_the_tables_ends() {
        for heads in [1, 3] {
            let (table, at) = wave("rel_bias", &[heads, 5]);
            is(&relative_bias(&table).unwrap(), |s, [_, h, q, kv]| {
                let column = (q as i64 - kv as i64).clamp(-2, 2) + 2;
                s + at(h % heads * 5 + column as usize)
            });
        }
    }

    #[test]
    fn t5_buckets_are_exact_near_and_logarithmic_far() {
        // Eight buckets a side, four exact; 4·2^k begins bucket 4 + 4k/3 up to distance 32.
        let bucket = |distance: usize| match distance {
            0..4 => distance,
            4 | 5 => 4,
            6 => 4,
            far => unreachable!("the grid has no distance {far}"),
        };
        let (table, at) = wave("t5", &[16, 3]);
        is(&t5_buckets(&table, true, 32).unwrap(), |s, [_, h, q, kv]| {
            let side = if kv > q { 8 } else { 0 };
            s + at((side + bucket(q.abs_diff(kv))) * 3 + h)
        });
        let (table, at) = wave("t5", &[8, 1]);
        is(&t5_buckets(&table, false, 32).unwrap(), |s, [_, _, q, kv]| {
            s + at(bucket(q.saturating_sub(kv)))
        });
    }

    #[test]
    fn t5_buckets_of_far_keys_grow_by_octaves() {
        // Twelve buckets behind the query, six exact: bucket 6 + 2k begins at 6·2^k.
        let elems: Vec<f32> = (0..12).map(|i| i as f32).collect();
        let table = Buffer::new("t5", &[12, 1], elems).unwrap();
        let score = t5_buckets(&table, false, 48).unwrap();
        for (q, bucket) in [(5, 5.0), (7, 6.0), (13, 8.0), (25, 10.0), (47, 11.0), (900, 11.0)] {
            let value = score.program().eval(&Point { q, ..Point::default() }).unwrap()[0];
            assert_eq!(value, ScalarValue::F32(bucket), "distance {q}");
        }
    }

    #[test]
    fn a_bias_is_broadcast_along_axes_of_length_one() {
        for mask in 0..16 {
            let full = [2, 3, 5, 7];
            let shape = [0, 1, 2, 3].map(|i| if mask >> i & 1 == 1 { full[i] } else { 1 });
            let (bias, at) = wave("bias", &shape);
            is(&additive_bias(&bias).unwrap(), |s, i| {
                s + at((0..4).fold(0, |n, a| n * shape[a] + if shape[a] == 1 { 0 } else { i[a] }))
            });
        }
        let (bias, at) = wave("bias", &[5, 7]);
        is(&additive_bias(&bias).unwrap(), |s, [_, _, q, kv]| s + at(q * 7 + kv));
    }

    #[test]
    fn heads_have_their_own_temperature_scale_and_bias() {
        let (values, at) = wave("t", &[3]);
        is(&temperature(&values).unwrap(), |s, [_, h, ..]| s / at(h));
        is(&head_scale(&values).unwrap(), |s, [_, h, ..]| s * at(h));
        is(&head_bias(&values).unwrap(), |s, [_, h, ..]| s + at(h));
    }

    #[test]
    fn caps_and_tables_that_cannot_be_are_refused() {
        let buffer = |shape: &[usize]| wave("table", shape).0;
        for (made, says) in [
            (
                relative_bias(&buffer(&[2, 4])),
                "relative_bias: the table's second axis is 2·max + 1",
            ),
            (
                relative_bias(&buffer(&[5])),
                "relative_bias: `table` must have 2 axes, but its shape is [5]",
            ),
            (t5_buckets(&buffer(&[5, 2]), true, 128), "t5: 5 buckets are too few"),
            (t5_buckets(&buffer(&[8, 2]), false, 4), "t5: max_distance must be above 4, not 4"),
            (additive_bias(&buffer(&[1, 1, 1, 1, 1])), "bias: 1 to 4 axes [b, h, q, kv], not 5"),
            (head_bias(&buffer(&[0])), "head_bias: `table` has no elements: its shape is [0]"),
            (
                temperature(&buffer(&[1, 1])),
                "temperature: `table` must have 1 axis, but its shape is [1, 1]",
            ),
            (soft_cap(0.0), "soft_cap: cap must be a positive number, not 0"),
            (soft_cap(-3.0), "soft_cap: cap must be a positive number, not -3"),
            (soft_cap(f32::NAN), "soft_cap: cap must be a positive number, not NaN"),
            (soft_cap(f32::INFINITY), "soft_cap: cap must be a positive number, not inf"),
            (alibi(0), "alibi: the number of heads must be at least 1"),
        ] {
            let text = made.expect_err(says).to_string();
            assert!(text.starts_with(says), "{text}");
        }
    }
}
