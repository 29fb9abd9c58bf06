//! What passes queue, on a driver made for tests that loads kernels and runs none
//! (`driver/cuda.c`): their order and grids, and what is refused before any of them. The kernels
//! are compiled, so there is nothing to see on a machine without NVRTC.

#[path = "../../../foveate-gpu/tests/driver/mod.rs"]
mod driver;
mod memory;

use std::time::Duration;
use std::{env, fs};

use foveate_cuda::{
    CudaOptions, CudaPlan, DeviceArray, DeviceBackward, DeviceForward, DeviceOffsets,
    DeviceOperands, DeviceTensor, ElementType, Engine,
};
use foveate_gpu::driver::{Allocation, Graph};
use foveate_gpu::{Queue, trace};
use foveate_mods::{Buffer, MaskMod, ScoreMod, expr, masks};
use foveate_problem::{Arrangement, Dims, Dropout, Spec};
use foveate_tensor::DType;

/// Whether this is the process with the driver; otherwise starts it for the test `name`.
fn inside(name: &str) -> bool {
    // Kernels that have not changed are not compiled again.
    let cache = concat!(env!("CARGO_TARGET_TMPDIR"), "/kernels");
    driver::inside(name, &["nvrtc"], &["-DLOADS"], &[("FOVEATE_CACHE_DIR", cache)])
}

const PLAIN: Spec = Spec { mask: None, score: None, scale: None, dropout: None };

/// Heads of 64 numbers; lengths that divide nothing.
const DIMS: Dims = Dims {
    batch: 2,
    heads_q: 4,
    heads_kv: 2,
    len_q: 300,
    len_k: 301,
    dim: 64,
    dim_v: 64,
    shared_kv: false,
    packed: false,
};

/// Operands and destinations of a problem in memory of the engine's own queue.
struct Tensors {
    blocks: Vec<Allocation>,
    forward: DeviceForward<'static>,
    backward: DeviceBackward<'static>,
}

impl Tensors {
    fn new(dims: &Dims) -> Self {
        let engine = Engine::get(0).unwrap();
        let mut blocks = Vec::new();
        let mut address = |elems: usize| {
            let block = engine.queue().pool().take(4 * elems).unwrap();
            let address = block.address();
            blocks.push(block);
            address
        };
        let mut tensor = |shape: [usize; 4]| {
            DeviceTensor::contiguous(address(shape.iter().product()), DType::BF16, shape)
        };
        let [q, dq] = [(); 2].map(|()| tensor(dims.q_shape()));
        let [k, v, dk, dv] = [(); 4].map(|()| tensor(dims.k_shape()));
        let [out, d_out] = [(); 2].map(|()| tensor(dims.out_shape()));
        let rows = dims.row_shape();
        let lse = DeviceTensor::contiguous(address(rows.iter().product()), DType::F32, rows);
        let mut vector =
            |len: usize| DeviceTensor::<1>::contiguous(address(len), DType::F32, [len]);
        let [sink, d_sink] = [(); 2].map(|()| vector(dims.heads_q));
        let d_bias = vector(dims.len_k);
        let operands = DeviceOperands { sink: Some(sink), ..DeviceOperands::new(q, k, v) };
        let forward = DeviceForward { operands, out, lse, max_score: None };
        let backward = DeviceBackward {
            operands,
            out,
            lse,
            d_out,
            d_lse: None,
            dq: Some(dq),
            dk: Some(dk),
            dv: Some(dv),
            accumulate: false,
            d_sink: Some(d_sink),
            d_captures: vec![("bias", d_bias)],
        };
        Self { blocks, forward, backward }
    }

    /// The backward of a program that captures nothing learned.
    fn backward_alone(&self) -> DeviceBackward<'static> {
        DeviceBackward { d_captures: Vec::new(), ..self.backward.clone() }
    }
}

fn plan(spec: &Spec, dims: &Dims, options: CudaOptions) -> CudaPlan {
    CudaPlan::new(Engine::get(0).unwrap(), spec, dims, DType::BF16, options).unwrap()
}

/// Causal attention in documents of `len` keys each, and its operands.
fn of_documents(len: i32) -> (CudaPlan, Tensors) {
    let doc = Buffer::vector("doc", (0..DIMS.len_k as i32).map(|i| i / len).collect());
    let mask = masks::causal() & masks::document(&doc).unwrap();
    let plan = plan(&Spec { mask: Some(mask), ..PLAIN }, &DIMS, CudaOptions::default());
    (plan, Tensors::new(&DIMS))
}

