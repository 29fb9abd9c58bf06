//! Each block beside the CPU's, on shapes that divide nothing, and what stands between host and
//! device. They need a GPU, and say so where there is none.

mod arena;
mod context;
mod host_moments;
mod meeting;
mod rotations;
mod sharing;
mod stopped;
mod tensor;

use std::collections::BTreeMap;
use std::sync::Arc;

use foveate_nn::moments::Filler;
use foveate_nn::{
    Activation as NnActivation, AdamW, Architecture, Array, AttentionProgram, AttentionShape,
    Batch, Blocks, Cpu, CpuBatch, CpuTotals, Gradients, LayerAttention, LayerProgram, LayerRope,
    LearnedBuffer, LinearShape, LossGradients, LossOperands, Model, ModelConfig, Moment, Moments,
    Norm, NormForward, OptimizerStep, PackedHeads, Parameter, ParameterState, Part, ProgramConfig,
    Recompute, RopePairing, RopeTable, Rotary, Rule, Sampling, Sgd, Span, Treatment, Weights,
};
use foveate_tensor::random::Random;

use super::transfer::{narrowed, widened};
use super::*;
use meeting::meet;

const ROWS: usize = 2;
const LEN: usize = 173;
const TOKENS: usize = ROWS * LEN;
const WIDTH: usize = 72;
const WIDE: usize = 200;
const VOCAB: usize = 331;
const HEADS: PackedHeads = PackedHeads { rows: ROWS, len: LEN, heads_q: 6, heads_kv: 2, dim: 64 };

/// Both backends; nothing, and a line that says so, without a GPU.
struct Both {
    cpu: Cpu,
    cuda: Cuda,
    dtype: DType,
    random: Random,
}

/// The same numbers on both.
struct Twin {
    cpu: Vec<f32>,
    cuda: CudaArray,
}

impl Twin {
    fn norm_forward<'a>(
        x: &'a Self,
        weight: &'a Self,
        norm: Norm,
        inverse: &'a Self,
    ) -> (NormForward<'a, Vec<f32>>, NormForward<'a, CudaArray>) {
        let (cpu, cuda) = (Part::whole(&weight.cpu), Part::whole(&weight.cuda));
        (
            NormForward { x: &x.cpu, weight: cpu, norm, inverse: &inverse.cpu },
            NormForward { x: &x.cuda, weight: cuda, norm, inverse: &inverse.cuda },
        )
    }
}

impl Both {
    fn new(state: ParameterState, seed: u64) -> Option<Self> {
        let precision = Precision::from(state);
        match Cuda::new(0, precision, true) {
            Ok(cuda) => {
                let (cpu, random) = (Cpu::default(), Random::new(seed));
                Some(Self { cpu, cuda, dtype: precision.weights, random })
            }
            Err(e) => {
                println!("skipped: {e}");
                None
            }
        }
    }

    /// In f32 and in bf16.
    fn all(seed: u64) -> impl Iterator<Item = Self> {
        [ParameterState::F32, ParameterState::Exact]
            .into_iter()
            .map_while(move |s| Self::new(s, seed))
    }

    /// Numbers that `dtype` holds.
    fn twin(&mut self, dtype: DType, values: Vec<f32>) -> Twin {
        let mut cpu = values;
        let bytes = narrowed(dtype, &cpu);
        cpu.iter_mut().enumerate().for_each(|(i, x)| *x = widened(dtype, &bytes, i));
        let mut cuda = CudaArray::default();
        self.cuda.resize("twin", &mut cuda, dtype, cpu.len()).unwrap();
        let place = 0..cpu.len();
        self.cuda.fill(PartMut { array: &mut cuda, place, accumulate: false }, &cpu).unwrap();
        Twin { cpu, cuda }
    }

    /// Normal numbers in the dtype of weights.
    fn normal(&mut self, elems: usize) -> Twin {
        let values = (0..elems).map(|_| self.random.normal() as f32).collect();
        self.twin(self.dtype, values)
    }

    /// Normal numbers that gradients are added to.
    fn sums(&mut self, elems: usize) -> Twin {
        let values = (0..elems).map(|_| self.random.normal() as f32).collect();
        self.twin(DType::F32, values)
    }

    /// What is to be written.
    fn nan(&mut self, dtype: DType, elems: usize) -> Twin {
        self.twin(dtype, vec![f32::NAN; elems])
    }

    fn activations(&mut self, elems: usize) -> Twin {
        self.nan(self.dtype, elems)
    }

    /// The device's numbers are the CPU's: in f32 to `tolerance` of the largest, in 16 bits to some
    /// roundings of it.
    fn check(&mut self, name: &str, twin: &Twin, tolerance: f32) {
        let mut found = vec![f32::NAN; twin.cpu.len()];
        self.cuda.download(Part::whole(&twin.cuda), &mut found).unwrap();
        let largest = twin.cpu.iter().fold(0f32, |most, x| most.max(x.abs()));
        assert!(largest.is_finite(), "{name}: the CPU has {largest}");
        let rounding = if self.dtype == DType::F32 { 0.0 } else { 2f32.powi(-7) };
        let most = (tolerance + rounding) * largest.max(1e-6);
        for (i, (found, expected)) in found.iter().zip(&twin.cpu).enumerate() {
            let off = (found - expected).abs();
            assert!(off <= most, "{:?} {name}[{i}] is {found}, not {expected}", self.dtype);
        }
    }

