//! The softmax of the Hopper forward, `kernels/hopper/softmax.cuh`, compiled for the host: 32 lanes by turns are a warp,
//! and weigh scores of many steps as a consumer does. `out`, `lse` and `max_score` are compared with f64, and where the
//! largest score is looked for and where weights overflow is as the file says.

#[path = "../src/compile/on_host.rs"]
mod on_host;

use foveate_tensor::random::Random;

const DEVICE: &str = include_str!("../kernels/device.cuh");
const PARAMS: &str = include_str!("../kernels/params.cuh");
const ROWS: &str = include_str!("../kernels/rows.cuh");
const FORWARD_DEVICE: &str = include_str!("../kernels/hopper/forward_device.cuh");
const SCALES: &str = include_str!("../kernels/hopper/scales.cuh");
const SOFTMAX: &str = include_str!("../kernels/hopper/softmax.cuh");
const FORWARD: &str = include_str!("../kernels/hopper/forward.cu");

/// A warp: a context for each lane, which go on by turns from one vote or shuffle to the next. Numbers of one such
/// meeting may be read until the next but one. Powers of 2 below f32's normal numbers are 0, as those of the device.
const AROUND: &str = r#"
#include <ucontext.h>
#include <cfloat>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <vector>
#define __device__
#define __log2f log2f
#define __fdividef(x, y) ((y) > 0x1p126f ? 0.f : (x) / (y))
#define FV_OVERLAP 1
#define FV_SCORE 0
#define FV_DROPOUT 0
#define FV_SCALE_BLOCKS 0
#define FV_GROUP 1
#define FV_OUT_DTYPE 2
enum Meeting { VOTE, SHUFFLE, WEIGHTS };
static int lane, largest_found[32];
static ucontext_t lanes[32], caller;
static float given[2][32];
static Meeting meetings[32];
static unsigned met[32];
static void go_on(ucontext_t& from, int next) {
    lane = next % 32;
    swapcontext(&from, &lanes[lane]);
}
static const float* meet(Meeting meeting, float x) {
    const int own = lane, half = met[own]++ % 2;
    given[half][own] = x;
    meetings[own] = meeting;
    if (own == 31)
        for (int i = 0; i < 32; ++i)
            if (meetings[i] != meeting || met[i] != met[own]) std::fprintf(stderr, "lanes part\n"), std::abort();
    go_on(lanes[own], own + 1);
    return given[half];
}
static bool __any_sync(unsigned, bool x) {
    const float* all = meet(VOTE, x);
    float sum = 0;
    for (int i = 0; i < 32; ++i) sum += all[i];
    return sum > 0;
}
static bool __all_sync(unsigned mask, bool x) { return !__any_sync(mask, !x); }
static float __shfl_xor_sync(unsigned, float x, int distance) { return meet(SHUFFLE, x)[lane ^ distance]; }
static float infinity() { return INFINITY; }
static float __ldg(const float* at) { return *at; }
static float max_or_nan(float x, float y) { return x != x || y != y ? NAN : fmaxf(x, y); }
static float exp2_score(float x) {
    const float y = exp2f(x);
    return y < FLT_MIN ? 0.f : y;
}
static float __int_as_float(int bits) {
    float x;
    std::memcpy(&x, &bits, 4);
    return x;
}
static float fv_dropout_scale(int) { return 1.f; }
struct KeyScales { float score[4], value[4]; };
"#;

/// Reads items, each as 32-bit words: steps, whether the largest scores are wanted, the scale, the sink, the kinds of
/// steps, then products and values of each step. Goes through the steps as a consumer of fv_forward does, and writes of
/// each row out, lse, max_score, whether its weights are lost, the largest of them, and whether its warp is looked at
/// again; and of each step whether it looked for the largest scores. Weights stay in f32, but for those of f16 that are
/// too large for it or below its normal numbers.
const MAIN: &str = r#"
constexpr int COLUMNS = 8, OF_ROW = COLUMNS + 5;
static std::vector<float> weights;
static float max_score[16], lse[16];
enum Kind { OVERLAPPED, WAITING, PASSED };
struct Work {
    int steps, wants_max;
    float scale;
    const float* sink;
    const int* kinds;
    const float *products, *values;
    float* results;
};
static int row_of(int half) { return lane / 4 + half * 8; }

