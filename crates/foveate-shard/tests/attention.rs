//! Attention over ranks that are threads is the attention of the whole problem: forward and backward,
//! against the f64 oracle, for every strategy.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use foveate::mask::Tile;
use foveate::mods::expr::{b, h, kv, q, q_len};
use foveate::tensor::{ElementType, random::Random};
use foveate::{Attention, Buffer, DType, MaskMod, Operands, ScoreMod, Tensor, masks, scores};
use foveate_problem::Spec;
use foveate_reference::{Upstream, low, unit_roundoff};
use foveate_shard::collectives::{Collectives, run_threads};
use foveate_shard::{
    Cells, LayerMask, Limits, Map, Mesh, ModelShape, PlanOptions, Planes, RankAttention,
    ShardError, ShardPlan, Sharded, Strategy, Whole, arrays,
};

const DEADLINE: Duration = Duration::from_secs(60);

struct Case {
    name: &'static str,
    program: Attention,
    sink: Option<Vec<f32>>,
    whole: Whole,
    /// As the program has it.
    scale: Option<f32>,
}

fn normal(random: &mut Random, n: usize) -> Vec<f32> {
    (0..n).map(|_| random.normal() as f32).collect()
}

fn cases() -> Vec<Case> {
    let random = &mut Random::new(11);
    let whole = Whole { batch: 2, heads: 8, kv_heads: 4, q_len: 37, kv_len: 37 };
    let causal = || Attention::new().mask(masks::causal());
    let case = |name, program| Case { name, program, sink: None, whole, scale: None };
    let documents = masks::causal() & masks::document_lengths(&[9, 1, 20, 7]).unwrap();
    let prefixes = masks::prefix_lm_per_batch(&Buffer::vector("prefix", vec![12, 3])).unwrap();
    let bias = Buffer::learned("bias", &[8, 73], normal(random, 8 * 73)).unwrap();
    let relative = bias.at([h(), q() - kv() + 36]);
    let relative = ScoreMod::new((foveate::mods::expr::score() + relative).dynamic()).unwrap();
    let slopes = Buffer::vector("slopes", normal(random, 8));
    let alibi = foveate::mods::expr::score() - slopes.at([h()]) * (q() - kv()).to_f32();
    let alibi = ScoreMod::new(alibi.dynamic()).unwrap();
    let by_head = MaskMod::new(((kv() + h() * 2).le(q()) | (b() * 5).eq(kv())).dynamic()).unwrap();
    let table = (0..37 * 37).map(|_| i32::from(random.below(5) == 0)).collect();
    let table = Buffer::new("table", &[37, 37], table).unwrap();
    let table = MaskMod::new(table.at([q(), kv()]).ne(0).dynamic()).unwrap();
    let large = foveate::mods::expr::score() - 1000.0;
    let from_end = MaskMod::new((q_len() - q()).ge(kv() - 4).dynamic()).unwrap();
    let long = Whole { kv_len: 513, ..whole };
    vec![
        case("no mask", Attention::new()),
        case("window", Attention::new().mask(masks::sliding_window(5).unwrap())),
        case("documents", Attention::new().mask(documents.clone())),
        case("a prefix of each batch entry", Attention::new().mask(prefixes)),
        case("rows that see nothing", Attention::new().mask(table)),
        case("a learned bias of each head", causal().score(relative)),
        case("ALiBi", causal().score(alibi)),
        case("a mask of each head and batch entry", Attention::new().mask(by_head)),
        case("soft cap", causal().score(scores::soft_cap(2.0).unwrap())),
        case("dropout", Attention::new().mask(documents).dropout(0.4, 0x1234_5678_9abc)),
        case("a large lse", causal().score(ScoreMod::new(large.dynamic()).unwrap())),
        Case { sink: Some(normal(random, 8)), ..case("a sink", causal()) },
        Case {
            whole: long,
            ..case("R2, R6: 513 keys, no padding", Attention::new().mask(from_end))
        },
        Case {
            whole: Whole { q_len: 40, kv_len: 23, ..whole },
            ..case("fewer keys", Attention::new().mask(masks::causal_bottom_right()))
        },
        case("chunks", Attention::new().mask(masks::causal() & masks::chunked(11).unwrap())),
        // A grid of 36 places: the last token is in no neighbourhood.
        case(
            "a neighbourhood",
            Attention::new().mask(masks::neighbourhood(&[4, 9], &[3, 5]).unwrap()),
        ),
    ]
}

const DIM: [usize; 2] = [8, 6];

