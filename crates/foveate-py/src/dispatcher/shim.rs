//! Torch's stable C functions, looked up in the libtorch that the interpreter has loaded.
//!
//! Nothing of torch is linked and no header of it is read, so one build serves every version of torch that
//! has these functions. [`FUNCTIONS`] says which version brought which: where one is missing, nothing is
//! registered from here, and the reason says what a torch needs.

use std::ffi::{CStr, c_char, c_int, c_void};
use std::path::Path;

use libloading::os::unix::{Library, RTLD_NOW};

/// Opens a library only if the process has it already (glibc's and musl's value).
const RTLD_NOLOAD: c_int = 4;

/// A value on the stack of a kernel: the bits of a number, or the address of what torch keeps for it.
pub type Value = u64;

/// A kernel as torch calls it: on `inputs` values, which it owns, in whose place it leaves `outputs`.
pub type Kernel = extern "C-unwind" fn(stack: *mut Value, inputs: u64, outputs: u64);

/// What a function of torch's returns: 0, or 1 after an error, of which it printed the words.
pub type Status = i32;

/// What is opaque here: a tensor, a list, a string, a library.
pub type Handle = *mut c_void;

/// Throws a `std::runtime_error`.
pub type Throw = unsafe extern "C-unwind" fn(message: *const c_char) -> !;

/// Why nothing can be registered.
pub type Missing = String;

macro_rules! functions {
    ($($field:ident: $name:literal of $version:literal, fn($($argument:ty),*) -> $result:ty;)*) => {
        /// The functions that are called here.
        pub struct Shim {
            $(pub $field: unsafe extern "C" fn($($argument),*) -> $result,)*
            /// Frees the place of an optional argument.
            free: unsafe extern "C" fn(*mut c_void) -> c_int,
            throw: Throw,
        }

        /// Each function with the version of torch that brought it, or the first one that the package takes.
        pub const FUNCTIONS: &[(&str, &str)] = &[$(($name, $version),)*];

        impl Shim {
            fn of(library: &Library) -> Result<Self, Missing> {
                Ok(Self {
                    // SAFETY: torch declares the functions of these names with these types, for good.
                    $($field: unsafe { found(library, $name) }.ok_or_else(|| missing($name, $version))?,)*
                    free: free(library)?,
                    throw: throw(library)?,
                })
            }
        }
    };
}

functions! {
    library_of_key: "aoti_torch_library_init_impl" of "2.10",
        fn(*const c_char, *const c_char, *const c_char, u32, *mut Handle) -> Status;
    implement: "torch_library_impl" of "2.10", fn(Handle, *const c_char, Kernel, u64) -> Status;
    threads: "torch_get_num_threads" of "2.10", fn(*mut u32) -> Status;
    delete_tensor: "aoti_torch_delete_tensor_object" of "2.10", fn(Handle) -> Status;
    dim: "aoti_torch_get_dim" of "2.10", fn(Handle, *mut i64) -> Status;
    sizes: "aoti_torch_get_sizes" of "2.10", fn(Handle, *mut *const i64) -> Status;
    strides: "aoti_torch_get_strides" of "2.10", fn(Handle, *mut *const i64) -> Status;
    dtype: "aoti_torch_get_dtype" of "2.10", fn(Handle, *mut i32) -> Status;
    device_type: "aoti_torch_get_device_type" of "2.10", fn(Handle, *mut i32) -> Status;
    const_data: "torch_get_const_data_ptr" of "2.10", fn(Handle, *mut *const c_void) -> Status;
    mutable_data: "torch_get_mutable_data_ptr" of "2.10", fn(Handle, *mut *mut c_void) -> Status;
    empty_strided: "aoti_torch_empty_strided" of "2.10",
        fn(i64, *const i64, *const i64, i32, i32, i32, *mut Handle) -> Status;
    cpu: "aoti_torch_device_type_cpu" of "2.10", fn() -> i32;
    float32: "aoti_torch_dtype_float32" of "2.10", fn() -> i32;
    bfloat16: "aoti_torch_dtype_bfloat16" of "2.10", fn() -> i32;
    float16: "aoti_torch_dtype_float16" of "2.10", fn() -> i32;
    int64: "aoti_torch_dtype_int64" of "2.10", fn() -> i32;
    int32: "aoti_torch_dtype_int32" of "2.10", fn() -> i32;
    boolean: "aoti_torch_dtype_bool" of "2.10", fn() -> i32;
    uint8: "aoti_torch_dtype_uint8" of "2.10", fn() -> i32;
    int16: "aoti_torch_dtype_int16" of "2.10", fn() -> i32;
    int8: "aoti_torch_dtype_int8" of "2.10", fn() -> i32;
    float64: "aoti_torch_dtype_float64" of "2.10", fn() -> i32;
    new_list: "torch_new_list_reserve_size" of "2.10", fn(usize, *mut Handle) -> Status;
    list_size: "torch_list_size" of "2.10", fn(Handle, *mut usize) -> Status;
    list_item: "torch_list_get_item" of "2.10", fn(Handle, usize, *mut Value) -> Status;
    list_push: "torch_list_push_back" of "2.10", fn(Handle, Value) -> Status;
    delete_list: "torch_delete_list" of "2.10", fn(Handle) -> Status;
    string_length: "torch_string_length" of "2.10", fn(Handle, *mut usize) -> Status;
    string_bytes: "torch_string_c_str" of "2.10", fn(Handle, *mut *const c_char) -> Status;
    delete_string: "torch_delete_string" of "2.10", fn(Handle) -> Status;
}

