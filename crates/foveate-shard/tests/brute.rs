//! A check of plans entry by entry, and its verdict beside the checker's on small random plans with
//! random faults.

use std::collections::{BTreeMap, BTreeSet};

use foveate::mask::Tile;
use foveate::mods::Head;
use foveate::tensor::{ElementType, random::Random};
use foveate::{Buffer, MaskMod, ScalarValue, masks};
use foveate_shard::{
    Axis, Cells, LayerMask, Limits, Map, Mesh, MeshAxis, ModelShape, Part, PlanOptions, Planes,
    Ranges, RankPlan, ShardPlan, Strategy, Whole,
};

type Entry = (usize, usize, usize);

fn positions(ranges: &Ranges) -> impl Iterator<Item = usize> + Clone + '_ {
    ranges.as_slice().iter().cloned().flatten()
}

/// (b, kv head, key) of cells.
fn keys(cells: &Cells) -> BTreeSet<Entry> {
    let heads = |b| cells.kv_heads.clone().map(move |h| (b, h));
    let pairs = cells.batch.clone().flat_map(heads);
    pairs.flat_map(|(b, h)| positions(&cells.kv).map(move |k| (b, h, k))).collect()
}

/// (b, head, query) of cells.
fn queries(cells: &Cells) -> BTreeSet<Entry> {
    let heads = |b| cells.heads.clone().map(move |h| (b, h));
    let pairs = cells.batch.clone().flat_map(heads);
    pairs.flat_map(|(b, h)| positions(&cells.q).map(move |q| (b, h, q))).collect()
}

fn lives(mask: &Option<MaskMod>, whole: &Whole, b: usize, h: usize, q: usize, kv: usize) -> bool {
    let head = Head {
        b: b as i32,
        h: h as i32,
        h_kv: (h * whole.kv_heads / whole.heads) as i32,
        q_len: whole.q_len as i32,
        kv_len: whole.kv_len as i32,
    };
    mask.as_ref().is_none_or(|m| {
        m.program().eval(&head.at(q as i32, kv as i32)).unwrap()[0] == ScalarValue::Bool(true)
    })
}

/// Nothing, or a word for what is wrong.
type Outcome = Result<(), String>;

fn fail(what: &str) -> Outcome {
    Err(what.to_owned())
}

/// How often each entry (b, h, q, kv) is computed.
type Computed = BTreeMap<(usize, usize, usize, usize), usize>;

/// What is wrong with a plan, entry by entry; `right` is one of the same problem that nobody
/// changed.
fn brute(plan: &ShardPlan, right: &ShardPlan, masks: &[Option<MaskMod>]) -> Outcome {
    let whole = right.whole;
    if plan.ranks.len() != right.ranks.len() || plan.whole != whole {
        return fail("ranks");
    }
    for (own, as_derived) in plan.ranks.iter().zip(&right.ranks) {
        if own.arrays != as_derived.arrays || own.own != as_derived.own {
            return fail("layouts");
        }
    }
    let stages = plan.ranks[0].stages.len();
    let mut computed = Computed::new();
    for rank in &plan.ranks {
        if rank.stages.len() != stages || rank.stages.iter().filter(|s| s.sink).count() != 1 {
            return fail("stages");
        }
        let read = reads(rank, &whole, &mut computed)?;
        if let Strategy::Exchange(_) = plan.strategy {
            needed(rank, &whole, masks)?;
        }
        returned(plan, rank, read)?;
    }
    let begun = plan.ranks.iter().flat_map(|rank| queries(&rank.stages[0].compute));
    let all = whole.batch * whole.heads * whole.q_len;
    if begun.collect::<BTreeSet<Entry>>().len() < all {
        return fail("queries");
    }
    covered(&whole, masks, &computed)?;
    labelled(plan, &whole)?;
    met(plan)?;
    sized(plan, right)
}

