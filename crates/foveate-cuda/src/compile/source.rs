//! The source of a kernel: macros, arguments, printed mods, what it shares with other kernels, and
//! its own file, in this order.
//!
//! The files are part of the binary, so a machine needs no folder of sources, and the text of a
//! kernel is the whole of what NVRTC sees: no headers, no options that change its meaning.

use sha2::{Digest, Sha256};

use crate::compile::codegen::{ModsSource, PRELUDE};
use crate::compile::config::{Config, Family, Kernel};
use crate::compile::wgmma;
use foveate_gpu::nvrtc::OPTIONS;

const PARAMS: &str = include_str!("../../kernels/params.cuh");
const DEVICE: &str = include_str!("../../kernels/device.cuh");
const FORWARD_DEVICE: &str = include_str!("../../kernels/portable/forward_device.cuh");
const FORWARD_STEPS: &str = include_str!("../../kernels/forward_steps.cuh");
const FORWARD_ROW: &str = include_str!("../../kernels/forward_row.cuh");
const HOPPER: &str = include_str!("../../kernels/hopper/hopper.cuh");
const BOUNDED_WAITS: &str = include_str!("../../kernels/hopper/bounded_waits.cuh");
const RANGE_ENDS: &str = include_str!("../../kernels/range_ends.cuh");
const OWN_TABLES: &str = include_str!("../../kernels/own_tables.cuh");
const ROWS: &str = include_str!("../../kernels/rows.cuh");
const BACKWARD_DEVICE: &str = include_str!("../../kernels/backward_device.cuh");
const PORTABLE_BACKWARD: &str = include_str!("../../kernels/portable/backward_device.cuh");
const HOPPER_STEPS: &str = include_str!("../../kernels/hopper/backward_steps.cuh");
const HOPPER_KEYS: &str = include_str!("../../kernels/hopper/backward_keys.cuh");
const BACKWARD_SCORES: &str = include_str!("../../kernels/backward_scores.cuh");
const CAPTURE_SUMS: &str = include_str!("../../kernels/capture_sums.cuh");

/// What a kernel needs after the mods: shared files, then its own. Kernels without matrix products,
/// and those that a family has not got, are the portable ones.
fn files(family: Family, kernel: Kernel) -> &'static [&'static str] {
    match (kernel, family) {
        (Kernel::Forward, Family::Portable) => &[
            DEVICE,
            ROWS,
            FORWARD_STEPS,
            FORWARD_ROW,
            FORWARD_DEVICE,
            include_str!("../../kernels/portable/forward.cu"),
        ],
        (Kernel::Forward, Family::Hopper) => &[
            DEVICE,
            ROWS,
            FORWARD_STEPS,
            FORWARD_ROW,
            HOPPER,
            include_str!("../../kernels/hopper/copies.cuh"),
            include_str!("../../kernels/hopper/forward_device.cuh"),
            include_str!("../../kernels/hopper/scales.cuh"),
            include_str!("../../kernels/hopper/softmax.cuh"),
            include_str!("../../kernels/hopper/forward.cu"),
        ],
        (Kernel::RowWeightSum, Family::Portable | Family::Hopper) => {
            &[DEVICE, BACKWARD_DEVICE, include_str!("../../kernels/portable/row_weight_sum.cu")]
        }
        (Kernel::Backward, Family::Portable) => &[
            DEVICE,
            BACKWARD_DEVICE,
            PORTABLE_BACKWARD,
            BACKWARD_SCORES,
            include_str!("../../kernels/portable/backward.cu"),
        ],
        (Kernel::Backward, Family::Hopper) => &[
            DEVICE,
            BACKWARD_DEVICE,
            HOPPER,
            include_str!("../../kernels/hopper/backward_layout.cuh"),
            BACKWARD_SCORES,
            HOPPER_STEPS,
            HOPPER_KEYS,
            include_str!("../../kernels/hopper/backward_device.cuh"),
            include_str!("../../kernels/hopper/backward.cu"),
        ],
        (Kernel::BackwardDq, Family::Portable) => &[
            DEVICE,
            BACKWARD_DEVICE,
            PORTABLE_BACKWARD,
            BACKWARD_SCORES,
            include_str!("../../kernels/portable/backward_dq.cu"),
            CAPTURE_SUMS,
        ],
        (Kernel::BackwardDq, Family::Hopper) => &[
            DEVICE,
            BACKWARD_DEVICE,
            HOPPER,
            include_str!("../../kernels/hopper/backward_dq_layout.cuh"),
            BACKWARD_SCORES,
            HOPPER_STEPS,
            include_str!("../../kernels/hopper/backward_dq.cu"),
            CAPTURE_SUMS,
        ],
        (Kernel::Combine, Family::Portable | Family::Hopper) => {
            &[DEVICE, ROWS, include_str!("../../kernels/combine.cu")]
        }
        (Kernel::Delta, Family::Portable | Family::Hopper) => {
            &[DEVICE, BACKWARD_DEVICE, include_str!("../../kernels/delta.cu")]
        }
        (Kernel::Dq, Family::Portable | Family::Hopper) => {
            &[DEVICE, BACKWARD_DEVICE, include_str!("../../kernels/dq.cu")]
        }
        (Kernel::GroupSums, Family::Portable | Family::Hopper) => {
            &[DEVICE, BACKWARD_DEVICE, include_str!("../../kernels/group_sums.cu")]
        }
        (Kernel::BlockLists, Family::Portable | Family::Hopper) => {
            &[RANGE_ENDS, OWN_TABLES, include_str!("../../kernels/block_lists.cu")]
        }
        (Kernel::RangeTable, Family::Portable | Family::Hopper) => {
            &[RANGE_ENDS, include_str!("../../kernels/range_table.cu")]
        }
        (Kernel::TransposeValues, Family::Portable | Family::Hopper) => {
            &[DEVICE, include_str!("../../kernels/hopper/transpose_values.cu")]
        }
        (Kernel::Sequences, Family::Portable | Family::Hopper) => {
            &[include_str!("../../kernels/sequences.cu")]
        }
    }
}

