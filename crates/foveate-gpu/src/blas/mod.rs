//! Matrix products of device tensors, by cuBLASLt.
//!
//! ```no_run
//! # use foveate_gpu::{GpuError, DeviceTensor, Engine, blas::Matmul};
//! # use foveate_tensor::DType;
//! # fn linear(x: u64, weight: u64, y: u64, [tokens, inputs, outputs]: [usize; 3]) -> Result<(), GpuError> {
//! let engine = Engine::get(0)?;
//! let matrix = |address, rows, columns| {
//!     DeviceTensor::contiguous(address, DType::BF16, [1, rows, columns])
//! };
//! // y [tokens, outputs] = x [tokens, inputs] · weightᵀ, weight [outputs, inputs].
//! let (x, weight) = (matrix(x, tokens, inputs), matrix(weight, outputs, inputs));
//! let y = matrix(y, tokens, outputs);
//! engine.matmul(engine.queue(), &Matmul::new(x, weight.transposed(), y))?;
//! # Ok(())
//! # }
//! ```
//!
//! Factors are f16, bf16 or f32; the result has their dtype, or is f32, as gradients of weights
//! are that are summed over steps. Every sum is made in f32: shares of a summed axis that the
//! library splits are added in f32 too, so 16-bit results are rounded once; with a bias some of its
//! kernels round before they add it and again after (seen with cuBLASLt 13.1). f32 factors are
//! multiplied as they are; [`Matmul::tf32`] lets the tensor cores round them to 10 bits first.
//!
//! A transpose is a view ([`DeviceTensor::transposed`]), a shared matrix one of batch stride 0.
//! Where the library finds a kernel for a problem it is kept, so the same call has the same bits. Which
//! one it is may be found by timing ([`Engine::tune_products`]). None adds shares of a sum in an order that
//! varies: the library does that only where parts are added in place, which is not allowed here.
//!
//! cuBLASLt is loaded at run time. Not through bindings of a crate: those look for it by its bare
//! name and so take another copy than the one that was found, and panic where a symbol is missing.

mod choices;
mod fastest;
mod matrix;
mod prepared;
mod sys;

use std::collections::{BTreeMap, HashMap};
use std::fmt;
use std::ptr;
use std::sync::{Arc, Mutex};

use foveate_tensor::DType;

use crate::access::Accesses;
use crate::cache::Cache;
use crate::driver::sys::Handle;
use crate::driver::{Device, Operation, operations};
use crate::engine::Engine;
use crate::error::GpuError;
use crate::library::Library;
use crate::queue::Queue;
use crate::sync::lock;
use crate::tensor::DeviceTensor;
use choices::{CANDIDATES, Choices};
use matrix::{Matrix, Order};
use prepared::{Key, Prepared};
use sys::Functions;

/// `c = alpha · a · b + beta · c + bias`, for each entry of a batch; with `add` in place of the c that
/// beta multiplies.
#[derive(Clone, Copy, Debug)]
pub struct Matmul {
    /// `[batch, m, k]`, f16, bf16 or f32.
    pub a: DeviceTensor<3>,
    /// `[batch, k, n]`, in the dtype of a.
    pub b: DeviceTensor<3>,
    /// `[batch, m, n]`, in the dtype of a or f32. Not read when `beta` is 0.
    pub c: DeviceTensor<3>,
    /// A factor of the product.
    pub alpha: f32,
    /// A factor of what is in c, or of `add`.
    pub beta: f32,
    /// What is added from elsewhere: as c, in order, shape and dtype. c is not read then.
    pub add: Option<DeviceTensor<3>>,
    /// Added to every row of a row-major c: `[n]`, side by side, in the dtype of c.
    pub bias: Option<DeviceTensor<1>>,
    /// Round f32 factors to tf32 (10 bits of mantissa), for several times the speed.
    pub tf32: bool,
}

impl Matmul {
    /// `c = a · b`.
    pub fn new(a: DeviceTensor<3>, b: DeviceTensor<3>, c: DeviceTensor<3>) -> Self {
        Self { a, b, c, alpha: 1.0, beta: 0.0, add: None, bias: None, tf32: false }
    }

