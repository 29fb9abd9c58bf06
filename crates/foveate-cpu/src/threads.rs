//! On which threads a call runs: those of the current rayon pool, or the calling one alone.

use std::cell::Cell;

use rayon::iter::{IntoParallelIterator, ParallelIterator};

thread_local! {
    static ALONE: Cell<bool> = const { Cell::new(false) };
}

/// Runs `call`, whose calls of attention stay on this thread: for those that take less time than to wake
/// another one. No pool is needed, and none is made. The results are the same bits.
pub fn on_this_thread<T>(call: impl FnOnce() -> T) -> T {
    struct Before(bool);
    impl Drop for Before {
        fn drop(&mut self) {
            ALONE.set(self.0);
        }
    }
    let _before = Before(ALONE.replace(true));
    call()
}

/// The threads that a call has here.
pub fn count() -> usize {
    if ALONE.get() { 1 } else { rayon::current_num_threads() }
}

/// `one` of each of `all`, in their order.
pub fn each<T: Send, R: Send>(all: Vec<T>, one: impl Fn(T) -> R + Sync + Send) -> Vec<R> {
    match count() {
        1 => all.into_iter().map(one).collect(),
        _ => all.into_par_iter().map(one).collect(),
    }
}

#[cfg(test)]
mod tests {
    use std::thread;

    use super::*;
    use crate::tasks;

    #[test]
    fn a_call_that_is_to_stay_on_its_thread_does_also_after_one_that_panicked() {
        let here = thread::current().id();
        let stays = || {
            assert_eq!(count(), 1);
            assert!(
                each((0..100).collect(), |_: usize| thread::current().id())
                    .iter()
                    .all(|id| *id == here)
            );
            tasks::run(0..100usize, || (), |(), _| assert_eq!(thread::current().id(), here));
        };
        let pool = rayon::ThreadPoolBuilder::new().num_threads(3).build().unwrap();
        on_this_thread(stays);
        assert_eq!(pool.install(count), 3);
        let panicked = std::panic::catch_unwind(|| on_this_thread(|| panic!("on purpose")));
        assert!(panicked.is_err());
        assert_eq!(count(), rayon::current_num_threads());
        on_this_thread(|| on_this_thread(stays));
        assert_eq!(
            pool.install(|| each((0..9).collect(), |i: usize| i * i)),
            each((0..9).collect(), |i| i * i)
        );
    }
}
