//! Loaded kernels.

use std::collections::HashMap;
use std::ffi::{CString, c_void};
use std::ptr;
use std::sync::{Arc, Mutex};

use super::device::{Device, Relaxed};
use super::operations::{self, Operation};
use super::stream::Stream;
use super::sys::{Handle, INVALID_VALUE, LaunchAttribute, LaunchConfig};
use crate::arch::Arch;
use crate::error::{GpuError, GpuErrorKind, breaks_context};
use crate::library::Library;
use crate::sync::lock;

/// Machine code on a device.
#[derive(Clone, Debug)]
pub struct Module(Arc<Loaded>);

#[derive(Debug)]
struct Loaded {
    device: Device,
    handle: Handle,
    /// Dynamic shared memory that each kernel may have. Every [`Function`] of a kernel sets the one
    /// limit the driver has for it, which therefore only grows: it refuses launches beyond it.
    shared_limits: Mutex<HashMap<String, u32>>,
}

// SAFETY: the driver lets every thread use a module.
unsafe impl Send for Loaded {}
// SAFETY: as above; it does not change.
unsafe impl Sync for Loaded {}

impl Module {
    /// Loads a cubin that was compiled for `arch`.
    ///
    /// # Errors
    /// [`GpuErrorKind::Architecture`]; when it is no cubin; those of the driver.
    pub fn load(device: &Device, arch: Arch, cubin: &[u8]) -> Result<Self, GpuError> {
        device.info().check_arch(arch)?;
        let driver = device.current()?;
        if !cubin.starts_with(b"\x7fELF") {
            return Err(GpuError::argument("the kernel's machine code is damaged: no ELF file"));
        }
        let _relaxed = Relaxed::new(&driver)?;
        let mut handle = ptr::null_mut();
        // SAFETY: an ELF file carries its own length; the driver copies it.
        let code = unsafe { (driver.module_load)(&mut handle, cubin.as_ptr().cast()) };
        driver.check(code, || format!("loading a kernel on {}", device.info().name))?;
        Ok(Self(Arc::new(Loaded {
            device: device.clone(),
            handle,
            shared_limits: Mutex::default(),
        })))
    }

    /// The kernel `name`, allowed `shared_bytes` of dynamic shared memory a CTA.
    ///
    /// # Errors
    /// When there is no such kernel, or the device has less shared memory.
    pub fn function(&self, name: &str, shared_bytes: u32) -> Result<Function, GpuError> {
        let driver = self.0.device.current()?;
        let symbol = CString::new(name)
            .map_err(|_| GpuError::argument(format!("{name:?} is no name of a kernel")))?;
        let mut handle = ptr::null_mut();
        // SAFETY: the module is alive, the name NUL-terminated.
        let code = unsafe { (driver.module_function)(&mut handle, self.0.handle, symbol.as_ptr()) };
        driver.check(code, || format!("finding kernel {name}"))?;
        self.allow(handle, name, shared_bytes)?;
        let mut parameters = Vec::new();
        loop {
            let (mut offset, mut size) = (0, 0);
            let i = parameters.len();
            // SAFETY: both are valid for a write.
            let code = unsafe { (driver.function_parameter)(handle, i, &mut offset, &mut size) };
            if code == INVALID_VALUE {
                break;
            }
            driver.check(code, || format!("asking for the parameters of kernel {name}"))?;
            parameters.push(size);
        }
        let (name, label) = (name.to_owned(), name.into());
        Ok(Function { module: self.clone(), handle, name, label, shared_bytes, parameters })
    }

    /// Allows kernel `name`, which is `function`, at least `shared_bytes` of dynamic shared memory.
    fn allow(&self, function: Handle, name: &str, shared_bytes: u32) -> Result<(), GpuError> {
        const MAX_DYNAMIC_SHARED: i32 = 8;
        let driver = self.0.device.current()?;
        let mut limits = lock(&self.0.shared_limits);
        let limit = limits.entry(name.to_owned()).or_default();
        if shared_bytes > *limit {
            let bytes = i32::try_from(shared_bytes).unwrap_or(i32::MAX);
            // SAFETY: the function is alive.
            let code = unsafe { (driver.function_set)(function, MAX_DYNAMIC_SHARED, bytes) };
            let giving = || format!("giving kernel {name} {shared_bytes} B of shared memory");
            driver.check(code, giving)?;
            *limit = shared_bytes;
        }
        Ok(())
    }
}

