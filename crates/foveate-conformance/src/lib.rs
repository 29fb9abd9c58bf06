//! One corpus of attention cases that every backend runs.
//!
//! A case is a few lines of TOML in `conformance/cases`: shapes, dtype, memory layout, mask and
//! score in text form, options, and why it is there. The harness makes random data for it, runs
//! the f64 oracle, runs forward and backward on every backend present into destinations filled
//! with NaN, and compares by the accuracy rule of the semantics (`docs/semantics.md`). What a backend
//! must not touch (rows of no sequence, elements between strided rows) has to hold NaN still.
//!
//! ```
//! let cases = foveate_conformance::parse(
//!     "an example",
//!     r#"
//!     [[case]]
//!     name = "a window over uneven lengths"
//!     why = "a tile may end inside of it"
//!     batch = 1
//!     heads = [2, 1]
//!     len = [7, 11]
//!     dim = [16, 16]
//!     dtype = "f32"
//!     layout = "bshd"
//!     mask = "sliding_window(5)"
//!     "#,
//! )?;
//! let report = foveate_conformance::run(&cases, &foveate_conformance::backends());
//! println!("{report}");
//! assert_eq!(report.failures().count(), 0);
//! # Ok::<(), foveate_conformance::CaseError>(())
//! ```
//!
//! How a case is added: `CONTRIBUTING.md`.

mod backend;
mod case;
mod compare;
mod corpus;
mod cover;
mod error;
mod inputs;
mod overrides;
mod program;
mod report;
mod run;
mod storage;

pub use backend::{Backend, Prepared, backends, gpu_backends, gpu_backends_that_wait};
pub use case::{BufferSpec, Case, Lengths, Sink};
pub use corpus::{load, parse};
pub use cover::cover;
pub use error::CaseError;
pub use overrides::{Operand, Override, Rows};
pub use program::Program;
pub use report::{Outcome, Report, Row};
pub use run::{check, check_each, run};
