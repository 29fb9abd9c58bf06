//! Devices and what they offer.

use std::collections::HashMap;
use std::ffi::{CStr, CString, c_int};
use std::ops::Deref;
use std::ptr;
use std::sync::{Arc, Mutex};

use super::free_list::SharedFreeList;
use super::held::{Held, HeldBytes};
use super::sys::{ACCESS_ENABLED, Driver, Handle};
use crate::arch::Arch;
use crate::error::{GpuError, GpuErrorKind};

/// A GPU with its primary context. Cheap to clone.
#[derive(Clone, Debug)]
pub struct Device(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    ordinal: i32,
    context: Handle,
    info: DeviceInfo,
    free: SharedFreeList,
    held: Held,
    copies_for_graphs: Mutex<HashMap<Box<[u8]>, usize>>,
}

// SAFETY: a context is a handle that the driver lets every thread use.
unsafe impl Send for Inner {}
// SAFETY: as above; nothing in it changes.
unsafe impl Sync for Inner {}

/// What the driver says about a device.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct DeviceInfo {
    /// Its name, `NVIDIA H200`.
    pub name: String,
    /// Compute capability, `(9, 0)`.
    pub capability: (u32, u32),
    /// Number of SMs.
    pub sms: u32,
    /// Bytes of shared memory a CTA can ask for.
    pub shared_bytes_per_block: u32,
    /// Bytes of shared memory of an SM.
    pub shared_bytes_per_sm: u32,
    /// Bytes of shared memory that the system takes of each CTA.
    pub shared_bytes_reserved: u32,
    /// Registers of an SM.
    pub registers_per_sm: u32,
    /// Bytes of L2.
    pub l2_bytes: u32,
    /// Bytes of memory.
    pub memory_bytes: usize,
    /// The driver's CUDA version, `(13, 0)`.
    pub driver: (u32, u32),
}

impl Device {
    /// Number of devices.
    ///
    /// # Errors
    /// When there is no driver, or it does not start.
    pub fn count() -> Result<usize, GpuError> {
        let driver = Driver::get()?;
        let mut count = 0;
        // SAFETY: `count` is valid for a write.
        let code = unsafe { (driver.device_count)(&mut count) };
        driver.check(code, || "counting devices".into())?;
        Ok(usize::try_from(count).unwrap_or(0))
    }

    /// Device `ordinal`, with its primary context.
    ///
    /// # Errors
    /// When there is no driver or no such device.
    pub fn open(ordinal: usize) -> Result<Self, GpuError> {
        let driver = Driver::get()?;
        let count = Self::count()?;
        if ordinal >= count {
            return Err(GpuError::argument(format!(
                "there is no GPU {ordinal}; the driver has {count}, counted from 0"
            )));
        }
        let doing = || format!("opening GPU {ordinal}");
        let mut device = 0;
        // SAFETY: `device` is valid for a write.
        let code = unsafe { (driver.device_get)(&mut device, ordinal as c_int) };
        driver.check(code, doing)?;
        let info = DeviceInfo::of(driver, device)?;
        let mut context = ptr::null_mut();
        // SAFETY: `context` is valid for a write; `Drop` releases what is retained.
        let code = unsafe { (driver.context_retain)(&mut context, device) };
        driver.check(code, doing)?;
        Ok(Self(Arc::new(Inner {
            ordinal: device,
            context,
            info,
            free: SharedFreeList::default(),
            held: Held::default(),
            copies_for_graphs: Mutex::default(),
        })))
    }

    /// Its index.
    pub fn ordinal(&self) -> usize {
        self.0.ordinal as usize
    }

    /// Where it is plugged in, `0000:1b:00.0`: the name by which other libraries know it.
    pub(crate) fn bus(&self) -> Result<CString, GpuError> {
        let driver = Driver::get()?;
        let mut bus = [0; 32];
        // SAFETY: there is room for the length given, and the driver ends the text with a NUL.
        let code = unsafe { (driver.device_bus)(bus.as_mut_ptr(), 32, self.0.ordinal) };
        driver.check(code, || "asking for the bus of a GPU".into())?;
        // SAFETY: as above.
        Ok(unsafe { CStr::from_ptr(bus.as_ptr()) }.to_owned())
    }

    /// What it offers.
    pub fn info(&self) -> &DeviceInfo {
        &self.0.info
    }

    /// Whether the driver encodes tensor maps, and whether it launches with attributes: what not
    /// every driver has that runs here.
    pub(crate) fn optional_functions(&self) -> [bool; 2] {
        Driver::get().map_or([false; 2], |driver| {
            [driver.tensor_map_tiled.is_some(), driver.launch_with_attributes.is_some()]
        })
    }

    /// The free list that its queues share.
    pub(super) fn free_list(&self) -> &SharedFreeList {
        &self.0.free
    }

    /// What the pools of this process hold of its memory.
    pub fn held(&self) -> HeldBytes {
        self.0.held.bytes()
    }

    /// Counts [`HeldBytes::peak`] from here on.
    pub fn forget_peak(&self) {
        self.0.held.forget_peak();
    }