/// The launches since the last look: kernel, grid, threads.
fn launches() -> Vec<String> {
    let log = std::path::Path::new(&env::var_os("HOME").unwrap()).join("launches");
    let lines = fs::read_to_string(&log).unwrap_or_default();
    let _ = fs::remove_file(log);
    lines.lines().map(str::to_owned).collect()
}

/// Their kernels.
fn names(launches: &[String]) -> Vec<&str> {
    launches.iter().map(|line| line.split(' ').next().unwrap()).collect()
}

#[test]
fn a_pass_queues_its_kernels_in_order_and_makes_lists_and_tables_once() {
    if !inside("a_pass_queues_its_kernels_in_order_and_makes_lists_and_tables_once") {
        return;
    }
    let queue = Engine::get(0).unwrap().queue().clone();
    let doc = Buffer::vector("doc", (0..DIMS.len_k as i32).map(|i| i / 50).collect());
    let bias = Buffer::learned("bias", &[DIMS.len_k], vec![0.5; DIMS.len_k]).unwrap();
    let score = ScoreMod::new((expr::score() + bias.at([expr::kv()])).dynamic()).unwrap();
    let mask = masks::causal() & masks::document(&doc).unwrap();
    let spec = Spec { mask: Some(mask), score: Some(score), ..PLAIN };
    let of =
        |deterministic| plan(&spec, &DIMS, CudaOptions { deterministic, ..CudaOptions::default() });
    let tensors = Tensors::new(&DIMS);

    let fast = of(false);
    fast.forward_on(&queue, &tensors.forward).unwrap();
    let first = launches();
    assert_eq!(names(&first), ["fv_range_table", "fv_block_lists", "fv_forward"]);
    fast.forward_on(&queue, &tensors.forward).unwrap();
    assert_eq!(launches(), first[2..], "what was made is kept");
    fast.backward_on(&queue, &tensors.backward).unwrap();
    let rows = ["fv_delta", "fv_row_weight_sum", "fv_sink_gradient"];
    // What they need comes before all launches of the pass.
    assert_eq!(
        names(&launches()),
        [&["fv_block_lists"], &rows[..], &["fv_backward", "fv_dq"]].concat()
    );
    fast.backward_on(&queue, &tensors.backward).unwrap();
    assert_eq!(names(&launches()), [&rows[..], &["fv_backward", "fv_dq"]].concat());

    let ordered = of(true);
    ordered.backward_on(&queue, &tensors.backward).unwrap();
    launches();
    ordered.backward_on(&queue, &tensors.backward).unwrap();
    let last = ["fv_backward", "fv_capture_sums", "fv_backward_dq"];
    assert_eq!(names(&launches()), [&rows[..], &last].concat());
    // Nobody asks for gradients of the sink and of the buffer.
    let few = DeviceBackward { d_sink: None, d_captures: Vec::new(), ..tensors.backward.clone() };
    ordered.backward_on(&queue, &few).unwrap();
    assert_eq!(
        names(&launches()),
        ["fv_delta", "fv_row_weight_sum", "fv_backward", "fv_backward_dq"]
    );
}

/// What is said of a queue that hangs, which it does from here on.
fn last_launches(queue: &Queue) -> String {
    fs::write(std::path::Path::new(&env::var_os("HOME").unwrap()).join("busy"), "").unwrap();
    queue.stream().wait(Duration::from_millis(20), "a step").unwrap_err().to_string()
}

#[test]
fn a_pass_that_hangs_names_its_kernels_with_their_configurations() {
    if !inside("a_pass_that_hangs_names_its_kernels_with_their_configurations") {
        return;
    }
    let queue = Engine::get(0).unwrap().queue().clone();
    let plan = plan(&PLAIN, &DIMS, CudaOptions::default());
    let tensors = Tensors::new(&DIMS);
    plan.forward_on(&queue, &tensors.forward).unwrap();
    plan.backward_on(&queue, &tensors.backward_alone()).unwrap();
    let said = last_launches(&queue);
    let launches = said.split("hangs in one of its last ").nth(1).expect(&said);
    assert!(launches.starts_with("5 launches (fv_forward (forward bf16 D 64, "), "{said}");
    for kernel in ["; fv_delta (delta ", "; fv_backward (backward bf16 D 64, ", "; fv_dq (dq "] {
        assert!(launches.contains(kernel), "{kernel}: {said}");
    }
}

