//! The optimiser over ranges of flat arenas, the norm of the gradients, and the totals of a step.
//!
//! | state | `weights` | `remainders` | `gradients` | `means`, `squares` | bytes a parameter |
//! | --- | --- | --- | --- | --- | --- |
//! | exact | bf16 | 16 bits | f32 | f32 | 16 |
//! | gradients bf16 | bf16 | 16 bits | bf16 | f32 | 14 |
//! | moments bf16, rounded stochastically | bf16 | 16 bits | f32 | bf16 | 12 |
//! | moments of 8 bits in blocks of 256, rounded stochastically | bf16 | 16 bits | f32 | 8 bits | 10.03 |
//! | all bf16, weights rounded stochastically | bf16 | none | bf16 | bf16 | 8 |
//! | f32 | f32 | none | f32 | f32 | 16 |
//!
//! The bf16 weight and the 16 bits that complete it are an exact f32 master (TransformerEngine's
//! `store_param_remainders`): the weight is the master rounded to the nearest, ties away from zero,
//! so that what is cut off is a signed 16-bit number. Random bits are parts of a hash of seed, step and
//! a quarter of the element's index among all parameters, so they depend on no launch, nor on the ranks
//! that have parts.

use std::ops::Range;

use foveate_gpu::abi::{Address, array_bytes};
use foveate_gpu::access::Accesses;
use foveate_gpu::{DeviceArray, DeviceTensor, ElementType, GpuError};
use foveate_nn::moments::{self, BLOCK};
use foveate_tensor::{DType, random};

use crate::launch::{Block, File, KernelLaunch, Source};
use crate::operands::{array, count};
use crate::params::{FactorParams, PieceParams, SquaresParams, UpdateParams};
pub use crate::params::{StepConstants, Totals};

/// f64 numbers that are as long as [`StepConstants`].
pub const CONSTANTS_LEN: usize = size_of::<StepConstants>() / 8;
/// f64 numbers that are as long as [`Totals`].
pub const TOTALS_LEN: usize = size_of::<Totals>() / 8;

impl StepConstants {
    /// Of step `step`, from 1 on.
    pub fn new(step: u64, seed: u64, rate: f64, betas: [f64; 2], clip: f64) -> Self {
        let scale = |beta: f64| (1.0 / (1.0 - beta.powf(step as f64))) as f32;
        Self {
            rate: rate as f32,
            mean_scale: scale(betas[0]),
            root_scale: scale(betas[1]),
            clip: clip as f32,
            random: random::mix(seed ^ random::mix(step)),
        }
    }

    /// Of step `step` of gradient descent with momentum.
    pub fn of_momentum(step: u64, seed: u64, rate: f64, clip: f64) -> Self {
        Self { mean_scale: 1.0, root_scale: 1.0, ..Self::new(step, seed, rate, [0.0; 2], clip) }
    }
}

/// How weights follow their gradients.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Rule {
    /// AdamW, of β₁, β₂ and what is added to the root.
    AdamW {
        /// β₁ and β₂.
        betas: [f32; 2],
        /// ε.
        eps: f32,
    },
    /// Gradient descent with momentum μ.
    Momentum(f32),
}

impl Totals {
    pub(crate) fn check(totals: &DeviceArray<'_>) -> Result<Address, GpuError> {
        array("totals", totals, ElementType::F64, TOTALS_LEN)?;
        Ok(totals.address)
    }
}

/// Elements of an arena that share a rate and a decay.
#[derive(Clone, Debug, PartialEq)]
pub struct Piece {
    /// Which: both ends multiples of 8, with f32 moments of 4, or [`Update`] reads less at once.
    pub range: Range<usize>,
    /// The first one's index among all parameters, which its random bits are drawn from: that in the
    /// arena, unless the arena is a rank's part. Pieces that share a block of 256 elements lie alike in
    /// both.
    pub origin: usize,
    /// Factor of the step's rate.
    pub rate: f32,
    /// Factor of the weight decay: 0 for gains and biases.
    pub decay: f32,
}

