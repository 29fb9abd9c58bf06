//! Snapshots of printed mods, and what NVRTC says to them.

mod execute;
mod lists;
mod mask_bits;
mod operations;
mod ranges;
mod sequences;
mod sine;
mod tile_kinds;
mod tile_tables;
mod values;

use super::*;
use crate::compile::params::{BackwardParams, MODS_BYTES, PersistentParams};
use foveate_gpu::Arch;
use foveate_gpu::cache::Cache;
use foveate_gpu::nvrtc::Compiler;
use foveate_mods::{Buffer, Expr, closure, expr, masks, scores};

fn options() -> Options {
    let extent = Extent { batch: 2, heads_q: 8, heads_kv: 2, queries: 512, keys: 512 };
    Options { extent, fast_math: true, checked: false, deterministic: false }
}

/// A kernel that calls everything.
const CALLS: &str = r#"
template <int READ>
__device__ void capture(const Mods& mods, const Place& place, Int q, Int kv, float score) {
    if constexpr (READ < CAPTURE_READS) {
        const float term = Capture<READ>::term(mods, place, q, kv, score, 2.f);
        if constexpr (Capture<READ>::kind == CAPTURE_EACH) Capture<READ>::add(mods, Capture<READ>::at(mods, place, q, kv, score), term);
        else Capture<READ>::add(mods, Capture<READ>::at(mods, place, q, kv), term);
        capture<READ + 1>(mods, place, q, kv, score);
    }
}
extern "C" __global__ void calls(const __grid_constant__ Mods mods, float* out) {
    int q = threadIdx.x, kv = blockIdx.x;
    Place place = {0, int(blockIdx.y), 0, 300, 400};
    float score = out[q];
    if (fv_mask(mods, place, q, kv)) score = fv_score(mods, place, q, kv, score, float(q - kv), fv_place_reads(mods, place));
    if (fv_dropout_keep(mods, place, q, kv)) score *= fv_dropout_scale(mods);
    capture<0>(mods, place, q, kv, score);
    out[q] = fv_score_gradient(mods, place, q, kv, score, 3.f, float(q - kv));
    if (fv_cover(mods, place, q, q + 128, kv, kv + 64) == 2) out[q] = 0.f;
}
"#;

/// The text of `mods`, once NVRTC has compiled it for the oldest and the newest architecture.
fn printed(mods: Mods<'_>, options: &Options) -> String {
    let source = ModsSource::new(mods, options).unwrap();
    match Compiler::get() {
        Err(error) => println!("not compiled: {error}"),
        Ok(compiler) => {
            let text = source.text();
            let text = format!("typedef long long i64;\n{PRELUDE}{text}{CALLS}");
            for arch in [(8, 0), (9, 0), (12, 0)].map(Arch::new) {
                if let Err(error) = Cache::at(None).compile(compiler, &text, arch) {
                    panic!("{error}\n{:?}\n{}", error.kind(), source.text());
                }
            }
        }
    }
    // The functions that are the same for every mod without a mask, a score or dropout say nothing.
    let nothing = ModsSource::new(Mods::default(), options).unwrap();
    let bodies = |text: &str| -> Vec<String> {
        text.split("\n\n").map(|body| format!("{}\n", body.trim_end())).collect()
    };
    let (usual, mut all) = (bodies(nothing.text()), bodies(source.text()));
    if mods.mask.is_some() || mods.score.is_some() || mods.dropout.is_some() {
        all.retain(|body| !usual.contains(body));
    }
    all.join("\n")
}

fn of_mask(mask: &MaskMod) -> String {
    printed(Mods { mask: Some(mask), ..Mods::default() }, &options())
}

fn of_score(score: &ScoreMod, options: &Options) -> String {
    let gradient = score.gradient().unwrap();
    printed(Mods { score: Some(score), gradient: Some(&gradient), ..Mods::default() }, options)
}

fn learned(name: &str, shape: &[usize]) -> Buffer<f32> {
    Buffer::learned(name, shape, vec![0.5; shape.iter().product()]).unwrap()
}

