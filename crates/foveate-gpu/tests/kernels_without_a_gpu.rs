//! Kernels, tensor maps and allocators on the driver made for tests (`driver/cuda.c`), which loads
//! kernels and lists their launches, and contexts that every call leaves as it found them.

mod driver;

use std::path::PathBuf;
use std::sync::{Arc, Mutex};
use std::time::Duration;
use std::{env, fs};

use foveate_gpu::abi::{Abi, Address};
use foveate_gpu::blas::Matmul;
use foveate_gpu::driver::{
    Allocation, Allocator, Device, Event, Fill, Graph, L2Promotion, Launch, Pinned, Pool, Stream,
    Swizzle, TensorMap, Tiled, operations,
};
use foveate_gpu::kernel::{Expected, KernelSource, LoadedKernel};
use foveate_gpu::library::Library;
use foveate_gpu::nccl::{Communicator, FlatArray, Reduce, Transfer, UniqueId};
use foveate_gpu::{Arch, DeviceTensor, ElementType, Engine, GpuError, GpuErrorKind, Queue};
use foveate_tensor::DType;

use driver::inside;

const LIMIT: Duration = Duration::from_secs(10);

const SOURCE: &str = r#"
extern "C" __device__ const int fv_shared_bytes = 1024;
struct alignas(64) Map { unsigned long long words[16]; };
extern "C" __global__ void scale(float* x, float factor, const __grid_constant__ Map map) {
    extern __shared__ float of_cta[];
    of_cta[threadIdx.x] = (float)map.words[threadIdx.x % 16];
    x[threadIdx.x] *= factor + of_cta[threadIdx.x];
}
"#;

const EXPECTED: Expected<'static> = Expected {
    name: "scale",
    entry: "scale",
    registers: 255,
    local_bytes: 0,
    static_shared_bytes: 0,
    shared_bytes: Some(1024),
};

fn kernel(engine: &Engine, arch: Arch) -> Result<LoadedKernel, GpuError> {
    engine.kernel(&KernelSource { text: SOURCE.to_owned(), arch }, &EXPECTED)
}

fn said<T>(result: Result<T, GpuError>) -> String {
    result.map(drop).unwrap_err().to_string()
}

fn home() -> PathBuf {
    env::var_os("HOME").unwrap().into()
}

/// A matrix of 2 x 1024 numbers at `address`, and tiles of 1 x 32 of it.
fn map(address: Address) -> Tiled<'static> {
    Tiled {
        element: ElementType::F32,
        address,
        dims: &[1000, 2],
        strides: &[4096],
        tile: &[32, 1],
        element_strides: &[1, 1],
        swizzle: Swizzle::Bytes128,
        l2_promotion: L2Promotion::Bytes256,
        fill: Fill::Nan,
    }
}

/// Queues the kernel on memory of the queue's own.
fn launch(kernel: &LoadedKernel, queue: &Queue, launch: &Launch) -> Result<(), GpuError> {
    let memory = queue.pool().take(8192)?;
    let map = TensorMap::tiled(queue.stream().device(), &map(memory.address()))?;
    // SAFETY: nothing runs on the driver for tests.
    unsafe { kernel.launch(queue, launch, (memory.address(), 2.0f32, map)) }
}

