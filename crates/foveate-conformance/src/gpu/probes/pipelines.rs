//! Rings of stages, turns at named barriers, and registers that roles deal out.

use std::sync::Arc;

use foveate_cuda::compile::config::{Elem, Kernel};
use foveate_gpu::cubin::Opcode;
use foveate_gpu::driver::Swizzle;
use foveate_gpu::tma::{MapAxes, MapTile};
use foveate_tensor::random::mix;
use foveate_tensor::{DType, Layout};

use super::layouts::{SWIZZLE_128, accumulator};
use super::products::{Factors, Image, bits, config};
use super::{Mapped, Numbers, Probe, source};

const PIPELINES: &str = include_str!("pipelines.cu");
const ROLES: &str = include_str!("roles.cu");

/// Those of pipelines.cu.
const TURNS: usize = 1000;
const STAGES: usize = 3;
const ROWS: usize = 16;
const COLUMNS: usize = 64;
const THREADS: usize = 128;
const CONSUMERS: usize = 2;
/// Words of a stage that a thread reads, and accumulators.
const WORDS: usize = ROWS * COLUMNS / 2 / THREADS;
const HELD: usize = COLUMNS / 2;

/// Element `column` of a row of the ring's tensor.
fn element(row: usize, column: usize) -> i32 {
    (mix((row * COLUMNS + column) as u64) % 15 + 1) as i32
}

/// What each thread of a consumer has read: all words in order, and the sums of products.
fn of_ring() -> Vec<u32> {
    let mut seen = vec![[0u32; WORDS]; THREADS];
    let mut sums = [0i32; COLUMNS];
    for turn in 0..TURNS {
        let mut stage = vec![0u8; ROWS * COLUMNS * 2];
        for (row, column) in (0..ROWS).flat_map(|row| (0..COLUMNS).map(move |c| (row, c))) {
            let value = element(turn * ROWS + row, column);
            let at = SWIZZLE_128.copied(0, ROWS, row, column);
            stage[at..at + 2].copy_from_slice(&bits(Elem::Bf16, value));
            sums[column] += value * (1 + turn as i32 % 7);
        }
        for (thread, seen) in seen.iter_mut().enumerate() {
            for (i, seen) in seen.iter_mut().enumerate() {
                let word = &stage[4 * (i * THREADS + thread)..][..4];
                let word = u32::from_le_bytes(word.try_into().expect("four"));
                *seen = seen.wrapping_mul(31).wrapping_add(word);
            }
        }
    }
    let thread = |(thread, seen): (usize, &[u32; WORDS])| {
        let sum = |i| (sums[accumulator(thread, i).1] as f32).to_bits();
        seen.iter().copied().chain((0..HELD).map(sum)).collect::<Vec<_>>()
    };
    let consumer: Vec<u32> = seen.iter().enumerate().flat_map(thread).collect();
    consumer.repeat(CONSUMERS)
}

fn ring(text: &Arc<str>, shared: usize, copied: bool) -> Probe {
    let elements = (0..TURNS * ROWS).flat_map(|row| (0..COLUMNS).map(move |column| (row, column)));
    let bytes: Vec<u8> =
        elements.flat_map(|(row, column)| bits(Elem::Bf16, element(row, column))).collect();
    let (entry, by, filled) = match copied {
        true => ("ring_of_copies", "cp.async", Opcode::Ldgsts),
        false => ("ring_of_loads", "TMA", Opcode::Utmaldg),
    };
    let tile = MapTile { axes: MapAxes::Heads, rows: ROWS as u32, swizzle: Swizzle::Bytes128 };
    let layout = Layout::bhsd(1, 1, TURNS * ROWS, COLUMNS);
    let mapped = Mapped { dtype: DType::BF16, layout, tile, bytes: bytes.clone() };
    let place = |i: usize| {
        let (thread, number) = (i / (WORDS + HELD), i % (WORDS + HELD));
        let what = if number < WORDS { "words that were read" } else { "sums of products" };
        format!("thread {} of consumer {}, {what}", thread % THREADS, thread / THREADS)
    };
    Probe {
        threads: 384,
        mapped: (!copied).then_some(mapped),
        input: if copied { bytes } else { Vec::new() },
        expected: Numbers::Words(of_ring()),
        place: Box::new(place),
        instructions: vec![
            (filled, 1),
            (Opcode::Hgmma, 1),
            (Opcode::SyncsExch, 2),
            (Opcode::SyncsArrive, 1),
            (Opcode::SyncsPhasechk, 2),
        ],
        ..Probe::new(format!("a ring of {TURNS} turns by {by}"), text, entry, shared)
    }
}