static void multiply_values(float (&out)[1][4], const Work& work, int step) {
    meet(WEIGHTS, 0.f);
    for (int i = 0; i < 4; ++i)
        for (int key = 0; key < FV_BN; ++key)
            out[0][i] = fmaf(weights[(step * 16 + row_of(i / 2)) * FV_BN + key],
                             work.values[(step * FV_BN + key) * COLUMNS + lane % 4 * 2 + i % 2], out[0][i]);
}

static void take_step(const Work& work, int step, Softmax& softmax, float (&out)[1][4], float (&heaviest)[2]) {
    float s[N][4], rescale[2] = {1.f, 1.f};
    auto at = [&](int j) { return (step * 16 + row_of(j % 4 / 2)) * FV_BN + j / 4 * 8 + lane % 4 * 2 + j % 2; };
    for (int j = 0; j < N * 4; ++j) {
        float& x = s[j / 4][j % 4] = work.products[at(j)];
        if (!softmax.unscaled && x != -infinity()) x *= work.scale;
    }
    auto look = [](float) {};
    const bool rescales = work.kinds[step] == WAITING ? softmax.weigh(s, rescale, KeyScales{}, look)
                                                      : softmax.weigh_by_sums(s, rescale, look);
    if (step > 0 && work.kinds[step - 1] != PASSED) multiply_values(out, work, step - 1);
    if (rescales) multiply_rows(out, rescale);
    for (int j = 0; j < N * 4; ++j) {
        const float x = s[j / 4][j % 4];
        heaviest[j % 4 / 2] = fmaxf(heaviest[j % 4 / 2], x);
        weights[at(j)] = FV_DTYPE == 1 || (x >= 0x1p-14f && x < 65520.f) ? x
                       : x >= 65520.f                                   ? infinity()
                                                                        : rintf(x * 0x1p24f) * 0x1p-24f;
    }
}

static void finish(const ForwardParams& p, const Work& work, const Softmax& softmax, const float (&out)[1][4],
                   const float (&heaviest)[2]) {
    const float scale = p.scale;
    const Sequence sequence = {};
    const int query0 = 0, head = 0, left = 16, mods = 0;
    bool any_lost = false;
    for (int half = 0; half < 2; ++half) {
        FINISH
        const float largest_weight = quad_max(heaviest[half]);
        bool is_seen = any_lost;
        float* const of_row = work.results + row * OF_ROW;
        for (int i = 0; i < 2; ++i) {
            is_seen |= !std::isfinite(out[0][half * 2 + i]);
            of_row[lane % 4 * 2 + i] = out[0][half * 2 + i] * target.factor;
        }
        is_seen = __any_sync(~0u, is_seen);
        if (lane % 4 != 0) continue;
        of_row[COLUMNS] = lse[row];
        of_row[COLUMNS + 1] = max_score[row];
        of_row[COLUMNS + 2] = is_lost;
        of_row[COLUMNS + 3] = largest_weight;
        of_row[COLUMNS + 4] = is_seen;
    }
}

static std::vector<Work> all;
static void consume() {
    Softmax softmax(0.f, false);        // of one item after the other
    for (const Work& work : all) {
        ForwardParams p = {};
        p.scale = work.scale;
        p.sink = work.sink;
        p.lse = {lse, 0, 0, 1};
        if (work.wants_max) p.max_score = {max_score, 0, 0, 1};
        if (softmax.wants_max != work.wants_max || softmax.scale != work.scale)
            softmax = Softmax(work.scale, work.wants_max);
        softmax.clear();
        float out[1][4] = {}, heaviest[2] = {};
        for (int step = 0; step < work.steps; ++step) {
            largest_found[lane] = 0;
            if (work.kinds[step] != PASSED) take_step(work, step, softmax, out, heaviest);
            else if (step > 0 && work.kinds[step - 1] != PASSED) multiply_values(out, work, step - 1);
            if (lane == 0) work.results[16 * OF_ROW + step] = largest_found[0];
        }
        if (work.kinds[work.steps - 1] != PASSED) multiply_values(out, work, work.steps - 1);
        finish(p, work, softmax, out, heaviest);
    }
    if (lane < 31) go_on(lanes[lane], lane + 1);
    setcontext(&caller);
}

