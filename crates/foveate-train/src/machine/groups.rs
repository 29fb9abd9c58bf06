//! Memory as control groups allow it: a container, or a job of a scheduler, has less than the machine.
//!
//! A group's limit holds for all groups in it, so that the least of those around a process is its own. Both
//! versions are read, for a machine may have both; what a file does not say limits nothing. A container
//! sees its own group as the root, yet may be told the path that it has outside: folders that are not there
//! are passed over.

use std::path::{Path, PathBuf};

/// The files of a version's memory controller.
struct Controller {
    /// The folder of the root group.
    folder: &'static str,
    limit: &'static str,
    used: &'static str,
    /// The line of `memory.stat` that counts pages of files which the kernel drops first.
    droppable: &'static str,
}

const V1: Controller = Controller {
    folder: "memory",
    limit: "memory.limit_in_bytes",
    used: "memory.usage_in_bytes",
    droppable: "total_inactive_file",
};

const V2: Controller = Controller {
    folder: "",
    limit: "memory.max",
    used: "memory.current",
    droppable: "inactive_file",
};

/// The control groups of this process that may limit its memory.
pub struct Groups(Vec<(PathBuf, &'static Controller)>);

impl Groups {
    /// Those of this process.
    pub fn of_this_process() -> Self {
        let list = std::fs::read_to_string("/proc/self/cgroup").unwrap_or_default();
        Self::listed(Path::new("/sys/fs/cgroup"), &list)
    }

    /// Those that `list` names, in the form of `/proc/self/cgroup`, and those around them, where
    /// the system mounts control groups at `root`.
    fn listed(root: &Path, list: &str) -> Self {
        let [mut v1, mut v2] = [""; 2];
        for line in list.lines() {
            match line.splitn(3, ':').collect::<Vec<_>>()[..] {
                [_, "", path] => v2 = path,
                [_, names, path] if names.split(',').any(|name| name == "memory") => v1 = path,
                _ => {}
            }
        }
        let mut groups = Vec::new();
        for (path, controller) in [(v1, &V1), (v2, &V2)] {
            let root = root.join(controller.folder);
            let own = root.join(path.trim_start_matches('/'));
            let around = own.ancestors().take_while(|group| group.starts_with(&root));
            groups.extend(around.map(|group| (group.to_path_buf(), controller)));
        }
        Self(groups)
    }

    /// The least that a group has left, in bytes.
    pub fn left(&self) -> Option<u64> {
        let left = |(group, c): &(PathBuf, &Controller)| {
            let limit = number(&group.join(c.limit))?;
            let used = number(&group.join(c.used)).unwrap_or(0);
            let stat = std::fs::read_to_string(group.join("memory.stat")).unwrap_or_default();
            let line = stat.lines().find_map(|l| l.strip_prefix(c.droppable)?.strip_prefix(' '));
            let droppable = line.and_then(|l| l.trim().parse().ok()).unwrap_or(0);
            Some(limit.saturating_sub(used.saturating_sub(droppable)))
        };
        self.0.iter().filter_map(left).min()
    }
}

/// The number in a file; none where the file says `max`.
fn number(file: &Path) -> Option<u64> {
    std::fs::read_to_string(file).ok()?.trim().parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn folder(files: &[(&str, &str)]) -> tempfile::TempDir {
        let root = tempfile::tempdir().unwrap();
        for (name, text) in files {
            let file = root.path().join(name);
            std::fs::create_dir_all(file.parent().unwrap()).unwrap();
            std::fs::write(file, text).unwrap();
        }
        root
    }

    fn left(root: &tempfile::TempDir, list: &str) -> Option<u64> {
        Groups::listed(root.path(), list).left()
    }

    #[test]
    fn the_least_of_a_group_and_those_around_it_holds() {
        let root = folder(&[
            ("user/job/memory.max", "max\n"),
            ("user/memory.max", "4096\n"),
            ("user/memory.current", "4000\n"),
            ("user/memory.stat", "anon 900\nactive_file 50\ninactive_file 3000\n"),
            ("small/memory.max", "1024\n"),
        ]);
        assert_eq!(left(&root, "1:cpu:/x\n0::/user/job\n"), Some(3096));
        assert_eq!(left(&root, "0::/small\n"), Some(1024));
        assert_eq!(left(&root, "0::/\n"), None);
        assert_eq!(left(&root, ""), None);
    }

    #[test]
    fn a_container_is_limited_by_the_root_that_it_sees() {
        // In version 1 it is told the path outside, which is not there inside.
        let root = folder(&[
            ("memory/memory.limit_in_bytes", "8192\n"),
            ("memory/memory.usage_in_bytes", "5000\n"),
            ("memory/memory.stat", "inactive_file 1\ntotal_inactive_file 1000\n"),
            ("cpu/memory.limit_in_bytes", "1\n"),
        ]);
        let list = "9:cpu,cpuacct:/docker/1\n4:hugetlb,memory:/docker/1\n0::/\n";
        assert_eq!(left(&root, list), Some(4192));
        assert_eq!(left(&root, "4:memory:/../..\n"), Some(4192));
    }

    #[test]
    fn a_group_that_is_over_its_limit_has_nothing_left() {
        let root = folder(&[("memory.max", "10\n"), ("memory.current", "12\n")]);
        assert_eq!(left(&root, "0::/\n"), Some(0));
    }
}
