//! Where a plan runs.

use std::fmt;

/// A device. Further kinds come without breaking a match: the enum is non-exhaustive.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum Device {
    /// The processor, on the threads of the rayon pool that `forward` and `backward` are called
    /// in. Results do not depend on how many there are.
    #[default]
    Cpu,
    /// An NVIDIA GPU, counted from 0 as the driver counts.
    Cuda(usize),
}

impl Device {
    /// The processor.
    pub fn cpu() -> Self {
        Self::Cpu
    }

    /// NVIDIA GPU `ordinal`. That there is one is found out when a program is planned on it.
    pub fn cuda(ordinal: usize) -> Self {
        Self::Cuda(ordinal)
    }
}

impl fmt::Display for Device {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Cpu => f.write_str("CPU"),
            Self::Cuda(ordinal) => write!(f, "GPU {ordinal}"),
        }
    }
}