int main() {
    std::vector<char> input;
    for (int c; (c = std::getchar()) != EOF;) input.push_back(c);
    std::vector<float> words(input.size() / 4), results;
    std::memcpy(words.data(), input.data(), words.size() * 4);
    std::vector<size_t> places;
    for (const float *at = words.data(), *end = at + words.size(); at < end;) {
        const int* const numbers = reinterpret_cast<const int*>(at);
        Work work = {numbers[0], numbers[1], at[2], at + 3, numbers + 4};
        work.products = at + 4 + work.steps;
        work.values = work.products + work.steps * 16 * FV_BN;
        at = work.values + work.steps * FV_BN * COLUMNS;
        places.push_back(results.size());
        results.resize(results.size() + 16 * OF_ROW + work.steps);
        if (weights.size() < size_t(work.steps * 16 * FV_BN)) weights.resize(work.steps * 16 * FV_BN);
        all.push_back(work);
    }
    for (size_t i = 0; i < all.size(); ++i) all[i].results = results.data() + places[i];
    std::vector<char> stacks(32 << 17);
    for (int i = 0; i < 32; ++i) {
        getcontext(&lanes[i]);
        lanes[i].uc_stack.ss_sp = &stacks[size_t(i) << 17];
        lanes[i].uc_stack.ss_size = 1 << 17;
        makecontext(&lanes[i], consume, 0);
    }
    go_on(caller, 0);
    std::fwrite(results.data(), 4, results.size(), stdout);
}
"#;

const STEPS: usize = 10;
const RANDOM_CASES: usize = 60;
const COLUMNS: usize = 8;
const LOG2_E: f64 = std::f64::consts::LOG2_E;
/// A score of 40, and what a reference may be off it: a weight of 2^16.
const LARGE: f64 = 40.0 + 16.0 / LOG2_E;
const HIDDEN: f64 = f64::NEG_INFINITY;

/// The score of a step, a row and a key; minus infinity where a mask hides it.
type Score = Box<dyn Fn(&mut Random, usize, usize, usize) -> f64>;

/// Scores of one kind.
struct Case {
    name: String,
    scale: f32,
    score: Score,
    /// Whether overlapped steps but the first do without the largest scores, unless these are wanted.
    only_first_looks: bool,
    /// Whether lse is the largest score to the last bit: it is far above the others, and large.
    is_exact: bool,
    /// What else lse may be off.
    off: f64,
    sink: f32,
}

/// A power of 2 is off by the rounding of its exponent, which is below 2^7: by 2^-18 ln 2. Sums are chains of at most
/// STEPS * 32 numbers in a lane: 320 times 2^-24 more. Both are below 2^-15.
const OFF: f64 = 1.0 / 32768.0;

fn case(
    name: &str,
    scale: f32,
    score: impl Fn(&mut Random, usize, usize, usize) -> f64 + 'static,
) -> Case {
    let score = Box::new(score);
    Case {
        name: name.into(),
        scale,
        score,
        only_first_looks: false,
        is_exact: false,
        off: OFF,
        sink: f32::NEG_INFINITY,
    }
}

