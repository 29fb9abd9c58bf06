//! What a recipe asks for that cannot be: each with its key, and why.

use foveate::DType;
use foveate_nn::Precision;

use super::{ModelSection, Recipe, RecomputeChoice};
use crate::error::TrainError;

impl Recipe {
    /// Refuses what a recipe cannot ask for; `place` names it.
    pub(super) fn check(&self, place: &str) -> Result<(), TrainError> {
        self.check_sizes()
            .and_then(|()| self.check_numbers())
            .and_then(|()| self.check_updates())
            .and_then(|()| self.mesh.check())
            .and_then(|()| self.check_choices())
            .map_err(|(key, why)| TrainError::recipe(place, format!("{key} {why}")))
    }

    /// What is wrong with how much there is of something: the key, and why.
    fn check_sizes(&self) -> Result<(), (String, String)> {
        let fail = |key: &str, why: String| Err((key.to_owned(), why));
        let positive = [
            ("data.len", self.data.len as u64),
            ("train.steps", self.train.steps.unwrap_or(1)),
            ("train.epochs", self.train.epochs.unwrap_or(1)),
            ("train.batch_rows", self.train.batch_rows as u64),
            ("train.accumulate", self.train.accumulate as u64),
            ("train.eval_rows", self.train.eval_rows as u64),
            ("train.keep", self.train.keep as u64),
        ];
        if let Some((key, _)) = positive.into_iter().find(|&(_, value)| value == 0) {
            return fail(key, "is 0; it must be at least 1".to_owned());
        }
        if self.train.steps.is_some() && self.train.epochs.is_some() {
            let why = "is given beside train.steps; give one of them";
            return fail("train.epochs", why.to_owned());
        }
        if self.run.dir.as_os_str().is_empty() {
            return fail("run.dir", "is empty; name a folder, or `.` for this one".to_owned());
        }
        let tokens = self.train.batch_rows.checked_mul(self.data.len);
        if tokens.is_none_or(|n| i32::try_from(n).is_err()) {
            let (rows, len) = (self.train.batch_rows, self.data.len);
            let most = i32::MAX;
            let why = format!("is {rows}; times data.len ({len}) it may be {most} at most");
            return fail("train.batch_rows", why);
        }
        Ok(())
    }

    /// What is wrong with a number that is no count: the key, and why.
    fn check_numbers(&self) -> Result<(), (String, String)> {
        let fail = |key: &str, why: String| Err((key.to_owned(), why));
        let held_out = self.data.held_out;
        if !(0.0..1.0).contains(&held_out) {
            return fail(
                "data.held_out",
                format!("is {held_out}; it must be at least 0 and below 1"),
            );
        }
        for (key, value, below) in [
            ("optimizer.lr", self.optimizer.lr, f64::INFINITY),
            ("optimizer.beta1", self.optimizer.beta1, 1.0),
            ("optimizer.beta2", self.optimizer.beta2, 1.0),
            ("optimizer.eps", self.optimizer.eps, f64::INFINITY),
            ("optimizer.weight_decay", self.optimizer.weight_decay, f64::INFINITY),
            ("optimizer.clip_norm", self.optimizer.clip_norm, f64::INFINITY),
            ("optimizer.momentum", self.optimizer.momentum, 1.0),
            ("train.z_loss", self.train.z_loss, f64::INFINITY),
        ] {
            if !(value >= 0.0 && value < below) {
                let finite = below.is_infinite();
                let below = if finite { "finite".to_owned() } else { format!("below {below}") };
                return fail(key, format!("is {value}; it must be at least 0 and {below}"));
            }
            if value as f32 >= below as f32 {
                let why = format!(
                    "is {value}, which is {} as a 32-bit number, and steps compute with these; give less",
                    value as f32
                );
                return fail(key, why);
            }
        }
        let eps = self.optimizer.eps;
        if eps as f32 == 0.0 {
            let why = format!("is {eps}; a root of 0 is divided by it, so it must be above 1e-38");
            return fail("optimizer.eps", why);
        }
        let ratio = self.schedule.min_ratio;
        if !(0.0..=1.0).contains(&ratio) {
            return fail("schedule.min_ratio", format!("is {ratio}; it must be from 0 to 1"));
        }
        Ok(())
    }

    /// What is wrong with how parameters are updated: the key, and why.
    fn check_updates(&self) -> Result<(), (String, String)> {
        let fail = |key: &str, why: String| Err((key.to_owned(), why));
        let accumulate = self.train.accumulate;
        if let Some(state) = self.precision.state
            && Precision::from(state).gradients != DType::F32
            && accumulate > 1
        {
            return fail(
                "train.accumulate",
                format!(
                    "is {accumulate}; sums in bf16 over batches lose what is small, so \
                     precision.state = \"{}\" takes 1",
                    state.name()
                ),
            );
        }
        if self.optimizer.in_backward && accumulate > 1 {
            let why = "the gradients of a batch are gone before the next one's are there, so \
                       optimizer.in_backward takes 1";
            return fail("train.accumulate", format!("is {accumulate}; {why}"));
        }
        if self.optimizer.in_backward && self.optimizer.clip_norm > 0.0 {
            let why = "the norm of all gradients is known only when most parameters are updated, so \
                       optimizer.in_backward takes 0";
            let clip_norm = self.optimizer.clip_norm;
            return fail("optimizer.clip_norm", format!("is {clip_norm}; {why}"));
        }
        for group in &self.optimizer.groups {
            let wrong = [("rate", Some(group.rate)), ("weight_decay", group.weight_decay)]
                .into_iter()
                .find(|(_, value)| {
                    value.is_some_and(|value| !(value >= 0.0 && (value as f32).is_finite()))
                });
            if let Some((key, value)) = wrong {
                let (value, most) = (value.unwrap_or_default(), f32::MAX);
                let why = format!(
                    "of `{}` is {value:?}; it must be at least 0, and at most {most:e}",
                    group.names
                );
                return fail(&format!("optimizer.groups.{key}"), why);
            }
            // What a group does not say is a rate of 1 and no decay of its own.
            let given =
                [("rate", group.rate != 1.0), ("weight_decay", group.weight_decay.is_some())]
                    .into_iter()
                    .find(|(_, is_given)| group.frozen && *is_given);
            if let Some((key, _)) = given {
                let why = format!(
                    "of `{}` is given, but its parameters are frozen; leave it or frozen out",
                    group.names
                );
                return fail(&format!("optimizer.groups.{key}"), why);
            }
            if group.weight_decay.is_some_and(|decay| decay > 0.0)
                && self.optimizer.weight_decay == 0.0
            {
                let why = format!(
                    "of `{}` is above 0 where optimizer.weight_decay is 0; give that the largest \
                     decay and groups their own",
                    group.names
                );
                return fail("optimizer.groups.weight_decay", why);
            }
        }
        Ok(())
    }

    /// What is given beside what decides it: the key, and why.
    fn check_choices(&self) -> Result<(), (String, String)> {
        let fail = |key: &str, why: &str| Err((key.to_owned(), why.to_owned()));
        if self.train.recompute == RecomputeChoice::Auto && self.train.recompute_layers.is_some() {
            let why =
                "is given beside train.recompute = \"auto\", which chooses them; leave it out";
            return fail("train.recompute_layers", why);
        }
        let sizes = ModelSection { checkpoint: None, ..self.model.clone() };
        if self.model.checkpoint.is_some() && sizes != ModelSection::default() {
            return fail("model.checkpoint", "brings its own sizes; remove them");
        }
        Ok(())
    }
}
