//! A checked replay of a batch whose loss or gradients are not finite: which block was the first to leave a
//! value that is not.

use std::fmt;

use foveate::DType;

use super::prepared::{Begun, Prepared};
use super::{Gradients, Model};
use crate::account::StepKind;
use crate::backend::{Array, Blocks, Part};
use crate::batch::Batch;
use crate::error::NnError;
use crate::parameters::Parameter;
use crate::tape::Recomputation;

/// The first value of a batch that is not finite.
#[derive(Clone, Debug, PartialEq)]
pub struct NotFinite {
    /// Where it is.
    pub place: NotFinitePlace,
    /// What it is.
    pub value: f32,
}

/// Where a value is that is not finite.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum NotFinitePlace {
    /// In what a block of the forward pass leaves.
    Forward {
        /// The layer, counted from 0; none of a block that is of no layer.
        layer: Option<usize>,
        /// The block, in words.
        block: &'static str,
        /// The row of the batch.
        row: usize,
        /// The token of the row.
        token: usize,
    },
    /// In the gradient of a parameter, of which the backward pass comes to this one first.
    Gradient {
        /// Its name.
        parameter: String,
        /// The element.
        element: usize,
    },
}

impl fmt::Display for NotFinite {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { place, value } = self;
        match place {
            NotFinitePlace::Forward { layer: None, block, row, token } => {
                write!(f, "{block} leaves {value} for token {token} of row {row}")
            }
            NotFinitePlace::Forward { layer: Some(layer), block, row, token } => {
                write!(f, "{block} of layer {layer} leaves {value} for token {token} of row {row}")
            }
            NotFinitePlace::Gradient { parameter, element } => {
                write!(f, "the gradient of {parameter} is {value} at element {element}")
            }
        }
    }
}

/// Elements that are read back at once.
const PIECE: usize = 1 << 20;

impl<B: Blocks> Model<B> {
    /// Runs a batch once more and looks at what every block leaves, then at the gradients of all parameters
    /// in the order of the backward pass: the first value that is not finite, or none. It takes the memory
    /// of a step and of [`Model::loss_over`]; `gradients` count as cleared behind it, and without them the
    /// backward pass is left out. None, too, where other ranks have parts of the model or of the rows.
    ///
    /// # Errors
    /// Those of [`Model::accumulate`].
    pub fn first_not_finite(
        &self,
        batch: &Batch<'_>,
        mut gradients: Option<&mut Gradients<B::Array>>,
        recompute: impl Into<Recomputation>,
    ) -> Result<Option<NotFinite>, NnError> {
        if self.is_cut() || self.running().context.is_some() {
            return Ok(None);
        }
        if let Some(found) = self.first_forward(batch, gradients.as_deref_mut())? {
            return Ok(Some(found));
        }
        let Some(gradients) = gradients else { return Ok(None) };
        self.clear(gradients);
        self.forward_backward(batch, gradients, recompute)?;
        self.clear(gradients);
        let trained = |p: &&Parameter| self.layout().trains(&p.place);
        for parameter in self.parameters().iter().rev().filter(trained) {
            let blocks = &mut self.running().blocks;
            let place = parameter.place.clone();
            if let Some((element, value)) =
                first_of(blocks, Part { array: &gradients.array, place })?
            {
                let parameter = parameter.name.clone();
                let place = NotFinitePlace::Gradient { parameter, element };
                return Ok(Some(NotFinite { place, value }));
            }
        }
        Ok(None)
    }

    fn first_forward(
        &self,
        batch: &Batch<'_>,
        between: Option<&mut Gradients<B::Array>>,
    ) -> Result<Option<NotFinite>, NnError> {
        self.check_parameters()?;
        let (running, fixed) = (&mut *self.running(), self.fixed());
        let prepared = Prepared::new(running, fixed, batch, None)?;
        let programs = prepared.of_layers(&self.programs);
        let idle = between.and_then(Gradients::idle);
        let Begun { mut pass, blocks, workspace, .. } =
            running.begin(fixed, &prepared, &programs, None, StepKind::Loss, idle)?;
        let (mut each, tokens) = (B::Array::default(), batch.tokens_total());
        blocks.resize("token losses", &mut each, DType::F32, tokens)?;
        let mut totals = blocks.totals()?;
        let (weights, mut first) = (&self.weights.array, None);
        let look = &mut |blocks: &mut B, layer, block, array: &B::Array| {
            let found = first_of(blocks, Part::whole(array))?;
            first = found.map(|(element, value)| {
                let token = element / (array.elems() / tokens).max(1);
                let (row, token) = (token / batch.len, token % batch.len);
                let place = NotFinitePlace::Forward { layer, block, row, token };
                NotFinite { place, value }
            });
            Ok(first.is_some())
        };
        pass.looked_at(blocks, weights, workspace, &mut each, &mut totals, look)?;
        blocks.read(totals)?;
        Ok(first)
    }
}

/// The first element that is not finite.
fn first_of<B: Blocks>(
    blocks: &mut B,
    of: Part<'_, B::Array>,
) -> Result<Option<(usize, f32)>, NnError> {
    let Part { array, place } = of;
    let mut values = vec![0.0; PIECE.min(place.len())];
    for start in place.clone().step_by(PIECE) {
        let piece = start..place.end.min(start + PIECE);
        let values = &mut values[..piece.len()];
        blocks.download(Part { array, place: piece }, values)?;
        if let Some(at) = values.iter().position(|value| !value.is_finite()) {
            return Ok(Some((start - place.start + at, values[at])));
        }
    }
    Ok(None)
}
