//! Programs: finished expressions over one graph. [`MaskMod`] and [`ScoreMod`] are the two
//! kinds a user meets.
//!
//! A program keeps the first error of the expressions it was built from ([`Program::check`]).
//! [`MaskMod::new`] and [`ScoreMod::new`] return it; the functions that `#[mask_mod]` makes give
//! a mod that holds it, so that mods are made and joined without a `?` at every step. Planning
//! returns it. Until then such a mask is false and such a score NaN everywhere.

use std::collections::HashMap;

use foldhash::fast::FixedState;
use std::sync::Arc;

use crate::capture::{AnyBuffer, Scalar};
use crate::error::{ModError, ModErrorKind};
use crate::expr::{DynExpr, Expr, ExprNode, Op};
use crate::ir::{Graph, Leaf, Node, NodeId};
use crate::value::{ScalarValue, Type};

/// A graph and the nodes in it that are results.
#[derive(Clone, Debug)]
pub struct Program {
    graph: Arc<Graph>,
    roots: Vec<NodeId>,
    /// Why it is not a program, the first reason met.
    wrong: Option<ModError>,
}

impl Program {
    /// Lowers traced expressions into one graph: simplified, without duplicates, without dead
    /// nodes, in a canonical order.
    pub fn build(roots: &[DynExpr]) -> Self {
        let mut graph = Graph::new();
        let (roots, wrong) = lower(&mut graph, roots);
        Self { wrong, ..Self::from_graph(&graph, &roots) }
    }

    /// Whether it could be made.
    ///
    /// # Errors
    /// What was wrong with the expressions it was built from.
    pub fn check(&self) -> Result<(), ModError> {
        self.wrong.clone().map_or(Ok(()), Err)
    }

    /// The error it holds.
    pub(crate) fn wrong(&self) -> Option<&ModError> {
        self.wrong.as_ref()
    }

    /// What `roots` reach in `graph`, in canonical order: depth first from the roots, operands
    /// in order, buffers and scalars numbered as they are met.
    pub(crate) fn from_graph(graph: &Graph, roots: &[NodeId]) -> Self {
        let mut canonical = Graph::new();
        let mut moved: Vec<Option<NodeId>> = vec![None; graph.nodes().len()];
        let mut stack: Vec<NodeId> = roots.iter().rev().copied().collect();
        while let Some(&id) = stack.last() {
            if moved[id.index()].is_some() {
                stack.pop();
                continue;
            }
            let before = stack.len();
            graph.node(id).for_each_operand(|x| {
                if moved[x.index()].is_none() {
                    stack.push(x);
                }
            });
            if stack.len() > before {
                stack[before..].reverse();
                continue;
            }
            let node = graph.node(id).map_operands(|x| moved[x.index()].expect("operands first"));
            let node = match node {
                Node::Load { buffer, index, from_end } => {
                    let buffer = canonical.buffer_slot(&graph.buffers()[buffer as usize]);
                    Node::Load { buffer, index, from_end }
                }
                Node::Scalar(slot) => {
                    Node::Scalar(canonical.scalar_slot(&graph.scalars()[slot as usize]))
                }
                node => node,
            };
            moved[id.index()] = Some(canonical.intern(node));
            stack.pop();
        }
        let roots = roots.iter().map(|r| moved[r.index()].expect("every root was met")).collect();
        Self { graph: Arc::new(canonical), roots, wrong: None }
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
        self.graph.nodes().contains(&Node::Leaf(leaf))
    }

