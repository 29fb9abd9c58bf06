//! One buffer that holds queries, keys and values: the output of a fused projection.
//!
//! A packing is an order of slots: one vector of each head. From the order alone follow the
//! offset and head stride of q, k, v and the gate, so views are never guessed and nothing is
//! copied. Two slots never overlap, whatever the order, which is what lets one gradient buffer
//! be borrowed as three or four destinations.

use crate::error::{TensorError, TensorErrorKind};
use crate::layout::{GroupedAxis, Layout};
use crate::slice::{Slice, SliceMut};
use crate::view::{TensorMut, TensorRef};

/// Order of the batch, sequence and head axes in memory. Packed sequences (`thd`) are either of
/// the first two with batch 1.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Order {
    /// Batch, sequence, then the fused axis.
    Bshd,
    /// Sequence, batch, then the fused axis.
    Sbhd,
    /// Batch, the fused axis' heads, then sequence.
    Bhsd,
}

/// The sizes a packed buffer is made of.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct PackedShape {
    /// Order of the axes in memory.
    pub order: Order,
    /// Batch entries.
    pub batch: usize,
    /// Rows.
    pub len: usize,
    /// Query heads.
    pub heads_q: usize,
    /// Key/value heads; divides `heads_q`.
    pub heads_kv: usize,
    /// Length of a query or key vector.
    pub dim: usize,
    /// Length of a value vector, and of a gate's.
    pub dim_v: usize,
}

/// One vector of the fused axis.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Part {
    /// A query head, `dim` long.
    Q,
    /// A key head, `dim` long.
    K,
    /// A value head, `dim_v` long.
    V,
    /// The gate of a query head's output, `dim_v` long.
    Gate,
}

/// Where q, k, v (and a gate) lie in one buffer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct QkvPacked {
    q: Layout,
    k: Layout,
    v: Layout,
    gate: Option<Layout>,
    elems: usize,
}

/// The views of one packed buffer.
#[derive(Clone, Copy, Debug)]
pub struct QkvRef<'a> {
    /// Queries.
    pub q: TensorRef<'a>,
    /// Keys.
    pub k: TensorRef<'a>,
    /// Values.
    pub v: TensorRef<'a>,
    /// Gates of the outputs, where the packing has them.
    pub gate: Option<TensorRef<'a>>,
}

/// The destinations in one packed buffer. They share no element.
#[derive(Debug)]
pub struct QkvMut<'a> {
    /// Gradient of the queries.
    pub q: TensorMut<'a>,
    /// Gradient of the keys.
    pub k: TensorMut<'a>,
    /// Gradient of the values.
    pub v: TensorMut<'a>,
    /// Gradient of the gates, where the packing has them.
    pub gate: Option<TensorMut<'a>>,
}

/// Heads of the widest projection that is believed.
const MOST_HEADS: usize = 1 << 20;

impl QkvPacked {
    /// Per group of key/value heads: its query heads, its key head, its value head.
    ///
    /// # Errors
    /// When the key/value heads do not divide the query heads, or the sizes overflow.
    pub fn interleaved(shape: &PackedShape) -> Result<Self, TensorError> {
        let mut group = vec![Part::Q; shape.group()?];
        group.extend([Part::K, Part::V]);
        Self::new(shape, &group.repeat(shape.heads_kv))
    }

    /// All query heads, all key heads, all value heads.
    ///
    /// # Errors
    /// As [`Self::interleaved`].
    pub fn stacked(shape: &PackedShape) -> Result<Self, TensorError> {
        shape.group()?;
        let mut parts = vec![Part::Q; shape.heads_q];
        parts.extend([Part::K].repeat(shape.heads_kv));
        parts.extend([Part::V].repeat(shape.heads_kv));
        Self::new(shape, &parts)
    }

    /// Per head: query, key, value (`[H, 3, D]`).
    ///
    /// # Errors
    /// As [`Self::interleaved`], and when the numbers of heads differ.
    pub fn per_head(shape: &PackedShape) -> Result<Self, TensorError> {
        shape.one_to_one()?;
        shape.group()?;
        Self::new(shape, &[Part::Q, Part::K, Part::V].repeat(shape.heads_q))
    }

    /// Per head: query, gate, key, value (`[H, 4, D]`).
    ///
    /// # Errors
    /// As [`Self::per_head`].
    pub fn gated_per_head(shape: &PackedShape) -> Result<Self, TensorError> {
        shape.one_to_one()?;
        shape.group()?;
        Self::new(shape, &[Part::Q, Part::Gate, Part::K, Part::V].repeat(shape.heads_q))
    }

