//! Architectures that kernels are compiled for.
//!
//! An architecture belongs to a kernel. Machine code for `sm_90` runs on every device of capability
//! 9.x from 9.0 on. Machine code for `sm_90a`, which has the instructions of that one capability
//! (`wgmma` of Hopper), runs on 9.0 alone. So one GPU runs kernels of both side by side.

use std::fmt;
use std::str::FromStr;

/// What a kernel is compiled for: `sm_90`, or with the instructions of one capability `sm_90a`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Arch {
    capability: (u32, u32),
    specific: bool,
}

impl Arch {
    /// The architecture of a compute capability, `(9, 0)` for `sm_90`.
    pub const fn new(capability: (u32, u32)) -> Self {
        Self { capability, specific: false }
    }

    /// The same with the instructions that no other capability has: `sm_90a`.
    pub const fn specific(self) -> Self {
        Self { specific: true, ..self }
    }

    /// Compute capability, major and minor.
    pub const fn capability(self) -> (u32, u32) {
        self.capability
    }

    /// Whether it has the instructions of one capability, `sm_90a`.
    pub(crate) const fn is_specific(self) -> bool {
        self.specific
    }

    /// Whether a device of `capability` runs machine code for this architecture: one of the same
    /// major version that is not older; with the instructions of one capability, that one alone.
    pub fn runs_on(self, capability: (u32, u32)) -> bool {
        match self.specific {
            true => capability == self.capability,
            false => capability.0 == self.capability.0 && capability.1 >= self.capability.1,
        }
    }
}

impl fmt::Display for Arch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let ((major, minor), suffix) = (self.capability, if self.specific { "a" } else { "" });
        write!(f, "sm_{major}{minor}{suffix}")
    }
}

impl FromStr for Arch {
    /// What is wrong with the text.
    type Err = String;

    /// Reads `sm_90` or `sm_90a`: the last digit is the minor version.
    fn from_str(text: &str) -> Result<Self, String> {
        let read = || {
            let number = text.strip_prefix("sm_")?;
            let (number, specific) = match number.strip_suffix('a') {
                Some(number) => (number, true),
                None => (number, false),
            };
            let digits = number.len() >= 2 && number.bytes().all(|b| b.is_ascii_digit());
            let number: u32 = digits.then(|| number.parse().ok())??;
            let arch = Self::new((number / 10, number % 10));
            Some(if specific { arch.specific() } else { arch })
        };
        read().ok_or_else(|| {
            format!(
                "{text:?} is no architecture; write sm_90, or sm_90a for the instructions of that \
                 one capability"
            )
        })
    }
}

impl serde::Serialize for Arch {
    fn serialize<S: serde::Serializer>(&self, to: S) -> Result<S::Ok, S::Error> {
        to.collect_str(self)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_architecture_is_read_as_it_is_written() {
        for (text, capability, specific) in [
            ("sm_80", (8, 0), false),
            ("sm_90", (9, 0), false),
            ("sm_90a", (9, 0), true),
            ("sm_120a", (12, 0), true),
        ] {
            let arch: Arch = text.parse().unwrap();
            assert_eq!((arch.capability(), arch.is_specific()), (capability, specific));
            assert_eq!(arch.to_string(), text);
        }
        for text in ["", "90", "sm_", "sm_9", "sm_+90", "sm_90b", "sm_90aa", "sm_99999999999"] {
            let said = text.parse::<Arch>().unwrap_err();
            assert!(
                said.starts_with(&format!("{text:?} is no architecture; write sm_90")),
                "{said}"
            );
        }
    }

    #[test]
    fn machine_code_runs_on_newer_minor_versions_unless_it_is_of_one_capability() {
        let (plain, specific) = (Arch::new((9, 0)), Arch::new((9, 0)).specific());
        assert!(plain.runs_on((9, 0)) && specific.runs_on((9, 0)));
        assert!(Arch::new((8, 6)).runs_on((8, 9)) && !Arch::new((8, 6)).runs_on((8, 0)));
        assert!(!plain.runs_on((10, 0)) && !specific.runs_on((10, 0)));
        assert!(Arch::new((12, 0)).runs_on((12, 1)));
        assert!(!Arch::new((12, 0)).specific().runs_on((12, 1)));
    }
}
