//! What joins attention over parts of the keys, beside f64.

use super::*;
use crate::context::{Join, SumKeys};

const SHAPE: [usize; 3] = [2, 3, 5];

/// f32 numbers `[elems]` in memory.
fn numbers(values: &[f32]) -> Memory {
    Memory::of(values)
}

#[test]
fn parts_of_attention_join_by_their_denominators() {
    let mut random = Random::new(11);
    let [rows, heads, len] = SHAPE;
    let none = f32::NEG_INFINITY;
    for dtype in [DType::BF16, DType::F16, DType::F32] {
        let all = [(16, false), (16, true), (5, false), (5, true)];
        let spans = [0..len, 1..4, 2..5, 3..3];
        let cases = all.iter().flat_map(|case| spans.iter().map(move |tokens| (*case, tokens)));
        for ((dim, in_place), tokens) in cases {
            let shape = [rows, len, heads, dim];
            let elems = rows * len * heads * dim;
            let mut draw = |scale: f64, count: usize| -> Vec<f32> {
                (0..count).map(|_| ((random.unit() * 2.0 - 1.0) * scale) as f32).collect()
            };
            let (x, y) = (draw(2.0, elems), draw(2.0, elems));
            let (mut a, mut b) = (draw(30.0, elems / dim), draw(30.0, elems / dim));
            // Keys in one part, in the other, in none.
            (a[0], b[1], a[2], b[2]) = (none, none, none, none);
            // Of the tokens that see them.
            let count = tokens.len();
            let of_tokens = |values: &[f32], at: &dyn Fn(usize) -> usize, elems: usize| {
                let seen = values.iter().enumerate().filter(|(i, _)| tokens.contains(&at(*i)));
                let seen: Vec<f32> = seen.map(|(_, &value)| value).collect();
                assert_eq!(seen.len(), elems);
                numbers(&seen)
            };
            let part = of_tokens(&y, &|i| i / dim / heads % len, rows * count * heads * dim);
            let part_lse = of_tokens(&b, &|i| i % len, rows * heads * count);
            for (_, lse) in b.iter_mut().enumerate().filter(|(i, _)| !tokens.contains(&(i % len))) {
                *lse = none;
            }
            let (out, lse) = (numbers(&x), numbers(&a));
            let placing = Placing::dense(dtype);
            let to = placing.empty([1, elems]);
            let to_lse = Placing::dense(DType::F32).empty([1, elems / dim]);
            let wide =
                |memory: &Memory| DeviceTensor::contiguous(memory.address(), DType::F32, shape);
            let statistics = |memory: &Memory| {
                DeviceTensor::contiguous(memory.address(), DType::F32, [rows, heads, len])
            };
            let narrow = DeviceTensor::contiguous(to.memory.address(), dtype, shape);
            let join = Join {
                out: wide(&out),
                lse: statistics(&lse),
                tokens: tokens.clone(),
                part: DeviceTensor::contiguous(
                    part.address(),
                    DType::F32,
                    [rows, count, heads, dim],
                ),
                part_lse: DeviceTensor::contiguous(
                    part_lse.address(),
                    DType::F32,
                    [rows, heads, count],
                ),
                to: (!in_place).then_some(narrow),
                to_lse: statistics(&to_lse.memory),
                dtype,
            };
            if !run(&join) {
                return;
            }
            let (mut expected, mut logs) = (vec![0.0; elems], vec![0.0; elems / dim]);
            for (at, value) in expected.iter_mut().enumerate() {
                let (row, head, token) =
                    (at / dim / heads / len, at / dim % heads, at / dim / heads % len);
                let of = (row * heads + head) * len + token;
                let (a, b) = (f64::from(a[of]), f64::from(b[of]));
                let most = a.max(b);
                let weight =
                    |lse: f64| if lse == f64::NEG_INFINITY { 0.0 } else { (lse - most).exp() };
                let sum = weight(a) + weight(b);
                *value = match sum > 0.0 {
                    true => (f64::from(x[at]) * weight(a) + f64::from(y[at]) * weight(b)) / sum,
                    false => f64::from(x[at]),
                };
                logs[of] = if sum > 0.0 { most + sum.ln() } else { most };
            }
            let (found, most) = match in_place {
                true => (out.read::<f32>().into_iter().map(f64::from).collect(), 2e-6),
                false => (to.values(), tolerance(dtype)),
            };
            out.check_guards("out");
            close("out", &found, &expected, most);
            for (found, expected) in to_lse.values().iter().zip(&logs) {
                assert!(found == expected || (found - expected).abs() < 1e-5, "{found} {expected}");
            }
        }
    }
}

#[test]
fn gradients_of_keys_are_summed_in_order_of_rank() {
    let mut random = Random::new(12);
    for (placing, width) in placings() {
        let (rows, all, parts) = (4, 9, 3);
        let from = Placing::dense(DType::F32).random([all, width], &mut random, 3.0);
        let sources: Vec<i32> = vec![0, 1, 2, 3, -1, 8, -1, 4, 7, -1, -1, 5];
        let words = Memory::of(&sources);
        let shape = [parts * rows];
        let to = placing.empty([rows, width]);
        let sources_at = words.array(ElementType::I32, &shape);
        let sum = SumKeys { from: from.tensor(), sources: sources_at, to: to.tensor() };
        if !run(&sum) {
            return;
        }
        let values = from.values();
        let mut expected = vec![0f32; rows * width];
        for (i, &source) in sources.iter().enumerate().filter(|(_, source)| **source >= 0) {
            for column in 0..width {
                let value = values[source as usize * width + column] as f32;
                expected[i % rows * width + column] += value;
            }
        }
        let expected: Vec<f64> = expected.into_iter().map(f64::from).collect();
        assert_eq!(to.values(), placing.matrix([rows, width], &expected).values());
    }
}