#[test]
fn clusters_programmatic_launches_and_tensor_maps_reach_the_driver() {
    let name = "clusters_programmatic_launches_and_tensor_maps_reach_the_driver";
    if !inside(name, &["nvrtc"], &["-DLOADS"], &[]) {
        return;
    }
    let engine = Engine::get(0).unwrap();
    let queue = engine.queue();
    let scale = kernel(&engine, engine.device().info().arch().specific()).unwrap();
    let plain = Launch::new([8, 2, 1], 128);
    launch(&scale, queue, &plain).unwrap();
    launch(&scale, queue, &plain.cluster([2, 1, 1])).unwrap();
    launch(&scale, queue, &plain.programmatic()).unwrap();
    launch(&scale, queue, &plain.cluster([4, 2, 1]).programmatic()).unwrap();
    launch(&scale, queue, &Launch::new([0, 2, 1], 128)).expect("nothing to do");
    let queued = fs::read_to_string(home().join("launches")).unwrap();
    let queued: Vec<_> = queued.lines().collect();
    let attributes =
        ["", ", cluster [2, 1, 1]", ", programmatic", ", cluster [4, 2, 1], programmatic"];
    assert_eq!(queued, attributes.map(|with| format!("scale [8, 2, 1] x 128{with}")));

    let refused = |cluster| said(launch(&scale, queue, &plain.cluster(cluster)));
    let head = "launching scale in clusters of";
    for cluster in [[0, 1, 1], [8, 2, 1], [1 << 16, 1 << 16, 1 << 16]] {
        let expected = format!("{head} {cluster:?}: a cluster has 1 to 8 CTAs");
        assert_eq!(refused(cluster), expected);
    }
    let expected = format!("{head} [3, 1, 1]: the grid [8, 2, 1] is no multiple of them");
    assert_eq!(refused([3, 1, 1]), expected);
    // SAFETY: nothing runs on the driver for tests.
    let few = said(unsafe { scale.launch(queue, &plain, (1u64, 2.0f32)) });
    assert_eq!(few, "kernel scale takes parameters of [8, 4, 128] bytes, not [8, 4]");
    let other = Engine::get(1).unwrap();
    let elsewhere = said(launch(&scale, other.queue(), &plain));
    assert_eq!(elsewhere, "kernel scale is loaded on GPU 0, but the queue is of GPU 1");

    let memory = queue.pool().take(8192).unwrap();
    let encoded = TensorMap::tiled(engine.device(), &map(memory.address())).unwrap().bytes();
    let words = encoded.chunks_exact(8).map(|b| u64::from_ne_bytes(b.try_into().unwrap()));
    let words: Vec<u64> = words.collect();
    // f32, 2 axes, not interleaved, swizzle of 128 B; L2 fetches 256 B; NaN outside.
    assert_eq!(words[0], 7 | 2 << 8 | 3 << 24 | 3 << 32 | 1 << 40);
    assert_eq!(words[1..3], [memory.address(), 1000]);
    assert_eq!((words[3], words[7], words[11]), (2, 4096, 32 | 1 << 32));
}

#[test]
fn a_device_that_hangs_or_faults_names_the_launches_that_may_have_done_it() {
    let name = "a_device_that_hangs_or_faults_names_the_launches_that_may_have_done_it";
    if !inside(name, &["nvrtc"], &["-DLOADS"], &[]) {
        return;
    }
    let engine = Engine::get(0).unwrap();
    let queue = engine.queue();
    let scale = kernel(&engine, engine.device().info().arch()).unwrap();
    let plain = Launch::new([8, 2, 1], 128);
    let wait = |limit| queue.stream().wait(Duration::from_millis(limit), "a pass");
    launch(&scale, queue, &plain).unwrap();
    wait(10_000).unwrap();
    let busy = home().join("busy");
    fs::write(&busy, "").unwrap();
    launch(&scale, queue, &plain).unwrap();
    let hangs = |of: &str| {
        format!(
            "a pass did not finish within 0.02 s; the stream hangs in {of}, or has more to do: \
             FOVEATE_TIMEOUT, or the limit of the call, sets how long to wait"
        )
    };
    assert_eq!(said(wait(20)), hangs("its launch of scale"));
    let recorded = Graph::record(queue.stream(), || launch(&scale, queue, &plain)).unwrap();
    assert_eq!(said(wait(20)), hangs("its launch of scale"), "what is recorded does not run");
    // SAFETY: nothing runs on the driver for tests.
    unsafe { recorded.launch(queue.stream()) }.unwrap();
    assert_eq!(said(wait(20)), hangs("one of its last 2 launches (scale; a graph of scale)"));
    fs::remove_file(busy).unwrap();
    wait(10_000).unwrap();

    launch(&scale, queue, &plain).unwrap();
    let fault = home().join("fault");
    fs::write(&fault, "").unwrap();
    let failed = said(wait(10_000));
    assert!(
        failed.starts_with("running kernels, its launch of scale: the driver says "),
        "{failed}"
    );
    let next = said(launch(&scale, queue, &plain));
    let after =
        ", 128 threads, 1024 B of shared memory, after its launch of scale: the driver says ";
    assert!(
        next.starts_with("launching scale on a grid of [8, 2, 1]") && next.contains(after),
        "{next}"
    );
    fs::remove_file(fault).unwrap();
}