/// Rows of a lane are eight apart: they are of two kinds where a kind is every third row.
fn cases() -> Vec<Case> {
    let usual = 0.0721688;
    let mut all = Vec::new();
    for scale in [usual, 1.0, -0.5, 0.0] {
        let random = case(&format!("random, scale {scale}"), scale, |r, _, _, _| r.normal());
        all.push(Case { only_first_looks: scale > 0.0, ..random });
    }
    for by in [3.0, 5.0, 20.0, 60.0, 100.0, 1000.0] {
        let rising = case(&format!("rising by {by}"), usual, move |r, step, row, _| {
            r.normal() + by * step as f64 * [1.0, -1.0, 0.0][row % 3]
        });
        all.push(Case { only_first_looks: by < 4.0, ..rising });
        all.push(case(&format!("rising by {by} once"), usual, move |r, step, row, _| {
            r.normal() + if step > row % 3 + 2 { by } else { 0.0 }
        }));
    }
    // Weights that all are below 2^128, and whose sum is not.
    for by in [78.0, 84.0, 86.0, 87.0, 88.0] {
        all.push(case(
            &format!("equal scores rising by {by} once"),
            usual,
            move |_, step, row, _| {
                if step > 1 && row % 3 == 1 { by } else { 0.0 }
            },
        ));
    }
    // Sums that f32 holds and the quotient of a GPU does not divide by, up to 2^128 in the last step.
    for by in [84.0, 87.5, 88.0] {
        all.push(case(&format!("a rise of {by} at last"), usual, move |_, step, row, key| {
            if step + 1 == STEPS && row % 3 == 1 && key == row { by } else { 0.0 }
        }));
    }
    // A weight between 2^15 and 2^18: f16 ends at 2^16.
    all.push(case("one key rising by 11 to 12", usual, |r, step, row, key| {
        if step > 1 && key == row { 14.0 } else { r.normal() }
    }));
    all.push(case("one row rising by 60", usual, |r, step, row, _| {
        r.normal() + if row == 11 { 60.0 * step as f64 } else { 0.0 }
    }));
    all.push(case("one row around -1000", usual, |r, _, row, _| {
        r.normal() - if row == 3 { 1000.0 } else { 0.0 }
    }));
    for by in [20.0, 100.0, 1000.0] {
        let falling = case(&format!("falling by {by}"), usual, move |r, step, row, _| {
            r.normal() - by * (step * (row % 4)) as f64
        });
        all.push(Case { only_first_looks: true, ..falling });
    }
    all.push(case("hidden at first", usual, |r, step, row, _| match step < row % 4 {
        true => HIDDEN,
        false => 3.0 * r.normal(),
    }));
    all.push(case("all hidden at first", usual, |r, step, row, _| match step <= row % 3 {
        true => HIDDEN,
        false => 20.0 + r.normal(),
    }));
    all.push(case("hidden, rows and keys", usual, |r, step, row, key| {
        let visible = row % 5 != 1 && key % 7 < row % 9 && (step + row) % 3 > 0;
        if visible { 3.0 * r.normal() + 9.0 * step as f64 } else { HIDDEN }
    }));
    for (name, odd) in [("NaN", f64::NAN), ("infinity", f64::INFINITY)] {
        all.push(case(name, usual, move |r, step, row, key| {
            let is_odd = row % 3 == 1 && step == row / 3 && key == 5 * row % 64;
            if is_odd { odd } else { r.normal() }
        }));
    }
    for at in [30.0, -30.0, 1000.0, -1000.0] {
        let lone = case(
            &format!("one key far above others, around {at}"),
            1.0,
            move |r, step, row, key| {
                let is_lone = step == row / 2 && key == 3 * row;
                at + r.normal() + if is_lone { 40.0 } else { 0.0 }
            },
        );
        all.push(Case { is_exact: at.abs() > LARGE, ..lone });
    }
    all.extend(rises());
    all
}

/// Scores that rise by so much that sums have to be brought down in time, or cannot be.
fn rises() -> Vec<Case> {
    let (usual, mut all) = (0.0721688, Vec::new());
    // Weights of 65,510 to 88,500, and of a lane's two rows one alone.
    all.push(case("one key rising by 11.09 to 11.39", usual, |_, step, row, key| {
        if step > 2 && key == row { 11.09 + 0.02 * row as f64 } else { 0.0 }
    }));
    for at in [3, 11] {
        all.push(case(&format!("row {at} rising by 45 twice"), usual, move |_, step, row, _| {
            if row == at { 45.0 * step.saturating_sub(2).min(2) as f64 } else { 0.0 }
        }));
    }
    // What a step of large weights leaves to one that raises the reference by a factor that f32 has no power for.
    for (at, by) in [(3, 80.0), (4, 86.0), (5, 80.0), (6, 86.0)] {
        let rise = move |_: &mut Random, step: usize, row: usize, key: usize| {
            if key != row || step < at {
                0.0
            } else if step == at {
                by
            } else {
                88.0
            }
        };
        all.push(case(&format!("one key rising by {by} in step {at}, then to 88"), usual, rise));
    }
    // Nothing comes behind a step of large weights. A sink and lse are not measured from the scores before.
    for [by, sink] in [[80.0, 88.0], [80.0, 100.0]] {
        let rise = move |_: &mut Random, step: usize, row: usize, key: usize| {
            if step + 1 == STEPS && row % 3 == 1 && key == row { by } else { 0.0 }
        };
        let rise = case(&format!("a rise of {by} at last beside a sink of {sink}"), usual, rise);
        all.push(Case { sink: sink as f32, ..rise });
    }
    let rise = case("one tile 38 above the others at last", usual, |r, step, _, _| {
        0.1 * r.normal() - if step + 1 < STEPS { 38.0 } else { 0.0 }
    });
    all.push(Case { off: 2.5e-6, ..rise });
    all
}

