//! Embeddings and losses, of all words and of a part of them.

use super::*;
use crate::embedding::{Embedding, EmbeddingBackward, TokenOrder};
use crate::loss::{AddLosses, CrossEntropy, CrossEntropyPart, LOGIT_SUMS, LogitSums};
use crate::optimizer::{TOTALS_LEN, Totals};

const TOKENS: usize = 7;

#[test]
fn rows_by_token_and_their_gradient() {
    let mut random = Random::new(5);
    let (vocabulary, tokens) = (11, 300);
    // Token 7 stands in several segments, 3 and 9 nowhere.
    let ids: Vec<u32> = (0..tokens)
        .map(|t| match t % 3 {
            0 => 7,
            1 => random.below(3) as u32,
            _ => [4, 5, 6, 8, 10][random.below(5)],
        })
        .collect();
    let ints: Vec<i32> = ids.iter().map(|&token| token as i32).collect();
    let (ids_at, shape) = (Memory::of(&ints), [tokens]);
    for (placing, width) in placings() {
        let table = placing.random([vocabulary, width], &mut random, 1.0);
        let out = placing.empty([tokens, width]);
        let embedding = Embedding {
            table: table.tensor(),
            first: None,
            tokens: ids_at.array(ElementType::I32, &shape),
            out: out.tensor(),
            scale: 2.0,
        };
        if !run(&embedding) {
            return;
        }
        let rows = table.values();
        let expected: Vec<f64> = ids
            .iter()
            .flat_map(|&id| rows[id as usize * width..][..width].iter().map(|x| 2.0 * x))
            .collect();
        assert_eq!(out.values(), expected, "twice a number is exact");

        let d_out = placing.random([tokens, width], &mut random, 1.0);
        sums_by_token(&ids, vocabulary, &d_out, placing.dtype, &mut random);
    }
}

/// Adds the gradients `d_out` of the rows of `ids` to a table, in f32 and in `dtype`, and compares with sums in f64.
fn sums_by_token(
    ids: &[u32],
    vocabulary: usize,
    d_out: &Matrix,
    dtype: DType,
    random: &mut Random,
) {
    let order = TokenOrder::new(ids).unwrap();
    let (words, words_len) = (Memory::of(&order.words()), [order.words().len()]);
    let (g, f32s) = (d_out.values(), Placing::dense(DType::F32));
    let width = g.len() / ids.len();
    for sums in [f32s, Placing::dense(dtype)] {
        let d_table = sums.random([vocabulary, width], random, 1.0);
        let mut expected = d_table.values();
        for (t, &id) in ids.iter().enumerate() {
            for i in 0..width {
                expected[id as usize * width + i] += 2.0 * g[t * width + i];
            }
        }
        let partial = f32s.empty([order.partial_rows(), width]);
        let block = EmbeddingBackward {
            d_out: d_out.tensor(),
            d_table: d_table.tensor(),
            first: None,
            order: &order,
            words: words.array(ElementType::I32, &words_len),
            partial: partial.tensor(),
            scale: 2.0,
        };
        if !run(&block) {
            return;
        }
        partial.values();
        close("d_table", &d_table.values(), &expected, tolerance(sums.dtype));
    }
}

/// Rows that a CTA of twice as many threads has no end of, of tokens that stand at one place and at several.
#[test]
fn the_gradient_of_wide_rows_is_that_of_narrow_ones() {
    let mut random = Random::new(25);
    let ids: Vec<u32> = (0..70).map(|t| if t < 66 { 3 } else { t % 2 }).collect();
    let d_out = Placing::dense(DType::BF16).random([ids.len(), 2056], &mut random, 1.0);
    sums_by_token(&ids, 5, &d_out, DType::BF16, &mut random);
}