/// The words after all turns: each was handed on to the thread beside.
fn of_turns(mut words: Vec<u32>) -> Vec<u32> {
    for (turn, consumer) in (0..TURNS).flat_map(|turn| (0..CONSUMERS).map(move |c| (turn, c))) {
        let mut after = words.clone();
        for (thread, before) in words.iter().enumerate() {
            let added = (consumer + 1) * (turn + 1) + thread;
            after[(thread + 1) % THREADS] = before.wrapping_mul(5).wrapping_add(added as u32);
        }
        words = after;
    }
    words
}

fn turns(text: &Arc<str>, shared: usize) -> Probe {
    let words: Vec<u32> = (0..THREADS).map(|i| mix(i as u64) as u32).collect();
    Probe {
        threads: 384,
        input: words.iter().flat_map(|word| word.to_le_bytes()).collect(),
        expected: Numbers::Words(of_turns(words)),
        instructions: vec![(Opcode::Bar, 5)],
        ..Probe::new(format!("{TURNS} turns at named barriers"), text, "turns", shared)
    }
}

/// Products whose accumulators need more registers than a launch gives.
fn roles() -> Probe {
    const DIM: usize = 64;
    const KEYS: usize = 96;
    const DIM_V: usize = 256;
    let (scores, out) =
        (Factors::new(Elem::Bf16, KEYS, DIM), Factors::new(Elem::Bf16, DIM_V, KEYS));
    let mut image = Image::new();
    image.tile(Elem::Bf16, SWIZZLE_128, [64, DIM], |row, k| scores.a[row][k]);
    image.tile(Elem::Bf16, SWIZZLE_128, [KEYS, DIM], |row, k| scores.b[row][k]);
    image.tile(Elem::Bf16, SWIZZLE_128, [KEYS, DIM_V], |k, column| out.b[column][k]);
    let shared = image.0.len();
    let config = config(Kernel::Forward, Elem::Bf16, [DIM, DIM_V], [128, KEYS]);
    let text = source(&config, shared, &[], ROLES);
    let consumer = [scores.result(false), out.result(true)].concat();
    let producer = (0..THREADS).map(|thread| (thread * 3 + 1) as f32);
    let each = consumer.len();
    let place = move |i: usize| match i / each {
        CONSUMERS => format!("thread {} of the producer", i % each),
        consumer => format!("accumulator {} of consumer {consumer}", i % each),
    };
    Probe {
        threads: 384,
        input: [image.0, out.left_registers()].concat(),
        expected: Numbers::Floats(consumer.repeat(CONSUMERS).into_iter().chain(producer).collect()),
        place: Box::new(place),
        instructions: vec![(Opcode::Usetmaxreg, 2), (Opcode::Hgmma, (DIM + KEYS) as u32 / 16)],
        registers: vec![40, 232],
        ..Probe::new("registers that roles deal out".into(), &text, "roles", shared)
    }
}

pub fn all() -> Vec<Probe> {
    let shared = STAGES * ROWS * COLUMNS * 2 + 1024;
    let config = config(Kernel::Forward, Elem::Bf16, [COLUMNS; 2], [128, 64]);
    let text = source(&config, shared, &[], PIPELINES);
    vec![ring(&text, shared, false), ring(&text, shared, true), turns(&text, shared), roles()]
}
