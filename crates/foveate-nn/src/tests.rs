//! Tests of the whole model. Those of a block are beside it.

mod offload;

use crate::{
    Activation, AdamW, Architecture, AttentionConfig, AttentionProgram, Batch, Cpu, Gradients,
    IGNORE, LayerRope, LearnedBuffer, Model, ModelConfig, NnError, NotFinite, NotFinitePlace,
    OptimizerStep, ProgramConfig, Recomputation, Recompute, Rule, Sampling, Sgd, Treatment,
};
use foveate::mods::{masks, scores};
use foveate::tensor::random::Random;

/// Sizes that divide nothing.
pub(crate) fn tiny(tied: bool) -> ModelConfig {
    ModelConfig {
        vocab_size: 13,
        hidden_size: 10,
        intermediate_size: 14,
        num_hidden_layers: 2,
        num_attention_heads: 4,
        num_key_value_heads: Some(2),
        head_dim: Some(6),
        rms_norm_eps: 1e-5,
        rope_theta: 100.0,
        rope_scaling: None,
        rope_pairing: Default::default(),
        max_position_embeddings: 64,
        tie_word_embeddings: tied,
        architecture: Default::default(),
    }
}

pub(crate) fn attention() -> AttentionConfig {
    program().into()
}

fn program() -> ProgramConfig {
    let bias = LearnedBuffer { shape: vec![4, 4], init: 0.1, std: 0.5 };
    ProgramConfig {
        mask: "causal & document".into(),
        score: Some("3 * tanh((score + bias[h, max(min(q - kv, 3), 0)]) / 3)".into()),
        learned: [("bias".to_owned(), bias)].into(),
        ..ProgramConfig::default()
    }
}

/// Each thing that another family has, and all of them together.
fn architectures() -> Vec<Architecture> {
    let plain = Architecture::default;
    let all = Architecture {
        family: "all".to_owned(),
        qkv_bias: true,
        head_norms: true,
        output_norms: true,
        centered_norms: true,
        activation: Activation::Gelu,
        scaled_embedding: true,
        logit_cap: Some(3.0),
        packed_weights: true,
        rotary_share: 0.67,
        local_rope_theta: Some(20.0),
        layer_rope: vec![LayerRope::Local, LayerRope::Global],
    };
    vec![
        Architecture { qkv_bias: true, ..plain() },
        Architecture { head_norms: true, layer_rope: vec![LayerRope::None], ..plain() },
        Architecture { output_norms: true, centered_norms: true, ..plain() },
        all,
    ]
}

/// A window without a bias in the first layer, a bias in the second.
fn pattern() -> AttentionConfig {
    let window = ProgramConfig {
        mask: "causal & document & window(4, 0)".into(),
        score: Some("softcap(5)".into()),
        ..Default::default()
    };
    AttentionConfig::Pattern {
        layers: vec!["local".into(), "global".into()],
        programs: [("local".to_owned(), window), ("global".to_owned(), program())].into(),
    }
}

/// A model whose weights are large enough for every part to matter.
pub(crate) fn model(config: ModelConfig, attention: &AttentionConfig, seed: u64) -> Model {
    let mut model = Model::new(config, attention, seed).unwrap();
    let mut random = Random::new(seed);
    for p in model.parameters().to_vec() {
        for x in &mut model.weights_mut()[p.place] {
            *x += 0.4 * random.normal() as f32;
        }
    }
    model
}

/// Documents of the given lengths, packed one after another.
struct Text {
    tokens: Vec<u32>,
    labels: Vec<i32>,
    documents: Vec<i32>,
    positions: Vec<i32>,
}

impl Text {
    fn new(lengths: &[usize], seed: u64) -> Self {
        let mut random = Random::new(seed);
        let mut text =
            Self { tokens: vec![], labels: vec![], documents: vec![], positions: vec![] };
        for (document, &len) in lengths.iter().enumerate() {
            for position in 0..len {
                text.tokens.push((random.bits() % 13) as u32);
                let last = position + 1 == len;
                text.labels.push(if last { IGNORE } else { (random.bits() % 13) as i32 });
                text.documents.push(document as i32);
                text.positions.push(position as i32);
            }
        }
        text
    }

    fn batch(&self, rows: usize) -> Batch<'_> {
        Batch {
            rows,
            len: self.tokens.len() / rows,
            tokens: &self.tokens,
            labels: &self.labels,
            documents: &self.documents,
            positions: &self.positions,
            live_pairs: &[],
            order: &[],
        }
    }

    fn part(&self, range: std::ops::Range<usize>) -> Self {
        Self {
            tokens: self.tokens[range.clone()].to_vec(),
            labels: self.labels[range.clone()].to_vec(),
            documents: vec![0; range.len()],
            positions: self.positions[range].to_vec(),
        }
    }
}

