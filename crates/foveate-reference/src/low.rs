//! The plain implementation in the operands' own precision that backends are measured against:
//! f32 arithmetic, and each tensor that an eager program stores (`q·k`, the probabilities, out,
//! and their gradients) rounded to the operands' dtype.
//!
//! Of f8e4m3 operands it is the plain emulation of that type: `q·k` in f32, `2⁸·exp(score − max)` rounded
//! to f8e4m3 as the factor of v, out rounded to bf16.
//!
//! The largest error of a tensor is a measure where the tensor has many elements. That of one number, such as
//! the gradient of a temperature, is one draw of some thousand roundings that nearly cancel, and as likely near 0
//! as anywhere: [`backward_drawn`] draws more often.

use foveate_problem::{Operands, Spec};
use foveate_tensor::random::mix;
use foveate_tensor::{DType, F8E4M3};
use half::{bf16, f16};

use crate::attention::{self, Forward, Gradients, Rounding, Upstream};
use crate::error::ReferenceError;
use crate::tolerance::FEWEST_OF_A_MEAN;

/// Programs that a tensor of few elements is measured by, the plain one among them.
const DRAWS: u32 = 16;

/// # Errors
/// Those of [`crate::forward`].
pub fn forward(spec: &Spec, operands: &Operands<'_>) -> Result<Forward, ReferenceError> {
    Ok(attention::run::<f32>(spec, operands, &rounding(operands.q.dtype()), None)?.0)
}

/// Plain programs that [`placed`] gives.
pub const PLACES: u32 = 16;

/// `out` of a plain program that rounds weights at another place between two powers of two: all but the largest of a
/// row times `2^(place/16)`, which it divides by afterwards. A program with one softmax for all tiles rounds
/// `exp(score - reference)` and divides by the sum of the row last, so its weights are at a place of their own, as those
/// of [`forward`] are. Where they are of all sizes the place says nothing. Where they are nearly equal, all of them lie in
/// one place, and the same rounding costs up to twice as much just above a power of two as just below it. The largest is
/// about 1 in both where it is much of a row.
///
/// # Errors
/// Those of [`crate::forward`].
pub fn placed(
    spec: &Spec,
    operands: &Operands<'_>,
    place: u32,
) -> Result<Vec<f64>, ReferenceError> {
    let plain = rounding(operands.q.dtype());
    let unit = (place as f32 / PLACES as f32).exp2();
    let weight = |p: f32, largest: f32| match p == largest {
        true => (plain.weight)(p, largest),
        false => (plain.weight)(p * unit, largest * unit) / unit,
    };
    let rounding = Rounding { weight: &weight, ..plain };
    Ok(attention::run::<f32>(spec, operands, &rounding, None)?.0.out)
}

/// # Errors
/// Those of [`crate::backward`].
pub fn backward(
    spec: &Spec,
    operands: &Operands<'_>,
    upstream: &Upstream<'_>,
) -> Result<Gradients, ReferenceError> {
    Ok(attention::run::<f32>(spec, operands, &rounding(operands.q.dtype()), Some(upstream))?.1)
}

/// [`backward`], with more than one draw of the roundings where a gradient of 16-bit operands has fewer than 16
/// elements: each is then as far from `gold` as in that one of 16 programs where it is farthest. These are the
/// plain one and 15 that round up or down at random, either as often as leaves no bias. Such a rounding has twice
/// the variance of one to nearest, so their errors count over √2.
///
/// # Errors
/// Those of [`crate::backward`].
pub fn backward_drawn(
    spec: &Spec,
    operands: &Operands<'_>,
    upstream: &Upstream<'_>,
    gold: &Gradients,
) -> Result<Gradients, ReferenceError> {
    let mut low = backward(spec, operands, upstream)?;
    let is_16_bit = matches!(operands.q.dtype(), DType::F16 | DType::BF16);
    if is_16_bit && few(&mut low).next().is_some() {
        for draw in 1..DRAWS {
            let mut drawn = drawn(spec, operands, upstream, draw)?;
            for ((low, drawn), gold) in
                few(&mut low).zip(few(&mut drawn)).zip(few(&mut gold.clone()))
            {
                for ((low, &mut drawn), &mut gold) in low.iter_mut().zip(drawn).zip(gold) {
                    let error = (drawn - gold) * std::f64::consts::FRAC_1_SQRT_2;
                    if error.is_finite() && error.abs() > (*low - gold).abs() {
                        *low = gold + error;
                    }
                }
            }
        }
    }
    Ok(low)
}

