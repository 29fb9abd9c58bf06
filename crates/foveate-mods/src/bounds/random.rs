//! Soundness of bounds on random programs of every operation, against brute force.

use super::*;
use crate::capture::{AnyBuffer, Buffer};
use crate::expr::DynExpr;
use crate::ir::{BinaryOp, UnaryOp, mix};
use crate::value::{ScalarValue, Type};
use crate::vector::{Machine, MaskBits, TileProgram};

/// A counter-based generator: enough randomness, no dependency, the seed says it all.
pub(crate) struct Random(pub i32, pub i32);

impl Random {
    pub fn below(&mut self, n: usize) -> usize {
        self.1 += 1;
        (mix(self.0, self.1) as u32 as usize) % n
    }
}

fn pick(r: &mut Random, pool: &[DynExpr], ty: Type) -> DynExpr {
    let of: Vec<_> = pool.iter().filter(|e| e.ty() == ty).collect();
    of[r.below(of.len())].clone()
}

/// A random expression of this type over the score, when it is to be one, and coordinates.
pub(crate) fn random(r: &mut Random, buffers: &[AnyBuffer], root: Type) -> DynExpr {
    use BinaryOp::*;
    let constants = [0, 1, -1, 2, 3, 7, -5, 100, i32::MAX, i32::MIN];
    let floats = [0.0, -0.0, 0.5, -3.0, 1e30, f32::INFINITY, f32::NAN];
    let mut pool: Vec<DynExpr> = [Leaf::Q, Leaf::Kv, Leaf::H, Leaf::QLen].map(DynExpr::leaf).into();
    for _ in 0..3 {
        pool.push(DynExpr::constant(ScalarValue::I32(constants[r.below(constants.len())])));
        pool.push(DynExpr::constant(ScalarValue::F32(floats[r.below(floats.len())])));
    }
    pool.push(pool[0].clone().cast(Type::F32));
    if root == Type::F32 {
        pool.push(DynExpr::leaf(Leaf::Score));
    }
    pool.push(DynExpr::binary(Le, pool[1].clone(), pool[0].clone()).unwrap());
    let i32_ops = [Add, Sub, Mul, Div, Rem, Min, Max, Sub, Div, Rem];
    let f32_ops = [Add, Sub, Mul, Div, Rem, Min, Max, Pow];
    let compare = [Eq, Ne, Lt, Le];
    let logic = [And, Or, Xor, Eq];
    let unary_f32 = [
        UnaryOp::Neg,
        UnaryOp::Abs,
        UnaryOp::Floor,
        UnaryOp::Exp,
        UnaryOp::Log,
        UnaryOp::Sqrt,
        UnaryOp::Rsqrt,
        UnaryOp::Tanh,
        UnaryOp::Sigmoid,
        UnaryOp::Erf,
        UnaryOp::Sin,
    ];
    for _ in 0..12 {
        let int = |r: &mut Random| pick(r, &pool, Type::I32);
        let made = match r.below(9) {
            0 | 1 => DynExpr::binary(i32_ops[r.below(10)], int(r), int(r)),
            2 => DynExpr::binary(compare[r.below(4)], int(r), int(r)),
            3 => {
                let buffer = &buffers[r.below(buffers.len())];
                let index = buffer.shape().iter().map(|_| int(r)).collect();
                DynExpr::load(buffer, index)
            }
            4 => {
                let (x, y) = (pick(r, &pool, Type::F32), pick(r, &pool, Type::F32));
                DynExpr::binary(f32_ops[r.below(8)], x, y)
            }
            5 => {
                let (x, y) = (pick(r, &pool, Type::F32), pick(r, &pool, Type::F32));
                DynExpr::binary(compare[r.below(4)], x, y)
            }
            6 => DynExpr::unary(unary_f32[r.below(11)], pick(r, &pool, Type::F32)),
            7 => {
                let (x, y) = (pick(r, &pool, Type::Bool), pick(r, &pool, Type::Bool));
                DynExpr::binary(logic[r.below(4)], x, y)
            }
            _ => {
                let ty = [Type::I32, Type::F32, Type::Bool][r.below(3)];
                let (x, y) = (pick(r, &pool, ty), pick(r, &pool, ty));
                DynExpr::select(pick(r, &pool, Type::Bool), x, y)
            }
        };
        pool.push(made.expect("types were chosen to fit"));
    }
    pool.into_iter().rev().find(|e| e.ty() == root).expect("the pool began with every type")
}

pub(crate) fn buffers() -> Vec<AnyBuffer> {
    let ids = Buffer::vector("ids", (0..90).map(|i| i / 11).collect::<Vec<i32>>());
    let noise: Vec<f32> =
        (0..90).map(|i| if i == 40 { f32::NAN } else { (i * i % 37) as f32 }).collect();
    let noise = Buffer::vector("noise", noise);
    let flags = Buffer::new("flags", &[5, 18], (0..90).map(|i| i % 7 == 0).collect()).unwrap();
    vec![ids.any().clone(), noise.any().clone(), flags.any().clone()]
}

/// Whether the mask is true somewhere and false somewhere, indices clamped as evaluation does.
fn seen(machine: &mut Machine, q: Range<i32>, kv: Range<i32>) -> [bool; 2] {
    let entries = q.len() as u64 * kv.len() as u64;
    let mut bits = MaskBits::default();
    machine.set_tile(q, kv);
    machine.mask_bits(None, &mut bits);
    [bits.count() < entries, bits.count() > 0]
}

#[test]
fn random_programs_are_never_decided_wrongly() {
    let seed = 20_261;
    println!("seed {seed}");
    let buffers = buffers();
    let mut decided = 0;
    for case in 0..4000 {
        let mut r = Random(seed + case, 0);
        let program = Program::build(&[random(&mut r, &buffers, Type::Bool)]);
        let head = Head { h: r.below(4) as i32, q_len: 70, kv_len: 90, ..Head::default() };
        let bounds = Bounds::new(&program);
        let mut machine = TileProgram::compile(&program).machine(6, 20);
        machine.set_head(head);
        for _ in 0..6 {
            let (q, kv) = (r.below(64) as i32, r.below(64) as i32);
            let q = q..q + 1 + r.below(6) as i32;
            let kv = kv..kv + 1 + r.below(20) as i32;
            let cover = bounds.cover(&head, q.clone(), kv.clone());
            let [no, yes] = seen(&mut machine, q.clone(), kv.clone());
            let right = match cover {
                Cover::Full => !no,
                Cover::Empty => !yes,
                Cover::Undecided => true,
            };
            assert!(right, "case {case}: {cover:?} over {q:?} x {kv:?}; true {yes}, false {no}");
            decided += usize::from(cover != Cover::Undecided);
        }
    }
    assert!(decided > 4000, "only {decided} of 24000 rectangles were decided");
}
