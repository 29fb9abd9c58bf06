//! A run that ends while it saves, and goes on.

use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::thread::sleep;
use std::time::{Duration, Instant};

use crate::place::Place;
use crate::preload::preloaded;

/// Variables of a process.
pub type Variables = Vec<(&'static str, String)>;

/// A run of a place's recipe in a folder.
pub struct Run<'a> {
    pub place: &'a Place,
    pub dir: PathBuf,
    /// Makes the command of these arguments of `foveate`.
    pub command: &'a dyn Fn(&[&str]) -> Command,
    /// What is set beside the recipe, the steps among it.
    pub sets: &'a [&'a str],
}

impl Run<'_> {
    /// Starts it, or goes on with it where something is saved, with these variables.
    pub fn start(&self, variables: &Variables) -> Child {
        let how = if self.checkpoints().is_empty() { "--start-over" } else { "--resume" };
        let dir = format!("run.dir={}", self.dir.display());
        let mut args = vec!["train", "recipe.toml", how, "--set", &dir];
        self.sets.iter().for_each(|set| args.extend(["--set", set]));
        let mut command = (self.command)(&args);
        command.envs(variables.iter().map(|(name, value)| (name, value)));
        command.stdout(Stdio::null()).stderr(Stdio::piped()).spawn().unwrap()
    }

    /// What is in the folder of checkpoints whose name begins so.
    pub fn named(&self, begin: &str) -> Vec<PathBuf> {
        let entries = fs::read_dir(self.dir.join("checkpoints")).into_iter().flatten();
        let is_named = |path: &PathBuf| {
            path.file_name().is_some_and(|name| name.to_string_lossy().starts_with(begin))
        };
        let mut found: Vec<_> =
            entries.filter_map(|entry| Some(entry.ok()?.path())).filter(is_named).collect();
        found.sort();
        found
    }

    pub fn checkpoints(&self) -> Vec<PathBuf> {
        self.named("step-")
    }

    /// Starts it, as [`Self::start`] does, and waits until it writes a checkpoint or has ended.
    pub fn start_and_save(&self, variables: &Variables) -> Child {
        // What an earlier one has left is not of this one.
        let writing = || {
            let is_begun = |path: &PathBuf| fs::read_dir(path).is_ok_and(|files| files.count() > 0);
            let found = self.named(".writing-").into_iter().filter(is_begun);
            let known =
                |path| fs::metadata(path).ok().map(|f| (f.ino(), f.ctime(), f.ctime_nsec()));
            found.filter_map(known).collect::<Vec<_>>()
        };
        let (left, began) = (writing(), Instant::now());
        let mut child = self.start(variables);
        while writing().iter().all(|one| left.contains(one)) && child.try_wait().unwrap().is_none()
        {
            assert!(began.elapsed() < Duration::from_secs(60), "nothing is saved");
            sleep(Duration::from_millis(1));
        }
        child
    }

    /// The exit code, and what was said, of a run that has ended or will; its checkpoints are whole.
    pub fn ended(&self, child: Child) -> (Option<i32>, String) {
        let done = child.wait_with_output().unwrap();
        let said = String::from_utf8(done.stderr).unwrap();
        assert!(!said.contains("panicked"), "{said}");
        for path in self.checkpoints() {
            let verified =
                self.place.run(&["checkpoint", "show", "--verify", path.to_str().unwrap()]);
            let why = String::from_utf8_lossy(&verified.stderr).into_owned();
            assert!(verified.status.success(), "{why}, behind {said}");
        }
        (done.status.code(), said)
    }

    /// Whether one line of an error says how the run goes on, from the checkpoint that is the newest now.
    pub fn says_how_it_goes_on(&self, said: &str) {
        let errors: Vec<&str> = said.lines().filter(|line| line.starts_with("error: ")).collect();
        assert!(errors.len() == 1 && said.lines().last() == Some(errors[0]), "{said}");
        let how = match self.checkpoints().last() {
            Some(last) => format!("continue with --resume: {} is intact", last.display()),
            None => "start again with --start-over: no checkpoint of this run was saved".to_owned(),
        };
        // Where there is no memory to look for the newest one.
        let folder = self.dir.join("checkpoints").display().to_string();
        let unseen = [
            format!("continue with --resume: the newest checkpoint in {folder} is whole"),
            format!("continue with --resume, which begins again if {folder} has no checkpoint"),
        ];
        let unseen = errors[0].starts_with("error: there is no memory for ")
            && unseen.iter().any(|how| errors[0].ends_with(how))
            || errors[0].ends_with(
                "could not be written: Cannot allocate memory (os error 12); give this process more memory and \
                 continue with --resume if a checkpoint was saved, else start again with --start-over",
            );
        assert!(unseen || errors[0].ends_with(&how), "{how}: {said}");
    }

    /// Goes on to the end, and has the losses and weights of a run that never ended before.
    pub fn is_as_if_it_had_not_ended(&self) {
        let (code, said) = self.ended(self.start(&Vec::new()));
        assert_eq!(code, Some(0), "{said}");
        let straight = Run { dir: self.place.path("straight"), ..*self };
        let (code, said) = straight.ended(straight.start(&Vec::new()));
        assert_eq!(code, Some(0), "{said}");
        let [own, other] = [&self.dir, &straight.dir].map(|dir| dir.to_str().unwrap());
        let steps = self.place.steps(own);
        assert_eq!(steps, self.place.steps(other));
        let last = steps.last().unwrap().0;
        assert_eq!(self.place.weights(own, last), self.place.weights(other, last));
    }
}

/// The variables of a disk on which every file takes so many milliseconds; none, and a line that says so, where
/// there is no C compiler.
pub fn slow_disk(folder: &Path, ms: u64) -> Option<Variables> {
    Some(vec![preloaded(folder, "slow_disk")?, ("SLOW_MS", ms.to_string())])
}
