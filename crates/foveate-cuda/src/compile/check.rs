//! Whether compiled kernels are what was planned.

use super::config::{Config, Entry};
use super::machine_code::MachineCode;
use super::resources::{Resources, local_bytes_allowed, shared_bytes_of};
use crate::error::CudaError;
use foveate_gpu::GpuErrorKind;
use foveate_gpu::kernel::{Excess, Expected};
use foveate_gpu::nvrtc::{Compiled, KernelResources};

/// What a compiled kernel takes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct Taken {
    /// Registers a thread.
    pub registers: u32,
    /// Bytes of local memory a thread, spills included: the memory, and not the instructions that
    /// write and read it.
    pub local_bytes: u32,
    /// Bytes of shared memory a CTA asks for at its launch.
    pub shared_bytes: u32,
    /// Instructions that read or write local memory among the products of a Hopper kernel.
    pub local_among_products: u32,
}

/// Compares what NVRTC says of every entry point of a compiled file with what was planned for its
/// kernel. A kernel that is only slower than planned, since its registers or its local memory are
/// more, runs for whoever has nothing better: the inner error is of the entry with the most.
///
/// # Errors
/// [`GpuErrorKind::Resources`] when the kernel is not there or shared memory is not what the
/// formula gives: it must not run.
pub fn compare(config: &Config, compiled: &Compiled) -> Result<Result<(), Excess>, CudaError> {
    let (name, entry) = (config.to_string(), config.kernel.entry().name());
    let planned = Resources::of(config).map_err(|refusal| -> CudaError {
        GpuErrorKind::Resources { kernel: name.clone(), reason: refusal.to_string() }.into()
    })?;
    let expected = Expected {
        name: &name,
        entry,
        registers: planned.registers as u32,
        local_bytes: local_bytes_allowed(config),
        static_shared_bytes: 0,
        shared_bytes: config
            .kernel
            .has_planned_shared_memory()
            .then_some(planned.shared_bytes as u32),
    };
    Ok(expected.compare(compiled)?)
}

/// Compares the machine code of a kernel of the Hopper family with its source: products, waits for them,
/// copies and the registers of its roles. `planned` is what was planned for it.
///
/// # Errors
/// [`GpuErrorKind::Resources`] when there are more or fewer.
pub fn compare_code(
    config: &Config,
    planned: &Resources,
    compiled: &Compiled,
) -> Result<(), CudaError> {
    let Some(written) = MachineCode::written(config, planned) else { return Ok(()) };
    let found = compiled.instructions(config.kernel.entry().name()).unwrap_or_default();
    written.compare(&MachineCode::found(&found)).map_err(|differences| {
        let reason = format!("its machine code is not what its source says: {differences}");
        GpuErrorKind::Resources { kernel: config.to_string(), reason }.into()
    })
}

/// What an entry point takes, in a compiled file of a kernel for which `planned` was planned.
pub fn taken(planned: &Resources, compiled: &Compiled, entry: &KernelResources) -> Taken {
    let own = || planned.shared_bytes as u32;
    let code = compiled.instructions(&entry.name).unwrap_or_default();
    Taken {
        local_among_products: code.local_among_products,
        registers: entry.registers,
        local_bytes: entry.local_bytes,
        shared_bytes: Entry::named(&entry.name).map_or_else(own, |e| shared_bytes_of(e, planned)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::compile::config::{Elem, Kernel};
    use crate::compile::resources::LOCAL_BYTES_ALLOWED;
    use foveate_gpu::Arch;

    fn compiled(entries: &[(&str, u32, u32)]) -> Compiled {
        let kernels = entries.iter().map(|&(name, registers, local_bytes)| KernelResources {
            name: name.to_owned(),
            registers,
            local_bytes,
            ..KernelResources::default()
        });
        let (arch, log) = (Arch::new((9, 0)), String::new());
        let (cubin, advisories) = (Vec::new(), Vec::new());
        Compiled { arch, cubin, log, kernels: kernels.collect(), advisories }
    }

    #[test]
    fn every_entry_of_a_file_is_compared_with_the_plan_of_its_configuration() {
        // Block lists state no shared memory, so that no machine code is needed.
        let config = Config::new(Kernel::BlockLists, Elem::Bf16, 64, 64);
        let found = |entries: &[(&str, u32, u32)]| compare(&config, &compiled(entries));
        let allowed = [("fv_block_lists", 40, 0), ("fv_more", 96, LOCAL_BYTES_ALLOWED)];
        assert_eq!(found(&allowed).unwrap(), Ok(()));
        let more = found(&[("fv_block_lists", 40, 0), ("fv_more", 97, 0)]).unwrap().unwrap_err();
        assert_eq!(more.reason, "a thread of `fv_more` takes 97 registers, the bound is 96");
        let local = found(&[("fv_more", 8, 48), ("fv_block_lists", 40, 0)]).unwrap().unwrap_err();
        assert!(local.reason.starts_with("a thread of `fv_more` takes 48 B of local memory, 40 "));
        let none = found(&[("fv_more", 8, 0)]).unwrap_err().to_string();
        assert!(none.ends_with("the compiled source has no `fv_block_lists`"), "{none}");
    }
}
