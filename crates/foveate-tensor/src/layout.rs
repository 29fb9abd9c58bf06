//! Shape, strides and offset, in elements.
//!
//! One stride an axis is enough for every order of axes, cut, broadcast and packing but one: the
//! query heads of an interleaved projection, which come in groups with keys and values between
//! the groups. [`GroupedAxis`] says so, so that these too are a view.

use std::ops::Range;

use crate::error::{TensorError, TensorErrorKind};

/// Where the elements of an `N`-axis view lie in its storage. Strides may be 0 (a broadcast
/// axis) and the strides of axes of length 1 mean nothing.
///
/// Strides are never negative: a reversed view (`ndarray`'s `slice(s![..;-1])`) has to be copied.
/// PyTorch, JAX and cuDNN have no negative strides either; the strides of a GPU's tensor maps are
/// unsigned, and every check that a view stays in its storage rests on `offset` being the first
/// element in memory too. A mask that looks backwards needs no reversed operand: it is a
/// formula over `q` and `kv`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Layout<const N: usize = 4> {
    /// Length of each axis.
    pub shape: [usize; N],
    /// Distance between neighbours along each axis, in elements.
    pub strides: [usize; N],
    /// Position of the first element.
    pub offset: usize,
    /// An axis whose entries come in groups.
    pub groups: Option<GroupedAxis>,
}

/// Groups of an axis: `inner` entries, `strides[axis]` apart, then the next group, `outer` from
/// the start of the one before. Entry `i` of the view is entry `first + i` of the groups.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct GroupedAxis {
    /// The axis.
    pub axis: usize,
    /// Entries of a group, at least 1.
    pub inner: usize,
    /// Distance between the starts of two groups, in elements.
    pub outer: usize,
    /// Entries of the groups before the view's first one.
    pub first: usize,
}

impl<const N: usize> Layout<N> {
    /// Row-major from element 0.
    pub fn contiguous(shape: [usize; N]) -> Self {
        let mut strides = [1; N];
        for axis in (0..N.saturating_sub(1)).rev() {
            strides[axis] = shape[axis + 1].max(1).saturating_mul(strides[axis + 1]);
        }
        Self::strided(shape, strides, 0)
    }

    /// Row-major over all of `len` elements.
    pub(crate) fn of_all(len: usize, shape: [usize; N]) -> Result<Self, TensorError> {
        let layout = Self::contiguous(shape);
        if layout.elems() != len {
            return Err(TensorErrorKind::Elements { shape: shape.to_vec(), len }.into());
        }
        Ok(layout)
    }

    /// The storage positions of the elements, when these lie there one after the other in
    /// row-major order.
    pub(crate) fn row_major(&self) -> Result<Range<usize>, TensorError> {
        let elems = self.elems();
        let dense = Self::contiguous(self.shape).strides;
        let along = |axis: usize| self.shape[axis] == 1 || self.strides[axis] == dense[axis];
        if elems == 0 {
            return Ok(0..0);
        }
        if self.groups.is_none() && (0..N).all(along) {
            return Ok(self.offset..self.offset + elems);
        }
        let (shape, strides) = (self.shape.to_vec(), self.strides.to_vec());
        Err(TensorErrorKind::Apart { shape, strides }.into())
    }

    /// One stride an axis, from element `offset`.
    pub fn strided(shape: [usize; N], strides: [usize; N], offset: usize) -> Self {
        Self { shape, strides, offset, groups: None }
    }

    /// Number of elements of the view; `usize::MAX` when there are more.
    pub fn elems(&self) -> usize {
        if self.shape.contains(&0) {
            return 0;
        }
        self.shape.iter().fold(1, |elems, &n| elems.saturating_mul(n))
    }

    /// The view of `len` neighbours from `start` on along `axis`: a prefix of a cache, some of
    /// the heads, part of the dim.
    ///
    /// # Errors
    /// When there is no such axis or it is shorter.
    pub fn narrowed(&self, axis: usize, start: usize, len: usize) -> Result<Self, TensorError> {
        let n = self.axis(axis)?;
        if start.checked_add(len).is_none_or(|end| end > n) {
            let reason = format!("{len} from {start} on is past its length {n}");
            return Err(TensorErrorKind::Axis { axis, reason }.into());
        }
        let mut view = *self;
        view.shape[axis] = len;
        match &mut view.groups {
            Some(groups) if groups.axis == axis => groups.first += start,
            _ if start < n => view.offset += start * self.strides[axis],
            _ => {}
        }
        Ok(view)
    }

