//! The driver layer against a driver made for tests (`driver/cuda.c`), which queues copies and
//! can run out of memory, hang, or be too old. Each test runs itself again in a process that
//! finds that driver and no other.

mod driver;

use std::sync::Arc;
use std::time::Duration;

use foveate_gpu::driver::{
    Device, Graph, HostArray, Module, Pool, Readback, Stream, default_timeout,
};
use foveate_gpu::nvrtc::check_driver;
use foveate_gpu::{GpuError, GpuErrorKind};

use driver::inside;

const LIMIT: Duration = Duration::from_secs(10);

fn pool(ordinal: usize) -> Pool {
    let device = Device::open(ordinal).unwrap();
    Pool::new(Arc::new(Stream::new(&device).unwrap()))
}

#[test]
fn what_was_given_to_a_copy_can_be_reused_at_once() {
    if !inside("what_was_given_to_a_copy_can_be_reused_at_once", &[], &[], &[]) {
        return;
    }
    let pool = pool(0);
    // Through one chunk, exactly one, several, and uneven.
    for bytes in [0, 1, 1000, 4 << 20, (9 << 20) + 7] {
        let given: Vec<u8> = (0..bytes).map(|i| (i * 31 % 251) as u8).collect();
        let mut data = given.clone();
        let allocation = pool.upload(&data).unwrap();
        data.fill(0xEE);
        allocation.read(&mut data, LIMIT).unwrap();
        assert!(data == given, "{bytes} B");
        if bytes > 10 {
            allocation.write_at(3, &[7; 5]).unwrap();
            allocation.read_at(2, &mut data[..7], LIMIT).unwrap();
            assert_eq!(data[..7], [given[2], 7, 7, 7, 7, 7, given[8]]);
            allocation.fill(9).unwrap();
            allocation.read(&mut data, LIMIT).unwrap();
            assert!(data.iter().all(|&b| b == 9));
            allocation.fill_at(4, 1, 3).unwrap();
            allocation.read_at(3, &mut data[..5], LIMIT).unwrap();
            assert_eq!(data[..5], [9, 1, 1, 1, 9]);
            assert!(allocation.fill_at(4, 1, bytes - 3).is_err());
            // SAFETY: the allocation has as many bytes, and lives until they are read.
            unsafe { pool.stream().fill_words(allocation.address() + 4, 0xFF80_0102, 1) }.unwrap();
            allocation.read_at(3, &mut data[..6], LIMIT).unwrap();
            assert_eq!(data[..6], [9, 2, 1, 0x80, 0xFF, 9]);
        }
        assert!(
            allocation.write_at(1, &given).is_err()
                && allocation.read_at(1, &mut data, LIMIT).is_err()
        );
    }
    // More small copies than the chunks hold, all queued before the first is read back.
    let allocations: Vec<_> =
        (0..3000u32).map(|i| pool.upload(&[i as u8; 4000]).unwrap()).collect();
    for (i, allocation) in allocations.iter().enumerate() {
        let mut data = [0; 4000];
        allocation.read(&mut data, LIMIT).unwrap();
        assert_eq!(data, [i as u8; 4000]);
    }
}

#[test]
fn a_readback_waits_for_the_work_before_it_and_no_other() {
    if !inside("a_readback_waits_for_the_work_before_it_and_no_other", &[], &[], &[]) {
        return;
    }
    let pool = pool(0);
    let memory = pool.upload(&[1, 2, 3]).unwrap();
    let mut readback = Readback::new(&memory).unwrap();
    assert!(readback.wait(LIMIT).unwrap_err().to_string().contains("no copy"));
    readback.queue(&memory).unwrap();
    // From here on nothing ends.
    let busy = std::path::Path::new(&std::env::var_os("HOME").unwrap()).join("busy");
    std::fs::write(&busy, "").unwrap();
    memory.write(&[4, 5, 6]).unwrap();
    assert_eq!(readback.wait(LIMIT).unwrap(), [1, 2, 3]);
    readback.queue(&memory).unwrap();
    let error = readback.wait(Duration::from_millis(50)).unwrap_err();
    assert!(matches!(error.kind(), GpuErrorKind::Timeout { .. }), "{error}");
    std::fs::remove_file(busy).unwrap();
    assert_eq!(readback.wait(LIMIT).unwrap(), [4, 5, 6]);
    assert!(readback.queue(&pool.take(4).unwrap()).is_err());
}

