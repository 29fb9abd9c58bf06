//! A workload made ready to run on the processor.

use foveate::cpu::{CpuError, CpuOptions, CpuPlan, Stages};
use foveate::{
    BackwardArgs, CaptureGrad, DType, Data, Device, ForwardArgs, Layout, Plan, Problem, Tensor,
    TensorMut,
};
use rayon::prelude::*;

use crate::bench::workload::{Direction, Workload, normal};
use crate::failure::Failure;

/// Operands, destinations and the plan of a workload.
pub struct Prepared {
    work: Workload,
    plan: Plan,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    d_out: Tensor,
    out: Tensor,
    lse: Tensor<3>,
    gradients: [(Data, Layout); 3],
    /// Name and gradient of a learned buffer.
    learned: Option<(&'static str, Vec<f32>)>,
}

impl Prepared {
    /// The workload planned, its operands filled with its numbers, its forward run once.
    ///
    /// # Errors
    /// When it cannot be planned.
    pub fn new(work: &Workload) -> Result<Self, Failure> {
        let shapes = work.shapes();
        let [q, k, v, d_out] = [0, 1, 2, 3].map(|i| random(i as i32 + 1, work.dtype, shapes[i]));
        let plan = work.program().plan(&Problem::of(&q, &k, &v)?, &Device::cpu())?;
        let gradient = |shape| {
            let layout = Layout::contiguous(shape);
            (Data::filled(work.dtype, layout.elems(), f64::NAN), layout)
        };
        let forward = plan.forward(&q, &k, &v)?;
        Ok(Self {
            work: work.clone(),
            plan,
            q,
            k,
            v,
            d_out,
            out: forward.out,
            lse: forward.lse,
            gradients: [gradient(shapes[0]), gradient(shapes[1]), gradient(shapes[2])],
            learned: work.learned().map(|(name, elems)| (name, vec![0.0; elems])),
        })
    }

    /// What runs.
    pub fn work(&self) -> &Workload {
        &self.work
    }

    /// The pass of the workload, into the tensors that are there.
    ///
    /// # Errors
    /// When the backend fails.
    pub fn run(&mut self) -> Result<(), Failure> {
        let plan = self.plan.clone();
        if self.work.pass != Direction::Backward {
            plan.forward_into(self.forward()?)?;
        }
        if self.work.pass != Direction::Forward {
            plan.backward_into(self.backward()?)?;
        }
        Ok(())
    }

    /// Where the time of so many passes goes.
    ///
    /// # Errors
    /// When the backend fails.
    pub fn profile(&mut self, passes: u32) -> Result<Stages, Failure> {
        let own = self.plan.cpu().expect("it was planned for the processor");
        let options = CpuOptions { profile: true, ..CpuOptions::default() };
        let dims = self.plan.problem().dims();
        let failed = |e: CpuError| Failure::new(e.to_string());
        let plan = CpuPlan::new(own.spec(), dims, self.work.dtype, options).map_err(failed)?;
        for pass in 0..=passes {
            if self.work.pass != Direction::Backward {
                plan.forward(self.forward()?).map_err(failed)?;
            }
            if self.work.pass != Direction::Forward {
                plan.backward(self.backward()?).map_err(failed)?;
            }
            // The first pass builds block masks and workspace.
            if pass == 0 {
                plan.take_stages();
            }
        }
        Ok(plan.take_stages())
    }

    fn forward(&mut self) -> Result<ForwardArgs<'_>, Failure> {
        Ok(ForwardArgs {
            operands: self.plan.operands((&self.q).into(), (&self.k).into(), (&self.v).into())?,
            out: self.out.view_mut().map_err(foveate::Error::from)?,
            lse: self.lse.view_mut().map_err(foveate::Error::from)?,
            max_score: None,
        })
    }

    fn backward(&mut self) -> Result<BackwardArgs<'_>, Failure> {
        let operands = self.plan.operands((&self.q).into(), (&self.k).into(), (&self.v).into())?;
        let [dq, dk, dv] = self
            .gradients
            .each_mut()
            .map(|(data, layout)| TensorMut::new(data, *layout).expect("gradients are contiguous"));
        let learned = self.learned.iter_mut();
        Ok(BackwardArgs {
            operands,
            out: self.out.view(),
            lse: self.lse.view(),
            d_out: self.d_out.view(),
            d_lse: None,
            dq: Some(dq),
            dk: Some(dk),
            dv: Some(dv),
            accumulate: false,
            d_sink: None,
            d_captures: learned
                .map(|(name, into)| CaptureGrad { name, into: into.as_mut_slice().into() })
                .collect(),
        })
    }

    /// q, k, v and d_out, widened.
    pub fn widened(&self) -> [Vec<f32>; 4] {
        [&self.q, &self.k, &self.v, &self.d_out].map(|t| floats(t.data()))
    }

    /// Names and elements of what the pass writes, widened: `out` of a forward, `dq`, `dk` and
    /// `dv` of a backward.
    pub fn results(&self) -> Vec<(&'static str, Vec<f32>)> {
        let mut results = Vec::new();
        if self.work.pass != Direction::Backward {
            results.push(("out", floats(self.out.data())));
        }
        if self.work.pass != Direction::Forward {
            let named = ["dq", "dk", "dv"].into_iter().zip(&self.gradients);
            results.extend(named.map(|(name, (data, _))| (name, floats(data))));
        }
        results
    }
}

/// Stream `seed` of the numbers of a workload.
fn random(seed: i32, dtype: DType, shape: [usize; 4]) -> Tensor {
    let layout = Layout::contiguous(shape);
    let numbers: Vec<f64> =
        (0..layout.elems()).into_par_iter().map(|i| f64::from(normal(seed, i))).collect();
    Tensor::new(Data::from_f64(dtype, numbers), layout).expect("as many elements as it has")
}

fn floats(data: &Data) -> Vec<f32> {
    match data {
        Data::F32(v) => v.clone(),
        Data::F16(v) => v.iter().map(|x| x.to_f32()).collect(),
        Data::BF16(v) => v.iter().map(|x| x.to_f32()).collect(),
        Data::F8E4M3(v) => v.iter().map(|x| x.to_f32()).collect(),
        Data::F64(v) => v.iter().map(|&x| x as f32).collect(),
    }
}
