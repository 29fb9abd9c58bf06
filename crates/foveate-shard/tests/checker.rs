//! The checker: right plans are proven, and every planted fault is refused with the right operand.
//!
//! The faults that are left in PyTorch/XLA's sharded flash attention, R1 to R14 of our notes on it, and
//! what holds them off here:
//!
//! | | fault there | here |
//! | --- | --- | --- |
//! | R1 | keys are cut and nothing follows | `r01_keys_that_are_cut_are_brought_to_whoever_reads_them` |
//! | R2 | padding joins the softmax | `r02_no_key_behind_the_last_joins_the_softmax` |
//! | R3 | ids are not padded with k | `r03_ids_travel_with_their_keys` |
//! | R4 | the backward does not pad | `r04_a_backward_pass_has_the_lengths_of_the_forward_pass` |
//! | R5 | k and v have gradients only with q | `r05_keys_and_values_have_gradients_beside_those_of_queries` |
//! | R6 | queries and keys are of one length | `r06_keys_have_a_length_of_their_own` |
//! | R7 | a bias has q's spec | `r07_a_bias_has_its_own_layout` |
//! | R8 | lengths are local × ranks | `r08_lengths_are_stored` |
//! | R9 | forward and backward on two meshes | `r09_an_operation_has_one_mesh` |
//! | R10 | the scale defaults to 1 | `attention.rs`: `r10_the_scale_is_that_of_the_head_dim_unless_a_program_says_another` |
//! | R11 | ids are floats | `r11_ids_are_integers` |
//! | R12 | block sizes are global state | `r12_plans_that_are_made_at_once_do_not_know_of_each_other` |
//! | R13 | specs are strings that are evaluated | `r13_a_spec_is_read_and_not_run` |
//! | R14 | the mask has the local length | `r14_the_mask_has_the_length_of_the_row` |
//!
//! `attention.rs` computes the cases of R2, R4 and R6 beside the oracle: 513 keys, lengths that divide nothing.
//!
//! What rules the class of faults out, the seventeen invariants of the same notes, and what holds each:
//!
//! | | invariant | held by |
//! | --- | --- | --- |
//! | 1 | one source of layouts | `layouts.rs`: `every_element_is_where_the_map_sends_it`; (a) compares every array on every rank |
//! | 2 | names, not positions | `the layout of ids is cut from q's by position` |
//! | 3 | declared is actual | `layouts.rs`: `an_array_with_another_layout_is_refused_by_operand_and_axis` |
//! | 4 | cut keys have a plan | R1; a [`Strategy`] without transfers cannot be made |
//! | 5 | heads beside their keys | `copies_of_key_value_heads_are_summed_over_every_query_head_once` |
//! | 6 | `dim` is whole, a mesh axis cuts once | `layouts.rs`: `what_cannot_be_is_refused_in_one_line` |
//! | 7 | global coordinates | `queries have local coordinates`, `the map of heads is forgotten` and their like; R14 |
//! | 8 | keys, values and positions move as one | R3, `values do not travel with their keys` |
//! | 9 | ids are integers, padding is a bound | R11, R2 |
//! | 10 | rows without a key are 0 | `attention.rs`: `rows that see nothing`, `a neighbourhood` |
//! | 11 | no mask is weakened | `attention.rs`: `ranks_that_differ_or_operands_that_do_not_fit_are_refused_on_all` |
//! | 12 | a permutation is a tagged bijection | `layouts.rs`: `a_permutation_is_undone_by_its_inverse`; `the permutation lies` |
//! | 13 | lengths are stored | R8 |
//! | 14 | the backward pass has the forward's plan | R4, R9; one `RankAttention` computes both |
//! | 15 | layouts are values | [`ShardLayout`] has no method that changes one; R12 |
//! | 16 | ranks agree | `attention.rs`, as 11; `collectives.rs`: `ranks_that_do_different_things_are_told_who_does_what` |
//! | 17 | partial results join in f32 | `attention.rs`: `a large lse`, and every case in 16 bits |

use std::sync::Arc;

use foveate::mask::Tile;
use foveate::tensor::{ElementType, random::Random};
use foveate::{MaskMod, masks};
use foveate_shard::interchange::{ArrayOf, from_partition_spec};
use foveate_shard::{
    Axis, Cut, LayerMask, Limits, Map, Mesh, MeshAxis, ModelShape, Permutation, PlanOptions,
    Planes, Ranges, ShardLayout, ShardPlan, Sharding, Strategy, Whole, arrays,
};

const TILE: Tile = Tile { q: 4, kv: 4 };
const LEN: usize = 60;

fn shape() -> ModelShape {
    ModelShape { dim: 8, dim_v: 4, hidden: 64, ffn: 96, vocab: 50, element: ElementType::BF16 }
}

fn documents() -> MaskMod {
    masks::causal() & masks::document_lengths(&[9, 1, 30, 20]).unwrap()
}

fn planned(mesh: [usize; 4], strategy: Strategy, mask: MaskMod) -> (ShardPlan, Planes) {
    let whole = Whole { batch: 4, heads: 8, kv_heads: 4, q_len: LEN, kv_len: LEN };
    let planes = Planes::new(whole, &[LayerMask { mask: Some(mask), layers: 2 }], TILE).unwrap();
    let map = Map::new(Mesh::new(mesh).unwrap());
    let options =
        PlanOptions { strategy: Some(strategy), chunk: Some(4), ..PlanOptions::default() };
    (ShardPlan::new(&map, &planes, &shape(), options).unwrap(), planes)
}

/// Two stages of an exchange on 12 ranks.
fn exchanged() -> (ShardPlan, Planes) {
    planned([1, 2, 3, 2], Strategy::Exchange(2), documents())
}

