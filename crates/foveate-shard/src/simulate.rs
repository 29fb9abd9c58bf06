//! How long a step would take on machines that are not here: rates and links as data ([`Machine`]),
//! and the tasks of ranks on their queues ([`Timeline`]).
//!
//! The model is small on purpose. A task has a length, a rank or several, a queue, and tasks that it
//! follows. A queue runs one task at a time, in the order in which they were given; so does a rank's
//! link into its host and the one into the network, in the order in which tasks could begin.
//! Transfers slow no kernel down, and a kernel no transfer.

mod machine;
mod timeline;

pub use machine::{AttentionRates, Gpu, Host, JOIN, Link, Machine, Span};
pub use timeline::{Idle, Queue, Ran, Task, TaskId, Timeline, Timing};
