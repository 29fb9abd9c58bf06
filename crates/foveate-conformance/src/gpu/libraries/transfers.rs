//! What goes between ranks, against the same done on the host. Numbers are such that their sums
//! are exact in every type, so results have to have the very bits.

use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use foveate_gpu::driver::{Allocation, Device, default_timeout};
use foveate_gpu::nccl::{
    Communicator, FlatArray, RankTransfer, Reduce, Transfer, UniqueId, together,
};
use foveate_gpu::{ElementType, Engine, GpuError, GpuErrorKind, Queue};
use foveate_tensor::Float;
use foveate_tensor::random::Random;
use half::{bf16, f16};

use crate::gpu::checks::{Checks, Outcome, expect_refusal};

/// Most ranks whose sums are exact in bf16.
const MOST_RANKS: usize = 4;

/// Lengths of a rank's part, and one that is tried with bf16 only; none divides anything.
const LENGTHS: [usize; 2] = [1, 1003];
const LONG: usize = 300_001;

/// How long a rank waits for one that does not come; several times what joining takes.
const SHORT: Duration = Duration::from_secs(5);

const ELEMENTS: [ElementType; 5] =
    [ElementType::F32, ElementType::F16, ElementType::BF16, ElementType::I32, ElementType::U8];

/// Every check of transfers: one rank, and a rank on each of several GPUs where there are some.
pub fn run(engine: &Arc<Engine>, checks: &mut Checks) {
    let one = [engine.clone()];
    checks.say("transfers of 1 rank", in_threads(&one));
    let count = Device::count().unwrap_or(1).min(MOST_RANKS);
    match (0..count).map(Engine::get).collect::<Result<Vec<_>, _>>() {
        Ok(engines) if count > 1 => {
            checks.say(&format!("transfers of {count} ranks, a thread each"), in_threads(&engines));
            checks.say(&format!("transfers of {count} ranks of one thread"), in_one(&engines));
            checks.say("a rank that takes no part is found by time", lost(&engines));
        }
        Ok(_) => checks.skip("transfers of 2 ranks", "there is one GPU"),
        Err(e) => checks.skip("transfers of 2 ranks", e),
    }
    checks.say("a rank that never comes is found by time", absent(engine));
    checks.say("transfers that do not fit are named", wrong(engine));
}

#[derive(Clone, Copy, Debug)]
enum Kind {
    /// How, and whether in place.
    AllReduce(Reduce, bool),
    AllGather(bool),
    ReduceScatter(Reduce, bool),
    /// From the last rank.
    Broadcast,
    /// Every rank sends to the next and receives from the one before.
    Ring,
}

impl Kind {
    /// All that `element` is tried with: means of integers are cut off, which is not checked.
    fn all(element: ElementType) -> impl Iterator<Item = Self> {
        let floats = !matches!(element, ElementType::I32 | ElementType::U8);
        let reduce = [Reduce::Sum, Reduce::Max, Reduce::Mean];
        let reduce = reduce.into_iter().filter(move |&how| floats || how != Reduce::Mean);
        let both = reduce.flat_map(|how| [(how, false), (how, true)]);
        let reduced = both.flat_map(|(how, in_place)| {
            [Self::AllReduce(how, in_place), Self::ReduceScatter(how, in_place)]
        });
        let others = [Self::AllGather(false), Self::AllGather(true), Self::Broadcast, Self::Ring];
        reduced.chain(others)
    }
}

/// What a rank gives: eighths, which every type of floats holds, or small integers.
fn numbers(element: ElementType, rank: usize, len: usize) -> Vec<f64> {
    let mut random = Random::new(77 + rank as u64);
    let mut next = || match element {
        ElementType::Bool | ElementType::U8 | ElementType::I8 | ElementType::I16 => {
            random.below(60) as f64
        }
        ElementType::I32 | ElementType::I64 => random.below(2_000_000) as f64 - 1e6,
        _ => (random.below(64) as f64 - 32.0) / 8.0,
    };
    (0..len).map(|_| next()).collect()
}

