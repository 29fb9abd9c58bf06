//! A rank that is lost while another waits for it by NCCL.

use std::sync::mpsc::channel;
use std::time::{Duration, Instant};

use foveate_nn::{Carrier, Cutting, NnErrorKind, Peers, Recompute};
use foveate_nn_cuda::Cuda;
use foveate_tensor::DType;

use super::ranks::TestRank;
use super::{Steps, cuda, inside, inside_with, unfilled};

/// The other rank's part of a transfer never comes: without a look at the ranks a step would wait for the driver's
/// timeout, a minute and more.
#[test]
fn a_step_that_waits_for_a_lost_rank_by_nccl_ends_in_seconds_and_says_that_it_is_lost() {
    if !inside(
        "lost_rank::a_step_that_waits_for_a_lost_rank_by_nccl_ends_in_seconds_and_says_that_it_is_lost",
    ) {
        return;
    }
    Cuda::available(0).unwrap();
    let ranks = TestRank::all(2, Carrier::Nccl, DType::F32);
    let (told, lost) = channel();
    std::thread::scope(|scope| {
        let mut ranks = ranks.into_iter();
        let [first, second] = [(); 2].map(|()| ranks.next().unwrap());
        scope.spawn(move || {
            let mut own = Steps::of_rank(&first);
            let totals = own.queue(Recompute::None);
            own.model.read(totals).unwrap();
            let began = Instant::now();
            let error = own.try_queue(Recompute::None).map(drop).unwrap_err();
            told.send((began.elapsed(), error.to_string())).unwrap();
            assert!(matches!(error.kind(), NnErrorKind::Ranks { lost: true, .. }), "{error}");
        });
        scope.spawn(move || {
            let mut own = Steps::of_rank(&second);
            let totals = own.queue(Recompute::None);
            own.model.read(totals).unwrap();
            std::thread::sleep(Duration::from_millis(300));
            second.is_lost();
            let (took, error) = lost.recv().unwrap();
            assert!(took < Duration::from_secs(20), "{took:?}: {error}");
        });
    });
}

/// When the test loses a rank, after the other has begun a step.
const LOST_AFTER: Duration = Duration::from_millis(700);

/// As NCCL has it on a GPU: the transfer is queued at once, the device waits for the other rank's part and the host
/// for the device. No call of NCCL is under way that could say anything.
#[test]
fn a_host_that_waits_for_the_device_behind_a_lost_rank_ends_in_seconds_and_is_told() {
    if !inside_with(
        "lost_rank::a_host_that_waits_for_the_device_behind_a_lost_rank_ends_in_seconds_and_is_told",
        &[("ON_DEVICE", "1")],
    ) {
        return;
    }
    Cuda::available(0).unwrap();
    let ranks = TestRank::all(2, Carrier::Nccl, DType::F32);
    let ((begun, begins), (told, lost)) = (channel(), channel());
    std::thread::scope(|scope| {
        let mut ranks = ranks.into_iter();
        let [first, second] = [(); 2].map(|()| ranks.next().unwrap());
        scope.spawn(move || {
            let mut own = Steps::of_rank(&first);
            let totals = own.queue(Recompute::None);
            own.model.read(totals).unwrap();
            begun.send(()).unwrap();
            let began = Instant::now();
            let queued = own.try_queue(Recompute::None);
            let read = queued.and_then(|totals| own.model.read(totals)).map(drop);
            let took = began.elapsed();
            told.send((took, read, own.try_queue(Recompute::None).map(drop))).unwrap();
        });
        scope.spawn(move || {
            let mut own = Steps::of_rank(&second);
            let totals = own.queue(Recompute::None);
            own.model.read(totals).unwrap();
            begins.recv().unwrap();
            std::thread::sleep(LOST_AFTER);
            second.is_lost();
            let (took, read, next) = lost.recv().unwrap();
            assert!(took >= LOST_AFTER, "{took:?}: the device did not wait");
            assert!(took < Duration::from_secs(20), "{took:?}: {read:?}");
            for error in [read.unwrap_err(), next.unwrap_err()] {
                assert!(matches!(error.kind(), NnErrorKind::Ranks { lost: true, .. }), "{error}");
            }
        });
    });
}

