//! NVRTC: CUDA C++ to a cubin for a real architecture.
//!
//! The cubin and not PTX: a driver loads cubins of every compiler of its major version, but
//! refuses PTX of a newer one. The log of a compilation is always kept, and what it says about
//! each kernel (registers, spills, shared memory, what became of `wgmma`) is read out of it.

mod advisories;

use std::ffi::{CStr, CString, c_char, c_int, c_void};
use std::fmt;
use std::ptr;
use std::sync::OnceLock;

use crate::arch::Arch;
use crate::cubin::{self, Instructions};
use crate::error::{GpuError, GpuErrorKind};
use crate::library::Library;
use crate::loader::functions;
pub use advisories::{Advisory, AdvisoryKind};

type Program = *mut c_void;

functions! {
    /// NVRTC's functions, unchanged since CUDA 11.1.
    Functions of Library::Nvrtc;

    version "nvrtcVersion" (*mut c_int, *mut c_int) -> c_int;
    create "nvrtcCreateProgram" (*mut Program, *const c_char, *const c_char, c_int,
                                 *const *const c_char, *const *const c_char) -> c_int;
    destroy "nvrtcDestroyProgram" (*mut Program) -> c_int;
    compile "nvrtcCompileProgram" (Program, c_int, *const *const c_char) -> c_int;
    log_size "nvrtcGetProgramLogSize" (Program, *mut usize) -> c_int;
    log "nvrtcGetProgramLog" (Program, *mut c_char) -> c_int;
    cubin_size "nvrtcGetCUBINSize" (Program, *mut usize) -> c_int;
    cubin "nvrtcGetCUBIN" (Program, *mut c_char) -> c_int;
}

/// The compiler, opened once in a process. Compilations may run on several threads at once.
pub struct Compiler {
    functions: Functions,
    version: (i32, i32),
}

/// A compiled source.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Compiled {
    /// What it was compiled for.
    pub arch: Arch,
    /// Machine code for one architecture.
    pub cubin: Vec<u8>,
    /// What NVRTC and its assembler said.
    pub log: String,
    /// One entry for each kernel.
    pub kernels: Vec<KernelResources>,
    /// What the assembler did to `wgmma` and `setmaxnreg`.
    pub advisories: Vec<Advisory>,
}

impl Compiled {
    /// Machine code and the log that says what its kernels take.
    pub(crate) fn new(arch: Arch, cubin: Vec<u8>, log: String) -> Self {
        let (kernels, advisories) = (resources(&log), Advisory::of(&log));
        Self { arch, cubin, log, kernels, advisories }
    }

    /// A kernel of the machine code that the log does not speak of. A log without kernels has no
    /// advisories either, whatever became of them.
    pub(crate) fn unreported(&self) -> Option<&str> {
        let names = cubin::kernels(&self.cubin).into_iter().map(|kernel| kernel.name);
        names.into_iter().find(|name| !self.kernels.iter().any(|k| k.name == *name))
    }

    /// The instructions of a kernel, counted; `None` when it is not there.
    pub fn instructions(&self, kernel: &str) -> Option<Instructions> {
        let kernels = cubin::kernels(&self.cubin);
        kernels.iter().find(|k| k.name == kernel).map(|k| Instructions::of(k.code))
    }
}

/// What a kernel takes of an SM, as the assembler reports it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct KernelResources {
    /// Name of the entry point.
    pub name: String,
    /// Registers a thread.
    pub registers: u32,
    /// Bytes a thread writes and reads back for want of registers.
    pub spill_bytes: u32,
    /// Bytes of local memory a thread (spills included).
    pub local_bytes: u32,
    /// Bytes of shared memory a CTA that the source fixes; what is asked for at a launch is
    /// not among them.
    pub static_shared_bytes: u32,
}

impl fmt::Display for KernelResources {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{}: {} registers, {} B spilled, {} B of local memory, {} B of static shared memory",
            self.name, self.registers, self.spill_bytes, self.local_bytes, self.static_shared_bytes
        )
    }
}

/// Options that every compilation gets, beside the architecture.
pub const OPTIONS: &[&str] = &["--std=c++17", "-default-device", "--ptxas-options=-v"];

