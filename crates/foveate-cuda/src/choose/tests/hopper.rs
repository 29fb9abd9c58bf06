//! Where the Hopper family runs, with which tiles, and what is said where it does not.

use super::*;
use crate::compile::codegen::{mask_reads, mask_steps};
use crate::compile::config::Config;
use foveate_gpu::hopper;
use foveate_mods::{MaskMod, masks};

#[test]
fn the_hopper_family_runs_long_forwards_of_16_bits_on_capability_9_0_alone() {
    let options = KernelOptions::default();
    let family = |card: &str, class: &Class, sizes: &Sizes| {
        let profile = Profile::named(card).unwrap();
        let plan = KernelPlan::new(&profile, class, sizes, false, &options).unwrap();
        let choice = plan.choice(Kernel::Forward);
        let refused: Vec<String> = choice.refused.iter().map(ToString::to_string).collect();
        (choice.chosen.config.family, refused.into_iter().find(|r| r.starts_with("hopper: ")))
    };
    let long = sizes(2, 32, 8, 8192);
    for dim in [33, 64, 80, 96, 128, 192, 256] {
        let class = Class::new(Elem::Bf16, dim, dim, 4);
        assert_eq!(family("h200", &class, &long), (Family::Hopper, None), "{dim}");
    }
    let plain = Class::new(Elem::F16, 128, 128, 4);
    let portable = |card, class: Class, sizes: &Sizes, why: &str| {
        let found = family(card, &class, sizes);
        assert_eq!(found, (Family::Portable, Some(format!("hopper: {why}"))));
    };
    portable("a100", plain.clone(), &long, "compute capability 8.0; it runs on 9.0");
    portable("b200", plain.clone(), &long, "compute capability 10.0; it runs on 9.0");
    // Of its capability, with a driver and a compiler that are too old.
    let old = Profile {
        hopper_unmet: hopper::unmet_by_nvrtc((12, 2)).into_iter().collect(),
        ..Profile::named("h200").unwrap()
    };
    let plan = KernelPlan::new(&old, &plain, &long, true, &options).unwrap();
    assert!(plan.kernels.iter().all(|c| c.chosen.config.family == Family::Portable));
    let told = plan.to_string();
    let why = "  refused    hopper: NVRTC 12.2 (needed 12.3)\n";
    assert_eq!(told.matches(why).count(), 2, "forward and backward: {told}");
    let f32 = Class::new(Elem::F32, 128, 128, 4);
    portable("h200", f32, &long, "f32 operands; no products of f32");
    let aligned = |align| Class { align, unmapped: Unmapped::aligned(align), ..plain.clone() };
    portable("h200", aligned(0), &long, "elements of q are apart; loads need them side by side");
    portable("h200", aligned(2), &long, "rows of q are aligned to 2 B; loads need 4");
    // Of out alone rows may lie in any way, but not those of operands to be copied.
    let out = Class { align: 2, ..plain.clone() };
    assert_eq!(family("h200", &out, &long), (Family::Hopper, None));
    let reason = "rows of out are aligned to 2 B; copies need 4";
    let out = Class { align: 2, ..repeated_keys(&plain) };
    portable("h200", out, &long, &format!("{STRIDED}, and {reason}"));
    // No product is as wide.
    let wide = KernelPlan::new(
        &Profile::named("h200").unwrap(),
        &Class::new(Elem::Bf16, 64, 272, 1),
        &long,
        false,
        &options,
    );
    assert_eq!(wide.unwrap().kernels[0].chosen.config.family, Family::Portable);
    let decode = Sizes { queries: 1, ..long };
    portable("h200", plain, &decode, "few queries, whose heads share a tile");
}

const STRIDED: &str = "k has row stride 0, which no tensor map has";

/// The same with keys that the copy engine does not take.
fn repeated_keys(class: &Class) -> Class {
    let reason = STRIDED.to_owned();
    Class { unmapped: vec![Unmapped { name: "k", reason, by_copies: true }], ..class.clone() }
}

#[test]
fn the_hopper_family_copies_row_by_row_what_no_tensor_map_has_and_says_why() {
    let profile = Profile::named("h200").unwrap();
    let (plain, long) = (Class::new(Elem::Bf16, 128, 128, 4), sizes(2, 32, 8, 8192));
    let planned = |class: &Class| {
        let plan = KernelPlan::new(&profile, class, &long, false, &KernelOptions::default());
        let (plan, told) = plan.map(|plan| (plan.clone(), plan.to_string())).unwrap();
        let config = plan.choice(Kernel::Forward).chosen.config.clone();
        assert_eq!(config.family, Family::Hopper, "{told}");
        let copies = told.lines().find_map(|line| line.strip_prefix("  copies     "));
        // What runs in its place takes the same operands, and copies all of them.
        let portable = plan.choice(Kernel::Forward).others.iter().map(|other| &other.config);
        let portable: Vec<_> = portable.filter(|c| c.family == Family::Portable).collect();
        assert!(!portable.is_empty() && portable.iter().all(|c| !c.copied.any()));
        (config.copied.to_string(), copies.map(str::to_owned).unwrap_or_default())
    };
    let by_maps = (String::new(), "q, k and v by tensor maps".to_owned());
    assert_eq!(planned(&plain), by_maps);
    let pages =
        |rows| planned(&Class { paged: true, unmapped: Unmapped::paged(rows), ..plain.clone() });
    for rows in [8, 16, 24, 4096] {
        assert_eq!(pages(rows), by_maps, "{rows}");
    }
    let reason = "hopper by copies: k lies in pages of 1 row, no multiple of the 8 of a tensor map; \
                  v lies in pages of 1 row, no multiple of the 8 of a tensor map";
    assert_eq!(pages(1), ("k, v".to_owned(), reason.to_owned()));
    let keys = planned(&repeated_keys(&plain));
    assert_eq!(keys, ("k".to_owned(), format!("hopper by copies: {STRIDED}")));
    for align in [4, 8] {
        let class = Class { align, unmapped: Unmapped::aligned(align), ..plain.clone() };
        let (copied, reason) = planned(&class);
        assert_eq!(copied, "q, k, v");
        let first = format!("hopper by copies: rows of q are aligned to {align} B; a tensor map");
        assert!(reason.starts_with(&first), "{reason}");
    }
}

