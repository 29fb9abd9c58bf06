//! What the host learns of a step: sums over its tokens, and times of its blocks.

use std::ops::Range;

use crate::batch::BlockSeconds;
use crate::error::NnError;
use crate::sharing::RankSums;

/// What makes the sums of a step on a rank those of all ranks.
pub struct SumOverRanks<'a> {
    /// Elements that another rank has, too, and counts.
    pub elsewhere: &'a [Range<usize>],
    /// Sums over the ranks that take the step.
    pub sum: &'a mut dyn FnMut(RankSums) -> Result<RankSums, NnError>,
}

impl SumOverRanks<'_> {
    /// Those of all ranks. With `more` gradients of the same step, loss and tokens are of all ranks already.
    ///
    /// # Errors
    /// When the ranks cannot go on.
    pub fn of_all(self, own: RankSums, more: bool) -> Result<RankSums, NnError> {
        let RankSums { squares, nats, .. } = own;
        // An infinite loss may have finite gradients. Other ranks are not to go on with them, either.
        let squares = if nats.is_finite() { squares } else { f64::NAN };
        if more {
            let RankSums { squares, .. } = (self.sum)(RankSums { squares, ..RankSums::default() })?;
            return Ok(RankSums { squares, ..own });
        }
        (self.sum)(RankSums { squares, ..own })
    }
}

/// Sums of a step, read back from the device.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Sums {
    /// Cross-entropy over all tokens that have a label, in nats; of all ranks of a step once it is updated.
    pub nats: f64,
    /// Their z-loss ([`crate::Model::set_z_loss`]), which `nats` has not.
    pub z_loss: f64,
    /// These tokens.
    pub labelled: u64,
    /// Norm of the gradient of the mean loss, before it was clipped; 0 where [`Blocks::clip`](crate::Blocks::clip) did not
    /// run.
    pub grad_norm: f64,
    /// What blocks took; none where the device took no times of this step.
    pub seconds: Option<BlockSeconds>,
}

/// What a [`BlockTime`] is called that lies within attention's: the time in which attention over ranks waits for
/// keys, queries or gradients of others.
pub const KEYS_WAIT: &str = "keys wait";

/// What a [`BlockTime`] is called of a copy from the memory of the host to the device, on a queue of its own beside the
/// blocks': moments, or an input of a layer.
pub const COPY_IN: &str = "copy in";

/// The same of a copy to the memory of the host: of what is saved, too.
pub const COPY_OUT: &str = "copy out";

/// When a block ran on the device.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct BlockTime {
    /// Its name, as [`crate::NotedBlock`] has it; the logits' own part of a loss is `cross_entropy`.
    pub block: &'static str,
    /// Seconds since the profile began.
    pub start: f64,
    /// Seconds that it took.
    pub seconds: f64,
}
