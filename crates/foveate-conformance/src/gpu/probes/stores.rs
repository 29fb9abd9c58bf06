//! Bulk reductions, matrices that are stored, and what lanes exchange.

use std::sync::Arc;

use foveate_cuda::compile::config::{Elem, Kernel};
use foveate_gpu::cubin::Opcode;
use foveate_tensor::random::mix;

use super::layouts::stored_transposed;
use super::products::config;
use super::{Numbers, Probe, source};

const TEXT: &str = include_str!("stores.cu");
/// Of smem; no multiple of the bytes of a warp's reads.
const SHARED: usize = 2064;
const WORDS: usize = SHARED / 4;
const ROUNDS: usize = 4;
const CTAS: usize = 8;
const THREADS: usize = 128;

fn bytes(words: &[u32]) -> Vec<u8> {
    words.iter().flat_map(|word| word.to_le_bytes()).collect()
}

/// What CTAs add lies between words that nobody writes.
fn rounds(text: &Arc<str>) -> Probe {
    const BESIDE: usize = 4;
    let before = |i: usize| (7 * i) as f32;
    let all = BESIDE + WORDS + BESIDE;
    let added = |i: usize| -> f32 {
        let each =
            (0..CTAS).flat_map(|cta| (0..ROUNDS).map(move |round| (cta + 1) * 1000 + round * 100));
        each.map(|sum| (sum + i % 97) as f32).sum()
    };
    let expected = (0..all).map(|i| match i.checked_sub(BESIDE).filter(|&i| i < WORDS) {
        Some(word) => before(i) + added(word),
        None => before(i),
    });
    Probe {
        ctas: CTAS as u32,
        before: (0..all).map(|i| before(i).to_bits()).collect(),
        expected: Numbers::Floats(expected.collect()),
        instructions: vec![(Opcode::Ublkred, 1)],
        ..Probe::new("bulk reductions of CTAs at once".into(), text, "add_rounds", SHARED)
    }
}

/// Numbers of which another order of the sum rounds otherwise.
fn in_order(text: &Arc<str>) -> Probe {
    let number = |rank: usize, i: usize| {
        let bits = mix((rank * WORDS + i) as u64);
        let size = (bits % 1000 + 1) as f32 + 0.125;
        let large = if bits >> 20 & 1 == 0 { 1.0 } else { 16_777_216.0 };
        if bits >> 21 & 1 == 0 { size * large } else { -size * large }
    };
    let sum = |i: usize| (0..CTAS).fold(0f32, |sum, rank| sum + number(rank, i)).to_bits();
    let numbers = (0..CTAS).flat_map(|rank| (0..WORDS).map(move |i| number(rank, i).to_bits()));
    Probe {
        ctas: CTAS as u32,
        input: bytes(&numbers.collect::<Vec<_>>()),
        before: vec![0],
        expected: Numbers::Words((0..WORDS).map(sum).chain([CTAS as u32]).collect()),
        instructions: vec![(Opcode::Ublkred, 1)],
        ..Probe::new("bulk reductions in the order of a count".into(), text, "add_in_order", SHARED)
    }
}

/// Rows of four matrices go to places of their own, none beside the next one.
fn matrices(text: &Arc<str>) -> Probe {
    let place = |lane: usize| (lane * 7 + 3) % 32 * 48;
    let half =
        |lane: usize, register: usize, half: usize| (lane * 8 + register * 2 + half + 1) as u16;
    let word = |lane, register| {
        u32::from(half(lane, register, 0)) | u32::from(half(lane, register, 1)) << 16
    };
    let lane = |lane: usize| {
        [place(lane) as u32, word(lane, 0), word(lane, 1), word(lane, 2), word(lane, 3)]
    };
    let mut smem = vec![0xff; SHARED];
    for ((lane, register, which), at) in stored_transposed(place) {
        smem[at..at + 2].copy_from_slice(&half(lane, register, which).to_le_bytes());
    }
    let words = smem.chunks_exact(4).map(|b| u32::from_le_bytes(b.try_into().expect("four")));
    Probe {
        threads: 32,
        input: bytes(&(0..32).flat_map(lane).collect::<Vec<_>>()),
        expected: Numbers::Words(words.collect()),
        instructions: vec![(Opcode::Stsm, 1)],
        ..Probe::new("matrices stored transposed".into(), text, "matrices", SHARED)
    }
}

fn lanes(text: &Arc<str>) -> Probe {
    const NUMBERS: usize = 9;
    let thread = |thread: usize| -> [u32; NUMBERS] {
        let (quad, lane) = (thread / 4 * 4, thread % 4);
        // Lane l has chunk l: word l of each lane of its quad.
        let word = |of: usize| ((quad + of) * 4 + lane) as u32;
        let number = -((thread + 1) as f32);
        let (warpgroup, warp) = (thread / 128, thread / 32 % 4);
        let (stays, stored) = (7, number.to_bits());
        [word(0), word(1), word(2), word(3), 1, warpgroup as u32, warp as u32, stays, stored]
    };
    let what = [
        "chunk",
        "chunk",
        "chunk",
        "chunk",
        "elected lanes",
        "warpgroup",
        "warp",
        "kept",
        "stored",
    ];
    Probe {
        threads: 2 * THREADS as u32,
        expected: Numbers::Words((0..2 * THREADS).flat_map(thread).collect()),
        place: Box::new(move |i| format!("{} of thread {}", what[i % NUMBERS], i / NUMBERS)),
        ..Probe::new("what lanes exchange, elect and keep".into(), text, "lanes", SHARED)
    }
}

pub fn all() -> Vec<Probe> {
    let config = config(Kernel::Forward, Elem::Bf16, [64; 2], [128, 64]);
    let text = source(&config, SHARED, &[], TEXT);
    vec![rounds(&text), in_order(&text), matrices(&text), lanes(&text)]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn another_order_of_the_sum_has_other_bits() {
        let text = "".into();
        let Probe { input, expected: Numbers::Words(expected), .. } = in_order(&text) else {
            unreachable!()
        };
        let number = |rank: usize, i: usize| {
            f32::from_le_bytes(input[4 * (rank * WORDS + i)..][..4].try_into().expect("four"))
        };
        let orders = [
            (0..CTAS).rev().collect::<Vec<_>>(),
            vec![0, 2, 1, 3, 4, 5, 6, 7],
            vec![0, 1, 2, 3, 4, 5, 7, 6],
        ];
        for order in orders {
            let sum =
                |i: usize| order.iter().fold(0f32, |sum, &rank| sum + number(rank, i)).to_bits();
            let differ = (0..WORDS).filter(|&i| sum(i) != expected[i]).count();
            assert!(differ > WORDS / 20, "{order:?}: {differ} of {WORDS} sums differ");
        }
    }
}
