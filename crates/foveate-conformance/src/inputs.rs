//! The random data of a case, drawn in one fixed order, so that a case's data never changes.

use foveate_problem::{Dims, Operands, Pages, ScaleBlocks, Scales};
use foveate_reference::Upstream;
use foveate_tensor::{DType, Data, Layout, Packing, Slice, TensorRef, indices};

use crate::case::{Case, SetScale, Sink};
use crate::error::CaseError;
use crate::overrides::{Operand, Override};
use crate::program::Program;
use crate::storage::{PageTable, Storage};
use foveate_tensor::random::Random;

/// Everything a backend reads for a case.
#[derive(Debug)]
pub(crate) struct Inputs<'c> {
    case: &'c Case,
    pub program: Program,
    pub dtype: DType,
    pub storage: Storage,
    packing: Option<Packing>,
    qkv: Vec<Data>,
    sink: Option<Data>,
    d_out: Data,
    d_lse: Option<Vec<f32>>,
    scales: Option<[Vec<f32>; 3]>,
}

impl<'c> Inputs<'c> {
    /// Draws the data of `case`.
    ///
    /// # Errors
    /// When a text does not parse, sizes do not fit, or a number is put outside an operand.
    pub fn draw(case: &'c Case) -> Result<Self, CaseError> {
        let fail = |e: &dyn std::fmt::Display| CaseError::new(&case.name, e);
        let mut random = Random::new(case.seed());
        let program = case.program(&mut random)?;
        let dtype = case.dtype()?;
        let storage = Storage::of(case)?;
        check_overrides(case, &storage)?;
        let packing = match &case.varlen {
            None => None,
            Some(lengths) => Some(Packing::new(&lengths.q, &lengths.k).map_err(|e| fail(&e))?),
        };
        let used = |operand: usize, entry: usize, row: usize| match (&packing, &storage.pages) {
            (Some(p), _) => row < if operand == 0 { p.rows_q() } else { p.rows_k() },
            (None, Some(pages)) if operand > 0 => row < pages.used[entry],
            (None, _) => true,
        };
        let magnitude = case.magnitude.unwrap_or(1.0);
        let qkv = fill(dtype, &storage.sizes, &storage.operands, used, |operand, index| {
            let x = random.normal() * magnitude;
            let [entry, h, row, d] = index;
            let key = |pages: &PageTable| pages.key(entry, row, storage.operands[1].1.shape[2]);
            let [b, s] = match storage.pages.as_ref().filter(|_| operand > 0) {
                Some(pages) => key(pages).expect("a row in use is a key's"),
                None => [entry, row],
            };
            let operand = [Operand::Q, Operand::K, Operand::V][operand];
            Override::find(&case.set, operand, [b, h, s, d]).unwrap_or(x)
        });
        let sink = match &case.sink {
            Sink::Random(false) => None,
            Sink::Random(true) => {
                Some((0..case.heads[0]).map(|_| f64::from(random.normal() as f32)).collect())
            }
            Sink::Given(values) => Some(values.iter().map(|&x| x.into()).collect()),
        };
        let sink_dtype = case.sink_dtype()?;
        let sink = sink.map(|values: Vec<f64>| Data::from_f64(sink_dtype, values));
        let (layout, size) = storage.out;
        let d_out = fill(dtype, &[size], &[(0, layout)], used, |_, index| {
            let x = random.normal();
            Override::find(&case.set, Operand::DOut, index).unwrap_or(x)
        });
        let [b, h, s, _] = layout.shape;
        let d_lse = case.d_lse.then(|| (0..b * h * s).map(|_| random.normal() as f32).collect());
        let [d_out] = <[Data; 1]>::try_from(d_out).expect("one buffer");
        let mut inputs =
            Self { case, program, dtype, storage, packing, qkv, sink, d_out, d_lse, scales: None };
        if case.scales {
            inputs.scales = Some(inputs.draw_scales(&mut random)?);
        }
        Ok(inputs)
    }

