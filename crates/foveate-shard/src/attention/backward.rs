//! The backward pass of attention on one rank: gradients of all that the rank computed, and then those of the
//! queries and keys that it holds.

use std::collections::BTreeMap;

use foveate::{ForwardRef, GradientsMut, Tensor, TensorMut, TensorRef};

use super::{RankAttention, RankForward, RankGradients, Saved, Unpacked};
use super::{k_shape, of, q_shape, rounded, tensor, v_shape};
use crate::error::ShardError;
use crate::layout::Sharded;
use crate::plan::{Cells, ModelShape, Part};
use crate::table::{Rows, Table};

/// Gradients of q, k and v over the same cells, in f32.
struct Operands {
    dq: Table<f32>,
    dk: Table<f32>,
    dv: Table<f32>,
}

/// What the cells that a rank computes give.
struct Computed {
    operands: Operands,
    /// Of the heads of these cells.
    d_sink: Vec<f32>,
    captures: BTreeMap<String, Vec<f32>>,
}

impl Operands {
    fn zeros(cells: &Cells, shape: &ModelShape) -> Self {
        Self {
            dq: Table::zeros(Rows::queries(cells), shape.dim),
            dk: Table::zeros(Rows::keys(cells), shape.dim),
            dv: Table::zeros(Rows::keys(cells), shape.dim_v),
        }
    }

    /// Adds the rows that both have.
    fn add(&mut self, other: &Self) {
        self.dq.add_from(&other.dq);
        self.dk.add_from(&other.dk);
        self.dv.add_from(&other.dv);
    }

    /// The bytes of a part, as [`Self::add_sent`] reads them.
    fn packed(&self, part: &Part) -> Vec<u8> {
        let (q, kv) = (Rows::queries(&part.cells), Rows::keys(&part.cells));
        let dq = part.carries.contains(&"dq").then(|| self.dq.take(q));
        let dq = dq.as_ref().map_or(&[][..], Table::bytes);
        [dq, self.dk.take(kv.clone()).bytes(), self.dv.take(kv).bytes()].concat()
    }

    /// Adds a part that another rank sent.
    fn add_sent(&mut self, part: &Part, bytes: Vec<u8>) -> Result<(), ShardError> {
        let (q, kv) = (Rows::queries(&part.cells), Rows::keys(&part.cells));
        let mut sent = Unpacked { bytes, at: 0 };
        if part.carries.contains(&"dq") {
            self.dq.add_from(&sent.table(q, self.dq.width())?);
        }
        self.dk.add_from(&sent.table(kv.clone(), self.dk.width())?);
        self.dv.add_from(&sent.table(kv, self.dv.width())?);
        Ok(())
    }
}

impl RankAttention {
    /// Computes the gradients. All ranks call it.
    ///
    /// # Errors
    /// Those of [`Self::forward`], and a score without a derivative.
    pub fn backward(
        &self,
        forward: &RankForward,
        d_out: &Sharded<Tensor>,
    ) -> Result<RankGradients, ShardError> {
        let computed = self.computed(&forward.saved, &self.d_out(d_out)?)?;
        let Operands { dq, dk, dv } = self.brought_home(&computed.operands)?;
        let d_sink = self.planned.has_sink.then(|| self.d_sink(&computed.d_sink)).transpose()?;
        let mut captures = computed.captures;
        if self.sums {
            captures.values_mut().try_for_each(|sums| self.world.all_reduce(sums))?;
        }
        let in_type = |name, sums: &Table<f32>| {
            self.sharded(name, rounded(sums, sums.width(), self.planned.dtype)?)
        };
        Ok(RankGradients {
            dq: in_type("dq", &dq)?,
            dk: in_type("dk", &dk)?,
            dv: in_type("dv", &dv)?,
            d_sink,
            captures,
        })
    }