#[test]
fn work_on_memory_that_no_device_has_fails_where_it_is_queued() {
    let name = "work_on_memory_that_no_device_has_fails_where_it_is_queued";
    if !inside(name, &["nvrtc"], &["-DLOADS"], &[]) {
        return;
    }
    let engine = Engine::get(0).unwrap();
    let (queue, pool) = (engine.queue(), engine.queue().pool());
    let scale = kernel(&engine, Arch::new((9, 0))).unwrap();
    let plain = Launch::new([1, 1, 1], 128);
    let run = |x: Address, of_map: Address| {
        let map = TensorMap::tiled(engine.device(), &map(of_map)).unwrap();
        // SAFETY: nothing runs on the driver for tests.
        unsafe { scale.launch(queue, &plain, (x, 2.0f32, map)) }
    };
    let [memory, gone] = [8192, 3 << 20].map(|bytes| pool.take(bytes).unwrap());
    let (there, freed) = (memory.address(), gone.address());
    run(there, there).unwrap();
    run(there + 8191, freed).unwrap();
    drop(gone);
    pool.release().unwrap();
    let pinned = Pinned::new(engine.device(), 8192).unwrap();
    let pageable = vec![0u8; 1 << 20];
    let of_host = |bytes: &[u8]| bytes.as_ptr().align_offset(16) as u64 + bytes.as_ptr() as u64;
    for wrong in [freed, of_host(pinned.as_slice()), of_host(&pageable)] {
        for (x, map) in [(wrong, there), (there, wrong)] {
            let told = said(run(x, map));
            assert!(told.contains("launching scale") && told.contains("ILLEGAL_ADDRESS"), "{told}");
        }
    }
    let queued = fs::read_to_string(home().join("launches")).unwrap();
    assert_eq!(queued.lines().count(), 2, "what fails is not queued");
    let stream = queue.stream();
    // SAFETY: the driver for tests finds what is not there.
    unsafe {
        stream.fill(there, 1, 8192).unwrap();
        stream.copy(there + 4096, there, stream.device(), 4096).unwrap();
        for told in [
            said(stream.fill(there + 1, 1, 8192)),
            said(stream.copy(there, freed, stream.device(), 16)),
            said(stream.copy(freed, there, stream.device(), 16)),
            said(stream.copy(there, there + 8000, stream.device(), 512)),
        ] {
            assert!(told.contains("ILLEGAL_ADDRESS"), "{told}");
        }
    }
}

#[test]
fn a_driver_without_attributes_and_maps_declines_what_needs_them() {
    let name = "a_driver_without_attributes_and_maps_declines_what_needs_them";
    if !inside(name, &["nvrtc"], &["-DLOADS", "-DWITHOUT_OPTIONAL"], &[]) {
        return;
    }
    let engine = Engine::get(0).unwrap();
    let scale = kernel(&engine, Arch::new((9, 0))).unwrap();
    let plain = Launch::new([8, 2, 1], 128);
    let queue = |launch: &Launch| {
        // SAFETY: nothing runs on the driver for tests.
        unsafe { scale.launch(engine.queue(), launch, (0u64, 2.0f32, [0u64; 16])) }
    };
    queue(&plain).unwrap();
    let why = said(queue(&plain.cluster([2, 1, 1])));
    let expected =
        "the NVIDIA driver has no `cuLaunchKernelEx`; it is too old, a newer one is needed";
    assert_eq!(why, expected);
    let why = said(TensorMap::tiled(engine.device(), &map(0x1000)));
    assert!(why.starts_with("the NVIDIA driver has no `cuTensorMapEncodeTiled`; it is"), "{why}");
}

