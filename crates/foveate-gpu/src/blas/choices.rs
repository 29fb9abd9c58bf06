//! Which of the library's algorithms computes a product.
//!
//! The library orders its algorithms for a problem by an estimate of their time. Where products are
//! tuned, the first [`CANDIDATES`] run when a problem is first queued, and the fastest computes it from
//! there on. Times differ from run to run, and algorithms may differ in their bits, so a choice is kept:
//! in the folder of compiled kernels for other processes, and by whoever asks for
//! [`Choices::used`], such as a checkpoint. Its name has all that decides what the library offers.

use std::collections::BTreeMap;
use std::fs;
use std::path::PathBuf;

use super::prepared::Key;
use crate::cache::write_whole;

/// Algorithms of a problem that are timed.
pub const CANDIDATES: usize = 8;

/// The file in the folder of compiled kernels: a line `NUMBER NAME` a problem.
const FILE: &str = "products.txt";

/// Numbers of algorithms in the library's order, by the name of a problem.
#[derive(Debug)]
pub struct Choices {
    /// GPU, driver and library.
    identity: String,
    /// Operations from which on a product is worth it; none are tuned before somebody asks.
    least_flops: Option<f64>,
    folder: Option<PathBuf>,
    /// Chosen before.
    given: BTreeMap<String, usize>,
    used: BTreeMap<String, usize>,
}

impl Choices {
    /// None, for a library on a device; what is chosen is kept in `folder`.
    pub fn new(identity: String, folder: Option<PathBuf>) -> Self {
        let (least_flops, given, used) = Default::default();
        Self { identity, least_flops, folder, given, used }
    }

    /// Tunes products of `least_flops` operations or more from here on, but those of `given`.
    pub fn tune(&mut self, least_flops: f64, given: &BTreeMap<String, usize>) {
        self.least_flops = Some(least_flops);
        self.given.extend(given.iter().map(|(name, number)| (name.clone(), *number)));
    }

    /// The name of a problem that is tuned.
    pub fn name(&self, key: &Key, flops: f64) -> Option<String> {
        let worth = self.least_flops.is_some_and(|least| flops >= least);
        worth.then(|| format!("{}: {key}", self.identity))
    }

    /// What is taken for a problem of so many `kernels`: as before, or what `choose` finds. A number
    /// that none of them has is passed over; builds that tried more than the library names left such.
    ///
    /// # Errors
    /// Those of `choose`.
    pub fn take<E>(
        &mut self,
        name: String,
        kernels: usize,
        choose: impl FnOnce() -> Result<usize, E>,
    ) -> Result<usize, E> {
        let of = |all: &_| chosen(all, &name, kernels);
        let before = of(&self.used).or_else(|| of(&self.given));
        let number = match before.or_else(|| of(&self.read())) {
            Some(number) => number,
            None => {
                let found = choose()?;
                self.write(&name, kernels, found)
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
    fn write(&self, name: &str, kernels: usize, found: usize) -> usize {
        let mut all = self.read();
        let number = chosen(&all, name, kernels).unwrap_or(found);
        all.insert(name.to_owned(), number);
        if let Some(folder) = &self.folder {
            let text: String = all.iter().map(|(name, n)| format!("{n} {name}\n")).collect();
            // Compiled kernels are kept in the same folder, which tells of one that cannot be written.
            let _ = write_whole(&folder.join(FILE), text.as_bytes());
        }
        number
    }
}

/// What was chosen for a problem, where it is one of its `kernels`.
fn chosen(all: &BTreeMap<String, usize>, name: &str, kernels: usize) -> Option<usize> {
    all.get(name).copied().filter(|&number| number < kernels)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn take(choices: &mut Choices, name: &str, found: Result<usize, ()>) -> Result<usize, ()> {
        choices.take(name.to_owned(), CANDIDATES, || found)
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
        let lost = second.take("z".into(), CANDIDATES, || take(&mut first, "z", Ok(5)).map(|_| 1));
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

    #[test]
    fn a_number_that_a_problem_has_no_kernel_of_is_chosen_anew_and_kept() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join(FILE);
        fs::write(&file, "3146069 x\n3 y\n9 z\n").unwrap();
        let mut choices = Choices::new("a GPU".into(), Some(folder.path().to_owned()));
        choices.tune(1.0, &[("x".to_owned(), 8), ("y".to_owned(), 8)].into());
        assert_eq!(take(&mut choices, "x", Ok(2)), Ok(2));
        assert_eq!(take(&mut choices, "y", Err(())), Ok(3), "another process's is taken");
        assert_eq!(choices.take("y".into(), 3, || Ok::<_, ()>(1)), Ok(1), "there are fewer here");
        assert_eq!(fs::read_to_string(&file).unwrap(), "2 x\n1 y\n9 z\n");
    }
}