#[test]
fn dq_has_a_dtype_of_its_own_and_dk_and_dv_have_one() {
    if !inside("dq_has_a_dtype_of_its_own_and_dk_and_dv_have_one") {
        return;
    }
    let queue = Engine::get(0).unwrap().queue().clone();
    let plan = plan(&PLAIN, &DIMS, CudaOptions::default());
    let backward = Tensors::new(&DIMS).backward_alone();
    let wide =
        |tensor: Option<DeviceTensor>| tensor.map(|t| DeviceTensor { dtype: DType::F32, ..t });
    let (dk, dv) = (wide(backward.dk), wide(backward.dv));
    plan.backward_on(&queue, &DeviceBackward { dk, dv, ..backward.clone() }).unwrap();
    let said = last_launches(&queue);
    let of =
        |kernel: &str| said.split("; ").find(|launch| launch.starts_with(kernel)).expect(&said);
    assert!(of("fv_backward (").contains(", gradients f32"), "{said}");
    assert!(!of("fv_dq (").contains("gradients"), "{said}");
    let other = plan.backward_on(&queue, &DeviceBackward { dk, ..backward }).unwrap_err();
    assert!(other.to_string().contains("dv is bf16; it must be f32"), "{other}");
}

#[test]
fn gradients_that_nobody_asks_for_are_not_computed() {
    if !inside("gradients_that_nobody_asks_for_are_not_computed") {
        return;
    }
    let queue = Engine::get(0).unwrap().queue().clone();
    let bias = Buffer::learned("bias", &[DIMS.len_k], vec![0.5; DIMS.len_k]).unwrap();
    let score = ScoreMod::new((expr::score() + bias.at([expr::kv()])).dynamic()).unwrap();
    let spec = Spec { score: Some(score), ..PLAIN };
    let tensors = Tensors::new(&DIMS);
    let all = tensors.backward.clone();
    let none = DeviceBackward {
        dq: None,
        dk: None,
        dv: None,
        d_sink: None,
        d_captures: Vec::new(),
        ..all.clone()
    };
    let (dq, dk, dv) = (all.dq, all.dk, all.dv);
    let d_captures = all.d_captures.clone();
    for deterministic in [false, true] {
        let plan = plan(&spec, &DIMS, CudaOptions { deterministic, ..CudaOptions::default() });
        plan.forward_on(&queue, &tensors.forward).unwrap();
        let made = |args: &DeviceBackward<'_>| {
            plan.backward_on(&queue, args).unwrap();
            launches();
            plan.backward_on(&queue, args).unwrap();
            let launched = launches();
            names(&launched).into_iter().map(str::to_owned).collect::<Vec<_>>()
        };
        let rows = ["fv_delta", "fv_row_weight_sum"];
        assert_eq!(made(&none), Vec::<String>::new());
        let sink = DeviceBackward { d_sink: all.d_sink, ..none.clone() };
        assert_eq!(made(&sink), [&rows[..], &["fv_sink_gradient"]].concat());
        assert_eq!(
            made(&DeviceBackward { dq, ..none.clone() }),
            [&rows[..], &["fv_backward_dq"]].concat()
        );
        for keys in [
            DeviceBackward { dk, ..none.clone() },
            DeviceBackward { dv, ..none.clone() },
            DeviceBackward { dk, dv, ..none.clone() },
        ] {
            assert_eq!(made(&keys), [&rows[..], &["fv_backward"]].concat());
        }
        let sums: &[&str] = if deterministic { &["fv_capture_sums"] } else { &[] };
        let captures = DeviceBackward { d_captures: d_captures.clone(), ..none.clone() };
        assert_eq!(made(&captures), [&rows[..], &["fv_backward"], sums].concat());
        let last = if deterministic { "fv_backward_dq" } else { "fv_dq" };
        assert_eq!(
            made(&DeviceBackward { dq, dv, ..none.clone() }),
            [&rows[..], &["fv_backward", last]].concat()
        );
    }
}

