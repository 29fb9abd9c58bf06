//! The functions of NCCL, with the types and numbers of nccl.h.

use std::ffi::{CStr, c_char, c_int, c_void};
use std::mem::offset_of;
use std::num::NonZeroU16;
use std::sync::OnceLock;

use crate::driver::sys::Handle;
use crate::error::{GpuError, GpuErrorKind};
use crate::library::Library;
use crate::loader::functions;

/// `ncclResult_t`.
pub type Code = c_int;

/// `ncclSuccess`.
pub const SUCCESS: Code = 0;
/// `ncclUnhandledGpuError`.
pub const CUDA_FAILED: Code = 1;
/// `ncclInProgress`.
pub const IN_PROGRESS: Code = 7;

/// `ncclUniqueId`.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Id(pub [u8; 128]);

/// `ncclConfig_t` as it is in NCCL 2.29. Versions added fields at its end: each is given it in the size that it had
/// there, of which it reads no more.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct NcclConfig {
    bytes: usize,
    magic: u32,
    version: u32,
    blocking: c_int,
    /// 2.17.
    cluster_size: c_int,
    min_ctas: c_int,
    max_ctas: c_int,
    net_name: *const c_char,
    /// 2.18.
    split_share: c_int,
    /// 2.25, where 2.18 has padding.
    traffic_class: c_int,
    /// 2.27.
    comm_name: *const c_char,
    collnet_enable: c_int,
    cta_policy: c_int,
    shrink_share: c_int,
    nvls_ctas: c_int,
    /// 2.28.
    channels_per_net_peer: c_int,
    nvlink_centric: c_int,
    /// 2.29.
    graph_usage: c_int,
    rma_contexts: c_int,
}

/// `NCCL_CONFIG_UNDEF_INT`: the library decides.
const UNDEFINED: c_int = c_int::MIN;

/// The version whose fields [`NcclConfig`] ends with.
const NEWEST: u32 = 22_900;

impl NcclConfig {
    /// Of the library of version `found`: calls come back before the other ranks took part, so that waiting for them
    /// can end, and transfers take at most `blocks` CTAs, where that is given.
    pub fn without_blocking([major, minor, patch]: [u32; 3], blocks: Option<NonZeroU16>) -> Self {
        let version = (major * 10_000 + minor * 100 + patch).min(NEWEST);
        let bytes = match version {
            ..22_700 => offset_of!(Self, comm_name),
            22_700..22_800 => offset_of!(Self, channels_per_net_peer),
            22_800..NEWEST => offset_of!(Self, graph_usage),
            _ => size_of::<Self>(),
        };
        let max_ctas = blocks.map_or(UNDEFINED, |blocks| blocks.get().into());
        Self {
            bytes,
            magic: 0xcafe_beef,
            version,
            blocking: 0,
            cluster_size: UNDEFINED,
            min_ctas: if blocks.is_some() { 1 } else { UNDEFINED },
            max_ctas,
            net_name: std::ptr::null(),
            split_share: UNDEFINED,
            traffic_class: UNDEFINED,
            comm_name: std::ptr::null(),
            collnet_enable: UNDEFINED,
            cta_policy: UNDEFINED,
            shrink_share: UNDEFINED,
            nvls_ctas: UNDEFINED,
            channels_per_net_peer: UNDEFINED,
            nvlink_centric: UNDEFINED,
            graph_usage: UNDEFINED,
            rma_contexts: UNDEFINED,
        }
    }
}

/// The oldest version: the first whose communicators are all that is used here without blocking.
const OLDEST: [u32; 2] = [2, 18];

functions! {
    /// NCCL's functions.
    Functions of Library::Nccl;

    version "ncclGetVersion" (*mut c_int) -> Code;
    error_string "ncclGetErrorString" (Code) -> *const c_char;
    last_error "ncclGetLastError" (Handle) -> *const c_char;
    unique_id "ncclGetUniqueId" (*mut Id) -> Code;
    init "ncclCommInitRankConfig" (*mut Handle, c_int, Id, c_int, *mut NcclConfig) -> Code;
    async_error "ncclCommGetAsyncError" (Handle, *mut Code) -> Code;
    finalize "ncclCommFinalize" (Handle) -> Code;
    destroy "ncclCommDestroy" (Handle) -> Code;
    abort "ncclCommAbort" (Handle) -> Code;
    group_start "ncclGroupStart" () -> Code;
    group_end "ncclGroupEnd" () -> Code;
    all_reduce "ncclAllReduce" (*const c_void, *mut c_void, usize, c_int, c_int, Handle, Handle)
        -> Code;
    all_gather "ncclAllGather" (*const c_void, *mut c_void, usize, c_int, Handle, Handle) -> Code;
    reduce_scatter "ncclReduceScatter" (*const c_void, *mut c_void, usize, c_int, c_int, Handle,
        Handle) -> Code;
    broadcast "ncclBroadcast" (*const c_void, *mut c_void, usize, c_int, c_int, Handle, Handle)
        -> Code;
    send "ncclSend" (*const c_void, usize, c_int, c_int, Handle, Handle) -> Code;
    receive "ncclRecv" (*mut c_void, usize, c_int, c_int, Handle, Handle) -> Code;
}

impl Functions {
    /// The library of this machine.
    ///
    /// # Errors
    /// When there is none, or it is too old.
    pub fn get() -> Result<&'static Self, GpuError> {
        static FUNCTIONS: OnceLock<Result<Functions, GpuError>> = OnceLock::new();
        let open = || {
            let functions = Self::load()?;
            let found = functions.version()?;
            if found[..2] < OLDEST[..] {
                let version = found.map(|n| n.to_string()).join(".");
                let (library, needed) = (Library::Nccl, "2.18");
                return Err(GpuErrorKind::OldLibrary { library, version, needed }.into());
            }
            Ok(functions)
        };
        FUNCTIONS.get_or_init(open).as_ref().map_err(Clone::clone)
    }

    /// Major, minor and patch.
    ///
    /// # Errors
    /// Those of the library.
    pub fn version(&self) -> Result<[u32; 3], GpuError> {
        let mut n = 0;
        // SAFETY: `n` is valid for a write.
        let code = unsafe { (self.version)(&mut n) };
        self.check(code, || "asking for the version".into())?;
        let n = n.unsigned_abs();
        // Up to 2.8 the minor version had one digit.
        Ok(match n {
            ..10_000 => [n / 1000, n / 100 % 10, n % 100],
            _ => [n / 10_000, n / 100 % 100, n % 100],
        })
    }

    /// An error for every code of a call without a communicator but success.
    pub fn check(&self, code: Code, doing: impl FnOnce() -> String) -> Result<(), GpuError> {
        if code == SUCCESS {
            return Ok(());
        }
        let (doing, library, says) = (doing(), Library::Nccl, self.says(code));
        Err(GpuErrorKind::Library { doing, library, code, says }.into())
    }

    /// What the library says about a code, and about the last failure.
    pub fn says(&self, code: Code) -> String {
        let text = |said: *const c_char| {
            // SAFETY: a string of the library's is NUL-terminated and outlives the call.
            (!said.is_null()).then(|| unsafe { CStr::from_ptr(said) }.to_string_lossy())
        };
        // SAFETY: both take any number and no communicator, and give a string or null.
        let said = unsafe { [(self.error_string)(code), (self.last_error)(std::ptr::null_mut())] };
        let [name, last] = said.map(|said| text(said).unwrap_or_default());
        if last.is_empty() { name.into_owned() } else { format!("{name}, {}", last.trim()) }
    }
}