    pub(super) fn count_held(&self) -> &Held {
        &self.0.held
    }

    /// Free and total bytes of its memory.
    ///
    /// # Errors
    /// Those of the driver.
    pub fn memory(&self) -> Result<(usize, usize), GpuError> {
        let driver = self.current()?;
        let (mut free, mut total) = (0, 0);
        // SAFETY: both are valid for a write, and the context is current.
        let code = unsafe { (driver.memory_info)(&mut free, &mut total) };
        driver.check(code, || "asking for free memory".into())?;
        Ok((free, total))
    }

    /// Lets work of this device read and write memory of `other`, so that copies between them go straight
    /// from one to the other, where the machine can do so; whether it can.
    ///
    /// # Errors
    /// Those of the driver.
    pub fn reach(&self, other: &Self) -> Result<bool, GpuError> {
        if self == other {
            return Ok(true);
        }
        let driver = self.current()?;
        let doing = || format!("letting GPU {} reach GPU {}", self.0.ordinal, other.0.ordinal);
        let mut can = 0;
        // SAFETY: `can` is valid for a write.
        let code = unsafe { (driver.can_access)(&mut can, self.0.ordinal, other.0.ordinal) };
        driver.check(code, doing)?;
        if can == 0 {
            return Ok(false);
        }
        // SAFETY: this device's context is current, and the other's is retained as long as `other` lives.
        match unsafe { (driver.enable_access)(other.0.context, 0) } {
            ACCESS_ENABLED => Ok(true),
            code => driver.check(code, doing).map(|()| true),
        }
    }

    /// The context, for copies between devices.
    pub(super) fn context(&self) -> Handle {
        self.0.context
    }

    /// Waits for everything that is queued on the device, without a limit: what may hang is waited for
    /// by its stream or event first. Tools that watch the device tell here what they found: racecheck
    /// tells nothing of kernels whose host asks events only.
    ///
    /// # Errors
    /// The failure of queued work.
    pub fn synchronize(&self) -> Result<(), GpuError> {
        let driver = self.current()?;
        // SAFETY: the context is current.
        let code = unsafe { (driver.context_synchronize)() };
        driver.check(code, || format!("waiting for GPU {}", self.0.ordinal))
    }

    /// The driver, with this device's context current on this thread as long as the guard lives.
    pub(crate) fn current(&self) -> Result<Current, GpuError> {
        self.0.current()
    }

    /// Addresses of pinned copies of what recorded graphs copy to the device, by contents; they stay as long
    /// as the process, since a graph may copy from there whenever it runs.
    pub(super) fn copies_for_graphs(&self) -> &Mutex<HashMap<Box<[u8]>, usize>> {
        &self.0.copies_for_graphs
    }

    /// The same around calls that may change the thread's context themselves, as NCCL's do.
    pub(crate) fn current_around(&self) -> Result<Current, GpuError> {
        let found = found(Driver::get()?)?;
        let mut current = self.current()?;
        current.restore = Some(found);
        Ok(current)
    }
}

/// The driver with a device's context current on this thread. Dropped, it makes the context current
/// that it found, without a call of the driver where that was the device's own.
pub(crate) struct Current {
    driver: &'static Driver,
    /// The context to make current again. A pointer keeps the guard on its thread.
    restore: Option<Handle>,
}

impl Deref for Current {
    type Target = Driver;

    fn deref(&self) -> &Driver {
        self.driver
    }
}

impl Drop for Current {
    fn drop(&mut self) {
        if let Some(context) = self.restore {
            // SAFETY: it was current before, or is null, which makes none current. If its owner has
            // destroyed it meanwhile, the driver says so, and there is nobody to tell.
            unsafe { (self.driver.context_set)(context) };
        }
    }
}

/// While it lives, this thread may load kernels and take pinned memory though a graph is recorded: the
/// driver refuses both otherwise, lest they wait for work that is not running. Neither is part of the
/// graph.
pub(super) struct Relaxed {
    driver: &'static Driver,
    /// The mode to go back to.
    before: c_int,
}

impl Relaxed {
    pub fn new(driver: &Current) -> Result<Self, GpuError> {
        const RELAXED: c_int = 2;
        let mut made = Self { driver: driver.driver, before: RELAXED };
        made.exchange()?;
        Ok(made)
    }

    fn exchange(&mut self) -> Result<(), GpuError> {
        // A driver without the function is older than every one that records.
        let Some(exchange) = self.driver.exchange_capture_mode else { return Ok(()) };
        // SAFETY: the mode is valid for a read and a write.
        let code = unsafe { exchange(&mut self.before) };
        self.driver.check(code, || "changing how graphs are recorded".into())
    }
}

impl Drop for Relaxed {
    fn drop(&mut self) {
        // A mode that the driver itself gave; there is nobody to tell of a failure.
        let _ = self.exchange();
    }
}

/// This thread's current context; null when there is none.
fn found(driver: &Driver) -> Result<Handle, GpuError> {
    let mut found = ptr::null_mut();
    // SAFETY: `found` is valid for a write.
    let code = unsafe { (driver.context_get)(&mut found) };
    driver.check(code, || "asking for the current context".into())?;
    Ok(found)
}