#[test]
fn an_array_of_the_host_is_read_and_freed_behind_the_copies_that_were_marked() {
    let name = "an_array_of_the_host_is_read_and_freed_behind_the_copies_that_were_marked";
    if !inside(name, &[], &[], &[]) {
        return;
    }
    let pool = pool(0);
    let (stream, memory) = (pool.stream(), pool.take(300).unwrap());
    let host = HostArray::new(stream.device(), 1000).unwrap();
    let mut found = [7; 1000];
    host.read(0, &mut found, LIMIT).unwrap();
    assert_eq!(found, [0; 1000]);
    let given: Vec<u8> = (0..1000).map(|i| (i * 31 % 251) as u8).collect();
    host.change(0, 1000, LIMIT, |bytes| bytes.copy_from_slice(&given)).unwrap();
    let through = |start: usize| {
        // SAFETY: the memory has 300 bytes and lives as long as the array, which is marked.
        unsafe { host.copy_to(stream, start, memory.address(), 300) }.unwrap();
        memory.fill_at(0, 9, 50).unwrap();
        // SAFETY: as above.
        unsafe { host.copy_from(stream, start, memory.address(), 300) }.unwrap();
        host.mark(stream).unwrap();
    };
    through(100);
    host.read(0, &mut found, LIMIT).unwrap();
    assert!(found[..100] == given[..100] && found[150..] == given[150..]);
    assert_eq!(found[100..150], [9; 50]);
    // What is not there fails, and changes nothing.
    // SAFETY: nothing is queued.
    let late = unsafe { host.copy_to(stream, 900, memory.address(), 101) }.unwrap_err();
    let told = "101 B from byte 900 on are not within 1000 B of the host";
    assert!(late.to_string().contains(told), "{late}");
    assert!(host.read(1, &mut found, LIMIT).is_err());
    assert!(host.change(usize::MAX, 2, LIMIT, |_| panic!("it has no such bytes")).is_err());
    // From here on nothing ends, until it does.
    let busy = std::path::Path::new(&std::env::var_os("HOME").unwrap()).join("busy");
    std::fs::write(&busy, "").unwrap();
    through(500);
    let error = host.read(0, &mut found, Duration::from_millis(50)).unwrap_err();
    assert!(matches!(error.kind(), GpuErrorKind::Timeout { .. }), "{error}");
    std::fs::remove_file(busy).unwrap();
    through(600);
    // The driver ends the process where memory of a queued copy is gone.
    drop(host);
    stream.wait(LIMIT, "copies").unwrap();
}

#[test]
fn a_device_is_synchronized_with_all_that_is_queued() {
    if !inside("a_device_is_synchronized_with_all_that_is_queued", &[], &[], &[]) {
        return;
    }
    let pool = pool(0);
    let allocation = pool.upload(&[1; 100]).unwrap();
    allocation.fill(9).unwrap();
    pool.stream().device().synchronize().unwrap();
    // SAFETY: the driver's device memory is host memory, of 100 bytes or more.
    let found = unsafe { std::slice::from_raw_parts(allocation.address() as *const u8, 100) };
    assert_eq!(found, [9; 100]);
}

#[test]
fn a_graph_holds_no_copies_no_memory_and_no_waiting() {
    let name = "a_graph_holds_no_copies_no_memory_and_no_waiting";
    if !inside(name, &[], &[], &[]) {
        return;
    }
    let pool = pool(0);
    let allocation = pool.take(100).unwrap();
    let record = |work: &dyn Fn() -> Result<(), GpuError>| Graph::record(pool.stream(), work);
    let refused = |what: &str, work: &dyn Fn() -> Result<(), GpuError>| {
        let said = record(work).unwrap_err().to_string();
        assert!(said.starts_with(&format!("{what} cannot be recorded in a graph")), "{said}");
    };
    refused("a copy between host and device", &|| allocation.write(&[1; 100]));
    refused("taking memory of the device", &|| pool.take(1 << 20).map(drop));
    refused("waiting for the device", &|| pool.stream().wait(LIMIT, "nothing"));
    // Memory that is there is given out, and nothing is left recording, whatever happens.
    drop(pool.take(5000).unwrap());
    record(&|| pool.take(5000).map(drop)).unwrap();
    let panics = || record(&|| panic!("on purpose"));
    assert!(std::panic::catch_unwind(std::panic::AssertUnwindSafe(panics)).is_err());
    let mut found = [0; 100];
    allocation.write(&[1; 100]).unwrap();
    allocation.read(&mut found, LIMIT).unwrap();
    assert_eq!(found, [1; 100]);
}

