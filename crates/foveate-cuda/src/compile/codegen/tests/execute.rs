//! Printed mods run on the CPU, by a host compiler, against the vector machine: values bit for
//! bit, bounds for soundness.

use std::ops::Range;

use foveate_mods::fuzz;
use foveate_mods::text::{Names, parse_mask, parse_score};
use foveate_mods::vector::{LANES, Machine, MaskBits, Read, Scores};
use foveate_mods::{
    Bounds, Cover, DynExpr, Head, Point, ScalarValue, SharedElements, TileProgram, Type,
};

use foveate_tensor::random::Random;

use super::ranges::range_table;
use super::*;

/// What kernels of CTAs stand on where the host runs them: shim, parameters, prelude, blocks and tables of ranges; for so
/// many query heads a key/value head.
pub(super) fn of_a_cta(group: usize) -> String {
    [
        &*format!("#define FV_GROUP {group}\n"),
        include_str!("shim.h"),
        include_str!("../../../../kernels/params.cuh"),
        PRELUDE,
        include_str!("block.h"),
        include_str!("../../../../kernels/range_ends.cuh"),
        include_str!("../../../../kernels/own_tables.cuh"),
    ]
    .concat()
}

/// A random expression of type `wanted` over `leaves`, buffers and scalars.
fn expression(r: &mut Random, leaves: &[Leaf], buffers: &[AnyBuffer], wanted: Type) -> DynExpr {
    let mut given: Vec<DynExpr> = leaves.iter().map(|&leaf| DynExpr::leaf(leaf)).collect();
    for (name, value) in [
        ("width", ScalarValue::I32([0, 1, -1, 2, 7, -5, 100, i32::MAX, i32::MIN][r.below(9)])),
        ("Slope", ScalarValue::F32([-0.0, 0.5, -3.0, 1e30, f32::NAN][r.below(5)])),
        ("if", ScalarValue::Bool(r.below(2) == 0)),
    ] {
        given.push(DynExpr::scalar(foveate_mods::Scalar { name: name.into(), value }));
    }
    given.push(DynExpr::leaf(Leaf::Q).cast(Type::F32));
    fuzz::expression(&mut |n| r.below(n), &given, buffers, 24, wanted)
}

fn buffers() -> Vec<AnyBuffer> {
    let ids = Buffer::vector("ids", (0..90).map(|i| i / 11).collect::<Vec<i32>>());
    let noise: Vec<f32> =
        (0..90).map(|i| if i == 40 { f32::NAN } else { (i * i % 37) as f32 }).collect();
    let noise = Buffer::new("noise", &[2, 45], noise).unwrap();
    let flags = Buffer::new("flags", &[5, 3, 6], (0..90).map(|i| i % 7 == 0).collect()).unwrap();
    let weight = Buffer::learned("float", &[90], (0..90).map(|i| 1.0 / i as f32).collect());
    let empty = Buffer::new("empty", &[3, 0], Vec::<i32>::new()).unwrap();
    let all: [&AnyBuffer; 5] =
        [ids.any(), noise.any(), flags.any(), weight.as_ref().unwrap().any(), empty.any()];
    all.into_iter().cloned().chain(memory()).collect()
}

/// An i64 that no i32 holds.
const TOO_WIDE: i64 = -(5 << 32) + 9;