/// Rows of a part of a table: those of other tokens are 0, and nothing is added to any row by them.
#[test]
fn rows_of_a_part_of_a_table_and_their_gradient() {
    let mut random = Random::new(15);
    let (tokens, ids_of_part) = (400, 3..8);
    // Tokens before, in and behind the part; 2, 5 and 9 stand in several segments.
    let one = |random: &mut Random, t: usize| match t % 2 {
        0 => [2, 5, 9][t / 2 % 3],
        _ => random.below(12) as u32,
    };
    let ids: Vec<u32> = (0..tokens).map(|t| one(&mut random, t)).collect();
    let order = TokenOrder::new(&ids).unwrap();
    let words = Memory::of(&order.words());
    let ints: Vec<i32> = ids.iter().map(|&token| token as i32).collect();
    let (ids_at, shape) = (Memory::of(&ints), [tokens]);
    let place = |id: u32| ids_of_part.contains(&id).then(|| (id - ids_of_part.start) as usize);
    let (rows, first) = (ids_of_part.len(), Some(ids_of_part.start as usize));
    for (placing, width) in placings() {
        let table = placing.random([rows, width], &mut random, 1.0);
        let out = placing.empty([tokens, width]);
        let tokens_at = ids_at.array(ElementType::I32, &shape);
        let embedding = Embedding {
            table: table.tensor(),
            first,
            tokens: tokens_at,
            out: out.tensor(),
            scale: 2.0,
        };
        if !run(&embedding) {
            return;
        }
        let of = table.values();
        let row = |id: u32| match place(id) {
            Some(at) => of[at * width..][..width].iter().map(|x| 2.0 * x).collect(),
            None => vec![0.0; width],
        };
        assert_eq!(out.values(), ids.iter().flat_map(|&id| row(id)).collect::<Vec<f64>>());

        let d_out = placing.random([tokens, width], &mut random, 1.0);
        let f32s = Placing::dense(DType::F32);
        for sums in [f32s, Placing::dense(placing.dtype)] {
            let d_table = sums.random([rows, width], &mut random, 1.0);
            let (mut expected, g) = (d_table.values(), d_out.values());
            for (t, &id) in ids.iter().enumerate() {
                let Some(at) = place(id) else { continue };
                for i in 0..width {
                    expected[at * width + i] += 2.0 * g[t * width + i];
                }
            }
            let partial = f32s.empty([order.partial_rows(), width]);
            let words_len = [order.words().len()];
            run(&EmbeddingBackward {
                d_out: d_out.tensor(),
                d_table: d_table.tensor(),
                first,
                order: &order,
                words: words.array(ElementType::I32, &words_len),
                partial: partial.tensor(),
                scale: 2.0,
            });
            close("d_table", &d_table.values(), &expected, tolerance(sums.dtype));
        }
    }
}

/// Losses of one token's logits, and the gradient of both.
fn entropy(z: &[f64], label: i32, cap: Option<f64>, z_weight: f64) -> ([f64; 2], Vec<f64>) {
    if label < 0 {
        return ([0.0; 2], vec![0.0; z.len()]);
    }
    let capped = |z: f64| cap.map_or(z, |cap| cap * (z / cap).tanh());
    let slope = |z: f64| cap.map_or(1.0, |cap| 1.0 - (z / cap).tanh().powi(2));
    let most = z.iter().map(|&z| capped(z)).fold(f64::NEG_INFINITY, f64::max);
    let lse = most + z.iter().map(|&z| (capped(z) - most).exp()).sum::<f64>().ln();
    let label = label as usize;
    let gradient = z
        .iter()
        .enumerate()
        .map(|(i, &z)| {
            let p = (capped(z) - lse).exp() * (1.0 + 2.0 * z_weight * lse);
            (p - f64::from(i == label)) * slope(z)
        })
        .collect();
    ([lse - capped(z[label]), z_weight * lse * lse], gradient)
}

