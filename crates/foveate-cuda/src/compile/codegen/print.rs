//! Programs to C++ expressions.
//!
//! A value that is used more than once becomes a named statement, everything else is written
//! where it is used. The same printer writes values and ranges: the types of `mods.cuh` and
//! those of `ranges.cuh` have the same operators.

mod node;

use foveate_mods::ir::{BinaryOp, UnaryOp};
use foveate_mods::{ElementType, Leaf, Node, NodeId, Program, Type};

use super::captures::{CaptureLayout, Captures, FieldKind, Slots};
use node::NodePrinter;

/// Longest expression that is not given a name, in characters.
const LONGEST: usize = 72;

/// What the expressions are over.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Over {
    /// One query and one key.
    Entry,
    /// A rectangle of them: every value is a range.
    Rectangle,
}

/// When an index out of range is an error of the user's.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Check {
    /// Never reported.
    Off,
    /// At every entry.
    Everywhere,
    /// Where the mask lets the entry through.
    WhereVisible,
}

/// A program to be printed and what surrounds it.
#[derive(Clone, Copy)]
pub(super) struct Printer<'a> {
    pub program: &'a Program,
    pub slots: &'a Slots,
    pub captures: &'a Captures,
    pub layout: &'a CaptureLayout,
    /// For each node that is a load, which of its indices are surely inside their axes.
    pub within: &'a [Vec<bool>],
    /// Floats that are surely positive, finite and not subnormal.
    pub normal: &'a [bool],
    pub over: Over,
    /// Nodes whose values are known, and where.
    pub given: &'a [(NodeId, String)],
    /// Whether the function is given `distance`, the float of `q - kv`.
    pub has_distance: bool,
    /// Approximations of the special function units, where nothing is decided.
    pub fast_math: bool,
    pub check: Check,
}

/// Statements, and the expressions of the roots after them.
pub(super) struct Printed {
    pub statements: Vec<String>,
    pub roots: Vec<Piece>,
}

/// A node's text, how tightly its outermost operator binds, and how deep it nests.
#[derive(Clone, Debug)]
pub(super) struct Piece {
    pub text: String,
    tight: u8,
    depth: usize,
}

const ATOM: u8 = 16;
const PREFIX: u8 = 15;
const TERNARY: u8 = 3;

impl Piece {
    fn atom(text: impl Into<String>) -> Self {
        Self { text: text.into(), tight: ATOM, depth: 0 }
    }

    /// The text as an operand of something that binds like `tight`.
    fn within(&self, tight: u8) -> String {
        if self.tight >= tight { self.text.clone() } else { format!("({})", self.text) }
    }

    /// As a factor.
    pub fn factor(&self) -> String {
        self.within(13)
    }
}

