//! Calls that say more than operands: destinations of the caller's, a gradient of `lse`, sums over
//! several calls.
//!
//! [`Plan::forward`] and [`Plan::backward`] are the plain calls. [`Plan::forward_call`] and
//! [`Plan::backward_call`] begin one that is told the rest piece by piece; the last method runs it.
//! Below both are [`Plan::forward_into`] and [`Plan::backward_into`], which take everything at
//! once, as backends do.

use foveate_problem::{BackwardArgs, CaptureGrad, ForwardArgs};
use foveate_tensor::{SliceMut, TensorMut, TensorRef};

use crate::error::Error;
use crate::plan::{Forward, Gradients, Plan};

impl Plan {
    /// Computes the gradients of q, k, v, the sink and every learned captured buffer, in the
    /// dtype of the operands or that of [`Plan::gradients_in`] (sink and captures in f32).
    ///
    /// # Errors
    /// Those of [`Plan::forward`], a `d_out` that has not the shape of `out`, or a score that has
    /// no derivative.
    pub fn backward<'a>(
        &'a self,
        q: impl Into<TensorRef<'a>>,
        k: impl Into<TensorRef<'a>>,
        v: impl Into<TensorRef<'a>>,
        forward: &'a Forward,
        d_out: impl Into<TensorRef<'a>>,
    ) -> Result<Gradients, Error> {
        self.backward_call(q, k, v, forward, d_out).run()
    }

    /// Begins a forward pass into destinations of the caller's.
    ///
    /// ```
    /// use foveate::{Attention, Device, Problem, Tensor, TensorMut};
    ///
    /// let q = Tensor::from_vec(vec![0.5f32; 2 * 3 * 4], [1, 2, 3, 4])?;
    /// let plan = Attention::new().plan(&Problem::of(&q, &q, &q)?, &Device::cpu())?;
    /// let (mut out, mut lse) = (vec![0.0f32; 24], vec![0.0f32; 6]);
    /// plan.forward_call(&q, &q, &q).write_to(
    ///     TensorMut::from_slice(&mut out, [1, 2, 3, 4])?,
    ///     TensorMut::from_slice(&mut lse, [1, 2, 3])?,
    /// )?;
    /// assert_eq!(out[0], 0.5);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn forward_call<'a>(
        &'a self,
        q: impl Into<TensorRef<'a>>,
        k: impl Into<TensorRef<'a>>,
        v: impl Into<TensorRef<'a>>,
    ) -> ForwardCall<'a> {
        ForwardCall::new(self, [q.into(), k.into(), v.into()])
    }

    /// Begins a backward pass with more than [`Plan::backward`] takes: a gradient of `lse`,
    /// destinations of the caller's, a sum over several calls. `forward` is what
    /// [`Plan::forward`] gave, or a [`ForwardRef`] to tensors of the caller's.
    ///
    /// ```
    /// use foveate::{Attention, Device, Problem, Tensor};
    ///
    /// let q = Tensor::from_vec(vec![0.5f32; 2 * 3 * 4], [1, 2, 3, 4])?;
    /// let plan = Attention::new().plan(&Problem::of(&q, &q, &q)?, &Device::cpu())?;
    /// let forward = plan.forward(&q, &q, &q)?;
    /// let d_lse = Tensor::from_vec(vec![1.0f32; 6], [1, 2, 3])?;
    /// let mut sum = plan.backward_call(&q, &q, &q, &forward, &q).d_lse(&d_lse).run()?;
    /// plan.backward_call(&q, &q, &q, &forward, &q).add_to(sum.view_mut()?)?;
    /// let dq: &[f32] = sum.dq.as_slice()?;
    /// # assert_eq!(dq.len(), 24);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn backward_call<'a>(
        &'a self,
        q: impl Into<TensorRef<'a>>,
        k: impl Into<TensorRef<'a>>,
        v: impl Into<TensorRef<'a>>,
        forward: impl Into<ForwardRef<'a>>,
        d_out: impl Into<TensorRef<'a>>,
    ) -> BackwardCall<'a> {
        BackwardCall::new(self, [q.into(), k.into(), v.into()], forward.into(), d_out.into())
    }
}

/// A forward pass into destinations of the caller's: see [`Plan::forward_call`].
#[derive(Debug)]
#[must_use = "a call runs when its destinations are given"]
pub struct ForwardCall<'a> {
    plan: &'a Plan,
    operands: [TensorRef<'a>; 3],
    max_score: Option<TensorMut<'a, 3>>,
}

impl<'a> ForwardCall<'a> {
    fn new(plan: &'a Plan, operands: [TensorRef<'a>; 3]) -> Self {
        Self { plan, operands, max_score: None }
    }

    /// Writes the largest score of each row to `into` too, `[B, Hq, Sq]`, f32.
    pub fn max_score(mut self, into: TensorMut<'a, 3>) -> Self {
        self.max_score = Some(into);
        self
    }

    /// Runs the pass: `out` is `[B, Hq, Sq, Dv]` of any dtype, `lse` is `[B, Hq, Sq]`, f32; both
    /// of any strides.
    ///
    /// # Errors
    /// Those of [`Plan::forward_into`].
    pub fn write_to(self, out: TensorMut<'_>, lse: TensorMut<'_, 3>) -> Result<(), Error> {
        let [q, k, v] = self.operands;
        let operands = self.plan.operands(q, k, v)?;
        self.plan.forward_into(ForwardArgs { operands, out, lse, max_score: self.max_score })
    }
}