/// The elements of a rank's cells, from the whole.
fn part(
    whole: &Tensor,
    heads: std::ops::Range<usize>,
    cells: &Cells,
    positions: &foveate_shard::Ranges,
) -> Tensor {
    let positions: Vec<usize> = positions.as_slice().iter().cloned().flatten().collect();
    let shape = [cells.batch.len(), heads.len(), positions.len(), whole.shape()[3]];
    Tensor::from_fn(whole.dtype(), shape, |[b, h, s, d]| {
        whole.view().get_f64([cells.batch.start + b, heads.start + h, positions[s], d])
    })
}

/// Puts a rank's part where it is in the whole; every element once, among ranks that differ in it.
fn put(
    into: &mut [f64],
    shape: [usize; 4],
    own: &Tensor,
    heads: std::ops::Range<usize>,
    cells: &Cells,
    positions: &foveate_shard::Ranges,
) {
    let positions: Vec<usize> = positions.as_slice().iter().cloned().flatten().collect();
    let [nb, nh, ns, nd] = own.shape();
    assert_eq!([nb, nh, ns], [cells.batch.len(), heads.len(), positions.len()]);
    for (b, h) in (0..nb).flat_map(|b| (0..nh).map(move |h| (b, h))) {
        for (s, &position) in positions.iter().enumerate() {
            for d in 0..nd {
                let at = (((cells.batch.start + b) * shape[1] + heads.start + h) * shape[2]
                    + position)
                    * shape[3]
                    + d;
                assert!(into[at].is_nan(), "element {at} comes from one rank");
                into[at] = own.view().get_f64([b, h, s, d]);
            }
        }
    }
}

/// The rules of `docs/semantics.md`: against a plain implementation in f32, or in the operands' type.
#[track_caller]
fn close(what: &str, dtype: DType, found: &[f64], gold: &[f64], low: &[f64]) {
    let error = |x: &f64, y: &f64| if x == y { 0.0 } else { (x - y).abs() };
    let most = |a: &[f64]| a.iter().zip(gold).map(|(x, y)| error(x, y)).fold(0.0, f64::max);
    assert_eq!(found.len(), gold.len(), "{what}");
    assert!(found.iter().all(|x| !x.is_nan()), "{what}: NaN");
    let largest = gold.iter().filter(|x| x.is_finite()).fold(0.0f64, |m, x| m.max(x.abs()));
    let allowed = match dtype {
        DType::F32 => 10.0 * most(low) + 1e-6,
        half => 2.0 * most(low) + unit_roundoff(half) * largest,
    };
    assert!(most(found) <= allowed, "{what}: error {} where {allowed} is allowed", most(found));
}

fn operand(dtype: DType, seed: u64, shape: [usize; 4]) -> Tensor {
    let mut random = Random::new(seed);
    Tensor::from_fn(dtype, shape, |_| random.normal())
}

type Found = (Tensor, Tensor<3>, [Tensor; 3], Option<Vec<f32>>, BTreeMap<String, Vec<f32>>);