/// A rank's stages read what is there, and compute what they are told; gives what they read.
fn reads(
    rank: &RankPlan,
    whole: &Whole,
    computed: &mut Computed,
) -> Result<(BTreeSet<Entry>, BTreeSet<Entry>), String> {
    let fail = |what: &str| Err(what.to_owned());
    let (own_keys, own_queries) = (keys(&rank.own), queries(&rank.own));
    let (mut have_keys, mut have_queries) = (own_keys.clone(), own_queries.clone());
    let (mut read_keys, mut read_queries) = (BTreeSet::new(), BTreeSet::new());
    for stage in &rank.stages {
        if stage.compute != stage.coordinates || stage.lengths != [whole.q_len, whole.kv_len] {
            return fail("coordinates");
        }
        for part in &stage.sends {
            if !keys(&part.cells).is_subset(&own_keys)
                || !queries(&part.cells).is_subset(&own_queries)
            {
                return fail("sends what it does not hold");
            }
        }
        for part in &stage.receives {
            let complete = |names: &[&str]| names.iter().all(|n| part.carries.contains(n));
            if !part.cells.kv.is_empty() && !complete(&["k", "v", "kv_positions"])
                || !part.cells.q.is_empty() && !complete(&["q", "q_positions"])
            {
                return fail("carries");
            }
            have_keys.extend(keys(&part.cells));
            have_queries.extend(queries(&part.cells));
        }
        let (k, q) = (keys(&stage.compute), queries(&stage.compute));
        if !k.is_subset(&have_keys) || !q.is_subset(&have_queries) {
            return fail("not arrived");
        }
        for &(b, h, q) in &q {
            let h_kv = h * whole.kv_heads / whole.heads;
            if !stage.compute.kv_heads.contains(&h_kv) {
                return fail("heads");
            }
            for kv in positions(&stage.compute.kv) {
                *computed.entry((b, h, q, kv)).or_default() += 1;
            }
        }
        read_keys.extend(k);
        read_queries.extend(q);
    }
    Ok((read_keys, read_queries))
}

/// Some query of the rank's rows and heads sees each key that arrives, and each query of a stage but the first one
/// of its keys.
fn needed(rank: &RankPlan, whole: &Whole, masks: &[Option<MaskMod>]) -> Outcome {
    let Cells { batch, heads, .. } = &rank.own;
    let pairs = batch.clone().flat_map(|b| heads.clone().map(move |h| (b, h)));
    for part in rank.stages.iter().flat_map(|s| &s.receives) {
        for kv in positions(&part.cells.kv) {
            let rows = positions(&rank.own.q);
            let seen = pairs.clone().any(|(b, h)| {
                rows.clone().any(|q| masks.iter().any(|m| lives(m, whole, b, h, q, kv)))
            });
            if !seen {
                return fail("needless");
            }
        }
    }
    let begun = queries(&rank.stages[0].compute);
    for stage in rank.stages.iter().skip(1).filter(|stage| !stage.compute.is_empty()) {
        if !queries(&stage.compute).is_subset(&begun) {
            return fail("not begun");
        }
        for q in positions(&stage.compute.q) {
            let keys = positions(&stage.compute.kv);
            let sees = pairs.clone().any(|(b, h)| {
                keys.clone().any(|kv| masks.iter().any(|m| lives(m, whole, b, h, q, kv)))
            });
            if !sees {
                return fail("blind");
            }
        }
    }
    Ok(())
}

/// Gradients of what was read and is another's return to whom it belongs, once.
fn returned(
    plan: &ShardPlan,
    rank: &RankPlan,
    (read_keys, read_queries): (BTreeSet<Entry>, BTreeSet<Entry>),
) -> Outcome {
    let (own_keys, own_queries) = (keys(&rank.own), queries(&rank.own));
    let (mut back_keys, mut back_queries) = (BTreeSet::new(), BTreeSet::new());
    for part in &rank.returns {
        let Some(owner) = plan.ranks.get(part.peer) else { return fail("peer") };
        let (k, q) = (keys(&part.cells), queries(&part.cells));
        let complete = |names: &[&str]| names.iter().all(|n| part.carries.contains(n));
        if !k.is_empty() && !complete(&["dk", "dv"]) || !q.is_empty() && !complete(&["dq"]) {
            return fail("carries back");
        }
        if !k.is_subset(&keys(&owner.own)) || !q.is_subset(&queries(&owner.own)) {
            return fail("owner");
        }
        for (of, all) in [(k, &mut back_keys), (q, &mut back_queries)] {
            for entry in of {
                if !all.insert(entry) {
                    return fail("returns twice");
                }
            }
        }
    }
    if back_keys != &read_keys - &own_keys || back_queries != &read_queries - &own_queries {
        return fail("returns");
    }
    Ok(())
}

