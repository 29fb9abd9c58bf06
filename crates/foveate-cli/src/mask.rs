//! `foveate mask`: a mask drawn, with its tiles, statistics and the time they took.

use std::path::PathBuf;
use std::time::Instant;

use foveate::MaskMod;
use foveate::mask::{BlockMask, Tile, Varies};
use foveate::mods::Head;
use foveate::mods::catalogue;
use foveate::mods::text::parse_mask;
use foveate::tensor::count::Count;
use serde::Serialize;

use crate::blind;
use crate::captures::Captures;
use crate::failure::Failure;
use crate::limits::{Limits, Need};
use crate::number::number;
use crate::output::{Output, bytes, count, write_file};
use crate::progress::COUNTING;

/// Queries or keys of a tile at most.
const TILE_SIDE: u32 = 1 << 20;
/// Points of a tile at most: each has a bit while the tile is evaluated.
const TILE_POINTS: u64 = 1 << 24;

/// Draw a mask and its tiles, with statistics and build time
#[derive(Debug, clap::Args)]
#[command(after_long_help = named())]
pub struct Args {
    /// The mask, such as "causal & document" or "q >= kv && q - kv < 256"
    text: String,
    /// Number of queries (the sum of --doc-lens when left out)
    #[arg(long, value_name = "N", allow_negative_numbers = true, value_parser = number::<usize>)]
    len: Option<usize>,
    /// Number of keys (as many as queries when left out)
    #[arg(long, value_name = "M", allow_negative_numbers = true, value_parser = number::<usize>)]
    kv_len: Option<usize>,
    /// Size of the tiles: queries x keys
    #[arg(long, value_name = "QxKV", default_value = "128x128", value_parser = tile)]
    tile: Tile,
    /// Batch entry that is drawn, of a mask that differs between them (the first when left out)
    #[arg(long, value_name = "B", allow_negative_numbers = true, value_parser = index)]
    batch_index: Option<i32>,
    /// Query head that is drawn, of a mask that differs between them (the first when left out)
    #[arg(long, value_name = "H", allow_negative_numbers = true, value_parser = index)]
    head: Option<i32>,
    #[command(flatten)]
    captures: Captures,
    /// Write a picture to this file too
    #[arg(long, value_name = "FILE")]
    svg: Option<PathBuf>,
    /// Print one JSON object, without the picture
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    limits: Limits,
}

#[derive(Debug, Serialize)]
struct Facts {
    mask: String,
    simplified: String,
    q_len: usize,
    kv_len: usize,
    tile: [u32; 2],
    tiles: u64,
    full: u64,
    partial: u64,
    empty: u64,
    runs: u64,
    bytes: u64,
    live_entries: u64,
    entries: u64,
    sparsity: f64,
    build_ms: f64,
}

/// The table of named masks that `--help` ends with.
fn named() -> String {
    let masks = catalogue::entries().filter(|e| !e.is_score);
    let lines = masks.map(|e| format!("\n  {:<36} {}", e.signature, e.doc));
    format!("Named masks:{}", lines.collect::<String>())
}

/// `128x64`.
fn tile(text: &str) -> Result<Tile, String> {
    let side = |text: &str| {
        let digits = text.trim();
        let is_length = !digits.is_empty() && digits.bytes().all(|b| b.is_ascii_digit());
        is_length.then(|| digits.parse::<u32>().unwrap_or(u32::MAX))
    };
    let sides = text.split_once('x').and_then(|(q, kv)| Some((side(q)?, side(kv)?)));
    let sides = sides.filter(|&(q, kv)| q > 0 && kv > 0);
    let (q, kv) = sides.ok_or("two lengths of at least 1 with an x between, such as 128x128")?;
    if q.max(kv) > TILE_SIDE {
        return Err(format!("a side of a tile is {TILE_SIDE} at most"));
    }
    if u64::from(q) * u64::from(kv) > TILE_POINTS {
        return Err(format!("a tile has up to {TILE_POINTS} points, such as 4096x4096"));
    }
    Ok(Tile { q, kv })
}

/// An index, counted from 0.
fn index(text: &str) -> Result<i32, String> {
    let found = number(text)?;
    if found < 0 { Err("it is counted from 0".to_owned()) } else { Ok(found) }
}

/// The head that is drawn.
///
/// # Errors
/// When one is asked for that is like all others.
fn head(args: &Args, mask: &MaskMod, q_len: i32, kv_len: i32) -> Result<Head, Failure> {
    let varies = Varies::of(mask);
    for (option, given, varies, of, leaf) in [
        ("--batch-index", args.batch_index, varies.by_batch, "batch entry", "b"),
        ("--head", args.head, varies.by_head, "head", "h"),
    ] {
        if let Some(given) = given.filter(|_| !varies) {
            let message = format!("{option} {given}: the mask is the same for every {of}");
            let help = format!("leave it out, or write a mask that reads `{leaf}`");
            return Err(Failure::usage(message).help(help));
        }
    }
    let [b, h] = [args.batch_index, args.head].map(Option::unwrap_or_default);
    Ok(Head { b, h, h_kv: h, q_len, kv_len })
}

