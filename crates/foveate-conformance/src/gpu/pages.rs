//! Keys and values in pages against the same in one piece.

use std::sync::Arc;

use foveate_cuda::{
    CudaOptions, CudaPlan, DeviceForward, DeviceOperands, DevicePages, DeviceTensor, Engine,
};
use foveate_gpu::driver::Allocation;
use foveate_problem::{Dims, Spec};
use foveate_tensor::DType;
use foveate_tensor::random::Random;

use crate::gpu::checks::{Outcome, expect_refusal};
use crate::gpu::tensors::{bf16_bytes, dims};

/// Two batch entries with different numbers of keys in scattered pages, against each alone.
pub fn paged(engine: &Arc<Engine>, page_size: usize, options: &CudaOptions) -> Outcome {
    let (lengths, heads, queries, dim) = ([100i32, 37], 2, 3, 64);
    let entries = 100usize.div_ceil(page_size);
    let pages = 2 * entries;
    let queue = engine.queue();
    let mut random = Random::new(6);
    let page = heads * page_size * dim * 2;
    let [keys, values] = [(); 2].map(|()| bf16_bytes(&mut random, pages * page / 2));
    let queries_of = bf16_bytes(&mut random, 2 * heads * queries * dim);
    // The pages of both entries are spread over all of them.
    let at = |b: usize, i: usize| (2 * i + b) * step(pages) % pages;
    let table_bytes: Vec<u8> = (0..2)
        .flat_map(|b| (0..entries).flat_map(move |i| (at(b, i) as i32).to_le_bytes()))
        .collect();
    let upload = |bytes: &[u8]| queue.pool().upload(bytes);
    let (q, k, v, table) =
        (upload(&queries_of)?, upload(&keys)?, upload(&values)?, upload(&table_bytes)?);
    let (out, lse) = (queue.pool().take(queries_of.len())?, queue.pool().take(4 * 2 * 2 * 3)?);
    let tensor = |allocation: &Allocation, shape| {
        DeviceTensor::contiguous(allocation.address(), DType::BF16, shape)
    };
    let dims = Dims { batch: 2, len_q: queries, ..dims(heads, 100) };
    let spec = Spec { mask: None, score: None, scale: None, dropout: None };
    let plan = CudaPlan::new(engine.clone(), &spec, &dims, DType::BF16, options.clone())?;
    let forward = |batch: usize, k, v, pages| DeviceForward {
        operands: DeviceOperands {
            pages,
            ..DeviceOperands::new(tensor(&q, [batch, heads, queries, dim]), k, v)
        },
        out: tensor(&out, [batch, heads, queries, dim]),
        lse: DeviceTensor::contiguous(lse.address(), DType::F32, [batch, heads, queries]),
        max_score: None,
    };
    let shape = [pages, heads, page_size, dim];
    let listed = DevicePages { table: table.address(), entries, lengths: &lengths };
    let args = forward(2, tensor(&k, shape), tensor(&v, shape), Some(listed));
    plan.forward_on(queue, &args)?;
    let mut found = vec![0; queries_of.len()];
    out.read(&mut found, options.timeout)?;
    // A page number out of range is reported by a checked plan.
    let checked = CudaOptions { checked: true, ..options.clone() };
    let checked = CudaPlan::new(engine.clone(), &spec, &dims, DType::BF16, checked)?;
    let good = table_bytes.len() - 4 * entries;
    let mut bad = table_bytes.clone();
    bad[good..good + 4].copy_from_slice(&(pages as i32 + 3).to_le_bytes());
    table.write(&bad)?;
    let expected = format!("has page {}", pages + 3);
    if let Err(wrong) = expect_refusal(checked.forward_on(queue, &args), &expected) {
        return Ok(Err(wrong));
    }
    for (b, len) in lengths.map(|len| len as usize).into_iter().enumerate() {
        // Heads, rows, elements of one entry, gathered from its pages.
        let gather = |from: &[u8]| -> Vec<u8> {
            let row = |h: usize, r: usize| {
                let start = at(b, r / page_size) * page + (h * page_size + r % page_size) * dim * 2;
                &from[start..start + dim * 2]
            };
            (0..heads).flat_map(|h| (0..len).flat_map(move |r| row(h, r).to_vec())).collect()
        };
        let (k, v) = (upload(&gather(&keys))?, upload(&gather(&values))?);
        let entry = queries_of.len() / 2;
        q.write(&queries_of[b * entry..][..entry])?;
        let shape = [1, heads, len, dim];
        plan.forward_on(queue, &forward(1, tensor(&k, shape), tensor(&v, shape), None))?;
        let mut alone = vec![0; entry];
        out.read(&mut alone, options.timeout)?;
        let number = |bytes: &[u8]| {
            f32::from_bits(u32::from(u16::from_le_bytes([bytes[0], bytes[1]])) << 16)
        };
        let pairs = found[b * entry..].chunks_exact(2).zip(alone.chunks_exact(2));
        let mut far = pairs.map(|(x, y)| (number(x) - number(y)).abs());
        if far.any(|x| x.is_nan() || x > 0.02) {
            return Ok(Err(format!("entry {b} differs")));
        }
    }
    Ok(Ok(()))
}

/// A step that visits every one of `n` pages.
fn step(n: usize) -> usize {
    [5, 7, 11, 13].into_iter().find(|&step| !n.is_multiple_of(step)).unwrap_or(1)
}
