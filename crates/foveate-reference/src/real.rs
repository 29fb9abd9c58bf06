//! The two precisions the oracle runs in.

use std::ops::{Add, AddAssign, Div, Mul, Neg, Sub};

/// f32 or f64.
pub trait Real:
    Copy
    + PartialOrd
    + Add<Output = Self>
    + Sub<Output = Self>
    + Mul<Output = Self>
    + Div<Output = Self>
    + Neg<Output = Self>
    + AddAssign
{
    /// Rounded from f64.
    fn of(x: f64) -> Self;
    /// Widened.
    fn to_f64(self) -> f64;
    /// `f` of it, one of the functions of a real variable, in its own precision.
    fn apply(self, f: Function) -> Self;
    /// `self^y`.
    fn pow(self, y: Self) -> Self;
}

/// Functions of a real variable.
#[derive(Clone, Copy, Debug)]
pub enum Function {
    Exp,
    Exp2,
    Ln,
    Log2,
    Sqrt,
    Tanh,
    Sin,
    Cos,
    Erf,
    Floor,
}

macro_rules! real {
    ($t:ident) => {
        impl Real for $t {
            fn of(x: f64) -> Self {
                x as $t
            }
            fn to_f64(self) -> f64 {
                self.into()
            }
            fn apply(self, f: Function) -> Self {
                match f {
                    Function::Exp => self.exp(),
                    Function::Exp2 => self.exp2(),
                    Function::Ln => self.ln(),
                    Function::Log2 => self.log2(),
                    Function::Sqrt => self.sqrt(),
                    Function::Tanh => self.tanh(),
                    Function::Sin => self.sin(),
                    Function::Cos => self.cos(),
                    Function::Erf => erf(self.into()) as $t,
                    Function::Floor => self.floor(),
                }
            }
            fn pow(self, y: Self) -> Self {
                self.powf(y)
            }
        }
    };
}

real!(f32);
real!(f64);

/// The error function by its series `2/√π · e^(-x²) · Σ 2ⁿ x^(2n+1) / (2n+1)!!`, whose terms are
/// all of one sign, so that nothing cancels.
fn erf(x: f64) -> f64 {
    if x.is_nan() || x.abs() > 6.0 {
        return if x.is_nan() { x } else { x.signum() };
    }
    let (mut term, mut sum, mut n) = (x, x, 0.0);
    while term.abs() > sum.abs() * 1e-17 {
        n += 1.0;
        term *= 2.0 * x * x / (2.0 * n + 1.0);
        sum += term;
    }
    std::f64::consts::FRAC_2_SQRT_PI * (-x * x).exp() * sum
}

#[cfg(test)]
mod tests {
    use super::erf;

    #[test]
    fn erf_agrees_with_tabulated_values() {
        for (x, y) in [
            (0.0, 0.0),
            (0.5, 0.520_499_877_813_046_5),
            (1.0, 0.842_700_792_949_714_9),
            (2.0, 0.995_322_265_018_952_7),
            (4.0, 0.999_999_984_582_742_1),
            (9.0, 1.0),
        ] {
            assert!((erf(x) - y).abs() < 1e-15, "erf({x}) = {}", erf(x));
            assert!((erf(-x) + y).abs() < 1e-15);
        }
        assert!(erf(f64::NAN).is_nan());
    }
}
