//! Ranks that are threads of a test.

use std::collections::{HashMap, VecDeque};
use std::num::NonZeroU16;
use std::ops::Range;
use std::sync::{Arc, Condvar, Mutex};
use std::time::Duration;

use foveate_nn::{
    Carrier, Holders, HostTransfers, NnError, NnErrorKind, Peers, Sharing, StepRanks,
    TensorSharing, TensorTransfers,
};
use foveate_tensor::DType;

/// How long a rank waits for another, which may have panicked.
const LATE: Duration = Duration::from_secs(100);

/// Where ranks meet: what each has brought to this meeting and to the one before.
#[derive(Debug, Default)]
struct Place {
    /// Whether a rank is lost, so that all that meet are told.
    lost: bool,
    /// Meetings that are over.
    over: usize,
    brought: [Vec<Option<Vec<u8>>>; 2],
}

/// A rank, or its place in a part of them.
#[derive(Clone, Debug)]
pub struct TestRank {
    place: Arc<(Mutex<Place>, Condvar)>,
    /// Parts of the ranks, by the first of each.
    groups: Arc<Mutex<HashMap<usize, Vec<TestRank>>>>,
    /// Those with the same key/value heads, of ranks of `tensor`.
    kv_holders: Range<usize>,
    rank: usize,
    ranks: usize,
    pub carrier: Carrier,
    pub reduce_dtype: DType,
}

impl TestRank {
    /// A rank of `tensor` that has the same key/value heads as `kv_holders`.
    pub fn with_kv_holders(&self, kv_holders: Range<usize>) -> Self {
        Self { kv_holders, ..self.clone() }
    }

    /// From here on this rank takes part in nothing, and the others know.
    #[allow(dead_code, reason = "the tests of blocks on a GPU lose no rank")]
    pub fn is_lost(&self) {
        self.place.0.lock().unwrap().lost = true;
    }

    /// All, which take steps together with parameters of their own; whether this one counts its tokens.
    pub fn step_ranks(&self, counts_tokens: bool) -> StepRanks {
        let peers = Box::new(self.clone());
        StepRanks { peers, counts_tokens, counts_parameters: true, cut: true }
    }

    /// The ranks `members` alone, of which this is one.
    fn among(&self, members: Range<usize>) -> Self {
        let mut groups = self.groups.lock().unwrap();
        let made = || Self::all(members.len(), self.carrier, self.reduce_dtype);
        let group = groups.entry(members.start).or_insert_with(made);
        group[self.rank - members.start].clone()
    }

    /// All of `ranks`.
    pub fn all(ranks: usize, carrier: Carrier, reduce_dtype: DType) -> Vec<Self> {
        let brought = [vec![None; ranks], vec![None; ranks]];
        let place = Arc::new((Mutex::new(Place { lost: false, over: 0, brought }), Condvar::new()));
        let groups = Arc::default();
        let rank = |rank| Self {
            place: Arc::clone(&place),
            groups: Arc::clone(&groups),
            kv_holders: 0..ranks,
            rank,
            ranks,
            carrier,
            reduce_dtype,
        };
        (0..ranks).map(rank).collect()
    }
}

impl Peers for TestRank {
    fn rank(&self) -> usize {
        self.rank
    }

    fn ranks(&self) -> usize {
        self.ranks
    }

    fn all_gather(&self, own: &[u8]) -> Result<Vec<Vec<u8>>, NnError> {
        let (place, moved) = &*self.place;
        let mut here = place.lock().unwrap();
        if here.lost {
            let message = "a rank of the test is lost".to_owned();
            return Err(NnErrorKind::Ranks { message, lost: true }.into());
        }
        let round = here.over;
        here.brought[round % 2][self.rank] = Some(own.to_vec());
        if here.brought[round % 2].iter().all(Option::is_some) {
            here.over += 1;
            // Of the next meeting; what this one has brought stays until that is over.
            here.brought[(round + 1) % 2].fill(None);
            moved.notify_all();
        }
        let waits = |here: &mut Place| here.over == round;
        let (here, waited) = moved.wait_timeout_while(here, LATE, waits).unwrap();
        if waited.timed_out() {
            let message = "a rank of the test did not come".to_owned();
            return Err(NnErrorKind::Ranks { message, lost: false }.into());
        }
        Ok(here.brought[round % 2].iter().flatten().cloned().collect())
    }

    fn is_aborted(&self) -> bool {
        self.place.0.lock().unwrap().lost
    }

