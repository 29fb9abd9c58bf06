//! Plans on a driver made for tests: what they say of themselves, and what is refused before
//! anything is compiled. Each test runs itself again in a process that finds that driver.

#[path = "../../foveate-gpu/tests/driver/mod.rs"]
mod driver;

use foveate_cuda::{CudaOptions, CudaPlan, Description, Engine};
use foveate_mask::Tiling;
use foveate_mods::{masks, scores};
use foveate_problem::{Arrangement, Dims, Spec};
use foveate_tensor::DType;

use driver::inside;

/// 8/2 heads of 64 numbers.
fn dims(batch: usize, [len_q, len_k]: [usize; 2]) -> Dims {
    Dims {
        batch,
        heads_q: 8,
        heads_kv: 2,
        len_q,
        len_k,
        dim: 64,
        dim_v: 64,
        shared_kv: false,
        packed: false,
    }
}

/// What a plan of 8/2 heads of 64 numbers in bf16 says of a call.
fn describe(spec: &Spec, batch: usize, len: [usize; 2], arrangement: Arrangement) -> Description {
    let engine = Engine::get(0).unwrap();
    let dims = dims(batch, len);
    let plan = CudaPlan::new(engine, spec, &dims, DType::BF16, CudaOptions::default()).unwrap();
    plan.describe(arrangement, None).unwrap()
}

const PLAIN: Spec = Spec { mask: None, score: None, scale: None, dropout: None };

#[test]
fn a_description_counts_the_keys_that_are_in_pages_and_plans_for_them() {
    if !inside("a_description_counts_the_keys_that_are_in_pages_and_plans_for_them", &[], &[], &[])
    {
        return;
    }
    let lengths = [1000, 10, 0];
    let paged = Arrangement::Paged { lengths: &lengths, page_size: 16 };
    for mask in [None, Some(masks::causal())] {
        let spec = Spec { mask, ..PLAIN };
        let found = describe(&spec, 3, [300, 1000], paged);
        let Tiling { tile_q: q, tile_kv: kv, .. } = found.tiling;
        let columns = 1000usize.div_ceil(kv) + 10usize.div_ceil(kv);
        assert_eq!(found.tiling.tiles, 8 * 300usize.div_ceil(q) * columns);
        assert!(found.kernels[0].contains(", paged"), "{:?}", found.kernels);
        assert!(found.kernels.iter().all(|k| !k.starts_with("backward")), "{:?}", found.kernels);
        assert_eq!(found.backward_bytes, 0);
        if spec.mask.is_none() {
            assert_eq!(found.tiling.live_pairs, 8 * 300 * 1010);
        }
        let dense = describe(&spec, 3, [300, 1000], Arrangement::Dense);
        assert!(
            dense.tiling.live_pairs > found.tiling.live_pairs
                && !dense.kernels[0].contains("paged")
        );
    }
}

#[test]
fn a_description_counts_the_cells_that_the_hopper_forward_passes_over() {
    let name = "a_description_counts_the_cells_that_the_hopper_forward_passes_over";
    if !inside(name, &[], &["-DLOADS"], &[]) {
        return;
    }
    let causal = Spec { mask: Some(masks::causal()), ..PLAIN };
    let found = describe(&causal, 8, [1024; 2], Arrangement::Dense);
    assert!(found.kernels[0].contains("tile 192x128"), "{:?}", found.kernels);
    assert!(found.kernels[0].contains(", for sm_90a: "), "{:?}", found.kernels);
    assert!(found.kernels[1].contains(", for sm_90: "), "{:?}", found.kernels);
    let Tiling { tile_q, tile_kv, tiles, full_tiles, partial_tiles, live_pairs, .. } = found.tiling;
    // In each of 64 heads 16 rows of cells, which see 1, 1, 2, 2, to 8 columns of 8.
    let heads = 8 * 8;
    assert_eq!((tile_q, tile_kv, tiles), (64, 128, heads * 16 * 8));
    assert_eq!((full_tiles, partial_tiles), (heads * 56, heads * 16));
    assert_eq!(live_pairs, (heads * 72 * 64 * 128) as u64);
    assert_eq!(found.tiling.seen_pairs, (heads * 1024 * 1025 / 2) as u64);
    // Of lengths that divide nothing.
    let odd = describe(&causal, 8, [1293, 1100], Arrangement::Dense);
    assert!(odd.kernels[0].contains("tile 192x128"), "{:?}", odd.kernels);
    let rows = |i: usize| (1293 - 64 * i).min(64);
    let keys = |i: usize| ((64 * (i + 1)).min(1293).div_ceil(128) * 128).min(1100);
    let pairs: usize = (0..21).map(|i| rows(i) * keys(i)).sum();
    assert_eq!(odd.tiling.live_pairs, (8 * 8 * pairs) as u64);
    let seen: usize = (0..1293).map(|q| (q + 1).min(1100)).sum();
    assert_eq!(odd.tiling.seen_pairs, (8 * 8 * seen) as u64);
}

