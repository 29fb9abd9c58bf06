//! Products of random matrices against sums in f64.

use std::fmt;
use std::sync::Arc;

use foveate_gpu::blas::Matmul;
use foveate_gpu::driver::{Allocation, Event, default_timeout};
use foveate_gpu::{DeviceTensor, Engine, GpuError, Queue};
use foveate_tensor::random::Random;
use foveate_tensor::{DType, Data, Layout, Slice, indices};

use crate::gpu::checks::{Checks, Outcome, expect_refusal};

/// Dtypes of the factors and of the result, and whether factors are rounded to tf32.
const KINDS: [(DType, DType, bool); 6] = [
    (DType::F32, DType::F32, false),
    (DType::F32, DType::F32, true),
    (DType::BF16, DType::BF16, false),
    (DType::BF16, DType::F32, false),
    (DType::F16, DType::F16, false),
    (DType::F16, DType::F32, false),
];

/// Random problems of each kind.
const PROBLEMS: u64 = 60;

/// Every check of products.
pub fn run(engine: &Arc<Engine>, checks: &mut Checks) {
    for (factor, result, tf32) in KINDS {
        let by = if tf32 { " by tf32" } else { "" };
        let name = format!("{PROBLEMS} products of {factor} into {result}{by}");
        let one = |seed| match Problem::random(factor, result, tf32, seed).check(engine)? {
            Ok(()) => Ok(Ok(())),
            Err(wrong) => Ok(Err(format!("seed {seed}: {wrong}"))),
        };
        checks.say(&name, all((0..PROBLEMS).map(one)));
    }
    checks.say("a large product has the same bits twice", twice(engine));
    checks.say("wrong memory is named before a product", wrong_memory(engine));
    let name = "a product of two GPUs' memory is refused";
    match Engine::get(1) {
        Ok(other) => checks.say(name, other_device(engine, &other)),
        Err(e) => checks.skip(name, e),
    }
    match speed(engine, 8192) {
        Ok(said) => say!("{said}"),
        Err(e) => checks.skip("time of a product", e),
    }
}

/// The first that is not right.
fn all(mut outcomes: impl Iterator<Item = Outcome>) -> Outcome {
    outcomes.find(|outcome| !matches!(outcome, Ok(Ok(())))).unwrap_or(Ok(Ok(())))
}

/// Strided matrices in memory of their own; what is between them is NaN.
#[derive(Debug)]
struct Matrices {
    layout: Layout<3>,
    storage: Data,
}

impl Matrices {
    /// `[batch, rows, columns]` of normal numbers in either order, with gaps of random sizes; a
    /// factor may be one matrix for all.
    fn random(random: &mut Random, dtype: DType, shape: [usize; 3], factor: bool) -> Self {
        let [batch, rows, columns] = shape;
        let by_rows = random.below(2) == 0;
        let (inner, outer) = if by_rows { (columns, rows) } else { (rows, columns) };
        let leading = inner + random.below(3) * random.below(5);
        let shared = factor && random.below(4) == 0;
        let between = if shared { 0 } else { outer * leading + random.below(2) * random.below(9) };
        let (row, column) = if by_rows { (leading, 1) } else { (1, leading) };
        let layout = Layout::strided(shape, [between, row, column], random.below(2) * 3);
        let mut values = vec![f64::NAN; layout.end().expect("small") + random.below(3)];
        for index in indices(shape) {
            values[layout.at(index)] = random.normal();
        }
        debug_assert!(batch > 0);
        Self { layout, storage: Data::from_f64(dtype, values) }
    }

    fn get(&self, index: [usize; 3]) -> f64 {
        Slice::from(&self.storage).get_f64(self.layout.at(index))
    }
}

fn bytes(data: &Data) -> Vec<u8> {
    match Slice::from(data) {
        Slice::F16(x) => x.iter().flat_map(|x| x.to_bits().to_le_bytes()).collect(),
        Slice::BF16(x) => x.iter().flat_map(|x| x.to_bits().to_le_bytes()).collect(),
        Slice::F8E4M3(x) => x.iter().map(|x| x.to_bits()).collect(),
        Slice::F32(x) => x.iter().flat_map(|x| x.to_le_bytes()).collect(),
        Slice::F64(x) => x.iter().flat_map(|x| x.to_le_bytes()).collect(),
    }
}