/// Memory of the other types, with strides.
fn memory() -> Vec<AnyBuffer> {
    let shared = |name: &str, elements: &SharedElements, shape: &[usize], strides: &[usize]| {
        AnyBuffer::shared(name, elements, shape, strides, 3, false).unwrap()
    };
    let of = |i: i32| foveate_mods::ir::mix(11, i) % 50;
    let ints = || (0..500).map(of);
    let floats =
        || (0..500).map(|i| of(i) as f32 * 0.75 - if i % 41 == 0 { f32::NAN } else { 3.0 });
    let bytes: Vec<u8> = ints().map(|x| x as u8).collect();
    let mut subnormal: Vec<half::f16> = floats().map(half::f16::from_f32).collect();
    subnormal[3] = half::f16::from_bits(0x8001);
    subnormal[4] = half::f16::INFINITY;
    vec![
        shared("bytes", &SharedElements::from_vec(bytes), &[90], &[1]),
        shared("small", &SharedElements::from_vec(ints().map(|x| x as i8).collect()), &[90], &[5]),
        shared(
            "short",
            &SharedElements::from_vec(ints().map(|x| x as i16).collect()),
            &[3, 30],
            &[1, 4],
        ),
        shared(
            "wide",
            &SharedElements::from_vec(
                (0..500).map(|i| if i % 10 == 1 { TOO_WIDE } else { of(i).into() }).collect(),
            ),
            &[4, 90],
            &[0, 2],
        ),
        shared("half_", &SharedElements::from_vec(subnormal), &[45, 2], &[2, 90]),
        shared(
            "brain",
            &SharedElements::from_vec(floats().map(half::bf16::from_f32).collect()),
            &[9, 10],
            &[10, 1],
        ),
        shared("exact", &SharedElements::from_vec(floats().map(f64::from).collect()), &[90], &[0]),
    ]
}

/// Memory at a fixed address of the running program.
#[derive(Default)]
pub(super) struct Arena(Vec<u8>);

const BASE: u64 = 0x2000_0000_0000;

impl Arena {
    pub(super) fn put(&mut self, bytes: &[u8]) -> u64 {
        self.0.resize(self.0.len().next_multiple_of(16), 0);
        let at = BASE + self.0.len() as u64;
        self.0.extend(bytes);
        at
    }
}

/// Scores that read the float of a distance, which kernels add up, and an element of each head beside it.
const DISTANCES: [&str; 6] = [
    "score + 1.0 / f32(kv - q)",
    "score + 1.0 / f32(q - kv)",
    "score * exp(-exact[h] * f32((kv - q).abs()))",
    "score - half_[h_kv, 0] * f32((q - kv).abs()) + f32(kv - q) + brain[b, 0]",
    "score / f32(kv - q) * half_[h, 0]",
    "score + exact[kv + q - kv] + f32(i32(f32(q - kv) * 0.3))",
];

const HEAD: Head = Head { b: 1, h: 3, h_kv: 1, q_len: 70, kv_len: 90 };
const QUERIES: [i32; 4] = [0, 5, 33, 69];
const KEYS: Range<i32> = 60..90;

/// One case: its mods and the rectangles asked about.
pub(super) struct Case {
    pub mask: MaskMod,
    pub score: ScoreMod,
    pub gradient: Option<ScoreGradient>,
    pub dropout: Dropout,
    pub rectangles: Vec<(Range<i32>, Range<i32>)>,
    pub checked: bool,
}

/// What was compared, and how much of it tells anything.
pub(super) struct Agreement {
    rectangles: usize,
    decided: usize,
    as_on_cpu: usize,
    reported: usize,
    /// Of them, those of an element that is no i32.
    wide: usize,
}

impl Case {
    pub(super) fn source(&self, fast_math: bool) -> ModsSource {
        let extent = Extent { batch: 2, heads_q: 4, heads_kv: 2, queries: 70, keys: 90 };
        let checked = self.checked;
        let options = Options { extent, fast_math, checked, deterministic: false };
        let mods = Mods {
            mask: Some(&self.mask),
            score: Some(&self.score),
            gradient: self.gradient.as_ref(),
            dropout: Some(&self.dropout),
        };
        ModsSource::new(mods, &options).unwrap()
    }

    /// Reads of an i64 that no i32 holds, and nothing else to report.
    fn too_wide() -> Self {
        let names = memory().iter().fold(Names::new(), |names, b| names.buffer(b));
        let mask = parse_mask("wide[h, kv] <= wide[h, q]", &names).unwrap();
        let score = parse_score("score * 0.5 + f32(wide[h, kv])", &names).unwrap();
        let rectangles = vec![(0..4, 60..70), (60..64, 60..63), (5..6, 64..65)];
        let (gradient, dropout) = (score.gradient().ok(), Dropout::new(0.3, 5));
        Case { mask, gradient, score, dropout, rectangles, checked: true }
    }

