//! The optimiser in every state, the norm and the factor.

use foveate_gpu::abi::Abi;

use super::*;
use crate::optimizer::{
    CONSTANTS_LEN, Factor, Piece, Pieces, Rule, Squares, StepConstants, TOTALS_LEN, Totals, Update,
    parts,
};
use foveate_nn::moments::{self, BLOCK, Moment};

const BETAS: [f64; 2] = [0.9, 0.95];
const EPS: f64 = 1e-8;
const DECAY: f64 = 0.1;
const ADAMW: Rule = Rule::AdamW { betas: [0.9, 0.95], eps: EPS as f32 };
/// More than a chunk, and no whole vectors at its end.
const ELEMS: usize = 4096 + 517;

/// An arena with the state of its parameters.
struct Arena {
    weights: Matrix,
    remainders: Option<Memory>,
    gradients: Matrix,
    means: Matrix,
    squares: Matrix,
    constants: Memory,
    totals: Memory,
    /// Sum of the losses.
    loss: f64,
    /// Whether a step was skipped.
    stopped: Memory,
    rule: Rule,
    /// Which weight the first gradient is of.
    first_gradient: usize,
    codes: bool,
}

fn f32_or_bf16(is_bf16: bool) -> Placing {
    Placing::dense(if is_bf16 { DType::BF16 } else { DType::F32 })
}

impl Arena {
    /// Weights, zero moments.
    fn new(masters: &[f32], kept: &str, gradients: bool, moments: bool) -> Self {
        let shape = [1, masters.len()];
        let zeros = vec![0.0; masters.len()];
        let values: Vec<f64> = masters.iter().map(|&x| f64::from(x)).collect();
        let (weights, remainders) = match kept {
            "f32" => (f32_or_bf16(false).matrix(shape, &values), None),
            "stochastic" => (f32_or_bf16(true).matrix(shape, &values), None),
            _ => {
                let split: Vec<(u16, u16)> = masters.iter().map(|&x| split(x)).collect();
                let mut weights = f32_or_bf16(true).empty(shape);
                let high: Vec<u16> = split.iter().map(|s| s.0).collect();
                let low: Vec<u16> = split.iter().map(|s| s.1).collect();
                weights.memory.bytes().copy_from_slice(bytemuck::cast_slice(&high));
                (weights, Some(Memory::of(&low)))
            }
        };
        Self {
            weights,
            remainders,
            gradients: f32_or_bf16(gradients).empty(shape),
            means: f32_or_bf16(moments).matrix(shape, &zeros),
            squares: f32_or_bf16(moments).matrix(shape, &zeros),
            constants: Memory::new(8 * CONSTANTS_LEN, 0),
            totals: Memory::new(8 * TOTALS_LEN, 0),
            loss: 3.0,
            stopped: Memory::of(&[0u64]),
            rule: ADAMW,
            first_gradient: 0,
            codes: false,
        }
    }

    /// With moments of 8 bits, 0.
    fn with_codes(self) -> Self {
        let words = moments::words(self.weights.shape[1]);
        let zeros = || f32_or_bf16(false).matrix([1, words], &vec![0.0; words]);
        Self { means: zeros(), squares: zeros(), codes: true, ..self }
    }

    /// The numbers of a moment of 8 bits.
    fn decoded(&self, moment: Moment) -> Vec<f64> {
        let kept = if moment == Moment::Mean { &self.means } else { &self.squares };
        let (words, mut values): (Vec<f32>, _) =
            (kept.memory.read(), vec![f32::NAN; self.weights.shape[1]]);
        moments::read(moment, &words, values.len(), 0, &mut values);
        values.into_iter().map(f64::from).collect()
    }

    /// The masters, or the weights where there is nothing else.
    fn masters(&self) -> Vec<f32> {
        let Some(remainders) = &self.remainders else {
            return self.weights.values().iter().map(|&x| x as f32).collect();
        };
        let (high, low): (Vec<u16>, Vec<i16>) = (self.weights.memory.read(), remainders.read());
        let bits = |(h, l): (u16, i16)| (u32::from(h) << 16).wrapping_add(i32::from(l) as u32);
        high.into_iter().zip(low).map(|pair| f32::from_bits(bits(pair))).collect()
    }

