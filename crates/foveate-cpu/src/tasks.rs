//! How a call is divided into tasks, and how tasks run.
//!
//! The rows that a task owns, the order in which it visits them and the number of partial sums
//! depend on the problem alone, never on the number of threads. Threads only decide which of them
//! runs a task and when, so results are the same bits for any number of them.

use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};

use foveate_problem::{Dims, Sequence};
use foveate_tensor::TensorMut;

use crate::threads;

/// The default limit of a wave's workspace, in bytes.
pub const WAVE_BYTES: usize = 256 << 20;

/// Rows `start..start + len` of batch entry `batch`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RowRange {
    pub batch: usize,
    pub start: usize,
    pub len: usize,
}

impl RowRange {
    /// The query rows of a sequence.
    pub fn queries(s: &Sequence) -> Self {
        Self { batch: s.q_batch, start: s.q_start, len: s.q_len }
    }

    /// The key rows of a sequence.
    pub fn keys(s: &Sequence) -> Self {
        Self { batch: s.k_batch, start: s.k_start, len: s.k_len }
    }
}

/// A KV head of one sequence, or of all sequences when they share keys.
#[derive(Clone, Debug)]
pub struct KvHead {
    /// Its keys.
    pub keys: RowRange,
    /// Index of its key range (the sequence, or 0 when keys are shared).
    pub range: usize,
    /// The key/value head.
    pub h_kv: usize,
    /// The sequences that attend to it.
    pub sequences: std::ops::Range<usize>,
}

/// The distinct key ranges of `sequences`.
pub fn key_ranges(dims: &Dims, sequences: &[Sequence]) -> Vec<RowRange> {
    let distinct = if dims.shared_kv { sequences.len().min(1) } else { sequences.len() };
    sequences[..distinct].iter().map(RowRange::keys).collect()
}

/// Every KV head of a problem, range by range.
pub fn kv_heads(dims: &Dims, sequences: &[Sequence]) -> Vec<KvHead> {
    let mut kv_heads = Vec::new();
    for (range, &keys) in key_ranges(dims, sequences).iter().enumerate() {
        let attending = if dims.shared_kv { 0..sequences.len() } else { range..range + 1 };
        for h_kv in 0..dims.heads_kv {
            kv_heads.push(KvHead { keys, range, h_kv, sequences: attending.clone() });
        }
    }
    kv_heads
}

/// Divides the KV heads into waves of consecutive ones whose workspace, `elems` floats each, fits
/// `bytes`. A wave has at least one.
pub fn waves(
    kv_heads: &[KvHead],
    bytes: usize,
    elems: impl Fn(&KvHead) -> usize,
) -> Vec<&[KvHead]> {
    let mut waves = Vec::new();
    let (mut start, mut used) = (0, 0);
    for (i, kv_head) in kv_heads.iter().enumerate() {
        let need = elems(kv_head);
        if i > start && used + need > bytes / size_of::<f32>() {
            waves.push(&kv_heads[start..i]);
            (start, used) = (i, 0);
        }
        used += need;
    }
    if start < kv_heads.len() {
        waves.push(&kv_heads[start..]);
    }
    waves
}

/// The tiles of a destination, each of which is taken once.
pub struct OutputTiles<'a, const N: usize> {
    tiles: Vec<Option<TensorMut<'a, N>>>,
    first: Vec<usize>,
    heads: usize,
}

impl<'a, const N: usize> OutputTiles<'a, N> {
    /// Splits `tensor` into tiles of `step(len)` rows, for each row range and head. Ranges are in the
    /// order of their rows and may leave rows out.
    pub fn split(
        tensor: TensorMut<'a, N>,
        ranges: &[RowRange],
        step: impl Fn(usize) -> usize,
    ) -> Self {
        let heads = tensor.shape()[1];
        let mut tiles = Vec::new();
        let mut first = Vec::with_capacity(ranges.len());
        // The rows not yet split: those from `row` of `batch`, and the batches after it.
        let (mut rest, mut batch, mut row) = (Some(tensor), 0, 0);
        let mut entry: Option<TensorMut<'a, N>> = None;
        for range in ranges {
            first.push(tiles.len());
            while entry.is_none() || batch < range.batch {
                let (one, more) = rest.take().expect("ranges are in order").split_at(0, 1);
                batch = if entry.is_none() { 0 } else { batch + 1 };
                (entry, rest, row) = (Some(one), Some(more), 0);
            }
            let (_, from) = entry.take().expect("set above").split_at(2, range.start - row);
            let (mut own, after) = from.split_at(2, range.len);
            (entry, row) = (Some(after), range.start + range.len);
            let step = step(range.len).max(1);
            for _ in 0..heads {
                let (mut head, more) = own.split_at(1, 1);
                own = more;
                while let left @ 1.. = head.shape()[2] {
                    let (tile, more) = head.split_at(2, step.min(left));
                    tiles.push(Some(tile));
                    head = more;
                }
            }
        }
        first.push(tiles.len());
        Self { tiles, first, heads }
    }

