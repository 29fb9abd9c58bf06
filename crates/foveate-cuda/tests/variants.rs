//! What lengths, captured values and layouts of documents compile: on a driver made for tests, whose
//! kernels are loaded and never run. There is nothing to see on a machine without NVRTC.

#[path = "../../foveate-gpu/tests/driver/mod.rs"]
mod driver;

use std::collections::BTreeMap;
use std::time::Duration;
use std::{env, fs};

use foveate_cuda::{
    CudaOptions, CudaPlan, DeviceArray, DeviceBackward, DeviceForward, DeviceOperands,
    DeviceTensor, ElementType, Engine,
};
use foveate_mods::text::{Names, parse_mask, parse_score};
use foveate_mods::{Buffer, ScalarValue};
use foveate_problem::{Dims, Spec};
use foveate_tensor::DType;
use foveate_tensor::random::Random;

/// Different batches, and queries and keys of the longest.
const BATCHES: usize = 1000;
const LONGEST: usize = 3000;

/// Variants of a kernel that they may take.
const MOST: usize = 6;

/// How often each entry point was compiled, by the sources in a folder.
fn compiled(folder: &str) -> BTreeMap<String, usize> {
    let mut found = BTreeMap::new();
    for file in fs::read_dir(folder).into_iter().flatten() {
        let path = file.unwrap().path();
        if path.extension().is_some_and(|e| e == "cu") {
            let text = fs::read_to_string(path).unwrap();
            let (_, after) = text.rsplit_once("__global__").unwrap();
            let (head, _) = after.split_once("(const").unwrap();
            let name = head.split_whitespace().last().unwrap();
            *found.entry(name.to_owned()).or_default() += 1;
        }
    }
    found
}

#[test]
fn a_thousand_lengths_values_and_layouts_compile_few_variants() {
    let dump = concat!(env!("CARGO_TARGET_TMPDIR"), "/variants");
    let cache = concat!(env!("CARGO_TARGET_TMPDIR"), "/kernels");
    let name = "a_thousand_lengths_values_and_layouts_compile_few_variants";
    let variables = [("FOVEATE_CACHE_DIR", cache), ("FOVEATE_DUMP_KERNELS", dump)];
    if env::var_os("FOVEATE_DUMP_KERNELS").is_none() {
        let _ = fs::remove_dir_all(dump);
    }
    if !driver::inside(name, &["nvrtc"], &["-DLOADS"], &variables) {
        return;
    }
    let engine = Engine::get(0).unwrap();
    let queue = engine.queue().clone();
    let (heads, dim) = (2, 64);
    let memory = queue.pool().take(16 * 2 * heads * LONGEST * dim).unwrap();
    let at = |i: usize| memory.address() + (i * 2 * heads * LONGEST * dim) as u64;
    let ids = Buffer::<i32>::on_device("ids", &[1]).unwrap();
    let names = Names::new()
        .scalar("width", ScalarValue::I32(1))
        .scalar("cap", ScalarValue::F32(1.0))
        .buffer(ids.any());
    let text = "causal & q - kv < width & ids[q] == ids[kv]";
    let dims = |len| Dims {
        batch: 1,
        heads_q: heads,
        heads_kv: heads,
        len_q: len,
        len_k: len,
        dim,
        dim_v: dim,
        shared_kv: false,
        packed: false,
    };
    let spec = Spec {
        mask: Some(parse_mask(text, &names).unwrap()),
        score: Some(parse_score("cap * tanh(score / cap)", &names).unwrap()),
        scale: None,
        dropout: None,
    };
    let made =
        CudaPlan::new(engine, &spec, &dims(100), DType::BF16, CudaOptions::default()).unwrap();
    let mut random = Random::new(1);
    for _ in 0..BATCHES {
        let len = 1 + random.below(LONGEST);
        let plan = made.set_scalar("width", ScalarValue::I32(1 + random.below(500) as i32));
        let cap = ScalarValue::F32(1.0 + random.below(1000) as f32 / 10.0);
        let plan = plan.unwrap().set_scalar("cap", cap).unwrap();
        let shape = [1, heads, len, dim];
        let tensor = |i| DeviceTensor::contiguous(at(i), DType::BF16, shape);
        let lse = DeviceTensor::contiguous(at(8), DType::F32, [1, heads, len]);
        let layout = [len];
        let captures = [("ids", DeviceArray::new(at(9), ElementType::I32, &layout))];
        let operands = DeviceOperands {
            captures: &captures,
            ..DeviceOperands::new(tensor(0), tensor(1), tensor(2))
        };
        let forward = DeviceForward { operands, out: tensor(3), lse, max_score: None };
        plan.forward_on(&queue, &forward).unwrap();
        let backward = DeviceBackward {
            operands,
            out: tensor(3),
            lse,
            d_out: tensor(4),
            d_lse: None,
            dq: Some(tensor(5)),
            dk: Some(tensor(6)),
            dv: Some(tensor(7)),
            accumulate: false,
            d_sink: None,
            d_captures: Vec::new(),
        };
        plan.backward_on(&queue, &backward).unwrap();
        queue.stream().wait(Duration::from_secs(10), "a call").unwrap();
    }
    let found = compiled(dump);
    println!("{found:?}");
    assert!(found.contains_key("fv_backward"), "{found:?}");
    assert!(found.values().all(|&variants| variants <= MOST), "{found:?}");
}