#[test]
fn gradients_of_keys_of_query_heads_are_added_up_behind_their_kernel() {
    if !inside("gradients_of_keys_of_query_heads_are_added_up_behind_their_kernel") {
        return;
    }
    let queue = Engine::get(0).unwrap().queue().clone();
    let tensors = Tensors::new(&DIMS);
    let both = DeviceBackward { d_sink: None, ..tensors.backward_alone() };
    let wide = Dims { dim: 256, dim_v: 256, ..DIMS };
    let of_wide = Tensors::new(&wide);
    for deterministic in [false, true] {
        let mut options = CudaOptions { deterministic, ..CudaOptions::default() };
        options.kernels.set("backward.split_gqa", "true").unwrap();
        let plan_of = |dims| plan(&PLAIN, dims, options.clone());
        let made = |plan: &CudaPlan, args: &DeviceBackward<'_>| {
            plan.backward_on(&queue, args).unwrap();
            launches()
        };
        let narrow = plan_of(&DIMS);
        let launched = made(&narrow, &both);
        let all = ["fv_delta", "fv_backward", "fv_group_sums", "fv_dq"];
        assert_eq!(names(&launched), all);
        // Two batch entries of three tiles of 128 keys, for four query heads; and of 19 tiles of 16, for two.
        assert!(launched[1].starts_with("fv_backward [24, 1, 1] "), "{}", launched[1]);
        assert!(launched[2].starts_with("fv_group_sums [38, 2, 1] "), "{}", launched[2]);
        let one = DeviceBackward { dk: None, ..both.clone() };
        assert_eq!(names(&made(&narrow, &one)), all);
        let none = DeviceBackward { dv: None, ..one };
        assert_eq!(names(&made(&narrow, &none)), ["fv_delta", "fv_backward_dq"]);
        let launched = made(&plan_of(&wide), &of_wide.backward_alone());
        let all =
            ["fv_delta", "fv_sink_gradient", "fv_backward", "fv_group_sums", "fv_backward_dq"];
        assert_eq!(names(&launched), all);
    }
}

#[test]
fn mask_bits_are_made_once_behind_the_lists_that_they_are_of() {
    if !inside("mask_bits_are_made_once_behind_the_lists_that_they_are_of") {
        return;
    }
    let queue = Engine::get(0).unwrap().queue().clone();
    let tensors = Tensors::new(&DIMS);
    let backward = DeviceBackward { d_sink: None, ..tensors.backward_alone() };
    let mut options = CudaOptions::default();
    for kernel in ["forward", "backward"] {
        options.kernels.set(&format!("{kernel}.mask_bits"), "true").unwrap();
    }
    options.kernels.set("backward.split_gqa", "false").unwrap();
    let spec = Spec { mask: Some(masks::causal()), ..PLAIN };
    let by_bits = plan(&spec, &DIMS, options);
    let made = |plan: &CudaPlan| {
        plan.forward_on(&queue, &tensors.forward).unwrap();
        plan.backward_on(&queue, &backward).unwrap();
        launches()
    };
    let launched = made(&by_bits);
    let lists = ["fv_block_lists", "fv_mask_bits"];
    let all = [&lists[..], &["fv_forward"], &lists, &["fv_delta", "fv_backward", "fv_dq"]].concat();
    assert_eq!(names(&launched), all);
    // Few rows of tiles are shared by as many CTAs as a row has tiles.
    let grids = launched.iter().filter(|line| line.starts_with("fv_mask_bits"));
    assert!(grids.clone().all(|line| !line.contains(", 1] ")), "{launched:?}");
    assert_eq!(names(&made(&by_bits)), ["fv_forward", "fv_delta", "fv_backward", "fv_dq"]);
}

