//! Moments in 8 bits, in blocks of 256 elements.
//!
//! A moment takes one array of 32-bit words: four codes a word for all blocks, then a scale (f32) for
//! each block. A code is a small float `c`: four bits of exponent and the rest mantissa, with zero and
//! subnormals as IEEE has them and no infinities. Of m it is `sign·c·scale`, with 3 bits of mantissa; of
//! v, which is not negative, `(c·scale)²`, with 4: the root has half the range. The scale is such that
//! the largest of a block is the largest code, so that what was read from codes is written back to the
//! same codes. Codes of a step are rounded stochastically: a small change of a moment would be lost by
//! rounding to the nearest. A v that is not zero stays so, since it divides.

use std::ops::Range;

/// Elements of a block.
pub const BLOCK: usize = 256;

/// Which moment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Moment {
    /// m.
    Mean,
    /// v.
    Square,
}

impl Moment {
    /// Bits of mantissa.
    const fn mantissa(self) -> u32 {
        match self {
            Self::Mean => 3,
            Self::Square => 4,
        }
    }

    /// The largest code's number.
    fn top(self) -> f32 {
        2.0 - 0.5f32.powi(self.mantissa() as i32)
    }
}

/// 32-bit words of `elems` elements.
pub fn words(elems: usize) -> usize {
    elems.div_ceil(BLOCK).saturating_mul(BLOCK / 4 + 1)
}

/// Bits that are added to what a code cuts off: half of it, or all of them random.
#[derive(Clone, Copy, Debug)]
pub enum Rounding {
    /// To the nearest.
    Nearest,
    /// Up with the probability of what is cut off, by the hash of this number and the element's index.
    Stochastic(u64),
}

impl Rounding {
    fn bits(self, moment: Moment, element: usize) -> u32 {
        let cut = 23 - moment.mantissa();
        match self {
            Self::Nearest => 1 << (cut - 1),
            Self::Stochastic(random) => {
                let bits = foveate::tensor::random::mix(random.wrapping_add(element as u64));
                let own = if moment == Moment::Mean { bits } else { bits >> 40 };
                own as u32 & ((1 << cut) - 1)
            }
        }
    }
}

/// The number of a code without its sign.
fn number(code: u32, mantissa: u32) -> f32 {
    match code >> mantissa {
        0 => code as f32 * 0.5f32.powi(14 + mantissa as i32),
        _ => f32::from_bits((code + (112 << mantissa)) << (23 - mantissa)),
    }
}

/// The code of a number from 0 to the largest code's.
fn code(y: f32, mantissa: u32, add: u32) -> u32 {
    let cut = 23 - mantissa;
    let code = if y < 0.5f32.powi(14) {
        let part = add as f32 * 0.5f32.powi(cut as i32);
        (y * 2f32.powi(14 + mantissa as i32) + part) as u32
    } else {
        ((y.to_bits() + add) >> cut) - (112 << mantissa)
    };
    code.min((16 << mantissa) - 1)
}

/// A moment's codes, one an element, and its scales, one a block.
pub fn parts(words: &[f32], elems: usize) -> (&[u8], &[f32]) {
    let (codes, scales) = words.split_at(elems.div_ceil(BLOCK) * BLOCK / 4);
    (bytemuck::cast_slice(codes), scales)
}

/// [`parts`], to be changed.
pub fn parts_mut(words: &mut [f32], elems: usize) -> (&mut [u8], &mut [f32]) {
    let (codes, scales) = words.split_at_mut(elems.div_ceil(BLOCK) * BLOCK / 4);
    (bytemuck::cast_slice_mut(codes), scales)
}

/// The numbers of whole blocks; the last may be cut.
pub fn decode(moment: Moment, codes: &[u8], scales: &[f32], values: &mut [f32]) {
    for ((values, codes), &scale) in values.chunks_mut(BLOCK).zip(codes.chunks(BLOCK)).zip(scales) {
        for (x, &code) in values.iter_mut().zip(codes) {
            *x = match moment {
                Moment::Mean => {
                    let x = number(u32::from(code & 0x7f), 3) * scale;
                    if code & 0x80 == 0 { x } else { -x }
                }
                Moment::Square => {
                    let root = number(u32::from(code), 4) * scale;
                    root * root
                }
            };
        }
    }
}