    fn check_nats(&mut self, totals: (CpuTotals, CudaTotals)) {
        let (cpu, cuda) =
            (self.cpu.read(totals.0).unwrap().nats, self.cuda.read(totals.1).unwrap().nats);
        let tolerance = if self.dtype == DType::F32 { 1e-5 } else { 2e-3 };
        assert!((cpu - cuda).abs() < tolerance * cpu, "{:?}: {cuda} nats, not {cpu}", self.dtype);
    }

    fn upload(&mut self, batch: &Batch<'_>, tables: &[Arc<RopeTable>]) -> (CpuBatch, CudaBatch) {
        (self.cpu.upload(batch, tables).unwrap(), self.cuda.upload(batch, tables).unwrap())
    }
}

fn whole<A: Array>(array: &mut A) -> PartMut<'_, A> {
    let place = 0..array.elems();
    PartMut { array, place, accumulate: true }
}

/// Tokens, labels, documents, positions: some tokens stand everywhere, some have no label.
struct Texts {
    tokens: Vec<u32>,
    labels: Vec<i32>,
    documents: Vec<i32>,
    positions: Vec<i32>,
}

impl Texts {
    fn new(random: &mut Random) -> Self {
        let tokens: Vec<u32> =
            (0..TOKENS).map(|i| if i % 2 == 0 { 7 } else { random.below(VOCAB) as u32 }).collect();
        let labels = (0..TOKENS)
            .map(|i| if i % 5 == 3 { foveate_nn::IGNORE } else { random.below(VOCAB) as i32 })
            .collect();
        let (mut documents, mut positions) = (Vec::new(), Vec::new());
        for row in 0..ROWS {
            for i in 0..LEN {
                let len = [50, 31][row];
                documents.push((i / len) as i32);
                positions.push((i % len) as i32);
            }
        }
        Self { tokens, labels, documents, positions }
    }

    fn batch(&self) -> Batch<'_> {
        Batch {
            rows: ROWS,
            len: LEN,
            tokens: &self.tokens,
            labels: &self.labels,
            documents: &self.documents,
            positions: &self.positions,
            live_pairs: &[(32 * ROWS * LEN) as f64],
            order: &[],
        }
    }
}

/// Two tables, the second of half of a head.
fn tables() -> Vec<Arc<RopeTable>> {
    let mut config = config(true);
    let table = |config: &ModelConfig| {
        let mut table = RopeTable::default();
        table.reach(&Rotary::of(config, LEN)[0], LEN);
        Arc::new(table)
    };
    let whole = table(&config);
    config.architecture.rotary_share = 0.5;
    vec![whole, table(&config)]
}

/// Of a Llama, and of a Gemma.
const NORMS: [Norm; 2] = [Norm { eps: 1e-5, offset: 0.0 }, Norm { eps: 1e-5, offset: 1.0 }];

/// Calls a block of both backends with the twins' halves.
macro_rules! both {
    ($both:ident . $block:ident ( $($cpu:expr),* ; $($cuda:expr),* )) => {
        $both.cpu.$block($($cpu),*).unwrap();
        $both.cuda.$block($($cuda),*).unwrap();
    };
}

fn loss_operands<'a, A: Array>(
    x: &'a mut A,
    words: &'a A,
    logits: &'a mut A,
    cap: Option<f32>,
) -> LossOperands<'a, A> {
    LossOperands { x, weight: Part::whole(words), width: WIDTH, cap, z_weight: 0.0, logits }
}

