//! Attention on one rank of a proven plan, on the CPU.
//!
//! Forward: for each stage keys, values and positions arrive as one value, the stage's attention runs
//! in f32 with global coordinates, and its result joins those before by `lse`, in order of stage.
//! Backward: one pass over the keys of all stages. Stages are not needed there: the weights of a row
//! follow from its `lse`, and rows with a large `lse` are normalised over all of the row's keys at
//! once. Gradients of keys return to the ranks that hold them, which sum them in order of rank in f32
//! and round once.

mod backward;

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;

use foveate::mods::Program;
use foveate::tensor::ElementType;
use foveate::{
    AnyBuffer, Attention, Buffer, BufferData, Coordinates, DType, Data, Device, Layout, Plan,
    Positions, Problem, Tensor, TensorMut,
};

use crate::arrays;
use crate::check::ProvenPlan;
use crate::collectives::{Collectives, agree};
use crate::error::{ShardError, refused};
use crate::layout::{ShardLayout, Sharded};
use crate::mesh::MeshAxis;
use crate::plan::{Cells, Part, RankPlan, ShardPlan, Stage};
use crate::ranges::Ranges;
use crate::table::{Rows, Table, elements};

/// Attention of one layer on one rank: see [`RankAttention::new`].
pub struct RankAttention {
    planned: PlannedAttention,
    context: Box<dyn Collectives>,
    /// Ranks with the same heads: they sum the gradient of the sink.
    same_heads: Box<dyn Collectives>,
    world: Box<dyn Collectives>,
    /// Whether the gradients of sink and captured buffers are summed over ranks.
    sums: bool,
}

/// Attention of one layer, planned for one rank, which has met no other: see [`RankAttention::of`].
#[derive(Clone)]
pub struct PlannedAttention {
    proven: Arc<ProvenPlan>,
    rank: usize,
    dtype: DType,
    /// Ranks of the mesh in the context group, in order.
    members: Vec<usize>,
    /// By stage; `None` where there is nothing to compute.
    stages: Vec<Option<Plan>>,
    /// Over the keys of all stages.
    joint: Plan,
    joint_cells: Cells,
    has_sink: bool,
    statement: Statement,
}

/// What a rank states of attention before it first runs, for a comparison with the other ranks.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Statement {
    /// Ranks of the plan's mesh.
    ranks: usize,
    fields: Vec<(&'static str, u64)>,
}

impl Statement {
    /// Compares what this rank states with what the other ranks of `world` do, in one exchange. All ranks
    /// call it.
    ///
    /// # Errors
    /// When ranks differ in a plan, a mask, a score or dropout, or the group has another number of ranks
    /// than a plan.
    pub fn agree(all: &[Self], world: &dyn Collectives) -> Result<(), ShardError> {
        all.iter().try_for_each(|statement| runs_all(world, statement.ranks))?;
        let fields: Vec<_> = all.iter().flat_map(|of| of.fields.iter().copied()).collect();
        agree(world, &fields)
    }
}

/// Whether `world` has as many ranks as a plan.
fn runs_all(world: &dyn Collectives, planned: usize) -> Result<(), ShardError> {
    match world.ranks() {
        runs if runs == planned => Ok(()),
        runs => refused(format!("{runs} ranks run a plan of {planned}; start {planned}")),
    }
}

/// What a forward pass gives on a rank.
#[derive(Debug)]
pub struct RankForward {
    /// `[batch, heads, seq, dim]` of the rank, in the type of the operands.
    pub out: Sharded<Tensor>,
    /// `[batch, heads, seq]` of the rank, f32.
    pub lse: Sharded<Tensor<3>>,
    /// Operands of everything that the rank computes, and its results, for the backward pass.
    saved: Saved,
}

#[derive(Debug)]
struct Saved {
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Table<f32>,
    lse: Table<f32>,
}