#[test]
fn what_is_asked_of_the_hopper_family_is_honoured_or_refused_with_the_numbers() {
    let profile = Profile::named("h200").unwrap();
    let class = Class::new(Elem::Bf16, 128, 128, 1);
    let with = |asked: &[(&str, &str)]| {
        let mut options = KernelOptions::default();
        for (name, value) in asked {
            options.set(&format!("forward.{name}"), value).unwrap();
        }
        KernelPlan::new(&profile, &class, &sizes(1, 4, 4, 4096), false, &options)
    };
    let chosen = |asked: &[(&str, &str)]| with(asked).unwrap().kernels[0].chosen.config.clone();
    let serial = chosen(&[("family", "hopper"), ("overlap", "false"), ("tile_kv", "64")]);
    assert_eq!((serial.family, serial.overlap, serial.tile_kv), (Family::Hopper, false, 64));
    assert_eq!(chosen(&[("family", "portable")]).family, Family::Portable);
    assert_eq!(chosen(&[("tile_q", "32")]).family, Family::Portable);
    let said = |asked: &[(&str, &str)]| with(asked).unwrap_err().to_string();
    let rows = said(&[("family", "hopper"), ("tile_q", "96")]);
    assert_eq!(rows.matches("96 queries; of 2 consumers each owns 64").count(), 1, "{rows}");
    // What only the family has is asked of it, too.
    let rows = said(&[("overlap", "true"), ("tile_q", "32")]);
    assert!(rows.contains("32 queries; of 2 consumers each owns 64"), "{rows}");
    let keys = said(&[("family", "hopper"), ("tile_kv", "264")]);
    assert!(keys.contains("hopper takes multiples of 16 keys from 32 to 256"), "{keys}");
    let overlap = said(&[("family", "portable"), ("overlap", "true")]);
    assert!(overlap.contains(": portable: it has no overlap of its own"), "{overlap}");
    let large = said(&[("family", "hopper"), ("tile_kv", "176"), ("stages", "4")]);
    assert!(large.contains("B of shared memory, a CTA can have 232448"), "{large}");
    let one = said(&[("family", "hopper"), ("stages", "1")]);
    assert_eq!(one.matches(": 1 stage; hopper has 2 to 4").count(), 1, "{one}");
}

#[test]
fn a_family_that_a_device_or_a_problem_has_not_is_refused_with_what_to_do() {
    let refused = |card: &str, class: &Class, asked: &str| {
        let mut options = KernelOptions::default();
        options.set(asked, "hopper").unwrap();
        let profile = Profile::named(card).unwrap();
        let plan = KernelPlan::new(&profile, class, &sizes(1, 4, 4, 4096), true, &options);
        plan.unwrap_err().to_string()
    };
    let plain = Class::new(Elem::Bf16, 128, 128, 1);
    for (card, capability) in [("a100", "8.0"), ("l40s", "8.9"), ("b200", "10.0")] {
        for kernel in ["forward", "backward"] {
            assert_eq!(
                refused(card, &plain, &format!("{kernel}.family")),
                format!(
                    "no {kernel} kernel for bf16 at head dim 128 with the options given (family hopper) \
                     runs on {card}: hopper: compute capability {capability}; it runs on 9.0. Others may: \
                     leave the options out"
                )
            );
        }
    }
    assert_eq!(
        refused("h200", &Class::new(Elem::F16, 128, 272, 1), "forward.family"),
        "no forward kernel for f16 at head dim 128/272 with the options given (family hopper) runs on \
         h200: hopper: head dim 128/272; it takes those up to 256. Others may: leave the options out"
    );
}

/// It writes eight numbers at a time, and those behind a row are not its own.
#[test]
fn rows_that_end_between_vectors_have_a_portable_backward() {
    let profile = Profile::named("h200").unwrap();
    for (dim, dim_v) in [(36, 36), (64, 60), (132, 128), (255, 255)] {
        for deterministic in [false, true] {
            // Of rows that begin at multiples of 16 bytes, of a longer one each.
            let class = Class { deterministic, ..Class::new(Elem::Bf16, dim, dim_v, 4) };
            let long = sizes(2, 32, 8, 8192);
            let plan = KernelPlan::new(&profile, &class, &long, true, &KernelOptions::default());
            let plan = plan.unwrap();
            let family = |kernel| plan.config(kernel).map(|config| config.family);
            assert_eq!(family(Kernel::Forward), Some(Family::Hopper), "{dim}/{dim_v}");
            assert_eq!(family(Kernel::Backward), Some(Family::Portable), "{dim}/{dim_v}");
            assert_ne!(family(Kernel::BackwardDq), Some(Family::Hopper), "{dim}/{dim_v}");
            assert!(
                !plan.splits_gqa()
                    && plan
                        .choice(Kernel::Backward)
                        .ranked()
                        .all(|c| { c.config.family == Family::Portable })
            );
            let dims = if dim == dim_v { dim.to_string() } else { format!("{dim}/{dim_v}") };
            let why = format!(
                "  refused    hopper: head dim {dims}; its backward takes multiples of 8\n"
            );
            assert!(plan.to_string().contains(&why), "{plan}");
        }
    }
}