/// The same for [`Config::is_wide_backward`].
const WIDE_BACKWARD: [&str; 8] = [
    DEVICE,
    BACKWARD_DEVICE,
    HOPPER,
    include_str!("../../kernels/hopper/backward_wide_layout.cuh"),
    BACKWARD_SCORES,
    HOPPER_STEPS,
    HOPPER_KEYS,
    include_str!("../../kernels/hopper/backward_wide.cu"),
];

/// The source of the kernel that `config` describes, for these mods.
pub fn source(config: &Config, mods: &ModsSource) -> String {
    let (defines, products) = (config.defines(), wgmma::wrappers(config));
    let mut parts = vec![defines.as_str(), PARAMS, PRELUDE, mods.text(), &products];
    parts.retain(|part| !part.is_empty());
    parts.extend(match config.is_wide_backward() {
        true => &WIDE_BACKWARD,
        false => files(config.family, config.kernel),
    });
    parts.join("\n")
}

/// Seconds that a wait of a kernel with bounded waits takes at most.
const BOUND_OF_WAITS: u32 = 5;

/// The source of a kernel of the Hopper family whose waits for mbarriers and counts end in an assertion that says
/// for what it waited, in place of never; `None` for a kernel without such waits.
pub fn source_with_bounded_waits(config: &Config, mods: &ModsSource) -> Option<String> {
    let waits = config.family == Family::Hopper && config.kernel.has_tiles();
    waits.then(|| {
        let name = config.kernel.entry().name();
        let defines =
            format!("#define BOUNDED_WAITS {BOUND_OF_WAITS}\n#define BOUNDED_KERNEL \"{name}\"\n");
        defines + &source(config, mods) + "\n" + BOUNDED_WAITS
    })
}

/// The source of kernels that try what a Hopper kernel of `config` stands on, its products and the wrappers of PTX, in
/// `text`.
#[cfg(feature = "conformance")]
pub fn probe_source(config: &Config, text: &str) -> String {
    [&config.defines(), PARAMS, &wgmma::wrappers(config), DEVICE, HOPPER, text].join("\n")
}

/// What prints mods, orders tiles and splits keys.
const AROUND: [&str; 8] = [
    include_str!("wgmma.rs"),
    include_str!("codegen/mod.rs"),
    include_str!("codegen/print.rs"),
    include_str!("codegen/captures.rs"),
    include_str!("codegen/sharing.rs"),
    include_str!("codegen/steps.rs"),
    include_str!("../choose/model.rs"),
    include_str!("../choose/schedule.rs"),
];

/// A hash of everything that decides how long a kernel of given tiles takes: every kernel file,
/// what is around them, and the compiler's options. What was measured with others is of no use.
pub fn digest() -> String {
    let mut hash = Sha256::new();
    let families = Family::ALL.into_iter();
    let all = families.flat_map(|family| Kernel::ALL.map(|kernel| files(family, kernel)));
    let kernels = all.flatten().copied().chain(WIDE_BACKWARD);
    for text in [PARAMS, PRELUDE].into_iter().chain(kernels).chain(AROUND).chain(OPTIONS.to_vec()) {
        hash.update(text);
    }
    hash.finalize()[..8].iter().map(|b| format!("{b:02x}")).collect()
}