    /// What decides which kernel runs, once everything fits together.
    fn key(&self) -> Result<Key, GpuError> {
        self.check_dtypes()?;
        let [batch, m, k] = self.a.layout.shape;
        let [b_batch, b_rows, n] = self.b.layout.shape;
        let c = self.c.layout.shape;
        if b_batch != batch || b_rows != k || c != [batch, m, n] {
            return Err(GpuError::argument(format!(
                "a is {:?}, b {:?} and c {c:?}; they must be [batch, m, k], [batch, k, n] and \
                 [batch, m, n]",
                self.a.layout.shape, self.b.layout.shape
            )));
        }
        if k == 0 {
            let reason = "a has no columns, so there is nothing to sum; fill c with zeros instead";
            return Err(GpuError::argument(reason));
        }
        let result = Matrix::of("c", &self.c)?;
        if let Some(bias) = &self.bias {
            bias.check_side_by_side("bias", n, self.c.dtype)?;
            if result.order == Order::Columns {
                let reason = "a bias is added along rows, but c is column-major; make its rows \
                              the ones with stride 1";
                return Err(GpuError::argument(reason));
            }
        }
        let added = match &self.add {
            None => result,
            Some(add) => {
                add.check_shape("add", c)?;
                add.check_dtype("add", self.c.dtype)?;
                let added = Matrix::of("add", add)?;
                if added.order != result.order {
                    let reason = "c is row-major and add column-major, or the other way round; \
                                  copy add into the order of c";
                    return Err(GpuError::argument(reason));
                }
                added
            }
        };
        let factors = [Matrix::of("a", &self.a)?, Matrix::of("b", &self.b)?];
        // A row-major result is the library's `cᵀ = bᵀ · aᵀ`.
        let swapped = result.order == Order::Rows;
        let [first, second] = if swapped { [factors[1], factors[0]] } else { factors };
        let ([a, b], c) = (self.addresses(swapped), self.c.start());
        Ok(Key {
            factor: self.a.dtype,
            result: self.c.dtype,
            batch,
            matrices: [first, second, added, result],
            alignments: [a, b, self.added(), c, self.bias.map_or(0, |b| b.start())]
                .map(prepared::alignment),
            bias: self.bias.is_some(),
            tf32: self.tf32 && self.a.dtype == DType::F32,
        })
    }

    fn check_dtypes(&self) -> Result<(), GpuError> {
        let (a, b, c) = (self.a.dtype, self.b.dtype, self.c.dtype);
        if sys::data_type(a).is_some() && a == b && (c == a || c == DType::F32) {
            return Ok(());
        }
        Err(GpuError::argument(format!(
            "a is {a}, b {b} and c {c}; factors are both f16, bf16 or f32, and c is of their dtype \
             or f32"
        )))
    }

    /// A multiply-add being two.
    fn flops(&self) -> f64 {
        let ([batch, m, k], n) = (self.a.layout.shape, self.b.layout.shape[2]);
        2.0 * [batch, m, n, k].map(|n| n as f64).iter().product::<f64>()
    }

    /// Of the library's first and second factor.
    fn addresses(&self, swapped: bool) -> [u64; 2] {
        let [a, b] = [self.a.start(), self.b.start()];
        if swapped { [b, a] } else { [a, b] }
    }

    /// Address of what beta multiplies.
    fn added(&self) -> u64 {
        self.add.map_or(self.c.start(), |add| add.start())
    }

    fn accesses(&self) -> Result<Accesses, GpuError> {
        let mut accesses = Accesses::default();
        accesses.read("a", &self.a)?;
        accesses.read("b", &self.b)?;
        self.bias.iter().try_for_each(|bias| accesses.read("bias", bias))?;
        self.add.iter().try_for_each(|add| accesses.read("add", add))?;
        accesses.write("c", &self.c)?;
        Ok(accesses)
    }
}

impl fmt::Display for Matmul {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let ([batch, m, k], n) = (self.a.layout.shape, self.b.layout.shape[2]);
        match batch {
            1 => f.write_str("a product")?,
            _ => write!(f, "{batch} products")?,
        }
        write!(f, " [{m}, {k}] · [{k}, {n}] of {}", self.a.dtype)?;
        if self.c.dtype == self.a.dtype { Ok(()) } else { write!(f, " into {}", self.c.dtype) }
    }
}

