//! Ranges of values and what operations do to them.
//!
//! Every rule returns a range that holds the result for all operands in the given ranges, with
//! the wrapping and rounding of [`crate::arithmetic`]. Where a rule would be long, it returns
//! everything instead.

use crate::arithmetic;
use crate::op::{BinaryOp, UnaryOp};
use crate::value::{ScalarValue, Type};

/// A set of values that holds at least the possible ones.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Interval {
    Bool { yes: bool, no: bool },
    I32 { lo: i32, hi: i32 },
    F32 { lo: f32, hi: f32, nan: bool },
}

use Interval::{Bool, F32, I32};

impl Interval {
    pub(crate) const ANY_BOOL: Self = Bool { yes: true, no: true };
    pub(crate) const ANY_I32: Self = I32 { lo: i32::MIN, hi: i32::MAX };
    pub(crate) const ANY_F32: Self = F32 { lo: f32::NEG_INFINITY, hi: f32::INFINITY, nan: true };

    pub(crate) fn one(value: ScalarValue) -> Self {
        match value {
            ScalarValue::Bool(v) => Bool { yes: v, no: !v },
            ScalarValue::I32(v) => I32 { lo: v, hi: v },
            ScalarValue::F32(v) if v.is_nan() => Self::ANY_F32,
            ScalarValue::F32(v) => F32 { lo: v, hi: v, nan: false },
        }
    }

    /// Whether every value is an index of an axis of length `len`.
    pub(crate) fn within(self, len: usize) -> bool {
        matches!(self, I32 { lo, hi } if lo >= 0 && (hi as usize) < len)
    }

    /// The positions that indices mean on an axis of length `len`: [`crate::eval::position`] of them.
    pub(crate) fn position(self, len: usize, from_end: bool) -> Self {
        let I32 { lo, hi } = self else { unreachable!("an index is i32") };
        if !from_end || lo >= 0 {
            return self;
        }
        let len = i64::try_from(len).unwrap_or(i64::MAX).min(i64::from(i32::MAX));
        let (lo, hi) = (i64::from(lo), i64::from(hi));
        if hi < 0 { int(lo + len, hi + len) } else { int((lo + len).min(0), hi.max(len - 1)) }
    }

    fn known(self) -> Option<ScalarValue> {
        match self {
            Bool { yes, no } if yes != no => Some(ScalarValue::Bool(yes)),
            I32 { lo, hi } if lo == hi => Some(ScalarValue::I32(lo)),
            // The ends of a range do not tell the two zeros apart.
            F32 { lo, hi, nan: false } if lo == hi && lo != 0.0 => Some(ScalarValue::F32(lo)),
            _ => None,
        }
    }

    pub(crate) fn union(self, other: Self) -> Self {
        match (self, other) {
            (Bool { yes, no }, Bool { yes: y, no: n }) => Bool { yes: yes | y, no: no | n },
            (I32 { lo, hi }, I32 { lo: l, hi: h }) => I32 { lo: lo.min(l), hi: hi.max(h) },
            (F32 { lo, hi, nan }, F32 { lo: l, hi: h, nan: n }) => {
                F32 { lo: lo.min(l), hi: hi.max(h), nan: nan | n }
            }
            _ => unreachable!("both have one type"),
        }
    }
}

/// The i32 range `lo..=hi`, or everything when it would wrap.
fn int(lo: i64, hi: i64) -> Interval {
    match (i32::try_from(lo), i32::try_from(hi)) {
        (Ok(lo), Ok(hi)) => I32 { lo, hi },
        _ => Interval::ANY_I32,
    }
}

/// The f32 range that holds `ends`, or everything when one is NaN.
fn float(ends: &[f32], nan: bool) -> Interval {
    if ends.iter().any(|x| x.is_nan()) {
        return Interval::ANY_F32;
    }
    let lo = ends.iter().copied().fold(f32::INFINITY, f32::min);
    let hi = ends.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    F32 { lo, hi, nan }
}

/// Widens by more than the error of the elementary functions, so that approximations that are
/// not quite monotone stay inside.
fn widened(lo: f32, hi: f32, nan: bool) -> Interval {
    let slack = |x: f32| if x.is_finite() { x.abs() * 1e-6 + f32::MIN_POSITIVE } else { 0.0 };
    F32 { lo: lo - slack(lo), hi: hi + slack(hi), nan }
}