#[test]
fn a_driver_without_tensor_maps_runs_the_portable_family_and_is_named() {
    let name = "a_driver_without_tensor_maps_runs_the_portable_family_and_is_named";
    let cache = concat!(env!("CARGO_TARGET_TMPDIR"), "/kernels");
    let options = ["-DLOADS", "-DWITHOUT_OPTIONAL"];
    let variables = [("FOVEATE_CACHE_DIR", cache), ("TOTAL", "1073741824")];
    if !driver::inside(name, &["nvrtc"], &options, &variables) {
        return;
    }
    // Long enough to be the Hopper family's.
    let dims = Dims { len_q: 4096, len_k: 4096, dim: 128, dim_v: 128, ..DIMS };
    let queue = Engine::get(0).unwrap().queue().clone();
    let tensors = Tensors::new(&dims);
    let plan = plan(&PLAIN, &dims, CudaOptions::default());
    plan.forward_on(&queue, &tensors.forward).unwrap();
    plan.backward_on(&queue, &tensors.backward_alone()).unwrap();
    let queued = launches();
    assert_eq!(
        names(&queued),
        ["fv_forward", "fv_delta", "fv_sink_gradient", "fv_backward", "fv_dq"]
    );
    let said = plan.describe(Arrangement::Dense, None).unwrap();
    let matmuls = said.kernels.iter().filter(|line| line.contains(" D 128"));
    assert!(matmuls.clone().count() > 1 && matmuls.clone().all(|line| !line.contains("hopper")));
    assert_eq!(
        said.notes,
        ["hopper: cuTensorMapEncodeTiled in a driver for CUDA 13.0 without it (needed 12.0); \
          cuLaunchKernelEx in a driver for CUDA 13.0 without it (needed 11.8); the portable \
          family runs"]
    );
}

/// They begin at multiples of 16 bytes, as tensor maps need, and end where a backward of the Hopper family would write
/// past them.
#[test]
fn rows_that_end_between_vectors_have_both_passes() {
    let name = "rows_that_end_between_vectors_have_both_passes";
    let cache = concat!(env!("CARGO_TARGET_TMPDIR"), "/kernels");
    let variables = [("FOVEATE_CACHE_DIR", cache), ("TOTAL", "1073741824")];
    if !driver::inside(name, &["nvrtc"], &["-DLOADS"], &variables) {
        return;
    }
    let longer = Dims { len_q: 4096, len_k: 4096, dim: 128, dim_v: 128, ..DIMS };
    let Tensors { blocks: _blocks, mut forward, mut backward } = Tensors::new(&longer);
    let cut = |tensor: &mut DeviceTensor| {
        tensor.layout = tensor.layout.narrowed(3, 0, 124).expect("124 of 128 numbers");
    };
    for operands in [&mut forward.operands, &mut backward.operands] {
        [&mut operands.q, &mut operands.k, &mut operands.v].into_iter().for_each(cut);
    }
    [&mut forward.out, &mut backward.out, &mut backward.d_out].into_iter().for_each(cut);
    let gradients = [&mut backward.dq, &mut backward.dk, &mut backward.dv];
    gradients.into_iter().flatten().for_each(cut);
    backward.d_captures.clear();
    let plan = plan(&PLAIN, &Dims { dim: 124, dim_v: 124, ..longer }, CudaOptions::default());
    let queue = Engine::get(0).unwrap().queue().clone();
    plan.forward_on(&queue, &forward).unwrap();
    plan.backward_on(&queue, &backward).unwrap();
    assert_eq!(
        names(&launches()),
        ["fv_forward", "fv_delta", "fv_sink_gradient", "fv_backward", "fv_dq"]
    );
}

#[test]
fn a_warm_call_encodes_no_tensor_map() {
    if !inside("a_warm_call_encodes_no_tensor_map") {
        return;
    }
    let queue = Engine::get(0).unwrap().queue().clone();
    let (tensors, other) = (Tensors::new(&DIMS), Tensors::new(&DIMS));
    let mut options = CudaOptions::default();
    for kernel in ["forward", "backward"] {
        options.kernels.set(&format!("{kernel}.family"), "hopper").unwrap();
    }
    let plan = plan(&PLAIN, &DIMS, options);
    let log = std::path::Path::new(&env::var_os("HOME").unwrap()).join("maps");
    let encoded = |of: &Tensors, queue: &Queue| {
        let lines = || fs::read_to_string(&log).unwrap_or_default().lines().count();
        let before = lines();
        plan.forward_on(queue, &of.forward).unwrap();
        plan.backward_on(queue, &of.backward_alone()).unwrap();
        lines() - before
    };
    // Boxes of the forward are a consumer's; those of the backward are of its own tiles, and d_out has one.
    let cold = encoded(&tensors, &queue);
    assert!((4..=7).contains(&cold), "{cold} maps of three operands and of four");
    assert_eq!(encoded(&tensors, &queue), 0);
    assert_eq!(encoded(&tensors, &Engine::get(0).unwrap().new_queue().unwrap()), 0);
    assert_eq!(encoded(&other, &queue), cold, "maps are of addresses");
    assert_eq!(encoded(&tensors, &queue), 0, "those of layers before are kept");
}

