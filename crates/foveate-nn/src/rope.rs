//! Rotary position embedding: frequencies, their scaling, and the table of rotations.

use crate::config::{ModelConfig, RopeScaling};

/// The angle by which pair `i` of a head turns at each position, one for each of `D/2` pairs:
/// `θ^(-2i/D)`, scaled as `rope_scaling` says ("linear": Chen et al. 2023; "llama3": Llama 3.1).
pub fn inverse_frequencies(config: &ModelConfig) -> Vec<f64> {
    let dim = config.dim();
    (0..dim / 2)
        .map(|i| config.rope_theta.powf(-2.0 * i as f64 / dim as f64))
        .map(|f| config.rope_scaling.as_ref().map_or(f, |s| scaled(f, s)))
        .collect()
}

fn scaled(frequency: f64, scaling: &RopeScaling) -> f64 {
    let slow = frequency / scaling.factor;
    match scaling.rope_type.as_str() {
        "linear" => slow,
        "llama3" => {
            let low = scaling.low_freq_factor.unwrap_or(1.0);
            let high = scaling.high_freq_factor.unwrap_or(4.0);
            let original = scaling.original_max_position_embeddings.unwrap_or(8192.0);
            let turns = original * frequency / std::f64::consts::TAU;
            let share = ((turns - low) / (high - low)).clamp(0.0, 1.0);
            share * frequency + (1.0 - share) * slow
        }
        _ => frequency,
    }
}

/// Cosine and sine of every angle up to a position, `[positions, D/2]` each.
#[derive(Clone, Debug, Default)]
pub struct RopeTable {
    pairs: usize,
    positions: usize,
    cos: Vec<f32>,
    sin: Vec<f32>,
}

impl RopeTable {
    /// Whether the table reaches `positions` positions.
    pub fn reaches(&self, positions: usize) -> bool {
        positions <= self.positions
    }

    /// Makes the table reach `positions` positions.
    pub fn reach(&mut self, config: &ModelConfig, positions: usize) {
        if positions <= self.positions {
            return;
        }
        let frequencies = inverse_frequencies(config);
        let positions = positions.next_power_of_two();
        for position in self.positions..positions {
            for f in &frequencies {
                let (sin, cos) = (position as f64 * f).sin_cos();
                self.cos.push(cos as f32);
                self.sin.push(sin as f32);
            }
        }
        self.pairs = frequencies.len();
        self.positions = positions;
    }

    /// Positions that it reaches, and pairs of a head: `D/2`.
    pub fn shape(&self) -> [usize; 2] {
        [self.positions, self.pairs]
    }

    /// Cosines and sines of one position, `D/2` each.
    pub fn at(&self, position: i32) -> (&[f32], &[f32]) {
        let start = position as usize * self.pairs;
        (&self.cos[start..start + self.pairs], &self.sin[start..start + self.pairs])
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tests::tiny;

    #[test]
    fn scaling_slows_low_frequencies_and_leaves_high_ones() {
        let mut config = tiny(true);
        config.head_dim = Some(128);
        config.rope_theta = 500_000.0;
        let plain = inverse_frequencies(&config);
        let scaling = |rope_type: &str| RopeScaling {
            rope_type: rope_type.into(),
            factor: 8.0,
            low_freq_factor: Some(1.0),
            high_freq_factor: Some(4.0),
            original_max_position_embeddings: Some(8192.0),
        };
        config.rope_scaling = Some(scaling("linear"));
        let linear = inverse_frequencies(&config);
        assert!(plain.iter().zip(&linear).all(|(p, l)| p / 8.0 == *l));
        config.rope_scaling = Some(scaling("llama3"));
        config.validate().unwrap();
        let llama3 = inverse_frequencies(&config);
        for (p, l) in plain.iter().zip(&llama3) {
            // Turns within the original context decide: more than 4 stay, fewer than 1 slow down.
            let turns = 8192.0 * p / std::f64::consts::TAU;
            match turns {
                t if t > 4.0 => assert_eq!(l, p),
                t if t < 1.0 => assert!((l - p / 8.0).abs() < 1e-18),
                _ => assert!(*l < *p && *l > p / 8.0),
            }
        }
        config.rope_scaling = Some(RopeScaling { low_freq_factor: None, ..scaling("llama3") });
        let error = config.validate().unwrap_err().to_string();
        assert!(error.starts_with("rope_scaling.low_freq_factor: is missing"), "{error}");
    }
}
