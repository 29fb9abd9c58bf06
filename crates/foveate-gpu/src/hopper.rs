//! What kernels for `sm_90a` need of a machine.
//!
//! `wgmma`, `setmaxnreg` and copies by tensor map are of compute capability 9.0, which no other one
//! has in this form. A driver has to encode maps and to launch with attributes, an NVRTC to compile
//! for `sm_90a` as the kernels expect. What is missing is in the device's
//! [`Profile`](crate::profile::Profile), and declines these kernels and nothing else.

use std::fmt;

use crate::driver::{Device, DeviceInfo};
use crate::error::GpuError;
use crate::nvrtc::Compiler;

const NVRTC: &str = "NVRTC";

/// Something that is needed, what there is of it, and whether that does.
#[derive(Clone, Debug, PartialEq, Eq, serde::Serialize)]
pub struct Need {
    /// What is needed.
    pub what: &'static str,
    /// What there is.
    pub found: String,
    /// The version that is needed.
    pub needed: &'static str,
    /// Whether it does.
    pub met: bool,
}

impl fmt::Display for Need {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { what, found, needed, .. } = self;
        write!(f, "{what} {found} (needed {needed})")
    }
}

/// Everything that the kernels need, for `device`.
pub fn needs(device: &Device) -> Vec<Need> {
    let nvrtc = Compiler::get().map(Compiler::version);
    of(device.info(), device.optional_functions(), nvrtc)
}

/// The same for a device whose driver has or lacks tensor maps and launches with attributes.
fn of(
    DeviceInfo { capability, driver, .. }: &DeviceInfo,
    [has_maps, has_attributes]: [bool; 2],
    nvrtc: Result<(i32, i32), GpuError>,
) -> Vec<Need> {
    let version = |(major, minor): (u32, u32)| format!("{major}.{minor}");
    let function = |what, needed, met| {
        let found = version(*driver);
        Need { what, found: if met { found } else { format!("{found} without it") }, needed, met }
    };
    vec![
        Need {
            what: "compute capability",
            found: version(*capability),
            needed: "9.0",
            met: *capability == (9, 0),
        },
        function("cuTensorMapEncodeTiled in a driver for CUDA", "12.0", has_maps),
        function("cuLaunchKernelEx in a driver for CUDA", "11.8", has_attributes),
        nvrtc_need(nvrtc),
    ]
}

/// What an NVRTC of this version lacks.
pub fn unmet_by_nvrtc(version: (i32, i32)) -> Option<Need> {
    Some(nvrtc_need(Ok(version))).filter(|need| !need.met)
}

/// What driver and NVRTC lack for `device`; nothing for one of another compute capability. An NVRTC
/// that is not found declines every kernel, and says so itself.
pub(crate) fn unmet(device: &Device) -> Vec<Need> {
    if device.info().capability != (9, 0) {
        return Vec::new();
    }
    let declines = |need: &Need| !need.met && (need.what != NVRTC || Compiler::get().is_ok());
    needs(device).into_iter().filter(declines).collect()
}

fn nvrtc_need(version: Result<(i32, i32), GpuError>) -> Need {
    Need {
        what: NVRTC,
        found: version.as_ref().map_or("not found".into(), |(a, b)| format!("{a}.{b}")),
        needed: "12.3",
        met: version.is_ok_and(|found| found >= (12, 3)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn said(capability: (u32, u32), functions: [bool; 2], nvrtc: (i32, i32)) -> Vec<String> {
        let driver = (12, 4);
        let info = DeviceInfo { capability, driver, ..DeviceInfo::default() };
        let unmet = of(&info, functions, Ok(nvrtc)).into_iter().filter(|need| !need.met);
        unmet.map(|need| need.to_string()).collect()
    }

    #[test]
    fn what_is_missing_is_named_with_what_is_needed() {
        assert_eq!(said((9, 0), [true; 2], (12, 3)), [""; 0]);
        assert_eq!(said((10, 0), [true; 2], (13, 0)), ["compute capability 10.0 (needed 9.0)"]);
        assert_eq!(
            said((8, 9), [false; 2], (12, 2)),
            [
                "compute capability 8.9 (needed 9.0)",
                "cuTensorMapEncodeTiled in a driver for CUDA 12.4 without it (needed 12.0)",
                "cuLaunchKernelEx in a driver for CUDA 12.4 without it (needed 11.8)",
                "NVRTC 12.2 (needed 12.3)",
            ]
        );
        let none = of(&DeviceInfo::default(), [true; 2], Err(GpuError::argument("none")));
        assert_eq!(none[3].to_string(), "NVRTC not found (needed 12.3)");
        assert_eq!(unmet_by_nvrtc((12, 3)), None);
        assert_eq!(unmet_by_nvrtc((12, 2)).unwrap().to_string(), "NVRTC 12.2 (needed 12.3)");
    }
}