#[test]
fn right_plans_are_proven_on_every_mesh_and_strategy() {
    for mesh in [[1, 1, 1, 1], [2, 1, 1, 2], [1, 2, 3, 2], [2, 2, 2, 2], [1, 1, 4, 1]] {
        for strategy in [
            Strategy::Gather,
            Strategy::Exchange(0),
            Strategy::Exchange(1),
            Strategy::Exchange(4),
            Strategy::HeadsForTokens,
        ] {
            if strategy == Strategy::HeadsForTokens && mesh[2] * mesh[3] > 4 {
                continue;
            }
            for mask in
                [documents(), masks::causal(), masks::full(), masks::sliding_window(7).unwrap()]
            {
                let (plan, planes) = planned(mesh, strategy, mask);
                assert!(plan.permutations.iter().all(|order| order.inverse().inverse() == *order));
                let proven = plan.prove(&planes, &Limits::default());
                let proof =
                    proven.unwrap_or_else(|e| panic!("{mesh:?}, {strategy}: {e}")).proof().clone();
                let live: u64 = planes.work().iter().sum();
                assert_eq!(proof.live_entries, live, "{mesh:?}, {strategy}");
                assert_eq!(proof.labels, 240);
                let tiles: u64 = planes
                    .block_masks()
                    .iter()
                    .map(|b| 32 * (b.tiles.stats().full + b.tiles.stats().partial))
                    .sum();
                assert_eq!(proof.live_tiles, tiles);
            }
        }
    }
}

/// Lists as long as the mesh are there once for all ranks, or plans of thousands would take the square of
/// their number, and be as slow to prove.
#[test]
fn thousands_of_ranks_share_what_they_have_in_common() {
    let whole = Whole { batch: 512, heads: 8, kv_heads: 8, q_len: 256, kv_len: 256 };
    let mask = masks::causal();
    let planes = Planes::new(whole, &[LayerMask { mask: Some(mask), layers: 2 }], TILE).unwrap();
    let map = Map::new(Mesh::new([1, 512, 1, 8]).unwrap());
    let plan = ShardPlan::new(&map, &planes, &shape(), PlanOptions::default()).unwrap();
    assert_eq!(Arc::strong_count(&plan.ranks[0].arrays), 4096);
    let hash = plan.hash();
    let proven = plan.prove(&planes, &Limits::default()).unwrap();
    assert_eq!((proven.proof().ranks, proven.proof().labels), (4096, 512 * 256));
    let mut other = proven.plan().clone();
    assert_eq!(other.hash(), hash);
    // What one of them has changed is seen.
    other.ranks[4095].kv_copies.pop();
    assert_ne!(other.hash(), hash);
    let fault = other.prove(&planes, &Limits::default()).unwrap_err();
    assert_eq!((fault.operand.as_str(), fault.point), ("dk", 'd'));
}

/// What a later stage computes are the queries that see a key of it, and no others: of two stages, parts of
/// twice all queries.
#[test]
fn queries_that_see_nothing_of_a_stage_are_left_out_of_it() {
    let len = 1 << 16;
    let whole = Whole { batch: 1, heads: 8, kv_heads: 4, q_len: len, kv_len: len };
    let mut random = Random::new(3);
    let mut lengths = vec![];
    while lengths.iter().sum::<i32>() < len as i32 {
        lengths.push(2048 + random.below(4096) as i32);
    }
    let packed = masks::causal() & masks::document_lengths(&lengths).unwrap();
    let tile = Tile { q: 128, kv: 128 };
    for (name, mask, most) in [
        ("packed documents", packed, [0.15, 0.85, 1.0]),
        ("a window", masks::sliding_window(1024).unwrap(), [0.05, 0.1, 0.2]),
        ("causal", masks::causal(), [1.45, 1.5, 1.5]),
    ] {
        let planes =
            Planes::new(whole, &[LayerMask { mask: Some(mask), layers: 1 }], tile).unwrap();
        for (ranks, most) in [2, 4, 8].into_iter().zip(most) {
            let map = Map::new(Mesh::new([1, 1, ranks, 1]).unwrap());
            let options =
                PlanOptions { strategy: Some(Strategy::Exchange(2)), ..PlanOptions::default() };
            let plan = ShardPlan::new(&map, &planes, &shape(), options).unwrap();
            let proven = plan.prove(&planes, &Limits::default()).unwrap();
            let plan = proven.plan();
            let rows = |from: usize| {
                let stages = plan.ranks.iter().flat_map(|rank| &rank.stages[from..]);
                stages.map(|stage| stage.compute.q.len()).sum::<usize>() as f64 / len as f64
            };
            println!("{name} over {ranks}: {:.3} of all queries in later stages", rows(1));
            assert_eq!(rows(0) - rows(1), 1.0, "the first stage has all");
            assert!(rows(1) <= most, "{name} over {ranks}: {}", rows(1));
        }
    }
}

/// A fault: its name, the plan that it is planted in, how, and what the checker has to name.
struct Fault {
    name: &'static str,
    strategy: Strategy,
    plant: fn(&mut ShardPlan),
    point: char,
    operand: &'static str,
}

fn map() -> Map {
    Map::new(Mesh::new([1, 2, 3, 2]).unwrap())
}

/// Replaces the layout of an array on a rank.
fn relayout(plan: &mut ShardPlan, rank: usize, name: &str, layout: ShardLayout) {
    let slot =
        Arc::make_mut(&mut plan.ranks[rank].arrays).iter_mut().find(|(n, _)| *n == name).unwrap();
    assert_ne!(slot.1, layout, "{name} changes");
    slot.1 = layout;
}