/// Scores at random: what rises or falls, by how much, when, in which rows, and what is hidden.
fn random_case(kernel: Kernel, number: usize, random: &mut Random) -> Case {
    const RISES: [f64; 20] = [
        0.0, 0.0, 0.0, 0.0, 1.0, 5.0, 11.0, 15.0, 30.0, 41.0, 60.0, 70.0, 75.0, 80.0, 84.0, 86.0,
        87.0, 88.0, 150.0, 1000.0,
    ];
    const STARTS: [f64; 8] = [0.0, 0.0, 0.0, -38.0, 38.0, 20.0, -1000.0, 1000.0];
    fn one_of(random: &mut Random, all: &[f64]) -> f64 {
        all[random.below(all.len())]
    }
    let scale = one_of(random, &[0.0721688, 0.125, 1.0, -0.5]) as f32;
    let noise = one_of(random, &[0.0, 0.1, 1.0, 5.0]);
    let hides = one_of(random, &[0.0, 0.0, 0.3]);
    let (rows, start) = (random.below(3), one_of(random, &STARTS));
    let mut level = [0.0; 16].map(|_| if rows == 1 { one_of(random, &STARTS) } else { start });
    let (mut levels, mut hidden, mut lone) = (Vec::new(), Vec::new(), Vec::new());
    let mut highest = f64::NEG_INFINITY;
    for _ in 0..STEPS {
        let common = if random.below(3) == 0 { one_of(random, &RISES) } else { 0.0 };
        let sign = if random.below(4) == 0 { -1.0 } else { 1.0 };
        for (row, level) in level.iter_mut().enumerate() {
            *level += sign
                * match rows {
                    0 => common,
                    1 if random.below(3) == 0 => one_of(random, &RISES),
                    2 if row == 11 => common,
                    _ => 0.0,
                };
            lone.push((random.below(4 * kernel.tile_kv), one_of(random, &RISES)));
            hidden.push(random.unit() < hides);
            highest = f64::max(highest, *level);
        }
        levels.push(level);
    }
    let sink = highest + one_of(random, &[0.0, 5.0, 10.0, 15.0, -10.0, -80.0]);
    let score = move |random: &mut Random, step: usize, row: usize, key: usize| {
        let (at, rise) = lone[step * 16 + row];
        match hidden[step * 16 + row] {
            true => HIDDEN,
            false => {
                levels[step][row] + noise * random.normal() + if at == key { rise } else { 0.0 }
            }
        }
    };
    let sink = if kernel.has_sink { sink as f32 } else { f32::NEG_INFINITY };
    Case { sink, ..case(&format!("random case {number}"), scale, score) }
}

/// A kernel's macros.
#[derive(Clone, Copy, Debug)]
struct Kernel {
    is_bf16: bool,
    tile_kv: usize,
    has_sink: bool,
}

/// What a consumer does with a step of an item.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Kind {
    Overlapped,
    /// Both products come first.
    Waiting,
    /// None of its rows sees it.
    Passed,
}

/// What a consumer gets: `products[step][row][key]` and `values[step][key][column]`.
struct Item {
    wants_max: bool,
    scale: f32,
    sink: f32,
    kinds: Vec<Kind>,
    products: Vec<f32>,
    values: Vec<f32>,
}

impl Item {
    fn new(
        case: &Case,
        kernel: Kernel,
        wants_max: bool,
        some_wait: bool,
        random: &mut Random,
    ) -> Self {
        let kinds = (0..STEPS)
            .map(|step| match step == 0 || (some_wait && random.below(4) == 0) {
                true => Kind::Waiting,
                false => Kind::Overlapped,
            })
            .collect();
        let mut products = Vec::new();
        for step in 0..STEPS {
            for row in 0..16 {
                for key in 0..kernel.tile_kv {
                    let score = (case.score)(random, step, row, key);
                    let scale = if case.scale == 0.0 { 1.0 } else { f64::from(case.scale) };
                    products.push(if score == f64::NEG_INFINITY { score } else { score / scale } as f32);
                }
            }
        }
        let values =
            (0..STEPS * kernel.tile_kv * COLUMNS).map(|_| random.normal() as f32).collect();
        Self { wants_max, scale: case.scale, sink: case.sink, kinds, products, values }
    }

