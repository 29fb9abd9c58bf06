//! What is wrong with an order of work on several streams: a checker over what [`foveate_gpu::trace`] has noted.
//!
//! Every stream has a clock of how far each other stream is by the time that its next work runs: it goes on where
//! the stream follows an event, or the host has seen an event reached before it queued that work. Each piece of
//! memory has its last write and the reads since; work that meets one of another stream must find it in its clock.

pub mod flow;

use std::collections::BTreeMap;

use foveate_gpu::trace::{HOST, Noted};

/// How much of each stream's work is done, by the stream's number.
type Clock = BTreeMap<u64, usize>;

fn join(clock: &mut Clock, other: &Clock) {
    for (&stream, &time) in other {
        let own = clock.entry(stream).or_default();
        *own = time.max(*own);
    }
}

/// Work on a stream.
#[derive(Clone, Copy)]
struct Work {
    stream: u64,
    time: usize,
    /// The note of it.
    note: usize,
}

/// Memory that was written or read as a whole.
#[derive(Clone, Default)]
struct Piece {
    end: u64,
    write: Option<Work>,
    /// Since then: the last on each stream.
    reads: BTreeMap<u64, Work>,
}

/// What each stream waits for, and who used which memory last.
#[derive(Default)]
struct Order {
    clocks: BTreeMap<u64, Clock>,
    marks: BTreeMap<u64, Clock>,
    host: Clock,
    /// By their first address.
    pieces: BTreeMap<u64, Piece>,
}

impl Order {
    /// Makes one piece end and another begin at `at`, where one goes over it.
    fn cut(&mut self, at: u64) {
        let over = self.pieces.range_mut(..at).next_back().filter(|(_, piece)| piece.end > at);
        let rest = over.map(|(_, piece)| {
            let rest = piece.clone();
            piece.end = at;
            rest
        });
        self.pieces.extend(rest.map(|rest| (at, rest)));
    }

    /// Forgets who used memory.
    fn forget(&mut self, (from, to): (u64, u64)) {
        self.cut(from);
        self.cut(to);
        let gone: Vec<u64> = self.pieces.range(from..to).map(|(&at, _)| at).collect();
        gone.iter().for_each(|at| drop(self.pieces.remove(at)));
    }

    /// Work of note `note` on `stream`; the notes of what it does not follow though it must.
    fn work(
        &mut self,
        note: usize,
        stream: u64,
        (from, to): (u64, u64),
        writes: bool,
    ) -> Vec<usize> {
        // What the host does is done before it queues anything else.
        let clock = match stream {
            HOST => &mut self.host,
            _ => {
                let clock = self.clocks.entry(stream).or_default();
                join(clock, &self.host);
                clock
            }
        };
        let time = clock.entry(stream).or_default();
        *time += 1;
        let (own, clock) = (Work { stream, time: *time, note }, clock.clone());
        self.cut(from);
        self.cut(to);
        let (mut astray, mut at) = (Vec::new(), from);
        let mut gaps = Vec::new();
        for (&start, piece) in self.pieces.range_mut(from..to) {
            let reads = piece.reads.values().filter(|_| writes);
            let before = piece.write.iter().chain(reads);
            let late = |of: &&Work| clock.get(&of.stream).is_none_or(|&time| time < of.time);
            astray.extend(before.filter(late).map(|of| of.note));
            piece.reads.insert(stream, own);
            gaps.extend((at < start).then_some((at, start)));
            at = piece.end;
        }
        gaps.extend((at < to).then_some((at, to)));
        if writes {
            self.forget((from, to));
            self.pieces.insert(from, Piece { end: to, write: Some(own), ..Piece::default() });
        } else {
            let read = |end| Piece { end, write: None, reads: BTreeMap::from([(stream, own)]) };
            self.pieces.extend(gaps.into_iter().map(|(at, end)| (at, read(end))));
        }
        astray
    }
}

/// Memory that somebody has: its length, and the addresses that were written.
#[derive(Default)]
struct Live {
    bytes: usize,
    written: Vec<(u64, u64)>,
}