    /// What NCCL for tests wants, too.
    fn blocks(&self) -> Option<NonZeroU16> {
        std::env::var("BLOCKS").ok()?.parse().ok()
    }
}

impl Sharing for TestRank {
    fn peers(&self) -> Result<Box<dyn Peers>, NnError> {
        Ok(Box::new(self.clone()))
    }

    fn reduce_dtype(&self) -> DType {
        self.reduce_dtype
    }

    fn replicas(&self) -> Result<Option<Box<dyn Peers>>, NnError> {
        Ok(None)
    }

    fn carrier(&self) -> Carrier {
        self.carrier
    }

    fn through_host(&self) -> Result<Box<dyn HostTransfers>, NnError> {
        let (gathered, sums) = Default::default();
        Ok(Box::new(Host { peers: self.clone(), gathered, sums }))
    }
}

impl TensorSharing for TestRank {
    fn holders(&self, among: Holders) -> Result<Box<dyn Peers>, NnError> {
        Ok(Box::new(match among {
            Holders::All => self.clone(),
            Holders::KvHeads => self.among(self.kv_holders.clone()),
        }))
    }

    fn carrier(&self) -> Carrier {
        self.carrier
    }

    fn through_host(&self) -> Result<Box<dyn TensorTransfers>, NnError> {
        let group = |peers: Self| Host { peers, gathered: VecDeque::new(), sums: VecDeque::new() };
        let kv_heads = group(self.among(self.kv_holders.clone()));
        Ok(Box::new(HostStream { all: group(self.clone()), kv_heads }))
    }
}

/// The stream, through the memory of the host.
struct HostStream {
    all: Host,
    kv_heads: Host,
}

impl TensorTransfers for HostStream {
    fn all_gather(&mut self, own: &[f32]) -> Result<Vec<Vec<f32>>, NnError> {
        self.all.all(own)
    }

    fn reduce_scatter(&mut self, partial: &[f32], lengths: &[usize]) -> Result<Vec<f32>, NnError> {
        let rank = self.all.peers.rank;
        let start = lengths[..rank].iter().sum();
        let mut sums = vec![0.0; lengths[rank]];
        for theirs in self.all.all(partial)? {
            sums.iter_mut().zip(&theirs[start..]).for_each(|(sum, x)| *sum += x);
        }
        Ok(sums)
    }

    fn sum_copies(&mut self, among: Holders, gradients: &mut [f32]) -> Result<(), NnError> {
        let group = match among {
            Holders::All => &self.all,
            Holders::KvHeads => &self.kv_heads,
        };
        let all = group.all(gradients)?;
        gradients.fill(0.0);
        for theirs in all {
            gradients.iter_mut().zip(theirs).for_each(|(sum, x)| *sum += x);
        }
        Ok(())
    }
}

/// Everything is done at once.
struct Host {
    peers: TestRank,
    gathered: VecDeque<Vec<Vec<f32>>>,
    sums: VecDeque<Vec<f32>>,
}

impl Host {
    fn all(&self, own: &[f32]) -> Result<Vec<Vec<f32>>, NnError> {
        let parts = self.peers.all_gather(bytemuck::cast_slice(own))?;
        let number = |&bytes: &[u8; 4]| f32::from_ne_bytes(bytes);
        Ok(parts.iter().map(|part| part.as_chunks().0.iter().map(number).collect()).collect())
    }
}

impl HostTransfers for Host {
    fn gather(&mut self, own: Vec<f32>) -> Result<(), NnError> {
        self.gathered.push_back(self.all(&own)?);
        Ok(())
    }

    fn gathered(&mut self) -> Result<Vec<Vec<f32>>, NnError> {
        Ok(self.gathered.pop_front().unwrap())
    }

    fn reduce(&mut self, gradients: Vec<f32>, parts: &[Range<usize>]) -> Result<(), NnError> {
        let own = parts[self.peers.rank].clone();
        let narrow = self.peers.reduce_dtype == DType::BF16;
        let mut sums = vec![0.0; own.len()];
        for theirs in self.all(&gradients)? {
            let rounded = |x: f32| if narrow { half::bf16::from_f32(x).to_f32() } else { x };
            sums.iter_mut().zip(&theirs[own.clone()]).for_each(|(sum, &x)| *sum += rounded(x));
        }
        self.sums.push_back(sums);
        Ok(())
    }

    fn reduced(&mut self) -> Result<Vec<f32>, NnError> {
        Ok(self.sums.pop_front().unwrap())
    }
}