/// What is read of a row has to be as its own kernel expects it; what is said names whose row it is.
#[test]
fn a_backward_names_the_operand_that_keeps_it_from_tensor_maps() {
    let profile = Profile::named("h200").unwrap();
    let refused = |class: Class| {
        let long = sizes(2, 32, 8, 8192);
        let plan = KernelPlan::new(&profile, &class, &long, true, &KernelOptions::default());
        plan.unwrap().choice(Kernel::Backward).refused[0].to_string()
    };
    let plain = Class::new(Elem::Bf16, 64, 66, 4);
    assert_eq!(
        refused(plain.clone().contiguous(None)),
        "hopper: head dim 64/66; its backward takes multiples of 8"
    );
    let plain = Class { dim_v: 64, ..plain };
    let shifted = Class { align: 8, unmapped: Unmapped::aligned(8), ..plain.clone() };
    assert_eq!(refused(shifted), "hopper: rows of q are aligned to 8 B; a tensor map needs 16");
    for (align, why) in [
        (0, "hopper: elements of out or of a gradient are apart"),
        (8, "hopper: rows of out or of a gradient are aligned to 8 B, not to 16"),
    ] {
        assert_eq!(refused(Class { align, ..plain.clone() }), why);
    }
}

/// Of a call: `CudaPlan::unmapped`.
#[test]
fn contiguous_operands_are_copied_as_their_own_rows_are_aligned() {
    let of = |dtype, dim, dim_v, pages| {
        let class = Class::new(dtype, dim, dim_v, 1).contiguous(pages);
        let reasons: Vec<String> = class.unmapped.iter().map(|of| of.reason.clone()).collect();
        (class.align, class.copied().to_string(), reasons.join("; "))
    };
    let said = |align, copied: &str, reasons: &str| (align, copied.to_owned(), reasons.to_owned());
    assert_eq!(of(Elem::Bf16, 64, 128, None), said(16, "", ""));
    let by_4 = "rows of v are aligned to 4 B; a tensor map needs 16";
    assert_eq!(of(Elem::Bf16, 64, 66, None), said(4, "v", by_4));
    let by_8 =
        ["q", "k"].map(|of| format!("rows of {of} are aligned to 8 B; a tensor map needs 16"));
    assert_eq!(of(Elem::F16, 36, 64, None), said(8, "q, k", &by_8.join("; ")));
    assert_eq!(
        of(Elem::Bf16, 64, 65, None),
        said(2, "v", "rows of v are aligned to 2 B; loads need 4")
    );
    let [in_k, in_v] = ["k", "v"]
        .map(|of| format!("{of} lies in pages of 7 rows, no multiple of the 8 of a tensor map"));
    assert_eq!(of(Elem::Bf16, 64, 64, Some(8)), said(16, "", ""));
    assert_eq!(of(Elem::Bf16, 64, 64, Some(7)), said(16, "k, v", &format!("{in_k}; {in_v}")));
    assert_eq!(of(Elem::Bf16, 64, 66, Some(7)), said(4, "k, v", &format!("{in_k}; {by_4}")));
}

#[test]
fn what_runs_in_place_of_a_hopper_kernel_is_what_was_measured_to_lose_least() {
    let profile = Profile::named("h200").unwrap();
    let next = |dim: usize, change: fn(&mut Class), kernel: Kernel| {
        let mut class = Class::new(Elem::Bf16, dim, dim, 4);
        change(&mut class);
        let options = KernelOptions::default();
        let plan = KernelPlan::new(&profile, &class, &sizes(2, 32, 8, 2048), true, &options);
        let choice = plan.unwrap().choice(kernel).clone();
        assert!(choice.chosen.config.family == Family::Hopper && choice.chosen.config.overlap);
        let tiles = |c: &Candidate| Tiles::of(&c.config);
        (tiles(&choice.chosen), [0, 1].map(|at| tiles(&choice.others[at])))
    };
    let soft_cap = |class: &mut Class| (class.score, class.score_steps) = (true, 41);
    for change in [|_: &mut Class| (), soft_cap] {
        for dim in [96, 128, 256] {
            let (chosen, [first, second]) = next(dim, change, Kernel::Forward);
            assert_eq!(first, Tiles { overlap: false, ..chosen }, "{dim}");
            assert_eq!(second.family, Family::Portable, "{dim}");
        }
        let (_, [first, _]) = next(64, change, Kernel::Forward);
        assert_eq!(first.family, Family::Portable);
        let (_, [first, _]) = next(128, change, Kernel::Backward);
        assert_eq!(first.family, Family::Portable);
    }
}

#[test]
fn long_rows_have_wide_tiles_and_the_usual_ones_if_those_spill() {
    let profile = Profile::named("h200").unwrap();
    let keys_of = |class: &Class, len: usize| {
        let (sizes, options) = (sizes(2, 16, 16, len), KernelOptions::default());
        let choice = choose(&profile, class, &sizes, Kernel::Forward, &options, None).unwrap();
        let keys = |c: &Candidate| (c.config.family, c.config.tile_kv);
        choice.ranked().take(2).map(keys).collect::<Vec<_>>()
    };
    let plain = Class::new(Elem::Bf16, 128, 128, 1);
    let alibi = Class { score: true, score_steps: 9, ..plain.clone() };
    let soft_cap = Class { score_steps: 41, ..alibi.clone() };
    let dropped = Class { dropout: true, ..alibi.clone() };
    let [wide, usual] = [176, 128].map(|keys| (Family::Hopper, keys));
    for class in [&plain, &alibi] {
        assert_eq!(keys_of(class, 4096), [wide, usual], "{class:?}");
    }
    let paged = Class { paged: true, ..plain.clone() };
    let few = [(&plain, 2048), (&alibi, 2048)];
    for (class, len) in few.into_iter().chain([&soft_cap, &dropped, &paged].map(|c| (c, 8192))) {
        assert_eq!(keys_of(class, len)[0], usual, "{class:?}");
    }
}