/// The gradients that have fewer elements than the rule of the mean takes.
fn few(gradients: &mut Gradients) -> impl Iterator<Item = &mut Vec<f64>> {
    let Gradients { dq, dk, dv, d_sink, captures } = gradients;
    let all = [dq, dk, dv, d_sink].into_iter().chain(captures.values_mut());
    all.filter(|values| (1..FEWEST_OF_A_MEAN).contains(&values.len()))
}

/// One program that rounds at random.
fn drawn(
    spec: &Spec,
    operands: &Operands<'_>,
    upstream: &Upstream<'_>,
    draw: u32,
) -> Result<Gradients, ReferenceError> {
    let of_f16 = |x: f32| {
        let near = f16::from_f32(x);
        at_random(
            x,
            near.to_f32(),
            |by| f16::from_bits(near.to_bits().wrapping_add(by)).into(),
            draw,
        )
    };
    let of_bf16 = |x: f32| {
        let near = bf16::from_f32(x);
        at_random(
            x,
            near.to_f32(),
            |by| bf16::from_bits(near.to_bits().wrapping_add(by)).into(),
            draw,
        )
    };
    let round: &dyn Fn(f32) -> f32 =
        if operands.q.dtype() == DType::F16 { &of_f16 } else { &of_bf16 };
    let rounding = Rounding { dot: round, weight: &|p, _| round(p), stored: round };
    Ok(attention::run::<f32>(spec, operands, &rounding, Some(upstream))?.1)
}

/// `near`, or its neighbour on the other side of `x`; what they are on average is `x`. `neighbour` is the number
/// whose bits are more by so much.
fn at_random(x: f32, near: f32, neighbour: impl Fn(u16) -> f32, draw: u32) -> f32 {
    if near == x || !near.is_finite() {
        return near;
    }
    let other = neighbour(if near.abs() > x.abs() { u16::MAX } else { 1 });
    let share = (x - near) / (other - near);
    let chance = (mix(u64::from(draw) << 32 | u64::from(x.to_bits())) >> 40) as f32 / 16_777_216.0;
    if chance < share { other } else { near }
}

/// The forward pass with nothing rounded below f32: the measure for `lse` and `max_score`,
/// which are f32 whatever the operands are. Of f8e4m3 operands `q·k` is rounded to f16: tensor
/// cores keep fewer bits of a sum of their products than f32 has.
///
/// # Errors
/// Those of [`crate::forward`].
pub fn statistics(spec: &Spec, operands: &Operands<'_>) -> Result<Forward, ReferenceError> {
    let rounding = match operands.q.dtype() {
        DType::F8E4M3 => Rounding { dot: &to_f16, ..Rounding::none() },
        DType::F32 | DType::F16 | DType::BF16 | DType::F64 => Rounding::none(),
    };
    Ok(attention::run::<f32>(spec, operands, &rounding, None)?.0)
}

fn rounding(dtype: DType) -> Rounding<'static, f32> {
    match dtype {
        DType::F16 => Rounding { dot: &to_f16, weight: &|p, _| to_f16(p), stored: &to_f16 },
        DType::BF16 => Rounding { dot: &to_bf16, weight: &|p, _| to_bf16(p), stored: &to_bf16 },
        DType::F8E4M3 => Rounding { weight: &e4m3_weight, stored: &to_bf16, ..Rounding::none() },
        DType::F32 | DType::F64 => Rounding::none(),
    }
}

fn to_f16(x: f32) -> f32 {
    f16::from_f32(x).to_f32()
}

