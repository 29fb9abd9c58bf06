//! Joining partial results of attention over parts of the keys.

/// Joins the partial result of some keys into that of others, row by row, in f32: `out` is
/// `[rows, width]` and `lse` `[rows]`, natural logs of the denominators. Both `out`s are divided by
/// their own denominators, so the joined row is their mean, weighted by `exp(lse)`. A row that saw no
/// key has `lse` −∞ and weighs nothing; one that saw none in either part keeps `out` 0 and `lse` −∞.
///
/// The order of joins is part of the result's bits: join parts in one order everywhere. `lse` holds 24
/// bits: where it is so large that the logs of denominators are lost in it (|lse| of 10⁷ and more),
/// parts weigh as if they had equally many keys.
///
/// ```
/// let (mut out, mut lse) = ([1.0, 2.0], [0.0]);
/// foveate_shard::combine(&mut out, &mut lse, &[3.0, 6.0], &[0.0]);
/// assert_eq!((out, lse), ([2.0, 4.0], [2f32.ln()]));
/// ```
///
/// # Panics
/// When the lengths of the two parts differ, or `out` is no multiple of `lse`.
pub fn combine(out: &mut [f32], lse: &mut [f32], part_out: &[f32], part_lse: &[f32]) {
    assert_eq!((out.len(), lse.len()), (part_out.len(), part_lse.len()), "parts of one problem");
    if lse.is_empty() {
        return;
    }
    assert!(out.len().is_multiple_of(lse.len()), "{} values for {} rows", out.len(), lse.len());
    let width = out.len() / lse.len();
    for (row, (lse, &part)) in lse.iter_mut().zip(part_lse).enumerate() {
        if part == f32::NEG_INFINITY {
            continue;
        }
        let values = row * width..(row + 1) * width;
        let (own, other) = (&mut out[values.clone()], &part_out[values]);
        if *lse == f32::NEG_INFINITY {
            own.copy_from_slice(other);
            *lse = part;
            continue;
        }
        let max = lse.max(part);
        let (a, b) = ((*lse - max).exp(), (part - max).exp());
        let sum = a + b;
        let (a, b) = (a / sum, b / sum);
        own.iter_mut().zip(other).for_each(|(x, y)| *x = *x * a + y * b);
        *lse = max + sum.ln();
    }
}
