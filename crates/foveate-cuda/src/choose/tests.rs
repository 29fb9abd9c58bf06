mod hopper;

use foveate_problem::Dims;

use super::class::{MOST_ROWS, coarse};
use super::planner::candidates;
use super::*;
use crate::compile::Candidate;
use crate::compile::config::{Elem, Family, Kernel, Tiles};
use crate::compile::resources::Refusal;
use foveate_gpu::profile::Profile;
use foveate_tensor::DType;

/// The kinds of mods that the kernels tell apart.
fn mods(class: &Class) -> [Class; 4] {
    let plain = class.clone();
    let mask = Class { mask: true, ..plain.clone() };
    let score = Class { score: true, dscore: true, ..plain.clone() };
    let learned = Class { captures: true, score: true, dscore: true, ..plain.clone() };
    [plain, mask, score, learned]
}

fn sizes(batch: usize, heads_q: usize, heads_kv: usize, len: usize) -> Sizes {
    Sizes { batch, heads_q, heads_kv, queries: len, keys: len, mean_kv_len: len }
}

fn profile_with(limit: usize) -> Profile {
    let all = Profile::all().into_iter();
    let mut found = all.filter(|p| p.shared_per_block == limit);
    found.next().expect("a profile with this limit")
}

/// Every kernel of a plan fits its device.
#[track_caller]
fn assert_fits(plan: &KernelPlan) {
    for choice in &plan.kernels {
        let Candidate { config, resources, occupancy, .. } = &choice.chosen;
        let limit = plan.profile.shared_per_block;
        assert!(resources.shared_bytes <= limit, "{config}: {}", resources.shared_bytes);
        assert!(occupancy.ctas >= 1, "{config} on {}", plan.profile.name);
    }
}

#[test]
fn every_device_has_a_configuration_for_every_class() {
    let options = KernelOptions::default();
    for profile in Profile::all() {
        for dtype in Elem::ALL {
            for (dim, dim_v) in
                [(16, 16), (64, 64), (80, 80), (128, 128), (160, 160), (256, 256), (192, 128)]
            {
                for mut class in mods(&Class::new(dtype, dim, dim_v, 4)) {
                    for deterministic in [false, true] {
                        class.deterministic = deterministic;
                        let sizes = sizes(2, 32, 8, 4096);
                        let plan = KernelPlan::new(&profile, &class, &sizes, true, &options);
                        assert_fits(&plan.unwrap_or_else(|e| panic!("{e}")));
                    }
                }
            }
        }
    }
}

#[test]
fn odd_head_dims_and_lengths_have_configurations_too() {
    for profile in Profile::all() {
        for (dim, dim_v) in [(1, 1), (33, 7), (100, 36), (255, 241)] {
            for len in [1, 15, 17, 100] {
                for dtype in Elem::ALL {
                    let unmapped = Unmapped::aligned(0);
                    let class = Class::new(dtype, dim, dim_v, 1);
                    let class = Class { align: 0, unmapped, sink: true, ..class };
                    let options = KernelOptions::default();
                    let sizes = sizes(1, 3, 3, len);
                    let plan = KernelPlan::new(&profile, &class, &sizes, true, &options).unwrap();
                    assert_fits(&plan);
                    let forward = &plan.kernels[0].chosen.config;
                    assert!(forward.tile_q < 2 * len.next_multiple_of(16), "{forward} for {len}");
                }
            }
        }
    }
}

/// Packed fine-tuning of Llama 3.1 and Qwen2.5 died in the backward of FlexAttention: the only
/// default tile took more shared memory than the card had.
#[test]
fn torchtune_2113_has_a_backward_on_both_limits() {
    for limit in [101_376, 232_448] {
        let class = Class { mask: true, ..Class::new(Elem::Bf16, 128, 128, 7) };
        let profile = profile_with(limit);
        let options = KernelOptions::default();
        let plan = KernelPlan::new(&profile, &class, &sizes(1, 28, 4, 512), true, &options);
        assert_fits(&plan.unwrap());
    }
}

