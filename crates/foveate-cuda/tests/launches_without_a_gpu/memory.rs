//! Whose memory passes take, how long it is kept, and that nobody waits for it.

#[path = "../refusing/mod.rs"]
mod refusing;

use std::cell::Cell;
use std::collections::HashMap;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, mpsc};
use std::time::Duration;
use std::{env, fs};

use foveate_cuda::{
    CudaError, CudaOptions, DeviceArray, DeviceBackward, DeviceForward, DeviceOperands,
    ElementType, Engine, Queue,
};
use foveate_gpu::abi::Address;
use foveate_gpu::driver::{Allocation, Allocator, Graph};
use foveate_gpu::{GpuError, GpuErrorKind};
use foveate_mods::{Buffer, MaskMod, ScoreMod, expr, masks};
use foveate_problem::{Dims, Spec};
use refusing::Refusing;

use super::{DIMS, PLAIN, Tensors, inside, launches, names, of_documents, plan};

#[test]
fn what_was_kept_for_a_queue_goes_with_it() {
    if !inside("memory::what_was_kept_for_a_queue_goes_with_it") {
        return;
    }
    let engine = Engine::get(0).unwrap();
    let doc = Buffer::vector("doc", vec![0i32; 1 << 19]);
    let mask = MaskMod::new(doc.at([expr::q()]).eq(doc.at([expr::kv()])).dynamic()).unwrap();
    let plan = plan(&Spec { mask: Some(mask), ..PLAIN }, &DIMS, CudaOptions::default());
    let tensors = Tensors::new(&DIMS);
    let free = || engine.device().memory().unwrap().0;
    let mut left = Vec::new();
    for _ in 0..10 {
        let queue = engine.new_queue().unwrap();
        plan.forward_on(&queue, &tensors.forward).unwrap();
        drop(queue);
        left.push(free());
    }
    assert!(left[1..].iter().all(|n| *n == left[1]), "{left:?}");
    // One that is held keeps what it has.
    let held = engine.new_queue().unwrap();
    for _ in 0..2 {
        plan.forward_on(&held, &tensors.forward).unwrap();
        plan.forward_on(&engine.new_queue().unwrap(), &tensors.forward).unwrap();
    }
    launches();
    plan.forward_on(&held, &tensors.forward).unwrap();
    assert_eq!(names(&launches()), ["fv_forward"]);
}

#[test]
fn no_call_waits_for_memory_of_a_queue_that_is_gone() {
    if !inside("memory::no_call_waits_for_memory_of_a_queue_that_is_gone") {
        return;
    }
    let engine = Engine::get(0).unwrap();
    let doc = Buffer::vector("doc", (0..DIMS.len_k as i32).map(|i| i / 50).collect());
    let mask = Some(masks::document(&doc).unwrap());
    let plan = plan(&Spec { mask, ..PLAIN }, &DIMS, CudaOptions::default());
    let tensors = Tensors::new(&DIMS);
    let home = std::path::PathBuf::from(env::var_os("HOME").unwrap());
    // The driver frees memory, of the device and pinned, only after all that the device is doing.
    let freed = || fs::read_to_string(home.join("frees")).unwrap_or_default().lines().count();
    let left = || engine.device().memory().unwrap().0;
    let call = |queue: &Queue| plan.forward_on(queue, &tensors.forward).unwrap();
    let [first, second] = [(); 2].map(|()| engine.new_queue().unwrap());
    call(&first);
    fs::write(home.join("busy"), "").unwrap();
    drop(first);
    let before = left();
    call(&second);
    let taken = before - left();
    assert!(taken > 0, "work of the first queue may still use its memory");
    fs::remove_file(home.join("busy")).unwrap();
    call(&second);
    for _ in 0..3 {
        let third = engine.new_queue().unwrap();
        call(&third);
        assert_eq!(left(), before - taken, "it takes what the first queue has left");
    }
    assert_eq!(freed(), 0);
    call(&second);
    engine.queue().pool().release().unwrap();
    assert!(freed() > 0 && left() >= before, "what is left is handed back where somebody waits");
}

