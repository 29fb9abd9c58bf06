//! What the source of a kernel of the Hopper family says that its machine code has.
//!
//! The assembler may do otherwise without a word: copy a product into a second branch, put one of
//! its own where a group is empty, wait where nobody wrote a wait. So products, waits, copies and
//! registers of roles are counted here from a configuration, by what the kernels' files write, and
//! `foveate kernels check` finds the same counts in the machine code or fails.

use std::fmt;

use super::config::{Config, Elem, Family, Kernel};
use super::resources::Resources;
use foveate_gpu::cubin::{Instructions, Opcode};

/// Bytes of a row of a panel.
const PANEL_ROW: usize = 128;

/// Instructions of a kernel: as written, or as found.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MachineCode {
    /// Products (`wgmma.mma_async`).
    pub products: u32,
    /// `wgmma.fence`.
    pub fences: u32,
    /// Groups of products that each `wgmma.wait_group` leaves under way, in order of these numbers.
    pub waits: Vec<u32>,
    /// Loads by tensor maps.
    pub loads: u32,
    /// Bulk reductions.
    pub reductions: u32,
    /// Registers that roles ask for (`setmaxnreg`), the fewest first.
    pub registers: Vec<u32>,
}

impl MachineCode {
    /// What a kernel of `config` writes; `None` for one without `wgmma`. `planned` is what it takes.
    pub fn written(config: &Config, planned: &Resources) -> Option<Self> {
        let products = match (config.family, config.kernel) {
            (Family::Hopper, Kernel::Forward) => Products::of_forward(config),
            (Family::Hopper, Kernel::Backward) if config.is_wide_backward() => {
                Products::of_wide_backward(config)
            }
            (Family::Hopper, Kernel::Backward) => Products::of_backward(config),
            (Family::Hopper, Kernel::BackwardDq) => Products::of_dq(config),
            (Family::Portable, Kernel::Forward | Kernel::Backward | Kernel::BackwardDq)
            | (
                Family::Portable | Family::Hopper,
                Kernel::Combine
                | Kernel::Delta
                | Kernel::RowWeightSum
                | Kernel::Dq
                | Kernel::GroupSums
                | Kernel::BlockLists
                | Kernel::RangeTable
                | Kernel::Sequences
                | Kernel::TransposeValues,
            ) => return None,
        };
        let Products { count, fences, mut waits } = products;
        waits.sort_unstable();
        let mut registers: Vec<u32> = planned.roles.iter().map(|(_, n)| *n as u32).collect();
        registers.sort_unstable();
        let reductions = match config.kernel {
            // Of a step, and of the last one of an item; in order one thread adds them all.
            Kernel::Backward if !config.separate_dq => 2 - u32::from(config.ordered_dq),
            _ => 0,
        };
        let (loads, fences) = (loads(config), fences as u32);
        Some(Self { products: count as u32, fences, waits, loads, reductions, registers })
    }

    /// What the machine code of a kernel has.
    pub fn found(code: &Instructions) -> Self {
        let sorted = |numbers: &[u32]| {
            let mut sorted = numbers.to_vec();
            sorted.sort_unstable();
            sorted
        };
        Self {
            products: code.count(Opcode::Hgmma) + code.count(Opcode::Qgmma),
            fences: code.count(Opcode::WarpgroupArrive),
            waits: sorted(&code.in_flight),
            loads: code.count(Opcode::Utmaldg),
            reductions: code.count(Opcode::Ublkred),
            registers: sorted(&code.registers),
        }
    }

    /// Compares this, as written, with what was found.
    ///
    /// # Errors
    /// What differs, with both numbers.
    pub fn compare(&self, found: &Self) -> Result<(), String> {
        let numbers: [(_, &dyn fmt::Debug, &dyn fmt::Debug); 6] = [
            ("products", &self.products, &found.products),
            ("wgmma fences", &self.fences, &found.fences),
            ("groups left under way by waits", &self.waits, &found.waits),
            ("loads by tensor maps", &self.loads, &found.loads),
            ("bulk reductions", &self.reductions, &found.reductions),
            ("registers of roles", &self.registers, &found.registers),
        ];
        let said = |(what, written, found): &(&str, &dyn fmt::Debug, &dyn fmt::Debug)| {
            let (written, found) = (format!("{written:?}"), format!("{found:?}"));
            (written != found).then(|| format!("{what}: {found}, the source has {written}"))
        };
        let differences: Vec<String> = numbers.iter().filter_map(said).collect();
        match differences.is_empty() {
            true => Ok(()),
            false => Err(differences.join("; ")),
        }
    }
}