#[test]
fn a_buffer_of_any_name_is_named_in_a_comment_of_one_line() {
    for name in ["two\nlines", "continued\\"] {
        let doc = Buffer::vector(name, vec![0i32; 512]);
        let of_mask = of_mask(&masks::document(&doc).unwrap());
        assert!(of_mask.lines().all(|line| !line.ends_with('\\')), "{of_mask}");
        let score = scores::relative_bias(&learned(name, &[8, 9])).unwrap();
        of_score(&score, &options());
    }
}

#[test]
fn an_element_past_what_an_int_counts_is_found_by_a_wide_index() {
    let axes = [4, 1 << 16, 1 << 16];
    let far = Buffer::<f32>::on_device("far", &axes).unwrap();
    let text = |first: Expr<i32>| {
        let read = far.at([first, expr::q(), expr::kv()]);
        let score = ScoreMod::new((expr::score() + read).dynamic()).unwrap();
        of_score(&score, &options())
    };
    let by_head = text(expr::h_kv());
    assert!(by_head.contains("i64(place.h_kv.v) * mods.far_1 + q.v"), "{by_head}");
    // The first of the first axis, which is nothing to add.
    let of_none = text(0.into());
    assert!(of_none.contains("i64(q.v) * mods.far_2 + kv.v"), "{of_none}");
}

#[test]
fn a_cache_that_grows_by_a_key_a_step_prints_few_texts() {
    let documents = Buffer::<i32>::vector("doc", vec![0; 4096]);
    let document = masks::document(&documents).unwrap();
    let window = masks::sliding_window(100).unwrap();
    for (mask, most) in [(masks::causal() & window, 1), (masks::causal() & document, 2)] {
        let texts = (64..=8192).step_by(64).map(|keys| {
            let extent = Extent { batch: 2, heads_q: 8, heads_kv: 2, queries: 16, keys };
            let options = Options { extent, ..options() };
            let mods = Mods { mask: Some(&mask), ..Mods::default() };
            ModsSource::new(mods, &options).unwrap().text().to_owned()
        });
        let different: std::collections::HashSet<String> = texts.collect();
        // One while a buffer is at least as long as the keys, one that clamps beyond.
        assert!(different.len() <= most, "{} texts of {mask}", different.len());
    }
}

#[test]
fn distances_are_added_up_as_long_as_floats_hold_them() {
    let score = scores::alibi(8).unwrap();
    let score = |keys| {
        let options = Options { extent: Extent { keys, ..options().extent }, ..options() };
        of_score(&score, &options)
    };
    let (near, far) = (score(1 << 24), score((1 << 24) + 128));
    assert!(near.contains("score - fabsf(distance) * reads.x0"), "{near}");
    assert!(far.contains("score - to_float(abs(q - kv)) * reads.x0"), "{far}");
}

#[test]
fn without_mods_every_function_is_there_and_does_nothing() {
    insta::assert_snapshot!(printed(Mods::default(), &options()));
}

#[test]
fn a_seed_of_dropout_in_device_memory_is_read_there() {
    let seed = Buffer::<i32>::on_device("seed", &[2]).unwrap();
    let dropout = Dropout::with_seed_in(0.25, &seed).unwrap();
    let text = printed(Mods { dropout: Some(&dropout), ..Mods::default() }, &options());
    assert!(text.contains("mix(load(mods.seed), place.b)"), "{text}");
    assert!(text.contains("load(mods.seed + 1)"), "{text}");
}

#[test]
fn causal_documents_read_like_their_text() {
    let doc = Buffer::vector("doc", vec![0; 500]);
    insta::assert_snapshot!(of_mask(&(masks::causal() & masks::document(&doc).unwrap())));
}

#[test]
fn a_prefix_of_each_sequence_is_read_without_clamping() {
    let prefixes = Buffer::vector("prefixes", vec![3, 5]);
    insta::assert_snapshot!(of_mask(&masks::prefix_lm_per_batch(&prefixes).unwrap()));
}