    /// Norm, factor and update; false without a compiler.
    fn step(&mut self, constants: StepConstants, labelled: i64, pieces: &[Piece]) -> bool {
        let elems = self.weights.shape[1];
        self.constants.bytes().copy_from_slice(&constants.bytes());
        let totals = Totals { loss: self.loss.to_bits(), labelled, ..Totals::default() };
        self.totals.bytes().copy_from_slice(&totals.bytes());
        let gradients = self.gradients.shape[1];
        let partial = Memory::new(8 * parts(gradients), 0);
        let partial_len = [parts(gradients)];
        let partial_at = partial.array(ElementType::F64, &partial_len);
        let constants = self.constants.array(ElementType::F64, &[CONSTANTS_LEN]);
        let totals = self.totals.array(ElementType::F64, &[TOTALS_LEN]);
        let squares = Squares { gradients: self.gradients.vector(), partial: partial_at };
        let stopped = self.stopped.array(ElementType::F64, &[1]);
        let factor = Factor { partial: partial_at, constants, totals, stopped, more: false };
        let pieces = Pieces::new(pieces).unwrap();
        let (table, table_len) = (Memory::of(&pieces.bytes()), [pieces.len_f64()]);
        let remainders_len = [elems];
        let update = Update {
            weights: self.weights.vector(),
            remainders: self
                .remainders
                .as_ref()
                .map(|r| r.array(ElementType::I16, &remainders_len)),
            gradients: self.gradients.vector(),
            first_gradient: self.first_gradient,
            means: self.means.vector(),
            squares: (self.rule == ADAMW).then(|| self.squares.vector()),
            codes: self.codes,
            trained: elems,
            pieces: &pieces,
            piece_table: table.array(ElementType::F64, &table_len),
            constants,
            totals,
            rule: self.rule,
            weight_decay: DECAY as f32,
        };
        run(&squares) && run(&factor) && run(&update)
    }

    fn factor(&self) -> (f64, f32, i32) {
        let [.., squares, last] = self.totals.read::<u64>()[..] else { panic!("totals") };
        (f64::from_bits(squares), f32::from_bits(last as u32), (last >> 32) as i32)
    }
}

/// A master as the weight rounded to the nearest, ties away from zero, and the rest.
fn split(master: f32) -> (u16, u16) {
    let bits = master.to_bits();
    ((bits.wrapping_add(0x8000) >> 16) as u16, bits as u16)
}

fn pieces() -> Vec<Piece> {
    vec![
        Piece { range: 4104..ELEMS, origin: 4104, rate: 0.5, decay: 0.0 },
        Piece { range: 0..4100, origin: 0, rate: 1.0, decay: 1.0 },
    ]
}

/// Masters and moments of f32 follow the formula in f64; what no piece has stays.
#[test]
fn exact_states_follow_the_formula_in_f64() {
    let mut random = Random::new(11);
    let masters: Vec<f32> = (0..ELEMS).map(|_| (random.unit() * 2.0 - 1.0) as f32).collect();
    for (kept, gradients) in [("f32", false), ("master", false), ("master", true)] {
        let mut arena = Arena::new(&masters, kept, gradients, false);
        let mut theta: Vec<f64> = masters.iter().map(|&x| f64::from(x)).collect();
        let (mut m, mut v) = (vec![0.0f64; ELEMS], vec![0.0f64; ELEMS]);
        for step in 1..=4u64 {
            let (rate, clip, labelled) =
                (1e-2 / step as f64, if step == 2 { 0.01 } else { 0.0 }, 37);
            arena.gradients = f32_or_bf16(gradients).random(
                [1, ELEMS],
                &mut random,
                if step == 3 { 1e-4 } else { 5.0 },
            );
            let constants = StepConstants::new(step, 9, rate, BETAS, clip);
            if !arena.step(constants, labelled, &pieces()) {
                return;
            }
            let g = arena.gradients.values();
            let norm = g.iter().map(|g| g * g).sum::<f64>().sqrt() / labelled as f64;
            let factor = if clip > 0.0 { clip / norm } else { 1.0 } / labelled as f64;
            let (squares, found, skipped) = arena.factor();
            assert!((squares.sqrt() / labelled as f64 / norm - 1.0).abs() < 1e-6);
            assert!((f64::from(found) / factor - 1.0).abs() < 1e-6 && skipped == 0);
            for Piece { range, rate: share, decay, .. } in pieces() {
                for i in range {
                    let (rate, g) = (rate * f64::from(share), g[i] * factor);
                    m[i] = BETAS[0] * m[i] + (1.0 - BETAS[0]) * g;
                    v[i] = BETAS[1] * v[i] + (1.0 - BETAS[1]) * g * g;
                    let mean = m[i] / (1.0 - BETAS[0].powi(step as i32));
                    let square = v[i] / (1.0 - BETAS[1].powi(step as i32));
                    let decayed = DECAY * f64::from(decay) * theta[i];
                    theta[i] -= rate * (mean / (square.sqrt() + EPS) + decayed);
                }
            }
        }
        let got: Vec<f64> = arena.masters().iter().map(|&x| f64::from(x)).collect();
        close("masters", &got, &theta, 2e-6);
        close("means", &arena.means.values(), &m, 2e-6);
        close("squares", &arena.squares.values(), &v, 2e-6);
        assert_eq!(arena.masters()[4100..4104], masters[4100..4104]);
        if kept == "master" {
            let nearest: Vec<u16> = arena.masters().iter().map(|&x| split(x).0).collect();
            assert_eq!(arena.weights.memory.read::<u16>(), nearest);
        }
    }
}