#[test]
fn torchtune_2392_has_a_backward_on_an_l40s() {
    let class = Class { mask: true, ..Class::new(Elem::Bf16, 128, 128, 4) };
    let profile = Profile::named("l40s").unwrap();
    let options = KernelOptions::default();
    let plan = KernelPlan::new(&profile, &class, &sizes(1, 32, 8, 2048), true, &options).unwrap();
    assert_fits(&plan);
    let backward = plan.kernels.iter().find(|c| c.chosen.config.kernel == Kernel::Backward);
    let refused = &backward.unwrap().refused;
    // The tile that a larger card takes, and what it would need here.
    let large = refused.iter().find(|r| {
        (r.config.tile_q, r.config.tile_kv, r.config.warps, r.config.stages) == (64, 128, 8, 2)
    });
    let wanted = Refusal::Shared { bytes: 175_168, limit: 101_376 };
    assert_eq!(large.unwrap().refusal, wanted);
}

#[test]
fn pytorch_133254_has_a_backward_on_an_rtx_4090() {
    let class = Class::new(Elem::F16, 128, 128, 1);
    let profile = Profile::named("rtx4090").unwrap();
    let options = KernelOptions::default();
    let plan = KernelPlan::new(&profile, &class, &sizes(4, 8, 8, 2048), true, &options);
    assert_fits(&plan.unwrap());
}

#[test]
fn pytorch_198224_has_a_backward_above_dim_128_on_an_rtx_5090() {
    let profile = Profile::named("rtx5090").unwrap();
    for (dim, dim_v) in [(160, 160), (192, 128), (192, 192), (256, 256)] {
        let class = Class { mask: true, ..Class::new(Elem::Bf16, dim, dim_v, 1) };
        let options = KernelOptions::default();
        let plan = KernelPlan::new(&profile, &class, &sizes(2, 16, 16, 4096), true, &options);
        assert_fits(&plan.unwrap());
    }
}

#[test]
fn options_are_honoured() {
    let profile = Profile::named("a100").unwrap();
    let class = Class::new(Elem::Bf16, 64, 64, 1);
    let forward = TileOptions { tile_q: Some(48), warps: Some(3), ..TileOptions::default() };
    let backward = TileOptions { tile_kv: Some(80), stages: Some(1), ..TileOptions::default() };
    let options =
        KernelOptions { forward, backward, kv_splits: Some(3), ..KernelOptions::default() };
    let plan = KernelPlan::new(&profile, &class, &sizes(1, 4, 4, 4096), true, &options).unwrap();
    let forward = plan.config(Kernel::Forward).unwrap();
    assert_eq!((forward.tile_q, forward.warps, forward.kv_split), (48, 3, true));
    let backward = plan.config(Kernel::Backward).unwrap();
    assert_eq!((backward.tile_kv, backward.stages), (80, 1));
    assert!(plan.config(Kernel::Combine).is_some());
}

#[test]
fn options_that_do_not_fit_are_refused_with_the_numbers() {
    let profile = Profile::named("l40s").unwrap();
    let class = Class::new(Elem::Bf16, 128, 128, 1);
    let refused = |backward: TileOptions| {
        let options = KernelOptions { backward, ..KernelOptions::default() };
        let plan = KernelPlan::new(&profile, &class, &sizes(1, 4, 4, 4096), true, &options);
        plan.unwrap_err().to_string()
    };
    let large = TileOptions {
        tile_q: Some(64),
        tile_kv: Some(128),
        warps: Some(8),
        stages: Some(2),
        ..TileOptions::default()
    };
    assert_eq!(
        refused(large),
        "no backward kernel for bf16 at head dim 128 with the options given (tile_q 64, tile_kv \
         128, warps 8, stages 2) fits l40s, where a CTA can have 101376 B of shared memory: hopper: \
         compute capability 8.9; it runs on 9.0; tile 64x128, 8 warps, 2 stages: 175168 B of shared memory, a CTA can have 101376"
    );
    let uneven = refused(TileOptions { tile_q: Some(20), ..TileOptions::default() });
    assert_eq!(
        uneven.matches("a side of 20; both sides of a tile are multiples").count(),
        1,
        "{uneven}"
    );
    let warps = refused(TileOptions { warps: Some(64), ..TileOptions::default() });
    assert!(warps.contains("64 warps; a CTA has 1 to 32"), "{warps}");
    let none = refused(TileOptions { warps: Some(0), stages: Some(9), ..TileOptions::default() });
    assert!(none.contains("0 warps; a CTA has 1 to 32"), "{none}");
}

