//! Copies of what is kept of the parameters, which are made while steps go on.

use std::ops::Range;
use std::sync::Arc;

use super::Model;
use crate::backend::{Blocks, Moments};
use crate::error::NnError;
use crate::optimizer::Rule;
use crate::precision::Precision;
use crate::state_copy::{self, Copied, Piece, StateCopy};

impl<B: Blocks> Model<B> {
    /// Memory of the host for [`Model::copy_state`], without room: to be [reserved](crate::StateMemory::reserve).
    pub fn state_memory(&self) -> B::StateMemory {
        self.running().blocks.state_memory()
    }

    /// Bytes that [`Model::copy_state`] copies of masters and the moments that `rule` keeps.
    ///
    /// # Errors
    /// When another rank owns one of the elements.
    pub fn state_bytes(&self, rule: &Rule, owned: &[Range<usize>]) -> Result<usize, NnError> {
        let precision = self.running().blocks.precision();
        let kept = 1 + usize::from(rule.keeps_squares());
        Ok(state_copy::bytes(precision, &self.pieces(owned)?, self.share.trained(), kept))
    }

    /// Begins to copy masters and moments of the elements `owned` to `memory`, which has room for them. What is
    /// queued behind may change them: it waits for the copy where it does, and the host does not. Until the copy
    /// [is there](StateCopy::wait) `moments` stay where they are.
    ///
    /// # Errors
    /// When another rank owns one of the elements, or the device fails.
    pub fn copy_state(
        &self,
        moments: &Moments<B::Array>,
        owned: &[Range<usize>],
        memory: &Arc<B::StateMemory>,
    ) -> Result<StateCopy<B::StateMemory>, NnError> {
        let blocks = &mut self.running().blocks;
        let copied = self.copied(blocks.precision(), moments, owned)?;
        blocks.copy_out(&copied.from, memory)?;
        Ok(copied.within(memory))
    }

    fn copied<'a>(
        &'a self,
        precision: Precision,
        moments: &'a Moments<B::Array>,
        owned: &[Range<usize>],
    ) -> Result<Copied<'a, B::Array>, NnError> {
        let (pieces, trained) = (self.pieces(owned)?, self.share.trained());
        Ok(Copied::new(precision, &pieces, trained, &self.weights, moments))
    }

    fn pieces(&self, owned: &[Range<usize>]) -> Result<Vec<Piece>, NnError> {
        let end = self.layout.elems();
        let mut pieces = Vec::new();
        for range in owned {
            pieces.extend(self.owned(range.start..range.end.min(end))?);
        }
        Ok(pieces)
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::AtomicBool;

    use super::*;
    use crate::moments::BLOCK;
    use crate::tests::{attention, tiny};
    use crate::{AdamW, Cpu, Moment, StateMemory};

    const RULE: Rule = Rule::AdamW(AdamW { beta1: 0.9, beta2: 0.95, eps: 1e-8, weight_decay: 0.1 });

    fn bits(values: &[f32]) -> Vec<u32> {
        values.iter().map(|x| x.to_bits()).collect()
    }

    /// Numbers that no two elements of a moment share, of either sign where that is kept.
    fn numbers(moment: Moment, elems: usize) -> Vec<f32> {
        let sign =
            |i: usize| if moment == Moment::Mean && i.is_multiple_of(3) { -1.0 } else { 1.0 };
        (0..elems).map(|i| sign(i) * (1.0 + i as f32).sqrt() * 1e-3).collect()
    }

    #[test]
    fn a_copy_has_the_bits_that_were_kept_whatever_changes_behind_it() {
        let made = [Cpu::default, Cpu::with_int8_moments];
        for (cpu, (parts, part)) in
            made.into_iter().flat_map(|cpu| [(1, 0), (3, 0), (3, 2)].map(|part| (cpu, part)))
        {
            let frozen = |name: &str| name.contains("layers.0.mlp");
            let mut model =
                Model::unfilled_with(cpu(), tiny(false), &attention(), &frozen).unwrap();
            model.share = model.layout.share(part, parts);
            model.draw_missing(5).unwrap();
            let (trained, elems) = (model.layout().trained(), model.layout().elems());
            let precision = model.running().blocks.precision();
            let mut moments = model.moments(&RULE).unwrap();
            for (moment, array) in
                [(Moment::Mean, &mut moments.mean), (Moment::Square, &mut moments.square)]
            {
                let values = numbers(moment, trained.next_multiple_of(BLOCK));
                let share = model.share().clone();
                for (own, _) in share.pieces(&(0..trained)) {
                    // Whole blocks, as they are filled.
                    let end = own.start + own.len().next_multiple_of(BLOCK);
                    let values = &values[own.start..end.min(trained)];
                    model.upload_moment(moment, array, own.start, values).unwrap();
                }
            }
            // All, or as replicas share it, cut anywhere.
            let all: Vec<Range<usize>> =
                model.share().pieces(&(0..elems)).into_iter().map(|(own, _)| own).collect();
            let some = |own: &Range<usize>| own.start + own.len() / 3..own.end - own.len() / 7;
            for owned in [all.clone(), all.iter().map(some).collect()] {
                let memory = Arc::new(model.state_memory());
                let bytes = model.state_bytes(&RULE, &owned).unwrap();
                assert_eq!(bytes, model.copied(precision, &moments, &owned).unwrap().bytes);
                if parts == 1 && owned == all {
                    assert_eq!(bytes as u64, precision.copy_bytes(elems, trained, 2));
                }
                memory.reserve(bytes, &AtomicBool::new(false)).unwrap();
                let copy = model.copy_state(&moments, &owned, &memory).unwrap();
                copy.wait().unwrap();
                let mut compared = 0;
                for range in &owned {
                    for (first, end) in [
                        (range.start, range.end),
                        (range.start + range.len() / 5, range.end - range.len() / 3),
                    ] {
                        let mut found = vec![f32::NAN; end - first];
                        let mut kept = found.clone();
                        copy.masters(first, &mut found).unwrap();
                        model.masters(first, &mut kept).unwrap();
                        assert!(bits(&found) == bits(&kept), "{first}..{end}");
                        compared += found.len();
                        if first >= trained {
                            continue;
                        }
                        for (moment, array) in
                            [(Moment::Mean, &moments.mean), (Moment::Square, &moments.square)]
                        {
                            copy.moment(moment, first, &mut found).unwrap();
                            model.download_moment(moment, array, first, &mut kept).unwrap();
                            assert!(bits(&found) == bits(&kept), "{moment:?} {first}..{end}");
                            assert!(found.iter().any(|&x| x != 0.0) || found.is_empty());
                        }
                    }
                }
                assert!(compared > elems / parts / 2, "{compared} of {elems}");
                // What comes later.
                let range = owned[0].clone();
                let (mut before, mut found) = (vec![0.0; range.len()], vec![0.0; range.len()]);
                copy.masters(range.start, &mut before).unwrap();
                let mut blocks = cpu();
                blocks.fill_weights(&mut model.weights, 0, &vec![9.0; range.len()]).unwrap();
                copy.masters(range.start, &mut found).unwrap();
                assert!(bits(&found) == bits(&before));
            }
        }
    }

    #[test]
    fn elements_of_another_rank_are_not_copied() {
        let mut model = Model::unfilled(tiny(true), &attention()).unwrap();
        model.share = model.layout.share(1, 2);
        let elems = model.layout().elems();
        let told = model.state_bytes(&RULE, std::slice::from_ref(&(0..elems))).unwrap_err();
        assert!(told.to_string().contains("are not all of this rank's share"), "{told}");
    }
}
