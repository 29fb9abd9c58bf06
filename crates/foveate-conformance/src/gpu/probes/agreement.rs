//! Both families of kernels on the same random operands: results differ by no more than twice the error
//! that the corpus allows one of them (`foveate_reference::Tolerance`).

use std::fmt;
use std::sync::Arc;

use foveate_cuda::{CudaError, CudaPlan, Engine};
use foveate_mods::{masks, scores};
use foveate_problem::{Dims, Operands, Spec};
use foveate_reference::{
    NonFinite, ReferenceError, Rule, Tolerance, Upstream, backward, forward, low,
};
use foveate_tensor::{DType, Data, Tensor};

use crate::gpu::checks::Outcome;
use crate::gpu::determinism;
use crate::gpu::tensors::{Tensors, dims, families};

const HEADS: usize = 2;
/// No multiple of any tile.
const LEN: usize = 333;
const HEAD_DIMS: [usize; 4] = [64, 96, 128, 256];
const SEED: u64 = 29;
/// What [`Tensors`] calls its results, from tensor 4 on.
const RESULTS: [&str; 5] = ["out", "lse", "dq", "dk", "dv"];

/// What a result may be from gold: the largest error, and the mean one.
type Allowed = [f64; 2];

/// A program, by its place in [`programs`], and a head dim.
#[derive(Clone, Copy, Debug)]
pub struct Check {
    program: usize,
    dim: usize,
}

const PROGRAMS: [&str; 4] = ["full", "causal", "causal with ALiBi", "documents"];

/// Those of [`PROGRAMS`].
fn programs() -> Result<[Spec; 4], CudaError> {
    let masked = |mask| Spec { mask: Some(mask), ..Spec::default() };
    let causal = masked(masks::causal());
    Ok([
        Spec::default(),
        causal.clone(),
        Spec { score: Some(scores::alibi(HEADS)?), ..causal },
        masked(masks::document_lengths(&[100, 7, 1, 160, 65])?),
    ])
}

/// Every check.
pub fn all() -> impl Iterator<Item = Check> {
    (0..PROGRAMS.len()).flat_map(|program| HEAD_DIMS.map(|dim| Check { program, dim }))
}

impl fmt::Display for Check {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "both families, {}, D {}", PROGRAMS[self.program], self.dim)
    }
}

impl Check {
    /// Makes it.
    pub fn run(self, engine: &Arc<Engine>) -> Outcome {
        let Self { program, dim } = self;
        let spec = &programs()?[program];
        let dims = Dims { dim, dim_v: dim, ..dims(HEADS, LEN) };
        let queue = engine.queue();
        let tensors = Tensors::new(queue, dims, SEED)?;
        let mut found = Vec::new();
        for (_, options) in families(engine) {
            let plan = CudaPlan::new(engine.clone(), spec, &dims, DType::BF16, options)?;
            tensors.clear()?;
            plan.forward_on(queue, &tensors.forward())?;
            plan.backward_on(queue, &tensors.backward())?;
            found.push(results(&tensors)?);
        }
        let [portable, hopper] = &found[..] else { unreachable!("the GPU runs both families") };
        let operand = |i: usize| -> Result<Tensor, CudaError> {
            let data = Data::from_f64(DType::BF16, numbers(&tensors.read(i)?, DType::BF16));
            Ok(Tensor::from_vec(data, dims.q_shape()).expect("as many numbers as elements"))
        };
        let operands = [operand(0)?, operand(1)?, operand(2)?, operand(3)?];
        let answers = match answers(spec, &operands) {
            Ok(answers) => answers,
            Err(e) => return Ok(Err(e.to_string())),
        };
        let results = RESULTS.into_iter().zip(portable).zip(hopper).zip(&answers);
        let wrong = results.filter_map(|(((name, portable), hopper), answers)| {
            let said = difference(portable, hopper, allowed(name, answers))?;
            Some(format!("{name} {said}"))
        });
        let wrong: Vec<String> = wrong.collect();
        Ok(if wrong.is_empty() {
            Ok(())
        } else {
            Err(format!("{}; seed {SEED}", wrong.join("; ")))
        })
    }
}

fn dtype(result: &str) -> DType {
    if result == "lse" { DType::F32 } else { DType::BF16 }
}

fn numbers(bytes: &[u8], dtype: DType) -> Vec<f64> {
    determinism::numbers(bytes, dtype).into_iter().map(f64::from).collect()
}

fn results(tensors: &Tensors) -> Result<Vec<Vec<f64>>, CudaError> {
    let read = |(i, name): (usize, &str)| Ok(numbers(&tensors.read(i)?, dtype(name)));
    (4..).zip(RESULTS).map(read).collect()
}