/// Runs a case over a mesh and compares everything with the oracle; returns the ranks' results.
fn run(
    case: &Case,
    dtype: DType,
    mesh: [usize; 4],
    strategy: Option<Strategy>,
) -> Result<Vec<Found>, ShardError> {
    let element = match dtype {
        DType::BF16 => ElementType::BF16,
        DType::F16 => ElementType::F16,
        DType::F64 => ElementType::F64,
        DType::F8E4M3 => unreachable!("no case has it"),
        DType::F32 => ElementType::F32,
    };
    let Whole { batch, heads, kv_heads, q_len, kv_len } = case.whole;
    let q = operand(dtype, 1, [batch, heads, q_len, DIM[0]]);
    let k = operand(dtype, 2, [batch, kv_heads, kv_len, DIM[0]]);
    let v = operand(dtype, 3, [batch, kv_heads, kv_len, DIM[1]]);
    let d_out = operand(dtype, 4, [batch, heads, q_len, DIM[1]]);
    let layer = LayerMask { mask: case.program.get_mask().cloned(), layers: 1 };
    let planes = Planes::new(case.whole, &[layer], Tile { q: 2, kv: 3 })?;
    let shape = ModelShape { dim: DIM[0], dim_v: DIM[1], hidden: 8, ffn: 8, vocab: 8, element };
    let map = Map::new(Mesh::new(mesh)?);
    let plan =
        ShardPlan::new(&map, &planes, &shape, PlanOptions { strategy, ..PlanOptions::default() })?;
    let proven = Arc::new(
        plan.prove(&planes, &Limits::default()).map_err(|e| ShardError::new(e.to_string()))?,
    );
    let plan = proven.plan();
    let ranks = run_threads(map.mesh().ranks(), DEADLINE, |world| {
        let own = &plan.ranks[world.rank()].own;
        let sharded = |name: &str, tensor: Tensor| {
            let layout = arrays::by_name(name).unwrap().layout_in(&plan.sharding, element)?;
            let shape = tensor.shape();
            Sharded::new(name, tensor, &shape, layout, plan.sharding.map(), world.rank())
        };
        let layer = RankAttention::new(world, &proven, &case.program, case.sink.as_deref())?;
        let q = sharded("q", part(&q, own.heads.clone(), own, &own.q))?;
        let k = sharded("k", part(&k, own.kv_heads.clone(), own, &own.kv))?;
        let v = sharded("v", part(&v, own.kv_heads.clone(), own, &own.kv))?;
        let d_out = sharded("d_out", part(&d_out, own.heads.clone(), own, &own.q))?;
        let forward = layer.forward(&q, &k, &v)?;
        let g = layer.backward(&forward, &d_out)?;
        let gradients = [g.dq, g.dk, g.dv].map(Sharded::into_value);
        Ok((forward.out.into_value(), forward.lse.into_value(), gradients, g.d_sink, g.captures))
    })?;

    let program = &case.program;
    let spec = Spec {
        mask: program.get_mask().cloned(),
        score: program.get_score().cloned(),
        scale: case.scale,
        dropout: program.get_dropout().cloned(),
    };
    let operands = Operands {
        q: q.view(),
        k: k.view(),
        v: v.view(),
        varlen: None,
        pages: None,
        scales: None,
        sink: case.sink.as_deref().map(foveate::tensor::Slice::F32),
    };
    let upstream = Upstream { d_out: d_out.view(), d_lse: None };
    let gold = foveate_reference::forward(&spec, &operands).unwrap();
    let low_forward = low::forward(&spec, &operands).unwrap();
    let statistics = low::statistics(&spec, &operands).unwrap();
    let gold_back = foveate_reference::backward(&spec, &operands, &upstream).unwrap();
    let low_back = low::backward(&spec, &operands, &upstream).unwrap();
    let empty = |shape: [usize; 4]| vec![f64::NAN; shape.iter().product()];
    let shapes = [[batch, heads, q_len, DIM[1]], q.shape(), k.shape(), v.shape()];
    let mut results = shapes.map(empty);
    let mut lse = vec![f64::NAN; batch * heads * q_len];
    for (rank, (out, own_lse, [dq, dk, dv], d_sink, captures)) in ranks.iter().enumerate() {
        let own = &plan.ranks[rank].own;
        put(&mut results[0], shapes[0], out, own.heads.clone(), own, &own.q);
        put(&mut results[1], shapes[1], dq, own.heads.clone(), own, &own.q);
        put(&mut results[2], shapes[2], dk, own.kv_heads.clone(), own, &own.kv);
        put(&mut results[3], shapes[3], dv, own.kv_heads.clone(), own, &own.kv);
        let [nb, nh, ns] = own_lse.shape();
        let column =
            Tensor::from_vec(own_lse.as_slice::<f32>().unwrap().to_vec(), [nb, nh, ns, 1]).unwrap();
        put(&mut lse, [batch, heads, q_len, 1], &column, own.heads.clone(), own, &own.q);
        if let Some(d_sink) = d_sink {
            let found: Vec<f64> = d_sink.iter().map(|&x| f64::from(x)).collect();
            let of = own.heads.clone();
            close("d_sink", dtype, &found, &gold_back.d_sink[of.clone()], &low_back.d_sink[of]);
        }
        assert_eq!(captures.len(), gold_back.captures.len());
        for (name, found) in captures {
            let found: Vec<f64> = found.iter().map(|&x| f64::from(x)).collect();
            close(name, dtype, &found, &gold_back.captures[name], &low_back.captures[name]);
        }
    }
    let about = format!("{} on {mesh:?}, {}", case.name, plan.strategy);
    close(&format!("{about}: out"), dtype, &results[0], &gold.out, &low_forward.out);
    close(&format!("{about}: lse"), DType::F32, &lse, &gold.lse, &statistics.lse);
    close(&format!("{about}: dq"), dtype, &results[1], &gold_back.dq, &low_back.dq);
    close(&format!("{about}: dk"), dtype, &results[2], &gold_back.dk, &low_back.dk);
    close(&format!("{about}: dv"), dtype, &results[3], &gold_back.dv, &low_back.dv);
    Ok(ranks)
}

const MESHES: [[usize; 4]; 8] = [
    [1, 1, 1, 1],
    [1, 1, 2, 1],
    [1, 1, 3, 1],
    [1, 2, 2, 1],
    [1, 1, 2, 2],
    [2, 1, 4, 1],
    [1, 1, 8, 1],
    [1, 3, 2, 1],
];

