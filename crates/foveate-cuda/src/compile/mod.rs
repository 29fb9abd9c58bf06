//! From a program and a configuration to machine code that was compared with its plan.
//!
//! [`config`] says what one kernel is compiled for, [`params`] what it is launched with.
//! [`codegen`] prints mods as CUDA C++, [`source`] puts the source together, [`resources`] knows
//! what a CTA takes before anything is compiled, [`check`] compares that with what the assembler
//! reports and what the source writes, and [`spill_fallback`] finds the configuration that runs where a kernel takes more.

mod candidate;
pub mod cells;
pub mod check;
pub mod codegen;
pub mod config;
pub mod kernel;
mod machine_code;
#[cfg(test)]
pub(crate) mod on_host;
pub mod params;
pub mod resources;
pub mod source;
pub mod spill_fallback;
pub(crate) mod tile_kinds;
pub(crate) mod tile_tables;
mod wgmma;

pub use candidate::Candidate;
