//! Programs with other values bound to their slots.

use foveate_mods::{AnyBuffer, ModError, Program, ScalarValue};

use crate::{ProblemError, Spec};

/// A program with another value bound.
#[derive(Clone, Debug)]
pub struct Rebound {
    /// The program.
    pub spec: Spec,
    /// The mask reads what has changed: block masks are no longer those of the mask.
    pub mask_changed: bool,
}

/// Why a value cannot be bound.
#[derive(Clone, Debug, thiserror::Error)]
pub enum RebindError {
    /// Its type, or a buffer's number of axes, is not that of the slot.
    #[error(transparent)]
    Mod(#[from] ModError),
    /// The program with it is refused by [`Spec::check`].
    #[error(transparent)]
    Problem(#[from] ProblemError),
}

impl Spec {
    /// The program with another captured buffer in place of the one of that name; `None` when no
    /// mod captures one.
    ///
    /// # Errors
    /// When type or rank differ.
    pub fn rebind(&self, buffer: &AnyBuffer) -> Result<Option<Rebound>, RebindError> {
        let holds = |p: &Program| p.graph().buffers().iter().any(|b| b.name() == buffer.name());
        self.bound(holds, &|p| p.rebind(buffer))
    }

    /// The program with another value of the run-time scalar called `name`; `None` when no mod
    /// has one.
    ///
    /// # Errors
    /// When the type differs, or dropout's probability is none.
    pub fn set_scalar(
        &self,
        name: &str,
        value: ScalarValue,
    ) -> Result<Option<Rebound>, RebindError> {
        let holds = |p: &Program| p.graph().scalars().iter().any(|s| s.name == name);
        self.bound(holds, &|p| p.set_scalar(name, value))
    }

    /// `f` applied to every program that `holds` what changes; `None` if none does.
    fn bound(
        &self,
        holds: impl Fn(&Program) -> bool,
        f: &dyn Fn(&Program) -> Result<Program, ModError>,
    ) -> Result<Option<Rebound>, RebindError> {
        let mut spec = self.clone();
        let (mut any, mut mask_changed) = (false, false);
        if let Some(mask) = &mut spec.mask
            && holds(mask.program())
        {
            *mask = mask.map(f)?;
            (any, mask_changed) = (true, true);
        }
        if let Some(score) = &mut spec.score
            && holds(score.program())
        {
            *score = score.map(f)?;
            any = true;
        }
        if let Some(dropout) = &mut spec.dropout
            && holds(dropout.keep_mask().program())
        {
            *dropout = dropout.map(|keep| keep.map(f))?;
            any = true;
        }
        spec.check()?;
        Ok(any.then_some(Rebound { spec, mask_changed }))
    }
}
