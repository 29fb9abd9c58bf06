//! Plans: what every rank holds, receives, computes and returns, as data.
//!
//! A [`ShardPlan`] is made for a map, the masks of all layers and the shapes of a model. It has no
//! code: coordinates, ranges, layouts and transfers are all written down, so that
//! [`ShardPlan::prove`] can check each against the others. What runs takes a [`crate::ProvenPlan`]
//! only.

use std::collections::{HashMap, HashSet};
use std::fmt;
use std::ops::Range;
use std::str::FromStr;
use std::sync::Arc;

use foveate::tensor::ElementType;
use foveate::tensor::count::Count;
use serde::{Deserialize, Serialize};

use crate::arrays;
use crate::dispatch::Dispatch;
use crate::error::{ShardError, refused};
use crate::layout::{Cut, Lengths, ShardLayout, Sharding};
use crate::map::{Axis, Map};
use crate::mesh::{Mesh, MeshAxis};
use crate::permutation::{Permutation, order_of};
use crate::plane::{Planes, PlanesPart, Whole};
use crate::ranges::Ranges;

/// How keys and queries of different ranks of `context` meet. As text it is `gather`, `exchange` (in 2
/// stages), `exchange:0` to `exchange:4`, or `heads`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub enum Strategy {
    /// Every rank receives all keys.
    Gather,
    /// Every rank receives the keys that its queries need, in so many stages, 1 to 4; its own keys
    /// are computed on first. In none: attention begins when all have arrived, and joins no parts.
    Exchange(usize),
    /// All to all: every rank gives its tokens of most heads for all tokens of some heads.
    HeadsForTokens,
}

impl fmt::Display for Strategy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Gather => f.write_str("gather"),
            Self::Exchange(0) => f.write_str("exchange before attention"),
            Self::Exchange(stages) => write!(f, "exchange in {}", Count(*stages, "stage")),
            Self::HeadsForTokens => f.write_str("heads for tokens"),
        }
    }
}

impl FromStr for Strategy {
    type Err = ShardError;

    fn from_str(text: &str) -> Result<Self, ShardError> {
        let stages = |n: &str| n.parse().ok().filter(|n| *n <= MOST_STAGES);
        match text {
            "gather" => Ok(Self::Gather),
            "heads" => Ok(Self::HeadsForTokens),
            "exchange" => Ok(Self::Exchange(2)),
            _ => match text.strip_prefix("exchange:").and_then(stages) {
                Some(stages) => Ok(Self::Exchange(stages)),
                None => refused(format!(
                    "{text:?} is no strategy; gather, exchange, exchange:0 to \
                     exchange:{MOST_STAGES}, or heads is expected"
                )),
            },
        }
    }
}

impl TryFrom<String> for Strategy {
    type Error = ShardError;

    fn try_from(text: String) -> Result<Self, ShardError> {
        text.parse()
    }
}

impl From<Strategy> for String {
    fn from(strategy: Strategy) -> Self {
        match strategy {
            Strategy::Gather => "gather".to_owned(),
            Strategy::Exchange(stages) => format!("exchange:{stages}"),
            Strategy::HeadsForTokens => "heads".to_owned(),
        }
    }
}

/// Stages of an exchange at most.
const MOST_STAGES: usize = 4;

/// What carries bytes to a rank, in MB/s: by which time strategies are compared.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Links {
    /// Ranks that share a host.
    pub host_ranks: usize,
    /// From the others of its host.
    pub host: u64,
    /// From those of other hosts.
    pub network: u64,
    /// Its memory.
    pub memory: u64,
}

impl Default for Links {
    /// Those of eight GPUs a host, with NVLink within and 400 Gb/s for each between hosts.
    fn default() -> Self {
        Self { host_ranks: 8, host: 360_000, network: 40_000, memory: 3_240_000 }
    }
}

impl Links {
    /// Whether these ranks are on several hosts.
    fn are_apart(&self, ranks: &[usize]) -> bool {
        ranks.iter().any(|rank| rank / self.host_ranks != ranks[0] / self.host_ranks)
    }