pub(crate) fn unary(op: UnaryOp, x: Interval) -> Interval {
    if let Some(x) = x.known() {
        return Interval::one(arithmetic::unary(op, x));
    }
    match (op, x) {
        (UnaryOp::Not, Bool { yes, no }) => Bool { yes: no, no: yes },
        (UnaryOp::Neg, I32 { lo, hi }) => int(-i64::from(hi), -i64::from(lo)),
        (UnaryOp::Abs, I32 { lo, hi }) => {
            let (lo, hi) = (i64::from(lo), i64::from(hi));
            let least = if lo <= 0 && 0 <= hi { 0 } else { lo.abs().min(hi.abs()) };
            int(least, lo.abs().max(hi.abs()))
        }
        (UnaryOp::Detach, x) => x,
        (UnaryOp::Unit, _) => F32 { lo: 0.0, hi: 1.0, nan: false },
        (op, F32 { lo, hi, nan }) => {
            let ends = |nan| {
                let f = |x| arithmetic::unary_f32(op, x);
                widened(f(lo), f(hi), nan)
            };
            match op {
                UnaryOp::Neg => F32 { lo: -hi, hi: -lo, nan },
                UnaryOp::Abs => {
                    let least = if lo <= 0.0 && 0.0 <= hi { 0.0 } else { lo.abs().min(hi.abs()) };
                    F32 { lo: least, hi: lo.abs().max(hi.abs()), nan }
                }
                UnaryOp::Floor => F32 { lo: lo.floor(), hi: hi.floor(), nan },
                UnaryOp::Exp | UnaryOp::Exp2 | UnaryOp::Tanh | UnaryOp::Sigmoid | UnaryOp::Erf => {
                    ends(nan)
                }
                UnaryOp::Log | UnaryOp::Log2 | UnaryOp::Sqrt if lo >= 0.0 => ends(nan),
                UnaryOp::Log | UnaryOp::Log2 | UnaryOp::Sqrt | UnaryOp::Rsqrt => Interval::ANY_F32,
                UnaryOp::Sin | UnaryOp::Cos => F32 { lo: -1.0, hi: 1.0, nan: true },
                UnaryOp::Not | UnaryOp::Unit | UnaryOp::Detach => {
                    unreachable!("{op:?} is above, or takes no f32")
                }
            }
        }
        _ => unreachable!("a graph is well-typed"),
    }
}

pub(crate) fn binary(op: BinaryOp, x: Interval, y: Interval) -> Interval {
    if let (Some(x), Some(y)) = (x.known(), y.known()) {
        return Interval::one(arithmetic::binary(op, x, y));
    }
    match (x, y) {
        (Bool { yes, no }, Bool { yes: y, no: n }) => match op {
            BinaryOp::And => Bool { yes: yes & y, no: no | n },
            BinaryOp::Or => Bool { yes: yes | y, no: no & n },
            BinaryOp::Xor | BinaryOp::Eq | BinaryOp::Ne => Interval::ANY_BOOL,
            op => unreachable!("{op:?} does not take bools"),
        },
        (I32 { lo, hi }, I32 { lo: l, hi: h }) => {
            integers(op, (lo.into(), hi.into()), (l.into(), h.into()))
        }
        (F32 { lo, hi, nan }, F32 { lo: l, hi: h, nan: n }) => {
            floats(op, (lo, hi), (l, h), nan | n)
        }
        _ => unreachable!("both have one type"),
    }
}

fn integers(op: BinaryOp, (lo, hi): (i64, i64), (l, h): (i64, i64)) -> Interval {
    let corners = |f: &dyn Fn(i64, i64) -> i64| {
        let all = [f(lo, l), f(lo, h), f(hi, l), f(hi, h)];
        int(*all.iter().min().expect("four"), *all.iter().max().expect("four"))
    };
    let apart = hi < l || h < lo;
    match op {
        BinaryOp::Add => int(lo + l, hi + h),
        BinaryOp::Sub => int(lo - h, hi - l),
        BinaryOp::Mul => corners(&|x, y| x * y),
        BinaryOp::Div if l > 0 || h < 0 => corners(&|x, y| x.div_euclid(y) - floor_fix(x, y)),
        BinaryOp::Div => {
            let most = lo.abs().max(hi.abs());
            int(-most, most)
        }
        BinaryOp::Rem if l == h && l > 0 && lo.div_euclid(l) == hi.div_euclid(l) => {
            int(lo.rem_euclid(l), hi.rem_euclid(l))
        }
        BinaryOp::Rem => int(0, (l.abs().max(h.abs()) - 1).max(0)),
        BinaryOp::Min => int(lo.min(l), hi.min(h)),
        BinaryOp::Max => int(lo.max(l), hi.max(h)),
        BinaryOp::Eq => Bool { yes: !apart, no: true },
        BinaryOp::Ne => Bool { yes: true, no: !apart },
        BinaryOp::Lt => Bool { yes: lo < h, no: hi >= l },
        BinaryOp::Le => Bool { yes: lo <= h, no: hi > l },
        BinaryOp::And => conjunction((lo, hi), (l, h)),
        BinaryOp::Or if lo >= 0 && l >= 0 => int(lo.max(l), below_power(hi | h)),
        BinaryOp::Xor if lo >= 0 && l >= 0 => int(0, below_power(hi | h)),
        BinaryOp::Shl if l == h && (0..32).contains(&l) => int(lo << l, hi << l),
        BinaryOp::Shr => {
            // A distance outside of 0..32 shifts like 31.
            let (near, far) = if l < 0 { (0, 31) } else { (l.min(31), h.min(31)) };
            int((lo >> near).min(lo >> far), (hi >> near).max(hi >> far))
        }
        BinaryOp::Or | BinaryOp::Xor | BinaryOp::Shl | BinaryOp::Mix => Interval::ANY_I32,
        BinaryOp::Pow => unreachable!("{op:?} does not take i32"),
    }
}

