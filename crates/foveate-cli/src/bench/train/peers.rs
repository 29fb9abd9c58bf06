//! Other trainers on the same model and batches: what `benches/train_gpu_peers.py` printed.

use std::path::Path;

use foveate_train::whole;
use serde::Deserialize;

use super::case::Case;
use super::steps::Measured;
use crate::failure::Failure;
use crate::output::{Output, bytes};

/// A line of the script.
#[derive(Debug, Deserialize)]
pub struct Peer {
    peer: String,
    model: String,
    rows: usize,
    len: usize,
    documents: usize,
    /// Bits of parameters and moments, in words.
    state: String,
    recompute: String,
    /// Keys back that every other layer sees.
    #[serde(default)]
    window: Option<usize>,
    /// Their score, as text.
    #[serde(default)]
    score: Option<String>,
    tokens_per_s: Option<f64>,
    /// In use at most.
    peak_bytes: Option<u64>,
    /// Taken from the device at most, by PyTorch's allocator: what can be held beside ours.
    reserved_bytes: Option<u64>,
    /// Why it did not run.
    declined: Option<String>,
}

pub fn read(file: &Path) -> Result<Vec<Peer>, Failure> {
    let text = whole::read_text(file)
        .map_err(|e| Failure::new(format!("cannot read {}: {e}", file.display())))?;
    let lines = text.lines().enumerate().filter(|(_, line)| !line.trim().is_empty());
    let peer = |(i, line): (usize, &str)| {
        serde_json::from_str(line).map_err(|e| {
            let message = format!("{}, line {}: {e}", file.display(), i + 1);
            Failure::new(message).help("the file is what benches/train_gpu_peers.py prints")
        })
    };
    lines.map(peer).collect()
}

/// The peers on the same model and tokens, and how many times as fast as each these steps are.
pub fn print(
    case: &Case,
    found: &Measured,
    peers: &[Peer],
    out: &mut Output,
) -> Result<(), Failure> {
    let same = |peer: &&Peer| {
        (&peer.model, peer.len, peer.documents) == (&case.name, case.len(), case.documents)
            && (peer.window, &peer.score) == (case.window, &case.score)
    };
    let told = |n: Option<u64>| n.map_or("?".to_owned(), |n| bytes(n as f64));
    for peer in peers.iter().filter(same) {
        let Peer { peer: name, rows, state, recompute, .. } = peer;
        let what = format!("{name}, {rows} x {}, state {state}, recompute {recompute}", peer.len);
        out.line(match (peer.tokens_per_s, &peer.declined) {
            (Some(rate), _) => format!(
                "{what}: {rate:.0} tokens/s, {} in use of {}; foveate has {:.3} times its rate",
                told(peer.peak_bytes),
                told(peer.reserved_bytes),
                found.tokens_per_s(case) / rate
            ),
            (None, reason) => format!("{what}: {}", reason.as_deref().unwrap_or("no result")),
        })?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_report_of_peers_is_read_and_a_broken_line_named() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("peers.jsonl");
        let line = r#"{"peer": "loop", "model": "1b", "rows": 2, "len": 8192, "documents": 16,
            "state": "f32", "recompute": "none", "tokens_per_s": 50000.0, "peak_bytes": 3}"#;
        std::fs::write(&file, line.replace('\n', "") + "\n\n").unwrap();
        let peers = read(&file).unwrap();
        assert_eq!((peers[0].peer.as_str(), peers[0].tokens_per_s), ("loop", Some(50_000.0)));
        std::fs::write(&file, "{}\n").unwrap();
        let said = format!("{:?}", read(&file).unwrap_err());
        assert!(said.contains("peers.jsonl, line 1: missing field `peer`"), "{said}");
    }
}