#[test]
fn a_neighbourhood_names_what_it_shares() {
    insta::assert_snapshot!(of_mask(&masks::neighbourhood(&[16, 16], &[5, 5]).unwrap()));
}

#[test]
fn alibi_then_a_soft_cap_has_both_in_one_function() {
    let score = scores::alibi(8).unwrap().then(&scores::soft_cap(30.0).unwrap());
    insta::assert_snapshot!(of_score(&score, &options()));
}

#[test]
fn a_soft_cap_of_f32_operands_is_accurate() {
    let options = Options { fast_math: false, ..options() };
    insta::assert_snapshot!(of_score(&scores::soft_cap(30.0).unwrap(), &options));
}

#[test]
fn a_learned_relative_bias_adds_to_its_gradient() {
    let score = scores::relative_bias(&learned("rel_bias", &[8, 129])).unwrap();
    insta::assert_snapshot!(of_score(&score, &options()));
}

#[test]
fn a_deterministic_gradient_is_summed_in_integers() {
    let options = Options { deterministic: true, ..options() };
    let score = scores::relative_bias(&learned("rel_bias", &[8, 129])).unwrap();
    insta::assert_snapshot!(of_score(&score, &options));
}

#[test]
fn scores_that_read_the_same_element_of_a_learned_buffer_are_found() {
    use sharing::Shared::{Column, Diagonal, Everywhere, Nowhere, Row};
    let kinds = |score: ScoreMod| {
        let gradient = score.gradient().unwrap();
        let roots = gradient.program().roots();
        let of = |read: &CaptureGradient| {
            let index: Vec<NodeId> = read.index.iter().map(|&root| roots[root]).collect();
            shared(gradient.program(), &index)
        };
        gradient.captures().iter().map(of).collect::<Vec<_>>()
    };
    let (table, of_head) = (learned("table", &[64]), learned("of_head", &[8, 64]));
    let is = |index: ScoreMod, wanted| assert_eq!(kinds(index), [wanted]);
    is(closure::score_mod!(|score, q, kv| score + table[kv - q + 32]), Diagonal);
    is(closure::score_mod!(|score, q, kv, kv_len| score + table[q - 3 - (kv + kv_len)]), Diagonal);
    is(closure::score_mod!(|score, q, kv| score + table[(kv - q).abs().min(63)]), Diagonal);
    is(closure::score_mod!(|score, h, q| score * of_head[(h, q)]), Row);
    is(closure::score_mod!(|score, h, kv| score * of_head[(h, kv / 2)]), Column);
    is(closure::score_mod!(|score, h| score * of_head[(h, 5)]), Everywhere);
    is(closure::score_mod!(|score, q, kv| score + table[kv + q]), Nowhere);
    is(closure::score_mod!(|score, q, kv| score + table[kv - q - q]), Nowhere);
    is(closure::score_mod!(|score, q, kv| score + table[kv / 4 - q / 4]), Nowhere);
    is(closure::score_mod!(|score, q, kv| score + of_head[(q, kv)]), Nowhere);
}

#[test]
fn t5_buckets_are_chosen_in_exact_floats() {
    let score = scores::t5_buckets(&learned("T5", &[32, 8]), true, 128).unwrap();
    insta::assert_snapshot!(of_score(&score, &options()));
}

#[test]
fn dropout_hashes_its_coordinates() {
    let dropout = Dropout::new(0.1, 7);
    insta::assert_snapshot!(printed(
        Mods { dropout: Some(&dropout), ..Mods::default() },
        &options()
    ));
}

#[test]
fn checked_mods_report_what_they_clamp() {
    let doc = Buffer::new("doc", &[2, 500], vec![0; 1000]).unwrap();
    let mask = masks::document(&doc).unwrap();
    let score = scores::relative_bias(&learned("int", &[8, 5])).unwrap();
    let flags = Buffer::vector("FLAGS", vec![true; 9]);
    let gated = closure::score_mod!(|score, q| if flags[q] { score } else { score * 0.5 });
    let score = score.then(&gated);
    let gradient = score.gradient().unwrap();
    let mods = Mods {
        mask: Some(&mask),
        score: Some(&score),
        gradient: Some(&gradient),
        ..Mods::default()
    };
    insta::assert_snapshot!(printed(mods, &Options { checked: true, ..options() }));
}