impl Engine {
    /// Queues a product on `queue`. Everything is checked before anything is queued, as in a
    /// launch of attention; nothing waits.
    ///
    /// # Errors
    /// When shapes, dtypes or layouts do not fit, memory is not this device's or overlaps; when
    /// cuBLASLt is missing, too old or too new for the driver, has no kernel for the problem, or
    /// refuses.
    pub fn matmul(&self, queue: &Queue, matmul: &Matmul) -> Result<(), GpuError> {
        let key = matmul.key()?;
        let accesses = matmul.accesses()?;
        accesses.check_apart(self.checked_apart())?;
        self.check_queue(queue)?;
        accesses.check_device(self, queue)?;
        if matmul.c.layout.elems() == 0 {
            return Ok(());
        }
        let blas = self.blas();
        blas.as_ref().as_ref().map_err(Clone::clone)?.run(queue, key, matmul)
    }

    /// From here on, has the library's best kernels run when a product of `least_flops` operations or
    /// more is first queued, a few times each, and takes the fastest of them for all that are like it;
    /// the caller waits for that. Products that add to c in place cannot be repeated, and take the
    /// library's first where nothing like them was queued before.
    ///
    /// A choice is kept in the folder of compiled kernels, for other processes. `given` are choices of
    /// [`Engine::product_choices`] that come before these and are not timed; one that the library does
    /// not offer is chosen anew.
    pub fn tune_products(&self, least_flops: f64, given: &BTreeMap<String, usize>) {
        // Without the library, the first product says so.
        if let Ok(blas) = self.blas().as_ref() {
            lock(&blas.choices).tune(least_flops, given);
        }
    }

    /// Which of the library's kernels compute products that were tuned, by number in the library's
    /// order. A name has all that decides what the library offers: GPU, driver, version and problem.
    pub fn product_choices(&self) -> BTreeMap<String, usize> {
        self.blas()
            .as_ref()
            .as_ref()
            .map_or_else(|_| BTreeMap::new(), |blas| lock(&blas.choices).used().clone())
    }

    fn blas(&self) -> Arc<Result<Blas, GpuError>> {
        self.keep(|| Blas::new(self.device()))
    }
}

/// Version of the cuBLASLt of this machine: major, minor, patch.
///
/// # Errors
/// When it is missing, lacks a function or is too old.
pub fn version() -> Result<[u32; 3], GpuError> {
    Ok(Functions::get()?.version())
}

/// cuBLASLt on one device, and what it was asked before.
struct Blas {
    functions: &'static Functions,
    handle: Handle,
    prepared: Mutex<HashMap<Key, Prepared>>,
    choices: Mutex<Choices>,
}

// SAFETY: the library lets threads share a handle; descriptors are behind the mutex.
unsafe impl Send for Blas {}
// SAFETY: as above.
unsafe impl Sync for Blas {}

/// Problems that are remembered; a training step has a few dozen.
const MOST_PREPARED: usize = 1 << 12;

impl Blas {
    /// The library on `device`.
    ///
    /// # Errors
    /// When it is missing, too old, or made for a newer driver.
    fn new(device: &Device) -> Result<Self, GpuError> {
        let functions = Functions::get()?;
        let [major, minor, patch] = functions.version();
        let info = device.info();
        let driver = info.driver;
        Library::CublasLt.check_driver((major, minor), driver)?;
        let _current = device.current()?;
        let mut handle = ptr::null_mut();
        // SAFETY: `handle` is valid for a write, and the device's context is current.
        let code = unsafe { (functions.create)(&mut handle) };
        functions.check(code, || "starting cuBLASLt".into())?;
        let identity = format!(
            "{}, {} SMs, CUDA {}.{}, cuBLASLt {major}.{minor}.{patch}",
            info.name, info.sms, driver.0, driver.1
        );
        let folder = Cache::get().folder().map(Into::into);
        let choices = Mutex::new(Choices::new(identity, folder));
        Ok(Self { functions, handle, prepared: Mutex::default(), choices })
    }

