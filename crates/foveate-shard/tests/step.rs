//! Steps between their attention: right ones are proven, and every planted fault is refused with the right operand.

mod steps;

use std::sync::Arc;

use foveate::tensor::{ElementType, random::Random};
use foveate_shard::step::{
    Among, Call, Edge, EdgeKind, Event, Held, Moved, Stays, StepPlan, StepStage, Terms,
};
use foveate_shard::{Axis, Lengths, Map, Mesh, MeshAxis, Ranges, Sharding};
use steps::{Model, again, model, shape, sharding};

const MODEL: Model = Model { layers: 3, kv_heads: 4, tied: false, rows: 12, len: 37 };

fn planned(mesh: [usize; 4]) -> StepPlan {
    let sharding = sharding(mesh, &MODEL);
    StepPlan::new(&sharding, &shape(&sharding, &MODEL)).unwrap()
}

#[test]
fn right_steps_are_proven_on_every_mesh_and_of_every_kind() {
    let mut random = Random::new(11);
    for mesh in [
        [1, 1, 1, 1],
        [2, 1, 1, 1],
        [1, 3, 1, 1],
        [1, 2, 2, 1],
        [2, 2, 1, 2],
        [2, 2, 2, 2],
        [1, 1, 2, 8],
    ] {
        for stays in [Stays::Layer, Stays::Batch, Stays::Step] {
            for tied in [false, true] {
                let of = Model { layers: 1 + random.below(3), tied, ..MODEL };
                let sharding = sharding(mesh, &of);
                let mut shape = shape(&sharding, &of);
                shape.stays = stays;
                shape.in_backward = random.below(2) == 0;
                shape.batches = if shape.in_backward { 1 } else { 1 + random.below(3) };
                shape.again.fill_with(|| again(&mut random));
                // Of the embedding, a layer or the head nothing may be trained.
                let untrained = random.below(2 * (of.layers + 2));
                for group in shape.groups.iter_mut().filter_map(|all| all.get_mut(untrained)) {
                    group.frozen += std::mem::take(&mut group.trained);
                }
                let plan = StepPlan::new(&sharding, &shape).unwrap();
                let proven = plan.clone().prove();
                let proven = proven.unwrap_or_else(|e| panic!("{mesh:?}, {shape:?}: {e}"));
                let proof = proven.proof();
                let copies = mesh[0] as u64;
                let all = shape.groups.iter().flatten();
                let all: usize = all.map(|group| group.trained + group.frozen).sum();
                assert_eq!(proof.parameter_elements, copies * all as u64, "{mesh:?}");
                assert_eq!(proof.edges > 0, mesh != [1; 4]);
                assert_eq!(proof.step_hash, plan.hash());
            }
        }
    }
}

/// What follows from two layouts of a value.
#[test]
fn a_transfer_follows_from_two_layouts() {
    let held = |on: &[MeshAxis], over: &[MeshAxis]| Held {
        element: ElementType::F32,
        axes: vec![(Axis::Elements, on.to_vec())],
        terms: match over {
            [] => vec![],
            over => vec![Terms { over: over.to_vec(), of: vec![Axis::Seq], copies: None }],
        },
    };
    use MeshAxis::{Context, Replicate, Shard};
    let kind = |from: Held, to: Held| {
        from.transfer(&to).map(|transfer| (transfer.kind, transfer.over, transfer.sum.is_some()))
    };
    let both = vec![Shard, Context];
    assert_eq!(
        kind(held(&both, &[]), held(&[], &[])),
        Some((EdgeKind::AllGather, both.clone(), false))
    );
    assert_eq!(
        kind(held(&[], &[Replicate, Shard, Context]), held(&both, &[Replicate])),
        Some((EdgeKind::ReduceScatter, both.clone(), true))
    );
    assert_eq!(
        kind(held(&both, &[Replicate]), held(&both, &[])),
        Some((EdgeKind::AllReduce, vec![Replicate], true))
    );
    for (from, to) in [
        (held(&[], &[]), held(&both, &[])),
        (held(&both, &[]), held(&both, &[])),
        (held(&both, &[]), held(&both, &[Shard])),
        (held(&[], &[Shard]), held(&[Context], &[])),
        (held(&both, &[Replicate]), held(&[], &[])),
    ] {
        assert_eq!(from.transfer(&to), None, "{from} to {to}");
    }
    assert_eq!(held(&both, &[Replicate]).to_string(), "f32[elements@(shard,context)] by replicate");
}