    /// The view in which `axis`, of length 1, is repeated `n` times without copying (stride 0).
    ///
    /// # Errors
    /// When there is no such axis or its length is not 1.
    pub fn expanded(&self, axis: usize, n: usize) -> Result<Self, TensorError> {
        let found = self.axis(axis)?;
        if found != 1 {
            let reason = format!("only an axis of length 1 can be repeated, not {found}");
            return Err(TensorErrorKind::Axis { axis, reason }.into());
        }
        let mut view = *self;
        if let Some(groups) = view.groups.take_if(|groups| groups.axis == axis) {
            view.offset += groups.first / groups.inner * groups.outer;
            view.offset += groups.first % groups.inner * self.strides[axis];
        }
        (view.shape[axis], view.strides[axis]) = (n, 0);
        Ok(view)
    }

    fn axis(&self, axis: usize) -> Result<usize, TensorError> {
        self.shape.get(axis).copied().ok_or_else(|| {
            TensorErrorKind::Axis { axis, reason: format!("there are {N} axes") }.into()
        })
    }

    /// Storage position of the element at `index`.
    pub fn at(&self, index: [usize; N]) -> usize {
        let mut index = index;
        let mut at = self.offset;
        if let Some(GroupedAxis { axis, inner, outer, first }) = self.groups {
            let entry = first + index[axis];
            at += entry / inner * outer;
            index[axis] = entry % inner;
        }
        at + index.iter().zip(self.strides).map(|(i, s)| i * s).sum::<usize>()
    }

    /// One past the last storage position used, 0 for an empty view; `None` when it overflows.
    pub fn end(&self) -> Option<usize> {
        if self.shape.contains(&0) {
            return Some(0);
        }
        let mut last = self.offset;
        for (n, s) in self.axes() {
            last = last.checked_add((n - 1).checked_mul(s)?)?;
        }
        if let Some(GroupedAxis { axis, inner, outer, first }) = self.groups {
            // The last entry may lie inside a group, so the largest position is its own or that
            // of the last entry of the group before.
            let stride = self.strides[axis];
            let reach = |entry: usize| {
                let inside = (entry % inner).checked_mul(stride)?;
                (entry / inner).checked_mul(outer)?.checked_add(inside)
            };
            let end = first.checked_add(self.shape[axis] - 1)?;
            let full = (end / inner * inner).saturating_sub(1).max(first);
            last = last.checked_add(reach(end)?.max(reach(full)?))?;
        }
        last.checked_add(1)
    }

    /// Lengths and strides of the axes that one stride describes.
    fn axes(&self) -> impl Iterator<Item = (usize, usize)> {
        let grouped = self.groups.map(|f| f.axis);
        let axes = self.shape.into_iter().zip(self.strides).enumerate();
        axes.filter(move |(axis, _)| Some(*axis) != grouped).map(|(_, axis)| axis)
    }

    /// True when no two elements share memory. Exact for nested strides (every view of a dense
    /// buffer), and false when it cannot tell.
    pub fn is_disjoint(&self) -> bool {
        if self.shape.contains(&0) {
            return true;
        }
        let mut axes: Vec<(usize, usize)> = self.axes().map(|(n, s)| (s, n)).collect();
        if let Some(GroupedAxis { axis, inner, outer, first }) = self.groups {
            let end = first.saturating_add(self.shape[axis]);
            axes.push((self.strides[axis], if end - first > 1 { inner.min(end) } else { 1 }));
            axes.push((outer, (end - 1) / inner - first / inner + 1));
        }
        axes.retain(|&(_, n)| n > 1);
        axes.sort_unstable();
        let mut extent = 1usize;
        for (stride, n) in axes {
            if stride < extent {
                return false;
            }
            extent = (n - 1).saturating_mul(stride).saturating_add(extent);
        }
        true
    }

