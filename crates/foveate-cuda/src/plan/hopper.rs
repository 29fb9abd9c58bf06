//! What a launch of the Hopper family takes beside a portable one: tensor maps of its operands, and
//! the counter that its persistent CTAs take items from.
//!
//! A map belongs to an address and a layout. Those of the last calls are kept, so that a warm call
//! encodes none.

use super::CudaPlan;
use super::call::Call;
use super::kernels::queue_kernel;
use super::resident::LaunchSchedule;
use crate::choose::Unmapped;
use crate::compile::config::{Config, Copied, Elem};
use crate::compile::params::{Abi, HeadView, PersistentParams, TransposeValuesParams};
use crate::error::CudaError;
use crate::operands::{DeviceOperands, DeviceScales, view};
use foveate_gpu::DeviceTensor;
use foveate_gpu::driver::{Allocation, Swizzle, TensorMap};
use foveate_gpu::sync::lock;
use foveate_gpu::tma::{MapAxes, MapRefusal, MapTile, OperandMap};
use foveate_tensor::DType;

/// Columns of transposed values that a CTA makes: `KEYS` of `transpose_values.cu`.
const TRANSPOSED_COLUMNS: usize = 64;
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
) -> Vec<(&'static str, Result<OperandMap, MapRefusal>)> {
    let tile = |axes, rows: usize| MapTile { axes, rows: rows as u32, swizzle: Swizzle::Bytes128 };
    let queries = tile(MapAxes::Groups { heads: group }, queries);
    let keys = tile(MapAxes::Heads, keys);
    let DeviceOperands { q, k, v, .. } = operands;
    let all = [("q", q, &queries), ("k", k, &keys), ("v", v, &keys)];
    let all = all.into_iter().chain(d_out.map(|d_out| ("d_out", d_out, &queries)));
    all.map(|(name, tensor, tile)| (name, OperandMap::of(name, tensor, tile))).collect()
}

/// Keys of a box of the maps of k and v: of a tile, or, where they lie in pages, of both.
fn box_keys(operands: &DeviceOperands<'_>, tile_kv: usize) -> usize {
    operands.pages.map_or(tile_kv, |_| common_divisor(tile_kv, operands.k.layout.shape[2]))
}

/// The greatest that divides both.
fn common_divisor(a: usize, b: usize) -> usize {
    if b == 0 { a } else { common_divisor(b, a % b) }
}

/// The tile of transposed values that one copy moves: `VALUE_KEYS` keys by all of their elements.
fn value_tile(config: &Config) -> MapTile {
    let swizzle = match config.tile_kv.is_multiple_of(128) {
        true => Swizzle::Bytes128,
        false => Swizzle::Bytes64,
    };
    MapTile { axes: MapAxes::Heads, rows: config.padded_dim_v() as u32, swizzle }
}

impl CudaPlan {
    /// Whether the family may run kernels of this plan.
    pub(super) fn may_persist(&self) -> bool {
        self.engine.profile().capability == (9, 0) && self.elem != Elem::F32
    }

    /// The operands of a call that the copy engine cannot load; none on devices where no kernel
    /// would use it.
    pub(super) fn unmapped(
        &self,
        operands: &DeviceOperands<'_>,
        d_out: Option<&DeviceTensor>,
    ) -> Vec<Unmapped> {
        if !self.may_persist() {
            return Vec::new();
        }
        let page_size = operands.pages.map(|_| operands.k.layout.shape[2]);
        let of_pages = |name| page_size.and_then(|rows| Unmapped::of_pages(name, rows));
        let maps = operand_maps(operands, d_out, self.dims.group(), [CONSUMER_ROWS; 2]);
        let unmapped = maps.into_iter().filter_map(|(name, map)| match map {
            Err(refusal) => Some(Unmapped::new(name, &refusal)),
            Ok(_) if name == "k" || name == "v" => of_pages(name),
            Ok(_) => None,
        });
        unmapped.collect()
    }

