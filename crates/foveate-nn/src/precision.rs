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
    /// Of the optimiser's moments.
    pub moments: MomentDtype,
    /// Whether moments lie in the memory of the host and pass through the device in pieces
    /// ([`MOMENTS_PIECE`]).
    pub host_moments: bool,
}

/// Elements of a piece of moments that lie in the memory of the host.
pub const MOMENTS_PIECE: usize = 8 << 20;
/// Pieces that a device holds at once: one comes in, one is updated, one goes out.
pub const MOMENTS_PIECES: usize = 3;

/// How a moment of each parameter is kept.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum MomentDtype {
    /// f32.
    F32,
    /// bf16, rounded stochastically.
    Bf16,
    /// 8 bits, rounded stochastically, and an f32 for each block of 256 ([`crate::moments`]).
    Int8,
}

impl MomentDtype {
    /// The array that a moment of `elems` elements is kept in: of which dtype, and how many of these.
    pub fn array(self, elems: usize) -> (DType, usize) {
        match self {
            Self::F32 => (DType::F32, elems),
            Self::Bf16 => (DType::BF16, elems),
            Self::Int8 => (DType::F32, crate::moments::words(elems)),
        }
    }

    /// Bytes of an element.
    pub fn bytes(self) -> f64 {
        match self {
            Self::F32 => 4.0,
            Self::Bf16 => 2.0,
            Self::Int8 => 1.0 + 4.0 / crate::moments::BLOCK as f64,
        }
    }
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
    /// The same with bf16 gradients, for one batch a step: 14 bytes a parameter.
    Bf16Gradients,
    /// The same with f32 gradients and bf16 moments: 12 bytes a parameter.
    Bf16Moments,
    /// The same with moments of 8 bits in blocks of 256: 10.03 bytes a parameter. On the CPU weights
    /// are f32.
    Int8Moments,
    /// As `exact` with moments in the memory of the host: 8 bytes a parameter, and 8 of the host's.
    HostMoments,
    /// All bf16: 8 bytes a parameter.
    Bf16,
}

impl ParameterState {
    /// The one with these dtypes.
    pub fn of(precision: Precision) -> Option<Self> {
        Self::ALL.into_iter().find(|&state| Precision::from(state) == precision)
    }

    /// All of them, by the bytes they take.
    pub const ALL: [Self; 7] = [
        Self::F32,
        Self::Exact,
        Self::Bf16Gradients,
        Self::Bf16Moments,
        Self::Int8Moments,
        Self::HostMoments,
        Self::Bf16,
    ];

    /// Its name in a recipe.
    pub fn name(self) -> &'static str {
        match self {
            Self::F32 => "f32",
            Self::Exact => "exact",
            Self::Bf16Gradients => "bf16_gradients",
            Self::Bf16Moments => "bf16_moments",
            Self::Int8Moments => "int8_moments",
            Self::HostMoments => "host_moments",
            Self::Bf16 => "bf16",
        }
    }
}

impl From<ParameterState> for Precision {
    fn from(state: ParameterState) -> Self {
        let (wide, narrow) = (DType::F32, DType::BF16);
        let (weights, gradients, moments) = match state {
            ParameterState::F32 => (wide, wide, MomentDtype::F32),
            ParameterState::Exact | ParameterState::HostMoments => (narrow, wide, MomentDtype::F32),
            ParameterState::Bf16Gradients => (narrow, narrow, MomentDtype::F32),
            ParameterState::Bf16Moments => (narrow, wide, MomentDtype::Bf16),
            ParameterState::Int8Moments => (narrow, wide, MomentDtype::Int8),
            ParameterState::Bf16 => (narrow, narrow, MomentDtype::Bf16),
        };
        let remainders = !matches!(state, ParameterState::F32 | ParameterState::Bf16);
        let host_moments = state == ParameterState::HostMoments;
        Self { weights, remainders, gradients, moments, host_moments }
    }
}

impl Precision {
    /// Bytes of weight, master, gradient and moments of a parameter, on the device.
    pub fn bytes_per_parameter(&self) -> f64 {
        let rest = if self.remainders { 2 } else { 0 };
        let moments = if self.host_moments { 0.0 } else { 2.0 * self.moments.bytes() };
        (self.weights.bytes() + rest + self.gradients.bytes()) as f64 + moments
    }

    /// Bytes of a copy of what is kept of `elems` parameters, `trained` of them with so many moments
    /// ([`crate::Model::copy_state`]).
    pub fn copy_bytes(&self, elems: usize, trained: usize, moments: usize) -> u64 {
        let bytes = |elems: usize, size: usize| (elems as u64).saturating_mul(size as u64);
        let (dtype, each) = self.moments.array(trained);
        let rest = if self.remainders { 2 } else { 0 };
        bytes(elems, self.weights.bytes())
            .saturating_add(bytes(trained, rest))
            .saturating_add(bytes(each, dtype.bytes()).saturating_mul(moments as u64))
    }

    /// Elements of each moment of `trained` parameters that are on the device at once.
    pub fn moments_on_device(&self, trained: usize) -> usize {
        match self.host_moments {
            true => MOMENTS_PIECES * trained.min(MOMENTS_PIECE),
            false => trained,
        }
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
        for bits in edges.flat_map(|b| [b, b | 1 << 31]) {
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
        let bytes = ParameterState::ALL.map(|state| Precision::from(state).bytes_per_parameter());
        assert_eq!(bytes, [16.0, 16.0, 14.0, 12.0, 10.03125, 8.0, 8.0]);
    }
}
