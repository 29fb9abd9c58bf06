//! The functions of cuBLASLt, with the types and numbers of cublasLt.h. Those used here are the
//! same in CUDA 12 and 13.

use std::ffi::{CStr, c_char, c_int, c_void};
use std::sync::OnceLock;

use foveate_tensor::DType;

use crate::driver::sys::Handle;
use crate::error::{GpuError, GpuErrorKind, OLDEST_CUDA};
use crate::library::Library;
use crate::loader::functions;

/// `cublasStatus_t`.
pub type Status = c_int;

/// `CUBLAS_STATUS_NOT_SUPPORTED`.
pub const NOT_SUPPORTED: Status = 15;

/// `cublasLtMatmulAlgo_t`.
pub type Algorithm = [u64; 8];

/// `cublasLtMatmulHeuristicResult_t`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub struct Heuristic {
    pub algorithm: Algorithm,
    pub workspace_bytes: usize,
    pub status: Status,
    pub waves: f32,
    reserved: [c_int; 4],
}

/// Numbers of `cublasComputeType_t`.
pub mod compute {
    pub const F32: i32 = 68;
    pub const F32_BY_TF32: i32 = 77;
}

/// `cudaDataType_t` of a dtype; `None` for what matrices are not made of.
pub fn data_type(dtype: DType) -> Option<i32> {
    match dtype {
        DType::F32 => Some(F32),
        DType::F16 => Some(2),
        DType::BF16 => Some(14),
        DType::F8E4M3 | DType::F64 => None,
    }
}

/// `CUDA_R_32F`.
pub const F32: i32 = 0;

/// Numbers of `cublasLtMatmulDescAttributes_t`.
pub mod product {
    pub const TRANSPOSE_A: i32 = 3;
    pub const TRANSPOSE_B: i32 = 4;
    pub const EPILOGUE: i32 = 7;
    pub const BIAS: i32 = 8;
    pub const BIAS_TYPE: i32 = 26;
}

/// Of `cublasLtEpilogue_t`: a bias is added.
pub const EPILOGUE_BIAS: u32 = 4;

/// Numbers of `cublasLtMatrixLayoutAttribute_t`.
pub mod layout {
    pub const BATCH_COUNT: i32 = 5;
    pub const BATCH_STRIDE: i32 = 6;
}

/// Numbers of `cublasLtMatmulPreferenceAttributes_t`.
pub mod preference {
    pub const MOST_WORKSPACE_BYTES: i32 = 1;
    pub const REDUCTION_SCHEMES: i32 = 3;
    /// Of a, b, c and the result.
    pub const ALIGNMENTS: [i32; 4] = [5, 6, 7, 8];
}

/// Of `cublasLtReductionScheme_t`: shares of the summed axis are added in the compute type.
pub const REDUCE_IN_COMPUTE_TYPE: u32 = 2;

functions! {
    /// cuBLASLt's functions.
    Functions of Library::CublasLt;

    version "cublasLtGetVersion" () -> usize;
    status_name "cublasLtGetStatusName" (Status) -> *const c_char;
    status_string "cublasLtGetStatusString" (Status) -> *const c_char;
    create "cublasLtCreate" (*mut Handle) -> Status;
    product_create "cublasLtMatmulDescCreate" (*mut Handle, c_int, c_int) -> Status;
    product_set "cublasLtMatmulDescSetAttribute" (Handle, c_int, *const c_void, usize) -> Status;
    product_destroy "cublasLtMatmulDescDestroy" (Handle) -> Status;
    layout_create "cublasLtMatrixLayoutCreate" (*mut Handle, c_int, u64, u64, i64) -> Status;
    layout_set "cublasLtMatrixLayoutSetAttribute" (Handle, c_int, *const c_void, usize) -> Status;
    layout_destroy "cublasLtMatrixLayoutDestroy" (Handle) -> Status;
    preference_create "cublasLtMatmulPreferenceCreate" (*mut Handle) -> Status;
    preference_set "cublasLtMatmulPreferenceSetAttribute" (Handle, c_int, *const c_void, usize)
        -> Status;
    preference_destroy "cublasLtMatmulPreferenceDestroy" (Handle) -> Status;
    heuristic "cublasLtMatmulAlgoGetHeuristic" (Handle, Handle, Handle, Handle, Handle, Handle,
        Handle, c_int, *mut Heuristic, *mut c_int) -> Status;
    matmul "cublasLtMatmul" (Handle, Handle, *const c_void, *const c_void, Handle, *const c_void,
        Handle, *const c_void, *const c_void, Handle, *mut c_void, Handle, *const Algorithm,
        *mut c_void, usize, Handle) -> Status;
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
            if functions.version()[0] < OLDEST_CUDA {
                let version = functions.version().map(|n| n.to_string()).join(".");
                let (library, needed) = (Library::CublasLt, "12.0");
                return Err(GpuErrorKind::OldLibrary { library, version, needed }.into());
            }
            Ok(functions)
        };
        FUNCTIONS.get_or_init(open).as_ref().map_err(Clone::clone)
    }

    /// Major, minor and patch.
    pub fn version(&self) -> [u32; 3] {
        // SAFETY: it takes nothing and reads a constant.
        let n = unsafe { (self.version)() } as u32;
        [n / 10_000, n / 100 % 100, n % 100]
    }

    /// An error for every code but success.
    pub fn check(&self, code: Status, doing: impl FnOnce() -> String) -> Result<(), GpuError> {
        if code == 0 {
            return Ok(());
        }
        let text = |f: unsafe extern "C" fn(Status) -> *const c_char| {
            // SAFETY: it takes any number and gives a static string or null.
            let said = unsafe { f(code) };
            // SAFETY: a string of the library's is NUL-terminated and static.
            (!said.is_null()).then(|| unsafe { CStr::from_ptr(said) }.to_string_lossy())
        };
        let name = text(self.status_name).unwrap_or("an unknown status".into());
        let says = match text(self.status_string) {
            Some(more) if more != name => format!("{name}, {more}"),
            _ => name.into_owned(),
        };
        let (doing, library) = (doing(), Library::CublasLt);
        Err(GpuErrorKind::Library { doing, library, code, says }.into())
    }
}
