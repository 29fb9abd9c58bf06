//! Memory of the host that arrays are copied to while steps go on.

use std::ops::Range;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{PoisonError, RwLock};

use foveate::tensor::memory::reserve_exact;
use rayon::prelude::*;

use crate::error::NnError;

/// Memory of the host that [`super::Blocks::copy_out`] copies arrays to. It is kept from one copy to the next,
/// since making it takes longer than filling it.
pub trait StateMemory: Send + Sync + 'static {
    /// Makes room for `bytes` bytes in all, from any thread. Where `stop` becomes true nobody wants them any more.
    ///
    /// # Errors
    /// When there is no memory for them.
    fn reserve(&self, bytes: usize, stop: &AtomicBool) -> Result<(), NnError>;

    /// Waits for what is on its way.
    ///
    /// # Errors
    /// When the device fails.
    fn wait(&self) -> Result<(), NnError>;

    /// Reads bytes from `start` on of what was copied last, and waits for it where nobody has.
    ///
    /// # Errors
    /// Those of [`StateMemory::wait`].
    fn read(&self, start: usize, into: &mut [u8]) -> Result<(), NnError>;
}

/// Bytes of an array.
#[derive(Debug)]
pub struct ArrayBytes<'a, A> {
    /// The array.
    pub array: &'a A,
    /// Which of its bytes.
    pub bytes: Range<usize>,
}

/// Bytes that one thread copies at once.
const PIECE: usize = 16 << 20;

/// Memory of the process, which all threads fill: that is done when [`super::Blocks::copy_out`] returns.
#[derive(Debug, Default)]
pub struct ProcessMemory {
    /// With room for [`PIECE`] bytes each, the last maybe for fewer, which the system gives when something is copied
    /// there.
    pieces: RwLock<Vec<Vec<u8>>>,
}

impl ProcessMemory {
    /// Copies all of `from`, one after another.
    ///
    /// # Panics
    /// When no room was made for it.
    pub(crate) fn fill(&self, from: &[&[u8]]) {
        let mut pieces = self.pieces.write().unwrap_or_else(PoisonError::into_inner);
        let mut starts = Vec::with_capacity(from.len());
        let mut all = 0;
        for some in from {
            starts.push(all);
            all += some.len();
        }
        let room: usize = pieces.iter().map(Vec::capacity).sum();
        assert!(all <= room, "{all} B are copied to {room} B");
        pieces.par_iter_mut().enumerate().for_each(|(number, piece)| {
            piece.clear();
            let (mut at, end) = (number * PIECE, all.min((number + 1) * PIECE));
            let mut source = starts.partition_point(|&start| start <= at).saturating_sub(1);
            while at < end {
                let (start, some) = (starts[source], from[source]);
                let part = at - start..some.len().min(end - start);
                at += part.len();
                piece.extend_from_slice(&some[part]);
                source += 1;
            }
        });
    }
}

impl StateMemory for ProcessMemory {
    fn reserve(&self, bytes: usize, stop: &AtomicBool) -> Result<(), NnError> {
        let mut pieces = self.pieces.write().unwrap_or_else(PoisonError::into_inner);
        // All but the last have room for a whole piece.
        if pieces.iter().map(Vec::capacity).sum::<usize>() < bytes {
            pieces.pop_if(|last| last.capacity() < PIECE);
        }
        while pieces.len() * PIECE < bytes {
            if stop.load(Ordering::Relaxed) {
                return Ok(());
            }
            let mut piece = Vec::new();
            let reserved = reserve_exact(&mut piece, PIECE.min(bytes - pieces.len() * PIECE));
            reserved.map_err(|_| NnError::memory("a copy of what is saved", bytes))?;
            pieces.push(piece);
        }
        Ok(())
    }

    fn wait(&self) -> Result<(), NnError> {
        Ok(())
    }

    fn read(&self, start: usize, into: &mut [u8]) -> Result<(), NnError> {
        let pieces = self.pieces.read().unwrap_or_else(PoisonError::into_inner);
        let (mut at, mut rest) = (start, into);
        while !rest.is_empty() {
            let piece = &pieces[at / PIECE][at % PIECE..];
            let (some, behind) = rest.split_at_mut(piece.len().min(rest.len()));
            some.copy_from_slice(&piece[..some.len()]);
            (at, rest) = (at + some.len(), behind);
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_copied_is_read_again_wherever_pieces_meet_and_the_memory_is_kept() {
        let memory = ProcessMemory::default();
        let numbers =
            |len: usize, by: usize| -> Vec<u8> { (0..len).map(|i| (i * by) as u8).collect() };
        let never = AtomicBool::new(false);
        for (lens, by) in
            [([1, 0, 7, 30], 3), ([PIECE + 5, 0, 3, 2 * PIECE - 9], 7), ([1, PIECE, 2, 30], 11)]
        {
            let parts = lens.map(|len| numbers(len, by));
            let from = parts.each_ref().map(Vec::as_slice);
            let all = from.concat();
            memory.reserve(all.len(), &never).unwrap();
            let places = || -> Vec<_> {
                let pieces = memory.pieces.read().unwrap();
                pieces.iter().map(|piece| (piece.as_ptr(), piece.capacity())).collect()
            };
            let before = places();
            memory.fill(&from);
            assert_eq!(places(), before, "no memory is taken while something is copied");
            let room: usize = before.iter().map(|(_, room)| room).sum();
            assert!(room >= all.len() && (by != 3 || room < PIECE), "{room} B for {}", all.len());
            let places = [(0, all.len()), (PIECE - 1, 2), (PIECE - 3, 20), (all.len(), 0)];
            for (start, len) in places.into_iter().filter(|(at, len)| at + len <= all.len()) {
                let mut found = vec![0; len];
                memory.read(start, &mut found).unwrap();
                assert!(found == all[start..start + len], "{start} {len}");
            }
        }
        let stopped = ProcessMemory::default();
        stopped.reserve(PIECE, &AtomicBool::new(true)).unwrap();
        assert!(stopped.pieces.read().unwrap().is_empty());
    }
}
