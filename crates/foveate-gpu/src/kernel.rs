//! Kernels of a crate: source, the plan of what they take, launches with typed parameters.
//!
//! [`Engine::kernel`] compiles a [`KernelSource`] through the cache, compares the machine code with
//! what its author [`Expected`], and loads it. The front page of this crate shows one from source to
//! launch. A crate that selects among configurations takes the steps one by one:
//! [`Engine::compiled`], [`Expected::compare`], [`Engine::load`].

use crate::abi::Abi;
use crate::arch::Arch;
use crate::cubin;
use crate::driver::{Function, Launch};
use crate::engine::Engine;
use crate::error::{GpuError, GpuErrorKind};
use crate::nvrtc::{Advisory, Compiled, KernelResources};
use crate::queue::Queue;

/// The constant by which a source states the dynamic shared memory of its kernels, in bytes:
/// `extern "C" __device__ const int fv_shared_bytes = ...;`.
pub const SHARED_BYTES_CONSTANT: &str = "fv_shared_bytes";

/// CUDA C++ and the architecture it is for.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct KernelSource {
    /// One file without `#include`. Its kernels are `extern "C" __global__`.
    pub text: String,
    /// What it is compiled for.
    pub arch: Arch,
}

/// What a compiled file may take, as its author planned it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Expected<'a> {
    /// The name of the plan in errors.
    pub name: &'a str,
    /// The kernel that the file is for. Bounds hold for every kernel of the file.
    pub entry: &'a str,
    /// Registers of a thread at most.
    pub registers: u32,
    /// Bytes of local memory of a thread at most, spills included.
    pub local_bytes: u32,
    /// Bytes of shared memory of a CTA that the source fixes, of each kernel exactly.
    pub static_shared_bytes: u32,
    /// Bytes of dynamic shared memory that the source must state
    /// ([`SHARED_BYTES_CONSTANT`]); `None` where it states none.
    pub shared_bytes: Option<u32>,
}

/// A kernel that takes more registers or local memory than expected, or whose `wgmma` or `setmaxnreg`
/// the assembler did not leave as they are written. It runs, but slower.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Excess {
    /// What it takes.
    pub taken: KernelResources,
    /// What the assembler did to the file, where that is what is wrong.
    pub advisory: Option<Advisory>,
    /// Of what it takes too much, with the numbers.
    pub reason: String,
}

impl Expected<'_> {
    /// Compares every kernel of a compiled file with the plan. The inner error is the kernel with
    /// the most local memory, then registers, of those that are only slower than planned: whoever
    /// has nothing better may run it. Where the assembler serialised `wgmma` or dropped `setmaxnreg`
    /// anywhere in the file ([`Advisory::is_slow`]), that is the error, whatever the kernels take.
    ///
    /// # Errors
    /// [`GpuErrorKind::Resources`] when the kernel is not there, or shared memory is not what was
    /// planned: it must not run.
    pub fn compare(&self, compiled: &Compiled) -> Result<Result<(), Excess>, GpuError> {
        let wrong = |reason: String| -> GpuError {
            GpuErrorKind::Resources { kernel: self.name.to_owned(), reason }.into()
        };
        if !compiled.kernels.iter().any(|k| k.name == self.entry) {
            return Err(wrong(format!("the compiled source has no `{}`", self.entry)));
        }
        if let Some(planned) = self.shared_bytes {
            let stated = cubin::constant(&compiled.cubin, SHARED_BYTES_CONSTANT);
            if stated != i32::try_from(planned).ok() {
                let stated = stated.map_or("nothing".to_owned(), |bytes| format!("{bytes} B"));
                return Err(wrong(format!(
                    "it states {stated} of shared memory, but {planned} B are planned"
                )));
            }
        }
        let planned = self.static_shared_bytes;
        if let Some(entry) = compiled.kernels.iter().find(|k| k.static_shared_bytes != planned) {
            let KernelResources { name, static_shared_bytes: bytes, .. } = entry;
            let planned = if planned == 0 { "none is".into() } else { format!("{planned} B are") };
            return Err(wrong(format!(
                "`{name}` has {bytes} B of static shared memory, {planned} planned"
            )));
        }
        if let Some(advisory) = compiled.advisories.iter().find(|advisory| advisory.is_slow()) {
            let named = |k: &&KernelResources| Some(&k.name) == advisory.function.as_ref();
            let entry = |k: &&KernelResources| k.name == self.entry;
            let taken = compiled.kernels.iter().find(named);
            let taken = taken.or_else(|| compiled.kernels.iter().find(entry));
            let taken = taken.expect("the entry is there, checked above").clone();
            let (reason, advisory) = (advisory.to_string(), Some(advisory.clone()));
            return Ok(Err(Excess { taken, advisory, reason }));
        }
        let all = compiled.kernels.iter().filter_map(|entry| self.excess(entry));
        let worst = all.max_by_key(|excess| (excess.taken.local_bytes, excess.taken.registers));
        Ok(worst.map_or(Ok(()), Err))
    }

    /// What a kernel takes beyond the plan.
    fn excess(&self, taken: &KernelResources) -> Option<Excess> {
        let too_much = if taken.local_bytes > self.local_bytes {
            format!("{} B of local memory, {} are allowed", taken.local_bytes, self.local_bytes)
        } else if taken.registers > self.registers {
            format!("{} registers, the bound is {}", taken.registers, self.registers)
        } else {
            return None;
        };
        let reason = format!("a thread of `{}` takes {too_much}", taken.name);
        Some(Excess { taken: taken.clone(), advisory: None, reason })
    }
}

