//! Whether destinations fit the operands. Backends call these first and trust what passed.

use foveate_mods::{AnyBuffer, Program};
use foveate_tensor::{DType, Layout};

use crate::{BackwardArgs, Dims, ForwardArgs, Operands, Pages, ProblemError, Scales, Spec};

impl Spec {
    /// # Errors
    /// When the scale is not finite, dropout's `p` is not in `[0, 1)`, or two learned buffers of
    /// the score have one name, so that their gradients could not be told apart.
    pub fn check(&self) -> Result<(), ProblemError> {
        if let Some(scale) = self.scale
            && !scale.is_finite()
        {
            return Err(ProblemError::new(format!("the scale is {scale}; it must be finite")));
        }
        if let Some(dropout) = &self.dropout {
            dropout.check()?;
        }
        let mut names: Vec<_> = self.learned().into_iter().map(AnyBuffer::name).collect();
        names.sort_unstable();
        match names.windows(2).find(|w| w[0] == w[1]) {
            None => Ok(()),
            Some(w) => Err(ProblemError::new(format!(
                "two learned buffers of the score are called `{}`; give each a name of its own",
                w[0]
            ))),
        }
    }

    /// What whoever computes on the host asks beyond [`Self::check`].
    ///
    /// # Errors
    /// When a captured buffer is not in host memory ([`AnyBuffer::on_device`]).
    pub fn check_on_host(&self) -> Result<(), ProblemError> {
        let mut buffers = self.programs().flat_map(|p| p.graph().buffers());
        let Some(elsewhere) = buffers.find(|b| b.is_on_device()) else { return Ok(()) };
        Err(ProblemError::new(format!(
            "captured buffer `{}` is in device memory, which only calls on tensors there can read; \
             bind one with its elements",
            elsewhere.name()
        )))
    }

    /// Mask, score and dropout, as far as there are any.
    pub fn programs(&self) -> impl Iterator<Item = &Program> {
        let mask = self.mask.as_ref().map(|m| m.program());
        let score = self.score.as_ref().map(|s| s.program());
        let dropout_keep = self.dropout.as_ref().map(|d| d.keep_mask().program());
        [mask, score, dropout_keep].into_iter().flatten()
    }

    /// The factor on `q·k` of vectors of `dim` elements.
    pub fn scale_for(&self, dim: usize) -> f32 {
        self.scale.unwrap_or(1.0 / (dim as f32).sqrt())
    }

    /// The buffers of the score that receive a gradient.
    pub fn learned(&self) -> Vec<&AnyBuffer> {
        let buffers = self.score.iter().flat_map(|s| s.program().graph().buffers());
        buffers.filter(|b| b.learned()).collect()
    }

    /// The learned buffers of these names, whose gradients are asked for.
    ///
    /// # Errors
    /// When one is not among them, or is named twice.
    pub fn learned_of(&self, names: &[&str]) -> Result<Vec<&AnyBuffer>, ProblemError> {
        let learned = self.learned();
        let find = |(i, name): (usize, &&str)| {
            let Some(buffer) = learned.iter().find(|b| b.name() == *name) else {
                let known: Vec<_> = learned.iter().map(|b| b.name()).collect();
                return Err(ProblemError::new(format!(
                    "a gradient of buffer `{name}` is asked for; the learned buffers of the score \
                     are {known:?}"
                )));
            };
            if names[..i].contains(name) {
                return Err(ProblemError::new(format!(
                    "buffer `{name}` has two destinations for its gradient; give it one"
                )));
            }
            Ok(*buffer)
        };
        names.iter().enumerate().map(find).collect()
    }
}

impl Dims {
    /// Length of the batch axis of q, out, lse and their gradients: 1 for varlen operands.
    pub fn q_axis(&self) -> usize {
        if self.packed { 1 } else { self.batch }
    }

    /// Length of the batch axis of k, v and their gradients: 1 for varlen or shared ones.
    pub fn kv_axis(&self) -> usize {
        if self.packed || self.shared_kv { 1 } else { self.batch }
    }

    /// Shape of q and dq, `[B, Hq, Sq, D]`.
    pub fn q_shape(&self) -> [usize; 4] {
        [self.q_axis(), self.heads_q, self.len_q, self.dim]
    }

    /// Shape of k and dk, `[Bk, Hkv, Sk, D]`.
    pub fn k_shape(&self) -> [usize; 4] {
        [self.kv_axis(), self.heads_kv, self.len_k, self.dim]
    }

    /// Shape of v and dv, `[Bk, Hkv, Sk, Dv]`.
    pub fn v_shape(&self) -> [usize; 4] {
        [self.kv_axis(), self.heads_kv, self.len_k, self.dim_v]
    }

    /// Shape of out and d_out, `[B, Hq, Sq, Dv]`.
    pub fn out_shape(&self) -> [usize; 4] {
        [self.q_axis(), self.heads_q, self.len_q, self.dim_v]
    }

    /// Shape of lse, max_score and d_lse, `[B, Hq, Sq]`.
    pub fn row_shape(&self) -> [usize; 3] {
        [self.q_axis(), self.heads_q, self.len_q]
    }

    /// Checks that operands of sizes `given` and of `found` are of the class that these sizes and
    /// `dtype` were planned for: head counts, head dims and dtype are those of the plan, batch,
    /// lengths and strides a call's own.
    ///
    /// # Errors
    /// When they differ, with both.
    pub fn admit(&self, dtype: DType, given: &Dims, found: DType) -> Result<(), ProblemError> {
        let class = |d: &Dims, dtype: DType| {
            let Dims { heads_q, heads_kv, dim, dim_v, .. } = d;
            format!("{heads_q}/{heads_kv} heads of dim {dim}/{dim_v} in {dtype}")
        };
        let heads_and_dims = |d: &Dims| [d.heads_q, d.heads_kv, d.dim, d.dim_v];
        if heads_and_dims(self) == heads_and_dims(given) && dtype == found {
            return Ok(());
        }
        Err(ProblemError::new(format!(
            "the plan is for {}, the operands have {}; make a plan for them",
            class(self, dtype),
            class(given, found)
        )))
    }

