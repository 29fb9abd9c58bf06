//! What a process takes on the processor beside its arrays.

use std::path::Path;

/// Stacks, the C library, tables, the recipe, buffers of files: measured on Linux where a model of 10,000
/// parameters trains.
const REST: u64 = 4 << 20;

/// Bytes of the program where the system does not tell them.
const PROGRAM: u64 = 24 << 20;

/// Of three pages of a program two are resident once it has trained, in release and debug builds: with a
/// page that is used come those around it.
const RESIDENT: [u64; 2] = [2, 3];

/// Bytes that a process takes before it trains.
pub(crate) fn bytes() -> u64 {
    let maps = std::fs::read_to_string("/proc/self/maps").ok();
    let program = std::env::current_exe().ok();
    let mapped = maps.zip(program).map(|(maps, program)| mapped(&maps, &program));
    let program = mapped.filter(|&bytes| bytes > 0).unwrap_or(PROGRAM);
    REST + program / RESIDENT[1] * RESIDENT[0]
}

/// Bytes of `file` in a table of mappings, whose lines are
/// `00400000-00452000 r-xp 00000000 08:02 173521 /usr/bin/foveate`.
fn mapped(maps: &str, file: &Path) -> u64 {
    let bytes = |line: &str| {
        let name = line.splitn(6, ' ').nth(5)?.trim_start();
        let (start, end) = line.split(' ').next()?.split_once('-')?;
        let at = |hex| u64::from_str_radix(hex, 16).ok();
        (Path::new(name) == file).then_some(at(end)?.saturating_sub(at(start)?))
    };
    maps.lines().filter_map(bytes).sum()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_mappings_of_a_file_add_up() {
        let maps = "1000-3000 r--p 00000000 08:02 17 /opt/a b/foveate\n\
                    3000-7000 r-xp 00002000 08:02 17      /opt/a b/foveate\n\
                    7000-9000 rw-p 00000000 00:00 0 \n\
                    9000-a000 r-xp 00000000 08:02 18 /opt/a b/foveate.so\n";
        assert_eq!(mapped(maps, Path::new("/opt/a b/foveate")), 0x6000);
        assert_eq!(mapped(maps, Path::new("/opt/other")), 0);
    }

    #[cfg(target_os = "linux")]
    #[test]
    fn this_program_is_mapped() {
        let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
        assert!(mapped(&maps, &std::env::current_exe().unwrap()) > 1 << 20);
    }
}
