//! `foveate bench mask`: how long building block masks takes, and what they hold.
//!
//! One thread builds. Each build starts from the mask alone: range tables of captured buffers are
//! made anew, as for a mask that has not been seen before.

use std::time::Instant;

use clap::Args as ClapArgs;
use foveate::mask::{BlockMask, Kind, Tile};
use foveate::mods::Head;
use serde::Serialize;

use super::workload::{Mask, Workload};
use crate::failure::Failure;
use crate::interrupt::Interrupt;
use crate::number::seconds;
use crate::output::{Output, bytes};

const TILE: Tile = Tile { q: 128, kv: 128 };

#[derive(Debug, ClapArgs)]
pub struct Args {
    /// Numbers of queries and keys, a comma between
    #[arg(long, value_name = "N,...", value_delimiter = ',', default_values_t = LENGTHS, value_parser = clap::value_parser!(u32).range(1..=1 << 24))]
    len: Vec<u32>,
    /// Run the masks whose name contains this only
    #[arg(long, value_name = "TEXT", default_value = "")]
    filter: String,
    /// Timing of one mask and length in seconds
    #[arg(long, value_name = "SECONDS", default_value_t = 0.5, allow_negative_numbers = true, value_parser = seconds)]
    seconds: f64,
    /// Print one JSON object a mask and length
    #[arg(long)]
    json: bool,
}

const LENGTHS: [u32; 6] = [8 << 10, 32 << 10, 128 << 10, 512 << 10, 1 << 20, 4 << 20];

/// What building a mask took.
#[derive(Debug, Serialize)]
struct Built {
    case: String,
    /// The mask, as the scripts in `benches/` make it.
    mask: Mask,
    width: usize,
    len: usize,
    ms: f64,
    min_ms: f64,
    runs: usize,
    /// Memory of the block mask.
    bytes: u64,
    full_tiles: u64,
    partial_tiles: u64,
}

/// The masks of the command: windows and prefixes in keys, documents by their number.
fn masks() -> [(Mask, usize); 5] {
    [
        (Mask::Causal, 0),
        (Mask::Window, 4096),
        (Mask::Prefix, 1000),
        (Mask::Documents, 100),
        (Mask::Documents, 10_000),
    ]
}

/// Builds every mask at every length and prints a line each.
pub fn run(args: &Args, out: &mut Output) -> Result<(), Failure> {
    let interrupt = Interrupt::watch()?;
    let wanted: Vec<(Mask, usize, String)> = masks()
        .into_iter()
        .map(|(mask, width)| (mask, width, workload(mask, width, 1).mask_name()))
        .filter(|(_, _, name)| name.contains(&args.filter))
        .collect();
    if wanted.is_empty() {
        let names: Vec<_> = masks().map(|(m, w)| workload(m, w, 1).mask_name()).into();
        let message = format!("no mask has `{}` in its name", args.filter);
        return Err(Failure::usage(message).help(format!("the masks are {}", names.join(", "))));
    }
    if !args.json {
        out.line(format_args!(
            "{:<16} {:>8} {:>10} {:>10} {:>11} {:>9} {:>12} {:>12}",
            "mask", "len", "ms", "min", "bytes", "ns/row", "full tiles", "partial"
        ))?;
    }
    for (mask, width, name) in wanted {
        for &len in &args.len {
            interrupt.check()?;
            let built = measure(mask, width, len as usize, args.seconds);
            if args.json {
                out.json(&built)?;
                continue;
            }
            let rows = len.div_ceil(TILE.q);
            out.line(format_args!(
                "{name:<16} {len:>8} {:>10.3} {:>10.3} {:>11} {:>9.0} {:>12} {:>12}",
                built.ms,
                built.min_ms,
                bytes(built.bytes as f64),
                built.min_ms * 1e6 / f64::from(rows),
                built.full_tiles,
                built.partial_tiles,
            ))?;
            out.flush()?;
        }
    }
    Ok(())
}

fn workload(mask: Mask, width: usize, len: usize) -> Workload {
    Workload { mask, width, ..Workload::causal(1, 1, len, 16) }
}

fn measure(mask: Mask, width: usize, len: usize, seconds: f64) -> Built {
    let work = workload(mask, width, len);
    let (queries, keys) = (len as i32, len as i32);
    let head = Head { q_len: queries, kv_len: keys, ..Head::default() };
    let (began, mut times, mut last) = (Instant::now(), Vec::new(), None);
    while times.len() < 3 || (began.elapsed().as_secs_f64() < seconds && times.len() < 100) {
        let program = work.mask_mod().expect("every mask of the command masks something");
        let began = Instant::now();
        let block = BlockMask::build(&program, head, len, len, TILE);
        times.push(began.elapsed().as_secs_f64() * 1e3);
        last = Some(block);
    }
    times.sort_by(f64::total_cmp);
    let block = last.expect("built three times or more");
    Built {
        case: format!("{}/s{len}", work.mask_name()),
        mask,
        width,
        len,
        ms: times[times.len() / 2],
        min_ms: times[0],
        runs: (0..block.rows()).map(|row| block.row(row).len()).sum(),
        bytes: block.bytes(),
        full_tiles: block.tiles_of(Kind::Full),
        partial_tiles: block.tiles_of(Kind::Partial),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn building_is_measured_with_what_was_built() {
        let built = measure(Mask::Documents, 4, 1000, 0.0);
        assert_eq!(built.case, "documents4/s1000");
        // Each of the documents has 250 positions, so none fills a tile, and rows of tiles meet
        // two documents or one.
        assert!(built.full_tiles + built.partial_tiles >= 8 && built.ms >= built.min_ms);
        assert!(built.bytes > 0 && built.runs >= 8);
    }
}