#[test]
fn where_nothing_fits_the_error_names_the_smallest_candidates_and_counts_all() {
    let profile = Profile::named("l4").unwrap();
    let class = Class::new(Elem::F32, 512, 512, 1);
    let options = KernelOptions::default();
    let plan = KernelPlan::new(&profile, &class, &sizes(1, 4, 4, 4096), false, &options);
    let said = plan.unwrap_err().to_string();
    let candidates = candidates(Kernel::Forward, &TileOptions::default(), 4096, 1);
    let first = "fits l4, where a CTA can have 101376 B of shared memory: hopper: compute capability \
                 8.9; it runs on 9.0; tile 16x16, 1 warp, 1 stage: ";
    let others = format!("; and {} more, of larger tiles.", 1 + candidates.len() - 3);
    assert!(said.contains(first) && said.contains(&others), "{said}");
    assert!(said.ends_with(" Head dims up to 256 fit every GPU"), "{said}");
    assert_eq!(said.lines().count(), 1, "{said}");
    assert!(said.starts_with("no forward kernel for f32 at head dim 512 fits l4, where a CTA "));
}

#[test]
fn few_queries_split_the_keys_so_that_the_device_is_busy() {
    let profile = Profile::named("h200").unwrap();
    let class = Class::new(Elem::Bf16, 128, 128, 4);
    let options = KernelOptions::default();
    let decode =
        Sizes { batch: 1, heads_q: 32, heads_kv: 8, queries: 1, keys: 32_768, mean_kv_len: 32_768 };
    let plan = KernelPlan::new(&profile, &class, &decode, false, &options).unwrap();
    assert!(plan.kv_splits >= 4, "{}", plan.kv_splits);
    assert_eq!(plan.config(Kernel::Forward).unwrap().tile_q, 16);
    let training = KernelPlan::new(&profile, &class, &sizes(2, 32, 8, 8192), true, &options);
    assert_eq!(training.unwrap().kv_splits, 1);
}

#[test]
fn keys_are_split_over_no_more_blocks_than_a_launch_has() {
    let profile = Profile::named("h200").unwrap();
    let class = Class::new(Elem::Bf16, 128, 128, 1);
    let with = |kv_splits| {
        let options = KernelOptions { kv_splits: Some(kv_splits), ..KernelOptions::default() };
        KernelPlan::new(&profile, &class, &sizes(1, 4, 4, 200), false, &options)
    };
    assert_eq!(with(3).unwrap().kv_splits, 3);
    for kv_splits in [0, 65536] {
        let said = with(kv_splits).unwrap_err().to_string();
        let reason = format!("kv_splits is {kv_splits}; keys are split over 1 to 65535 CTAs");
        assert_eq!(said, reason);
    }
}

#[test]
fn a_large_card_gets_what_was_measured_there() {
    let profile = Profile::named("h200").unwrap();
    let class = Class { mask: true, ..Class::new(Elem::Bf16, 128, 128, 4) };
    let options = KernelOptions::default();
    let plan = KernelPlan::new(&profile, &class, &sizes(2, 32, 8, 8192), true, &options).unwrap();
    for kernel in [Kernel::Forward, Kernel::Backward] {
        let choice = plan.kernels.iter().find(|c| c.chosen.config.kernel == kernel).unwrap();
        assert_eq!(choice.origin, Origin::Table, "{}", choice.chosen.config);
    }
}

#[test]
fn the_heads_of_a_group_share_a_tile_for_few_queries() {
    let class = Class::new(Elem::Bf16, 128, 128, 4);
    let options = KernelOptions::default();
    let profile = Profile::named("h200").unwrap();
    let plan = |class: &Class, queries| {
        let sizes =
            Sizes { batch: 16, heads_q: 32, heads_kv: 8, queries, keys: 8192, mean_kv_len: 8192 };
        KernelPlan::new(&profile, class, &sizes, false, &options).unwrap()
    };
    let decode = plan(&class, 1);
    let forward = decode.config(Kernel::Forward).unwrap();
    assert!(forward.pack_gqa && forward.tile_q == 16 && forward.queries() == 4, "{forward}");
    // 128 pairs of an entry and a key head, on a card of 132 SMs.
    let resident = decode.kernels[0].chosen.occupancy.ctas;
    assert!(
        resident >= 3 && decode.kv_splits == 132 * resident / 128,
        "{resident} {}",
        decode.kv_splits
    );
    let packs_gqa =
        |class: &Class, queries| plan(class, queries).config(Kernel::Forward).unwrap().pack_gqa;
    assert_eq!(decode.kernels[0].origin, Origin::Table);
    let of_cache = plan(&class, 16);
    let forward = of_cache.config(Kernel::Forward).unwrap();
    assert!(forward.pack_gqa && forward.tile_q == 64 && forward.queries() == 16, "{forward}");
    assert_eq!(of_cache.kernels[0].origin, Origin::Table);
    assert!(packs_gqa(&class, 32));
    assert!(!packs_gqa(&class, 512));
    assert!(!packs_gqa(&Class { mask: true, by_head: true, ..class.clone() }, 1));
    assert!(!packs_gqa(&Class { group: 1, ..class }, 1));
}

