//! What the machine has, as far as the system says (Linux only).

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

/// Bytes that programs can take in all: memory and swap.
pub fn usable() -> Option<u64> {
    Some(memory("MemTotal")? + memory("SwapTotal").unwrap_or(0))
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
        assert!(0 < mine && mine < total && total <= usable().unwrap());
        assert!(mine <= peak_resident().unwrap() && host().is_some());
        assert_eq!(memory("MemTot"), None);
    }
}