    /// Takes tile `index` of `head` in `range`. A tile is taken once.
    pub fn take(&mut self, range: usize, head: usize, index: usize) -> TensorMut<'a, N> {
        let a_head = (self.first[range + 1] - self.first[range]) / self.heads;
        let at = self.first[range] + head * a_head + index;
        self.tiles[at].take().expect("a tile has one owner")
    }
}

/// Runs `work` on every task, on the calling thread and the threads of the current pool, starting
/// them in order. Each thread makes at most one `state`, when it gets its first task.
///
/// The caller takes part even when it is not a thread of the pool: it would sleep otherwise, and
/// would have to be woken at the end. Schedulers that wake two threads at once were seen to put both
/// on one core for milliseconds, also a thread that last ran on the caller's core. So one thread more
/// is woken than there are slots, and the first to run take the slots.
pub fn run<T: Send, S>(
    tasks: impl Iterator<Item = T> + Send,
    state: impl Fn() -> S + Sync,
    work: impl Fn(&mut S, T) + Sync,
) {
    let most = tasks.size_hint().1.unwrap_or(usize::MAX);
    let others = threads::count().min(most).saturating_sub(1);
    let tasks = Mutex::new(tasks.fuse());
    // The lock is released before a task runs, so a panic does not poison it.
    let next = || tasks.lock().unwrap_or_else(|e| e.into_inner()).next();
    let share = || {
        let mut own = None;
        while let Some(task) = next() {
            work(own.get_or_insert_with(&state), task);
        }
    };
    if others == 0 {
        return share();
    }
    let slots = AtomicUsize::new(others);
    let has_slot = |left: usize| left.checked_sub(1);
    rayon::in_place_scope(|scope| {
        // A thread that waits for the caller's core comes too late for a slot.
        for _ in 0..others + 1 {
            scope.spawn(|_| {
                if slots.fetch_update(Ordering::Relaxed, Ordering::Relaxed, has_slot).is_ok() {
                    share();
                }
            });
        }
        share();
    });
}

#[cfg(test)]
mod tests {
    use super::*;
    use foveate_tensor::{DType, Tensor};

    #[test]
    fn tiles_cover_the_rows_of_every_range_and_no_others() {
        let mut t = Tensor::filled(DType::F32, [1, 2, 13, 1], 0.0);
        let ranges = [
            RowRange { batch: 0, start: 1, len: 5 },
            RowRange { batch: 0, start: 6, len: 0 },
            RowRange { batch: 0, start: 8, len: 3 },
        ];
        let mut tiles = OutputTiles::split(t.view_mut().unwrap(), &ranges, |_| 2);
        for (range, s) in ranges.iter().enumerate() {
            for head in 0..2 {
                for tile in 0..s.len.div_ceil(2) {
                    let mut rows = tiles.take(range, head, tile);
                    for r in 0..rows.shape()[2] {
                        let value = (100 * head + s.start + 2 * tile + r) as f32;
                        rows.write_row(0, 0, r, &[value], true);
                    }
                }
            }
        }
        drop(tiles);
        let want = |h: usize| {
            (0..13).map(move |r| {
                let owned = (1..6).contains(&r) || (8..11).contains(&r);
                if owned { (100 * h + r) as f64 } else { 0.0 }
            })
        };
        assert_eq!(t.to_f64(), want(0).chain(want(1)).collect::<Vec<_>>());
    }

    #[test]
    fn tiles_of_a_dense_problem_follow_the_batch() {
        let mut t = Tensor::filled(DType::F32, [3, 1, 4, 1], 0.0);
        let ranges: Vec<_> = (0..3).map(|batch| RowRange { batch, start: 0, len: 4 }).collect();
        let mut tiles = OutputTiles::split(t.view_mut().unwrap(), &ranges, |len| len);
        for b in 0..3 {
            tiles.take(b, 0, 0).write_row(0, 0, 3, &[b as f32 + 1.0], false);
        }
        drop(tiles);
        assert_eq!(t.to_f64(), [0., 0., 0., 1., 0., 0., 0., 2., 0., 0., 0., 3.]);
    }

    #[test]
    fn every_task_runs_once_for_any_number_of_threads() {
        for threads in [1, 2, 5] {
            let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
            let done = Mutex::new(vec![0; 100]);
            let all = || run(0..100usize, || (), |_, i| done.lock().unwrap()[i] += 1);
            pool.install(all);
            // From outside of any pool, too.
            all();
            assert!(done.into_inner().unwrap().iter().all(|&n| n == 2));
        }
    }

    #[test]
    fn no_more_threads_work_than_the_pool_has() {
        // Called from outside of it, so that one thread more could.
        let most = rayon::current_num_threads();
        for _ in 0..20 {
            let (states, working) = (AtomicUsize::new(0), AtomicUsize::new(0));
            let task = |_: &mut usize, _| {
                assert!(working.fetch_add(1, Ordering::SeqCst) < most);
                std::thread::sleep(std::time::Duration::from_micros(200));
                working.fetch_sub(1, Ordering::SeqCst);
            };
            let state = || states.fetch_add(1, Ordering::SeqCst);
            run(0..10 * most, state, task);
            assert!((1..=most).contains(&states.into_inner()));
        }
    }
}