#[test]
fn a_tensor_map_that_the_driver_refuses_is_told_by_operand_and_axis() {
    let name = "a_tensor_map_that_the_driver_refuses_is_told_by_operand_and_axis";
    let cache = concat!(env!("CARGO_TARGET_TMPDIR"), "/kernels");
    let variables = [("FOVEATE_CACHE_DIR", cache), ("TOTAL", "1073741824"), ("MAP_ROWS", "4095")];
    if !driver::inside(name, &["nvrtc"], &["-DLOADS"], &variables) {
        return;
    }
    let dims = Dims { len_q: 4096, len_k: 4095, dim: 128, dim_v: 128, ..DIMS };
    let queue = Engine::get(0).unwrap().queue().clone();
    let plan = plan(&PLAIN, &dims, CudaOptions::default());
    let tensors = Tensors::new(&dims);
    let said = plan.forward_on(&queue, &tensors.forward).unwrap_err().to_string();
    let k = tensors.forward.operands.k.address;
    let axes = "element axis: 128 every 2 B, 64 in a tile; row axis: 4095 every 256 B, 176 in a \
                tile; head axis: 2 every 1048320 B, 1 in a tile; batch axis: 2 every 2096640 B, 1 in a \
                tile";
    assert!(
        said.contains(&format!("encoding a tensor map of k, bf16 at {k:#x}; {axes}")),
        "{said}"
    );
}

#[test]
fn dq_has_a_kernel_of_its_own_where_all_that_add_it_in_order_spill() {
    let name = "dq_has_a_kernel_of_its_own_where_all_that_add_it_in_order_spill";
    let cache = concat!(env!("CARGO_TARGET_TMPDIR"), "/kernels");
    let variables = [("FOVEATE_CACHE_DIR", cache), ("TOTAL", "1073741824")];
    if !driver::inside(name, &["nvrtc"], &["-DLOADS"], &variables) {
        return;
    }
    let [heads_q, heads_kv] = [8; 2];
    let dims = Dims { heads_q, heads_kv, len_q: 2048, len_k: 2048, dim: 128, dim_v: 128, ..DIMS };
    let queue = Engine::get(0).unwrap().queue().clone();
    let tensors = Tensors::new(&dims);
    let made = |score: Option<ScoreMod>, ordered: &[&str]| {
        let dropout = score.as_ref().map(|_| Dropout::new(0.1, 1));
        let spec = Spec { mask: Some(masks::causal()), score, dropout, ..PLAIN };
        let mut options = CudaOptions { deterministic: true, ..CudaOptions::default() };
        ordered.iter().for_each(|given| options.kernels.set("backward.ordered_dq", given).unwrap());
        let plan = plan(&spec, &dims, options);
        plan.backward_on(&queue, &tensors.backward_alone()).unwrap();
        let queued = launches();
        let said = plan.describe(Arrangement::Dense, None).unwrap();
        let last = names(&queued).last().map(|name| (*name).to_owned());
        (last.unwrap(), said.kernels.join("\n"), said.notes)
    };
    // Waves, two numbers for each entry and dropout take the registers that the order has.
    let bias = Buffer::new("bias", &[2048; 2], vec![0.5f32; 2048 * 2048]).unwrap();
    let waves = || {
        let wave = (expr::q().to_f32() * expr::kv().to_f32()).sin();
        let [one, other] = [[expr::q(), expr::kv()], [expr::kv(), expr::q()]].map(|at| bias.at(at));
        Some(ScoreMod::new((expr::score() + wave + one * other).dynamic()).unwrap())
    };
    let (last, kernels, notes) = made(waves(), &[]);
    assert_eq!(last, "fv_backward_dq", "{notes:?}");
    assert!(kernels.contains("backward_dq bf16 D 128, "), "{kernels}");
    assert!(!kernels.contains("ordered dq"), "{kernels}");
    // That kernel's own on Hopper spills, too.
    let [note, _] = &notes[..] else { panic!("{notes:?}") };
    assert!(note.contains(" B of local memory, 48 are allowed; dq has a kernel of"), "{note}");
    // What is asked for runs.
    let (last, kernels, notes) = made(waves(), &["true"]);
    assert!(last == "fv_dq" && kernels.contains("ordered dq"), "{kernels}");
    assert!(notes[0].ends_with(" B, and runs"), "{notes:?}");
    let (last, _, notes) = made(None, &[]);
    assert_eq!((last.as_str(), &notes[..]), ("fv_dq", &[][..]));
}