    /// The parameters of a launch after its mods: of a backward if there is a `d_out`, of a forward of
    /// e4m3 if values are `transposed`.
    pub(super) fn persistent(
        &self,
        operands: &DeviceOperands<'_>,
        transposed: Option<&DeviceTensor>,
        d_out: Option<&DeviceTensor>,
        config: &Config,
        schedule: &LaunchSchedule,
    ) -> Result<(PersistentParams, Vec<TensorMap>), CudaError> {
        // A consumer of the forward has queries, and a copy of them, of its own.
        let queries = if d_out.is_some() { config.tile_q } else { CONSUMER_ROWS };
        let box_keys = box_keys(operands, config.tile_kv);
        let Copied { q, k, v } = config.copied;
        let copied = [q, k, v, false];
        // Of operands that the kernel copies row by row it reads no map.
        let maps = operand_maps(operands, d_out, self.dims.group(), [queries, box_keys]);
        let maps = maps.into_iter().zip(copied).map(|((_, map), copied)| match copied {
            true => Ok(None),
            false => map.map(Some).map_err(|refusal| CudaError::argument(refusal.to_string())),
        });
        let mut maps = maps.collect::<Result<Vec<_>, _>>()?;
        if let Some(values) = transposed {
            let map = OperandMap::of("v", values, &value_tile(config));
            maps[2] = Some(map.map_err(|refusal| CudaError::argument(refusal.to_string()))?);
        }
        let scale = |of: fn(&DeviceScales) -> &DeviceTensor<2>| {
            operands.scales.as_ref().map_or(HeadView::default(), |scales| {
                let [batch, head] = of(scales).layout.strides.map(|s| s as i64);
                HeadView { data: of(scales).start(), batch, head }
            })
        };
        let step = |map: usize, axis: usize| {
            maps.get(map).and_then(Option::as_ref).map_or(0, |map| map.steps[axis] as i32)
        };
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
            box_keys: box_keys as i32,
            packed: operands.varlen.is_some().into(),
            q_scale: scale(|scales| &scales.q),
            k_scale: scale(|scales| &scales.k),
            v_scale: scale(|scales| &scales.v),
        };
        let encoded = |map: &Option<OperandMap>| match map {
            Some(map) => self.encoded(map),
            None => Ok(TensorMap::UNUSED),
        };
        Ok((params, maps.iter().map(encoded).collect::<Result<_, _>>()?))
    }

    /// Queues the transposition of values of e4m3: `[Bk, Hkv, Dv, columns]`, in the order of keys that
    /// the forward of `config` multiplies, and the memory that they are in.
    pub(super) fn transposed_values(
        &self,
        call: &Call<'_>,
        operands: &DeviceOperands<'_>,
        config: &Config,
        schedule: &LaunchSchedule,
    ) -> Result<(Allocation, DeviceTensor), CudaError> {
        let (dims, tile) = (call.dims, config.tile_kv);
        let tiles = match dims.packed {
            true => dims.len_k / tile + dims.batch,
            false => dims.len_k.div_ceil(tile).max(1),
        };
        let shape = [dims.kv_axis(), dims.heads_kv, dims.dim_v, tiles * tile];
        let ctas = shape[0] * shape[1] * shape[3] / TRANSPOSED_COLUMNS;
        let count = |n: usize| {
            i32::try_from(n).map_err(|_| {
                CudaError::argument(format!(
                    "{n} keys and parts of all heads are more than a launch counts; cut the batch"
                ))
            })
        };
        let memory = call.queue.pool().take(shape.iter().product())?;
        let params = TransposeValuesParams {
            v: view(&operands.v, "v", 1)?,
            sequences: schedule.sequences,
            values: memory.address(),
            count: count(dims.batch)?,
            packed: dims.packed.into(),
            columns: count(shape[3])?,
            tile_kv: count(tile)?,
            heads: count(dims.heads_kv)?,
        };
        let own = Config::transpose_values(dims.dim_v);
        let (threads, grid) = (own.threads() as u32, [count(ctas)? as u32, 1, 1]);
        let function = self.plain_kernel(own)?;
        queue_kernel(&function, call.queue, grid, threads, &[&params.bytes()])?;
        let values = DeviceTensor::contiguous(memory.address(), DType::F8E4M3, shape);
        Ok((memory, values))
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

#[cfg(test)]
mod tests {
    use super::*;

    /// Boxes that lie apart by other than 1024 bytes would be swizzled otherwise than their tile is.
    #[test]
    fn boxes_of_pages_are_whole_parts_of_pages_and_tiles_and_of_the_swizzle() {
        for tile_kv in (32..=256).step_by(16) {
            for page in (8..=4096).step_by(8) {
                let keys = common_divisor(tile_kv, page);
                assert_eq!((page % keys, tile_kv % keys, keys % 8), (0, 0, 0), "{tile_kv}, {page}");
                assert!(tile_kv / keys <= 32, "a lane for each box of {tile_kv} keys");
            }
        }
    }
}