/// Those of a call whose tensors have nothing between their rows.
#[test]
fn a_description_is_of_kernels_that_take_rows_as_long_as_they_are() {
    let name = "a_description_is_of_kernels_that_take_rows_as_long_as_they_are";
    if !inside(name, &[], &["-DLOADS"], &[]) {
        return;
    }
    let of_rows = |dim, dim_v| {
        let dims = Dims { dim, dim_v, ..dims(8, [1024; 2]) };
        let engine = Engine::get(0).unwrap();
        let options = CudaOptions::default();
        let plan = CudaPlan::new(engine, &PLAIN, &dims, DType::BF16, options).unwrap();
        let kernels = plan.describe(Arrangement::Dense, None).unwrap().kernels;
        let configurations = plan.configurations().unwrap().into_iter();
        assert!(
            configurations.zip(&kernels).all(|(c, line)| line.starts_with(&format!("{c}, for")))
        );
        let hopper = |kernel| {
            let of = kernels.iter().find(|line| line.starts_with(kernel)).unwrap();
            (of.contains("hopper"), of.contains(", v by copies, "))
        };
        (hopper("forward"), hopper("backward"))
    };
    assert_eq!(of_rows(128, 128), ((true, false), (true, false)));
    assert_eq!(of_rows(128, 122), ((true, true), (false, false)));
    assert_eq!(of_rows(127, 127), ((false, false), (false, false)));
}

#[test]
fn a_description_says_how_many_heads_share_a_tile() {
    if !inside("a_description_says_how_many_heads_share_a_tile", &[], &[], &[]) {
        return;
    }
    for mask in [None, Some(masks::causal())] {
        let spec = Spec { mask, ..PLAIN };
        let found = describe(&spec, 5, [1, 700], Arrangement::Dense);
        assert_eq!((found.tiling.tile_heads, found.tiling.tile_q), (4, 4));
        // Two of four heads each for every tile of keys and batch entry.
        assert_eq!(found.tiling.tiles, 2 * 5 * 700usize.div_ceil(found.tiling.tile_kv));
        assert!(found.tiling.full_tiles + found.tiling.partial_tiles <= found.tiling.tiles);
        let long = describe(&spec, 5, [700, 700], Arrangement::Dense);
        assert_eq!(long.tiling.tile_heads, 1);
    }
}

#[test]
fn more_queries_than_kernels_count_are_an_error_before_anything_is_made() {
    let name = "more_queries_than_kernels_count_are_an_error_before_anything_is_made";
    if !inside(name, &[], &[], &[]) {
        return;
    }
    let of = |batch, len, packed| {
        let dims = Dims { packed, ..dims(batch, [len; 2]) };
        let engine = Engine::get(0).unwrap();
        CudaPlan::new(engine, &PLAIN, &dims, DType::BF16, CudaOptions::default())
    };
    let said = of(70_000, 32_767, false).unwrap_err().to_string();
    assert_eq!(
        said,
        "batch and sequences have 2293760000 queries of a head together; kernels count to \
         2147483647: cut the batch"
    );
    assert!(of(3, i32::MAX as usize, true).is_err());
    assert!(of(60_000, 32_767, false).is_ok() && of(3, i32::MAX as usize - 100, true).is_ok());
}

#[test]
fn a_score_takes_another_number_for_each_row_of_the_backward() {
    if !inside("a_score_takes_another_number_for_each_row_of_the_backward", &[], &[], &[]) {
        return;
    }
    let score = Some(scores::soft_cap(30.0).unwrap());
    let bytes = |spec: &Spec| describe(spec, 2, [333, 100], Arrangement::Dense).backward_bytes;
    let of_rows = 4 * 2 * 8 * 333;
    assert_eq!(bytes(&Spec { score, ..PLAIN }), bytes(&PLAIN) + of_rows);
}

#[test]
fn a_gpu_older_than_ampere_is_an_error_before_anything_is_compiled() {
    let name = "a_gpu_older_than_ampere_is_an_error_before_anything_is_compiled";
    if !inside(name, &[], &[], &[("CAPABILITY", "75")]) {
        return;
    }
    let engine = Engine::get(0).unwrap();
    let options = CudaOptions::default();
    let said = CudaPlan::new(engine, &PLAIN, &dims(1, [64, 64]), DType::BF16, options).unwrap_err();
    assert_eq!(
        said.to_string(),
        "Test GPU has compute capability 7.5; kernels run on 8.0 (Ampere) and newer"
    );
}
