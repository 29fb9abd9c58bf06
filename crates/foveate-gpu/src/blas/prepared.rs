//! A product that cuBLASLt has been asked about: its descriptors, and the kernels it has for it.

use std::ffi::{c_int, c_void};
use std::fmt;
use std::ptr;

use foveate_tensor::DType;

use super::Matmul;
use super::matrix::Matrix;
use super::sys::{self, Functions, Heuristic};
use crate::driver::Allocation;
use crate::driver::sys::Handle;
use crate::error::GpuError;
use crate::queue::Queue;

/// Memory that a kernel may ask for: what NVIDIA advises for Hopper; older kernels ask for less.
const MOST_WORKSPACE_BYTES: usize = 32 << 20;

/// Alignments beyond this one open no other kernels.
const MOST_ALIGNMENT: u64 = 256;

/// What decides which kernel runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Key {
    /// Of both factors.
    pub factor: DType,
    /// Of the result.
    pub result: DType,
    /// Number of products.
    pub batch: usize,
    /// The library's first and second factor, what is added, and the result.
    pub matrices: [Matrix; 4],
    /// Bytes that divide the addresses of these and of the bias.
    pub alignments: [u32; 5],
    pub bias: bool,
    pub tf32: bool,
}

impl fmt::Display for Key {
    /// One line, without a space at either end.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { factor, result, batch, matrices, alignments, bias, tf32 } = self;
        write!(f, "{factor} to {result}, {batch} times")?;
        for Matrix { order, rows, columns, leading, batch_stride } in matrices {
            write!(f, ", {order:?} {rows} x {columns} by {leading} and {batch_stride}")?;
        }
        write!(f, ", aligned to {alignments:?}, bias {bias}, tf32 {tf32}")
    }
}

/// Bytes that divide an address, as far as kernels differ by them.
pub fn alignment(address: u64) -> u32 {
    1 << (address | MOST_ALIGNMENT).trailing_zeros()
}

/// Descriptors and kernels of one problem.
pub struct Prepared {
    functions: &'static Functions,
    product: Descriptor,
    matrices: [Descriptor; 4],
    /// In the library's order, of which the first is its best estimate; one or more.
    kernels: Vec<Heuristic>,
    /// Which of them runs.
    chosen: usize,
}

impl Prepared {
    /// Asks the library for its `most` best kernels, of which the first runs; `matmul` is a problem of
    /// `key`.
    ///
    /// # Errors
    /// When it has none, or refuses.
    pub fn new(
        functions: &'static Functions,
        handle: Handle,
        key: &Key,
        matmul: &Matmul,
        most: usize,
    ) -> Result<Self, GpuError> {
        let asking = || format!("asking for a kernel for {matmul}");
        let types = [key.factor, key.factor, key.result, key.result];
        let [a, b, c, d] =
            std::array::from_fn(|i| matrix(functions, &key.matrices[i], types[i], key));
        let matrices = [a?, b?, c?, d?];
        let product = product(functions, key)?;
        if let Some(bias) = &matmul.bias {
            product.set(sys::product::BIAS, &bias.start())?;
        }
        let wish = preference(functions, key)?;
        let (mut kernels, mut found) = (vec![Heuristic::default(); most], 0);
        // SAFETY: all descriptors are alive; there is room for as many results as are asked for.
        let code = unsafe {
            (functions.heuristic)(
                handle,
                product.handle,
                matrices[0].handle,
                matrices[1].handle,
                matrices[2].handle,
                matrices[3].handle,
                wish.handle,
                most as c_int,
                kernels.as_mut_ptr(),
                &mut found,
            )
        };
        functions.check(code, asking)?;
        kernels.truncate(usize::try_from(found).unwrap_or(0));
        let status = kernels.first().map_or(sys::NOT_SUPPORTED, |kernel| kernel.status);
        functions.check(status, asking)?;
        kernels.retain(|kernel| kernel.status == 0);
        Ok(Self { functions, product, matrices, kernels, chosen: 0 })
    }

    /// Kernels there are.
    pub fn kernels(&self) -> usize {
        self.kernels.len()
    }

    /// Has kernel `number` run, which is less than [`Self::kernels`].
    pub fn choose(&mut self, number: usize) {
        self.chosen = number;
    }

    /// The number of the kernel that runs.
    pub fn chosen(&self) -> usize {
        self.chosen
    }

    /// Memory that the kernel asks for.
    pub fn workspace_bytes(&self) -> usize {
        self.kernels[self.chosen].workspace_bytes
    }