/// The layout of values that kernels here read and leave: that of torch 2.10, as `torch_library_impl` is told.
const BUILT_FOR: u64 = 0x020a_0000_0000_0000;

fn missing(name: &str, version: &str) -> Missing {
    format!("this libtorch has no `{name}`, which torch {version} has")
}

/// # Safety
/// `F` is the type of the function of this name.
unsafe fn found<F: Copy>(library: &Library, name: &str) -> Option<F> {
    // SAFETY: the caller's promise. Functions of torch stay: it is never unloaded.
    unsafe { library.get::<F>(name.as_bytes()) }.ok().map(|symbol| *symbol)
}

/// Newer versions of torch free it themselves; before, it was made by `new`, of the C++ library that torch
/// stands on.
fn free(library: &Library) -> Result<unsafe extern "C" fn(*mut c_void) -> c_int, Missing> {
    // SAFETY: both take the address alone; that `operator delete(void*)` returns nothing is no matter
    // where the result is not read.
    let found = ["torch_delete_stable_ivalue", "_ZdlPv"]
        .into_iter()
        .find_map(|name| unsafe { found(library, name) });
    found.ok_or_else(|| "this libtorch stands on a C++ library without `operator delete`".into())
}

/// A kernel has no result for errors: torch's own extensions throw, and so does this function of the C++
/// library that torch stands on (`std::__throw_runtime_error`).
fn throw(library: &Library) -> Result<Throw, Missing> {
    // SAFETY: its type in libstdc++, which has had it since GCC 3.
    let found = unsafe { found(library, "_ZSt21__throw_runtime_errorPKc") };
    found.ok_or_else(|| "this libtorch stands on a C++ library other than libstdc++".into())
}

impl Shim {
    /// Those of the libtorch at `path`, which the process has loaded.
    ///
    /// # Errors
    /// When it has not, or a function is missing.
    pub fn find(path: &Path) -> Result<Self, Missing> {
        // SAFETY: with this flag nothing is loaded, so no code runs.
        let library = unsafe { Library::open(Some(path), RTLD_NOW | RTLD_NOLOAD) };
        let library = library.map_err(|e| format!("{} is not loaded: {e}", path.display()))?;
        let shim = Self::of(&library)?;
        // Torch stays in the process, and so do the addresses.
        std::mem::forget(library);
        Ok(shim)
    }

    /// Registers `kernel` for the operator `foveate::name` on tensors of dispatch key `key`, for as long as
    /// the process runs.
    ///
    /// # Errors
    /// When torch refuses.
    pub fn register(&self, key: &CStr, name: &CStr, kernel: Kernel) -> Result<(), Missing> {
        let mut library = std::ptr::null_mut();
        let file = c"foveate";
        // SAFETY: the strings end with 0; torch copies what it keeps of them. The library is not deleted,
        // so the kernel stays registered.
        let status = unsafe {
            let made = (self.library_of_key)(
                c"foveate".as_ptr(),
                key.as_ptr(),
                file.as_ptr(),
                0,
                &mut library,
            );
            if made == 0 {
                (self.implement)(library, name.as_ptr(), kernel, BUILT_FOR)
            } else {
                made
            }
        };
        match status {
            0 => Ok(()),
            _ => Err(format!("torch took no kernel of {name:?} for {key:?}")),
        }
    }

    /// Frees the place of an optional argument.
    ///
    /// # Safety
    /// Torch made it, and it is not used again.
    pub unsafe fn free(&self, place: *mut Value) {
        // SAFETY: the caller's promise.
        unsafe { (self.free)(place.cast()) };
    }

    /// Leaves the kernel that runs with an error for torch, which makes a `RuntimeError` of it.
    ///
    /// # Safety
    /// Only frames of C++ and such as let exceptions of C++ pass (`C-unwind`) are between here and torch,
    /// without values to drop; `message` outlives them.
    pub unsafe fn throw(&self, message: *const c_char) -> ! {
        // SAFETY: the caller's promise; the message is copied before anything unwinds.
        unsafe { (self.throw)(message) }
    }
}