#[test]
fn the_attention_of_every_mesh_and_strategy_is_that_of_the_whole() {
    for case in cases() {
        for mesh in MESHES {
            let mut strategies = vec![
                None,
                Some(Strategy::Gather),
                Some(Strategy::Exchange(0)),
                Some(Strategy::Exchange(1)),
                Some(Strategy::Exchange(3)),
            ];
            if case.whole.kv_heads / mesh[3] >= mesh[2] {
                strategies.push(Some(Strategy::HeadsForTokens));
            }
            for strategy in strategies {
                if let Err(error) = run(&case, DType::F32, mesh, strategy) {
                    panic!("{} on {mesh:?}, {strategy:?}: {error}", case.name);
                }
            }
        }
    }
}

#[test]
fn sixteen_ranks_and_half_types_give_the_attention_of_the_whole() {
    for case in cases() {
        for (dtype, mesh) in [
            (DType::F32, [2, 2, 2, 2]),
            (DType::F32, [1, 1, 8, 2]),
            (DType::BF16, [1, 2, 3, 1]),
            (DType::F16, [1, 1, 4, 1]),
        ] {
            for strategy in [Strategy::Exchange(2), Strategy::HeadsForTokens] {
                if strategy == Strategy::HeadsForTokens && mesh[2] * mesh[3] > 4 {
                    continue;
                }
                if let Err(error) = run(&case, dtype, mesh, Some(strategy)) {
                    panic!("{} in {dtype} on {mesh:?}, {strategy}: {error}", case.name);
                }
            }
        }
    }
}

#[test]
fn a_mesh_gives_the_same_bits_every_time() {
    let bits =
        |t: &Tensor| t.as_slice::<f32>().unwrap().iter().map(|x| x.to_bits()).collect::<Vec<_>>();
    for case in cases().into_iter().skip(5).take(3) {
        for strategy in [Strategy::Exchange(2), Strategy::HeadsForTokens] {
            let [one, two] =
                [(); 2].map(|()| run(&case, DType::F32, [1, 1, 4, 1], Some(strategy)).unwrap());
            for (a, b) in one.iter().zip(&two) {
                assert_eq!(bits(&a.0), bits(&b.0));
                a.2.iter().zip(&b.2).for_each(|(x, y)| assert_eq!(bits(x), bits(y)));
                assert_eq!(a.4, b.4);
            }
        }
    }
}

#[test]
fn r10_the_scale_is_that_of_the_head_dim_unless_a_program_says_another() {
    let outputs = |scale: Option<f32>| {
        let mut case = cases().swap_remove(2);
        case.scale = scale;
        if let Some(scale) = scale {
            case.program = case.program.scale(scale);
        }
        // Beside the oracle, with 1/√D where there is no scale.
        let ranks = run(&case, DType::F32, [1, 1, 3, 1], Some(Strategy::Exchange(2))).unwrap();
        let values = |found: &Found| found.0.as_slice::<f32>().unwrap().to_vec();
        ranks.iter().flat_map(values).collect::<Vec<f32>>()
    };
    let [unsaid, one, said] = [None, Some(1.0), Some(1.0 / (DIM[0] as f32).sqrt())].map(outputs);
    assert!(unsaid.iter().zip(&one).any(|(x, y)| (x - y).abs() > 0.1));
    assert!(unsaid == said);
}