/// The layout of an array under another map, with the plan's lengths.
fn mapped(plan: &ShardPlan, name: &str, map: Map) -> ShardLayout {
    let lengths = foveate_shard::Lengths {
        batch: 4,
        seq: LEN,
        kv_seq: LEN,
        heads: 8,
        kv_heads: 4,
        dim: 8,
        dim_v: 4,
        hidden: 64,
        ffn: 96,
        vocab: 50,
    };
    let sharding = Sharding::new(map, &lengths).unwrap().in_order(Some(plan.permutation(0).id()));
    arrays::by_name(name).unwrap().layout(&sharding).unwrap()
}

fn shift(ranges: &Ranges) -> Ranges {
    Ranges::of(ranges.as_slice().iter().map(|r| r.start + 1..r.end + 1))
}

fn less_last(ranges: &Ranges) -> Ranges {
    let last = ranges.as_slice().last().unwrap().end - 1;
    ranges.difference(&Ranges::one(last..last + 1))
}

/// Rows of a call as local code counts them.
fn local(ranges: &Ranges) -> Ranges {
    Ranges::one(0..ranges.len())
}

/// Edits each send and the receive that meets it alike.
fn both(plan: &mut ShardPlan, stage: usize, edit: impl Fn(&mut foveate_shard::Part)) {
    for rank in &mut plan.ranks {
        let stage = &mut rank.stages[stage];
        stage.sends.iter_mut().chain(&mut stage.receives).for_each(&edit);
    }
}

/// Takes an array out of parts, with its bytes.
fn without(part: &mut foveate_shard::Part, name: &str) {
    let (kv, q) = (part.cells.kv.len() as u64, part.cells.q.len() as u64);
    let pairs = |heads: usize| (part.cells.batch.len() * heads) as u64;
    let (kv_heads, heads) = (pairs(part.cells.kv_heads.len()), pairs(part.cells.heads.len()));
    part.bytes -= match name {
        "kv_positions" => kv * 4,
        "q_positions" => q * 4,
        "k" => kv * kv_heads * 16,
        "v" => kv * kv_heads * 8,
        "dv" => kv * kv_heads * 16,
        "dk" => kv * kv_heads * 32,
        "dq" => q * heads * 32,
        _ => unreachable!(),
    };
    part.carries.retain(|n| *n != name);
}

/// Leaves the first query head of a part alone, with its bytes: queries, or gradients of queries in f32.
fn first_head(part: &mut foveate_shard::Part) {
    let stored = if part.carries.contains(&"dq") { 4 } else { 2 };
    let heads = part.cells.heads.clone();
    let lost = part.cells.batch.len() * (heads.len() - 1) * part.cells.q.len() * 8 * stored;
    part.bytes -= lost as u64;
    part.cells.heads = heads.start..heads.start + 1;
}

/// A rank and a stage that receive something, and the rank that sends it.
fn receiver(plan: &ShardPlan) -> (usize, usize, usize) {
    let ranks = 0..plan.ranks.len();
    let found = ranks.flat_map(|r| (0..plan.ranks[r].stages.len()).map(move |s| (r, s)));
    let mut found =
        found.filter_map(|(r, s)| Some((r, s, plan.ranks[r].stages[s].receives.first()?.peer)));
    found.next().expect("a rank receives")
}

const TWO: Strategy = Strategy::Exchange(2);
const SWAP: Strategy = Strategy::HeadsForTokens;