impl Drop for Loaded {
    fn drop(&mut self) {
        if let Ok(driver) = self.device.current() {
            // SAFETY: loaded in `load`; functions keep the module alive.
            unsafe { (driver.module_unload)(self.handle) };
        }
    }
}

/// How a kernel is launched.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Launch {
    /// CTAs along each axis; none at all where one is 0.
    pub grid: [u32; 3],
    /// Threads of a CTA.
    pub threads: u32,
    /// CTAs of a cluster along each axis, at most 8 in all; a grid is whole clusters. `[1; 3]` is
    /// no cluster.
    pub cluster: [u32; 3],
    /// Programmatic dependent launch: the kernel may start while the one before it on the stream
    /// runs. It must execute `griddepcontrol.wait` before it reads what that one writes, or writes
    /// what that one reads.
    pub programmatic: bool,
}

/// CTAs of a cluster that every device with clusters holds.
const MOST_IN_CLUSTER: u32 = 8;

impl Launch {
    /// A launch without attributes.
    pub const fn new(grid: [u32; 3], threads: u32) -> Self {
        Self { grid, threads, cluster: [1; 3], programmatic: false }
    }

    /// The same in clusters of `dims` CTAs.
    pub const fn cluster(self, dims: [u32; 3]) -> Self {
        Self { cluster: dims, ..self }
    }

    /// The same as a programmatic dependent launch ([`Self::programmatic`]).
    pub const fn programmatic(self) -> Self {
        Self { programmatic: true, ..self }
    }

    fn attributes(&self) -> Vec<LaunchAttribute> {
        let cluster = (self.cluster != [1; 3]).then(|| LaunchAttribute::cluster(self.cluster));
        let serial = self.programmatic.then(LaunchAttribute::programmatic_serialization);
        cluster.into_iter().chain(serial).collect()
    }

    /// Whether `device` runs launches with these attributes.
    fn check(&self, kernel: &str, device: &Device) -> Result<(), GpuError> {
        let Self { grid, cluster, .. } = self;
        let wrong = |reason: String| {
            Err(GpuError::argument(format!(
                "launching {kernel} in clusters of {cluster:?}: {reason}"
            )))
        };
        let ctas = cluster.iter().try_fold(1u32, |n, &len| n.checked_mul(len));
        match ctas {
            Some(1..=MOST_IN_CLUSTER) => {}
            _ => return wrong(format!("a cluster has 1 to {MOST_IN_CLUSTER} CTAs")),
        }
        if grid.iter().zip(cluster).any(|(grid, cluster)| grid % cluster != 0) {
            return wrong(format!("the grid {grid:?} is no multiple of them"));
        }
        let info = device.info();
        if (*cluster != [1; 3] || self.programmatic) && info.capability < (9, 0) {
            let (major, minor) = info.capability;
            return Err(GpuError::argument(format!(
                "launching {kernel}: clusters and programmatic launches need compute capability \
                 9.0, {} has {major}.{minor}",
                info.name
            )));
        }
        Ok(())
    }
}

/// A kernel.
#[derive(Clone, Debug)]
pub struct Function {
    module: Module,
    handle: Handle,
    name: String,
    /// What errors call it.
    label: Arc<str>,
    shared_bytes: u32,
    /// Size of each parameter in bytes.
    parameters: Vec<usize>,
}

// SAFETY: the driver lets every thread use a function.
unsafe impl Send for Function {}
// SAFETY: as above; it does not change.
unsafe impl Sync for Function {}