#[test]
fn the_hopper_family_runs_long_backwards_of_head_dims_up_to_128() {
    let profile = Profile::named("h200").unwrap();
    let plain = Class::new(Elem::Bf16, 128, 128, 4);
    let long = sizes(2, 32, 8, 8192);
    let with = |class: &Class, asked: &[(&str, &str)]| {
        let mut options = KernelOptions::default();
        for (name, value) in asked {
            options.set(&format!("backward.{name}"), value).unwrap();
        }
        KernelPlan::new(&profile, class, &long, true, &options)
    };
    let chosen = |class: &Class| {
        Tiles::of(with(class, &[]).unwrap().config(Kernel::Backward).expect("a backward has one"))
    };
    assert_eq!(chosen(&plain), Tiles::hopper_backward(64, 3));
    let narrow = Class::new(Elem::F16, 64, 64, 1);
    assert_eq!(chosen(&narrow), Tiles::hopper_backward(128, 3));
    // Where a program leaves it too few registers, the best portable tiles are next.
    let plan = with(&plain, &[]).unwrap();
    let next = &plan.choice(Kernel::Backward).others[0].config;
    assert_eq!(Tiles::of(next), Tiles::portable(64, 128, 8, 2));
    let refused = |class: &Class, asked: &[(&str, &str)], why: &str| {
        let asked = [&[("family", "hopper")], asked].concat();
        let said = with(class, &asked).unwrap_err().to_string();
        assert!(said.contains(why), "{said}");
    };
    // Gradients of learned buffers take registers.
    let learned = Class { captures: true, score: true, ..narrow.clone() };
    assert_eq!(chosen(&learned), Tiles::hopper_backward(64, 3));
    let fixed = Class { deterministic: true, ..narrow };
    assert_eq!(chosen(&fixed), Tiles::hopper_backward(128, 3).ordered());
    // The backward copies nothing row by row.
    let unmapped = repeated_keys(&plain);
    refused(&unmapped, &[], STRIDED);
    refused(&plain, &[("tile_q", "128")], "280 registers a thread, it can have 232");
    refused(&plain, &[("tile_q", "96")], "hopper takes 64 or 128 queries");
    let once = with(&plain, &[("family", "hopper"), ("tile_q", "96")]).unwrap_err().to_string();
    assert_eq!(once.matches("hopper takes 64 or 128 queries").count(), 1, "{once}");
    refused(&plain, &[("tile_kv", "64")], "of which two consumers own 64 keys each");
    refused(&plain, &[("stages", "4")], "B of shared memory, a CTA can have 232448");
    assert_eq!(chosen(&unmapped).family, Family::Portable);
}

#[test]
fn wide_head_dims_and_fixed_orders_have_a_hopper_kernel_for_dq_alone() {
    let profile = Profile::named("h200").unwrap();
    let long = sizes(2, 32, 8, 8192);
    let plan = |class: &Class, asked: &[(&str, &str)]| {
        let mut options = KernelOptions::default();
        asked.iter().for_each(|(name, value)| options.set(name, value).unwrap());
        KernelPlan::new(&profile, class, &long, true, &options)
    };
    let tiles = |plan: &KernelPlan| {
        [Kernel::Backward, Kernel::BackwardDq].map(|kernel| plan.config(kernel).map(Tiles::of))
    };
    let wide = Class::new(Elem::Bf16, 256, 256, 4);
    let found = plan(&wide, &[]).unwrap();
    assert_eq!(
        tiles(&found),
        [Some(Tiles::hopper_wide_backward(2)), Some(Tiles::hopper_dq(64, 2))]
    );
    assert!(found.separates_dq() && found.config(Kernel::Dq).is_none());
    // What runs where the program leaves it too few registers leaves dq to the same kernel.
    let others = &found.choice(Kernel::Backward).others;
    assert!(!others.is_empty() && others.iter().all(|c| c.config.separate_dq));
    // The portable kernel adds dq, and so has no other in its place that does not.
    let portable = plan(&wide, &[("backward.tile_kv", "64"), ("backward.warps", "8")]).unwrap();
    assert_eq!(tiles(&portable)[1], None);
    let others = &portable.choice(Kernel::Backward).others;
    assert!(!portable.separates_dq() && others.iter().all(|c| !c.config.separate_dq));
    let latent = plan(&Class::new(Elem::F16, 192, 128, 1), &[]).unwrap();
    assert_eq!(
        tiles(&latent),
        [Some(Tiles::hopper_wide_backward(3)), Some(Tiles::hopper_dq(80, 2))]
    );
    let fixed = Class { deterministic: true, ..Class::new(Elem::Bf16, 128, 128, 4) };
    let own = Tiles::hopper_backward(64, 3);
    let ordered = plan(&fixed, &[]).unwrap();
    assert_eq!(tiles(&ordered), [Some(own.ordered()), None]);
    // What stands in for it adds dq in a fixed order too.
    let others = &ordered.choice(Kernel::Backward).others;
    assert!(!others.is_empty() && others.iter().all(|c| c.config.ordered_dq));
    let apart = plan(&fixed, &[("backward.ordered_dq", "false")]).unwrap();
    assert_eq!(tiles(&apart), [Some(own), Some(Tiles::hopper_dq(96, 2))]);
    // Under a mask as sparse as documents it was slower at head dim 128, and at 64 all heads take turns.
    for (dim, live, ordered, turns) in
        [(128, 960, true, 4), (128, 256, false, 5), (64, 960, true, 4), (64, 256, true, 32)]
    {
        let masked =
            Class { mask: true, deterministic: true, ..Class::new(Elem::Bf16, dim, dim, 4) };
        let sizes = Sizes { mean_kv_len: live, heads_kv: long.heads_q, ..long };
        let found = KernelPlan::new(&profile, &masked, &sizes, true, &KernelOptions::default());
        let found = found.unwrap();
        assert_eq!(found.config(Kernel::Backward).unwrap().ordered_dq, ordered, "{dim} {live}");
        assert_eq!(found.interleaved_heads(Kernel::Backward, 32, 128), turns, "{dim} {live}");
    }
    // Where a score has a derivative or learns, registers are too few for it.
    for (dscore, captures) in [(true, false), (false, true)] {
        let scored = Class { score: true, dscore, captures, ..fixed.clone() };
        let found = plan(&scored, &[]).unwrap();
        assert!(found.separates_dq() && !found.config(Kernel::Backward).unwrap().ordered_dq);
    }
    let learned = Class { captures: true, score: true, ..wide.clone() };
    let found = plan(&learned, &[]).unwrap();
    assert_eq!(tiles(&found)[0].unwrap().family, Family::Portable);
    // Of all configurations at once.
    let reason = "  refused    hopper: gradients of captured buffers at head dims above 128 (";
    assert_eq!(found.to_string().matches(reason).count(), 1, "{found}");
    let refused = |class: &Class, asked: &[(&str, &str)], why: &str| {
        let said = plan(class, asked).unwrap_err().to_string();
        assert!(said.contains(why), "{said}");
    };
    let hopper = ("backward.family", "hopper");
    refused(&learned, &[hopper], "hopper: gradients of captured buffers at head dims above 128");
    refused(&wide, &[hopper, ("backward.tile_q", "128")], "hopper has 64x64 and 12 at head dims");
    let asked = ("backward.ordered_dq", "true");
    refused(&wide, &[asked], "hopper leaves dq to a kernel of its own at head dims above 128");
    let portable = ("backward.family", "portable");
    refused(&wide, &[asked, portable], "portable: it has no fixed order for dq");
    refused(
        &wide,
        &[hopper, ("backward.stages", "3")],
        "B of shared memory, a CTA can have 232448",
    );
    let dq = ("backward_dq.family", "hopper");
    refused(&wide, &[dq, ("backward_dq.tile_q", "64")], "two consumers own 64 queries each");
    refused(&wide, &[dq, ("backward_dq.tile_kv", "136")], "multiples of 16 keys from 32 to 128");
    refused(&wide, &[dq, ("backward_dq.tile_kv", "96")], "registers a thread, it can have 240");
}

