//! The program of a case: its texts parsed, its captured buffers filled, its positions bound.

use foveate::{Coordinates, Positions};
use foveate_mods::text::{Names, parse_mask, parse_score};
use foveate_mods::{
    AnyBuffer, Buffer, BufferData, DynExpr, ElementType, Expr, Leaf, MaskMod, ModError,
    ScalarValue, ScoreMod, SharedElements,
};
use foveate_problem::{Dropout, Spec};
use half::{bf16, f16};
use toml::Value;

use crate::case::{BufferSpec, Case};
use crate::error::CaseError;
use foveate_tensor::Float;
use foveate_tensor::random::Random;

/// What a case asks a backend to compute.
#[derive(Clone, Debug)]
pub struct Program {
    /// Mask, score, scale and dropout in global positions.
    pub global: Spec,
    /// Where the operands stand in the whole problem.
    pub coordinates: Coordinates,
    /// `global` with local coordinates, as every backend below the crate `foveate` takes it.
    pub local: Spec,
    /// Seed of the dropout.
    pub seed: u64,
}

impl Case {
    /// The program, its captured buffers filled from `random`.
    ///
    /// # Errors
    /// When a text does not parse or a buffer cannot be made.
    pub fn program(&self, random: &mut Random) -> Result<Program, CaseError> {
        let fail = |e: &dyn std::fmt::Display| CaseError::new(&self.name, e);
        let mut names = Names::new().heads(self.heads[0]);
        for (name, spec) in &self.buffers {
            names = names.buffer(&buffer(&self.name, name, spec, random)?);
        }
        for (name, value) in &self.scalars {
            names = match value {
                Value::Integer(i) => {
                    let i = i32::try_from(*i);
                    let i = i.map_err(|e| fail(&format!("scalar `{name}`: {e}")))?;
                    names.scalar(name, ScalarValue::I32(i))
                }
                Value::Float(x) => names.scalar(name, ScalarValue::F32(*x as f32)),
                Value::Boolean(x) => names.scalar(name, ScalarValue::Bool(*x)),
                other => return Err(fail(&format!("scalar `{name}` is {other}, not a number"))),
            };
        }
        let mask = self.mask.as_ref().map(|text| parse_mask(text, &names)).transpose();
        let score = self.score.as_ref().map(|text| parse_score(text, &names)).transpose();
        let (mask, score) = (mask.map_err(|e| fail(&e))?, score.map_err(|e| fail(&e))?);
        let dropout = self.dropout.map(|p| Dropout::new(p, self.seed()));
        let global = Spec { mask, score, scale: self.scale, dropout };
        let local = self.local(&global).map_err(|e| fail(&e))?;
        let seed = self.seed();
        Ok(Program { global, local, coordinates: self.coordinates(), seed })
    }

    /// Global index of the first row, head or batch entry of each leaf, or the map of all.
    fn places(&self) -> [(Leaf, i32, Option<Vec<i32>>); 5] {
        let [q, kv] = self.offsets;
        let [b, h, h_kv] = self.first;
        let [h_map, h_kv_map] = self.head_maps.clone().map_or([None, None], |maps| maps.map(Some));
        [
            (Leaf::B, b, self.b_map.clone()),
            (Leaf::H, h, h_map),
            (Leaf::HKv, h_kv, h_kv_map),
            (Leaf::Q, q, self.q_map.clone()),
            (Leaf::Kv, kv, self.kv_map.clone()),
        ]
    }

    fn coordinates(&self) -> Coordinates {
        let [b, h, h_kv, q, kv] = self.places().map(|(leaf, offset, map)| match map {
            Some(map) => Positions::Map(Buffer::vector(map_name(leaf), map)),
            None if offset != 0 => Positions::offset(offset),
            None => Positions::Rows,
        });
        let coordinates = Coordinates::new().batch(b).heads(h, h_kv).q(q).kv(kv);
        match self.whole {
            Some([q_len, kv_len]) => coordinates.lengths(q_len, kv_len),
            None => coordinates,
        }
    }

    /// `global` with rows for positions: offsets are constants here, not run-time scalars as in
    /// the crate `foveate`, which does this for its users.
    fn local(&self, global: &Spec) -> Result<Spec, ModError> {
        let places = self.places();
        let at = |leaf: Leaf| {
            let length = |i: usize| self.whole.map(|whole| Expr::from(whole[i]).dynamic().clone());
            let whole = match leaf {
                Leaf::QLen => length(0),
                Leaf::KvLen => length(1),
                _ => None,
            };
            let index = || DynExpr::leaf(leaf).typed::<i32>().expect("a coordinate is i32");
            let placed = places.iter().find(|(of, ..)| *of == leaf);
            let placed = placed.map(|(_, offset, map)| match map {
                Some(map) => Buffer::vector(map_name(leaf), map.clone()).at([index()]),
                None => index() + *offset,
            });
            whole.or(placed.map(|e| e.dynamic().clone())).unwrap_or_else(|| DynExpr::leaf(leaf))
        };
        let mask = |m: &MaskMod| MaskMod::new(m.at(&at).dynamic());
        let score = |s: &ScoreMod| ScoreMod::new(s.at(&at).dynamic());
        Ok(Spec {
            mask: global.mask.as_ref().map(mask).transpose()?,
            score: global.score.as_ref().map(score).transpose()?,
            scale: global.scale,
            dropout: global.dropout.as_ref().map(|d| d.map(mask)).transpose()?,
        })
    }
}