fn gradients(
    model: &Model,
    batch: &Batch<'_>,
    recompute: impl Into<Recomputation>,
) -> (f64, Gradients) {
    let mut gradients = Gradients::zeros(model);
    let loss = model.forward_backward(batch, &mut gradients, recompute).unwrap();
    (loss.sum_nats, gradients)
}

fn close(a: &[f32], b: &[f32], tolerance: f32, what: &str) {
    assert_eq!(a.len(), b.len(), "{what}");
    let scale = a.iter().fold(1.0f32, |m, x| m.max(x.abs()));
    for (i, (x, y)) in a.iter().zip(b).enumerate() {
        assert!((x - y).abs() <= tolerance * scale, "{what}[{i}]: {x} and {y}, scale {scale}");
    }
}

#[test]
fn every_gradient_of_the_model_is_its_central_difference() {
    let llama = Architecture::default;
    let llamas = [(true, 1, attention()), (false, 2, attention()), (true, 3, pattern())];
    let others = architectures().into_iter().enumerate();
    let others = others.map(|(i, other)| (other, (i % 2 == 0, 4 + i as u64, attention())));
    for (architecture, (tied, seed, attention)) in
        llamas.map(|l| (llama(), l)).into_iter().chain(others)
    {
        let config = ModelConfig { architecture, ..tiny(tied) };
        config.validate().unwrap();
        let mut model = model(config, &attention, seed);
        let text = Text::new(&[5, 1, 3, 5], 10 + seed);
        let batch = text.batch(2);
        let (_, gradients) = gradients(&model, &batch, Recompute::None);
        for p in 0..model.parameters().len() {
            let parameter = model.parameters()[p].clone();
            let (name, g, first) =
                (&parameter.name, gradients.of(&parameter), parameter.place.start);
            let most = g.iter().fold(0.0f32, |m, x| m.max(x.abs()));
            assert!(most > 0.0, "{name} has no gradient (seed {seed})");
            // A few elements of each array, and the direction of the whole gradient.
            let mut random = Random::new(seed + p as u64);
            for _ in 0..4 {
                let i = random.bits() as usize % g.len();
                let step = 4e-3f32;
                let old = model.weights()[first + i];
                let mut at = |x: f32| {
                    model.weights_mut()[first + i] = x;
                    model.loss(&batch).unwrap().sum_nats
                };
                let slope = (at(old + step) - at(old - step)) / f64::from(2.0 * step);
                at(old);
                let error = (slope - f64::from(g[i])).abs();
                let allowed = 6e-3 * (1.0 + f64::from(most));
                assert!(error < allowed, "{name}[{i}]: {} but {slope} (seed {seed})", g[i]);
            }
            // Along itself a gradient's slope is its length.
            let length = g.iter().map(|x| f64::from(*x).powi(2)).sum::<f64>().sqrt();
            let old = model.values(&parameter).to_vec();
            let step = 2e-3 / length;
            let mut at = |x: f64| {
                let place = model.weights_mut()[parameter.place.clone()].iter_mut();
                for (w, (o, g)) in place.zip(old.iter().zip(g)) {
                    *w = o + (x * f64::from(*g)) as f32;
                }
                model.loss(&batch).unwrap().sum_nats
            };
            let slope = (at(step) - at(-step)) / 4e-3;
            at(0.0);
            let error = (slope - length).abs();
            assert!(error < 3e-3 * length, "{name}: {length} but {slope} (seed {seed})");
        }
    }
}

#[test]
fn packed_documents_train_as_separate_documents() {
    let model = model(tiny(true), &attention(), 3);
    let lengths = [7, 1, 4, 9];
    let text = Text::new(&lengths, 30);
    let (loss, packed) = gradients(&model, &text.batch(1), Recompute::None);
    let mut apart = Gradients::zeros(&model);
    let (mut sum, mut start) = (0.0, 0);
    for len in lengths {
        let part = text.part(start..start + len);
        let loss = model.forward_backward(&part.batch(1), &mut apart, Recompute::None).unwrap();
        sum += loss.sum_nats;
        start += len;
    }
    assert!((loss - sum).abs() < 1e-4, "{loss} packed, {sum} apart");
    for p in model.parameters() {
        close(packed.of(p), apart.of(p), 1e-5, &p.name);
    }
}

