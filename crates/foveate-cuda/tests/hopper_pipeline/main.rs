//! The mbarriers of the Hopper kernels as a model: the roles of `kernels/hopper/forward.cu` and
//! those of the backward as lists of what they do to barriers and shared memory, carried out in random
//! order.
//!
//! The model finds what no compiler does: a deadlock, a wait that takes one phase for another, an
//! arrival that nobody expects, a copy that lands in a buffer that is still read, a store that the
//! copy engine or a product may not see. It knows no data but which tile a buffer holds.

mod backward;
mod backward_dq;
mod backward_wide;
mod forward;
mod model;
mod steps;