/// The kinds and bytes of a small step, as they follow from its sizes.
#[test]
fn edges_have_the_bytes_that_follow_from_sizes() {
    let plan = planned([2, 2, 2, 2]);
    let of = |value: &str| plan.edges().find(|edge| edge.values[0] == value).unwrap();
    let group = &plan.shape.groups[0][1];
    let elems = (group.trained + group.frozen) as u64;
    let gathered = of("layers.0 weights");
    assert_eq!(gathered.kind, EdgeKind::AllGather);
    assert_eq!(gathered.to.to_string(), "bf16[elements]");
    let own: u64 = plan.ranks[0].owned[1].elements.len() as u64;
    assert_eq!(plan.received(gathered, 0), 2 * (elems - own));
    let stream = of("layers.0 attention, by head");
    assert_eq!(
        (stream.kind, stream.from.to_string(), stream.to.to_string()),
        (
            EdgeKind::ReduceScatter,
            "bf16[batch@(replicate,shard), seq@context, hidden] by tensor".to_owned(),
            "bf16[batch@(replicate,shard), stream@(context,tensor), hidden]".to_owned()
        )
    );
    let tokens = plan.sharding.range(Axis::Stream, 0).len() as u64;
    let rows = plan.sharding.range(Axis::Batch, 0).len() as u64;
    assert_eq!(plan.received(stream, 0), 2 * rows * tokens * 16);
    let logits = of("logits' maximum, sum and label, by token id");
    let all = plan.sharding.range(Axis::Seq, 0).len() as u64;
    assert_eq!(plan.received(logits, 0), rows * all * 3 * 4);
    let summed = of("layers.0 gradients");
    let trained = plan.ranks[0].owned[1].elements.len().min(group.trained) as u64;
    assert_eq!((summed.kind, plan.received(summed, 0)), (EdgeKind::AllReduce, trained * 4));
    let totals = of("norm, loss, z-loss and labels");
    assert_eq!((totals.kind, plan.received(totals, 0)), (EdgeKind::AllReduce, 15 * 4 * 8));
    let gradient = of("layers.2 gradients of a batch");
    assert_eq!(gradient.beside, None, "what copies have is waited for");
    let scattered = plan.edges().find(|e| e.values[1] == "layers.2 gradients").unwrap();
    assert_eq!(scattered.beside.as_deref(), Some("layers.1 backward"));
}

#[test]
fn shapes_that_no_mesh_has_are_refused() {
    let sharding = sharding([1, 2, 1, 2], &MODEL);
    let right = shape(&sharding, &MODEL);
    let refused = |edit: &dyn Fn(&mut foveate_shard::step::StepShape)| {
        let mut shape = right.clone();
        edit(&mut shape);
        StepPlan::new(&sharding, &shape).unwrap_err().to_string()
    };
    assert!(refused(&|s| s.batches = 0).contains("a batch or more"));
    assert!(refused(&|s| drop(s.groups.pop())).contains("a step of 3 layers on 2 ranks of tensor"));
    assert!(refused(&|s| s.again.truncate(2)).contains("a step of 2 layers"));
    let two = refused(&|s| (s.batches, s.in_backward) = (2, true));
    assert!(two.contains("one batch a step, not of 2"), "{two}");
    let map = Map::new(Mesh::new([1, 2, 1, 2]).unwrap());
    let map = map.with(Axis::Elements, &[MeshAxis::Tensor]).unwrap();
    let other = model(map, &MODEL);
    let wrong = StepPlan::new(&other, &shape(&other, &MODEL)).unwrap_err().to_string();
    assert!(wrong.contains("elements that go where batch and seq go"), "{wrong}");
    let map = Map::new(Mesh::new([1, 2, 1, 2]).unwrap()).with(Axis::Ffn, &[]).unwrap();
    let other = model(map, &MODEL);
    let wrong = StepPlan::new(&other, &shape(&other, &MODEL)).unwrap_err().to_string();
    assert!(wrong.contains("layers.0 feed-forward, by column: no transfer leads from"), "{wrong}");
}

