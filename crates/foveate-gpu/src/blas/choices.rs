//! Which of the library's algorithms computes a product.
//!
//! The library orders its algorithms for a problem by an estimate of their time. Where products are
//! tuned, the first [`CANDIDATES`] run when a problem is first queued, and the fastest computes it from
//! there on. It names no more, but has more: the same with other tiles and other clusters of thread
//! blocks, which are tried for large products where [`SEARCH_VARIABLE`] is set. Times differ from run
//! to run, and algorithms may differ in their bits, so a choice is kept: in the folder of compiled
//! kernels for other processes, and by whoever asks for [`Choices::used`], such as a checkpoint. Its
//! name has all that decides what the library offers.

use std::collections::BTreeMap;
use std::fmt::Display;
use std::fs;
use std::path::PathBuf;

use crate::cache::write_whole;

/// Algorithms of a problem that are timed.
pub const CANDIDATES: usize = 8;

/// A problem is searched beyond those where it has so many times the operations from which on products are tuned.
const SEARCHED: f64 = 200.0;

/// Set and not empty, large products are searched.
const SEARCH_VARIABLE: &str = "FOVEATE_SEARCH_PRODUCTS";

/// An algorithm of a problem: one that the library names, or the same with another tile or cluster of thread blocks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Variation {
    /// In the library's order.
    pub named: usize,
    /// Its own where 0.
    pub tile: u32,
    /// Its own where 0.
    pub cluster: u16,
}

impl Variation {
    pub fn named(named: usize) -> Self {
        Self { named, tile: 0, cluster: 0 }
    }

    pub fn is_named(self) -> bool {
        self == Self::named(self.named)
    }

    /// As choices are kept: that of the library's order, where nothing is varied.
    pub fn number(self) -> usize {
        self.named | (self.tile as usize) << 4 | (self.cluster as usize) << 20
    }

    /// That of a number.
    pub fn of(number: usize) -> Self {
        Self {
            named: number & 15,
            tile: (number >> 4 & 0xffff) as u32,
            cluster: (number >> 20 & 0xffff) as u16,
        }
    }
}

/// The file in the folder of compiled kernels: a line `NUMBER NAME` a problem.
const FILE: &str = "products.txt";

/// Numbers of algorithms in the library's order, by the name of a problem.
#[derive(Debug)]
pub struct Choices {
    /// GPU, driver and library.
    identity: String,
    /// Operations from which on a product is worth it; none are tuned before somebody asks.
    least_flops: Option<f64>,
    /// Whether large products are searched.
    searched: bool,
    folder: Option<PathBuf>,
    /// Chosen before.
    given: BTreeMap<String, usize>,
    used: BTreeMap<String, usize>,
}

impl Choices {
    /// None, for a library on a device; what is chosen is kept in `folder`.
    pub fn new(identity: String, folder: Option<PathBuf>) -> Self {
        let (least_flops, given, used) = Default::default();
        let searched = std::env::var_os(SEARCH_VARIABLE).is_some_and(|value| !value.is_empty());
        Self { identity, least_flops, searched, folder, given, used }
    }

    /// Tunes products of `least_flops` operations or more from here on, but those of `given`.
    pub fn tune(&mut self, least_flops: f64, given: &BTreeMap<String, usize>) {
        self.least_flops = Some(least_flops);
        self.given.extend(given.iter().map(|(name, number)| (name.clone(), *number)));
    }

    /// The name of a problem that is tuned.
    pub fn name(&self, key: &impl Display, flops: f64) -> Option<String> {
        let worth = self.least_flops.is_some_and(|least| flops >= least);
        worth.then(|| format!("{}: {key}", self.identity))
    }

    /// Whether more than what the library names is tried for a problem that is tuned.
    pub fn searches(&self, flops: f64) -> bool {
        self.searched && self.least_flops.is_some_and(|least| flops >= SEARCHED * least)
    }