#[test]
fn a_kernel_is_loaded_only_where_its_architecture_runs() {
    let name = "a_kernel_is_loaded_only_where_its_architecture_runs";
    if !inside(name, &["nvrtc"], &["-DLOADS"], &[("CAPABILITY", "80")]) {
        return;
    }
    let engine = Engine::get(0).unwrap();
    let error = kernel(&engine, Arch::new((9, 0)).specific()).unwrap_err();
    assert!(matches!(error.kind(), GpuErrorKind::Architecture { .. }), "{error:?}");
    assert_eq!(
        error.to_string(),
        "a kernel for sm_90a runs on compute capability 9.0 alone, but Test GPU has 8.0; compile it \
         for sm_80"
    );
    let scale = kernel(&engine, Arch::new((8, 0))).unwrap();
    let why = said(launch(&scale, engine.queue(), &Launch::new([8, 1, 1], 128).programmatic()));
    let expected = "launching scale: clusters and programmatic launches need compute capability \
                    9.0, Test GPU has 8.0";
    assert_eq!(why, expected);
    let source = KernelSource { text: SOURCE.to_owned(), arch: Arch::new((8, 0)) };
    let more = Expected { shared_bytes: Some(2048), ..EXPECTED };
    let why = said(engine.kernel(&source, &more));
    assert_eq!(why, "kernel scale: it states 1024 B of shared memory, but 2048 B are planned");
    let fewer = Expected { registers: 1, ..EXPECTED };
    let why = said(engine.kernel(&source, &fewer));
    assert!(why.starts_with("kernel scale: a thread of `scale` takes ") && why.ends_with("is 1"));
}

/// Gives out parts of one allocation, and notes what is out.
#[derive(Debug)]
struct Parts {
    whole: Allocation,
    /// Bytes given out so far, and parts that are out: address, bytes.
    state: Mutex<(u64, Vec<(Address, usize)>)>,
    stream: usize,
}

// SAFETY: the parts are apart, of memory that lives as long as the allocator, and used once.
unsafe impl Allocator for Parts {
    fn allocate(&self, bytes: usize, stream: usize) -> Result<Address, GpuError> {
        assert_eq!(stream, self.stream);
        let (used, out) = &mut *self.state.lock().unwrap();
        let address = self.whole.address().next_multiple_of(256) + *used;
        *used += (bytes as u64).next_multiple_of(256);
        if *used + 256 > self.whole.bytes() as u64 {
            return Err(GpuError::argument("the parts are used up"));
        }
        out.push((address, bytes));
        Ok(address)
    }

    unsafe fn free(&self, address: Address, bytes: usize, stream: usize) {
        assert_eq!(stream, self.stream);
        let (_, out) = &mut *self.state.lock().unwrap();
        let at = out.iter().position(|part| *part == (address, bytes)).expect("it is out");
        out.swap_remove(at);
    }
}

