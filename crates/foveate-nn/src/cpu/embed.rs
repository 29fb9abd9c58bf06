//! Embedding: a gather, and a sum in token order. A table may begin at another id than 0, and end before
//! the last.

use rayon::prelude::*;

use super::TASK;

/// The rows of `table`, the first of which is that of id `first`; 0 for tokens that it has none of.
pub(super) fn gather(
    tokens: &[u32],
    first: usize,
    table: &[f32],
    width: usize,
    scale: f32,
    out: &mut [f32],
) {
    out.par_chunks_mut(width * TASK).zip(tokens.par_chunks(TASK)).for_each(|(rows, tokens)| {
        for (row, &token) in rows.chunks_exact_mut(width).zip(tokens) {
            let at = (token as usize).checked_sub(first).map(|row| row * width);
            match at.and_then(|at| table.get(at..at + width)) {
                Some(from) => row.iter_mut().zip(from).for_each(|(x, w)| *x = w * scale),
                None => row.fill(0.0),
            }
        }
    });
}

/// Each task owns some rows of the table and finds their tokens in `order`, so that every row is
/// summed in token order by one thread. The table's first row is that of id `first_id`.
pub(super) fn scatter_add(
    tokens: &[u32],
    order: &[u32],
    first_id: usize,
    d_out: &[f32],
    width: usize,
    scale: f32,
    d_table: &mut [f32],
) {
    let owned = (d_table.len() / width).div_ceil(16);
    d_table.par_chunks_mut(owned * width).enumerate().for_each(|(task, part)| {
        let first = first_id + task * owned;
        let from = order.partition_point(|&t| (tokens[t as usize] as usize) < first);
        for &t in &order[from..] {
            let row = tokens[t as usize] as usize - first;
            let Some(into) = part.get_mut(row * width..(row + 1) * width) else { break };
            let d = &d_out[t as usize * width..][..width];
            into.iter_mut().zip(d).for_each(|(a, b)| *a += b * scale);
        }
    });
}
