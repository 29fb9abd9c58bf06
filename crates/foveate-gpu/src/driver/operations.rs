//! What is queued, as data: each operation with all that it is given.
//!
//! A graph holds the addresses and numbers that its operations were given when it was recorded, and gives
//! them again each time. So work may be replayed only where queueing it once more would give the same;
//! comparing two lists of operations shows that, and names the first that differs.

use std::cell::RefCell;

/// A kernel, a product, a copy or a fill that was queued, with all that it was given.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Operation {
    /// The kernel's name, or what else it is.
    pub name: String,
    /// The sizes of a kernel's launch, in words; else empty.
    pub launch: String,
    /// The bytes of each parameter of a kernel, then what is launched; those of a product or a copy in one.
    pub parameters: Vec<Vec<u8>>,
}

impl Operation {
    /// What is no launch of a kernel.
    pub(crate) fn of(name: &str, parameters: impl IntoIterator<Item = u64>) -> Self {
        let bytes = parameters.into_iter().flat_map(u64::to_ne_bytes).collect();
        Self { name: name.to_owned(), launch: String::new(), parameters: vec![bytes] }
    }

    /// What another of the same place in its list is given otherwise.
    fn difference(&self, other: &Self) -> Option<String> {
        let Self { name, launch, parameters } = self;
        if *name != other.name {
            return Some(format!("is {name}, then {}", other.name));
        }
        if *launch != other.launch {
            return Some(format!("{name} is launched as {launch}, then {}", other.launch));
        }
        let mut pairs = parameters.iter().zip(&other.parameters).enumerate();
        let sizes = |of: &Self| of.parameters.iter().map(Vec::len).collect::<Vec<_>>();
        if sizes(self) != sizes(other) {
            let sizes = [self, other].map(sizes);
            return Some(format!("{name} has parameters of {:?} B, then {:?}", sizes[0], sizes[1]));
        }
        pairs.find(|(_, (own, others))| own != others).map(|(i, (own, others))| {
            let byte = own.iter().zip(others).position(|(a, b)| a != b).unwrap_or(0);
            // The word that it lies in: an address, or two numbers.
            let word = byte - byte % 8;
            let at = |bytes: &[u8]| {
                bytes[word..].iter().take(8).rev().fold(0, |n, &b| n << 8 | u64::from(b))
            };
            let [own, others] = [own, others].map(|bytes| at(bytes));
            format!("{name} has {own:#x} at byte {word} of parameter {i}, then {others:#x}")
        })
    }
}

/// The first operation of `before` that `after` has otherwise, in a line; nothing where all are the same.
pub fn difference(before: &[Operation], after: &[Operation]) -> Option<String> {
    let pairs = before.iter().zip(after).enumerate();
    let differs = |(i, (a, b)): (usize, (&Operation, &Operation))| {
        a.difference(b).map(|difference| format!("operation {i} {difference}"))
    };
    pairs.filter_map(differs).next().or_else(|| {
        let [before, after] = [before, after].map(<[_]>::len);
        (before != after).then(|| format!("there are {before} operations, then {after}"))
    })
}

thread_local! {
    static NOTED: RefCell<Option<Vec<Operation>>> = const { RefCell::new(None) };
}

/// Does `work`, and gives what this thread queued in it, on any stream.
pub fn noted<T>(work: impl FnOnce() -> T) -> (T, Vec<Operation>) {
    let before = NOTED.replace(Some(Vec::new()));
    let done = work();
    (done, NOTED.replace(before).unwrap_or_default())
}

/// Notes an operation, where this thread's are.
pub(crate) fn note(make: impl FnOnce() -> Operation) {
    NOTED.with_borrow_mut(|noted| {
        if let Some(all) = noted {
            all.push(make());
        }
    });
}