fn reduced(element: ElementType, how: Reduce, ranks: usize, len: usize) -> Vec<f64> {
    let mut result = numbers(element, 0, len);
    for rank in 1..ranks {
        for (into, x) in result.iter_mut().zip(numbers(element, rank, len)) {
            *into = if how == Reduce::Max { into.max(x) } else { *into + x };
        }
    }
    let over = if how == Reduce::Mean { ranks as f64 } else { 1.0 };
    result.iter().map(|x| x / over).collect()
}

fn encoded(element: ElementType, values: &[f64]) -> Vec<u8> {
    let each = values.iter();
    match element {
        ElementType::Bool | ElementType::U8 | ElementType::I8 => each.map(|&x| x as u8).collect(),
        ElementType::I16 => each.flat_map(|&x| (x as i16).to_le_bytes()).collect(),
        ElementType::I64 => each.flat_map(|&x| (x as i64).to_le_bytes()).collect(),
        ElementType::I32 => each.flat_map(|&x| (x as i32).to_le_bytes()).collect(),
        ElementType::F16 => {
            each.flat_map(|&x| <f16 as Float>::from_f64(x).to_bits().to_le_bytes()).collect()
        }
        ElementType::BF16 => {
            each.flat_map(|&x| <bf16 as Float>::from_f64(x).to_bits().to_le_bytes()).collect()
        }
        ElementType::F32 => each.flat_map(|&x| (x as f32).to_le_bytes()).collect(),
        ElementType::F64 => each.flat_map(|&x| x.to_le_bytes()).collect(),
    }
}

/// A rank's part in a transfer, ready to run.
struct Part {
    what: String,
    transfers: Vec<Transfer>,
    allocations: Vec<Allocation>,
    /// Where the result is in the last allocation, in bytes, and what it has to be.
    start: usize,
    expected: Vec<u8>,
}

impl Part {
    fn new(
        kind: Kind,
        element: ElementType,
        len: usize,
        [rank, ranks]: [usize; 2],
        queue: &Queue,
    ) -> Result<Self, GpuError> {
        let own = |len: usize| encoded(element, &numbers(element, rank, len));
        let width = element.bytes();
        let (part, start) = (len * width, rank * len * width);
        let array = |allocation: &Allocation, start: usize, len: usize| FlatArray {
            address: allocation.address() + start as u64,
            element,
            len,
        };
        let filled = |bytes: usize| -> Result<Allocation, GpuError> {
            let allocation = queue.pool().take(bytes)?;
            allocation.fill(0xFF)?;
            Ok(allocation)
        };
        let mut allocations = Vec::new();
        let (transfers, start, expected) = match kind {
            Kind::AllReduce(reduce, in_place) => {
                allocations.push(queue.pool().upload(&own(len))?);
                if !in_place {
                    allocations.push(filled(part)?);
                }
                let (from, into) = (
                    array(&allocations[0], 0, len),
                    array(&allocations[allocations.len() - 1], 0, len),
                );
                let expected = reduced(element, reduce, ranks, len);
                (vec![Transfer::AllReduce { from, into, reduce }], 0, expected)
            }
            Kind::AllGather(in_place) => {
                let into = filled(part * ranks)?;
                let from = if in_place {
                    into.write_at(start, &own(len))?;
                    array(&into, start, len)
                } else {
                    allocations.push(queue.pool().upload(&own(len))?);
                    array(&allocations[0], 0, len)
                };
                allocations.push(into);
                let into = array(&allocations[allocations.len() - 1], 0, len * ranks);
                let expected = (0..ranks).flat_map(|r| numbers(element, r, len)).collect();
                (vec![Transfer::AllGather { from, into }], 0, expected)
            }
            Kind::ReduceScatter(reduce, in_place) => {
                allocations.push(queue.pool().upload(&own(len * ranks))?);
                let from = array(&allocations[0], 0, len * ranks);
                if !in_place {
                    allocations.push(filled(part)?);
                }
                let start = if in_place { start } else { 0 };
                let into = array(&allocations[allocations.len() - 1], start, len);
                let all = reduced(element, reduce, ranks, len * ranks);
                let expected = all[rank * len..][..len].to_vec();
                (vec![Transfer::ReduceScatter { from, into, reduce }], start, expected)
            }
            Kind::Broadcast => {
                let root = ranks - 1;
                allocations.push(filled(part)?);
                if rank == root {
                    allocations[0].write(&own(len))?;
                }
                let array = array(&allocations[0], 0, len);
                (vec![Transfer::Broadcast { array, root }], 0, numbers(element, root, len))
            }
            Kind::Ring => {
                let (next, before) = ((rank + 1) % ranks, (rank + ranks - 1) % ranks);
                allocations.extend([queue.pool().upload(&own(len))?, filled(part)?]);
                let (from, into) = (array(&allocations[0], 0, len), array(&allocations[1], 0, len));
                let both = vec![
                    Transfer::Send { from, to: next },
                    Transfer::Receive { into, from: before },
                ];
                (both, 0, numbers(element, before, len))
            }
        };
        let what = format!("{kind:?} of {len} {element:?} on rank {rank} of {ranks}");
        Ok(Self { what, transfers, allocations, start, expected: encoded(element, &expected) })
    }

