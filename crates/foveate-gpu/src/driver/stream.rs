//! Streams, events, and waiting with a deadline.

use std::ffi::OsStr;
use std::ptr;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, OnceLock};
use std::time::{Duration, Instant};

use super::device::Device;
use super::launches::Launches;
use super::operations::{self, Operation};
use super::sys::{Code, Driver, Handle, NOT_READY};
use crate::error::{GpuError, GpuErrorKind};
use crate::sync::lock;
use crate::trace::{Noted, note};

/// How long to wait for a device before it is said to hang, where nothing else is said: two minutes,
/// or the seconds that `FOVEATE_TIMEOUT` says.
pub fn default_timeout() -> Duration {
    static TIMEOUT: OnceLock<Duration> = OnceLock::new();
    *TIMEOUT.get_or_init(|| {
        let given = std::env::var_os("FOVEATE_TIMEOUT").unwrap_or_default();
        seconds(&given).unwrap_or_else(|| {
            eprintln!("warning: FOVEATE_TIMEOUT is {given:?}, no number of seconds; it is 120");
            DEFAULT_TIMEOUT
        })
    })
}

const DEFAULT_TIMEOUT: Duration = Duration::from_secs(120);

/// What `FOVEATE_TIMEOUT` says; nothing when that is no time.
fn seconds(given: &OsStr) -> Option<Duration> {
    match given.to_str()?.trim() {
        "" => Some(DEFAULT_TIMEOUT),
        text => Duration::try_from_secs_f64(text.parse().ok()?).ok(),
    }
}

/// A queue of work on a device: our own, or one that belongs to somebody else (PyTorch, candle).
#[derive(Debug)]
pub struct Stream {
    device: Device,
    handle: Handle,
    owned: bool,
    number: u64,
    launches: Arc<Launches>,
}

/// Differs from every number before.
fn next_number() -> u64 {
    static NEXT: AtomicU64 = AtomicU64::new(1);
    NEXT.fetch_add(1, Ordering::Relaxed)
}

// SAFETY: the driver lets every thread use a stream.
unsafe impl Send for Stream {}
// SAFETY: as above; the driver orders concurrent calls.
unsafe impl Sync for Stream {}

impl Stream {
    /// A new stream that does not wait for the legacy default stream.
    ///
    /// # Errors
    /// Those of the driver.
    pub fn new(device: &Device) -> Result<Self, GpuError> {
        let driver = device.current()?;
        let mut handle = ptr::null_mut();
        const NON_BLOCKING: u32 = 1;
        // SAFETY: `handle` is valid for a write, and the context is current.
        let code = unsafe { (driver.stream_create)(&mut handle, NON_BLOCKING) };
        driver.check(code, || "making a stream".into())?;
        Ok(Self::of(device, handle, true))
    }

    /// A stream that somebody else made on `device` and keeps alive; 0 is the default stream.
    ///
    /// # Safety
    /// `raw` is 0 or a `CUstream` of the device's primary context that outlives every use of the
    /// value.
    pub unsafe fn borrowed(device: &Device, raw: usize) -> Self {
        Self::of(device, raw as Handle, false)
    }

    fn of(device: &Device, handle: Handle, owned: bool) -> Self {
        let (device, launches) = (device.clone(), Arc::default());
        Self { device, handle, owned, number: next_number(), launches }
    }

    /// Its number in [`crate::trace`]: each value of this type has one of its own.
    pub fn number(&self) -> u64 {
        self.number
    }

    /// The device it queues work on.
    pub fn device(&self) -> &Device {
        &self.device
    }

    pub(crate) fn handle(&self) -> Handle {
        self.handle
    }

    /// What it was given to run, for errors.
    pub(super) fn launches(&self) -> &Launches {
        &self.launches
    }

    /// Whether its work is recorded in a graph at present.
    ///
    /// # Errors
    /// Those of the driver.
    pub fn is_recording(&self) -> Result<bool, GpuError> {
        let driver = self.device.current()?;
        let mut recording = 0;
        // SAFETY: `recording` is valid for a write, the stream is alive.
        let code = unsafe { (driver.capture_status)(self.handle, &mut recording) };
        driver.check(code, || "asking whether a graph is recorded".into())?;
        Ok(recording != 0)
    }

    /// Refuses what cannot be part of a graph while one is recorded: `doing` says what.
    ///
    /// # Errors
    /// When the stream's work is recorded at present.
    pub fn refuse_recording(&self, doing: &str) -> Result<(), GpuError> {
        if !self.is_recording()? {
            return Ok(());
        }
        Err(GpuError::argument(format!(
            "{doing} cannot be recorded in a graph; make the same calls once before recording them"
        )))
    }

