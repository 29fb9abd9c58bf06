//! Clocks and power of a GPU while it works, by NVML.
//!
//! A rate says little without the clock it was measured at: cards of one name differ, and one that
//! reaches its limit of power slows down. [`Watch`] asks every few milliseconds in a thread of its
//! own; nothing of the device's settings is changed.

use std::ffi::{CStr, c_char, c_int, c_uint};
use std::ptr;
use std::sync::OnceLock;
use std::sync::mpsc::{self, RecvTimeoutError, Sender};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use serde::Serialize;

use crate::driver::Device;
use crate::driver::sys::Handle;
use crate::error::{GpuError, GpuErrorKind};
use crate::library::Library;
use crate::loader::functions;

/// `nvmlReturn_t`.
type Code = c_int;

/// Time between two questions.
const PERIOD: Duration = Duration::from_millis(5);

/// `NVML_CLOCK_SM`.
const SM_CLOCK: c_uint = 1;
/// `NVML_FI_DEV_POWER_INSTANT`, in milliwatts. `nvmlDeviceGetPowerUsage` is a mean over a second.
const INSTANT_POWER: c_uint = 186;

/// What lowers clocks, by the bits of `nvmlClocksEventReasons`. Being idle and settings of clocks,
/// which are no failing of a measurement, are left out.
const LIMITS: [(u64, &str); 5] = [
    (0x04, "power"),
    (0x08, "hardware"),
    (0x20, "temperature"),
    (0x40, "temperature of the hardware"),
    (0x80, "power brake"),
];

/// `nvmlFieldValue_t`.
#[repr(C)]
pub(crate) struct FieldValue {
    field: c_uint,
    scope: c_uint,
    timestamp: i64,
    latency: i64,
    value_type: c_int,
    code: Code,
    /// A union; of power its first 32 bits.
    value: [u32; 2],
}

functions! {
    /// NVML's functions.
    Functions of Library::Nvml;

    init "nvmlInit_v2" () -> Code;
    error_string "nvmlErrorString" (Code) -> *const c_char;
    device_of_bus "nvmlDeviceGetHandleByPciBusId_v2" (*const c_char, *mut Handle) -> Code;
    clock "nvmlDeviceGetClockInfo" (Handle, c_uint, *mut c_uint) -> Code;
    highest_clock "nvmlDeviceGetMaxClockInfo" (Handle, c_uint, *mut c_uint) -> Code;
    limits "nvmlDeviceGetCurrentClocksThrottleReasons" (Handle, *mut u64) -> Code;
    power "nvmlDeviceGetPowerUsage" (Handle, *mut c_uint) -> Code;
    ? fields "nvmlDeviceGetFieldValues" (Handle, c_int, *mut FieldValue) -> Code;
}

impl Functions {
    fn get() -> Result<&'static Self, GpuError> {
        static FUNCTIONS: OnceLock<Result<Functions, GpuError>> = OnceLock::new();
        let open = || {
            let functions = Self::load()?;
            // SAFETY: it takes nothing, and is never undone.
            let code = unsafe { (functions.init)() };
            functions.check(code, "starting NVML")?;
            Ok(functions)
        };
        FUNCTIONS.get_or_init(open).as_ref().map_err(Clone::clone)
    }

    fn check(&self, code: Code, doing: &str) -> Result<(), GpuError> {
        if code == 0 {
            return Ok(());
        }
        // SAFETY: it takes any number and gives a static string or null.
        let said = unsafe { (self.error_string)(code) };
        // SAFETY: a string of the library's is NUL-terminated and static.
        let said = (!said.is_null()).then(|| unsafe { CStr::from_ptr(said) }.to_string_lossy());
        let says = said.unwrap_or("an unknown code".into()).into_owned();
        Err(GpuErrorKind::Library { doing: doing.into(), library: Library::Nvml, code, says }
            .into())
    }
}

/// Whether NVML is on this machine and starts.
///
/// # Errors
/// When it is missing, lacks a function or does not start.
pub fn check() -> Result<(), GpuError> {
    Functions::get().map(drop)
}

/// How a GPU was while it was watched.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Conditions {
    /// The SM clock in MHz, the median of what was seen.
    pub sm_mhz: u32,
    /// The highest SM clock of the device in MHz.
    pub highest_sm_mhz: u32,
    /// Watts, the median of what was seen. `None` where no answer was newer than the first: the device
    /// measures every tenth of a second or so.
    pub watts: Option<f64>,
    /// What lowered the clock at any time: `power`, `temperature`.
    pub limits: Vec<&'static str>,
}

/// Watches a GPU until it is ended or dropped.
#[derive(Debug)]
pub struct Watch {
    /// Never sent on: the thread sees it go.
    stop: Sender<()>,
    thread: JoinHandle<Result<Conditions, GpuError>>,
}

