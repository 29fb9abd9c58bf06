//! The kernels between a model's products, as the list has them.
//!
//! In f16 and f32 they are listed as whole rows are read, in vectors: what reads element by element
//! has no plan that a dtype changes. sm_86 has the sample alone, as the kernels of attention.

use foveate_cuda::CudaError;
use foveate_cuda::compile::check::Taken;
use foveate_gpu::Arch;
use foveate_gpu::cache::Cache;
use foveate_gpu::nvrtc::Compiler;
use foveate_nn_cuda::listed::{self, ListedSource};

use super::list::{Checked, Cta, Listed};

/// A file of kernels for an architecture.
#[derive(Clone, Debug, PartialEq)]
pub struct ListedBlock {
    arch: Arch,
    source: ListedSource,
}

/// The files for `arch`; with `few` a sample of them.
pub fn list(arch: Arch, few: bool) -> Vec<ListedBlock> {
    let few = few || arch == Arch::new((8, 6));
    let wanted = |source: &ListedSource| {
        source.is_few() || !few && (source.reads_vectors() || source.is_bf16())
    };
    let all = listed::list().into_iter().filter(wanted);
    all.map(|source| ListedBlock { arch, source }).collect()
}

impl Listed for ListedBlock {
    fn arch(&self) -> Arch {
        self.arch
    }

    fn name(&self) -> String {
        self.source.name()
    }

    fn cta(&self) -> Cta {
        let warps = self.source.threads() / 32;
        Cta { numbers: [0, 0, warps, 0], hopper: Vec::new(), words: format!("{warps} warps") }
    }

    fn check(&self, compiler: &Compiler, cache: &Cache) -> Result<Checked, CudaError> {
        let compiled = self.source.compile(compiler, cache, self.arch)?;
        let shared_bytes = self.source.shared_bytes();
        let taken = |name: &str| {
            let kernel = compiled.kernels.iter().find(|k| k.name == name).expect("compared");
            let (registers, local_bytes) = (kernel.registers, kernel.local_bytes);
            (
                name.to_owned(),
                Taken { registers, local_bytes, shared_bytes, local_among_products: 0 },
            )
        };
        let entries = self.source.entries().into_iter().map(taken).collect();
        Ok(Checked { cta: self.cta(), entries, fallback: None, note: None })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kernels::list::ARCHS;
    use std::collections::HashSet;

    #[test]
    fn every_architecture_has_every_kernel_between_products() {
        let entries = |list: &[ListedBlock]| -> HashSet<&'static str> {
            list.iter().flat_map(|block| block.source.entries()).collect()
        };
        let every: HashSet<_> = listed::list().iter().flat_map(ListedSource::entries).collect();
        for (arch, _) in ARCHS {
            let (few, all) = (list(arch, true), list(arch, false));
            assert_eq!(entries(&few), every, "{arch}");
            assert!(few.iter().all(|block| all.contains(block)));
            let names: HashSet<String> = all.iter().map(Listed::name).collect();
            assert_eq!(names.len(), all.len());
            println!("{arch}: {} files, {} in the sample", all.len(), few.len());
        }
    }

    #[test]
    fn a_kernel_that_takes_more_than_the_table_says_is_worse() {
        let compiler = match Compiler::get() {
            Ok(compiler) => compiler,
            Err(e) => return println!("skipped: {e}"),
        };
        let block = &list(Arch::new((9, 0)), true)[0];
        let found = block.check(compiler, &Cache::at(None)).unwrap();
        assert_eq!(found.entries.len(), block.source.entries().len());
        let table = crate::kernels::table::Table::recorded().unwrap();
        let (name, taken) = crate::kernels::table::rows(block, &found).next().unwrap();
        let standing = |taken: &Taken| table.standing(block.arch, &name, &found, taken).to_string();
        assert_eq!(standing(&taken), "as recorded");
        assert_eq!(standing(&Taken { registers: 255, ..taken }), "WORSE");
        assert_eq!(standing(&Taken { shared_bytes: taken.shared_bytes + 4, ..taken }), "WORSE");
    }
}