/// Codes and scales of whole blocks from their numbers; `first` is the index of the first element.
pub fn encode(
    moment: Moment,
    values: &[f32],
    first: usize,
    rounding: Rounding,
    codes: &mut [u8],
    scales: &mut [f32],
) {
    let mantissa = moment.mantissa();
    let magnitude = |x: f32| if moment == Moment::Mean { x.abs() } else { x.sqrt() };
    let blocks = values.chunks(BLOCK).zip(codes.chunks_mut(BLOCK)).zip(scales).enumerate();
    for (block, ((values, codes), scale)) in blocks {
        let most = values.iter().fold(0f32, |most, &x| most.max(magnitude(x)));
        *scale = most / moment.top();
        let inverse = if *scale > 0.0 { 1.0 / *scale } else { 0.0 };
        for (i, (&x, to)) in values.iter().zip(codes).enumerate() {
            let y = magnitude(x) * inverse;
            let code = code(y, mantissa, rounding.bits(moment, first + block * BLOCK + i));
            *to = match moment {
                Moment::Mean => code as u8 | if x < 0.0 && code > 0 { 0x80 } else { 0 },
                Moment::Square => code.max(u32::from(y > 0.0)) as u8,
            };
        }
    }
}

/// Reads elements from `first` on of a moment of `elems` elements.
pub fn read(moment: Moment, words: &[f32], elems: usize, first: usize, into: &mut [f32]) {
    let (codes, scales) = parts(words, elems);
    let mut block = [0.0; BLOCK];
    for at in blocks(first, into.len()) {
        let start = at.start / BLOCK * BLOCK;
        decode(moment, &codes[start..start + BLOCK], &scales[start / BLOCK..], &mut block);
        into[at.start - first..at.end - first]
            .copy_from_slice(&block[at.start - start..at.end - start]);
    }
}

/// Writes elements from `first` on, each to the nearest. Those beside them in a block are written anew, and
/// may be rounded once more: [`Filler`] makes whole blocks of what comes in pieces.
pub fn write(moment: Moment, words: &mut [f32], elems: usize, first: usize, from: &[f32]) {
    let mut block = [0.0; BLOCK];
    let (codes, scales) = parts_mut(words, elems);
    for at in blocks(first, from.len()) {
        let start = at.start / BLOCK * BLOCK;
        let (codes, scales) =
            (&mut codes[start..start + BLOCK], &mut scales[start / BLOCK..=start / BLOCK]);
        decode(moment, codes, scales, &mut block);
        block[at.start - start..at.end - start]
            .copy_from_slice(&from[at.start - first..at.end - first]);
        encode(moment, &block, start, Rounding::Nearest, codes, scales);
    }
}

/// Makes whole blocks of elements that come in pieces, in the order of their places; what lies between is 0.
#[derive(Debug, Default)]
pub struct Filler {
    /// The place of the first pending element: a block's.
    start: usize,
    pending: Vec<f32>,
}

impl Filler {
    /// Takes elements from `first` on, none of which came before, and writes the blocks that are whole.
    ///
    /// # Errors
    /// Those of `write`.
    pub fn put<E>(
        &mut self,
        first: usize,
        values: &[f32],
        mut write: impl FnMut(usize, &[f32]) -> Result<(), E>,
    ) -> Result<(), E> {
        if first >= (self.start + self.pending.len()).next_multiple_of(BLOCK) {
            self.finish(&mut write)?;
            self.start = first / BLOCK * BLOCK;
        }
        self.pending.resize(first - self.start, 0.0);
        self.pending.extend_from_slice(values);
        let whole = self.pending.len() / BLOCK * BLOCK;
        if whole > 0 {
            write(self.start, &self.pending[..whole])?;
            self.pending.drain(..whole);
            self.start += whole;
        }
        Ok(())
    }

    /// Writes what is left.
    ///
    /// # Errors
    /// Those of `write`.
    pub fn finish<E>(
        &mut self,
        mut write: impl FnMut(usize, &[f32]) -> Result<(), E>,
    ) -> Result<(), E> {
        if !self.pending.is_empty() {
            write(self.start, &self.pending)?;
            self.pending.clear();
        }
        Ok(())
    }
}

/// `len` elements from `first` on, those of each block.
fn blocks(first: usize, len: usize) -> impl Iterator<Item = Range<usize>> {
    let end = first + len;
    let cuts = (first / BLOCK..end.div_ceil(BLOCK))
        .map(move |block| (block * BLOCK).max(first)..((block + 1) * BLOCK).min(end));
    cuts.filter(|at| !at.is_empty())
}