    /// Per group of key/value heads: a (query, gate) pair for each query head, key, value.
    ///
    /// # Errors
    /// As [`Self::interleaved`].
    pub fn gated_interleaved(shape: &PackedShape) -> Result<Self, TensorError> {
        let mut group = [Part::Q, Part::Gate].repeat(shape.group()?);
        group.extend([Part::K, Part::V]);
        Self::new(shape, &group.repeat(shape.heads_kv))
    }

    /// A (query, gate) pair for each query head, then all key heads, all value heads.
    ///
    /// # Errors
    /// As [`Self::interleaved`].
    pub fn gated_stacked(shape: &PackedShape) -> Result<Self, TensorError> {
        shape.group()?;
        let mut parts = [Part::Q, Part::Gate].repeat(shape.heads_q);
        parts.extend([Part::K].repeat(shape.heads_kv));
        parts.extend([Part::V].repeat(shape.heads_kv));
        Self::new(shape, &parts)
    }

    /// Any order of parts whose heads are evenly spaced, or come in evenly spaced groups of one
    /// size that a single stride can follow.
    ///
    /// # Errors
    /// When the parts are not as many as there are heads, the heads of a part are unevenly
    /// spaced, or the sizes overflow.
    pub fn new(shape: &PackedShape, parts: &[Part]) -> Result<Self, TensorError> {
        shape.group()?;
        let PackedShape { order, batch, len, heads_q, heads_kv, dim, dim_v } = *shape;
        let width = |part: Part| if matches!(part, Part::Q | Part::K) { dim } else { dim_v };
        let overflow = || packed("the sizes overflow".to_owned());
        let total = parts.iter().try_fold(0usize, |sum, &p| sum.checked_add(width(p)));
        let total = total.ok_or_else(overflow)?;
        // Strides count an empty batch or length as one.
        let rows = batch.max(1).checked_mul(len.max(1)).ok_or_else(overflow)?;
        total.checked_mul(rows).ok_or_else(overflow)?;
        let elems = total * batch * len;
        let layout = |part: Part, heads: usize| {
            let mut start = 0;
            let mut starts = Vec::new();
            for &p in parts {
                if p == part {
                    starts.push(start);
                }
                start += width(p);
            }
            if starts.len() != heads {
                let found = starts.len();
                return Err(packed(format!("{found} parts {part:?} for {heads} heads")));
            }
            let (step, inner, outer) = spacing(&starts, width(part))
                .ok_or_else(|| packed(format!("the heads of {part:?} are unevenly spaced")))?;
            let (row, head) = match order {
                Order::Bshd | Order::Sbhd => (total, 1),
                Order::Bhsd => (width(part), len),
            };
            let strides = match order {
                Order::Sbhd => [row, step, batch * row, 1],
                Order::Bshd | Order::Bhsd => [len * total, step * head, row, 1],
            };
            let groups = GroupedAxis { axis: 1, inner, outer: outer * head, first: 0 };
            Ok(Layout {
                groups: (inner < heads).then_some(groups),
                ..Layout::strided([batch, heads, len, width(part)], strides, starts[0] * head)
            })
        };
        let gated = parts.contains(&Part::Gate);
        Ok(Self {
            q: layout(Part::Q, heads_q)?,
            k: layout(Part::K, heads_kv)?,
            v: layout(Part::V, heads_kv)?,
            gate: gated.then(|| layout(Part::Gate, heads_q)).transpose()?,
            elems,
        })
    }

    /// Elements of the buffer.
    pub fn elems(&self) -> usize {
        self.elems
    }

    /// Layout of the queries.
    pub fn q(&self) -> &Layout {
        &self.q
    }

    /// Layout of the keys.
    pub fn k(&self) -> &Layout {
        &self.k
    }

    /// Layout of the values.
    pub fn v(&self) -> &Layout {
        &self.v
    }

    /// Layout of the gates, where the packing has them.
    pub fn gate(&self) -> Option<&Layout> {
        self.gate.as_ref()
    }

