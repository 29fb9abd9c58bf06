//! Blocks against f64: their kernels run on a GPU where there is one, on pinned memory of the host,
//! and else on the host (`machine.h`), the launches as a GPU would get them. What is written is NaN
//! before, and so is what lies around it; nothing around it changes.

mod attention;
mod blocks;
mod key_rows;
mod sources;
mod updates;
mod vocabulary;

use std::collections::HashMap;
use std::path::Path;
use std::process::Command;
use std::sync::{Arc, LazyLock, Mutex};
use std::time::Duration;

use foveate_gpu::access::Accesses;
use foveate_gpu::driver::Pinned;
use foveate_gpu::sync::lock;
use foveate_gpu::{DeviceArray, DeviceTensor, ElementType, Engine};
use foveate_tensor::random::Random;
use foveate_tensor::{DType, Float, Layout};
use half::{bf16, f16};
use libloading::{Library, Symbol};

use crate::launch::{Block, KernelLaunch, Kernels, Source};

const MACHINE: &str = include_str!("machine.h");

/// Memory of the machine: bytes that begin at a multiple of 64, with NaN on both sides.
struct Memory {
    store: Store,
    start: usize,
    len: usize,
}

enum Store {
    Host(Vec<u64>),
    Pinned(Pinned),
}

/// Bytes on each side.
const GUARD: usize = 256;

/// A kernel that takes longer hangs.
const LIMIT: Duration = Duration::from_secs(20);

/// The GPU, where there is one.
fn gpu() -> Option<&'static Kernels> {
    static GPU: LazyLock<Option<Kernels>> = LazyLock::new(|| Engine::get(0).ok().map(Kernels::new));
    GPU.as_ref()
}

impl Memory {
    /// `len` bytes of NaN, `shift` bytes after a multiple of 64.
    fn new(len: usize, shift: usize) -> Self {
        let all = len + shift + 2 * GUARD + 64;
        let store = match gpu() {
            None => Store::Host(vec![u64::MAX; all / 8]),
            Some(gpu) => Store::Pinned(Pinned::new(gpu.engine().device(), all).unwrap()),
        };
        let mut memory = Self { store, start: 0, len };
        memory.all_mut().fill(0xff);
        let begin = memory.all().as_ptr() as usize;
        memory.start = (begin + GUARD).next_multiple_of(64) - begin + shift;
        memory
    }

    fn all(&self) -> &[u8] {
        match &self.store {
            Store::Host(words) => bytemuck::cast_slice(words),
            Store::Pinned(pinned) => pinned.as_slice(),
        }
    }

    fn all_mut(&mut self) -> &mut [u8] {
        match &mut self.store {
            Store::Host(words) => bytemuck::cast_slice_mut(words),
            Store::Pinned(pinned) => pinned.as_mut_slice(),
        }
    }

    fn of<T: bytemuck::NoUninit>(elements: &[T]) -> Self {
        let bytes: &[u8] = bytemuck::cast_slice(elements);
        let mut memory = Self::new(bytes.len(), 0);
        memory.bytes().copy_from_slice(bytes);
        memory
    }

    fn bytes(&mut self) -> &mut [u8] {
        let (start, len) = (self.start, self.len);
        &mut self.all_mut()[start..][..len]
    }

    fn read<T: bytemuck::AnyBitPattern>(&self) -> Vec<T> {
        self.all()[self.start..][..self.len]
            .chunks_exact(size_of::<T>())
            .map(bytemuck::pod_read_unaligned)
            .collect()
    }

    fn address(&self) -> u64 {
        self.all().as_ptr() as u64 + self.start as u64
    }

    /// Panics when something around it was written.
    fn check_guards(&self, name: &str) {
        let (before, after) = (&self.all()[..self.start], &self.all()[self.start + self.len..]);
        let intact = before.iter().chain(after).all(|&byte| byte == 0xff);
        assert!(intact, "what lies around {name} was written");
    }

    fn array<'a>(&self, element: ElementType, shape: &'a [usize]) -> DeviceArray<'a> {
        DeviceArray::new(self.address(), element, shape)
    }
}

/// A matrix in memory, with some elements between its rows.
struct Matrix {
    memory: Memory,
    dtype: DType,
    shape: [usize; 2],
    stride: usize,
}