/// What the map of a leaf is called.
fn map_name(leaf: Leaf) -> String {
    format!("{}_map", leaf.name())
}

/// A captured buffer of a case.
fn buffer(
    at: &str,
    name: &str,
    spec: &BufferSpec,
    random: &mut Random,
) -> Result<AnyBuffer, CaseError> {
    let elems: usize = spec.shape.iter().product();
    let last = spec.shape.last().copied().unwrap_or(0);
    let BufferSpec { ints, floats, doc_lens, below, normal, chance, .. } = spec;
    let mut all = Vec::new();
    all.extend(ints.clone().map(BufferData::I32));
    all.extend(floats.clone().map(BufferData::F32));
    all.extend(doc_lens.as_ref().map(|lens| {
        let mut end = 0;
        let ends: Vec<usize> = lens.iter().map(|n| (end += n, end).1).collect();
        let last_id = lens.len().saturating_sub(1);
        let of = |i: usize| ends.iter().filter(|&&end| end <= i).count().min(last_id);
        BufferData::I32((0..elems).map(|i| of(i % last.max(1)) as i32).collect())
    }));
    all.extend(below.map(|n| {
        BufferData::I32((0..elems).map(|_| random.below(n.max(1) as usize) as i32).collect())
    }));
    all.extend(
        normal.map(|x| BufferData::F32((0..elems).map(|_| random.normal() as f32 * x).collect())),
    );
    all.extend(chance.map(|p| BufferData::Bool((0..elems).map(|_| random.unit() < p).collect())));
    let fail = |e: &dyn std::fmt::Display| CaseError::new(at, format!("buffer `{name}`: {e}"));
    let [data] = <[BufferData; 1]>::try_from(all)
        .map_err(|all| fail(&format!("{} ways to fill it, not one", all.len())))?;
    let made = AnyBuffer::new(name, &spec.shape, data, spec.learned);
    let made = made.map_err(|e| fail(&e))?;
    if spec.is_shared() { shared(spec, &made).map_err(|e| fail(&e)) } else { Ok(made) }
}

/// The elements of `dense` laid out in memory as `spec` says.
fn shared(spec: &BufferSpec, dense: &AnyBuffer) -> Result<AnyBuffer, String> {
    let shape = dense.shape();
    let known = |name: &String| {
        let found = ElementType::ALL.into_iter().find(|element| element.name() == name);
        found.ok_or_else(|| format!("there is no element type `{name}`"))
    };
    let element = spec.element.as_ref().map_or(Ok(dense.element()), known)?;
    let order = spec.order.clone().unwrap_or_else(|| (0..shape.len()).collect());
    let mut sorted = order.clone();
    sorted.sort_unstable();
    if !sorted.iter().copied().eq(0..shape.len()) {
        return Err(format!("order {order:?} does not name each of {} axes once", shape.len()));
    }
    let mut strides = vec![0; shape.len()];
    let mut step = spec.gap.unwrap_or(1);
    for &axis in order.iter().rev().filter(|axis| !spec.broadcast.contains(axis)) {
        strides[axis] = step;
        step *= shape[axis];
    }
    // A few elements before the first and between neighbours that nobody reads.
    let offset = 3;
    let mut memory = vec![77.0f64; step + offset];
    let data = dense.to_data();
    for at in 0..dense.elems() {
        let mut rest = at;
        let mut place = offset;
        let mut first = true;
        for (axis, &len) in shape.iter().enumerate().rev() {
            place += rest % len * strides[axis];
            first &= strides[axis] > 0 || rest.is_multiple_of(len);
            rest /= len;
        }
        if first {
            memory[place] = match &data {
                BufferData::Bool(v) => f64::from(u8::from(v[at])),
                BufferData::I32(v) => f64::from(v[at]),
                BufferData::F32(v) => f64::from(v[at]),
            };
        }
    }
    macro_rules! elements {
        ($($element:ident => $of:expr),*) => {
            match element {
                $(ElementType::$element => {
                    SharedElements::from_vec(memory.into_iter().map($of).collect::<Vec<_>>())
                })*
            }
        };
    }
    let elements = elements!(
        Bool => |x| x != 0.0,
        U8 => |x| x as u8,
        I8 => |x| x as i8,
        I16 => |x| x as i16,
        I32 => |x| x as i32,
        I64 => |x| x as i64,
        F16 => <f16 as Float>::from_f64,
        BF16 => <bf16 as Float>::from_f64,
        F32 => |x| x as f32,
        F64 => |x| x
    );
    AnyBuffer::shared(dense.name(), &elements, shape, &strides, offset, spec.learned)
        .map_err(|e| e.to_string())
}