#[test]
fn norms_and_gates_are_those_of_the_cpu() {
    for mut both in Both::all(1) {
        let norm = NORMS[usize::from(both.dtype == DType::F32)];
        let (mut x, residual) = (both.normal(TOKENS * WIDTH), both.normal(TOKENS * WIDTH));
        let weight = both.normal(WIDTH);
        let mut inverse = both.nan(DType::F32, TOKENS);
        let mut out = both.activations(TOKENS * WIDTH);
        let w = (Part::whole(&weight.cpu), Part::whole(&weight.cuda));
        both!(both.rms_norm(&x.cpu, w.0, norm, &mut inverse.cpu, &mut out.cpu;
            &x.cuda, w.1, norm, &mut inverse.cuda, &mut out.cuda));
        both.check("inverse", &inverse, 1e-5);
        both.check("out", &out, 1e-5);
        let w = (Part::whole(&weight.cpu), Part::whole(&weight.cuda));
        both!(both.add_rms_norm(&residual.cpu, &mut x.cpu, w.0, norm, &mut inverse.cpu, &mut out.cpu;
            &residual.cuda, &mut x.cuda, w.1, norm, &mut inverse.cuda, &mut out.cuda));
        both.check("sum", &x, 1e-6);
        both.check("inverse of the sum", &inverse, 1e-2);
        both.check("out of the sum", &out, 1e-5);
        // From here on from the same sum.
        let mut sum = vec![0.0; x.cpu.len()];
        both.cuda.download(Part::whole(&x.cuda), &mut sum).unwrap();
        let x = both.twin(both.dtype, sum);
        let w = (Part::whole(&weight.cpu), Part::whole(&weight.cuda));
        both!(both.rms_norm(&x.cpu, w.0, norm, &mut inverse.cpu, &mut out.cpu;
            &x.cuda, w.1, norm, &mut inverse.cuda, &mut out.cuda));
        let mut again = both.activations(TOKENS * WIDTH);
        let forward = Twin::norm_forward(&x, &weight, norm, &inverse);
        both!(both.rms_norm_again(forward.0.again(), &mut again.cpu; forward.1.again(), &mut again.cuda));
        both.check("again", &again, 1e-5);
        let (mut again, d_out) = (both.activations(TOKENS * WIDTH), both.normal(TOKENS * WIDTH));
        let (mut d_x, mut d_weight) = (both.normal(TOKENS * WIDTH), both.sums(WIDTH));
        for accumulate in [true, false] {
            let d_w = (Some(whole(&mut d_weight.cpu)), Some(whole(&mut d_weight.cuda)));
            both!(both.rms_norm_backward(
                forward.0.again(), &d_out.cpu, PartMut::whole(&mut d_x.cpu, accumulate), d_w.0, Some(&mut again.cpu);
                forward.1.again(), &d_out.cuda, PartMut::whole(&mut d_x.cuda, accumulate), d_w.1, Some(&mut again.cuda)));
            both.check("again, beside the gradients", &again, 1e-5);
            both.check("d_x", &d_x, 1e-5);
            both.check("d_weight", &d_weight, 1e-5);
        }
        let mut gate_up = both.normal(TOKENS * 2 * WIDE);
        let mut out = both.activations(TOKENS * WIDE);
        let f = if both.dtype == DType::F32 { NnActivation::Gelu } else { NnActivation::Silu };
        both!(both.gated(f, WIDE, &gate_up.cpu, &mut out.cpu; f, WIDE, &gate_up.cuda, &mut out.cuda));
        both.check("gated", &out, 1e-5);
        let mut d_out = both.normal(TOKENS * WIDE);
        both!(both.gated_backward(f, WIDE, &mut gate_up.cpu, &mut d_out.cpu;
            f, WIDE, &mut gate_up.cuda, &mut d_out.cuda));
        both.check("d_gate_up", &gate_up, 1e-5);
        both.check("gated again", &d_out, 1e-5);
    }
}

#[test]
fn products_are_those_of_the_cpu() {
    for mut both in Both::all(2) {
        let shape = LinearShape { tokens: TOKENS, inputs: WIDTH, outputs: WIDE };
        // A weight among others, at a place that vectors are read from.
        let (x, all) = (both.normal(TOKENS * WIDTH), both.normal(64 + WIDE * WIDTH + 10));
        let place = || 64..64 + WIDE * WIDTH;
        let weight = (
            || Part { array: &all.cpu, place: place() },
            || Part { array: &all.cuda, place: place() },
        );
        let add = both.normal(TOKENS * WIDE);
        for add in [None, Some(&add)] {
            let mut y = both.activations(TOKENS * WIDE);
            both!(both.linear(
                shape, Part::whole(&x.cpu), weight.0(), None, add.map(|a| &a.cpu), &mut y.cpu;
                shape, Part::whole(&x.cuda), weight.1(), None, add.map(|a| &a.cuda), &mut y.cuda));
            both.check("y", &y, 1e-5);
        }
        let (bias, mut y) = (both.normal(WIDE), both.activations(TOKENS * WIDE));
        let given = (Some(Part::whole(&bias.cpu)), Some(Part::whole(&bias.cuda)));
        both!(both.linear(
            shape, Part::whole(&x.cpu), weight.0(), given.0, None, &mut y.cpu;
            shape, Part::whole(&x.cuda), weight.1(), given.1, None, &mut y.cuda));
        both.check("y with a bias", &y, 1e-5);
        let mut d_bias = both.sums(WIDE);
        both!(both.bias_backward(&add.cpu, whole(&mut d_bias.cpu);
            &add.cuda, whole(&mut d_bias.cuda)));
        both.check("d_bias", &d_bias, 1e-5);
        both!(both.add(&add.cpu, &mut y.cpu; &add.cuda, &mut y.cuda));
        both.check("y with what is added", &y, 1e-5);
        let d_y = both.normal(TOKENS * WIDE);
        let mut d_x = both.activations(TOKENS * WIDTH);
        both!(both.linear_backward_input(shape, &d_y.cpu, weight.0(), &mut d_x.cpu;
            shape, &d_y.cuda, weight.1(), &mut d_x.cuda));
        both.check("d_x", &d_x, 1e-5);
        let mut d_all = both.sums(64 + WIDE * WIDTH + 10);
        for accumulate in [true, false] {
            let cpu = PartMut { array: &mut d_all.cpu, place: place(), accumulate };
            let cuda = PartMut { array: &mut d_all.cuda, place: place(), accumulate };
            both!(both.linear_backward_weight(
                shape, &d_y.cpu, &x.cpu, cpu; shape, &d_y.cuda, &x.cuda, cuda));
            both.check("d_weight and what is beside it", &d_all, 1e-5);
        }
    }
}

