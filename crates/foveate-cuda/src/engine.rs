//! One GPU as plans use it: context, a stream of our own, loaded kernels.
//!
//! There is one engine for each device in a process, so that plans share what they compiled and
//! the memory they give back.

use std::collections::{HashMap, HashSet};
use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};

use crate::abi::Address;
use crate::blas::Blas;
use crate::cache::Cache;
use crate::driver::{Device, Function, Module, Pool, Stream};
use crate::error::CudaError;
use crate::nvrtc::{Compiled, Compiler, check_driver};
use crate::profile::Profile;
use crate::tuner::Records;

/// A device and the kernels that are loaded on it.
pub struct Engine {
    device: Device,
    queue: Queue,
    arch: String,
    profile: Profile,
    /// What the tuner has found on this GPU, read when it is first asked for; `None` without NVRTC.
    records: OnceLock<Option<Records>>,
    /// Matrix products, once there was one.
    blas: OnceLock<Result<Blas, CudaError>>,
    loaded: Mutex<HashMap<usize, (Arc<Compiled>, Module)>>,
    /// Foreign memory that the driver has been asked about.
    known: Mutex<HashSet<(Address, usize)>>,
    /// Pairs of tensors that interleave without sharing an element.
    apart: Mutex<HashSet<u64>>,
}

/// A stream and memory for its work. Cheap to clone.
///
/// Memory that was used on a queue is given out again on the same queue only, so nothing has to
/// wait for work to end before it drops its memory. A queue is gone when the last clone of it, of
/// its pool, and the last block from there are dropped: the driver frees its memory, and waits for
/// the device; what plans keep for the queue, and what they keep it from freeing, other queues get
/// once the work is done ([`Pool::release`] hands it back).
#[derive(Clone, Debug)]
pub struct Queue {
    id: u64,
    pool: Pool,
}

/// What is left of a queue when it is gone, and until then.
#[derive(Clone, Debug)]
pub(crate) struct Remains(Queue);

impl Remains {
    /// That of [`Queue::id`].
    pub fn id(&self) -> u64 {
        self.0.id
    }

    /// Whether nobody holds the queue and its work is done.
    pub fn is_over(&self) -> bool {
        self.0.pool.is_over()
    }

    /// Leaves memory that nothing is kept in to other queues.
    pub fn leave(&self) {
        self.0.pool.leave();
    }
}

impl Queue {
    fn new(stream: Stream) -> Self {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        let id = NEXT.fetch_add(1, Ordering::Relaxed);
        Self { id, pool: Pool::new(Arc::new(stream)) }
    }

    /// Differs from that of every other queue.
    pub(crate) fn id(&self) -> u64 {
        self.id
    }

    /// What is left of it when it is gone.
    pub(crate) fn remains(&self) -> Remains {
        Remains(Self { id: self.id, pool: self.pool.kept() })
    }

    /// Memory for its work.
    pub fn pool(&self) -> &Pool {
        &self.pool
    }

    /// Where its work is queued.
    pub fn stream(&self) -> &Stream {
        self.pool.stream()
    }
}

impl Engine {
    /// The engine of GPU `ordinal`.
    ///
    /// # Errors
    /// When there is no driver, no such device, or it does not start.
    pub fn get(ordinal: usize) -> Result<Arc<Self>, CudaError> {
        static ENGINES: Mutex<Vec<(usize, Arc<Engine>)>> = Mutex::new(Vec::new());
        let mut engines = lock(&ENGINES);
        if let Some((_, engine)) = engines.iter().find(|(o, _)| *o == ordinal) {
            return Ok(engine.clone());
        }
        let device = Device::open(ordinal)?;
        let engine = Arc::new(Self {
            arch: device.info().arch(),
            profile: Profile::of(device.info()),
            queue: Queue::new(Stream::new(&device)?),
            device,
            records: OnceLock::new(),
            blas: OnceLock::new(),
            loaded: Mutex::default(),
            known: Mutex::default(),
            apart: Mutex::default(),
        });
        engines.push((ordinal, engine.clone()));
        Ok(engine)
    }

    /// The device.
    pub fn device(&self) -> &Device {
        &self.device
    }

    /// What the planner knows of the device.
    pub fn profile(&self) -> &Profile {
        &self.profile
    }

    /// What the tuner has found on this GPU; `None` where NVRTC is missing, and nothing could run.
    pub fn records(&self) -> Option<&Records> {
        self.records.get_or_init(|| Records::of(self.device.info()).ok()).as_ref()
    }