/// How matrices of a case lie.
#[derive(Clone, Copy, Debug)]
struct Placing {
    dtype: DType,
    /// Elements between rows.
    gap: usize,
    /// Elements after a multiple of 64 bytes.
    shift: usize,
}

impl Placing {
    fn dense(dtype: DType) -> Self {
        Self { dtype, gap: 0, shift: 0 }
    }

    /// NaN everywhere.
    fn empty(self, shape: [usize; 2]) -> Matrix {
        let Self { dtype, gap, shift } = self;
        let stride = shape[1] + gap;
        let len = if shape[0] == 0 { 0 } else { (shape[0] - 1) * stride + shape[1] };
        let memory = Memory::new(len * dtype.bytes(), shift * dtype.bytes());
        Matrix { memory, dtype, shape, stride }
    }

    /// `values`, rounded to the dtype.
    fn matrix(self, shape: [usize; 2], values: &[f64]) -> Matrix {
        let mut matrix = self.empty(shape);
        matrix.fill(values);
        matrix
    }

    /// Numbers in (-scale, scale).
    fn random(self, shape: [usize; 2], random: &mut Random, scale: f64) -> Matrix {
        let values: Vec<f64> =
            (0..shape[0] * shape[1]).map(|_| (random.unit() * 2.0 - 1.0) * scale).collect();
        self.matrix(shape, &values)
    }
}

impl Matrix {
    fn fill(&mut self, values: &[f64]) {
        let ([_, width], stride, dtype) = (self.shape, self.stride, self.dtype);
        let size = dtype.bytes();
        let bytes = self.memory.bytes();
        for (i, &value) in values.iter().enumerate() {
            let at = (i / width * stride + i % width) * size;
            match dtype {
                DType::F16 => {
                    bytes[at..at + 2]
                        .copy_from_slice(&<f16 as Float>::from_f64(value).to_ne_bytes());
                }
                DType::BF16 => {
                    bytes[at..at + 2]
                        .copy_from_slice(&<bf16 as Float>::from_f64(value).to_ne_bytes());
                }
                _ => bytes[at..at + 4].copy_from_slice(&(value as f32).to_ne_bytes()),
            }
        }
    }

    /// What it holds, row after row; what lies between rows must still be NaN.
    fn values(&self) -> Vec<f64> {
        self.memory.check_guards("a matrix");
        let all: Vec<f64> = match self.dtype {
            DType::F16 => {
                self.memory.read::<u16>().iter().map(|&x| f16::from_bits(x).to_f64()).collect()
            }
            DType::BF16 => {
                self.memory.read::<u16>().iter().map(|&x| bf16::from_bits(x).to_f64()).collect()
            }
            _ => self.memory.read::<f32>().iter().map(|&x| f64::from(x)).collect(),
        };
        let [rows, width] = self.shape;
        for row in 1..rows {
            let between = &all[(row - 1) * self.stride + width..row * self.stride];
            assert!(between.iter().all(|x| x.is_nan()), "what lies between rows was written");
        }
        (0..rows).flat_map(|row| all[row * self.stride..][..width].to_vec()).collect()
    }

    fn tensor(&self) -> DeviceTensor<2> {
        let [rows, _] = self.shape;
        let strides = [if rows > 1 { self.stride } else { self.shape[1] }, 1];
        DeviceTensor {
            address: self.memory.address(),
            dtype: self.dtype,
            layout: Layout { strides, ..Layout::contiguous(self.shape) },
        }
    }

    /// The one row of it.
    fn vector(&self) -> DeviceTensor<1> {
        assert_eq!(self.shape[0], 1);
        DeviceTensor::contiguous(self.memory.address(), self.dtype, [self.shape[1]])
    }
}

/// Runs a block, on the GPU or on the host; false, and a line that says so, with neither a GPU nor a
/// compiler.
fn run(block: &impl Block) -> bool {
    let mut accesses = Accesses::default();
    let launches = block.launches(&mut accesses).unwrap();
    accesses.check_apart(&Mutex::default()).unwrap();
    let Some(gpu) = gpu() else { return launches.iter().all(launch) };
    let queue = gpu.engine().queue();
    for launch in &launches {
        // SAFETY: operands are memory of the test, pinned, and the wait below ends their use.
        unsafe { gpu.launch(queue, launch) }.unwrap();
    }
    queue.stream().wait(LIMIT, launches[0].entry).unwrap();
    true
}