/// A kernel on a device, which was compared with its plan. Cheap to clone.
#[derive(Clone, Debug)]
pub struct LoadedKernel {
    function: Function,
}

impl Engine {
    /// The kernel `expected.entry` of `source`: compiled or found compiled, compared with its plan,
    /// loaded, and allowed the dynamic shared memory that it states.
    ///
    /// # Errors
    /// Those of [`Self::compiled`] and [`Self::load`]; [`GpuErrorKind::Resources`] when it takes more
    /// than was expected.
    pub fn kernel(
        &self,
        source: &KernelSource,
        expected: &Expected<'_>,
    ) -> Result<LoadedKernel, GpuError> {
        let compiled = self.compiled(&source.text, source.arch)?;
        expected.compare(&compiled)?.map_err(|Excess { reason, .. }| GpuErrorKind::Resources {
            kernel: expected.name.to_owned(),
            reason,
        })?;
        let shared_bytes = expected.shared_bytes.unwrap_or(0);
        Ok(LoadedKernel { function: self.load(&compiled, expected.entry, shared_bytes)? })
    }
}

impl LoadedKernel {
    /// Its name.
    pub fn name(&self) -> &str {
        self.function.name()
    }

    /// Queues a launch with one value for each parameter of the kernel.
    ///
    /// # Errors
    /// Those of [`Function::launch`].
    ///
    /// # Safety
    /// What the kernel reads and writes through addresses and tensor maps among the parameters is
    /// device memory that stays allocated until it has run
    /// ([`Accesses`](crate::access::Accesses) checks tensors; memory of the same queue's pool may be
    /// dropped at once).
    pub unsafe fn launch(
        &self,
        queue: &Queue,
        launch: &Launch,
        parameters: impl Parameters,
    ) -> Result<(), GpuError> {
        let bytes = parameters.bytes();
        let bytes: Vec<&[u8]> = bytes.iter().map(Vec::as_slice).collect();
        // SAFETY: the caller's promise is the same.
        unsafe { self.function.launch(queue.stream(), launch, &bytes) }
    }
}

/// The parameters of a kernel in their order: a tuple of values that know their bytes ([`Abi`]).
pub trait Parameters {
    /// The bytes of each parameter.
    fn bytes(&self) -> Vec<Vec<u8>>;
}