/// What a backward pass gives on a rank.
#[derive(Debug)]
pub struct RankGradients {
    /// Gradient of the rank's q.
    pub dq: Sharded<Tensor>,
    /// Gradient of the rank's k, summed over all ranks that read it.
    pub dk: Sharded<Tensor>,
    /// Gradient of the rank's v, summed over all ranks that read it.
    pub dv: Sharded<Tensor>,
    /// Gradient of the sink of the rank's heads, summed over all tokens and batch entries, unless the
    /// attention is [`RankAttention::without_sums`].
    pub d_sink: Option<Vec<f32>>,
    /// Gradients of learned captured buffers, summed over all ranks with the same exception.
    pub captures: BTreeMap<String, Vec<f32>>,
}

impl std::fmt::Debug for RankAttention {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("RankAttention").field("rank", &self.planned.rank).finish_non_exhaustive()
    }
}

impl std::fmt::Debug for PlannedAttention {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("PlannedAttention").field("rank", &self.rank).finish_non_exhaustive()
    }
}

impl PlannedAttention {
    /// Attention of a layer with `program` on rank `rank` of the plan's mesh. `sink` has a logit for each
    /// query head of the whole problem. It needs no other rank.
    ///
    /// # Errors
    /// Those of [`ProvenPlan::states`], and a program that cannot be planned.
    pub fn new(
        proven: &Arc<ProvenPlan>,
        rank: usize,
        program: &Attention,
        sink: Option<&[f32]>,
    ) -> Result<Self, ShardError> {
        let statement = proven.states(program, sink)?;
        let plan = proven.plan();
        let Some(own) = plan.ranks.get(rank) else {
            let planned = plan.ranks.len();
            return refused(format!(
                "a plan of {planned} ranks has no rank {rank}; start {planned}"
            ));
        };
        let dtype = dtype_of(plan.shape.element)?;
        let compiled = |stage: &Stage, cells: &Cells, sink: Option<&[f32]>| {
            let problem = Problem::shaped(
                dtype,
                q_shape(plan, cells),
                k_shape(plan, cells),
                v_shape(plan, cells),
            );
            let mut problem = problem.map_err(of)?;
            if let Some(sink) = sink {
                problem = problem.sink(&sink[cells.heads.clone()]).map_err(of)?;
            }
            let told = Cells { kv: cells.kv.clone(), ..stage.coordinates.clone() };
            let coordinates = coordinates(&told, stage.lengths)?;
            program.clone().coordinates(coordinates).plan(&problem, &Device::cpu()).map_err(of)
        };
        let nothing =
            |cells: &Cells| cells.batch.is_empty() || cells.heads.is_empty() || cells.q.is_empty();
        let mut stages = Vec::new();
        for stage in &own.stages {
            let sink = sink.filter(|_| stage.sink);
            let needed = !nothing(&stage.compute) && (!stage.compute.kv.is_empty() || stage.sink);
            stages.push(needed.then(|| compiled(stage, &stage.compute, sink)).transpose()?);
        }
        let Some(first) = own.stages.first() else {
            return refused(format!("rank {rank} has no stage"));
        };
        let all = own.stages.iter().fold(Ranges::default(), |all, s| all.union(&s.compute.kv));
        let joint_cells = Cells { kv: all, ..first.compute.clone() };
        Ok(Self {
            joint: compiled(first, &joint_cells, sink)?,
            joint_cells,
            proven: Arc::clone(proven),
            rank,
            dtype,
            members: plan.context_group(rank),
            stages,
            has_sink: sink.is_some(),
            statement,
        })
    }
}