#[cfg(test)]
mod tests {
    use super::*;
    use foveate::tensor::random::Random;

    /// Numbers of many sizes, some 0.
    fn values(elems: usize, moment: Moment, seed: u64) -> Vec<f32> {
        let mut random = Random::new(seed);
        let each = |_| {
            let x = (random.normal() * 10f64.powf(random.unit() * -9.0)) as f32;
            match (random.below(20), moment) {
                (0, _) => 0.0,
                (_, Moment::Mean) => x,
                (_, Moment::Square) => x * x,
            }
        };
        let mut all: Vec<f32> = (0..elems).map(each).collect();
        // Some pieces, and more than a block, of nothing.
        for at in [100..200, 600..1100] {
            all.get_mut(at).into_iter().flatten().for_each(|x| *x = 0.0);
        }
        all
    }

    #[test]
    fn what_is_read_from_codes_is_written_back_to_the_same_codes() {
        for moment in [Moment::Mean, Moment::Square] {
            let elems = 5 * BLOCK + 77;
            let mut kept = vec![0.0; words(elems)];
            write(moment, &mut kept, elems, 0, &values(elems, moment, 1));
            let mut read_back = vec![f32::NAN; elems];
            read(moment, &kept, elems, 0, &mut read_back);
            let mut again = vec![0.0; words(elems)];
            // In pieces that are no blocks; what is between two of them is 0 anyway.
            let mut filler = Filler::default();
            let mut put = |first: usize, some: &[f32]| {
                write(moment, &mut again, elems, first, some);
                Ok::<_, ()>(())
            };
            for (i, piece) in read_back.chunks(100).enumerate() {
                if piece.iter().any(|&x| x != 0.0) {
                    filler.put(i * 100, piece, &mut put).unwrap();
                }
            }
            filler.finish(put).unwrap();
            let bits = |words: &[f32]| words.iter().map(|w| w.to_bits()).collect::<Vec<_>>();
            assert_eq!(bits(&again), bits(&kept), "{moment:?}");
        }
    }

    #[test]
    fn codes_are_near_their_numbers_and_right_in_the_mean() {
        for moment in [Moment::Mean, Moment::Square] {
            let x = values(BLOCK, moment, 2);
            let most = x.iter().fold(0f32, |most, x| most.max(x.abs()));
            let (mut kept, mut found) = (vec![0.0; words(BLOCK)], vec![0.0; BLOCK]);
            write(moment, &mut kept, BLOCK, 0, &x);
            read(moment, &kept, BLOCK, 0, &mut found);
            // Half a step: of the root of v, whose square has twice its relative error.
            for (x, found) in x.iter().zip(&found) {
                let near = match moment {
                    Moment::Mean => (x - found).abs() <= x.abs() / 15.0 + most * 2f32.powi(-18),
                    Moment::Square => {
                        let (a, b) = (x.sqrt(), found.sqrt());
                        (a - b).abs() <= a / 31.0 + most.sqrt() * 2f32.powi(-18)
                    }
                };
                assert!(near, "{moment:?}: {x} became {found}");
                // What divides is 0 only where it was.
                assert!(moment == Moment::Mean || (*x == 0.0) == (*found == 0.0), "{x} {found}");
            }
            let (codes, scales) = parts_mut(&mut kept, BLOCK);
            let rounds = 4000;
            let mut sums = vec![0.0f64; BLOCK];
            for seed in 0..rounds {
                encode(moment, &x, 0, Rounding::Stochastic(seed * 1_000_003), codes, scales);
                decode(moment, codes, scales, &mut found);
                for (sum, &found) in sums.iter_mut().zip(&found) {
                    let found = f64::from(found);
                    *sum += if moment == Moment::Mean { found } else { found.sqrt() };
                }
            }
            let size = f64::from(if moment == Moment::Mean { most } else { most.sqrt() });
            for (x, sum) in x.iter().zip(sums) {
                let (x, mean) = (f64::from(*x), sum / rounds as f64);
                let x = if moment == Moment::Mean { x } else { x.sqrt() };
                // A step is at most an eighth of the number; what is never 0 is a little more.
                let allowed = 0.02 * x.abs() + size * 2f64.powi(-18);
                assert!((mean - x).abs() < allowed, "{moment:?}: {mean} for {x}");
            }
        }
    }
}
