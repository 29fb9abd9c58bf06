//! Soundness of bounds on random programs of every operation, against brute force.

use foveate_tensor::random::Random;

use super::*;
use crate::capture::{AnyBuffer, Buffer};
use crate::elements::SharedElements;
use crate::expr::DynExpr;
use crate::fuzz;
use crate::value::Type;
use crate::vector::{Machine, MaskBits, TileProgram};

/// A random expression of type `root` over coordinates and, when it is to be a score, the score.
pub(crate) fn random(r: &mut Random, buffers: &[AnyBuffer], root: Type) -> DynExpr {
    let mut given: Vec<_> = [Leaf::Q, Leaf::Kv, Leaf::H, Leaf::QLen].map(DynExpr::leaf).into();
    given.push(DynExpr::leaf(Leaf::Q).cast(Type::F32));
    if root == Type::F32 {
        given.push(DynExpr::leaf(Leaf::Score));
    }
    fuzz::expression(&mut |n| r.below(n), &given, buffers, 12, root)
}

pub(crate) fn buffers() -> Vec<AnyBuffer> {
    let ids = Buffer::vector("ids", (0..90).map(|i| i / 11).collect::<Vec<i32>>());
    let noise: Vec<f32> =
        (0..90).map(|i| if i == 40 { f32::NAN } else { (i * i % 37) as f32 }).collect();
    let noise = Buffer::vector("noise", noise);
    let flags = Buffer::new("flags", &[5, 18], (0..90).map(|i| i % 7 == 0).collect()).unwrap();
    // Every second i64 of an array, and rows of bf16 that are broadcast.
    let wide = SharedElements::from_vec((0..90).map(|i| i % 13 - 4).collect::<Vec<i64>>());
    let wide = AnyBuffer::shared("wide", &wide, &[40], &[2], 7, false).unwrap();
    let rows = (0..90).map(|i| half::bf16::from_f32((i * 5 % 17) as f32)).collect::<Vec<_>>();
    let rows = SharedElements::from_vec(rows);
    let rows = AnyBuffer::shared("rows", &rows, &[6, 80], &[0, 1], 10, false).unwrap();
    vec![ids.any().clone(), noise.any().clone(), flags.any().clone(), wide, rows]
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
        let mut r = Random::new(seed + case);
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
