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
    /// The program with it is refused by [`Spec::check`], or has no slot of that name.
    #[error(transparent)]
    Problem(#[from] ProblemError),
}

impl Spec {
    /// The program with another captured buffer in place of the one of that name.
    ///
    /// # Errors
    /// When no mod captures one, or type or rank differ.
    pub fn rebind(&self, buffer: &AnyBuffer) -> Result<Rebound, RebindError> {
        let holds = |p: &Program| p.graph().buffers().iter().any(|b| b.name() == buffer.name());
        self.bound(["captured buffer", buffer.name()], holds, &|p| p.rebind(buffer))
    }

    /// The program with another value of the run-time scalar called `name`.
    ///
    /// # Errors
    /// When no mod has one, the type differs, or dropout's probability is none.
    pub fn set_scalar(&self, name: &str, value: ScalarValue) -> Result<Rebound, RebindError> {
        let holds = |p: &Program| p.graph().scalars().iter().any(|s| s.name == name);
        self.bound(["run-time scalar", name], holds, &|p| p.set_scalar(name, value))
    }

    /// `f` applied to every program that `holds` the slot, which is a `what` called `name`.
    fn bound(
        &self,
        [what, name]: [&str; 2],
        holds: impl Fn(&Program) -> bool,
        f: &dyn Fn(&Program) -> Result<Program, ModError>,
    ) -> Result<Rebound, RebindError> {
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
        if !any {
            return Err(ProblemError::no_slot(what, name).into());
        }
        spec.check()?;
        Ok(Rebound { spec, mask_changed })
    }
}
