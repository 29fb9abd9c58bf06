//! Masks, scores and dropout inside a tile.

use crate::captures::Slot;

/// What a thread evaluates mods with.
pub struct Evaluator {}

/// The compiled mods of a plan.
#[derive(Debug)]
pub struct Mods {}

pub struct Learned {
    pub name: String,
    pub shape: Vec<usize>,
}

impl Learned {
    pub fn elems(&self) -> usize {
        self.shape.iter().product()
    }
}

/// The head a thread is at.
pub struct Head {
    pub b: i32,
    pub h: i32,
    pub h_kv: i32,
    pub q_len: i32,
    pub kv_len: i32,
}

impl Mods {
    pub fn learned(&self) -> &[Learned] {
        &[]
    }
    pub fn evaluator(&self, _width: usize) -> Evaluator {
        Evaluator {}
    }
}

impl Evaluator {
    pub fn enter(&mut self, _head: Head) {}
    pub fn columns(&mut self, _start: usize, _width: usize, _partial: bool) {}
    pub fn score(&mut self, _q: usize, _row: &mut [f32], _partial: bool) {}
    pub fn drop_again(&mut self, _row: &mut [f32]) {}
    pub fn gradient(&mut self, _q: usize, _row: &mut [f32], _slot: &mut Slot) {}
    pub fn drop_out(&mut self, _q: usize, _row: &mut [f32]) {}
}