    pub(crate) fn check(&self, len: usize) -> Result<(), TensorError> {
        let grouped = self.groups.is_none_or(|groups| groups.axis < N && groups.inner > 0);
        let counts = self.elems() < usize::MAX && grouped;
        if counts && self.end().is_some_and(|end| end <= len) {
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
        if self.is_disjoint() {
            return Ok(());
        }
        Err(TensorErrorKind::Overlap { shape: self.shape.to_vec(), strides: self.strides.to_vec() }
            .into())
    }
}

/// Row-major storage by the order of its axes: b(atch), s(equence), h(ead), d(im), or t for the
/// rows of packed sequences. Arguments are lengths in the order of the name; the view's axes are
/// `[batch, heads, length, dim]` always.
impl Layout<4> {
    /// Batch, sequence, head, dim.
    pub fn bshd(batch: usize, len: usize, heads: usize, dim: usize) -> Self {
        Layout::contiguous([batch, len, heads, dim]).permuted([0, 2, 1, 3])
    }

    /// Sequence, batch, head, dim.
    pub fn sbhd(len: usize, batch: usize, heads: usize, dim: usize) -> Self {
        Layout::contiguous([len, batch, heads, dim]).permuted([1, 2, 0, 3])
    }

    /// Batch, head, sequence, dim.
    pub fn bhsd(batch: usize, heads: usize, len: usize, dim: usize) -> Self {
        Layout::contiguous([batch, heads, len, dim])
    }

    /// Packed rows, head, dim; the batch axis has length 1.
    pub fn thd(rows: usize, heads: usize, dim: usize) -> Self {
        Layout::bshd(1, rows, heads, dim)
    }