    /// Steps of which some are passed over; what follows these waits.
    fn passing(mut self, kernel: Kernel, random: &mut Random) -> Self {
        for step in 0..STEPS {
            let follows = step == 0 || self.kinds[step - 1] == Kind::Passed;
            if random.below(4) == 0 {
                self.kinds[step] = Kind::Passed;
                self.products[step * 16 * kernel.tile_kv..][..16 * kernel.tile_kv]
                    .fill(f32::NEG_INFINITY);
            } else if follows {
                self.kinds[step] = Kind::Waiting;
            }
        }
        self
    }

    fn write(&self, input: &mut Vec<u8>) {
        let mut word = |bits: u32| input.extend(bits.to_ne_bytes());
        word(STEPS as u32);
        word(self.wants_max.into());
        word(self.scale.to_bits());
        word(self.sink.to_bits());
        self.kinds.iter().for_each(|&kind| word(kind as u32));
        self.products.iter().chain(&self.values).for_each(|x| word(x.to_bits()));
    }

    /// The scores of a row in a step.
    fn scores(&self, kernel: Kernel, step: usize, row: usize) -> Vec<f64> {
        let of_row = &self.products[(step * 16 + row) * kernel.tile_kv..][..kernel.tile_kv];
        let score = |&x: &f32| {
            if x == f32::NEG_INFINITY { x.into() } else { f64::from(x) * f64::from(self.scale) }
        };
        of_row.iter().map(score).collect()
    }

    /// The largest score of a row in each step.
    fn largest(&self, kernel: Kernel, row: usize) -> Vec<f64> {
        let of_step =
            |step| self.scores(kernel, step, row).into_iter().fold(f64::NEG_INFINITY, f64::max);
        (0..STEPS).map(of_step).collect()
    }

    /// Whether weights of the row or their sum overflow, if `looks` are the steps that find the largest scores
    /// first; nothing where their number decides it. In the others a weight is 2^(its score above the largest so
    /// far) times that one's. This is at most 2^16 in bf16 and 20,000 in f16, the largest sum of a lane that is left
    /// alone; where a sum was larger, 2^5 is that of at most STEPS * tile_kv / 4 weights.
    fn overflows(&self, kernel: Kernel, row: usize, looks: &[bool]) -> Option<bool> {
        let largest_sum = if kernel.is_bf16 { 16.0 } else { 20_000f64.log2() };
        let of_tile = largest_sum + (kernel.tile_kv as f64).log2();
        let always = 128.0 - 5.0 + ((STEPS * kernel.tile_kv / 4) as f64).log2();
        let mut before = f64::NEG_INFINITY;
        for (step, largest) in self.largest(kernel, row).into_iter().enumerate() {
            let rise = (largest - before) * LOG2_E;
            if !looks[step] && rise > self.largest_exponent(kernel, step) - of_tile {
                return (rise > always).then_some(true);
            }
            before = before.max(largest);
        }
        Some(false)
    }

    /// The exponent of the largest sum of a step's weights that is not lost by what comes behind it.
    fn largest_exponent(&self, kernel: Kernel, step: usize) -> f64 {
        match self.kinds[step + 1..].iter().find(|&&kind| kind != Kind::Passed) {
            _ if !kernel.is_bf16 => 128.0,
            Some(Kind::Overlapped) => 128.0,
            None if !kernel.has_sink => 120.0,
            _ => 100.0,
        }
    }
}

/// What the program says of a row.
struct Row<'a> {
    out: &'a [f32],
    lse: f32,
    max_score: f32,
    /// Its weights overflowed, or their sum.
    is_lost: bool,
    largest_weight: f32,
    /// Its warp looks for rows to compute again.
    is_seen: bool,
}

impl<'a> Row<'a> {
    fn new(words: &'a [f32]) -> Self {
        let [lse, max_score, is_lost, largest_weight, is_seen] = words[COLUMNS..] else {
            panic!("five beside out")
        };
        let [is_lost, is_seen] = [is_lost, is_seen].map(|x| x != 0.0);
        Self { out: &words[..COLUMNS], lse, max_score, is_lost, largest_weight, is_seen }
    }
}

