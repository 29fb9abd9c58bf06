//! What a launch of the Hopper family takes beside a portable one: tensor maps of its operands, and
//! the counter that its persistent CTAs take items from.
//!
//! A map belongs to an address and a layout. Those of the last calls are kept, so that a warm call
//! encodes none.

use super::CudaPlan;
use super::resident::LaunchSchedule;
use crate::compile::config::{Config, Elem};
use crate::compile::params::PersistentParams;
use crate::error::CudaError;
use crate::operands::DeviceOperands;
use foveate_gpu::driver::{Swizzle, TensorMap};
use foveate_gpu::sync::lock;
use foveate_gpu::tma::{MapAxes, MapRefusal, MapTile, OperandMap};

/// Queries of a consumer, which has a copy of its own.
const CONSUMER_ROWS: u32 = 64;
/// Maps that are kept: those of a few layers.
const MOST_MAPS: usize = 256;

/// Maps of the last calls.
#[derive(Clone, Debug, Default)]
pub(super) struct KeptMaps(Vec<(OperandMap, TensorMap)>);

/// The maps of q, k and v for tiles of `tile_kv` keys.
fn operand_maps(
    operands: &DeviceOperands<'_>,
    group: usize,
    tile_kv: usize,
) -> Result<[OperandMap; 3], MapRefusal> {
    let tile = |axes, rows| MapTile { axes, rows, swizzle: Swizzle::Bytes128 };
    let queries = tile(MapAxes::Groups { heads: group }, CONSUMER_ROWS);
    let keys = tile(MapAxes::Heads, tile_kv as u32);
    Ok([
        OperandMap::of("q", &operands.q, &queries)?,
        OperandMap::of("k", &operands.k, &keys)?,
        OperandMap::of("v", &operands.v, &keys)?,
    ])
}

impl CudaPlan {
    /// Whether the family may run kernels of this plan.
    pub(super) fn may_persist(&self) -> bool {
        self.engine.profile().capability == (9, 0) && self.elem != Elem::F32
    }

    /// Why the copy engine cannot load an operand of a call; nothing on devices where no kernel
    /// would use it.
    pub(super) fn unmapped(&self, operands: &DeviceOperands<'_>) -> Option<String> {
        let maps = self.may_persist().then(|| operand_maps(operands, self.dims.group(), 64));
        maps.and_then(Result::err).map(|refusal| refusal.to_string())
    }

    /// The parameters of a launch after its mods.
    pub(super) fn persistent(
        &self,
        operands: &DeviceOperands<'_>,
        config: &Config,
        schedule: &LaunchSchedule,
    ) -> Result<(PersistentParams, [TensorMap; 3]), CudaError> {
        let maps = operand_maps(operands, self.dims.group(), config.tile_kv);
        let maps = maps.map_err(|refusal| CudaError::argument(refusal.to_string()))?;
        let step = |map: usize, axis: usize| maps[map].steps[axis] as i32;
        let params = PersistentParams {
            taken: schedule.taken(),
            q_head: step(0, 2),
            q_group: step(0, 3),
            q_batch: step(0, 4),
            k_head: step(1, 2),
            k_batch: step(1, 3),
            v_head: step(2, 2),
            v_batch: step(2, 3),
        };
        let mut encoded = Vec::with_capacity(maps.len());
        for map in &maps {
            encoded.push(self.encoded(map)?);
        }
        Ok((params, encoded.try_into().expect("as many as operands")))
    }

    fn encoded(&self, map: &OperandMap) -> Result<TensorMap, CudaError> {
        let mut kept = lock(&self.maps);
        if let Some((_, encoded)) = kept.0.iter().find(|(of, _)| of == map) {
            return Ok(*encoded);
        }
        let encoded = map.encode(self.engine.device())?;
        if kept.0.len() >= MOST_MAPS {
            kept.0.remove(0);
        }
        kept.0.push((*map, encoded));
        Ok(encoded)
    }
}