impl Function {
    /// Its name.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The same, called `label` where a device fails or hangs: the name, and which variant of the kernel it is.
    pub fn labelled(self, label: impl Into<Arc<str>>) -> Self {
        Self { label: label.into(), ..self }
    }

    /// Queues a launch with its parameters' bytes.
    ///
    /// # Errors
    /// When the stream is of another device, a parameter has not the size that the kernel declares, the
    /// grid or the attributes are outside the device's limits, the driver is too old for an attribute
    /// ([`GpuErrorKind::Symbol`]), or earlier work on the device failed.
    ///
    /// # Safety
    /// What the kernel reads and writes through addresses among the parameters is device memory
    /// that stays allocated until it has run. Host memory that is pinned has device addresses, too.
    pub unsafe fn launch(
        &self,
        stream: &Stream,
        launch: &Launch,
        parameters: &[&[u8]],
    ) -> Result<(), GpuError> {
        if !parameters.iter().map(|p| p.len()).eq(self.parameters.iter().copied()) {
            let given: Vec<usize> = parameters.iter().map(|p| p.len()).collect();
            return Err(GpuError::argument(format!(
                "kernel {} takes parameters of {:?} bytes, not {given:?}",
                self.name, self.parameters
            )));
        }
        let device = &self.module.0.device;
        if stream.device() != device {
            return Err(GpuError::argument(format!(
                "kernel {} is loaded on GPU {}, but the queue is of GPU {}",
                self.name,
                device.ordinal(),
                stream.device().ordinal()
            )));
        }
        launch.check(&self.name, device)?;
        if launch.grid.contains(&0) {
            return Ok(());
        }
        operations::note(|| {
            let own = [self.handle as u64, self.shared_bytes.into()];
            let own = own.map(u64::to_ne_bytes).concat();
            let parameters = parameters.iter().map(|p| p.to_vec());
            Operation {
                name: self.name.clone(),
                launch: format!("{launch:?}"),
                parameters: parameters.chain([own]).collect(),
            }
        });
        let driver = device.current()?;
        let ([x, y, z], attributes) = (launch.grid, launch.attributes());
        let mut pointers: Vec<*mut c_void> =
            parameters.iter().map(|p| p.as_ptr().cast_mut().cast()).collect();
        let launches = stream.launches();
        let (stream, pointers, more) = (stream.handle(), pointers.as_mut_ptr(), ptr::null_mut());
        let (threads, shared_bytes) = (launch.threads, self.shared_bytes);
        let code = if attributes.is_empty() {
            // SAFETY: each pointer has as many readable bytes as the kernel declares, checked
            // above; the driver copies them before it returns.
            unsafe {
                (driver.launch)(
                    self.handle,
                    x,
                    y,
                    z,
                    threads,
                    1,
                    1,
                    shared_bytes,
                    stream,
                    pointers,
                    more,
                )
            }
        } else {
            let symbol = "cuLaunchKernelEx";
            let launch = driver
                .launch_with_attributes
                .ok_or(GpuErrorKind::Symbol { library: Library::Driver.name(), symbol })?;
            let config = LaunchConfig {
                grid: [x, y, z],
                block: [threads, 1, 1],
                shared_bytes,
                stream,
                attributes: attributes.as_ptr(),
                attribute_count: attributes.len() as u32,
            };
            // SAFETY: as above; the configuration and its attributes outlive the call.
            unsafe { launch(&config, self.handle, pointers, more) }
        };
        driver.check(code, || {
            let Launch { grid, cluster, programmatic, .. } = launch;
            let mut said = format!("launching {} on a grid of {grid:?}", self.name);
            if !attributes.is_empty() {
                said += &format!(", clusters of {cluster:?}");
                said += if *programmatic { ", programmatic" } else { "" };
            }
            said += &format!(", {threads} threads, {shared_bytes} B of shared memory");
            // Of what ran before: a launch does not fault itself.
            let before = launches.unfinished(launches.queued());
            if breaks_context(code) && !before.is_empty() {
                said += &format!(", after {before}");
            }
            said
        })?;
        launches.note(&self.label);
        Ok(())
    }
}