    /// Queues the product.
    ///
    /// # Errors
    /// Those of the library.
    ///
    /// # Safety
    /// `matmul` is a problem of the key this was made for, with the library's factors at
    /// `factors`; its tensors, and `workspace` of [`Self::workspace_bytes`], lie in memory of the
    /// queue's device that stays allocated until the work is done, c apart from the others. The
    /// device's context is current.
    pub unsafe fn queue(
        &mut self,
        handle: Handle,
        queue: &Queue,
        matmul: &Matmul,
        factors: [u64; 2],
        workspace: &Allocation,
    ) -> Result<(), GpuError> {
        if let Some(bias) = &matmul.bias {
            self.product.set(sys::product::BIAS, &bias.start())?;
        }
        let scale = |x: &f32| ptr::from_ref(x).cast::<c_void>();
        let [a, b] = factors.map(|address| address as *const c_void);
        let added = matmul.added() as *const c_void;
        let result = matmul.c.start() as *mut c_void;
        let [of_a, of_b, of_added, of_result] = self.matrices.each_ref().map(|m| m.handle);
        // SAFETY: the descriptors are alive and describe the tensors at these addresses, which the
        // caller vouches for; alpha and beta are f32, as the descriptor says, and read at once.
        let code = unsafe {
            (self.functions.matmul)(
                handle,
                self.product.handle,
                scale(&matmul.alpha),
                a,
                of_a,
                b,
                of_b,
                scale(&matmul.beta),
                added,
                of_added,
                result,
                of_result,
                &self.kernels[self.chosen].algorithm,
                workspace.address() as *mut c_void,
                workspace.bytes(),
                queue.stream().handle(),
            )
        };
        self.functions.check(code, || format!("queueing {matmul}"))
    }
}

/// The operation: which factors are transposed, what is added to the product.
fn product(functions: &'static Functions, key: &Key) -> Result<Descriptor, GpuError> {
    let compute = if key.tf32 { sys::compute::F32_BY_TF32 } else { sys::compute::F32 };
    let product = Descriptor::new(functions.product_set, functions.product_destroy, |handle| {
        // SAFETY: `handle` is valid for a write.
        unsafe { (functions.product_create)(handle, compute, sys::F32) }
    })?;
    let result = key.matrices[3].order;
    let transposed = |i: usize| i32::from(key.matrices[i].order != result);
    product.set(sys::product::TRANSPOSE_A, &transposed(0))?;
    product.set(sys::product::TRANSPOSE_B, &transposed(1))?;
    if key.bias {
        product.set(sys::product::EPILOGUE, &sys::EPILOGUE_BIAS)?;
        product.set(sys::product::BIAS_TYPE, &type_of(key.result))?;
    }
    Ok(product)
}

/// One of the matrices.
fn matrix(
    functions: &'static Functions,
    matrix: &Matrix,
    dtype: DType,
    key: &Key,
) -> Result<Descriptor, GpuError> {
    let Matrix { rows, columns, leading, .. } = *matrix;
    let made = Descriptor::new(functions.layout_set, functions.layout_destroy, |handle| {
        let (rows, columns) = (rows as u64, columns as u64);
        // SAFETY: `handle` is valid for a write.
        unsafe { (functions.layout_create)(handle, type_of(dtype), rows, columns, leading as i64) }
    })?;
    let batch = i32::try_from(key.batch)
        .map_err(|_| GpuError::argument(format!("a batch of {} is too large", key.batch)))?;
    made.set(sys::layout::BATCH_COUNT, &batch)?;
    made.set(sys::layout::BATCH_STRIDE, &(matrix.batch_stride as i64))?;
    Ok(made)
}

/// What kernels are wished for: any whose sums are made in f32.
fn preference(functions: &'static Functions, key: &Key) -> Result<Descriptor, GpuError> {
    let wish = Descriptor::new(functions.preference_set, functions.preference_destroy, |handle| {
        // SAFETY: `handle` is valid for a write.
        unsafe { (functions.preference_create)(handle) }
    })?;
    wish.set(sys::preference::MOST_WORKSPACE_BYTES, &MOST_WORKSPACE_BYTES)?;
    wish.set(sys::preference::REDUCTION_SCHEMES, &sys::REDUCE_IN_COMPUTE_TYPE)?;
    let [a, b, c, d, _] = key.alignments;
    for (attribute, bytes) in sys::preference::ALIGNMENTS.into_iter().zip([a, b, c, d]) {
        wish.set(attribute, &bytes)?;
    }
    Ok(wish)
}

fn type_of(dtype: DType) -> i32 {
    sys::data_type(dtype).expect("checked by `Matmul::key`")
}

/// One of the library's descriptors, destroyed with the value.
struct Descriptor {
    handle: Handle,
    set: unsafe extern "C" fn(Handle, c_int, *const c_void, usize) -> sys::Status,
    destroy: unsafe extern "C" fn(Handle) -> sys::Status,
}

impl Descriptor {
    fn new(
        set: unsafe extern "C" fn(Handle, c_int, *const c_void, usize) -> sys::Status,
        destroy: unsafe extern "C" fn(Handle) -> sys::Status,
        create: impl FnOnce(*mut Handle) -> sys::Status,
    ) -> Result<Self, GpuError> {
        let mut handle = ptr::null_mut();
        let code = create(&mut handle);
        Functions::get()?.check(code, || "describing a product".into())?;
        Ok(Self { handle, set, destroy })
    }

    /// Sets an attribute to a number of the attribute's own type.
    fn set<T: bytemuck::NoUninit>(&self, attribute: c_int, value: &T) -> Result<(), GpuError> {
        let value = bytemuck::bytes_of(value);
        // SAFETY: the descriptor is alive; the library copies so many bytes, and refuses a number
        // of another size than the attribute's.
        let code =
            unsafe { (self.set)(self.handle, attribute, value.as_ptr().cast(), value.len()) };
        Functions::get()?.check(code, || format!("describing a product (attribute {attribute})"))
    }
}

impl Drop for Descriptor {
    fn drop(&mut self) {
        // SAFETY: made in `new`; queued work does not refer to it.
        unsafe { (self.destroy)(self.handle) };
    }
}