fn to_bf16(x: f32) -> f32 {
    bf16::from_f32(x).to_f32()
}

/// A weight in units of 2⁻⁸ of the largest of its row, rounded to e4m3.
fn e4m3_weight(p: f32, largest: f32) -> f32 {
    let unit = largest / 256.0;
    if unit > 0.0 { F8E4M3::from_f32(p / unit).to_f32() * unit } else { p }
}

#[cfg(test)]
mod tests {
    use foveate_mods::text::{Names, parse_score};
    use foveate_mods::{Buffer, masks, scores};
    use foveate_tensor::Tensor;
    use foveate_tensor::random::Random;

    use super::*;
    use crate::{Measure, NonFinite, Rule, Tolerance};

    #[test]
    fn a_rounding_at_random_is_one_of_both_neighbours_and_has_no_bias() {
        let mut random = Random::new(7);
        for _ in 0..64 {
            let x = random.normal() as f32;
            let near = bf16::from_f32(x);
            let below = bf16::from_bits((x.to_bits() >> 16) as u16).to_f32();
            let above = bf16::from_bits((x.to_bits() >> 16) as u16 + 1).to_f32();
            let neighbour = |by| bf16::from_bits(near.to_bits().wrapping_add(by)).to_f32();
            let draws = (0..4096).map(|draw| at_random(x, near.to_f32(), neighbour, draw));
            let draws: Vec<f32> = draws.collect();
            assert!(draws.iter().all(|&d| d == below || d == above), "{x}: {below} or {above}");
            let mean = draws.iter().map(|&d| f64::from(d)).sum::<f64>() / 4096.0;
            let unit = f64::from(above - below).abs();
            assert!((mean - f64::from(x)).abs() < 0.04 * unit, "{x}: {mean} of units of {unit}");
        }
        assert_eq!(at_random(1.0, 1.0, |_| f32::NAN, 3), 1.0, "what is exact stays");
    }

    /// The rule of the plain program, and of all places, for a program that rounds its weights by `weight`, which is
    /// given the largest of the row too.
    fn placed_rule(dtype: DType, score: &str, weight: &dyn Fn(f32, f32) -> f32) -> [Measure; 2] {
        let mut random = Random::new(5);
        let mut tensor = |len| Tensor::from_fn(dtype, [2, 4, len, 16], |_| random.normal());
        let [q, k, v] = [64, 33, 33].map(&mut tensor);
        let score = Some(parse_score(score, &Names::new()).unwrap());
        let spec = Spec { mask: None, score, scale: None, dropout: None };
        let operands = Operands::new(q.view(), k.view(), v.view());
        let gold = crate::forward(&spec, &operands).unwrap().out;
        let low = forward(&spec, &operands).unwrap().out;
        let stored = rounding(dtype).stored;
        let rounding = Rounding { weight, stored, ..Rounding::none() };
        let ours = attention::run::<f32>(&spec, &operands, &rounding, None).unwrap().0.out;
        let rule = Tolerance { dtype, rule: Rule::Plain, non_finite: NonFinite::Same };
        let one = rule.measure(&gold, &low, &ours);
        let places = (1..PLACES).map(|place| placed(&spec, &operands, place).unwrap());
        [one, places.fold(one, |found, low| rule.or_mean(found, &gold, &low))]
    }

