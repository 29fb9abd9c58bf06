//! Inputs of layers in the memory of the host, from the forward pass of a layer to its backward pass.
//!
//! ```text
//! blocks     layer 0   layer 1   layer 2 | head   layer 2   layer 1   layer 0
//! to host    input 0   input 1           |
//! from host                              |        input 1   input 0
//! ```
//!
//! The input of a layer goes out while the layer runs, which only reads it, and the blocks wait for the copy
//! before they run the next one. It comes back while the layer behind it runs backward. The last layer's stays:
//! it is needed first. So two arrays of the device serve all layers in turn: the one that a layer reads, and the
//! one that it writes or, backward, that comes in. The host waits for nothing.

use foveate::DType;
use serde::{Deserialize, Serialize};

use crate::backend::{Array, Blocks};
use crate::error::NnError;

/// Inputs on the device at once, where the host has them all.
pub(crate) const INPUTS: usize = 2;

/// What of activations waits in the memory of the host for the backward pass.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Offload {
    /// Nothing.
    #[default]
    None,
    /// The inputs of all layers but the last.
    LayerInputs,
}

impl Offload {
    /// Its name in a recipe.
    pub fn name(self) -> &'static str {
        match self {
            Self::None => "none",
            Self::LayerInputs => "layer_inputs",
        }
    }
}

/// The arrays of the host, and which copies are under way.
#[derive(Debug, Default)]
pub(crate) struct HostInputs<A> {
    /// Of all layers but the last.
    arrays: Vec<A>,
    /// Whether the pass under way uses them.
    used: bool,
    /// The layer whose input goes out.
    leaving: Option<usize>,
    /// The layer whose input comes back.
    coming: Option<usize>,
}

impl<A: Array> HostInputs<A> {
    /// A pass begins that does not use them, unless they are fitted to it.
    pub fn rest(&mut self) {
        (self.used, self.leaving, self.coming) = (false, None, None);
    }

    /// Makes them fit inputs of `elems` elements of `layers` layers.
    pub fn fit<B: Blocks<Array = A>>(
        &mut self,
        blocks: &mut B,
        layers: usize,
        dtype: DType,
        elems: usize,
    ) -> Result<(), NnError> {
        self.used = true;
        self.arrays.resize_with(layers.saturating_sub(1), A::default);
        for array in &mut self.arrays {
            if (array.dtype(), array.elems()) != (dtype, elems) {
                blocks.resize_on_host("layer input of the host", array, dtype, elems)?;
            }
        }
        Ok(())
    }

    /// `layer` runs next: its input begins to go out. `inputs` are those of the device.
    pub fn leave<B: Blocks<Array = A>>(
        &mut self,
        blocks: &mut B,
        inputs: &[A],
        layer: usize,
    ) -> Result<(), NnError> {
        let Some(to) = self.arrays.get_mut(layer).filter(|_| self.used) else { return Ok(()) };
        self.leaving = Some(layer);
        blocks.leave(&inputs[layer % inputs.len()], to)
    }

    /// What is queued next waits for the input that is going out.
    pub fn left<B: Blocks<Array = A>>(
        &mut self,
        blocks: &mut B,
        inputs: &[A],
    ) -> Result<(), NnError> {
        let Some(layer) = self.leaving.take() else { return Ok(()) };
        blocks.left(&inputs[layer % inputs.len()])
    }

    /// `layer` runs backward next: what is queued for it waits for its input, and that of the layer before
    /// begins to come.
    pub fn come<B: Blocks<Array = A>>(
        &mut self,
        blocks: &mut B,
        inputs: &mut [A],
        layer: usize,
    ) -> Result<(), NnError> {
        self.came(blocks, inputs)?;
        let Some(before) = layer.checked_sub(1).filter(|_| self.used) else { return Ok(()) };
        self.coming = Some(before);
        let slot = before % inputs.len();
        blocks.bring(&self.arrays[before], &mut inputs[slot])
    }

    fn came<B: Blocks<Array = A>>(&mut self, blocks: &mut B, inputs: &[A]) -> Result<(), NnError> {
        let Some(layer) = self.coming.take() else { return Ok(()) };
        blocks.brought(&inputs[layer % inputs.len()])
    }

    /// A pass has ended in an error: what is queued behind it, in the same memory, waits for its copies.
    pub fn abandon<B: Blocks<Array = A>>(&mut self, blocks: &mut B, inputs: &[A]) {
        // The error that ended the pass is the one to tell.
        let _ = self.left(blocks, inputs);
        let _ = self.came(blocks, inputs);
    }
}