/// Pieces of one launch.
#[derive(Clone, Debug, PartialEq)]
pub struct Pieces {
    entries: Vec<PieceParams>,
    chunks: usize,
}

/// Elements that a CTA updates.
const CHUNK: usize = 4096;
const THREADS: u32 = 256;
/// Elements that a thread reads at once: 16 bytes of bf16 or of f32.
pub(crate) const VECTORS: [usize; 2] = [8, 4];
/// Most parts of a sum of squares.
const PARTS: usize = 1024;

impl Pieces {
    /// Empty pieces are left out.
    ///
    /// # Errors
    /// When two overlap, or they have too many elements for a launch.
    pub fn new(pieces: &[Piece]) -> Result<Self, GpuError> {
        let mut sorted: Vec<&Piece> = pieces.iter().filter(|p| !p.range.is_empty()).collect();
        sorted.sort_by_key(|piece| piece.range.start);
        if let Some(pair) = sorted.windows(2).find(|p| p[0].range.end > p[1].range.start) {
            let [a, b] = [&pair[0].range, &pair[1].range];
            return Err(GpuError::argument(format!("the pieces {a:?} and {b:?} overlap")));
        }
        let (mut entries, mut chunks) = (Vec::new(), 0);
        for &Piece { ref range, origin, rate, decay } in sorted {
            let place = |at: usize| {
                i64::try_from(at).map_err(|_| GpuError::argument(format!("a piece has place {at}")))
            };
            let (first, end) = (place(range.start)?, place(range.end)?);
            let chunk = count("chunks", chunks)?;
            entries.push(PieceParams {
                first,
                end,
                shift: place(origin)? - first,
                chunk,
                rate,
                decay,
                unused: 0,
            });
            chunks += range.len().div_ceil(CHUNK);
        }
        count("chunks", chunks)?;
        Ok(Self { entries, chunks })
    }

    /// What the device reads, of which [`Update::piece_table`] is the place: f64 numbers in all.
    pub fn len_f64(&self) -> usize {
        self.entries.len() * size_of::<PieceParams>() / 8
    }

    /// What the device reads.
    pub fn bytes(&self) -> Vec<u8> {
        array_bytes(&self.entries)
    }

    fn first(&self) -> usize {
        self.entries.first().map_or(0, |piece| piece.first as usize)
    }

    fn end(&self) -> usize {
        self.entries.last().map_or(0, |piece| piece.end as usize)
    }

    /// Whether every piece is whole vectors, whose elements share random bits in fours.
    fn whole(&self, vector: usize) -> bool {
        let whole = |at: i64| at % vector as i64 == 0;
        let is_whole = |p: &PieceParams| whole(p.first) && whole(p.end) && p.shift % 4 == 0;
        self.entries.iter().all(is_whole)
    }
}

/// One step of the optimiser of some pieces of an arena, with what [`Factor`] found; nothing where that
/// says so.
#[derive(Clone, Copy, Debug)]
pub struct Update<'a> {
    /// `[elems]`: f32, or bf16. Those behind `trained` are not touched.
    pub weights: DeviceTensor<1>,
    /// i16 `[trained]`, which complete bf16 weights to masters.
    pub remainders: Option<DeviceArray<'a>>,
    /// f32 or bf16: sums over the tokens of a step.
    pub gradients: DeviceTensor<1>,
    /// Which weight the first gradient is of.
    pub first_gradient: usize,
    /// m of `trained` elements: f32, or bf16 rounded stochastically; or 8 bits and their scales as
    /// [`foveate_nn::moments`] has them, in f32 words.
    pub means: DeviceTensor<1>,
    /// v, as m is kept; none with momentum.
    pub squares: Option<DeviceTensor<1>>,
    /// Whether moments are codes of 8 bits and their scales.
    pub codes: bool,
    /// Elements that are trained.
    pub trained: usize,
    /// What is updated.
    pub pieces: &'a Pieces,
    /// Where [`Pieces::bytes`] lies: f64 `[pieces.len_f64()]`.
    pub piece_table: DeviceArray<'a>,
    /// Where [`StepConstants`] lie: f64 `[CONSTANTS_LEN]`.
    pub constants: DeviceArray<'a>,
    /// Where [`Totals`] lie: f64 `[TOTALS_LEN]`.
    pub totals: DeviceArray<'a>,
    /// The rule.
    pub rule: Rule,
    /// λ.
    pub weight_decay: f32,
}

