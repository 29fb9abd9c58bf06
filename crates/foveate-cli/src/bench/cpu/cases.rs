//! The grids of `foveate bench cpu`.

use foveate::DType;

use crate::bench::workload::{Direction, Mask, Score, Workload};

/// A few cases of everyday size, for a look at one machine.
pub fn everyday() -> Vec<Workload> {
    let mut cases = Vec::new();
    for pass in [Direction::Forward, Direction::Backward] {
        let base = Workload { pass, ..Workload::causal(8, 2, 1024, 64) };
        let long = Workload { pass, ..Workload::causal(8, 2, 2048, 64) };
        cases.push(Workload { mask: Mask::Full, ..base.clone() });
        cases.push(base.clone());
        cases.push(Workload { mask: Mask::Window, width: 256, ..long });
        cases.push(Workload { score: Score::Softcap, ..base.clone() });
        cases.push(Workload { dim: 128, ..base.clone() });
        cases.push(Workload { dtype: DType::BF16, ..base.clone() });
        cases.push(Workload { pass, ..Workload::causal(8, 2, 256, 64) });
        cases.push(Workload { pass, ..Workload::causal(4, 4, 4096, 64) });
    }
    cases
}

/// The cases of the comparison with PyTorch: one batch entry and 8 heads, short to long; grouped
/// heads; decoding. Short ones first, so that a run that is cut off has covered much.
pub fn comparison() -> Vec<Workload> {
    let mut cases = Vec::new();
    for len in [512, 2048, 8192] {
        for dtype in [DType::F32, DType::BF16] {
            for dim in [64, 128] {
                let causal = Workload { dtype, ..Workload::causal(8, 8, len, dim) };
                let masked = |mask, width| Workload { mask, width, ..causal.clone() };
                let scored = |score| Workload { score, ..causal.clone() };
                let grouped = Workload { heads: 32, ..causal.clone() };
                let programs = [
                    masked(Mask::Full, 0),
                    causal.clone(),
                    masked(Mask::Window, 256),
                    masked(Mask::Documents, 16),
                    masked(Mask::Prefix, len / 4),
                    scored(Score::Alibi),
                    scored(Score::Softcap),
                    grouped,
                ];
                for work in programs {
                    cases.push(Workload { pass: Direction::Both, ..work.clone() });
                    cases.push(work);
                }
            }
        }
    }
    for dtype in [DType::F32, DType::F16, DType::BF16] {
        let square = Workload { mask: Mask::Full, dtype, ..Workload::causal(32, 8, 8192, 128) };
        cases.push(Workload { q_len: 1, ..square });
    }
    cases
}

/// The cases of both grids.
pub fn every() -> Vec<Workload> {
    let mut cases = everyday();
    let names: Vec<_> = cases.iter().map(Workload::name).collect();
    cases.extend(comparison().into_iter().filter(|c| !names.contains(&c.name())));
    cases
}

/// Every mask and score that has an unfused form, on sizes that divide nothing, for tests.
#[cfg(test)]
pub fn small() -> Vec<Workload> {
    let base = Workload::causal(8, 2, 45, 20);
    let masks = [(Mask::Full, 0), (Mask::Causal, 0), (Mask::Window, 9), (Mask::Documents, 4)];
    let masked = masks.map(|(mask, width)| Workload { mask, width, ..base.clone() });
    let scored = [Score::Alibi, Score::Softcap].map(|score| Workload { score, ..base.clone() });
    masked.into_iter().chain(scored).collect()
}

#[cfg(test)]
mod tests {
    use super::super::unfused::Unfused;
    use super::*;

    #[test]
    fn every_case_of_a_grid_has_a_name_of_its_own() {
        for grid in [everyday(), comparison(), every()] {
            let names: std::collections::HashSet<_> = grid.iter().map(Workload::name).collect();
            assert_eq!(names.len(), grid.len());
        }
    }

    #[test]
    fn the_unfused_peer_takes_what_is_square_and_fits_in_memory() {
        let square = Workload::causal(8, 2, 2048, 64);
        assert!(Unfused::takes(&square));
        assert!(!Unfused::takes(&Workload { q_len: 1, ..square.clone() }));
        assert!(!Unfused::takes(&Workload { batch: 2, ..square }));
        assert!(!Unfused::takes(&Workload::causal(8, 8, 8192, 64)));
        assert!(everyday().iter().all(Unfused::takes));
    }
}