impl Watch {
    /// Begins to watch `device`.
    ///
    /// # Errors
    /// When NVML is missing, does not start, or does not know the device.
    pub fn begin(device: &Device) -> Result<Self, GpuError> {
        let watched = Watched::of(device)?;
        let (stop, stopped) = mpsc::channel();
        let thread = thread::spawn(move || {
            let mut seen = vec![watched.sample()?];
            while let Err(RecvTimeoutError::Timeout) = stopped.recv_timeout(PERIOD) {
                seen.push(watched.sample()?);
            }
            Ok(watched.summary(&seen))
        });
        Ok(Self { stop, thread })
    }

    /// What was seen.
    ///
    /// # Errors
    /// When the device did not answer.
    pub fn end(self) -> Result<Conditions, GpuError> {
        drop(self.stop);
        self.thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
    }
}

/// One answer.
#[derive(Clone, Copy)]
struct Sample {
    sm_mhz: u32,
    milliwatts: u32,
    limits: u64,
}

/// A device, as NVML knows it.
struct Watched {
    functions: &'static Functions,
    handle: Handle,
    highest_sm_mhz: u32,
}

// SAFETY: a handle is a name; NVML's functions may be called from any thread.
unsafe impl Send for Watched {}

impl Watched {
    fn of(device: &Device) -> Result<Self, GpuError> {
        let functions = Functions::get()?;
        let bus = device.bus()?;
        let (mut handle, mut highest_sm_mhz) = (ptr::null_mut(), 0);
        // SAFETY: `bus` ends with a NUL, and `handle` is valid for a write.
        let code = unsafe { (functions.device_of_bus)(bus.as_ptr(), &mut handle) };
        functions.check(code, "finding a GPU by its bus")?;
        // SAFETY: `handle` is NVML's, and the number valid for a write.
        let code = unsafe { (functions.highest_clock)(handle, SM_CLOCK, &mut highest_sm_mhz) };
        functions.check(code, "asking for the highest clock")?;
        Ok(Self { functions, handle, highest_sm_mhz })
    }

    fn sample(&self) -> Result<Sample, GpuError> {
        let (functions, mut sm_mhz, mut limits) = (self.functions, 0, 0);
        // SAFETY: the handle is NVML's, and the number valid for a write.
        let code = unsafe { (functions.clock)(self.handle, SM_CLOCK, &mut sm_mhz) };
        functions.check(code, "asking for a clock")?;
        // SAFETY: as above.
        let code = unsafe { (functions.limits)(self.handle, &mut limits) };
        functions.check(code, "asking what limits a clock")?;
        Ok(Sample { sm_mhz, milliwatts: self.milliwatts()?, limits })
    }

    fn milliwatts(&self) -> Result<u32, GpuError> {
        if let Some(fields) = self.functions.fields {
            let mut value = FieldValue {
                field: INSTANT_POWER,
                scope: 0,
                timestamp: 0,
                latency: 0,
                value_type: 0,
                code: 0,
                value: [0; 2],
            };
            // SAFETY: the handle is NVML's, and there is one field, valid for reads and writes.
            let code = unsafe { fields(self.handle, 1, &mut value) };
            if (code, value.code) == (0, 0) {
                return Ok(value.value[0]);
            }
        }
        let mut milliwatts = 0;
        // SAFETY: the handle is NVML's, and the number valid for a write.
        let code = unsafe { (self.functions.power)(self.handle, &mut milliwatts) };
        self.functions.check(code, "asking for the power")?;
        Ok(milliwatts)
    }

    /// Of at least one sample.
    fn summary(&self, seen: &[Sample]) -> Conditions {
        let median = |seen: &[Sample], of: fn(&Sample) -> u32| {
            let mut all: Vec<u32> = seen.iter().map(of).collect();
            all.sort_unstable();
            all.get(all.len() / 2).copied()
        };
        // Up to here the power may be that of before.
        let old = seen.iter().take_while(|sample| sample.milliwatts == seen[0].milliwatts).count();
        let watts = median(&seen[old..], |sample| sample.milliwatts);
        let reasons = seen.iter().fold(0, |all, sample| all | sample.limits);
        let limits = LIMITS.iter().filter(|(bit, _)| reasons & bit != 0);
        Conditions {
            sm_mhz: median(seen, |sample| sample.sm_mhz).unwrap_or(0),
            highest_sm_mhz: self.highest_sm_mhz,
            watts: watts.map(|milliwatts| f64::from(milliwatts) / 1e3),
            limits: limits.map(|(_, name)| *name).collect(),
        }
    }
}
