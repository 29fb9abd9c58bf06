//! Where a program is evaluated: a head of a problem, and a point in its plane.

use crate::ir::Leaf;
use crate::value::ScalarValue;

use ScalarValue::{F32, I32};

/// What stays the same over all rows and columns of one head.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Head {
    /// Batch (or sequence) index.
    pub b: i32,
    /// Query head.
    pub h: i32,
    /// Key/value head.
    pub h_kv: i32,
    /// Number of queries.
    pub q_len: i32,
    /// Number of keys.
    pub kv_len: i32,
}

impl Head {
    /// The point of query `q` and key `kv`, with a score of 0.
    pub fn at(&self, q: i32, kv: i32) -> Point {
        let Head { b, h, h_kv, q_len, kv_len } = *self;
        Point { b, h, h_kv, q, kv, q_len, kv_len, score: 0.0 }
    }
}

/// The coordinates and the score at one point.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Point {
    /// Batch index.
    pub b: i32,
    /// Query head.
    pub h: i32,
    /// Key/value head.
    pub h_kv: i32,
    /// Query position.
    pub q: i32,
    /// Key position.
    pub kv: i32,
    /// Number of queries.
    pub q_len: i32,
    /// Number of keys.
    pub kv_len: i32,
    /// Scaled dot product.
    pub score: f32,
}

impl Point {
    /// The value of a leaf here.
    pub fn leaf(&self, leaf: Leaf) -> ScalarValue {
        match leaf {
            Leaf::B => I32(self.b),
            Leaf::H => I32(self.h),
            Leaf::HKv => I32(self.h_kv),
            Leaf::Q => I32(self.q),
            Leaf::Kv => I32(self.kv),
            Leaf::QLen => I32(self.q_len),
            Leaf::KvLen => I32(self.kv_len),
            Leaf::Score => F32(self.score),
        }
    }
}
