//! Rotary position embedding: frequencies, their scaling, and the table of rotations.

use std::sync::Arc;

use crate::config::{ModelConfig, RopeScaling};

/// The rotations of some layers: `inverse_frequencies` are the angles by which the pairs of a head
/// turn at each position, and `magnitude` is what cosines and sines are multiplied with.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Rotary {
    /// Of each pair.
    pub inverse_frequencies: Vec<f64>,
    /// 1, but for longrope.
    pub magnitude: f64,
}

impl Rotary {
    /// Those of a batch that reaches `positions` positions: of layers that turn by `rope_theta`, and
    /// of those that turn by `local_rope_theta` where there are any. An angle is `θ^(-2i/R)`, of R
    /// rotated components, scaled as `rope_scaling` says ("linear": Chen et al. 2023; "llama3":
    /// Llama 3.1; "longrope": Ding et al. 2024, whose factors depend on `positions`).
    pub fn of(config: &ModelConfig, positions: usize) -> Vec<Self> {
        let rotated = config.rotated();
        let plain = |theta: f64| {
            (0..rotated / 2).map(move |i| theta.powf(-2.0 * i as f64 / rotated as f64))
        };
        let scaling = config.rope_scaling.as_ref();
        let scaled = |(i, f): (usize, f64)| scaling.map_or(f, |s| scaled(f, i, s, positions));
        let global = Self {
            inverse_frequencies: plain(config.rope_theta).enumerate().map(scaled).collect(),
            magnitude: scaling.map_or(1.0, |s| magnitude(s, config.max_position_embeddings)),
        };
        let local = config.architecture.local_rope_theta;
        let local =
            local.map(|theta| Self { inverse_frequencies: plain(theta).collect(), magnitude: 1.0 });
        [global].into_iter().chain(local).collect()
    }
}

/// The frequency of pair `i`.
fn scaled(frequency: f64, i: usize, scaling: &RopeScaling, positions: usize) -> f64 {
    let slow = frequency / scaling.factor;
    let original = scaling.original_max_position_embeddings.unwrap_or(8192.0);
    match scaling.rope_type.as_str() {
        "linear" => slow,
        "llama3" => {
            let low = scaling.low_freq_factor.unwrap_or(1.0);
            let high = scaling.high_freq_factor.unwrap_or(4.0);
            let turns = original * frequency / std::f64::consts::TAU;
            let share = ((turns - low) / (high - low)).clamp(0.0, 1.0);
            share * frequency + (1.0 - share) * slow
        }
        "longrope" => {
            let is_long = positions as f64 > original;
            let factors = if is_long { &scaling.long_factor } else { &scaling.short_factor };
            frequency / factors.as_ref().and_then(|all| all.get(i)).copied().unwrap_or(1.0)
        }
        _ => frequency,
    }
}

fn magnitude(scaling: &RopeScaling, longest: usize) -> f64 {
    let original = match (scaling.rope_type.as_str(), scaling.original_max_position_embeddings) {
        ("longrope", Some(original)) => original,
        _ => return 1.0,
    };
    // As transformers has it: a factor that is given goes before the ratio of lengths.
    let factor = if scaling.factor > 1.0 { scaling.factor } else { longest as f64 / original };
    let usual = if factor <= 1.0 { 1.0 } else { (1.0 + factor.ln() / original.ln()).sqrt() };
    scaling.attention_factor.unwrap_or(usual)
}

/// Cosine and sine of every angle up to a position, `[positions, pairs]` each.
#[derive(Clone, Debug, Default)]
pub struct RopeTable {
    rotary: Rotary,
    positions: usize,
    cos: Vec<f32>,
    sin: Vec<f32>,
}

impl RopeTable {
    /// Whether the table has the rotations of `rotary` up to `positions` positions.
    pub fn reaches(&self, rotary: &Rotary, positions: usize) -> bool {
        positions <= self.positions && *rotary == self.rotary
    }

    /// Makes the table have the rotations of `rotary` up to `positions` positions.
    pub fn reach(&mut self, rotary: &Rotary, positions: usize) {
        if self.reaches(rotary, positions) {
            return;
        }
        if *rotary != self.rotary {
            *self = Self { rotary: rotary.clone(), ..Self::default() };
        }
        let positions = positions.next_power_of_two();
        for position in self.positions..positions {
            for f in &self.rotary.inverse_frequencies {
                let (sin, cos) = (position as f64 * f).sin_cos();
                self.cos.push((cos * self.rotary.magnitude) as f32);
                self.sin.push((sin * self.rotary.magnitude) as f32);
            }
        }
        self.positions = positions;
    }

    /// Makes `tables` those of a batch that reaches `positions` positions.
    pub(crate) fn reach_all(tables: &mut Vec<Arc<Self>>, config: &ModelConfig, positions: usize) {
        let all = Rotary::of(config, positions);
        tables.resize_with(all.len(), Arc::default);
        for (table, rotary) in tables.iter_mut().zip(&all) {
            if !table.reaches(rotary, positions) {
                Arc::make_mut(table).reach(rotary, positions);
            }
        }
    }

    fn pairs(&self) -> usize {
        self.rotary.inverse_frequencies.len()
    }

    /// Positions that it reaches, and pairs of a head that turn.
    pub fn shape(&self) -> [usize; 2] {
        [self.positions, self.pairs()]
    }

    /// Cosines and sines of one position, one of each for a pair.
    pub fn at(&self, position: i32) -> (&[f32], &[f32]) {
        let (start, pairs) = (position as usize * self.pairs(), self.pairs());
        (&self.cos[start..start + pairs], &self.sin[start..start + pairs])
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
        let frequencies =
            |config: &ModelConfig| Rotary::of(config, 1).remove(0).inverse_frequencies;
        let plain = frequencies(&config);
        let scaling = |rope_type: &str| RopeScaling {
            rope_type: rope_type.into(),
            factor: 8.0,
            low_freq_factor: Some(1.0),
            high_freq_factor: Some(4.0),
            original_max_position_embeddings: Some(8192.0),
            short_factor: None,
            long_factor: None,
            attention_factor: None,
        };
        config.rope_scaling = Some(scaling("linear"));
        let linear = frequencies(&config);
        assert!(plain.iter().zip(&linear).all(|(p, l)| p / 8.0 == *l));
        config.rope_scaling = Some(scaling("llama3"));
        config.validate().unwrap();
        let llama3 = frequencies(&config);
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