#[test]
fn a_tile_holds_a_query_of_every_head_that_shares_it() {
    let profile = Profile::named("a100").unwrap();
    for group in [2, 3, 7, 12, 71, 128, 129] {
        let class = Class::new(Elem::F16, 64, 64, group);
        let sizes = Sizes {
            batch: 1,
            heads_q: group,
            heads_kv: 1,
            queries: 3,
            keys: 500,
            mean_kv_len: 500,
        };
        let plan = KernelPlan::new(&profile, &class, &sizes, false, &KernelOptions::default());
        let plan = plan.unwrap();
        let forward = plan.config(Kernel::Forward).unwrap();
        assert_eq!(forward.pack_gqa, group <= MOST_ROWS, "{forward}");
        assert!(forward.queries() >= 1 && forward.queries() * forward.heads() <= forward.tile_q);
    }
}

#[test]
fn a_choice_is_the_users_before_a_record_before_the_table_before_the_model() {
    let profile = Profile::named("h200").unwrap();
    let sizes = sizes(2, 16, 16, 8192);
    let choice = |class: &Class, options: &KernelOptions, recorded| {
        choose(&profile, class, &sizes, Kernel::Backward, options, recorded).unwrap()
    };
    let class = Class::new(Elem::Bf16, 128, 128, 1);
    let none = KernelOptions::default();
    let table = choice(&class, &none, None);
    assert_eq!(table.origin, Origin::Table);
    // Any that fits may be the best of a GPU.
    let best = Tiles::of(&table.others.last().unwrap().config);
    let recorded = |tiles| Some(Record { tiles, us: 12.0, planned_us: Some(18.0) });
    let record = choice(&class, &none, recorded(best));
    assert_eq!((record.origin, Tiles::of(&record.chosen.config)), (Origin::Record, best));
    assert_eq!(record.ranked().count(), table.ranked().count());
    let mut asked = none;
    asked.set("backward.tile_q", "64").unwrap();
    assert_eq!(choice(&class, &asked, recorded(best)).origin, Origin::User);
    // A record of tiles that no longer fit is none.
    let foreign = Tiles { tile_q: 512, ..best };
    assert_eq!(choice(&class, &none, recorded(foreign)), table);
    let profile = Profile::named("l40s").unwrap();
    let model = choose(&profile, &class, &sizes, Kernel::Backward, &none, None).unwrap();
    assert_eq!(model.origin, Origin::Model);
    assert!(model.ranked().all(|c| c.modelled_us >= model.chosen.modelled_us));
}

#[test]
fn every_configuration_of_the_table_fits_the_card_it_was_measured_on() {
    let profile = Profile::named("h200").unwrap();
    for dim in [64, 96, 128, 192, 256] {
        for class in &mods(&Class::new(Elem::Bf16, dim, dim, 1))[..3] {
            for mean_kv_len in [8192, 256] {
                let sizes = Sizes { mean_kv_len, ..sizes(2, 2048 / dim, 2048 / dim, 8192) };
                let options = KernelOptions::default();
                let plan = KernelPlan::new(&profile, class, &sizes, true, &options).unwrap();
                let of_tiles = plan.kernels.iter().filter(|c| c.chosen.config.kernel.has_tiles());
                for choice in of_tiles {
                    assert_eq!(choice.origin, Origin::Table, "{}:\n{plan}", choice.chosen.config);
                }
            }
        }
    }
}

fn growing(keys: usize) -> Sizes {
    Sizes::of(&Dims {
        batch: 4,
        heads_q: 32,
        heads_kv: 8,
        len_q: 1,
        len_k: keys,
        dim: 128,
        dim_v: 128,
        shared_kv: false,
        packed: false,
    })
}