/// 126 layers on 1,024 ranks.
#[test]
fn a_step_of_a_thousand_ranks_is_proven() {
    let of = Model { layers: 126, kv_heads: 8, tied: false, rows: 12, len: 37 };
    let lengths =
        Lengths { batch: 256, seq: 8192, kv_seq: 8192, heads: 128, ..steps::lengths(&of) };
    let map = Map::new(Mesh::new([1, 128, 1, 8]).unwrap());
    let sharding = Sharding::new(map, &lengths).unwrap();
    let shape = shape(&sharding, &of);
    let began = std::time::Instant::now();
    let plan = StepPlan::new(&sharding, &shape).unwrap();
    let planned = began.elapsed();
    let proven = plan.prove().unwrap();
    println!("planned in {planned:?}, planned and proven in {:?}", began.elapsed());
    println!("{}", proven.proof());
    assert_eq!(proven.proof().ranks, 1024);
}

/// A fault: its name, the mesh, how it is planted, and what the checker has to name.
struct Fault {
    name: &'static str,
    mesh: [usize; 4],
    plant: fn(&mut StepPlan),
    point: char,
    operand: &'static str,
}

const ALL: [usize; 4] = [2, 2, 2, 2];
const HSDP: [usize; 4] = [2, 4, 1, 1];
/// Two ranks hold each key/value head.
const COPIES: [usize; 4] = [1, 1, 2, 8];

/// The number of the edge that takes a value.
fn edge(plan: &StepPlan, from: &str) -> usize {
    plan.edges().find(|edge| edge.values[0] == from).expect(from).number
}

fn edge_mut(plan: &mut StepPlan, number: usize) -> &mut Edge {
    let edges = plan.events.iter_mut().filter_map(|event| match event {
        Event::Edge(edge) => Some(edge),
        Event::Stage(_) => None,
    });
    edges.into_iter().nth(number).unwrap()
}

fn stage_mut<'a>(plan: &'a mut StepPlan, name: &str) -> &'a mut StepStage {
    let stages = plan.events.iter_mut().filter_map(|event| match event {
        Event::Stage(stage) => Some(stage),
        Event::Edge(_) => None,
    });
    stages.into_iter().find(|stage| stage.name == name).expect(name)
}

/// Takes an edge out of the step, on all ranks.
fn forget(plan: &mut StepPlan, number: usize) {
    plan.events.retain(|event| !matches!(event, Event::Edge(edge) if edge.number == number));
    let lower = |at: &mut usize| *at -= usize::from(*at > number);
    for event in &mut plan.events {
        if let Event::Edge(edge) = event {
            lower(&mut edge.number);
        }
    }
    for rank in &mut plan.ranks {
        let calls = Arc::make_mut(&mut rank.calls);
        calls.retain(|call| call.edge != number);
        calls.iter_mut().for_each(|call| lower(&mut call.edge));
    }
}

/// Does an edge a second time, behind the first, on all ranks.
fn double(plan: &mut StepPlan, number: usize) {
    let is = |event: &Event| matches!(event, Event::Edge(edge) if edge.number == number);
    let at = plan.events.iter().position(is).unwrap();
    let again = plan.events[at].clone();
    plan.events.insert(at + 1, again);
    let mut next = 0;
    for event in &mut plan.events {
        if let Event::Edge(edge) = event {
            edge.number = next;
            next += 1;
        }
    }
    for rank in &mut plan.ranks {
        let calls = Arc::make_mut(&mut rank.calls);
        calls.iter_mut().for_each(|call| call.edge += usize::from(call.edge > number));
        let Some(at) = calls.iter().position(|call| call.edge == number) else { continue };
        let mut again = calls[at].clone();
        again.edge += 1;
        calls.insert(at + 1, again);
    }
}

