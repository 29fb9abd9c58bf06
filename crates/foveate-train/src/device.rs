//! Which device a run computes on, as a recipe or `--device` says it, and how work that takes any
//! backend is put on it.

use std::fmt;
use std::str::FromStr;

use foveate::cuda::choose::KernelOptions;
use foveate_nn::{Blocks, Cpu, ParameterState};
use foveate_nn_cuda::Cuda;
use serde::{Deserialize, Serialize};

use crate::error::TrainError;

/// The device that is asked for: `cpu`, `cuda:N`, or `auto` for the first GPU where there is one and
/// the CPU elsewhere.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub enum DeviceChoice {
    /// GPU 0 where it can be used, else the CPU.
    Auto,
    /// The processor, in f32.
    #[default]
    Cpu,
    /// An NVIDIA GPU, counted from 0 as the driver counts.
    Cuda(usize),
}

impl FromStr for DeviceChoice {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match (text, text.strip_prefix("cuda:").map(str::parse)) {
            ("auto", _) => Ok(Self::Auto),
            ("cpu", _) => Ok(Self::Cpu),
            ("cuda", _) => Ok(Self::Cuda(0)),
            (_, Some(Ok(ordinal))) => Ok(Self::Cuda(ordinal)),
            _ => Err(format!(
                "there is no device `{text}`; say auto, cpu, or cuda:0 for the first GPU"
            )),
        }
    }
}

impl TryFrom<String> for DeviceChoice {
    type Error = String;

    fn try_from(text: String) -> Result<Self, String> {
        text.parse()
    }
}

impl From<DeviceChoice> for String {
    fn from(device: DeviceChoice) -> Self {
        device.to_string()
    }
}

impl fmt::Display for DeviceChoice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Auto => f.write_str("auto"),
            Self::Cpu => f.write_str("cpu"),
            Self::Cuda(ordinal) => write!(f, "cuda:{ordinal}"),
        }
    }
}

/// How a device computes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DeviceOptions {
    /// Which.
    pub device: DeviceChoice,
    /// What is kept of each parameter; where nothing is said f32 on the CPU, and `exact` on a GPU.
    pub state: Option<ParameterState>,
    /// Whether a run's results have the same bits every time on the same GPU, at some cost. On the
    /// CPU they always have.
    pub deterministic: bool,
    /// What is asked of attention's kernels on a GPU; by default what the planner chooses.
    pub attention: KernelOptions,
}

impl From<DeviceChoice> for DeviceOptions {
    fn from(device: DeviceChoice) -> Self {
        Self { device, state: None, deterministic: true, attention: KernelOptions::default() }
    }
}

/// Work for a device, whichever it is.
pub trait OnDevice {
    /// What comes of it.
    type Output;

    /// Does it by the blocks of the device, whose name is `gpu` where it is a GPU.
    fn run<B: Blocks>(self, blocks: B, gpu: Option<String>) -> Self::Output;
}

impl DeviceOptions {
    /// Does `work` on the device.
    ///
    /// # Errors
    /// When there is no such device, it does not keep parameters in that state, or kernels of a GPU are asked of
    /// the CPU.
    pub fn run<W: OnDevice>(self, work: W) -> Result<W::Output, TrainError> {
        let ordinal = match self.device {
            DeviceChoice::Cuda(ordinal) => Some(ordinal),
            DeviceChoice::Auto => Cuda::available(0).is_ok().then_some(0),
            DeviceChoice::Cpu => None,
        };
        let Some(ordinal) = ordinal else {
            if self.attention != KernelOptions::default() {
                let message = "kernels of attention are asked for, and the run is on the CPU, which has \
                               none of them; leave them out, or choose a GPU by --device";
                return Err(TrainError::model(message));
            }
            return match self.state.unwrap_or_default() {
                ParameterState::F32 => Ok(work.run(Cpu::default(), None)),
                ParameterState::Int8Moments => Ok(work.run(Cpu::with_int8_moments(), None)),
                state => {
                    let message = format!(
                        "is \"{}\", but the CPU keeps f32, with moments of 8 bits by \
                         \"int8_moments\"; leave it out, or choose a GPU by run.device",
                        state.name()
                    );
                    Err(TrainError::recipe("precision.state", message))
                }
            };
        };
        let precision = self.state.unwrap_or(ParameterState::Exact).into();
        let blocks = Cuda::new(ordinal, precision, self.deterministic).map_err(|e| {
            TrainError::model(format!(
                "cuda:{ordinal}: {e}; run on the CPU by --device cpu, or run.device = \"cpu\" in a \
                 recipe"
            ))
        })?;
        let gpu = blocks.name().to_owned();
        Ok(work.run(blocks.with_attention_by(self.attention), Some(gpu)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn devices_are_read_as_they_are_written() {
        for (text, device) in [
            ("auto", DeviceChoice::Auto),
            ("cpu", DeviceChoice::Cpu),
            ("cuda:0", DeviceChoice::Cuda(0)),
            ("cuda:13", DeviceChoice::Cuda(13)),
        ] {
            assert_eq!(text.parse(), Ok(device));
            assert_eq!(device.to_string(), text);
        }
        assert_eq!("cuda".parse(), Ok(DeviceChoice::Cuda(0)));
        for wrong in ["", "gpu", "cuda:", "cuda:-1", "cuda:x", "CPU"] {
            let told = wrong.parse::<DeviceChoice>().unwrap_err();
            assert!(told.contains(&format!("`{wrong}`")) && told.contains("cuda:0"), "{told}");
        }
    }
}