impl RankAttention {
    /// Attention of a layer with `program` on this rank of `world`, whose ranks are those of the
    /// plan's mesh. `sink` has a logit for each query head of the whole problem. All ranks call it,
    /// and compare their plans first.
    ///
    /// # Errors
    /// When the mask of `program` is none that the plan was proven for, ranks differ in the plan, the
    /// mask, the score or dropout, the group has another number of ranks, or the program cannot be
    /// planned.
    pub fn new(
        world: &dyn Collectives,
        proven: &Arc<ProvenPlan>,
        program: &Attention,
        sink: Option<&[f32]>,
    ) -> Result<Self, ShardError> {
        runs_all(world, proven.plan().ranks.len())?;
        let planned = PlannedAttention::new(proven, world.rank(), program, sink)?;
        Ok(Self::of(&[planned], world)?.remove(0))
    }

    /// Attention of several layers as it was planned for this rank of `world`. All ranks call it, and
    /// compare all plans first, in one exchange.
    ///
    /// # Errors
    /// Those of [`Statement::agree`].
    pub fn of(
        planned: &[PlannedAttention],
        world: &dyn Collectives,
    ) -> Result<Vec<Self>, ShardError> {
        let statements: Vec<_> = planned.iter().map(|of| of.statement.clone()).collect();
        Statement::agree(&statements, world)?;
        let everyone: Vec<usize> = (0..world.ranks()).collect();
        let with_heads = [MeshAxis::Replicate, MeshAxis::Shard, MeshAxis::Context];
        let attention = |planned: &PlannedAttention| {
            let mesh = planned.proven.plan().sharding.map().mesh();
            Ok(Self {
                context: world.subgroup(&planned.members)?,
                same_heads: world.subgroup(&mesh.group(planned.rank, &with_heads))?,
                world: world.subgroup(&everyone)?,
                planned: planned.clone(),
                sums: true,
            })
        };
        planned.iter().map(attention).collect()
    }

    /// Leaves the gradients of sink and captured buffers what this rank's queries give, for a caller
    /// that sums the gradients of all parameters over the ranks.
    #[must_use]
    pub fn without_sums(self) -> Self {
        Self { sums: false, ..self }
    }

    /// Takes other values of a buffer that the score captures, such as those that a layer learned. A
    /// backward pass needs those of its forward pass.
    ///
    /// # Errors
    /// When the score captures no such buffer, or one of another shape, or a mask does, which the plan
    /// was proven for.
    pub fn bind(&mut self, buffer: &AnyBuffer) -> Result<(), ShardError> {
        let mut masks = self.planned.proven.masks().iter().flatten();
        let name = buffer.name();
        if masks.any(|mask| mask.program().graph().buffers().iter().any(|b| b.name() == name)) {
            return refused(format!("a mask reads `{name}`; plan with its other values"));
        }
        for plan in self.planned.stages.iter_mut().flatten().chain([&mut self.planned.joint]) {
            *plan = plan.rebind(buffer).map_err(of)?;
        }
        Ok(())
    }

    fn plan(&self) -> &ShardPlan {
        self.planned.proven.plan()
    }

    fn own(&self) -> &RankPlan {
        &self.plan().ranks[self.planned.rank]
    }