#[test]
fn gradients_are_bitwise_equal_whatever_is_recomputed_and_however_many_threads_run() {
    let others = architectures().into_iter().map(|other| (other, attention()));
    let llamas = [attention(), pattern()].map(|attention| (Architecture::default(), attention));
    for (architecture, attention) in llamas.into_iter().chain(others) {
        let model = model(ModelConfig { architecture, ..tiny(false) }, &attention, 4);
        let text = Text::new(&[40, 21, 60, 3, 2], 40);
        let batch = text.batch(3);
        let wanted = gradients(&model, &batch, Recompute::None);
        for threads in [1, 2, 3] {
            let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
            for recompute in Recompute::ALL {
                for layers in [1, usize::MAX] {
                    let again = Recomputation { layers, ..recompute.into() };
                    let found = pool.install(|| gradients(&model, &batch, again));
                    assert_eq!(found, wanted, "{again:?} on {threads} threads");
                }
            }
        }
        let loss = model.loss(&batch).unwrap();
        assert_eq!(loss.sum_nats, wanted.0);
        // A hint to the planner changes nothing.
        let pairs = vec![9.0 * batch.tokens_total() as f64; model.programs().len()];
        let told = Batch { live_pairs: &pairs, ..batch };
        assert_eq!(gradients(&model, &told, Recompute::None), wanted);
    }
}

#[test]
fn parameters_lie_packed_in_groups_that_fill_one_array() {
    for tied in [true, false] {
        let model = Model::new(tiny(tied), &attention(), 3).unwrap();
        let layout = model.layout();
        let place = |name: &str| model.parameter(name).unwrap().place.clone();
        for layer in 0..2 {
            let part = |name: &str| place(&format!("model.layers.{layer}.{name}"));
            let qkv = ["q", "k", "v"].map(|p| part(&format!("self_attn.{p}_proj.weight")));
            assert!(qkv.windows(2).all(|w| w[0].end == w[1].start), "{qkv:?}");
            assert_eq!(qkv[2].end - qkv[0].start, (4 + 2 * 2) * 6 * 10);
            let (gate, up) = (part("mlp.gate_proj.weight"), part("mlp.up_proj.weight"));
            assert_eq!(gate.end, up.start);
        }
        let names: Vec<&str> = layout.groups().iter().map(|g| g.name.as_str()).collect();
        assert_eq!(names, ["embedding", "layers.0", "layers.1", "head"]);
        let (mut end, mut parameters) = (0, 0);
        for group in layout.groups() {
            assert_eq!((group.place.start, group.parameters.start), (end, parameters));
            assert!(group.place.start.is_multiple_of(64));
            let mut at = end;
            for p in &layout.parameters()[group.parameters.clone()] {
                assert!(p.place.start >= at && p.place.end <= group.place.end, "{}", p.name);
                assert!(model.weights()[at..p.place.start].iter().all(|&x| x == 0.0));
                at = p.place.end;
            }
            (end, parameters) = (group.place.end, group.parameters.end);
        }
        assert_eq!((end, parameters), (layout.trained(), layout.parameters().len()));
        assert_eq!((model.weights().len(), layout.elems()), (end, end));
    }
}

#[test]
fn first_values_are_those_of_one_stream_however_many_threads_draw_them() {
    let config = ModelConfig { vocab_size: 6001, ..tiny(true) };
    let model = Model::new(config, &attention(), 5).unwrap();
    let [embedding, ..] = model.parameters() else { panic!("there is an embedding") };
    let mut random = Random::new(5 ^ 0xD6E8_FEB8_6659_FD93);
    let drawn = || 0.02 * random.normal() as f32;
    let drawn: Vec<f32> = std::iter::repeat_with(drawn).take(embedding.elems()).collect();
    assert!(drawn.len() > 3 * (1 << 14), "several threads draw");
    let values = &model.weights()[embedding.place.clone()];
    assert_eq!(values.iter().zip(&drawn).position(|(a, b)| a != b), None);
    assert_eq!(values.len(), drawn.len());
}

#[test]
fn a_cache_fed_in_pieces_gives_the_logits_of_the_whole_text() {
    for attention in [attention(), pattern()] {
        a_cache_gives_the_logits_of_the_whole_text(&model(tiny(false), &attention, 5));
    }
    for architecture in architectures() {
        let config = ModelConfig { architecture, ..tiny(false) };
        a_cache_gives_the_logits_of_the_whole_text(&model(config, &attention(), 5));
    }
}

fn a_cache_gives_the_logits_of_the_whole_text(model: &Model) {
    let text = Text::new(&[19], 50);
    let sampling = Sampling::default();
    let mut whole = model.generator(19, sampling).unwrap();
    let wanted = whole.feed(&text.tokens).unwrap();
    let mut pieces = model.generator(30, sampling).unwrap();
    let mut found = Vec::new();
    for piece in [0..5, 5..6, 6..7, 7..15, 15..19] {
        found.extend(pieces.feed(&text.tokens[piece]).unwrap());
    }
    close(&found, &wanted, 1e-5, "logits");
    // The same logits as the training path: its loss from them.
    let sum: f64 = (0..19)
        .filter(|&t| text.labels[t] != IGNORE)
        .map(|t| {
            let row = &wanted[t * 13..(t + 1) * 13];
            let sum: f64 = row.iter().map(|&z| f64::from(z).exp()).sum();
            sum.ln() - f64::from(row[text.labels[t] as usize])
        })
        .sum();
    let loss = model.loss(&text.batch(1)).unwrap();
    assert_eq!(loss.tokens, 18);
    assert!((loss.sum_nats - sum).abs() < 1e-4, "{} and {sum}", loss.sum_nats);
}

