//! Ranks that are processes, over TCP.
//!
//! Every pair of ranks has a connection. A thread for each connection reads what arrives into the
//! inbox, so a write never waits for what the other rank does, and a large exchange cannot stop
//! half way with both sides writing. Another thread says every second that this rank lives.
//!
//! A rank that is gone is noticed at once, by the end of its connection; one that is stopped, or
//! whose host is, when it has been silent for [`super::Meeting::silence`].

use std::io::{self, Read, Write};
use std::net::{Shutdown, TcpStream};
use std::sync::mpsc::{RecvTimeoutError, Sender, channel};
use std::sync::{Arc, Mutex, TryLockError};
use std::time::{Duration, Instant};

use foveate::tensor::memory::reserve_exact;

use super::Kind;
use super::inbox::{Inbox, Sent, Wait, Way, Why};
use super::rank::Wire;
use crate::error::ShardError;

/// How often a rank says that it lives, and how often a reader looks up.
const BEAT: Duration = Duration::from_millis(500);

/// How long an abort waits for a write to the same rank to end, and for the others to have read why.
const PATIENCE: Duration = Duration::from_millis(500);

/// What opens every frame: what it is, the kind of collective, the group, the number of the
/// collective and the bytes that follow, little-endian.
const HEADER: usize = 32;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Frame {
    Message,
    /// The sender lives; the bytes say for which rank it waits, if it does, and the header in what.
    Beat,
    /// The sender sends nothing any more.
    Leave,
    /// Everything ends; the bytes say why, and the number is 1 where a rank is lost.
    Abort,
}

const FRAMES: [Frame; 4] = [Frame::Message, Frame::Beat, Frame::Leave, Frame::Abort];

const KINDS: [Kind; 6] = [
    Kind::Exchange,
    Kind::AllGather,
    Kind::ReduceScatter,
    Kind::AllReduce,
    Kind::Broadcast,
    Kind::SendReceive,
];

struct Header {
    frame: Frame,
    kind: Kind,
    group: u64,
    number: u64,
    bytes: u64,
}

impl Header {
    /// A frame that is no message.
    fn of(frame: Frame, bytes: usize) -> Self {
        Self { frame, kind: Kind::Exchange, group: 0, number: 0, bytes: bytes as u64 }
    }

    /// That a rank lives, and what it waits for.
    fn beat(wait: Option<Wait>) -> Vec<u8> {
        let Some(Wait { from, kind, number }) = wait else {
            return Self::of(Frame::Beat, 0).encode().to_vec();
        };
        let from = (from as u32).to_le_bytes();
        let header = Self { kind, number, ..Self::of(Frame::Beat, from.len()) };
        [&header.encode()[..], &from].concat()
    }

    fn encode(&self) -> [u8; HEADER] {
        let place = |at: Option<usize>| at.expect("every one is listed") as u8;
        let mut out = [0; HEADER];
        out[0] = place(FRAMES.iter().position(|&f| f == self.frame));
        out[1] = place(KINDS.iter().position(|&k| k == self.kind));
        out[8..16].copy_from_slice(&self.group.to_le_bytes());
        out[16..24].copy_from_slice(&self.number.to_le_bytes());
        out[24..32].copy_from_slice(&self.bytes.to_le_bytes());
        out
    }

    fn decode(bytes: &[u8; HEADER]) -> Option<Self> {
        let word = |at: usize| {
            u64::from_le_bytes(bytes[at..at + 8].try_into().expect("eight bytes of a header"))
        };
        let frame = *FRAMES.get(usize::from(bytes[0]))?;
        let kind = *KINDS.get(usize::from(bytes[1]))?;
        Some(Self { frame, kind, group: word(8), number: word(16), bytes: word(24) })
    }
}

/// The connections of a rank to all others.
#[derive(Debug)]
struct Links {
    inbox: Inbox,
    rank: usize,
    /// By rank; none to this one.
    writers: Vec<Option<Writer>>,
}

#[derive(Debug)]
struct Writer {
    stream: Mutex<TcpStream>,
    /// The same connection, to end it while another thread writes.
    ending: TcpStream,
}

/// The wire of a process.
#[derive(Debug)]
pub(super) struct Tcp {
    links: Arc<Links>,
    /// Ends the thread that says that this rank lives.
    _beating: Sender<()>,
}