#[test]
fn embeddings_and_losses_are_those_of_the_cpu() {
    for mut both in Both::all(3) {
        let (texts, tables) = (Texts::new(&mut both.random), tables());
        let batch = both.upload(&texts.batch(), &tables);
        let words = both.normal(VOCAB * WIDTH);
        let mut out = both.activations(TOKENS * WIDTH);
        both!(both.embed(&batch.0, None, Part::whole(&words.cpu), WIDTH, 2.0, &mut out.cpu;
            &batch.1, None, Part::whole(&words.cuda), WIDTH, 2.0, &mut out.cuda));
        both.check("embedding", &out, 0.0);
        let (d_out, mut d_words) = (both.normal(TOKENS * WIDTH), both.sums(VOCAB * WIDTH));
        both!(both.embed_backward(&batch.0, None, &d_out.cpu, WIDTH, 2.0, whole(&mut d_words.cpu);
            &batch.1, None, &d_out.cuda, WIDTH, 2.0, whole(&mut d_words.cuda)));
        both.check("d_table", &d_words, 1e-5);

        let cap = (both.dtype == DType::F32).then_some(3.0);
        // Logits of 100 tokens at once, which divides no number of tokens.
        let mut x = both.normal(TOKENS * WIDTH);
        let small = words.cpu.iter().map(|word| word * 0.1).collect();
        let words = both.twin(both.dtype, small);
        let mut logits = both.activations(100 * VOCAB);
        let (mut d_x, mut d_words) = (both.activations(TOKENS * WIDTH), both.sums(VOCAB * WIDTH));
        let mut each = both.nan(DType::F32, TOKENS);
        let mut totals = (both.cpu.totals().unwrap(), both.cuda.totals().unwrap());
        both!(both.loss(
            &batch.0, loss_operands(&mut x.cpu, &words.cpu, &mut logits.cpu, cap), Some(&mut each.cpu), None, &mut totals.0;
            &batch.1, loss_operands(&mut x.cuda, &words.cuda, &mut logits.cuda, cap), Some(&mut each.cuda), None, &mut totals.1));
        // Logits of 16 bits are rounded before the softmax.
        let of_logits = if both.dtype == DType::F32 { 1e-5 } else { 2e-2 };
        both.check("losses", &each, of_logits);
        let gradients = (
            LossGradients { d_x: &mut d_x.cpu, d_weight: Some(whole(&mut d_words.cpu)) },
            LossGradients { d_x: &mut d_x.cuda, d_weight: Some(whole(&mut d_words.cuda)) },
        );
        both!(both.loss(
            &batch.0, loss_operands(&mut x.cpu, &words.cpu, &mut logits.cpu, cap), None, Some(gradients.0), &mut totals.0;
            &batch.1, loss_operands(&mut x.cuda, &words.cuda, &mut logits.cuda, cap), None, Some(gradients.1), &mut totals.1));
        both.check("d_x of the loss", &d_x, of_logits);
        both.check("d_weight of the loss", &d_words, of_logits);
        both.check_nats(totals);

        // Labelled rows alone, by way of logits with room for a quarter of them.
        let mut x = both.normal(TOKENS * WIDTH);
        let mut logits = both.activations(20 * VOCAB);
        let mut totals = (both.cpu.totals().unwrap(), both.cuda.totals().unwrap());
        both!(both.loss(
            &batch.0, loss_operands(&mut x.cpu, &words.cpu, &mut logits.cpu, cap), None, None, &mut totals.0;
            &batch.1, loss_operands(&mut x.cuda, &words.cuda, &mut logits.cuda, cap), None, None, &mut totals.1));
        both.check_nats(totals);
    }
}

/// A mask of documents, a cap and a learned bias.
fn program() -> AttentionProgram {
    let bias = LearnedBuffer { shape: vec![HEADS.heads_q], init: 0.0, std: 0.0 };
    let config = ProgramConfig {
        mask: "causal & document".into(),
        score: Some("softcap(20) then score + bias[h] * f32(kv - q) * 0.05".into()),
        learned: BTreeMap::from([("bias".to_owned(), bias)]),
        ..ProgramConfig::default()
    };
    AttentionProgram::parse(&config, HEADS.heads_q).unwrap()
}

/// The plan of a batch.
fn planned<B: Blocks>(
    blocks: &mut B,
    program: &AttentionProgram,
    texts: &Texts,
    batch: &B::Batch,
) -> B::Plan {
    let shape =
        AttentionShape { heads: HEADS, first_heads: [0, 0], mean_kv_len: Some(32), cached: false };
    let plan = blocks.plan(program, &shape).unwrap();
    blocks.bind(&plan, &texts.documents, batch).unwrap()
}