#[test]
fn threads_share_a_plan_and_queues() {
    if !inside("threads_share_a_plan_and_queues") {
        return;
    }
    let engine = &Engine::get(0).unwrap();
    let (plan, tensors) = of_documents(1);
    let backward = tensors.backward_alone();
    const CALLS: usize = 25;
    std::thread::scope(|scope| {
        for own in [false, false, true, true] {
            let (plan, forward, backward) = (&plan, &tensors.forward, &backward);
            scope.spawn(move || {
                for _ in 0..CALLS {
                    let new = own.then(|| engine.new_queue().unwrap());
                    let queue = new.as_ref().unwrap_or(engine.queue());
                    plan.forward_on(queue, forward).unwrap();
                    plan.backward_on(queue, backward).unwrap();
                }
            });
        }
    });
    let queued = launches();
    let count = |name| names(&queued).iter().filter(|queued| **queued == name).count();
    assert_eq!(["fv_forward", "fv_backward", "fv_dq"].map(count), [4 * CALLS; 3]);
    // Lists of a queue are made once, or once by each thread that comes first.
    assert!((4 * CALLS + 2..=4 * CALLS + 4).contains(&count("fv_block_lists")), "{queued:?}");
}

#[test]
fn keys_that_are_split_over_blocks_are_joined() {
    if !inside("keys_that_are_split_over_blocks_are_joined") {
        return;
    }
    let queue = Engine::get(0).unwrap().queue().clone();
    let mut options = CudaOptions::default();
    options.kernels.set("kv_splits", "3").unwrap();
    plan(&PLAIN, &DIMS, options).forward_on(&queue, &Tensors::new(&DIMS).forward).unwrap();
    let launches = launches();
    assert_eq!(names(&launches), ["fv_forward", "fv_combine"]);
    assert!(launches[0].contains(", 4, 3] x "), "heads and shares: {}", launches[0]);
    assert!(launches[1].contains(", 4, 1] x "), "{}", launches[1]);
}

#[test]
fn calls_of_which_nothing_is_promised_are_recorded_and_make_lists_each_time() {
    if !inside("calls_of_which_nothing_is_promised_are_recorded_and_make_lists_each_time") {
        return;
    }
    let queue = Engine::get(0).unwrap().new_queue().unwrap();
    let dims = Dims { batch: 1, ..DIMS };
    let tensors = Tensors::new(&dims);
    let offsets = queue.pool().take(16).unwrap();
    let cu = DeviceArray::new(offsets.address(), ElementType::I32, &[4]);
    let varlen = DeviceOffsets { q: cu, k: cu, longest_q: 200, longest_k: 200 };
    let packed = Dims { batch: 3, packed: true, ..dims };
    let constant: Option<MaskMod> = Some(masks::sliding_window(64).unwrap());
    for mask in [None, Some(masks::causal()), constant] {
        let masked = mask.is_some();
        let plan = plan(&Spec { mask, ..PLAIN }, &packed, CudaOptions::default());
        let operands = DeviceOperands { varlen: Some(varlen.into()), ..tensors.forward.operands };
        let forward = DeviceForward { operands, ..tensors.forward };
        let backward =
            DeviceBackward { operands, d_captures: Vec::new(), ..tensors.backward.clone() };
        let both = || {
            plan.forward_on(&queue, &forward)?;
            plan.backward_on(&queue, &backward)
        };
        both().unwrap();
        let first = launches();
        let lists = first.iter().filter(|line| line.starts_with("fv_block_lists")).count();
        assert_eq!(lists, if masked { 2 } else { 0 }, "{first:?}");
        Graph::record(queue.stream(), both).unwrap();
        assert_eq!(launches(), first);
    }
}

