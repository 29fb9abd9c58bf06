//! Rotations, each from the same numbers beside f64: one turn in 16 bits is one rounding from it,
//! several in place drift apart by their roundings, each of up to 2⁻⁸ of the pair that it turns.

use foveate_nn::{Blocks, Cpu, Part, RopePairing, RopeTable, Rotation, Turn};
use foveate_tensor::DType;
use foveate_tensor::random::Random;

use super::{Both, HEADS, NORMS, TOKENS, Texts, Twin, narrowed, tables, whole, widened};

/// Half an ulp, of 1 and of the smallest number.
fn half_ulp(dtype: DType) -> [f64; 2] {
    match dtype {
        DType::F16 => [2f64.powi(-11), 2f64.powi(-25)],
        DType::BF16 => [2f64.powi(-8), 0.0],
        _ => [2f64.powi(-24), 0.0],
    }
}

/// What a turn of `before` is in f64, and how far its result in `dtype` may be from it: one rounding,
/// and that of the two products and their sum in f32.
fn turned(
    before: &[f32],
    table: &RopeTable,
    positions: &[i32],
    (pairing, rotation): (RopePairing, Rotation),
    dtype: DType,
) -> Vec<(f64, f64)> {
    let [half_ulp, least] = half_ulp(dtype);
    let mut all: Vec<(f64, f64)> = before.iter().map(|&x| (f64::from(x), 0.0)).collect();
    for (token, row) in all.chunks_exact_mut(HEADS.width()).enumerate() {
        let (cos, sin) = table.at(positions[token]);
        for head in row.chunks_exact_mut(HEADS.dim).take(HEADS.heads_q + HEADS.heads_kv) {
            for (i, (&c, &s)) in cos.iter().zip(sin).enumerate() {
                let (first, second) = match pairing {
                    RopePairing::HalfSplit => (i, i + cos.len()),
                    RopePairing::Interleaved => (2 * i, 2 * i + 1),
                };
                let s = if rotation == Rotation::Forward { s } else { -s };
                let (c, s, a, b) = (f64::from(c), f64::from(s), head[first].0, head[second].0);
                let of = |x: f64, y: f64| {
                    let of_f32 = 2f64.powi(-23) * (x.abs() + y.abs());
                    (x + y, (half_ulp * ((x + y).abs() + of_f32)).max(least) + of_f32)
                };
                (head[first], head[second]) = (of(a * c, -b * s), of(b * c, a * s));
            }
        }
    }
    all
}

/// The first element that is further off than it may be.
fn misfit(found: &[f32], expected: &[(f64, f64)]) -> Option<String> {
    let mut each = found.iter().zip(expected).enumerate();
    each.find(|(_, (found, (x, most)))| {
        let off = (f64::from(**found) - x).abs();
        off.is_nan() || off > *most
    })
    .map(|(i, (found, (x, most)))| format!("[{i}] is {found}, not {x} within {most:.1e}"))
}

/// Every turn that a model makes, on both tables.
fn turns() -> impl Iterator<Item = (usize, (RopePairing, Rotation))> {
    [RopePairing::HalfSplit, RopePairing::Interleaved].into_iter().flat_map(|pairing| {
        let rotations = [Rotation::Forward, Rotation::Backward].into_iter();
        rotations.flat_map(move |rotation| [0, 1].map(|table| (table, (pairing, rotation))))
    })
}

/// `x` as `dtype` holds it.
fn rounded(dtype: DType, values: &[f32]) -> Vec<f32> {
    let bytes = narrowed(dtype, values);
    (0..values.len()).map(|i| widened(dtype, &bytes, i)).collect()
}

#[test]
fn rotations_on_the_device_are_those_of_f64() {
    for mut both in Both::all(6) {
        let (texts, tables) = (Texts::new(&mut both.random), tables());
        let (_, batch) = both.upload(&texts.batch(), &tables);
        for (table, how) in turns() {
            let mut qkv = both.normal(TOKENS * HEADS.width());
            let expected = turned(&qkv.cpu, &tables[table], &texts.positions, how, both.dtype);
            both.cuda
                .rope(Turn { batch: &batch, table, pairing: how.0 }, HEADS, how.1, &mut qkv.cuda)
                .unwrap();
            let mut found = vec![f32::NAN; qkv.cpu.len()];
            both.cuda.download(Part::whole(&qkv.cuda), &mut found).unwrap();
            let off = misfit(&found, &expected);
            assert_eq!(off, None, "{:?}, table {table}, {how:?}", both.dtype);
        }
    }
}