/// Replaces a group on its members, as these know it.
fn regroup(plan: &mut StepPlan, rank: usize, among: Among, to: Vec<usize>) {
    let to = Arc::new(to);
    let old = plan.ranks[rank].groups[among as usize].clone();
    old.iter().for_each(|&member| plan.ranks[member].groups[among as usize] = to.clone());
}

/// Edits the parts of an edge on all ranks that do it with `rank`, alike.
fn reparts(plan: &mut StepPlan, rank: usize, number: usize, edit: impl Fn(&mut Vec<Ranges>)) {
    let calls = &plan.ranks[rank].calls;
    let call = calls.iter().find(|call| call.edge == number).unwrap();
    let (among, mut parts) = (call.among, (*call.parts).clone());
    edit(&mut parts);
    let parts = Arc::new(parts);
    let members = Arc::clone(plan.ranks[rank].members(among));
    for &member in members.iter() {
        let calls = Arc::make_mut(&mut plan.ranks[member].calls);
        calls.iter_mut().find(|call| call.edge == number).unwrap().parts = parts.clone();
    }
}

/// Some edges are done by other groups of ranks, each with its own part.
fn among_others(
    plan: &mut StepPlan,
    is: impl Fn(&Edge) -> bool,
    group_of: impl Fn(&Mesh, usize) -> Vec<usize>,
) {
    let (right, mesh) = (plan.clone(), *plan.sharding.map().mesh());
    let edges: Vec<usize> = right.edges().filter(|edge| is(edge)).map(|edge| edge.number).collect();
    let part_of = |member: usize, edge: usize| {
        let own = &right.ranks[member];
        let call = own.calls.iter().find(|call| call.edge == edge).unwrap();
        let place = own.members(call.among).iter().position(|&rank| rank == member).unwrap();
        call.parts[place].clone()
    };
    for (rank, own) in plan.ranks.iter_mut().enumerate() {
        let members = group_of(&mesh, rank);
        let of_edges = |call: &&mut Call| edges.contains(&call.edge);
        for call in Arc::make_mut(&mut own.calls).iter_mut().filter(of_edges) {
            let parts = members.iter().map(|&member| part_of(member, call.edge)).collect();
            (call.among, call.parts) = (Among::KvHolders, Arc::new(parts));
        }
        own.groups[Among::KvHolders as usize] = Arc::new(members);
    }
}

/// Whether an edge is such a transfer of parameters or gradients.
fn of_elements(edge: &Edge, kind: EdgeKind) -> bool {
    matches!(edge.moved, Moved::Elements { .. }) && edge.kind == kind
}

fn less_last(ranges: &Ranges) -> Ranges {
    let last = ranges.as_slice().last().unwrap().end - 1;
    ranges.difference(&Ranges::one(last..last + 1))
}

