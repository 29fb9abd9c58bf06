//! Named masks.
//!
//! Each is one short function over the public API, so each is also an example. Sizes are
//! run-time scalars, or expressions ([`Parameter`]): changing one compiles nothing. What cannot be
//! a size is refused when the mask is made; a scalar set later is not checked again. Masks compose
//! with `&`, `|` and `!`:
//!
//! ```
//! use foveate_mods::masks;
//! let documents = masks::causal() & masks::document_lengths(&[300, 212])?;
//! let longformer = masks::window(256, 256)? | masks::global_tokens(4)?;
//! # Ok::<(), foveate_mods::ModError>(())
//! ```

use foveate_macros::mask_mod;

use crate::capture::Buffer;
use crate::error::ModError;
use crate::expr::{self, Expr, scalar};
use crate::parameter::{Parameter, argument, rank};
use crate::program::MaskMod;

pub use crate::blocks::{BlockLists, block_lists, block_table, blocks};

/// Every query sees every key.
pub fn full() -> MaskMod {
    every()
}

#[mask_mod]
fn every() -> bool {
    true
}

/// `q >= kv`, aligned at the top left: query 0 sees key 0 only.
#[mask_mod]
pub fn causal(q: i32, kv: i32) -> bool {
    q >= kv
}

/// Causal, aligned at the bottom right: the last query sees every key,
/// `q + (kv_len - q_len) >= kv`. With more queries than keys the first rows are empty.
#[mask_mod]
pub fn causal_bottom_right(q: i32, kv: i32, q_len: i32, kv_len: i32) -> bool {
    q + (kv_len - q_len) >= kv
}

/// The `left` keys before the query, the query's own, and the `right` keys after it:
/// `q - left <= kv <= q + right`.
///
/// # Errors
/// When one is negative. A window without a limit on one side is a comparison, `kv - q <= right`.
pub fn window(
    left: impl Into<Parameter<i32>>,
    right: impl Into<Parameter<i32>>,
) -> Result<MaskMod, ModError> {
    #[mask_mod]
    fn around(q: i32, kv: i32, left: Expr<i32>, right: Expr<i32>) -> bool {
        q - kv <= left && kv - q <= right
    }
    let left = left.into().at_least(0, "window", "left")?;
    Ok(around(left, right.into().at_least(0, "window", "right")?))
}

/// The last `size` keys, the query's own among them: `0 <= q - kv < size` (Mistral).
///
/// # Errors
/// When `size` is not positive.
pub fn sliding_window(size: impl Into<Parameter<i32>>) -> Result<MaskMod, ModError> {
    #[mask_mod]
    fn last(q: i32, kv: i32, size: Expr<i32>) -> bool {
        q >= kv && q - kv < size
    }
    Ok(last(size.into().at_least(1, "sliding_window", "size")?))
}

/// Causal, with the first `prefix` keys visible to all: `kv < prefix || q >= kv`.
///
/// # Errors
/// When `prefix` is negative.
pub fn prefix_lm(prefix: impl Into<Parameter<i32>>) -> Result<MaskMod, ModError> {
    #[mask_mod]
    fn after_prefix(q: i32, kv: i32, prefix: Expr<i32>) -> bool {
        kv < prefix || q >= kv
    }
    Ok(after_prefix(prefix.into().at_least(0, "prefix", "prefix")?))
}

/// Prefix-LM with a prefix for each sequence, `prefixes [B]`.
///
/// # Errors
/// When `prefixes` has not one axis.
pub fn prefix_lm_per_batch(prefixes: &Buffer<i32>) -> Result<MaskMod, ModError> {
    rank("prefix", prefixes, &[1])?;
    prefix_lm(prefixes.at([expr::b()]))
}

fn id_at(ids: &Buffer<i32>, position: Expr<i32>) -> Expr<i32> {
    match ids.shape().len() {
        1 => ids.at([position]),
        _ => ids.at([expr::b(), position]),
    }
}

/// Same document: `ids[q] == ids[kv]`, with ids `[len]`, or `[B, len]` read at `[b, q]`.
/// Add [`causal`] for packed language modelling.
///
/// # Errors
/// When `ids` has neither one nor two axes.
pub fn document(ids: &Buffer<i32>) -> Result<MaskMod, ModError> {
    document_pair(ids, ids)
}