/// The same of the CPU's turns, rounded once: the bound takes each, and neither what is two ulps
/// further off nor several turns in place.
#[test]
fn one_turn_is_one_rounding_and_several_are_not() {
    let mut random = Random::new(7);
    let (texts, tables) = (Texts::new(&mut random), tables());
    let mut cpu = Cpu::default();
    let batch = cpu.upload(&texts.batch(), &tables).unwrap();
    let normal: Vec<f32> = (0..TOKENS * HEADS.width()).map(|_| random.normal() as f32).collect();
    for dtype in [DType::F32, DType::BF16, DType::F16] {
        let before = rounded(dtype, &normal);
        for (table, how) in turns() {
            let expected = turned(&before, &tables[table], &texts.positions, how, dtype);
            let mut found = before.clone();
            cpu.rope(Turn { batch: &batch, table, pairing: how.0 }, HEADS, how.1, &mut found)
                .unwrap();
            let found = rounded(dtype, &found);
            assert_eq!(misfit(&found, &expected), None, "{dtype}, table {table}, {how:?}");
            let two_ulps = 4.0 * half_ulp(dtype)[0] as f32;
            let off: Vec<f32> = found.iter().map(|x| x * (1.0 + two_ulps)).collect();
            assert!(misfit(&off, &expected).is_some());
        }
    }
    // There and back twice in bf16, rounded each time, is further off than one rounding.
    let before = rounded(DType::BF16, &normal);
    let mut found = before.clone();
    for rotation in [Rotation::Forward, Rotation::Forward, Rotation::Backward, Rotation::Backward] {
        let turn = Turn { batch: &batch, table: 0, pairing: RopePairing::HalfSplit };
        cpu.rope(turn, HEADS, rotation, &mut found).unwrap();
        found = rounded(DType::BF16, &found);
    }
    let once = |&x: &f32| (f64::from(x), 2f64.powi(-8) * f64::from(x.abs()));
    let expected: Vec<(f64, f64)> = before.iter().map(once).collect();
    assert!(misfit(&found, &expected).is_some());
}

#[test]
fn norms_of_heads_that_turn_are_those_of_the_cpu() {
    for mut both in Both::all(8) {
        let (texts, tables) = (Texts::new(&mut both.random), tables());
        let batch = both.upload(&texts.batch(), &tables);
        let (qkv, weight) = (both.normal(TOKENS * HEADS.width()), both.normal(2 * HEADS.dim));
        let heads = TOKENS * (HEADS.heads_q + HEADS.heads_kv);
        let norm = NORMS[1];
        for (table, pairing) in [(0, RopePairing::HalfSplit), (1, RopePairing::Interleaved)] {
            let mut inverse = both.nan(DType::F32, heads);
            let mut out = both.activations(TOKENS * HEADS.width());
            let of_cpu = || Some(Turn { batch: &batch.0, table, pairing });
            let of_cuda = || Some(Turn { batch: &batch.1, table, pairing });
            let (w, inverses) = (Part::whole(&weight.cpu), &mut inverse.cpu);
            both.cpu.head_norm(HEADS, &qkv.cpu, w, norm, of_cpu(), inverses, &mut out.cpu).unwrap();
            let (w, inverses) = (Part::whole(&weight.cuda), &mut inverse.cuda);
            both.cuda
                .head_norm(HEADS, &qkv.cuda, w, norm, of_cuda(), inverses, &mut out.cuda)
                .unwrap();
            both.check("inverse of heads", &inverse, 1e-5);
            both.check("normalised heads, turned", &out, 1e-5);
            let mut d_qkv = both.normal(TOKENS * HEADS.width());
            let mut d_weight = both.sums(2 * HEADS.dim);
            let forward = Twin::norm_forward(&qkv, &weight, norm, &inverse);
            let d_w = Some(whole(&mut d_weight.cpu));
            both.cpu.head_norm_backward(HEADS, forward.0, of_cpu(), &mut d_qkv.cpu, d_w).unwrap();
            let d_w = Some(whole(&mut d_weight.cuda));
            both.cuda
                .head_norm_backward(HEADS, forward.1, of_cuda(), &mut d_qkv.cuda, d_w)
                .unwrap();
            both.check("d_qkv of the norm of heads", &d_qkv, 1e-5);
            both.check("d_weight of the norm of heads", &d_weight, 1e-5);
        }
    }
}
