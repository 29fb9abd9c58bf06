//! A configuration that fits a device, with what it takes there.

use super::config::Config;
use super::resources::{Occupancy, Resources};

/// A configuration that fits.
#[derive(Clone, Debug, PartialEq, serde::Serialize)]
pub struct Candidate {
    /// The configuration.
    pub config: Config,
    /// What a CTA takes.
    pub resources: Resources,
    /// CTAs of an SM.
    pub occupancy: Occupancy,
    /// Modelled time of a launch without a mask, in microseconds.
    pub modelled_us: f64,
}
