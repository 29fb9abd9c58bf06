//! Rates that were measured on an H200, against what the planner chooses there: it is to be within 3
//! percent of the best of each run. The rows are those of
//! `docs/records/hopper.md`: TFLOP/s of one run, bf16, 16,384 tokens and heads of 2048 numbers
//! together, 8192 queries and keys unless said; of the backward and of dq those of the whole pass.

use super::class::{Class, Sizes};
use super::options::KernelOptions;
use super::planner::{Choice, choose};
use crate::compile::config::{Elem, Family, Kernel, Tiles};
use foveate_gpu::profile::Profile;

/// Of the rate of the best, what a choice may lose.
const NEAR: f64 = 0.97;

/// The mods of a case.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Mods {
    Plain,
    /// A mask, and live keys of a query.
    Mask(usize),
    /// A score whose derivative is 1, with no mask or with one.
    Bias(Option<usize>),
    /// One with a derivative of its own.
    Cap(Option<usize>),
    /// One that learns.
    Learned(Option<usize>),
}
use Mods::*;

const CAUSAL: usize = 4096;
const WINDOW: usize = 960;
const DOCUMENTS: usize = 256;
const PREFIX: usize = 4200;

#[derive(Clone, Copy, Debug)]
struct Case {
    kernel: Kernel,
    dtype: Elem,
    dim: usize,
    dim_v: usize,
    mods: Mods,
    len: usize,
    deterministic: bool,
}

impl Case {
    const fn new(kernel: Kernel, dim: usize, mods: Mods) -> Self {
        Self { kernel, dtype: Elem::Bf16, dim, dim_v: dim, mods, len: 8192, deterministic: false }
    }
    const fn dim_v(self, dim_v: usize) -> Self {
        Self { dim_v, ..self }
    }
    const fn e4m3(self) -> Self {
        Self { dtype: Elem::E4m3, ..self }
    }
    const fn len(self, len: usize) -> Self {
        Self { len, ..self }
    }
    const fn deterministic(self) -> Self {
        Self { deterministic: true, ..self }
    }

    fn class(self) -> Class {
        let (backward, plain) =
            (!self.kernel.is_of_forward(), Class::new(self.dtype, self.dim, self.dim_v, 1));
        let live = match self.mods {
            Plain => None,
            Mask(live) => Some(live),
            Bias(live) | Cap(live) | Learned(live) => live,
        };
        Class {
            mask: live.is_some(),
            score: matches!(self.mods, Bias(_) | Cap(_) | Learned(_)),
            score_steps: match self.mods {
                Plain | Mask(_) => 0,
                Bias(_) | Learned(_) => 9,
                Cap(_) => 41,
            },
            dscore: backward && matches!(self.mods, Cap(_)),
            captures: backward && matches!(self.mods, Learned(_)),
            deterministic: self.deterministic,
            ..plain
        }
    }

    fn sizes(self) -> Sizes {
        let (heads, len) = (2048 / self.dim_v, self.len);
        let mean_kv_len = match self.mods {
            Mask(live) | Bias(Some(live)) | Cap(Some(live)) | Learned(Some(live)) => {
                live * len / 8192
            }
            Plain | Bias(None) | Cap(None) | Learned(None) => len,
        };
        Sizes {
            batch: (16_384 / len).max(1),
            heads_q: heads,
            heads_kv: heads,
            queries: len,
            keys: len,
            mean_kv_len,
        }
    }

    fn choice(self) -> Choice {
        let (profile, options) = (Profile::named("h200").unwrap(), KernelOptions::default());
        choose(&profile, &self.class(), &self.sizes(), self.kernel, &options, None).unwrap()
    }
}

