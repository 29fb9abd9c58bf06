//! Plans by the structure of what is traced: one serves all tensors and all values of captured numbers.

use std::collections::HashSet;
use std::sync::{Arc, Mutex};

use foveate::cuda::{CudaOptions, CudaPlan};
use foveate::mods::ir::BinaryOp;
use foveate::mods::{Buffer, DynExpr, Leaf, Program};
use foveate::{DType, Dropout, MaskMod, ScoreMod};
use foveate_problem::Spec;
use pyo3::prelude::*;

use super::{engine, memory};
use crate::error::raised;

/// Name of the captured buffer that holds the seed of dropout, int32 `[2]`.
pub const SEED: &str = "dropout_seed";

/// Name of the captured buffer that holds the keys of each batch entry, int32 `[B]`.
pub const LENGTHS: &str = "kv_lengths";

/// What a plan is made for, besides the structure of its mods.
#[derive(Clone, PartialEq)]
pub struct Class {
    pub device: usize,
    pub dtype: DType,
    pub heads: [usize; 2],
    pub dims: [usize; 2],
    pub scale: Option<u32>,
    pub dropout: Option<u32>,
    pub deterministic: bool,
    /// Whether the number of keys of each batch entry is read from [`LENGTHS`].
    pub counted: bool,
}

/// A plan with the programs that it was made of, whose captured tensors have no elements.
pub struct Kept {
    class: Class,
    pub mask: Option<Program>,
    pub score: Option<Program>,
    pub plan: CudaPlan,
    /// Calls by what decides their kernels: of these all is compiled.
    ready: Arc<Mutex<HashSet<u64>>>,
}

/// Plans that are kept: beyond it, the least recently used are dropped.
const MOST: usize = 256;

/// Different calls of a plan that are remembered as compiled.
const MOST_READY: usize = 4096;

/// The most recently used is last.
static KEPT: Mutex<Vec<Arc<Kept>>> = Mutex::new(Vec::new());

impl Kept {
    /// Whether it is a plan for these programs, whatever the values of their numbers.
    fn suits(&self, class: &Class, mods: [Option<&Program>; 2]) -> bool {
        let same = |kept: &Option<Program>, now: Option<&Program>| match (kept, now) {
            (None, None) => true,
            (Some(kept), Some(now)) => kept.same_structure(now),
            _ => false,
        };
        self.class == *class && same(&self.mask, mods[0]) && same(&self.score, mods[1])
    }

    pub fn programs(&self) -> [Option<&Program>; 2] {
        [self.mask.as_ref(), self.score.as_ref()]
    }

    /// Whether its numbers have the values of these programs'.
    fn has_values(&self, mods: [Option<&Program>; 2]) -> bool {
        self.programs().into_iter().zip(mods).all(|pair| match pair {
            (Some(kept), Some(now)) => {
                let values = kept.graph().scalars().iter().zip(now.graph().scalars());
                values.into_iter().all(|(kept, now)| kept.value == now.value)
            }
            _ => true,
        })
    }

    /// The plan with the values of these programs' numbers.
    fn with(&self, mods: [Option<&Program>; 2]) -> PyResult<Self> {
        let mut plan = self.plan.clone();
        let mut programs = self.programs().map(Option::<&Program>::cloned);
        for (program, now) in programs.iter_mut().zip(mods) {
            let (Some(kept), Some(now)) = (program.as_mut(), now) else { continue };
            let values: Vec<_> = now.graph().scalars().iter().map(|s| s.value).collect();
            for (at, value) in values.into_iter().enumerate() {
                let slot = &kept.graph().scalars()[at];
                if slot.value != value {
                    let name = slot.name.clone();
                    plan = plan.set_scalar(&name, value).map_err(memory::raised)?;
                    *kept = kept.set_scalar(&name, value).map_err(raised)?;
                }
            }
        }
        let [mask, score] = programs;
        Ok(Self { class: self.class.clone(), mask, score, plan, ready: self.ready.clone() })
    }

    fn make(class: &Class, dims: &foveate::Dims, mods: [Option<&Program>; 2]) -> PyResult<Self> {
        let length = match class.counted {
            true => {
                let lengths = Buffer::<i32>::on_device(LENGTHS, &[1]).map_err(raised)?;
                let read = DynExpr::load(lengths.any(), vec![DynExpr::leaf(Leaf::B)]);
                Some(read.map_err(raised)?)
            }
            false => None,
        };
        let leaf = |leaf| match (&length, leaf) {
            (Some(length), Leaf::KvLen) => length.clone(),
            _ => DynExpr::leaf(leaf),
        };
        let expr = |p: &Program| p.trace(0, &leaf);
        let [mask, score] = mods;
        let mut allowed = mask.map(&expr);
        if let Some(length) = &length {
            let inside = DynExpr::binary(BinaryOp::Lt, DynExpr::leaf(Leaf::Kv), length.clone());
            let both = |mask| DynExpr::binary(BinaryOp::And, mask, inside.clone()?);
            allowed = Some(allowed.map_or(inside.clone(), both).map_err(raised)?);
        }
        let seeded = |p: u32| {
            let seed = Buffer::<i32>::on_device(SEED, &[2]).map_err(raised)?;
            Dropout::with_seed_in(f32::from_bits(p), &seed).map_err(raised)
        };
        let spec = Spec {
            mask: allowed.map(|mask| MaskMod::new(&mask).map_err(raised)).transpose()?,
            score: score.map(|p| ScoreMod::new(&expr(p)).map_err(raised)).transpose()?,
            scale: class.scale.map(f32::from_bits),
            dropout: class.dropout.map(seeded).transpose()?,
        };
        let engine = engine(class.device)?;
        let options = CudaOptions { deterministic: class.deterministic, ..CudaOptions::default() };
        let plan =
            CudaPlan::new(engine, &spec, dims, class.dtype, options).map_err(memory::raised)?;
        Ok(Self {
            class: class.clone(),
            mask: mask.cloned(),
            score: score.cloned(),
            plan,
            ready: Arc::default(),
        })
    }

    /// The kept plan for these programs, or one that is made.
    pub fn found(
        class: &Class,
        dims: &foveate::Dims,
        mods: [Option<&Program>; 2],
    ) -> PyResult<Arc<Self>> {
        let mut kept = KEPT.lock().unwrap_or_else(|e| e.into_inner());
        let mut like = None;
        for at in (0..kept.len()).rev().filter(|&i| kept[i].suits(class, mods)) {
            if kept[at].has_values(mods) {
                let found = kept[at].clone();
                kept[at..].rotate_left(1);
                return Ok(found);
            }
            like = like.or(Some(at));
        }
        let made = Arc::new(match like {
            Some(at) => kept[at].with(mods)?,
            None => Self::make(class, dims, mods)?,
        });
        kept.push(made.clone());
        let oldest = (kept.len() > MOST).then(|| kept.remove(0));
        // Its memory goes back to torch's allocator, which lets other threads of Python's run: they may be here.
        drop(kept);
        drop(oldest);
        Ok(made)
    }

    /// Whether a call with this key is the first, and may compile.
    pub fn is_first(&self, key: u64) -> bool {
        !self.ready.lock().unwrap_or_else(|e| e.into_inner()).contains(&key)
    }

    /// Notes that what a call with this key needs is compiled.
    pub fn remember(&self, key: u64) {
        let mut ready = self.ready.lock().unwrap_or_else(|e| e.into_inner());
        if ready.len() >= MOST_READY {
            ready.clear();
        }
        ready.insert(key);
    }
}