    /// The views of a packed buffer.
    ///
    /// # Errors
    /// When the buffer is too short.
    pub fn views<'a>(&self, data: impl Into<Slice<'a>>) -> Result<QkvRef<'a>, TensorError> {
        let data = data.into();
        let view = |layout: Layout| TensorRef::new(data, layout);
        Ok(QkvRef {
            q: view(self.q)?,
            k: view(self.k)?,
            v: view(self.v)?,
            gate: self.gate.map(view).transpose()?,
        })
    }

    /// The destinations in a packed buffer, to be written independently.
    ///
    /// # Errors
    /// When the buffer is too short.
    pub fn views_mut<'a>(&self, data: impl Into<SliceMut<'a>>) -> Result<QkvMut<'a>, TensorError> {
        let data = data.into();
        let layouts = [Some(self.q), Some(self.k), Some(self.v), self.gate];
        // SAFETY: slots of the fused axis follow one another and heads are distinct slots, so no
        // two of these layouts share an element.
        let [q, k, v, gate] = unsafe { TensorMut::parts(data, layouts) }?;
        let (Some(q), Some(k), Some(v)) = (q, k, v) else {
            unreachable!("a destination for each layout given")
        };
        Ok(QkvMut { q, k, v, gate })
    }
}

impl PackedShape {
    fn group(&self) -> Result<usize, TensorError> {
        let Self { heads_q, heads_kv, dim, dim_v, .. } = *self;
        if heads_q == 0 || heads_kv == 0 {
            return Err(packed(format!(
                "{heads_q} query heads and {heads_kv} key/value heads; there must be at least 1 of \
                 each"
            )));
        }
        if heads_q % heads_kv != 0 {
            return Err(packed(format!(
                "{heads_q} query heads cannot share {heads_kv} key/value heads; the first must be \
                 a multiple of the second"
            )));
        }
        if heads_q > MOST_HEADS {
            return Err(packed(format!("{heads_q} query heads; up to {MOST_HEADS} can be packed")));
        }
        if dim == 0 || dim_v == 0 {
            return Err(packed(format!("head dims are {dim} and {dim_v}; neither may be 0")));
        }
        Ok(heads_q / heads_kv)
    }

    fn one_to_one(&self) -> Result<(), TensorError> {
        if self.heads_q == self.heads_kv {
            return Ok(());
        }
        Err(packed(format!(
            "packing per head needs as many key/value heads as query heads, not {} and {}; \
             use an interleaved packing",
            self.heads_kv, self.heads_q
        )))
    }
}

/// Distance inside a group, size of a group, distance of groups of evenly spaced starts.
fn spacing(starts: &[usize], alone: usize) -> Option<(usize, usize, usize)> {
    let step = starts.get(1).map_or(alone, |second| second - starts[0]);
    let inner = starts.windows(2).take_while(|w| w[1] - w[0] == step).count() + 1;
    let outer = starts.get(inner).map_or(step, |next| next - starts[0]);
    let expected = |i: usize| starts[0] + i / inner * outer + i % inner * step;
    let even = starts.iter().enumerate().all(|(i, &start)| start == expected(i));
    even.then_some((step, inner, outer))
}

