//! Which candidate of a choice runs, once the assembler has said what each takes.
//!
//! A plan bounds registers by a model, and a program may need more of them than any model knows.
//! So no kernel runs before its compilation was compared with its plan. One that takes more gives
//! way to the next best that needs fewer registers, until one holds. One whose `wgmma` was serialised
//! gives way to the next best whatever that needs. Where none holds, the one with the least local
//! memory runs, of those that are not serialised, and whoever asks for a report of the plan is told.
//!
//! Nothing is remembered here: a compilation is kept with the assembler's report, in memory and on
//! disk, so to select again costs a look at what is there.

use std::sync::Arc;

use super::candidate::Candidate;
use super::check::compare;
use super::config::{Config, Family, TilesOf};
use super::resources::{Resources, local_bytes_allowed};
use crate::error::CudaError;
use foveate_gpu::GpuErrorKind;
use foveate_gpu::kernel::Excess;
use foveate_gpu::nvrtc::Compiled;
use foveate_gpu::profile::Profile;

/// The candidate that runs.
#[derive(Debug)]
pub struct Selected<'a, T> {
    /// The candidate.
    pub candidate: &'a Candidate,
    /// What was made of it.
    pub made: T,
    /// Whether it takes no more than was planned.
    pub holds: bool,
    /// Why the planner's choice does not run, or runs although it takes more than was planned.
    pub fallback: Option<Fallback>,
    /// The same with the numbers.
    pub reason: Option<String>,
    /// And what runs.
    pub note: Option<String>,
}

impl<T> Selected<'_, T> {
    /// The note where every candidate adds dq in order and takes more than was planned.
    pub fn without_order(&self) -> Option<String> {
        self.reason.as_ref().map(|why| format!("{why}; dq has a kernel of its own"))
    }
}

/// Why the planner's choice does not run, or is not as planned where it does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fallback {
    /// The assembler made it slower than its source says; see [`Excess::advisory`].
    Serialised,
    /// It takes more registers or local memory than was planned.
    Spilled,
    /// It must not run.
    Refused,
}

/// Compiles `candidates`, the best first, until one takes no more of `profile` than was planned.
/// `make` gives the configuration that a candidate is compiled with, what the caller keeps of it,
/// and its compilation.
///
/// # Errors
/// The first of `make`, except that [`GpuErrorKind::Resources`], a kernel that must not run, is
/// passed over as long as there is another.
pub fn compile_one_that_fits<'a, T>(
    profile: &Profile,
    candidates: impl Iterator<Item = &'a Candidate>,
    mut make: impl FnMut(&Candidate) -> Result<(Config, T, Arc<Compiled>), CudaError>,
) -> Result<Selected<'a, (Config, T, Arc<Compiled>)>, CudaError> {
    select(candidates, |candidate| {
        let (config, kept, compiled) = make(candidate)?;
        let compared = tolerate(candidate, profile, compare(&config, &compiled)?);
        Ok(((config, kept, compiled), compared))
    })
}

/// What `compared` says, except that registers over the bound are no loss where an SM
/// holds as many CTAs with them.
fn tolerate(
    candidate: &Candidate,
    profile: &Profile,
    compared: Result<(), Excess>,
) -> Result<(), Excess> {
    compared.or_else(|excess| {
        if excess.advisory.is_some() {
            return Err(excess);
        }
        let registers = excess.taken.registers as usize;
        let resources = Resources { registers, ..candidate.resources.clone() };
        let local = excess.taken.local_bytes > local_bytes_allowed(&candidate.config);
        let fewer = resources.occupancy(profile).ctas < candidate.occupancy.ctas;
        if local || fewer { Err(excess) } else { Ok(()) }
    })
}

