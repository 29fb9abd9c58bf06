//! Checks that need a GPU and are no case of the corpus.

pub mod checks;
pub mod determinism;
mod device_data;
mod gradients;
pub mod host_time;
pub mod launches;
pub mod libraries;
pub mod misuse;
mod pages;
pub mod placement;
pub mod probes;
mod tensors;
pub mod trespass;
mod workspaces;