    fn draw_scales(&self, random: &mut Random) -> Result<[Vec<f32>; 3], CaseError> {
        let (case, fail) = (self.case, |e| CaseError::new(&self.case.name, e));
        let operands = self.operands()?;
        let dims = Dims::of(&operands).map_err(fail)?;
        let blocks = scale_blocks(case).shapes(&dims, dims.longest(operands.varlen));
        let shapes = blocks.map_err(fail)?;
        let mut operand = 0;
        let mut scales = shapes.map(|shape| -> Vec<f32> {
            let spread = case.scale_spread[operand];
            operand += 1;
            let mut scale = || {
                let usual = random.normal().abs() as f32 + 0.1;
                let exponent = match spread {
                    0 => 0,
                    n => random.below(2 * n as usize + 1) as i32 - n as i32,
                };
                usual * 2f32.powi(exponent)
            };
            (0..shape.iter().product()).map(|_| scale()).collect()
        });
        for SetScale { operand, at: [b, h, block], value } in &case.set_scales {
            let i = *operand as usize;
            let place = shapes
                .get(i)
                .filter(|shape| [*b, *h, *block].iter().zip(*shape).all(|(at, n)| at < n));
            let Some([_, heads, blocks]) = place else {
                let message =
                    format!("set_scales: {} has no scale [{b}, {h}, {block}]", operand.name());
                return Err(CaseError::new(&case.name, message));
            };
            scales[i][(b * heads + h) * blocks + block] = *value;
        }
        Ok(scales)
    }

    /// q, k, v and what goes with them.
    pub fn operands(&self) -> Result<Operands<'_>, CaseError> {
        let fail = |e: &dyn std::fmt::Display| CaseError::new(&self.case.name, e);
        let view = |i: usize| {
            let (buffer, layout) = self.storage.operands[i];
            TensorRef::new(&self.qkv[buffer], layout).map_err(|e| fail(&e))
        };
        let [rows_q, rows_k] = self.case.rows();
        let varlen = self.packing.as_ref().map(|p| p.varlen(rows_q, rows_k)).transpose();
        let pages = self.storage.pages.as_ref().map(|p| Pages::new(&p.table, &p.lengths));
        Ok(Operands {
            q: view(0)?,
            k: view(1)?,
            v: view(2)?,
            sink: self.sink.as_ref().map(Slice::from),
            varlen: varlen.map_err(|e| fail(&e))?,
            pages: pages.transpose().map_err(|e| fail(&e))?,
            scales: self.scales.as_ref().map(|[q, k, v]| {
                let blocks = scale_blocks(self.case);
                Scales { q, k, v, blocks }
            }),
        })
    }

    /// What the backward pass starts from.
    pub fn upstream(&self) -> Result<Upstream<'_>, CaseError> {
        let fail = |e: &dyn std::fmt::Display| CaseError::new(&self.case.name, e);
        let layout = self.storage.out.0;
        let d_out = TensorRef::new(&self.d_out, layout).map_err(|e| fail(&e))?;
        let [b, h, s, _] = layout.shape;
        let rows = Layout::contiguous([b, h, s]);
        let d_lse = self.d_lse.as_deref().map(|v| TensorRef::new(v, rows)).transpose();
        Ok(Upstream { d_out, d_lse: d_lse.map_err(|e| fail(&e))? })
    }
}

/// The rows of its scales' blocks.
fn scale_blocks(case: &Case) -> ScaleBlocks {
    case.scale_blocks.map_or(ScaleBlocks::WHOLE, |[q, kv]| ScaleBlocks { q, kv })
}

/// Checks that each number that a case puts into an operand has an element there.
fn check_overrides(case: &Case, storage: &Storage) -> Result<(), CaseError> {
    for one in &case.set {
        let mut shape = match one.operand {
            Operand::Q => storage.operands[0].1.shape,
            Operand::K => storage.operands[1].1.shape,
            Operand::V => storage.operands[2].1.shape,
            Operand::DOut => storage.out.0.shape,
        };
        if storage.pages.is_some() && matches!(one.operand, Operand::K | Operand::V) {
            (shape[0], shape[2]) = (case.batch, case.len[1]);
        }
        one.check(&case.name, shape)?;
    }
    Ok(())
}

/// The buffers of a case. Layout `i` of `layouts` holds `value(i, index)` in the rows of which
/// `used(i, batch entry, row)`; everything else is NaN.
pub(crate) fn fill(
    dtype: DType,
    sizes: &[usize],
    layouts: &[(usize, Layout)],
    used: impl Fn(usize, usize, usize) -> bool,
    mut value: impl FnMut(usize, [usize; 4]) -> f64,
) -> Vec<Data> {
    let mut values: Vec<Vec<f64>> = sizes.iter().map(|&n| vec![f64::NAN; n]).collect();
    for (operand, (buffer, layout)) in layouts.iter().enumerate() {
        for index in indices(layout.shape).filter(|index| used(operand, index[0], index[2])) {
            let x = value(operand, index);
            let old = &mut values[*buffer][layout.at(index)];
            if old.is_nan() {
                *old = x;
            }
        }
    }
    values.into_iter().map(|v| Data::from_f64(dtype, v)).collect()
}