    /// A score that tells how far apart query and key are, with its sign where they are not apart.
    fn of_distance(score: &str) -> Self {
        let names = memory().iter().fold(Names::new(), |names, b| names.buffer(b));
        let mask = parse_mask("kv != 63", &names).unwrap();
        let score = parse_score(score, &names).unwrap();
        let (gradient, dropout) = (score.gradient().ok(), Dropout::new(0.3, 5));
        Case { mask, gradient, score, dropout, rectangles: vec![], checked: false }
    }

    fn random(seed: i32) -> Self {
        let buffers = buffers();
        let mut r = Random::new(seed as u64);
        let coordinates = [Leaf::Q, Leaf::Kv, Leaf::H, Leaf::QLen, Leaf::HKv, Leaf::B, Leaf::KvLen];
        let mask = expression(&mut r, &coordinates, &buffers, Type::Bool);
        let with_score = [Leaf::Q, Leaf::Kv, Leaf::H, Leaf::Score];
        let score = ScoreMod::new(&expression(&mut r, &with_score, &buffers, Type::F32)).unwrap();
        let mut rectangle = || {
            let (q, kv) = (r.below(64) as i32, r.below(64) as i32);
            (q..q + 1 + r.below(6) as i32, kv..kv + 1 + r.below(26) as i32)
        };
        Case {
            mask: MaskMod::new(&mask).unwrap(),
            gradient: score.gradient().ok(),
            score,
            dropout: Dropout::new(0.3, seed as u64),
            rectangles: (0..16).map(|_| rectangle()).collect(),
            checked: seed % 2 == 0,
        }
    }
}

fn row_of_scores(q: i32) -> Vec<f32> {
    KEYS.map(|kv| ((q * 31 + kv * 7) % 23 - 11) as f32 * 0.3).collect()
}

/// The captured buffers in the arena.
pub(super) fn put_buffers(arena: &mut Arena, source: &ModsSource) -> Vec<BufferAddresses> {
    let addresses = source.buffers().iter().map(|b| BufferAddresses {
        elems: arena.put(&buffer_bytes(b)),
        gradient: arena.put(&vec![0; 4 * b.elems() + 4]),
        ranges: arena.put(&range_table(b)),
        sums: 0,
    });
    addresses.collect()
}

/// What the compiled cases write, or nothing without a host compiler.
fn executed(cases: &[Case]) -> Option<Vec<u8>> {
    let mut text = format!("{}{PRELUDE}", include_str!("shim.h"));
    let mut main = String::from("int main() { take_arena();");
    let mut arena = Arena::default();
    let mut input = Vec::new();
    for (i, case) in cases.iter().enumerate() {
        let source = case.source(false);
        text.push_str(&format!("namespace p{i} {{\n{}RUN\n}}\n", source.text()));
        main.push_str(&format!(" p{i}::run();"));
        let report = if case.checked { arena.put(&[0; 16]) } else { 0 };
        let mods = source.pack(&put_buffers(&mut arena, &source), report).unwrap();
        let mut int = |x: i32| input.extend(x.to_le_bytes());
        int(mods.len() as i32);
        mods.chunks(4).for_each(|word| int(i32::from_le_bytes(word.try_into().unwrap())));
        [HEAD.b, HEAD.h, HEAD.h_kv, HEAD.q_len, HEAD.kv_len].into_iter().for_each(&mut int);
        int((QUERIES.len() * KEYS.len()) as i32);
        for q in QUERIES {
            for (kv, score) in KEYS.zip(row_of_scores(q)) {
                [q, kv, score.to_bits() as i32].into_iter().for_each(&mut int);
            }
        }
        [report as i32, (report >> 32) as i32, case.rectangles.len() as i32]
            .into_iter()
            .for_each(&mut int);
        for (q, kv) in &case.rectangles {
            [q.start, q.end, kv.start, kv.end].into_iter().for_each(&mut int);
        }
    }
    program_output(&format!("{text}{main} }}\n"), arena, input)
}