#[test]
fn a_device_tells_the_most_memory_that_its_pools_held_at_once() {
    if !inside("a_device_tells_the_most_memory_that_its_pools_held_at_once", &[], &[], &[]) {
        return;
    }
    let device = Device::open(0).unwrap();
    let [first, other] = [(); 2].map(|()| Pool::new(Arc::new(Stream::new(&device).unwrap())));
    let held = || {
        let (free, total) = device.memory().unwrap();
        assert_eq!(device.held().now, (total - free) as u64, "what the driver has given");
        [device.held().now, device.held().peak].map(|bytes| bytes >> 20)
    };
    assert_eq!(held(), [0, 0]);
    let taken = [first.take(20 << 20).unwrap(), other.take(12 << 20).unwrap()];
    assert_eq!(held(), [32, 32]);
    drop(taken);
    assert_eq!(held(), [32, 32], "free, and held");
    let again = first.take(19 << 20).unwrap();
    other.release().unwrap();
    assert_eq!(held(), [20, 32]);
    device.forget_peak();
    assert_eq!(held(), [20, 20]);
    drop((again, first, other));
    assert_eq!(held(), [0, 20]);
}

#[test]
fn memory_runs_out_only_when_free_blocks_are_handed_back() {
    let name = "memory_runs_out_only_when_free_blocks_are_handed_back";
    if !inside(name, &[], &[], &[("TOTAL", "67108864")]) {
        return;
    }
    let pool = pool(0);
    drop(pool.take(40 << 20).unwrap());
    let most = pool.take(60 << 20).expect("the free 40 MiB were handed back");
    let error = pool.take(5 << 20).unwrap_err();
    let GpuErrorKind::OutOfMemory { bytes, free, total } = *error.kind() else { panic!("{error}") };
    assert_eq!((bytes, free, total), (5 << 20, 4 << 20, 64 << 20));
    let address = most.address();
    drop(most);
    assert_eq!(pool.take(60 << 20).unwrap().address(), address, "given out again");
    for most in [usize::MAX, isize::MAX as usize] {
        let error = pool.take(most).unwrap_err();
        assert!(matches!(error.kind(), GpuErrorKind::OutOfMemory { .. }), "{error}");
    }
    assert_eq!(pool.take(60 << 20).unwrap().address(), address, "nothing is lost");
}

/// Whether an allocation is given out for one byte more, which an exact pool has no room for.
fn serves_nearly_equal_requests() -> bool {
    let pool = pool(0);
    let address = pool.take(1000).unwrap().address();
    pool.take(1001).unwrap().address() == address
}

#[test]
fn an_empty_variable_does_not_make_memory_exact() {
    let empty = [("FOVEATE_EXACT_MEMORY", "")];
    if inside("an_empty_variable_does_not_make_memory_exact", &[], &[], &empty) {
        assert!(serves_nearly_equal_requests());
    }
}

#[test]
fn a_variable_makes_memory_exact() {
    if inside("a_variable_makes_memory_exact", &[], &[], &[("FOVEATE_EXACT_MEMORY", "1")]) {
        assert!(!serves_nearly_equal_requests());
    }
}

#[test]
fn memory_of_the_host_or_of_another_gpu_is_named() {
    if !inside("memory_of_the_host_or_of_another_gpu_is_named", &[], &[], &[]) {
        return;
    }
    let (pool, device) = (pool(1), Device::open(0).unwrap());
    let allocation = pool.take(1 << 20).unwrap();
    let said = device.check_address("q", allocation.address(), 16).unwrap_err().to_string();
    assert_eq!(said, "q is on GPU 1, but the work is for GPU 0");
    pool.stream().device().check_address("q", allocation.address(), 1 << 20).unwrap();
    let host = [0u8; 16];
    let said = device.check_address("k", host.as_ptr() as u64, 16).unwrap_err().to_string();
    assert!(said.starts_with("k is at 0x") && said.contains("no device memory"), "{said}");
    let said = Device::open(2).unwrap_err().to_string();
    assert_eq!(said, "there is no GPU 2; the driver has 2, counted from 0");
    let said = Module::load(&device, device.info().arch(), b"\x7fELF").unwrap_err().to_string();
    assert!(said.starts_with("loading a kernel on Test GPU: "), "{said}");
}