#[test]
fn memory_that_outlives_its_queue_goes_to_others_behind_the_last_work_on_it() {
    if !inside("memory::memory_that_outlives_its_queue_goes_to_others_behind_the_last_work_on_it") {
        return;
    }
    let engine = Engine::get(0).unwrap();
    let mask = Some(masks::causal());
    let plan = plan(&Spec { mask, ..PLAIN }, &DIMS, CudaOptions::default());
    let tensors = Tensors::new(&DIMS);
    let busy = std::path::PathBuf::from(env::var_os("HOME").unwrap()).join("busy");
    let call = |queue: &Queue| plan.forward_on(queue, &tensors.forward).unwrap();
    let [first, second] = [(); 2].map(|()| engine.new_queue().unwrap());
    call(&first);
    let pool = first.pool().clone();
    drop(first);
    // Of no size that anything else has.
    const BYTES: usize = 7 << 20;
    let block = pool.take(BYTES).unwrap();
    let address = block.address();
    drop(pool);
    fs::write(&busy, "").unwrap();
    block.write(&[1; 1000]).unwrap();
    drop(block);
    call(&second);
    let another = second.pool().take(BYTES).unwrap();
    assert_ne!(another.address(), address, "what was copied there is still on its way");
    fs::remove_file(&busy).unwrap();
    call(&second);
    assert_eq!(second.pool().take(BYTES).unwrap().address(), address);
}

/// Gives out parts of one allocation, and counts what is out.
#[derive(Debug)]
struct Parts {
    whole: Allocation,
    /// Bytes given out so far, and how many parts are out.
    state: Mutex<(u64, usize)>,
}

// SAFETY: the parts are apart, of memory that lives as long as the allocator, and used once.
unsafe impl Allocator for Parts {
    fn allocate(&self, bytes: usize, _: usize) -> Result<Address, GpuError> {
        let (used, out) = &mut *self.state.lock().unwrap();
        let address = self.whole.address().next_multiple_of(256) + *used;
        *used += (bytes as u64).next_multiple_of(256);
        assert!(*used + 256 <= self.whole.bytes() as u64, "the parts are used up");
        *out += 1;
        Ok(address)
    }

    unsafe fn free(&self, _: Address, _: usize, _: usize) {
        self.state.lock().unwrap().1 -= 1;
    }
}

#[test]
fn passes_take_all_memory_from_the_allocator_of_their_queue() {
    if !inside("memory::passes_take_all_memory_from_the_allocator_of_their_queue") {
        return;
    }
    let engine = Engine::get(0).unwrap();
    let (plan, tensors) = of_documents(50);
    let backward = tensors.backward_alone();
    let whole = engine.queue().pool().take(24 << 20).unwrap();
    let parts = Arc::new(Parts { whole, state: Mutex::default() });
    let log = std::path::Path::new(&env::var_os("HOME").unwrap()).join("allocations");
    let allocations = || fs::read_to_string(&log).unwrap().lines().count();
    let before = allocations();
    let queue = engine.new_queue().unwrap().with_allocator(parts.clone());
    let both = || {
        plan.forward_on(&queue, &tensors.forward)?;
        plan.backward_on(&queue, &backward)
    };
    both().unwrap();
    let used = || parts.state.lock().unwrap().0;
    let first = used();
    assert!(first > 0 && parts.state.lock().unwrap().1 > 0, "block lists are kept for the queue");
    Graph::record(queue.stream(), both).unwrap();
    assert!(used() > first, "scratch of recorded calls is the allocator's too");
    drop(queue);
    drop(plan);
    assert_eq!(parts.state.lock().unwrap().1, 0, "all is given back");
    assert_eq!(allocations(), before);
}