#[test]
fn lengths_that_are_close_are_planned_together_and_short_ones_apart() {
    for n in 0..=64 {
        assert_eq!(coarse(n), n);
    }
    for n in 65..20_000 {
        let rounded = coarse(n);
        assert!(n <= rounded && 8 * (rounded - n) < n, "{n} is {rounded}");
        assert_eq!(coarse(rounded), rounded);
    }
    assert_eq!([65, 128, 129, 4096, 4097].map(coarse), [72, 128, 144, 4096, 4608]);
    assert_eq!(coarse(usize::MAX), usize::MAX);
}

#[test]
fn options_of_any_size_are_refused_at_once() {
    let profile = Profile::named("h200").unwrap();
    let class = Class::new(Elem::Bf16, 64, 64, 4);
    for name in ["tile_q", "tile_kv", "warps", "stages", "consumers"] {
        // What wraps around to something small, what is a multiple of everything, and what takes
        // long to count to.
        for value in [(1 << 59) + 1, 1 << 60, 10_000_000_000, 4112, usize::MAX] {
            for kernel in ["forward", "backward"] {
                let mut options = KernelOptions::default();
                options.set(&format!("{kernel}.{name}"), &value.to_string()).unwrap();
                let plan = KernelPlan::new(&profile, &class, &sizes(2, 32, 8, 512), true, &options);
                let said = plan.unwrap_err().to_string();
                assert!(said.contains(&format!("({name} {value})")), "{said}");
            }
        }
    }
}

#[test]
fn a_cache_that_grows_by_a_key_a_step_is_planned_few_times_and_runs_few_kernels() {
    let options = KernelOptions::default();
    for card in ["h200", "l40s"] {
        let profile = Profile::named(card).unwrap();
        let class = Class { mask: true, ..Class::new(Elem::Bf16, 128, 128, 4) };
        let plan = |sizes: &Sizes| KernelPlan::new(&profile, &class, sizes, false, &options);
        let mut planned: Vec<Sizes> = (1..=32_768).map(growing).collect();
        planned.dedup();
        assert!(planned.len() <= 64 + 9 * 8, "{} plans", planned.len());
        let mut configs = std::collections::HashSet::new();
        for sizes in &planned {
            let kernels = plan(sizes).unwrap().kernels.into_iter();
            configs.extend(kernels.map(|choice| choice.chosen.config));
        }
        // Split or not, few tiles, and what joins the shares.
        assert!(configs.len() <= 8, "{card}: {configs:#?}");
        let began = std::time::Instant::now();
        let mut steps: Vec<Sizes> = (5000..6000).map(growing).collect();
        steps.dedup();
        steps.iter().for_each(|sizes| drop(plan(sizes).unwrap()));
        let rounded = began.elapsed();
        let exact = |keys| Sizes { keys, ..growing(keys) };
        let began = std::time::Instant::now();
        (5000..6000).for_each(|keys| drop(plan(&exact(keys)).unwrap()));
        println!(
            "{card}: 1000 steps of a growing cache are planned {} times in {rounded:?}; each anew \
             would take {:?}; {} kernels up to 32768 keys",
            steps.len(),
            began.elapsed(),
            configs.len()
        );
    }
}

/// How much of a launch its CTAs work, when each takes the next item as soon as it is free, tiles of
/// keys under a causal mask in turns of `turns` heads.
fn share_at_work(plan: &KernelPlan, sizes: &Sizes, turns: usize) -> f64 {
    let Tiles { tile_q, tile_kv, .. } = Tiles::of(plan.config(Kernel::Backward).unwrap());
    let heads: Vec<usize> = (0..sizes.heads_kv).collect();
    let tiles: Vec<usize> = (0..sizes.keys / tile_kv).collect();
    let work = |&tile: &usize| {
        sizes.heads_q / sizes.heads_kv * (sizes.queries - tile * tile_kv).div_ceil(tile_q)
    };
    let mut free = vec![0; plan.profile.sms];
    for together in heads.chunks(turns) {
        for tile in &tiles {
            for _ in (0..sizes.batch).flat_map(|_| together) {
                *free.iter_mut().min().unwrap() += work(tile);
            }
        }
    }
    free.iter().sum::<usize>() as f64 / (free.len() * free.iter().max().unwrap()) as f64
}