#[test]
fn losses_and_gradients_of_logits_are_those_of_f64() {
    let mut random = Random::new(6);
    for (placing, width) in placings() {
        for (cap, z_weight) in [(None, 0.0), (Some(20.0), 1e-3)] {
            let vocabulary = 50 * width + usize::from(placing.gap > 0);
            let logits = placing.random([TOKENS, vocabulary], &mut random, 30.0);
            let z = logits.values();
            let labels: Vec<i32> = (0..TOKENS)
                .map(|t| if t == 2 { -100 } else { random.below(vocabulary) as i32 })
                .collect();
            let labels_at = Memory::of(&labels);
            let labels_at = labels_at.array(ElementType::I32, &[TOKENS]);
            let [losses, z_losses] =
                [(); 2].map(|()| Placing::dense(DType::F32).empty([1, TOKENS]));
            let wanted = (z_weight > 0.0).then(|| z_losses.vector());
            let block = CrossEntropy {
                logits: logits.tensor(),
                labels: labels_at,
                losses: losses.vector(),
                z_losses: wanted,
                gradient: false,
                cap: cap.map(|cap: f64| cap as f32),
                z_weight: z_weight as f32,
            };
            if !run(&block) {
                return;
            }
            assert_eq!(logits.values(), z, "without a gradient logits stay");
            let expected: Vec<_> = z
                .chunks(vocabulary)
                .zip(&labels)
                .map(|(z, &label)| entropy(z, label, cap, f64::from(z_weight as f32)))
                .collect();
            let of_losses: Vec<f64> = expected.iter().map(|([loss, _], _)| *loss).collect();
            let of_z: Vec<f64> = expected.iter().map(|([_, z_loss], _)| *z_loss).collect();
            close("losses", &losses.values(), &of_losses, 2e-6);
            if wanted.is_some() {
                close("z-losses", &z_losses.values(), &of_z, 2e-6);
            }
            let first = losses.values();
            run(&CrossEntropy { gradient: true, ..block });
            assert_eq!(losses.values(), first);
            let gradient: Vec<f64> = expected.into_iter().flat_map(|(_, g)| g).collect();
            close("gradient", &logits.values(), &gradient, tolerance(placing.dtype) + 4e-6);

            let totals = Memory::of(
                &[Totals { labelled: 10, ..Totals::default() }]
                    .map(|t| foveate_gpu::abi::Abi::bytes(&t))[0],
            );
            let add = AddLosses {
                losses: losses.vector(),
                z_losses: wanted,
                labels: labels_at,
                totals: totals.array(ElementType::F64, &[TOTALS_LEN]),
            };
            run(&add);
            run(&add);
            let words: Vec<u64> = totals.read();
            let sum: f64 = first.iter().sum();
            assert!((f64::from_bits(words[0]) - 2.0 * sum).abs() < 1e-9 * sum);
            assert_eq!(words[1], 10 + 2 * (TOKENS as u64 - 1));
            let sum = if wanted.is_some() { z_losses.values().iter().sum() } else { 0.0 };
            assert!((f64::from_bits(words[2]) - 2.0 * sum).abs() <= 1e-9 * sum);
        }
    }
}

/// Rows of as many words as have CTAs of their own size, whose threads have several vectors each, and some one more
/// than others; one at a time where words lie at odd places. On a rank that has all of them, and on one of several.
#[test]
fn losses_of_long_rows_are_those_of_f64() {
    let mut random = Random::new(36);
    let (dtype, labels) = (DType::BF16, [65_535, -100, 3]);
    let memory = Memory::of(&labels);
    for vocabulary in [9 * 8192 + 24, 66_001] {
        let logits = Placing::dense(dtype).random([3, vocabulary], &mut random, 30.0);
        let z = logits.values();
        let f32s = Placing::dense(DType::F32);
        let [losses, of_part] = [(); 2].map(|()| f32s.empty([1, 3]));
        let labels_at = memory.array(ElementType::I32, &[3]);
        let block = CrossEntropy {
            logits: logits.tensor(),
            labels: labels_at,
            losses: losses.vector(),
            z_losses: None,
            gradient: true,
            cap: None,
            z_weight: 1e-3,
        };
        if !run(&block) {
            return;
        }
        // A rank that has all words as its part.
        let part = Placing::dense(dtype).matrix([3, vocabulary], &z);
        let sums = f32s.empty([3, LOGIT_SUMS]);
        let (first, cap) = (0, None);
        run(&LogitSums {
            logits: part.tensor(),
            labels: labels_at,
            first,
            sums: sums.tensor(),
            cap,
        });
        run(&CrossEntropyPart {
            logits: part.tensor(),
            labels: labels_at,
            first,
            sums: sums.tensor(),
            losses: of_part.vector(),
            z_losses: None,
            gradient: true,
            cap,
            z_weight: 1e-3,
        });
        let z_weight = f64::from(1e-3f32);
        let expected = z.chunks(vocabulary).zip(labels).map(|(z, l)| entropy(z, l, None, z_weight));
        let (of_losses, gradient): (Vec<_>, Vec<_>) =
            expected.map(|([loss, _], gradient)| (loss, gradient)).unzip();
        for (losses, logits) in [(losses, logits), (of_part, part)] {
            close("losses", &losses.values(), &of_losses, 2e-6);
            close("gradient", &logits.values(), &gradient.concat(), tolerance(dtype) + 4e-6);
        }
    }
}