/// Same document, queries and keys having ids of their own (cross-attention, decoding).
///
/// # Errors
/// When one of them has neither one nor two axes.
pub fn document_pair(q_ids: &Buffer<i32>, kv_ids: &Buffer<i32>) -> Result<MaskMod, ModError> {
    rank("document", q_ids, &[1, 2])?;
    rank("document", kv_ids, &[1, 2])?;
    let (of_q, of_kv) = (id_at(q_ids, expr::q()), id_at(kv_ids, expr::kv()));
    MaskMod::new(of_q.eq(of_kv).dynamic())
}

/// Same document, the documents standing one after the other with these lengths.
///
/// # Errors
/// When a length is negative or there are more than `i32::MAX` positions.
pub fn document_lengths(lengths: &[i32]) -> Result<MaskMod, ModError> {
    document_lengths_within(lengths, usize::MAX)
}

/// [`document_lengths`], of the first `positions` positions only: the mask is never asked for
/// others, so their ids are not made. The mask captures them as `document_lengths`, apart from a `doc` that a
/// program may rebind beside it.
///
/// # Errors
/// Those of [`document_lengths`].
pub fn document_lengths_within(lengths: &[i32], positions: usize) -> Result<MaskMod, ModError> {
    let mut ends = Vec::with_capacity(lengths.len());
    let mut end = 0i32;
    for (id, &length) in lengths.iter().enumerate() {
        if length < 0 {
            return Err(argument("document", format!("length {id} is negative: {length}")));
        }
        let next = end.checked_add(length);
        end = next.ok_or_else(|| argument("document", "more than i32::MAX positions"))?;
        ends.push(end);
    }
    let mut ids = Vec::with_capacity(positions.min(end as usize));
    for (id, &end) in ends.iter().enumerate() {
        ids.resize(positions.min(end as usize), id as i32);
    }
    document(&Buffer::vector("document_lengths", ids))
}

/// Same document, document `i` standing at `offsets[i]..offsets[i + 1]`.
///
/// # Errors
/// When the offsets do not start at 0 or decrease.
pub fn document_offsets(offsets: &[i32]) -> Result<MaskMod, ModError> {
    if offsets.first() != Some(&0) {
        return Err(argument("document", "offsets must start at 0"));
    }
    let mut lengths = Vec::with_capacity(offsets.len() - 1);
    for (i, pair) in offsets.windows(2).enumerate() {
        if pair[1] < pair[0] {
            let (at, from, to) = (i + 1, pair[0], pair[1]);
            return Err(argument("document", format!("offset {at} falls from {from} to {to}")));
        }
        lengths.push(pair[1] - pair[0]);
    }
    document_lengths(&lengths)
}

/// Attention inside chunks of `chunk` positions: `q / chunk == kv / chunk` (Llama 4's local
/// layers, with [`causal`]).
///
/// # Errors
/// When `chunk` is not positive.
pub fn chunked(chunk: impl Into<Parameter<i32>>) -> Result<MaskMod, ModError> {
    #[mask_mod]
    fn same_chunk(q: i32, kv: i32, chunk: Expr<i32>) -> bool {
        q / chunk == kv / chunk
    }
    Ok(same_chunk(chunk.into().at_least(1, "chunked", "chunk")?))
}

/// Every `step`-th key up to `reach` positions away, on both sides:
/// `|q - kv| <= reach && |q - kv| % step == 0`.
///
/// # Errors
/// When `reach` is negative or `step` is not positive.
pub fn dilated(
    reach: impl Into<Parameter<i32>>,
    step: impl Into<Parameter<i32>>,
) -> Result<MaskMod, ModError> {
    #[mask_mod]
    fn every_step(q: i32, kv: i32, reach: Expr<i32>, step: Expr<i32>) -> bool {
        let distance = (q - kv).abs();
        distance <= reach && distance % step == 0
    }
    let reach = reach.into().at_least(0, "dilated", "reach")?;
    Ok(every_step(reach, step.into().at_least(1, "dilated", "step")?))
}

/// The first `tokens` positions see all and are seen by all: `q < tokens || kv < tokens`
/// (Longformer, with `|` [`window`]).
///
/// # Errors
/// When `tokens` is negative.
pub fn global_tokens(tokens: impl Into<Parameter<i32>>) -> Result<MaskMod, ModError> {
    #[mask_mod]
    fn either_among_first(q: i32, kv: i32, tokens: Expr<i32>) -> bool {
        q < tokens || kv < tokens
    }
    Ok(either_among_first(tokens.into().at_least(0, "global_tokens", "tokens")?))
}

