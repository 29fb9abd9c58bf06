//! What the machine has, as far as the system says (Linux only).

mod groups;

use groups::Groups;

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

/// What tells this machine from others, the same for all its containers; else its name.
pub fn id() -> Option<String> {
    let id = std::fs::read_to_string("/proc/sys/kernel/random/boot_id").ok();
    id.map(|id| id.trim().to_owned()).filter(|id| !id.is_empty()).or_else(host)
}

/// Memory that this process can still take.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Free {
    /// How much, in bytes.
    pub bytes: u64,
    /// What there is no more of, with a verb: `the machine has free`.
    pub by: &'static str,
}

/// Memory that this process can take now without swapping: the least of what the machine has, what
/// its control groups leave it and what its limit of address space (`ulimit -v`) does.
pub fn free() -> Option<Free> {
    least(memory("MemAvailable"), Groups::of_this_process().left(), address_space_left())
}

fn least(machine: Option<u64>, groups: Option<u64>, address_space: Option<u64>) -> Option<Free> {
    let all = [
        (machine, "the machine has free"),
        (groups, "the control group of this process leaves"),
        (address_space, "the limit of address space (ulimit -v) leaves"),
    ];
    let known = all.into_iter().filter_map(|(bytes, by)| Some(Free { bytes: bytes?, by }));
    known.min_by_key(|free| free.bytes)
}

/// Bytes of address space that this process may still map; none where it has no limit.
pub fn address_space_left() -> Option<u64> {
    #[cfg(unix)]
    let limit = rustix::process::getrlimit(rustix::process::Resource::As).current;
    #[cfg(not(unix))]
    let limit: Option<u64> = None;
    Some(limit?.saturating_sub(field("/proc/self/status", "VmSize").unwrap_or(0)))
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
    fn a_process_takes_less_than_there_is() {
        let (total, mine) = (memory("MemTotal").unwrap(), resident().unwrap());
        let free = free().unwrap().bytes;
        assert!(0 < mine && mine < total && 0 < free && free < total);
        assert!(mine <= peak_resident().unwrap() && host().is_some());
        assert!(id().is_some() && id() == id());
        assert_eq!(memory("MemTot"), None);
    }

    #[test]
    fn the_least_of_machine_group_and_address_space_is_what_is_free() {
        let by = |machine, groups, space| least(machine, groups, space).map(|f| (f.bytes, f.by));
        assert_eq!(by(Some(3), Some(4), None), Some((3, "the machine has free")));
        assert_eq!(
            by(Some(3), Some(2), Some(5)).unwrap().1,
            "the control group of this process leaves"
        );
        let limited = Some((1, "the limit of address space (ulimit -v) leaves"));
        assert_eq!(by(Some(3), None, Some(1)), limited);
        assert_eq!(by(None, None, None), None);
    }
}
