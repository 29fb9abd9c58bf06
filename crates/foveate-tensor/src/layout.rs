//! Shape, strides and offset, in elements.

use crate::error::{TensorError, TensorErrorKind};

/// Where the elements of an `N`-axis view lie in its storage. Strides may be 0 (a broadcast
/// axis) and the strides of axes of length 1 mean nothing.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Layout<const N: usize = 4> {
    /// Length of each axis.
    pub shape: [usize; N],
    /// Distance between neighbours along each axis, in elements.
    pub strides: [usize; N],
    /// Position of the first element.
    pub offset: usize,
}

impl<const N: usize> Layout<N> {
    /// Row-major from element 0.
    pub fn contiguous(shape: [usize; N]) -> Self {
        let mut strides = [1; N];
        for axis in (0..N.saturating_sub(1)).rev() {
            strides[axis] = strides[axis + 1] * shape[axis + 1].max(1);
        }
        Self { shape, strides, offset: 0 }
    }

    /// Number of elements of the view.
    pub fn elems(&self) -> usize {
        self.shape.iter().product()
    }

    /// Storage position of the element at `index`.
    pub fn at(&self, index: [usize; N]) -> usize {
        self.offset + index.iter().zip(self.strides).map(|(i, s)| i * s).sum::<usize>()
    }

    /// One past the last storage position used, 0 for an empty view; `None` when it overflows.
    pub fn end(&self) -> Option<usize> {
        if self.shape.contains(&0) {
            return Some(0);
        }
        let mut last = self.offset;
        for (n, s) in self.shape.iter().zip(self.strides) {
            last = last.checked_add((n - 1).checked_mul(s)?)?;
        }
        last.checked_add(1)
    }

    /// True when no two elements share memory. Exact for nested strides (every view of a dense
    /// buffer), and false when it cannot tell.
    pub fn is_disjoint(&self) -> bool {
        let mut axes: Vec<(usize, usize)> = self.strides.into_iter().zip(self.shape).collect();
        axes.retain(|&(_, n)| n > 1);
        axes.sort_unstable();
        let mut extent = 1;
        for (stride, n) in axes {
            if stride < extent {
                return false;
            }
            extent = (n - 1) * stride + extent;
        }
        true
    }

    pub(crate) fn check(&self, len: usize) -> Result<(), TensorError> {
        if self.end().is_some_and(|end| end <= len) {
            return Ok(());
        }
        Err(TensorErrorKind::OutOfBounds {
            shape: self.shape.to_vec(),
            strides: self.strides.to_vec(),
            offset: self.offset,
            len,
        }
        .into())
    }

    pub(crate) fn check_disjoint(&self) -> Result<(), TensorError> {
        if self.shape.contains(&0) || self.is_disjoint() {
            return Ok(());
        }
        Err(TensorErrorKind::Overlap { shape: self.shape.to_vec(), strides: self.strides.to_vec() }
            .into())
    }
}
