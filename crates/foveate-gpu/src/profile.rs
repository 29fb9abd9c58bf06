//! What a GPU offers, as data: enough to plan for it without having it.
//!
//! Limits of an SM follow from the compute capability; what differs between cards of
//! one capability is in `CARDS`. [`Profile::of`] takes a device's limits from its driver
//! instead, and only the rates from here.

use std::borrow::Cow;

use crate::arch::Arch;
use crate::driver::{Device, DeviceInfo};
use crate::error::GpuError;
use crate::hopper::{self, Need};

/// What the planner knows of a device.
#[derive(Clone, Debug, PartialEq, serde::Serialize)]
pub struct Profile {
    /// Its name, `l40s`.
    pub name: Cow<'static, str>,
    /// Compute capability, `(8, 9)`.
    pub capability: (u32, u32),
    /// Number of SMs.
    pub sms: usize,
    /// Bytes of shared memory that a CTA can ask for.
    pub shared_per_block: usize,
    /// Bytes of shared memory of an SM.
    pub shared_per_sm: usize,
    /// Bytes of shared memory that the system takes of each CTA.
    pub shared_reserved: usize,
    /// Registers of an SM, 32 bits each.
    pub registers_per_sm: usize,
    /// Threads that an SM holds at once.
    pub threads_per_sm: usize,
    /// CTAs that an SM holds at once.
    pub ctas_per_sm: usize,
    /// Bytes of L2.
    pub l2_bytes: usize,
    /// Clock of the SMs under which rates are given, in MHz.
    pub clock_mhz: f64,
    /// Peak rate of bf16 products with f32 sums on dense operands, in TFLOP/s.
    pub bf16_tflops: f64,
    /// Peak rate of device memory, in GB/s.
    pub bandwidth_gbs: f64,
    /// What driver and NVRTC lack of what kernels for `sm_90a` need; nothing of a card that is not
    /// there, or has another compute capability.
    pub hopper_unmet: Vec<Need>,
}

/// Registers that a thread can have, on every capability here.
pub const REGISTERS_PER_THREAD: usize = 255;
/// Registers are given to a warp in multiples of this.
pub const REGISTER_UNIT: usize = 256;

/// What an SM of one capability holds.
struct Limits {
    capability: (u32, u32),
    shared_kib: usize,
    threads: usize,
    ctas: usize,
}

/// "Technical Specifications per Compute Capability", CUDA C++ Programming Guide. A CTA can ask
/// for all of the shared memory but 1 KiB, which the system takes of each CTA; there are 64 Ki
/// registers in all of them.
const LIMITS: [Limits; 6] = [
    Limits { capability: (8, 0), shared_kib: 164, threads: 2048, ctas: 32 },
    Limits { capability: (8, 6), shared_kib: 100, threads: 1536, ctas: 16 },
    Limits { capability: (8, 9), shared_kib: 100, threads: 1536, ctas: 24 },
    Limits { capability: (9, 0), shared_kib: 228, threads: 2048, ctas: 32 },
    Limits { capability: (10, 0), shared_kib: 228, threads: 2048, ctas: 32 },
    Limits { capability: (12, 0), shared_kib: 100, threads: 1536, ctas: 24 },
];

/// What differs between cards of one capability.
struct Card {
    name: &'static str,
    capability: (u32, u32),
    sms: usize,
    l2_mib: usize,
    clock_mhz: f64,
    bf16_tflops: f64,
    bandwidth_gbs: f64,
}

/// Rates are those of the makers' data sheets, without sparsity and, where a sheet gives two, with
/// sums in f32. Clocks are the sheets' boost clocks; of H100, H200 and B200 those at which the peak
/// rate follows from the SMs.
const CARDS: [Card; 10] = [
    // NVIDIA A100 Tensor Core GPU data sheet, SXM 80 GB; GA100 white paper for SMs and L2.
    card("a100", (8, 0), 108, 40, 1410.0, 312.0, 2039.0),
    // NVIDIA A10 data sheet; GA102 white paper for L2.
    card("a10", (8, 6), 72, 6, 1695.0, 125.0, 600.0),
    // NVIDIA L4 data sheet (half of the rates with sparsity); Ada white paper for SMs and L2.
    card("l4", (8, 9), 58, 48, 2040.0, 121.0, 300.0),
    // NVIDIA L40S data sheet; Ada white paper for L2.
    card("l40s", (8, 9), 142, 96, 2520.0, 362.0, 864.0),
    // GA102 white paper, table of the GeForce RTX 3090.
    card("rtx3090", (8, 6), 82, 6, 1695.0, 71.0, 936.0),
    // Ada white paper, table of the GeForce RTX 4090.
    card("rtx4090", (8, 9), 128, 72, 2520.0, 165.2, 1008.0),
    // RTX Blackwell white paper, table of the GeForce RTX 5090.
    card("rtx5090", (12, 0), 170, 96, 2407.0, 209.5, 1792.0),
    // NVIDIA H100 data sheet, SXM (half of the rates with sparsity); Hopper white paper for L2.
    card("h100", (9, 0), 132, 50, 1830.0, 989.4, 3350.0),
    // NVIDIA H200 data sheet, SXM; the chip is that of the H100.
    card("h200", (9, 0), 132, 50, 1830.0, 989.4, 4800.0),
    // NVIDIA HGX B200 data sheet (half of the rates with sparsity, an eighth of a board); SMs and
    // L2 as drivers report them.
    card("b200", (10, 0), 148, 126, 1850.0, 2250.0, 7700.0),
];

