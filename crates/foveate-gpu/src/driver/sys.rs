//! The driver's functions, with the types of cuda.h.

use std::ffi::{CStr, c_char, c_int, c_uint, c_void};
use std::sync::OnceLock;

use crate::error::{GpuError, GpuErrorKind};
use crate::library::Library;
use crate::loader::functions;

pub type Handle = *mut c_void;
pub type Code = c_int;

pub const SUCCESS: Code = 0;
pub const INVALID_VALUE: Code = 1;
pub const OUT_OF_MEMORY: Code = 2;
pub const NOT_READY: Code = 600;
pub const ACCESS_ENABLED: Code = 704;

functions! {
    /// The driver's functions.
    Driver of Library::Driver;

    init "cuInit" (c_uint) -> Code;
    version "cuDriverGetVersion" (*mut c_int) -> Code;
    error_name "cuGetErrorName" (Code, *mut *const c_char) -> Code;
    error_string "cuGetErrorString" (Code, *mut *const c_char) -> Code;
    device_count "cuDeviceGetCount" (*mut c_int) -> Code;
    device_get "cuDeviceGet" (*mut c_int, c_int) -> Code;
    device_name "cuDeviceGetName" (*mut c_char, c_int, c_int) -> Code;
    device_bus "cuDeviceGetPCIBusId" (*mut c_char, c_int, c_int) -> Code;
    device_memory "cuDeviceTotalMem_v2" (*mut usize, c_int) -> Code;
    device_attribute "cuDeviceGetAttribute" (*mut c_int, c_int, c_int) -> Code;
    context_retain "cuDevicePrimaryCtxRetain" (*mut Handle, c_int) -> Code;
    context_release "cuDevicePrimaryCtxRelease_v2" (c_int) -> Code;
    context_get "cuCtxGetCurrent" (*mut Handle) -> Code;
    context_set "cuCtxSetCurrent" (Handle) -> Code;
    context_synchronize "cuCtxSynchronize" () -> Code;
    memory_info "cuMemGetInfo_v2" (*mut usize, *mut usize) -> Code;
    alloc "cuMemAlloc_v2" (*mut u64, usize) -> Code;
    free "cuMemFree_v2" (u64) -> Code;
    host_alloc "cuMemHostAlloc" (*mut *mut c_void, usize, c_uint) -> Code;
    host_free "cuMemFreeHost" (*mut c_void) -> Code;
    to_device "cuMemcpyHtoDAsync_v2" (u64, *const c_void, usize, Handle) -> Code;
    to_host "cuMemcpyDtoHAsync_v2" (*mut c_void, u64, usize, Handle) -> Code;
    set_bytes "cuMemsetD8Async" (u64, u8, usize, Handle) -> Code;
    set_words "cuMemsetD32Async" (u64, u32, usize, Handle) -> Code;
    copy "cuMemcpyDtoDAsync_v2" (u64, u64, usize, Handle) -> Code;
    copy_between "cuMemcpyPeerAsync" (u64, Handle, u64, Handle, usize, Handle) -> Code;
    can_access "cuDeviceCanAccessPeer" (*mut c_int, c_int, c_int) -> Code;
    enable_access "cuCtxEnablePeerAccess" (Handle, c_uint) -> Code;
    pointer_attribute "cuPointerGetAttribute" (*mut c_void, c_int, u64) -> Code;
    stream_create "cuStreamCreate" (*mut Handle, c_uint) -> Code;
    stream_destroy "cuStreamDestroy_v2" (Handle) -> Code;
    stream_wait "cuStreamWaitEvent" (Handle, Handle, c_uint) -> Code;
    capture_begin "cuStreamBeginCapture_v2" (Handle, c_uint) -> Code;
    capture_end "cuStreamEndCapture" (Handle, *mut Handle) -> Code;
    capture_status "cuStreamIsCapturing" (Handle, *mut c_int) -> Code;
    graph_instantiate "cuGraphInstantiateWithFlags" (*mut Handle, Handle, u64) -> Code;
    graph_launch "cuGraphLaunch" (Handle, Handle) -> Code;
    graph_ready_destroy "cuGraphExecDestroy" (Handle) -> Code;
    graph_destroy "cuGraphDestroy" (Handle) -> Code;
    event_create "cuEventCreate" (*mut Handle, c_uint) -> Code;
    event_destroy "cuEventDestroy_v2" (Handle) -> Code;
    event_record "cuEventRecord" (Handle, Handle) -> Code;
    event_query "cuEventQuery" (Handle) -> Code;
    event_elapsed "cuEventElapsedTime" (*mut f32, Handle, Handle) -> Code;
    module_load "cuModuleLoadData" (*mut Handle, *const c_void) -> Code;
    module_unload "cuModuleUnload" (Handle) -> Code;
    module_function "cuModuleGetFunction" (*mut Handle, Handle, *const c_char) -> Code;
    function_set "cuFuncSetAttribute" (Handle, c_int, c_int) -> Code;
    function_parameter "cuFuncGetParamInfo" (Handle, usize, *mut usize, *mut usize) -> Code;
    launch "cuLaunchKernel" (Handle, c_uint, c_uint, c_uint, c_uint, c_uint, c_uint, c_uint,
                             Handle, *mut *mut c_void, *mut *mut c_void) -> Code;
    ? exchange_capture_mode "cuThreadExchangeStreamCaptureMode" (*mut c_int) -> Code;
    ? launch_with_attributes "cuLaunchKernelEx" (*const LaunchConfig, Handle, *mut *mut c_void,
                                                 *mut *mut c_void) -> Code;
    ? tensor_map_tiled "cuTensorMapEncodeTiled" (*mut c_void, c_int, c_uint, *mut c_void,
                                                 *const u64, *const u64, *const u32, *const u32,
                                                 c_int, c_int, c_int, c_int) -> Code;
}