macro_rules! tuples {
    ($(($($t:ident)*))*) => {$(
        impl<$($t: Abi),*> Parameters for ($($t,)*) {
            fn bytes(&self) -> Vec<Vec<u8>> {
                #[allow(non_snake_case)]
                let ($($t,)*) = self;
                vec![$($t.bytes()),*]
            }
        }
    )*};
}

tuples! {
    (A) (A B) (A B C) (A B C D) (A B C D E) (A B C D E F) (A B C D E F G) (A B C D E F G H)
}

#[cfg(test)]
mod tests {
    use super::*;

    const EXPECTED: Expected<'static> = Expected {
        name: "scale f32",
        entry: "scale",
        registers: 96,
        local_bytes: 40,
        static_shared_bytes: 0,
        shared_bytes: None,
    };

    fn compiled(entries: &[(&str, u32, u32, u32)]) -> Compiled {
        let kernels = entries.iter().map(|&(name, registers, local_bytes, static_shared_bytes)| {
            let name = name.to_owned();
            let spill_bytes = 0;
            KernelResources { name, registers, spill_bytes, local_bytes, static_shared_bytes }
        });
        let (arch, log) = (Arch::new((9, 0)), String::new());
        let (cubin, advisories) = (Vec::new(), Vec::new());
        Compiled { arch, cubin, log, kernels: kernels.collect(), advisories }
    }

    #[test]
    fn every_kernel_of_a_file_is_compared_with_its_plan() {
        let found = |entries: &[(&str, u32, u32, u32)]| EXPECTED.compare(&compiled(entries));
        assert_eq!(found(&[("scale", 40, 0, 0), ("more", 96, 40, 0)]).unwrap(), Ok(()));
        let more = found(&[("scale", 40, 0, 0), ("more", 97, 0, 0)]).unwrap().unwrap_err();
        assert_eq!(more.reason, "a thread of `more` takes 97 registers, the bound is 96");
        assert_eq!(more.taken.registers, 97);
        let local = found(&[("more", 99, 0, 0), ("scale", 8, 48, 0)]).unwrap().unwrap_err();
        assert_eq!(local.reason, "a thread of `scale` takes 48 B of local memory, 40 are allowed");
        let refused = |entries: &[(&str, u32, u32, u32)]| found(entries).unwrap_err().to_string();
        assert_eq!(
            refused(&[("more", 8, 0, 0)]),
            "kernel scale f32: the compiled source has no `scale`"
        );
        assert_eq!(
            refused(&[("scale", 8, 0, 16)]),
            "kernel scale f32: `scale` has 16 B of static shared memory, none is planned"
        );
        let stated = Expected { shared_bytes: Some(4096), ..EXPECTED };
        assert_eq!(
            stated.compare(&compiled(&[("scale", 8, 0, 0)])).unwrap_err().to_string(),
            "kernel scale f32: it states nothing of shared memory, but 4096 B are planned"
        );
    }

    #[test]
    fn a_serialised_kernel_gives_way_whatever_it_takes() {
        let advisory =
            |code, text: &str| Advisory { code, function: Some("more".into()), text: text.into() };
        let inserted = Compiled {
            advisories: vec![advisory(7519, "warpgroup.arrive is injected")],
            ..compiled(&[("scale", 40, 0, 0), ("more", 96, 40, 0)])
        };
        assert_eq!(EXPECTED.compare(&inserted).unwrap(), Ok(()), "a fence costs nothing");
        let mut serialised = inserted;
        serialised.advisories.push(advisory(7510, "wgmma.mma_async instructions are serialized"));
        let Excess { taken, advisory, reason } =
            EXPECTED.compare(&serialised).unwrap().unwrap_err();
        assert_eq!((taken.name.as_str(), advisory.unwrap().code), ("more", 7510));
        assert_eq!(reason, "wgmma serialised (C7510, a call) in `more`");
    }

    #[test]
    fn parameters_are_the_bytes_of_their_values() {
        let bytes = (7u64, 1.5f32, -1i32).bytes();
        assert_eq!(bytes, [7u64.to_ne_bytes().to_vec(), 1.5f32.to_ne_bytes().into(), vec![255; 4]]);
    }
}