#[test]
fn ranks_that_differ_or_operands_that_do_not_fit_are_refused_on_all() {
    let whole = Whole { batch: 1, heads: 2, kv_heads: 2, q_len: 16, kv_len: 16 };
    let layer = |mask: MaskMod| LayerMask { mask: Some(mask), layers: 1 };
    let planes = Planes::new(whole, &[layer(masks::causal())], Tile { q: 2, kv: 2 }).unwrap();
    let shape =
        ModelShape { dim: 4, dim_v: 4, hidden: 8, ffn: 8, vocab: 8, element: ElementType::F32 };
    let map = Map::new(Mesh::new([1, 1, 2, 1]).unwrap());
    let plan = ShardPlan::new(&map, &planes, &shape, PlanOptions::default()).unwrap();
    let proven = Arc::new(plan.prove(&planes, &Limits::default()).unwrap());
    let told = |ranks, program: &(dyn Fn(usize) -> Attention + Sync)| {
        let made = run_threads(ranks, DEADLINE, |world| {
            RankAttention::new(world, &proven, &program(world.rank()), None).map(drop)
        });
        made.unwrap_err().to_string()
    };
    let causal = || Attention::new().mask(masks::causal());
    let said = told(2, &|rank| causal().dropout(0.5, rank as u64));
    assert!(said.contains("ranks [1] have another dropout than rank 0"), "{said}");
    let said = told(2, &|_| Attention::new());
    assert!(said.contains("none of those that the plan was proven for"), "{said}");
    let said = told(3, &|_| causal());
    assert!(said.contains("3 ranks run a plan of 2"), "{said}");
    let said = run_threads(2, DEADLINE, |world| {
        let layer = RankAttention::new(world, &proven, &causal(), None)?;
        let sharding = proven.plan().sharding.clone().in_order(None);
        let layout = arrays::by_name("q").unwrap().layout_in(&sharding, ElementType::F32)?;
        let q = Tensor::filled(DType::F32, [1, 2, 8, 4], 1.0);
        let q = Sharded::new("q", q, &[1, 2, 8, 4], layout, sharding.map(), world.rank())?;
        layer.forward(&q, &q, &q).map(drop)
    });
    let said = said.unwrap_err().to_string();
    assert!(said.contains("operand `q`, order of tokens: expected tokens in order"), "{said}");
}

/// trl#6843: change one token of a document; exactly the outputs change that see it.
#[test]
fn a_token_changes_the_outputs_that_see_it_and_no_other() {
    let case = cases().into_iter().find(|c| c.name == "documents").unwrap();
    let (mesh, at) = ([1, 1, 4, 1], 12usize);
    let whole = case.whole;
    let q = operand(DType::F32, 1, [2, 8, 37, DIM[0]]);
    let k = operand(DType::F32, 2, [2, 4, 37, DIM[0]]);
    let v = operand(DType::F32, 3, [2, 4, 37, DIM[1]]);
    let moved = Tensor::from_fn(DType::F32, v.shape(), |i| {
        v.view().get_f64(i) + if i[2] == at { 1.0 } else { 0.0 }
    });
    let planes = Planes::new(
        whole,
        &[LayerMask { mask: case.program.get_mask().cloned(), layers: 1 }],
        Tile { q: 2, kv: 3 },
    )
    .unwrap();
    let shape = ModelShape {
        dim: DIM[0],
        dim_v: DIM[1],
        hidden: 8,
        ffn: 8,
        vocab: 8,
        element: ElementType::F32,
    };
    let map = Map::new(Mesh::new(mesh).unwrap());
    for strategy in [Strategy::Gather, Strategy::Exchange(2), Strategy::HeadsForTokens] {
        let plan = ShardPlan::new(
            &map,
            &planes,
            &shape,
            PlanOptions { strategy: Some(strategy), ..PlanOptions::default() },
        )
        .unwrap();
        let proven = Arc::new(plan.prove(&planes, &Limits::default()).unwrap());
        let plan = proven.plan();
        let changed = run_threads(4, DEADLINE, |world| {
            let own = &plan.ranks[world.rank()].own;
            let sharded = |name: &str, tensor: Tensor| {
                let layout =
                    arrays::by_name(name).unwrap().layout_in(&plan.sharding, ElementType::F32)?;
                let shape = tensor.shape();
                Sharded::new(name, tensor, &shape, layout, plan.sharding.map(), world.rank())
            };
            let layer = RankAttention::new(world, &proven, &case.program, None)?;
            // Without dropout, whether an output sees a key is whether its value changes it.
            let q = sharded("q", part(&q, own.heads.clone(), own, &own.q))?;
            let k = sharded("k", part(&k, own.kv_heads.clone(), own, &own.kv))?;
            let outs = [&v, &moved].map(|v| {
                let v = sharded("v", part(v, own.kv_heads.clone(), own, &own.kv))?;
                Ok::<_, ShardError>(layer.forward(&q, &k, &v)?.out.into_value())
            });
            let [before, after] = outs;
            let (before, after) = (before?, after?);
            let rows = own.q.as_slice().iter().cloned().flatten().enumerate();
            let differs = |s: &usize| {
                (0..2).any(|b| {
                    (0..8).any(|h| {
                        (0..DIM[1]).any(|d| {
                            before.view().get_f64([b, h, *s, d])
                                != after.view().get_f64([b, h, *s, d])
                        })
                    })
                })
            };
            Ok(rows.filter(|(s, _)| differs(s)).map(|(_, q)| q).collect::<Vec<_>>())
        })
        .unwrap();
        let mut changed = changed.concat();
        changed.sort_unstable();
        // The third document has positions 10 to 29.
        assert_eq!(changed, (at..30).collect::<Vec<_>>(), "{strategy}");
    }
}
