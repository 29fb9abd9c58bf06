//! What a launch of the Hopper family takes beside a portable one: tensor maps of its operands, and
//! the counter that its persistent CTAs take items from.
//!
//! A map belongs to an address and a layout. Those of the last calls are kept, so that a warm call
//! encodes none.

use super::CudaPlan;
use super::call::Call;
use super::kernels::queue_kernel;
use super::resident::LaunchSchedule;
use crate::choose::{Unmapped, unmet};
use crate::compile::config::{Config, Copied, Elem};
use crate::compile::params::{Abi, PersistentParams, ScaleView, TransposeValuesParams};
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
        self.engine.profile().runs_hopper() && self.elem != Elem::F32
    }

    /// Why the family runs nothing on a card that it is made for.
    pub(super) fn without_hopper(&self) -> Option<String> {
        let unmet = unmet(self.engine.profile())?;
        Some(format!("hopper: {unmet}; the portable family runs"))
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
        let scale = |of: fn(&DeviceScales) -> (&DeviceTensor<3>, usize)| {
            operands.scales.as_ref().map_or(ScaleView::default(), |scales| {
                let (tensor, rows) = of(scales);
                let [batch, head, block] = tensor.layout.strides.map(|s| s as i64);
                let rows = rows.min(i32::MAX as usize) as i64;
                ScaleView { data: tensor.start(), batch, head, block, rows }
            })
        };
        let step = |map: usize, axis: usize| {
            maps.get(map).and_then(Option::as_ref).map_or(0, |map| map.steps[axis] as i32)
        };
        let [mask_bits, mask_slots] = schedule.mask_bits();
        let params = PersistentParams {
            taken: schedule.taken(),
            mask_bits,
            mask_slots,
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
            q_scale: scale(|scales| (&scales.q, scales.blocks.q)),
            k_scale: scale(|scales| (&scales.k, scales.blocks.kv)),
            v_scale: scale(|scales| (&scales.v, scales.blocks.kv)),
        };
        let encoded = |(name, map): (&str, &Option<OperandMap>)| match map {
            Some(map) => self.encoded(name, map),
            None => Ok(TensorMap::UNUSED),
        };
        let maps = ["q", "k", "v", "d_out"].into_iter().zip(&maps);
        Ok((params, maps.map(encoded).collect::<Result<_, _>>()?))
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

    fn encoded(&self, name: &str, map: &OperandMap) -> Result<TensorMap, CudaError> {
        let mut kept = lock(&self.maps);
        if let Some((_, encoded)) = kept.0.iter().find(|(of, _)| of == map) {
            return Ok(*encoded);
        }
        let encoded = map.encode(name, self.engine.device())?;
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
    use crate::compile::config::{Kernel, Tiles};

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

    /// What a layout's text takes of other files.
    const PRELUDE: &str = "
#include <cstdio>
constexpr int ELEM_BYTES = FV_DTYPE == 3 ? 1 : 2, PANEL_ROW = 128, PANEL_COLUMNS = PANEL_ROW / ELEM_BYTES;
constexpr int ceil_div(int a, int b) { return (a + b - 1) / b; }
constexpr int panels(int columns) { return ceil_div(columns, PANEL_COLUMNS); }
";

    /// The bytes that a kernel announces for a copy of q, k, v and d_out: what its layout says, compiled for
    /// the host. `None` without a C++ compiler.
    fn announced(config: &Config) -> Option<[usize; 4]> {
        let layout = if config.kernel == Kernel::Forward {
            include_str!("../../kernels/hopper/forward_device.cuh")
        } else if config.is_wide_backward() {
            include_str!("../../kernels/hopper/backward_wide_layout.cuh")
        } else if config.kernel == Kernel::Backward {
            include_str!("../../kernels/hopper/backward_layout.cuh")
        } else {
            include_str!("../../kernels/hopper/backward_dq_layout.cuh")
        };
        let d_out = if config.kernel == Kernel::Forward { "0" } else { "D_OUT_BYTES" };
        let (constants, _) = layout.split_once("extern \"C\"").expect("it states its bytes");
        let main = format!(
            "int main() {{ std::printf(\"%d %d %d %d\", Q_BYTES, K_BYTES, V_BYTES, {d_out}); }}\n"
        );
        let code = [&config.defines(), PRELUDE, constants, &main].concat();
        let said = crate::compile::on_host::text(&code)?;
        let numbers: Vec<usize> = said.split(' ').map(|n| n.parse().unwrap()).collect();
        Some(numbers.try_into().expect("four numbers"))
    }

    /// A barrier that was told of other bytes than its boxes bring is never over.
    #[test]
    fn kernels_announce_the_bytes_of_the_boxes_that_they_copy() {
        const PANEL_ROW: usize = 128;
        let dims = [(64, 64), (72, 40), (128, 128), (192, 128), (256, 256)];
        for (dim, dim_v) in dims {
            let wide = dim > Tiles::MOST_DIM_OF_BOTH;
            let backward = match wide {
                true => vec![Tiles::hopper_wide_backward(2)],
                false => vec![Tiles::hopper_backward(64, 3), Tiles::hopper_backward(128, 2)],
            };
            let all = [
                (
                    Kernel::Forward,
                    Elem::Bf16,
                    vec![Tiles::hopper(3, 80, 2), Tiles::hopper(2, 128, 2)],
                ),
                (
                    Kernel::Forward,
                    Elem::E4m3,
                    vec![Tiles::hopper(2, 192, 2), Tiles::hopper(2, 128, 3)],
                ),
                (Kernel::Backward, Elem::Bf16, backward),
                (
                    Kernel::BackwardDq,
                    Elem::F16,
                    vec![Tiles::hopper_dq(48, 2), Tiles::hopper_dq(64, 2)],
                ),
            ];
            let each = all.iter().flat_map(|(kernel, dtype, tiles)| {
                tiles.iter().map(move |tiles| (*kernel, *dtype, *tiles))
            });
            for (kernel, dtype, tiles) in each {
                let config = Config::new(kernel, dtype, dim, dim_v).tiled(tiles);
                let config = Config { separate_dq: wide, ..config };
                // A copy has a box for each panel of an operand's rows.
                let of = |rows: usize, dim: usize| {
                    rows * PANEL_ROW * (dim * dtype.bytes()).div_ceil(PANEL_ROW)
                };
                let forward = kernel == Kernel::Forward;
                let queries = if forward { CONSUMER_ROWS } else { tiles.tile_q };
                // Of e4m3 boxes of 128 or 64 keys, a byte each, cover the tile.
                let values = match dtype == Elem::E4m3 {
                    true => value_tile(&config).rows as usize * tiles.tile_kv,
                    false => of(tiles.tile_kv, dim_v),
                };
                let d_out = if forward { 0 } else { of(queries, dim_v) };
                let boxes = [of(queries, dim), of(tiles.tile_kv, dim), values, d_out];
                let Some(announced) = announced(&config) else { return };
                assert_eq!(announced, boxes, "{config}");
            }
        }
    }
}