#[test]
fn attention_of_packed_documents_is_that_of_the_cpu() {
    for mut both in Both::all(4) {
        let (texts, program) = (Texts::new(&mut both.random), program());
        let batch = both.upload(&texts.batch(), &tables());
        let plans = (
            planned(&mut both.cpu, &program, &texts, &batch.0),
            planned(&mut both.cuda, &program, &texts, &batch.1),
        );
        let programs = (
            LayerProgram::<Cpu> { plan: &plans.0, learned: &program.learned },
            LayerProgram::<Cuda> { plan: &plans.1, learned: &program.learned },
        );
        let values = both.normal(HEADS.heads_q);
        let layer = (
            || LayerAttention {
                program: &programs.0,
                heads: HEADS,
                values: Part::whole(&values.cpu),
            },
            || LayerAttention {
                program: &programs.1,
                heads: HEADS,
                values: Part::whole(&values.cuda),
            },
        );
        let width = HEADS.heads_q * HEADS.dim;
        let qkv = both.normal(TOKENS * HEADS.width());
        let (mut out, mut lse) =
            (both.activations(TOKENS * width), both.nan(DType::F32, TOKENS * HEADS.heads_q));
        both!(both.attention(layer.0(), &qkv.cpu, None, &mut out.cpu, &mut lse.cpu;
            layer.1(), &qkv.cuda, None, &mut out.cuda, &mut lse.cuda));
        both.check("out", &out, 1e-4);
        both.check("lse", &lse, 1e-4);
        let d_out = both.normal(TOKENS * width);
        let (mut d_qkv, mut d_values) =
            (both.activations(TOKENS * HEADS.width()), both.sums(HEADS.heads_q));
        both!(both.attention_backward(
            layer.0(), &qkv.cpu, &out.cpu, &lse.cpu, &d_out.cpu, &mut d_qkv.cpu, whole(&mut d_values.cpu);
            layer.1(), &qkv.cuda, &out.cuda, &lse.cuda, &d_out.cuda, &mut d_qkv.cuda, whole(&mut d_values.cuda)));
        both.check("d_qkv", &d_qkv, 1e-3);
        both.check("gradient of the bias", &d_values, 2e-2);
    }
}

#[test]
fn a_step_of_adamw_is_that_of_the_cpu_on_masters() {
    const ELEMS: usize = 10_007;
    for mut both in Both::all(5) {
        let precision = both.cuda.precision();
        let masters: Vec<f32> = (0..ELEMS).map(|_| both.random.normal() as f32).collect();
        let mut cpu = Weights { array: masters.clone(), ..Weights::default() };
        let mut cuda = Weights::<CudaArray>::default();
        both.cuda.resize("weights", &mut cuda.array, precision.weights, ELEMS).unwrap();
        if precision.remainders {
            both.cuda.resize("remainders", &mut cuda.remainders, DType::BF16, ELEMS).unwrap();
        }
        both.cuda.fill_weights(&mut cuda, 0, &masters).unwrap();
        let mut found = vec![0.0; ELEMS];
        both.cuda.download_weights(&cuda, 0, &mut found).unwrap();
        assert_eq!(found, masters, "masters come back to the bit");
        // Some of them again and again, beside what stays.
        let mut expected = narrowed(precision.weights, &masters);
        let (size, place) = (precision.weights.bytes(), 130..ELEMS - 9);
        for at in place.start + 77..place.end {
            expected.copy_within((at - 77) * size..(at - 76) * size, at * size);
        }
        let mut array = both.twin(precision.weights, masters.clone()).cuda;
        let part = PartMut { array: &mut array, place, accumulate: false };
        both.cuda.repeat(part, 77).unwrap();
        let mut repeated = vec![0.0; ELEMS];
        both.cuda.download(Part::whole(&array), &mut repeated).unwrap();
        assert_eq!(narrowed(precision.weights, &repeated), expected);

        let spans = [(0..4100, 1.0, 1.0), (4100..ELEMS, 0.5, 0.0)].map(|(place, rate, decay)| {
            Span { origin: place.start, place, treatment: Treatment { rate, decay } }
        });
        let spans = (both.cpu.spans(&spans).unwrap(), both.cuda.spans(&spans).unwrap());
        let mut moments = (Moments::<Vec<f32>>::default(), Moments::<CudaArray>::default());
        let zeros = vec![0.0; ELEMS];
        moments.0 = Moments { mean: zeros.clone(), square: zeros };
        for array in [&mut moments.1.mean, &mut moments.1.square] {
            let (dtype, elems) = precision.moments.array(ELEMS);
            both.cuda.resize("moment", array, dtype, elems).unwrap();
            both.cuda.clear(array).unwrap();
        }
        let (texts, tables) = (Texts::new(&mut both.random), tables());
        let batch = both.upload(&texts.batch(), &tables);
        let (mut x, words) = (both.normal(TOKENS * WIDTH), both.normal(VOCAB * WIDTH));
        let mut logits = both.activations(TOKENS * VOCAB);
        for step in 1..=3 {
            // Totals count the labelled tokens.
            let mut totals = (both.cpu.totals().unwrap(), both.cuda.totals().unwrap());
            both!(both.loss(
                &batch.0, loss_operands(&mut x.cpu, &words.cpu, &mut logits.cpu, None), None, None, &mut totals.0;
                &batch.1, loss_operands(&mut x.cuda, &words.cuda, &mut logits.cuda, None), None, None, &mut totals.1));
            let gradients = both.sums(ELEMS);
            let adamw = AdamW { beta1: 0.9, beta2: 0.95, eps: 1e-8, weight_decay: 0.1 };
            let rule = Rule::AdamW(adamw);
            let of_step = OptimizerStep { rule, step, rate: 1e-2, clip_norm: 0.2, seed: 3 };
            both!(both.clip(&of_step, &gradients.cpu, false, None, &mut totals.0;
                &of_step, &gradients.cuda, false, None, &mut totals.1));
            both!(both.update(
                &of_step, &spans.0, &mut cpu, (&gradients.cpu, 0), &mut moments.0, ELEMS, &mut totals.0;
                &of_step, &spans.1, &mut cuda, (&gradients.cuda, 0), &mut moments.1, ELEMS, &mut totals.1));
            let norms = (
                both.cpu.read(totals.0).unwrap().grad_norm,
                both.cuda.read(totals.1).unwrap().grad_norm,
            );
            assert!((norms.0 - norms.1).abs() < 1e-6 * norms.0, "{norms:?}");
            both.cuda.download_weights(&cuda, 0, &mut found).unwrap();
            for (i, (found, expected)) in found.iter().zip(&cpu.array).enumerate() {
                assert!((found - expected).abs() < 1e-5, "[{i}] is {found}, not {expected}");
            }
        }
    }
}

