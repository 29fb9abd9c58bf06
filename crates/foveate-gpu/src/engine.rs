//! One GPU of this process: context, a stream of its own, loaded kernels.
//!
//! There is one engine for each device in a process, so that plans share what they compiled and
//! their free memory.

use std::any::{Any, TypeId};
use std::collections::{HashMap, HashSet};
use std::fmt;
use std::sync::{Arc, Mutex};

use crate::abi::Address;
use crate::arch::Arch;
use crate::cache::Cache;
use crate::driver::{Device, Function, Module, Stream};
use crate::error::GpuError;
use crate::nvrtc::{Compiled, Compiler, check_driver};
use crate::profile::Profile;
use crate::queue::Queue;
use crate::sync::lock;

/// A device and the kernels that are loaded on it.
pub struct Engine {
    device: Device,
    queue: Queue,
    profile: Profile,
    /// What other modules and crates keep for the device, by type.
    kept: Mutex<HashMap<TypeId, Arc<dyn Any + Send + Sync>>>,
    loaded: Mutex<HashMap<usize, (Arc<Compiled>, Module)>>,
    /// Foreign memory that the driver has been asked about.
    checked: Mutex<HashSet<(Address, usize)>>,
    /// Pairs of tensors that interleave without sharing an element.
    apart: Mutex<HashSet<u64>>,
}

impl Engine {
    /// The engine of GPU `ordinal`.
    ///
    /// # Errors
    /// When there is no driver, no such device, or it does not start.
    pub fn get(ordinal: usize) -> Result<Arc<Self>, GpuError> {
        static ENGINES: Mutex<Vec<(usize, Arc<Engine>)>> = Mutex::new(Vec::new());
        let mut engines = lock(&ENGINES);
        if let Some((_, engine)) = engines.iter().find(|(o, _)| *o == ordinal) {
            return Ok(engine.clone());
        }
        let device = Device::open(ordinal)?;
        let engine = Arc::new(Self {
            profile: Profile::of_device(&device),
            queue: Queue::new(Stream::new(&device)?),
            device,
            kept: Mutex::default(),
            loaded: Mutex::default(),
            checked: Mutex::default(),
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

    /// The one value of type `T` that is kept for this device as long as the process lives, made
    /// when it is first asked for: a library's handle, what a tuner has recorded. `make` must not
    /// ask for a kept value itself.
    pub fn keep<T: Any + Send + Sync>(&self, make: impl FnOnce() -> T) -> Arc<T> {
        let mut kept = lock(&self.kept);
        let value = kept.entry(TypeId::of::<T>()).or_insert_with(|| Arc::new(make()));
        value.clone().downcast().expect("it is kept under its type")
    }

    /// The engine's own queue.
    pub fn queue(&self) -> &Queue {
        &self.queue
    }

    /// A queue with a stream of its own, which runs beside [`Self::queue`].
    ///
    /// # Errors
    /// Those of the driver.
    pub fn new_queue(&self) -> Result<Queue, GpuError> {
        Ok(Queue::new(Stream::new(&self.device)?))
    }

    /// A queue on a stream that somebody else made on this device (PyTorch, candle, cudarc); 0 is
    /// the default stream. Keep it from call to call: the memory of its work stays with it.
    ///
    /// # Safety
    /// `stream` is 0 or a `CUstream` of the device's primary context that outlives the queue, pools
    /// and allocations of its memory, and everything that was queued on it.
    pub unsafe fn queue_on(&self, stream: usize) -> Queue {
        // SAFETY: the caller's promise is the same.
        Queue::new(unsafe { Stream::borrowed(&self.device, stream) })
    }

    /// `source` compiled for `arch`, or found compiled: what [`Self::load`] takes.
    ///
    /// # Errors
    /// [`GpuErrorKind::Architecture`](crate::GpuErrorKind::Architecture) when the device does not
    /// run it; when NVRTC is missing, too new for the driver, does not know the architecture, or
    /// refuses the source.
    pub fn compiled(&self, source: &str, arch: Arch) -> Result<Arc<Compiled>, GpuError> {
        let info = self.device.info();
        info.check_arch(arch)?;
        let compiler = Compiler::get()?;
        check_driver(compiler.version(), info.driver)?;
        Cache::get().compile(compiler, source, arch)
    }

    /// The kernel `entry` of what was compiled, allowed `shared_bytes` of dynamic shared memory a
    /// CTA. A file is loaded once for all of its kernels.
    ///
    /// # Errors
    /// When the device does not run what was compiled, there is no such kernel, or the device lacks
    /// the shared memory.
    pub fn load(
        &self,
        compiled: &Arc<Compiled>,
        entry: &str,
        shared_bytes: u32,
    ) -> Result<Function, GpuError> {
        let mut loaded = lock(&self.loaded);
        let key = Arc::as_ptr(compiled) as usize;
        let module = match loaded.get(&key) {
            Some((_, module)) => module.clone(),
            None => {
                let module = Module::load(&self.device, compiled.arch, &compiled.cubin)?;
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
    pub fn check_queue(&self, queue: &Queue) -> Result<(), GpuError> {
        let [given, here] = [queue.stream().device(), &self.device].map(Device::ordinal);
        if given == here {
            return Ok(());
        }
        Err(GpuError::argument(format!(
            "the queue is of GPU {given}, but the work is for GPU {here}; take one of its engine's"
        )))
    }

    /// What [`Accesses::check_apart`](crate::access::Accesses::check_apart) has found about tensors that
    /// interleave.
    pub fn checked_apart(&self) -> &Mutex<HashSet<u64>> {
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
    ) -> Result<(), GpuError> {
        const MAX_CHECKED: usize = 1 << 14;
        if lock(&self.checked).contains(&(address, bytes)) {
            return Ok(());
        }
        self.device.check_address(name, address, bytes)?;
        let mut checked = lock(&self.checked);
        if checked.len() >= MAX_CHECKED {
            checked.clear();
        }
        checked.insert((address, bytes));
        Ok(())
    }
}

impl fmt::Debug for Engine {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Engine of GPU {}", self.device.ordinal())
    }
}