impl Card {
    /// The one that the driver's name names.
    fn named(info: &DeviceInfo) -> Option<&'static Self> {
        let name = plain(&info.name);
        // The longest name that fits: `l40s` and not `l4`.
        let named = CARDS.iter().filter(|c| name.contains(c.name)).max_by_key(|c| c.name.len());
        named.filter(|card| card.is_like(info))
    }

    /// Whether a driver's name is its name, and not that of a form with other rates.
    fn is_called(&self, name: &str) -> bool {
        let words: Vec<String> = name.split([' ', '-']).map(plain).collect();
        let other = ["pcie", "nvl", "laptop", "d", "ti", "super"];
        let mut names = words.windows(2).map(|two| two.concat()).chain(words.iter().cloned());
        names.any(|word| word == self.name) && !words.iter().any(|word| other.contains(&&**word))
    }

    /// Whether a device has the limits of its capability.
    fn is_like(&self, info: &DeviceInfo) -> bool {
        Limits::of(self.capability).capability == Limits::of(info.capability).capability
    }
}

const fn card(
    name: &'static str,
    capability: (u32, u32),
    sms: usize,
    l2_mib: usize,
    clock_mhz: f64,
    bf16_tflops: f64,
    bandwidth_gbs: f64,
) -> Card {
    Card { name, capability, sms, l2_mib, clock_mhz, bf16_tflops, bandwidth_gbs }
}

impl Profile {
    /// Every profile, smallest capability first.
    pub fn all() -> Vec<Self> {
        CARDS.iter().map(Self::of_card).collect()
    }

    /// The profile called `name`; case, spaces and hyphens do not matter.
    ///
    /// # Errors
    /// The names there are, in one line.
    pub fn named(name: &str) -> Result<Self, String> {
        let wanted = plain(name);
        let bare = wanted.strip_prefix("nvidia").unwrap_or(&wanted);
        let bare = bare.strip_prefix("geforce").unwrap_or(bare);
        let found =
            CARDS.iter().find(|c| bare == c.name || c.name.strip_prefix("rtx") == Some(bare));
        found.map(Self::of_card).ok_or_else(|| {
            let names: Vec<_> = CARDS.iter().map(|c| c.name).collect();
            format!("there is no profile of `{name}`; there are {}", names.join(", "))
        })
    }

    /// The profile of a device from what its driver says. Rates are those of the card that the
    /// driver's name names; for a card that is not in the table, those of one of its capability,
    /// by SMs.
    pub fn of(info: &DeviceInfo) -> Self {
        let is_like = |c: &&Card| c.is_like(info);
        let like = Card::named(info).or_else(|| CARDS.iter().find(is_like)).unwrap_or(&CARDS[0]);
        let share = f64::from(info.sms) / like.sms as f64;
        let limits = Limits::of(info.capability);
        Self {
            name: info.name.clone().into(),
            capability: info.capability,
            sms: info.sms as usize,
            shared_per_block: info.shared_bytes_per_block as usize,
            shared_per_sm: info.shared_bytes_per_sm as usize,
            shared_reserved: info.shared_bytes_reserved as usize,
            registers_per_sm: info.registers_per_sm as usize,
            threads_per_sm: limits.threads,
            ctas_per_sm: limits.ctas,
            l2_bytes: info.l2_bytes as usize,
            clock_mhz: like.clock_mhz,
            bf16_tflops: like.bf16_tflops * share,
            bandwidth_gbs: like.bandwidth_gbs * share,
            hopper_unmet: Vec::new(),
        }
    }

    /// The same with what driver and NVRTC of this machine lack for it.
    pub fn of_device(device: &Device) -> Self {
        Self { hopper_unmet: hopper::unmet(device), ..Self::of(device.info()) }
    }

    /// The peak rate of a device in 16 bits with sums in f32, in TFLOP/s, of its share of the card's SMs; none
    /// for a card that is not in the table.
    pub fn peak_tflops(info: &DeviceInfo) -> Option<f64> {
        let card = Card::named(info).filter(|card| card.is_called(&info.name))?;
        Some(card.bf16_tflops * f64::from(info.sms) / card.sms as f64)
    }

