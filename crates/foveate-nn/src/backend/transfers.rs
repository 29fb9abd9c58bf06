//! Parts of parameters and of gradients between ranks.

use super::{Blocks, PartMut};
use crate::error::NnError;
use crate::sharing::CutGroup;

/// What moves parts of parameters and of gradients between the ranks that share them. All ranks begin
/// and wait for transfers of a kind in the same order; what is begun runs beside the caller. Waiting may
/// be left to the work that is queued behind.
pub trait Transfers<B: Blocks>: Send {
    /// Begins to bring together the parts of a group in `into`, which is written until
    /// [`Transfers::gathered`]; `own` has those of this rank, and stays as it is until then.
    ///
    /// # Errors
    /// When the ranks cannot go on, or the device fails.
    fn gather(
        &mut self,
        blocks: &mut B,
        own: &B::Array,
        group: &CutGroup,
        into: &mut B::Array,
    ) -> Result<(), NnError>;

    /// Waits for the group whose gathering began first, with `into` as it began.
    ///
    /// # Errors
    /// Those of [`Transfers::gather`].
    fn gathered(
        &mut self,
        blocks: &mut B,
        group: &CutGroup,
        into: &mut B::Array,
    ) -> Result<(), NnError>;

    /// Begins to sum the gradients of a group over ranks, in order of rank; `gradients` begins with
    /// them, and may be taken. The part of this rank goes to `into`, which is written until
    /// [`Transfers::reduced`].
    ///
    /// # Errors
    /// Those of [`Transfers::gather`].
    fn reduce(
        &mut self,
        blocks: &mut B,
        gradients: &mut B::Array,
        group: &CutGroup,
        into: PartMut<'_, B::Array>,
    ) -> Result<(), NnError>;

    /// Waits for the sum that began first, with `into` as it began.
    ///
    /// # Errors
    /// Those of [`Transfers::gather`].
    fn reduced(
        &mut self,
        blocks: &mut B,
        group: &CutGroup,
        into: PartMut<'_, B::Array>,
    ) -> Result<(), NnError>;
}