#[test]
fn a_queue_with_an_allocator_takes_no_other_memory_of_the_device() {
    let name = "a_queue_with_an_allocator_takes_no_other_memory_of_the_device";
    if !inside(name, &["nvrtc", "cublaslt"], &["-DLOADS"], &[]) {
        return;
    }
    let engine = Engine::get(0).unwrap();
    let scale = kernel(&engine, Arch::new((9, 0))).unwrap();
    // Free memory of other queues, of the sizes that are taken below.
    for bytes in [1000, 8192, 100_000] {
        drop(engine.queue().pool().take(bytes).unwrap());
    }
    let whole = engine.queue().pool().take(8 << 20).unwrap();
    let own = engine.new_queue().unwrap();
    // The driver for tests has one stream.
    let parts = Arc::new(Parts { whole, state: Mutex::default(), stream: 1 });
    let allocations = || fs::read_to_string(home().join("allocations")).unwrap().lines().count();
    let before = allocations();

    let queue = own.with_allocator(parts.clone());
    assert_ne!(queue.id(), own.id());
    let given = |address: Address, bytes: usize| {
        let (_, out) = &*parts.state.lock().unwrap();
        out.contains(&(address, bytes))
    };
    let taken = queue.pool().take(1000).unwrap();
    assert!(given(taken.address(), 1000));
    let data: Vec<u8> = (0..100_000).map(|i| i as u8).collect();
    let uploaded = queue.pool().upload(&data).unwrap();
    assert!(given(uploaded.address(), 100_000));
    let mut read = vec![0; data.len()];
    uploaded.read(&mut read, LIMIT).unwrap();
    assert_eq!(read, data);
    launch(&scale, &queue, &Launch::new([1; 3], 128)).unwrap();
    let square =
        |i: u64| DeviceTensor::contiguous(uploaded.address() + 1024 * i, DType::F32, [1, 16, 16]);
    let matmul = Matmul::new(square(0), square(1), square(2));
    let used = || parts.state.lock().unwrap().0;
    let first = used();
    engine.matmul(&queue, &matmul).unwrap();
    assert!(used() > first, "the product's workspace is the allocator's");
    let first = used();
    let record = || {
        launch(&scale, &queue, &Launch::new([1; 3], 128))?;
        engine.matmul(&queue, &matmul)
    };
    Graph::record(queue.stream(), record).unwrap();
    assert!(used() > first, "recorded calls take memory too");
    // What a graph copies stays where it is: the caller's data and the memory for copies change.
    let mut given = vec![5; 3000];
    let recorded = || queue.pool().upload(&given);
    let mut copied = None;
    let work = || recorded().map(|made| copied = Some(made));
    let graph = Graph::record(queue.stream(), work).unwrap();
    given.fill(6);
    // SAFETY: what was copied to is held.
    unsafe { graph.launch(queue.stream()) }.unwrap();
    let mut read = vec![0; 3000];
    copied.as_ref().unwrap().read(&mut read, LIMIT).unwrap();
    assert_eq!(read, [5; 3000]);
    drop(copied);
    queue.pool().release().unwrap();
    let kept = queue.downgrade();
    drop((taken, uploaded, queue));
    assert!(kept.is_finished());
    kept.release();
    assert!(parts.state.lock().unwrap().1.is_empty(), "all is given back: {parts:?}");
    assert_eq!(allocations(), before);
}

#[test]
fn an_allocator_that_fails_or_gives_crooked_memory_is_told() {
    let name = "an_allocator_that_fails_or_gives_crooked_memory_is_told";
    if !inside(name, &[], &[], &[]) {
        return;
    }
    #[derive(Debug)]
    struct Crooked;
    // SAFETY: nobody uses what it gives.
    unsafe impl Allocator for Crooked {
        fn allocate(&self, bytes: usize, _: usize) -> Result<Address, GpuError> {
            match bytes {
                ..1000 => Ok(0x1080),
                _ => Err(GpuError::argument("no more than 999 bytes")),
            }
        }

        unsafe fn free(&self, _: Address, _: usize, _: usize) {}
    }
    let queue = Engine::get(0).unwrap().queue().with_allocator(Arc::new(Crooked));
    assert_eq!(said(queue.pool().take(1000)), "no more than 999 bytes");
    assert_eq!(
        said(queue.pool().take(10)),
        "the allocator gave memory at 0x1080; it must start at a multiple of 256 bytes"
    );
}

/// The current context of this thread, by the driver's own functions. The driver for tests calls
/// the context of device `i` `i + 1`.
struct Contexts(libloading::Library);

impl Contexts {
    fn open() -> Self {
        // SAFETY: it is open already.
        Self(unsafe { libloading::Library::new(Library::Driver.open().unwrap().path()) }.unwrap())
    }

    fn set(&self, context: usize) {
        type Set = unsafe extern "C" fn(usize) -> i32;
        // SAFETY: the function takes a pointer or null.
        assert_eq!(unsafe { self.0.get::<Set>(b"cuCtxSetCurrent").unwrap()(context) }, 0);
    }

