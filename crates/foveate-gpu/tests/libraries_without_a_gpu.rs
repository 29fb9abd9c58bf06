//! cuBLASLt and NCCL made for tests, or missing, or of a wrong version: each is one clear error.
//! That products and transfers are right on them is a test of `foveate-conformance`.

mod driver;

use std::collections::BTreeMap;
use std::num::NonZeroU16;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use foveate_gpu::blas::{self, Matmul};
use foveate_gpu::driver::Allocation;
use foveate_gpu::nccl::{self, Communicator, FlatArray, Reduce, Transfer, UniqueId};
use foveate_gpu::nvml::{Conditions, Watch};
use foveate_gpu::trace::{self, Noted};
use foveate_gpu::{DeviceTensor, ElementType, Engine, GpuError, GpuErrorKind};
use foveate_tensor::DType;

use driver::inside;

const TIMEOUT: Duration = Duration::from_millis(200);

/// A product of two f32 matrices of 16 by 16, which lie from `at` on with the result behind them.
fn product_at(at: u64) -> Matmul {
    let square = |i: u64| DeviceTensor::contiguous(at + 1024 * i, DType::F32, [1, 16, 16]);
    Matmul::new(square(0), square(1), square(2))
}

/// A product on the driver for tests, and its memory.
fn product() -> (Result<(), GpuError>, Allocation) {
    let engine = Engine::get(0).unwrap();
    let allocation = engine.queue().pool().take(4096).unwrap();
    (engine.matmul(engine.queue(), &product_at(allocation.address())), allocation)
}

fn said<T>(result: Result<T, GpuError>) -> String {
    result.map(drop).unwrap_err().to_string()
}

#[test]
fn libraries_that_are_missing_are_named_with_what_to_install() {
    if !inside("libraries_that_are_missing_are_named_with_what_to_install", &[], &[], &[]) {
        return;
    }
    if blas::version().is_ok() || nccl::version().is_ok() {
        return println!("skipped: this machine has them where everybody finds them");
    }
    let why = said(product().0);
    assert!(why.starts_with("cuBLASLt was not found in "), "{why}");
    assert!(why.ends_with("`pip install nvidia-cublas` or install the CUDA toolkit"), "{why}");
    let why = said(UniqueId::new());
    assert!(why.starts_with("NCCL was not found in "), "{why}");
    assert!(why.ends_with("`pip install nvidia-nccl-cu13` or install NCCL"), "{why}");
}

#[test]
fn libraries_without_a_function_are_too_old() {
    let (name, more) = ("libraries_without_a_function_are_too_old", ["cublaslt", "nccl"]);
    if !inside(name, &more, &["-DOLD_BLAS", "-DOLD_NCCL"], &[]) {
        return;
    }
    let why = said(product().0);
    assert!(why.starts_with("cuBLASLt has no `cublasLtMatmul`; it is too old"), "{why}");
    let why = said(UniqueId::new());
    assert!(why.starts_with("NCCL has no `ncclCommFinalize`; it is too old"), "{why}");
}

#[test]
fn libraries_of_old_versions_are_refused_with_the_version_that_is_needed() {
    let name = "libraries_of_old_versions_are_refused_with_the_version_that_is_needed";
    let old = [("BLAS", "110504"), ("NCCL", "2804")];
    if !inside(name, &["cublaslt", "nccl"], &[], &old) {
        return;
    }
    assert_eq!(
        said(blas::version()),
        "cuBLASLt is of version 11.5.4, 12.0 or newer is needed: `pip install nvidia-cublas` or \
         install the CUDA toolkit"
    );
    assert_eq!(
        said(nccl::version()),
        "NCCL is of version 2.8.4, 2.18 or newer is needed: `pip install nvidia-nccl-cu13` or \
         install NCCL"
    );
}

#[test]
fn a_cublaslt_newer_than_the_driver_is_refused_with_one_that_fits() {
    let name = "a_cublaslt_newer_than_the_driver_is_refused_with_one_that_fits";
    if !inside(name, &["cublaslt"], &[], &[("CUDA", "12040")]) {
        return;
    }
    assert_eq!(blas::version().unwrap(), [13, 1, 2]);
    assert_eq!(
        said(product().0),
        "the driver is for CUDA 12.4 and runs no kernels of cuBLASLt 13.1; install a driver 580 or \
         newer, or cuBLASLt 12 (`pip install nvidia-cublas-cu12`), to whose folder \
         FOVEATE_CUDA_LIBRARIES points"
    );
}