#[rustfmt::skip]
const FAULTS: &[Fault] = &[
    Fault { name: "R1: keys are cut and nothing follows", strategy: TWO, point: 'b', operand: "k", plant: |p| for r in &mut p.ranks {
        r.stages.truncate(1); r.returns.clear(); r.returned.clear();
    } },
    Fault { name: "R1: every key is read and none is sent", strategy: Strategy::Gather, point: 'c', operand: "k", plant: |p| for r in &mut p.ranks {
        r.stages[0].sends.clear(); r.stages[0].receives.clear();
    } },
    Fault { name: "R2: keys behind the last are computed", strategy: TWO, point: 'c', operand: "k", plant: |p| {
        let last = p.ranks.iter().position(|r| r.own.kv.as_slice().last().is_some_and(|run| run.end == LEN)).unwrap();
        let s = &mut p.ranks[last].stages[0]; s.compute.kv = s.compute.kv.union(&Ranges::one(LEN..LEN + 4)); s.coordinates.kv = s.compute.kv.clone();
    } },
    Fault { name: "R2: a rank holds keys behind the last", strategy: TWO, point: 'a', operand: "kv_positions", plant: |p| p.ranks[4].own.kv = p.ranks[4].own.kv.union(&Ranges::one(LEN..LEN + 4)) },
    Fault { name: "R3: ids do not travel with their keys", strategy: TWO, point: 'c', operand: "kv_positions", plant: |p| for s in 1..3 {
        both(p, s, |part| without(part, "kv_positions"));
    } },
    Fault { name: "R4: gradients of the last key of a part do not return", strategy: TWO, point: 'c', operand: "dk", plant: |p| {
        let r = receiver(p).0; let peer = p.ranks[r].returns[0].peer;
        let cut = |part: &mut foveate_shard::Part| {
            let keys = part.cells.kv.len() as u64; part.bytes -= part.bytes / keys; part.cells.kv = less_last(&part.cells.kv);
        };
        cut(&mut p.ranks[r].returns[0]); cut(p.ranks[peer].returned.iter_mut().find(|x| x.peer == r).unwrap());
    } },
    Fault { name: "R5: gradients of keys do not return beside those of queries", strategy: SWAP, point: 'c', operand: "dk", plant: |p| for r in &mut p.ranks {
        r.returns.iter_mut().chain(&mut r.returned).for_each(|part| without(part, "dk"));
    } },
    Fault { name: "R5: gradients of values do not return beside those of queries", strategy: SWAP, point: 'c', operand: "dv", plant: |p| for r in &mut p.ranks {
        r.returns.iter_mut().chain(&mut r.returned).for_each(|part| without(part, "dv"));
    } },
    Fault { name: "R7: a bias is cut as queries are", strategy: TWO, point: 'a', operand: "capture", plant: |p| {
        let layout = mapped(p, "q", map()); relayout(p, 0, "capture", layout);
    } },
    Fault { name: "R8: lengths are local times ranks", strategy: TWO, point: 'a', operand: "seq", plant: |p| {
        let most = *p.sharding.cut(Axis::Seq).lengths().iter().max().unwrap();
        p.sharding = p.sharding.clone().with_cut(Axis::Seq, Cut::of_lengths(&[most + 1; 3]).unwrap()).unwrap();
    } },
    Fault { name: "R9: two meshes in one operation", strategy: TWO, point: 'a', operand: "dq", plant: |p| {
        let other = Map::new(Mesh::new([1, 3, 2, 2]).unwrap()); let layout = mapped(p, "dq", other); relayout(p, 4, "dq", layout);
    } },
    Fault { name: "R11: ids are floats", strategy: TWO, point: 'a', operand: "documents", plant: |p| {
        let layout = p.sharding.layout(ElementType::BF16, &[Axis::Batch, Axis::Seq]).unwrap(); relayout(p, 3, "documents", layout);
    } },
    Fault { name: "R14: the mask has the local length", strategy: TWO, point: 'a', operand: "q_len", plant: |p| {
        let n = p.ranks[2].own.q.len(); p.ranks[2].stages[0].lengths[0] = n;
    } },
    Fault { name: "the layout of ids is dropped", strategy: TWO, point: 'a', operand: "documents", plant: |p| {
        let whole = map().with(Axis::Seq, &[]).unwrap().with(Axis::Batch, &[]).unwrap();
        let layout = mapped(p, "documents", whole); relayout(p, 1, "documents", layout);
    } },
    Fault { name: "the layout of ids is cut from q's by position", strategy: TWO, point: 'a', operand: "documents", plant: |p| {
        let array = ArrayOf { element: ElementType::I32, axes: &[Axis::Batch, Axis::Seq], shape: &[4, LEN] };
        let layout = from_partition_spec("P('shard', 'tensor')", array, map().mesh()).unwrap(); relayout(p, 1, "documents", layout);
    } },
    Fault { name: "heads and tokens of q are swapped", strategy: TWO, point: 'a', operand: "q", plant: |p| {
        let swapped = map().with(Axis::Seq, &[MeshAxis::Tensor]).unwrap().with(Axis::Heads, &[MeshAxis::Context]).unwrap();
        let layout = mapped(p, "q", swapped); relayout(p, 5, "q", layout);
    } },
    Fault { name: "axes of lse are swapped", strategy: TWO, point: 'a', operand: "lse", plant: |p| {
        let layout = p.sharding.layout(ElementType::F32, &[Axis::Heads, Axis::Batch, Axis::Seq]).unwrap(); relayout(p, 5, "lse", layout);
    } },
    Fault { name: "labels are whole on every rank of context", strategy: TWO, point: 'a', operand: "labels", plant: |p| {
        let layout = mapped(p, "labels", map().with(Axis::Seq, &[]).unwrap()); relayout(p, 0, "labels", layout);
    } },
    Fault { name: "gradients of keys are of all heads", strategy: TWO, point: 'a', operand: "dk", plant: |p| {
        let layout = mapped(p, "dk", map().with(Axis::Heads, &[]).unwrap()); relayout(p, 7, "dk", layout);
    } },
    Fault { name: "masters are cut over shard alone", strategy: TWO, point: 'a', operand: "masters", plant: |p| {
        let other = map().with(Axis::Elements, &[MeshAxis::Shard]).unwrap();
        let layout = mapped(p, "masters", other); relayout(p, 7, "masters", layout);
    } },
    Fault { name: "the sink is of all heads", strategy: TWO, point: 'a', operand: "sink", plant: |p| {
        let layout = mapped(p, "sink", map().with(Axis::Heads, &[]).unwrap()); relayout(p, 1, "sink", layout);
    } },
    Fault { name: "the residual stream is in the row's own order", strategy: TWO, point: 'a', operand: "residual", plant: |p| {
        let layout = p.sharding.clone().in_order(None).layout(ElementType::BF16, &[Axis::Batch, Axis::Seq, Axis::Hidden]).unwrap();
        relayout(p, 2, "residual", layout);
    } },
    Fault { name: "rotary rows are in the order of another permutation", strategy: TWO, point: 'a', operand: "rotary", plant: |p| {
        let other = Permutation::new(vec![30..LEN, 0..30], LEN).unwrap().id();
        let layout = p.sharding.clone().in_order(Some(other)).layout(ElementType::F32, &[Axis::Seq, Axis::Dim]).unwrap();
        relayout(p, 2, "rotary", layout);
    } },
    Fault { name: "an array has no layout", strategy: TWO, point: 'a', operand: "moment_2", plant: |p| Arc::make_mut(&mut p.ranks[3].arrays).retain(|(n, _)| *n != "moment_2") },
    Fault { name: "a rank holds queries shifted by one", strategy: TWO, point: 'a', operand: "q_positions", plant: |p| p.ranks[0].own.q = shift(&p.ranks[0].own.q) },
    Fault { name: "a rank holds the keys of another", strategy: TWO, point: 'a', operand: "kv_positions", plant: |p| p.ranks[0].own.kv = p.ranks[2].own.kv.clone() },
    Fault { name: "a rank holds the batch entries of another", strategy: TWO, point: 'a', operand: "b", plant: |p| p.ranks[11].own.batch = 0..2 },
    Fault { name: "a rank holds the heads of another", strategy: TWO, point: 'a', operand: "h", plant: |p| p.ranks[1].own.heads = 0..4 },
    Fault { name: "queries have local coordinates", strategy: TWO, point: 'a', operand: "q_positions", plant: |p| {
        let s = &mut p.ranks[2].stages[1]; s.coordinates.q = local(&s.compute.q);
    } },
    Fault { name: "keys have local coordinates", strategy: TWO, point: 'a', operand: "kv_positions", plant: |p| {
        let s = &mut p.ranks[2].stages[0]; s.coordinates.kv = local(&s.compute.kv);
    } },
    Fault { name: "the map of heads is forgotten", strategy: TWO, point: 'a', operand: "h", plant: |p| p.ranks[1].stages[0].coordinates.heads = 0..4 },
    Fault { name: "the map of key/value heads is forgotten", strategy: TWO, point: 'a', operand: "h_kv", plant: |p| p.ranks[1].stages[1].coordinates.kv_heads = 0..2 },
    Fault { name: "the map of batch entries is forgotten", strategy: TWO, point: 'a', operand: "b", plant: |p| p.ranks[6].stages[1].coordinates.batch = 0..2 },
    Fault { name: "keys have the local length", strategy: TWO, point: 'a', operand: "kv_len", plant: |p| p.ranks[0].stages[2].lengths[1] = 13 },
    Fault { name: "the permutation lies", strategy: TWO, point: 'a', operand: "permutation", plant: |p| p.permutations[1] = Permutation::new(vec![30..LEN, 0..30], LEN).unwrap() },
    Fault { name: "a part of the batch has no permutation", strategy: TWO, point: 'a', operand: "permutation", plant: |p| { p.permutations.pop(); } },
    Fault { name: "permutation and layouts lie alike", strategy: TWO, point: 'a', operand: "q", plant: |p| {
        p.permutations.fill(Permutation::new(vec![30..LEN, 0..30], LEN).unwrap());
        p.sharding = p.sharding.clone().in_order(Some(p.permutations[0].id()));
    } },
    Fault { name: "a rank is missing", strategy: TWO, point: 'a', operand: "mesh", plant: |p| { p.ranks.pop(); } },
    Fault { name: "the plan is of another length than the mask", strategy: TWO, point: 'a', operand: "mask", plant: |p| p.whole.kv_len += 1 },
    Fault { name: "a range of keys is shifted by one", strategy: TWO, point: 'c', operand: "k", plant: |p| {
        let s = &mut p.ranks[4].stages[0]; s.compute.kv = shift(&s.compute.kv); s.coordinates.kv = s.compute.kv.clone();
    } },
    Fault { name: "the last key of a rank is left out", strategy: TWO, point: 'b', operand: "k", plant: |p| {
        let s = &mut p.ranks[4].stages[0]; s.compute.kv = less_last(&s.compute.kv); s.coordinates.kv = s.compute.kv.clone();
    } },
    Fault { name: "the last query of a rank is left out", strategy: TWO, point: 'b', operand: "q", plant: |p| {
        let most = less_last(&p.ranks[4].own.q);
        for s in &mut p.ranks[4].stages { s.compute.q = s.compute.q.intersection(&most); s.coordinates.q = s.compute.q.clone(); }
    } },
    Fault { name: "a query of a later stage is left out", strategy: TWO, point: 'b', operand: "k", plant: |p| {
        let (r, s, _) = receiver(p); let s = &mut p.ranks[r].stages[s];
        s.compute.q = less_last(&s.compute.q); s.coordinates.q = s.compute.q.clone();
    } },
    Fault { name: "queries are computed that see none of a stage's keys", strategy: TWO, point: 'b', operand: "q", plant: |p| for r in &mut p.ranks {
        let all = r.own.q.clone();
        for s in &mut r.stages { s.compute.q = all.clone(); s.coordinates.q = all.clone(); }
    } },
    Fault { name: "queries of another rank are computed too", strategy: TWO, point: 'c', operand: "q", plant: |p| {
        let all = p.ranks[0].own.q.union(&p.ranks[2].own.q);
        for s in &mut p.ranks[0].stages { s.compute.q = all.clone(); s.coordinates.q = all.clone(); }
    } },
    Fault { name: "a stage is dropped on one rank", strategy: TWO, point: 'e', operand: "k", plant: |p| { p.ranks[3].stages.remove(1); } },
    Fault { name: "a stage is dropped on all ranks", strategy: TWO, point: 'c', operand: "dk", plant: |p| for r in &mut p.ranks { r.stages.remove(2); } },
    Fault { name: "a stage is computed twice", strategy: TWO, point: 'b', operand: "k", plant: |p| for r in &mut p.ranks {
        let mut again = r.stages[1].clone(); again.sends.clear(); again.receives.clear(); r.stages.push(again);
    } },
    Fault { name: "own keys are computed twice", strategy: TWO, point: 'b', operand: "k", plant: |p| {
        let own = p.ranks[5].own.kv.clone(); let s = &mut p.ranks[5].stages[1];
        s.compute.kv = s.compute.kv.union(&own); s.coordinates.kv = s.compute.kv.clone();
    } },
    Fault { name: "stages of one rank are swapped", strategy: TWO, point: 'e', operand: "k", plant: |p| { let (r, ..) = receiver(p); p.ranks[r].stages.swap(1, 2); } },
    Fault { name: "keys that nobody needs are sent", strategy: TWO, point: 'b', operand: "k", plant: |p| {
        let (r, s, peer) = receiver(p);
        let dead = Ranges::one(LEN - 1..LEN).difference(&p.ranks[r].own.kv);
        let owner = (0..12).find(|&o| p.ranks[o].own.kv.common(&dead) > 0 && p.ranks[r].stages[s].receives.iter().any(|x| x.peer == o)).unwrap_or(peer);
        let dead = p.ranks[owner].own.kv.difference(&p.ranks[r].stages.iter().fold(Ranges::default(), |a, x| a.union(&x.compute.kv)));
        let per_key = (2 * 2 * (8 + 4) * 2 + 4) as u64;
        let edit = |part: &mut foveate_shard::Part| { part.cells.kv = part.cells.kv.union(&dead); part.bytes = part.cells.kv.len() as u64 * per_key; };
        edit(p.ranks[r].stages[s].receives.iter_mut().find(|x| x.peer == owner).unwrap());
        edit(p.ranks[owner].stages[s].sends.iter_mut().find(|x| x.peer == r).unwrap());
    } },
    Fault { name: "values do not travel with their keys", strategy: TWO, point: 'c', operand: "v", plant: |p| for s in 1..3 { both(p, s, |part| without(part, "v")); } },
    Fault { name: "one rank sends keys without values", strategy: TWO, point: 'e', operand: "v", plant: |p| {
        let (r, s, peer) = receiver(p); let part = p.ranks[peer].stages[s].sends.iter_mut().find(|x| x.peer == r).unwrap(); without(part, "v");
    } },
    Fault { name: "a send is dropped", strategy: TWO, point: 'e', operand: "k", plant: |p| { let (r, s, peer) = receiver(p); p.ranks[peer].stages[s].sends.retain(|x| x.peer != r); } },
    Fault { name: "a receive is dropped", strategy: TWO, point: 'e', operand: "k", plant: |p| { let (r, s, _) = receiver(p); p.ranks[r].stages[s].receives.remove(0); } },
    Fault { name: "a transfer is dropped on both sides", strategy: TWO, point: 'c', operand: "k", plant: |p| {
        let (r, s, peer) = receiver(p); p.ranks[peer].stages[s].sends.retain(|x| x.peer != r); p.ranks[r].stages[s].receives.remove(0);
    } },
    Fault { name: "keys arrive a stage too late", strategy: TWO, point: 'c', operand: "k", plant: |p| for r in &mut p.ranks {
        let (sends, receives) = (std::mem::take(&mut r.stages[1].sends), std::mem::take(&mut r.stages[1].receives));
        let late = r.stages.len() - 1; let old = (std::mem::replace(&mut r.stages[late].sends, sends), std::mem::replace(&mut r.stages[late].receives, receives));
        (r.stages[1].sends, r.stages[1].receives) = old;
    } },
    Fault { name: "a rank sends keys that it does not hold", strategy: Strategy::Gather, point: 'c', operand: "k", plant: |p| {
        let part = &mut p.ranks[0].stages[0].sends[0]; let peer = part.peer;
        part.cells.kv = shift(&part.cells.kv); let cells = part.cells.clone();
        p.ranks[peer].stages[0].receives.iter_mut().find(|x| x.peer == 0).unwrap().cells = cells;
    } },
    Fault { name: "one side counts other bytes", strategy: TWO, point: 'e', operand: "k", plant: |p| { let (r, s, _) = receiver(p); p.ranks[r].stages[s].receives[0].bytes += 1; } },
    Fault { name: "a part goes to a rank of another batch", strategy: TWO, point: 'e', operand: "k", plant: |p| { let (r, s, _) = receiver(p); let part = &mut p.ranks[r].stages[s].receives[0]; part.peer = (part.peer + 6) % 12; } },
    Fault { name: "a rank sends to itself", strategy: TWO, point: 'e', operand: "k", plant: |p| { let (r, s, _) = receiver(p); p.ranks[r].stages[s].receives[0].peer = r; } },
    Fault { name: "a part is sent twice", strategy: TWO, point: 'e', operand: "k", plant: |p| { let (r, s, _) = receiver(p); let part = p.ranks[r].stages[s].receives[0].clone(); p.ranks[r].stages[s].receives.push(part); } },
    Fault { name: "a gradient returns twice", strategy: TWO, point: 'e', operand: "dk", plant: |p| { let r = receiver(p).0; let part = p.ranks[r].returns[0].clone(); p.ranks[r].returns.push(part); } },
    Fault { name: "a gradient returns to two ranks", strategy: Strategy::Gather, point: 'c', operand: "dk", plant: |p| {
        let [to, also] = [0, 1].map(|i| p.ranks[0].returns[i].peer);
        let cells = p.ranks[0].returns[0].cells.clone(); let bytes = p.ranks[0].returns[0].bytes;
        p.ranks[0].returns[1].cells = cells.clone(); p.ranks[0].returns[1].bytes = bytes;
        let back = p.ranks[also].returned.iter_mut().find(|x| x.peer == 0).unwrap(); back.cells = cells; back.bytes = bytes;
        assert_ne!(to, also);
    } },
    Fault { name: "a gradient never returns", strategy: TWO, point: 'c', operand: "dk", plant: |p| {
        let r = receiver(p).0; let peer = p.ranks[r].returns.remove(0).peer; p.ranks[peer].returned.retain(|x| x.peer != r);
    } },
    Fault { name: "the owner does not wait for a gradient", strategy: TWO, point: 'e', operand: "dk", plant: |p| { let r = receiver(p).0; let peer = p.ranks[r].returns[0].peer; p.ranks[peer].returned.retain(|x| x.peer != r); } },
    Fault { name: "gradients of values do not return", strategy: TWO, point: 'c', operand: "dv", plant: |p| for r in &mut p.ranks {
        r.returns.iter_mut().chain(&mut r.returned).for_each(|part| without(part, "dv"));
    } },
    Fault { name: "the sink joins in two stages", strategy: TWO, point: 'b', operand: "sink", plant: |p| p.ranks[0].stages[1].sink = true },
    Fault { name: "the sink joins in no stage", strategy: TWO, point: 'b', operand: "sink", plant: |p| p.ranks[0].stages[0].sink = false },
    Fault { name: "labels are counted on every rank of tensor", strategy: TWO, point: 'd', operand: "labels", plant: |p| p.ranks[1].labels.1 = p.ranks[1].own.q.clone() },
    Fault { name: "every rank of context counts the whole row", strategy: TWO, point: 'd', operand: "labels", plant: |p| p.ranks[0].labels.1 = Ranges::one(0..LEN) },
    Fault { name: "the last label of a rank is shifted out", strategy: TWO, point: 'd', operand: "labels", plant: |p| p.ranks[0].labels.1 = less_last(&p.ranks[0].labels.1) },
    Fault { name: "query heads are not those of their keys", strategy: SWAP, point: 'a', operand: "h_kv", plant: |p| for c in [true, false] {
        let s = &mut p.ranks[0].stages[0]; let cells = if c { &mut s.compute } else { &mut s.coordinates }; cells.heads = 1..3;
    } },
    Fault { name: "positions of queries do not travel with them", strategy: SWAP, point: 'c', operand: "q_positions", plant: |p| both(p, 0, |part| without(part, "q_positions")) },
    Fault { name: "gradients of queries do not return", strategy: SWAP, point: 'c', operand: "dq", plant: |p| for r in &mut p.ranks {
        r.returns.iter_mut().chain(&mut r.returned).for_each(|part| without(part, "dq"));
    } },
    Fault { name: "gradients of one query head of two return", strategy: SWAP, point: 'c', operand: "dq", plant: |p| {
        let peer = p.ranks[0].returns[0].peer; first_head(&mut p.ranks[0].returns[0]);
        first_head(p.ranks[peer].returned.iter_mut().find(|x| x.peer == 0).unwrap());
    } },
    Fault { name: "one query head of two arrives", strategy: SWAP, point: 'c', operand: "q", plant: |p| both(p, 0, first_head) },
    Fault { name: "a stage computes other heads than the one before", strategy: TWO, point: 'c', operand: "dq", plant: |p| {
        let s = &mut p.ranks[0].stages[2];
        for cells in [&mut s.compute, &mut s.coordinates] { (cells.heads, cells.kv_heads) = (0..2, 0..1); }
    } },
    Fault { name: "a rank computes the heads of another", strategy: SWAP, point: 'c', operand: "k", plant: |p| {
        let (heads, kv_heads) = { let c = &p.ranks[2].stages[0].compute; (c.heads.clone(), c.kv_heads.clone()) };
        let s = &mut p.ranks[0].stages[0];
        for cells in [&mut s.compute, &mut s.coordinates] { (cells.heads, cells.kv_heads) = (heads.clone(), kv_heads.clone()); }
    } },
];