/// Loads of panels by tensor maps: of a tile each place in the source has one for each panel.
fn loads(config: &Config) -> u32 {
    let panels = |dim: usize| (dim * config.dtype.bytes()).div_ceil(PANEL_ROW);
    let (of_k, of_v) = (panels(config.dim), panels(config.dim_v));
    if config.kernel != Kernel::Forward {
        // Q, K; V, d_out.
        return (2 * of_k + 2 * of_v) as u32;
    }
    let of_v = match config.dtype {
        // Values lie with keys along their rows, in panels of 128 or of 64.
        Elem::E4m3 => config.tile_kv / if config.tile_kv.is_multiple_of(128) { 128 } else { 64 },
        Elem::F16 | Elem::Bf16 | Elem::F32 => of_v,
    };
    let of = |copied: bool, panels: usize| if copied { 0 } else { panels };
    let copied = config.copied;
    (of(copied.q, of_k) + of(copied.k, of_k) + of(copied.v, of_v)) as u32
}

/// The products of a kernel, and what stands around them.
struct Products {
    count: usize,
    fences: usize,
    waits: Vec<u32>,
}

impl Products {
    /// Of places in the source that each have so many products behind one fence, and of waits.
    fn of(places: &[usize], waits: &[&[u32]]) -> Self {
        Self { count: places.iter().sum(), fences: places.len(), waits: waits.concat() }
    }

    /// An overlapped step, and the three kinds of a waiting one: both products, or one of them.
    fn of_forward(config: &Config) -> Self {
        let k = if config.dtype == Elem::E4m3 { 32 } else { 16 };
        let (s, out) = (config.padded_dim() / k, config.tile_kv / k);
        let waiting = Self::of(&[s + out, s, out], &[&[0, 0, 0]]);
        waiting.with(config.overlap, Self::of(&[s + out], &[&[1, 0]]))
    }

    /// S with dQ, dK and the end of dV of the step before, apart with two fences; dP; dV; and what is
    /// pending at the end of an item. `WIDE_SUMS`, `FROM_DELTA`, `SPLITS_DV`, `FIRST_DV` and `LAST_DV`
    /// are those of `backward_layout.cuh`.
    fn of_backward(config: &Config) -> Self {
        let wide_sums = config.padded_dim() + config.padded_dim_v() > 128;
        let scored_in_order = config.score && config.ordered_dq && config.tile_q == 128;
        let from_delta = !wide_sums && !config.dropout && !scored_in_order;
        let splits_dv = from_delta && (!config.score || config.dscore && !config.captures);
        let (s, dp) = (config.padded_dim() / 16, config.padded_dim_v() / 16);
        let edge = usize::from(wide_sums || splits_dv);
        let dq = if config.separate_dq { 0 } else { config.tile_kv / 16 };
        let (pending, dv) = (edge + dq + config.tile_q / 16, config.tile_q / 16 - 2 * edge);
        let waiting = Self::of(&[s, s, pending, pending], &[&[0, 0, 0]]);
        let (both, rest) = match (wide_sums, splits_dv) {
            // dP after P, with the first 16 queries of dV behind the same fence.
            (true, _) => (Self::of(&[s, pending], &[&[1, 0]]), Self::of(&[dp + 1, dv], &[&[1, 0]])),
            // In both kinds of step dP with the first of dV; the rest in halves. A plain step waits for S
            // alone first.
            (false, true) => {
                let waits: &[u32] = if config.score { &[1, 1] } else { &[2, 1, 1] };
                let rest = Self::of(&[dp, 1, dv / 2, dv - dv / 2], &[&[1, 0]]);
                (Self::of(&[s, pending, dp, 1], &[waits]), rest)
            }
            // The same without dV.
            (false, false) => {
                (Self::of(&[s, pending, dp], &[&[1, 0]]), Self::of(&[dp, dv], &[&[0, 0]]))
            }
        };
        waiting.with(config.overlap, both).with(true, rest)
    }