/// Of every second part of the arena, whose gradients alone are there.
#[test]
fn momentum_follows_the_formula_on_a_part_of_the_gradients() {
    let mut random = Random::new(14);
    let masters: Vec<f32> = (0..ELEMS).map(|_| (random.unit() * 2.0 - 1.0) as f32).collect();
    let first = 1024;
    let pieces = [
        Piece { range: first..2000, origin: first, rate: 1.0, decay: 1.0 },
        Piece { range: 2000..ELEMS, origin: 2000, rate: 0.5, decay: 0.0 },
    ];
    for codes in [false, true] {
        let mut arena = Arena::new(&masters, "master", false, false);
        arena = if codes { arena.with_codes() } else { arena };
        (arena.rule, arena.first_gradient) = (Rule::Momentum(0.9), first);
        let mut theta: Vec<f64> = masters.iter().map(|&x| f64::from(x)).collect();
        let mut m = vec![0.0f64; ELEMS];
        for step in 1..=4u64 {
            arena.gradients = f32_or_bf16(false).random([1, ELEMS - first], &mut random, 5.0);
            let constants = StepConstants::of_momentum(step, 9, 1e-2, 0.0);
            if !arena.step(constants, 2, &pieces) {
                return;
            }
            let g = arena.gradients.values();
            for Piece { range, rate, decay, .. } in &pieces {
                for i in range.clone() {
                    m[i] = 0.9 * m[i] + g[i - first] / 2.0;
                    let decayed = DECAY * f64::from(*decay) * theta[i];
                    theta[i] -= 1e-2 * f64::from(*rate) * (m[i] + decayed);
                }
            }
            if codes {
                m = arena.decoded(Moment::Mean);
            }
        }
        let got: Vec<f64> = arena.masters().iter().map(|&x| f64::from(x)).collect();
        close("masters", &got, &theta, 2e-6);
        if !codes {
            close("means", &arena.means.values(), &m, 2e-6);
        }
    }
}

/// A rank that has a part of the arena rounds it as one that has all of it.
#[test]
fn random_bits_are_those_of_an_elements_index_among_all_parameters() {
    let mut random = Random::new(17);
    let masters: Vec<f32> = (0..ELEMS).map(|_| (random.unit() * 2.0 - 1.0) as f32).collect();
    let first = 5 * BLOCK;
    for (kept, codes) in [("stochastic", false), ("stochastic", true), ("master", true)] {
        let arena = |masters: &[f32]| {
            let arena = Arena::new(masters, kept, false, true);
            if codes { arena.with_codes() } else { arena }
        };
        let (mut whole, mut part) = (arena(&masters), arena(&masters[first..]));
        let mut elsewhere = arena(&masters[first..]);
        for step in 1..=3u64 {
            whole.gradients = f32_or_bf16(false).random([1, ELEMS], &mut random, 5.0);
            let own = whole.gradients.values().split_off(first);
            let constants = StepConstants::new(step, 9, 1e-2, BETAS, 0.0);
            let piece = |elems, origin| Piece { range: 0..elems, origin, rate: 1.0, decay: 1.0 };
            if !whole.step(constants, 37, &[piece(ELEMS, 0)]) {
                return;
            }
            for (arena, origin) in [(&mut part, first), (&mut elsewhere, 0)] {
                arena.gradients = f32_or_bf16(false).matrix([1, ELEMS - first], &own);
                assert!(arena.step(constants, 37, &[piece(ELEMS - first, origin)]));
            }
        }
        let moments = |arena: &Arena| match codes {
            true => [Moment::Mean, Moment::Square].map(|moment| arena.decoded(moment)),
            false => [arena.means.values(), arena.squares.values()],
        };
        assert_eq!(part.masters(), whole.masters()[first..], "{kept}");
        for ((own, all), other) in
            moments(&part).iter().zip(moments(&whole)).zip(moments(&elsewhere))
        {
            assert_eq!(*own, all[first..], "{kept}");
            assert_ne!(*own, other, "{kept}: other bits at another place");
        }
    }
}

