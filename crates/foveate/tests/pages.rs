//! Keys and values in pages, as a cache keeps them.

use foveate::mods::expr;
use foveate::{Attention, DType, Device, Error, MaskMod, Plan, Problem, Tensor};

const PAGE: usize = 3;
/// Pages of two batch entries with up to 3 entries each; the last page is nobody's.
const TABLE: [i32; 6] = [4, 0, 2, 3, 1, -1];
const LENGTHS: [i32; 2] = [8, 4];

fn number([b, h, s, d]: [usize; 4]) -> f64 {
    ((b * 31 + h * 17 + s * 7 + d * 3) % 13) as f64 / 13.0 - 0.4
}

fn tensor(shape: [usize; 4]) -> Tensor {
    Tensor::from_fn(DType::F32, shape, number)
}

/// Six pages of keys or of values, whose last rows may be nobody's.
fn pages(dim: usize) -> Tensor {
    tensor([6, 2, PAGE, dim])
}

/// The first keys of batch entry `b`, gathered.
fn gathered(dim: usize, b: usize, len: usize) -> Tensor {
    let page = |s: usize| TABLE[b * 3 + s / PAGE] as usize;
    Tensor::from_fn(DType::F32, [1, 2, len, dim], |[_, h, s, d]| number([page(s), h, s % PAGE, d]))
}

fn causal() -> MaskMod {
    let last = expr::kv_len() - expr::q_len();
    MaskMod::new((expr::q() + last).ge(expr::kv()).dynamic()).expect("a mask")
}

fn paged(table: &[i32], lengths: &[i32]) -> Result<Plan, Error> {
    let problem = Problem::paged(&tensor([2, 4, 2, 8]), &pages(8), &pages(5), table, lengths)?;
    Attention::new().mask(causal()).plan(&problem, &Device::cpu())
}

#[test]
fn a_cache_in_pages_gives_what_the_gathered_one_gives() {
    let q = tensor([2, 4, 2, 8]);
    let plan = paged(&TABLE, &LENGTHS).unwrap();
    let shorter = plan.with_pages(&TABLE, &[5, 1]).unwrap();
    for (plan, lengths) in [(plan, [8, 4]), (shorter, [5, 1])] {
        let found = plan.forward(&q, &pages(8), &pages(5)).unwrap();
        for (b, len) in lengths.into_iter().enumerate() {
            let q = Tensor::from_fn(DType::F32, [1, 4, 2, 8], |[_, h, s, d]| number([b, h, s, d]));
            let (k, v) = (gathered(8, b, len), gathered(5, b, len));
            let problem = Problem::of(&q, &k, &v).unwrap();
            let alone = Attention::new().mask(causal()).plan(&problem, &Device::cpu()).unwrap();
            let alone = alone.forward(&q, &k, &v).unwrap();
            let part = |all: Vec<f64>| all[b * all.len() / 2..][..all.len() / 2].to_vec();
            assert_eq!(part(found.out.to_f64()), alone.out.to_f64());
            assert_eq!(part(found.lse.to_f64()), alone.lse.to_f64());
        }
    }
}

#[test]
fn a_table_that_does_not_fit_is_one_clear_error() {
    let said = |table: &[i32], lengths: &[i32]| paged(table, lengths).unwrap_err().to_string();
    assert_eq!(said(&TABLE, &[8, -4]), "batch entry 1 has -4 keys in pages; it needs 0 or more");
    assert_eq!(
        said(&TABLE, &[10, 4]),
        "the 10 keys of batch entry 0 need more than the 3 pages of 3 in its page table"
    );
    assert_eq!(
        said(&[4, 0, 2, 3, 6, 0], &LENGTHS),
        "entry 1 of the page table of batch entry 1 is 6; k and v have 6 pages"
    );
    let plan = paged(&TABLE, &LENGTHS).unwrap().with_pages(&TABLE, &[8, 7]).unwrap();
    let given = plan.forward(&tensor([2, 4, 2, 8]), &pages(8), &pages(5));
    assert!(given.unwrap_err().to_string().contains("batch entry 1 is -1"));
}