/// Makes candidates, the best first, until one takes no more than was planned.
fn select<'a, T>(
    candidates: impl Iterator<Item = &'a Candidate>,
    mut make: impl FnMut(&Candidate) -> Result<(T, Result<(), Excess>), CudaError>,
) -> Result<Selected<'a, T>, CudaError> {
    let mut least: Option<((bool, u32), &Candidate, T)> = None;
    let mut first: Option<(Fallback, String)> = None;
    let mut broken = None;
    let of = |c: &Candidate| match c.config.family {
        Family::Portable => (Family::Portable, 0),
        Family::Hopper => (Family::Hopper, c.config.warps),
    };
    // Registers that were too many, of those that have as many: a consumer's go by its CTA's warps.
    let mut too_many: Vec<((Family, usize), usize)> = Vec::new();
    for candidate in candidates {
        // What needs as many registers as one that had not enough of them has not enough either.
        let (like, needed) = (of(candidate), candidate.resources.needed);
        if too_many.iter().any(|(of, bound)| *of == like && needed >= *bound) {
            continue;
        }
        let said = match make(candidate) {
            Ok((made, Ok(()))) => {
                let (fallback, reason) = first.unzip();
                let runs = TilesOf(&candidate.config);
                let note = reason.as_ref().map(|why| format!("{why}; {runs} runs"));
                return Ok(Selected { candidate, made, holds: true, fallback, reason, note });
            }
            Ok((made, Err(Excess { taken, advisory, reason }))) => {
                if advisory.is_none() {
                    too_many.push((like, needed));
                }
                let cost = (advisory.is_some(), taken.local_bytes);
                if least.as_ref().is_none_or(|(least, ..)| cost < *least) {
                    least = Some((cost, candidate, made));
                }
                let why = match advisory {
                    Some(_) => Fallback::Serialised,
                    None => Fallback::Spilled,
                };
                (why, format!("kernel {}: {reason}", candidate.config))
            }
            Err(e) if matches!(e.gpu(), Some(GpuErrorKind::Resources { .. })) => {
                let said = e.to_string();
                broken.get_or_insert(e);
                (Fallback::Refused, said)
            }
            Err(e) => return Err(e),
        };
        first.get_or_insert(said);
    }
    let Some(((_, bytes), candidate, made)) = least else {
        return Err(broken.expect("a choice has a candidate, which was made or refused"));
    };
    let (fallback, reason) = first.expect("there is a reason for what was passed over");
    let note = format!(
        "{reason}; of all that fit {} takes the least local memory, {bytes} B, and runs",
        TilesOf(&candidate.config)
    );
    let (fallback, reason, note) = (Some(fallback), Some(reason), Some(note));
    Ok(Selected { candidate, made, holds: false, fallback, reason, note })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::choose::{Choice, Class, KernelOptions, Sizes, choose};
    use crate::compile::config::{Elem, Kernel};
    use foveate_gpu::nvrtc::{Advisory, KernelResources};

    const SIZES: Sizes =
        Sizes { batch: 2, heads_q: 16, heads_kv: 16, queries: 8192, keys: 8192, mean_kv_len: 8192 };

    fn choice(mut options: KernelOptions) -> Choice {
        options.set("backward.family", "portable").unwrap();
        let profile = Profile::named("h200").unwrap();
        let class = Class::new(Elem::Bf16, 128, 128, 1);
        choose(&profile, &class, &SIZES, Kernel::Backward, &options, None).unwrap()
    }

    fn takes(local_bytes: u32, allowed: u32) -> Result<(), Excess> {
        let taken = KernelResources { registers: 255, local_bytes, ..KernelResources::default() };
        let reason = format!("{local_bytes} B, {allowed} are allowed");
        if local_bytes > allowed { Err(Excess { taken, advisory: None, reason }) } else { Ok(()) }
    }

    /// A kernel whose products the assembler serialised, and nothing else.
    fn serialised() -> Excess {
        let text = "wgmma.mma_async instructions are serialized".to_owned();
        let advisory = Advisory { code: 7510, function: None, text };
        let reason = advisory.to_string();
        Excess { taken: KernelResources::default(), advisory: Some(advisory), reason }
    }

    /// Where none of these holds dq has a kernel of its own, which takes longer than a few words.
    #[test]
    fn a_kernel_that_adds_dq_in_order_may_take_more_local_memory() {
        let profile = Profile::named("h200").unwrap();
        let class =
            Class { deterministic: true, mask: true, ..Class::new(Elem::Bf16, 128, 128, 3) };
        let choice = |class: &Class| {
            choose(&profile, class, &SIZES, Kernel::Backward, &KernelOptions::default(), None)
        };
        let ordered = choice(&class).unwrap().chosen;
        let any = choice(&Class { deterministic: false, ..class }).unwrap().chosen;
        assert!(ordered.config.ordered_dq && !any.config.ordered_dq);
        let excess = |local_bytes| {
            let taken =
                KernelResources { registers: 168, local_bytes, ..KernelResources::default() };
            Err(Excess { taken, advisory: None, reason: String::new() })
        };
        for (candidate, allowed) in [(&ordered, 48), (&any, 40)] {
            assert!(tolerate(candidate, &profile, excess(allowed)).is_ok());
            assert!(tolerate(candidate, &profile, excess(allowed + 1)).is_err());
        }
    }

    #[test]
    fn a_kernel_that_is_as_planned_runs_and_no_other_is_made() {
        let choice = choice(KernelOptions::default());
        let mut made = 0;
        let selected = select(choice.ranked(), |_| {
            made += 1;
            Ok(((), takes(0, 128)))
        });
        let selected = selected.unwrap();
        assert_eq!((selected.candidate, selected.note, made), (&choice.chosen, None, 1));
    }

    #[test]
    fn a_kernel_that_spills_gives_way_to_the_next_that_needs_fewer_registers() {
        let choice = choice(KernelOptions::default());
        // Registers that a program leaves to a kernel, of which the model knows nothing.
        let available = choice.chosen.resources.needed - 24;
        let mut tried = Vec::new();
        let selected = select(choice.ranked(), |c| {
            tried.push(c.resources.needed);
            let over = c.resources.needed.saturating_sub(available) as u32;
            Ok((c.config.clone(), takes(over * 8, 128)))
        });
        let selected = selected.unwrap();
        assert_eq!(selected.made, selected.candidate.config);
        let needed = selected.candidate.resources.needed;
        assert!(needed <= available + 16, "{needed}");
        assert!(tried.is_sorted_by(|a, b| a > b), "{tried:?}");
        let better = choice.others.iter().take_while(|c| *c != selected.candidate);
        assert!(better.into_iter().all(|c| c.resources.needed > available + 16));
        let note = selected.note.unwrap();
        assert!(note.starts_with(&format!("kernel {}: ", choice.chosen.config)), "{note}");
        assert!(note.ends_with(&format!("; {} runs", TilesOf(&selected.candidate.config))));
    }

    #[test]
    fn where_everything_spills_the_least_runs_and_the_note_says_so() {
        let choice = choice(KernelOptions::default());
        let bytes = |c: &Candidate| 1000 + c.resources.needed as u32;
        let selected = select(choice.ranked(), |c| Ok(((), takes(bytes(c), 128)))).unwrap();
        let least = choice.ranked().map(bytes).min().unwrap();
        assert_eq!(bytes(selected.candidate), least);
        let note = selected.note.unwrap();
        assert!(note.ends_with(&format!("takes the least local memory, {least} B, and runs")));
    }

    #[test]
    fn what_a_user_asks_for_runs_even_if_it_spills() {
        let mut options = KernelOptions::default();
        for (name, value) in [("tile_q", "64"), ("tile_kv", "128"), ("warps", "8"), ("stages", "2")]
        {
            options.set(&format!("backward.{name}"), value).unwrap();
        }
        let choice = choice(options);
        assert!(choice.others.is_empty());
        let selected = select(choice.ranked(), |_| Ok(((), takes(400, 128)))).unwrap();
        assert!(selected.note.unwrap().contains("400 B, 128 are allowed; of all that fit"));
    }

    #[test]
    fn registers_over_the_bound_are_no_loss_where_as_many_ctas_run() {
        let profile = Profile::named("h200").unwrap();
        let mut candidate = choice(KernelOptions::default()).chosen;
        (candidate.resources.registers, candidate.resources.shared_bytes) = (96, 100_000);
        candidate.occupancy = candidate.resources.occupancy(&profile);
        assert_eq!(candidate.occupancy.ctas, 2);
        let over = |registers, local_bytes| {
            let taken = KernelResources { registers, local_bytes, ..KernelResources::default() };
            let reason = String::new();
            tolerate(&candidate, &profile, Err(Excess { taken, advisory: None, reason }))
        };
        assert!(over(112, 0).is_ok());
        assert!(over(160, 0).is_err(), "one CTA of eight warps takes more than half");
        assert!(over(112, 136).is_err());
        assert!(tolerate(&candidate, &profile, Err(serialised())).is_err());
    }

    #[test]
    fn a_serialised_kernel_gives_way_to_the_next_best_and_to_what_spills() {
        let choice = choice(KernelOptions::default());
        let first = |c: &Candidate| c == &choice.chosen;
        let selected = select(choice.ranked(), |c| {
            Ok(((), if first(c) { Err(serialised()) } else { Ok(()) }))
        })
        .unwrap();
        assert_eq!(selected.candidate, &choice.others[0]);
        let note = selected.note.unwrap();
        assert!(note.contains(": wgmma serialised (C7510, a call); "), "{note}");
        let spilling = select(choice.ranked(), |c| {
            Ok(((), if first(c) { Err(serialised()) } else { takes(400, 128) }))
        });
        assert_ne!(spilling.unwrap().candidate, &choice.chosen);
    }

    #[test]
    fn a_serialised_forward_waits_for_its_products_and_one_that_spills_is_portable() {
        let profile = Profile::named("h200").unwrap();
        let class = Class { score: true, score_steps: 41, ..Class::new(Elem::Bf16, 128, 128, 1) };
        let options = KernelOptions::default();
        let choice = choose(&profile, &class, &SIZES, Kernel::Forward, &options, None).unwrap();
        let hopper = |c: &Candidate| c.config.family == Family::Hopper;
        let found = |why, said: &dyn Fn(&Candidate) -> Result<(), Excess>| {
            let selected = select(choice.ranked(), |c| Ok(((), said(c)))).unwrap();
            assert_eq!(selected.fallback, Some(why));
            (selected.candidate.clone(), selected.note.unwrap())
        };
        let overlapped = |c: &Candidate| if c.config.overlap { Err(serialised()) } else { Ok(()) };
        let (waiting, note) = found(Fallback::Serialised, &overlapped);
        assert_eq!(waiting.config, Config { overlap: false, ..choice.chosen.config.clone() });
        let runs =
            "wgmma serialised (C7510, a call); hopper, tile 128x128, 12 warps, 2 stages runs";
        assert!(note.ends_with(runs), "{note}");
        // Without overlap it may be serialised, too, and needs no fewer registers.
        let (portable, _) =
            found(Fallback::Serialised, &|c| if hopper(c) { Err(serialised()) } else { Ok(()) });
        assert!(!hopper(&portable));
        let (portable, _) =
            found(Fallback::Spilled, &|c| takes(if hopper(c) { 400 } else { 0 }, 128));
        assert!(!hopper(&portable));
    }

    #[test]
    fn what_must_not_run_is_passed_over_and_other_errors_end_it() {
        let choice = choice(KernelOptions::default());
        let refused = |c: &Candidate| -> CudaError {
            let reason = "it states 8 B of shared memory, but 16 B are planned".to_owned();
            GpuErrorKind::Resources { kernel: c.config.to_string(), reason }.into()
        };
        let selected = select(choice.ranked(), |c| match c == &choice.chosen {
            true => Err(refused(c)),
            false => Ok(((), takes(0, 128))),
        });
        assert_eq!(selected.unwrap().candidate, &choice.others[0]);
        let none = select(choice.ranked(), |c| Err::<((), _), _>(refused(c))).unwrap_err();
        assert_eq!(none.to_string(), refused(&choice.chosen).to_string());
        let mut made = 0;
        let failed = select(choice.ranked(), |_| {
            made += 1;
            Err::<((), _), _>(CudaError::argument("no compiler"))
        });
        assert_eq!((failed.unwrap_err().to_string().as_str(), made), ("no compiler", 1));
    }
}