/// The other rank is gone before it joins, of which NCCL knows nothing: it would wait for the driver's timeout, and
/// say that a GPU has one rank.
#[test]
fn a_rank_that_joins_by_nccl_ends_in_seconds_when_another_is_lost_and_says_so() {
    if !inside(
        "lost_rank::a_rank_that_joins_by_nccl_ends_in_seconds_when_another_is_lost_and_says_so",
    ) {
        return;
    }
    Cuda::available(0).unwrap();
    let mut ranks = TestRank::all(2, Carrier::Nccl, DType::F32).into_iter();
    let [first, second] = [(); 2].map(|()| ranks.next().unwrap());
    std::thread::scope(|scope| {
        scope.spawn(move || {
            // Ranks say in which process they are, and the first one what names them for NCCL.
            let process = second.all_gather(&[0; 8]).unwrap();
            assert_eq!(process.len(), 2);
            assert_eq!(second.all_gather(&[]).unwrap()[0].len(), 128);
            std::thread::sleep(LOST_AFTER);
            second.is_lost();
        });
        let (began, mut model) = (Instant::now(), unfilled(cuda()));
        let cutting = Cutting { parts: 2, ..Cutting::WHOLE };
        let error = model.cut(cutting, 0, &first).unwrap_err();
        let took = began.elapsed();
        assert!(took >= LOST_AFTER && took < Duration::from_secs(20), "{took:?}: {error}");
        assert!(matches!(error.kind(), NnErrorKind::Ranks { lost: true, .. }), "{error}");
    });
}

/// NCCL says that it has lost the other process a moment before the ranks' connections know of it.
#[test]
fn a_rank_that_nccl_loses_first_is_told_as_lost() {
    if !inside_with("lost_rank::a_rank_that_nccl_loses_first_is_told_as_lost", &[("FAILS", "6")]) {
        return;
    }
    Cuda::available(0).unwrap();
    let mut ranks = TestRank::all(2, Carrier::Nccl, DType::F32).into_iter();
    let [first, second] = [(); 2].map(|()| ranks.next().unwrap());
    let ((begun, begins), (told, done)) = (channel(), channel());
    std::thread::scope(|scope| {
        scope.spawn(move || {
            let mut own = Steps::of_rank(&first);
            begun.send(()).unwrap();
            let error = own.try_queue(Recompute::None).map(drop).unwrap_err();
            told.send(()).unwrap();
            assert!(matches!(error.kind(), NnErrorKind::Ranks { lost: true, .. }), "{error}");
        });
        scope.spawn(move || {
            let own = Steps::of_rank(&second);
            begins.recv().unwrap();
            std::thread::sleep(Duration::from_millis(300));
            second.is_lost();
            done.recv().unwrap();
            drop(own);
        });
    });
}

/// Between steps, with nothing queued, the ranks' connections lose a rank and the model is dropped before the look at
/// the ranks. NCCL would wait for the other process to close its connections, which one that is stopped never does.
#[test]
fn a_model_that_is_dropped_when_a_rank_is_lost_does_not_wait_for_it() {
    if !inside_with(
        "lost_rank::a_model_that_is_dropped_when_a_rank_is_lost_does_not_wait_for_it",
        &[("DESTROY_MS", "10000")],
    ) {
        return;
    }
    Cuda::available(0).unwrap();
    let ranks = TestRank::all(2, Carrier::Nccl, DType::F32);
    std::thread::scope(|scope| {
        for rank in ranks {
            scope.spawn(move || {
                let mut own = Steps::of_rank(&rank);
                let totals = own.queue(Recompute::None);
                own.model.read(totals).unwrap();
                rank.is_lost();
                let began = Instant::now();
                drop(own);
                assert!(began.elapsed() < Duration::from_secs(5), "{:?}", began.elapsed());
            });
        }
    });
}
