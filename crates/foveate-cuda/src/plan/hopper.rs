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
use foveate_gpu::DeviceTensor;
use foveate_gpu::driver::{Swizzle, TensorMap};
use foveate_gpu::sync::lock;
use foveate_gpu::tma::{MapAxes, MapRefusal, MapTile, OperandMap};

/// Rows of a consumer.
const CONSUMER_ROWS: usize = 64;
/// Maps that are kept: those of a few layers.
const MOST_MAPS: usize = 256;

/// Maps of the last calls.
#[derive(Clone, Debug, Default)]
pub(super) struct KeptMaps(Vec<(OperandMap, TensorMap)>);

/// The maps of q, k and v, and in a backward of d_out, with boxes of so many queries and keys.
fn operand_maps(
    operands: &DeviceOperands<'_>,
    d_out: Option<&DeviceTensor>,
    group: usize,
    [queries, keys]: [usize; 2],
) -> Result<Vec<OperandMap>, MapRefusal> {
    let tile = |axes, rows: usize| MapTile { axes, rows: rows as u32, swizzle: Swizzle::Bytes128 };
    let queries = tile(MapAxes::Groups { heads: group }, queries);
    let keys = tile(MapAxes::Heads, keys);
    let mut maps = vec![
        OperandMap::of("q", &operands.q, &queries)?,
        OperandMap::of("k", &operands.k, &keys)?,
        OperandMap::of("v", &operands.v, &keys)?,
    ];
    if let Some(d_out) = d_out {
        maps.push(OperandMap::of("d_out", d_out, &queries)?);
    }
    Ok(maps)
}

impl CudaPlan {
    /// Whether the family may run kernels of this plan.
    pub(super) fn may_persist(&self) -> bool {
        self.engine.profile().capability == (9, 0) && self.elem != Elem::F32
    }

    /// Why the copy engine cannot load an operand of a call; nothing on devices where no kernel
    /// would use it.
    pub(super) fn unmapped(
        &self,
        operands: &DeviceOperands<'_>,
        d_out: Option<&DeviceTensor>,
    ) -> Option<String> {
        let boxes = [CONSUMER_ROWS; 2];
        let maps =
            self.may_persist().then(|| operand_maps(operands, d_out, self.dims.group(), boxes));
        maps.and_then(Result::err).map(|refusal| refusal.to_string())
    }

    /// The parameters of a launch after its mods: of a backward if there is a `d_out`.
    pub(super) fn persistent(
        &self,
        operands: &DeviceOperands<'_>,
        d_out: Option<&DeviceTensor>,
        config: &Config,
        schedule: &LaunchSchedule,
    ) -> Result<(PersistentParams, Vec<TensorMap>), CudaError> {
        // A consumer of the forward has queries, and a copy of them, of its own.
        let queries = if d_out.is_some() { config.tile_q } else { CONSUMER_ROWS };
        let maps = operand_maps(operands, d_out, self.dims.group(), [queries, config.tile_kv]);
        let maps = maps.map_err(|refusal| CudaError::argument(refusal.to_string()))?;
        let step = |map: usize, axis: usize| maps.get(map).map_or(0, |map| map.steps[axis] as i32);
        let params = PersistentParams {
            taken: schedule.taken(),
            q_head: step(0, 2),
            q_group: step(0, 3),
            q_batch: step(0, 4),
            k_head: step(1, 2),
            k_batch: step(1, 3),
            v_head: step(2, 2),
            v_batch: step(2, 3),
            d_out_head: step(3, 2),
            d_out_group: step(3, 3),
            d_out_batch: step(3, 4),
        };
        let encoded = maps.iter().map(|map| self.encoded(map)).collect::<Result<_, _>>()?;
        Ok((params, encoded))
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