impl Tcp {
    /// Takes the connections of `rank`, one to each other rank in order of rank and none to itself.
    pub fn new(
        rank: usize,
        streams: Vec<Option<TcpStream>>,
        [deadline, silence]: [Duration; 2],
    ) -> io::Result<Self> {
        let mut readers = Vec::new();
        let mut writers = Vec::new();
        for (peer, stream) in streams.into_iter().enumerate() {
            let Some(stream) = stream else {
                writers.push(None);
                continue;
            };
            stream.set_nodelay(true)?;
            stream.set_read_timeout(Some(BEAT))?;
            stream.set_write_timeout(Some(deadline))?;
            readers.push((peer, stream.try_clone()?));
            let ending = stream.try_clone()?;
            writers.push(Some(Writer { stream: Mutex::new(stream), ending }));
        }
        let inbox = Inbox::new(writers.len(), deadline);
        let links = Arc::new(Links { inbox, rank, writers });
        for (peer, stream) in readers {
            let links = Arc::clone(&links);
            let name = format!("from rank {peer}");
            let read = move || {
                links.read(peer, stream, silence);
                links.inbox.close(peer);
            };
            std::thread::Builder::new().name(name).spawn(read)?;
        }
        let (beating, stopped) = channel::<()>();
        let beats = Arc::clone(&links);
        let beat = move || {
            while stopped.recv_timeout(BEAT) == Err(RecvTimeoutError::Timeout) {
                let beat = Header::beat(beats.inbox.wait_of(beats.rank));
                beats.each(|writer| {
                    // A rank that is being written to hears from this one anyway.
                    if let Ok(mut stream) = writer.stream.try_lock() {
                        let _ = stream.write_all(&beat);
                    }
                });
            }
        };
        std::thread::Builder::new().name("heartbeat".to_owned()).spawn(beat)?;
        Ok(Self { links, _beating: beating })
    }
}

impl Wire for Tcp {
    fn inbox(&self) -> &Inbox {
        &self.links.inbox
    }

    fn send(&self, way: Way, sent: Sent) -> Result<(), ShardError> {
        let Some(writer) = &self.links.writers[way.to] else {
            self.links.inbox.put(way, sent);
            return Ok(());
        };
        let Sent { kind, number, bytes } = sent;
        let (group, len) = (way.group, bytes.len() as u64);
        let header = Header { frame: Frame::Message, kind, group, number, bytes: len };
        let mut stream = writer.stream.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
        let written = stream.write_all(&header.encode()).and_then(|()| stream.write_all(&bytes));
        drop(stream);
        let Err(error) = written else { return Ok(()) };
        // What the reader of the same connection comes to says more than that it broke: why the other
        // rank ended is on its way, or was read and not yet told.
        let inbox = &self.links.inbox;
        if !timed_out(&error) {
            inbox.wait_closed(&[way.to], PATIENCE);
        }
        let why = match timed_out(&error) {
            true => format!(
                "rank {} could not send {len} bytes to rank {} in {:?}",
                way.from, way.to, inbox.deadline
            ),
            false if inbox.has_left(way.to) => {
                format!("rank {} sends to rank {}, which has ended", way.from, way.to)
            }
            false => gone(way.to, way.from),
        };
        let why = Why::lost(why);
        self.links.abort(why.clone());
        Err(inbox.aborted().unwrap_or(why).error())
    }

    fn abort(&self, why: Why) {
        self.links.abort(why);
    }

    /// Each of the ranks whose own failure came before they heard of another tells it to all: the first of
    /// these says it. What a rank before this one told is read before its connection ends.
    fn said_instead(&self, rank: usize) -> Option<Why> {
        let before: Vec<usize> = (0..rank).collect();
        self.links.inbox.wait_closed(&before, PATIENCE);
        self.links.inbox.said_before(rank)
    }

    fn leave(&self, _rank: usize) {
        self.links.tell(Frame::Leave, &Why::wrong(""));
        // A connection that is closed while bytes of the other rank lie unread is reset, and what was
        // told last may be lost with it. The others end theirs when they have read it.
        if self.links.inbox.aborted().is_some() {
            self.links.inbox.wait_closed(&self.links.others(), PATIENCE);
        }
    }
}

impl Links {
    fn others(&self) -> Vec<usize> {
        (0..self.writers.len()).filter(|&rank| rank != self.rank).collect()
    }

    fn each(&self, act: impl Fn(&Writer)) {
        self.writers.iter().flatten().for_each(act);
    }

    fn abort(&self, why: Why) {
        if self.inbox.abort(why.clone(), false) {
            self.tell(Frame::Abort, &why);
        }
    }

    /// Sends every other rank a last frame. A connection whose write does not end is ended.
    fn tell(&self, frame: Frame, Why { text, lost }: &Why) {
        let header = Header { number: u64::from(*lost), ..Header::of(frame, text.len()) };
        let bytes = [&header.encode()[..], text.as_bytes()].concat();
        let until = Instant::now() + PATIENCE;
        self.each(|writer| {
            let told = loop {
                match writer.stream.try_lock() {
                    Ok(mut stream) => {
                        let _ = stream.set_write_timeout(Some(PATIENCE));
                        break stream.write_all(&bytes).is_ok();
                    }
                    Err(TryLockError::Poisoned(_)) => break false,
                    Err(TryLockError::WouldBlock) if Instant::now() >= until => break false,
                    Err(TryLockError::WouldBlock) => std::thread::sleep(BEAT / 50),
                }
            };
            let half = if told { Shutdown::Write } else { Shutdown::Both };
            let _ = writer.ending.shutdown(half);
        });
    }

