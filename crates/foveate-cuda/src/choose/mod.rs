//! Which kernels a problem runs, with which configurations, on which tiles.
//!
//! [`Pass`] is the table of what a forward or a backward launches. [`KernelPlan`] has the planner's
//! choice for each of these kernels: measured on this GPU ([`Records`], written by the tuner),
//! measured when the kernels were written (`table`), or ranked by a model. [`schedule`] orders the
//! tiles of a launch. All of it is pure: it needs a profile, and no GPU.

mod class;
mod key;
mod limits;
mod mean_kv_len;
#[cfg(test)]
mod measured;
mod model;
mod options;
mod pass;
mod planner;
mod race;
mod records;
mod report;
pub mod schedule;
mod table;
#[cfg(test)]
mod tests;

pub use class::{Class, Sizes, Unmapped};
pub use key::RecordKey;
pub use limits::admit;
pub(crate) use limits::check_rows;
pub use options::{KernelOptions, TileOptions};
pub use pass::{Grid, Pass, PassLaunch, PrintedMods};
pub(crate) use planner::unmet;
pub use planner::{Choice, KernelPlan, Origin, Refused, choose};
pub use race::{CANDIDATES, Progress, Tuned, Tuning};
pub(crate) use race::{Finish, most_runs, race};
pub use records::{Machine, Record, Records};
