//! Programs to C++ expressions.
//!
//! A value that is used more than once becomes a named statement, everything else is written
//! where it is used. The same printer writes values and ranges: the types of `mods.cuh` and
//! those of `ranges.cuh` have the same operators.

use foveate_mods::ir::{BinaryOp, UnaryOp};
use foveate_mods::{Leaf, Node, NodeId, Program, Type};

use super::captures::{Captures, FieldKind, Layout, Slots};

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
    pub layout: &'a Layout,
    /// For each node that is a load, which of its indices are surely inside their axes.
    pub within: &'a [Vec<bool>],
    /// Floats that are surely positive, finite and not subnormal.
    pub normal: &'a [bool],
    pub over: Over,
    /// Nodes whose values are known: the fields `x0`, `x1`, … of `reads`.
    pub given: &'a [NodeId],
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
        for i in (0..nodes.len()).rev() {
            if uses[i] > 0 && self.given_as(i).is_none() {
                nodes[i].for_each_operand(|x| uses[x.index()] += 1);
            }
        }
        let decides = self.decides(roots);
        let mut statements = Vec::new();
        let mut pieces: Vec<Piece> = Vec::with_capacity(nodes.len());
        for (i, node) in nodes.iter().enumerate() {
            if uses[i] == 0 {
                pieces.push(Piece::atom(""));
                continue;
            }
            if let Some(given) = self.given_as(i) {
                pieces.push(given);
                continue;
            }
            if let Node::Load { index, .. } = node {
                self.checks(node, i, index, &mut pieces, &mut statements);
            }
            let mut piece = self.piece(node, i, &pieces, &decides);
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
        let at = self.given.iter().position(|given| given.index() == node)?;
        Some(Piece::atom(format!("reads.x{at}")))
    }

    /// Nodes that an integer or a root that is not a float hangs on.
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
        node: &Node,
        i: usize,
        index: &[NodeId],
        pieces: &mut [Piece],
        statements: &mut Vec<String>,
    ) {
        let Node::Load { buffer, .. } = node else { return };
        if self.check == Check::Off {
            return;
        }
        let buffer = self.slots.buffers[*buffer as usize];
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
            statements.push(format!(
                "if (!inside({index}, {length})) \
                 fv_outside(mods, place, q, kv, {only}, {buffer}, {axis}, {index});"
            ));
        }
    }

    fn field(&self, kind: FieldKind) -> String {
        format!("mods.{}", self.layout.name(kind))
    }

    fn piece(&self, node: &Node, i: usize, pieces: &[Piece], decides: &[bool]) -> Piece {
        let rectangle = self.over == Over::Rectangle;
        let exact = |node: usize| decides[node] && self.ty(node) == Type::F32;
        let at = |x: &NodeId| {
            let piece = pieces[x.index()].clone();
            // A float that something hangs on, in an expression that nothing hangs on.
            let plain = !rectangle && exact(x.index()) && !decides[i];
            if plain { unwrapped(piece) } else { piece }
        };
        let call = |name: &str, args: &[&NodeId]| {
            let args: Vec<String> = args.iter().map(|x| at(x).text).collect();
            Piece::atom(format!("{name}({})", args.join(", ")))
        };
        let of_type = |text: String| {
            Piece::atom(format!("{}({text})", self.type_name(self.ty(i), decides[i])))
        };
        // A plain float that has to become an exact one, or a value that becomes a range.
        let wrapped =
            |piece: Piece| if rectangle || exact(i) { of_type(piece.text) } else { piece };
        let prefix = |mark: char, x: &NodeId| Piece {
            text: format!("{mark}{}", at(x).within(PREFIX)),
            tight: PREFIX,
            depth: 0,
        };
        // What to multiply by instead of dividing by `y`: the same bits for a power of two.
        let reciprocal = |y: &NodeId| {
            let Node::F32(bits) = *self.program.graph().node(*y) else { return None };
            let (value, inverse) = (f32::from_bits(bits), f32::from_bits(bits).recip());
            let near = self.fast_math && !decides[i] && !rectangle;
            let same = bits & 0x7f_ffff == 0 || near;
            (same && value.is_normal() && inverse.is_normal()).then_some(inverse)
        };
        // A logarithm of what is positive, finite and not subnormal is 0 or far from where a
        // quotient by a constant of usual size underflows or overflows.
        let logarithm = |x: &NodeId| {
            let Node::Unary(UnaryOp::Log | UnaryOp::Log2, of) = *self.program.graph().node(*x)
            else {
                return false;
            };
            exact(i) && !rectangle && self.normal[of.index()]
        };
        let usual = |y: &NodeId| {
            let Node::F32(bits) = *self.program.graph().node(*y) else { return None };
            let value = f32::from_bits(bits);
            (1e-6..1e6).contains(&value.abs()).then(|| value.recip())
        };
        match node {
            Node::Leaf(Leaf::Score) if rectangle => Piece::atom("FloatRange::any()"),
            Node::Leaf(Leaf::Score) => wrapped(Piece::atom("score")),
            Node::Leaf(leaf @ (Leaf::Q | Leaf::Kv)) => Piece::atom(leaf.name()),
            Node::Leaf(leaf) => {
                let place = Piece::atom(format!("place.{}", leaf.name()));
                if rectangle { wrapped(place) } else { place }
            }
            Node::Bool(v) if rectangle => of_type(v.to_string()),
            Node::Bool(v) => Piece::atom(v.to_string()),
            Node::I32(v) => integer(*v),
            Node::F32(v) => wrapped(float(*v)),
            Node::Scalar(slot) => {
                let slot = self.slots.scalars[*slot as usize];
                let field = self.field(FieldKind::Scalar(slot));
                match self.ty(i) {
                    Type::Bool if rectangle => of_type(format!("to_bool({field})")),
                    Type::Bool => Piece::atom(format!("to_bool({field})")),
                    Type::I32 if rectangle => of_type(field),
                    Type::I32 => Piece::atom(field),
                    Type::F32 => wrapped(Piece::atom(field)),
                }
            }
            Node::Load { buffer, index } => {
                let slot = self.slots.buffers[*buffer as usize];
                if rectangle {
                    let axis = |(axis, x): (usize, &NodeId)| {
                        let length = self.field(FieldKind::Length { buffer: slot, axis });
                        format!("{{{}, {length}}}", at(x).text)
                    };
                    let axes: Vec<String> = index.iter().enumerate().map(axis).collect();
                    let elems = self.field(FieldKind::Buffer(slot));
                    let ranges = self.field(FieldKind::Ranges(slot));
                    let axes = axes.join(", ");
                    Piece::atom(format!("load({elems}, {ranges}, {{{axes}}}, within)"))
                } else {
                    let buffer = self.field(FieldKind::Buffer(slot));
                    let within = Some(self.within[i].as_slice());
                    let indices: Vec<Piece> = index.iter().map(at).collect();
                    let position = self.position(slot, index, within, &indices);
                    wrapped(Piece::atom(format!("load({buffer}{position})")))
                }
            }
            Node::Unary(UnaryOp::Neg, x) => prefix('-', x),
            Node::Unary(UnaryOp::Not, x) => prefix('!', x),
            Node::Unary(UnaryOp::Unit, x) if rectangle => call("unit", &[x]),
            Node::Unary(UnaryOp::Unit, x) => wrapped(call("unit", &[x])),
            Node::Unary(UnaryOp::Log, x) if exact(i) && !rectangle && self.normal[x.index()] => {
                call("log_normal", &[x])
            }
            Node::Unary(UnaryOp::Log2, x) if exact(i) && !rectangle && self.normal[x.index()] => {
                call("log2_normal", &[x])
            }
            Node::Unary(op, x) => {
                let exact = rectangle || decides[i];
                call(unary_name(*op, exact, self.fast_math), &[x])
            }
            Node::Binary(BinaryOp::Div, x, y) if reciprocal(y).is_some() => Piece {
                text: format!(
                    "{} * {}",
                    at(x).factor(),
                    wrapped(float(reciprocal(y).expect("it is some").to_bits())).within(14)
                ),
                tight: 13,
                depth: 0,
            },
            Node::Binary(BinaryOp::Div, x, y) if logarithm(x) && usual(y).is_some() => {
                let inverse = float(usual(y).expect("it is some").to_bits());
                let [x, y] = [x, y].map(|piece| at(piece).text);
                Piece::atom(format!("quotient({x}, {y}, {})", wrapped(inverse).text))
            }
            Node::Binary(op, x, y) => {
                let float = self.ty(i) == Type::F32 && !decides[i] && !rectangle;
                let name = match op {
                    BinaryOp::Min if float => "fminf",
                    BinaryOp::Max if float => "fmaxf",
                    BinaryOp::Pow if float => "powf",
                    BinaryOp::Rem if float => "remainder_of",
                    BinaryOp::Div if float && self.fast_math => "fast_divide",
                    BinaryOp::Min => "min",
                    BinaryOp::Max => "max",
                    BinaryOp::Pow => "pow",
                    BinaryOp::Mix => "mix",
                    _ => "",
                };
                if !name.is_empty() {
                    return call(name, &[x, y]);
                }
                let (mark, tight) = operator(*op);
                // `a + b < c & d`: comparisons inside logic are easier to read in brackets.
                let (left, right) = match tight {
                    6..=8 => (ATOM - 1, ATOM - 1),
                    9 | 10 => (tight + 1, tight + 1),
                    _ => (tight, tight + 1),
                };
                let [left, right] = [(at(x), left), (at(y), right)].map(|(piece, least)| {
                    let chain = piece.tight == tight && matches!(tight, 6..=8);
                    piece.within(if chain { tight } else { least })
                });
                Piece { text: format!("{left} {mark} {right}"), tight, depth: 0 }
            }
            Node::Select { cond, then, other } => {
                // A literal would be a C++ int.
                let side = |x: &NodeId| match self.program.graph().node(*x) {
                    Node::I32(_) => of_type(at(x).text),
                    _ => at(x),
                };
                let (cond, then, other) = (at(cond), side(then), side(other));
                if rectangle {
                    let (cond, then, other) = (cond.text, then.text, other.text);
                    return Piece::atom(format!("select({cond}, {then}, {other})"));
                }
                let (cond, then) = (cond.within(TERNARY + 1), then.within(TERNARY + 1));
                let text = format!("{cond} ? {then} : {}", other.within(TERNARY));
                Piece { text, tight: TERNARY, depth: 0 }
            }
            Node::Cast(to, x) => {
                if *to == self.ty(x.index()) {
                    return at(x);
                }
                match to {
                    Type::Bool => call("to_bool", &[x]),
                    Type::I32 => call("to_int", &[x]),
                    Type::F32 if rectangle => call("to_float", &[x]),
                    Type::F32 => wrapped(call("to_float", &[x])),
                }
            }
        }
    }

    /// ` + position` of clamped indices in buffer `slot`, row-major; nothing for position 0.
    /// `pieces` are those of the indices; without `within` every index is clamped.
    pub fn position(
        &self,
        slot: usize,
        index: &[NodeId],
        within: Option<&[bool]>,
        pieces: &[Piece],
    ) -> String {
        let graph = self.program.graph();
        let buffer = &self.captures.buffers[slot];
        // Where positions outgrow an int, the first product is the one to widen.
        let mut widen = buffer.elems() > i32::MAX as usize;
        let mut at: Option<Piece> = None;
        for (axis, x) in index.iter().enumerate() {
            let length = self.field(FieldKind::Length { buffer: slot, axis });
            let sure = within.is_some_and(|w| w[axis]);
            let piece = &pieces[axis];
            let term = match graph.node(*x) {
                Node::I32(0) => None,
                Node::I32(v) if sure => Some(Piece::atom(v.to_string())),
                _ if sure => Some(Piece::atom(format!("{}.v", piece.within(ATOM)))),
                _ => Some(Piece::atom(format!("clamp({}, {length})", piece.text))),
            };
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

/// Nodes of `program` that an integer or a root that is not a float hangs on.
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

fn integer(v: i32) -> Piece {
    if v == i32::MIN {
        // The literal's digits alone do not fit an int.
        return Piece { text: format!("{} - 1", v + 1), tight: 12, depth: 0 };
    }
    Piece { text: v.to_string(), tight: if v < 0 { PREFIX } else { ATOM }, depth: 0 }
}

fn float(bits: u32) -> Piece {
    let v = f32::from_bits(bits);
    if !v.is_finite() {
        return Piece::atom(format!("of_bits({bits:#010x}u)"));
    }
    let tight = if v.is_sign_negative() { PREFIX } else { ATOM };
    Piece { text: format!("{v:?}f"), tight, depth: 0 }
}

fn operator(op: BinaryOp) -> (&'static str, u8) {
    match op {
        BinaryOp::Mul => ("*", 13),
        BinaryOp::Div => ("/", 13),
        BinaryOp::Rem => ("%", 13),
        BinaryOp::Add => ("+", 12),
        BinaryOp::Sub => ("-", 12),
        BinaryOp::Lt => ("<", 10),
        BinaryOp::Le => ("<=", 10),
        BinaryOp::Eq => ("==", 9),
        BinaryOp::Ne => ("!=", 9),
        BinaryOp::And => ("&", 8),
        BinaryOp::Xor => ("^", 7),
        BinaryOp::Or => ("|", 6),
        BinaryOp::Min | BinaryOp::Max | BinaryOp::Pow | BinaryOp::Mix => {
            unreachable!("written as calls")
        }
    }
}

/// The function of `mods.cuh` (or the compiler's) for `op`.
fn unary_name(op: UnaryOp, exact: bool, fast: bool) -> &'static str {
    let one = |in_exact, accurate, in_fast| match (exact, fast) {
        (true, _) => in_exact,
        (false, false) => accurate,
        (false, true) => in_fast,
    };
    match op {
        UnaryOp::Abs => one("abs", "fabsf", "fabsf"),
        UnaryOp::Floor => one("floor", "floorf", "floorf"),
        UnaryOp::Exp => one("exp", "exact_exp", "fast_exp"),
        UnaryOp::Exp2 => one("exp2", "exact_exp2", "fast_exp2"),
        UnaryOp::Log => one("log", "exact_log", "fast_log"),
        UnaryOp::Log2 => one("log2", "exact_log2", "fast_log2"),
        UnaryOp::Sqrt => one("sqrt", "sqrtf", "fast_sqrt"),
        UnaryOp::Rsqrt => one("rsqrt", "exact_rsqrt", "fast_rsqrt"),
        UnaryOp::Tanh => one("tanh", "exact_tanh", "fast_tanh"),
        UnaryOp::Sigmoid => one("sigmoid", "exact_sigmoid", "fast_sigmoid"),
        UnaryOp::Erf => one("erf", "exact_erf", "exact_erf"),
        UnaryOp::Sin => one("sin", "sinf", "fast_sin"),
        UnaryOp::Cos => one("cos", "cosf", "fast_cos"),
        UnaryOp::Neg | UnaryOp::Not | UnaryOp::Unit => unreachable!("written by the caller"),
    }
}