/// Every live entry is computed once.
fn covered(whole: &Whole, masks: &[Option<MaskMod>], computed: &Computed) -> Outcome {
    for b in 0..whole.batch {
        for q in 0..whole.q_len {
            for h in 0..whole.heads {
                for kv in 0..whole.kv_len {
                    let live = masks.iter().any(|m| lives(m, whole, b, h, q, kv));
                    let times = computed.get(&(b, h, q, kv)).copied().unwrap_or(0);
                    if live && times != 1 {
                        return fail("coverage");
                    }
                }
            }
        }
    }
    Ok(())
}

/// Every label is counted once.
fn labelled(plan: &ShardPlan, whole: &Whole) -> Outcome {
    let mut labels: BTreeMap<(usize, usize), usize> = BTreeMap::new();
    for rank in &plan.ranks {
        for b in rank.labels.0.clone() {
            positions(&rank.labels.1).for_each(|q| *labels.entry((b, q)).or_default() += 1);
        }
    }
    for (b, q) in (0..whole.batch).flat_map(|b| (0..whole.q_len).map(move |q| (b, q))) {
        if labels.remove(&(b, q)) != Some(1) {
            return fail("labels");
        }
    }
    if labels.is_empty() { Ok(()) } else { fail("labels outside") }
}

/// Sends meet receives, in every stage and on the way back.
fn met(plan: &ShardPlan) -> Outcome {
    let all = |of: &dyn Fn(usize) -> (Vec<Part>, Vec<Part>)| {
        let (mut sends, mut receives) = (Vec::new(), Vec::new());
        for rank in 0..plan.ranks.len() {
            let (sent, received) = of(rank);
            sends.extend(sent.into_iter().map(|p| {
                format!("{rank}>{} {p:?}", p.peer).replace(&format!("peer: {}", p.peer), "")
            }));
            receives.extend(received.into_iter().map(|p| {
                format!("{}>{rank} {p:?}", p.peer).replace(&format!("peer: {}", p.peer), "")
            }));
        }
        sends.sort();
        receives.sort();
        let pairs = |parts: &[String]| {
            parts.iter().map(|p| p.split(' ').next().unwrap().to_owned()).collect::<Vec<_>>()
        };
        let mut distinct = pairs(&sends);
        distinct.dedup();
        sends == receives && distinct.len() == sends.len()
    };
    let meets = (0..plan.ranks[0].stages.len()).all(|s| {
        all(&|r| (plan.ranks[r].stages[s].sends.clone(), plan.ranks[r].stages[s].receives.clone()))
    });
    if !meets || !all(&|r| (plan.ranks[r].returns.clone(), plan.ranks[r].returned.clone())) {
        return fail("sends and receives");
    }
    Ok(())
}

/// What is sent is as large as it was derived.
fn sized(plan: &ShardPlan, right: &ShardPlan) -> Outcome {
    if plan.ranks.iter().zip(&right.ranks).any(|(a, b)| {
        let bytes = |s: &[Part]| s.iter().map(|p| (p.peer, p.bytes)).collect::<Vec<_>>();
        a.stages.iter().zip(&b.stages).any(|(x, y)| {
            x.sends
                .iter()
                .zip(&y.sends)
                .any(|(p, r)| p.cells == r.cells && p.carries == r.carries && p.bytes != r.bytes)
                || bytes(&x.sends).len() != bytes(&x.sends).iter().collect::<BTreeSet<_>>().len()
        })
    }) {
        return fail("bytes");
    }
    Ok(())
}

