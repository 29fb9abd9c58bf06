//! Kernels of a call before the call: all of them compiled side by side.

use std::thread;

use foveate_mask::Varies;

use super::CudaPlan;
use super::call::Call;
use super::kernels::sizes;
use crate::choose::schedule::Axis;
use crate::choose::{Class, KernelPlan, Pass, PassLaunch};
use crate::error::CudaError;
use crate::operands::{DeviceForward, Wanted, written};
use foveate_gpu::Queue;

impl CudaPlan {
    /// Compiles and loads the kernels that [`Self::forward_on`] would launch for `args` and, where gradients are
    /// wanted, those of [`Self::backward_on`] with gradients laid out as `args` are, each on a thread of its own.
    /// Nothing is launched, and memory is neither taken nor read.
    ///
    /// # Errors
    /// Those of planning and compiling; a score that cannot be differentiated, where gradients are wanted.
    pub fn prepare(
        &self,
        queue: &Queue,
        args: &DeviceForward<'_>,
        backward: Option<Wanted>,
    ) -> Result<(), CudaError> {
        self.engine.check_queue(queue)?;
        let dims = self.admit(&args.operands)?;
        args.check(&dims)?;
        let plan = self.bound(args.operands.captures)?;
        let call = Call::new(queue, &dims, &args.operands, plan.options.checked)?;
        let sizes = sizes(&dims, call.sequences.longest());
        let forward = plan.forward_class(&call, args)?;
        let chosen = plan.chosen(forward, sizes, false)?;
        let pass = Pass::Forward { kv_split: chosen.kv_splits > 1 };
        let mut queued: Vec<_> =
            pass.launches().into_iter().map(|launch| (chosen.clone(), launch)).collect();
        if let Some(wanted) = backward {
            plan.differentiable()?;
            let class = Class {
                dq_dtype: written("dq", args.operands.q.dtype)?,
                grad_dtype: written("dk", args.operands.q.dtype)?,
                align: args.align(),
                unmapped: plan.unmapped(&args.operands, Some(&args.out)),
                sink: args.operands.sink.is_some(),
                captures: wanted.captures,
                checked: call.checked,
                separate_dq: wanted.separates_dq(),
                ..plan.class()
            };
            let chosen = plan.chosen_backward(class.clone(), &call)?;
            let pass = Pass::Backward {
                row_weight_sum: class.has_row_weight_sum(),
                sink: class.sink,
                deterministic: class.deterministic,
                separate_dq: chosen.separates_dq(),
                split_gqa: chosen.splits_gqa(),
                wanted,
            };
            queued.extend(pass.launches().into_iter().map(|launch| (chosen.clone(), launch)));
        }
        thread::scope(|scope| {
            let started: Vec<_> = queued
                .iter()
                .map(|(chosen, launch)| scope.spawn(|| plan.prepare_launch(&call, chosen, launch)))
                .collect();
            let done = started.into_iter().map(|t| t.join().expect("compiling does not panic"));
            done.collect::<Vec<_>>().into_iter().collect()
        })
    }

    fn prepare_launch(
        &self,
        call: &Call<'_>,
        chosen: &KernelPlan,
        launch: &PassLaunch,
    ) -> Result<(), CudaError> {
        let kernel = self.kernel(chosen, launch, call)?;
        let tile = kernel.tile();
        if kernel.config.mask_bits {
            self.mask_bits_kernel(call, tile)?;
        }
        if let Some(mask) = self.spec.mask.as_ref().filter(|_| launch.main_loop) {
            let [q, kv] = call.sequences.longest();
            let columns = match launch.axis {
                Axis::Queries => kv.div_ceil(tile.kv),
                Axis::Keys => q.div_ceil(tile.q),
            };
            let heads = if Varies::of(mask).by_head { call.dims.heads_q } else { 1 };
            self.list_kernel_of(call, tile, columns, heads)?;
        }
        Ok(())
    }
}
