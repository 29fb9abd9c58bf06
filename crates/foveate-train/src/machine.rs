//! What the machine has, as far as the system says (Linux only).

use std::path::Path;

/// Bytes of one line of the system's memory table, such as `MemTotal` or `MemAvailable`.
pub fn memory(name: &str) -> Option<u64> {
    field("/proc/meminfo", name)
}

/// Resident memory of this process in bytes.
pub fn resident() -> Option<u64> {
    field("/proc/self/status", "VmRSS")
}

/// The most resident memory that this process has had, in bytes.
pub fn peak_resident() -> Option<u64> {
    field("/proc/self/status", "VmHWM")
}

/// The name of the machine.
pub fn host() -> Option<String> {
    let name = std::fs::read_to_string("/proc/sys/kernel/hostname").ok()?;
    Some(name.trim().to_owned()).filter(|name| !name.is_empty())
}

/// Bytes that programs can take in all: memory, or what the control group of this process allows of
/// it, and swap.
pub fn usable() -> Option<u64> {
    let all = memory("MemTotal")?;
    let groups = std::fs::read_to_string("/proc/self/cgroup").unwrap_or_default();
    let allowed = group_limit(Path::new("/sys/fs/cgroup"), &groups).unwrap_or(all);
    Some(all.min(allowed) + memory("SwapTotal").unwrap_or(0))
}

/// The least `memory.max`, in bytes, of the control group (version 2) that `groups` names and of the
/// groups around it, under `root`. A container sees its own group as the root.
fn group_limit(root: &Path, groups: &str) -> Option<u64> {
    let own = groups.lines().find_map(|line| line.strip_prefix("0::/")).unwrap_or_default();
    let limit = |group: &Path| {
        let text = std::fs::read_to_string(group.join("memory.max")).ok()?;
        text.trim().parse::<u64>().ok()
    };
    let own = root.join(own);
    own.ancestors().take_while(|group| group.starts_with(root)).filter_map(limit).min()
}

/// The line `NAME:  1234 kB` of a table.
fn field(table: &str, name: &str) -> Option<u64> {
    let text = std::fs::read_to_string(table).ok()?;
    let line = text.lines().find_map(|l| l.strip_prefix(name)?.strip_prefix(':'))?;
    let kib: u64 = line.split_whitespace().next()?.parse().ok()?;
    Some(kib * 1024)
}

#[cfg(all(test, target_os = "linux"))]
mod tests {
    use super::*;

    #[test]
    fn the_least_limit_of_a_control_group_and_those_around_it_holds() {
        let root = tempfile::tempdir().unwrap();
        let job = root.path().join("user/job");
        std::fs::create_dir_all(&job).unwrap();
        let put =
            |group: &Path, text: &str| std::fs::write(group.join("memory.max"), text).unwrap();
        assert_eq!(group_limit(root.path(), "0::/user/job\n"), None);
        put(&job, "max\n");
        put(&root.path().join("user"), "4096\n");
        assert_eq!(group_limit(root.path(), "1:cpu:/x\n0::/user/job\n"), Some(4096));
        put(&job, "1024\n");
        assert_eq!(group_limit(root.path(), "0::/user/job\n"), Some(1024));
        assert_eq!(group_limit(root.path(), "0::/user\n"), Some(4096));
    }

    #[test]
    fn a_process_takes_less_than_there_is() {
        let (total, mine) = (memory("MemTotal").unwrap(), resident().unwrap());
        assert!(0 < mine && mine < total && total <= usable().unwrap());
        assert!(mine <= peak_resident().unwrap() && host().is_some());
        assert_eq!(memory("MemTot"), None);
    }
}
