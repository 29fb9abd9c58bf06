//! Values of nodes as f32: integers by their bits, bools as the bits of 0 and 1.

use crate::value::ScalarValue;

/// Floats in a group: loops run over whole groups.
pub const LANES: usize = 16;

pub(super) const fn padded(n: usize) -> usize {
    n.div_ceil(LANES) * LANES
}

/// Scores of the rows of a strip: that of column `c` in its row `r` at `data[r * stride + c]`.
#[derive(Clone, Copy, Debug, Default)]
pub struct Scores<'a> {
    /// The scores; whole groups in each row.
    pub data: &'a [f32],
    /// Distance between rows.
    pub stride: usize,
}

/// Values of one node, beginning at a multiple of a cache line.
#[derive(Debug, Default)]
pub(super) struct Register {
    data: Vec<f32>,
    start: usize,
}

impl Register {
    pub(super) fn new(len: usize) -> Self {
        let data = vec![0.0; len + LANES];
        let start = data.as_ptr().align_offset(LANES * size_of::<f32>()).min(LANES);
        Self { data, start }
    }

    pub(super) fn get(&self) -> &[f32] {
        &self.data[self.start..]
    }

    pub(super) fn get_mut(&mut self) -> &mut [f32] {
        &mut self.data[self.start..]
    }
}

/// Values for the lines of a step: line `r` begins at `start + r·step`.
#[derive(Clone, Copy)]
pub(super) struct Operand<'a> {
    pub(super) data: &'a [f32],
    pub(super) start: usize,
    pub(super) step: isize,
    /// A line is one value.
    pub(super) one: bool,
}

/// One line of an operand.
#[derive(Clone, Copy)]
pub(super) enum Line<'a> {
    One(f32),
    Each(&'a [f32]),
}

impl<'a> Operand<'a> {
    #[inline(always)]
    pub(super) fn line(&self, r: usize, width: usize) -> Line<'a> {
        let at = self.start.wrapping_add_signed(self.step * r as isize);
        if self.one { Line::One(self.data[at]) } else { Line::Each(&self.data[at..at + width]) }
    }

    /// The value in column `c`, counted from the first of the strip, of line `r`.
    pub(super) fn at(&self, r: usize, c: usize) -> f32 {
        let at = self.start.wrapping_add_signed(self.step * r as isize);
        self.data[if self.one { at } else { at + c }]
    }

    /// Whether line `r` is the line before it.
    #[inline(always)]
    pub(super) fn repeats(&self, r: usize) -> bool {
        let at = |r: usize| self.data[self.start.wrapping_add_signed(self.step * r as isize)];
        self.step == 0 || self.one && at(r).to_bits() == at(r - 1).to_bits()
    }

    /// Whether lines of `width` follow one another, or all are one value.
    pub(super) fn is_flat(&self, width: usize) -> bool {
        if self.one { self.step == 0 } else { self.step == width as isize }
    }
}

/// The bits of a value as they lie in a register.
pub(super) fn bits_of(value: ScalarValue) -> f32 {
    match value {
        ScalarValue::Bool(v) => of_bool(v),
        ScalarValue::I32(v) => of_int(v),
        ScalarValue::F32(v) => v,
    }
}

#[inline(always)]
pub(super) fn int(x: f32) -> i32 {
    x.to_bits() as i32
}

#[inline(always)]
pub(super) fn of_int(x: i32) -> f32 {
    f32::from_bits(x as u32)
}

#[inline(always)]
pub(super) fn bool(x: f32) -> bool {
    x.to_bits() != 0
}

#[inline(always)]
pub(super) fn of_bool(x: bool) -> f32 {
    f32::from_bits(u32::from(x))
}

impl Line<'_> {
    /// Writes the line to `out`.
    #[inline(always)]
    pub(super) fn copy_to(self, out: &mut [f32]) {
        match self {
            Line::One(x) => out.fill(x),
            Line::Each(x) => out.copy_from_slice(x),
        }
    }
}