    /// Computes attention of the rank's queries. All ranks call it.
    ///
    /// # Errors
    /// When an operand's layout is not the one that the map gives, or a transfer fails; then on all
    /// ranks.
    pub fn forward(
        &self,
        q: &Sharded<Tensor>,
        k: &Sharded<Tensor>,
        v: &Sharded<Tensor>,
    ) -> Result<RankForward, ShardError> {
        let (plan, own) = (self.plan(), self.own());
        let mut queries = vec![self.table("q", q, Rows::queries(&own.own))?];
        let mut keys = vec![self.table("k", k, Rows::keys(&own.own))?];
        let mut values = vec![self.table("v", v, Rows::keys(&own.own))?];
        let first = &own.stages[0].compute;
        let width = plan.shape.dim_v;
        let mut out = Table::<f32>::zeros(Rows::queries(first), width);
        let mut lse = Table::zeros(Rows::queries(first), 1);
        lse.elems_mut().fill(f32::NEG_INFINITY);
        for (number, stage) in own.stages.iter().enumerate() {
            let moves = |r: &usize| !plan.ranks[*r].stages[number].sends.is_empty();
            if self.planned.members.iter().any(moves) {
                let send = |part: &Part| {
                    pack(part, &[("q", &queries[0]), ("k", &keys[0]), ("v", &values[0])])
                };
                for (part, bytes) in self.exchange(&stage.sends, &stage.receives, send)? {
                    let mut parts = Unpacked { bytes, at: 0 };
                    let (of_q, of_kv) = (Rows::queries(&part.cells), Rows::keys(&part.cells));
                    if part.carries.contains(&"q") {
                        queries.push(parts.table(of_q, queries[0].width())?);
                        parts.positions(part, &part.cells.q)?;
                    }
                    keys.push(parts.table(of_kv.clone(), keys[0].width())?);
                    values.push(parts.table(of_kv, values[0].width())?);
                    parts.positions(part, &part.cells.kv)?;
                }
            }
            let Some(compiled) = &self.planned.stages[number] else { continue };
            let [q, k, v] = self.operands(&stage.compute, [&queries, &keys, &values])?;
            let mut part_out = Table::zeros(Rows::queries(&stage.compute), width);
            let mut part_lse = Table::zeros(Rows::queries(&stage.compute), 1);
            let [b, h, s] = part_out.shape();
            let to = TensorMut::from_slice(part_out.elems_mut(), [b, h, s, plan.shape.dim_v]);
            let lse_to = TensorMut::from_slice(part_lse.elems_mut(), [b, h, s]);
            let (to, lse_to) = (to.map_err(of)?, lse_to.map_err(of)?);
            compiled.forward_call(&q, &k, &v).write_to(to, lse_to).map_err(of)?;
            out.join(&mut lse, &part_out, &part_lse);
        }
        let [q, k, v] = self.operands(&self.planned.joint_cells, [&queries, &keys, &values])?;
        // Queries of others are computed here where heads were given for tokens: their results go
        // home, and those of the rank's own come from others.
        let mut own_out = out.take(Rows::queries(&own.own));
        let mut own_lse = lse.take(Rows::queries(&own.own));
        if self.moves_queries() {
            let send = |part: &Part| {
                let rows = Rows::queries(&part.cells);
                [out.take(rows.clone()).bytes(), lse.take(rows).bytes()].concat()
            };
            for (part, bytes) in self.exchange(&own.returns, &own.returned, send)? {
                let mut parts = Unpacked { bytes, at: 0 };
                let rows = Rows::queries(&part.cells);
                own_out.copy_from(&parts.table(rows.clone(), width)?);
                own_lse.copy_from(&parts.table(rows, 1)?);
            }
        }
        let [b, h, s] = own_lse.shape();
        let lse_tensor = Tensor::from_vec(own_lse.elems().to_vec(), [b, h, s]).map_err(of)?;
        let lse_sharded = Sharded::new(
            "lse",
            lse_tensor,
            &[b, h, s],
            self.layout("lse")?,
            plan.sharding.map(),
            self.planned.rank,
        )?;
        Ok(RankForward {
            out: self.sharded("out", rounded(&own_out, plan.shape.dim_v, self.planned.dtype)?)?,
            lse: lse_sharded,
            saved: Saved { q, k, v, out, lse },
        })
    }

    /// True when queries travel, as they do when heads are given for tokens.
    fn moves_queries(&self) -> bool {
        let moves = |s: &Stage| s.sends.iter().chain(&s.receives).any(|p| p.carries.contains(&"q"));
        let of = |r: &usize| self.plan().ranks[*r].stages.iter().any(moves);
        self.planned.members.iter().any(of)
    }

