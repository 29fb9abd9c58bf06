//! How processes find each other.
//!
//! Rank 0 listens at the address that all know. Every other rank connects to it, says who it is and
//! where it listens itself, and is told where the others do; then each rank connects to those below
//! it. Who does not belong (another run, an older attempt of this one, a rank that is there already)
//! is told why and turned away, and the meeting goes on. A rank that died while it waited is no longer
//! there: rank 0 asks who came before it turns another of the same number away, and before it begins.

use std::hash::{BuildHasher, RandomState};
use std::io::{self, Read, Write};
use std::net::{IpAddr, Ipv4Addr, SocketAddr, TcpListener, TcpStream, ToSocketAddrs};
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime};

use super::rank::Rank;
use super::tcp::Tcp;
use crate::error::{ShardError, refused};
use crate::mesh::MOST_RANKS;

/// Where and how ranks that are processes meet.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Meeting {
    /// Host name or address of rank 0.
    pub host: String,
    /// Port at which rank 0 listens.
    pub port: u16,
    /// This rank.
    pub rank: usize,
    /// Number of ranks.
    pub ranks: usize,
    /// Tells runs apart, so that ranks of another run at the same port are turned away.
    pub run: u64,
    /// How often the run was started again: ranks of an older attempt are turned away.
    pub attempt: u64,
    /// How long ranks wait for the others to come: a scheduler may start them minutes apart.
    pub arrival: Duration,
    /// The longest that a rank waits for another in a collective.
    pub deadline: Duration,
    /// How long a rank may be silent before it counts as lost. A rank says that it lives twice a
    /// second, whatever it computes.
    pub silence: Duration,
}

/// What opens every connection: whose it is, and the version of what is said.
const MAGIC: [u8; 8] = *b"foveate2";
const OURS: &[u8] = b"foveate";
const HELLO: usize = 36;

/// How long somebody who connects has to say who it is.
const GREETING: Duration = Duration::from_secs(2);

/// How often a listener looks up, and how soon a connection is tried again.
const PAUSE: Duration = Duration::from_millis(10);

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Hello {
    run: u64,
    attempt: u64,
    rank: u32,
    ranks: u32,
    /// At which this rank listens itself.
    port: u16,
}

impl Hello {
    fn encode(&self) -> [u8; HELLO] {
        let mut out = [0; HELLO];
        out[..8].copy_from_slice(&MAGIC);
        out[8..16].copy_from_slice(&self.run.to_le_bytes());
        out[16..24].copy_from_slice(&self.attempt.to_le_bytes());
        out[24..28].copy_from_slice(&self.rank.to_le_bytes());
        out[28..32].copy_from_slice(&self.ranks.to_le_bytes());
        out[32..34].copy_from_slice(&self.port.to_le_bytes());
        out
    }

    /// What somebody who connected says; none when it is no rank of this program. A rank of another version
    /// of it is told so.
    fn read(stream: &mut TcpStream) -> Option<Self> {
        let mut said = [0; HELLO];
        stream.set_read_timeout(Some(GREETING)).ok()?;
        stream.set_write_timeout(Some(GREETING)).ok()?;
        stream.read_exact(&mut said).ok()?;
        let word = |at: usize| u64::from_le_bytes(said[at..at + 8].try_into().expect("a word"));
        let half = |at: usize| u32::from_le_bytes(said[at..at + 4].try_into().expect("a half"));
        if said[..8] != MAGIC && said.starts_with(OURS) {
            let why = "another version of foveate meets here; run the same binary on all ranks";
            let _ = Answer::Refused(why.to_owned()).write(stream);
        }
        (said[..8] == MAGIC).then(|| Self {
            run: word(8),
            attempt: word(16),
            rank: half(24),
            ranks: half(28),
            port: u16::from_le_bytes([said[32], said[33]]),
        })
    }
}

/// What a rank is answered.
#[derive(Debug)]
enum Answer {
    /// It belongs: which meeting this is, and where the ranks listen from rank 1 on, one a line.
    Welcome(String),
    /// It does not, and why.
    Refused(String),
    /// It belongs, and others did not come.
    Missing(String),
    /// Who answers ends; the next at this address may be the right one.
    Later,
}

/// Before an answer: whoever still waits for it sends a byte back.
const ASKED: u8 = 4;

impl Answer {
    fn write(&self, stream: &mut TcpStream) -> io::Result<()> {
        let (kind, text) = match self {
            Self::Welcome(text) => (0, text.as_str()),
            Self::Refused(text) => (1, text.as_str()),
            Self::Later => (2, ""),
            Self::Missing(text) => (3, text.as_str()),
        };
        let mut out = vec![kind];
        out.extend((text.len() as u32).to_le_bytes());
        out.extend(text.as_bytes());
        stream.write_all(&out)
    }