impl Compiler {
    /// The compiler of this machine.
    ///
    /// # Errors
    /// When NVRTC is not found, with advice.
    pub fn get() -> Result<&'static Self, GpuError> {
        static COMPILER: OnceLock<Result<Compiler, GpuError>> = OnceLock::new();
        COMPILER.get_or_init(Self::open).as_ref().map_err(Clone::clone)
    }

    fn open() -> Result<Self, GpuError> {
        let functions = Functions::load()?;
        let (mut major, mut minor) = (0, 0);
        // SAFETY: both pointers are valid for a write.
        let code = unsafe { (functions.version)(&mut major, &mut minor) };
        if code != 0 {
            let (doing, library) = ("asking for its version".to_owned(), Library::Nvrtc);
            let says = "that it cannot tell".to_owned();
            return Err(GpuErrorKind::Library { doing, library, code, says }.into());
        }
        Ok(Self { functions, version: (major, minor) })
    }

    /// Major and minor version.
    pub fn version(&self) -> (i32, i32) {
        self.version
    }

    /// Compiles `source` for `arch`. Outside this crate sources go through
    /// [`Cache::compile`](crate::cache::Cache::compile).
    ///
    /// # Errors
    /// [`GpuErrorKind::UnknownArchitecture`]; [`GpuErrorKind::Compile`] with the log when NVRTC
    /// refuses the source.
    pub(crate) fn compile(&self, source: &str, arch: Arch) -> Result<Compiled, GpuError> {
        // From 12.9 on NVRTC has a cache of its own. What comes out of it, after another process
        // compiled the same, has an empty log: neither what kernels take nor what became of them.
        let no_cache: &[&str] = if self.version >= (12, 9) { &["--no-cache"] } else { &[] };
        let refused = |log: String| -> GpuError { GpuErrorKind::Compile { arch, log }.into() };
        let Ok(text) = CString::new(source) else {
            return Err(refused("error: the source has a NUL character".into()));
        };
        let mut program = Made { of: &self.functions, program: ptr::null_mut() };
        // SAFETY: `text` is NUL-terminated and outlives the call, which copies it; there are no
        // headers, so their arrays may be null.
        let code = unsafe {
            (self.functions.create)(
                &mut program.program,
                text.as_ptr(),
                c"foveate.cu".as_ptr(),
                0,
                ptr::null(),
                ptr::null(),
            )
        };
        if code != 0 {
            return Err(refused(format!("error: NVRTC cannot make a program ({code})")));
        }
        let options: Vec<CString> = OPTIONS
            .iter()
            .chain(no_cache)
            .map(|o| (*o).to_owned())
            .chain([format!("--gpu-architecture={arch}")])
            .map(|o| CString::new(o).expect("options have no NUL"))
            .collect();
        let pointers: Vec<*const c_char> = options.iter().map(|o| o.as_ptr()).collect();
        // SAFETY: the program was made above; the options outlive the call.
        let code = unsafe {
            (self.functions.compile)(program.program, pointers.len() as c_int, pointers.as_ptr())
        };
        let log = program.bytes(self.functions.log_size, self.functions.log);
        let log = CStr::from_bytes_until_nul(&log)
            .map_or(String::new(), |l| l.to_string_lossy().into_owned());
        const INVALID_OPTION: c_int = 5;
        if code == INVALID_OPTION && log.contains("gpu-architecture") {
            let version = self.version;
            return Err(GpuErrorKind::UnknownArchitecture { arch, version }.into());
        }
        if code != 0 {
            return Err(refused(log));
        }
        let cubin = program.bytes(self.functions.cubin_size, self.functions.cubin);
        let compiled = Compiled::new(arch, cubin, log);
        match compiled.unreported() {
            None => Ok(compiled),
            Some(kernel) => Err(refused(format!("error: the log says nothing of kernel {kernel}"))),
        }
    }
}

/// Whether a driver loads the machine code of an NVRTC: see [`Library::check_driver`]. (For PTX the
/// minor version would count too.)
///
/// # Errors
/// [`GpuErrorKind::OldDriver`] with the versions that would do.
pub fn check_driver(nvrtc: (i32, i32), driver: (u32, u32)) -> Result<(), GpuError> {
    Library::Nvrtc.check_driver((nvrtc.0.unsigned_abs(), nvrtc.1.unsigned_abs()), driver)
}

/// A program of NVRTC's, destroyed with the value.
struct Made<'a> {
    of: &'a Functions,
    program: Program,
}

impl Made<'_> {
    /// What a pair of functions for size and contents gives; nothing when they fail.
    fn bytes(
        &self,
        size: unsafe extern "C" fn(Program, *mut usize) -> c_int,
        contents: unsafe extern "C" fn(Program, *mut c_char) -> c_int,
    ) -> Vec<u8> {
        let mut len = 0;
        // SAFETY: the program is alive, and `len` is valid for a write.
        if unsafe { size(self.program, &mut len) } != 0 {
            return Vec::new();
        }
        let mut bytes = vec![0u8; len];
        // SAFETY: there is room for the size that NVRTC gave.
        if unsafe { contents(self.program, bytes.as_mut_ptr().cast()) } != 0 {
            bytes.clear();
        }
        bytes
    }
}

impl Drop for Made<'_> {
    fn drop(&mut self) {
        if !self.program.is_null() {
            // SAFETY: made by `create` and destroyed only here.
            unsafe { (self.of.destroy)(&mut self.program) };
        }
    }
}