fn refusal(block: &impl Block) -> String {
    block.launches(&mut Accesses::default()).unwrap_err().to_string()
}

type Start = unsafe extern "C" fn(*const u32, i32, *const u8, u64) -> i32;

fn launch(launch: &KernelLaunch) -> bool {
    let Some(library) = library(&launch.source, launch.entry) else { return false };
    // One kernel at a time: a machine's state is the library's.
    let library = lock(&library);
    // SAFETY: the symbol has this type (`library`), and operands are memory of the test's.
    let status = unsafe {
        let start: Symbol<'_, Start> = library.get(b"fv_start").unwrap();
        let bytes = &launch.parameters;
        start(
            launch.grid.as_ptr(),
            launch.source.threads as i32,
            bytes.as_ptr(),
            bytes.len() as u64,
        )
    };
    assert_eq!(status, 0, "{}", launch.entry);
    true
}

type Libraries = Mutex<HashMap<(Source, &'static str), Arc<Mutex<Library>>>>;

/// A kernel compiled for the host, once.
fn library(source: &Source, entry: &'static str) -> Option<Arc<Mutex<Library>>> {
    static LIBRARIES: LazyLock<Libraries> = LazyLock::new(Libraries::default);
    let libraries = &*LIBRARIES;
    let key = (source.clone(), entry);
    if let Some(library) = lock(libraries).get(&key) {
        return Some(library.clone());
    }
    let start = format!(
        "extern \"C\" int fv_start(const u32* grid, int threads, const void* parameters, u64 bytes) \
         {{ return launch({entry}, grid, threads, parameters, bytes); }}\n"
    );
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("kernel.so");
    if !compiled(&(source.text_on(MACHINE) + &start), &file) {
        return None;
    }
    // SAFETY: loading runs no code of it but constructors of empty containers.
    let library = unsafe { Library::new(&file) }.unwrap();
    let library = Arc::new(Mutex::new(library));
    Some(lock(libraries).entry(key).or_insert(library).clone())
}

/// Compiles C++ to a library; false, and a line that says so, without a compiler.
fn compiled(text: &str, file: &Path) -> bool {
    let code = file.with_extension("cpp");
    std::fs::write(&code, text).unwrap();
    let compiled = Command::new("c++")
        .args(["-std=c++17", "-O1", "-ffp-contract=off", "-fno-strict-aliasing", "-w"])
        .args(["-shared", "-fPIC", "-o"])
        .args([file, &code])
        .output();
    let said = match compiled {
        Err(error) => {
            println!("skipped: no C++ compiler `c++`: {error}");
            return false;
        }
        Ok(output) => output,
    };
    let message = String::from_utf8_lossy(&said.stderr);
    assert!(said.status.success(), "{}", message.chars().take(3000).collect::<String>());
    true
}

/// Panics where values are further from what is expected than `tolerance` of the largest.
fn close(name: &str, got: &[f64], expected: &[f64], tolerance: f64) {
    assert_eq!(got.len(), expected.len(), "{name}");
    let largest = expected.iter().fold(1e-30f64, |most, x| most.max(x.abs()));
    for (i, (got, expected)) in got.iter().zip(expected).enumerate() {
        let off = (got - expected).abs();
        assert!(off <= tolerance * largest, "{name}[{i}] is {got}, not {expected}");
    }
}

/// Half a unit in the last place of a dtype, beside 1, and the error of f32 sums.
fn tolerance(dtype: DType) -> f64 {
    2e-6 + match dtype {
        DType::F16 => 2f64.powi(-11),
        DType::BF16 => 2f64.powi(-8),
        _ => 0.0,
    }
}

/// What every dtype is tried with: whole vectors, a width that none divides, rows apart, a start
/// that no vector can be read from.
fn placings() -> Vec<(Placing, usize)> {
    let mut all = Vec::new();
    for dtype in [DType::F32, DType::BF16, DType::F16] {
        all.push((Placing::dense(dtype), 96));
        all.push((Placing { dtype, gap: 3, shift: 1 }, 41));
    }
    all.push((Placing { dtype: DType::BF16, gap: 8, shift: 0 }, 264));
    all.push((Placing { dtype: DType::BF16, gap: 0, shift: 1 }, 64));
    // Several warps a row.
    all.push((Placing::dense(DType::F32), 1032));
    all
}