#[cfg(test)]
mod tests {
    use foveate_mods::text::{Names, parse_score};

    use super::*;
    use crate::compile::check::compare;
    use crate::compile::codegen::{Extent, Mods, Options};
    use crate::compile::config::Elem;
    use crate::compile::resources::Resources;
    use foveate_gpu::Arch;
    use foveate_gpu::cache::Cache;
    use foveate_gpu::nvrtc::{Compiled, Compiler};

    #[test]
    fn every_kernel_is_one_source_that_compiles() {
        let compiler = match Compiler::get() {
            Ok(compiler) => compiler,
            Err(e) => return println!("skipped: {e}"),
        };
        let extent = Extent { batch: 1, heads_q: 1, heads_kv: 1, queries: 64, keys: 64 };
        let options = Options { extent, fast_math: true, checked: false, deterministic: false };
        let mods = ModsSource::new(Mods::default(), &options).unwrap();
        let short = [(1, 1), (3, 3), (5, 1)]
            .map(|(d, dv)| Config { align: 2, ..Config::new(Kernel::Forward, Elem::Bf16, d, dv) });
        for config in short {
            let made =
                Cache::at(None).compile(compiler, &source(&config, &mods), Arch::new((8, 0)));
            made.unwrap_or_else(|e| panic!("{config}: {e}"));
        }
        for kernel in Kernel::ALL {
            let config = Config::new(kernel, Elem::Bf16, 64, 64);
            let source = source(&config, &mods);
            let compiled = Cache::at(None)
                .compile(compiler, &source, Arch::new((8, 0)))
                .unwrap_or_else(|e| panic!("{e}"));
            let entry = kernel.entry().name();
            assert!(compiled.kernels.iter().any(|k| k.name == entry), "{}", compiled.log);
        }
    }

    #[test]
    fn kernels_with_bounded_waits_assert_and_others_do_not() {
        let compiler = match Compiler::get() {
            Ok(compiler) => compiler,
            Err(e) => return println!("skipped: {e}"),
        };
        let extent = Extent { batch: 1, heads_q: 1, heads_kv: 1, queries: 64, keys: 64 };
        let options = Options { extent, fast_math: true, checked: false, deterministic: false };
        let mods = ModsSource::new(Mods::default(), &options).unwrap();
        let hopper = |kernel, dim, tile_q, tile_kv, warps| Config {
            family: Family::Hopper,
            tile_q,
            tile_kv,
            warps,
            stages: 2,
            align: 16,
            overlap: true,
            ..Config::new(kernel, Elem::Bf16, dim, dim)
        };
        let backward = hopper(Kernel::Backward, 64, 64, 128, 12);
        for config in [
            hopper(Kernel::Forward, 64, 128, 128, 12),
            Config { ordered_dq: true, deterministic: true, ..backward.clone() },
            backward,
            Config { separate_dq: true, ..hopper(Kernel::Backward, 256, 64, 64, 12) },
            hopper(Kernel::BackwardDq, 64, 128, 64, 12),
        ] {
            let compiled = |text: &str| {
                let made = Cache::at(None).compile(compiler, text, Arch::new((9, 0)).specific());
                made.unwrap_or_else(|e| panic!("{config}: {e}"))
            };
            // The name of what a kernel calls stands in the file.
            let asserts = |cubin: &[u8]| cubin.windows(12).any(|name| name == b"__assertfail");
            let bounded = source_with_bounded_waits(&config, &mods).expect("it waits");
            let [bounded, endless] = [bounded, source(&config, &mods)].map(|text| compiled(&text));
            assert!(asserts(&bounded.cubin) && !asserts(&endless.cubin), "{config}");
            let counts = |cubin: &[u8]| cubin.windows(14).any(|name| name == b"named_arrivals");
            assert!(counts(&bounded.cubin) && !counts(&endless.cubin), "{config}: named barriers");
            // A role that did not get its registers, of roles that do, would wait for ever.
            let registers = |made: &Compiled| {
                made.instructions(config.kernel.entry().name()).expect("it is there").registers
            };
            assert_eq!(registers(&bounded), registers(&endless), "{config}");
        }
        let portable = Config::new(Kernel::Forward, Elem::Bf16, 64, 64);
        assert_eq!(source_with_bounded_waits(&portable, &mods), None);
    }