    /// Reads what `peer` sends until it leaves or is lost.
    fn read(&self, peer: usize, mut stream: TcpStream, silence: Duration) {
        let lost = loop {
            let mut header = [0; HEADER];
            if let Err(lost) = fill(&mut stream, &mut header, silence) {
                break lost;
            }
            let Some(header) = Header::decode(&header) else {
                break Lost::Garbled;
            };
            let mut bytes = Vec::new();
            let room = usize::try_from(header.bytes).ok();
            if room.is_none_or(|room| reserve_exact(&mut bytes, room).is_err()) {
                break Lost::NoMemory(header.bytes);
            }
            bytes.resize(header.bytes as usize, 0);
            if let Err(lost) = fill(&mut stream, &mut bytes, silence) {
                break lost;
            }
            let Header { frame, kind, group, number, .. } = header;
            match frame {
                Frame::Message => {
                    let way = Way { group, from: peer, to: self.rank };
                    self.inbox.put(way, Sent { kind, number, bytes });
                }
                Frame::Beat => {
                    let from = <[u8; 4]>::try_from(&bytes[..]).map(u32::from_le_bytes).ok();
                    let from = from.map(|f| f as usize).filter(|&f| f < self.writers.len());
                    self.inbox.waits(peer, from.map(|from| Wait { from, kind, number }));
                }
                Frame::Leave => return self.inbox.leave(peer),
                Frame::Abort => {
                    let text = String::from_utf8_lossy(&bytes).into_owned();
                    let why = Why { text, lost: number == 1 };
                    self.inbox.told(peer, why.clone());
                    self.inbox.abort(why, true);
                    return;
                }
            }
        };
        let own = self.rank;
        self.abort(Why::lost(match lost {
            Lost::Ended => gone(peer, own),
            Lost::Silent => format!(
                "rank {peer} has been silent to rank {own} for {silence:?}: it is stopped, or its \
                 host or the network is gone"
            ),
            Lost::Garbled => format!("rank {peer} sent rank {own} what is no message"),
            Lost::NoMemory(bytes) => {
                format!("rank {own} has no memory for {bytes} bytes from rank {peer}")
            }
        }));
    }
}

/// Why nothing more can be read.
enum Lost {
    Ended,
    Silent,
    Garbled,
    NoMemory(u64),
}

fn gone(peer: usize, own: usize) -> String {
    format!("rank {peer} is gone: its connection to rank {own} has ended")
}

fn timed_out(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut)
}

/// Reads until `into` is full. Bytes of any frame are a sign of life.
fn fill(stream: &mut TcpStream, mut into: &mut [u8], silence: Duration) -> Result<(), Lost> {
    let mut heard = Instant::now();
    while !into.is_empty() {
        match stream.read(into) {
            Ok(0) => return Err(Lost::Ended),
            Ok(read) => {
                into = &mut into[read..];
                heard = Instant::now();
            }
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) if timed_out(&error) => {
                if heard.elapsed() >= silence {
                    return Err(Lost::Silent);
                }
            }
            Err(_) => return Err(Lost::Ended),
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::net::TcpListener;

    /// What rank 0 is told where rank 1 ends right after it told `why`, with bytes that it has not
    /// read: the connection is reset, and a write fails while what was told may not be read yet.
    fn told_by_a_write(why: &str) -> String {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let own = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let (mut other, _) = listener.accept().unwrap();
        let long = Duration::from_secs(30);
        let wire = Tcp::new(0, vec![None, Some(own)], [long; 2]).unwrap();
        std::thread::scope(|scope| {
            let sending = scope.spawn(|| {
                let way = Way { group: 0, from: 0, to: 1 };
                let some = |number| Sent { kind: Kind::AllReduce, number, bytes: vec![0; 1 << 16] };
                (1..).find_map(|number| wire.send(way, some(number)).err()).unwrap().to_string()
            });
            other.read_exact(&mut [0; 100]).unwrap();
            let header = Header { number: 1, ..Header::of(Frame::Abort, why.len()) };
            other.write_all(&[&header.encode()[..], why.as_bytes()].concat()).unwrap();
            drop(other);
            sending.join().unwrap()
        })
    }

    #[test]
    fn a_write_to_a_rank_that_has_ended_tells_why_it_ended() {
        let why = "rank 2 is gone: its connection to rank 1 has ended";
        // Many at once, so that readers come late.
        std::thread::scope(|scope| {
            for _ in 0..64 {
                scope.spawn(|| (0..10).for_each(|_| assert_eq!(told_by_a_write(why), why)));
            }
        });
    }
}