/// What the program `text` writes, given an arena and the rest of its input; nothing, and a line
/// that says so, without a host compiler.
pub(super) fn program_output(text: &str, arena: Arena, input: Vec<u8>) -> Option<Vec<u8>> {
    let len = arena.0.len() as u64;
    let input = [&BASE.to_le_bytes()[..], &len.to_le_bytes(), &arena.0, &input].concat();
    crate::compile::on_host::output(text, &["-O0", "-ffp-contract=off"], input)
}

fn point(q: i32, kv: i32, score: f32) -> Point {
    let Head { b, h, h_kv, q_len, kv_len } = HEAD;
    Point { b, h, h_kv, q, kv, q_len, kv_len, score }
}

fn integer(value: ScalarValue) -> i32 {
    let ScalarValue::I32(value) = value else { panic!("{value:?} is no i32") };
    value
}

/// Equal bits, or both NaN.
fn same(x: f32, y: f32) -> bool {
    x.to_bits() == y.to_bits() || x.is_nan() && y.is_nan()
}

/// Compares what printed mods give with the CPU's bits and bounds; nothing without a compiler.
pub(super) fn agree_with_the_cpu(cases: &[Case]) -> Option<Agreement> {
    let bytes = executed(cases)?;
    let mut words = bytes.chunks(4).map(|word| u32::from_le_bytes(word.try_into().unwrap()));
    let mut word = || words.next().expect("one answer for each question");
    let (width, padded) = (KEYS.len(), KEYS.len().next_multiple_of(LANES));
    let (mut decided, mut as_on_cpu, mut reported, mut wide) = (0, 0, 0, 0);
    for (number, case) in cases.iter().enumerate() {
        let machine = |program: &Program| {
            let mut machine = TileProgram::compile(program).machine(1, width);
            machine.set_head(HEAD);
            machine
        };
        // The first root over the one row of a tile that was run last.
        let row = |machine: &Machine| {
            let mut row = vec![f32::NAN; padded];
            machine.store(0, &mut row, padded);
            row
        };
        let mut mask = machine(case.mask.program());
        let mut score = machine(case.score.program());
        let mut gradient = case.gradient.as_ref().map(|g| machine(g.program()));
        let mut dropout_keep = machine(case.dropout.keep_mask().program());
        for q in QUERIES {
            let mut given = row_of_scores(q);
            given.resize(padded, 0.0);
            let given = Scores { data: &given, stride: padded };
            let (mut seen, mut kept) = (MaskBits::default(), MaskBits::default());
            mask.set_tile(q..q + 1, KEYS);
            mask.mask_bits(None, &mut seen);
            dropout_keep.set_tile(q..q + 1, KEYS);
            dropout_keep.mask_bits(None, &mut kept);
            score.set_tile(q..q + 1, KEYS);
            score.run(0..1, 0..width, given, Some(&seen));
            let scores = row(&score);
            let slopes = gradient.as_mut().map_or(vec![1.0; padded], |gradient| {
                gradient.set_tile(q..q + 1, KEYS);
                gradient.run(0..1, 0..width, given, None);
                row(gradient)
            });
            for column in 0..width {
                let at = format!("case {number}, q {q}, kv {}", KEYS.start + column as i32);
                assert_eq!(word() == 1, seen.get(0, column), "{at}: {}", case.mask);
                let (got, want) = (f32::from_bits(word()), scores[column]);
                assert!(same(got, want), "{at}: {got}, not {want}: {}", case.score);
                let (got, want) = (f32::from_bits(word()), slopes[column]);
                assert!(same(got, want), "{at}: slope {got}, not {want}: {}", case.score);
                assert_eq!(word() == 1, kept.get(0, column), "{at}: dropout");
            }
        }
        if case.checked {
            let report = [(); 4].map(|()| word() as i32);
            let wrong = mask.out_of_range().or(score.out_of_range());
            let said = case.source(false).out_of_range(report);
            assert_eq!(said.is_some(), wrong.is_some(), "case {number}: {said:?}, not {wrong:?}");
            if let Some(said) = said {
                let inside = match said {
                    OutOfRange::Index { index, len, .. } => {
                        usize::try_from(index).is_ok_and(|index| index < len)
                    }
                    OutOfRange::Value { value, .. } => value != TOO_WIDE,
                };
                assert!(!inside, "case {number}: {said}");
                wide += usize::from(matches!(said, OutOfRange::Value { .. }));
                reported += 1;
            }
        }
        let bounds = Bounds::new(case.mask.program());
        for (q, kv) in &case.rectangles {
            let mut machine = TileProgram::compile(case.mask.program()).machine(q.len(), kv.len());
            let mut entries = MaskBits::default();
            machine.set_head(HEAD);
            machine.set_tile(q.clone(), kv.clone());
            machine.mask_bits(None, &mut entries);
            let live = entries.count();
            let seen = [live < (q.len() * kv.len()) as u64, live > 0];
            let says = word();
            let right = match says {
                0 => !seen[1],
                1 => !seen[0],
                _ => says == 2,
            };
            assert!(right, "case {number}: {says} over {q:?} x {kv:?} {seen:?}: {}", case.mask);
            decided += usize::from(says != 2);
            let on_cpu = bounds.cover(&HEAD, q.clone(), kv.clone()) != Cover::Undecided;
            as_on_cpu += usize::from(on_cpu == (says != 2));
        }
    }
    let rectangles: usize = cases.iter().map(|c| c.rectangles.len()).sum();
    println!("{decided} of {rectangles} rectangles decided, {as_on_cpu} as on the CPU");
    println!("indices out of range in {reported} of {} cases", cases.len());
    Some(Agreement { rectangles, decided, as_on_cpu, reported, wide })
}

