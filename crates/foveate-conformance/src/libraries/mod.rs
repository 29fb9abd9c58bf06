//! The libraries beside the driver and NVRTC: products by cuBLASLt, transfers by NCCL.

mod products;
mod transfers;

use foveate_cuda::{Engine, blas, nccl};

use crate::checks::Checks;

/// Runs all of it and prints a line for each check; whether all passed.
pub fn run() -> Result<bool, String> {
    let engine = match Engine::get(0) {
        Ok(engine) => engine,
        Err(e) => {
            println!("libraries declined: {e}");
            return Ok(true);
        }
    };
    let mut checks = Checks::new();
    match blas::version() {
        Ok([major, minor, patch]) => {
            println!("cuBLASLt {major}.{minor}.{patch}");
            products::run(&engine, &mut checks);
        }
        Err(e) => checks.skip("products", e),
    }
    match nccl::version() {
        Ok([major, minor, patch]) => {
            println!("NCCL {major}.{minor}.{patch}");
            transfers::run(&engine, &mut checks);
        }
        Err(e) => checks.skip("transfers", e),
    }
    Ok(checks.passed())
}
