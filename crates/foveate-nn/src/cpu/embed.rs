//! Embedding: a gather, and a scatter-add in token order.

use rayon::prelude::*;

use super::TASK;

pub(super) fn gather(tokens: &[u32], table: &[f32], width: usize, out: &mut [f32]) {
    out.par_chunks_mut(width * TASK).zip(tokens.par_chunks(TASK)).for_each(|(rows, tokens)| {
        for (row, &token) in rows.chunks_exact_mut(width).zip(tokens) {
            row.copy_from_slice(&table[token as usize * width..][..width]);
        }
    });
}

/// Each task owns some rows of the table and reads all tokens, so that every row is summed in
/// token order by one thread.
pub(super) fn scatter_add(tokens: &[u32], d_out: &[f32], width: usize, d_table: &mut [f32]) {
    let rows = d_table.len() / width;
    let owned = rows.div_ceil(16);
    d_table.par_chunks_mut(owned * width).enumerate().for_each(|(task, part)| {
        let first = task * owned;
        for (&token, d) in tokens.iter().zip(d_out.chunks_exact(width)) {
            let Some(row) = (token as usize).checked_sub(first) else { continue };
            if let Some(into) = part.get_mut(row * width..(row + 1) * width) {
                into.iter_mut().zip(d).for_each(|(a, b)| *a += b);
            }
        }
    });
}
