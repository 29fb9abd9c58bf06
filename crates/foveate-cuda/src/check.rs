//! Whether compiled kernels are what was planned, and the list of kernels on which that is seen
//! without a GPU.

mod list;

use crate::config::{Config, Kernel};
use crate::error::CudaError;
use crate::resources::{LOCAL_BYTES_ALLOWED, Resources, shared_bytes_of};
use foveate_gpu::GpuErrorKind;
use foveate_gpu::cubin;
use foveate_gpu::nvrtc::{Compiled, KernelResources};

pub use list::{ARCHS, Checked, DIMS, Kind, Listed, list};

/// What a compiled kernel takes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct Taken {
    /// Registers a thread.
    pub registers: u32,
    /// Bytes of local memory a thread, spills included: the memory, and not the instructions that
    /// write and read it.
    pub local_bytes: u32,
    /// Bytes of shared memory a block asks for at its launch.
    pub shared_bytes: u32,
}

/// What a compiled kernel takes beyond its plan.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Excess {
    /// What it takes.
    pub taken: Taken,
    /// Of what it takes too much, with the numbers.
    pub reason: String,
}

/// Compares what NVRTC says of every entry point of a compiled file with what was planned for its
/// kernel. A kernel that is only slower than planned, since its registers or its local memory are
/// more, runs for whoever has nothing better: the inner error is of the entry with the most.
///
/// # Errors
/// [`GpuErrorKind::Resources`] when the kernel is not there or shared memory is not what the
/// formula gives: it must not run.
pub fn compare(config: &Config, compiled: &Compiled) -> Result<Result<(), Excess>, CudaError> {
    let wrong = |reason: String| -> CudaError {
        GpuErrorKind::Resources { kernel: config.to_string(), reason }.into()
    };
    let main = config.kernel.entry();
    if !compiled.kernels.iter().any(|k| k.name == main) {
        return Err(wrong(format!("the compiled source has no `{main}`")));
    }
    let planned = Resources::of(config).map_err(|refusal| wrong(refusal.to_string()))?;
    // Block lists ask for as much as a row of tiles is long, which is known at the launch only.
    let states = config.kernel != Kernel::BlockLists;
    let stated = cubin::constant(&compiled.cubin, "fv_shared_bytes");
    if states && stated != i32::try_from(planned.shared_bytes).ok() {
        let stated = stated.map_or("nothing".to_owned(), |bytes| format!("{bytes} B"));
        return Err(wrong(format!(
            "it states {stated} of shared memory, but {} B are planned",
            planned.shared_bytes
        )));
    }
    if let Some(entry) = compiled.kernels.iter().find(|k| k.static_shared_bytes != 0) {
        let KernelResources { name, static_shared_bytes: bytes, .. } = entry;
        return Err(wrong(format!(
            "`{name}` has {bytes} B of static shared memory, none is planned"
        )));
    }
    let all = compiled.kernels.iter().filter_map(|entry| excess(&planned, entry));
    let worst = all.max_by_key(|excess| (excess.taken.local_bytes, excess.taken.registers));
    Ok(worst.map_or(Ok(()), Err))
}

/// What an entry point takes beyond the plan of its file.
fn excess(planned: &Resources, entry: &KernelResources) -> Option<Excess> {
    let taken = taken(planned, entry);
    let too_much = if taken.local_bytes > LOCAL_BYTES_ALLOWED {
        format!("{} B of local memory, {LOCAL_BYTES_ALLOWED} are allowed", taken.local_bytes)
    } else if taken.registers as usize > planned.registers {
        format!("{} registers, the bound is {}", taken.registers, planned.registers)
    } else {
        return None;
    };
    Some(Excess { taken, reason: format!("a thread of `{}` takes {too_much}", entry.name) })
}

fn taken(planned: &Resources, entry: &KernelResources) -> Taken {
    Taken {
        registers: entry.registers,
        local_bytes: entry.stack_bytes,
        shared_bytes: shared_bytes_of(&entry.name, planned),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::Elem;

    fn compiled(entries: &[(&str, u32, u32)]) -> Compiled {
        let kernels = entries.iter().map(|&(name, registers, stack_bytes)| KernelResources {
            name: name.to_owned(),
            registers,
            stack_bytes,
            ..KernelResources::default()
        });
        Compiled { cubin: Vec::new(), log: String::new(), kernels: kernels.collect() }
    }

    #[test]
    fn every_entry_of_a_file_is_compared_with_its_plan() {
        // Block lists state no shared memory, so that no machine code is needed.
        let config = Config::new(Kernel::BlockLists, Elem::Bf16, 64, 64);
        let found = |entries: &[(&str, u32, u32)]| compare(&config, &compiled(entries));
        assert_eq!(found(&[("fv_block_lists", 40, 0), ("fv_more", 96, 40)]).unwrap(), Ok(()));
        let more = found(&[("fv_block_lists", 40, 0), ("fv_more", 97, 0)]).unwrap().unwrap_err();
        assert_eq!(more.reason, "a thread of `fv_more` takes 97 registers, the bound is 96");
        assert_eq!(more.taken.registers, 97);
        let local = found(&[("fv_more", 8, 48), ("fv_block_lists", 40, 0)]).unwrap().unwrap_err();
        assert!(local.reason.starts_with("a thread of `fv_more` takes 48 B of local memory, 40 "));
        let none = found(&[("fv_more", 8, 0)]).unwrap_err().to_string();
        assert!(none.ends_with("the compiled source has no `fv_block_lists`"), "{none}");
    }
}