/// A step from the moments that codes hold follows the formula; the codes after it are neighbours of its
/// moments, right on average.
#[test]
fn steps_with_moments_of_8_bits_follow_the_formula_from_what_they_kept() {
    let mut random = Random::new(15);
    let masters: Vec<f32> = (0..ELEMS).map(|_| (random.unit() * 2.0 - 1.0) as f32).collect();
    for kept in ["f32", "master"] {
        let mut arena = Arena::new(&masters, kept, false, false).with_codes();
        for step in 1..=4u64 {
            let before: Vec<f64> = arena.masters().iter().map(|&x| f64::from(x)).collect();
            let (mut theta, mut m, mut v) =
                (before.clone(), arena.decoded(Moment::Mean), arena.decoded(Moment::Square));
            arena.gradients = f32_or_bf16(false).random([1, ELEMS], &mut random, 5.0);
            let constants = StepConstants::new(step, 9, 1e-2, BETAS, 0.0);
            if !arena.step(constants, 37, &pieces()) {
                return;
            }
            let g = arena.gradients.values();
            for Piece { range, rate, decay, .. } in pieces() {
                for i in range {
                    let g = g[i] / 37.0;
                    m[i] = BETAS[0] * m[i] + (1.0 - BETAS[0]) * g;
                    v[i] = BETAS[1] * v[i] + (1.0 - BETAS[1]) * g * g;
                    let mean = m[i] / (1.0 - BETAS[0].powi(step as i32));
                    let square = v[i] / (1.0 - BETAS[1].powi(step as i32));
                    let decayed = DECAY * f64::from(decay) * theta[i];
                    theta[i] -= 1e-2 * f64::from(rate) * (mean / (square.sqrt() + EPS) + decayed);
                }
            }
            let got: Vec<f64> = arena.masters().iter().map(|&x| f64::from(x)).collect();
            close("masters", &got, &theta, 2e-6);
            assert_eq!(got[4100..4104], before[4100..4104]);
            for (moment, exact, share) in
                [(Moment::Mean, &m, 1.0 / 8.0), (Moment::Square, &v, 1.0 / 16.0)]
            {
                let size = |x: f64| if moment == Moment::Mean { x } else { x.sqrt() };
                let found: Vec<f64> = arena.decoded(moment).into_iter().map(size).collect();
                let exact: Vec<f64> = exact.iter().copied().map(size).collect();
                let (mut sum, mut of) = (0.0, 0.0);
                for (block, found) in found.chunks(BLOCK).enumerate() {
                    let exact = &exact[block * BLOCK..][..found.len()];
                    let most = exact.iter().fold(0.0f64, |most, x| most.max(x.abs()));
                    for (found, exact) in found.iter().zip(exact) {
                        let off = found - exact;
                        let step = share * exact.abs() + most * 2f64.powi(-17);
                        assert!(off.abs() <= step * 1.0001, "{moment:?}: {found}, not {exact}");
                        sum += off * exact.signum();
                        of += exact.abs();
                    }
                }
                assert!(sum.abs() < 2e-3 * of, "{moment:?} is {} off on average", sum / of);
            }
        }
    }
}