/// Compares a row with f64. Both sums of a row, of out and of the weights, are off by `OFF`. Lse is rounded as f32 twice
/// besides, with the scale and with the logarithm.
fn check_row(
    row: &Row,
    case: &Case,
    kernel: Kernel,
    item: &Item,
    number: usize,
    looks: &[bool],
    at: &str,
) {
    let scores: Vec<f64> = (0..STEPS).flat_map(|step| item.scores(kernel, step, number)).collect();
    let is_finite = row.out.iter().all(|x| x.is_finite());
    if scores.iter().any(|x| x.is_nan()) {
        assert!(
            row.out.iter().all(|x| x.is_nan()) && row.lse.is_nan(),
            "{at}: {:?}, lse {}",
            row.out,
            row.lse
        );
        assert!(!item.wants_max || row.max_score.is_nan(), "{at}: max_score {}", row.max_score);
        return;
    }
    let overflows = item.overflows(kernel, number, looks).unwrap_or(row.is_lost);
    assert_eq!(row.is_lost, overflows, "{at}");
    if overflows {
        // So recompute_nonfinite_rows finds it.
        let wanted = if item.sink == f32::NEG_INFINITY { f32::NEG_INFINITY } else { f32::MAX };
        let is_found = row.is_seen && !is_finite && row.lse <= wanted;
        assert!(is_found, "{at}: {:?}, lse {}", row.out, row.lse);
        return;
    }
    let mut before = f64::NEG_INFINITY;
    for (step, largest) in item.largest(kernel, number).iter().enumerate() {
        let is_large = before.is_finite() && before.abs() > LARGE;
        assert!(
            looks[step] || !is_large || item.kinds[step] == Kind::Passed,
            "{at}: step {step} does not look, {before} is the largest score"
        );
        before = before.max(*largest);
    }
    let largest = before;
    if largest == f64::INFINITY {
        assert!(
            row.lse.is_nan() && row.out.iter().all(|x| x.is_nan()),
            "{at}: {:?}, lse {}",
            row.out,
            row.lse
        );
        return;
    }
    assert!(
        !item.wants_max || row.max_score == largest as f32,
        "{at}: {}, not {largest}",
        row.max_score
    );
    assert!(
        kernel.is_bf16 || row.largest_weight <= 65504.0,
        "{at}: a weight of {}",
        row.largest_weight
    );
    let sink = f64::from(item.sink);
    let highest = largest.max(sink);
    if highest == f64::NEG_INFINITY {
        assert!(
            row.out.iter().all(|&x| x == 0.0) && row.lse == f32::NEG_INFINITY,
            "{at}: {:?}",
            row.out
        );
        return;
    }
    let weights: Vec<f64> = scores.iter().map(|x| (x - highest).exp()).collect();
    let sum = weights.iter().sum::<f64>() + (sink - highest).exp();
    let lse = highest + sum.ln();
    let off = (f64::from(row.lse) - lse).abs();
    assert!(off <= case.off + lse.abs() * 2f64.powi(-23), "{at}: lse {}, not {lse}", row.lse);
    if case.is_exact && !item.kinds.contains(&Kind::Passed) {
        assert_eq!(row.lse, largest as f32, "{at}: lse is the largest score");
    }
    // The largest score is rounded before its distance to a sink is found.
    let far = if sink.is_finite() && largest.is_finite() { largest.abs() } else { 0.0 };
    let distance = far * 2f64.powi(-23);
    // Beside a sink powers below 2^-126 are 0; and f16 rounds more below its normal numbers, of a largest weight of 1/2.
    let smallest = match kernel.is_bf16 {
        true => 2f64.powi(-120),
        false => 2f64.powi(-120) + 2f64.powi(-24) * (largest - highest).exp(),
    };
    for (column, &out) in row.out.iter().enumerate() {
        let (mut wanted, mut allowed) = (0.0, 0.0);
        for (weight, values) in weights.iter().zip(item.values.chunks(COLUMNS)) {
            let value = f64::from(values[column]);
            wanted += weight * value / sum;
            allowed += ((2.0 * OFF + distance) * weight + smallest) * value.abs() / sum;
        }
        let off = (f64::from(out) - wanted).abs();
        assert!(off <= allowed, "{at}: out {out}, not {wanted}");
    }
}

/// The text from `from` to before `to`.
fn part<'a>(file: &'a str, from: &str, to: &str) -> &'a str {
    let at = file.find(from).expect("the file has it");
    let end = file[at..].find(to).expect("and what follows");
    &file[at..at + end]
}