    /// Sends each part and returns what arrived, in order of rank.
    fn exchange<'a>(
        &self,
        sends: &[Part],
        receives: &'a [Part],
        pack: impl Fn(&Part) -> Vec<u8>,
    ) -> Result<Vec<(&'a Part, Vec<u8>)>, ShardError> {
        let place = |peer: usize| {
            self.planned.members.iter().position(|&m| m == peer).expect("it is proven")
        };
        let mut parts = vec![Vec::new(); self.planned.members.len()];
        for part in sends {
            parts[place(part.peer)] = pack(part);
        }
        let mut received = self.context.exchange(parts)?;
        let mut found: Vec<(&Part, Vec<u8>)> = receives
            .iter()
            .map(|part| (part, std::mem::take(&mut received[place(part.peer)])))
            .collect();
        found.sort_by_key(|(part, _)| part.peer);
        Ok(found)
    }

    /// q, k and v of some cells, from the tables that hold them.
    fn operands(&self, cells: &Cells, from: [&[Table<u8>]; 3]) -> Result<[Tensor; 3], ShardError> {
        let shape = &self.plan().shape;
        let gather = |rows: Rows, from: &[Table<u8>], dim: usize| {
            let mut table = Table::zeros(rows, from[0].width());
            from.iter().for_each(|other| table.copy_from(other));
            tensor(&table, dim, self.planned.dtype)
        };
        Ok([
            gather(Rows::queries(cells), from[0], shape.dim)?,
            gather(Rows::keys(cells), from[1], shape.dim)?,
            gather(Rows::keys(cells), from[2], shape.dim_v)?,
        ])
    }

    /// The layout of an array that the map gives.
    fn layout(&self, name: &str) -> Result<ShardLayout, ShardError> {
        let array = arrays::by_name(name).expect("attention's arrays are listed");
        array.layout_in(&self.plan().sharding, self.plan().shape.element)
    }

    /// The rows of an operand, once its layout is the one that the map gives.
    fn table(
        &self,
        name: &str,
        operand: &Sharded<Tensor>,
        rows: Rows,
    ) -> Result<Table<u8>, ShardError> {
        let tensor = operand.expect(name, &self.layout(name)?)?;
        let width = tensor.shape()[3] * self.planned.dtype.bytes();
        let contiguous = match *tensor.layout() == Layout::contiguous(tensor.shape()) {
            true => tensor.clone(),
            false => {
                Tensor::from_fn(self.planned.dtype, tensor.shape(), |at| tensor.view().get_f64(at))
            }
        };
        let bytes: &[u8] = match contiguous.data() {
            Data::F32(v) => bytemuck::cast_slice(v),
            Data::F16(v) => bytemuck::cast_slice(v),
            Data::BF16(v) => bytemuck::cast_slice(v),
            Data::F8E4M3(v) => bytemuck::cast_slice(v),
            Data::F64(v) => bytemuck::cast_slice(v),
        };
        let wanted = rows.len() * width;
        Table::of_bytes(rows, width, &bytes[..wanted.min(bytes.len())])
    }

    fn sharded(&self, name: &str, tensor: Tensor) -> Result<Sharded<Tensor>, ShardError> {
        let shape = tensor.shape();
        Sharded::new(
            name,
            tensor,
            &shape,
            self.layout(name)?,
            self.plan().sharding.map(),
            self.planned.rank,
        )
    }
}