#[test]
fn random_programs_give_the_cpus_bits_and_bounds_that_hold() {
    let seed = 20_261;
    println!("seed {seed}");
    let mut cases: Vec<_> = (seed..seed + 250).map(Case::random).collect();
    cases.push(Case::too_wide());
    cases.extend(DISTANCES.map(Case::of_distance));
    let Some(found) = agree_with_the_cpu(&cases) else { return };
    let Agreement { rectangles, decided, as_on_cpu, reported, wide } = found;
    assert!(decided * 8 > rectangles && as_on_cpu * 10 > rectangles * 9);
    assert!((1..cases.len() / 2).contains(&reported) && wide > 0, "{reported}, {wide} too wide");
}

#[test]
fn random_programs_compile_for_a_gpu_with_and_without_approximations() {
    let compiler = match Compiler::get() {
        Ok(compiler) => compiler,
        Err(error) => return println!("skipped: {error}"),
    };
    for fast_math in [false, true] {
        let mut text = format!("typedef long long i64;\n{PRELUDE}");
        for seed in 0..8 {
            let source = Case::random(seed).source(fast_math);
            let calls = CALLS.replace("calls", &format!("calls{seed}"));
            let of = source.text();
            text.push_str(&format!("namespace p{seed} {{\n{of}{calls}}}\n"));
        }
        let compiled = Cache::at(None)
            .compile(compiler, &text, Arch::new((8, 0)))
            .unwrap_or_else(|e| panic!("{:?}", e.kind()));
        assert_eq!(compiled.kernels.len(), 8);
    }
}

