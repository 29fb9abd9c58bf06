//! Attention programs: what is computed, whatever the shapes and the device.

use foveate_mods::{MaskMod, ScoreMod};
use foveate_problem::{Dropout, Spec};

use crate::backend::Wanted;
use crate::device::Device;
use crate::error::Error;
use crate::plan::Plan;
use crate::positions::{Coordinates, Positions};
use crate::problem::Problem;

/// A program: mask, score, scale, dropout and the meaning of positions. It has no shapes and no
/// device; [`Attention::plan`] joins it with a [`Problem`] on a [`Device`].
///
/// Without a mask every query sees every key; without a score the scaled dot product is the
/// score.
#[derive(Clone, Debug, Default)]
pub struct Attention {
    mask: Option<MaskMod>,
    score: Option<ScoreMod>,
    scale: Option<f32>,
    dropout: Option<Dropout>,
    coordinates: Coordinates,
    deterministic: bool,
    mean_kv_len: Option<usize>,
}

impl Attention {
    /// Plain attention.
    pub fn new() -> Self {
        Self::default()
    }

    /// Lets a query see a key only where `mask` is true too; masks given one after another all
    /// have to hold.
    pub fn mask(mut self, mask: MaskMod) -> Self {
        self.mask = Some(match self.mask {
            Some(earlier) => earlier & mask,
            None => mask,
        });
        self
    }

    /// Puts every score through `score`; scores given one after another run in that order.
    pub fn score(mut self, score: ScoreMod) -> Self {
        self.score = Some(match self.score {
            Some(earlier) => earlier.then(&score),
            None => score,
        });
        self
    }

    /// The factor on `q·k`, `1/√D` when none is given.
    pub fn scale(mut self, scale: f32) -> Self {
        self.scale = Some(scale);
        self
    }

    /// Drops each probability with chance `p` after the softmax and scales the others by
    /// `1/(1 - p)`. What is dropped depends on (seed, b, h, q, kv) alone.
    pub fn dropout(mut self, p: f32, seed: u64) -> Self {
        self.dropout = Some(Dropout::new(p, seed));
        self
    }

    /// [`Self::dropout`] of any form: with a seed that calls read from memory, for one
    /// ([`Dropout::with_seed_in`]).
    pub fn with_dropout(mut self, dropout: Dropout) -> Self {
        self.dropout = Some(dropout);
        self
    }

    /// Says where the rows of q, and those of k and v, stand in the whole problem: a shard or a
    /// cache passes an offset or a map and the same mask gives the same answer.
    pub fn positions(mut self, q: Positions, kv: Positions) -> Self {
        self.coordinates = self.coordinates.q(q).kv(kv);
        self
    }

    /// [`Self::positions`] with batch entries, heads and lengths too: what a shard of heads or of the
    /// batch says, so that a bias by head, a mask by batch entry and dropout answer for the whole
    /// problem.
    pub fn coordinates(mut self, coordinates: Coordinates) -> Self {
        self.coordinates = coordinates;
        self
    }

    /// Asks for the same bits from the same inputs in every run. The CPU always gives them; on a
    /// GPU sums over blocks are then made in a fixed order, at some cost in the backward.
    pub fn deterministic(mut self, wanted: bool) -> Self {
        self.deterministic = wanted;
        self
    }

    /// States how many keys a query sees on average. The planner of a GPU chooses smaller tiles
    /// where few are seen; it samples a mask on the host, but takes every key for seen where the
    /// mask reads device memory. What is stated changes which kernels run, never what is computed;
    /// more keys than there are count as all of them.
    pub fn mean_kv_len(mut self, keys: usize) -> Self {
        self.mean_kv_len = Some(keys);
        self
    }

    /// The mask, as it was given.
    pub fn get_mask(&self) -> Option<&MaskMod> {
        self.mask.as_ref()
    }

    /// The score, as it was given.
    pub fn get_score(&self) -> Option<&ScoreMod> {
        self.score.as_ref()
    }

    /// The dropout, as it was given.
    pub fn get_dropout(&self) -> Option<&Dropout> {
        self.dropout.as_ref()
    }

    /// Joins the program with a problem on a device. Nothing runs, nothing is read from the
    /// operands, and the same three arguments always give the same plan.
    ///
    /// # Errors
    /// When the program has an option outside its range, a learned buffer in its mask, or an
    /// operation without a derivative on the way of a gradient (unless the problem says
    /// [`Problem::forward_only`]); or when every backend of the device declined: then each is listed with its reason.
    pub fn plan(&self, problem: &Problem, device: &Device) -> Result<Plan, Error> {
        let spec = self.spec()?;
        if let Some(score) = &spec.score
            && !problem.is_forward_only()
        {
            score.gradient()?;
        }
        let Self { deterministic, mean_kv_len, .. } = *self;
        Plan::new(&Wanted { spec: &spec, problem, deterministic, mean_kv_len }, device)
    }

    /// The program as backends take it: positions are substituted, so that the mods read the
    /// rows of the operands and answer for the whole problem.
    fn spec(&self) -> Result<Spec, Error> {
        let place = self.coordinates.substitution()?;
        let learned = |p: &foveate_mods::Program| {
            p.graph().buffers().iter().find(|b| b.learned()).map(|b| b.name().to_owned())
        };
        if let Some(name) = self.mask.as_ref().and_then(|m| learned(m.program())) {
            let reason = format!(
                "it captures `{name}`, which is to be learned, but a mask has no gradient; \
                 capture a copy that is not learned, or move it into the score"
            );
            return Err(Error::option("mask", reason));
        }
        let spec = Spec {
            mask: self.mask.as_ref().map(|m| place.mask(m)).transpose()?,
            score: self.score.as_ref().map(|s| place.score(s)).transpose()?,
            scale: self.scale,
            dropout: self.dropout.as_ref().map(|d| d.map(|keep| place.mask(keep))).transpose()?,
        };
        spec.check()?;
        Ok(spec)
    }
}
