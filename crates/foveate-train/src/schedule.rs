//! Learning-rate schedules: warm-up, then constant, linear, cosine or warm-up/stable/decay.
//!
//! A schedule is a pure function of the step, so resuming needs no state.

use serde::{Deserialize, Serialize};

/// How the learning rate moves after the warm-up.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum ScheduleKind {
    /// Stays at the peak.
    Constant,
    /// Falls in a straight line to the floor, which the step behind the last would have.
    Linear,
    /// Falls along half a cosine to the floor, which the step behind the last would have.
    #[default]
    Cosine,
    /// Stays at the peak, then falls in a straight line over the last `decay_steps` steps.
    Wsd,
}

/// A schedule over a known number of steps.
#[derive(Clone, Debug, PartialEq)]
pub struct Schedule {
    /// The shape after the warm-up.
    pub kind: ScheduleKind,
    /// Steps over which the rate rises in a straight line from `peak / warmup_steps`.
    pub warmup_steps: u64,
    /// Steps of the final fall; only [`ScheduleKind::Wsd`] reads it.
    pub decay_steps: u64,
    /// All steps of the run.
    pub steps: u64,
    /// The floor, as a fraction of the peak.
    pub min_ratio: f64,
}

impl Schedule {
    /// The fraction of the peak learning rate at `step`, counted from zero.
    pub fn ratio(&self, step: u64) -> f64 {
        if step < self.warmup_steps {
            return (step + 1) as f64 / self.warmup_steps as f64;
        }
        let fall = |start: u64| {
            let length = self.steps.saturating_sub(start).max(1) as f64;
            (step.saturating_sub(start) as f64 / length).min(1.0)
        };
        let floor = self.min_ratio;
        match self.kind {
            ScheduleKind::Constant => 1.0,
            ScheduleKind::Linear => 1.0 - (1.0 - floor) * fall(self.warmup_steps),
            ScheduleKind::Cosine => {
                let cosine = (std::f64::consts::PI * fall(self.warmup_steps)).cos();
                floor + (1.0 - floor) * 0.5 * (1.0 + cosine)
            }
            ScheduleKind::Wsd => {
                let start = self.steps.saturating_sub(self.decay_steps).max(self.warmup_steps);
                1.0 - (1.0 - floor) * fall(start)
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn schedule(kind: ScheduleKind) -> Schedule {
        Schedule { kind, warmup_steps: 10, decay_steps: 20, steps: 110, min_ratio: 0.1 }
    }

    #[test]
    fn the_rate_rises_in_a_straight_line_to_the_peak() {
        for kind in
            [ScheduleKind::Constant, ScheduleKind::Linear, ScheduleKind::Cosine, ScheduleKind::Wsd]
        {
            let schedule = schedule(kind);
            for step in 0..10 {
                assert_eq!(schedule.ratio(step), (step + 1) as f64 / 10.0);
            }
            assert_eq!(schedule.ratio(10), 1.0);
        }
    }

    #[test]
    fn each_shape_passes_through_its_known_points() {
        let close = |a: f64, b: f64| assert!((a - b).abs() < 1e-12, "{a} {b}");
        close(schedule(ScheduleKind::Constant).ratio(109), 1.0);
        close(schedule(ScheduleKind::Linear).ratio(60), 0.55);
        close(schedule(ScheduleKind::Linear).ratio(110), 0.1);
        close(schedule(ScheduleKind::Cosine).ratio(60), 0.55);
        close(schedule(ScheduleKind::Cosine).ratio(35), 0.1 + 0.9 * 0.5 * (1.0 + 0.5f64.sqrt()));
        close(schedule(ScheduleKind::Cosine).ratio(500), 0.1);
        close(schedule(ScheduleKind::Wsd).ratio(90), 1.0);
        close(schedule(ScheduleKind::Wsd).ratio(100), 0.55);
        close(schedule(ScheduleKind::Wsd).ratio(110), 0.1);
    }

    #[test]
    fn a_run_shorter_than_its_warm_up_is_defined_everywhere() {
        let schedule = Schedule {
            kind: ScheduleKind::Wsd,
            warmup_steps: 5,
            decay_steps: 9,
            steps: 3,
            min_ratio: 0.0,
        };
        assert!((0..20).all(|step| (0.0..=1.0).contains(&schedule.ratio(step))));
    }
}
