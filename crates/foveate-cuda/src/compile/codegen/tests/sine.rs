//! The sine and cosine of 16-bit operands' scores, run on the CPU, against f64.

use foveate_mods::ir::mix;

use super::PRELUDE;
use super::execute::{Arena, program_output};

/// What `kernels/mods.cuh` and `docs/gpu.md` promise, and up to where.
const ERROR: f64 = 1.0 / (1 << 21) as f64;
const UP_TO: f32 = (1 << 26) as f32;

/// The device function, and a program that answers each float of its input with sine and cosine.
fn program() -> String {
    let start = PRELUDE.find("__device__ float fast_sine(").expect("it is in the prelude");
    let text = &PRELUDE[start..];
    let text = &text[..text.find("\n}\n").expect("it ends") + 3];
    [
        include_str!("shim.h"),
        // Wraps where the device's saturates: neither matters, far past where results are promised.
        "static int __float2int_rn(float x) { return int(i64(rintf(x))); }\n",
        text,
        "int main() {\n\
             take<i64>(), take<i64>(); // an empty arena\n\
             for (int n = take<int>(); n > 0; --n) {\n\
                 float x = take<float>();\n\
                 give(fast_sine(x, 0)), give(fast_sine(x, 1));\n\
             }\n\
         }\n",
    ]
    .concat()
}

/// Sine and cosine of each; nothing, and a line that says so, without a host compiler.
fn found(all: &[f32]) -> Option<Vec<[f32; 2]>> {
    let mut input = (all.len() as i32).to_le_bytes().to_vec();
    input.extend(all.iter().flat_map(|x| x.to_le_bytes()));
    let bytes = program_output(&program(), Arena::default(), input)?;
    let float = |bytes: &[u8]| f32::from_le_bytes(bytes.try_into().unwrap());
    let found: Vec<_> =
        bytes.chunks(8).map(|both| [float(&both[..4]), float(&both[4..])]).collect();
    assert_eq!(found.len(), all.len());
    Some(found)
}

#[test]
fn sine_and_cosine_are_as_close_to_f64_as_is_said() {
    let seed = 11;
    println!("seed {seed}");
    // Every power of two from the subnormals on, evenly within each, and what is next to multiples
    // of a quarter turn, where a result is small and the reduction loses most.
    let step = |i: i32| f32::from_bits(((i % 153) << 23) as u32 | mix(seed, i) as u32 & 0x7f_ffff);
    let quarter =
        |i: i32| (f64::from(mix(seed, i) as u32 >> 7) * std::f64::consts::FRAC_PI_2) as f32;
    let each = (0..150_000).flat_map(|i| [step(i), quarter(i)]);
    let mut all: Vec<f32> = each.filter(|x| *x <= UP_TO).flat_map(|x| [x, -x]).collect();
    all.extend([0.0, -0.0, UP_TO, -UP_TO]);
    assert!(all.len() > 400_000, "{}", all.len());
    let Some(found) = found(&all) else { return };
    let mut worst = [(0.0, 0.0); 2];
    for (&x, found) in all.iter().zip(&found) {
        let wanted = [f64::from(x).sin(), f64::from(x).cos()];
        for ((worst, found), wanted) in worst.iter_mut().zip(found).zip(wanted) {
            let off = (f64::from(*found) - wanted).abs();
            if off > worst.0 || off.is_nan() {
                *worst = (off, x);
            }
        }
    }
    let [(sine, at), (cosine, at_cosine)] = worst;
    println!("off by {sine:e} at {at} and {cosine:e} at {at_cosine}; {ERROR:e} are allowed");
    assert!(sine <= ERROR && cosine <= ERROR);
}

#[test]
fn sines_of_what_is_too_large_stay_numbers_and_those_of_no_number_do_not() {
    let large: Vec<f32> = (26..128).flat_map(|e| [2f32.powi(e), -1.7 * 2f32.powi(e)]).collect();
    let Some(results) = found(&large) else { return };
    for (x, [sine, cosine]) in large.iter().zip(results) {
        assert!(sine.abs() <= 1.001 && cosine.abs() <= 1.001, "{x}: {sine}, {cosine}");
    }
    for results in found(&[f32::NAN, f32::INFINITY, f32::NEG_INFINITY]).unwrap() {
        assert!(results.iter().all(|x| x.is_nan()), "{results:?}");
    }
}