    /// Waits until everything queued so far is done, at most `limit`.
    ///
    /// # Errors
    /// [`GpuErrorKind::Timeout`] naming `waiting`, or the failure of queued work.
    pub fn wait(&self, limit: Duration, waiting: &str) -> Result<(), GpuError> {
        self.refuse_recording("waiting for the device")?;
        let event = Event::new(&self.device)?;
        event.record(self)?;
        event.wait(limit, waiting)
    }

    /// Sets `bytes` bytes of device memory from `address` on, in order with the other work.
    ///
    /// # Errors
    /// Those of the driver.
    ///
    /// # Safety
    /// The range is device memory that stays allocated until the work is done.
    pub unsafe fn fill(&self, address: u64, byte: u8, bytes: usize) -> Result<(), GpuError> {
        self.filled(address, byte.into(), bytes, |driver| {
            // SAFETY: the stream is alive; the caller vouches for the range.
            unsafe { (driver.set_bytes)(address, byte, bytes, self.handle) }
        })
    }

    /// Sets `words` words of 4 bytes from `address` on, a multiple of 4, in order with the other work.
    ///
    /// # Errors
    /// Those of the driver.
    ///
    /// # Safety
    /// As for [`Self::fill`].
    pub unsafe fn fill_words(&self, address: u64, word: u32, words: usize) -> Result<(), GpuError> {
        self.filled(address, word.into(), 4 * words, |driver| {
            // SAFETY: the stream is alive; the caller vouches for the range.
            unsafe { (driver.set_words)(address, word, words, self.handle) }
        })
    }

    /// Sets bytes with `value` by a function of the driver.
    fn filled(
        &self,
        address: u64,
        value: u64,
        bytes: usize,
        set: impl FnOnce(&Driver) -> Code,
    ) -> Result<(), GpuError> {
        if bytes == 0 {
            return Ok(());
        }
        let stream = self.number;
        let span = (address, address + bytes as u64);
        note(|| Noted::Written { name: "a fill".into(), span, stream });
        operations::note(|| Operation::of("a fill", [address, value, bytes as u64]));
        let driver = self.device.current()?;
        driver.check(set(&driver), || format!("filling {bytes} B"))
    }

    /// Copies `bytes` bytes of device memory at `from`, which is memory of `device`, to `to`, in order with
    /// the other work.
    ///
    /// # Errors
    /// Those of the driver.
    ///
    /// # Safety
    /// `to` is memory of the stream's device, and both ranges stay allocated until the work is done.
    pub unsafe fn copy(
        &self,
        to: u64,
        from: u64,
        device: &Device,
        bytes: usize,
    ) -> Result<(), GpuError> {
        if bytes == 0 {
            return Ok(());
        }
        let (span, stream) = (|at: u64| (at, at + bytes as u64), self.number);
        note(|| Noted::Read { name: "a copy".into(), span: span(from), stream });
        note(|| Noted::Written { name: "a copy".into(), span: span(to), stream });
        operations::note(|| Operation::of("a copy", [to, from, bytes as u64]));
        let driver = self.device.current()?;
        let code = match *device == self.device {
            // SAFETY: the stream is alive; the caller vouches for both ranges.
            true => unsafe { (driver.copy)(to, from, bytes, self.handle) },
            false => {
                let contexts = [&self.device, device].map(Device::context);
                // SAFETY: as above, and the devices keep their contexts.
                unsafe {
                    (driver.copy_between)(to, contexts[0], from, contexts[1], bytes, self.handle)
                }
            }
        };
        driver.check(code, || format!("copying {bytes} B between arrays"))
    }

    /// Makes everything queued from here on wait for `event`, which may be of another device.
    ///
    /// # Errors
    /// Those of the driver.
    pub fn after(&self, event: &Event) -> Result<(), GpuError> {
        note(|| Noted::Follows { stream: self.number, event: event.number });
        let driver = self.device.current()?;
        // SAFETY: stream and event are alive.
        let code = unsafe { (driver.stream_wait)(self.handle, event.handle, 0) };
        driver.check(code, || "making a stream wait".into())
    }
}

impl Drop for Stream {
    fn drop(&mut self) {
        if let (true, Ok(driver)) = (self.owned, self.device.current()) {
            // SAFETY: made in `new`. The driver finishes queued work before it lets go.
            unsafe { (driver.stream_destroy)(self.handle) };
        }
    }
}

/// A point in a stream's work.
#[derive(Debug)]
pub struct Event {
    device: Device,
    handle: Handle,
    number: u64,
    /// The stream's launches when it was last recorded, and how many there were.
    behind: Mutex<Option<(Arc<Launches>, u64)>>,
}