#[test]
fn bad_sizes_batches_and_programs_are_refused_with_the_place() {
    let fails = |change: &dyn Fn(&mut ModelConfig)| {
        let mut config = tiny(true);
        change(&mut config);
        Model::new(config, &AttentionConfig::default(), 0).unwrap_err().to_string()
    };
    assert!(
        fails(&|c| c.num_key_value_heads = Some(3)).contains("must divide num_attention_heads")
    );
    assert!(fails(&|c| c.head_dim = Some(5)).starts_with("head_dim: is 5"));
    assert!(fails(&|c| c.head_dim = None).starts_with("hidden_size: is 10"));
    assert!(fails(&|c| c.vocab_size = 0).starts_with("vocab_size: is 0"));
    let typo = ProgramConfig { mask: "causal & documnet".into(), ..Default::default() };
    let error = Model::new(tiny(true), &typo.into(), 0).unwrap_err().to_string();
    assert!(error.contains("documnet") && error.contains("column 10"), "{error}");
    let unused = ProgramConfig { score: None, ..program() };
    let error = Model::new(tiny(true), &unused.into(), 0).unwrap_err().to_string();
    assert!(error.contains("attention.learned.bias"), "{error}");

    let model = Model::new(tiny(true), &attention(), 0).unwrap();
    let text = Text::new(&[4, 4], 6);
    let mut batch = text.batch(2);
    batch.labels = &text.labels[1..];
    let error = model.loss(&batch).unwrap_err().to_string();
    assert_eq!(error, "labels has 7 elements; a batch of 2 rows of 4 has 8");
    let mut text = Text::new(&[4, 4], 6);
    text.tokens[6] = 13;
    let error = model.loss(&text.batch(2)).unwrap_err().to_string();
    assert_eq!(error, "token 13 at row 1, column 2; the vocabulary has 13");
    let error = model.generator(65, Sampling::default()).unwrap_err().to_string();
    assert!(error.contains("65") && error.contains("64"), "{error}");
}

#[test]
fn labels_and_positions_out_of_range_are_refused_with_the_place() {
    let model = Model::new(tiny(true), &attention(), 0).unwrap();
    let refused = |change: &dyn Fn(&mut Text)| {
        let mut text = Text::new(&[4, 4], 6);
        change(&mut text);
        let error = model.loss(&text.batch(2)).unwrap_err().to_string();
        let mut gradients = Gradients::zeros(&model);
        let passes = model.forward_backward(&text.batch(2), &mut gradients, Recompute::None);
        assert_eq!(passes.unwrap_err().to_string(), error);
        assert!(gradients.array.iter().all(|&x| x == 0.0));
        error
    };
    for label in [13, -2, i32::MIN, i32::MAX] {
        let said = format!(
            "label {label} at row 1, column 0; labels are {IGNORE} or below the vocabulary's 13"
        );
        assert_eq!(refused(&|text| text.labels[4] = label), said);
    }
    for position in [64, -1] {
        let said = format!("position {position} at row 0, column 3; max_position_embeddings is 64");
        assert_eq!(refused(&|text| text.positions[3] = position), said);
    }
}

#[test]
fn a_model_that_is_read_draws_only_what_is_missing() {
    let drawn = Model::new(tiny(false), &attention(), 9).unwrap();
    let mut read = Model::unfilled(tiny(false), &attention()).unwrap();
    assert!(read.parameters().iter().all(|p| read.values(p).is_empty()));
    let text = Text::new(&[4, 4], 6);
    let told = read.loss(&text.batch(2)).unwrap_err().to_string();
    assert!(told.starts_with("parameter `model.embed_tokens.weight`: has no values"), "{told}");
    let elems = read.parameters()[3].place.len();
    let mut give = |p: usize, values: &[f32]| {
        read.fill(p, |put| values.chunks(7).try_for_each(put)).map_err(|e: NnError| e.to_string())
    };
    give(3, &vec![0.25; elems]).unwrap();
    assert!(give(4, &vec![1.0; elems + 1]).unwrap_err().contains("values; it has"));
    assert!(give(4, &[]).unwrap_err().contains("is given 0 values"));
    read.draw_missing(9).unwrap();
    assert_eq!(read.parameters(), drawn.parameters());
    for (i, p) in drawn.parameters().iter().enumerate() {
        assert_eq!(read.values(p) == drawn.values(p), i != 3, "{}", p.name);
    }
    assert!(read.values(&read.parameters()[3]).iter().all(|&x| x == 0.25));
}