/// The squares of an arena's gradients, in parts.
#[derive(Clone, Copy, Debug)]
pub struct Squares<'a> {
    /// `[elems]`, f32 or bf16.
    pub gradients: DeviceTensor<1>,
    /// f64 `[parts(elems)]`, written.
    pub partial: DeviceArray<'a>,
}

/// The norm of the gradients of all arenas, and what they are multiplied with: the mean over labels,
/// brought down to the largest norm. Where norm or loss is not finite, nothing is updated by this step nor by those
/// behind it.
#[derive(Clone, Copy, Debug)]
pub struct Factor<'a> {
    /// f64: what [`Squares`] of every arena wrote, side by side.
    pub partial: DeviceArray<'a>,
    /// Where [`StepConstants`] lie: f64 `[CONSTANTS_LEN]`.
    pub constants: DeviceArray<'a>,
    /// Where [`Totals`] lie: f64 `[TOTALS_LEN]`; `loss` and `labelled` are read, `squares`, `factor` and
    /// `skipped` are written.
    pub totals: DeviceArray<'a>,
    /// f64 `[1]` of which only the bits count: not 0 once a step was skipped, and then all behind it are.
    pub stopped: DeviceArray<'a>,
    /// Whether gradients of the step were squared before: their sum is in `totals`.
    pub more: bool,
}

/// Parts of the sum of squares of `elems` gradients.
pub fn parts(elems: usize) -> usize {
    elems.div_ceil(CHUNK).min(PARTS)
}

/// 0 for f32, 1 for bf16.
fn kind(name: &str, tensor: &DeviceTensor<1>, elems: usize) -> Result<u32, GpuError> {
    let kind = match tensor.dtype {
        DType::F32 => 0,
        DType::BF16 => 1,
        other => {
            return Err(GpuError::argument(format!("{name} is {other}; it must be f32 or bf16")));
        }
    };
    tensor.check_side_by_side(name, elems, tensor.dtype)?;
    Ok(kind)
}

/// Elements that a thread may read at once of arrays that start at these addresses: 8 where `narrow`
/// ones are most of what is read.
fn vector(narrow: bool, starts: &[(Address, usize)], whole: impl Fn(usize) -> bool) -> usize {
    let fits = |vector: &usize| {
        let aligned = |&(at, bytes): &(Address, usize)| at.is_multiple_of((bytes * vector) as u64);
        whole(*vector) && starts.iter().all(aligned)
    };
    VECTORS.into_iter().skip(usize::from(!narrow)).find(fits).unwrap_or(1)
}

/// Threads that take a block of moments of 8 bits: `LANES` of `kernels/update_int8.cu`.
fn block_lanes(vector: usize) -> usize {
    if vector == 1 { 32 } else { 16 }
}

/// How what an update goes through is kept, as `kernels/updates.cuh` numbers it.
struct Kept {
    weights: u32,
    gradients: u32,
    moments: u32,
}

