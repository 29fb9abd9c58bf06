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
    /// What computed attention, where the peer chose.
    attention: Option<String>,
    /// Of the peer, where it is a library, and of PyTorch.
    version: Option<String>,
    torch: Option<String>,
    /// Why it did not run.
    declined: Option<String>,
}

impl Peer {
    /// What it is, and how it was run.
    fn told(&self) -> String {
        let Self { peer, rows, len, state, recompute, .. } = self;
        let version = self.version.as_ref().map_or(String::new(), |n| format!(" {n}"));
        let attention = self.attention.as_ref().map_or(String::new(), |by| format!(", {by}"));
        let torch = self.torch.as_ref().map_or(String::new(), |n| format!(", PyTorch {n}"));
        format!(
            "{peer}{version}, {rows} x {len}, state {state}, recompute {recompute}{attention}{torch}"
        )
    }

    /// Whether another setting of it, of the same rows and state, is faster.
    fn is_slower_than(&self, other: &Self) -> bool {
        let setting = |of: &Self| (of.peer.clone(), of.rows, of.state.clone());
        setting(self) == setting(other) && self.tokens_per_s < other.tokens_per_s
    }
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

/// The peers on the same model and tokens, and how many times as fast as each these steps are. Of a peer's
/// settings the fastest is the one to compare with.
pub fn print(
    case: &Case,
    found: &Measured,
    peers: &[Peer],
    out: &mut Output,
) -> Result<(), Failure> {
    for line in lines(case, found.tokens_per_s(case), peers) {
        out.line(line)?;
    }
    Ok(())
}

fn lines(case: &Case, ours: f64, peers: &[Peer]) -> Vec<String> {
    let same = |peer: &&Peer| {
        (&peer.model, peer.len, peer.documents) == (&case.name, case.len(), case.documents)
            && (peer.window, &peer.score) == (case.window, &case.score)
    };
    let told = |n: Option<u64>| n.map_or("?".to_owned(), |n| bytes(n as f64));
    let all: Vec<&Peer> = peers.iter().filter(same).collect();
    let line = |peer: &&Peer| match (peer.tokens_per_s, &peer.declined) {
        (Some(rate), _) => format!(
            "{}: {rate:.0} tokens/s, {} in use of {}; foveate has {:.3} times its rate{}",
            peer.told(),
            told(peer.peak_bytes),
            told(peer.reserved_bytes),
            ours / rate,
            match all.iter().any(|other| peer.is_slower_than(other)) {
                true => "",
                false => " (its fastest setting)",
            }
        ),
        (None, reason) => {
            format!("{}: {}", peer.told(), reason.as_deref().unwrap_or("no result"))
        }
    };
    all.iter().map(line).collect()
}

#[cfg(test)]
mod tests {
    use super::super::case::tests::case;
    use super::*;

    #[test]
    fn the_fastest_setting_of_a_peer_is_the_one_to_compare_with() {
        let line = |recompute: &str, rest: &str| -> Peer {
            let same = r#""peer": "torchtitan", "version": "0.2.2", "torch": "2.11", "model": "1b", "rows": 2"#;
            let same = format!(r#"{{{same}, "len": 8192, "documents": 1, "state": "bf16""#);
            serde_json::from_str(&format!(r#"{same}, "recompute": "{recompute}", {rest}}}"#))
                .unwrap()
        };
        let peers = [
            line("none", r#""declined": "out of memory""#),
            line("selective", r#""tokens_per_s": 50000.0, "peak_bytes": 3, "reserved_bytes": 4"#),
            line("full", r#""tokens_per_s": 40000.0"#),
            Peer { documents: 16, ..line("none", r#""tokens_per_s": 90000.0"#) },
        ];
        let case = case(&["--model", "1b"]).unwrap();
        let told = "torchtitan 0.2.2, 2 x 8192, state bf16, recompute";
        let wanted = [
            format!("{told} none, PyTorch 2.11: out of memory"),
            format!(
                "{told} selective, PyTorch 2.11: 50000 tokens/s, 3 B in use of 4 B; foveate has 1.100 times its \
                 rate (its fastest setting)"
            ),
            format!(
                "{told} full, PyTorch 2.11: 40000 tokens/s, ? in use of ?; foveate has 1.375 times its rate"
            ),
        ];
        assert_eq!(lines(&case, 55_000.0, &peers), wanted);
    }

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