    fn read(stream: &mut TcpStream) -> io::Result<Self> {
        let mut kind = [ASKED];
        loop {
            stream.read_exact(&mut kind)?;
            if kind != [ASKED] {
                break;
            }
            stream.write_all(&kind)?;
        }
        let mut len = [0; 4];
        stream.read_exact(&mut len)?;
        let len = u32::from_le_bytes(len);
        let mut text = String::new();
        if stream.take(u64::from(len)).read_to_string(&mut text)? < len as usize {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        Ok(match kind[0] {
            0 => Self::Welcome(text),
            1 => Self::Refused(text),
            3 => Self::Missing(text),
            _ => Self::Later,
        })
    }
}

/// Drops those who wait for an answer and are no longer there: their process has ended, or they are silent.
fn drop_gone(streams: &mut [Option<TcpStream>], silence: Duration) {
    let until = Instant::now() + silence;
    for stream in streams.iter_mut() {
        stream.take_if(|stream| stream.write_all(&[ASKED]).is_err());
    }
    for stream in streams {
        stream.take_if(|stream| {
            let left = until.saturating_duration_since(Instant::now()).max(PAUSE);
            let heard = stream.set_read_timeout(Some(left));
            heard.and_then(|()| stream.read_exact(&mut [0])).is_err()
        });
    }
}

/// Meets the other ranks, and is the rank of the group of all.
///
/// # Errors
/// When `meeting` names no rank or more than 65,536, the address cannot be used, a rank does not come in time
/// (those that are missing are named), or this rank is turned away.
pub fn connect(meeting: &Meeting) -> Result<Rank, ShardError> {
    let Meeting { rank, ranks, .. } = *meeting;
    if ranks > MOST_RANKS {
        return refused(format!("{ranks} ranks; give at most {MOST_RANKS}"));
    }
    if rank >= ranks {
        return refused(format!("rank {rank} of {ranks}; ranks are counted from 0"));
    }
    let meet = Meet { meeting, until: Instant::now() + meeting.arrival };
    let (streams, meeting_id) = match rank {
        _ if ranks == 1 => (vec![None], identity()),
        0 => meet.as_first()?,
        _ => meet.as_other()?,
    };
    let failed = |e| ShardError::new(format!("rank {rank} cannot set its connections up: {e}"));
    let tcp = Tcp::new(rank, streams, [meeting.deadline, meeting.silence]).map_err(failed)?;
    Ok(Rank::of_all(Arc::new(tcp), [rank, ranks], meeting_id))
}

/// A number that no other meeting of this run has. The clock alone does not make it: one that was set back,
/// or stands before 1970, says the same twice, and in containers so do the numbers of processes.
pub(super) fn identity() -> u64 {
    identity_at(SystemTime::now())
}

fn identity_at(now: SystemTime) -> u64 {
    RandomState::new().hash_one((now, std::process::id()))
}

struct Meet<'a> {
    meeting: &'a Meeting,
    until: Instant,
}

/// The connection to each rank; none to this one.
type Streams = Vec<Option<TcpStream>>;