#[test]
fn a_product_without_a_kernel_is_described() {
    let name = "a_product_without_a_kernel_is_described";
    if !inside(name, &["cublaslt"], &[], &[("KERNELS", "0")]) {
        return;
    }
    let error = product().0.unwrap_err();
    assert!(matches!(error.kind(), GpuErrorKind::Library { code: 15, .. }), "{error:?}");
    assert_eq!(
        error.to_string(),
        "asking for a kernel for a product [16, 16] · [16, 16] of f32: cuBLASLt says \
         CUBLAS_STATUS_NOT_SUPPORTED, a failure of tests (15)"
    );
}

/// Waits of the host during `work`.
fn waits(work: impl FnOnce()) -> usize {
    trace::start();
    work();
    trace::stop().iter().filter(|noted| matches!(noted, Noted::Waited { .. })).count()
}

#[test]
fn a_tuned_product_runs_its_fastest_kernel_and_is_timed_once() {
    let name = "a_tuned_product_runs_its_fastest_kernel_and_is_timed_once";
    if !inside(name, &["cublaslt"], &[], &[("KERNELS", "11"), ("FASTEST", "5")]) {
        return;
    }
    let engine = Engine::get(0).unwrap();
    let numbers: Vec<f32> = (0..4 * 256).map(|i| (i % 7) as f32).collect();
    let memory = engine.queue().pool().upload(bytemuck::cast_slice(&numbers)).unwrap();
    let square = |i: u64, rows: usize, columns: usize| {
        let address = memory.address() + 1024 * i;
        DeviceTensor::contiguous(address, DType::F32, [1, rows, columns])
    };
    let product = |rows, columns| {
        Matmul::new(square(0, rows, 16), square(1, 16, columns), square(2, rows, columns))
    };
    let run = |matmul: &Matmul| engine.matmul(engine.queue(), matmul).unwrap();
    let written = |from: usize| {
        let mut bytes = [0; 16];
        memory.read_at(from, &mut bytes, TIMEOUT).unwrap();
        bytemuck::cast::<_, [f32; 4]>(bytes)
    };
    let expected =
        |columns: usize| -> f32 { (0..16).map(|k| numbers[k] * numbers[256 + columns * k]).sum() };
    // Nobody has asked for it.
    assert_eq!(waits(|| run(&product(16, 16))), 0);
    assert!(engine.product_choices().is_empty());
    let given = BTreeMap::new();
    engine.tune_products(2.0 * 15.0 * 16.0 * 16.0, &given);
    assert_eq!(waits(|| run(&product(14, 16))), 0, "a product that is too small to be worth it");
    assert_eq!(waits(|| run(&product(15, 16))), 1);
    assert_eq!(waits(|| run(&product(15, 16))), 0);
    let chosen = engine.product_choices();
    let [(problem, 5)] = chosen.iter().map(|(problem, n)| (problem, *n)).collect::<Vec<_>>()[..]
    else {
        panic!("{chosen:?}")
    };
    assert!(problem.contains("cuBLASLt 13.1.2: f32 to f32, 1 times, Rows 16 x 16"), "{problem}");
    assert_eq!(written(2048)[0], expected(16));
    // What adds in place is added once, and what adds from elsewhere may be repeated.
    let plus = Matmul { beta: 1.0, ..product(16, 15) };
    assert_eq!(waits(|| run(&plus)), 0);
    let add = Matmul { add: Some(square(3, 15, 15)), beta: 1.0, ..product(15, 15) };
    assert_eq!(waits(|| run(&add)), 0, "it is too small");
    engine.tune_products(1000.0, &given);
    let add = Matmul { add: Some(square(3, 14, 15)), beta: 1.0, ..product(14, 15) };
    assert_eq!(waits(|| run(&add)), 1);
    assert_eq!(written(2048)[0], expected(15) + numbers[768]);
    let numbers_of: Vec<usize> = engine.product_choices().into_values().collect();
    assert_eq!(numbers_of.iter().filter(|&&number| number == 5).count(), 2);
    assert_eq!(numbers_of.iter().filter(|&&number| number == 0).count(), 1);
}

