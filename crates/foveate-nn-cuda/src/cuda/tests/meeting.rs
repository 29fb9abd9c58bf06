//! Two models that train side by side.

use super::*;

/// Gives the CPU's model what the GPU's has: masters and moments. Between two meetings both take two steps, so the
/// second one's loss is held to the first one's update. Left alone for more, they part by what they round: at the
/// rates that move a model in a few steps a difference of 1e-9 is ten times as large after each.
pub(super) fn meet(
    cpu: &mut Model,
    cuda: &Model<Cuda>,
    (of_cpu, of_cuda): &mut (Moments<Vec<f32>>, Moments<CudaArray>),
) {
    cuda.masters(0, cpu.weights_mut()).unwrap();
    for (moment, from, to) in [
        (Moment::Mean, &of_cuda.mean, &mut of_cpu.mean),
        (Moment::Square, &of_cuda.square, &mut of_cpu.square),
    ] {
        if from.elems() > 0 {
            cuda.download_moment(moment, from, 0, to).unwrap();
        }
    }
}