/// A step whose rate is 0 splits every master anew: of both signs, every 61st master of a binade, all
/// remainders of its first two bf16 numbers, and the edges.
#[test]
fn every_master_survives_being_split() {
    let binade = (0x3f80_0000u32..0x4000_0000).step_by(61);
    let edges = [0, 1, 0x7fff, 0x8000, 0x8001, 0x007f_ffff, 0x0080_0000, 0x7f7f_7fff, 0x7f7f_8000];
    let edges = edges.into_iter().chain([0x7f7f_ffff, 0x3f80_7fff, 0x3f80_8000, 0x3f80_8001]);
    let bits: Vec<u32> = binade.chain(0x3f80_0000..0x3f82_0000).chain(edges).collect();
    let masters: Vec<f32> =
        bits.iter().flat_map(|&b| [f32::from_bits(b), f32::from_bits(b | 1 << 31)]).collect();
    let mut arena = Arena::new(&masters, "master", false, false);
    arena.gradients = f32_or_bf16(false).matrix([1, masters.len()], &vec![0.0; masters.len()]);
    let constants = StepConstants::new(1, 9, 0.0, BETAS, 0.0);
    let all = Piece { range: 0..masters.len(), origin: 0, rate: 1.0, decay: 1.0 };
    if !arena.step(constants, 1, &[all]) {
        return;
    }
    let same = arena.masters().iter().zip(&masters).all(|(a, b)| a.to_bits() == b.to_bits());
    assert!(same, "a master changed");
    let nearest: Vec<u16> = masters.iter().map(|&x| split(x).0).collect();
    assert_eq!(arena.weights.memory.read::<u16>(), nearest);
}

/// A number that was rounded to bf16 in two ways that are possible: the probability of the upper one, and
/// whether it was taken. None where the number is so near to a bf16, or so small beside its `terms`, that
/// its own error decides.
fn rounding(kept: f64, exact: f64, terms: f64) -> Option<(f64, bool)> {
    let bits = (exact as f32).to_bits();
    let (cut, down) = (bits & 0xffff, f32::from_bits(bits & !0xffff));
    let up = f32::from_bits((bits & !0xffff).wrapping_add(0x1_0000));
    if !(256..0x1_0000 - 256).contains(&cut) || exact.abs() < terms / 32.0 {
        return None;
    }
    let (kept_up, kept_down) = (kept == f64::from(up), kept == f64::from(down));
    assert!(kept_up || kept_down, "{kept} is no neighbour of {exact}");
    Some((f64::from(cut) / 65536.0, kept_up))
}

/// Means, squares and weights of 16 bits are right on average, by bits that differ between seeds and
/// steps, between the three of an element, and between neighbours.
#[test]
fn what_is_rounded_stochastically_is_right_on_average_and_independent() {
    let mut random = Random::new(16);
    let elems = 4096 + 520;
    let all = [Piece { range: 0..elems, origin: 0, rate: 1.0, decay: 1.0 }];
    let masters: Vec<f32> = (0..elems).map(|_| (random.unit() * 2.0 - 1.0) as f32).collect();
    for kept in ["stochastic", "master"] {
        // Sums of deviations from what is expected, and of their variances: of the three numbers,
        // of products of two, and of neighbours one to four apart.
        let mut sums = [[0.0f64; 2]; 3 + 3 + 3 * 4];
        for seed in 0..12 {
            let mut arena = Arena::new(&masters, kept, kept == "stochastic", true);
            let (mut m, mut v) = (vec![0.0f64; elems], vec![0.0f64; elems]);
            for step in 1..=2u64 {
                let before = arena.masters();
                let gradients = f32_or_bf16(kept == "stochastic");
                arena.gradients = gradients.random([1, elems], &mut random, 5.0);
                let constants = StepConstants::new(step, seed, 1e-2, BETAS, 0.0);
                if !arena.step(constants, 1, &all) {
                    return;
                }
                let (means, squares, weights) =
                    (arena.means.values(), arena.squares.values(), arena.weights.values());
                let g = arena.gradients.values();
                let mut off = vec![[None; 3]; elems];
                for i in 0..elems {
                    let terms = m[i].abs() + g[i].abs();
                    m[i] = BETAS[0] * m[i] + (1.0 - BETAS[0]) * g[i];
                    v[i] = BETAS[1] * v[i] + (1.0 - BETAS[1]) * g[i] * g[i];
                    let mean = m[i] / (1.0 - BETAS[0].powi(step as i32));
                    let square = v[i] / (1.0 - BETAS[1].powi(step as i32));
                    let theta = f64::from(before[i]);
                    let theta = theta - 1e-2 * (mean / (square.sqrt() + EPS) + DECAY * theta);
                    off[i] = [
                        rounding(means[i], m[i], terms),
                        rounding(squares[i], v[i], v[i]),
                        // Masters are not rounded.
                        (kept == "stochastic").then(|| rounding(weights[i], theta, 1.0)).flatten(),
                    ]
                    .map(|rounded| {
                        rounded.map(|(p, up)| (f64::from(u8::from(up)) - p, p * (1.0 - p)))
                    });
                    (m[i], v[i]) = (means[i], squares[i]);
                }
                let mut add = |to: usize, factors: &[Option<(f64, f64)>]| {
                    let product =
                        factors.iter().copied().try_fold((1.0, 1.0), |product, factor| {
                            factor.map(|factor| (product.0 * factor.0, product.1 * factor.1))
                        });
                    let (deviation, variance) = product.unwrap_or_default();
                    sums[to][0] += deviation;
                    sums[to][1] += variance;
                };
                for i in 0..elems {
                    for kind in 0..3 {
                        add(kind, &[off[i][kind]]);
                        add(3 + kind, &[off[i][kind], off[i][(kind + 1) % 3]]);
                        for apart in 1..=4 {
                            if let Some(next) = off.get(i + apart) {
                                add(6 + 4 * kind + apart - 1, &[off[i][kind], next[kind]]);
                            }
                        }
                    }
                }
            }
        }
        for (number, [deviation, variance]) in sums.into_iter().enumerate() {
            // Nothing is known of masters' rounding, which there is none of.
            let known = kept == "stochastic" || !matches!(number, 2 | 4 | 5 | 14..);
            assert_eq!(variance > 1000.0, known, "{kept}, sum {number}: {variance}");
            let sigmas = deviation / variance.max(1.0).sqrt();
            assert!(sigmas.abs() < 4.5, "{kept}, sum {number} is {sigmas} sigmas off");
        }
    }
}