impl Update<'_> {
    /// How moments are kept: 2 for codes of 8 bits, else as [`kind`].
    fn moment_kind(&self) -> Result<u32, GpuError> {
        if self.codes {
            let words = moments::words(self.trained);
            self.means.check_side_by_side("means", words, DType::F32)?;
            return Ok(2);
        }
        kind("means", &self.means, self.trained)
    }

    /// How everything is kept, where it fits together.
    fn kept(&self) -> Result<Kept, GpuError> {
        let ([elems], [gradients_len]) = (self.weights.layout.shape, self.gradients.layout.shape);
        let weights = kind("weights", &self.weights, elems)?;
        let gradients = kind("gradients", &self.gradients, gradients_len)?;
        let moments = self.moment_kind()?;
        self.check_places(elems, gradients_len)?;
        array("piece_table", &self.piece_table, ElementType::F64, self.pieces.len_f64())?;
        array("constants", &self.constants, ElementType::F64, CONSTANTS_LEN)?;
        let weights = match &self.remainders {
            Some(_) if weights == 0 => {
                return Err(GpuError::argument("f32 weights have no remainders"));
            }
            Some(remainders) => {
                array("remainders", remainders, ElementType::I16, self.trained)?;
                1
            }
            None => 2 * weights,
        };
        Ok(Kept { weights, gradients, moments })
    }

    /// Names what is read and what is written.
    fn name_to(&self, accesses: &mut Accesses) -> Result<(), GpuError> {
        if let Some(remainders) = &self.remainders {
            accesses.write_array("remainders", remainders)?;
        }
        accesses.write("weights", &self.weights)?;
        accesses.read("gradients", &self.gradients)?;
        accesses.write("means", &self.means)?;
        if let Some(squares) = &self.squares {
            accesses.write("squares", squares)?;
        }
        accesses.read_array("piece_table", &self.piece_table)?;
        accesses.read_array("constants", &self.constants)?;
        accesses.read_array("totals", &self.totals)
    }

    /// Where what belongs to weight 0 lies, or would, with bytes of its elements.
    fn starts(&self, told: &UpdateParams, moment_bytes: usize) -> Vec<(Address, usize)> {
        let gradient_bytes = self.gradients.dtype.bytes();
        let before = (self.first_gradient * gradient_bytes) as Address;
        let mut starts = vec![
            (told.weights, self.weights.dtype.bytes()),
            (told.gradients.wrapping_sub(before), gradient_bytes),
            (told.means, moment_bytes),
        ];
        starts.extend(self.squares.map(|_| (told.squares, moment_bytes)));
        starts.extend(self.remainders.map(|_| (told.remainders, 2)));
        starts
    }

    fn parameters(&self) -> Result<UpdateParams, GpuError> {
        let ([beta1, beta2], eps) = match self.rule {
            Rule::AdamW { betas, eps } => (betas, eps),
            Rule::Momentum(momentum) => ([momentum, 0.0], 0.0),
        };
        Ok(UpdateParams {
            weights: self.weights.start(),
            remainders: self.remainders.map_or(0, |remainders| remainders.address),
            gradients: self.gradients.start(),
            means: self.means.start(),
            squares: self.squares.map_or(0, |squares| squares.start()),
            pieces: self.piece_table.address,
            constants: self.constants.address,
            totals: Totals::check(&self.totals)?,
            elems: self.trained as i64,
            first_gradient: self.first_gradient as i64,
            piece_count: count("pieces", self.pieces.entries.len())?,
            beta1,
            beta2,
            eps,
            weight_decay: self.weight_decay,
        })
    }

    /// Whether there are squares where the rule keeps them, and weights and gradients for all pieces, of `elems`
    /// weights and `gradients` gradients.
    fn check_places(&self, elems: usize, gradients: usize) -> Result<(), GpuError> {
        let keeps_squares = matches!(self.rule, Rule::AdamW { .. });
        if keeps_squares != self.squares.is_some() {
            let reason = "AdamW has squares of gradients, and momentum has none";
            return Err(GpuError::argument(reason));
        }
        if let Some(squares) = &self.squares {
            squares.check_side_by_side("squares", self.means.layout.shape[0], self.means.dtype)?;
        }
        let (trained, pieces) = (self.trained, self.pieces.first()..self.pieces.end());
        if pieces.end > trained || trained > elems {
            return Err(GpuError::argument(format!(
                "a piece ends at {}, what is trained at {trained}, the arena at {elems}",
                pieces.end
            )));
        }
        let there = self.first_gradient..self.first_gradient + gradients;
        let is_none = self.pieces.entries.is_empty();
        if !is_none && (pieces.start < there.start || pieces.end > there.end) {
            return Err(GpuError::argument(format!(
                "pieces are of {} to {}, gradients of {} to {}",
                pieces.start, pieces.end, there.start, there.end
            )));
        }
        Ok(())
    }
}

