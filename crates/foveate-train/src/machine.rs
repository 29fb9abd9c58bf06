//! What the machine has, as far as the system says (Linux only).

/// Bytes of one line of the system's memory table, such as `MemTotal` or `MemAvailable`.
pub fn memory(name: &str) -> Option<u64> {
    field("/proc/meminfo", name)
}

/// Resident memory of this process in bytes.
pub fn resident() -> Option<u64> {
    field("/proc/self/status", "VmRSS")
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
        assert_eq!(memory("MemTot"), None);
    }
}
