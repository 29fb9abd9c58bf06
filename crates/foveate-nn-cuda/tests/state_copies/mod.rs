//! Copies of weights and moments to the memory of the host, which are made beside steps.

use std::ops::Range;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::{Duration, Instant};
use std::{env, fs};

use foveate_gpu::trace::{self, HOST, Noted};
use foveate_nn::{Moment, ParameterState, Precision, Recompute, StateMemory};
use foveate_nn_cuda::{Cuda, CudaStateMemory};

use super::order::trouble;
use super::{RULE, Steps, cuda, filled, inside, inside_with, unfilled};

/// Bytes of a piece of the memory: many of them.
const PIECE: usize = 3000;

fn of_state(state: ParameterState) -> Steps {
    let cuda = Cuda::new(0, state.into(), true).unwrap().with_moments_in_pieces_of(2056);
    Steps::of(filled(unfilled(cuda)))
}

/// Moments that no two elements share, of either sign where it is kept.
fn fill_moments(steps: &mut Steps) {
    let trained = steps.model.layout().trained();
    let moments = &mut steps.state.1;
    for (array, sign, moment) in
        [(&mut moments.mean, -1.0, Moment::Mean), (&mut moments.square, 1.0, Moment::Square)]
    {
        let sign = |i: usize| if i.is_multiple_of(3) { sign } else { 1.0 };
        let values: Vec<f32> = (1..=trained).map(|i| sign(i) * (i as f32).sqrt() * 1e-3).collect();
        steps.model.upload_moment(moment, array, 0, &values).unwrap();
    }
}

fn memory(steps: &Steps, owned: &[Range<usize>]) -> Arc<CudaStateMemory> {
    let memory = Arc::new(steps.model.state_memory().in_pieces_of(PIECE));
    let bytes = steps.model.state_bytes(&RULE, owned).unwrap();
    memory.reserve(bytes, &AtomicBool::new(false)).unwrap();
    memory
}

fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|x| x.to_bits()).collect()
}

/// All elements, and ranges that begin and end anywhere.
fn owned(elems: usize) -> [Vec<Range<usize>>; 2] {
    let (third, half) = (elems / 3, elems / 2);
    [std::iter::once(0..elems).collect(), vec![7..third + 1, half + 3..elems - 5]]
}

#[test]
fn a_copy_has_the_bits_that_downloads_have_in_every_state() {
    if !inside("state_copies::a_copy_has_the_bits_that_downloads_have_in_every_state") {
        return;
    }
    for state in ParameterState::ALL {
        let mut steps = of_state(state);
        fill_moments(&mut steps);
        let totals = steps.queue(Recompute::None);
        steps.model.read(totals).unwrap();
        let (model, moments) = (&steps.model, &steps.state.1);
        let (trained, elems) = (model.layout().trained(), model.layout().elems());
        for owned in owned(elems) {
            let bytes = model.state_bytes(&RULE, &owned).unwrap() as u64;
            let planned = Precision::from(state).copy_bytes(elems, trained, 2);
            assert!(bytes == planned || owned.len() > 1 && bytes < planned, "{state:?}: {bytes}");
            // Memory that is not enough becomes more.
            let room = Arc::new(model.state_memory().in_pieces_of(PIECE));
            for some in [bytes / 2, bytes] {
                room.reserve(some as usize, &AtomicBool::new(false)).unwrap();
            }
            let copy = model.copy_state(moments, &owned, &room).unwrap();
            copy.wait().unwrap();
            for range in owned {
                let mut found = [(); 2].map(|()| vec![f32::NAN; range.len()]);
                copy.masters(range.start, &mut found[0]).unwrap();
                model.masters(range.start, &mut found[1]).unwrap();
                assert!(bits(&found[0]) == bits(&found[1]), "{state:?} {range:?}");
                for (moment, array) in
                    [(Moment::Mean, &moments.mean), (Moment::Square, &moments.square)]
                {
                    // From the middle on, and no further than there are moments.
                    let range = range.start + range.len() / 2..range.end.min(trained);
                    let mut found = [(); 2].map(|()| vec![f32::NAN; range.len()]);
                    copy.moment(moment, range.start, &mut found[0]).unwrap();
                    model.download_moment(moment, array, range.start, &mut found[1]).unwrap();
                    assert!(bits(&found[0]) == bits(&found[1]), "{state:?} {moment:?} {range:?}");
                    assert!(found[0].iter().all(|x| x.abs() > 0.0), "{state:?} {moment:?}");
                }
            }
        }
    }
}