    #[test]
    fn nearly_equal_weights_are_held_to_their_worst_place_between_powers_of_two() {
        let spread = "2.0 * score";
        let equal = "if kv == 0 { 0.65 } else { 0.01 * score }";
        // As a program with one softmax rounds them, and with a bit less.
        for (dtype, bits) in [(DType::BF16, 16), (DType::F16, 13)] {
            let plain = rounding(dtype).weight;
            let fused = |p: f32, largest: f32| plain(p / largest, 1.0) * largest;
            let coarse = |p: f32, largest: f32| {
                let last = 1 << bits;
                f32::from_bits(((p / largest).to_bits() + last) & !(2 * last - 1)) * largest
            };
            let too_large = |p: f32, largest: f32| fused(p, largest) * 1.02;
            let lost = |p: f32, largest: f32| if p == largest { 0.0 } else { fused(p, largest) };

            let [one, all] = placed_rule(dtype, equal, &fused);
            assert!(all.passes() && all.mean_allowed < 1.5 * one.mean_allowed, "{one}; {all}");
            // Where weights are of all sizes, or one has nearly all of a row, the rule is as strict as that of the
            // plain program.
            for score in ["0.5 * score", spread, "8.0 * score", "30.0 * score"] {
                let [one, all] = placed_rule(dtype, score, &fused);
                assert!(all.passes() && all.mean_allowed < 1.02 * one.mean_allowed, "{one}; {all}");
            }

            let [_, all] = placed_rule(dtype, equal, &coarse);
            assert!(!all.passes(), "{dtype:?}, a bit less: {all}");
            for score in [equal, spread] {
                let [_, all] = placed_rule(dtype, score, &lost);
                assert!(!all.passes(), "{dtype:?}, {score}, a key lost: {all}");
                let [_, all] = placed_rule(dtype, score, &too_large);
                assert!(!all.passes(), "{dtype:?}, {score}, a factor: {all}");
            }
        }
        let fused = |p: f32, largest: f32| to_bf16(p / largest) * largest;
        let [one, all] = placed_rule(DType::BF16, equal, &fused);
        assert!(!one.passes() && all.passes(), "{one}; {all}");
    }

    /// How many of 100 problems refuse each gradient of a temperature: a program as exact as the plain one, by the
    /// plain one alone and by 16 draws; and a gradient that is a half too large, by 16 draws.
    fn refused(dtype: DType) -> [usize; 3] {
        let mut refused = [0; 3];
        for seed in 0..100 {
            let mut random = Random::new(seed);
            let mut tensor = |len| Tensor::from_fn(dtype, [1, 2, len, 8], |_| random.normal());
            let [q, k, v, d_out] = [11, 13, 13, 11].map(&mut tensor);
            let table = Buffer::learned("temperatures", &[2], vec![0.5, 1.7]).unwrap();
            let score = scores::temperature(&table).unwrap();
            let spec = Spec {
                mask: Some(masks::causal()),
                score: Some(score),
                scale: None,
                dropout: None,
            };
            let operands = Operands::new(q.view(), k.view(), v.view());
            let upstream = Upstream { d_out: d_out.view(), d_lse: None };
            let gold = crate::backward(&spec, &operands, &upstream).unwrap();
            let of = |gradients: &Gradients| gradients.captures["temperatures"].clone();
            let draws = of(&backward_drawn(&spec, &operands, &upstream, &gold).unwrap());
            let low = of(&backward(&spec, &operands, &upstream).unwrap());
            let other = of(&drawn(&spec, &operands, &upstream, 1000).unwrap());
            let gold = of(&gold);
            let scaled = |(x, g): (&f64, &f64)| g + (x - g) * std::f64::consts::FRAC_1_SQRT_2;
            let other: Vec<f64> = other.iter().zip(&gold).map(scaled).collect();
            let wrong: Vec<f64> = gold.iter().map(|g| g * 1.5).collect();
            let rule = Tolerance { dtype, rule: Rule::Plain, non_finite: NonFinite::Same };
            for (count, low, ours) in [(0, &low, &other), (1, &draws, &other), (2, &draws, &wrong)]
            {
                refused[count] += usize::from(!rule.measure(&gold, low, ours).passes());
            }
        }
        refused
    }

    #[test]
    fn a_gradient_of_two_elements_is_measured_by_more_than_one_draw_of_the_roundings() {
        for dtype in [DType::BF16, DType::F16] {
            let [by_one, by_draws, wrong] = refused(dtype);
            assert!(by_one >= 10, "{dtype:?}: one draw refuses {by_one} of 100 that are as exact");
            assert!(by_draws == 0, "{dtype:?}: 16 draws refuse {by_draws}");
            assert!(wrong >= 90, "{dtype:?}: of 100 wrong gradients {wrong} are refused");
        }
    }
}