    fn calls<'a>(
        &'a self,
        on: &'a Communicator,
        queue: &'a Queue,
    ) -> impl Iterator<Item = RankTransfer<'a>> {
        self.transfers.iter().map(move |&transfer| RankTransfer { on, queue, transfer })
    }

    fn check(&self) -> Outcome {
        let mut found = vec![0; self.expected.len()];
        let last = self.allocations.last().expect("every part has one");
        last.read_at(self.start, &mut found, default_timeout())?;
        Ok(match found == self.expected {
            true => Ok(()),
            false => Err(format!("{}: wrong numbers", self.what)),
        })
    }
}

/// Every transfer with every type.
fn every() -> impl Iterator<Item = (Kind, ElementType, usize)> {
    let lengths = |element| LENGTHS.into_iter().map(move |len| (element, len));
    let all = ELEMENTS.into_iter().flat_map(lengths).chain([(ElementType::BF16, LONG)]);
    all.flat_map(|(element, len)| Kind::all(element).map(move |kind| (kind, element, len)))
}

/// A thread for each rank.
fn in_threads(engines: &[Arc<Engine>]) -> Outcome {
    let (id, ranks) = (UniqueId::new()?, engines.len());
    // As another process gets it.
    let id = UniqueId::from_bytes(*id.bytes());
    let rank = |rank: usize, engine: &Arc<Engine>| -> Outcome {
        let limit = default_timeout();
        let among = Communicator::new(engine, &id, rank, ranks, limit)?;
        let queue = engine.queue();
        for (kind, element, len) in every() {
            let part = Part::new(kind, element, len, [rank, ranks], queue)?;
            together(&part.calls(&among, queue).collect::<Vec<_>>())?;
            among.wait(queue)?;
            if let Err(wrong) = part.check()? {
                return Ok(Err(wrong));
            }
        }
        Ok(Ok(()))
    };
    let outcomes = thread::scope(|scope| {
        let run = |(r, engine)| scope.spawn(move || rank(r, engine));
        let threads: Vec<_> = engines.iter().enumerate().map(run).collect();
        let joined = threads.into_iter().map(|t| t.join());
        joined.map(|done| done.unwrap_or(Ok(Err("a rank panicked".into())))).collect::<Vec<_>>()
    });
    outcomes.into_iter().find(|o| !matches!(o, Ok(Ok(())))).unwrap_or(Ok(Ok(())))
}

/// All ranks of one thread.
fn in_one(engines: &[Arc<Engine>]) -> Outcome {
    let among = Communicator::of_process(engines, default_timeout())?;
    for (kind, element, len) in every() {
        let each = engines.iter().enumerate();
        let parts = each.map(|(rank, engine)| {
            Part::new(kind, element, len, [rank, engines.len()], engine.queue())
        });
        let parts = parts.collect::<Result<Vec<_>, _>>()?;
        let all = parts.iter().zip(&among).zip(engines);
        let calls: Vec<_> =
            all.flat_map(|((part, on), engine)| part.calls(on, engine.queue())).collect();
        together(&calls)?;
        for ((part, on), engine) in parts.iter().zip(&among).zip(engines) {
            on.wait(engine.queue())?;
            if let Err(wrong) = part.check()? {
                return Ok(Err(wrong));
            }
        }
    }
    Ok(Ok(()))
}