#[test]
fn the_hopper_backward_of_head_dims_above_64_runs_on_half_of_all_sms() {
    let profile = Profile::named("h200").unwrap();
    let family = |dim, heads| {
        let class = Class { mask: true, ..Class::new(Elem::Bf16, dim, dim, 1) };
        let sizes = Sizes { mean_kv_len: 512, ..sizes(1, heads, heads, 1024) };
        let options = KernelOptions::default();
        let plan = KernelPlan::new(&profile, &class, &sizes, true, &options).unwrap();
        plan.config(Kernel::Backward).unwrap().family
    };
    // Measured with 64, 96 and 128 tiles of 128 keys, for 132 SMs.
    assert_eq!([8, 12, 16].map(|heads| family(128, heads)), [Family::Hopper; 3]);
    assert_eq!([8, 16].map(|heads| family(64, heads)), [Family::Portable; 2]);
    let leaves_idle = |heads, len: usize| {
        let keys = Class::new(Elem::Bf16, 128, 128, 1)
            .config(Kernel::Backward, Tiles::hopper_backward(64, 3));
        model::leaves_idle(&profile, &keys, &sizes(1, heads, heads, len))
    };
    assert_eq!([(8, 1024), (7, 1024)].map(|(heads, len)| leaves_idle(heads, len)), [false, true]);
}

#[test]
fn query_heads_have_items_of_their_own_where_groups_leave_sms_waiting() {
    let profile = Profile::named("h200").unwrap();
    let plan = |class: &Class, sizes: &Sizes, asked: &[(&str, &str)]| {
        let mut options = KernelOptions::default();
        for (name, value) in asked {
            options.set(name, value).unwrap();
        }
        KernelPlan::new(&profile, class, sizes, true, &options)
    };
    let splits = |class: &Class, sizes: &Sizes| {
        let found = plan(class, sizes, &[]).unwrap();
        let sums = found.config(Kernel::GroupSums);
        assert_eq!(found.splits_gqa(), sums.is_some());
        assert!(sums.is_none_or(|sums| sums.grad_dtype == class.grad_dtype));
        // They are rounded once, when they are added up.
        let keys = found.config(Kernel::Backward).unwrap();
        assert!(!keys.split_gqa || keys.grad_dtype == Elem::F32);
        // Nothing that has to be added up stands in for what is whole; but the tuner knows of both.
        let choice = found.choice(Kernel::Backward);
        assert!(keys.split_gqa || choice.ranked().all(|c| !c.config.split_gqa));
        let mut all = std::iter::once(&choice.chosen).chain(&choice.others);
        assert_eq!(all.any(|c| c.config.split_gqa), class.group > 1);
        found.splits_gqa()
    };
    let causal = |sizes: Sizes| Sizes { mean_kv_len: sizes.keys / 2, ..sizes };
    for deterministic in [false, true] {
        let grouped = |group, dim| Class {
            mask: true,
            deterministic,
            ..Class::new(Elem::Bf16, dim, dim, group)
        };
        // 48 tiles of keys of key/value heads, of which each is walked for three heads.
        assert!(splits(&grouped(3, 64), &causal(sizes(1, 9, 3, 2048))));
        assert!(splits(&grouped(4, 128), &causal(sizes(1, 32, 8, 2048))));
        // One key/value head, whose heaviest tiles take half of the launch.
        assert!(splits(&grouped(8, 128), &causal(sizes(1, 8, 1, 8192))));
        // Enough of them for all, and nothing to split.
        assert!(!splits(&grouped(4, 128), &causal(sizes(2, 32, 8, 8192))));
        assert!(!splits(&grouped(1, 128), &causal(sizes(1, 8, 8, 1024))));
    }
    // Without a mask all items are alike: 128 of 132 SMs are busy as it is.
    let full = Class::new(Elem::Bf16, 128, 128, 4);
    assert!(!splits(&full, &sizes(1, 32, 8, 2048)));
    let (few, asked) = (sizes(1, 32, 8, 2048), ("backward.split_gqa", "true"));
    assert!(plan(&full, &few, &[asked]).unwrap().splits_gqa());
    let not = ("backward.split_gqa", "false");
    let masked = Class { mask: true, ..full.clone() };
    assert!(!plan(&masked, &causal(few), &[not]).unwrap().splits_gqa());
    let portable = ("backward.family", "portable");
    let said = plan(&full, &few, &[asked, portable]).unwrap_err().to_string();
    assert!(said.contains("portable: it has no gradients of keys for each query head"), "{said}");
}

