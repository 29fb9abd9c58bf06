//! Torch's stable C functions, looked up in the libtorch that the interpreter has loaded.
//!
//! Nothing of torch is linked and no header of it is read, so one build serves every version of torch that
//! has these functions, from [`SINCE`] on: where one is missing, nothing is registered, and the reason says
//! what a torch needs. What newer versions have is used where it is there ([`define_tagged`], [`free`]).
//! Libraries are looked up as Linux names and loads them; elsewhere nothing is registered.

use std::ffi::{CStr, c_char, c_int, c_void};
use std::path::Path;
use std::ptr::null_mut;

use libloading::Library;

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
    ($($field:ident: $name:literal, fn($($argument:ty),*) -> $result:ty;)*) => {
        /// The functions that are called here.
        pub struct Shim {
            $(pub $field: unsafe extern "C" fn($($argument),*) -> $result,)*
            define_tagged: Option<(DefineTagged, Tag)>,
            /// Frees the place of an optional argument.
            free: unsafe extern "C" fn(*mut c_void) -> c_int,
            throw: Throw,
        }

        /// Their names.
        pub const FUNCTIONS: &[&str] = &[$($name,)*];

        impl Shim {
            fn of(library: &Library) -> Result<Self, Missing> {
                Ok(Self {
                    // SAFETY: torch declares the functions of these names with these types, for good.
                    $($field: unsafe { found(library, $name) }.ok_or_else(|| missing($name))?,)*
                    define_tagged: define_tagged(library),
                    free: free(library)?,
                    throw: throw(library)?,
                })
            }
        }
    };
}

functions! {
    fragment: "aoti_torch_library_init_fragment",
        fn(*const c_char, *const c_char, u32, *mut Handle) -> Status;
    define: "aoti_torch_library_def", fn(Handle, *const c_char) -> Status;
    library_of_key: "aoti_torch_library_init_impl",
        fn(*const c_char, *const c_char, *const c_char, u32, *mut Handle) -> Status;
    implement: "torch_library_impl", fn(Handle, *const c_char, Kernel, u64) -> Status;
    delete_library: "aoti_torch_delete_library_object", fn(Handle) -> Status;
    threads: "torch_get_num_threads", fn(*mut u32) -> Status;
    delete_tensor: "aoti_torch_delete_tensor_object", fn(Handle) -> Status;
    dim: "aoti_torch_get_dim", fn(Handle, *mut i64) -> Status;
    sizes: "aoti_torch_get_sizes", fn(Handle, *mut *const i64) -> Status;
    strides: "aoti_torch_get_strides", fn(Handle, *mut *const i64) -> Status;
    dtype: "aoti_torch_get_dtype", fn(Handle, *mut i32) -> Status;
    device_type: "aoti_torch_get_device_type", fn(Handle, *mut i32) -> Status;
    device_index: "aoti_torch_get_device_index", fn(Handle, *mut i32) -> Status;
    const_data: "torch_get_const_data_ptr", fn(Handle, *mut *const c_void) -> Status;
    mutable_data: "torch_get_mutable_data_ptr", fn(Handle, *mut *mut c_void) -> Status;
    empty_strided: "aoti_torch_empty_strided",
        fn(i64, *const i64, *const i64, i32, i32, i32, *mut Handle) -> Status;
    zero: "aoti_torch_zero_", fn(Handle) -> Status;
    copy: "aoti_torch_copy_", fn(Handle, Handle, i32) -> Status;
    cpu: "aoti_torch_device_type_cpu", fn() -> i32;
    cuda: "aoti_torch_device_type_cuda", fn() -> i32;
    float32: "aoti_torch_dtype_float32", fn() -> i32;
    bfloat16: "aoti_torch_dtype_bfloat16", fn() -> i32;
    float16: "aoti_torch_dtype_float16", fn() -> i32;
    int64: "aoti_torch_dtype_int64", fn() -> i32;
    int32: "aoti_torch_dtype_int32", fn() -> i32;
    boolean: "aoti_torch_dtype_bool", fn() -> i32;
    uint8: "aoti_torch_dtype_uint8", fn() -> i32;
    int16: "aoti_torch_dtype_int16", fn() -> i32;
    int8: "aoti_torch_dtype_int8", fn() -> i32;
    float64: "aoti_torch_dtype_float64", fn() -> i32;
    new_list: "torch_new_list_reserve_size", fn(usize, *mut Handle) -> Status;
    list_size: "torch_list_size", fn(Handle, *mut usize) -> Status;
    list_item: "torch_list_get_item", fn(Handle, usize, *mut Value) -> Status;
    list_push: "torch_list_push_back", fn(Handle, Value) -> Status;
    delete_list: "torch_delete_list", fn(Handle) -> Status;
    string_length: "torch_string_length", fn(Handle, *mut usize) -> Status;
    string_bytes: "torch_string_c_str", fn(Handle, *mut *const c_char) -> Status;
    delete_string: "torch_delete_string", fn(Handle) -> Status;
}