#[test]
fn values_that_repeat_fill_every_parameter_and_nothing_beside_it() {
    let mut model = Model::unfilled(tiny(false), &attention()).unwrap();
    let period = [1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0];
    for index in 0..model.parameters().len() {
        model.fill_repeating(index, &period).unwrap();
    }
    let mut belongs = vec![false; model.weights().len()];
    for parameter in model.parameters() {
        belongs[parameter.place.clone()].fill(true);
        let expected = period.iter().cycle().take(parameter.place.len());
        assert!(model.values(parameter).iter().eq(expected), "{}", parameter.name);
    }
    let beside = model.weights().iter().zip(belongs).filter(|(_, belongs)| !belongs);
    assert!(beside.map(|(&value, _)| value).all(|value| value == 0.0));
    let said = model.fill_repeating(0, &[]).unwrap_err().to_string();
    assert!(said.contains("embed_tokens.weight`: is given no values to repeat"), "{said}");
}

#[test]
fn a_program_built_in_rust_trains_as_the_same_one_in_text() {
    let (mask, score) = (Some(masks::causal()), Some(scores::soft_cap(3.0).unwrap()));
    let built = AttentionProgram { mask, score, learned: Vec::new() };
    let text = ProgramConfig {
        mask: "causal".into(),
        score: Some("softcap(3)".into()),
        ..Default::default()
    };
    let built = Model::with_program(tiny(true), &built, 5).unwrap();
    let read = Model::new(tiny(true), &text.into(), 5).unwrap();
    let of = |model: &Model| gradients(model, &Text::new(&[12], 6).batch(1), Recompute::None);
    assert_eq!(of(&built), of(&read));
    let mut wrong = tiny(true);
    wrong.vocab_size = 0;
    let program = AttentionProgram { mask: None, score: None, learned: Vec::new() };
    assert!(
        Model::with_program(wrong, &program, 5).unwrap_err().to_string().contains("vocab_size")
    );
}

#[test]
fn each_layer_runs_the_program_that_the_pattern_gives_it() {
    let AttentionConfig::Pattern { programs, .. } = pattern() else { unreachable!() };
    let of = |layers: &[&str]| {
        let layers: Vec<String> = layers.iter().map(|&name| name.to_owned()).collect();
        let programs = programs.clone().into_iter().filter(|(name, _)| layers.contains(name));
        AttentionConfig::Pattern { programs: programs.collect(), layers }
    };
    let text = Text::new(&[9, 14, 1], 70);
    let batch = text.batch(2);
    let run = |attention: &AttentionConfig| {
        let mut config = tiny(true);
        config.num_hidden_layers = 4;
        let model = model(config, attention, 7);
        let learned: Vec<String> = model.parameters().iter().map(|p| p.name.clone()).collect();
        let learned: Vec<String> = learned.into_iter().filter(|n| n.ends_with("bias")).collect();
        let mut gradients = Gradients::zeros(&model);
        let loss = model.forward_backward(&batch, &mut gradients, Recompute::Full).unwrap();
        (loss.sum_nats, loss.live_pairs.unwrap(), learned)
    };
    let (loss, pairs, learned) = run(&of(&["local", "global"]));
    let bias = |layer: usize| format!("model.layers.{layer}.self_attn.bias");
    assert_eq!(learned, [bias(1), bias(3)]);
    // Repeated, or a name for each layer.
    let each = run(&of(&["local", "global", "local", "global"]));
    assert_eq!((loss, pairs, learned), each);
    let [local, global] =
        ["local", "global"].map(|name| run(&AttentionConfig::Uniform(programs[name].clone())));
    assert_eq!(run(&of(&["global"])), global);
    assert!(pairs == (local.1 + global.1) / 2.0 && local.1 < global.1, "in the mean of the layers");
    assert!(loss != local.0 && loss != global.0);
    let more = Model::new(tiny(true), &of(&["local", "global", "local"]), 1).unwrap_err();
    assert_eq!(more.to_string(), "attention.layers: names 3 programs; num_hidden_layers is 2");
    let mut wrong = programs.clone();
    wrong.get_mut("local").unwrap().mask = "causl".into();
    let layers = vec!["local".into(), "global".into()];
    let wrong = AttentionConfig::Pattern { layers, programs: wrong };
    let told = Model::new(tiny(true), &wrong, 1).unwrap_err().to_string();
    assert!(told.starts_with("attention.programs.local.mask: there is no `causl`"), "{told}");
}