    fn get(&self) -> usize {
        type Get = unsafe extern "C" fn(*mut usize) -> i32;
        let mut found = 99;
        // SAFETY: `found` is valid for a write.
        assert_eq!(unsafe { self.0.get::<Get>(b"cuCtxGetCurrent").unwrap()(&mut found) }, 0);
        found
    }

    /// How many calls have set one.
    fn sets(&self) -> i32 {
        // SAFETY: it is an int.
        unsafe { **self.0.get::<*const i32>(b"contexts_set").unwrap() }
    }

    /// Makes `call` with each context current, and none, and sees which one it leaves.
    fn kept_by(&self, name: &str, mut call: impl FnMut()) {
        for context in [0, 1, 2] {
            self.set(context);
            call();
            assert_eq!(self.get(), context, "{name} leaves another context");
        }
    }
}

#[test]
fn every_call_of_memory_and_streams_leaves_the_context_that_it_found() {
    let name = "every_call_of_memory_and_streams_leaves_the_context_that_it_found";
    if !inside(name, &[], &[], &[]) {
        return;
    }
    let contexts = Contexts::open();
    let kept_by = |name: &str, call: &mut dyn FnMut()| contexts.kept_by(name, call);

    kept_by("Device::open", &mut || drop(Device::open(0).unwrap()));
    kept_by("Device::open of none", &mut || drop(Device::open(9).unwrap_err()));
    kept_by("Engine::get", &mut || drop(Engine::get(0).unwrap()));
    let engine = Engine::get(0).unwrap();
    let (device, queue) = (engine.device(), engine.queue());
    let (stream, pool) = (queue.stream(), queue.pool());
    kept_by("memory", &mut || assert!(device.memory().is_ok()));
    let memory = pool.take(100_000).unwrap();
    let at = memory.address();
    kept_by("check_address", &mut || device.check_address("x", at, 100).unwrap());
    kept_by("check_address of none", &mut || drop(device.check_address("x", 16, 1).unwrap_err()));

    kept_by("Stream::new", &mut || drop(Stream::new(device).unwrap()));
    kept_by("wait", &mut || stream.wait(LIMIT, "nothing").unwrap());
    // SAFETY: the allocation has as many bytes.
    kept_by("Stream::fill", &mut || unsafe { stream.fill(at, 0, 100) }.unwrap());
    kept_by("events", &mut || {
        let [first, second] = [(); 2].map(|()| Event::new(device).unwrap());
        first.record(stream).unwrap();
        second.record(stream).unwrap();
        stream.after(&first).unwrap();
        first.wait(LIMIT, "nothing").unwrap();
        assert!(second.done().unwrap());
        second.ms_since(&first).unwrap();
    });

    kept_by("new_queue", &mut || drop(engine.new_queue().unwrap()));
    kept_by("a pool", &mut || {
        let pool = Pool::new(Arc::new(Stream::new(device).unwrap()));
        drop(pool.take(5000).unwrap());
        pool.release().unwrap();
        drop(pool.take(5000).unwrap());
        drop(pool.take(1 << 40).unwrap_err());
    });
    kept_by("copies", &mut || {
        memory.write(&[1; 1000]).unwrap();
        memory.read(&mut [0; 1000], LIMIT).unwrap();
        memory.fill(3).unwrap();
        drop(memory.read(&mut vec![0; 1 << 20], LIMIT).unwrap_err());
    });
    kept_by("pinned memory", &mut || drop(Pinned::new(device, 100).unwrap()));
    kept_by("a finished queue", &mut || {
        let queue = engine.new_queue().unwrap();
        queue.pool().upload(&[1; 100]).unwrap();
        let kept = queue.downgrade();
        drop(queue);
        assert!(kept.is_finished());
        kept.release();
    });
}

