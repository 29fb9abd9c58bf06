//! Which writes the bytes of every read come from.

use std::collections::BTreeMap;

use foveate_gpu::trace::{HOST, Noted};

/// From where to where bytes were written last by one write, and which.
type Part = (u64, u64, usize);

/// Bytes that were written last by one write, by where they start: their end, and which.
#[derive(Default)]
struct Last(BTreeMap<u64, (u64, usize)>);

impl Last {
    /// The parts of a span that were written, with their writes.
    fn of(&self, (start, end): (u64, u64)) -> Vec<Part> {
        let meets = self.0.range(..end).filter(|(_, (until, _))| *until > start);
        meets.map(|(&at, &(until, of))| (at.max(start), until.min(end), of)).collect()
    }

    fn write(&mut self, (start, end): (u64, u64), write: usize) {
        let over = self.0.range(..end).filter(|(_, (until, _))| *until > start);
        let over: Vec<(u64, (u64, usize))> = over.map(|(&at, &of)| (at, of)).collect();
        for (at, (until, of)) in over {
            self.0.remove(&at);
            if at < start {
                self.0.insert(at, (start, of));
            }
            if until > end {
                self.0.insert(end, (until, of));
            }
        }
        self.0.insert(start, (end, write));
    }
}

/// Of every read, in order: its operand, and which writes were the last of its bytes. Copies between host and
/// device are neither: what they copy stays what was written first.
pub fn flow(notes: &[Noted]) -> Vec<(&str, Vec<usize>)> {
    let mut last = Last::default();
    let (mut reads, mut writes) = (Vec::new(), 0);
    // Where the copy under way reads, and what was written there.
    let mut copied: Option<(u64, Vec<Part>)> = None;
    for noted in notes {
        match noted {
            Noted::Written { span: (start, _), .. } if copied.is_some() => {
                let (from, parts) = copied.take().expect("there is a copy");
                let to = |at: u64| at - from + start;
                parts.into_iter().for_each(|(at, end, of)| last.write((to(at), to(end)), of));
            }
            // The host's own zeros.
            Noted::Written { stream: HOST, .. } => {}
            Noted::Written { span, .. } => {
                last.write(*span, writes);
                writes += 1;
            }
            Noted::Read { name, span, stream }
                if name == "a copy out" || name == "memory of the host" && *stream != HOST =>
            {
                copied = Some((span.0, last.of(*span)));
            }
            Noted::Read { name, span, .. } => {
                let of = last.of(*span).into_iter().map(|(.., of)| of);
                reads.push((name.as_str(), of.collect()));
            }
            _ => {}
        }
    }
    reads
}

#[test]
fn the_flow_of_bytes_goes_through_copies() {
    let written = |from, to, stream| Noted::Written { name: "y".into(), span: (from, to), stream };
    let read =
        |name: &str, from, to| Noted::Read { name: name.into(), span: (from, to), stream: 1 };
    let notes = [
        written(0, 9, 1),
        written(4, 6, 1),
        read("x", 0, 9),
        // Bytes 3 to 9 go to 103 to 109, and of these 104 to 108 come to 20.
        read("a copy out", 3, 9),
        written(103, 109, 2),
        written(0, 9, 1),
        read("memory of the host", 104, 108),
        written(20, 24, 3),
        read("x", 19, 30),
        read("x", 3, 6),
    ];
    let expected = [("x", vec![0, 1, 0]), ("x", vec![1, 0]), ("x", vec![2])];
    assert_eq!(flow(&notes), expected);
}