#[test]
fn live_pairs_are_those_that_the_mask_lets_through() {
    let window = |mask: &str| ProgramConfig { mask: mask.into(), ..Default::default() }.into();
    let lengths = [70, 3, 61, 1, 60, 5, 130, 10];
    let text = Text::new(&lengths, 8);
    let documents: u64 = lengths.iter().map(|&n| n as u64 * (n as u64 + 1) / 2).sum();
    // Rows of 170: the first ends 35 tokens into the fifth document, each part of which is causal.
    let split = |n: u64| n * (n + 1) / 2;
    let documents = documents - split(60) + split(35) + split(25);
    let causal = 2 * split(170);
    for (mask, rows, want) in
        [("causal & document", 2, documents), ("causal", 2, causal), ("", 2, 2 * 170 * 170)]
    {
        let mut config = tiny(true);
        config.max_position_embeddings = 400;
        let model = Model::new(config, &window(mask), 1).unwrap();
        let mut gradients = Gradients::zeros(&model);
        let mut batch = text.batch(rows);
        let loss = model.forward_backward(&batch, &mut gradients, Recompute::None).unwrap();
        assert_eq!(loss.live_pairs, Some(want as f64), "{mask}");
        // Another shape, then the first again.
        (batch.rows, batch.len) = (1, 340);
        model.forward_backward(&batch, &mut gradients, Recompute::None).unwrap();
        let batch = text.batch(rows);
        let again = model.forward_backward(&batch, &mut gradients, Recompute::None).unwrap();
        assert_eq!((again.live_pairs, again.sum_nats), (loss.live_pairs, loss.sum_nats));
        assert_eq!(model.loss(&batch).unwrap().live_pairs, None);
    }
}

#[test]
fn pairs_that_a_program_counts_are_those_of_the_steps_that_run_it() {
    let text = Text::new(&[70, 3, 61, 1, 60, 5, 130, 10], 8);
    for mask in [
        "causal & document & sliding_window(20)",
        "causal & sliding_window(150)",
        "causal & document & q - kv < 9 * (h + 1)",
        "document & q + b >= kv",
    ] {
        let mut config = tiny(true);
        config.max_position_embeddings = 400;
        let of = ProgramConfig { mask: mask.into(), ..Default::default() };
        let model = Model::new(config, &of.into(), 1).unwrap();
        let mut gradients = Gradients::zeros(&model);
        for rows in [2, 1] {
            let batch = text.batch(rows);
            let loss = model.forward_backward(&batch, &mut gradients, Recompute::None).unwrap();
            let shape = [rows, batch.len];
            let counted = model.programs()[0].live_pairs(model.config(), shape, batch.documents);
            assert_eq!(loss.live_pairs, Some(counted.unwrap()), "{mask}, {rows} rows");
        }
        let told = Batch { live_pairs: &[1.0, 2.0], ..text.batch(2) };
        let told = model.loss(&told).unwrap_err().to_string();
        let wanted = "live_pairs has 2 elements; the model has 1 attention programs";
        assert!(told.contains(wanted), "{told}");
    }
}

#[test]
fn planners_are_told_of_each_program_how_many_keys_a_query_sees() {
    let AttentionConfig::Pattern { programs, .. } = pattern() else { unreachable!() };
    let masks = [("far", "causal & document"), ("near", "causal & document & sliding_window(3)")];
    let named = |(name, mask): (&str, &str)| {
        let program = ProgramConfig { mask: mask.into(), ..programs["local"].clone() };
        (name.to_owned(), ProgramConfig { score: None, learned: Default::default(), ..program })
    };
    let layers = ["near", "far"].map(str::to_owned).into();
    let attention = AttentionConfig::Pattern { layers, programs: masks.map(named).into() };
    let programs = crate::plans::Programs::parse(&attention, &tiny(true)).unwrap();
    let text = Text::new(&[40, 24], 8);
    let batch = text.batch(1);
    let pairs = |p: &AttentionProgram| p.live_pairs(&tiny(true), [1, 64], batch.documents).unwrap();
    let pairs: Vec<f64> = programs.all().iter().map(pairs).collect();
    assert_eq!(pairs, [820.0 + 300.0, (3.0 * 64.0) - 6.0]);
    let told = programs.mean_kv_len(&Batch { live_pairs: &pairs, ..batch }).unwrap();
    assert_eq!(told, [Some(32), Some(4)]);
    assert_eq!(programs.mean_kv_len(&batch).unwrap(), []);
}

#[test]
fn the_losses_of_tokens_add_up_to_the_loss() {
    let model = model(tiny(false), &attention(), 6);
    let text = Text::new(&[9, 14, 1, 40, 26], 12);
    let batch = text.batch(2);
    let each = model.token_losses(&batch, None).unwrap();
    let loss = model.loss(&batch).unwrap();
    assert_eq!(each.len(), text.labels.len());
    assert!((each.iter().sum::<f64>() - loss.sum_nats).abs() < 1e-4);
    for (nats, &label) in each.iter().zip(&text.labels) {
        assert_eq!(*nats == 0.0, label == IGNORE);
    }
    // One token alone.
    let mut labels = vec![IGNORE; text.labels.len()];
    labels[30] = 5;
    let batch = Batch { labels: &labels, ..batch };
    let alone = model.loss(&batch).unwrap().sum_nats;
    assert!((model.token_losses(&batch, None).unwrap()[30] - alone).abs() < 1e-5);
}