    /// cuBLASLt on this device.
    ///
    /// # Errors
    /// When it is missing or does not go with the driver.
    pub(crate) fn blas(&self) -> Result<&Blas, CudaError> {
        self.blas.get_or_init(|| Blas::new(self)).as_ref().map_err(Clone::clone)
    }

    /// The engine's own queue.
    pub fn queue(&self) -> &Queue {
        &self.queue
    }

    /// A queue with a stream of its own, which runs beside [`Self::queue`].
    ///
    /// # Errors
    /// Those of the driver.
    pub fn new_queue(&self) -> Result<Queue, CudaError> {
        Ok(Queue::new(Stream::new(&self.device)?))
    }

    /// A queue on a stream that somebody else made on this device (PyTorch, candle, cudarc); 0 is
    /// the default stream. Keep it from call to call: the memory of its work stays with it.
    ///
    /// # Safety
    /// `stream` is 0 or a `CUstream` of the device's primary context that outlives the queue, pools
    /// and blocks of its memory, and everything that was queued on it.
    pub unsafe fn queue_on(&self, stream: usize) -> Queue {
        // SAFETY: the caller's promise is the same.
        Queue::new(unsafe { Stream::borrowed(&self.device, stream) })
    }

    /// The kernel `entry` of `source`, compiled or found compiled, and loaded.
    ///
    /// # Errors
    /// When NVRTC is missing or refuses the source, or the device lacks what the kernel takes.
    pub(crate) fn function(
        &self,
        source: &str,
        entry: &str,
        shared_bytes: u32,
    ) -> Result<Function, CudaError> {
        self.load(&self.compiled(source)?, entry, shared_bytes)
    }

    /// `source` for this device, compiled or found compiled.
    ///
    /// # Errors
    /// When NVRTC is missing, too new for the driver, or refuses the source.
    pub(crate) fn compiled(&self, source: &str) -> Result<Arc<Compiled>, CudaError> {
        let compiler = Compiler::get()?;
        check_driver(compiler.version(), self.device.info().driver)?;
        Cache::get().compile(compiler, source, &self.arch)
    }

    /// The kernel `entry` of what was compiled.
    ///
    /// # Errors
    /// When the device lacks what the kernel takes.
    pub(crate) fn load(
        &self,
        compiled: &Arc<Compiled>,
        entry: &str,
        shared_bytes: u32,
    ) -> Result<Function, CudaError> {
        let mut loaded = lock(&self.loaded);
        let module = match loaded.get(&(Arc::as_ptr(compiled) as usize)) {
            Some((_, module)) => module.clone(),
            None => {
                let module = Module::load(&self.device, &compiled.cubin)?;
                let key = Arc::as_ptr(compiled) as usize;
                // The compiled kernel is kept so that no other takes its address.
                loaded.insert(key, (compiled.clone(), module.clone()));
                module
            }
        };
        module.function(entry, shared_bytes)
    }

    /// Whether work of this device can be queued on `queue`.
    ///
    /// # Errors
    /// When it is one of another device.
    pub(crate) fn check_queue(&self, queue: &Queue) -> Result<(), CudaError> {
        let [given, here] = [queue.stream().device(), &self.device].map(Device::ordinal);
        if given == here {
            return Ok(());
        }
        Err(CudaError::argument(format!(
            "the queue is of GPU {given}, but the work is for GPU {here}; take one of its engine's"
        )))
    }

    /// What [`crate::tensors`] has found about tensors that interleave.
    pub(crate) fn known_apart(&self) -> &Mutex<HashSet<u64>> {
        &self.apart
    }

    /// Whether `bytes` from `address` on are memory of this device; `name` is what they are to
    /// hold. The driver is asked once for each range.
    ///
    /// # Errors
    /// When they are not.
    pub(crate) fn check_memory(
        &self,
        name: &str,
        address: Address,
        bytes: usize,
    ) -> Result<(), CudaError> {
        const MOST_KNOWN: usize = 1 << 14;
        if lock(&self.known).contains(&(address, bytes)) {
            return Ok(());
        }
        self.device.check_address(name, address, bytes)?;
        let mut known = lock(&self.known);
        if known.len() >= MOST_KNOWN {
            known.clear();
        }
        known.insert((address, bytes));
        Ok(())
    }
}

impl fmt::Debug for Engine {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Engine of GPU {}", self.device.ordinal())
    }
}

/// A lock that outlives a panic elsewhere: what it guards is valid between any two statements.
pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
