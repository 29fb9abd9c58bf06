//! Saves: those that the steps wait for, and those that go on beside them.
//!
//! A save beside the steps copies what this rank writes to host memory, while the steps go on where the device can;
//! a thread waits for the copy and writes it. At the
//! end of each step the ranks tell each other whether theirs is done; when all are, they report what they wrote
//! and rank 0 renames the folder; where ranks have several disks, the first of each. The next save and the end of the run wait for it, and the last one does not
//! go on beside anything.

use std::path::PathBuf;
use std::time::{Duration, Instant};

use foveate_nn::Blocks;

use super::Observer;
use super::copies::refused;
use super::pending::Pending;
use super::setup::Setup;
use crate::checkpoint::{Content, HostCopy, Save, Snapshot, Written};
use crate::error::{TrainError, TrainErrorKind};
use crate::metrics::{Record, SaveMetrics, unix_time};

/// What a rank tells the others that no longer waits for memory to copy to, as the run is to end.
const ENDS: &str = "interrupted";

impl<B: Blocks> Setup<'_, B> {
    /// Saves the state of the last step, beside the next steps where `beside` says so. The place of the
    /// checkpoint, which is whole unless it is written beside the steps.
    pub(super) fn save(
        &mut self,
        beside: bool,
        observer: &mut dyn Observer,
    ) -> Result<PathBuf, TrainError> {
        self.settle(observer)?;
        observer.begins("saving");
        let beside = beside && self.can_copy(observer)?;
        let (began, ranks, step) = (Instant::now(), self.ranks, self.state.step);
        let save = Save::of(&self.folder.checkpoints(), step, self.recipe.train.keep);
        let save = save.on(self.disks.all());
        let place = save.place.clone();
        let begins = self.disks.leads() && !self.disks.have(step);
        let begun = if begins { save.begin() } else { Ok(!self.disks.have(step)) };
        let begun = ranks.together(begun)?;
        if ranks.bytes_of_first(vec![u8::from(begun)])? != [1] {
            let took = began.elapsed();
            self.tell(&place, step, took, took, observer)?;
            return Ok(place);
        }
        let shared = ranks.together(save.is_shared(ranks.rank()));
        shared.map_err(|e| self.abandoned(&save, e))?;
        let (rank, count) = (ranks.rank(), ranks.count());
        self.state.choices = self.model.choices();
        self.disks.alike(ranks, &mut self.state)?;
        let snapshot = Snapshot {
            model: &self.model,
            attention: &self.attention,
            moments: &self.moments,
            state: &self.state,
            dtype: self.recipe.train.save_dtype,
            tokenizer: self.corpus.tokenizer(),
            origin: self.origin.as_deref(),
            chat_template: self.template_source.as_deref(),
        };
        let owned = ranks.owned(self.model.layout());
        if !beside {
            let content = Content::of(&snapshot);
            let written = content.and_then(|content| match count {
                1 => save.write(&content, &snapshot),
                _ => save.write_part(&content, &snapshot, &owned, rank),
            });
            let place = self.commit(&save, step, written)?;
            let took = began.elapsed();
            self.tell(&place, step, took, took, observer)?;
            return Ok(place);
        }
        let copied = Content::of(&snapshot).and_then(|content| {
            let memory = self.copies.as_ref().expect("there is memory for saves beside the steps");
            HostCopy::begin(&snapshot, &owned, memory.room()).map(|copy| (content, copy))
        });
        let (content, copy) = match ranks.together(copied) {
            Ok(copied) => copied,
            Err(e) => return Err(self.abandoned(&save, e)),
        };
        let (dropped, to) = (copy.dropped.clone(), save.clone());
        let write = move || {
            // Whether or not somebody waits for this thread: what is copied stays where it is until then.
            copy.wait()?;
            match count {
                1 => to.write(&content, &copy),
                _ => to.write_part(&content, &copy, &owned, rank),
            }
        };
        let pending = Pending::start(save.clone(), step, began, dropped, write);
        let pending = ranks.together(pending).map_err(|e| self.abandoned(&save, e))?;
        self.saving = Some(pending);
        Ok(place)
    }

    /// Waits for the memory that saves beside the steps copy to, where the recipe asks for them: what it cannot have
    /// is refused before there is a step to lose.
    pub(super) fn admit_copies(&mut self, observer: &mut dyn Observer) -> Result<(), TrainError> {
        let Some(copies) = &mut self.copies else { return Ok(()) };
        if self.recipe.train.async_save != Some(true) {
            return Ok(());
        }
        observer.begins("making room for copies of what is saved");
        match copies.wait_unless(&mut || observer.interrupted()) {
            None => Err(TrainErrorKind::Interrupted.into()),
            Some(made) => made.map_err(|why| refused(&why)),
        }
    }

    /// Has saves beside the steps made by all ranks or by none: each has looked at the free memory of its host.
    pub(super) fn agree_on_saves(&mut self) -> Result<(), TrainError> {
        let all = self.ranks.all(&[u8::from(self.saves_beside)])?;
        if all.iter().any(|beside| *beside == [0]) {
            (self.saves_beside, self.copies) = (false, None);
        }
        Ok(())
    }

    /// Whether all ranks have the memory that a save beside the steps copies to, which the first such save waits for.
    /// Where one has none, which the recipe did not ask for, the steps wait for saves from here on. So they do where
    /// the run is to end before a rank has it: what is saved then is the last of it.
    fn can_copy(&mut self, observer: &mut dyn Observer) -> Result<bool, TrainError> {
        let copies = self.copies.as_mut().expect("there is memory for saves beside the steps");
        // All ranks waited before the first step, or all at the same save.
        if copies.is_awaited() {
            return Ok(true);
        }
        let made = copies.wait_unless(&mut || observer.interrupted());
        let own = match made {
            None => ENDS.to_owned(),
            Some(made) => made.err().unwrap_or_default(),
        };
        let all = self.ranks.all(own.as_bytes())?;
        if all.iter().any(|why| why == ENDS.as_bytes()) {
            (self.saves_beside, self.copies) = (false, None);
            return Ok(false);
        }
        let Some(rank) = all.iter().position(|why| !why.is_empty()) else { return Ok(true) };
        let why = String::from_utf8_lossy(&all[rank]);
        let why = if self.ranks.alone() { why } else { format!("on rank {rank} {why}").into() };
        (self.saves_beside, self.copies) = (false, None);
        observer.saves_wait(&why);
        Ok(false)
    }

    /// What all ranks know at the end of a step: whether the run is to end, which `interrupted` says of this
    /// rank. A save that all have written is made a checkpoint.
    pub(super) fn after_step(
        &mut self,
        interrupted: bool,
        observer: &mut dyn Observer,
    ) -> Result<bool, TrainError> {
        let at_work = self.saving.as_ref().is_some_and(|saving| !saving.is_done());
        let all = self.ranks.all(&[u8::from(interrupted) | u8::from(at_work) << 1])?.concat();
        if self.saving.is_some() && all.iter().all(|said| said & 2 == 0) {
            self.settle(observer)?;
        }
        Ok(all.iter().any(|said| said & 1 == 1))
    }

    /// Waits for the save that goes on beside the steps, if one does, on all ranks.
    pub(super) fn settle(&mut self, observer: &mut dyn Observer) -> Result<(), TrainError> {
        let Some(mut saving) = self.saving.take() else { return Ok(()) };
        observer.begins("saving");
        let waiting = Instant::now();
        let written = saving.written();
        let place = self.commit(&saving.save, saving.step, written)?;
        let waited = saving.waited + waiting.elapsed();
        self.tell(&place, saving.step, saving.began.elapsed(), waited, observer)
    }

    /// [`Self::settle`] where a step has failed by `e`, and all ranks are there and know it.
    pub(super) fn settle_behind(
        &mut self,
        e: &TrainError,
        observer: &mut dyn Observer,
    ) -> Result<(), TrainError> {
        use TrainErrorKind::{Diverged, Elsewhere};
        let known = matches!(e.kind(), Diverged { .. } | Elsewhere { .. });
        if self.saving.is_none() || !known && !self.ranks.alone() {
            return Ok(());
        }
        self.ranks.all(&[])?;
        self.settle(observer)
    }

    /// Makes a checkpoint of what all ranks have written, or of nothing where one of them failed.
    fn commit(
        &mut self,
        save: &Save,
        step: u64,
        written: Result<Written, TrainError>,
    ) -> Result<PathBuf, TrainError> {
        let ranks = self.ranks;
        let all = ranks.together(written).and_then(|own| {
            if ranks.alone() {
                return Ok(vec![own]);
            }
            let all = ranks.all(&serde_json::to_vec(&own).expect("plain text and numbers"))?;
            let parsed = all.iter().map(|report| serde_json::from_slice(report));
            parsed.collect::<Result<Vec<Written>, _>>().map_err(|e| {
                let message = format!("a rank reported something else than what it saved: {e}");
                TrainErrorKind::Ranks { message, lost: false }.into()
            })
        });
        // All ranks have written what they will.
        let all = all.map_err(|e| self.abandoned(save, e))?;
        let leads = self.disks.leads();
        ranks.together(if leads { save.publish(all) } else { Ok(()) })?;
        // Every disk has it.
        ranks.together(if leads { save.retire() } else { Ok(()) })?;
        self.disks.now_have(step);
        Ok(save.place.clone())
    }

    /// Removes what was written, for the sake of `e`.
    fn abandoned(&self, save: &Save, e: TrainError) -> TrainError {
        if self.disks.leads() { save.abandon(e) } else { e }
    }

    fn tell(
        &mut self,
        place: &std::path::Path,
        step: u64,
        took: Duration,
        waited: Duration,
        observer: &mut dyn Observer,
    ) -> Result<(), TrainError> {
        let (seconds, waited_seconds) = (took.as_secs_f64(), waited.as_secs_f64());
        let metrics = SaveMetrics { step, unix_time: unix_time(), seconds, waited_seconds };
        self.record(Record::Save(metrics.clone()))?;
        observer.saved(place, &metrics);
        Ok(())
    }
}
