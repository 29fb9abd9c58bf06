//! Programs: finished expressions over one graph. [`MaskMod`] and [`ScoreMod`] are the two
//! kinds a user meets.

use std::collections::HashMap;
use std::sync::Arc;

use crate::capture::{AnyBuffer, Scalar, ScalarValue};
use crate::error::{ModError, ModErrorKind};
use crate::expr::{DynExpr, Expr, ExprNode};
use crate::ir::{Graph, Leaf, Node, NodeId, Type};

/// A graph and the nodes in it that are results.
#[derive(Clone, Debug)]
pub struct Program {
    graph: Arc<Graph>,
    roots: Vec<NodeId>,
}

impl Program {
    /// Lowers traced expressions into one graph, simplified and without duplicates.
    pub fn build(roots: &[DynExpr]) -> Self {
        let mut graph = Graph::new();
        let mut memo = HashMap::new();
        let roots = roots.iter().map(|e| lower(&mut graph, &mut memo, e)).collect();
        Self { graph: Arc::new(graph), roots }
    }

    /// Joins a finished graph with its results.
    pub(crate) fn from_graph(graph: Graph, roots: Vec<NodeId>) -> Self {
        Self { graph: Arc::new(graph), roots }
    }

    /// The nodes.
    pub fn graph(&self) -> &Graph {
        &self.graph
    }

    /// The results.
    pub fn roots(&self) -> &[NodeId] {
        &self.roots
    }

    /// True when a result depends on `leaf`.
    pub fn uses(&self, leaf: Leaf) -> bool {
        self.graph.nodes().iter().any(|n| *n == Node::Leaf(leaf))
    }

    /// Result `root` as a traced expression, each leaf replaced by what `leaf` gives for it.
    pub fn trace(&self, root: usize, leaf: &dyn Fn(Leaf) -> DynExpr) -> DynExpr {
        let graph = self.graph();
        let mut made: Vec<DynExpr> = Vec::with_capacity(graph.nodes().len());
        for node in graph.nodes() {
            let of = |id: &NodeId| made[id.index()].clone();
            let expr = match node {
                Node::Leaf(l) => leaf(*l),
                Node::Bool(v) => DynExpr::constant(ScalarValue::Bool(*v)),
                Node::I32(v) => DynExpr::constant(ScalarValue::I32(*v)),
                Node::F32(v) => DynExpr::constant(ScalarValue::F32(f32::from_bits(*v))),
                Node::Scalar(slot) => DynExpr::scalar(graph.scalars()[*slot as usize].clone()),
                Node::Load { buffer, index } => DynExpr::load(
                    &graph.buffers()[*buffer as usize],
                    index.iter().map(of).collect(),
                )
                .expect(WELL_TYPED),
                Node::Unary(op, x) => DynExpr::unary(*op, of(x)).expect(WELL_TYPED),
                Node::Binary(op, x, y) => DynExpr::binary(*op, of(x), of(y)).expect(WELL_TYPED),
                Node::Select { cond, then, other } => {
                    DynExpr::select(of(cond), of(then), of(other)).expect(WELL_TYPED)
                }
                Node::Cast(ty, x) => of(x).cast(*ty),
            };
            made.push(expr);
        }
        made[self.roots[root].index()].clone()
    }

    /// The same program with another buffer in the slot called `name`.
    ///
    /// # Errors
    /// When there is no such slot, or type or rank differ.
    pub fn rebind(&self, buffer: &AnyBuffer) -> Result<Self, ModError> {
        let name = buffer.name();
        let slot = self.graph.buffers().iter().position(|b| b.name() == name);
        let slot = slot.ok_or_else(|| {
            let names: Vec<_> = self.graph.buffers().iter().map(AnyBuffer::name).collect();
            binding(name, format!("the captured buffers are {names:?}"))
        })?;
        let old = &self.graph.buffers()[slot];
        if old.ty() != buffer.ty() || old.shape().len() != buffer.shape().len() {
            return Err(binding(
                name,
                format!(
                    "the slot holds {} with {} axes, not {} with {}",
                    old.ty(),
                    old.shape().len(),
                    buffer.ty(),
                    buffer.shape().len()
                ),
            ));
        }
        let mut graph = (*self.graph).clone();
        graph.set_buffer(slot, buffer.clone());
        Ok(Self { graph: Arc::new(graph), roots: self.roots.clone() })
    }

    /// The same program with another value for the run-time scalar called `name`.
    ///
    /// # Errors
    /// When there is no such scalar, or its type differs.
    pub fn set_scalar(&self, name: &str, value: ScalarValue) -> Result<Self, ModError> {
        let scalar = Scalar { name: name.to_owned(), value };
        let slot = self.graph.scalars().iter().position(|s| s.name == name);
        let slot = slot.ok_or_else(|| {
            let names: Vec<_> = self.graph.scalars().iter().map(|s| s.name.as_str()).collect();
            binding(name, format!("the run-time scalars are {names:?}"))
        })?;
        let ty = self.graph.scalars()[slot].ty();
        if ty != scalar.ty() {
            return Err(binding(name, format!("the scalar is {ty}, not {}", scalar.ty())));
        }
        let mut graph = (*self.graph).clone();
        graph.set_scalar(slot, scalar);
        Ok(Self { graph: Arc::new(graph), roots: self.roots.clone() })
    }
}

const WELL_TYPED: &str = "a graph is well-typed";

fn binding(name: &str, reason: String) -> ModError {
    ModErrorKind::Binding { name: name.to_owned(), reason }.into()
}