#[test]
fn every_launch_and_transfer_leaves_the_context_that_it_found() {
    let name = "every_launch_and_transfer_leaves_the_context_that_it_found";
    if !inside(name, &["nvrtc", "cublaslt", "nccl"], &["-DLOADS"], &[]) {
        return;
    }
    let contexts = Contexts::open();
    let kept_by = |name: &str, call: &mut dyn FnMut()| contexts.kept_by(name, call);
    let engine = Engine::get(0).unwrap();
    let (device, queue) = (engine.device(), engine.queue());
    let stream = queue.stream();
    let memory = queue.pool().take(100_000).unwrap();
    let at = memory.address();

    kept_by("kernel", &mut || drop(kernel(&engine, device.info().arch()).unwrap()));
    let scale = kernel(&engine, device.info().arch()).unwrap();
    kept_by("launch", &mut || launch(&scale, queue, &Launch::new([2; 3], 32)).unwrap());
    let wrong = Launch::new([2; 3], 32).cluster([3, 1, 1]);
    kept_by("a wrong launch", &mut || drop(launch(&scale, queue, &wrong).unwrap_err()));
    let damaged = KernelSource { text: "nonsense".into(), arch: device.info().arch() };
    kept_by("a wrong kernel", &mut || drop(engine.kernel(&damaged, &EXPECTED).unwrap_err()));
    kept_by("a tensor map", &mut || assert!(TensorMap::tiled(device, &map(at)).is_ok()));
    kept_by("a graph", &mut || {
        let work = || launch(&scale, queue, &Launch::new([2; 3], 32));
        let graph = Graph::record(stream, work).unwrap();
        // SAFETY: nothing runs on the driver for tests.
        unsafe { graph.launch(stream) }.unwrap();
        drop(Graph::record(stream, || memory.write(&[1; 10])).unwrap_err());
    });

    let square = |i: u64| DeviceTensor::contiguous(at + 1024 * i, DType::F32, [1, 16, 16]);
    let matmul = Matmul::new(square(0), square(1), square(2));
    kept_by("a product", &mut || engine.matmul(queue, &matmul).unwrap());
    let wrong = Matmul::new(square(0), square(1), square(1));
    kept_by("a wrong product", &mut || drop(engine.matmul(queue, &wrong).unwrap_err()));

    let numbers = FlatArray { address: at, element: ElementType::F32, len: 100 };
    let transfer = Transfer::AllReduce { from: numbers, into: numbers, reduce: Reduce::Sum };
    let alone = || Communicator::new(&engine, &UniqueId::new().unwrap(), 0, 1, LIMIT).unwrap();
    kept_by("a communicator", &mut || {
        let among = alone();
        among.run(queue, transfer).unwrap();
        among.wait(queue).unwrap();
    });
    kept_by("an aborted communicator", &mut || {
        let among = alone();
        among.abort();
        drop(among.run(queue, transfer).unwrap_err());
    });

    // Where the device's own context is current, none is set.
    contexts.set(1);
    let before = contexts.sets();
    device.memory().unwrap();
    stream.wait(LIMIT, "nothing").unwrap();
    launch(&scale, queue, &Launch::new([2; 3], 32)).unwrap();
    assert_eq!(contexts.sets(), before);
}