    fn of_card(card: &Card) -> Self {
        let limits = Limits::of(card.capability);
        Self {
            name: card.name.into(),
            capability: card.capability,
            sms: card.sms,
            shared_per_block: (limits.shared_kib - 1) << 10,
            shared_per_sm: limits.shared_kib << 10,
            shared_reserved: 1 << 10,
            registers_per_sm: 1 << 16,
            threads_per_sm: limits.threads,
            ctas_per_sm: limits.ctas,
            l2_bytes: card.l2_mib << 20,
            clock_mhz: card.clock_mhz,
            bf16_tflops: card.bf16_tflops,
            bandwidth_gbs: card.bandwidth_gbs,
            hopper_unmet: Vec::new(),
        }
    }

    /// Whether kernels can be compiled for the device.
    ///
    /// # Errors
    /// When it is older than Ampere.
    pub fn check_capability(&self) -> Result<(), GpuError> {
        const OLDEST: (u32, u32) = (8, 0);
        let (major, minor) = self.capability;
        if self.capability >= OLDEST {
            return Ok(());
        }
        Err(GpuError::argument(format!(
            "{} has compute capability {major}.{minor}; kernels run on {}.{} (Ampere) and newer",
            self.name, OLDEST.0, OLDEST.1
        )))
    }

    /// Whether kernels for `sm_90a` run: on compute capability 9.0, with all that they need.
    pub fn runs_hopper(&self) -> bool {
        self.capability == (9, 0) && self.hopper_unmet.is_empty()
    }

    /// The architecture of its capability, `sm_89`.
    pub fn arch(&self) -> Arch {
        Arch::new(self.capability)
    }
}

impl Limits {
    /// The limits of `capability`, or of the nearest one before it.
    fn of(capability: (u32, u32)) -> &'static Self {
        LIMITS.iter().rev().find(|l| l.capability <= capability).unwrap_or(&LIMITS[0])
    }
}

/// Lower case, letters and digits only.
fn plain(name: &str) -> String {
    name.chars().filter(char::is_ascii_alphanumeric).map(|c| c.to_ascii_lowercase()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_block_can_ask_for_what_the_programming_guide_says() {
        let limit = |name| Profile::named(name).unwrap().shared_per_block;
        for name in ["a10", "l4", "l40s", "rtx3090", "rtx4090", "rtx5090"] {
            assert_eq!(limit(name), 101_376, "{name}");
        }
        for name in ["h100", "h200", "b200"] {
            assert_eq!(limit(name), 232_448, "{name}");
        }
        assert_eq!(limit("a100"), 166_912);
    }

    #[test]
    fn names_are_read_as_people_write_them() {
        for (text, name) in [
            ("L40S", "l40s"),
            ("RTX 4090", "rtx4090"),
            ("4090", "rtx4090"),
            ("NVIDIA GeForce RTX 3090", "rtx3090"),
            ("nvidia-h200", "h200"),
        ] {
            assert_eq!(Profile::named(text).unwrap().name, name);
        }
        let refused = Profile::named("l40x").unwrap_err();
        assert!(refused.starts_with("there is no profile of `l40x`; there are a100, a10, "));
    }

    #[test]
    fn a_device_has_the_limits_of_its_driver_and_the_rates_of_its_card() {
        let seen = Profile::of(&DeviceInfo::for_tests("NVIDIA L40S", (8, 9), 142));
        let listed = Profile { name: "NVIDIA L40S".into(), ..Profile::named("l40s").unwrap() };
        assert_eq!(seen, listed);
        let peak = |name, capability, sms| {
            Profile::peak_tflops(&DeviceInfo::for_tests(name, capability, sms))
        };
        assert_eq!(peak("NVIDIA L40S", (8, 9), 142), Some(362.0));
        assert_eq!(peak("NVIDIA H100 80GB HBM3", (9, 0), 132), Some(989.4));
        assert_eq!(peak("NVIDIA GeForce RTX 4090", (8, 9), 128), Some(165.2));
        assert_eq!(peak("NVIDIA A100-SXM4-80GB", (8, 0), 108), Some(312.0));
        // What has other rates than the card whose name is in theirs.
        for (name, capability, sms) in [
            ("NVIDIA L40", (8, 9), 142),
            ("NVIDIA A10G", (8, 6), 80),
            ("NVIDIA H100 PCIe", (9, 0), 114),
            ("NVIDIA H100 NVL", (9, 0), 132),
            ("NVIDIA GeForce RTX 4090 Laptop GPU", (8, 9), 76),
            ("NVIDIA GeForce RTX 3090 Ti", (8, 6), 84),
            ("NVIDIA GeForce RTX 4090 D", (8, 9), 114),
        ] {
            assert_eq!(peak(name, capability, sms), None, "{name}");
        }
    }

    #[test]
    fn a_device_that_is_not_listed_has_rates_by_its_sms() {
        let info = DeviceInfo::for_tests("NVIDIA RTX PRO 6000", (12, 1), 85);
        let seen = Profile::of(&info);
        assert_eq!(seen.arch().to_string(), "sm_121");
        assert_eq!(seen.bf16_tflops, 209.5 / 2.0);
        assert_eq!(Profile::peak_tflops(&info), None);
        assert_eq!(seen.threads_per_sm, 1536);
    }
}