/// Element `i` of numbers in device memory.
fn element(dtype: DType, bytes: &[u8], i: usize) -> f64 {
    let two = || u16::from_le_bytes([bytes[2 * i], bytes[2 * i + 1]]);
    match dtype {
        DType::F16 => half::f16::from_bits(two()).to_f64(),
        DType::BF16 => half::bf16::from_bits(two()).to_f64(),
        _ => f64::from(f32::from_le_bytes(bytes[4 * i..4 * i + 4].try_into().expect("four"))),
    }
}

/// A product of random sizes, layouts and options.
struct Problem {
    a: Matrices,
    b: Matrices,
    /// What c holds before; NaN everywhere unless it is added to.
    c: Matrices,
    /// What is added in place of what c holds.
    add: Option<Matrices>,
    bias: Option<Data>,
    alpha: f32,
    beta: f32,
    tf32: bool,
}

impl Problem {
    fn random(factor: DType, result: DType, tf32: bool, seed: u64) -> Self {
        let mut random = Random::new(seed);
        // Mostly small and dividing nothing; every tenth has a long sum.
        let mut size = || {
            let most = [9, 40, 70][random.below(3)];
            1 + random.below(most)
        };
        let (m, n, mut k) = (size(), size(), size());
        let batch = [1, 1, 2, 3][random.below(4)];
        if seed % 10 == 9 {
            k += 500;
        }
        let pick = |random: &mut Random, from: [f32; 3]| from[random.below(3)];
        let (alpha, beta) =
            (pick(&mut random, [1.0, 1.0, -0.5]), pick(&mut random, [0.0, 0.0, 1.0]));
        let a = Matrices::random(&mut random, factor, [batch, m, k], true);
        let b = Matrices::random(&mut random, factor, [batch, k, n], true);
        let mut c = Matrices::random(&mut random, result, [batch, m, n], false);
        let add = Matrices::random(&mut random, result, [batch, m, n], false);
        let in_order = |of: &Matrices| of.layout.strides[2] == 1;
        let fits = m > 1 && n > 1 && in_order(&add) == in_order(&c);
        let add = Some(add).filter(|_| fits && beta != 0.0);
        if beta == 0.0 || add.is_some() {
            let nan = (0..Slice::from(&c.storage).len()).map(|_| f64::NAN);
            c.storage = Data::from_f64(result, nan);
        }
        let by_rows = c.layout.strides[2] == 1 || n == 1;
        let bias = (by_rows && random.below(2) == 0)
            .then(|| Data::from_f64(result, (0..n).map(|_| random.normal())));
        Self { a, b, c, add, bias, alpha, beta, tf32 }
    }

    /// Element `index` of the result, and how far from it the device may be.
    fn expected(&self, [batch, i, j]: [usize; 3]) -> (f64, f64) {
        let (mut sum, mut size) = (0.0, 0.0);
        let terms = self.a.layout.shape[2];
        for l in 0..terms {
            let term = self.a.get([batch, i, l]) * self.b.get([batch, l, j]);
            (sum, size) = (sum + term, size + term.abs());
        }
        let mut value = f64::from(self.alpha) * sum;
        if self.beta != 0.0 {
            let added = self.add.as_ref().unwrap_or(&self.c);
            value += f64::from(self.beta) * added.get([batch, i, j]);
        }
        let bias = self.bias.as_ref().map_or(0.0, |bias| Slice::from(bias).get_f64(j));
        // With a bias the library may round to the result's dtype before and after adding it.
        let rounded = if bias == 0.0 { 0.0 } else { value.abs() };
        value += bias;
        // Sums in f32, which tensor cores cut off instead of rounding; factors cut to 10 bits.
        let terms = (terms + 4) as f64;
        let rounding = 2f64.powi(-23) * terms + if self.tf32 { 2f64.powi(-9) } else { 0.0 };
        let error = rounding * (size + value.abs());
        let unit = match self.c.storage.dtype() {
            DType::BF16 => 2f64.powi(-8),
            DType::F16 => 2f64.powi(-11),
            _ => 2f64.powi(-24),
        };
        (value, error + unit * (value.abs() + rounded + error) + 1e-7)
    }