fn packed(reason: String) -> TensorError {
    TensorErrorKind::Packed { reason: format!("packed projection: {reason}") }.into()
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::*;
    use crate::dtype::{DType, Data};
    use crate::layout::indices;

    fn shape(order: Order, heads_kv: usize, dim_v: usize) -> PackedShape {
        PackedShape { order, batch: 2, len: 3, heads_q: 4, heads_kv, dim: 5, dim_v }
    }

    fn all() -> Vec<QkvPacked> {
        let mut all = Vec::new();
        for order in [Order::Bshd, Order::Sbhd, Order::Bhsd] {
            for dim_v in [5, 3] {
                for heads_kv in [1, 2, 4] {
                    let shape = shape(order, heads_kv, dim_v);
                    all.push(QkvPacked::interleaved(&shape).unwrap());
                    all.push(QkvPacked::stacked(&shape).unwrap());
                    all.push(QkvPacked::gated_interleaved(&shape).unwrap());
                    all.push(QkvPacked::gated_stacked(&shape).unwrap());
                }
                all.push(QkvPacked::per_head(&shape(order, 4, dim_v)).unwrap());
                all.push(QkvPacked::gated_per_head(&shape(order, 4, dim_v)).unwrap());
            }
        }
        all
    }

    #[test]
    #[cfg_attr(miri, ignore = "counts positions, touches no memory, and takes minutes")]
    fn the_parts_of_every_packing_fill_its_buffer_once() {
        for packing in all() {
            let parts = [Some(packing.q), Some(packing.k), Some(packing.v), packing.gate];
            let mut seen = HashSet::new();
            for part in parts.into_iter().flatten() {
                for index in indices(part.shape) {
                    assert!(seen.insert(part.at(index)), "{packing:?}");
                }
            }
            assert_eq!(seen.len(), packing.elems());
            assert!(seen.into_iter().all(|at| at < packing.elems()));
        }
    }

    #[test]
    fn destinations_of_one_buffer_are_written_independently() {
        // Miri takes seconds for each: some of every kind.
        for packing in all().into_iter().step_by(if cfg!(miri) { 13 } else { 1 }) {
            let mut data = Data::filled(DType::F32, packing.elems(), f64::NAN);
            let QkvMut { q, k, v, gate } = packing.views_mut(&mut data).unwrap();
            std::thread::scope(|threads| {
                for (part, mut tensor) in [Some(q), Some(k), Some(v), gate].into_iter().enumerate()
                {
                    threads.spawn(move || {
                        let Some(tensor) = &mut tensor else { return };
                        let [b, h, s, d] = tensor.shape();
                        for [b, h, s] in indices([b, h, s]) {
                            tensor.write_row(b, h, s, &vec![part as f32; d], false);
                        }
                    });
                }
            });
            let views = packing.views(&data).unwrap();
            assert_eq!(views.q.get_f64([1, 3, 2, 4]), 0.0);
            assert_eq!(views.k.get_f64([0, 0, 1, 0]), 1.0);
            assert_eq!(views.v.get_f64([1, 0, 2, 2]), 2.0);
            assert!(views.gate.is_none_or(|g| g.get_f64([0, 2, 0, 0]) == 3.0));
            let Data::F32(values) = &data else { unreachable!() };
            assert!(values.iter().all(|x| !x.is_nan()));
        }
    }

    #[test]
    fn the_fused_multi_query_buffer_is_found_by_its_strides() {
        let shape = PackedShape {
            order: Order::Sbhd,
            batch: 1,
            len: 2048,
            heads_q: 16,
            heads_kv: 1,
            dim: 64,
            dim_v: 64,
        };
        let packing = QkvPacked::interleaved(&shape).unwrap();
        assert_eq!((packing.q.strides[1..].to_vec(), packing.q.offset), (vec![64, 18 * 64, 1], 0));
        assert_eq!((packing.k.strides[2], packing.k.offset), (18 * 64, 16 * 64));
        assert_eq!((packing.v.strides[2], packing.v.offset), (18 * 64, 17 * 64));
    }

    #[test]
    fn packings_that_cannot_be_are_refused_with_the_reason() {
        let says = |result: Result<QkvPacked, TensorError>| result.unwrap_err().to_string();
        let grouped = shape(Order::Bshd, 2, 5);
        assert!(says(QkvPacked::per_head(&grouped)).contains("use an interleaved packing"));
        let uneven = PackedShape { heads_kv: 3, ..grouped };
        assert!(says(QkvPacked::stacked(&uneven)).contains("4 query heads cannot share 3"));
        let none = PackedShape { heads_q: 0, heads_kv: 0, ..grouped };
        assert!(says(QkvPacked::stacked(&none)).contains("there must be at least 1 of each"));
        use Part::{K, Q, V};
        let parts = [Q, Q, K, Q, K, Q, V, V];
        assert!(says(QkvPacked::new(&grouped, &parts)).contains("unevenly spaced"));
        assert!(says(QkvPacked::new(&grouped, &[Q, Q, Q, Q, K, V])).contains("1 parts K for 2"));
        let long = PackedShape { len: usize::MAX, ..grouped };
        assert!(says(QkvPacked::stacked(&long)).contains("overflow"));
        let wide = PackedShape { dim: usize::MAX / 2, batch: 0, ..grouped };
        assert!(says(QkvPacked::interleaved(&wide)).contains("overflow"));
        let heads = PackedShape { heads_q: usize::MAX, heads_kv: usize::MAX, ..grouped };
        for pack in [QkvPacked::stacked, QkvPacked::per_head, QkvPacked::interleaved] {
            assert!(says(pack(&heads)).contains("up to 1048576 can be packed"));
        }
        let packing = QkvPacked::stacked(&grouped).unwrap();
        let mut short = Data::filled(DType::F16, packing.elems() - 1, 0.0);
        assert!(says(packing.views_mut(&mut short).map(|_| packing)).contains("reaches past"));
    }
}