#[test]
fn documents_that_are_overwritten_make_new_lists_in_the_memory_of_the_old_ones() {
    if !inside("documents_that_are_overwritten_make_new_lists_in_the_memory_of_the_old_ones") {
        return;
    }
    let queue = Engine::get(0).unwrap().new_queue().unwrap();
    let tensors = Tensors::new(&DIMS);
    let documents = queue.pool().take(4 * DIMS.len_k).unwrap();
    let captured = Buffer::<i32>::on_device("doc", &[DIMS.len_k]).unwrap();
    let mask = masks::causal() & masks::document(&captured).unwrap();
    let plan = plan(&Spec { mask: Some(mask), ..PLAIN }, &DIMS, CudaOptions::default());
    let run = |version| {
        let of = DeviceArray::new(documents.address(), ElementType::I32, &[DIMS.len_k]);
        let captures = [("doc", DeviceArray { version, ..of })];
        let operands = DeviceOperands { captures: &captures, ..tensors.forward.operands };
        let backward =
            DeviceBackward { operands, d_captures: Vec::new(), ..tensors.backward.clone() };
        plan.forward_on(&queue, &DeviceForward { operands, ..tensors.forward }).unwrap();
        plan.backward_on(&queue, &backward).unwrap();
    };
    run(Some(1));
    launches();
    run(Some(1));
    let lists = |of: &[String]| of.iter().filter(|line| line.starts_with("fv_block_lists")).count();
    assert_eq!(lists(&launches()), 0, "what was promised is kept");
    trace::start();
    for version in 2..8 {
        run(Some(version));
        assert_eq!(lists(&launches()), 2, "contents {version}");
    }
    let more = trace::stop();
    assert!(!more.iter().any(|n| matches!(n, trace::Noted::Allocated { .. })), "{more:?}");
}

#[test]
fn range_tables_of_small_buffers_take_no_launch_and_those_of_large_ones_do() {
    if !inside("range_tables_of_small_buffers_take_no_launch_and_those_of_large_ones_do") {
        return;
    }
    let queue = Engine::get(0).unwrap().new_queue().unwrap();
    let tensors = Tensors::new(&DIMS);
    let memory = queue.pool().take(4 * 70_000).unwrap();
    // Of how many elements each buffer is, whether heads differ, and how many tables take a launch.
    for (lengths, by_head, tables) in [
        (&[301][..], false, 0),
        (&[16_384], false, 0),
        (&[16_385], false, 1),
        (&[10_000, 10_000], false, 1),
        (&[301], true, 0),
        (&[4_097], true, 1),
    ] {
        let names: Vec<String> = (0..lengths.len()).map(|i| format!("ids{i}")).collect();
        let mut mask = masks::causal();
        for (name, &len) in names.iter().zip(lengths) {
            let ids = Buffer::<i32>::on_device(name, &[len]).unwrap();
            let same = match by_head {
                true => ids.at([expr::q()]).eq(ids.at([expr::kv()]) + expr::h()),
                false => ids.at([expr::q()]).eq(ids.at([expr::kv()])),
            };
            mask = mask & MaskMod::new(same.dynamic()).unwrap();
        }
        let plan = plan(&Spec { mask: Some(mask), ..PLAIN }, &DIMS, CudaOptions::default());
        let shapes: Vec<[usize; 1]> = lengths.iter().map(|&len| [len]).collect();
        let array = |shape| DeviceArray::new(memory.address(), ElementType::I32, shape);
        let captures: Vec<(&str, DeviceArray<'_>)> =
            names.iter().zip(&shapes).map(|(name, shape)| (&name[..], array(shape))).collect();
        let operands = DeviceOperands { captures: &captures, ..tensors.forward.operands };
        let forward = DeviceForward { operands, ..tensors.forward };
        let backward =
            DeviceBackward { operands, d_captures: Vec::new(), ..tensors.backward.clone() };
        plan.forward_on(&queue, &forward).unwrap();
        plan.backward_on(&queue, &backward).unwrap();
        let made = launches();
        let count = |kernel| self::names(&made).iter().filter(|name| **name == kernel).count();
        let said = format!("{lengths:?}, by head: {by_head}: {made:?}");
        assert_eq!(count("fv_range_table"), 2 * tables, "{said}");
        assert_eq!(count("fv_block_lists"), 2, "{said}");
    }
}