    fn check(&self, engine: &Arc<Engine>) -> Outcome {
        let queue = engine.queue();
        let on_device = |m: &Matrices| queue.pool().upload(&bytes(&m.storage));
        let (a, b, c) = (on_device(&self.a)?, on_device(&self.b)?, on_device(&self.c)?);
        let add = self.add.as_ref().map(on_device).transpose()?;
        let bias = self.bias.as_ref().map(|bias| queue.pool().upload(&bytes(bias))).transpose()?;
        let tensor = |allocation: &Allocation, of: &Matrices| DeviceTensor {
            address: allocation.address(),
            dtype: of.storage.dtype(),
            layout: of.layout,
        };
        let result = self.c.storage.dtype();
        let matmul = Matmul {
            alpha: self.alpha,
            beta: self.beta,
            tf32: self.tf32,
            add: add.as_ref().zip(self.add.as_ref()).map(|(add, of)| tensor(add, of)),
            bias: bias.as_ref().map(|allocation| {
                let n = self.c.layout.shape[2];
                DeviceTensor::contiguous(allocation.address(), result, [n])
            }),
            ..Matmul::new(tensor(&a, &self.a), tensor(&b, &self.b), tensor(&c, &self.c))
        };
        engine.matmul(queue, &matmul)?;
        let before = bytes(&self.c.storage);
        let mut after = vec![0; before.len()];
        c.read(&mut after, default_timeout())?;
        let mut written = vec![false; before.len() / result.bytes()];
        for index in indices(self.c.layout.shape) {
            let at = self.c.layout.at(index);
            written[at] = true;
            let (found, (value, error)) = (element(result, &after, at), self.expected(index));
            let near = (found - value).abs() <= error;
            if !near {
                return Ok(Err(format!("{self}: {found} at {index:?}, not {value} ± {error:.1e}")));
            }
        }
        let width = result.bytes();
        let kept = |i: usize| before[i * width..][..width] == after[i * width..][..width];
        Ok(match (0..written.len()).find(|&i| !written[i] && !kept(i)) {
            None => Ok(()),
            Some(i) => Err(format!("{self}: element {i} of the memory of c is not of c")),
        })
    }
}

impl fmt::Display for Problem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (name, m) in [("a", &self.a), ("b", &self.b), ("c", &self.c)] {
            let Layout { shape, strides, offset, .. } = m.layout;
            write!(f, "{name} {shape:?} strides {strides:?} offset {offset}, ")?;
        }
        let add = if self.add.is_some() { " of another" } else { "" };
        let bias = if self.bias.is_some() { ", bias" } else { "" };
        write!(f, "alpha {}, beta {}{add}{bias}", self.alpha, self.beta)
    }
}

/// Random numbers in device memory.
fn numbers(queue: &Queue, seed: u64, dtype: DType, elems: usize) -> Result<Allocation, GpuError> {
    // One stretch again and again: the numbers of a large matrix cost more time than its product.
    let mut random = Random::new(seed);
    let some = elems.min((1 << 20) + 37);
    let some = bytes(&Data::from_f64(dtype, (0..some).map(|_| random.normal())));
    let allocation = queue.pool().take(elems * dtype.bytes())?;
    let mut at = 0;
    while at < allocation.bytes() {
        let n = some.len().min(allocation.bytes() - at);
        allocation.write_at(at, &some[..n])?;
        at += n;
    }
    Ok(allocation)
}

/// A sum that the library likes to split, into what is NaN before.
fn twice(engine: &Arc<Engine>) -> Outcome {
    let queue = engine.queue();
    let [m, n, k] = [130, 70, 5000];
    let (a, b) = (numbers(queue, 1, DType::BF16, m * k)?, numbers(queue, 2, DType::BF16, k * n)?);
    let c = queue.pool().take(4 * m * n)?;
    let matrix = |allocation: &Allocation, dtype, rows, columns| {
        DeviceTensor::contiguous(allocation.address(), dtype, [1, rows, columns])
    };
    let matmul = Matmul::new(
        matrix(&a, DType::BF16, m, k),
        matrix(&b, DType::BF16, k, n),
        matrix(&c, DType::F32, m, n),
    );
    let mut results = [vec![0; c.bytes()], vec![0; c.bytes()]];
    for result in &mut results {
        c.fill(0xFF)?;
        engine.matmul(queue, &matmul)?;
        c.read(result, default_timeout())?;
    }
    let nan = results[0].chunks_exact(4).any(|word| word == [0xFF; 4]);
    Ok(match (nan, results[0] == results[1]) {
        (true, _) => Err("c was not written everywhere".into()),
        (_, false) => Err("the bits differ".into()),
        (false, true) => Ok(()),
    })
}

