//! Memory that may not be there, and is asked for.
//!
//! An allocation that fails ends a Rust program, unless it was asked for by `try_reserve`. A program whose
//! allocator says so in words of its own has to tell the two apart: what is asked for here is refused and
//! goes on ([`is_asking`]), all else ends.

use std::cell::Cell;
use std::collections::TryReserveError;

thread_local! {
    static ASKING: Cell<bool> = const { Cell::new(false) };
}

/// Makes room for `more` elements behind those of `values`, and not for others.
///
/// # Errors
/// When there is no memory for them.
pub fn reserve_exact<T>(values: &mut Vec<T>, more: usize) -> Result<(), TryReserveError> {
    ASKING.set(true);
    let reserved = values.try_reserve_exact(more);
    ASKING.set(false);
    reserved
}

/// Whether this thread asks for memory now, and goes on where there is none.
pub fn is_asking() -> bool {
    ASKING.get()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    #[cfg_attr(miri, ignore = "Miri ends where an allocator would refuse")]
    fn what_is_not_there_is_refused_and_nobody_asks_afterwards() {
        let mut values = vec![7u8];
        assert!(reserve_exact(&mut values, isize::MAX as usize - 8).is_err());
        assert!(!is_asking());
        reserve_exact(&mut values, 100).unwrap();
        assert!(values.capacity() >= 101 && values == [7] && !is_asking());
    }
}