#[test]
fn a_structure_is_packed_as_it_is_laid_out() {
    let doc = Buffer::new("doc", &[2, 500], vec![0; 1000]).unwrap();
    let mask = masks::document(&doc).unwrap() & masks::window(3, 4).unwrap();
    let score = scores::relative_bias(&learned("bias", &[8, 5])).unwrap();
    let gradient = score.gradient().unwrap();
    let dropout = Dropout::new(0.5, 1 << 40 | 7);
    let mods = Mods {
        mask: Some(&mask),
        score: Some(&score),
        gradient: Some(&gradient),
        dropout: Some(&dropout),
    };
    let source = ModsSource::new(mods, &options()).unwrap();
    let slots: Vec<_> = source.buffers().iter().map(AnyBuffer::name).collect();
    assert_eq!(slots, ["doc", "bias"]);
    assert_eq!(source.learned().collect::<Vec<_>>(), [1]);
    let at = |i: u64| BufferAddresses {
        elems: 0x7000_0000_0000 + i,
        gradient: 0x7100_0000_0000 + i,
        ranges: 0x7200_0000_0000 + i,
        ..Default::default()
    };
    let bytes = source.pack(&[at(16), at(32)], 0).unwrap();
    assert_eq!(bytes.len(), source.layout().bytes());
    for field in source.layout().fields() {
        assert_eq!(field.offset % field.kind.bytes(), 0, "{}", field.name);
        let word = |n: usize| {
            let mut wide = [0; 8];
            wide[..n].copy_from_slice(&bytes[field.offset..field.offset + n]);
            u64::from_le_bytes(wide)
        };
        let want = match field.name.as_str() {
            "doc" => 0x7000_0000_0010,
            "bias" => 0x7000_0000_0020,
            "doc_ranges" => 0x7200_0000_0010,
            "bias_gradient" => 0x7100_0000_0020,
            "doc_0" => 2,
            "doc_1" => 500,
            "bias_0" => 8,
            "bias_1" => 5,
            "left" => 3,
            "right" => 4,
            "max_distance" => 2,
            "dropout_seed_lo" => 7,
            "dropout_seed_hi" => 1 << 8,
            "dropout_p" => 0.5f32.to_bits().into(),
            "dropout_scale" => 2f32.to_bits().into(),
            other => panic!("a field `{other}`"),
        };
        assert_eq!(word(field.kind.bytes()), want, "{}", field.name);
    }
    let error = source.pack(&[at(16)], 0).unwrap_err().to_string();
    assert_eq!(error, "the mods capture 2 buffers, but addresses of 1 were given");
    let error = source.pack(&[at(16), BufferAddresses::default()], 0).unwrap_err().to_string();
    assert_eq!(error, "no device address for the elements of captured buffer `bias`");
}

#[test]
fn mods_that_capture_too_much_for_a_kernel_are_refused() {
    let of = |buffers: i32| {
        let mut mask = masks::full();
        for i in 0..buffers {
            let ids = Buffer::vector(format!("ids{i}"), vec![i]);
            mask = mask & masks::document(&ids).unwrap();
        }
        ModsSource::new(Mods { mask: Some(&mask), ..Mods::default() }, &options())
    };
    let error = of(300).unwrap_err().to_string();
    assert!(error.starts_with("the mods capture 300 buffers and 0 scalars, 6000 bytes"), "{error}");
    // A Hopper backward has the most arguments of its own, and four tensor maps at multiples of 64.
    let buffers = (MODS_BYTES / 20) as i32;
    assert!(of(buffers + 1).is_err());
    let most = of(buffers).unwrap();
    let own = size_of::<BackwardParams>() + size_of::<PersistentParams>();
    let all = (own + most.layout().bytes()).next_multiple_of(64) + 4 * 128;
    assert!((4096 - 64..=4096).contains(&all), "{all} bytes");
}
