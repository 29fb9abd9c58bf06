//! What the ranks of a run do together.
//!
//! All ranks read the same recipe and pack the same rows; of each batch a rank takes a part of the
//! rows. Gradients are summed in order of rank, in f32, so every rank takes the same step, and a run
//! has the same bits every time with the same number of ranks. Rank 0 alone writes to the run's
//! folder. What goes wrong on one rank ends all, and only that rank says why.

use std::ops::Range;

use foveate_shard::ShardError;
use foveate_shard::collectives::{Collectives, Kind, agree};

use crate::error::{TrainError, TrainErrorKind};

/// The ranks of a run, seen from one of them.
#[derive(Clone, Copy)]
pub(crate) struct Ranks<'a>(pub &'a dyn Collectives);

impl Ranks<'_> {
    /// Whether this rank writes.
    pub fn first(self) -> bool {
        self.0.rank() == 0
    }

    pub fn alone(self) -> bool {
        self.0.ranks() == 1
    }

    /// The rows of this rank, of `rows`.
    pub fn part(self, rows: usize) -> Range<usize> {
        let (rank, ranks) = (self.0.rank(), self.0.ranks());
        rank * rows / ranks..(rank + 1) * rows / ranks
    }

    /// Goes on where all ranks do. The first rank that failed returns its error.
    pub fn together<T>(self, result: Result<T, TrainError>) -> Result<T, TrainError> {
        if self.alone() {
            return result;
        }
        let own = result.as_ref().err().map_or(String::new(), ToString::to_string);
        let all = self.0.all_gather(own.as_bytes())?;
        match all.iter().position(|message| !message.is_empty()) {
            Some(rank) if all[rank] == TrainErrorKind::Interrupted.to_string().as_bytes() => {
                Err(TrainErrorKind::Interrupted.into())
            }
            Some(rank) if rank != self.0.rank() => Err(TrainErrorKind::Elsewhere {
                message: format!("rank {rank}: {}", String::from_utf8_lossy(&all[rank])),
            }
            .into()),
            _ => result,
        }
    }

    /// Compares what has to be the same on all ranks.
    pub fn agree(self, fields: &[(&str, u64)]) -> Result<(), TrainError> {
        if self.alone() { Ok(()) } else { Ok(agree(self.0, fields)?) }
    }

    /// Whether any rank says so.
    pub fn any(self, own: bool) -> Result<bool, TrainError> {
        if self.alone() {
            return Ok(own);
        }
        Ok(self.0.all_gather(&[u8::from(own)])?.concat().contains(&1))
    }

    /// Sums in order of rank, in f64.
    pub fn sum<const N: usize>(self, own: [f64; N]) -> Result<[f64; N], TrainError> {
        if self.alone() {
            return Ok(own);
        }
        let parts = self.0.exchange_as(
            Kind::AllReduce,
            vec![own.map(f64::to_le_bytes).as_flattened().to_vec(); self.0.ranks()],
        )?;
        let mut sums = [0.0; N];
        for part in parts {
            let (values, _) = part.as_chunks();
            sums.iter_mut().zip(values).for_each(|(sum, &value)| *sum += f64::from_le_bytes(value));
        }
        Ok(sums)
    }

    /// Sums gradients in order of rank.
    pub fn sum_gradients(self, values: &mut [f32]) -> Result<(), TrainError> {
        Ok(self.0.all_reduce(values)?)
    }

    /// What rank 0 has, on all.
    pub fn of_first(self, text: String) -> Result<String, TrainError> {
        let bytes = self.0.broadcast(0, text.as_bytes())?;
        Ok(String::from_utf8_lossy(&bytes).into_owned())
    }

    /// Ends all ranks where this one has failed, unless another ended it.
    pub fn end_with<T>(self, result: Result<T, TrainError>) -> Result<T, TrainError> {
        result.inspect_err(|e| {
            if !matches!(e.kind(), TrainErrorKind::Elsewhere { .. }) {
                self.0.abort(&e.to_string());
            }
        })
    }
}

impl From<ShardError> for TrainError {
    fn from(e: ShardError) -> Self {
        let message = e.to_string();
        match message.strip_prefix("aborted: ") {
            Some(why) => TrainErrorKind::Elsewhere { message: why.to_owned() },
            None => TrainErrorKind::Ranks { message },
        }
        .into()
    }
}