#[test]
fn a_device_that_hangs_is_an_error_after_a_time() {
    if !inside("a_device_that_hangs_is_an_error_after_a_time", &[], &[], &[("HANGS", "1")]) {
        return;
    }
    let pool = pool(0);
    let allocation = pool.take(100).unwrap();
    let error = allocation.read(&mut [0; 100], Duration::from_millis(50)).unwrap_err();
    assert!(matches!(error.kind(), GpuErrorKind::Timeout { .. }), "{error}");
}

#[test]
fn room_to_copy_through_is_waited_for_as_long_as_the_caller_says() {
    let name = "room_to_copy_through_is_waited_for_as_long_as_the_caller_says";
    if !inside(name, &[], &[], &[("HANGS", "1"), ("FOVEATE_TIMEOUT", "0.4")]) {
        return;
    }
    let waited = |pool: &Pool| {
        // More than the chunks hold, behind work that does not end.
        let error = pool.upload(&vec![1; 12 << 20]).unwrap_err();
        let GpuErrorKind::Timeout { waiting, seconds, .. } = error.kind() else {
            panic!("{error}")
        };
        assert_eq!(waiting, "copies between host and device");
        *seconds
    };
    let pool = pool(0);
    assert_eq!(waited(&pool), 0.4);
    assert_eq!(waited(&pool.with_timeout(Duration::from_millis(50))), 0.05);
    let said = pool.release().unwrap_err().to_string();
    assert!(said.contains(" within 0.4 s; ") && said.contains("FOVEATE_TIMEOUT"), "{said}");
    // Its end would be waited for.
    std::mem::forget(pool);
    assert_eq!(default_timeout(), Duration::from_millis(400));
}

#[test]
fn a_driver_without_a_function_is_too_old() {
    if !inside("a_driver_without_a_function_is_too_old", &[], &["-DOLD"], &[]) {
        return;
    }
    let said = Device::count().unwrap_err().to_string();
    let expected = "the NVIDIA driver has no `cuFuncGetParamInfo`; it is too old";
    assert!(said.starts_with(expected), "{said}");
}

#[test]
fn a_driver_that_does_not_start_says_why() {
    if !inside("a_driver_that_does_not_start_says_why", &[], &[], &[("INIT", "803")]) {
        return;
    }
    let said = Device::count().unwrap_err().to_string();
    assert!(
        said.starts_with("starting the driver: the driver says CUDA_ERROR_SYSTEM_DRIVER"),
        "{said}"
    );
    let advice = "(803); the driver was changed under the running system: restart the machine";
    assert!(said.ends_with(advice), "{said}");
}

#[test]
fn a_driver_older_than_nvrtc_is_refused_with_what_to_install() {
    if !inside(
        "a_driver_older_than_nvrtc_is_refused_with_what_to_install",
        &[],
        &[],
        &[("CUDA", "12040")],
    ) {
        return;
    }
    let driver = Device::open(0).unwrap().info().driver;
    assert_eq!(driver, (12, 4));
    for newer_minor_or_older in [(12, 9), (12, 4), (11, 8)] {
        check_driver(newer_minor_or_older, driver).unwrap();
    }
    let error = check_driver((13, 0), driver).unwrap_err();
    assert!(matches!(error.kind(), GpuErrorKind::OldDriver { .. }), "{error:?}");
    let said = error.to_string();
    assert_eq!(
        said,
        "the driver is for CUDA 12.4 and loads no kernels of NVRTC 13.0; install a driver 580 or \
         newer, or NVRTC 12 (`pip install nvidia-cuda-nvrtc-cu12`), to whose folder \
         FOVEATE_CUDA_LIBRARIES points"
    );
    // No NVRTC that Foveate takes would do.
    let said = check_driver((13, 0), (11, 8)).unwrap_err().to_string();
    assert!(said.ends_with("install a driver 580 or newer"), "{said}");
}