#[test]
fn e4m3_operands_have_a_forward_on_hopper_and_one_line_elsewhere() {
    let (h200, a100) = (Profile::named("h200").unwrap(), Profile::named("a100").unwrap());
    let dims = |dim, dim_v| Dims {
        batch: 2,
        heads_q: 8,
        heads_kv: 2,
        len_q: 300,
        len_k: 300,
        dim,
        dim_v,
        shared_kv: false,
        packed: false,
    };
    let options = KernelOptions::default();
    for (dim, dim_v) in [(16, 16), (64, 64), (96, 80), (128, 128), (192, 128), (256, 256)] {
        for queries in [1, 300] {
            for class in mods(&Class::new(Elem::E4m3, dim, dim_v, 4)) {
                let sizes = sizes(2, 8, 2, queries);
                let plan = KernelPlan::new(&h200, &class, &sizes, false, &options).unwrap();
                assert_fits(&plan);
                let config = plan.config(Kernel::Forward).unwrap();
                assert_eq!((config.family, config.out_dtype), (Family::Hopper, Elem::Bf16));
                assert!(config.tile_kv.is_multiple_of(64) && plan.kernels.len() == 1, "{config}");
            }
        }
    }
    assert_eq!(admit(&h200, &dims(64, 64), DType::F8E4M3).unwrap(), Elem::E4m3);
    let old = admit(&a100, &dims(64, 64), DType::F8E4M3).unwrap_err().to_string();
    assert_eq!(
        old,
        "f8e4m3 operands run on compute capability 9.0; this GPU has 8.0: give bf16 or f16 ones"
    );
    let class = Class::new(Elem::E4m3, 64, 64, 4);
    let refused = |class: &Class, backward| {
        let sizes = sizes(2, 8, 2, 300);
        KernelPlan::new(&h200, class, &sizes, backward, &options).unwrap_err().to_string()
    };
    assert_eq!(
        refused(&Class { paged: true, ..class.clone() }, false),
        "no forward kernel for f8e4m3 at head dim 64: portable: f8e4m3 operands; the hopper family \
         takes them; hopper: keys of f8e4m3 in pages"
    );
    assert_eq!(
        refused(&Class { unmapped: Unmapped::aligned(8), ..class.clone() }, false),
        "no forward kernel for f8e4m3 at head dim 64: portable: f8e4m3 operands; the hopper family \
         takes them; hopper: rows of q are aligned to 8 B; a tensor map needs 16"
    );
    assert!(refused(&class, true).ends_with("hopper: f8e4m3 operands; it has a forward of them"));
}

#[test]
fn what_was_measured_slower_on_the_hopper_family_is_said() {
    let profile = Profile::named("h200").unwrap();
    let options = KernelOptions::default();
    let refused = |class: &Class, sizes: &Sizes, recorded| {
        let choice = choose(&profile, class, sizes, Kernel::Forward, &options, recorded).unwrap();
        let lines: Vec<_> = choice.refused.iter().map(|refused| refused.to_string()).collect();
        let found = lines.into_iter().find(|line| line.starts_with("hopper: "));
        (choice.chosen.config.family, found)
    };
    let long = sizes(2, 16, 16, 8192);
    let class = Class::new(Elem::Bf16, 128, 128, 1);
    assert_eq!(refused(&class, &long, None), (Family::Hopper, None));
    let portable = Tiles::portable(128, 48, 4, 2);
    let record = |planned_us| Some(Record { tiles: portable, us: 12.2, planned_us });
    let said = |line: &str| (Family::Portable, Some(line.to_owned()));
    let numbers = said("hopper: 18 µs, portable: 12 µs (record)");
    assert_eq!(refused(&class, &long, record(Some(18.4))), numbers);
    let preferred = said("hopper: a record prefers the portable kernel");
    assert_eq!(refused(&class, &long, record(None)), preferred);
    let measured = said("hopper: the portable kernel was measured faster");
    let masked = Class { mask: true, ..Class::new(Elem::Bf16, 64, 64, 1) };
    let documents = Sizes { mean_kv_len: 128, ..sizes(2, 32, 32, 8192) };
    assert_eq!(refused(&masked, &documents, None), measured);
    // Where it is plain and of longer documents it was measured to be the faster one.
    let longer = Sizes { mean_kv_len: 256, ..documents };
    assert_eq!(refused(&masked, &longer, None), (Family::Hopper, None));
    let short_rows = Sizes { mean_kv_len: 256, ..sizes(32, 32, 32, 512) };
    assert_eq!(refused(&masked, &short_rows, None), measured);
    assert_eq!(refused(&Class { score: true, ..masked.clone() }, &longer, None), measured);
    // A record's two times are not of the family where it was not what ran before.
    let both =
        Some(Record { tiles: Tiles::portable(64, 64, 2, 2), us: 9.0, planned_us: Some(10.0) });
    assert_eq!(refused(&masked, &documents, both), preferred);
    // Tiles of 192 queries are too few where smaller ones are not, and with a score the family has no smaller ones.
    let few = Sizes { mean_kv_len: 1024, ..sizes(1, 9, 9, 2048) };
    let idle = said("hopper: its 99 tiles leave 33 of 132 SMs idle");
    assert_eq!(refused(&Class { score: true, ..masked }, &few, None), idle);
}