#[test]
fn heads_take_turns_so_that_the_ctas_of_a_causal_backward_end_together() {
    let profile = Profile::named("h200").unwrap();
    let plain = Class { mask: true, ..Class::new(Elem::Bf16, 128, 128, 4) };
    for (batch, heads_q, heads_kv, len) in
        [(1, 32, 8, 8192), (1, 24, 8, 8192), (2, 32, 8, 8192), (2, 16, 16, 8192), (8, 16, 16, 2048)]
    {
        let sizes = sizes(batch, heads_q, heads_kv, len);
        let plan = KernelPlan::new(&profile, &plain, &sizes, true, &KernelOptions::default());
        let plan = plan.unwrap();
        let turns = plan.interleaved_heads(Kernel::Backward, heads_kv, batch * len / 128);
        let share = share_at_work(&plan, &sizes, turns);
        assert!(share > 0.98, "{sizes:?}: {turns} heads, {share}");
    }
    // Llama-3.1-8B's one row, a head after the other: the last head's longest item begins late.
    let one_row = sizes(1, 32, 8, 8192);
    let plan = KernelPlan::new(&profile, &plain, &one_row, true, &KernelOptions::default());
    assert!(share_at_work(&plan.unwrap(), &one_row, 1) < 0.85);
}

#[test]
fn tiles_are_smaller_where_few_keys_are_seen() {
    let profile = Profile::named("h200").unwrap();
    let tiles = |kernel, dim, score, group, mean_kv_len| {
        let class = Class { mask: true, score, group, ..Class::new(Elem::Bf16, dim, dim, 1) };
        let sizes = Sizes { mean_kv_len, ..sizes(2, 8 * group, 8, 8192) };
        let portable = TileOptions { family: Some(Family::Portable), ..TileOptions::default() };
        let options =
            KernelOptions { forward: portable, backward: portable, ..KernelOptions::default() };
        let plan = KernelPlan::new(&profile, &class, &sizes, true, &options).unwrap();
        let config = plan.config(kernel).unwrap();
        (config.tile_q, config.tile_kv)
    };
    // Documents of 512, a window of 1024, and causal.
    let masks = [256, 960, 4096];
    let forward =
        |dim, score| masks.map(|mean_kv_len| tiles(Kernel::Forward, dim, score, 1, mean_kv_len));
    assert_eq!(forward(64, false), [(64, 64), (64, 64), (128, 64)]);
    assert_eq!(forward(128, false), [(64, 32), (128, 48), (128, 32)]);
    assert_eq!(forward(128, true), [(128, 64); 3]);
    let backward =
        |score| masks.map(|mean_kv_len| tiles(Kernel::Backward, 64, score, 1, mean_kv_len));
    assert_eq!(backward(false), [(64, 64), (64, 96), (64, 96)]);
    assert_eq!(backward(true), [(64, 96); 3]);
    // Four heads of queries see each key.
    assert_eq!(tiles(Kernel::Backward, 64, false, 4, 256), (64, 96));
    assert_eq!(tiles(Kernel::Backward, 64, false, 4, 128), (64, 64));
}

/// The tuner compiles and runs each of these: what runs now and, where rates are known, of the
/// others none that the model has far behind.
#[test]
fn the_tuner_times_what_the_model_has_near_the_best_where_rates_are_known_and_else_all() {
    for (dim, kernel) in [64, 128, 256].into_iter().flat_map(|dim| {
        [Kernel::Forward, Kernel::Backward, Kernel::BackwardDq].map(|kernel| (dim, kernel))
    }) {
        let class = Class { deterministic: true, ..Class::new(Elem::Bf16, dim, dim, 1) };
        let sizes = sizes(2, 2048 / dim, 2048 / dim, 8192);
        let options = KernelOptions::default();
        for card in ["h200", "a100", "l40s", "b200"] {
            let profile = Profile::named(card).unwrap();
            let choice = choose(&profile, &class, &sizes, kernel, &options, None).unwrap();
            let best = choice.ranked().map(|c| c.modelled_us).fold(f64::INFINITY, f64::min);
            let all: Vec<_> = choice.worth_timing(usize::MAX).collect();
            assert_eq!(all[0], &choice.chosen);
            let said = format!("{kernel} at {dim} on {card}");
            if card == "h200" {
                assert!(all[1..].iter().all(|c| c.modelled_us <= 1.5 * best), "{said}");
                assert!(all.len() < choice.ranked().count(), "{said}: some are far behind");
            } else {
                assert_eq!(all.len(), choice.ranked().count(), "{said}");
            }
            assert_eq!(choice.worth_timing(12).count(), all.len().min(12));
            assert_eq!(choice.worth_timing(0).count(), 1);
        }
    }
}