/// Rates of tiles of forwards.
fn tiles() -> Vec<(Case, Vec<(Tiles, f64)>)> {
    let forward = |dim| Case::new(Kernel::Forward, dim, Plain);
    let serial = |tiles| Tiles { overlap: false, ..tiles };
    vec![
        // Milliseconds of one run, of which the reciprocals are given; without the overlap the ratio is of an
        // earlier one.
        (
            forward(128),
            vec![
                (Tiles::hopper(2, 128, 2), 1e3 / 1.468),
                (Tiles::hopper(2, 176, 2), 1e3 / 1.435),
                (Tiles::hopper(2, 192, 2), 1e3 / 2.151),
                (serial(Tiles::hopper(2, 128, 2)), 0.94e3 / 1.468),
            ],
        ),
        (
            Case::new(Kernel::Forward, 128, Mask(CAUSAL)),
            vec![(Tiles::hopper(2, 128, 2), 1e3 / 0.764), (Tiles::hopper(2, 176, 2), 1e3 / 0.755)],
        ),
        (
            forward(128).len(2048),
            vec![(Tiles::hopper(2, 128, 2), 1e3 / 0.395), (Tiles::hopper(2, 176, 2), 1e3 / 0.396)],
        ),
        (
            Case::new(Kernel::Forward, 128, Mask(CAUSAL)).len(2048),
            vec![(Tiles::hopper(2, 128, 2), 1e3 / 0.236), (Tiles::hopper(2, 176, 2), 1e3 / 0.250)],
        ),
        (
            Case::new(Kernel::Forward, 128, Mask(CAUSAL)).len(32_768),
            vec![(Tiles::hopper(2, 128, 2), 1e3 / 5.73), (Tiles::hopper(2, 176, 2), 1e3 / 5.59)],
        ),
        (
            forward(64),
            vec![
                (Tiles::hopper(3, 128, 3), 1e3 / 1.801),
                (Tiles::hopper(3, 144, 3), 1e3 / 2.287),
                (Tiles::hopper(3, 160, 3), 1e3 / 2.230),
                (Tiles::hopper(2, 192, 3), 1e3 / 2.149),
            ],
        ),
        (
            forward(96),
            vec![
                (Tiles::hopper(3, 96, 2), 1e3 / 1.535),
                (Tiles::hopper(2, 160, 2), 1e3 / 1.666),
                (Tiles::hopper(2, 192, 2), 1e3 / 1.612),
            ],
        ),
        (
            Case::new(Kernel::Forward, 96, Mask(CAUSAL)),
            vec![
                (Tiles::hopper(3, 96, 2), 1e3 / 0.807),
                (Tiles::hopper(2, 160, 2), 1e3 / 0.866),
                (Tiles::hopper(2, 192, 2), 1e3 / 0.848),
            ],
        ),
        (
            forward(192).dim_v(128),
            vec![
                (Tiles::hopper(3, 64, 2), 1e3 / 1.742),
                (Tiles::hopper(2, 112, 2), 1e3 / 1.733),
                (Tiles::hopper(2, 128, 2), 1e3 / 1.696),
            ],
        ),
        (
            Case::new(Kernel::Forward, 192, Mask(CAUSAL)).dim_v(128),
            vec![
                (Tiles::hopper(3, 64, 2), 1e3 / 0.884),
                (Tiles::hopper(2, 112, 2), 1e3 / 0.907),
                (Tiles::hopper(2, 128, 2), 1e3 / 0.881),
            ],
        ),
        (
            forward(128).e4m3(),
            vec![(Tiles::hopper(2, 192, 3), 914.0), (Tiles::hopper(2, 128, 4), 863.0)],
        ),
        (
            forward(64).e4m3(),
            vec![(Tiles::hopper(3, 128, 3), 616.0), (Tiles::hopper(2, 256, 3), 595.0)],
        ),
    ]
}