    /// The ranks of each group of `context`; of groups of one `kind` that lie alike on hosts the first.
    fn groups(&self, mesh: &Mesh, kind: impl Fn(usize) -> usize) -> Vec<Vec<usize>> {
        let mut seen = HashSet::new();
        let unlike = |first: usize| {
            let group = mesh.group(first, &[MeshAxis::Context]);
            let host = |rank: &usize| rank / self.host_ranks - first / self.host_ranks;
            let is_first = group[0] == first;
            let hosts = || group.iter().map(host).collect::<Vec<_>>();
            (is_first && seen.insert((kind(first), hosts()))).then_some(group)
        };
        (0..mesh.ranks()).filter_map(unlike).collect()
    }

    /// Microseconds in which a rank receives bytes of others.
    fn micros(&self, rank: usize, parts: impl Iterator<Item = (usize, u64)>) -> f64 {
        let mut bytes = [0; 2];
        parts.for_each(|(peer, part)| bytes[usize::from(self.are_apart(&[rank, peer]))] += part);
        (bytes[0] as f64 / self.host as f64).max(bytes[1] as f64 / self.network as f64)
    }
}

/// Shapes of a model that masks do not know.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct ModelShape {
    /// Length of a query or key vector.
    pub dim: usize,
    /// Length of a value vector.
    pub dim_v: usize,
    /// Width of the residual stream.
    pub hidden: usize,
    /// Columns of the feed-forward block.
    pub ffn: usize,
    /// Entries of the vocabulary.
    pub vocab: usize,
    /// Type of q, k and v.
    pub element: ElementType,
}

/// What the planner is told besides.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct PlanOptions {
    /// The strategy; when it is `None` the one whose bytes arrive soonest, an exchange before attention where
    /// that is sooner than parts of it are joined.
    pub strategy: Option<Strategy>,
    /// Tokens of a chunk, a multiple of the tile; chosen when it is `None`.
    pub chunk: Option<usize>,
    /// What the bytes go by.
    pub links: Links,
}

/// Batch entries, heads and positions of the whole problem.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Cells {
    /// Batch entries.
    pub batch: Range<usize>,
    /// Query heads.
    pub heads: Range<usize>,
    /// Key/value heads.
    pub kv_heads: Range<usize>,
    /// Positions of queries; rows are ascending.
    pub q: Ranges,
    /// Positions of keys; rows are ascending.
    pub kv: Ranges,
}

impl Cells {
    /// True when there is no query or key of any batch entry and head.
    pub fn is_empty(&self) -> bool {
        self.batch.is_empty() || self.kv_heads.is_empty() || self.q.is_empty() && self.kv.is_empty()
    }
}

/// What one rank sends to another, as one value.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Part {
    /// The other rank, of the mesh.
    pub peer: usize,
    /// What of the operands: keys in a forward pass, queries too when heads are given for tokens, and
    /// the gradients of the same when they return.
    pub cells: Cells,
    /// The arrays that travel together.
    pub carries: Vec<&'static str>,
    /// Their bytes.
    pub bytes: u64,
}

/// An exchange and the attention that waits for it. Every rank has as many.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Stage {
    /// What leaves, by rank.
    pub sends: Vec<Part>,
    /// What arrives, by rank.
    pub receives: Vec<Part>,
    /// What is computed on: local rows are those of these cells, in their order. The first stage has all of
    /// the rank's queries, later ones those that see any of their keys.
    pub compute: Cells,
    /// What the mods are told of the local rows, heads and batch entries.
    pub coordinates: Cells,
    /// What the mods are told of the numbers of queries and keys.
    pub lengths: [usize; 2],
    /// True when the sink joins the denominator here.
    pub sink: bool,
}

/// What one rank holds and does.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct RankPlan {
    /// The layout of every array, by name: one list for all ranks.
    pub arrays: Arc<Vec<(&'static str, ShardLayout)>>,
    /// What it holds of q, k and v.
    pub own: Cells,
    /// What it computes.
    pub stages: Vec<Stage>,
    /// Gradients that leave after the backward pass, to the ranks that hold the operands.
    pub returns: Vec<Part>,
    /// Gradients that arrive from others.
    pub returned: Vec<Part>,
    /// Labels that it counts and whose loss it sums: batch entries and tokens.
    pub labels: (Range<usize>, Ranges),
    /// Ranks over which the gradients of what makes its keys and values are summed, because they hold the
    /// same key/value heads and other query heads of these; it among them.
    pub kv_copies: Vec<usize>,
}