#[test]
fn every_planted_fault_is_refused_with_the_right_operand() {
    assert!(FAULTS.len() >= 40, "{} faults", FAULTS.len());
    refused("");
}

/// Plants each fault whose name begins so, and has the checker name it.
fn refused(case: &str) {
    let mut wrong = Vec::new();
    let faults: Vec<&Fault> = FAULTS.iter().filter(|fault| fault.name.starts_with(case)).collect();
    assert!(!faults.is_empty(), "there is no fault {case}");
    for Fault { name, strategy, plant, point, operand } in &faults {
        let mesh = if *strategy == SWAP { [1, 2, 2, 2] } else { [1, 2, 3, 2] };
        let (mut plan, planes) = planned(mesh, *strategy, documents());
        plan.clone().prove(&planes, &Limits::default()).expect("it is right before");
        plant(&mut plan);
        match plan.prove(&planes, &Limits::default()) {
            Ok(_) => wrong.push(format!("{name}: proven")),
            Err(found) => {
                println!("{name}\n    {found}");
                if (found.point, found.operand.as_str()) != (*point, *operand) {
                    wrong.push(format!("{name}: wanted ({point}) {operand}, found {found}"));
                }
            }
        }
    }
    assert!(wrong.is_empty(), "{} of {}:\n{}", wrong.len(), faults.len(), wrong.join("\n"));
}