impl Inner {
    fn current(&self) -> Result<Current, GpuError> {
        let driver = Driver::get()?;
        let found = found(driver)?;
        if found == self.context {
            return Ok(Current { driver, restore: None });
        }
        // SAFETY: the context is retained as long as `self` lives.
        let code = unsafe { (driver.context_set)(self.context) };
        driver.check(code, || format!("making GPU {} current", self.ordinal))?;
        Ok(Current { driver, restore: Some(found) })
    }
}

impl PartialEq for Device {
    fn eq(&self, other: &Self) -> bool {
        self.0.ordinal == other.0.ordinal
    }
}

impl Eq for Device {}

impl Drop for Inner {
    fn drop(&mut self) {
        if let Ok(driver) = Driver::get() {
            if let Ok(current) = self.current() {
                // A failure while the process ends is of no account.
                let _ = self.free.free_all(&current, &self.held);
            }
            // SAFETY: retained once in `open`. A failure while the process ends is of no account.
            unsafe { (driver.context_release)(self.ordinal) };
        }
    }
}

impl DeviceInfo {
    fn of(driver: &Driver, device: c_int) -> Result<Self, GpuError> {
        let doing = || "asking what a GPU offers".to_owned();
        let mut name = [0; 256];
        // SAFETY: there is room for the length given, and the driver ends the name with a NUL.
        let code = unsafe { (driver.device_name)(name.as_mut_ptr(), 256, device) };
        driver.check(code, doing)?;
        // SAFETY: as above.
        let name = unsafe { CStr::from_ptr(name.as_ptr()) }.to_string_lossy().into_owned();
        let mut memory_bytes = 0;
        // SAFETY: valid for a write.
        let code = unsafe { (driver.device_memory)(&mut memory_bytes, device) };
        driver.check(code, doing)?;
        let mut version = 0;
        // SAFETY: valid for a write.
        let code = unsafe { (driver.version)(&mut version) };
        driver.check(code, doing)?;
        let attribute = |which: c_int| {
            let mut value = 0;
            // SAFETY: valid for a write.
            let code = unsafe { (driver.device_attribute)(&mut value, which, device) };
            driver.check(code, doing)?;
            Ok::<u32, GpuError>(u32::try_from(value).unwrap_or(0))
        };
        // Numbers of CUdevice_attribute in cuda.h.
        Ok(Self {
            name,
            capability: (attribute(75)?, attribute(76)?),
            sms: attribute(16)?,
            shared_bytes_per_block: attribute(97)?,
            shared_bytes_per_sm: attribute(81)?,
            shared_bytes_reserved: attribute(111)?,
            registers_per_sm: attribute(82)?,
            l2_bytes: attribute(38)?,
            memory_bytes,
            driver: ((version / 1000) as u32, (version % 1000 / 10) as u32),
        })
    }

    /// The architecture of its capability, `sm_90`. [`Arch::specific`] has the instructions of that
    /// capability alone.
    pub fn arch(&self) -> Arch {
        Arch::new(self.capability)
    }

    /// Whether the device runs machine code for `arch`.
    ///
    /// # Errors
    /// [`GpuErrorKind::Architecture`] with both.
    pub(crate) fn check_arch(&self, arch: Arch) -> Result<(), GpuError> {
        let (device, capability) = (self.name.clone(), self.capability);
        match arch.runs_on(capability) {
            true => Ok(()),
            false => Err(GpuErrorKind::Architecture { arch, device, capability }.into()),
        }
    }
}

#[cfg(test)]
impl DeviceInfo {
    /// A card that need not be there.
    pub(crate) fn for_tests(name: &str, capability: (u32, u32), sms: u32) -> Self {
        Self {
            name: name.into(),
            capability,
            sms,
            shared_bytes_per_block: 101_376,
            shared_bytes_per_sm: 102_400,
            shared_bytes_reserved: 1024,
            registers_per_sm: 65_536,
            l2_bytes: 96 << 20,
            memory_bytes: 48 << 30,
            driver: (13, 0),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_device_that_does_not_run_an_architecture_is_named_with_the_one_it_runs() {
        let said = |name: &str, capability, arch: Arch| {
            let info = DeviceInfo::for_tests(name, capability, 142);
            info.check_arch(arch).map_err(|e| e.to_string())
        };
        let hopper = Arch::new((9, 0));
        assert_eq!(said("NVIDIA H200", (9, 0), hopper.specific()), Ok(()));
        assert_eq!(
            said("NVIDIA L40S", (8, 9), hopper.specific()).unwrap_err(),
            "a kernel for sm_90a runs on compute capability 9.0 alone, but NVIDIA L40S has 8.9; \
             compile it for sm_89"
        );
        let plain = said("NVIDIA B200", (10, 0), hopper).unwrap_err();
        assert!(plain.starts_with("a kernel for sm_90 runs on compute capability 9.0 to 9.9, but"));
    }
}