#[test]
fn a_choice_that_the_library_does_not_offer_is_made_anew() {
    let name = "a_choice_that_the_library_does_not_offer_is_made_anew";
    if !inside(name, &["cublaslt"], &[], &[("KERNELS", "8"), ("FASTEST", "5")]) {
        return;
    }
    let engine = Engine::get(0).unwrap();
    let memory = engine.queue().pool().take(8192).unwrap();
    let start = memory.address().next_multiple_of(256);
    // The same product, at addresses that other powers of two divide.
    let run =
        |offset: u64| waits(|| engine.matmul(engine.queue(), &product_at(start + offset)).unwrap());
    engine.tune_products(1000.0, &BTreeMap::new());
    assert_eq!(run(0), 1);
    let (problem, _) = engine.product_choices().pop_first().unwrap();
    let of = |offset: u64| {
        let [own, other] = [256, offset].map(|n| format!("aligned to [{n}, {n}, {n}, {n}"));
        assert!(problem.contains(&own), "{problem}");
        problem.replace(&own, &other)
    };
    // As a checkpoint has them: of a build that tried more than the library names, and of one that did not.
    let given = [(of(64), 2 | 21 << 4 | 3 << 20), (of(32), 2)].into();
    engine.tune_products(1000.0, &given);
    assert_eq!((run(64), run(32)), (1, 0));
    assert_eq!(engine.product_choices(), [(problem.clone(), 5), (of(64), 5), (of(32), 2)].into());
}

#[test]
fn a_choice_is_kept_beside_those_of_other_devices() {
    let name = "a_choice_is_kept_beside_those_of_other_devices";
    if !inside(name, &["cublaslt"], &[], &[("KERNELS", "8"), ("FASTEST", "5")]) {
        return;
    }
    let engine = Engine::get(0).unwrap();
    let memory = engine.queue().pool().take(4096).unwrap();
    let matmul = product_at(memory.address());
    let kept =
        PathBuf::from(std::env::var("HOME").unwrap()).join(".cache/foveate/kernels/products.txt");
    let problem = "a device of tests, 1 SMs, CUDA 13.0, cuBLASLt 13.1.2: not this one";
    std::fs::create_dir_all(kept.parent().unwrap()).unwrap();
    std::fs::write(&kept, format!("3 {problem}\n")).unwrap();
    engine.tune_products(1000.0, &BTreeMap::new());
    assert_eq!(waits(|| engine.matmul(engine.queue(), &matmul).unwrap()), 1);
    let text = std::fs::read_to_string(&kept).unwrap();
    let mut lines: Vec<&str> = text.lines().collect();
    lines.sort_unstable();
    assert_eq!(lines[0], format!("3 {problem}"));
    assert!(lines.len() == 2 && lines[1].starts_with("5 "), "{text}");
}

/// One rank, and numbers of its.
fn alone() -> (Communicator, Allocation, Transfer) {
    let engine = Engine::get(0).unwrap();
    let among = Communicator::new(&engine, &UniqueId::new().unwrap(), 0, 1, TIMEOUT).unwrap();
    let allocation = engine.queue().pool().take(4000).unwrap();
    let numbers = FlatArray { address: allocation.address(), element: ElementType::F32, len: 1000 };
    let reduce = Reduce::Sum;
    (among, allocation, Transfer::AllReduce { from: numbers, into: numbers, reduce })
}

#[test]
fn a_failure_of_another_rank_ends_the_communicator() {
    let name = "a_failure_of_another_rank_ends_the_communicator";
    if !inside(name, &["nccl"], &[], &[("FAILS", "6")]) {
        return;
    }
    let (engine, (among, _memory, transfer)) = (Engine::get(0).unwrap(), alone());
    let expected = "rank 0 of 1: all-reduce of 1000 f32: NCCL says remote process exited or there \
                    was a network error";
    assert_eq!(said(among.run(engine.queue(), transfer)), expected);
    // It is said again to whoever comes later.
    assert_eq!(said(among.run(engine.queue(), transfer)), expected);
    assert_eq!(said(among.wait(engine.queue())), expected);
}

#[test]
fn a_communicator_that_is_being_aborted_says_so_at_once() {
    let name = "a_communicator_that_is_being_aborted_says_so_at_once";
    if !inside(name, &["nccl"], &[], &[("ABORT_MS", "3000")]) {
        return;
    }
    let (engine, (among, _memory, _)) = (Engine::get(0).unwrap(), alone());
    let began = Instant::now();
    std::thread::scope(|scope| {
        scope.spawn(|| among.abort());
        let mut asked = (1..).map(|_| among.wait(engine.queue()));
        let error = asked.find_map(Result::err).unwrap();
        let took = began.elapsed();
        assert!(error.to_string().contains("was aborted"), "{error}");
        assert!(took < Duration::from_millis(3000), "{took:?}: only when NCCL was done");
    });
    assert!(began.elapsed() >= Duration::from_millis(3000));
}

#[test]
fn transfers_that_hang_on_the_device_end_after_a_time() {
    let name = "transfers_that_hang_on_the_device_end_after_a_time";
    if !inside(name, &["nccl"], &[], &[("HANGS", "1")]) {
        return;
    }
    let (engine, (among, _memory, transfer)) = (Engine::get(0).unwrap(), alone());
    among.run(engine.queue(), transfer).unwrap();
    let began = Instant::now();
    let error = among.wait(engine.queue()).unwrap_err();
    assert!(matches!(error.kind(), GpuErrorKind::Communication { .. }), "{error:?}");
    assert!(error.to_string().starts_with("rank 0 of 1: transfers on the device did not"));
    assert!(began.elapsed() >= TIMEOUT && began.elapsed() < TIMEOUT * 50);
}

