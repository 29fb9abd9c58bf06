//! What a user asks of kernels in place of the planner's choice.

use std::fmt;

use crate::compile::config::{Family, Kernel, Tiles};
use crate::error::CudaError;

/// Tiles, warps and stages that a user asks for; what is `None` is left to the planner.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Serialize)]
pub struct TileOptions {
    /// The family of the kernel.
    pub family: Option<Family>,
    /// Queries of a tile.
    pub tile_q: Option<usize>,
    /// Keys of a tile.
    pub tile_kv: Option<usize>,
    /// Warps of a CTA.
    pub warps: Option<usize>,
    /// Tiles of the main loop's axis that smem holds.
    pub stages: Option<usize>,
    /// Hopper: warpgroups that consume; warps are four for each and four more.
    pub consumers: Option<usize>,
    /// Hopper: whether softmax runs beside a product within a warpgroup.
    pub overlap: Option<bool>,
    /// Hopper's backward: whether dq is added in a fixed order, where it must be in one; otherwise a
    /// kernel of its own makes it.
    pub ordered_dq: Option<bool>,
    /// Hopper's backward: whether every query head has items of its own, whose dk and dv are added up.
    pub split_gqa: Option<bool>,
    /// Hopper: whether partial tiles read bits of the mask that are made beforehand, in place of its evaluation.
    pub mask_bits: Option<bool>,
}

/// What a user asks of kernels. It is honoured, or refused with the numbers.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Serialize)]
pub struct KernelOptions {
    /// Of the forward.
    pub forward: TileOptions,
    /// Of the backward.
    pub backward: TileOptions,
    /// Of the deterministic backward's kernel for dq.
    pub backward_dq: TileOptions,
    /// KV splits of a tile of queries in the forward.
    pub kv_splits: Option<usize>,
}

impl KernelOptions {
    /// Asks for these tiles of `kernel`, and else what was asked for before.
    pub fn with(mut self, kernel: Kernel, tiles: Tiles) -> Self {
        match kernel {
            Kernel::Forward => self.forward = TileOptions::exactly(tiles),
            Kernel::Backward => self.backward = TileOptions::exactly(tiles),
            Kernel::BackwardDq => self.backward_dq = TileOptions::exactly(tiles),
            Kernel::Combine
            | Kernel::Delta
            | Kernel::RowWeightSum
            | Kernel::Dq
            | Kernel::GroupSums
            | Kernel::BlockLists
            | Kernel::RangeTable
            | Kernel::Sequences
            | Kernel::TransposeValues => {}
        }
        self
    }

    /// Sets one option by its name: `forward.tile_q` to `64`, `forward.family` to `hopper`,
    /// `kv_splits` to `2`.
    ///
    /// # Errors
    /// The names there are, or the values that one takes.
    pub fn set(&mut self, name: &str, value: &str) -> Result<(), String> {
        let (of, field) = match name.split_once('.') {
            None if name == "kv_splits" => {
                self.kv_splits = Some(number(name, value)?);
                return Ok(());
            }
            Some(("forward", field)) => (&mut self.forward, field),
            Some(("backward", field)) => (&mut self.backward, field),
            Some(("backward_dq", field)) => (&mut self.backward_dq, field),
            _ => return Err(unknown(name)),
        };
        if matches!(field, "ordered_dq" | "split_gqa") && !name.starts_with("backward.") {
            return Err(format!(
                "there is no kernel option `{name}`; only the backward has {field}"
            ));
        }
        if field == "mask_bits" && name.starts_with("backward_dq.") {
            return Err(format!(
                "there is no kernel option `{name}`; forward and backward have {field}"
            ));
        }
        match field {
            "family" => {
                of.family = Some(Family::named(value).ok_or_else(|| {
                    let names = Family::ALL.map(Family::name).join(" or ");
                    format!("{name} is {value:?}; it is {names}")
                })?)
            }
            "overlap" => of.overlap = Some(truth(name, value)?),
            "ordered_dq" => of.ordered_dq = Some(truth(name, value)?),
            "split_gqa" => of.split_gqa = Some(truth(name, value)?),
            "mask_bits" => of.mask_bits = Some(truth(name, value)?),
            "consumers" => of.consumers = Some(number(name, value)?),
            "tile_q" => of.tile_q = Some(number(name, value)?),
            "tile_kv" => of.tile_kv = Some(number(name, value)?),
            "warps" => of.warps = Some(number(name, value)?),
            "stages" => of.stages = Some(number(name, value)?),
            _ => return Err(unknown(name)),
        }
        Ok(())
    }