    #[test]
    fn hopper_backwards_lay_out_as_much_shared_memory_as_is_planned() {
        let compiler = match Compiler::get() {
            Ok(compiler) => compiler,
            Err(e) => return println!("skipped: {e}"),
        };
        let of_family = |kernel| files(Family::Hopper, kernel);
        // The files of each kernel, the tile that a consumer's rows make, and where its layout is.
        let narrow = (Kernel::Backward, of_family(Kernel::Backward), 128);
        let wide = (Kernel::Backward, &WIDE_BACKWARD[..], 64);
        let dq = (Kernel::BackwardDq, of_family(Kernel::BackwardDq), 128);
        let both = [(64, 2), (64, 3), (64, 4), (128, 2), (128, 3)];
        let keys = [(32, 2), (48, 2), (64, 2), (64, 3), (80, 2), (96, 4), (128, 2)];
        let dims: [(usize, usize); 10] = [
            (8, 8),
            (16, 128),
            (64, 64),
            (72, 40),
            (128, 64),
            (128, 128),
            (136, 8),
            (192, 128),
            (160, 192),
            (256, 256),
        ];
        let mut compared = [0; 3];
        for ((kernel, files, rows), count) in [narrow, wide, dq].into_iter().zip(&mut compared) {
            let is_layout = |file: &&str| file.starts_with("// Tiles of fv_backward");
            let before = files.iter().position(is_layout).expect("it is in the list");
            for (dim, dim_v) in dims {
                for &(side, stages) in if kernel.owns_keys() { &both[..] } else { &keys } {
                    let (tile_q, tile_kv) =
                        if kernel.owns_keys() { (side, rows) } else { (rows, side) };
                    let config = Config {
                        family: Family::Hopper,
                        tile_q,
                        tile_kv,
                        warps: 12,
                        stages,
                        separate_dq: kernel.owns_keys() && rows == 64,
                        ..Config::new(kernel, Elem::Bf16, dim, dim_v)
                    };
                    if Resources::of(&config).is_err() {
                        continue;
                    }
                    let defines = config.defines();
                    let text = [&[defines.as_str(), PARAMS, PRELUDE], &files[..=before]];
                    let entry = kernel.entry().name();
                    // What the comparison looks for beside the number.
                    let text = format!(
                        "{}\nextern \"C\" __global__ void {entry}() {{}}\n",
                        text.concat().join("\n")
                    );
                    let compiled = Cache::at(None).compile(compiler, &text, Arch::new((9, 0)));
                    let compiled = compiled.unwrap_or_else(|e| panic!("{config}: {e}"));
                    assert_eq!(compare(&config, &compiled).unwrap(), Ok(()), "{config}");
                    *count += 1;
                }
            }
        }
        assert!(compared.iter().all(|&count| count > 5), "{compared:?} configurations");
    }

    #[test]
    fn a_long_score_stands_once_and_not_for_every_entry() {
        let compiler = match Compiler::get() {
            Ok(compiler) => compiler,
            Err(e) => return println!("skipped: {e}"),
        };
        let extent = Extent { batch: 1, heads_q: 1, heads_kv: 1, queries: 64, keys: 64 };
        let text = "let x = score * 0.7 + tanh(f32(q - kv) * 0.01); let y = sigmoid(x) * erf(x * 0.5); \
                    x * exp(-y * y) + sin(y) / (1.5 + y * y) - cos(x) * log(abs(x) + 1.0)";
        let score = parse_score(text, &Names::new()).unwrap();
        let gradient = score.gradient().unwrap();
        let long = Mods { score: Some(&score), gradient: Some(&gradient), ..Mods::default() };
        for (dtype, fast_math) in [(Elem::Bf16, true), (Elem::F32, false)] {
            let options = Options { extent, fast_math, checked: false, deterministic: false };
            for kernel in [Kernel::Forward, Kernel::Backward] {
                // Of the smallest head dim: products are compiled in no time, and the more of the
                // machine code is the score's.
                let plain = Config { warps: 2, stages: 1, ..Config::new(kernel, dtype, 16, 16) };
                let scored = Config { score: true, dscore: true, ..plain.clone() };
                let [plain, scored] =
                    [(plain, Mods::default()), (scored, long)].map(|(config, mods)| {
                        let mods = ModsSource::new(mods, &options).unwrap();
                        Cache::at(None)
                            .compile(compiler, &source(&config, &mods), Arch::new((9, 0)))
                            .unwrap()
                            .cubin
                            .len()
                    });
                let said = format!("{kernel} {}: {plain} B plain, {scored} B", dtype.name());
                println!("{said}");
                assert!(2 * scored < 5 * plain, "{said}");
            }
        }
    }
}