#[test]
fn a_graphs_calls_may_be_the_first_of_their_queue_and_keep_nothing() {
    if !inside("memory::a_graphs_calls_may_be_the_first_of_their_queue_and_keep_nothing") {
        return;
    }
    let engine = Engine::get(0).unwrap();
    // The captured buffer is the host's, and is bounded, so its range table is made too.
    let (plan, tensors) = of_documents(50);
    let backward = tensors.backward_alone();
    let both = |queue: &Queue| {
        plan.forward_on(queue, &tensors.forward)?;
        plan.backward_on(queue, &backward)
    };
    let whole = engine.queue().pool().take(48 << 20).unwrap();
    let parts = Arc::new(Parts { whole, state: Mutex::default() });
    let out = || parts.state.lock().unwrap().1;
    let [warm, fresh] = [(); 2].map(|()| engine.new_queue().unwrap().with_allocator(parts.clone()));
    both(&warm).unwrap();
    let kept = out();
    assert!(kept > 0, "calls that run keep their schedules");
    for queue in [&fresh, &warm] {
        let before = parts.state.lock().unwrap().0;
        Graph::record(queue.stream(), || both(queue)).unwrap();
        let used = parts.state.lock().unwrap().0 - before;
        assert!(used > 0 && out() == kept, "the graph has memory of its own, which is the graph's");
        // The same again, although a queue of calls that ran keeps what they made.
        Graph::record(queue.stream(), || both(queue)).unwrap();
        assert_eq!(parts.state.lock().unwrap().0 - before, 2 * used);
    }
    // Without an allocator there is no memory that a graph could own.
    let queue = engine.new_queue().unwrap();
    let said = Graph::record(queue.stream(), || both(&queue)).unwrap_err().to_string();
    assert!(said.contains("cannot be recorded in a graph"), "{said}");
}

/// Gives out parts that it wants back from each call.
#[derive(Debug)]
struct Lender(Parts);

// SAFETY: as `Parts`.
unsafe impl Allocator for Lender {
    fn allocate(&self, bytes: usize, stream: usize) -> Result<Address, GpuError> {
        self.0.allocate(bytes, stream)
    }

    unsafe fn free(&self, address: Address, bytes: usize, stream: usize) {
        // SAFETY: the caller's promise.
        unsafe { self.0.free(address, bytes, stream) }
    }

    fn lends(&self) -> bool {
        true
    }
}

#[test]
fn memory_that_is_lent_is_given_back_by_each_call() {
    if !inside("memory::memory_that_is_lent_is_given_back_by_each_call") {
        return;
    }
    let engine = Engine::get(0).unwrap();
    let (plan, tensors) = of_documents(50);
    let backward = tensors.backward_alone();
    let whole = engine.queue().pool().take(48 << 20).unwrap();
    let lender = Arc::new(Lender(Parts { whole, state: Mutex::default() }));
    let queue = engine.new_queue().unwrap().with_allocator(lender.clone());
    launches();
    for _ in 0..2 {
        plan.forward_on(&queue, &tensors.forward).unwrap();
        plan.backward_on(&queue, &backward).unwrap();
        assert_eq!(lender.0.state.lock().unwrap().1, 0, "nothing is kept");
        let made = launches();
        let lists = names(&made).into_iter().filter(|name| *name == "fv_block_lists").count();
        assert_eq!(lists, 2, "{made:?}");
    }
}

type Work = Arc<dyn Fn() + Send + Sync>;

/// Has another thread make a call before it gives memory or takes it back, and waits for its end: it would not
/// come if this thread held a lock that the call needs. PyTorch's allocator waits for other threads so, for the
/// interpreter's lock.
struct Asking {
    parts: Mutex<HashMap<Address, Allocation>>,
    call: Mutex<Option<(Work, Option<usize>)>>,
    /// Times that memory was asked for or given back in the call of this thread.
    asked: AtomicUsize,
    /// Times that the end did not come.
    waited: AtomicUsize,
}

thread_local! {
    /// Whether this thread makes the call.
    static ASKED: Cell<bool> = const { Cell::new(false) };
}

impl std::fmt::Debug for Asking {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Asking")
    }
}