/// As measured: 9 heads at head dim 64 and a row of 2,048, 28 at 128 and one of 512.
#[test]
fn a_forward_of_few_tiles_has_tiles_of_fewer_queries_before_the_portable_ones() {
    let profile = Profile::named("h200").unwrap();
    let chosen = |class: &Class, heads, len| {
        let sizes = Sizes { mean_kv_len: len / 2, ..sizes(1, heads, heads, len) };
        let options = KernelOptions::default();
        let choice = choose(&profile, class, &sizes, Kernel::Forward, &options, None).unwrap();
        Tiles::of(&choice.chosen.config)
    };
    let causal = |dim| Class { mask: true, ..Class::new(Elem::Bf16, dim, dim, 1) };
    assert_eq!(chosen(&causal(64), 16, 4096), Tiles::hopper(3, 128, 3));
    assert_eq!(chosen(&causal(64), 9, 2048), Tiles::hopper(2, 64, 2));
    assert_eq!(chosen(&causal(64), 9, 1024), Tiles::hopper(1, 64, 2));
    assert_eq!(chosen(&causal(128), 28, 512), Tiles::hopper(2, 128, 2));
    assert_eq!(chosen(&causal(128), 27, 512), Tiles::hopper(1, 64, 2));
    // With a score they were not measured.
    let scored = Class { score: true, ..causal(64) };
    assert_eq!(chosen(&scored, 9, 2048).family, Family::Portable);
}

/// As measured: one to four heads of 16 or 32 were faster than six and seven, and a divisor than three.
#[test]
fn heads_of_a_persistent_forward_take_turns_in_even_groups() {
    let profile = Profile::named("h200").unwrap();
    let turns = |dim, heads, len: usize, family| {
        let mut options = KernelOptions::default();
        options.set("forward.family", family).unwrap();
        let class = Class { mask: true, ..Class::new(Elem::Bf16, dim, dim, 1) };
        let sizes = sizes(16_384 / len, heads, heads, len);
        let plan = KernelPlan::new(&profile, &class, &sizes, false, &options).unwrap();
        let tile_q = plan.config(Kernel::Forward).unwrap().queries();
        plan.interleaved_heads(Kernel::Forward, heads, sizes.batch * len.div_ceil(tile_q))
    };
    for (dim, heads, len, expected) in
        [(64, 32, 8192, 4), (128, 16, 8192, 2), (128, 16, 2048, 2), (192, 10, 8192, 2)]
    {
        assert_eq!(turns(dim, heads, len, "hopper"), expected, "{dim}");
    }
    // Others are given to CTAs by the device.
    assert_eq!(turns(128, 16, 8192, "portable"), 16);
}

#[test]
fn consumers_are_asked_for_by_their_number() {
    let profile = Profile::named("h200").unwrap();
    let class = Class::new(Elem::Bf16, 128, 128, 1);
    let long = sizes(2, 16, 16, 8192);
    let with = |asked: &[(&str, &str)], kernel| {
        let mut options = KernelOptions::default();
        asked.iter().for_each(|(name, value)| options.set(name, value).unwrap());
        choose(&profile, &class, &long, kernel, &options, None)
    };
    for (count, warps) in [("1", 8), ("2", 12), ("3", 16)] {
        let found = with(&[("forward.consumers", count)], Kernel::Forward);
        // Three leave too few registers for scores and out at head dim 128.
        match found {
            Ok(choice) => {
                let tiles = Tiles::of(&choice.chosen.config);
                assert_eq!((tiles.family, tiles.warps), (Family::Hopper, warps));
                assert_eq!(choice.origin, Origin::User);
            }
            Err(e) => assert!(count == "3" && e.to_string().contains("registers"), "{count}: {e}"),
        }
    }
    let said = |asked: &[(&str, &str)], kernel| with(asked, kernel).unwrap_err().to_string();
    let many = said(&[("forward.consumers", "4")], Kernel::Forward);
    assert!(many.contains("20 warps; hopper has 8, 12 or 16, four of them producers"), "{many}");
    let most = said(&[("forward.consumers", &usize::MAX.to_string())], Kernel::Forward);
    assert!(most.contains("hopper has 8, 12 or 16"), "{most}");
    let three = said(&[("backward.consumers", "3")], Kernel::Backward);
    assert!(three.contains("16 warps; hopper has 12"), "{three}");
    // Heads of few queries share a tile only where nothing is asked of the family.
    let mut options = KernelOptions::default();
    options.set("forward.consumers", "1").unwrap();
    let (grouped, decode) = (Class { group: 4, ..class.clone() }, Sizes { queries: 1, ..long });
    let choice = choose(&profile, &grouped, &decode, Kernel::Forward, &options, None).unwrap();
    let config = &choice.chosen.config;
    assert!(config.family == Family::Hopper && !config.pack_gqa, "{config}");
    let both = said(&[("forward.consumers", "2"), ("forward.warps", "8")], Kernel::Forward);
    let reason = "8 warps are asked for, and consumers that make 12; leave one of them out";
    assert_eq!(both, reason);
    let family = [("forward.consumers", "2"), ("forward.family", "portable")];
    let portable = said(&family, Kernel::Forward);
    assert!(portable.contains("portable: it has no consumers; leave the option out"), "{portable}");
}

