//! Rotation of query and key heads in a packed projection.

use rayon::prelude::*;

use super::TASK;
use super::level::for_each_level;
use crate::backend::{PackedHeads, Rotation};
use crate::config::RopePairing;
use crate::rope::RopeTable;

pub(super) fn rotate(
    heads: PackedHeads,
    pairing: RopePairing,
    table: &RopeTable,
    positions: &[i32],
    rotation: Rotation,
    qkv: &mut [f32],
) {
    let width = heads.width();
    let sign = if rotation == Rotation::Forward { 1.0 } else { -1.0 };
    qkv.par_chunks_mut(width * TASK).zip(positions.par_chunks(TASK)).for_each(|(rows, ps)| {
        for (row, &position) in rows.chunks_exact_mut(width).zip(ps) {
            let (cos, sin) = table.at(position);
            match pairing {
                RopePairing::HalfSplit => rotate_halves(heads, cos, sin, sign, row),
                RopePairing::Interleaved => rotate_pairs(heads, cos, sin, sign, row),
            }
        }
    });
}

for_each_level! {
    rotate_halves / rotate_halves_on = halves_body(
        heads: PackedHeads,
        cos: &[f32],
        sin: &[f32],
        sign: f32,
        row: &mut [f32],
    )
}

#[inline(always)]
fn halves_body(heads: PackedHeads, cos: &[f32], sin: &[f32], sign: f32, row: &mut [f32]) {
    let turned = heads.heads_q + heads.heads_kv;
    for head in row.chunks_exact_mut(heads.dim).take(turned) {
        let (xs, ys) = head.split_at_mut(cos.len());
        for (((x, y), c), s) in xs.iter_mut().zip(ys).zip(cos).zip(sin) {
            let (a, b, s) = (*x, *y, s * sign);
            (*x, *y) = (a * c - b * s, b * c + a * s);
        }
    }
}

for_each_level! {
    rotate_pairs / rotate_pairs_on = pairs_body(
        heads: PackedHeads,
        cos: &[f32],
        sin: &[f32],
        sign: f32,
        row: &mut [f32],
    )
}

#[inline(always)]
fn pairs_body(heads: PackedHeads, cos: &[f32], sin: &[f32], sign: f32, row: &mut [f32]) {
    let turned = heads.heads_q + heads.heads_kv;
    for head in row.chunks_exact_mut(heads.dim).take(turned) {
        for ((pair, c), s) in head.chunks_exact_mut(2).zip(cos).zip(sin) {
            let (a, b, s) = (pair[0], pair[1], s * sign);
            (pair[0], pair[1]) = (a * c - b * s, b * c + a * s);
        }
    }
}