/// The same step has the same bits, read 8, 4 or 1 at a time and in whatever pieces; another step and
/// another seed have others.
#[test]
fn random_bits_depend_on_seed_step_and_element_alone() {
    let mut random = Random::new(17);
    let elems = 4096 + 520;
    let masters: Vec<f32> = (0..elems).map(|_| (random.unit() * 2.0 - 1.0) as f32).collect();
    let state = |step: u64, seed: u64, at: &[usize]| {
        let mut arena = Arena::new(&masters, "stochastic", true, true);
        arena.gradients = f32_or_bf16(true).random([1, elems], &mut Random::new(18), 5.0);
        let mut constants = StepConstants::new(1, 0, 1e-2, BETAS, 0.0);
        constants.random = StepConstants::new(step, seed, 0.0, BETAS, 0.0).random;
        let ends = at.iter().copied().chain([elems]);
        let starts = [0].into_iter().chain(at.iter().copied());
        let pieces: Vec<Piece> = starts
            .zip(ends)
            .map(|(start, end)| Piece { range: start..end, origin: start, rate: 1.0, decay: 1.0 })
            .collect();
        let numbers = |arena: &Arena| {
            [&arena.weights, &arena.means, &arena.squares].map(|of| of.memory.read::<u16>())
        };
        arena.step(constants, 1, &pieces).then(|| numbers(&arena))
    };
    let Some(whole) = state(1, 9, &[]) else { return };
    for at in [&[4100][..], &[4097], &[8, 1000], &[3, 5, 4096]] {
        assert_eq!(state(1, 9, at).unwrap(), whole, "cut at {at:?}");
    }
    for (step, seed) in [(2, 9), (1, 10)] {
        let other = state(step, seed, &[]).unwrap();
        for (other, whole) in other.iter().zip(&whole) {
            let changed = other.iter().zip(whole).filter(|(a, b)| a != b).count();
            assert!(changed * 5 > elems, "{changed} of {elems} changed");
        }
    }
}

/// Infinity and numbers that are none stay what they are, whatever the random bits.
#[test]
fn rounding_stochastically_keeps_infinity_and_nan() {
    let masters: Vec<f32> = (0..512)
        .map(|i| match i % 8 {
            1 => f32::NAN,
            2 => f32::INFINITY,
            3 => f32::NEG_INFINITY,
            _ => 1.0 + i as f32,
        })
        .collect();
    let mut arena = Arena::new(&masters, "stochastic", true, true);
    arena.gradients = f32_or_bf16(true).matrix([1, 512], &[1.0; 512]);
    let all = Piece { range: 0..512, origin: 0, rate: 1.0, decay: 1.0 };
    if !arena.step(StepConstants::new(1, 9, 1e-2, BETAS, 0.0), 1, &[all]) {
        return;
    }
    for (got, master) in arena.masters().iter().zip(&masters) {
        let kept = if master.is_finite() {
            (got / master - 1.0).abs() < 0.02
        } else {
            got.is_nan() == master.is_nan() && (got == master || got.is_nan())
        };
        assert!(kept, "{master} became {got}");
    }
}