/// What every rank of a mesh does.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ShardPlan {
    /// The map and the cuts that layouts follow from.
    pub sharding: Sharding,
    /// Sizes of the whole problem.
    pub whole: Whole,
    /// Shapes of the model.
    pub shape: ModelShape,
    /// How keys and queries meet.
    pub strategy: Strategy,
    /// Why this strategy.
    pub reason: String,
    /// The order of the tokens of rows, by part of `batch`.
    pub permutations: Vec<Permutation>,
    /// The ranks, in order.
    pub ranks: Vec<RankPlan>,
}

/// Arrays that travel with keys: all that is indexed by `kv`.
pub(crate) const WITH_KEYS: [&str; 3] = ["k", "v", "kv_positions"];
/// Arrays that travel with queries.
pub(crate) const WITH_QUERIES: [&str; 2] = ["q", "q_positions"];
/// Gradients that return to the owners of keys, and of queries.
pub(crate) const BACK: [&str; 2] = ["dk", "dv"];
pub(crate) const BACK_QUERIES: [&str; 1] = ["dq"];

/// Bytes of parts that carry these arrays.
pub(crate) fn part_bytes(shape: &ModelShape, cells: &Cells, carries: &[&str]) -> u64 {
    let (q, kv) = (cells.q.len(), cells.kv.len());
    let (heads, kv_heads) =
        (cells.batch.len() * cells.heads.len(), cells.batch.len() * cells.kv_heads.len());
    let stored = shape.element.bytes();
    let bytes = |name: &str| match name {
        "q" => q * heads * shape.dim * stored,
        "k" => kv * kv_heads * shape.dim * stored,
        "v" => kv * kv_heads * shape.dim_v * stored,
        "q_positions" => q * 4,
        "kv_positions" => kv * 4,
        // Gradients return in f32 and are rounded once, by the owner.
        "dq" => q * heads * shape.dim * 4,
        "dk" => kv * kv_heads * shape.dim * 4,
        "dv" => kv * kv_heads * shape.dim_v * 4,
        _ => 0,
    };
    carries.iter().map(|name| bytes(name) as u64).sum()
}

/// Bytes of the results of queries that go home where queries travelled: out and lse, in f32.
pub(crate) fn result_bytes(shape: &ModelShape, cells: &Cells) -> u64 {
    (cells.batch.len() * cells.heads.len() * cells.q.len() * 4 * (shape.dim_v + 1)) as u64
}

impl ShardPlan {
    /// Whether keys of any rank go to another one: not where ranks exchange heads for tokens.
    pub fn keys_travel(&self) -> bool {
        let mut stages = self.ranks.iter().flat_map(|rank| &rank.stages);
        self.strategy != Strategy::HeadsForTokens && stages.any(|stage| !stage.sends.is_empty())
    }

    /// The plan of a model with these masks on the mesh of `map`.
    ///
    /// # Errors
    /// When heads, tokens or the strategy cannot be cut over the mesh, with the counts that would do.
    pub fn new(
        map: &Map,
        planes: &Planes,
        shape: &ModelShape,
        options: PlanOptions,
    ) -> Result<Self, ShardError> {
        let whole = *planes.whole();
        if map.of(Axis::Seq) != [MeshAxis::Context] {
            return refused("attention is planned for tokens that go to `context`; map seq there");
        }
        let lengths = Lengths {
            batch: whole.batch,
            seq: whole.q_len,
            kv_seq: whole.kv_len,
            heads: whole.heads,
            kv_heads: whole.kv_heads,
            dim: shape.dim,
            dim_v: shape.dim_v,
            hidden: shape.hidden,
            ffn: shape.ffn,
            vocab: shape.vocab,
        };
        let sharding = Sharding::new(map.clone(), &lengths)?;
        let places = Places::new(&sharding, planes, options.chunk)?;
        let permutations: Vec<Permutation> =
            places.tokens.iter().map(|tokens| tokens.dispatch.permutation().clone()).collect();
        let first = places.tokens.first().expect("there is a part of the batch");
        let sharding = sharding
            .with_cut(Axis::Seq, first.dispatch.cut().clone())?
            .with_cut(Axis::KvSeq, first.kv_cut.clone())?
            .in_order(order_of(&permutations));
        let (strategy, reason) = choose(&sharding, &whole, shape, &options, &places)?;
        let mut plan = Self {
            sharding,
            whole,
            shape: shape.clone(),
            strategy,
            reason,
            permutations,
            ranks: Vec::new(),
        };
        let layout = |array: &arrays::Array| {
            Ok((array.name, array.layout_in(&plan.sharding, plan.shape.element)?))
        };
        let arrays = arrays::ATTENTION.iter().chain(arrays::MODEL).map(layout);
        let arrays = Arc::new(arrays.collect::<Result<Vec<_>, ShardError>>()?);
        plan.ranks =
            (0..map.mesh().ranks()).map(|rank| plan.rank(rank, planes, &places, &arrays)).collect();
        Ok(plan)
    }