/// Builds the block mask and prints it.
pub fn run(args: &Args, out: &mut Output) -> Result<(), Failure> {
    let Some(len) = args.len.or(args.captures.documents_len()) else {
        return Err(Failure::usage("--len is missing").help("say how many queries: --len 2048"));
    };
    let kv_len = args.kv_len.unwrap_or(len);
    for (what, count, options) in
        [("queries", len, "--len or --doc-lens"), ("keys", kv_len, "--kv-len")]
    {
        if count == 0 {
            let wrong = Failure::usage(format!("the mask has 0 {what}"));
            return Err(wrong.help(format!("give one or more by {options}")));
        }
    }
    let (q_len, kv_len_i32) = match (i32::try_from(len), i32::try_from(kv_len)) {
        (Ok(q), Ok(kv)) => (q, kv),
        _ => {
            let message = format!("{} positions; masks count up to {}", len.max(kv_len), i32::MAX);
            return Err(Failure::usage(message).help("give a smaller --len"));
        }
    };
    let longest = len.max(kv_len);
    let ids = args.captures.id_bytes(longest, [&args.text]);
    let need = Need { bytes: ids, seconds: 0.0 };
    args.limits.admit("the table of documents", need, "give fewer positions: --len 4096")?;
    let names = args.captures.names(longest)?;
    let mask = parse_mask(&args.text, &names)
        .map_err(|e| args.captures.hinted(&args.text, Failure::of_text("the mask", &e)))?;
    args.captures.read_by([&args.text], [mask.program()])?;
    let head = head(args, &mask, q_len, kv_len_i32)?;
    let larger = "make the tiles larger, such as --tile 1024x1024, or --len smaller";
    let began = Instant::now();
    let tiles = format!("building the mask in tiles of {}x{}", args.tile.q, args.tile.kv);
    let block = args.limits.watched(&tiles, ids, larger, |watch| {
        BlockMask::build_watched(&mask, head, len, kv_len, args.tile, watch)
    })?;
    let build_ms = began.elapsed().as_secs_f64() * 1e3;
    if let Some(read) = block.out_of_range() {
        return Err(Failure::usage(read.to_string()));
    }
    // Not with smaller tiles, which take longer to build.
    let smaller = "make --len smaller";
    let stats = args.limits.watched(COUNTING, ids, smaller, |watch| block.stats_watched(watch))?;
    if let Some(file) = &args.svg {
        write_file(file, &block.to_svg(&args.text))?;
    }
    let facts = Facts {
        mask: args.text.clone(),
        simplified: mask.to_string(),
        q_len: len,
        kv_len,
        tile: [args.tile.q, args.tile.kv],
        tiles: stats.tiles,
        full: stats.full,
        partial: stats.partial,
        empty: stats.tiles - stats.full - stats.partial,
        runs: stats.runs,
        bytes: stats.bytes,
        live_entries: stats.live_entries,
        entries: stats.entries,
        sparsity: stats.sparsity(),
        build_ms,
    };
    if block.sees_nothing() {
        blind::warn(&facts.mask);
    }
    if args.json {
        return Ok(out.json(&facts)?);
    }
    out.line(block.to_terminal(32, 64))?;
    show(&facts, out)?;
    if let Some(file) = &args.svg {
        out.line(format_args!("picture  {}", file.display()))?;
    }
    Ok(())
}

fn show(facts: &Facts, out: &mut Output) -> Result<(), Failure> {
    let share = |n: u64| format!("{:.1} %", 100.0 * n as f64 / facts.tiles.max(1) as f64);
    out.line(format_args!("mask     {}", facts.simplified))?;
    out.line(format_args!(
        "size     {} x {}",
        Count(facts.q_len, "query"),
        Count(facts.kv_len, "key")
    ))?;
    out.line(format_args!(
        "pairs    {} of {} live, {:.2} % masked",
        count(facts.live_entries as f64),
        count(facts.entries as f64),
        100.0 * facts.sparsity
    ))?;
    out.line(format_args!(
        "tiles    {} of {}x{}: {} full, {} partial, {} empty",
        facts.tiles,
        facts.tile[0],
        facts.tile[1],
        share(facts.full),
        share(facts.partial),
        share(facts.empty)
    ))?;
    out.line(format_args!("runs     {} in {}", facts.runs, bytes(facts.bytes as f64)))?;
    out.line(format_args!("built    in {:.3} ms", facts.build_ms))?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_documentation_of_the_text_form_lists_every_name_as_the_catalogue_has_it() {
        let page = include_str!("../../../docs/text-form.md");
        for entry in catalogue::entries() {
            // A bar ends a cell of a table, in code too.
            let [name, does] = [entry.signature, entry.doc].map(|text| text.replace('|', "\\|"));
            let row = format!("| `{name}` | {does} |");
            assert!(page.contains(&row), "docs/text-form.md lacks: {row}");
        }
    }

    #[test]
    fn tiles_are_two_lengths_of_at_least_one() {
        assert_eq!(tile("128x64"), Ok(Tile { q: 128, kv: 64 }));
        for wrong in ["128", "0x4", "4x", "axb", "-1x4"] {
            assert!(tile(wrong).is_err(), "{wrong}");
        }
        for long in ["2000000x1", "1x99999999999999999999"] {
            assert_eq!(tile(long).unwrap_err(), "a side of a tile is 1048576 at most", "{long}");
        }
    }
}