/// Checks that each product is refused with the words beside it.
fn refused(engine: &Engine, queue: &Queue, asked: &[(Matmul, &str)]) -> Result<(), String> {
    let refused = |(matmul, words): &(_, &str)| expect_refusal(engine.matmul(queue, matmul), words);
    asked.iter().try_for_each(refused)
}

/// Operands and result of a product of squares.
fn squares(queue: &Queue) -> Result<(Vec<Allocation>, Matmul), GpuError> {
    let (a, b) = (numbers(queue, 1, DType::F32, 400)?, numbers(queue, 2, DType::F32, 400)?);
    let c = queue.pool().take(1600)?;
    c.fill(0xFF)?;
    let allocations = vec![a, b, c];
    let [a, b, c] = [0, 1, 2].map(|i| square(allocations[i].address()));
    Ok((allocations, Matmul::new(a, b, c)))
}

fn square(address: u64) -> DeviceTensor<3> {
    DeviceTensor::contiguous(address, DType::F32, [1, 20, 20])
}

/// Whether nothing was written to the result of [`squares`].
fn untouched(allocations: &[Allocation]) -> Outcome {
    let mut bytes = [0; 1600];
    allocations[2].read(&mut bytes, default_timeout())?;
    let untouched = bytes.iter().all(|&byte| byte == 0xFF);
    Ok(if untouched { Ok(()) } else { Err("a refused product wrote something".into()) })
}

fn wrong_memory(engine: &Arc<Engine>) -> Outcome {
    let queue = engine.queue();
    let (allocations, good) = squares(queue)?;
    let host = [0u8; 1600];
    let asked = [
        (Matmul { a: square(host.as_ptr() as u64), ..good }, "a is at"),
        (Matmul { b: square(good.b.address + (1 << 46)), ..good }, "b is at"),
        (Matmul { c: good.a, ..good }, "c overlaps a"),
        (Matmul { c: square(good.c.address + 2), ..good }, "no multiple of the 4 bytes"),
    ];
    match refused(engine, queue, &asked) {
        Ok(()) => untouched(&allocations),
        Err(wrong) => Ok(Err(wrong)),
    }
}

fn other_device(engine: &Arc<Engine>, other: &Arc<Engine>) -> Outcome {
    let ((here, good), (there, far)) = (squares(engine.queue())?, squares(other.queue())?);
    let asked = [
        (Matmul { b: far.b, ..good }, "b is on GPU 1"),
        (Matmul { c: far.c, ..good }, "c is on GPU 1"),
        (far, "a is on GPU 1"),
    ];
    let said = refused(engine, engine.queue(), &asked)
        .and_then(|()| refused(engine, other.queue(), &[(good, "the queue is of GPU 1")]));
    match said {
        Ok(()) => untouched(&here).and_then(|one| Ok(one.and(untouched(&there)?))),
        Err(wrong) => Ok(Err(wrong)),
    }
}

/// TFLOP/s of a bf16 product of `n³`, and the host's time for queueing one.
fn speed(engine: &Arc<Engine>, n: usize) -> Result<String, GpuError> {
    let queue = engine.queue();
    let factors = [1, 2].map(|seed| numbers(queue, seed, DType::BF16, n * n));
    let [a, b] = factors;
    let (a, b, c) = (a?, b?, queue.pool().take(2 * n * n)?);
    let matrix = |allocation: &Allocation| {
        DeviceTensor::contiguous(allocation.address(), DType::BF16, [1, n, n])
    };
    let matmul = Matmul::new(matrix(&a), matrix(&b), matrix(&c));
    let limit = default_timeout();
    let device = engine.device();
    let (mut ms, mut host) = (f32::INFINITY, f64::INFINITY);
    for _ in 0..8 {
        let (begin, end) = (Event::new(device)?, Event::new(device)?);
        begin.record(queue.stream())?;
        let began = std::time::Instant::now();
        for _ in 0..10 {
            engine.matmul(queue, &matmul)?;
        }
        host = host.min(began.elapsed().as_secs_f64() / 10.0);
        end.record(queue.stream())?;
        end.wait(limit, "a large product")?;
        ms = ms.min(end.ms_since(&begin)? / 10.0);
    }
    let tflops = 2.0 * (n as f64).powi(3) / f64::from(ms) / 1e9;
    Ok(format!("bf16 {n}x{n}x{n}: {tflops:.0} TFLOP/s, {:.1} us of host time", host * 1e6))
}