#[test]
fn a_replay_names_the_block_that_first_leaves_a_value_that_is_not_finite() {
    let (text, rows) = (Text::new(&[9, 14, 1, 40, 26], 12), 2);
    let batch = text.batch(rows);
    let fresh = || model(tiny(false), &attention(), 6);
    let place = |model: &Model, name: &str| model.parameter(name).unwrap().place.clone();
    let found = |model: &Model| {
        let mut gradients = Gradients::zeros(model);
        let found = model.first_not_finite(&batch, Some(&mut gradients), Recompute::None);
        let none = model.first_not_finite(&batch, None, Recompute::None).unwrap();
        (found.unwrap(), none)
    };
    assert_eq!(found(&fresh()), (None, None));
    for (name, layer, block) in [
        ("model.layers.0.self_attn.k_proj.weight", Some(0), "the projection to q, k and v"),
        ("model.layers.1.self_attn.o_proj.weight", Some(1), "the output projection"),
        ("model.layers.1.mlp.up_proj.weight", Some(1), "the projection to gate and up"),
        ("model.layers.0.mlp.down_proj.weight", Some(0), "the down projection"),
        ("model.norm.weight", None, "the last norm"),
        ("lm_head.weight", None, "the loss"),
    ] {
        let mut model = fresh();
        let at = place(&model, name).start;
        model.weights_mut()[at] = f32::NAN;
        let (first, without) = found(&model);
        let NotFinite { place, value } = first.clone().unwrap();
        let NotFinitePlace::Forward { row: 0, token: 0, .. } = place else { panic!("{place:?}") };
        assert!(
            !value.is_finite() && without.map(|found| found.place) == Some(place.clone()),
            "{name}"
        );
        assert_eq!(place, NotFinitePlace::Forward { layer, block, row: 0, token: 0 }, "{name}");
    }
    // A word that stands in the middle.
    let mut model = fresh();
    let (at, width) = (batch.len + 5, model.config().hidden_size);
    let word = batch.tokens[at] as usize;
    let first = batch.tokens.iter().position(|&token| token as usize == word).unwrap();
    let of_word = place(&model, "model.embed_tokens.weight").start + word * width;
    model.weights_mut()[of_word + 1] = f32::NEG_INFINITY;
    let told = found(&model).0.unwrap().to_string();
    let (row, token) = (first / batch.len, first % batch.len);
    assert_eq!(told, format!("the embedding leaves -inf for token {token} of row {row}"));
    // Losses that are finite, of logits that are all 0, and gradients that are not.
    let mut model = fresh();
    let (norm, head) = (place(&model, "model.norm.weight"), place(&model, "lm_head.weight"));
    model.weights_mut()[norm].fill(0.0);
    let rows = head.len() / width;
    for (i, weight) in model.weights_mut()[head].iter_mut().enumerate() {
        *weight = if i / width < rows / 2 { f32::MAX } else { f32::MIN };
    }
    assert!(model.loss(&batch).unwrap().sum_nats.is_finite());
    let (first, without) = found(&model);
    let NotFinitePlace::Gradient { parameter, .. } = first.unwrap().place else { panic!() };
    assert_eq!((parameter.as_str(), without), ("model.norm.weight", None));
}

#[test]
fn gradients_that_were_cleared_are_written_over_whatever_was_there() {
    for tied in [true, false] {
        let model = model(tiny(tied), &attention(), 8);
        let text = Text::new(&[6, 11, 3], 14);
        let batch = text.batch(1);
        let (_, expected) = gradients(&model, &batch, Recompute::None);
        let mut found = Gradients::zeros(&model);
        for p in model.parameters() {
            found.array[p.place.clone()].fill(f32::NAN);
        }
        model.clear(&mut found);
        let adamw = AdamW { beta1: 0.9, beta2: 0.95, eps: 1e-8, weight_decay: 0.1 };
        let rule = Rule::AdamW(adamw);
        let spans = model.spans(Treatment::of).unwrap();
        let (mut moments, mut totals) = (model.moments(&rule).unwrap(), model.totals().unwrap());
        let step = OptimizerStep { rule, step: 1, rate: 1e-3, clip_norm: 1.0, seed: 0 };
        let mut changed = Model::new(tiny(tied), &attention(), 8).unwrap();
        let none = changed.update(&step, &spans, &found, &mut moments, &mut totals);
        assert!(none.unwrap_err().to_string().contains("hold no batch"));
        model.forward_backward(&batch, &mut found, Recompute::None).unwrap();
        for p in model.parameters() {
            assert!(expected.of(p) == found.of(p), "{} (tied {tied})", p.name);
        }
        // The next batch is added.
        model.forward_backward(&batch, &mut found, Recompute::None).unwrap();
        let twice: Vec<f32> = expected.array.iter().map(|x| 2.0 * x).collect();
        close(&twice, &found.array, 1e-6, "two batches");
    }
}