/// The smallest `2^k - 1` that is not below `x`, which is not negative.
fn below_power(x: i64) -> i64 {
    (x as u64 + 1).next_power_of_two() as i64 - 1
}

/// `x & y`: never above an operand that is not negative. A known `-2^k` rounds down and a known
/// `2^k - 1` is a remainder.
fn conjunction((lo, hi): (i64, i64), (l, h): (i64, i64)) -> Interval {
    let known = if l == h { Some(((lo, hi), l)) } else { (lo == hi).then_some(((l, h), lo)) };
    if let Some(((first, last), y)) = known {
        let rounds = y < 0 && (-y).count_ones() == 1;
        let rest = y >= 0 && (y + 1).count_ones() == 1 && first & !y == last & !y;
        if rounds || rest {
            return int(first & y, last & y);
        }
    }
    match (lo >= 0, l >= 0) {
        (true, true) => int(0, hi.min(h)),
        (true, false) => int(0, hi),
        (false, true) => int(0, h),
        (false, false) => int(i64::from(i32::MIN), hi.max(h)),
    }
}

/// What Euclidean division is above floor division: they differ for negative divisors that
/// leave a remainder.
fn floor_fix(x: i64, y: i64) -> i64 {
    i64::from(y < 0 && x.rem_euclid(y) != 0)
}

fn floats(op: BinaryOp, (lo, hi): (f32, f32), (l, h): (f32, f32), nan: bool) -> Interval {
    match op {
        // Rounding to nearest keeps sums and products of the ends at the ends.
        BinaryOp::Add => float(&[lo + l, hi + h, lo + h, hi + l], nan),
        BinaryOp::Sub => float(&[lo - h, hi - l, lo - l, hi - h], nan),
        BinaryOp::Mul => {
            let infinite = |x: f32, y: f32| x.is_infinite() || y.is_infinite();
            let zero = |x: f32, y: f32| x <= 0.0 && 0.0 <= y;
            if (infinite(lo, hi) && zero(l, h)) || (infinite(l, h) && zero(lo, hi)) {
                return Interval::ANY_F32;
            }
            float(&[lo * l, lo * h, hi * l, hi * h], nan)
        }
        BinaryOp::Div if l > 0.0 || h < 0.0 => float(&[lo / l, lo / h, hi / l, hi / h], nan),
        BinaryOp::Min if !nan => F32 { lo: lo.min(l), hi: hi.min(h), nan },
        BinaryOp::Max if !nan => F32 { lo: lo.max(l), hi: hi.max(h), nan },
        // The other operand stands in for a NaN.
        BinaryOp::Min | BinaryOp::Max => F32 { lo: lo.min(l), hi: hi.max(h), nan },
        BinaryOp::Eq => Bool { yes: lo <= h && l <= hi, no: true },
        BinaryOp::Ne => Bool { yes: true, no: lo <= h && l <= hi },
        BinaryOp::Lt => Bool { yes: lo < h, no: hi >= l || nan },
        BinaryOp::Le => Bool { yes: lo <= h, no: hi > l || nan },
        BinaryOp::Div | BinaryOp::Rem | BinaryOp::Pow => Interval::ANY_F32,
        BinaryOp::Mix
        | BinaryOp::And
        | BinaryOp::Or
        | BinaryOp::Xor
        | BinaryOp::Shl
        | BinaryOp::Shr => unreachable!("{op:?} does not take f32"),
    }
}

pub(crate) fn cast(to: Type, x: Interval) -> Interval {
    match (to, x) {
        (Type::I32, Bool { yes, no }) => I32 { lo: i32::from(!no), hi: i32::from(yes) },
        (Type::F32, Bool { yes, no }) => {
            F32 { lo: u8::from(!no).into(), hi: u8::from(yes).into(), nan: false }
        }
        (Type::F32, I32 { lo, hi }) => F32 { lo: lo as f32, hi: hi as f32, nan: false },
        (Type::I32, F32 { lo, hi, nan }) => {
            let range = I32 { lo: lo as i32, hi: hi as i32 };
            if nan { range.union(I32 { lo: 0, hi: 0 }) } else { range }
        }
        (Type::Bool, x) => match x {
            Bool { .. } => x,
            _ => Interval::ANY_BOOL,
        },
        (_, x) => x,
    }
}
