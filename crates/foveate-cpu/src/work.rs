//! How a call is cut into tasks, and how tasks are run.
//!
//! Everything here depends on the problem alone, never on the number of threads: which rows a
//! task owns, in which order it visits them, how many partial sums there are. Threads only
//! decide who runs a task and when, so results are the same bits for any number of them.

use std::ops::{Deref, DerefMut};
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};

use foveate_problem::{Dims, Sequence};
use foveate_tensor::TensorMut;

/// Bytes of workspace a wave may use when nobody says.
pub const WAVE_BYTES: usize = 256 << 20;

/// Rows `start..start + len` of batch entry `batch`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Span {
    pub batch: usize,
    pub start: usize,
    pub len: usize,
}

impl Span {
    /// The query rows of a sequence.
    pub fn queries(s: &Sequence) -> Self {
        Self { batch: s.q_batch, start: s.q_start, len: s.q_len }
    }

    /// The key rows of a sequence.
    pub fn keys(s: &Sequence) -> Self {
        Self { batch: s.k_batch, start: s.k_start, len: s.k_len }
    }
}

/// One key/value head of one sequence, or of all sequences when they share keys.
#[derive(Clone, Debug)]
pub struct Unit {
    /// Its keys.
    pub keys: Span,
    /// Which of the key spans this is (the sequence, or 0 when keys are shared).
    pub span: usize,
    /// The key/value head.
    pub h_kv: usize,
    /// The sequences that attend to it.
    pub sequences: std::ops::Range<usize>,
}

/// The distinct key spans of `sequences`.
pub fn key_spans(dims: &Dims, sequences: &[Sequence]) -> Vec<Span> {
    let distinct = if dims.shared_kv { sequences.len().min(1) } else { sequences.len() };
    sequences[..distinct].iter().map(Span::keys).collect()
}

/// Every unit of a problem, span by span.
pub fn units(dims: &Dims, sequences: &[Sequence]) -> Vec<Unit> {
    let mut units = Vec::new();
    for (span, &keys) in key_spans(dims, sequences).iter().enumerate() {
        let range = if dims.shared_kv { 0..sequences.len() } else { span..span + 1 };
        for h_kv in 0..dims.heads_kv {
            units.push(Unit { keys, span, h_kv, sequences: range.clone() });
        }
    }
    units
}

/// Consecutive units whose workspace, `elems(unit)` floats each, fits `bytes`; at least one.
pub fn waves(units: &[Unit], bytes: usize, elems: impl Fn(&Unit) -> usize) -> Vec<&[Unit]> {
    let mut waves = Vec::new();
    let (mut start, mut used) = (0, 0);
    for (i, unit) in units.iter().enumerate() {
        let need = elems(unit);
        if i > start && used + need > bytes / size_of::<f32>() {
            waves.push(&units[start..i]);
            (start, used) = (i, 0);
        }
        used += need;
    }
    if start < units.len() {
        waves.push(&units[start..]);
    }
    waves
}

/// Pieces of a destination, each taken once: `get(span, head, piece)`.
pub struct Pieces<'a, const N: usize> {
    pieces: Vec<Option<TensorMut<'a, N>>>,
    first: Vec<usize>,
    heads: usize,
}

impl<'a, const N: usize> Pieces<'a, N> {
    /// Cuts `tensor` into the rows of each span, by head, `step(len)` rows a piece. Spans are in
    /// the order of their rows and may leave rows out.
    pub fn cut(tensor: TensorMut<'a, N>, spans: &[Span], step: impl Fn(usize) -> usize) -> Self {
        let heads = tensor.shape()[1];
        let mut pieces = Vec::new();
        let mut first = Vec::with_capacity(spans.len());
        // The rows not yet cut: those from `row` of `batch`, and the batches after it.
        let (mut rest, mut batch, mut row) = (Some(tensor), 0, 0);
        let mut entry: Option<TensorMut<'a, N>> = None;
        for span in spans {
            first.push(pieces.len());
            while entry.is_none() || batch < span.batch {
                let (one, more) = rest.take().expect("spans are in order").split_at(0, 1);
                batch = if entry.is_none() { 0 } else { batch + 1 };
                (entry, rest, row) = (Some(one), Some(more), 0);
            }
            let (_, from) = entry.take().expect("set above").split_at(2, span.start - row);
            let (mut own, after) = from.split_at(2, span.len);
            (entry, row) = (Some(after), span.start + span.len);
            let step = step(span.len).max(1);
            for _ in 0..heads {
                let (mut head, more) = own.split_at(1, 1);
                own = more;
                while let left @ 1.. = head.shape()[2] {
                    let (piece, more) = head.split_at(2, step.min(left));
                    pieces.push(Some(piece));
                    head = more;
                }
            }
        }
        first.push(pieces.len());
        Self { pieces, first, heads }
    }

    /// Piece `index` of `head` in `span`, which nobody has taken before.
    pub fn take(&mut self, span: usize, head: usize, index: usize) -> TensorMut<'a, N> {
        let a_head = (self.first[span + 1] - self.first[span]) / self.heads;
        let at = self.first[span] + head * a_head + index;
        self.pieces[at].take().expect("a piece has one owner")
    }
}

