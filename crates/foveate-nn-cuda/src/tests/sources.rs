//! Every kernel compiled for every architecture, where NVRTC is.

use std::collections::HashSet;

use foveate_gpu::Arch;
use foveate_gpu::cache::Cache;
use foveate_gpu::nvrtc::Compiler;

use super::*;
use crate::listed::list;
use crate::params;

/// What a file takes on an architecture is within its plan: no local memory, and registers for a
/// whole CTA. Vectors are read as one instruction.
#[test]
fn every_kernel_compiles_for_every_architecture_within_its_plan() {
    let Ok(compiler) = Compiler::get() else {
        println!("skipped: no NVRTC");
        return;
    };
    for arch in [(8, 0), (8, 6), (8, 9), (9, 0), (10, 0), (12, 0)].map(Arch::new) {
        for listed in list() {
            let compiled = listed.compile(compiler, Cache::get(), arch);
            compiled.unwrap_or_else(|e| panic!("{arch} {}: {e}", listed.name()));
        }
    }
}

#[test]
fn files_declare_the_same_sizes_and_offsets() {
    let folder = tempfile::tempdir().unwrap();
    let mut declared = HashSet::new();
    let mut seen = HashSet::new();
    for listed in list() {
        if !seen.insert(listed.entries()) {
            continue;
        }
        let mut text = listed.source.text_on(MACHINE);
        for (name, size, fields) in params::structs() {
            if !text.contains(&format!("struct {name} {{")) {
                continue;
            }
            declared.insert(*name);
            text += &format!("static_assert(sizeof({name}) == {size}, \"{name}\");\n");
            for (field, offset) in *fields {
                text += &format!(
                    "static_assert(offsetof({name}, {field}) == {offset}, \"{name}.{field}\");\n"
                );
            }
        }
        if !compiled(&text, &folder.path().join("params.so")) {
            return;
        }
    }
    let all: HashSet<&str> = params::structs().iter().map(|(name, ..)| *name).collect();
    assert_eq!(declared, all);
}

#[test]
fn every_file_has_a_name_of_its_own_and_one_of_each_is_in_the_sample() {
    let all = list();
    let names: HashSet<String> = all.iter().map(|l| l.name()).collect();
    assert_eq!(names.len(), all.len());
    let kinds: HashSet<_> = all.iter().map(|l| l.source.file.name()).collect();
    let few: Vec<_> = all.iter().filter(|l| l.is_few()).map(|l| l.source.file.name()).collect();
    assert_eq!(few.len(), kinds.len());
    assert_eq!(few.into_iter().collect::<HashSet<_>>(), kinds);
}