/// [`RESULTS`] of the oracle, and of the plain implementation in bf16.
fn answers(
    spec: &Spec,
    [q, k, v, d_out]: &[Tensor; 4],
) -> Result<[[Vec<f64>; 2]; 5], ReferenceError> {
    let operands = Operands::new(q.view(), k.view(), v.view());
    let upstream = Upstream { d_out: d_out.view(), d_lse: None };
    let gold = forward(spec, &operands)?;
    let grads = backward(spec, &operands, &upstream)?;
    let low_grads = low::backward_drawn(spec, &operands, &upstream, &grads)?;
    Ok([
        [gold.out, low::forward(spec, &operands)?.out],
        [gold.lse, low::statistics(spec, &operands)?.lse],
        [grads.dq, low_grads.dq],
        [grads.dk, low_grads.dk],
        [grads.dv, low_grads.dv],
    ])
}

/// What the corpus allows a result.
fn allowed(name: &str, [gold, low]: &[Vec<f64>; 2]) -> Allowed {
    let (rule, non_finite) = (Rule::Plain, NonFinite::Same);
    let measured = Tolerance { dtype: dtype(name), rule, non_finite }.measure(gold, low, gold);
    [measured.max_allowed, measured.mean_allowed]
}

/// How two results differ, if by more than twice what is allowed of one.
fn difference(one: &[f64], other: &[f64], [max_allowed, mean_allowed]: Allowed) -> Option<String> {
    let same = |x: f64, y: f64| x == y || x.is_nan() && y.is_nan();
    let differences =
        one.iter().zip(other).map(|(&x, &y)| if same(x, y) { 0.0 } else { (x - y).abs() });
    let differences: Vec<f64> = differences.collect();
    if let Some(at) = differences.iter().position(|x| !x.is_finite()) {
        return Some(format!("is {} by portable and {} by hopper at {at}", one[at], other[at]));
    }
    let (at, max) = differences.iter().copied().enumerate().max_by(|x, y| x.1.total_cmp(&y.1))?;
    let mean = differences.iter().sum::<f64>() / differences.len() as f64;
    let agrees = max <= 2.0 * max_allowed && mean <= 2.0 * mean_allowed;
    (!agrees).then(|| {
        let [max_allowed, mean_allowed] = [max_allowed, mean_allowed].map(|x| 2.0 * x);
        format!("differs by {max:.3e} of {max_allowed:.3e} at {at}, mean {mean:.3e} of {mean_allowed:.3e}")
    })
}

#[cfg(test)]
mod tests {
    use foveate_tensor::random::Random;

    use super::*;

    #[test]
    fn a_plain_implementation_agrees_with_the_oracle_and_rows_that_change_places_do_not() {
        let mut random = Random::new(SEED);
        let shape = dims(HEADS, LEN).q_shape();
        let operands = [(); 4].map(|()| Tensor::from_fn(DType::BF16, shape, |_| random.normal()));
        for (spec, program) in programs().unwrap().iter().zip(PROGRAMS) {
            for (answers, name) in answers(spec, &operands).unwrap().iter().zip(RESULTS) {
                let ([gold, low], allowed) = (answers, allowed(name, answers));
                assert_eq!(difference(low, gold, allowed), None, "{program}: {name}");
                let mut turned = gold.clone();
                turned.rotate_left(gold.len() / LEN / HEADS);
                assert_ne!(difference(&turned, gold, allowed), None, "{program}: {name}");
            }
        }
    }

    #[test]
    fn results_agree_within_twice_what_one_is_allowed() {
        let allowed = [0.5, 0.25];
        assert_eq!(
            difference(&[1.0, f64::NAN, 0.0, 0.0], &[1.99, f64::NAN, 0.0, 0.0], allowed),
            None
        );
        assert_eq!(difference(&[f64::NEG_INFINITY], &[f64::NEG_INFINITY], allowed), None);
        let said = |one: &[f64], other: &[f64]| difference(one, other, allowed).unwrap();
        assert_eq!(
            said(&[0.0; 4], &[0.0, 1.1, 0.0, 0.0]),
            "differs by 1.100e0 of 1.000e0 at 1, mean 2.750e-1 of 5.000e-1"
        );
        assert_eq!(
            said(&[0.0; 2], &[0.9; 2]),
            "differs by 9.000e-1 of 1.000e0 at 1, mean 9.000e-1 of 5.000e-1"
        );
        assert_eq!(said(&[0.0, f64::NAN], &[0.0, 1.0]), "is NaN by portable and 1 by hopper at 1");
    }

    #[test]
    fn every_program_can_be_made() {
        assert_eq!(programs().unwrap().len(), PROGRAMS.len());
        let names: Vec<String> = all().map(|check| check.to_string()).collect();
        assert_eq!((names.len(), names[15].as_str()), (16, "both families, documents, D 256"));
    }
}