/// The same of backwards. Of a kernel that has others of its own they are compared among themselves.
fn tiles_of_backwards() -> Vec<(Case, Vec<(Tiles, f64)>)> {
    let backward = |dim, mods| Case::new(Kernel::Backward, dim, mods);
    let dq = |dim, mods| Case::new(Kernel::BackwardDq, dim, mods).deterministic();
    let (own, of_64) = (Tiles::hopper_backward, |stages| Tiles::hopper_backward(64, stages));
    let keys = |keys| Tiles::hopper_dq(keys, 2);
    vec![
        (
            backward(64, Plain),
            vec![(own(128, 2), 441.0), (of_64(2), 382.0), (of_64(3), 383.0), (of_64(4), 386.0)],
        ),
        (backward(64, Plain), vec![(own(128, 2), 446.0), (own(128, 3), 450.0)]),
        // In order, and with dq in a kernel of its own.
        (
            backward(128, Plain).deterministic(),
            vec![(of_64(3).ordered(), 598.0), (of_64(3), 458.0)],
        ),
        (
            backward(64, Plain).deterministic(),
            vec![(own(128, 3).ordered(), 459.0), (own(128, 3), 329.0)],
        ),
        (dq(256, Plain), vec![(keys(48), 431.0), (keys(64), 457.0)]),
        (dq(256, Mask(CAUSAL)), vec![(keys(48), 423.0), (keys(64), 455.0)]),
        (dq(192, Plain), vec![(keys(48), 414.0), (keys(64), 429.0), (keys(80), 457.0)]),
        (dq(192, Mask(CAUSAL)), vec![(keys(48), 413.0), (keys(64), 442.0), (keys(80), 445.0)]),
        (
            dq(128, Plain),
            vec![
                (Tiles::hopper_dq(64, 4), 448.0),
                (keys(80), 454.0),
                (keys(96), 456.0),
                (keys(112), 455.0),
            ],
        ),
        (
            dq(128, Mask(CAUSAL)),
            vec![
                (Tiles::hopper_dq(64, 4), 408.0),
                (keys(80), 414.0),
                (keys(96), 420.0),
                (keys(112), 424.0),
            ],
        ),
        (dq(64, Plain), vec![(keys(128), 329.0), (Tiles::hopper_dq(128, 3), 325.0)]),
        (dq(64, Mask(CAUSAL)), vec![(keys(128), 315.0), (Tiles::hopper_dq(128, 3), 314.0)]),
    ]
}

/// The same of forwards with a score at head dim 128, by the keys of a tile.
fn tiles_of_scores() -> Vec<(Case, Vec<(Tiles, f64)>)> {
    let forward = |mods| Case::new(Kernel::Forward, 128, mods);
    vec![
        (
            forward(Bias(None)),
            vec![
                (Tiles::hopper(2, 128, 2), 531.0),
                (Tiles::hopper(2, 144, 2), 552.2),
                (Tiles::hopper(2, 160, 2), 563.1),
                (Tiles::hopper(2, 176, 2), 571.2),
            ],
        ),
        (
            forward(Learned(None)),
            vec![(Tiles::hopper(2, 128, 2), 473.2), (Tiles::hopper(2, 176, 2), 501.0)],
        ),
        (
            forward(Cap(None)),
            vec![(Tiles::hopper(2, 128, 2), 487.5), (Tiles::hopper(2, 176, 2), 467.1)],
        ),
    ]
}