impl Live {
    fn write(&mut self, span: (u64, u64)) {
        self.written.push(span);
        self.written.sort_unstable();
        // Neighbours become one.
        let mut joined: Vec<(u64, u64)> = Vec::new();
        for &(from, to) in &self.written {
            match joined.last_mut() {
                Some(last) if from <= last.1 => last.1 = last.1.max(to),
                _ => joined.push((from, to)),
            }
        }
        self.written = joined;
    }
}

/// What is wrong with an order of work: memory that two have at once, work on memory that nobody has, a read of
/// what was never written, and work that may run before work of another stream that it needs to follow: a read
/// before its write, a write before a read of what was there, or before another write.
pub fn trouble(notes: &[Noted]) -> Vec<String> {
    let mut live: BTreeMap<u64, Live> = BTreeMap::new();
    let mut order = Order::default();
    let mut trouble = Vec::new();
    for (i, noted) in notes.iter().enumerate() {
        match noted {
            Noted::Taken { address, bytes } => {
                let end = address + *bytes as u64;
                let before = live.range(..end).next_back();
                if before.is_some_and(|(at, of)| at + of.bytes as u64 > *address) {
                    trouble.push(format!("{i}: {bytes} B at {address:#x} are somebody's"));
                }
                live.insert(*address, Live { bytes: *bytes, ..Live::default() });
            }
            Noted::Given { address } => {
                live.remove(address);
            }
            Noted::Read { name, span, stream } | Noted::Written { name, span, stream } => {
                let writes = matches!(noted, Noted::Written { .. });
                for before in order.work(i, *stream, *span, writes) {
                    trouble.push(format!(
                        "{i}: {name} on stream {stream} does not follow {}",
                        words(before, &notes[before])
                    ));
                }
                let of = live.range_mut(..=span.0).next_back();
                let Some((_, of)) = of.filter(|(at, of)| span.1 <= **at + of.bytes as u64) else {
                    trouble.push(format!("{i}: {name} is in memory that nobody has"));
                    continue;
                };
                if writes {
                    of.write(*span);
                } else if !of.written.iter().any(|w| w.0 <= span.0 && span.1 <= w.1) {
                    trouble.push(format!("{i}: {name} is read before it is written"));
                }
            }
            // The driver has waited for whoever had it.
            Noted::Allocated { address, bytes } => {
                order.forget((*address, address + *bytes as u64));
            }
            Noted::Marked { event, stream } => {
                let clock = order.clocks.entry(*stream).or_default();
                join(clock, &order.host);
                order.marks.insert(*event, clock.clone());
            }
            Noted::Follows { stream, event } => {
                // What nothing has marked is not waited for.
                let mark = order.marks.get(event).cloned().unwrap_or_default();
                join(order.clocks.entry(*stream).or_default(), &mark);
            }
            Noted::Reached { event } => {
                let mark = order.marks.get(event).cloned().unwrap_or_default();
                join(&mut order.host, &mark);
            }
            Noted::Waited { .. } | Noted::Planned { .. } | Noted::Bound { .. } => {}
        }
    }
    trouble
}

fn words(at: usize, noted: &Noted) -> String {
    match noted {
        Noted::Read { name, stream, .. } => format!("{at}: the read of {name} on stream {stream}"),
        Noted::Written { name, stream, .. } => {
            format!("{at}: the write of {name} on stream {stream}")
        }
        _ => unreachable!("work reads or writes"),
    }
}

