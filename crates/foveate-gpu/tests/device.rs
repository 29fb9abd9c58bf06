//! The driver layer on a real device. Without one every test says why it is skipped.

use std::sync::Arc;
use std::time::{Duration, Instant};

use foveate_gpu::cache::Cache;
use foveate_gpu::driver::{Device, Event, Function, Launch, Module, Pinned, Pool, Stream};
use foveate_gpu::nvrtc::{Compiled, Compiler};
use foveate_gpu::{Arch, GpuError, GpuErrorKind};

const LIMIT: Duration = Duration::from_secs(20);

/// Device 0 and a pool on a stream of its own, or the reason why there is none.
fn device() -> Option<(Device, Pool)> {
    let opened = Device::open(0).and_then(|device| {
        let stream = Arc::new(Stream::new(&device)?);
        Ok((device, Pool::new(stream)))
    });
    opened.map_err(|e| println!("skipped: {e}")).ok()
}

fn compiled(source: &str, arch: Arch) -> Arc<Compiled> {
    Cache::at(None).compile(Compiler::get().unwrap(), source, arch).unwrap()
}

fn kernel(device: &Device, source: &str, name: &str) -> Function {
    let compiled = compiled(source, device.info().arch());
    Module::load(device, compiled.arch, &compiled.cubin).unwrap().function(name, 0).unwrap()
}

const SOURCES: &str = "
extern \"C\" __global__ void add(float* x, float y) { x[blockIdx.x * blockDim.x + threadIdx.x] += y; }
extern \"C\" __global__ void spin(long long cycles) {
    long long began = clock64();
    while (clock64() - began < cycles) {}
}
";

/// Queues `function` on the pool's stream.
fn launch(
    function: &Function,
    pool: &Pool,
    grid: [u32; 3],
    threads: u32,
    parameters: &[&[u8]],
) -> Result<(), GpuError> {
    // SAFETY: the tests give the kernels addresses of allocations that outlive the work, or make
    // launches that are refused.
    unsafe { function.launch(pool.stream(), &Launch::new(grid, threads), parameters) }
}

fn bytes(x: &[f32]) -> Vec<u8> {
    x.iter().flat_map(|x| x.to_le_bytes()).collect()
}

#[test]
fn what_is_written_is_computed_on_and_read_back() {
    let Some((device, pool)) = device() else { return };
    let numbers: Vec<f32> = (0..1000).map(|i| i as f32 * 0.5).collect();
    let allocation = pool.upload(&bytes(&numbers)).unwrap();
    let add = kernel(&device, SOURCES, "add");
    let address = allocation.address().to_le_bytes();
    launch(&add, &pool, [10, 1, 1], 100, &[&address, &2.0f32.to_le_bytes()]).unwrap();
    let mut read = vec![0; 4000];
    allocation.read(&mut read, LIMIT).unwrap();
    let wanted: Vec<f32> = numbers.iter().map(|x| x + 2.0).collect();
    assert_eq!(read, bytes(&wanted));
    allocation.fill(0xff).unwrap();
    allocation.read(&mut read, LIMIT).unwrap();
    assert!(read.iter().all(|&b| b == 0xff));
    assert!(allocation.write(&[0; 4001]).is_err());
    assert!(allocation.read(&mut [0; 4001], LIMIT).is_err());
}

#[test]
fn dropped_memory_is_given_out_again() {
    let Some((_, pool)) = device() else { return };
    let first = pool.take(3_000_000).unwrap();
    let (address, small) = (first.address(), pool.take(100).unwrap());
    drop(first);
    let second = pool.take(2_999_000).unwrap();
    assert_eq!(second.address(), address);
    assert_ne!(small.address(), address);
    drop(second);
    pool.release().unwrap();
    assert_eq!(small.bytes(), 100);
}

#[test]
fn asking_for_more_than_there_is_says_how_much_there_is() {
    let Some((device, pool)) = device() else { return };
    let (_, total) = device.memory().unwrap();
    let error = pool.take(total * 2).unwrap_err();
    let GpuErrorKind::OutOfMemory { bytes, free, total: of } = *error.kind() else {
        panic!("{error}")
    };
    assert!(bytes >= total * 2 && free <= of && of == total, "{error}");
    pool.take(1 << 20).expect("the pool still works");
}

