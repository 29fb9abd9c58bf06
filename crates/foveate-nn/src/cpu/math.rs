//! Sums and exponentials that vectorise.

/// Independent partial sums; their order is fixed.
const LANES: usize = 16;

/// `Σ f(aᵢ, bᵢ)` in [`LANES`] partial sums.
#[inline(always)]
pub(crate) fn sum(a: &[f32], b: &[f32], f: impl Fn(f32, f32) -> f32) -> f32 {
    let mut lanes = [0.0f32; LANES];
    let (a_blocks, b_blocks) = (a.chunks_exact(LANES), b.chunks_exact(LANES));
    let rest = a_blocks.remainder().iter().zip(b_blocks.remainder());
    let rest: f32 = rest.map(|(&x, &y)| f(x, y)).sum();
    for (x, y) in a_blocks.zip(b_blocks) {
        for i in 0..LANES {
            lanes[i] += f(x[i], y[i]);
        }
    }
    lanes.iter().sum::<f32>() + rest
}

/// The largest element, `-∞` of none.
#[inline(always)]
pub(crate) fn largest(x: &[f32]) -> f32 {
    let mut lanes = [f32::NEG_INFINITY; LANES];
    let blocks = x.chunks_exact(LANES);
    let rest = blocks.remainder().iter().fold(f32::NEG_INFINITY, |m, &x| if x > m { x } else { m });
    for block in blocks {
        for i in 0..LANES {
            lanes[i] = if block[i] > lanes[i] { block[i] } else { lanes[i] };
        }
    }
    lanes.iter().fold(rest, |m, &x| if x > m { x } else { m })
}

/// `eˣ` to about 2 ulp for x in [-87, 88], which arguments are clamped to: `2ⁿ·eʳ` with
/// `|r| ≤ ln 2 / 2` and a polynomial for `eʳ`. No branch, no table: it vectorises.
#[inline(always)]
pub(crate) fn exp(x: f32) -> f32 {
    const ROUND: f32 = 12_582_912.0; // 1.5·2²³: adding it rounds to the nearest integer
    let x = if x < -87.0 { -87.0 } else { x };
    let x = if x > 88.0 { 88.0 } else { x };
    let shifted = x * std::f32::consts::LOG2_E + ROUND;
    let n = shifted - ROUND;
    let r = (x - n * 0.693_359_4) - n * -2.121_944_4e-4;
    let p = 1.987_569_1e-4;
    let p = p * r + 1.398_2e-3;
    let p = p * r + 8.333_452e-3;
    let p = p * r + 4.166_579_6e-2;
    let p = p * r + 1.666_666_5e-1;
    let p = p * r + 0.5;
    let p = p * (r * r) + r + 1.0;
    f32::from_bits(p.to_bits().wrapping_add(shifted.to_bits() << 23))
}

/// `1/(1 + e⁻ˣ)`.
#[inline(always)]
pub(crate) fn sigmoid(x: f32) -> f32 {
    1.0 / (1.0 + exp(-x))
}

/// `tanh x`, to about 2⁻²³ of 1.
#[inline(always)]
pub(crate) fn tanh(x: f32) -> f32 {
    let e = exp(-2.0 * x.abs());
    ((1.0 - e) / (1.0 + e)).copysign(x)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn exp_is_accurate_to_a_few_ulp_over_its_whole_range() {
        for i in -86_900..88_000 {
            let x = i as f32 * 1e-3;
            let gold = f64::from(x).exp();
            let error = (f64::from(exp(x)) - gold).abs() / gold;
            assert!(error < 3e-7, "exp({x}): relative error {error:e}");
        }
        assert!(exp(f32::NEG_INFINITY) < 1e-37);
        assert!(exp(1000.0).is_finite());
    }
}
