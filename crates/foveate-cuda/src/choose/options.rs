//! What a user asks of kernels in place of the planner's choice.

use std::fmt;

use crate::compile::config::{Kernel, Tiles};

/// Tiles, warps and stages that a user asks for; what is `None` is left to the planner.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Serialize)]
pub struct TileOptions {
    /// Queries of a tile.
    pub tile_q: Option<usize>,
    /// Keys of a tile.
    pub tile_kv: Option<usize>,
    /// Warps of a CTA.
    pub warps: Option<usize>,
    /// Tiles of the main loop's axis that smem holds.
    pub stages: Option<usize>,
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
            | Kernel::BlockLists
            | Kernel::RangeTable
            | Kernel::Sequences => {}
        }
        self
    }

    /// Sets one option by its name: `forward.tile_q`, `backward.warps`, `kv_splits`.
    ///
    /// # Errors
    /// The names there are.
    pub fn set(&mut self, name: &str, value: usize) -> Result<(), String> {
        let field = match name.split_once('.') {
            None if name == "kv_splits" => Some(&mut self.kv_splits),
            Some(("forward", field)) => self.forward.field(field),
            Some(("backward", field)) => self.backward.field(field),
            Some(("backward_dq", field)) => self.backward_dq.field(field),
            _ => None,
        };
        let field = field.ok_or_else(|| {
            format!(
                "there is no kernel option `{name}`; there are kv_splits and, after forward., \
                 backward. or backward_dq., tile_q, tile_kv, warps, stages"
            )
        })?;
        *field = Some(value);
        Ok(())
    }

    /// What is asked of `kernel`.
    pub(super) fn of(&self, kernel: Kernel) -> TileOptions {
        match kernel {
            Kernel::Forward => self.forward,
            Kernel::Backward => self.backward,
            Kernel::BackwardDq => self.backward_dq,
            Kernel::Combine
            | Kernel::Delta
            | Kernel::RowWeightSum
            | Kernel::Dq
            | Kernel::BlockLists
            | Kernel::RangeTable
            | Kernel::Sequences => TileOptions::default(),
        }
    }
}

impl TileOptions {
    fn field(&mut self, name: &str) -> Option<&mut Option<usize>> {
        match name {
            "tile_q" => Some(&mut self.tile_q),
            "tile_kv" => Some(&mut self.tile_kv),
            "warps" => Some(&mut self.warps),
            "stages" => Some(&mut self.stages),
            _ => None,
        }
    }

    /// Asks for these.
    fn exactly(tiles: Tiles) -> Self {
        let Tiles { tile_q, tile_kv, warps, stages } = tiles;
        let [tile_q, tile_kv, warps, stages] = [tile_q, tile_kv, warps, stages].map(Some);
        Self { tile_q, tile_kv, warps, stages }
    }
}

impl fmt::Display for TileOptions {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let parts = [
            ("tile_q", self.tile_q),
            ("tile_kv", self.tile_kv),
            ("warps", self.warps),
            ("stages", self.stages),
        ];
        let given = parts.iter().filter_map(|(name, value)| value.map(|v| format!("{name} {v}")));
        f.write_str(&given.collect::<Vec<_>>().join(", "))
    }
}