/// What a backward pass needs of the forward pass.
#[derive(Clone, Copy, Debug)]
pub struct ForwardRef<'a> {
    /// `[B, Hq, Sq, Dv]`, as the forward pass wrote it.
    pub out: TensorRef<'a>,
    /// `[B, Hq, Sq]`, f32, as the forward pass wrote it.
    pub lse: TensorRef<'a, 3>,
}

impl<'a> From<&'a Forward> for ForwardRef<'a> {
    fn from(forward: &'a Forward) -> Self {
        Self { out: forward.out.view(), lse: forward.lse.view() }
    }
}

/// A backward pass: see [`Plan::backward_call`].
#[derive(Debug)]
#[must_use = "a call runs when it is told where gradients go"]
pub struct BackwardCall<'a> {
    plan: &'a Plan,
    operands: [TensorRef<'a>; 3],
    forward: ForwardRef<'a>,
    d_out: TensorRef<'a>,
    d_lse: Option<TensorRef<'a, 3>>,
}

impl<'a> BackwardCall<'a> {
    fn new(
        plan: &'a Plan,
        operands: [TensorRef<'a>; 3],
        forward: ForwardRef<'a>,
        d_out: TensorRef<'a>,
    ) -> Self {
        Self { plan, operands, forward, d_out, d_lse: None }
    }

    /// The gradient of the loss with respect to `lse`, `[B, Hq, Sq]`, f32; 0 when it is not given.
    pub fn d_lse(mut self, d_lse: impl Into<TensorRef<'a, 3>>) -> Self {
        self.d_lse = Some(d_lse.into());
        self
    }

    /// Runs the pass into new tensors, as [`Plan::backward`] does.
    ///
    /// # Errors
    /// Those of [`Plan::backward`].
    pub fn run(self) -> Result<Gradients, Error> {
        let [q, k, v] = self.operands;
        let mut gradients = self.plan.zero_gradients(&self.plan.operands(q, k, v)?)?;
        self.write_to(gradients.view_mut()?)?;
        Ok(gradients)
    }

    /// Runs the pass and writes the gradients to `to`, over what is there.
    ///
    /// # Errors
    /// Those of [`Plan::backward_into`].
    pub fn write_to(self, to: GradientsMut<'_>) -> Result<(), Error> {
        self.finish(to, false)
    }

    /// Runs the pass and adds the gradients to what `to` holds: the sum over the parts of a batch.
    ///
    /// # Errors
    /// Those of [`Plan::backward_into`].
    pub fn add_to(self, to: GradientsMut<'_>) -> Result<(), Error> {
        self.finish(to, true)
    }

    fn finish(self, to: GradientsMut<'_>, accumulate: bool) -> Result<(), Error> {
        let [q, k, v] = self.operands;
        self.plan.backward_into(BackwardArgs {
            operands: self.plan.operands(q, k, v)?,
            out: self.forward.out,
            lse: self.forward.lse,
            d_out: self.d_out,
            d_lse: self.d_lse,
            dq: to.dq,
            dk: to.dk,
            dv: to.dv,
            accumulate,
            d_sink: to.d_sink,
            d_captures: to.captures,
        })
    }
}

/// Where the gradients of a backward pass go: views of any strides and dtype, those of one packed
/// buffer too. What is given no destination is not computed.
#[derive(Debug)]
pub struct GradientsMut<'a> {
    dq: Option<TensorMut<'a>>,
    dk: Option<TensorMut<'a>>,
    dv: Option<TensorMut<'a>>,
    d_sink: Option<SliceMut<'a>>,
    captures: Vec<CaptureGrad<'a>>,
}

impl<'a> GradientsMut<'a> {
    /// Destinations of the shapes of q, k and v.
    pub fn new(dq: TensorMut<'a>, dk: TensorMut<'a>, dv: TensorMut<'a>) -> Self {
        Self { dq: Some(dq), dk: Some(dk), dv: Some(dv), ..Self::none() }
    }

    /// No destination yet: gradients that get none are not computed.
    pub fn none() -> Self {
        Self { dq: None, dk: None, dv: None, d_sink: None, captures: Vec::new() }
    }

    /// That of the gradient of q, of the shape of q.
    pub fn dq(mut self, into: TensorMut<'a>) -> Self {
        self.dq = Some(into);
        self
    }

    /// That of the gradient of k, of the shape of k.
    pub fn dk(mut self, into: TensorMut<'a>) -> Self {
        self.dk = Some(into);
        self
    }

    /// That of the gradient of v, of the shape of v.
    pub fn dv(mut self, into: TensorMut<'a>) -> Self {
        self.dv = Some(into);
        self
    }

    /// That of the sink's gradient, `[Hq]`, of any dtype.
    pub fn d_sink(mut self, into: impl Into<SliceMut<'a>>) -> Self {
        self.d_sink = Some(into.into());
        self
    }

    /// That of the gradient of the learned captured buffer called `name`, row-major like the
    /// buffer, of any dtype.
    pub fn capture(mut self, name: &'a str, into: impl Into<SliceMut<'a>>) -> Self {
        self.captures.push(CaptureGrad { name, into: into.into() });
        self
    }
}

impl Gradients {
    /// All of them as destinations of another pass.
    ///
    /// # Errors
    /// Never for gradients that a plan made: these are contiguous.
    pub fn view_mut(&mut self) -> Result<GradientsMut<'_>, Error> {
        let mut to =
            GradientsMut::new(self.dq.view_mut()?, self.dk.view_mut()?, self.dv.view_mut()?);
        to.d_sink = self.d_sink.as_deref_mut().map(SliceMut::F32);
        let captures = self.captures.iter_mut();
        to.captures = captures
            .map(|(name, into)| CaptureGrad { name, into: into.as_mut_slice().into() })
            .collect();
        Ok(to)
    }
}