/// Checks that the loss of a rank is reported in time.
fn in_time(began: Instant, said: Result<(), GpuError>) -> Result<(), String> {
    let expected = format!("did not finish within {} s", SHORT.as_secs());
    match said {
        Err(e) if !matches!(e.kind(), GpuErrorKind::Communication { .. }) => Err(e.to_string()),
        Err(e) if !e.to_string().contains(&expected) => Err(e.to_string()),
        Err(_) if began.elapsed() > SHORT * 4 => Err(format!("it took {:?}", began.elapsed())),
        Err(_) => Ok(()),
        Ok(()) => Err("no error".into()),
    }
}

/// One rank of two.
fn absent(engine: &Arc<Engine>) -> Outcome {
    let began = Instant::now();
    let joined = Communicator::new(engine, &UniqueId::new()?, 0, 2, SHORT);
    Ok(in_time(began, joined.map(drop)))
}

/// Rank 0 reduces, the others do nothing.
fn lost(engines: &[Arc<Engine>]) -> Outcome {
    let among = Communicator::of_process(engines, SHORT)?;
    let queue = engines[0].queue();
    let kind = Kind::AllReduce(Reduce::Sum, true);
    let part = Part::new(kind, ElementType::F32, 1003, [0, engines.len()], queue)?;
    let began = Instant::now();
    let said = among[0].run(queue, part.transfers[0]).and_then(|()| among[0].wait(queue));
    if let Err(wrong) = in_time(began, said) {
        return Ok(Err(wrong));
    }
    among[1..].iter().for_each(Communicator::abort);
    // Its memory is of the other GPU, which is said first.
    let own = Part::new(kind, ElementType::F32, 1003, [1, engines.len()], engines[1].queue())?;
    for (part, expected) in [(&part, "is on GPU 0"), (&own, "was aborted")] {
        let refused = among[1].run(engines[1].queue(), part.transfers[0]);
        if let Err(wrong) = expect_refusal(refused, expected) {
            return Ok(Err(wrong));
        }
    }
    // The device is free again.
    queue.stream().wait(SHORT, "what the lost rank has left")?;
    Ok(Ok(()))
}

fn wrong(engine: &Arc<Engine>) -> Outcome {
    let id = UniqueId::new()?;
    let among = Communicator::new(engine, &id, 0, 1, default_timeout())?;
    let queue = engine.queue();
    let allocation = queue.pool().take(4000)?;
    allocation.fill(0xFF)?;
    let host = [0u8; 400];
    let at = |address: u64, len: usize| FlatArray { address, element: ElementType::F32, len };
    let (good, reduce) = (at(allocation.address(), 100), Reduce::Sum);
    let all_reduce = |from, into| Transfer::AllReduce { from, into, reduce };
    let asked = [
        (all_reduce(good, at(allocation.address() + 400, 99)), "100 f32 go with 100 f32"),
        (all_reduce(good, FlatArray { element: ElementType::I32, ..good }), "not with 100 i32"),
        (all_reduce(good, at(allocation.address() + 396, 100)), "into overlaps from"),
        (all_reduce(at(allocation.address() + 2, 100), good), "into overlaps from"),
        (all_reduce(at(allocation.address() + 402, 100), good), "no multiple of the 4 bytes"),
        (all_reduce(at(host.as_ptr() as u64, 100), good), "from is at"),
        (Transfer::AllGather { from: good, into: at(allocation.address() + 400, 200) }, "200 f32"),
        (Transfer::Broadcast { array: good, root: 1 }, "the root is rank 1; there are 1"),
        (Transfer::Send { from: good, to: 3 }, "the receiver is rank 3"),
        (
            Transfer::Receive { into: at(allocation.address() + (1 << 46), 1), from: 0 },
            "into is at",
        ),
    ];
    for (transfer, expected) in asked {
        // A good one goes first, and is not queued.
        let first = RankTransfer { on: &among, queue, transfer: all_reduce(good, good) };
        let refused = together(&[first, RankTransfer { transfer, ..first }]);
        if let Err(wrong) = expect_refusal(refused, expected) {
            return Ok(Err(wrong));
        }
    }
    among.wait(queue)?;
    let mut bytes = [0; 4000];
    allocation.read(&mut bytes, default_timeout())?;
    let untouched = bytes.iter().all(|&byte| byte == 0xFF);
    Ok(if untouched { Ok(()) } else { Err("a refused transfer wrote something".into()) })
}