impl ProvenPlan {
    /// What a rank states of attention with `program` by this plan, before it first runs. `sink` has a logit
    /// for each query head of the whole problem.
    ///
    /// # Errors
    /// When the mask of `program` is none that the plan was proven for, or the sink has not a logit for each
    /// head.
    pub fn states(
        &self,
        program: &Attention,
        sink: Option<&[f32]>,
    ) -> Result<Statement, ShardError> {
        let plan = self.plan();
        let mesh = plan.sharding.map().mesh();
        if !self.masks().iter().any(|mask| mask.as_ref() == program.get_mask()) {
            return refused(
                "the mask of the program is none of those that the plan was proven for; plan with it",
            );
        }
        if let Some(sink) = sink.filter(|s| s.len() != plan.whole.heads) {
            let (logits, heads) = (sink.len(), plan.whole.heads);
            return refused(format!("sink: {logits} logits for {heads} query heads; give all"));
        }
        let hash = |program: Option<&Program>| program.map_or(0, program_hash);
        let dropout = program.get_dropout().map(|d| d.keep_mask().program());
        let sink = sink.iter().flat_map(|s| s.iter().map(|x| x.to_bits().into()));
        let fields = vec![
            ("version", crate::hash::bytes(env!("CARGO_PKG_VERSION").bytes())),
            ("mesh", crate::hash::bytes(mesh.to_string().bytes())),
            ("map", crate::hash::bytes(plan.sharding.map().to_string().bytes())),
            ("lengths", crate::hash::bytes(format!("{:?}", plan.whole).bytes())),
            ("permutation", crate::hash::bytes(format!("{:?}", plan.permutations).bytes())),
            ("dtype", plan.shape.element as u64),
            ("plan", self.proof().plan_hash),
            ("mask", hash(program.get_mask().map(|m| m.program()))),
            ("score", hash(program.get_score().map(|s| s.program()))),
            ("dropout", hash(dropout)),
            ("sink", crate::hash::words(sink)),
        ];
        Ok(Statement { ranks: mesh.ranks(), fields })
    }
}

/// Parts of what another rank sent, in order.
struct Unpacked {
    bytes: Vec<u8>,
    at: usize,
}

impl Unpacked {
    fn take(&mut self, len: usize) -> Result<&[u8], ShardError> {
        let Some(bytes) = self.bytes.get(self.at..self.at + len) else {
            let (has, wants) = (self.bytes.len(), self.at + len);
            return refused(format!("{has} bytes arrived where {wants} are planned"));
        };
        self.at += len;
        Ok(bytes)
    }

    fn table<T: bytemuck::Pod>(
        &mut self,
        rows: Rows,
        width: usize,
    ) -> Result<Table<T>, ShardError> {
        let bytes = self.take(rows.len() * width * size_of::<T>())?;
        Table::of_bytes(rows, width, bytes)
    }

    /// The positions that came with rows are those of the plan.
    fn positions(&mut self, part: &Part, planned: &Ranges) -> Result<(), ShardError> {
        let bytes = self.take(planned.len() * size_of::<i32>())?;
        if bytes != packed_positions(planned) {
            let peer = part.peer;
            return refused(format!("rank {peer} sent other positions than {planned}"));
        }
        Ok(())
    }
}

fn packed_positions(ranges: &Ranges) -> Vec<u8> {
    let positions = ranges.as_slice().iter().cloned().flatten();
    positions.flat_map(|p| (p as i32).to_le_bytes()).collect()
}

/// The bytes of a part: rows, then positions, of queries and then of keys.
fn pack(part: &Part, tables: &[(&str, &Table<u8>)]) -> Vec<u8> {
    let mut bytes = Vec::with_capacity(part.bytes as usize);
    for (name, positions) in [("q", &part.cells.q), ("k", &part.cells.kv), ("v", &part.cells.kv)] {
        if !part.carries.contains(&name) {
            continue;
        }
        let rows = if name == "q" { Rows::queries(&part.cells) } else { Rows::keys(&part.cells) };
        let table = tables.iter().find(|(of, _)| *of == name).expect("all three are there").1;
        bytes.extend(table.take(rows).bytes());
        if name != "k" {
            bytes.extend(packed_positions(positions));
        }
    }
    bytes
}

fn q_shape(plan: &ShardPlan, c: &Cells) -> [usize; 4] {
    [c.batch.len(), c.heads.len(), c.q.len(), plan.shape.dim]
}

fn k_shape(plan: &ShardPlan, c: &Cells) -> [usize; 4] {
    [c.batch.len(), c.kv_heads.len(), c.kv.len(), plan.shape.dim]
}

