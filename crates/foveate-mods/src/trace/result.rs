//! What a body becomes.

use std::panic::Location;

use super::operand::Adapt;
use crate::program::{MaskMod, ScoreMod};

/// A finished mask. One that reads the score, which only a captured expression can bring into it,
/// holds that error.
#[track_caller]
pub fn mask(body: impl Adapt<bool>) -> MaskMod {
    let place = Location::caller();
    MaskMod::holding(MaskMod::new(body.adapt().dynamic()).map_err(|e| e.at(place)))
}

/// A finished score function.
#[track_caller]
pub fn score(body: impl Adapt<f32>) -> ScoreMod {
    let place = Location::caller();
    ScoreMod::holding(ScoreMod::new(body.adapt().dynamic()).map_err(|e| e.at(place)))
}