/// A step by AdamW, after the backward pass and in it.
fn stepped(model: &mut Model, batch: &Batch<'_>, in_backward: bool, rule: Rule) -> (f64, f64) {
    let step = OptimizerStep { rule, step: 1, rate: 1e-2, clip_norm: 0.0, seed: 1 };
    let mut moments = model.moments(&rule).unwrap();
    let mut totals = model.totals().unwrap();
    if in_backward {
        let mut gradients = model.passing_gradients().unwrap();
        let spans = model.group_spans(Treatment::of).unwrap();
        let again = Recompute::Mlp;
        model
            .step_in_backward(
                batch,
                None,
                &mut gradients,
                again,
                &step,
                &spans,
                &mut moments,
                &mut totals,
            )
            .unwrap();
    } else {
        let mut gradients = model.gradients().unwrap();
        let spans = model.spans(Treatment::of).unwrap();
        model.accumulate(batch, &mut gradients, Recompute::None, &mut totals).unwrap();
        model.update(&step, &spans, &gradients, &mut moments, &mut totals).unwrap();
    }
    let sums = model.read(totals).unwrap();
    (sums.nats, sums.grad_norm)
}

#[test]
fn an_update_in_the_backward_pass_is_that_after_it() {
    let adamw = AdamW { beta1: 0.9, beta2: 0.95, eps: 1e-8, weight_decay: 0.1 };
    let sgd = Sgd { momentum: 0.9, weight_decay: 0.1 };
    for (tied, rule) in [(true, Rule::AdamW(adamw)), (false, Rule::Sgd(sgd))] {
        let text = Text::new(&[5, 1, 3, 5], 60);
        let run = |in_backward| {
            let mut model = model(tiny(tied), &attention(), 6);
            let (nats, norm) = stepped(&mut model, &text.batch(2), in_backward, rule);
            (nats, norm, model.weights().to_vec())
        };
        let (after, within) = (run(false), run(true));
        assert_eq!((after.0, &after.2), (within.0, &within.2), "tied: {tied}");
        assert!((after.1 - within.1).abs() < 1e-12 * after.1, "{} and {}", after.1, within.1);
    }
    let mut model = model(tiny(true), &attention(), 6);
    let text = Text::new(&[5], 60);
    let mut gradients = model.passing_gradients().unwrap();
    let spans = model.group_spans(Treatment::of).unwrap();
    let (rule, mut totals) = (Rule::AdamW(adamw), model.totals().unwrap());
    let mut moments = model.moments(&rule).unwrap();
    let step = OptimizerStep { rule, step: 1, rate: 1e-2, clip_norm: 1.0, seed: 1 };
    let none = Recompute::None;
    let told = model
        .step_in_backward(
            &text.batch(1),
            None,
            &mut gradients,
            none,
            &step,
            &spans,
            &mut moments,
            &mut totals,
        )
        .unwrap_err()
        .to_string();
    assert!(told.starts_with("clip_norm: must be 0"), "{told}");
}

#[test]
fn what_is_frozen_has_no_gradient_and_all_else_the_one_it_had() {
    let config = tiny(false);
    let whole = model(config.clone(), &attention(), 7);
    let text = Text::new(&[5, 1, 3, 5], 70);
    let (_, expected) = gradients(&whole, &text.batch(2), Recompute::None);
    for frozen in ["embed", "layers.0", "norm", "mlp", "self_attn.o_proj", "lm_head", "model."] {
        let is_frozen = |name: &str| name.contains(frozen) && !name.ends_with(".bias");
        let mut part =
            Model::unfilled_with(Cpu::default(), config.clone(), &attention(), &is_frozen).unwrap();
        for i in 0..part.parameters().len() {
            let name = part.parameters()[i].name.clone();
            let values = whole.values(whole.parameter(&name).unwrap());
            part.fill(i, |put| put(values)).unwrap_or_else(|e: NnError| panic!("{e}"));
        }
        let before = part.weights().to_vec();
        let (_, found) = gradients(&part, &text.batch(2), Recompute::Full);
        let trained = part.layout().trained();
        assert_eq!(found.array.len(), trained);
        for p in part.parameters().iter().filter(|p| part.layout().trains(&p.place)) {
            assert!(!is_frozen(&p.name));
            assert_eq!(found.of(p), expected.of(whole.parameter(&p.name).unwrap()), "{}", p.name);
        }
        let rule = Rule::Sgd(Sgd { momentum: 0.0, weight_decay: 0.1 });
        for in_backward in [false, true] {
            stepped(&mut part, &text.batch(2), in_backward, rule);
            assert_eq!(part.weights()[trained..], before[trained..], "{frozen}");
            assert_ne!(part.weights()[..trained], before[..trained], "{frozen}");
        }
    }
}