#[rustfmt::skip]
const FAULTS: &[Fault] = &[
    // FSDP.
    Fault { name: "a layer reads weights that nobody gathers", mesh: ALL, point: 'c', operand: "layers.1 weights, gathered", plant: |p| { let e = edge(p, "layers.1 weights"); forget(p, e); } },
    Fault { name: "a layer reads its own part of the weights", mesh: ALL, point: 'c', operand: "layers.1 weights", plant: |p| {
        stage_mut(p, "layers.1: attention").reads[1].value = "layers.1 weights".into();
    } },
    Fault { name: "weights are dropped before the layer has used them", mesh: ALL, point: 'c', operand: "layers.1 weights, gathered", plant: |p| {
        stage_mut(p, "layers.1: attention").drops.push("layers.1 weights, gathered".into());
    } },
    Fault { name: "weights are gathered twice", mesh: ALL, point: 'c', operand: "layers.1 weights, gathered", plant: |p| { let e = edge(p, "layers.1 weights"); double(p, e); } },
    Fault { name: "gathered weights stay behind the update", mesh: ALL, point: 'c', operand: "layers.0 weights, gathered", plant: |p| {
        let at = p.events.iter().rposition(|e| matches!(e, Event::Stage(s) if s.name == "weights are dropped")).unwrap(); p.events.remove(at);
    } },
    Fault { name: "weights are gathered over shard alone", mesh: ALL, point: 'c', operand: "embedding weights", plant: |p| {
        among_others(p, |e| of_elements(e, EdgeKind::AllGather), |mesh, rank| mesh.group(rank, &[MeshAxis::Shard]));
    } },
    Fault { name: "weights are gathered from ranks with other heads", mesh: ALL, point: 'c', operand: "embedding weights", plant: |p| {
        // The second and third rank have changed places: what is of two places on `tensor` is taken for one.
        let turned = |rank: usize| match rank % 8 { 2 => rank + 1, 3 => rank - 1, _ => rank };
        among_others(p, |e| of_elements(e, EdgeKind::AllGather), move |mesh, rank| {
            let group = mesh.group(turned(rank), &[MeshAxis::Shard, MeshAxis::Context]);
            group.into_iter().map(turned).collect()
        });
    } },
    Fault { name: "a rank gives elements that it does not own", mesh: ALL, point: 'c', operand: "layers.0 weights", plant: |p| {
        let e = edge(p, "layers.0 weights"); reparts(p, 0, e, |parts| parts.swap(0, 1));
    } },
    Fault { name: "the last element of a part is not sent", mesh: ALL, point: 'c', operand: "layers.0 weights", plant: |p| {
        let e = edge(p, "layers.0 weights"); reparts(p, 0, e, |parts| parts[1] = less_last(&parts[1]));
    } },
    Fault { name: "one rank takes no part in a gather", mesh: HSDP, point: 'e', operand: "layers.0 weights", plant: |p| {
        let e = edge(p, "layers.0 weights"); Arc::make_mut(&mut p.ranks[2].calls).retain(|call| call.edge != e);
    } },
    Fault { name: "two ranks expect other parts", mesh: HSDP, point: 'e', operand: "layers.0 weights", plant: |p| {
        let e = edge(p, "layers.0 weights"); let calls = Arc::make_mut(&mut p.ranks[2].calls);
        let call = calls.iter_mut().find(|call| call.edge == e).unwrap(); Arc::make_mut(&mut call.parts)[1] = Ranges::default();
    } },
    Fault { name: "an element has two owners", mesh: HSDP, point: 'd', operand: "layers.1", plant: |p| {
        let own = &mut Arc::make_mut(&mut p.ranks[2].owned)[2].elements; let first = own.as_slice()[0].start; *own = own.union(&Ranges::one(first - 1..first));
    } },
    Fault { name: "an element has no owner", mesh: HSDP, point: 'd', operand: "layers.1", plant: |p| {
        let own = &mut Arc::make_mut(&mut p.ranks[2].owned)[2].elements; *own = less_last(own);
    } },
    Fault { name: "random numbers of the optimiser are local", mesh: HSDP, point: 'd', operand: "random index", plant: |p| Arc::make_mut(&mut p.ranks[1].owned)[1].random_from = 0 },
    Fault { name: "gradients are not summed", mesh: HSDP, point: 'c', operand: "layers.1 gradients of a batch", plant: |p| { let e = edge(p, "layers.1 gradients of a batch"); forget(p, e); } },
    Fault { name: "gradients are summed twice", mesh: HSDP, point: 'c', operand: "layers.1 gradients of a batch", plant: |p| { let e = edge(p, "layers.1 gradients of a batch"); double(p, e); } },
    Fault { name: "gradients of one batch of two are summed", mesh: HSDP, point: 'c', operand: "layers.1 gradients", plant: |p| {
        let e = p.edges().filter(|e| e.values[0] == "layers.1 gradients of a batch").last().unwrap().number; forget(p, e);
    } },
    Fault { name: "gradients are summed over half of shard", mesh: HSDP, point: 'd', operand: "head gradients of a batch", plant: |p| {
        among_others(p, |e| of_elements(e, EdgeKind::ReduceScatter), |_, rank| vec![rank / 2 * 2, rank / 2 * 2 + 1]);
    } },
    Fault { name: "gradients are added in another order on one rank", mesh: HSDP, point: 'e', operand: "embedding weights", plant: |p| { p.ranks[1].groups[0] = Arc::new(vec![1, 0, 2, 3]); } },
    Fault { name: "gradients are added in an order that is not that of ranks", mesh: HSDP, point: 'd', operand: "embedding gradients", plant: |p| regroup(p, 0, Among::Replicas, vec![4, 0]) },
    Fault { name: "a part of a sum goes to another rank", mesh: HSDP, point: 'd', operand: "layers.0 gradients of a batch", plant: |p| {
        let e = edge(p, "layers.0 gradients of a batch"); reparts(p, 0, e, |parts| parts.swap(1, 2));
    } },
    Fault { name: "the last element of a sum goes to nobody", mesh: HSDP, point: 'd', operand: "layers.0 gradients of a batch", plant: |p| {
        let e = edge(p, "layers.0 gradients of a batch"); reparts(p, 0, e, |parts| { let last = parts.len() - 1; parts[last] = less_last(&parts[last]); });
    } },
    // Copies on `replicate`.
    Fault { name: "gradients of replicas are not summed", mesh: HSDP, point: 'c', operand: "layers.0 gradients", plant: |p| { let e = edge(p, "layers.0 gradients"); forget(p, e); } },
    Fault { name: "gradients of replicas are summed twice", mesh: HSDP, point: 'c', operand: "layers.0 gradients", plant: |p| { let e = edge(p, "layers.0 gradients"); double(p, e); } },
    Fault { name: "gradients are summed with a replica that has other elements", mesh: HSDP, point: 'd', operand: "embedding gradients", plant: |p| {
        let other = |rank: usize| (rank + 4) % 8 / 4 * 4 + (rank ^ 1) % 4;
        among_others(p, |e| of_elements(e, EdgeKind::AllReduce), move |_, rank| vec![rank.min(other(rank)), rank.max(other(rank))]);
    } },
    Fault { name: "a replica is counted twice", mesh: HSDP, point: 'd', operand: "embedding gradients", plant: |p| regroup(p, 0, Among::Replicas, vec![0, 4, 4]) },
    Fault { name: "a sum of replicas lacks one", mesh: [3, 2, 1, 1], point: 'd', operand: "embedding gradients", plant: |p| {
        among_others(p, |e| of_elements(e, EdgeKind::AllReduce), |_, rank| match rank { 4 | 5 => vec![rank], _ => vec![rank % 2, rank % 2 + 2] });
    } },
    // The stream over `tensor`.
    Fault { name: "a product reads the tokens of one rank of tensor", mesh: ALL, point: 'c', operand: "layers.0 attention normed, all tokens", plant: |p| {
        let e = edge(p, "layers.0 attention normed"); forget(p, e);
    } },
    Fault { name: "terms of heads are not summed", mesh: ALL, point: 'c', operand: "layers.0 middle", plant: |p| { let e = edge(p, "layers.0 attention, by head"); forget(p, e); } },
    Fault { name: "terms of columns are summed twice", mesh: ALL, point: 'c', operand: "layers.0 feed-forward, by column", plant: |p| { let e = edge(p, "layers.0 feed-forward, by column"); double(p, e); } },
    Fault { name: "a sum is taken for a gather", mesh: ALL, point: 'c', operand: "layers.0 attention, by head", plant: |p| { let e = edge(p, "layers.0 attention, by head"); edge_mut(p, e).kind = EdgeKind::AllGather; } },
    Fault { name: "a sum is given to all that each needs a part of", mesh: ALL, point: 'c', operand: "layers.0 attention, by head", plant: |p| { let e = edge(p, "layers.0 attention, by head"); edge_mut(p, e).kind = EdgeKind::AllReduce; } },
    Fault { name: "what is gathered is said to be cut", mesh: ALL, point: 'c', operand: "layers.0 attention normed, all tokens", plant: |p| {
        let e = edge(p, "layers.0 attention normed"); let edge = edge_mut(p, e);
        edge.to.axes[0].1 = vec![]; edge.to.axes[1].1 = edge.from.axes[1].1.clone(); edge.from.axes[0].1.clone_into(&mut edge.to.axes[0].1);
        edge.to.axes[1].1 = vec![MeshAxis::Context]; edge.to.axes[1].0 = Axis::Stream;
    } },
    Fault { name: "the stream is scattered over context", mesh: ALL, point: 'd', operand: "embeddings, by token id", plant: |p| {
        among_others(p, |e| e.kind == EdgeKind::ReduceScatter && matches!(e.moved, Moved::Tokens { .. }), |mesh, rank| mesh.group(rank, &[MeshAxis::Context]));
    } },
    Fault { name: "tokens of a slice are those of the next", mesh: ALL, point: 'c', operand: "layers.0 attention normed", plant: |p| {
        let e = edge(p, "layers.0 attention normed"); reparts(p, 0, e, |parts| parts.swap(0, 1));
    } },
    Fault { name: "a token of the stream is sent by two ranks", mesh: ALL, point: 'c', operand: "layers.0 attention normed", plant: |p| {
        let e = edge(p, "layers.0 attention normed"); reparts(p, 0, e, |parts| parts[1] = parts[1].union(&parts[0]));
    } },
    Fault { name: "ranks of tensor sum other tokens at a time", mesh: ALL, point: 'e', operand: "layers.0 attention, by head", plant: |p| {
        let e = edge(p, "layers.0 attention, by head");
        let calls = Arc::make_mut(&mut p.ranks[1].calls); let call = calls.iter_mut().find(|call| call.edge == e).unwrap();
        call.parts = Arc::new(call.parts.iter().rev().cloned().collect());
    } },
    Fault { name: "logits of one rank's token ids are taken for all", mesh: ALL, point: 'c', operand: "logits' sums", plant: |p| { let e = edge(p, "logits' maximum, sum and label, by token id"); forget(p, e); } },
    Fault { name: "gradients of copied norms are not summed", mesh: ALL, point: 'c', operand: "layers.0 gradients of a batch", plant: |p| { let e = edge(p, "layers.0 gradients of a batch"); forget(p, e); } },
    Fault { name: "gradients of copied norms are summed behind those of tokens", mesh: ALL, point: 'e', operand: "layers.0 gradients of a batch", plant: |p| {
        let e = edge(p, "layers.0 gradients of a batch"); let calls = Arc::make_mut(&mut p.ranks[3].calls);
        let at = calls.iter().position(|call| call.edge == e).unwrap(); calls.swap(at, at + 1);
    } },
    Fault { name: "a copied element is left out of the sum", mesh: ALL, point: 'd', operand: "layers.0 gradients of a batch", plant: |p| {
        let e = edge(p, "layers.0 gradients of a batch"); reparts(p, 0, e, |parts| parts.iter_mut().for_each(|part| *part = less_last(part)));
    } },
    Fault { name: "copies of key/value heads are summed over all ranks of tensor", mesh: COPIES, point: 'd', operand: "layers.2 gradients of a batch", plant: |p| {
        for rank in &mut p.ranks { let all = rank.groups[Among::Tensor as usize].clone(); rank.groups[Among::KvHolders as usize] = all; 
            let mut calls = (*rank.calls).clone();
            calls.iter_mut().filter(|c| c.among == Among::KvHolders).for_each(|c| c.parts = Arc::new(vec![c.parts[0].clone(); 8])); rank.calls = Arc::new(calls);
        }
    } },
    Fault { name: "a copy of key/value heads is not summed on one rank", mesh: COPIES, point: 'e', operand: "layers.0 gradients of a batch", plant: |p| {
        let e = p.edges().filter(|e| e.values[1] == "layers.0 gradients of a batch").nth(1).unwrap().number;
        Arc::make_mut(&mut p.ranks[5].calls).retain(|call| call.edge != e);
    } },
    // Sums of all ranks.
    Fault { name: "the norm is that of a rank", mesh: ALL, point: 'c', operand: "norm, loss, z-loss and labels of all", plant: |p| { let e = edge(p, "norm, loss, z-loss and labels"); forget(p, e); } },
    Fault { name: "the norm is summed over the ranks of parameters alone", mesh: ALL, point: 'd', operand: "norm, loss, z-loss and labels", plant: |p| {
        among_others(p, |e| e.moved == Moved::Totals, |mesh, rank| mesh.group(rank, &[MeshAxis::Shard, MeshAxis::Context]));
    } },
    Fault { name: "squares of a copied norm are counted on all ranks of tensor", mesh: ALL, point: 'd', operand: "norm", plant: |p| {
        for own in Arc::make_mut(&mut p.ranks[1].owned) { own.counted = own.elements.intersection(&Ranges::one(0..20)); }
    } },
    Fault { name: "squares are counted in each replica", mesh: HSDP, point: 'd', operand: "norm", plant: |p| { let own = p.ranks[0].owned.clone(); p.ranks[4].owned = own; } },
    Fault { name: "squares of a part are counted by nobody", mesh: HSDP, point: 'd', operand: "norm", plant: |p| Arc::make_mut(&mut p.ranks[1].owned)[1].counted = Ranges::default() },
    Fault { name: "labels are counted on every rank of tensor", mesh: ALL, point: 'd', operand: "loss", plant: |p| p.ranks[1].counts_tokens = true },
    Fault { name: "labels of a rank are counted by nobody", mesh: ALL, point: 'd', operand: "loss", plant: |p| p.ranks[2].counts_tokens = false },
    // The order.
    Fault { name: "one rank gathers in another order", mesh: HSDP, point: 'e', operand: "embedding weights", plant: |p| Arc::make_mut(&mut p.ranks[1].calls).swap(0, 1) },
    Fault { name: "two ranks wait for each other on two queues", mesh: ALL, point: 'e', operand: "layers.0 weights", plant: |p| {
        let (a, b) = (edge(p, "layers.0 weights"), edge(p, "embeddings, by token id")); assert!(b > a);
        let calls = Arc::make_mut(&mut p.ranks[6].calls);
        let [i, j] = [a, b].map(|e| calls.iter().position(|call| call.edge == e).unwrap()); calls[i..=j].rotate_left(1);
    } },
    Fault { name: "a rank sends once more at the end", mesh: HSDP, point: 'e', operand: "step", plant: |p| {
        let n = p.edges().count(); let calls = Arc::make_mut(&mut p.ranks[1].calls); let mut last = calls.last().unwrap().clone(); last.edge = n; calls.push(last);
    } },
    Fault { name: "a group is never updated", mesh: HSDP, point: 'd', operand: "layers.1 gradients", plant: |p| {
        for name in ["norm", "update"] { stage_mut(p, name).reads.retain(|read| read.value != "layers.1 gradients"); }
    } },
    Fault { name: "a mesh has another rank", mesh: HSDP, point: 'a', operand: "mesh", plant: |p| { let one = p.ranks[0].clone(); p.ranks.push(one); } },
];