/// A model of two layers with every kind of program, its head tied or not.
fn config(tied: bool) -> ModelConfig {
    ModelConfig {
        vocab_size: VOCAB,
        hidden_size: WIDTH,
        intermediate_size: WIDE,
        num_hidden_layers: 2,
        num_attention_heads: HEADS.heads_q,
        num_key_value_heads: Some(HEADS.heads_kv),
        head_dim: Some(HEADS.dim),
        rms_norm_eps: 1e-5,
        rope_theta: 10_000.0,
        rope_scaling: None,
        rope_pairing: RopePairing::default(),
        max_position_embeddings: 512,
        tie_word_embeddings: tied,
        architecture: Default::default(),
    }
}

/// Sizes, and a program with a learned buffer.
fn parts(architecture: Architecture, tied: bool) -> (ModelConfig, ProgramConfig) {
    let bias = LearnedBuffer { shape: vec![HEADS.heads_q], init: 0.1, std: 0.1 };
    let attention = ProgramConfig {
        mask: "causal & document".into(),
        score: Some("softcap(20) then score + bias[h] * f32(kv - q) * 0.05".into()),
        learned: BTreeMap::from([("bias".to_owned(), bias)]),
        ..ProgramConfig::default()
    };
    (ModelConfig { architecture, ..config(tied) }, attention)
}

/// A model on both, with the same masters.
fn models(
    state: ParameterState,
    tied: bool,
    architecture: Architecture,
) -> Option<(Model, Model<Cuda>)> {
    let cuda = match Cuda::new(0, state.into(), true) {
        Ok(cuda) => cuda,
        Err(e) => {
            println!("skipped: {e}");
            return None;
        }
    };
    let (config, attention) = parts(architecture, tied);
    let cpu = Model::new(config.clone(), &attention.clone().into(), 9).unwrap();
    let mut cuda = Model::unfilled_on(cuda, config, &attention.into()).unwrap();
    cuda.draw_missing(9).unwrap();
    Some((cpu, cuda))
}