fn v_shape(plan: &ShardPlan, c: &Cells) -> [usize; 4] {
    [c.batch.len(), c.kv_heads.len(), c.kv.len(), plan.shape.dim_v]
}

/// The coordinates of cells, as mods are told them.
fn coordinates(cells: &Cells, [q_len, kv_len]: [usize; 2]) -> Result<Coordinates, ShardError> {
    let i32_of = |n: usize| i32::try_from(n).expect("planes count in i32");
    let offset = |range: &Range<usize>| Positions::offset(i32_of(range.start));
    let rows = |name: &str, ranges: &Ranges| match ranges.as_slice() {
        [] => Ok(Positions::Rows),
        [one] => Ok(offset(one)),
        several => {
            let positions = several.iter().cloned().flatten().map(i32_of).collect();
            Positions::map(Buffer::vector(name, positions)).map_err(of)
        }
    };
    Ok(Coordinates::new()
        .batch(offset(&cells.batch))
        .heads(offset(&cells.heads), offset(&cells.kv_heads))
        .q(rows("shard_q_positions", &cells.q)?)
        .kv(rows("shard_kv_positions", &cells.kv)?)
        .lengths(i32_of(q_len), i32_of(kv_len)))
}

/// Hash of what a program says and captures.
fn program_hash(program: &Program) -> u64 {
    let graph = program.graph();
    let scalars = graph.scalars().iter().map(|s| format!("{:?}", s.value));
    let scalars = crate::hash::bytes(scalars.flat_map(String::into_bytes));
    let buffer = |buffer: &AnyBuffer| {
        let data = match buffer.to_data() {
            BufferData::Bool(values) => crate::hash::bytes(values.into_iter().map(u8::from)),
            BufferData::I32(values) => crate::hash::slice(bytemuck::cast_slice(&values)),
            BufferData::F32(values) => crate::hash::slice(bytemuck::cast_slice(&values)),
        };
        crate::hash::words(buffer.shape().iter().map(|&len| len as u64).chain([data]))
    };
    let buffers = graph.buffers().iter().filter(|b| !b.is_on_device()).map(buffer);
    crate::hash::words([program.structural_hash(), scalars].into_iter().chain(buffers))
}

fn dtype_of(element: ElementType) -> Result<DType, ShardError> {
    match element {
        ElementType::F32 => Ok(DType::F32),
        ElementType::F16 => Ok(DType::F16),
        ElementType::BF16 => Ok(DType::BF16),
        ElementType::F64 => Ok(DType::F64),
        other => refused(format!("q, k and v are {other}; attention takes f32, f16, bf16 and f64")),
    }
}

fn of(error: impl std::fmt::Display) -> ShardError {
    ShardError::new(error.to_string())
}

/// Rows of elements of `dtype` as a tensor.
fn tensor(table: &Table<u8>, dim: usize, dtype: DType) -> Result<Tensor, ShardError> {
    let bytes = table.bytes();
    let data = match dtype {
        DType::F32 => Data::F32(elements(bytes)),
        DType::F16 => Data::F16(elements(bytes)),
        DType::BF16 => Data::BF16(elements(bytes)),
        DType::F8E4M3 => Data::F8E4M3(elements(bytes)),
        DType::F64 => Data::F64(elements(bytes)),
    };
    let [b, h, s] = table.shape();
    Tensor::from_vec(data, [b, h, s, dim]).map_err(of)
}

/// Rows of f32 as a tensor of `dtype`, rounded once.
fn rounded(table: &Table<f32>, dim: usize, dtype: DType) -> Result<Tensor, ShardError> {
    let [b, h, s] = table.shape();
    let data = Data::from_f64(dtype, table.elems().iter().map(|&x| f64::from(x)));
    Tensor::from_vec(data, [b, h, s, dim]).map_err(of)
}