impl Asking {
    fn ask(&self) {
        let Some((call, at)) = self.call.lock().unwrap().clone().filter(|_| !ASKED.get()) else {
            return;
        };
        let now = self.asked.fetch_add(1, Ordering::Relaxed);
        if at.is_some_and(|at| at != now) {
            return;
        }
        let (done, ended) = mpsc::channel();
        std::thread::spawn(move || {
            ASKED.set(true);
            call();
            let _ = done.send(());
        });
        if ended.recv_timeout(Duration::from_secs(120)).is_err() {
            self.waited.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// Makes a call on this thread, and meanwhile, when memory moves for the time `at`, or each time, on another.
    /// Returns the times.
    fn run(&self, at: Option<usize>, call: impl Fn() + Send + Sync + 'static) -> usize {
        let call = Arc::new(call);
        self.asked.store(0, Ordering::Relaxed);
        *self.call.lock().unwrap() = Some((call.clone(), at));
        call();
        *self.call.lock().unwrap() = None;
        self.asked.load(Ordering::Relaxed)
    }
}

// SAFETY: the engine's own pool gives the memory, which is kept until it is taken back.
unsafe impl Allocator for Asking {
    fn allocate(&self, bytes: usize, _: usize) -> Result<Address, GpuError> {
        self.ask();
        let memory = Engine::get(0).unwrap().queue().pool().take(bytes + 256)?;
        let address = memory.address().next_multiple_of(256);
        self.parts.lock().unwrap().insert(address, memory);
        Ok(address)
    }

    unsafe fn free(&self, address: Address, _: usize, _: usize) {
        self.ask();
        self.parts.lock().unwrap().remove(&address);
    }
}

#[test]
fn memory_is_taken_and_given_back_without_locks_that_other_calls_need() {
    if !inside("memory::memory_is_taken_and_given_back_without_locks_that_other_calls_need") {
        return;
    }
    let engine = Engine::get(0).unwrap();
    let (parts, call, asked, waited) = Default::default();
    let asking = Arc::new(Asking { parts, call, asked, waited });
    let new_queue = || engine.new_queue().unwrap().with_allocator(asking.clone());
    let options = CudaOptions { deterministic: true, ..CudaOptions::default() };
    let held = |what: &str| {
        assert_eq!(asking.waited.load(Ordering::Relaxed), 0, "{what}: another call has to wait");
    };
    // First calls of queues that take the place of others: what is made of captured buffers of the host.
    let doc = Buffer::vector("doc", (0..DIMS.len_k as i32).map(|i| i / 50).collect());
    let mask = masks::causal() & masks::document(&doc).unwrap();
    let spec = Spec { mask: Some(mask), ..PLAIN };
    let of_host = Arc::new((plan(&spec, &DIMS, options.clone()), Tensors::new(&DIMS)));
    let mut at = 0..;
    while at.next().is_some_and(|at| {
        let (queue, of) = (new_queue(), of_host.clone());
        at < asking.run(Some(at), move || {
            of.0.forward_on(&queue, &of.1.forward).unwrap();
            of.0.backward_on(&queue, &of.1.backward_alone()).unwrap();
        })
    }) {}
    assert!(at.start > 8, "{at:?}");
    held("buffers of the host");
    // Those of a device, so large that their range tables are kept: overwritten, others, of other lengths.
    let memory = engine.queue().pool().take(4 * 20_000).unwrap();
    let captured = Buffer::<i32>::on_device("doc", &[17_000]).unwrap();
    let mask = masks::causal() & masks::document(&captured).unwrap();
    let spec = Spec { mask: Some(mask), ..PLAIN };
    let plan = Arc::new(plan(&spec, &DIMS, options));
    let queue = new_queue();
    let run = |tensors: &Arc<Tensors>, address: Address, version: u64, len: usize| {
        let (plan, queue, tensors) = (plan.clone(), queue.clone(), tensors.clone());
        asking.run(None, move || {
            let shape = [len];
            let of = DeviceArray::new(address, ElementType::I32, &shape);
            let captures = [("doc", DeviceArray { version: Some(version), ..of })];
            let operands = DeviceOperands { captures: &captures, ..tensors.forward.operands };
            let backward = DeviceBackward { operands, ..tensors.backward_alone() };
            plan.forward_on(&queue, &DeviceForward { operands, ..tensors.forward }).unwrap();
            plan.backward_on(&queue, &backward).unwrap();
        });
    };
    let tensors = Arc::new(Tensors::new(&DIMS));
    (0..3).for_each(|version| run(&tensors, memory.address(), version, 17_000));
    held("contents that are overwritten");
    (0..20).for_each(|at| run(&tensors, memory.address() + 64 * at, 9, 17_000));
    held("other buffers");
    (0..20).for_each(|more| run(&tensors, memory.address(), 9, 17_001 + more));
    held("buffers of other lengths");
    for shorter in 0..30 {
        let dims = Dims { len_q: DIMS.len_q - shorter, ..DIMS };
        run(&Arc::new(Tensors::new(&dims)), memory.address(), 9, 17_000);
    }
    held("other lengths");
}

type Pass<'a> = &'a dyn Fn(&Queue) -> Result<(), CudaError>;

/// Kernels that write only what the engine keeps for itself.
const HELPERS: [&str; 5] =
    ["fv_range_table", "fv_block_lists", "fv_dq_ranks", "fv_mask_bits", "fv_sequences"];

#[test]
fn without_memory_for_lists_bits_or_sums_destinations_are_as_they_were() {
    if !inside("memory::without_memory_for_lists_bits_or_sums_destinations_are_as_they_were") {
        return;
    }
    let engine = Engine::get(0).unwrap();
    let tensors = Tensors::new(&DIMS);
    let doc = Buffer::vector("doc", (0..DIMS.len_k as i32).map(|i| i / 50).collect());
    let mask = Some(masks::causal() & masks::document(&doc).unwrap());
    let bias = Buffer::learned("bias", &[DIMS.len_k], vec![0.5; DIMS.len_k]).unwrap();
    let score = ScoreMod::new((expr::score() + bias.at([expr::kv()])).dynamic()).unwrap();
    let masked = Spec { mask, ..PLAIN };
    let learns = Spec { score: Some(score), ..masked.clone() };
    let of = |options: &[(&str, &str)], deterministic| {
        let mut given = CudaOptions { deterministic, ..CudaOptions::default() };
        options.iter().for_each(|(name, value)| given.kernels.set(name, value).unwrap());
        given
    };
    let portable = [("forward.family", "portable"), ("backward.family", "portable")];
    let hopper = [
        ("forward.family", "hopper"),
        ("backward.family", "hopper"),
        ("backward_dq.family", "hopper"),
        ("backward.split_gqa", "true"),
    ];
    let by_bits = [&hopper[..], &[("forward.mask_bits", "true"), ("backward.mask_bits", "true")]];
    for (what, spec, options, memories) in [
        ("portable, split keys", &masked, of(&[portable[0], ("kv_splits", "3")], false), [6, 5]),
        ("portable, in a fixed order", &learns, of(&portable, true), [3, 8]),
        ("hopper by bits", &masked, of(&by_bits.concat(), false), [4, 8]),
        ("hopper, dq in order", &masked, of(&hopper, true), [4, 8]),
        ("hopper, in a fixed order", &learns, of(&hopper, true), [4, 9]),
    ] {
        let plan = plan(spec, &DIMS, options);
        let backward = match spec.score {
            Some(_) => tensors.backward.clone(),
            None => tensors.backward_alone(),
        };
        let forward = |queue: &Queue| plan.forward_on(queue, &tensors.forward);
        let backward = |queue: &Queue| plan.backward_on(queue, &backward);
        for (pass, least) in [&forward as Pass<'_>, &backward].into_iter().zip(memories) {
            tensors.blocks.iter().for_each(|block| block.fill(0x5A).unwrap());
            launches();
            let refused = (0..).take_while(|&left| {
                let refusing = Refusing::after(left, &engine);
                let queue = engine.new_queue().unwrap().with_allocator(refusing);
                let Err(said) = pass(&queue) else { return false };
                assert!(matches!(said.gpu(), Some(GpuErrorKind::OutOfMemory { .. })), "{said}");
                let queued = launches();
                let helps = |name: &&str| HELPERS.contains(name);
                assert!(names(&queued).iter().all(helps), "{what}, {left} allocations: {queued:?}");
                for block in &tensors.blocks {
                    let mut bytes = vec![0; block.bytes()];
                    block.read(&mut bytes, Duration::from_secs(10)).unwrap();
                    assert!(
                        bytes.iter().all(|byte| *byte == 0x5A),
                        "{what}: a destination changed"
                    );
                }
                true
            });
            let refused = refused.count();
            assert!(refused >= least, "{what}: {refused} allocations, not the {least} of its sums");
            launches();
        }
    }
}
