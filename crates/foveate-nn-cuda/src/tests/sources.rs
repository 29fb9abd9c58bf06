//! Every kernel compiled for every architecture, where NVRTC is.

use std::collections::HashSet;

use foveate_gpu::Arch;
use foveate_gpu::cache::Cache;
use foveate_gpu::nvrtc::Compiler;

use super::*;
use crate::launch::File;
use crate::params;

const ENTRIES: [(&str, &[&str]); 11] = [
    ("norm", &["fv_rms_norm", "fv_rms_norm_again", "fv_rms_norm_backward"]),
    ("gated", &["fv_gated", "fv_gated_backward"]),
    ("rope", &["fv_rope"]),
    ("embedding", &["fv_embedding", "fv_embedding_backward", "fv_embedding_join"]),
    ("loss", &["fv_cross_entropy", "fv_total"]),
    ("update", &["fv_update", "fv_squares", "fv_factor"]),
    ("vectors", &["fv_widen", "fv_add", "fv_copy_rows", "fv_add_rows", "fv_column_sums"]),
    ("sum_parts", &["fv_sum_parts"]),
    ("head_norm", &["fv_head_norm", "fv_head_norm_backward"]),
    ("norm of rows", &["fv_rms_norm_backward_rows"]),
    ("update_int8", &["fv_update_int8"]),
];

/// The sources that models of widths 1024 to 16384 (f32: 8192) need, by the place of their kernels in ENTRIES.
fn sources() -> HashSet<(usize, Source)> {
    let mut all = HashSet::new();
    for dtype in [DType::BF16, DType::F16, DType::F32] {
        let whole = 16 / dtype.bytes();
        for vector in [1, whole] {
            let mut add = |at, file, threads| {
                all.insert((at, Source { file, dtype, vector, threads }));
            };
            for threads in [64, 256, if dtype == DType::F32 { 512 } else { 1024 }] {
                add(0, File::RmsNorm { held: 16 / vector }, threads);
            }
            for (width, threads) in [(576, 128), (1024, 128), (2048, 64)] {
                if width <= 1024 || (vector > 1 && dtype != DType::F32) {
                    add(
                        9,
                        File::RmsNormRows { held: usize::div_ceil(width, 32 * vector) },
                        threads,
                    );
                }
            }
            add(6, File::Vectors, 256);
            add(7, File::SumParts, 1024);
            for dim in [64, 128, 256] {
                add(8, File::HeadNorm { held: usize::div_ceil(dim, 32 * vector) }, 128);
            }
            for other in [false, true] {
                add(3, File::Embedding { narrow: other }, 128);
                add(1, File::Gated { gelu: other }, 256);
                add(2, File::Rope { neighbours: other }, 128);
                add(4, File::CrossEntropy { cap: other }, 512);
            }
        }
    }
    for (weights, moments, gradients) in
        [(0, 0, 0), (1, 0, 0), (1, 0, 1), (1, 1, 0), (2, 1, 1), (0, 2, 0), (1, 2, 0), (1, 2, 1)]
    {
        for (vector, rule) in [(1, 0), (4, 0), (1, 1), (4, 1)] {
            let file = File::Update { rule, weights, moments, gradients };
            let at = if moments == 2 { 10 } else { 5 };
            all.insert((at, Source { file, dtype: DType::F32, vector, threads: 256 }));
        }
    }
    all
}

/// What a file takes on an architecture is within its plan: no local memory, and registers for a
/// whole CTA. Vectors are read as one instruction.
#[test]
fn every_kernel_compiles_for_every_architecture_within_its_plan() {
    let Ok(compiler) = Compiler::get() else {
        println!("skipped: no NVRTC");
        return;
    };
    for arch in [(8, 0), (8, 6), (8, 9), (9, 0), (10, 0), (12, 0)].map(Arch::new) {
        for (at, source) in sources() {
            let compiled = Cache::get().compile(compiler, &source.text(), arch).unwrap();
            let mut found: Vec<&str> = compiled.kernels.iter().map(|k| k.name.as_str()).collect();
            found.sort_unstable();
            let mut entries = ENTRIES[at].1.to_vec();
            entries.sort_unstable();
            assert_eq!(found, entries);
            for entry in ENTRIES[at].1 {
                let excess = source.expected(entry).compare(&compiled).unwrap();
                assert!(excess.is_ok(), "{arch} {source:?}: {excess:?}");
            }
        }
    }
}

#[test]
fn files_declare_the_same_sizes_and_offsets() {
    let folder = tempfile::tempdir().unwrap();
    let mut declared = HashSet::new();
    let mut seen = HashSet::new();
    for (at, source) in sources() {
        if !seen.insert(at) {
            continue;
        }
        let mut text = source.text_on(MACHINE);
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
