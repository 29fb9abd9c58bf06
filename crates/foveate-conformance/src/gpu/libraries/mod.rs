//! The libraries beside the driver and NVRTC: products by cuBLASLt, transfers by NCCL.

mod products;
mod transfers;

use foveate_gpu::{blas, nccl};

use crate::gpu::checks::on_gpu;

/// Runs all of it and prints a line for each check; whether all passed.
pub fn run() -> Result<bool, String> {
    on_gpu("libraries", |engine, checks| {
        match blas::version() {
            Ok([major, minor, patch]) => {
                say!("cuBLASLt {major}.{minor}.{patch}");
                products::run(engine, checks);
            }
            Err(e) => checks.skip("products", e),
        }
        match nccl::version() {
            Ok([major, minor, patch]) => {
                say!("NCCL {major}.{minor}.{patch}");
                transfers::run(engine, checks);
            }
            Err(e) => checks.skip("transfers", e),
        }
    })
}