#[test]
fn a_launch_with_wrong_parameters_is_refused_before_it_starts() {
    let Some((device, pool)) = device() else { return };
    let add = kernel(&device, SOURCES, "add");
    let said = launch(&add, &pool, [1, 1, 1], 1, &[&[0; 8]]).unwrap_err().to_string();
    assert_eq!(said, "kernel add takes parameters of [8, 4] bytes, not [8]");
    let said = launch(&add, &pool, [1, 1, 1], 5000, &[&[0; 8], &[0; 4]]).unwrap_err();
    assert!(said.to_string().starts_with("launching add on a grid of [1, 1, 1]"), "{said}");
    launch(&add, &pool, [0, 1, 1], 1, &[&[0; 8], &[0; 4]]).expect("nothing to do");
}

#[test]
fn a_kernel_that_does_not_end_in_time_is_an_error() {
    let Some((device, pool)) = device() else { return };
    let spin = kernel(&device, SOURCES, "spin");
    // A second or so, so that the device is free again soon.
    launch(&spin, &pool, [1, 1, 1], 1, &[&2_000_000_000i64.to_le_bytes()]).unwrap();
    let began = Instant::now();
    let error = pool.stream().wait(Duration::from_millis(100), "a spinning kernel").unwrap_err();
    assert!(matches!(error.kind(), GpuErrorKind::Timeout { .. }), "{error}");
    assert!(began.elapsed() < Duration::from_millis(800));
    pool.stream().wait(LIMIT, "the rest of it").unwrap();
}

#[test]
fn events_take_the_time_and_order_streams() {
    let Some((device, pool)) = device() else { return };
    let spin = kernel(&device, SOURCES, "spin");
    let (begin, end) = (Event::new(&device).unwrap(), Event::new(&device).unwrap());
    begin.record(pool.stream()).unwrap();
    launch(&spin, &pool, [1, 1, 1], 1, &[&20_000_000i64.to_le_bytes()]).unwrap();
    end.record(pool.stream()).unwrap();
    let other = Stream::new(&device).unwrap();
    other.after(&end).unwrap();
    other.wait(LIMIT, "the other stream").unwrap();
    assert!(end.done().unwrap());
    let ms = end.ms_since(&begin).unwrap();
    assert!(ms > 2.0 && ms < 1000.0, "{ms} ms");
}

#[test]
fn addresses_that_are_not_of_the_device_are_told_apart() {
    let Some((device, pool)) = device() else { return };
    let allocation = pool.take(1 << 20).unwrap();
    device.check_address("q", allocation.address(), 1 << 20).unwrap();
    let said = |address: u64, bytes: usize| {
        device.check_address("q", address, bytes).unwrap_err().to_string()
    };
    let host = [0u8; 16];
    let of_host = said(host.as_ptr() as u64, 16);
    assert!(of_host.contains("no device memory; copy it to the GPU first"), "{of_host}");
    let pinned = Pinned::new(&device, 64).unwrap();
    assert!(pinned.as_slice().iter().all(|&b| b == 0));
    assert!(said(pinned.as_slice().as_ptr() as u64, 64).contains("no device memory"));
    let past = said(allocation.address(), 1 << 40);
    assert!(past.contains("its memory ends"), "{past}");
}

#[test]
fn machine_code_that_is_damaged_or_for_another_device_is_refused() {
    let Some((device, _)) = device() else { return };
    let arch = device.info().arch();
    assert!(Module::load(&device, arch, b"not a cubin").is_err());
    let other = Arch::new(if device.info().capability.0 == 8 { (9, 0) } else { (8, 0) });
    let foreign = compiled(SOURCES, other);
    let load = |arch| Module::load(&device, arch, &foreign.cubin).unwrap_err().to_string();
    let said = load(other);
    assert!(said.starts_with(&format!("a kernel for {other} runs on compute cap")), "{said}");
    let said = load(arch);
    assert!(said.starts_with("loading a kernel on"), "the driver looks too: {said}");
    let module = Module::load(&device, arch, &compiled(SOURCES, arch).cubin).unwrap();
    assert!(module.function("subtract", 0).is_err());
    let too_much = module.function("add", 1 << 30).unwrap_err().to_string();
    assert!(too_much.contains("1073741824 B of shared memory"), "{too_much}");
}

#[test]
fn a_device_that_is_not_there_is_named() {
    match Device::count() {
        Err(e) => println!("skipped: {e}"),
        Ok(count) => {
            let said = Device::open(count).unwrap_err().to_string();
            assert!(said.starts_with(&format!("there is no GPU {count};")), "{said}");
        }
    }
}