/// The faults of a case of PyTorch/XLA, as a test of its own.
macro_rules! cases {
    ($($test:ident: $case:literal)*) => { $(#[test] fn $test() { refused($case); })* };
}

cases! {
    r01_keys_that_are_cut_are_brought_to_whoever_reads_them: "R1:"
    r02_no_key_behind_the_last_joins_the_softmax: "R2:"
    r03_ids_travel_with_their_keys: "R3:"
    r04_a_backward_pass_has_the_lengths_of_the_forward_pass: "R4:"
    r05_keys_and_values_have_gradients_beside_those_of_queries: "R5:"
    r07_a_bias_has_its_own_layout: "R7:"
    r08_lengths_are_stored: "R8:"
    r09_an_operation_has_one_mesh: "R9:"
    r11_ids_are_integers: "R11:"
    r14_the_mask_has_the_length_of_the_row: "R14:"
}

#[test]
fn r06_keys_have_a_length_of_their_own() {
    let whole = Whole { batch: 4, heads: 8, kv_heads: 4, q_len: LEN, kv_len: 43 };
    let mask = Some(masks::causal_bottom_right());
    let planes = Planes::new(whole, &[LayerMask { mask, layers: 2 }], TILE).unwrap();
    for strategy in [Strategy::Gather, Strategy::Exchange(2)] {
        let options =
            PlanOptions { strategy: Some(strategy), chunk: Some(4), ..PlanOptions::default() };
        let plan = ShardPlan::new(&map(), &planes, &shape(), options).unwrap();
        let proven = plan.clone().prove(&planes, &Limits::default()).unwrap();
        assert_eq!(proven.proof().live_entries, planes.work().iter().sum::<u64>());
        type Plant = fn(&mut ShardPlan);
        let faults: [(Plant, &str); 3] = [
            (|p| p.ranks[1].stages[0].lengths[1] = LEN, "kv_len"),
            (|p| p.ranks[1].stages[0].lengths = [43, LEN], "q_len"),
            (|p| p.whole.kv_len = LEN, "mask"),
        ];
        for (plant, operand) in faults {
            let mut wrong = plan.clone();
            plant(&mut wrong);
            let found = wrong.prove(&planes, &Limits::default()).unwrap_err();
            assert_eq!((found.point, found.operand.as_str()), ('a', operand), "{found}");
        }
    }
}

#[test]
fn limits_of_bytes_and_of_imbalance_are_held() {
    let (plan, planes) = exchanged();
    let proof = plan.clone().prove(&planes, &Limits::default()).unwrap().proof().clone();
    let held = proof.bytes.iter().map(|b| b.held).max().unwrap();
    let limits = |attention_bytes, imbalance| Limits { attention_bytes, imbalance };
    plan.clone().prove(&planes, &limits(Some(held), Some(proof.imbalance))).unwrap();
    let found = plan.clone().prove(&planes, &limits(Some(held - 1), None)).unwrap_err();
    assert_eq!((found.point, found.operand.as_str()), ('f', "attention"));
    let found = plan.prove(&planes, &limits(None, Some(proof.imbalance - 1e-6))).unwrap_err();
    assert_eq!((found.point, found.operand.as_str()), ('g', "live entries"));
    let text = proof.to_string();
    assert!(text.contains("(b) live tiles") && text.lines().count() == 8, "{text}");
    assert!(text.contains(&format!("{:.1} KiB held", held as f64 / 1024.0)), "{text}");
}

#[test]
fn r12_plans_that_are_made_at_once_do_not_know_of_each_other() {
    let wanted = [
        ([1, 2, 3, 2], Strategy::Exchange(2)),
        ([1, 1, 4, 1], Strategy::Gather),
        ([2, 1, 2, 2], Strategy::HeadsForTokens),
        ([1, 1, 3, 1], Strategy::Exchange(4)),
    ];
    let make = |(mesh, strategy)| planned(mesh, strategy, documents()).0;
    let alone = wanted.map(make);
    for _ in 0..8 {
        let at_once: Vec<ShardPlan> = std::thread::scope(|scope| {
            let plans = wanted.map(|wanted| scope.spawn(move || make(wanted)));
            plans.into_iter().map(|plan| plan.join().unwrap()).collect()
        });
        assert_eq!(at_once, alone);
    }
}

#[test]
fn r13_a_spec_is_read_and_not_run() {
    let array =
        ArrayOf { element: ElementType::I32, axes: &[Axis::Batch, Axis::Seq], shape: &[4, LEN] };
    for spec in
        ["P(print('shard'))", "__import__('os')", "P('sh' + 'ard')", "P(*['shard'])", "P(0)"]
    {
        let refused = from_partition_spec(spec, array, map().mesh());
        assert!(refused.is_err(), "{spec}");
    }
}

/// Fewer key/value heads than ranks of `tensor`: what makes them has gradients of each query head once.
#[test]
fn copies_of_key_value_heads_are_summed_over_every_query_head_once() {
    // Two ranks hold each of 4 key/value heads, with one of its two query heads each.
    for strategy in [Strategy::Gather, Strategy::Exchange(2)] {
        let (plan, planes) = planned([1, 1, 2, 8], strategy, documents());
        assert_eq!(plan.ranks[3].kv_copies, [2, 3]);
        assert_eq!((&plan.ranks[3].own.heads, &plan.ranks[3].own.kv_heads), (&(3..4), &(1..2)));
        let proven = plan.clone().prove(&planes, &Limits::default()).unwrap();
        assert_eq!(proven.proof().live_entries, planes.work().iter().sum::<u64>());
        type Plant = fn(&mut ShardPlan);
        let faults: [(&str, Plant, char, &str); 6] = [
            ("without its own", |p| p.ranks[3].kv_copies = vec![2], 'd', "dk"),
            ("summed by no rank", |p| p.ranks[2].kv_copies = vec![2], 'd', "dk"),
            ("where 3 is next", |p| p.ranks[2].kv_copies = vec![2, 2, 3], 'd', "dk"),
            ("which has others", |p| p.ranks[3].kv_copies = vec![2, 3, 4], 'd', "dk"),
            ("which has others", |p| p.ranks[3].kv_copies = vec![2, 3, 11], 'd', "dk"),
            // Both ranks compute the first of the two query heads.
            (
                "the rank holds",
                |p| {
                    p.ranks[3].own.heads = 2..3;
                    p.ranks[3].stages.iter_mut().for_each(|s| {
                        (s.compute.heads, s.coordinates.heads) = (2..3, 2..3);
                    });
                },
                'a',
                "h",
            ),
        ];
        for (what, plant, point, operand) in faults {
            let mut wrong = plan.clone();
            plant(&mut wrong);
            let found = wrong.prove(&planes, &Limits::default()).unwrap_err();
            assert_eq!((found.point, found.operand.as_str()), (point, operand), "{found}");
            assert!(found.to_string().contains(what), "{what}: {found}");
        }
    }
    let (plan, planes) = planned([1, 1, 2, 4], Strategy::Exchange(1), documents());
    let mut wrong = plan;
    wrong.ranks[1].own.heads = 2..3;
    wrong.ranks[1].stages.iter_mut().for_each(|s| {
        (s.compute.heads, s.coordinates.heads) = (2..3, 2..3);
    });
    assert!(wrong.prove(&planes, &Limits::default()).is_err(), "heads that have no copies");
}