/// The first version of torch that has all of [`FUNCTIONS`]: 2.10, and so have 2.11 to 2.15.
const SINCE: &str = "2.10";

/// Defines an operator with tags.
type DefineTagged = unsafe extern "C" fn(Handle, *const c_char, *const i32, i32) -> Status;

/// The number of a tag.
type Tag = unsafe extern "C" fn() -> i32;

/// From 2.12 on, with the tag that says that torch may compile an operator; before, Python adds it.
fn define_tagged(library: &Library) -> Option<(DefineTagged, Tag)> {
    // SAFETY: torch declares the functions of these names with these types, for good.
    unsafe {
        let define = found(library, "torch_library_def_with_tags");
        define.zip(found(library, "torch_tag_pt2_compliant_tag"))
    }
}

/// The layout of values that kernels here read and leave: that of torch 2.10, as `torch_library_impl` is told.
const BUILT_FOR: u64 = 0x020a_0000_0000_0000;

fn missing(name: &str) -> Missing {
    format!("this libtorch has no `{name}`, which torch has from {SINCE} on")
}

/// The library at `path`, if the process has it already.
#[cfg(target_os = "linux")]
fn loaded(path: &Path) -> Result<Library, Missing> {
    use libloading::os::unix::{Library, RTLD_NOW};
    /// Glibc's and musl's value.
    const RTLD_NOLOAD: c_int = 4;
    // SAFETY: with this flag nothing is loaded, so no code runs.
    let library = unsafe { Library::open(Some(path), RTLD_NOW | RTLD_NOLOAD) };
    library.map(Into::into).map_err(|e| format!("{} is not loaded: {e}", path.display()))
}

#[cfg(not(target_os = "linux"))]
fn loaded(_: &Path) -> Result<Library, Missing> {
    Err("native kernels take libtorch_cpu.so on libstdc++, as torch has them on Linux alone".into())
}

/// # Safety
/// `F` is the type of the function of this name.
unsafe fn found<F: Copy>(library: &Library, name: &str) -> Option<F> {
    // SAFETY: the caller's promise. Functions of torch stay: it is never unloaded.
    unsafe { library.get::<F>(name.as_bytes()) }.ok().map(|symbol| *symbol)
}

/// From 2.13 on torch frees it by a function; before, it was made by `new`, of the C++ library that torch stands on.
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
        let library = loaded(path)?;
        let shim = Self::of(&library)?;
        // Torch stays in the process, and so do the addresses.
        std::mem::forget(library);
        Ok(shim)
    }

    /// Defines operators of the namespace `foveate` by their schemas, and registers their kernels for tensors
    /// of these dispatch keys, for as long as the process runs: all of them, or none. Whether they have the tag
    /// that says that torch may compile them.
    ///
    /// # Errors
    /// When torch refuses one.
    pub fn register(
        &self,
        keys: &[&CStr],
        operators: &[(&CStr, &CStr, Kernel)],
    ) -> Result<bool, Missing> {
        let mut made = Libraries { shim: self, handles: Vec::new() };
        let name = c"foveate".as_ptr();
        // SAFETY: the strings end with 0; torch copies what it keeps of them.
        let all = made.library(|into| unsafe { (self.fragment)(name, name, 0, into) });
        let all = all.ok_or("torch took no operators")?;
        for &(operator, schema, _) in operators {
            // SAFETY: as above.
            let status = unsafe {
                match self.define_tagged {
                    Some((define, tag)) => define(all, schema.as_ptr(), &tag(), 1),
                    None => (self.define)(all, schema.as_ptr()),
                }
            };
            if status != 0 {
                return Err(format!("torch took no operator {operator:?}"));
            }
        }
        for &key in keys {
            // SAFETY: as above.
            let of_key = made.library(|into| unsafe {
                (self.library_of_key)(name, key.as_ptr(), name, 0, into)
            });
            let of_key = of_key.ok_or_else(|| format!("torch took no kernels for {key:?}"))?;
            for &(operator, _, kernel) in operators {
                // SAFETY: as above.
                if unsafe { (self.implement)(of_key, operator.as_ptr(), kernel, BUILT_FOR) } != 0 {
                    return Err(format!("torch took no kernel of {operator:?} for {key:?}"));
                }
            }
        }
        made.handles.clear();
        Ok(self.define_tagged.is_some())
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

/// Libraries of torch's dispatcher; dropped, they take back what was registered in them.
struct Libraries<'a> {
    shim: &'a Shim,
    handles: Vec<Handle>,
}

impl Libraries<'_> {
    /// The one that `make` makes.
    fn library(&mut self, make: impl FnOnce(&mut Handle) -> Status) -> Option<Handle> {
        let mut handle = null_mut();
        (make(&mut handle) == 0).then(|| {
            self.handles.push(handle);
            handle
        })
    }
}

impl Drop for Libraries<'_> {
    fn drop(&mut self) {
        for &handle in self.handles.iter().rev() {
            // SAFETY: the library is owned, and this is its end, and that of what it registered.
            unsafe { (self.shim.delete_library)(handle) };
        }
    }
}