    /// The order of the tokens of a rank's rows.
    ///
    /// # Panics
    /// When there is no such rank.
    pub fn permutation(&self, rank: usize) -> &Permutation {
        &self.permutations[self.sharding.map().part(Axis::Batch, rank)]
    }

    /// The ranks of a rank's `context` group, in order.
    pub(crate) fn context_group(&self, rank: usize) -> Vec<usize> {
        self.sharding.map().mesh().group(rank, &[MeshAxis::Context])
    }

    fn rank(
        &self,
        rank: usize,
        planes: &Planes,
        places: &Places,
        arrays: &Arc<Vec<(&'static str, ShardLayout)>>,
    ) -> RankPlan {
        let map = self.sharding.map();
        let tokens = &places.tokens[map.part(Axis::Batch, rank)];
        let needs = places.needs(map, rank);
        let (q, kv) = (&tokens.q, &tokens.kv);
        let mesh = map.mesh();
        let at = |axis| self.sharding.range(axis, rank);
        let c = mesh.index(rank, MeshAxis::Context);
        let group = self.context_group(rank);
        let own = Cells {
            batch: at(Axis::Batch),
            heads: at(Axis::Heads),
            kv_heads: at(Axis::KvHeads),
            q: q[c].clone(),
            kv: kv[c].clone(),
        };
        let keys = |tokens: Ranges| Cells { q: Ranges::default(), kv: tokens, ..own.clone() };
        let with_keys =
            |peer: usize, tokens: Ranges| self.part(group[peer], keys(tokens), &WITH_KEYS);
        let others = || (0..group.len()).filter(move |&o| o != c);
        let stage = |sends: Vec<Part>, receives: Vec<Part>, compute: Cells, sink| Stage {
            sends: sends.into_iter().filter(Part::is_needed).collect(),
            receives: receives.into_iter().filter(Part::is_needed).collect(),
            coordinates: compute.clone(),
            compute,
            lengths: [self.whole.q_len, self.whole.kv_len],
            sink,
        };
        let back = |peer: usize, tokens: Ranges| self.part(group[peer], keys(tokens), &BACK);
        let wants = |reader: usize| match self.strategy {
            Strategy::Gather => Ranges::one(0..self.whole.kv_len),
            _ => needs[reader].clone(),
        };
        let from = |owner: usize, reader: usize| wants(reader).intersection(&kv[owner]);
        let (stages, returns, returned);
        match self.strategy {
            Strategy::Gather | Strategy::Exchange(0) => {
                let sends = others().map(|o| with_keys(o, from(c, o))).collect();
                let receives = others().map(|o| with_keys(o, from(o, c))).collect();
                let all = kv[c].union(&wants(c));
                stages = vec![stage(sends, receives, Cells { kv: all, ..own.clone() }, true)];
                returns = others().map(|o| back(o, from(o, c))).collect::<Vec<_>>();
                returned = others().map(|o| back(o, from(c, o))).collect::<Vec<_>>();
            }
            Strategy::Exchange(number) => {
                let arrives =
                    |to: usize, s: usize| piece(&needs[to].difference(&kv[to]), s, number);
                let part = planes.part(&own.batch, &own.heads);
                let mut all = vec![stage(vec![], vec![], own.clone(), true)];
                for s in 0..number {
                    let mine = arrives(c, s);
                    let sends = others().map(|o| with_keys(o, arrives(o, s).intersection(&kv[c])));
                    let receives = others().map(|o| with_keys(o, mine.intersection(&kv[o])));
                    // Queries that see none of them would give nothing.
                    let q = part.seeing(&q[c], &mine);
                    let compute = Cells { q, kv: mine.clone(), ..own.clone() };
                    all.push(stage(sends.collect(), receives.collect(), compute, false));
                }
                stages = all;
                returns = others().map(|o| back(o, from(o, c))).collect();
                returned = others().map(|o| back(o, from(c, o))).collect();
            }
            Strategy::HeadsForTokens => {
                let swap = self.swapped(&own, &group, c, [q, kv]);
                stages = vec![stage(swap.sends, swap.receives, swap.compute, true)];
                (returns, returned) = (swap.returns, swap.returned);
            }
        }
        let first_of_tensor = mesh.index(rank, MeshAxis::Tensor) == 0;
        let labels = if first_of_tensor { own.q.clone() } else { Ranges::default() };
        RankPlan {
            arrays: Arc::clone(arrays),
            labels: (own.batch.clone(), labels),
            own,
            stages,
            returns: returns.into_iter().filter(Part::is_needed).collect(),
            returned: returned.into_iter().filter(Part::is_needed).collect(),
            kv_copies: self.kv_copies(rank),
        }
    }

    /// What rank `c` of a group gives and takes where heads are given for tokens: of `own`, which it holds, and the
    /// tokens of all, queries and keys.
    fn swapped(&self, own: &Cells, group: &[usize], c: usize, [q, kv]: [&[Ranges]; 2]) -> Swapped {
        let cut = Cut::even(own.kv_heads.len(), group.len());
        let per = self.whole.heads / self.whole.kv_heads;
        let cells = |heads_of: usize, tokens_of: Option<usize>| {
            let (part, first) = (cut.range(heads_of), own.kv_heads.start);
            let kv_heads = first + part.start..first + part.end;
            Cells {
                batch: own.batch.clone(),
                heads: kv_heads.start * per..kv_heads.end * per,
                kv_heads,
                q: tokens_of.map_or(Ranges::one(0..self.whole.q_len), |o| q[o].clone()),
                kv: tokens_of.map_or(Ranges::one(0..self.whole.kv_len), |o| kv[o].clone()),
            }
        };
        let there: Vec<_> = WITH_QUERIES.into_iter().chain(WITH_KEYS).collect();
        let back: Vec<_> = BACK_QUERIES.into_iter().chain(BACK).collect();
        let others = || (0..group.len()).filter(move |&o| o != c);
        let gives =
            |o: usize, moved: &[&'static str]| self.part(group[o], cells(o, Some(c)), moved);
        let takes =
            |o: usize, moved: &[&'static str]| self.part(group[o], cells(c, Some(o)), moved);
        Swapped {
            sends: others().map(|o| gives(o, &there)).collect(),
            receives: others().map(|o| takes(o, &there)).collect(),
            compute: cells(c, None),
            returns: others().map(|o| takes(o, &back)).collect(),
            returned: others().map(|o| gives(o, &back)).collect(),
        }
    }

    /// The ranks that hold a rank's key/value heads, and differ from it on the axes of heads alone.
    fn kv_copies(&self, rank: usize) -> Vec<usize> {
        let map = self.sharding.map();
        let group = map.mesh().group(rank, map.of(Axis::KvHeads));
        let copies = self.sharding.cut(Axis::KvHeads).copies(map.part(Axis::KvHeads, rank));
        group[copies].to_vec()
    }

    fn part(&self, peer: usize, cells: Cells, carries: &[&'static str]) -> Part {
        Part {
            peer,
            bytes: part_bytes(&self.shape, &cells, carries),
            carries: carries.to_vec(),
            cells,
        }
    }
}

/// Heads given for tokens.
struct Swapped {
    sends: Vec<Part>,
    receives: Vec<Part>,
    compute: Cells,
    returns: Vec<Part>,
    returned: Vec<Part>,
}

/// The tokens of some rows on the ranks of `context`.
struct Tokens {
    dispatch: Dispatch,
    kv_cut: Cut,
    q: Vec<Ranges>,
    kv: Vec<Ranges>,
}

impl Tokens {
    fn new(
        part: &PlanesPart<'_>,
        context: usize,
        chunk: Option<usize>,
    ) -> Result<Self, ShardError> {
        let dispatch = Dispatch::of_rows(part, context, chunk)?;
        let Whole { q_len, kv_len, .. } = *part.planes.whole();
        let q: Vec<Ranges> = (0..context).map(|c| Ranges::of(dispatch.tokens(c))).collect();
        // The keys of self-attention are the tokens themselves; others stay as they are.
        let (kv_cut, kv) = match q_len == kv_len {
            true => (dispatch.cut().clone(), q.clone()),
            false => {
                let cut = Cut::even(kv_len, context);
                let kv = (0..context).map(|c| Ranges::one(cut.range(c))).collect();
                (cut, kv)
            }
        };
        Ok(Self { dispatch, kv_cut, q, kv })
    }
}

/// Who has which tokens and needs which keys. Ranks that share rows share a permutation of their own; parts whose
/// masks are the same have the same one.
struct Places {
    /// By part of `batch`.
    tokens: Vec<Arc<Tokens>>,
    /// By part of `batch` and of `heads`: the keys that each rank of `context` needs.
    needs: Vec<Arc<Vec<Ranges>>>,
}

impl Places {
    fn new(sharding: &Sharding, planes: &Planes, chunk: Option<usize>) -> Result<Self, ShardError> {
        let context = sharding.map().mesh().size(MeshAxis::Context);
        let (batch, heads) = (sharding.cut(Axis::Batch), sharding.cut(Axis::Heads));
        let (mut found, mut needed) = (HashMap::new(), HashMap::new());
        let mut places = Self { tokens: vec![], needs: vec![] };
        for b in 0..batch.parts() {
            let rows = planes.part(&batch.range(b), &(0..planes.whole().heads));
            let tokens: Arc<Tokens> = match found.get(&rows.which) {
                Some(known) => Arc::clone(known),
                None => Arc::new(Tokens::new(&rows, context, chunk)?),
            };
            for h in 0..heads.parts() {
                let part = planes.part(&batch.range(b), &heads.range(h));
                let of_all = || tokens.q.iter().map(|q| part.needs_of(q)).collect::<Vec<_>>();
                let known = needed.entry([rows.which.clone(), part.which.clone()]);
                places.needs.push(Arc::clone(known.or_insert_with(|| Arc::new(of_all()))));
            }
            found.insert(rows.which, Arc::clone(&tokens));
            places.tokens.push(tokens);
        }
        Ok(places)
    }

    /// Microseconds in which the keys arrive that the rank needs whose arrive last, by the `bytes` of some keys; and the
    /// most keys that a rank needs of others.
    fn longest_exchange(
        &self,
        map: &Map,
        links: &Links,
        bytes: impl Fn(Ranges) -> u64,
    ) -> (f64, usize) {
        let heads = self.needs.len() / self.tokens.len();
        let place = |rank: usize| map.part(Axis::Batch, rank) * heads + map.part(Axis::Heads, rank);
        let (mut longest, mut most) = (0.0, 0);
        for group in links.groups(map.mesh(), place) {
            let place = place(group[0]);
            let (kv, apart) = (&self.tokens[place / heads].kv, links.are_apart(&group));
            for (c, needs) in self.needs[place].iter().enumerate() {
                let others = needs.difference(&kv[c]);
                most = others.len().max(most);
                let micros = if apart {
                    let of = |o: usize| (group[o], bytes(needs.intersection(&kv[o])));
                    links.micros(group[c], (0..group.len()).filter(|&o| o != c).map(of))
                } else {
                    bytes(others) as f64 / links.host as f64
                };
                longest = micros.max(longest);
            }
        }
        (longest, most)
    }

    /// The keys that each rank of `context` needs which has a rank's rows and heads.
    fn needs(&self, map: &Map, rank: usize) -> &[Ranges] {
        let heads = self.needs.len() / self.tokens.len();
        &self.needs[map.part(Axis::Batch, rank) * heads + map.part(Axis::Heads, rank)]
    }
}

impl Part {
    fn is_needed(&self) -> bool {
        !self.cells.is_empty()
    }
}

/// Piece `s` of `number` of about equal sizes, in order of position.
fn piece(ranges: &Ranges, s: usize, number: usize) -> Ranges {
    let wanted = Cut::even(ranges.len(), number).range(s);
    let (mut at, mut found) = (0, Vec::new());
    for range in ranges.as_slice() {
        let (from, to) = (wanted.start.max(at), wanted.end.min(at + range.len()));
        if from < to {
            found.push(range.start + from - at..range.start + to - at);
        }
        at += range.len();
    }
    Ranges::of(found)
}

/// The strategy and why.
fn choose(
    sharding: &Sharding,
    whole: &Whole,
    shape: &ModelShape,
    options: &PlanOptions,
    places: &Places,
) -> Result<(Strategy, String), ShardError> {
    // Every part of the batch has as many tokens on a rank.
    let Tokens { q, kv, .. } = &*places.tokens[0];
    let ranks = kv.len();
    // Of the ranks of `tensor`, the one with the fewest key/value heads.
    let kv_heads = whole.kv_heads / sharding.map().parts(Axis::KvHeads);
    let Links { host_ranks, host, network, memory } = options.links;
    if host_ranks == 0 || [host, network, memory].contains(&0) {
        return refused(format!("a number of {:?} is 0; give 1 or more", options.links));
    }
    match options.strategy {
        Some(Strategy::HeadsForTokens) if kv_heads == 0 => {
            return refused(
                "heads for tokens: there are fewer key/value heads than ranks of tensor; use exchange",
            );
        }
        Some(Strategy::Exchange(stages)) if stages > MOST_STAGES => {
            return refused(format!("exchange in {stages} stages; give 0 to {MOST_STAGES}"));
        }
        Some(Strategy::HeadsForTokens) if kv_heads < ranks => {
            return refused(format!(
                "heads for tokens: {} of a rank cannot be cut over {} of context; use {kv_heads} or \
                 fewer, or exchange",
                Count(kv_heads, "key/value head"),
                Count(ranks, "rank")
            ));
        }
        Some(strategy) => return Ok((strategy, "it was asked for".to_owned())),
        None if ranks == 1 => return Ok((Strategy::Gather, "one rank has all tokens".to_owned())),
        None => {}
    }
    // Of the first place on `tensor`, and of the part of the batch with the most rows.
    let batch = (0..places.tokens.len()).map(|b| sharding.cut(Axis::Batch).range(b).len());
    let batch = batch.max().unwrap_or(0);
    let group = whole.heads / whole.kv_heads;
    let cells = |kv_heads: usize, q: Ranges, kv: Ranges| Cells {
        batch: 0..batch,
        heads: 0..kv_heads * group,
        kv_heads: 0..kv_heads,
        q,
        kv,
    };
    let keys =
        |keys: Ranges| part_bytes(shape, &cells(kv_heads, Ranges::default(), keys), &WITH_KEYS);
    let (exchange, tokens) = places.longest_exchange(sharding.map(), &options.links, keys);
    let own_heads = Cut::even(kv_heads, ranks);
    let groups = options.links.groups(sharding.map().mesh(), |_| 0);
    let swapped = (0..ranks).flat_map(|c| {
        let bytes = |o: usize| {
            let tokens = cells(own_heads.range(c).len(), q[o].clone(), kv[o].clone());
            let results = cells(own_heads.range(o).len(), q[c].clone(), Ranges::default());
            part_bytes(shape, &tokens, &WITH_QUERIES)
                + part_bytes(shape, &tokens, &WITH_KEYS)
                + result_bytes(shape, &results)
        };
        let parts: Vec<_> = (0..ranks).filter(|&o| o != c).map(|o| (o, bytes(o))).collect();
        let links = &options.links;
        let micros = move |peers: &Vec<usize>| {
            links.micros(peers[c], parts.iter().map(|&(o, bytes)| (peers[o], bytes)))
        };
        groups.iter().map(micros)
    });
    let divides = kv_heads > 0 && kv_heads.is_multiple_of(ranks);
    let swapped = if divides { swapped.fold(0.0, f64::max) } else { f64::INFINITY };
    if swapped < exchange {
        let reason = format!(
            "the busiest rank waits {:.0} % of what it would for an exchange of needed keys",
            100.0 * swapped / exchange
        );
        return Ok((Strategy::HeadsForTokens, reason));
    }
    let reason = match divides {
        false if kv_heads == 0 => "ranks of tensor hold copies of key/value heads".to_owned(),
        true => "its keys arrive no later than heads given for tokens would".to_owned(),
        false => {
            let (kv_heads, ranks) = (Count(kv_heads, "key/value head"), Count(ranks, "rank"));
            format!("{kv_heads} cannot be divided over {ranks}")
        }
    };
    // Parts of attention are f32 in place of what is stored, and read again; those of later stages, of about as
    // many queries as there are keys, are joined.
    let queries = q.iter().map(Ranges::len).max().unwrap_or(0);
    let parts = 8 * (queries + 2 * queries.min(tokens));
    let joined = (batch * kv_heads * group * shape.dim_v * parts) as f64;
    let (stages, why) = if exchange <= joined / options.links.memory as f64 {
        (0, "the keys arrive sooner than parts of attention would be joined")
    } else {
        (2, "more keys arrive than parts of attention take to join")
    };
    Ok((Strategy::Exchange(stages), format!("{reason}; {why}")))
}