#[test]
fn steps_go_on_beside_a_copy_and_only_their_update_waits_for_it_on_the_device() {
    let name =
        "state_copies::steps_go_on_beside_a_copy_and_only_their_update_waits_for_it_on_the_device";
    if !inside(name) {
        return;
    }
    for state in [ParameterState::Exact, ParameterState::Int8Moments, ParameterState::Bf16] {
        trace::start();
        let mut steps = of_state(state);
        let elems = steps.model.layout().elems();
        let [all, _] = owned(elems);
        let mut notes = trace::stop();
        trace::start();
        let room = memory(&steps, &all);
        let taken = trace::stop();
        let is_taken = |noted: &&Noted| matches!(noted, Noted::Taken { .. });
        let bytes = steps.model.state_bytes(&RULE, &all).unwrap();
        assert_eq!(taken.iter().filter(is_taken).count(), bytes.div_ceil(PIECE));
        let all_taken = taken.iter().map(|noted| match noted {
            Noted::Taken { bytes, .. } => *bytes,
            _ => 0,
        });
        assert_eq!(all_taken.sum::<usize>(), bytes, "{state:?}: no more than is told");
        notes.extend(taken);
        // Of two copies to the same memory: the first reads what a step has left, the second what another has.
        for _ in 0..2 {
            let [of_step, read] = steps.run(Recompute::None);
            notes.extend([of_step, read].concat());
            trace::start();
            let copy = steps.model.copy_state(&steps.state.1, &all, &room).unwrap();
            let queued = trace::stop();
            // The step's thread waits for nothing and takes nothing: it queues copies and marks.
            let others = queued.iter().filter(|noted| match noted {
                Noted::Read { name, .. } => name != "a copy out",
                Noted::Written { name, stream, .. } => {
                    name != "memory of the host" || *stream == HOST
                }
                Noted::Marked { .. } | Noted::Follows { .. } => false,
                _ => true,
            });
            assert_eq!(others.count(), 0, "{state:?}: {queued:?}");
            notes.extend(queued);
            let begins = notes.len();
            let [of_step, read] = steps.run(Recompute::None);
            let next = begins..begins + of_step.len();
            notes.extend([of_step, read].concat());
            // What a thread reads beside the steps.
            trace::start();
            copy.wait().unwrap();
            copy.masters(0, &mut vec![0.0; elems]).unwrap();
            let read = trace::stop();
            let waits = read.iter().filter(|noted| matches!(noted, Noted::Waited { .. })).count();
            assert_eq!(waits, bytes.div_ceil(PIECE), "once for each piece");
            notes.extend(read);
            assert_eq!(trouble(&notes), [""; 0], "{state:?}");
            // One event is waited for, behind the passes of the step and before its update.
            let follows: Vec<usize> =
                next.clone().filter(|&at| matches!(notes[at], Noted::Follows { .. })).collect();
            assert_eq!(follows.len(), 1, "{state:?}");
            let share = (follows[0] - next.start) as f64 / next.len() as f64;
            assert!(share > 0.9, "{state:?}: the event comes behind {share} of a step");
            let without = [&notes[..follows[0]], &notes[follows[0] + 1..]].concat();
            let astray = trouble(&without);
            let of_copy = |line: &String| line.contains("the read of a copy out");
            assert!(!astray.is_empty() && astray.iter().all(of_copy), "{astray:?}");
        }
    }
}

#[test]
fn what_has_come_is_there_when_the_device_is_gone() {
    if !inside("state_copies::what_has_come_is_there_when_the_device_is_gone") {
        return;
    }
    let steps = of_state(ParameterState::Exact);
    let elems = steps.model.layout().elems();
    let [all, _] = owned(elems);
    let (room, mut kept) = (memory(&steps, &all), vec![0.0; elems]);
    steps.model.masters(0, &mut kept).unwrap();
    let copy = steps.model.copy_state(&steps.state.1, &all, &room).unwrap();
    copy.wait().unwrap();
    let late = steps.model.copy_state(&steps.state.1, &all, &memory(&steps, &all)).unwrap();
    let fault = Path::new(&env::var("HOME").unwrap()).join("fault");
    fs::write(&fault, "").unwrap();
    let mut found = vec![0.0; elems];
    copy.masters(0, &mut found).unwrap();
    assert!(bits(&found) == bits(&kept));
    let told = late.wait().unwrap_err().to_string();
    fs::remove_file(&fault).unwrap();
    assert!(told.contains("start it again"), "{told}");
}

#[test]
fn memory_whose_device_hangs_ends_after_one_wait_and_is_left_to_it() {
    if !inside("state_copies::memory_whose_device_hangs_ends_after_one_wait_and_is_left_to_it") {
        return;
    }
    let steps = of_state(ParameterState::Exact);
    let [all, _] = owned(steps.model.layout().elems());
    let room = memory(&steps, &all);
    let pieces = steps.model.state_bytes(&RULE, &all).unwrap().div_ceil(PIECE);
    assert!(pieces > 5, "{pieces}");
    let [busy, frees] =
        ["busy", "frees"].map(|name| Path::new(&env::var("HOME").unwrap()).join(name));
    let freed = || fs::read_to_string(&frees).unwrap_or_default().lines().count();
    fs::write(&busy, "").unwrap();
    let copy = steps.model.copy_state(&steps.state.1, &all, &room).unwrap();
    drop(copy);
    let (before, began) = (freed(), Instant::now());
    drop(Arc::into_inner(room).expect("nothing else has it"));
    let (took, freed) = (began.elapsed(), freed() - before);
    fs::remove_file(&busy).unwrap();
    // A wait for each piece takes 5 s for each.
    assert!(took < Duration::from_secs(15), "{took:?} for {pieces} pieces");
    assert_eq!(freed, 0, "of memory that the device may still write");
}

/// Of 400 pieces the tenth fails, and each takes 5 ms.
#[test]
fn no_more_is_pinned_when_a_piece_could_not_be() {
    let name = "state_copies::no_more_is_pinned_when_a_piece_could_not_be";
    if !inside_with(name, &[("PIN_FAILS", "10"), ("PIN_MS", "5")]) {
        return;
    }
    let model = unfilled(cuda());
    let pins = Path::new(&env::var("HOME").unwrap()).join("pins");
    let count = || fs::read_to_string(&pins).unwrap_or_default().lines().count();
    let before = count();
    assert!(before < 10, "{before}");
    let memory = model.state_memory().in_pieces_of(64);
    let error = memory.reserve(400 * 64, &AtomicBool::new(false)).unwrap_err().to_string();
    assert!(error.starts_with("25600 B of host memory for what is saved: "), "{error}");
    let made = count() - before;
    assert!(made < 200, "{made} of 400 pieces");
}
