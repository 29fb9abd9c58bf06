//! The gradients of a model's parameters, in one array.

use super::Model;
use crate::parameters::Parameter;

/// The gradients of all parameters of a model, each at its parameter's place.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Gradients<A = Vec<f32>> {
    /// Elements as [`ParameterLayout`](crate::ParameterLayout) places them. They mean nothing between
    /// [`Model::clear`] and the next batch.
    pub array: A,
    /// Whether the next batch writes over them.
    pub(crate) cleared: bool,
    /// Whether they are of one batch, whose activations lie in their memory before they begin.
    pub(crate) one_batch: bool,
}

impl<A> Gradients<A> {
    /// Their memory, where activations may lie in it between steps; they hold nothing from there on.
    pub(crate) fn idle(&mut self) -> Option<&A> {
        self.cleared |= self.one_batch;
        self.one_batch.then_some(&self.array)
    }
}

impl Gradients {
    /// Zeros for every parameter of `model`.
    pub fn zeros(model: &Model) -> Self {
        Self { array: vec![0.0; model.layout.trained()], ..Self::default() }
    }

    /// Sets all to zero.
    pub fn clear(&mut self) {
        self.array.fill(0.0);
    }

    /// The gradient of one parameter that is trained, row-major.
    pub fn of(&self, parameter: &Parameter) -> &[f32] {
        &self.array[parameter.place.clone()]
    }
}