    fn check_operands(&self, operands: &Operands<'_>) -> Result<(), ProblemError> {
        let found = Dims::of(operands)?;
        if found == *self {
            return Ok(());
        }
        Err(ProblemError::new(format!("the operands are {found}, but the plan is for {self}")))
    }
}

impl std::fmt::Display for Dims {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Dims { batch, heads_q, heads_kv, len_q, len_k, dim, dim_v, shared_kv, packed } = self;
        let batches = if *packed { "sequences" } else { "batch" };
        write!(f, "{batches} {batch}, heads {heads_q}/{heads_kv}, lengths {len_q}/{len_k}, ")?;
        write!(f, "dims {dim}/{dim_v}{}", if *shared_kv { ", shared k and v" } else { "" })
    }
}

fn shape<const N: usize>(
    name: &str,
    found: &Layout<N>,
    needed: [usize; N],
) -> Result<(), ProblemError> {
    if found.shape == needed {
        return Ok(());
    }
    let found = found.shape;
    Err(ProblemError::new(format!("{name} has shape {found:?}; it must be {needed:?}")))
}

fn statistic(
    name: &str,
    layout: &Layout<3>,
    dtype: DType,
    dims: &Dims,
) -> Result<(), ProblemError> {
    shape(name, layout, dims.row_shape())?;
    if dtype == DType::F32 {
        return Ok(());
    }
    Err(ProblemError::new(format!("{name} is {dtype}; statistics of rows are f32")))
}

fn length(name: &str, found: usize, needed: usize) -> Result<(), ProblemError> {
    if found == needed {
        return Ok(());
    }
    Err(ProblemError::new(format!("{name} has {found} elements; it must have {needed}")))
}

impl ForwardArgs<'_> {
    /// Checks the operands against the `dims` that were planned for, and every destination's
    /// shape; `lse` and `max_score` must be f32. `out` may have any dtype.
    ///
    /// # Errors
    /// Names the first that does not fit, what it has and what it must have.
    pub fn check(&self, dims: &Dims) -> Result<(), ProblemError> {
        dims.check_operands(&self.operands)?;
        self.check_destinations(dims)
    }

    /// Checks every destination, as [`Self::check`] does, against the sizes of the operands, `dims`.
    ///
    /// # Errors
    /// Names the first that does not fit, what it has and what it must have.
    pub fn check_destinations(&self, dims: &Dims) -> Result<(), ProblemError> {
        shape("out", self.out.layout(), dims.out_shape())?;
        statistic("lse", self.lse.layout(), self.lse.dtype(), dims)?;
        match &self.max_score {
            None => Ok(()),
            Some(max) => statistic("max_score", max.layout(), max.dtype(), dims),
        }
    }
}

impl BackwardArgs<'_> {
    /// Checks the operands against the `dims` that were planned for, every other tensor's shape,
    /// and that each destination of a captured buffer's gradient is for a learned buffer of the
    /// score and holds as many elements. `lse` and `d_lse` must be f32; gradients may have any
    /// dtype. A learned buffer without a destination is left out.
    ///
    /// # Errors
    /// Names the first that does not fit, what it has and what it must have.
    pub fn check(&self, dims: &Dims, spec: &Spec) -> Result<(), ProblemError> {
        dims.check_operands(&self.operands)?;
        self.check_destinations(dims, spec)
    }

    /// Checks every tensor but the operands, as [`Self::check`] does, against the sizes of the
    /// operands, `dims`.
    ///
    /// # Errors
    /// Names the first that does not fit, what it has and what it must have.
    pub fn check_destinations(&self, dims: &Dims, spec: &Spec) -> Result<(), ProblemError> {
        if self.operands.pages.is_some() {
            return Err(Pages::no_gradients());
        }
        if self.operands.q.dtype() == DType::F8E4M3 {
            return Err(Scales::no_gradients());
        }
        shape("out", self.out.layout(), dims.out_shape())?;
        shape("d_out", self.d_out.layout(), dims.out_shape())?;
        statistic("lse", self.lse.layout(), self.lse.dtype(), dims)?;
        if let Some(d_lse) = &self.d_lse {
            statistic("d_lse", d_lse.layout(), d_lse.dtype(), dims)?;
        }
        let shapes = [dims.q_shape(), dims.k_shape(), dims.v_shape()];
        let gradients = [("dq", &self.dq), ("dk", &self.dk), ("dv", &self.dv)];
        for ((name, gradient), needed) in gradients.into_iter().zip(shapes) {
            gradient.iter().try_for_each(|t| shape(name, t.layout(), needed))?;
        }
        if let Some(d_sink) = &self.d_sink {
            if self.operands.sink.is_none() {
                let message = "d_sink is asked for, but there is no sink; leave it out";
                return Err(ProblemError::new(message));
            }
            length("d_sink", d_sink.len(), dims.heads_q)?;
        }
        let names: Vec<&str> = self.d_captures.iter().map(|grad| grad.name).collect();
        for (grad, buffer) in self.d_captures.iter().zip(spec.learned_of(&names)?) {
            let what = format!("the gradient of buffer `{}`", grad.name);
            length(&what, grad.into.len(), buffer.elems())?;
        }
        Ok(())
    }
}