fn lower(graph: &mut Graph, memo: &mut HashMap<usize, NodeId>, expr: &DynExpr) -> NodeId {
    if let Some(&id) = memo.get(&expr.address()) {
        return id;
    }
    let node = match expr.node() {
        ExprNode::Leaf(leaf) => Node::Leaf(*leaf),
        ExprNode::Const(ScalarValue::Bool(v)) => Node::Bool(*v),
        ExprNode::Const(ScalarValue::I32(v)) => Node::I32(*v),
        ExprNode::Const(ScalarValue::F32(v)) => Node::F32(v.to_bits()),
        ExprNode::Scalar(scalar) => Node::Scalar(graph.scalar_slot(scalar)),
        ExprNode::Load { buffer, index } => {
            let index = index.iter().map(|i| lower(graph, memo, i)).collect();
            Node::Load { buffer: graph.buffer_slot(buffer), index }
        }
        ExprNode::Unary(op, x) => Node::Unary(*op, lower(graph, memo, x)),
        ExprNode::Binary(op, x, y) => {
            Node::Binary(*op, lower(graph, memo, x), lower(graph, memo, y))
        }
        ExprNode::Select { cond, then, other } => Node::Select {
            cond: lower(graph, memo, cond),
            then: lower(graph, memo, then),
            other: lower(graph, memo, other),
        },
        ExprNode::Cast(ty, x) => Node::Cast(*ty, lower(graph, memo, x)),
    };
    let id = graph.intern(node);
    memo.insert(expr.address(), id);
    id
}

/// Which keys a query may see: a program with one bool result that does not read the score.
#[derive(Clone, Debug)]
pub struct MaskMod(Program);

impl MaskMod {
    /// The mask that an expression says.
    ///
    /// # Errors
    /// When the expression is not bool or reads the score.
    pub fn new(expr: &DynExpr) -> Result<Self, ModError> {
        let program = Program::build(std::slice::from_ref(expr));
        if expr.ty() != Type::Bool {
            let reason = format!("a mask is a bool, not {}", expr.ty());
            return Err(ModErrorKind::Root { reason }.into());
        }
        if program.uses(Leaf::Score) {
            let reason = "a mask cannot read the score".to_owned();
            return Err(ModErrorKind::Root { reason }.into());
        }
        Ok(Self(program))
    }

    /// The program behind it; its only root is the mask.
    pub fn program(&self) -> &Program {
        &self.0
    }

    /// The mask as an expression over the given coordinates.
    pub fn at(&self, leaf: &dyn Fn(Leaf) -> DynExpr) -> Expr<bool> {
        self.0.trace(0, leaf).typed().expect("a mask is bool")
    }

    /// The mask as an expression over the leaves themselves.
    pub fn expr(&self) -> Expr<bool> {
        self.at(&DynExpr::leaf)
    }

    /// The mask with `f` applied to its program (rebinding, setting scalars).
    ///
    /// # Errors
    /// Those of `f`.
    pub fn map(
        &self,
        f: impl FnOnce(&Program) -> Result<Program, ModError>,
    ) -> Result<Self, ModError> {
        f(&self.0).map(Self)
    }
}

/// What becomes of a score: a program with one f32 result.
#[derive(Clone, Debug)]
pub struct ScoreMod(Program);

impl ScoreMod {
    /// The score function that an expression says.
    ///
    /// # Errors
    /// When the expression is not f32.
    pub fn new(expr: &DynExpr) -> Result<Self, ModError> {
        if expr.ty() != Type::F32 {
            let reason = format!("a score is an f32, not {}", expr.ty());
            return Err(ModErrorKind::Root { reason }.into());
        }
        Ok(Self(Program::build(std::slice::from_ref(expr))))
    }

    /// The program behind it; its only root is the new score.
    pub fn program(&self) -> &Program {
        &self.0
    }

    /// The score as an expression over the given coordinates and score.
    pub fn at(&self, leaf: &dyn Fn(Leaf) -> DynExpr) -> Expr<f32> {
        self.0.trace(0, leaf).typed().expect("a score is f32")
    }

    /// The score as an expression over the leaves themselves.
    pub fn expr(&self) -> Expr<f32> {
        self.at(&DynExpr::leaf)
    }

    /// This score function, then `next` on its result.
    pub fn then(&self, next: &ScoreMod) -> ScoreMod {
        let first = self.expr();
        let expr = next.at(&|leaf| match leaf {
            Leaf::Score => first.dynamic().clone(),
            other => DynExpr::leaf(other),
        });
        ScoreMod::new(expr.dynamic()).expect("a score is f32")
    }

    /// The score function with `f` applied to its program (rebinding, setting scalars).
    ///
    /// # Errors
    /// Those of `f`.
    pub fn map(
        &self,
        f: impl FnOnce(&Program) -> Result<Program, ModError>,
    ) -> Result<Self, ModError> {
        f(&self.0).map(Self)
    }
}

impl std::ops::BitAnd for MaskMod {
    type Output = MaskMod;
    fn bitand(self, rhs: MaskMod) -> MaskMod {
        joined(self.expr() & rhs.expr())
    }
}

impl std::ops::BitOr for MaskMod {
    type Output = MaskMod;
    fn bitor(self, rhs: MaskMod) -> MaskMod {
        joined(self.expr() | rhs.expr())
    }
}

impl std::ops::Not for MaskMod {
    type Output = MaskMod;
    fn not(self) -> MaskMod {
        joined(!self.expr())
    }
}

fn joined(expr: Expr<bool>) -> MaskMod {
    MaskMod::new(expr.dynamic()).expect("masks joined are a mask")
}