    /// Queues what `key` describes and [`Engine::matmul`] has checked.
    fn run(&self, queue: &Queue, key: Key, matmul: &Matmul) -> Result<(), GpuError> {
        let _current = queue.stream().device().current()?;
        let mut prepared = lock(&self.prepared);
        if prepared.len() >= MOST_PREPARED {
            prepared.clear();
        }
        let ready = match prepared.entry(key) {
            std::collections::hash_map::Entry::Occupied(found) => found.into_mut(),
            std::collections::hash_map::Entry::Vacant(free) => {
                free.insert(self.prepare(queue, &key, matmul)?)
            }
        };
        // The pool gives the memory out again for work of this queue only, which comes later.
        let workspace = queue.pool().take(ready.workspace_bytes())?;
        let swapped = key.matrices[3].order == Order::Rows;
        operations::note(|| {
            let [a, b] = matmul.addresses(swapped);
            let bias = matmul.bias.map_or(0, |bias| bias.start());
            let places = [a, b, matmul.added(), matmul.c.start(), bias, workspace.address()];
            let scale = [matmul.alpha, matmul.beta].map(|x| x.to_bits().into());
            let name = format!("{matmul} ({key})");
            Operation::of(&name, [&places[..], &scale, &[ready.chosen() as u64]].concat())
        });
        // SAFETY: `key` is that of `matmul`, whose tensors lie in memory of this device, apart
        // where written (`Engine::matmul`); the workspace has the bytes that were asked for and
        // its pool is that of the queue.
        unsafe { ready.queue(self.handle, queue, matmul, matmul.addresses(swapped), &workspace) }
    }

    /// Descriptors and kernel of a problem that comes for the first time.
    fn prepare(&self, queue: &Queue, key: &Key, matmul: &Matmul) -> Result<Prepared, GpuError> {
        let new = |most| Prepared::new(self.functions, self.handle, key, matmul, most);
        let mut choices = lock(&self.choices);
        let Some(name) = choices.name(key, matmul.flops()) else { return new(1) };
        let mut made = new(CANDIDATES)?;
        let kernels = made.kernels();
        let find = || fastest::fastest(self.handle, queue, key, matmul, &mut made);
        let number = choices.take(name, kernels, find)?;
        made.choose(number);
        Ok(made)
    }
}

#[cfg(test)]
mod tests {
    use foveate_tensor::Layout;

    use super::*;

    fn tensor<const N: usize>(address: u64, dtype: DType, shape: [usize; N]) -> DeviceTensor<N> {
        DeviceTensor::contiguous(address, dtype, shape)
    }

    fn product() -> Matmul {
        Matmul::new(
            tensor(0x1_0000, DType::BF16, [2, 3, 5]),
            tensor(0x2_0000, DType::BF16, [2, 5, 7]),
            tensor(0x3_0000, DType::BF16, [2, 3, 7]),
        )
    }

    fn said(matmul: &Matmul) -> String {
        let checked = matmul.key().and_then(|_| matmul.accesses()?.check_apart(&Mutex::default()));
        checked.unwrap_err().to_string()
    }

    #[test]
    fn shapes_dtypes_and_overlaps_that_do_not_fit_are_named() {
        let good = product();
        good.key().unwrap();
        let b = tensor(0x2_0000, DType::BF16, [2, 6, 7]);
        assert_eq!(
            said(&Matmul { b, ..good }),
            "a is [2, 3, 5], b [2, 6, 7] and c [2, 3, 7]; they must be [batch, m, k], \
             [batch, k, n] and [batch, m, n]"
        );
        let b = DeviceTensor { dtype: DType::F32, ..good.b };
        assert!(said(&Matmul { b, ..good }).starts_with("a is bf16, b f32 and c bf16; factors"));
        let c = DeviceTensor { dtype: DType::F16, ..good.c };
        assert!(said(&Matmul { c, ..good }).contains("c f16"));
        Matmul { c: DeviceTensor { dtype: DType::F32, ..good.c }, ..good }.key().unwrap();
        let c = DeviceTensor { address: good.a.address + 8, ..good.c };
        assert_eq!(said(&Matmul { c, ..good }), "c overlaps a; give it memory of its own");
        let c = DeviceTensor { address: good.c.address + 1, ..good.c };
        assert!(said(&Matmul { c, ..good }).starts_with("c starts at 0x30001, which is no"));
        let none = [good.a, good.b].map(|t| DeviceTensor { dtype: DType::F64, ..t });
        assert!(said(&Matmul { a: none[0], b: none[1], ..good }).contains("a is f64"));
        let empty = Matmul {
            a: tensor(0x1_0000, DType::BF16, [2, 3, 0]),
            b: tensor(0x2_0000, DType::BF16, [2, 0, 7]),
            ..good
        };
        assert!(said(&empty).starts_with("a has no columns"));
    }