    /// What is asked of `kernel`.
    pub(super) fn of(&self, kernel: Kernel) -> TileOptions {
        let asked = match kernel {
            Kernel::Forward => self.forward,
            Kernel::Backward => self.backward,
            Kernel::BackwardDq => self.backward_dq,
            Kernel::Combine
            | Kernel::Delta
            | Kernel::RowWeightSum
            | Kernel::Dq
            | Kernel::GroupSums
            | Kernel::BlockLists
            | Kernel::RangeTable
            | Kernel::Sequences
            | Kernel::TransposeValues => TileOptions::default(),
        };
        TileOptions { warps: asked.warps.or(asked.warps_of_consumers()), ..asked }
    }
}

impl TileOptions {
    /// Whether candidates of `family` are to be made: no other one is asked for.
    pub(super) fn allows(&self, family: Family) -> bool {
        self.family.is_none_or(|asked| asked == family)
    }

    /// Whether what is asked for is the Hopper family's alone.
    pub(super) fn is_of_hopper(&self) -> bool {
        let asked = [self.overlap, self.ordered_dq, self.split_gqa, self.mask_bits];
        asked.contains(&Some(true)) || self.consumers.is_some()
    }

    /// Whether the Hopper family is asked for, by its name or by what no other has.
    pub(super) fn asks_for_hopper(&self) -> bool {
        self.family == Some(Family::Hopper) || self.is_of_hopper()
    }

    /// Refuses consumers that make other warps than are asked for.
    pub(super) fn check(&self) -> Result<(), CudaError> {
        match (self.warps_of_consumers(), self.warps) {
            (Some(consumers), Some(warps)) if consumers != warps => {
                Err(CudaError::argument(format!(
                    "{warps} warps are asked for, and consumers that make {consumers}; leave one of \
                     them out"
                )))
            }
            (Some(_) | None, _) => Ok(()),
        }
    }

    /// Warps of a CTA with so many consumers.
    pub(super) fn warps_of_consumers(&self) -> Option<usize> {
        self.consumers.map(|count| count.saturating_add(1).saturating_mul(4))
    }

    /// Asks for these.
    pub fn exactly(tiles: Tiles) -> Self {
        Self {
            family: Some(tiles.family),
            tile_q: Some(tiles.tile_q),
            tile_kv: Some(tiles.tile_kv),
            warps: Some(tiles.warps),
            stages: Some(tiles.stages),
            consumers: None,
            overlap: Some(tiles.overlap),
            ordered_dq: Some(tiles.ordered_dq),
            split_gqa: Some(tiles.split_gqa),
            mask_bits: Some(tiles.mask_bits),
        }
    }
}

impl fmt::Display for TileOptions {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let number = |value: Option<usize>| value.map(|n| n.to_string());
        let parts = [
            ("family", self.family.map(|family| family.name().to_owned())),
            ("tile_q", number(self.tile_q)),
            ("tile_kv", number(self.tile_kv)),
            ("warps", number(self.warps.filter(|_| self.consumers.is_none()))),
            ("stages", number(self.stages)),
            ("consumers", number(self.consumers)),
            ("overlap", self.overlap.map(|overlaps| overlaps.to_string())),
            ("ordered_dq", self.ordered_dq.map(|ordered| ordered.to_string())),
            ("split_gqa", self.split_gqa.map(|split| split.to_string())),
            ("mask_bits", self.mask_bits.map(|bits| bits.to_string())),
        ];
        let given =
            parts.iter().filter_map(|(name, value)| Some(format!("{name} {}", value.as_ref()?)));
        f.write_str(&given.collect::<Vec<_>>().join(", "))
    }
}

fn number(name: &str, value: &str) -> Result<usize, String> {
    value.parse().map_err(|_| format!("{name} is {value:?}; it is a number"))
}

fn truth(name: &str, value: &str) -> Result<bool, String> {
    value.parse().map_err(|_| format!("{name} is {value:?}; it is true or false"))
}

fn unknown(name: &str) -> String {
    format!(
        "there is no kernel option `{name}`; there are kv_splits and, after forward., backward. or \
         backward_dq., family, tile_q, tile_kv, warps, stages, consumers, overlap, ordered_dq, split_gqa, \
         mask_bits"
    )
}