/// Every gradient of a step, of each parameter on its own, and the losses of some steps.
#[test]
fn a_model_has_the_gradients_and_the_losses_of_the_cpu() {
    let [f32s, exact, narrow] = [ParameterState::F32, ParameterState::Exact, ParameterState::Bf16];
    // All that other families have.
    let other = Architecture {
        family: "all".to_owned(),
        qkv_bias: true,
        head_norms: true,
        output_norms: true,
        centered_norms: true,
        activation: NnActivation::Gelu,
        scaled_embedding: true,
        logit_cap: Some(3.0),
        packed_weights: true,
        rotary_share: 0.75,
        local_rope_theta: Some(100.0),
        layer_rope: vec![LayerRope::Local, LayerRope::Global],
    };
    let llama = Architecture::default;
    for (state, tied, architecture) in [
        (f32s, true, llama()),
        (exact, false, llama()),
        (narrow, true, llama()),
        (f32s, false, other.clone()),
        (exact, true, other),
    ] {
        let Some((mut cpu, mut cuda)) = models(state, tied, architecture) else { return };
        let texts = Texts::new(&mut Random::new(6));
        let (mut expected, mut found) = (Gradients::zeros(&cpu), cuda.gradients().unwrap());
        let narrow = state != ParameterState::F32;
        for recompute in Recompute::ALL {
            expected.clear();
            // What a cleared gradient holds is not read.
            for p in cuda.parameters() {
                let nan = vec![f32::NAN; p.place.len()];
                cuda.upload(&mut found.array, p.place.start, &nan).unwrap();
            }
            cuda.clear(&mut found);
            let a = cpu.forward_backward(&texts.batch(), &mut expected, recompute).unwrap();
            let b = cuda.forward_backward(&texts.batch(), &mut found, recompute).unwrap();
            let (a, b) = (a.mean_nats(), b.mean_nats());
            assert!((a - b).abs() < if narrow { 5e-3 } else { 1e-5 }, "{a} and {b}");
            for p in cpu.parameters() {
                let mut gradient = vec![f32::NAN; p.place.len()];
                cuda.download(&found.array, p.place.start, &mut gradient).unwrap();
                let size = |x: &mut dyn Iterator<Item = f32>| {
                    x.map(|x| f64::from(x).powi(2)).sum::<f64>().sqrt()
                };
                let own = expected.of(p);
                let off = size(&mut own.iter().zip(&gradient).map(|(a, b)| a - b));
                let of = size(&mut own.iter().copied());
                let most = if narrow { 0.05 } else { 1e-4 };
                println!("{state:?} {recompute:?} {}: {:.1e} off", p.name, off / of);
                assert!(off <= most * of, "{}: {off} of {of}", p.name);
            }
        }
        let spans = (cpu.spans(Treatment::of).unwrap(), cuda.spans(Treatment::of).unwrap());
        let adamw = AdamW { beta1: 0.9, beta2: 0.95, eps: 1e-8, weight_decay: 0.1 };
        let rule = Rule::AdamW(adamw);
        let mut moments = (cpu.moments(&rule).unwrap(), cuda.moments(&rule).unwrap());
        for step in 1..=8 {
            let of_step = OptimizerStep { rule, step, rate: 1e-2, clip_norm: 1.0, seed: 3 };
            let mut totals = (cpu.totals().unwrap(), cuda.totals().unwrap());
            expected.clear();
            cuda.clear(&mut found);
            // Two batches a step.
            for _ in 0..2 {
                cpu.accumulate(&texts.batch(), &mut expected, Recompute::None, &mut totals.0)
                    .unwrap();
                cuda.accumulate(&texts.batch(), &mut found, Recompute::None, &mut totals.1)
                    .unwrap();
            }
            cpu.update(&of_step, &spans.0, &expected, &mut moments.0, &mut totals.0).unwrap();
            cuda.update(&of_step, &spans.1, &found, &mut moments.1, &mut totals.1).unwrap();
            let (a, b) = (cpu.read(totals.0).unwrap(), cuda.read(totals.1).unwrap());
            println!("{state:?} step {step}: {} nats, on the GPU {}", a.nats, b.nats);
            let most = if narrow { 1e-2 } else { 1e-5 };
            assert!((a.nats - b.nats).abs() < most * a.nats, "step {step}: {a:?} and {b:?}");
            if step % 2 == 0 {
                meet(&mut cpu, &cuda, &mut moments);
            }
        }
    }
}