/// Rates of the Hopper family and of the portable one, each as it is chosen.
fn families() -> Vec<(Case, [f64; 2])> {
    let forward = |dim, mods| Case::new(Kernel::Forward, dim, mods);
    let backward = |dim, mods| Case::new(Kernel::Backward, dim, mods);
    let (causal, mask) = (Some(CAUSAL), Mask);
    vec![
        (forward(128, Plain).len(1024), [549.0, 339.0]),
        (forward(64, Plain).len(1024), [399.0, 299.0]),
        (forward(128, mask(CAUSAL)).len(1024), [385.0, 264.0]),
        (forward(64, mask(CAUSAL)).len(1024), [254.0, 228.0]),
        (forward(128, mask(CAUSAL)).len(2048), [483.0, 318.0]),
        (forward(64, mask(CAUSAL)).len(2048), [354.0, 280.0]),
        (forward(128, mask(WINDOW)), [463.0, 298.0]),
        (forward(64, mask(WINDOW)), [312.0, 270.0]),
        (forward(128, mask(DOCUMENTS)), [254.0, 199.0]),
        (forward(64, mask(DOCUMENTS)), [201.0, 181.0]),
        (forward(128, mask(PREFIX)), [593.0, 373.0]),
        (forward(64, mask(PREFIX)), [465.0, 342.0]),
        (forward(128, Bias(None)), [510.0, 347.0]),
        (forward(64, Bias(None)), [388.0, 293.0]),
        (forward(128, Cap(None)), [500.0, 343.0]),
        (forward(64, Cap(None)), [350.0, 275.0]),
        (forward(128, Learned(None)), [489.0, 330.0]),
        (forward(64, Learned(None)), [353.0, 286.0]),
        (forward(128, Bias(causal)), [484.0, 327.0]),
        (forward(64, Bias(causal)), [357.0, 273.0]),
        (forward(128, Cap(causal)), [451.0, 335.0]),
        (forward(64, Cap(causal)), [308.0, 277.0]),
        (forward(128, Learned(causal)), [446.0, 316.0]),
        (forward(64, Learned(causal)), [300.0, 281.0]),
        (backward(128, Plain), [598.0, 353.0]),
        (backward(64, Plain), [457.0, 314.0]),
        (backward(128, mask(CAUSAL)), [521.0, 327.0]),
        (backward(64, mask(CAUSAL)), [438.0, 295.0]),
        (backward(128, mask(WINDOW)), [368.0, 257.0]),
        (backward(64, mask(WINDOW)), [309.0, 231.0]),
        (backward(128, mask(DOCUMENTS)), [201.0, 152.0]),
        (backward(64, mask(DOCUMENTS)), [168.0, 131.0]),
        (backward(128, mask(PREFIX)), [518.0, 330.0]),
        (backward(64, mask(PREFIX)), [439.0, 293.0]),
        (backward(128, Bias(None)), [526.0, 334.0]),
        (backward(64, Bias(None)), [333.0, 288.0]),
        (backward(128, Cap(None)), [491.0, 312.0]),
        (backward(64, Cap(None)), [302.0, 267.0]),
        (backward(64, Bias(causal)), [316.0, 268.0]),
        (backward(64, Cap(causal)), [293.0, 250.0]),
        (backward(128, Learned(causal)), [326.0, 288.0]),
        (backward(64, Learned(causal)), [253.0, 243.0]),
    ]
}

fn best(rates: impl Iterator<Item = f64>) -> f64 {
    rates.fold(0.0, f64::max)
}

#[test]
fn the_choice_is_within_3_percent_of_the_best_measured_one() {
    for (case, rates) in [tiles(), tiles_of_scores(), tiles_of_backwards()].concat() {
        let chosen = Tiles::of(&case.choice().chosen.config);
        // A run without the stages that are chosen says nothing of them.
        let same = |tiles: &Tiles| Tiles { stages: chosen.stages, ..*tiles } == chosen;
        let rate = rates.iter().filter(|(tiles, _)| same(tiles)).map(|(_, rate)| *rate);
        let (rate, best) = (best(rate), best(rates.iter().map(|(_, rate)| *rate)));
        assert!(rate >= NEAR * best, "{case:?}: {chosen} at {rate}, the best at {best}");
    }
    for (case, [hopper, portable]) in families() {
        let chosen = Tiles::of(&case.choice().chosen.config);
        let rate = if chosen.family == Family::Hopper { hopper } else { portable };
        assert!(rate >= NEAR * hopper.max(portable), "{case:?}: {chosen} at {rate}");
    }
    // Documents: in order at head dims up to 64, dq in a kernel of its own above; milliseconds.
    for (dim, in_order, alone) in [(128, 0.520, 0.444), (64, 0.499, 0.572)] {
        let case = Case::new(Kernel::Backward, dim, Mask(DOCUMENTS)).deterministic();
        let chosen = Tiles::of(&case.choice().chosen.config);
        assert_eq!(chosen.ordered_dq, in_order < alone, "{case:?}: {chosen}");
    }
}