impl Block for Update<'_> {
    fn launches(&self, accesses: &mut Accesses) -> Result<Vec<KernelLaunch>, GpuError> {
        let Kept { weights, gradients, moments } = self.kept()?;
        self.name_to(accesses)?;
        let (parameters, codes) = (self.parameters()?, moments == 2);
        if self.pieces.entries.is_empty() {
            return Ok(Vec::new());
        }
        let starts = self.starts(&parameters, if codes { 1 } else { self.means.dtype.bytes() });
        let vector = vector(moments == 1, &starts, |vector| self.pieces.whole(vector));
        let rule = u32::from(matches!(self.rule, Rule::Momentum(_)));
        let file = File::Update { rule, weights, moments, gradients };
        let source = Source { file, dtype: DType::F32, vector, threads: THREADS };
        let (entry, ctas) = if codes {
            let blocks = self.pieces.end().div_ceil(BLOCK) - self.pieces.first() / BLOCK;
            ("fv_update_int8", blocks.div_ceil(THREADS as usize / block_lanes(vector)))
        } else {
            ("fv_update", self.pieces.chunks)
        };
        Ok(vec![KernelLaunch::new(&source, entry, [ctas, 1], &parameters)?])
    }
}

impl Block for Squares<'_> {
    fn launches(&self, accesses: &mut Accesses) -> Result<Vec<KernelLaunch>, GpuError> {
        let [elems] = self.gradients.layout.shape;
        let gradients = kind("gradients", &self.gradients, elems)?;
        let parts = parts(elems);
        array("partial", &self.partial, ElementType::F64, parts)?;
        accesses.read("gradients", &self.gradients)?;
        accesses.write_array("partial", &self.partial)?;
        let start = (self.gradients.start(), self.gradients.dtype.bytes());
        let vector = vector(gradients == 1, &[start], |vector| elems.is_multiple_of(vector));
        let file = File::Update { rule: 0, weights: 0, moments: 0, gradients };
        let source = Source { file, dtype: DType::F32, vector, threads: THREADS };
        let parameters = SquaresParams {
            gradients: self.gradients.start(),
            elems: elems as i64,
            partial: self.partial.address,
        };
        Ok(vec![KernelLaunch::new(&source, "fv_squares", [parts, 1], &parameters)?])
    }
}

impl Block for Factor<'_> {
    fn launches(&self, accesses: &mut Accesses) -> Result<Vec<KernelLaunch>, GpuError> {
        let parts = self.partial.shape.iter().product();
        array("partial", &self.partial, ElementType::F64, parts)?;
        array("constants", &self.constants, ElementType::F64, CONSTANTS_LEN)?;
        array("stopped", &self.stopped, ElementType::F64, 1)?;
        accesses.read_array("partial", &self.partial)?;
        accesses.read_array("constants", &self.constants)?;
        accesses.write_array("totals", &self.totals)?;
        accesses.write_array("stopped", &self.stopped)?;
        let file = File::Update { rule: 0, weights: 0, moments: 0, gradients: 0 };
        let source = Source { file, dtype: DType::F32, vector: VECTORS[1], threads: THREADS };
        let parameters = FactorParams {
            partial: self.partial.address,
            constants: self.constants.address,
            totals: Totals::check(&self.totals)?,
            stopped: self.stopped.address,
            parts: count("parts", parts)?,
            more: self.more.into(),
        };
        Ok(vec![KernelLaunch::new(&source, "fv_factor", [1, 1], &parameters)?])
    }
}