/// The library made for tests refuses a configuration of another version, of another size, or with other values.
fn joins(test: &str, version: &str, blocks: Option<u16>) {
    let number = blocks.map(|blocks| blocks.to_string());
    let mut variables = vec![("NCCL", version)];
    variables.extend(number.as_deref().map(|number| ("BLOCKS", number)));
    if !inside(test, &["nccl"], &[], &variables) {
        return;
    }
    let (engine, id) = (Engine::get(0).unwrap(), UniqueId::new().unwrap());
    let blocks = blocks.and_then(NonZeroU16::new);
    Communicator::in_blocks(&engine, &id, 0, 1, TIMEOUT, blocks, &|| false).unwrap();
    let other = NonZeroU16::new(3);
    let why = said(Communicator::in_blocks(&engine, &id, 0, 1, TIMEOUT, other, &|| false));
    assert!(why.contains("joining"), "{why}");
}

macro_rules! versions {
    ($($name:ident: $version:literal, $blocks:expr;)*) => {
        $(#[test]
        fn $name() {
            joins(stringify!($name), $version, $blocks);
        })*
    };
}

versions! {
    a_configuration_is_that_of_nccl_2_18: "21805", None;
    a_configuration_is_that_of_nccl_2_25: "22501", Some(8);
    a_configuration_is_that_of_nccl_2_27: "22703", None;
    a_configuration_is_that_of_nccl_2_28: "22803", Some(16);
    a_configuration_is_that_of_nccl_2_29: "22901", None;
    a_configuration_of_a_later_nccl_is_that_of_2_29: "23104", Some(1);
}

#[test]
fn ranks_that_cannot_be_are_refused() {
    if !inside("ranks_that_cannot_be_are_refused", &["nccl"], &[], &[]) {
        return;
    }
    let (engine, id) = (Engine::get(0).unwrap(), UniqueId::new().unwrap());
    let why = said(Communicator::new(&engine, &id, 2, 2, TIMEOUT));
    assert_eq!(why, "there is no rank 2 of 2; ranks are counted from 0");
    let why = said(Communicator::of_process(&[engine.clone(), engine.clone()], TIMEOUT));
    assert_eq!(why, "GPU 0 is given twice; a device has one rank");
    let why = said(Communicator::of_process(&[], TIMEOUT));
    assert_eq!(why, "there are no devices for ranks");
    let joining = Communicator::new(&engine, &id, 0, 2, TIMEOUT);
    let why = said(joining);
    assert!(why.starts_with("rank 0 of 2: joining the other ranks did not finish"), "{why}");
}

/// What NVML tells of a GPU within so many milliseconds: the one made for tests measures its power after the third
/// answer.
fn watched(gpu: usize, ms: u64) -> Result<Conditions, GpuError> {
    let watch = Watch::begin(Engine::get(gpu).unwrap().device())?;
    std::thread::sleep(Duration::from_millis(ms));
    watch.end()
}

#[test]
fn clocks_and_power_are_those_of_the_watched_gpu() {
    if !inside("clocks_and_power_are_those_of_the_watched_gpu", &["nvml"], &[], &[]) {
        return;
    }
    let (sm_mhz, watts) = (1980, Some(698.25));
    let first = Conditions { sm_mhz, highest_sm_mhz: 1980, watts, limits: vec![] };
    assert_eq!(watched(0, 300).unwrap(), first);
    let lowered = Conditions { sm_mhz: 1410, limits: vec!["power"], ..first.clone() };
    assert_eq!(watched(1, 300).unwrap(), lowered);
    // No answer is newer than the first.
    assert_eq!(watched(0, 0).unwrap(), Conditions { watts: None, ..first });
}

#[test]
fn power_is_a_mean_where_nvml_knows_no_other() {
    if inside("power_is_a_mean_where_nvml_knows_no_other", &["nvml"], &["-DOLD_NVML"], &[]) {
        assert_eq!(watched(0, 300).unwrap().watts, Some(90.5));
    }
}

#[test]
fn an_nvml_that_does_not_start_says_so() {
    let name = "an_nvml_that_does_not_start_says_so";
    if inside(name, &["nvml"], &[], &[("NVML", "9")]) {
        assert_eq!(said(watched(0, 0)), "starting NVML: NVML says Driver Not Loaded (9)");
    }
}