impl Meet<'_> {
    fn hello(&self, port: u16) -> Hello {
        let Meeting { run, attempt, rank, ranks, .. } = *self.meeting;
        Hello { run, attempt, rank: rank as u32, ranks: ranks as u32, port }
    }

    fn place(&self) -> String {
        format!("{}:{}", self.meeting.host, self.meeting.port)
    }

    /// Rank 0: waits for all others, then tells them where they are.
    fn as_first(&self) -> Result<(Streams, u64), ShardError> {
        let listener = self.listen()?;
        let ranks = self.meeting.ranks;
        let mut streams: Streams = (0..ranks).map(|_| None).collect();
        let mut places = vec![String::from("-"); ranks];
        let all_came = |streams: &Streams| streams.iter().skip(1).all(Option::is_some);
        loop {
            if all_came(&streams) {
                drop_gone(&mut streams, self.meeting.silence);
                if all_came(&streams) {
                    break;
                }
            }
            let Some((mut stream, from)) = self.accept(&listener)? else {
                let missing: Vec<_> = (1..ranks).filter(|&r| streams[r].is_none()).collect();
                let why = format!(
                    "of {ranks} ranks {missing:?} did not come to {} in {:?}; start them, or give \
                     another number of ranks",
                    self.place(),
                    self.meeting.arrival
                );
                for stream in streams.iter_mut().flatten() {
                    let _ = Answer::Missing(why.clone()).write(stream);
                }
                return Err(ShardError::lost(why));
            };
            let Some(hello) = Hello::read(&mut stream) else { continue };
            let peer = hello.rank as usize;
            if let Some(why) = self.stranger(&hello) {
                let _ = Answer::Refused(why).write(&mut stream);
                continue;
            }
            if hello.attempt > self.meeting.attempt {
                let (theirs, ours) = (hello.attempt, self.meeting.attempt);
                let why = format!("attempt {theirs} of this run has begun, and this is {ours}");
                let _ = Answer::Later.write(&mut stream);
                return self.send_home(streams.iter_mut().flatten(), why);
            }
            if hello.ranks as usize != ranks || peer >= ranks {
                let (theirs, from) = (hello.ranks, from.ip());
                let why = format!(
                    "rank {peer} at {from} counts {theirs} ranks, and rank 0 {ranks}; give all \
                     the same number"
                );
                let all = streams.iter_mut().flatten().chain([&mut stream]);
                return self.send_home(all, why);
            }
            drop_gone(&mut streams[peer..=peer], self.meeting.silence);
            if peer == 0 || streams[peer].is_some() {
                let why = format!("there is a rank {peer} already; start each rank once");
                let _ = Answer::Refused(why).write(&mut stream);
                continue;
            }
            places[peer] = SocketAddr::new(from.ip(), hello.port).to_string();
            streams[peer] = Some(stream);
        }
        let meeting = identity();
        places[0] = format!("{meeting:x}");
        let table = Answer::Welcome(places.join("\n"));
        for (peer, stream) in streams.iter_mut().enumerate() {
            if let Some(stream) = stream {
                let gone = |e| ShardError::lost(format!("rank {peer} is gone: {e}"));
                table.write(stream).map_err(gone)?;
            }
        }
        Ok((streams, meeting))
    }

    /// Any other rank: meets rank 0, then those below it, then those above.
    fn as_other(&self) -> Result<(Streams, u64), ShardError> {
        let Meeting { rank, ranks, .. } = *self.meeting;
        let failed = |e| ShardError::new(format!("rank {rank} cannot listen: {e}"));
        let (first, listener, port, places) = loop {
            let mut first = self.reach(&self.place(), 0)?;
            let own = first.local_addr().map_err(failed)?.ip();
            let listener = TcpListener::bind((own, 0)).map_err(failed)?;
            let port = listener.local_addr().map_err(failed)?.port();
            match self.greet(&mut first, port, 0)? {
                Answer::Welcome(places) => break (first, listener, port, places),
                Answer::Refused(why) => return refused(why),
                Answer::Missing(why) => return Err(ShardError::lost(why)),
                Answer::Later => std::thread::sleep(PAUSE),
            }
        };
        let places: Vec<&str> = places.lines().collect();
        let meeting = places.first().and_then(|id| u64::from_str_radix(id, 16).ok());
        let Some(meeting) = meeting.filter(|_| places.len() == ranks) else {
            return refused("rank 0 did not say where the ranks are; run the same binary on all");
        };
        let mut streams: Streams = (0..ranks).map(|_| None).collect();
        streams[0] = Some(first);
        for peer in 1..rank {
            let mut stream = self.reach(places[peer], peer)?;
            match self.greet(&mut stream, port, peer)? {
                Answer::Welcome(_) => streams[peer] = Some(stream),
                Answer::Refused(why) => return refused(why),
                Answer::Missing(why) => return Err(ShardError::lost(why)),
                Answer::Later => return refused(format!("rank {peer} ends")),
            }
        }
        listener.set_nonblocking(true).map_err(failed)?;
        while let Some(peer) = (rank + 1..ranks).find(|&peer| streams[peer].is_none()) {
            let Some((mut stream, _)) = self.accept(&listener)? else {
                let waited = self.meeting.arrival;
                let late = format!("rank {peer} did not reach rank {rank} in {waited:?}");
                return Err(ShardError::lost(late));
            };
            let Some(hello) = Hello::read(&mut stream) else { continue };
            let peer = hello.rank as usize;
            let fits = peer > rank && peer < ranks && streams[peer].is_none();
            let why = self.stranger(&hello).or((!fits).then(|| format!("this is rank {rank}")));
            match why {
                Some(why) => drop(Answer::Refused(why).write(&mut stream)),
                None if Answer::Welcome(String::new()).write(&mut stream).is_ok() => {
                    streams[peer] = Some(stream);
                }
                None => {}
            }
        }
        Ok((streams, meeting))
    }

    /// Why who says `hello` does not belong here, if it does not.
    fn stranger(&self, hello: &Hello) -> Option<String> {
        let Meeting { run, attempt, .. } = *self.meeting;
        let place = self.place();
        if hello.run != run {
            return Some(format!("another run meets at {place}; give each run a port of its own"));
        }
        (hello.attempt < attempt).then(|| {
            let old = hello.attempt;
            format!("attempt {attempt} of this run meets at {place}, and this is attempt {old}")
        })
    }

    /// Tells those who came why nothing comes of it.
    fn send_home<'s, T>(
        &self,
        streams: impl Iterator<Item = &'s mut TcpStream>,
        why: String,
    ) -> Result<T, ShardError> {
        for stream in streams {
            let _ = Answer::Refused(why.clone()).write(stream);
        }
        refused(why)
    }

    /// Listens at the meeting's address where it is this host's, else at all of this host's.
    fn listen(&self) -> Result<TcpListener, ShardError> {
        let Meeting { host, port, .. } = self.meeting;
        let failed = |e: io::Error| {
            let place = self.place();
            ShardError::new(match e.kind() {
                io::ErrorKind::AddrInUse => format!(
                    "rank 0 cannot listen at {place}, where another program does; choose another \
                     port"
                ),
                _ => format!("rank 0 cannot listen at {place}: {e}"),
            })
        };
        let listener = match TcpListener::bind((host.as_str(), *port)) {
            Err(e) if e.kind() == io::ErrorKind::AddrNotAvailable => {
                TcpListener::bind((IpAddr::V4(Ipv4Addr::UNSPECIFIED), *port))
            }
            bound => bound,
        };
        let listener = listener.map_err(failed)?;
        listener.set_nonblocking(true).map_err(failed)?;
        Ok(listener)
    }

    /// The next who connects; none when the deadline has passed.
    fn accept(
        &self,
        listener: &TcpListener,
    ) -> Result<Option<(TcpStream, SocketAddr)>, ShardError> {
        loop {
            match listener.accept() {
                Ok((stream, from)) if stream.set_nonblocking(false).is_ok() => {
                    return Ok(Some((stream, from)));
                }
                Ok(_) => {}
                Err(e) if e.kind() == io::ErrorKind::WouldBlock => {
                    if Instant::now() >= self.until {
                        return Ok(None);
                    }
                    std::thread::sleep(PAUSE);
                }
                // Who connected is gone already.
                Err(e) if e.kind() == io::ErrorKind::ConnectionAborted => {}
                Err(e) => {
                    let rank = self.meeting.rank;
                    return refused(format!("rank {rank} cannot be reached by others: {e}"));
                }
            }
        }
    }

    /// A connection to rank `peer`, tried until the deadline: it may start later than this rank.
    fn reach(&self, place: &str, peer: usize) -> Result<TcpStream, ShardError> {
        let Meeting { rank, arrival, .. } = *self.meeting;
        loop {
            let left = self.until.saturating_duration_since(Instant::now());
            let tried = place.to_socket_addrs().and_then(|places| {
                let mut last = io::Error::other("the name has no address");
                for place in places {
                    match TcpStream::connect_timeout(&place, left.max(PAUSE)) {
                        Ok(stream) => return Ok(stream),
                        Err(e) => last = e,
                    }
                }
                Err(last)
            });
            match tried {
                Ok(stream) => return Ok(stream),
                Err(e) if Instant::now() >= self.until => {
                    return Err(ShardError::lost(format!(
                        "rank {rank} could not reach rank {peer} at {place} in {arrival:?}: {e}; start \
                         rank {peer} there, or give all ranks its address"
                    )));
                }
                Err(_) => std::thread::sleep(PAUSE),
            }
        }
    }

    /// Says who this rank is, and waits for the answer.
    fn greet(&self, stream: &mut TcpStream, port: u16, peer: usize) -> Result<Answer, ShardError> {
        let rank = self.meeting.rank;
        let left = self.until.saturating_duration_since(Instant::now()).max(PAUSE);
        let said = stream
            .set_read_timeout(Some(left + GREETING))
            .and_then(|()| stream.write_all(&self.hello(port).encode()))
            .and_then(|()| Answer::read(stream));
        said.map_err(|e| {
            let (place, waited) = (self.place(), self.meeting.arrival);
            let why = match e.kind() {
                io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut => {
                    format!("no answer came in {waited:?}")
                }
                _ => format!("the connection ended ({e})"),
            };
            ShardError::lost(format!(
                "rank {peer} did not let rank {rank} in at {place}: {why}; start each rank once, and give \
                 each run a port of its own, at which no other program listens"
            ))
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_meeting_is_no_other_one_where_a_clock_stands_still() {
        let now = SystemTime::UNIX_EPOCH - Duration::from_secs(1);
        assert_ne!(identity_at(now), identity_at(now));
    }
}