#[test]
fn the_checker_finds_what_is_wrong_with_memory() {
    let taken = |address, bytes| Noted::Taken { address, bytes };
    let read = |from, to| Noted::Read { name: "x".into(), span: (from, to), stream: 1 };
    let written = |from, to| Noted::Written { name: "y".into(), span: (from, to), stream: 1 };
    let right = [
        taken(100, 50),
        written(100, 120),
        written(120, 150),
        read(110, 140),
        Noted::Given { address: 100 },
        taken(90, 30),
        written(90, 120),
        read(90, 120),
    ];
    assert_eq!(trouble(&right), [""; 0]);
    assert_eq!(trouble(&[taken(100, 50), taken(140, 10)]), ["1: 10 B at 0x8c are somebody's"]);
    assert_eq!(trouble(&right[..4]).len() + trouble(&right[1..4]).len(), 3);
    let late = [&right[..5], &[read(110, 140)]].concat();
    assert_eq!(trouble(&late), ["5: x is in memory that nobody has"]);
    let unwritten = [taken(100, 50), written(100, 120), read(110, 130)];
    assert_eq!(trouble(&unwritten), ["2: x is read before it is written"]);
    // Memory of somebody before holds nothing for the next.
    let again = [&right[..5], &[taken(100, 50), read(110, 120)]].concat();
    assert_eq!(trouble(&again), ["6: x is read before it is written"]);
}

#[test]
fn the_checker_finds_an_event_that_is_missing() {
    let read = |from, to, stream| Noted::Read { name: "x".into(), span: (from, to), stream };
    let written = |from, to, stream| Noted::Written { name: "y".into(), span: (from, to), stream };
    let marked = |event, stream| Noted::Marked { event, stream };
    let follows = |stream, event| Noted::Follows { stream, event };
    // Written on 1, read on 2, written again on 1, read on 3 by way of 2, and once more behind the host.
    let right = [
        Noted::Taken { address: 0, bytes: 100 },
        written(0, 100, 1),
        marked(7, 1),
        follows(2, 7),
        read(20, 60, 2),
        marked(8, 2),
        follows(1, 8),
        written(40, 90, 1),
        marked(7, 1),
        follows(2, 7),
        marked(9, 2),
        follows(3, 9),
        read(0, 100, 3),
        marked(9, 3),
        Noted::Reached { event: 9 },
        written(0, 100, 4),
    ];
    assert_eq!(trouble(&right), [""; 0]);
    let without = |at: usize| {
        let rest = right.iter().enumerate().filter(|(i, _)| *i != at);
        trouble(&rest.map(|(_, noted)| noted.clone()).collect::<Vec<_>>())
    };
    let first = "3: x on stream 2 does not follow 1: the write of y on stream 1";
    assert_eq!(without(3)[0], first);
    assert_eq!(without(6), ["6: y on stream 1 does not follow 4: the read of x on stream 2"]);
    for needed in [2, 3, 5, 6, 8, 9, 10, 11, 13, 14] {
        assert_ne!(without(needed), [""; 0], "without {:?}", right[needed]);
    }
    // A mark before the work says nothing of it.
    let early = [&right[..1], &[marked(7, 1), right[1].clone()], &right[3..5]].concat();
    assert_eq!(
        trouble(&early)[0],
        "4: x on stream 2 does not follow 2: the write of y on stream 1"
    );
    // What the host writes is there for all that it queues behind, and what it reads is to be reached before.
    let by_host = [right[0].clone(), written(0, 9, HOST), read(0, 9, 2), marked(1, 2)];
    assert_eq!(trouble(&by_host), [""; 0]);
    let seen = [&by_host[..], &[Noted::Reached { event: 1 }, written(0, 9, HOST)]].concat();
    assert_eq!(trouble(&seen), [""; 0]);
    let unseen = [&by_host[..], &[written(0, 9, HOST)]].concat();
    assert_eq!(trouble(&unseen), ["4: y on stream 0 does not follow 2: the read of x on stream 2"]);
    // Work of other bytes does not meet, and memory that the driver gives anew has no past.
    let apart = [right[0].clone(), written(0, 50, 1), written(50, 100, 2)];
    assert_eq!(trouble(&apart), [""; 0]);
    let anew = Noted::Allocated { address: 0, bytes: 100 };
    let again =
        [&right[..2], &[Noted::Given { address: 0 }, anew, right[0].clone(), written(0, 9, 2)]];
    assert_eq!(trouble(&again.concat()), [""; 0]);
}
