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

/// Bytes that programs can take in all: memory and swap, or what control groups allow of them.
pub fn usable() -> Option<u64> {
    let groups = Groups::of_this_process();
    let least = |there: u64, limit: Option<u64>| limit.map_or(there, |limit| there.min(limit));
    let swap = least(memory("SwapTotal").unwrap_or(0), groups.swap_limit());
    Some(least(memory("MemTotal")?, groups.limit()) + swap)
}

/// Bytes that programs can take now without swapping: those of the machine, or those that are left
/// of what control groups allow.
pub fn available() -> Option<u64> {
    [memory("MemAvailable"), Groups::of_this_process().left()].into_iter().flatten().min()
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
        let (usable, available) = (usable().unwrap(), available().unwrap());
        assert!(0 < mine && mine < total && 0 < available && available <= usable);
        assert!(mine <= peak_resident().unwrap() && host().is_some());
        assert_eq!(memory("MemTot"), None);
    }
}