#[test]
fn pages_have_no_backward() {
    let q = tensor([2, 4, 2, 8]);
    let plan = paged(&TABLE, &LENGTHS).unwrap();
    assert!(plan.problem().is_forward_only());
    let forward = plan.forward(&q, &pages(8), &pages(5)).unwrap();
    let d_out = tensor([2, 4, 2, 5]);
    let refused = plan.backward(&q, &pages(8), &pages(5), &forward, &d_out).unwrap_err();
    assert!(refused.to_string().starts_with("keys and values in pages have no gradients"));
}

#[test]
fn pages_and_offsets_exclude_each_other_before_anything_is_planned() {
    let q = tensor([1, 4, 2, 8]);
    let problem = Problem::paged(&q, &pages(8), &pages(5), &[4, 0, 2], &[8]).unwrap();
    let said = problem.varlen(&[0, 2], &[0, 8]).unwrap_err().to_string();
    assert!(said.contains("keys in pages go with queries that are not packed; give"), "{said}");
    let (k, v) = (tensor([1, 2, 8, 8]), tensor([1, 2, 8, 5]));
    let problem = Problem::of(&q, &k, &v).unwrap().varlen(&[0, 2], &[0, 8]).unwrap();
    let plan = Attention::new().plan(&problem, &Device::cpu()).unwrap();
    let said = plan.with_pages(&[0, 1, 2], &[8]).unwrap_err().to_string();
    assert!(said.contains("keys in pages go with queries that are not packed; give"), "{said}");
}

#[test]
fn an_explanation_counts_each_entry_at_its_own_length() {
    let problem =
        Problem::paged(&tensor([2, 4, 2, 8]), &pages(8), &pages(5), &TABLE, &LENGTHS).unwrap();
    let plan = Attention::new().plan(&problem, &Device::cpu()).unwrap();
    let found = plan.explain();
    assert_eq!(found.execution.tiling.live_pairs, 4 * 2 * (8 + 4));
    assert_eq!(found.page_size, Some(PAGE));
    assert!(found.to_string().contains(", keys in pages of 3\n"), "{found}");
    // The same once lengths have changed, without planning again.
    let shorter = plan.with_pages(&TABLE, &[5, 0]).unwrap().explain();
    assert_eq!((shorter.execution.tiling.live_pairs, shorter.len_k), (4 * 2 * 5, 5));
}

#[test]
fn a_paged_problem_can_be_posed_without_operands() {
    let shape = |len, dim| [2, 4, len, dim];
    let posed = |k, page| Problem::shaped_in_pages(DType::F32, shape(3, 8), k, shape(10, 5), page);
    let problem = posed(shape(10, 8), 4).unwrap();
    let plan = Attention::new().plan(&problem, &Device::cpu()).unwrap();
    assert_eq!(plan.explain().execution.tiling.live_pairs, 2 * 4 * 3 * 10);
    let pages = problem.get_pages().unwrap();
    assert_eq!((pages.table(), pages.lengths()), (&[0, 1, 2, 3, 4, 5][..], &[10, 10][..]));
    let said = posed(shape(10, 8), 0).unwrap_err().to_string();
    assert!(said.contains("a page holds one key or more"), "{said}");
    let long = [2, 4, 1 << 30, 8];
    let posed_long = Problem::shaped_in_pages(DType::F32, shape(3, 8), long, long, 1);
    let said = posed_long.unwrap_err().to_string();
    assert!(said.contains("is 1: 2 entries of 1073741824 keys take 2147483648 pages"), "{said}");
    let said = posed(shape(9, 8), 4).unwrap_err().to_string();
    assert!(said.contains("they must be equal"), "{said}");
}