    /// S and dV of one consumer, dP and dK of the other.
    fn of_wide_backward(config: &Config) -> Self {
        let (s, dp) = (config.padded_dim() / 16, config.padded_dim_v() / 16);
        let of_queries = config.tile_q / 16;
        Self::of(&[s, of_queries, dp, of_queries], &[&[0, 0, 0, 0]])
    }

    /// dQ of the step before with S, then dP; without dQ in the first step; and the last dQ.
    fn of_dq(config: &Config) -> Self {
        let (s, dp) = (config.padded_dim() / 16, config.padded_dim_v() / 16);
        let dq = config.tile_kv / 16;
        let waiting = Self::of(&[s + dp, dq + s, dp, dq], &[&[0, 1, 0, 0]]);
        waiting.with(config.overlap, Self::of(&[dq + s, dp], &[&[1, 1, 0]]))
    }

    /// These and, if there are any, those.
    fn with(mut self, there: bool, more: Self) -> Self {
        if there {
            self.count += more.count;
            self.fences += more.fences;
            self.waits.extend(more.waits);
        }
        self
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::compile::config::Tiles;

    fn written(kernel: Kernel, dtype: Elem, dim: usize, tiles: Tiles) -> MachineCode {
        let config = Config::new(kernel, dtype, dim, dim).tiled(tiles);
        let config = Config { separate_dq: config.is_wide_backward(), ..config };
        let planned = Resources::of(&config).expect("it fits");
        MachineCode::written(&config, &planned).expect("it has products")
    }

    /// Counted by hand in the kernels' files.
    #[test]
    fn products_and_waits_are_those_of_the_source() {
        let code = |products, fences, waits: &[u32], loads, reductions, registers: [u32; 2]| {
            let (waits, registers) = (waits.to_vec(), registers.to_vec());
            MachineCode { products, fences, waits, loads, reductions, registers }
        };
        let of = |kernel, dtype, dim, tiles| written(kernel, dtype, dim, tiles);
        assert_eq!(
            of(Kernel::Forward, Elem::Bf16, 128, Tiles::hopper(2, 128, 2)),
            code(48, 4, &[0, 0, 0, 0, 1], 6, 0, [40, 232])
        );
        let waiting = Tiles { overlap: false, ..Tiles::hopper(3, 128, 2) };
        assert_eq!(
            of(Kernel::Forward, Elem::F16, 64, waiting),
            code(24, 3, &[0, 0, 0], 3, 0, [32, 160])
        );
        assert_eq!(
            of(Kernel::Forward, Elem::E4m3, 128, Tiles::hopper(2, 192, 3)),
            code(30, 4, &[0, 0, 0, 0, 1], 5, 0, [40, 232])
        );
        assert_eq!(
            of(Kernel::Backward, Elem::Bf16, 64, Tiles::hopper_backward(128, 3)),
            code(79, 12, &[0, 0, 0, 0, 1, 1, 1, 2], 4, 2, [40, 232])
        );
        assert_eq!(
            of(Kernel::Backward, Elem::Bf16, 128, Tiles::hopper_backward(64, 3).ordered()),
            code(74, 8, &[0, 0, 0, 0, 0, 1, 1], 8, 1, [40, 232])
        );
        assert_eq!(
            of(Kernel::Backward, Elem::Bf16, 256, Tiles::hopper_wide_backward(2)),
            code(40, 4, &[0, 0, 0, 0], 16, 0, [40, 232])
        );
        assert_eq!(
            of(Kernel::BackwardDq, Elem::Bf16, 256, Tiles::hopper_dq(64, 2)),
            code(108, 6, &[0, 0, 0, 0, 1, 1, 1], 16, 0, [24, 240])
        );
    }

    #[test]
    fn what_differs_is_said_with_both_numbers() {
        let source = written(Kernel::Forward, Elem::Bf16, 64, Tiles::hopper(2, 128, 2));
        assert_eq!(source.compare(&source), Ok(()));
        let waits = [source.waits.clone(), vec![0]].concat();
        let more = MachineCode { products: 37, waits, registers: vec![232], ..source.clone() };
        assert_eq!(
            source.compare(&more).unwrap_err(),
            "products: 37, the source has 36; groups left under way by waits: [0, 0, 0, 0, 1, 0], \
             the source has [0, 0, 0, 0, 1]; registers of roles: [232], the source has [40, 232]"
        );
    }
}