#[test]
fn a_rectangle_that_reads_one_element_of_a_bias_does_and_scores_need_no_more() {
    let table = |shape: &[usize]| learned("table", shape);
    let biases = [
        scores::t5_buckets(&table(&[32, 4]), true, 48).unwrap(),
        scores::t5_buckets(&table(&[12, 1]), false, 40).unwrap(),
        scores::relative_bias(&table(&[4, 11])).unwrap(),
        scores::relative_bias(&table(&[1, 129])).unwrap(),
    ];
    let mut text = format!("{}{PRELUDE}", include_str!("shim.h"));
    let mut main = String::from("int main() { take_arena();");
    let (mut arena, mut input, mut r) = (Arena::default(), Vec::new(), Random::new(5));
    let mut asked = Vec::new();
    for (i, score) in biases.iter().enumerate() {
        let gradient = score.gradient().unwrap();
        let mods = Mods { score: Some(score), gradient: Some(&gradient), ..Mods::default() };
        let source = ModsSource::new(mods, &options()).unwrap();
        text.push_str(&format!("namespace p{i} {{\n{}RUN_ONE\n}}\n", source.text()));
        main.push_str(&format!(" p{i}::run();"));
        let bytes = source.pack(&put_buffers(&mut arena, &source), 0).unwrap();
        input.extend((bytes.len() as i32).to_le_bytes());
        input.extend(bytes);
        input.extend(200i32.to_le_bytes());
        for _ in 0..200 {
            let (q, kv) = (r.below(300) as i32, r.below(300) as i32);
            let (q, kv) = (q..q + 1 + r.below(40) as i32, kv..kv + 1 + r.below(40) as i32);
            input.extend([q.start, q.end, kv.start, kv.end].map(i32::to_le_bytes).concat());
            asked.push((gradient.clone(), q, kv));
        }
    }
    let Some(bytes) = program_output(&format!("{text}{main} }}\n"), arena, input) else { return };
    let mut found = [0, 0];
    for (answer, (gradient, q, kv)) in bytes.chunks(4).zip(&asked) {
        let mut elements = std::collections::BTreeSet::new();
        for (q, kv) in q.clone().flat_map(|q| kv.clone().map(move |kv| (q, kv))) {
            let values = gradient.program().eval(&point(q, kv, 0.0)).expect("indices in range");
            let index = gradient.captures()[0].index.iter().map(|&i| integer(values[i]));
            elements.insert(index.collect::<Vec<_>>());
        }
        let says_one = answer[0] > 0;
        assert!(answer[0] != 1, "{q:?} x {kv:?}: a score given what it reads is another one");
        assert!(!says_one || elements.len() == 1, "{q:?} x {kv:?} reads {elements:?}");
        found[usize::from(says_one)] += 1;
    }
    println!("{} rectangles of several elements, {} of one", found[0], found[1]);
    assert!(found[0] > 100 && found[1] > 100);
}

#[test]
fn what_the_score_indexes_is_read_for_each_score() {
    let names = Names::new().buffer(Buffer::vector("bias", vec![0.5f32; 41]).any());
    let text = |index: &str| format!("score + bias[min(max(q - kv{index}, 0), 40)]");
    for (index, reads) in [("", 1), (" + i32(score)", 0)] {
        let score = parse_score(&text(index), &names).unwrap();
        let decides = vec![false; score.program().graph().nodes().len()];
        assert_eq!(levelling_reads(score.program(), &decides).len(), reads, "{index}");
    }
}