    /// Result `root` as a traced expression, each leaf replaced by what `leaf` gives for it.
    pub fn trace(&self, root: usize, leaf: &dyn Fn(Leaf) -> DynExpr) -> DynExpr {
        let graph = self.graph();
        if let Some(error) = &self.wrong {
            return DynExpr::wrong(graph.ty(self.roots[root]), error.clone());
        }
        let mut made: Vec<DynExpr> = Vec::with_capacity(graph.nodes().len());
        for node in graph.nodes() {
            let of = |id: &NodeId| made[id.index()].clone();
            let expr = match node {
                Node::Leaf(l) => leaf(*l),
                Node::Bool(v) => DynExpr::constant(ScalarValue::Bool(*v)),
                Node::I32(v) => DynExpr::constant(ScalarValue::I32(*v)),
                Node::F32(v) => DynExpr::constant(ScalarValue::F32(f32::from_bits(*v))),
                Node::Scalar(slot) => DynExpr::scalar(graph.scalars()[*slot as usize].clone()),
                Node::Load { buffer, index, from_end } => {
                    let buffer = &graph.buffers()[*buffer as usize];
                    DynExpr::read(buffer, index.iter().map(of).collect(), *from_end)
                        .expect(WELL_TYPED)
                }
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

    /// Slot of `buffer`, added when no node reads it.
    pub(crate) fn keep_buffer(&mut self, buffer: &AnyBuffer) -> u32 {
        Arc::make_mut(&mut self.graph).buffer_slot(buffer)
    }

    /// The same program with `buffer` in every slot of its name.
    ///
    /// # Errors
    /// When there is no such slot, or type, rank or learnedness differ.
    pub fn rebind(&self, buffer: &AnyBuffer) -> Result<Self, ModError> {
        let name = buffer.name();
        let slots = matching(self.graph.buffers(), |b| b.name() == name);
        if slots.is_empty() {
            let names: Vec<_> = self.graph.buffers().iter().map(AnyBuffer::name).collect();
            return Err(binding(name, format!("the captured buffers are {names:?}")));
        }
        let mut graph = (*self.graph).clone();
        for slot in slots {
            let old = &self.graph.buffers()[slot];
            let class = |b: &AnyBuffer| {
                let learned = if b.learned() { "learned " } else { "" };
                let axes = b.shape().len();
                let plural = if axes == 1 { "axis" } else { "axes" };
                format!("{learned}{} with {axes} {plural}", b.element())
            };
            if class(old) != class(buffer) {
                let reason = format!("the slot holds {}, not {}", class(old), class(buffer));
                return Err(binding(name, reason));
            }
            graph.set_buffer(slot, buffer.clone());
        }
        Ok(Self { graph: Arc::new(graph), ..self.clone() })
    }

    /// The same program where each element of a buffer for which `value` says one has that value.
    ///
    /// # Panics
    /// When it says one of another type than the buffer's elements have when they are loaded.
    pub fn with_constants(&self, value: impl Fn(&AnyBuffer) -> Option<ScalarValue>) -> Self {
        let mut graph = Graph::new();
        let mut moved: Vec<NodeId> = Vec::with_capacity(self.graph.nodes().len());
        for id in self.graph.ids() {
            let node = self.graph.node(id).map_operands(|x| moved[x.index()]);
            moved.push(match node {
                Node::Load { buffer, index, from_end } => {
                    let of = &self.graph.buffers()[buffer as usize];
                    if let Some(value) = value(of) {
                        assert_eq!(value.ty(), of.ty(), "the type of an element of {}", of.name());
                        graph.constant_node(value)
                    } else {
                        let buffer = graph.buffer_slot(of);
                        graph.intern(Node::Load { buffer, index, from_end })
                    }
                }
                Node::Scalar(slot) => {
                    let slot = graph.scalar_slot(&self.graph.scalars()[slot as usize]);
                    graph.intern(Node::Scalar(slot))
                }
                node => graph.simplified(node),
            });
        }
        let roots: Vec<NodeId> = self.roots.iter().map(|root| moved[root.index()]).collect();
        Self { wrong: self.wrong.clone(), ..Self::from_graph(&graph, &roots) }
    }

    /// The same program with another value for the run-time scalars called `name`.
    ///
    /// # Errors
    /// When there is no such scalar, or its type differs.
    pub fn set_scalar(&self, name: &str, value: ScalarValue) -> Result<Self, ModError> {
        let scalar = Scalar { name: name.to_owned(), value };
        let slots = matching(self.graph.scalars(), |s| s.name == name);
        if slots.is_empty() {
            let names: Vec<_> = self.graph.scalars().iter().map(|s| s.name.as_str()).collect();
            return Err(binding(name, format!("the run-time scalars are {names:?}")));
        }
        let mut graph = (*self.graph).clone();
        for slot in slots {
            let ty = self.graph.scalars()[slot].ty();
            if ty != scalar.ty() {
                return Err(binding(name, format!("the scalar is {ty}, not {}", scalar.ty())));
            }
            graph.set_scalar(slot, scalar.clone());
        }
        Ok(Self { graph: Arc::new(graph), ..self.clone() })
    }
}

fn matching<T>(slots: &[T], wanted: impl Fn(&T) -> bool) -> Vec<usize> {
    (0..slots.len()).filter(|&i| wanted(&slots[i])).collect()
}

const WELL_TYPED: &str = "a graph is well-typed";

fn binding(name: &str, reason: String) -> ModError {
    ModErrorKind::Binding { name: name.to_owned(), reason }.into()
}

/// Nodes of `roots` in `graph`, operands first, without recursion, and the first error met.
fn lower(graph: &mut Graph, roots: &[DynExpr]) -> (Vec<NodeId>, Option<ModError>) {
    let mut wrong = None;
    let mut done: HashMap<usize, NodeId, FixedState> = HashMap::default();
    let mut stack: Vec<&DynExpr> = roots.iter().rev().collect();
    while let Some(&expr) = stack.last() {
        if done.contains_key(&expr.address()) {
            stack.pop();
            continue;
        }
        let ExprNode { op, args } = expr.node();
        let before = stack.len();
        stack.extend(args.iter().rev().filter(|a| !done.contains_key(&a.address())));
        if stack.len() > before {
            continue;
        }
        let arg = |i: usize| done[&args[i].address()];
        let node = match op {
            Op::Leaf(leaf) => Node::Leaf(*leaf),
            Op::Const(ScalarValue::Bool(v)) => Node::Bool(*v),
            Op::Const(ScalarValue::I32(v)) => Node::I32(*v),
            Op::Const(ScalarValue::F32(v)) => Node::F32(v.to_bits()),
            Op::Scalar(scalar) => Node::Scalar(graph.scalar_slot(scalar)),
            Op::Load(buffer, from_end) => {
                let index = (0..args.len()).map(arg).collect();
                Node::Load { buffer: graph.buffer_slot(buffer), index, from_end: *from_end }
            }
            Op::Unary(op) => Node::Unary(*op, arg(0)),
            Op::Binary(op) => Node::Binary(*op, arg(0), arg(1)),
            Op::Select => Node::Select { cond: arg(0), then: arg(1), other: arg(2) },
            Op::Cast(ty) => Node::Cast(*ty, arg(0)),
            Op::Wrong(error) => {
                wrong.get_or_insert_with(|| error.clone());
                match expr.ty() {
                    Type::Bool => Node::Bool(false),
                    Type::I32 => Node::I32(0),
                    Type::F32 => Node::F32(f32::NAN.to_bits()),
                }
            }
        };
        let id = graph.simplified(node);
        done.insert(expr.address(), id);
        stack.pop();
    }
    (roots.iter().map(|r| done[&r.address()]).collect(), wrong)
}

/// Which keys a query may see: a program with one bool result that does not read the score.
#[derive(Clone, Debug)]
pub struct MaskMod(Program);

impl MaskMod {
    /// The mask that an expression says.
    ///
    /// # Errors
    /// When the expression is not bool or reads the score, or indexes a buffer with another
    /// number of indices than it has axes.
    pub fn new(expr: &DynExpr) -> Result<Self, ModError> {
        let program = Program::build(std::slice::from_ref(expr));
        program.check()?;
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

    /// The mask that an expression says, or one that holds the error.
    pub(crate) fn holding(made: Result<Self, ModError>) -> Self {
        made.unwrap_or_else(|error| Self(Program::build(&[DynExpr::wrong(Type::Bool, error)])))
    }

    /// Whether it is a mask. Planning asks this; a mask that holds an error is false everywhere.
    ///
    /// # Errors
    /// What was wrong where it was made, with the place when a macro made it.
    pub fn check(&self) -> Result<(), ModError> {
        self.0.check()
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
    /// Those of [`Self::check`] and of `f`.
    pub fn map(
        &self,
        f: impl FnOnce(&Program) -> Result<Program, ModError>,
    ) -> Result<Self, ModError> {
        self.check()?;
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
    /// When the expression is not f32, or indexes a buffer with another number of indices than
    /// it has axes.
    pub fn new(expr: &DynExpr) -> Result<Self, ModError> {
        let program = Program::build(std::slice::from_ref(expr));
        program.check()?;
        if expr.ty() != Type::F32 {
            let reason = format!("a score is an f32, not {}", expr.ty());
            return Err(ModErrorKind::Root { reason }.into());
        }
        Ok(Self(program))
    }

    /// The score function that an expression says, or one that holds the error.
    pub(crate) fn holding(made: Result<Self, ModError>) -> Self {
        made.unwrap_or_else(|error| Self(Program::build(&[DynExpr::wrong(Type::F32, error)])))
    }

    /// Whether it is a score function. Planning asks this; one that holds an error is NaN
    /// everywhere.
    ///
    /// # Errors
    /// What was wrong where it was made, with the place when a macro made it.
    pub fn check(&self) -> Result<(), ModError> {
        self.0.check()
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
        ScoreMod::holding(ScoreMod::new(expr.dynamic()))
    }

    /// The score function with `f` applied to its program (rebinding, setting scalars).
    ///
    /// # Errors
    /// Those of [`Self::check`] and of `f`.
    pub fn map(
        &self,
        f: impl FnOnce(&Program) -> Result<Program, ModError>,
    ) -> Result<Self, ModError> {
        self.check()?;
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

impl std::ops::BitXor for MaskMod {
    type Output = MaskMod;
    fn bitxor(self, rhs: MaskMod) -> MaskMod {
        joined(self.expr() ^ rhs.expr())
    }
}

impl std::ops::Not for MaskMod {
    type Output = MaskMod;
    fn not(self) -> MaskMod {
        joined(!self.expr())
    }
}

fn joined(expr: Expr<bool>) -> MaskMod {
    MaskMod::holding(MaskMod::new(expr.dynamic()))
}