/// Neighbourhood attention on a grid of one, two or three axes, positions row-major (NATTEN).
///
/// On each axis a query sees `kernel` neighbours: those around it, and at an edge the `kernel`
/// nearest ones, `|clamp(x_q, kernel/2, size - 1 - kernel/2) - x_kv| <= kernel/2`.
///
/// # Errors
/// When the numbers of axes differ or are not 1 to 3, or a kernel is even or exceeds its axis.
pub fn neighbourhood(sizes: &[i32], kernels: &[i32]) -> Result<MaskMod, ModError> {
    let of = "neighbourhood";
    if sizes.len() != kernels.len() || !(1..=3).contains(&sizes.len()) {
        let (sizes, kernels) = (sizes.len(), kernels.len());
        return Err(argument(
            of,
            format!("1 to 3 sizes and as many kernels are wanted, not {sizes} and {kernels}"),
        ));
    }
    for (&size, &kernel) in sizes.iter().zip(kernels) {
        if kernel < 1 || kernel % 2 == 0 || kernel > size {
            return Err(argument(
                of,
                format!("a kernel is odd and at most its axis; {kernel} on {size} is not"),
            ));
        }
    }
    let (mut q, mut kv) = (expr::q(), expr::kv());
    let mut near = Expr::from(true);
    for axis in (0..sizes.len()).rev() {
        let size = scalar(format!("size{axis}"), sizes[axis]);
        let half = scalar(format!("kernel{axis}"), kernels[axis]) / 2;
        // The first axis takes what is left, so a position past the grid is in no neighbourhood.
        let (x_q, x_kv) =
            if axis == 0 { (q.clone(), kv.clone()) } else { (&q % &size, &kv % &size) };
        let centre = x_q.max(&half).min(&size - 1 - &half);
        near = near & (centre - x_kv).abs().le(&half);
        (q, kv) = (q / &size, kv / &size);
    }
    MaskMod::new(near.dynamic())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::point::Point;
    use crate::value::ScalarValue;

    /// Compares a mask with a formula over every point of a grid.
    #[track_caller]
    fn is(mask: &MaskMod, q_len: i32, kv_len: i32, formula: impl Fn(i32, i32, i32) -> bool) {
        for b in 0..2 {
            for q in 0..q_len {
                for kv in 0..kv_len {
                    let point = Point { b, q, kv, q_len, kv_len, ..Point::default() };
                    let value = mask.program().eval(&point).unwrap()[0];
                    let wanted = ScalarValue::Bool(formula(b, q, kv));
                    assert_eq!(value, wanted, "at b {b}, q {q}, kv {kv}");
                }
            }
        }
    }

    #[test]
    fn causal_masks_align_at_either_corner() {
        is(&full(), 3, 5, |_, _, _| true);
        is(&causal(), 5, 7, |_, q, kv| kv <= q);
        is(&causal_bottom_right(), 5, 7, |_, q, kv| kv <= q + 2);
        is(&causal_bottom_right(), 7, 5, |_, q, kv| kv + 2 <= q);
    }

    #[test]
    fn windows_count_keys_as_they_say() {
        is(&window(2, 1).unwrap(), 9, 11, |_, q, kv| (q - 2..=q + 1).contains(&kv));
        is(&sliding_window(3).unwrap(), 9, 9, |_, q, kv| kv <= q && kv > q - 3);
        is(&dilated(4, 2).unwrap(), 9, 9, |_, q, kv| [0, 2, 4].contains(&(q - kv).abs()));
        is(&chunked(4).unwrap(), 9, 11, |_, q, kv| q.div_euclid(4) == kv.div_euclid(4));
        is(&global_tokens(2).unwrap(), 5, 5, |_, q, kv| q.min(kv) < 2);
    }

    #[test]
    fn a_size_may_be_a_scalar_or_differ_between_batch_entries() {
        let window = sliding_window(scalar("near", 3)).unwrap();
        is(&window, 9, 9, |_, q, kv| kv <= q && kv > q - 3);
        let wider = window.map(|p| p.set_scalar("near", ScalarValue::I32(5))).unwrap();
        is(&wider, 9, 9, |_, q, kv| kv <= q && kv > q - 5);
        let sizes = Buffer::vector("sizes", vec![2, 4]);
        let per_entry = chunked(sizes.at([expr::b()])).unwrap();
        is(&per_entry, 9, 9, |b, q, kv| q / [2, 4][b as usize] == kv / [2, 4][b as usize]);
    }

    #[test]
    fn a_prefix_is_one_number_or_one_a_sequence() {
        is(&prefix_lm(3).unwrap(), 6, 6, |_, q, kv| kv < 3 || kv <= q);
        let per = prefix_lm_per_batch(&Buffer::vector("p", vec![1, 4])).unwrap();
        is(&per, 6, 6, |b, q, kv| kv < [1, 4][b as usize] || kv <= q);
    }

    #[test]
    fn documents_come_as_ids_lengths_or_offsets() {
        let ids = [0, 0, 1, 1, 1, 3];
        let formula = |_, q: i32, kv: i32| ids[q as usize] == ids[kv as usize];
        is(&document(&Buffer::vector("doc", ids.to_vec())).unwrap(), 6, 6, formula);
        is(&document_lengths(&[2, 3, 0, 1]).unwrap(), 6, 6, formula);
        is(&document_offsets(&[0, 2, 5, 5, 6]).unwrap(), 6, 6, formula);
        // Ids are made for the positions that are looked at, and lengths checked before any are.
        let few = document_lengths_within(&[2, 3, 0, i32::MAX - 5], 4).unwrap();
        is(&few, 4, 4, formula);
        assert_eq!(few.program().graph().buffers()[0].elems(), 4);
        assert!(document_lengths(&[i32::MAX, 1]).is_err());
        let rows = Buffer::new("doc", &[2, 3], vec![0, 0, 1, 5, 6, 6]).unwrap();
        let table = [[0, 0, 1], [5, 6, 6]];
        is(&document(&rows).unwrap(), 3, 3, |b, q, kv| {
            table[b as usize][q as usize] == table[b as usize][kv as usize]
        });
        let keys = Buffer::vector("kv_doc", vec![1, 0]);
        let pair = document_pair(&Buffer::vector("doc", ids.to_vec()), &keys).unwrap();
        is(&pair, 6, 2, |_, q, kv| ids[q as usize] == [1, 0][kv as usize]);
    }

    #[test]
    fn a_neighbourhood_keeps_its_size_at_the_edges() {
        let line = neighbourhood(&[7], &[3]).unwrap();
        is(&line, 7, 7, |_, q, kv| (q.clamp(1, 5) - kv).abs() <= 1);
        let near =
            |q: i32, kv: i32, n: i32, k: i32| (q.clamp(k / 2, n - 1 - k / 2) - kv).abs() <= k / 2;
        let plane = neighbourhood(&[3, 5], &[1, 3]).unwrap();
        is(&plane, 15, 15, |_, q, kv| near(q / 5, kv / 5, 3, 1) && near(q % 5, kv % 5, 5, 3));
        let space = neighbourhood(&[2, 3, 4], &[1, 3, 3]).unwrap();
        is(&space, 24, 24, |_, q, kv| {
            near(q / 12, kv / 12, 2, 1)
                && near(q / 4 % 3, kv / 4 % 3, 3, 3)
                && near(q % 4, kv % 4, 4, 3)
        });
    }

    #[test]
    fn an_argument_that_cannot_be_is_refused_with_the_reason() {
        for (error, says) in [
            (window(-1, 0), "window: left must be at least 0, not -1"),
            (window(0, expr::scalar("w", -3)), "window: right must be at least 0, not -3"),
            (sliding_window(0), "sliding_window: size must be at least 1, not 0"),
            (sliding_window(Expr::from(3) - 3), "sliding_window: size must be at least 1, not 0"),
            (prefix_lm(-2), "prefix: prefix must be at least 0, not -2"),
            (chunked(0), "chunked: chunk must be at least 1, not 0"),
            (dilated(-1, 1), "dilated: reach must be at least 0, not -1"),
            (dilated(4, -1), "dilated: step must be at least 1, not -1"),
            (global_tokens(-1), "global_tokens: tokens must be at least 0, not -1"),
            (
                document(&Buffer::new("doc", &[1, 1, 2], vec![0; 2]).unwrap()),
                "document: `doc` must have 1 or 2 axes, but its shape is [1, 1, 2]",
            ),
            (document_offsets(&[0, 3, 2]), "document: offset 2 falls from 3 to 2"),
            (document_offsets(&[]), "document: offsets must start at 0"),
            (document_lengths(&[1, -1]), "document: length 1 is negative: -1"),
            (neighbourhood(&[8], &[4]), "neighbourhood: a kernel is odd"),
            (neighbourhood(&[8], &[3, 3]), "neighbourhood: 1 to 3 sizes"),
        ] {
            let text = error.expect_err(says).to_string();
            assert!(text.starts_with(says), "{text}");
        }
    }
}