    #[test]
    fn a_result_that_writes_an_element_twice_and_layouts_of_no_matrix_are_refused() {
        let good = product();
        let layout = Layout::strided([2, 3, 7], [0, 7, 1], 0);
        let c = DeviceTensor { layout, ..good.c };
        assert!(said(&Matmul { c, ..good }).contains("writes an element twice"));
        let layout = Layout::strided([2, 3, 5], [60, 10, 2], 0);
        let a = DeviceTensor { layout, ..good.a };
        assert!(said(&Matmul { a, ..good }).starts_with("a is 3 x 5 with strides 10 and 2;"));
        let mut layout = good.b.layout;
        layout.groups = Some(foveate_tensor::GroupedAxis { axis: 2, inner: 2, outer: 9, first: 0 });
        let b = DeviceTensor { layout, ..good.b };
        assert!(said(&Matmul { b, ..good }).starts_with("b has an axis in groups"));
    }

    #[test]
    fn a_bias_is_of_the_length_and_dtype_of_a_row_of_a_row_major_result() {
        let good = product();
        let bias = tensor(0x4_0000, DType::BF16, [7]);
        let with = |bias| Matmul { bias: Some(bias), ..good };
        with(bias).key().unwrap();
        let long = with(tensor(0x4_0000, DType::BF16, [8]));
        assert_eq!(said(&long), "bias has shape [8]; it must be [7]");
        let wide = with(tensor(0x4_0000, DType::F32, [7]));
        assert_eq!(said(&wide), "bias is f32; it must be bf16");
        let apart = DeviceTensor { layout: Layout::strided([7], [2], 0), ..bias };
        assert_eq!(said(&with(apart)), "bias has stride 2; it must be 1");
        let c = tensor(0x3_0000, DType::BF16, [2, 7, 3]).transposed();
        let columns = Matmul { c, ..with(bias) };
        assert!(said(&columns).starts_with("a bias is added along rows, but c is column-major"));
    }

    #[test]
    fn what_is_added_is_as_the_result_and_apart_from_it() {
        let good = product();
        let add = tensor(0x5_0000, DType::BF16, [2, 3, 7]);
        let with = |add| Matmul { add: Some(add), beta: 1.0, ..good };
        with(add).key().unwrap();
        // Rows of it may be further apart.
        let layout = Layout::strided([2, 3, 7], [90, 9, 1], 0);
        let key = with(DeviceTensor { layout, ..add }).key().unwrap();
        assert_eq!(key.matrices.map(|m| m.leading)[2..], [9, 7]);
        let long = tensor(0x5_0000, DType::BF16, [2, 4, 7]);
        assert_eq!(said(&with(long)), "add has shape [2, 4, 7]; it must be [2, 3, 7]");
        let wide = tensor(0x5_0000, DType::F32, [2, 3, 7]);
        assert_eq!(said(&with(wide)), "add is f32; it must be bf16");
        let columns = tensor(0x5_0000, DType::BF16, [2, 7, 3]).transposed();
        assert!(said(&with(columns)).starts_with("c is row-major and add column-major"));
        assert_eq!(said(&with(good.c)), "c overlaps add; give it memory of its own");
    }

    #[test]
    fn factors_in_another_order_than_the_result_are_transposed() {
        let good = product();
        let key = good.key().unwrap();
        let orders = |key: &Key| key.matrices.map(|m| m.order);
        assert_eq!(orders(&key), [Order::Rows; 4]);
        assert_eq!(key.matrices.map(|m| (m.rows, m.columns)), [(7, 5), (5, 3), (7, 3), (7, 3)]);
        let b = tensor(0x2_0000, DType::BF16, [2, 7, 5]).transposed();
        let key = Matmul { b, ..good }.key().unwrap();
        assert_eq!(orders(&key), [Order::Columns, Order::Rows, Order::Rows, Order::Rows]);
        let c = tensor(0x3_0000, DType::BF16, [2, 7, 3]).transposed();
        let key = Matmul { c, ..good }.key().unwrap();
        assert_eq!(orders(&key), [Order::Rows, Order::Rows, Order::Columns, Order::Columns]);
        assert_eq!(key.matrices.map(|m| (m.rows, m.columns)), [(5, 3), (7, 5), (3, 7), (3, 7)]);
    }
}