/// One of many small masks.
fn mask(random: &mut Random, whole: &Whole) -> Option<MaskMod> {
    use foveate::mods::expr::{b, h, kv, q};
    let len = whole.q_len as i32;
    Some(match random.below(9) {
        0 => return None,
        1 => masks::causal(),
        2 => masks::sliding_window(1 + random.below(5) as i32).unwrap(),
        3 => {
            let longest = whole.q_len.max(whole.kv_len);
            let mut id = 0;
            let ids = (0..longest)
                .map(|_| {
                    id += i32::from(random.below(4) == 0);
                    id
                })
                .collect();
            masks::causal() & masks::document(&Buffer::vector("doc", ids)).unwrap()
        }
        4 => masks::prefix_lm(random.below(6) as i32).unwrap(),
        5 => masks::chunked(1 + random.below(6) as i32).unwrap(),
        6 => MaskMod::new((kv() + h() * 2).le(q() + b() * 3).dynamic()).unwrap(),
        7 => {
            let table =
                (0..whole.q_len * whole.kv_len).map(|_| i32::from(random.below(3) == 0)).collect();
            let table = Buffer::new("table", &[whole.q_len, whole.kv_len], table).unwrap();
            MaskMod::new(table.at([q(), kv()]).ne(0).dynamic()).unwrap()
        }
        _ => MaskMod::new((q() * 3 + kv()).lt(len).dynamic()).unwrap(),
    })
}

fn nudge(random: &mut Random, ranges: &Ranges, len: usize) -> Ranges {
    let at = random.below(len);
    let one = Ranges::one(at..at + 1 + random.below(2));
    match random.below(3) {
        0 => ranges.union(&one),
        1 => ranges.difference(&one),
        _ => Ranges::of(ranges.as_slice().iter().map(|r| r.start + 1..r.end + 1)),
    }
}

/// Changes something of a plan; sometimes nothing that matters.
fn disturb(random: &mut Random, plan: &mut ShardPlan) {
    let len = plan.whole.q_len;
    let r = random.below(plan.ranks.len());
    let other = random.below(plan.ranks.len());
    let others_q = plan.ranks[other].own.q.clone();
    let s = random.below(plan.ranks[r].stages.len());
    let rank = &mut plan.ranks[r];
    match random.below(13) {
        0 => {
            let kv = nudge(random, &rank.stages[s].compute.kv, len);
            rank.stages[s].compute.kv = kv.clone();
            rank.stages[s].coordinates.kv = kv;
        }
        1 => {
            let q = nudge(random, &rank.stages[s].compute.q, len);
            let one = random.below(2) == 0;
            for (number, stage) in rank.stages.iter_mut().enumerate() {
                if !one || number == s {
                    stage.compute.q = q.clone();
                    stage.coordinates.q = q.clone();
                }
            }
        }
        2 => rank.stages[s].coordinates.q = Ranges::one(0..rank.stages[s].compute.q.len()),
        3 => rank.stages[s].coordinates.kv = Ranges::one(0..rank.stages[s].compute.kv.len()),
        4 => drop(rank.stages.remove(s)),
        5 => rank.stages[s].lengths[1] = rank.own.kv.len(),
        6 => drop(rank.returns.pop()),
        7 => rank.labels.1 = nudge(random, &rank.labels.1, len),
        8 => rank.labels.1 = others_q,
        9 => {
            // A transfer that both sides forget.
            if let Some(part) = rank.stages[s].receives.pop() {
                plan.ranks[part.peer].stages[s].sends.retain(|p| p.peer != r);
            }
        }
        10 => {
            // A part that both sides make smaller or larger.
            if !rank.stages[s].receives.is_empty() {
                let i = random.below(rank.stages[s].receives.len());
                let mut part = rank.stages[s].receives[i].clone();
                part.cells.kv = nudge(random, &part.cells.kv, len);
                let per_key =
                    (part.cells.batch.len() * part.cells.kv_heads.len() * 8 * 4 + 4) as u64;
                let per_query =
                    (part.cells.batch.len() * part.cells.heads.len() * 4 * 4 + 4) as u64;
                part.bytes =
                    part.cells.kv.len() as u64 * per_key + part.cells.q.len() as u64 * per_query;
                let peer = part.peer;
                rank.stages[s].receives[i] = part.clone();
                part.peer = r;
                let sends = &mut plan.ranks[peer].stages[s].sends;
                *sends.iter_mut().find(|p| p.peer == r).unwrap() = part;
            }
        }
        11 => {
            // A part of several query heads, of which both sides forget one.
            let back = random.below(2) == 0;
            let parts = if back { &mut rank.returns } else { &mut rank.stages[s].receives };
            let Some(part) = parts.first_mut().filter(|part| part.cells.heads.len() > 1) else {
                return;
            };
            let Cells { batch, heads, q, .. } = &part.cells;
            part.bytes -= (batch.len() * q.len() * 4 * 4) as u64;
            part.cells.heads = match random.below(2) {
                0 => heads.start + 1..heads.end,
                _ => heads.start..heads.end - 1,
            };
            let (peer, part) = (part.peer, Part { peer: r, ..part.clone() });
            let of_peer = &mut plan.ranks[peer];
            let theirs = if back { &mut of_peer.returned } else { &mut of_peer.stages[s].sends };
            *theirs.iter_mut().find(|p| p.peer == r).unwrap() = part;
        }
        _ => rank.stages[s].sink = !rank.stages[s].sink,
    }
}