/// The program of a kernel: the softmax with a count of the searches for the largest scores, and what it takes of other
/// files.
fn program(kernel: Kernel) -> String {
    let Kernel { is_bf16, tile_kv, has_sink } = kernel;
    let macros = format!(
        "#define FV_DTYPE {}\n#define FV_BN {tile_kv}\n#define FV_SINK {}\n",
        u8::from(is_bf16),
        u8::from(has_sink)
    );
    let finds = "void find_largest(const float (&s)[N][4]) {";
    assert_eq!(SOFTMAX.matches(finds).count(), 1, "find_largest is declared once");
    let finish = part(
        FORWARD,
        "float sum = quad_sum(softmax.row_sum[half]);",
        "if constexpr (FV_DTYPE == 3) target.factor",
    );
    [
        &macros,
        AROUND,
        PARAMS,
        part(DEVICE, "[[maybe_unused]] constexpr float LOG2_E", "\n"),
        part(DEVICE, "// Over the four lanes (a quad)", "// ---- copies into shared memory"),
        part(ROWS, "#if FV_OUT_DTYPE == 2", "// A column of a row."),
        part(FORWARD_DEVICE, "constexpr int N = FV_BN / 8;", "//"),
        part(FORWARD_DEVICE, "constexpr int BLOCK_UNIT", "\n"),
        part(FORWARD_DEVICE, "constexpr float LARGEST_EXPONENT", "// Consumers take turns"),
        part(SCALES, "__device__ inline bool is_usual", "\n"),
        &SOFTMAX.replace(finds, &format!("{finds} ++largest_found[lane];")),
        &MAIN.replace("FINISH", finish),
    ]
    .join("\n")
}

fn check(kernel: Kernel) {
    let seed = kernel.tile_kv as u64 + u64::from(kernel.is_bf16);
    let (mut random, mut of_cases) = (Random::new(seed), Random::stream(seed, 1));
    let mut cases = cases();
    cases.retain(|case| kernel.has_sink || case.sink == f32::NEG_INFINITY);
    cases.extend((0..RANDOM_CASES).map(|number| random_case(kernel, number, &mut of_cases)));
    let (mut items, mut input) = (Vec::new(), Vec::new());
    for case in &cases {
        for [wants_max, some_wait] in [[false, false], [false, true], [true, false]] {
            items.push((case, Item::new(case, kernel, wants_max, some_wait, &mut random)));
        }
    }
    for case in &cases {
        let item = Item::new(case, kernel, false, true, &mut random);
        items.push((case, item.passing(kernel, &mut random)));
    }
    items.iter().for_each(|(_, item)| item.write(&mut input));
    let Some(bytes) = on_host::output(&program(kernel), &["-O1"], input) else { return };
    let words: Vec<f32> =
        bytes.chunks_exact(4).map(|x| f32::from_ne_bytes(x.try_into().unwrap())).collect();
    let of_rows = 16 * (COLUMNS + 5);
    assert_eq!(words.len(), items.len() * (of_rows + STEPS));
    for ((case, item), words) in items.iter().zip(words.chunks(of_rows + STEPS)) {
        let (wants_max, kinds) = (item.wants_max, &item.kinds);
        let at = format!("{kernel:?}, {}, wants_max {wants_max}, {kinds:?}", case.name);
        let looks: Vec<bool> = words[of_rows..].iter().map(|&count| count > 0.0).collect();
        if wants_max {
            assert!(looks.iter().all(|looks| *looks), "{at}: {looks:?}");
        } else if case.only_first_looks && !kinds.contains(&Kind::Passed) {
            let first = kinds.iter().position(|&kind| kind == Kind::Overlapped);
            let wanted = |(i, &kind): (usize, &Kind)| kind == Kind::Waiting || Some(i) == first;
            let wanted: Vec<bool> = kinds.iter().enumerate().map(wanted).collect();
            assert_eq!(looks, wanted, "{at}: the steps that look for the largest scores");
        }
        for (number, words) in words[..of_rows].chunks(COLUMNS + 5).enumerate() {
            let at = format!("{at}, row {number}");
            check_row(&Row::new(words), case, kernel, item, number, &looks, &at);
        }
    }
}

fn check_all(is_bf16: bool) {
    for [tile_kv, sink] in [[64, 0], [128, 0], [64, 1]] {
        check(Kernel { is_bf16, tile_kv, has_sink: sink == 1 });
    }
}

#[test]
fn weights_by_sums_of_f16_give_what_f64_gives() {
    check_all(false);
}

#[test]
fn weights_by_sums_of_bf16_give_what_f64_gives() {
    check_all(true);
}