    /// The gradient of the results that this rank computed, from the ranks that hold them.
    fn d_out(&self, own: &Sharded<Tensor>) -> Result<Tensor, ShardError> {
        let local = self.table("d_out", own, Rows::queries(&self.own().own))?;
        let mut d_out = local.take(Rows::queries(&self.planned.joint_cells));
        if self.moves_queries() {
            let stage = &self.own().stages[0];
            let send = |part: &Part| local.take(Rows::queries(&part.cells)).bytes().to_vec();
            for (part, bytes) in self.exchange(&stage.sends, &stage.receives, send)? {
                let rows = Rows::queries(&part.cells);
                d_out.copy_from(&Table::of_bytes(rows, local.width(), &bytes)?);
            }
        }
        tensor(&d_out, self.plan().shape.dim_v, self.planned.dtype)
    }

    /// The gradients of what this rank computed, over the keys of all stages.
    fn computed(&self, saved: &Saved, d_out: &Tensor) -> Result<Computed, ShardError> {
        let (plan, planned) = (self.plan(), &self.planned);
        let cells = &planned.joint_cells;
        let mut operands = Operands::zeros(cells, &plan.shape);
        let mut d_sink = vec![0.0; cells.heads.len()];
        let zeros = planned.joint.learned().into_iter();
        let mut captures: BTreeMap<String, Vec<f32>> =
            zeros.map(|b| (b.name().to_owned(), vec![0.0; b.elems()])).collect();
        if Rows::queries(cells).len() > 0 {
            let Operands { dq, dk, dv } = &mut operands;
            let [b, h, s] = saved.out.shape();
            let out = TensorRef::from_slice(saved.out.elems(), [b, h, s, plan.shape.dim_v]);
            let lse = TensorRef::from_slice(saved.lse.elems(), [b, h, s]);
            let mut to = GradientsMut::none()
                .dq(TensorMut::from_slice(dq.elems_mut(), q_shape(plan, cells)).map_err(of)?)
                .dk(TensorMut::from_slice(dk.elems_mut(), k_shape(plan, cells)).map_err(of)?)
                .dv(TensorMut::from_slice(dv.elems_mut(), v_shape(plan, cells)).map_err(of)?);
            if planned.has_sink {
                to = to.d_sink(d_sink.as_mut_slice());
            }
            for (name, into) in &mut captures {
                to = to.capture(name, into.as_mut_slice());
            }
            let forward = ForwardRef { out: out.map_err(of)?, lse: lse.map_err(of)? };
            let call = planned.joint.backward_call(&saved.q, &saved.k, &saved.v, forward, d_out);
            call.write_to(to).map_err(of)?;
        }
        Ok(Computed { operands, d_sink, captures })
    }

    /// The gradients of the queries and keys that this rank holds, of all ranks that computed with them: summed in
    /// order of rank, this rank's own among them.
    fn brought_home(&self, computed: &Operands) -> Result<Operands, ShardError> {
        let (plan, own, members) = (self.plan(), self.own(), &self.planned.members);
        let moves = members.iter().any(|&rank| !plan.ranks[rank].returns.is_empty());
        let sent = match moves {
            true => self.exchange(&own.returns, &own.returned, |part| computed.packed(part))?,
            false => Vec::new(),
        };
        let mut sent = sent.into_iter().peekable();
        let mut sums = Operands::zeros(&own.own, &plan.shape);
        for &member in members {
            if member == self.planned.rank {
                sums.add(computed);
            }
            if let Some((part, bytes)) = sent.next_if(|(part, _)| part.peer == member) {
                sums.add_sent(part, bytes)?;
            }
        }
        Ok(sums)
    }

    /// The gradient of the sink of the rank's heads, of which it computed some.
    fn d_sink(&self, computed: &[f32]) -> Result<Vec<f32>, ShardError> {
        let held = &self.own().own.heads;
        let first = self.planned.joint_cells.heads.start - held.start;
        let mut sums = vec![0.0; held.len()];
        sums[first..first + computed.len()].copy_from_slice(computed);
        if self.sums {
            self.same_heads.all_reduce(&mut sums)?;
        }
        Ok(sums)
    }
}