#[test]
fn the_verdict_is_that_of_a_check_entry_by_entry() {
    let (mut right, mut wrong) = (0, 0);
    for seed in 0..3000 {
        let mut random = Random::new(seed);
        let kv_heads = 2 + 2 * random.below(2);
        let q_len = 4 + random.below(9);
        let whole = Whole {
            batch: 1 + random.below(3),
            heads: kv_heads * (1 + random.below(2)),
            kv_heads,
            q_len,
            kv_len: if random.below(3) == 0 { 1 + random.below(12) } else { q_len },
        };
        let masks: Vec<_> = (0..1 + random.below(2)).map(|_| mask(&mut random, &whole)).collect();
        let layers: Vec<_> =
            masks.iter().map(|m| LayerMask { mask: m.clone(), layers: 1 }).collect();
        let Ok(planes) = Planes::new(whole, &layers, Tile { q: 1, kv: 1 }) else {
            panic!("seed {seed}: {:?}", Planes::new(whole, &layers, Tile { q: 1, kv: 1 }).err())
        };
        let mesh =
            [1 + random.below(2), 1 + random.below(2), 1 + random.below(4), 1 + random.below(2)];
        let strategies =
            [Strategy::Gather, Strategy::Exchange(random.below(5)), Strategy::HeadsForTokens];
        let mut strategy = strategies[random.below(3)];
        if kv_heads / mesh[3] < mesh[2] && strategy == Strategy::HeadsForTokens {
            strategy = Strategy::Gather;
        }
        let shape =
            ModelShape { dim: 4, dim_v: 4, hidden: 8, ffn: 8, vocab: 9, element: ElementType::F32 };
        let map = Map::new(Mesh::new(mesh).unwrap());
        let map = if random.below(4) == 0 {
            map.with(Axis::Elements, &[MeshAxis::Shard, MeshAxis::Context]).unwrap()
        } else {
            map
        };
        let options = PlanOptions { strategy: Some(strategy), ..PlanOptions::default() };
        let plan = ShardPlan::new(&map, &planes, &shape, options).unwrap();
        assert_eq!(brute(&plan, &plan, &masks), Ok(()), "seed {seed}: a plan as it was made");
        let mut changed = plan.clone();
        for _ in 0..random.below(3) {
            disturb(&mut random, &mut changed);
            if changed.ranks.iter().any(|r| r.stages.is_empty()) {
                break;
            }
        }
        if changed.ranks.iter().any(|r| r.stages.is_empty()) {
            continue;
        }
        let wanted = brute(&changed, &plan, &masks);
        let found = changed.prove(&planes, &Limits::default()).map(|_| ());
        match (&wanted, &found) {
            (Ok(()), Ok(())) => right += 1,
            (Err(_), Err(_)) => wrong += 1,
            _ => panic!(
                "seed {seed}, {mesh:?}, {strategy}: entry by entry {wanted:?}, the checker {found:?}"
            ),
        }
    }
    println!("{right} right plans and {wrong} wrong ones");
    assert!(right > 500 && wrong > 500, "{right} right plans and {wrong} wrong ones");
}