/// Runs `work` on every task, on the calling thread and all others of the current pool, starting
/// them in order. Each thread makes at most one `state`, when it gets its first task.
///
/// The caller takes part although it may be no thread of the pool: a thread that waits has to be
/// woken for what it could do at once, and systems that wake two at the same time have put both on
/// one core and left them there for milliseconds. They do so with one that was last on the caller's
/// core, too. So one more is woken than there are places: the first to run has a place.
pub fn run<T: Send, S>(
    tasks: impl Iterator<Item = T> + Send,
    state: impl Fn() -> S + Sync,
    work: impl Fn(&mut S, T) + Sync,
) {
    let most = tasks.size_hint().1.unwrap_or(usize::MAX);
    let others = rayon::current_num_threads().min(most).saturating_sub(1);
    let tasks = Mutex::new(tasks.fuse());
    // A task that panics does so outside the lock.
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
    let places = AtomicUsize::new(others);
    let has_place = |left: usize| left.checked_sub(1);
    rayon::in_place_scope(|scope| {
        // What waits for the caller's core comes too late for a place.
        for _ in 0..others + 1 {
            scope.spawn(|_| {
                if places.fetch_update(Ordering::Relaxed, Ordering::Relaxed, has_place).is_ok() {
                    share();
                }
            });
        }
        share();
    });
}

/// Buffers that outlive a call, so that a training loop allocates once.
#[derive(Debug, Default)]
pub struct Pool(Mutex<Vec<Vec<f32>>>);

impl Pool {
    /// A buffer of `len` floats whose contents are anything.
    pub fn take(&self, len: usize) -> Vec<f32> {
        if len == 0 {
            return Vec::new();
        }
        let mut free = self.0.lock().unwrap_or_else(|e| e.into_inner());
        let best = (0..free.len()).max_by_key(|&i| {
            let capacity = free[i].capacity();
            // The smallest that is large enough, else the largest.
            if capacity >= len { (1, usize::MAX - capacity) } else { (0, capacity) }
        });
        let mut buffer = best.map_or_else(Vec::new, |i| free.swap_remove(i));
        drop(free);
        if buffer.capacity() < len {
            buffer = vec![0.0; len];
        }
        buffer.resize(len, 0.0);
        buffer
    }

    /// [`Self::take`], given back when it is dropped.
    pub fn lend(&self, len: usize) -> Lent<'_> {
        Lent { buffer: self.take(len), pool: self }
    }

    /// Gives a buffer back.
    pub fn give(&self, buffer: Vec<f32>) {
        if buffer.is_empty() {
            return;
        }
        self.0.lock().unwrap_or_else(|e| e.into_inner()).push(buffer);
    }
}

/// A buffer of a [`Pool`].
#[derive(Debug)]
pub struct Lent<'a> {
    buffer: Vec<f32>,
    pool: &'a Pool,
}

impl Deref for Lent<'_> {
    type Target = [f32];

    fn deref(&self) -> &[f32] {
        &self.buffer
    }
}

impl DerefMut for Lent<'_> {
    fn deref_mut(&mut self) -> &mut [f32] {
        &mut self.buffer
    }
}

impl Drop for Lent<'_> {
    fn drop(&mut self) {
        self.pool.give(std::mem::take(&mut self.buffer));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use foveate_tensor::{DType, Tensor};

    #[test]
    fn pieces_cover_the_rows_of_every_span_and_no_others() {
        let mut t = Tensor::filled(DType::F32, [1, 2, 13, 1], 0.0);
        let spans = [
            Span { batch: 0, start: 1, len: 5 },
            Span { batch: 0, start: 6, len: 0 },
            Span { batch: 0, start: 8, len: 3 },
        ];
        let mut pieces = Pieces::cut(t.view_mut().unwrap(), &spans, |_| 2);
        for (span, s) in spans.iter().enumerate() {
            for head in 0..2 {
                for piece in 0..s.len.div_ceil(2) {
                    let mut rows = pieces.take(span, head, piece);
                    for r in 0..rows.shape()[2] {
                        let value = (100 * head + s.start + 2 * piece + r) as f32;
                        rows.write_row(0, 0, r, &[value], true);
                    }
                }
            }
        }
        drop(pieces);
        let want = |h: usize| {
            (0..13).map(move |r| {
                let owned = (1..6).contains(&r) || (8..11).contains(&r);
                if owned { (100 * h + r) as f64 } else { 0.0 }
            })
        };
        assert_eq!(t.to_f64(), want(0).chain(want(1)).collect::<Vec<_>>());
    }

    #[test]
    fn pieces_of_a_dense_problem_follow_the_batch() {
        let mut t = Tensor::filled(DType::F32, [3, 1, 4, 1], 0.0);
        let spans: Vec<_> = (0..3).map(|batch| Span { batch, start: 0, len: 4 }).collect();
        let mut pieces = Pieces::cut(t.view_mut().unwrap(), &spans, |len| len);
        for b in 0..3 {
            pieces.take(b, 0, 0).write_row(0, 0, 3, &[b as f32 + 1.0], false);
        }
        drop(pieces);
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

    #[test]
    fn a_pool_gives_buffers_of_the_length_asked_for() {
        let pool = Pool::default();
        pool.give(vec![1.0; 10]);
        pool.give(vec![1.0; 100]);
        assert_eq!(pool.take(7).len(), 7);
        assert_eq!(pool.take(1000).len(), 1000);
        assert_eq!(pool.take(3).len(), 3);
    }
}