/// A gradient or a loss that is not finite: nothing is updated by that step nor by one behind it, until the host
/// has read of it, and the totals say so.
#[test]
fn a_step_that_is_not_finite_updates_nothing_and_neither_does_the_next() {
    let (nan, infinity) = (f64::NAN, f64::INFINITY);
    for (gradient, loss) in
        [(nan, 2.0), (infinity, 2.0), (1.0, nan), (1.0, infinity), (1.0, -infinity)]
    {
        let masters = vec![0.5f32; ELEMS];
        let mut arena = Arena::new(&masters, "master", false, false);
        let mut gradients = vec![1.0; ELEMS];
        let constants = |step| StepConstants::new(step, 9, 0.1, BETAS, 1.0);
        for (number, (gradient, loss)) in [(gradient, loss), (1.0, 2.0)].into_iter().enumerate() {
            gradients[4500] = gradient;
            arena.gradients = f32_or_bf16(false).matrix([1, ELEMS], &gradients);
            arena.loss = loss;
            if !arena.step(constants(1 + number as u64), 4, &pieces()) {
                return;
            }
            assert_eq!(arena.factor().2, 1, "step {number} behind {gradient}, {loss}");
            assert_eq!(arena.masters(), masters);
            assert_eq!(arena.means.values(), vec![0.0; ELEMS]);
        }
        arena.stopped = Memory::of(&[0u64]);
        assert!(arena.step(constants(2), 4, &pieces()));
        assert_eq!(arena.factor().2, 0);
        assert_ne!(arena.masters(), masters);
    }
}

#[test]
fn pieces_that_overlap_or_end_late_are_refused() {
    let piece =
        |range: std::ops::Range<usize>| Piece { origin: range.start, range, rate: 1.0, decay: 1.0 };
    let overlap = Pieces::new(&[piece(0..8), piece(4..12)]).unwrap_err();
    assert_eq!(overlap.to_string(), "the pieces 0..8 and 4..12 overlap");
    let mut arena = Arena::new(&[0.0; 8], "f32", false, false);
    arena.gradients = f32_or_bf16(false).matrix([1, 8], &[0.0; 8]);
    let pieces = Pieces::new(&[piece(0..12)]).unwrap();
    let (table, table_len) = (Memory::of(&pieces.bytes()), [pieces.len_f64()]);
    let update = Update {
        weights: arena.weights.vector(),
        remainders: None,
        gradients: arena.gradients.vector(),
        first_gradient: 0,
        means: arena.means.vector(),
        squares: Some(arena.squares.vector()),
        codes: false,
        trained: 8,
        pieces: &pieces,
        piece_table: table.array(ElementType::F64, &table_len),
        constants: arena.constants.array(ElementType::F64, &[CONSTANTS_LEN]),
        totals: arena.totals.array(ElementType::F64, &[TOTALS_LEN]),
        rule: ADAMW,
        weight_decay: 0.0,
    };
    let late = "a piece ends at 12, what is trained at 8, the arena at 8";
    assert_eq!(refusal(&update), late);
    let pieces = Pieces::new(&[piece(0..8)]).unwrap();
    let apart = Update { pieces: &pieces, first_gradient: 4, ..update };
    assert_eq!(refusal(&apart), "pieces are of 0 to 8, gradients of 4 to 12");
    let kept = Update { pieces: &pieces, rule: Rule::Momentum(0.9), ..update };
    assert_eq!(refusal(&kept), "AdamW has squares of gradients, and momentum has none");
    // A rank of many may own nothing of a group, wherever the group begins.
    let (none, no_len) = (Pieces::new(&[]).unwrap(), [0]);
    let piece_table = table.array(ElementType::F64, &no_len);
    let nothing = Update { pieces: &none, piece_table, first_gradient: 4, ..update };
    assert!(nothing.launches(&mut Accesses::default()).unwrap().is_empty());
}