/// `CUlaunchConfig`.
#[repr(C)]
pub struct LaunchConfig {
    pub grid: [c_uint; 3],
    pub block: [c_uint; 3],
    pub shared_bytes: c_uint,
    pub stream: Handle,
    pub attributes: *const LaunchAttribute,
    pub attribute_count: c_uint,
}

/// `CUlaunchAttribute`: a number of `CUlaunchAttributeID`, and a union of 64 bytes.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct LaunchAttribute {
    id: c_int,
    pad: [u8; 4],
    value: [u32; 16],
}

impl LaunchAttribute {
    fn new(id: c_int, start: [u32; 3]) -> Self {
        let mut value = [0; 16];
        value[..3].copy_from_slice(&start);
        Self { id, pad: [0; 4], value }
    }

    /// CTAs of a cluster along each axis.
    pub fn cluster(dims: [u32; 3]) -> Self {
        Self::new(4, dims)
    }

    /// The kernel may start before the one ahead of it on the stream has ended.
    pub fn programmatic_serialization() -> Self {
        Self::new(6, [1, 0, 0])
    }
}

impl Driver {
    /// The driver of this machine, initialised.
    ///
    /// # Errors
    /// When there is none, it is too old, or it finds no device.
    pub fn get() -> Result<&'static Self, GpuError> {
        static DRIVER: OnceLock<Result<Driver, GpuError>> = OnceLock::new();
        let open = || {
            let driver = Self::load()?;
            // SAFETY: flags must be 0.
            let code = unsafe { (driver.init)(0) };
            driver.check(code, || "starting the driver".into())?;
            Ok(driver)
        };
        DRIVER.get_or_init(open).as_ref().map_err(Clone::clone)
    }

    /// An error for every code but success.
    pub fn check(&self, code: Code, doing: impl FnOnce() -> String) -> Result<(), GpuError> {
        if code == SUCCESS {
            return Ok(());
        }
        let text = |f: unsafe extern "C" fn(Code, *mut *const c_char) -> Code| {
            let mut said = std::ptr::null();
            // SAFETY: `said` is valid for a write; the driver's strings are static.
            let known = unsafe { f(code, &mut said) } == SUCCESS && !said.is_null();
            // SAFETY: a string the driver gave is NUL-terminated and static.
            known.then(|| unsafe { CStr::from_ptr(said) }.to_string_lossy().into_owned())
        };
        let name = text(self.error_name).unwrap_or_else(|| "an unknown error".into());
        let says = text(self.error_string).map_or(name.clone(), |s| format!("{name}, {s}"));
        Err(GpuErrorKind::Driver { doing: doing(), code, says }.into())
    }
}