/// Ranks that have parts of the logits, of uneven lengths and one of them with nothing that counts: the losses
/// of all of them, and each its part of the gradient.
#[test]
fn losses_of_parts_of_a_vocabulary_are_those_of_all_of_it() {
    let mut random = Random::new(26);
    for (placing, width) in placings() {
        for (cap, z_weight) in [(None, 0.0), (Some(20.0), 1e-3f32)] {
            let lengths = [20 * width, 9 * width, 30 * width];
            let mut first = 0;
            let parts: Vec<(usize, Matrix)> = lengths
                .iter()
                .map(|&len| {
                    first += len;
                    (first - len, placing.random([TOKENS, len], &mut random, 30.0))
                })
                .collect();
            let vocabulary = first;
            let values: Vec<Vec<f64>> = parts.iter().map(|(_, logits)| logits.values()).collect();
            let labels: Vec<i32> = (0..TOKENS)
                .map(|t| if t == 2 { -100 } else { random.below(vocabulary) as i32 })
                .collect();
            let memory = Memory::of(&labels);
            let labels_at = memory.array(ElementType::I32, &[TOKENS]);
            let f32s = Placing::dense(DType::F32);
            let mut told = Vec::new();
            for (first, logits) in &parts {
                let sums = f32s.empty([TOKENS, LOGIT_SUMS]);
                let block = LogitSums {
                    logits: logits.tensor(),
                    labels: labels_at,
                    first: *first,
                    sums: sums.tensor(),
                    cap: cap.map(|cap: f64| cap as f32),
                };
                if !run(&block) {
                    return;
                }
                told.extend(sums.values());
            }
            let all = f32s.matrix([3 * TOKENS, LOGIT_SUMS], &told);
            let expected: Vec<([f64; 2], Vec<f64>)> = (0..TOKENS)
                .map(|t| {
                    let row = values.iter().zip(lengths).flat_map(|(z, len)| &z[t * len..][..len]);
                    let z_weight = f64::from(z_weight);
                    entropy(&row.copied().collect::<Vec<f64>>(), labels[t], cap, z_weight)
                })
                .collect();
            let of_losses: Vec<f64> = expected.iter().map(|([loss, _], _)| *loss).collect();
            let of_z: Vec<f64> = expected.iter().map(|([_, z_loss], _)| *z_loss).collect();
            let mut bits = Vec::new();
            for ((first, logits), z) in parts.iter().zip(&values) {
                let [losses, z_losses] = [(); 2].map(|()| f32s.empty([1, TOKENS]));
                let block = CrossEntropyPart {
                    logits: logits.tensor(),
                    labels: labels_at,
                    first: *first,
                    sums: all.tensor(),
                    losses: losses.vector(),
                    z_losses: (z_weight > 0.0).then(|| z_losses.vector()),
                    gradient: false,
                    cap: cap.map(|cap| cap as f32),
                    z_weight,
                };
                run(&block);
                assert_eq!(&logits.values(), z, "without a gradient logits stay");
                run(&CrossEntropyPart { gradient: true, ..block });
                close("losses", &losses.values(), &of_losses, 2e-6);
                if z_weight > 0.0 {
                    close("z-losses", &z_losses.values(), &of_z, 2e-6);
                }
                bits.push(losses.values());
                let len = z.len() / TOKENS;
                let own: Vec<f64> =
                    expected.iter().flat_map(|(_, d)| d[*first..][..len].to_vec()).collect();
                close("gradient", &logits.values(), &own, tolerance(placing.dtype) + 4e-6);
            }
            assert!(
                bits.iter().all(|losses| *losses == bits[0]),
                "losses are the same on all ranks"
            );
        }
    }
}

/// Logits beyond what can be subtracted, and those that say that there is no such word.
#[test]
fn large_and_infinite_logits_have_their_loss() {
    let minus = f64::NEG_INFINITY;
    // Whole vectors have no word at all.
    let rows = [
        [3e38, -3e38, 0.0, 1.0, minus, minus, minus, minus],
        [minus, minus, 5.0, minus, minus, minus, minus, minus],
        [minus, minus, minus, minus, minus, 1.0, minus, 1.0],
        [f64::NAN, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0],
    ];
    let expected = [0.0, 0.0, 2f64.ln(), f64::NAN];
    let labels = Memory::of(&[0i32, 2, 5, 1]);
    let placing = Placing::dense(DType::F32);
    let logits = placing.matrix([4, 8], rows.as_flattened());
    let losses = placing.empty([1, 4]);
    let block = CrossEntropy {
        logits: logits.tensor(),
        labels: labels.array(ElementType::I32, &[4]),
        losses: losses.vector(),
        z_losses: None,
        gradient: true,
        cap: None,
        z_weight: 0.0,
    };
    if !run(&block) {
        return;
    }
    for (got, expected) in losses.values().iter().zip(expected) {
        assert!((got - expected).abs() < 1e-6 || got.is_nan() && expected.is_nan(), "{got}");
    }
    let gradient = logits.values();
    assert_eq!(gradient[..16], [0.0; 16]);
    assert_eq!(gradient[16..24], [0.0, 0.0, 0.0, 0.0, 0.0, -0.5, 0.0, 0.5]);
    assert!(gradient[24..].iter().all(|x| x.is_nan()));
}
