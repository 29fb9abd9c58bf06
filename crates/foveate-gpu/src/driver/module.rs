//! Loaded kernels.

use std::collections::HashMap;
use std::ffi::{CString, c_void};
use std::ptr;
use std::sync::{Arc, Mutex};

use super::device::Device;
use super::stream::Stream;
use super::sys::{Handle, INVALID_VALUE};
use crate::error::GpuError;
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
    /// Loads a cubin.
    ///
    /// # Errors
    /// When it was made for another architecture, or is not a cubin.
    pub fn load(device: &Device, cubin: &[u8]) -> Result<Self, GpuError> {
        let driver = device.current()?;
        if !cubin.starts_with(b"\x7fELF") {
            return Err(GpuError::argument("the kernel's machine code is damaged: no ELF file"));
        }
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

    /// The kernel `name`, allowed `shared_bytes` of dynamic shared memory a block.
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
        let name = name.to_owned();
        Ok(Function { module: self.clone(), handle, name, shared_bytes, parameters })
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

/// A kernel.
#[derive(Clone, Debug)]
pub struct Function {
    module: Module,
    handle: Handle,
    name: String,
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

    /// Queues a launch with its parameters' bytes.
    ///
    /// # Errors
    /// When a parameter has not the size that the kernel declares, the grid is outside the
    /// device's limits, or earlier work on the device failed.
    ///
    /// # Safety
    /// What the kernel reads and writes through addresses among the parameters is device memory
    /// that stays allocated until it has run. Host memory that is pinned has device addresses, too.
    pub unsafe fn launch(
        &self,
        stream: &Stream,
        grid: [u32; 3],
        threads: u32,
        parameters: &[&[u8]],
    ) -> Result<(), GpuError> {
        if !parameters.iter().map(|p| p.len()).eq(self.parameters.iter().copied()) {
            let given: Vec<usize> = parameters.iter().map(|p| p.len()).collect();
            return Err(GpuError::argument(format!(
                "kernel {} takes parameters of {:?} bytes, not {given:?}",
                self.name, self.parameters
            )));
        }
        if grid.contains(&0) {
            return Ok(());
        }
        let driver = self.module.0.device.current()?;
        let mut pointers: Vec<*mut c_void> =
            parameters.iter().map(|p| p.as_ptr().cast_mut().cast()).collect();
        // SAFETY: each pointer has as many readable bytes as the kernel declares, checked above;
        // the driver copies them before it returns.
        let code = unsafe {
            (driver.launch)(
                self.handle,
                grid[0],
                grid[1],
                grid[2],
                threads,
                1,
                1,
                self.shared_bytes,
                stream.handle(),
                pointers.as_mut_ptr(),
                ptr::null_mut(),
            )
        };
        driver.check(code, || {
            format!(
                "launching {} on a grid of {grid:?}, {threads} threads, {} B of shared memory",
                self.name, self.shared_bytes
            )
        })
    }
}