/// Steps of every state, by both rules, after the backward pass and in it, beside the CPU's in f32; and
/// what is kept, read back and written again.
#[test]
fn every_state_trains_as_the_cpu_and_comes_back_to_the_bit() {
    let adamw = AdamW { beta1: 0.9, beta2: 0.95, eps: 1e-8, weight_decay: 0.1 };
    let rules = [Rule::AdamW(adamw), Rule::Sgd(Sgd { momentum: 0.9, weight_decay: 0.1 })];
    for (state, rule, in_backward, tied) in ParameterState::ALL.into_iter().flat_map(|state| {
        [(false, true), (true, true), (true, false)]
            .into_iter()
            .flat_map(move |(within, tied)| rules.map(|rule| (state, rule, within, tied)))
    }) {
        let Some((mut cpu, mut cuda)) = models(state, tied, Architecture::default()) else {
            return;
        };
        let texts = Texts::new(&mut Random::new(16));
        let treat = |p: &Parameter| match p.name.contains("embed") {
            true => Treatment { rate: 0.5, decay: 0.0 },
            false => Treatment::of(p),
        };
        let mut expected = Gradients::zeros(&cpu);
        let mut moments = (cpu.moments(&rule).unwrap(), cuda.moments(&rule).unwrap());
        let spans = (cpu.spans(treat).unwrap(), cuda.spans(treat).unwrap());
        let groups = cuda.group_spans(treat).unwrap();
        let mut last = (0.0, 0.0);
        for step in 1..=6 {
            let rate = if rule.keeps_squares() { 1e-2 } else { 1.0 };
            let of_step = OptimizerStep { rule, step, rate, clip_norm: 0.0, seed: 3 };
            let mut totals = (cpu.totals().unwrap(), cuda.totals().unwrap());
            let (batch, again) = (texts.batch(), Recompute::None);
            expected.clear();
            cpu.accumulate(&batch, &mut expected, again, &mut totals.0).unwrap();
            cpu.update(&of_step, &spans.0, &expected, &mut moments.0, &mut totals.0).unwrap();
            if in_backward {
                let mut passing = cuda.passing_gradients().unwrap();
                let kept = &mut moments.1;
                cuda.step_in_backward(
                    &batch,
                    None,
                    &mut passing,
                    again,
                    &of_step,
                    &groups,
                    kept,
                    &mut totals.1,
                )
                .unwrap();
            } else {
                let mut found = cuda.gradients().unwrap();
                cuda.accumulate(&batch, &mut found, again, &mut totals.1).unwrap();
                cuda.update(&of_step, &spans.1, &found, &mut moments.1, &mut totals.1).unwrap();
            }
            let (a, b) = (cpu.read(totals.0).unwrap(), cuda.read(totals.1).unwrap());
            let most = if state == ParameterState::F32 { 1e-5 } else { 1e-2 };
            let off = (a.nats - b.nats).abs() / a.nats;
            assert!(off < most, "{state:?} {rule:?} {in_backward} step {step}: {a:?} and {b:?}");
            let norms = (a.grad_norm - b.grad_norm).abs() / a.grad_norm;
            assert!(norms < 0.2, "{state:?} {rule:?} {in_backward} step {step}: {a:?} and {b:?}");
            last = (a.nats, b.nats);
            if step % 2 == 0 {
                meet(&mut cpu, &cuda, &mut moments);
            }
        }
        println!("{state:?} {rule:?} in backward {in_backward}: {} and {} nats", last.0, last.1);
        // What a checkpoint holds brings back the same numbers, codes of 8 bits too.
        let elems = cuda.layout().trained();
        let mut again = cuda.moments(&rule).unwrap();
        for (moment, from, to) in [
            (Moment::Mean, &moments.1.mean, &mut again.mean),
            (Moment::Square, &moments.1.square, &mut again.square),
        ] {
            if from.elems() == 0 {
                continue;
            }
            let (mut kept, mut back) = (vec![f32::NAN; elems], vec![f32::NAN; elems]);
            cuda.download_moment(moment, from, 0, &mut kept).unwrap();
            assert!(kept.iter().all(|x| x.is_finite()));
            let mut filler = Filler::default();
            let mut put = |first: usize, some: &[f32]| cuda.upload_moment(moment, to, first, some);
            for p in cuda.parameters() {
                filler.put(p.place.start, &kept[p.place.clone()], &mut put).unwrap();
            }
            filler.finish(put).unwrap();
            cuda.download_moment(moment, to, 0, &mut back).unwrap();
            for p in cuda.parameters() {
                assert_eq!(back[p.place.clone()], kept[p.place.clone()], "{state:?} {}", p.name);
            }
        }
    }
}

#[test]
fn a_step_has_the_same_bits_again() {
    let Some((_, cuda)) = models(ParameterState::Exact, true, Architecture::default()) else {
        return;
    };
    let texts = Texts::new(&mut Random::new(7));
    let mut first = Vec::new();
    for repeat in 0..200 {
        let mut gradients = cuda.gradients().unwrap();
        cuda.forward_backward(&texts.batch(), &mut gradients, Recompute::None).unwrap();
        let mut all = vec![0.0; cuda.layout().trained()];
        cuda.download(&gradients.array, 0, &mut all).unwrap();
        let bits: Vec<u32> = all.iter().map(|x| x.to_bits()).collect();
        if repeat == 0 {
            first = bits;
        } else {
            assert!(first == bits, "repeat {repeat} differs");
        }
    }
}

#[test]
fn generation_with_a_cache_has_the_logits_of_the_cpu() {
    let Some((cpu, cuda)) = models(ParameterState::F32, true, Architecture::default()) else {
        return;
    };
    let mut generators = (
        cpu.generator(40, Sampling::default()).unwrap(),
        cuda.generator(40, Sampling::default()).unwrap(),
    );
    for tokens in [&[3u32, 1, 4, 1, 5][..], &[9], &[2, 6], &[5]] {
        let (a, b) = (generators.0.feed(tokens).unwrap(), generators.1.feed(tokens).unwrap());
        let largest = a.iter().fold(0f32, |most, x| most.max(x.abs()));
        let off = a.iter().zip(&b).fold(0f32, |most, (a, b)| most.max((a - b).abs()));
        assert!(off < 1e-4 * largest, "{off} of {largest}");
    }
}

#[test]
fn logits_take_a_share_of_the_gpus_memory_and_whole_powers_of_two_of_tokens() {
    let gib = |n: usize| (n << 30) / LOGITS_SHARE;
    // Llama 3's words in bf16 on cards of 139, 80, 24 and 8 GiB; a small vocabulary; none at all.
    let tokens = [139, 80, 24, 8].map(|n| logits_tokens(gib(n), 2 * 128_256));
    assert_eq!(tokens, [8192, 4096, 1024, 1024]);
    assert_eq!([logits_tokens(gib(139), 2 * 49_152), logits_tokens(0, 0)], [16_384, 1024]);
}