impl Printer<'_> {
    /// Prints what `roots` need. With a `root` that decides something (a mask), all floats it
    /// depends on are exact; so are those an integer depends on.
    pub fn print(&self, roots: &[NodeId]) -> Printed {
        let nodes = self.program.graph().nodes();
        let mut uses = vec![0usize; nodes.len()];
        roots.iter().for_each(|r| uses[r.index()] += 1);
        let decides = self.decides(roots);
        let given_as = |i| self.given_as(i).or_else(|| self.of_distance(i).filter(|_| !decides[i]));
        for i in (0..nodes.len()).rev() {
            if uses[i] > 0 && given_as(i).is_none() {
                nodes[i].for_each_operand(|x| uses[x.index()] += 1);
            }
        }
        let mut statements = Vec::new();
        let mut pieces: Vec<Piece> = Vec::with_capacity(nodes.len());
        for (i, node) in nodes.iter().enumerate() {
            if uses[i] == 0 {
                pieces.push(Piece::atom(""));
                continue;
            }
            if let Some(given) = given_as(i) {
                pieces.push(given);
                continue;
            }
            if let Node::Load { buffer, index, from_end } = node {
                let slot = self.slots.buffers[*buffer as usize];
                self.checks(slot, i, (index, *from_end), &mut pieces, &mut statements);
                let wide = self.captures.buffers[slot].element() == ElementType::I64;
                if wide && self.check != Check::Off {
                    let pieces: Vec<Piece> =
                        index.iter().map(|x| pieces[x.index()].clone()).collect();
                    let place = self.place(slot, (index, *from_end), &self.within[i], &pieces);
                    let at = format!("{}{place}", self.field(FieldKind::Buffer(slot)));
                    let only = self.check == Check::WhereVisible;
                    statements.push(format!(
                        "if (!fits({at})) fv_too_wide(mods, place, q, kv, {only}, {slot}, {at});"
                    ));
                }
            }
            let mut piece =
                NodePrinter { printer: self, i, pieces: &pieces, decides: &decides }.piece(node);
            let mut depth = 0;
            node.for_each_operand(|x| depth = depth.max(pieces[x.index()].depth + 1));
            piece.depth = depth;
            let is_result = roots.len() == 1 && roots[0].index() == i;
            let shared = uses[i] > 1 && depth > 0;
            pieces.push(if shared || (piece.text.len() > LONGEST && !is_result) {
                self.named(piece, i, decides[i], &mut statements)
            } else {
                piece
            });
        }
        let plain = |i: usize| self.over == Over::Entry && decides[i] && self.ty(i) == Type::F32;
        let value = |r: &NodeId| {
            let piece = pieces[r.index()].clone();
            if plain(r.index()) { unwrapped(piece) } else { piece }
        };
        Printed { roots: roots.iter().map(value).collect(), statements }
    }

    fn given_as(&self, node: usize) -> Option<Piece> {
        let (_, text) = self.given.iter().find(|(given, _)| given.index() == node)?;
        Some(Piece::atom(text.clone()))
    }

    /// A node that is the float of `q - kv`, of `kv - q` or of how far they are apart, where the
    /// function is given it. `0.0f -`, since the float of 0 is no -0.
    fn of_distance(&self, node: usize) -> Option<Piece> {
        let graph = self.program.graph();
        let Node::Cast(Type::F32, of) = graph.nodes()[node] else { return None };
        let (of, is_absolute) = match *graph.node(of) {
            Node::Unary(UnaryOp::Abs, of) => (of, true),
            _ => (of, false),
        };
        let Node::Binary(BinaryOp::Sub, left, right) = *graph.node(of) else { return None };
        let piece = match (graph.node(left), graph.node(right)) {
            _ if !self.has_distance => return None,
            (Node::Leaf(Leaf::Q), Node::Leaf(Leaf::Kv)) if !is_absolute => Piece::atom("distance"),
            (Node::Leaf(Leaf::Kv), Node::Leaf(Leaf::Q)) if !is_absolute => {
                Piece { text: "0.0f - distance".to_owned(), tight: 12, depth: 0 }
            }
            (Node::Leaf(Leaf::Q | Leaf::Kv), Node::Leaf(Leaf::Q | Leaf::Kv)) if left != right => {
                Piece::atom("fabsf(distance)")
            }
            _ => return None,
        };
        Some(piece)
    }

    /// Nodes that an integer, or a root that is not a float, depends on.
    pub fn decides(&self, roots: &[NodeId]) -> Vec<bool> {
        decides(self.program, roots)
    }

    fn ty(&self, node: usize) -> Type {
        self.program.graph().types()[node]
    }

    fn type_name(&self, ty: Type, exact: bool) -> &'static str {
        match (self.over, ty) {
            (Over::Entry, Type::Bool) => "bool",
            (Over::Entry, Type::I32) => "Int",
            (Over::Entry, Type::F32) if exact => "Exact",
            (Over::Entry, Type::F32) => "float",
            (Over::Rectangle, Type::Bool) => "BoolRange",
            (Over::Rectangle, Type::I32) => "IntRange",
            (Over::Rectangle, Type::F32) => "FloatRange",
        }
    }

    fn named(&self, piece: Piece, i: usize, exact: bool, statements: &mut Vec<String>) -> Piece {
        let named = statements.iter().filter(|s| s.starts_with("const ")).count();
        let name = format!("x{}", named + 1);
        let ty = self.type_name(self.ty(i), exact);
        statements.push(format!("const {ty} {name} = {};", piece.text));
        Piece::atom(name)
    }

    /// Statements that report indices of load `i` that are out of range.
    fn checks(
        &self,
        buffer: usize,
        i: usize,
        (index, from_end): (&[NodeId], bool),
        pieces: &mut [Piece],
        statements: &mut Vec<String>,
    ) {
        if self.check == Check::Off {
            return;
        }
        let only = self.check == Check::WhereVisible;
        for (axis, x) in index.iter().enumerate() {
            if self.within[i][axis] {
                continue;
            }
            if pieces[x.index()].depth > 0 {
                let piece = pieces[x.index()].clone();
                pieces[x.index()] = self.named(piece, x.index(), false, statements);
            }
            let index = &pieces[x.index()].text;
            let length = self.field(FieldKind::Length { buffer, axis });
            let position = if from_end { from_the_end(index, &length) } else { index.clone() };
            statements.push(format!(
                "if (!inside({position}, {length})) \
                 fv_outside(mods, place, q, kv, {only}, {buffer}, {axis}, {index});"
            ));
        }
    }

    fn field(&self, kind: FieldKind) -> String {
        format!("mods.{}", self.layout.name(kind))
    }

    /// ` + place` in memory of the element that clamped indices of buffer `slot` mean; nothing for
    /// that of index 0. `pieces` are those of the indices.
    pub fn place(
        &self,
        slot: usize,
        (index, from_end): (&[NodeId], bool),
        within: &[bool],
        pieces: &[Piece],
    ) -> String {
        if self.captures.buffers[slot].is_dense() {
            return self.row_major(slot, (index, from_end), Some(within), pieces);
        }
        let mut place = String::new();
        for (axis, &sure) in within.iter().enumerate() {
            if let Some(term) = self.clamped(slot, axis, (index, from_end), sure, pieces) {
                let stride = self.field(FieldKind::Stride { buffer: slot, axis });
                place.push_str(&format!(" + i64({}) * {stride}", term.text));
            }
        }
        place
    }

    /// The position that an index means on its axis, clamped unless it is `sure`; nothing for 0.
    fn clamped(
        &self,
        slot: usize,
        axis: usize,
        (index, from_end): (&[NodeId], bool),
        sure: bool,
        pieces: &[Piece],
    ) -> Option<Piece> {
        let length = self.field(FieldKind::Length { buffer: slot, axis });
        let piece = &pieces[axis];
        match self.program.graph().node(index[axis]) {
            Node::I32(0) => None,
            _ if from_end && !sure => {
                let index = from_the_end(&piece.text, &length);
                Some(Piece::atom(format!("clamp({index}, {length})")))
            }
            Node::I32(v) if sure => Some(Piece::atom(v.to_string())),
            _ if sure => Some(Piece::atom(format!("{}.v", piece.within(ATOM)))),
            _ => Some(Piece::atom(format!("clamp({}, {length})", piece.text))),
        }
    }

    /// ` + position` of clamped indices in buffer `slot`, row-major; nothing for position 0.
    /// `pieces` are those of the indices; without `within` every index is clamped.
    pub fn row_major(
        &self,
        slot: usize,
        (index, from_end): (&[NodeId], bool),
        within: Option<&[bool]>,
        pieces: &[Piece],
    ) -> String {
        let buffer = &self.captures.buffers[slot];
        // Where positions outgrow an int, the first product is the one to widen.
        let mut widen = buffer.elems() > i32::MAX as usize;
        let mut at: Option<Piece> = None;
        for axis in 0..index.len() {
            let length = self.field(FieldKind::Length { buffer: slot, axis });
            let sure = within.is_some_and(|w| w[axis]);
            let term = self.clamped(slot, axis, (index, from_end), sure, pieces);
            let scaled = at.map(|at| Piece {
                text: match std::mem::take(&mut widen) {
                    true => format!("i64({}) * {length}", at.text),
                    false => format!("{} * {length}", at.within(13)),
                },
                tight: 13,
                depth: 0,
            });
            at = match (scaled, term) {
                (None, term) => term,
                (scaled, None) => scaled,
                (Some(scaled), Some(term)) => Some(Piece {
                    text: format!("{} + {}", scaled.text, term.text),
                    tight: 12,
                    depth: 0,
                }),
            };
        }
        at.map_or(String::new(), |at| format!(" + {}", at.text))
    }
}

/// The position that an index means which counts from the end where it is negative.
fn from_the_end(index: &str, length: &str) -> String {
    format!("from_end({index}, {length})")
}

/// Nodes of `program` that an integer, or a root that is not a float, depends on.
pub(super) fn decides(program: &Program, roots: &[NodeId]) -> Vec<bool> {
    let graph = program.graph();
    let mut decides: Vec<bool> = graph.types().iter().map(|&ty| ty == Type::I32).collect();
    for root in roots {
        decides[root.index()] |= graph.ty(*root) != Type::F32;
    }
    for (i, node) in graph.nodes().iter().enumerate().rev() {
        if decides[i] {
            node.for_each_operand(|x| decides[x.index()] = true);
        }
    }
    decides
}

/// The plain float of an exact one.
fn unwrapped(piece: Piece) -> Piece {
    let inner = piece.text.strip_prefix("Exact(").and_then(|t| t.strip_suffix(')'));
    match inner {
        // `Exact(a) + Exact(b)` also begins and ends so, but is no atom.
        Some(inner) if piece.tight == ATOM => Piece::atom(inner),
        _ => Piece { text: format!("{}.v", piece.within(ATOM)), tight: ATOM, depth: piece.depth },
    }
}