    /// What is taken for a problem: as before, or what `choose` finds.
    ///
    /// # Errors
    /// Those of `choose`.
    pub fn take<E>(
        &mut self,
        name: String,
        choose: impl FnOnce() -> Result<usize, E>,
    ) -> Result<usize, E> {
        let before = self.used.get(&name).or_else(|| self.given.get(&name)).copied();
        let number = match before.or_else(|| self.read().get(&name).copied()) {
            Some(number) => number,
            None => {
                let number = choose()?;
                self.write(&name, number)
            }
        };
        self.used.insert(name, number);
        Ok(number)
    }

    /// All that were taken.
    pub fn used(&self) -> &BTreeMap<String, usize> {
        &self.used
    }

    /// What other processes chose. Lines that cannot be read are chosen anew.
    fn read(&self) -> BTreeMap<String, usize> {
        let file = self.folder.as_ref().map(|folder| folder.join(FILE));
        let text = file.and_then(|file| fs::read_to_string(file).ok()).unwrap_or_default();
        let choice = |line: &str| {
            let (number, name) = line.split_once(' ')?;
            Some((name.to_owned(), number.parse().ok()?))
        };
        text.lines().filter_map(choice).collect()
    }

    /// Keeps a choice, unless another process was first: that one's is returned.
    fn write(&self, name: &str, number: usize) -> usize {
        let mut all = self.read();
        let number = *all.entry(name.to_owned()).or_insert(number);
        if let Some(folder) = &self.folder {
            let text: String = all.iter().map(|(name, n)| format!("{n} {name}\n")).collect();
            // Compiled kernels are kept in the same folder, which tells of one that cannot be written.
            let _ = write_whole(&folder.join(FILE), text.as_bytes());
        }
        number
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn take(choices: &mut Choices, name: &str, found: Result<usize, ()>) -> Result<usize, ()> {
        choices.take(name.to_owned(), || found)
    }

    #[test]
    fn variations_have_numbers_and_those_that_the_library_names_its_own() {
        assert_eq!(Variation::named(7).number(), 7);
        for variation in [
            Variation::named(0),
            Variation { named: 7, tile: 1, cluster: 0 },
            Variation { named: 3, tile: 0xffff, cluster: 16 },
        ] {
            assert_eq!(Variation::of(variation.number()), variation);
        }
    }

    #[test]
    fn a_choice_is_made_once_and_other_processes_take_it() {
        let folder = tempfile::tempdir().unwrap();
        let new = || Choices::new("a GPU".into(), Some(folder.path().join("deep")));
        let mut first = new();
        assert_eq!(take(&mut first, "x", Ok(3)), Ok(3));
        assert_eq!(take(&mut first, "x", Err(())), Ok(3));
        assert_eq!(take(&mut first, "y", Err(())), Err(()));
        // Both look for the same at the same time: the first to write is followed.
        let mut second = new();
        let lost = second.take("z".into(), || take(&mut first, "z", Ok(5)).map(|_| 1));
        assert_eq!((lost, take(&mut second, "x", Err(()))), (Ok(5), Ok(3)));
        let used: Vec<_> = second.used().iter().map(|(name, n)| (name.as_str(), *n)).collect();
        assert_eq!(used, [("x", 3), ("z", 5)]);
    }

    #[test]
    fn what_is_given_comes_before_what_is_kept_and_a_spoiled_file_is_chosen_anew() {
        let folder = tempfile::tempdir().unwrap();
        let mut choices = Choices::new("a GPU".into(), Some(folder.path().to_owned()));
        assert_eq!(take(&mut choices, "x", Ok(3)), Ok(3));
        let mut resumed = Choices::new("a GPU".into(), Some(folder.path().to_owned()));
        resumed.tune(1.0, &[("x".to_owned(), 6)].into());
        assert_eq!(take(&mut resumed, "x", Err(())), Ok(6));
        fs::write(folder.path().join(FILE), "x\n-1 x\nnothing").unwrap();
        let mut anew = Choices::new("a GPU".into(), Some(folder.path().to_owned()));
        assert_eq!(take(&mut anew, "x", Ok(2)), Ok(2));
        let mut nowhere = Choices::new("a GPU".into(), None);
        assert_eq!(take(&mut nowhere, "x", Ok(1)), Ok(1));
    }
}