#[test]
fn a_graph_does_what_was_recorded_and_says_what_another_has_otherwise() {
    let name = "a_graph_does_what_was_recorded_and_says_what_another_has_otherwise";
    if !inside(name, &["nvrtc", "cublaslt"], &["-DLOADS"], &[]) {
        return;
    }
    let engine = Engine::get(0).unwrap();
    let scale = kernel(&engine, Arch::new((9, 0))).unwrap();
    let queue = engine.new_queue().unwrap().for_graphs();
    let (stream, pool) = (queue.stream(), queue.pool());
    let numbers = pool.take(3 * 1024).unwrap();
    let square =
        |i: u64| DeviceTensor::contiguous(numbers.address() + 1024 * i, DType::F32, [1, 16, 16]);
    // Work with scratch of its own, which the next piece of work takes again.
    let work = |launches: Launch, alpha: f32, bytes: usize| -> Result<(), GpuError> {
        let scratch = [pool.take(8192)?, pool.take(8192)?];
        scratch[0].fill_at(0, 1, bytes)?;
        launch(&scale, &queue, &launches)?;
        let matmul = Matmul::new(square(0), square(1), square(2));
        engine.matmul(&queue, &Matmul { alpha, ..matmul })
    };
    let plain = Launch::new([8, 1, 1], 128);
    let run = || work(plain, 1.0, 100);
    let (done, first) = operations::noted(run);
    done.unwrap();
    let names: Vec<_> = first.iter().map(|operation| operation.name.as_str()).collect();
    assert_eq!(names[..2], ["a fill", "scale"]);
    assert!(names[2].starts_with("a product [16, 16] · [16, 16] of f32"), "{names:?}");
    // Scratch goes back in another order than it came.
    let record = |work: &dyn Fn() -> Result<(), GpuError>| Graph::record(stream, work).unwrap();
    // One more than they need at once.
    drop([(); 4].map(|()| pool.take(8192).unwrap()));
    // What is kept until its successor is made lies where it lay, too.
    let again = |kept: Vec<Allocation>| {
        drop(kept);
        vec![pool.take(8192).unwrap(), pool.take(8192).unwrap()]
    };
    let places = |kept: &[Allocation]| [kept[0].address(), kept[1].address()];
    let kept = again(Vec::new());
    let first_places = places(&kept);
    let kept = again(kept);
    assert_eq!(places(&kept), first_places);
    drop(kept);
    let held = pool.fingerprint();
    let graphs = [record(&run), record(&run), record(&run)];
    assert_eq!(pool.fingerprint(), held);
    let [before, graph, after] = graphs.each_ref().map(Graph::operations);
    assert_eq!([before, graph], [after; 2]);
    assert_eq!(operations::difference(graph, after), None);

    let other = |work: &dyn Fn() -> Result<(), GpuError>| {
        operations::difference(graph, record(work).operations()).unwrap()
    };
    let grid = other(&|| work(Launch::new([9, 1, 1], 128), 1.0, 100));
    assert!(
        grid.starts_with("operation 1 scale is launched as Launch { grid: [8, 1, 1]"),
        "{grid}"
    );
    let alpha = other(&|| work(plain, 2.0, 100));
    assert!(alpha.contains("has 0x3f800000 at byte 48 of parameter 0, then 0x40000000"), "{alpha}");
    let bytes = other(&|| work(plain, 1.0, 101));
    assert_eq!(bytes, "operation 0 a fill has 0x64 at byte 16 of parameter 0, then 0x65");
    let more = other(&|| run().and_then(|()| numbers.fill_at(0, 1, 9)));
    assert_eq!(more, "there are 3 operations, then 4");
    // Memory that somebody took meanwhile makes other addresses, and another fingerprint.
    let taken = pool.take(8192).unwrap();
    assert!(pool.fingerprint() != held);
    assert!(other(&run).starts_with("operation 0 a fill has 0x"));
    drop(taken);
    assert_eq!(pool.fingerprint(), held);

    // What is recorded is done when the graph is launched, each time.
    let mut ones = [1f32.to_ne_bytes(); 2 * 256].concat();
    ones.resize(3 * 1024, 0);
    let result = || {
        let mut read = [[0; 4]; 1];
        numbers.read_at(2 * 1024, read.as_flattened_mut(), LIMIT).unwrap();
        f32::from_ne_bytes(read[0])
    };
    let log = || fs::read_to_string(home().join("launches")).unwrap();
    let lines = log().lines().count();
    for _ in 0..2 {
        numbers.write(&ones).unwrap();
        assert_eq!(result(), 0.0);
        // SAFETY: all that it reads and writes is held, or free memory of the queue.
        unsafe { graphs[0].launch(stream) }.unwrap();
        assert_eq!(result(), 16.0);
    }
    assert_eq!(log().lines().skip(lines).collect::<Vec<_>>(), ["graph of 1 kernels"; 2]);

    // Asking the driver for memory cannot be recorded; what graphs name is not handed back.
    let larger = || Graph::record(stream, || pool.take(1 << 20).map(drop));
    assert!(said(larger()).starts_with("taking memory of the device cannot be recorded"));
    let frees = || fs::read_to_string(home().join("frees")).map_or(0, |text| text.lines().count());
    let before = frees();
    pool.release().unwrap();
    assert_eq!(frees(), before);
}