#[test]
fn every_planted_fault_of_a_step_is_refused_with_the_right_operand() {
    let mut wrong = Vec::new();
    for Fault { name, mesh, plant, point, operand } in FAULTS {
        let sharding = sharding(*mesh, &MODEL);
        let mut shape = shape(&sharding, &MODEL);
        shape.batches = if *mesh == HSDP { 2 } else { 1 };
        let mut plan = StepPlan::new(&sharding, &shape).unwrap();
        plan.clone().prove().expect("it is right before");
        plant(&mut plan);
        match plan.prove() {
            Ok(_) => wrong.push(format!("{name}: proven")),
            Err(found) => {
                println!("{name}\n    {found}");
                if (found.point, found.operand.as_str()) != (*point, *operand) {
                    wrong.push(format!("{name}: wanted ({point}) {operand}, found {found}"));
                }
            }
        }
    }
    assert!(wrong.is_empty(), "{} of {}:\n{}", wrong.len(), FAULTS.len(), wrong.join("\n"));
}

#[test]
fn the_trained_elements_of_an_edge_are_those_of_its_group() {
    let plan = planned([1, 2, 1, 1]);
    let moved: Vec<_> = plan.edges().map(|edge| edge.moved).collect();
    assert!(moved.contains(&Moved::Elements { group: 1, trained: false }));
    assert!(moved.contains(&Moved::Elements { group: 1, trained: true }));
}