    fn permuted(&self, axes: [usize; 4]) -> Self {
        let (shape, strides) = (axes.map(|a| self.shape[a]), axes.map(|a| self.strides[a]));
        Self::strided(shape, strides, self.offset)
    }
}

/// Every index of a view of `shape`, the last axis fastest.
pub fn indices<const N: usize>(shape: [usize; N]) -> impl Iterator<Item = [usize; N]> + Clone {
    let first = (!shape.contains(&0)).then_some([0; N]);
    std::iter::successors(first, move |index| {
        let axis = (0..N).rev().find(|&axis| index[axis] + 1 < shape[axis])?;
        let mut next = *index;
        next[axis] += 1;
        next[axis + 1..].fill(0);
        Some(next)
    })
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use proptest::prelude::*;

    use super::*;

    fn positions<const N: usize>(layout: &Layout<N>) -> Vec<usize> {
        indices(layout.shape).map(|index| layout.at(index)).collect()
    }

    #[test]
    fn indices_count_up_from_the_last_axis() {
        let all: Vec<_> = indices([2, 1, 3]).collect();
        let expected = [[0, 0, 0], [0, 0, 1], [0, 0, 2], [1, 0, 0], [1, 0, 1], [1, 0, 2]];
        assert_eq!(all, expected);
        assert_eq!(indices([3, 0, 2]).count(), 0);
        assert_eq!(indices([]).collect::<Vec<_>>(), [[0; 0]]);
    }

    fn distinct(layout: &Layout<4>) -> bool {
        let all = positions(layout);
        all.iter().collect::<HashSet<_>>().len() == all.len()
    }

    fn any_layout() -> impl Strategy<Value = Layout<4>> {
        ([0..4usize, 1..4, 1..5, 1..4], [0..9usize, 0..9, 0..30, 0..4], 0..5usize)
            .prop_map(|(shape, strides, offset)| Layout::strided(shape, strides, offset))
    }

    fn grouped() -> impl Strategy<Value = Layout<4>> {
        (any_layout(), 1..4usize, 0..30usize, 0..4usize).prop_map(
            |(layout, inner, outer, first)| Layout {
                groups: Some(GroupedAxis { axis: 1, inner, outer, first }),
                ..layout
            },
        )
    }

    /// A dense buffer of any order, cut along every axis.
    fn dense_view() -> impl Strategy<Value = Layout<4>> {
        let orders = prop_oneof![Just([0, 1, 2, 3]), Just([0, 2, 1, 3]), Just([2, 0, 1, 3])];
        let cuts = [(0..3usize, 1..4usize), (0..3, 1..4), (0..3, 1..4), (0..3, 1..4)];
        (orders, cuts).prop_map(|(order, cuts)| {
            let whole = Layout::contiguous(cuts.map(|(start, len)| start + len)).permuted(order);
            let cut = |view: Layout<4>, axis: usize| {
                let (start, len) = cuts[order[axis]];
                view.narrowed(axis, start, len).expect("the axis is start + len long")
            };
            (0..4).fold(whole, cut)
        })
    }

    proptest! {
        #[test]
        fn disjoint_is_never_said_of_a_layout_that_repeats_a_position(layout in prop_oneof![any_layout(), grouped()]) {
            prop_assert!(!layout.is_disjoint() || distinct(&layout));
        }

        #[test]
        fn every_cut_of_a_dense_buffer_in_any_order_is_disjoint(layout in dense_view()) {
            prop_assert!(distinct(&layout) && layout.is_disjoint());
        }

        #[test]
        fn the_end_is_one_past_the_largest_position(layout in prop_oneof![any_layout(), grouped()]) {
            let largest = positions(&layout).into_iter().max();
            prop_assert_eq!(layout.end(), Some(largest.map_or(0, |p| p + 1)));
            prop_assert!(layout.check(layout.end().unwrap()).is_ok());
            if let Some(short) = layout.end().unwrap().checked_sub(1) {
                prop_assert!(layout.check(short).is_err());
            }
        }
    }

    #[test]
    fn each_named_order_steps_through_memory_as_its_name_says() {
        let (b, h, s, d) = (2, 3, 5, 7);
        assert_eq!(Layout::bshd(b, s, h, d).strides, [s * h * d, d, h * d, 1]);
        assert_eq!(Layout::sbhd(s, b, h, d).strides, [h * d, d, b * h * d, 1]);
        assert_eq!(Layout::bhsd(b, h, s, d).strides, [h * s * d, s * d, d, 1]);
        assert_eq!(Layout::thd(s, h, d).strides[1..], [d, h * d, 1]);
        for layout in [Layout::bshd(b, s, h, d), Layout::sbhd(s, b, h, d)] {
            assert_eq!(layout.shape, [b, h, s, d]);
        }
        assert_eq!(Layout::thd(s, h, d).shape, [1, h, s, d]);
    }

    proptest! {
        #[test]
        fn a_cut_of_a_view_holds_the_same_positions(
            layout in prop_oneof![any_layout(), grouped()], start in 0..4usize, len in 0..4usize,
        ) {
            let Ok(cut) = layout.narrowed(1, start, len) else { return Ok(()) };
            for [b, h, s, d] in indices(cut.shape) {
                prop_assert_eq!(cut.at([b, h, s, d]), layout.at([b, start + h, s, d]));
            }
        }
    }

    #[test]
    fn heads_in_groups_with_others_between_them_are_disjoint() {
        // Three query heads, a key and a value head a group, of 4 elements each.
        let groups = Some(GroupedAxis { axis: 1, inner: 3, outer: 20, first: 0 });
        let q = Layout { groups, ..Layout::strided([2, 6, 5, 4], [200, 4, 40, 1], 0) };
        assert!(q.is_disjoint() && distinct(&q));
        assert_eq!(q.at([0, 4, 1, 2]), 40 + 20 + 4 + 2);
    }

    #[test]
    fn strides_of_axes_of_length_one_mean_nothing() {
        let odd = Layout::strided([1, 2, 1, 3], [usize::MAX, 3, 977, 1], 0);
        assert!(odd.is_disjoint());
        assert_eq!(odd.end(), Some(6));
    }

    #[test]
    fn a_repeated_axis_is_not_a_destination() {
        let expanded = Layout::bshd(2, 3, 1, 4).expanded(1, 8).expect("one head");
        assert_eq!((expanded.shape, expanded.end()), ([2, 8, 3, 4], Some(24)));
        assert!(!expanded.is_disjoint());
        let error = Layout::bshd(2, 3, 2, 4).expanded(1, 8).expect_err("two heads");
        assert!(error.to_string().contains("not 2"), "{error}");
    }

    #[test]
    fn cuts_past_the_end_of_an_axis_and_sizes_past_counting_are_refused() {
        let layout = Layout::bhsd(1, 2, 3, 4);
        assert!(layout.narrowed(2, 1, 2).is_ok());
        assert!(layout.narrowed(2, 2, 2).is_err());
        assert!(layout.narrowed(4, 0, 0).is_err());
        let huge = Layout::strided([usize::MAX, 2, 2, 1], [0; 4], 0);
        assert!(huge.check(1).is_err());
        assert!(Layout::contiguous([usize::MAX; 4]).check(usize::MAX).is_err());
    }
}