#[test]
fn what_entries_give_to_learned_buffers_is_what_the_cpu_gives() {
    let table = learned;
    let short = table("short", &[9]);
    let rel = scores::relative_bias(&table("rel", &[4, 11])).unwrap();
    let slopes = scores::alibi_with(&table("slopes", &[4])).unwrap();
    let all = [
        rel.then(&scores::soft_cap(2.0).unwrap()),
        slopes.then(&scores::temperature(&table("temperature", &[4])).unwrap()).then(&rel),
        scores::additive_bias(&table("bias", &[2, 1, 70, 90])).unwrap(),
        scores::t5_buckets(&table("t5", &[12, 1]), false, 40).unwrap(),
        // Both reads are clamped to the buffer.
        closure::score_mod!(|score, q, kv| score * short[q - 30] + short[kv]),
        closure::score_mod!(|score| score + short[(score.detach() * 3.0).to_i32() + 4]),
    ];
    let weight = |q: i32, kv: i32| ((q * 13 + kv * 5) % 17 - 8) as f32 * 0.125;
    let mut text = format!("{}{PRELUDE}", include_str!("shim.h"));
    let mut main = String::from("int main() { take_arena();");
    let (mut arena, mut input) = (Arena::default(), Vec::new());
    let mut sources = Vec::new();
    for (i, score) in all.iter().enumerate() {
        let gradient = score.gradient().unwrap();
        let mods = Mods { score: Some(score), gradient: Some(&gradient), ..Mods::default() };
        let accurate = Options { fast_math: false, ..options() };
        let source = ModsSource::new(mods, &accurate).unwrap();
        text.push_str(&format!("namespace p{i} {{\n{}RUN_CAPTURES\n}}\n", source.text()));
        main.push_str(&format!(" p{i}::run();"));
        let addresses = put_buffers(&mut arena, &source);
        let bytes = source.pack(&addresses, 0).unwrap();
        let mut int = |x: i32| input.extend(x.to_le_bytes());
        int(bytes.len() as i32);
        bytes.chunks(4).for_each(|word| int(i32::from_le_bytes(word.try_into().unwrap())));
        [HEAD.b, HEAD.h, HEAD.h_kv, HEAD.q_len, HEAD.kv_len].into_iter().for_each(&mut int);
        int((QUERIES.len() * KEYS.len()) as i32);
        for q in QUERIES {
            for (kv, score) in KEYS.zip(row_of_scores(q)) {
                let bits = |x: f32| x.to_bits() as i32;
                [q, kv, bits(score), bits(weight(q, kv))].into_iter().for_each(&mut int);
            }
        }
        int(source.learned().count() as i32);
        for slot in source.learned() {
            input.extend(addresses[slot].gradient.to_le_bytes());
            input.extend((source.buffers()[slot].elems() as u64).to_le_bytes());
        }
        sources.push((source, gradient));
    }
    let Some(bytes) = program_output(&format!("{text}{main} }}\n"), arena, input) else { return };
    let mut got = bytes.chunks(4).map(|word| f32::from_le_bytes(word.try_into().unwrap()));
    for (number, (source, gradient)) in sources.iter().enumerate() {
        let buffers = gradient.program().graph().buffers();
        let mut wanted: Vec<Vec<f64>> = buffers.iter().map(|b| vec![0.0; b.elems()]).collect();
        let mut machine = TileProgram::compile(gradient.program()).machine(1, KEYS.len());
        machine.set_head(HEAD);
        for q in QUERIES {
            let padded = KEYS.len().next_multiple_of(LANES);
            let mut given = row_of_scores(q);
            let mut d: Vec<f32> = KEYS.map(|kv| weight(q, kv)).collect();
            given.resize(padded, 0.0);
            d.resize(padded, 0.0);
            machine.set_tile(q..q + 1, KEYS);
            machine.run(0..1, 0..KEYS.len(), Scores { data: &given, stride: padded }, None);
            for read in gradient.captures() {
                let shape = buffers[read.buffer as usize].shape();
                let read_of =
                    Read { value: read.value, index: &read.index, from_end: read.from_end, shape };
                let wanted = &mut wanted[read.buffer as usize];
                let mut sums = vec![0.0; wanted.len()];
                machine.add_read(read_of, &d, padded, &mut sums);
                wanted.iter_mut().zip(sums).for_each(|(sum, x)| *sum += f64::from(x));
            }
        }
        for slot in source.learned() {
            let buffer = &source.buffers()[slot];
            let of = buffers.iter().position(|b| b.same(buffer)).expect("it has a gradient");
            assert!(wanted[of].iter().any(|&x| x != 0.0), "score {number} gives nothing");
            for (at, want) in wanted[of].iter().enumerate() {
                let got = f64::from(got.next().expect("an element of a gradient"));
                let close = (got - want).abs() <= 1e-5 * (1.0 + want.abs());
                assert!(close, "score {number}, `{}`[{at}]: {got}, not {want}", buffer.name());
            }
        }
    }
}
