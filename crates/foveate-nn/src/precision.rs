//! What is kept of each parameter, and in how many bits.
//!
//! A bf16 weight and 16 bits more are an exact f32 master (TransformerEngine's
//! `store_param_remainders`): the weight is the master rounded to the nearest, ties away from zero,
//! so that what is cut off is a signed 16-bit number. Blocks compute with the weight alone, and no
//! second copy of it is kept.

use foveate::DType;
use serde::{Deserialize, Serialize};

/// Dtypes of what is kept of a parameter. Activations have the dtype of the weights; sums inside a
/// block are f32 or more.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Precision {
    /// Of weights and activations: f32 or bf16.
    pub weights: DType,
    /// Whether 16 bits complete each bf16 weight to an f32 master. Without them a bf16 weight is
    /// its own master, rounded stochastically.
    pub remainders: bool,
    /// Of gradients: f32 or bf16.
    pub gradients: DType,
    /// Of AdamW's two moments: f32, or bf16 rounded stochastically.
    pub moments: DType,
}

/// The precisions that have a name, in recipes too.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ParameterState {
    /// All f32: 16 bytes a parameter.
    #[default]
    F32,
    /// bf16 weights with f32 masters, f32 gradients and moments: 16 bytes a parameter.
    Exact,
    /// The same with bf16 moments: 12 bytes a parameter.
    Bf16Moments,
    /// All bf16: 8 bytes a parameter.
    Bf16,
}

impl ParameterState {
    /// The one with these dtypes.
    pub fn of(precision: Precision) -> Option<Self> {
        let all = [Self::F32, Self::Exact, Self::Bf16Moments, Self::Bf16];
        all.into_iter().find(|&state| Precision::from(state) == precision)
    }

    /// Its name in a recipe.
    pub fn name(self) -> &'static str {
        match self {
            Self::F32 => "f32",
            Self::Exact => "exact",
            Self::Bf16Moments => "bf16_moments",
            Self::Bf16 => "bf16",
        }
    }
}

impl From<ParameterState> for Precision {
    fn from(state: ParameterState) -> Self {
        let (wide, narrow) = (DType::F32, DType::BF16);
        let [weights, gradients, moments] = match state {
            ParameterState::F32 => [wide, wide, wide],
            ParameterState::Exact => [narrow, wide, wide],
            ParameterState::Bf16Moments => [narrow, wide, narrow],
            ParameterState::Bf16 => [narrow, narrow, narrow],
        };
        let remainders = matches!(state, ParameterState::Exact | ParameterState::Bf16Moments);
        Self { weights, remainders, gradients, moments }
    }
}

impl Precision {
    /// Bytes of weight, master, gradient and moments of a parameter.
    pub fn bytes_per_parameter(&self) -> usize {
        let rest = if self.remainders { 2 } else { 0 };
        self.weights.bytes() + rest + self.gradients.bytes() + 2 * self.moments.bytes()
    }
}

/// The bits of the bf16 weight of a master, and the 16 bits that complete it.
pub fn split_master(master: f32) -> (u16, u16) {
    let bits = master.to_bits();
    if master.is_nan() {
        // Rounding the bits of a NaN may leave the NaNs.
        return (0x7fff, 0);
    }
    ((bits.wrapping_add(0x8000) >> 16) as u16, bits as u16)
}

/// The master of a bf16 weight and the 16 bits that complete it.
pub fn join_master(weight: u16, remainder: u16) -> f32 {
    let remainder = i32::from(remainder as i16) as u32;
    f32::from_bits((u32::from(weight) << 16).wrapping_add(remainder))
}

#[cfg(test)]
mod tests {
    use super::*;
    use half::bf16;

    #[test]
    fn a_master_is_put_together_again_from_its_two_halves() {
        // Every pattern of two binades, and the edges of all: zeros, subnormals, the largest.
        let edges =
            (0u32..=0x1_0000).chain(0x7f7e_0000..=0x7f80_0000).chain(0x3f80_0000..0x4080_0000);
        for bits in edges.step_by(1).flat_map(|b| [b, b | 1 << 31]) {
            let master = f32::from_bits(bits);
            let (weight, remainder) = split_master(master);
            assert_eq!(join_master(weight, remainder).to_bits(), bits, "{bits:x}");
            let (weight, nearest) = (bf16::from_bits(weight), bf16::from_f32(master));
            let is_tie = bits & 0xffff == 0x8000;
            assert!(is_tie || weight == nearest, "{bits:x}: {weight} is not {nearest}");
        }
        let (weight, remainder) = split_master(f32::NAN);
        assert!(bf16::from_bits(weight).is_nan() && join_master(weight, remainder).is_nan());
    }

    #[test]
    fn states_have_the_sizes_that_the_manual_gives_them() {
        let bytes = [
            ParameterState::F32,
            ParameterState::Exact,
            ParameterState::Bf16Moments,
            ParameterState::Bf16,
        ]
        .map(|state| Precision::from(state).bytes_per_parameter());
        assert_eq!(bytes, [16, 16, 12, 8]);
    }
}