// SAFETY: the driver lets every thread use an event.
unsafe impl Send for Event {}
// SAFETY: as above.
unsafe impl Sync for Event {}

impl Event {
    /// An event that takes the time.
    ///
    /// # Errors
    /// Those of the driver.
    pub fn new(device: &Device) -> Result<Self, GpuError> {
        let driver = device.current()?;
        let mut handle = ptr::null_mut();
        // SAFETY: `handle` is valid for a write, and the context is current.
        let code = unsafe { (driver.event_create)(&mut handle, 0) };
        driver.check(code, || "making an event".into())?;
        Ok(Self { device: device.clone(), handle, number: next_number(), behind: Mutex::default() })
    }

    /// Marks the present end of the stream's work.
    ///
    /// # Errors
    /// Those of the driver.
    pub fn record(&self, stream: &Stream) -> Result<(), GpuError> {
        note(|| Noted::Marked { event: self.number, stream: stream.number });
        let driver = self.device.current()?;
        // SAFETY: both are alive.
        let code = unsafe { (driver.event_record)(self.handle, stream.handle) };
        driver.check(code, || "recording an event".into())?;
        let launches = &stream.launches;
        *lock(&self.behind) = Some((launches.clone(), launches.queued()));
        Ok(())
    }

    /// Which launches before it may not be done.
    fn unfinished(&self) -> String {
        let behind = lock(&self.behind);
        behind.as_ref().map_or_else(String::new, |(launches, count)| launches.unfinished(*count))
    }

    /// Whether the work before it is done.
    ///
    /// # Errors
    /// The failure of that work.
    pub fn done(&self) -> Result<bool, GpuError> {
        let driver = self.device.current()?;
        // SAFETY: the event is alive.
        match unsafe { (driver.event_query)(self.handle) } {
            NOT_READY => Ok(false),
            code => {
                driver.check(code, || match self.unfinished() {
                    none if none.is_empty() => "running kernels".into(),
                    launches => format!("running kernels, {launches}"),
                })?;
                if let Some((launches, count)) = &*lock(&self.behind) {
                    launches.done(*count);
                }
                note(|| Noted::Reached { event: self.number });
                Ok(true)
            }
        }
    }

    /// Waits until the work before it is done, at most `limit`: a kernel that hangs becomes an
    /// error.
    ///
    /// # Errors
    /// [`GpuErrorKind::Timeout`] naming `waiting`, or the failure of that work.
    pub fn wait(&self, limit: Duration, waiting: &str) -> Result<(), GpuError> {
        note(|| Noted::Waited { what: waiting.into() });
        let began = Instant::now();
        while !self.done()? {
            let spent = began.elapsed();
            if spent > limit {
                let (waiting, seconds) = (waiting.to_owned(), limit.as_secs_f64());
                let launches = self.unfinished();
                return Err(GpuErrorKind::Timeout { waiting, seconds, launches }.into());
            }
            pause(began);
        }
        Ok(())
    }

    /// Milliseconds of device time since `earlier`. Both must be done.
    ///
    /// # Errors
    /// When one has not been recorded or is not done.
    pub fn ms_since(&self, earlier: &Event) -> Result<f32, GpuError> {
        let driver = self.device.current()?;
        let mut ms = 0.0;
        // SAFETY: `ms` is valid for a write, both events are alive.
        let code = unsafe { (driver.event_elapsed)(&mut ms, earlier.handle, self.handle) };
        driver.check(code, || "reading a time".into())?;
        Ok(ms)
    }
}

/// A step of waiting for a device since `began`: spins at first and then sleeps, so that short work
/// is not made longer.
pub(crate) fn pause(began: Instant) {
    if began.elapsed() > Duration::from_millis(20) {
        std::thread::sleep(Duration::from_micros(200));
    } else {
        std::hint::spin_loop();
    }
}

impl Drop for Event {
    fn drop(&mut self) {
        if let Ok(driver) = self.device.current() {
            // SAFETY: made in `new`.
            unsafe { (driver.event_destroy)(self.handle) };
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_time_for_a_device_is_a_number_of_seconds_or_not_taken() {
        let of = |text: &str| seconds(text.as_ref());
        assert_eq!(["", " ", "120"].map(of), [Some(DEFAULT_TIMEOUT); 3]);
        assert_eq!(of("0.5"), Some(Duration::from_millis(500)));
        assert_eq!(["2m", "-1", "NaN", "inf", "1e30"].map(of), [None; 5]);
    }

    #[cfg(unix)]
    #[test]
    fn a_time_that_is_no_text_is_not_taken_for_one_that_is_not_set() {
        use std::os::unix::ffi::OsStrExt;
        assert_eq!(seconds(OsStr::from_bytes(b"60\xff")), None);
    }
}