#[test]
fn masks_that_take_long_have_bits_and_others_are_evaluated() {
    let profile = Profile::named("h200").unwrap();
    let plan = |mask: MaskMod, dim: usize, asked: &[(&str, &str)]| {
        let mut options = KernelOptions::default();
        for (name, value) in asked {
            options.set(name, value).unwrap();
        }
        let class = Class {
            mask: true,
            mask_steps: mask_steps(&mask),
            mask_reads: mask_reads(&mask),
            ..Class::new(Elem::Bf16, dim, dim, 1)
        };
        KernelPlan::new(&profile, &class, &sizes(2, 16, 16, 8192), true, &options)
    };
    const BOTH: [Kernel; 2] = [Kernel::Forward, Kernel::Backward];
    let bits = |plan: &KernelPlan| BOTH.map(|kernel| plan.config(kernel).unwrap().mask_bits);
    let neighbours = || masks::neighbourhood(&[128, 64], &[17, 17]).unwrap();
    for (dim, kernels) in [(64, &BOTH[..1]), (128, &BOTH)] {
        let found = plan(neighbours(), dim, &[]).unwrap();
        assert_eq!(bits(&found), [true, kernels.len() > 1], "{dim}");
        // Where it spills or is serialised, the same that evaluates the mask runs.
        for &kernel in kernels {
            let choice = found.choice(kernel);
            let evaluating = Config { mask_bits: false, ..choice.chosen.config.clone() };
            assert_eq!(choice.others[0].config, evaluating, "{dim}");
            let needed = |of: &Candidate| of.resources.needed;
            assert!(needed(&choice.others[0]) < needed(&choice.chosen), "{dim}");
            let alike = |c: &Candidate| c.config.mask_bits || c.config.family == Family::Portable;
            assert!(choice.worth_timing(12).all(alike));
        }
        // A window has bits in a plain forward alone, a causal mask and a prefix nowhere.
        let window = masks::causal() & masks::sliding_window(1024).unwrap();
        assert_eq!(bits(&plan(window, dim, &[]).unwrap()), [true, false]);
        for mask in [masks::causal(), masks::prefix_lm(1024).unwrap()] {
            assert_eq!(bits(&plan(mask, dim, &[]).unwrap()), [false; 2]);
        }
    }
    assert_eq!(bits(&plan(neighbours(), 192, &[]).unwrap()), [true, false]);
    let documents = || masks::causal() & masks::document_lengths(&[4096; 2]).unwrap();
    assert_eq!(bits(&plan(documents(), 64, &[]).unwrap()), [false; 2]);
    assert_eq!(bits(&plan(documents(), 128, &[]).unwrap()), [true; 2]);
    let said = plan(neighbours(), 128, &[]).unwrap().to_string();
    assert!(said.contains("  mask       partial by mask bits: the mask takes "), "{said}");
    // Rows so long that few tiles are partial, or bits of all have no room.
    let class = Class { mask: true, mask_steps: 9, ..Class::new(Elem::Bf16, 128, 128, 3) };
    let long = |mean_kv_len| {
        let sizes = Sizes { mean_kv_len, ..sizes(1, 24, 8, 65_536) };
        KernelPlan::new(&profile, &class, &sizes, true, &KernelOptions::default()).unwrap()
    };
    let wide = |plan: &KernelPlan| plan.config(Kernel::Forward).unwrap().tile_kv == 176;
    for keys in [2048, 4095, 4096, 16_383, 16_384, 32_768] {
        let found = long(keys);
        assert_eq!((bits(&found), wide(&found)), ([keys < 16_384; 2], keys >= 4096), "{keys}");
    }
    let said = long(32_768).to_string();
    assert!(said.contains("partial by evaluation: a query sees 16384 keys or more"), "{said}");
    let (yes, no) = (("forward.mask_bits", "true"), ("backward.mask_bits", "false"));
    let asked = plan(masks::causal(), 128, &[yes, no]).unwrap();
    assert_eq!(bits(&asked), [true, false]);
    assert!(asked.to_string().contains("  mask       partial by mask bits: as asked for\n"));
    let refused = |asked: &[(&str, &str)], dim, why: &str| {
        let said = plan(masks::causal(), dim, asked).unwrap_err().to_string();
        assert!(said.contains(why), "{said}");
    };
    refused(&[yes, ("forward.family", "portable")], 128, "portable: it has no mask bits");
    let wide = "hopper: mask bits in a backward at head dims above 128";
    refused(&[("backward.mask_bits", "true")], 192, wide);
    let said = KernelOptions::default().set("backward_dq.mask_bits", "true").unwrap_err();
    assert!(said.ends_with("forward and backward have mask_bits"), "{said}");
    // Without a mask there is nothing to make bits of.
    let mut options = KernelOptions::default();
    options.set("forward.mask_bits", "true").unwrap();
    let plain = Class::new(Elem::Bf16, 128, 128, 1);
    let found = KernelPlan::new(&profile, &plain, &sizes(2, 16, 16, 8192), false, &options);
    assert!(!found.unwrap().config(Kernel::Forward).unwrap().mask_bits);
}
