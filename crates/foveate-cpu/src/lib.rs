//! Fused attention on the CPU, forward and backward
mod backward;
mod call;
mod captures;
pub mod error;
mod forward;
mod masks;
mod mods;
mod pack;
pub mod plan;
mod simd;
pub mod tiles;
mod work;

pub use error::{CpuError, CpuErrorKind};
pub use plan::CpuPlan;
pub use tiles::CpuOptions;