/// Reads the assembler's report, three lines a kernel:
///
/// ```text
/// ptxas info    : Compiling entry function 'fv_forward' for 'sm_90'
/// ptxas info    : Function properties for fv_forward
///     0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
/// ptxas info    : Used 168 registers, used 1 barriers, 16 bytes smem
/// ```
fn resources(log: &str) -> Vec<KernelResources> {
    let mut kernels: Vec<KernelResources> = Vec::new();
    for line in log.lines() {
        if let Some((_, rest)) = line.split_once("Compiling entry function '") {
            let name = rest.split('\'').next().unwrap_or_default().to_owned();
            kernels.push(KernelResources { name, ..Default::default() });
        }
        let Some(kernel) = kernels.last_mut() else { continue };
        let before = |what: &str| number_before(line, what);
        if let Some(stack) = before(" bytes stack frame") {
            kernel.local_bytes = kernel.local_bytes.max(stack);
            let stores = before(" bytes spill stores").unwrap_or(0);
            kernel.spill_bytes += stores + before(" bytes spill loads").unwrap_or(0);
        }
        if let Some(registers) = before(" registers") {
            kernel.registers = registers;
            kernel.static_shared_bytes = before(" bytes smem").unwrap_or(0);
        }
    }
    kernels
}

/// The number that stands before `what` in `line`.
fn number_before(line: &str, what: &str) -> Option<u32> {
    let (head, _) = line.split_once(what)?;
    let digits = head.rsplit(|c: char| !c.is_ascii_digit()).next()?;
    digits.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_assemblers_report_is_read() {
        let log = "\
ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function 'a' for 'sm_90'
ptxas info    : Function properties for a
    24 bytes stack frame, 8 bytes spill stores, 12 bytes spill loads
ptxas info    : Used 168 registers, used 1 barriers, 24 bytes cumulative stack size, 16 bytes smem
ptxas info    : Compiling entry function 'b' for 'sm_90'
ptxas info    : Function properties for b
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 8 registers, used 0 barriers
";
        let a = KernelResources {
            name: "a".into(),
            registers: 168,
            spill_bytes: 20,
            local_bytes: 24,
            static_shared_bytes: 16,
        };
        let b = KernelResources { name: "b".into(), registers: 8, ..Default::default() };
        let said =
            "a: 168 registers, 20 B spilled, 24 B of local memory, 16 B of static shared memory";
        assert_eq!(a.to_string(), said);
        assert_eq!(resources(log), [a, b]);
    }

    /// The compiler, or a line that says why the test is skipped.
    fn compiler() -> Option<&'static Compiler> {
        Compiler::get().map_err(|e| println!("skipped: {e}")).ok()
    }

    #[test]
    fn a_kernel_becomes_a_cubin_with_its_resources() {
        let Some(compiler) = compiler() else { return };
        let source = "extern \"C\" __global__ void twice(float* x) { x[threadIdx.x] *= 2.0f; }";
        let hopper = Arch::new((9, 0));
        for arch in [Arch::new((8, 0)), hopper, hopper.specific()] {
            let compiled = compiler.compile(source, arch).unwrap();
            assert_eq!(compiled.arch, arch);
            assert_eq!(&compiled.cubin[..4], b"\x7fELF");
            let [kernel] = &compiled.kernels[..] else { panic!("{:?}", compiled.kernels) };
            assert_eq!((kernel.name.as_str(), kernel.spill_bytes), ("twice", 0));
            assert!(kernel.registers > 0);
        }
    }

    #[test]
    fn a_source_that_does_not_compile_is_an_error_with_the_line() {
        let Some(compiler) = compiler() else { return };
        let error =
            compiler.compile("__global__ void f() { nothing(); }", Arch::new((8, 0))).unwrap_err();
        let said = error.to_string();
        assert!(said.starts_with("NVRTC refused a kernel for sm_80: foveate.cu(1)"), "{said}");
    }

    #[test]
    fn an_architecture_that_nvrtc_does_not_know_is_named() {
        let Some(compiler) = compiler() else { return };
        let error = compiler.compile("", Arch::new((999, 0))).unwrap_err();
        assert!(matches!(error.kind(), GpuErrorKind::UnknownArchitecture { .. }), "{error:?}");
        let (major, minor) = compiler.version();
        let said = error.to_string();
        let expected = format!("NVRTC {major}.{minor} does not compile for sm_9990; take another");
        assert!(said.starts_with(&expected), "{said}");
    }

    #[test]
    fn instructions_of_one_capability_compile_for_it_alone() {
        let Some(compiler) = compiler() else { return };
        let source = "extern \"C\" __global__ void f() { asm volatile(\"setmaxnreg.dec.sync.aligned.u32 40;\"); }";
        compiler.compile(source, Arch::new((9, 0)).specific()).unwrap();
        let error = compiler.compile(source, Arch::new((9, 0))).unwrap_err();
        assert!(matches!(error.kind(), GpuErrorKind::Compile { .. }), "{error:?}");
    }
}
