//! The expression of one node.

use foveate_mods::ir::{BinaryOp, UnaryOp};
use foveate_mods::{Leaf, Node, NodeId, Type};

use super::{ATOM, FieldKind, Over, PREFIX, Piece, Printer, TERNARY, unwrapped};

/// Prints node `i` of a program from the texts of the nodes before it.
#[derive(Clone, Copy)]
pub(super) struct NodePrinter<'a> {
    pub printer: &'a Printer<'a>,
    pub i: usize,
    /// The nodes before it.
    pub pieces: &'a [Piece],
    /// Of every node, whether an integer or a root that is not a float depends on it.
    pub decides: &'a [bool],
}

impl NodePrinter<'_> {
    pub fn piece(self, node: &Node) -> Piece {
        match node {
            Node::Leaf(leaf) => self.leaf(*leaf),
            Node::Bool(v) => self.wrapped(Piece::atom(v.to_string())),
            Node::I32(v) => integer(*v),
            Node::F32(v) => self.wrapped(float(*v)),
            Node::Scalar(slot) => self.scalar(*slot),
            Node::Load { buffer, index, from_end } => self.load(*buffer, index, *from_end),
            Node::Unary(op, x) => self.unary(*op, *x),
            Node::Binary(BinaryOp::Div, x, y) => self.division(*x, *y),
            Node::Binary(op, x, y) => self.binary(*op, *x, *y),
            Node::Select { cond, then, other } => self.select(*cond, *then, *other),
            Node::Cast(to, x) => self.cast(*to, *x),
        }
    }

    fn leaf(self, leaf: Leaf) -> Piece {
        match leaf {
            Leaf::Score if self.is_range() => Piece::atom("FloatRange::any()"),
            Leaf::Score => self.wrapped(Piece::atom("score")),
            Leaf::Q | Leaf::Kv => Piece::atom(leaf.name()),
            _ => self.wrapped(Piece::atom(format!("place.{}", leaf.name()))),
        }
    }

    fn scalar(self, slot: u32) -> Piece {
        let field =
            self.printer.field(FieldKind::Scalar(self.printer.slots.scalars[slot as usize]));
        let value = match self.printer.ty(self.i) {
            Type::Bool => format!("to_bool({field})"),
            Type::I32 | Type::F32 => field,
        };
        self.wrapped(Piece::atom(value))
    }

    fn load(self, buffer: u32, index: &[NodeId], from_end: bool) -> Piece {
        let printer = self.printer;
        let slot = printer.slots.buffers[buffer as usize];
        let elems = printer.field(FieldKind::Buffer(slot));
        if !self.is_range() {
            let within = &printer.within[self.i];
            let indices: Vec<Piece> = index.iter().map(|&x| self.operand(x)).collect();
            let position = printer.place(slot, (index, from_end), within, &indices);
            return self.wrapped(Piece::atom(format!("load({elems}{position})")));
        }
        let axis = |(axis, &x): (usize, &NodeId)| {
            let length = printer.field(FieldKind::Length { buffer: slot, axis });
            let index = self.operand(x).text;
            let position = match from_end && !printer.within[self.i][axis] {
                true => format!("range_from_end({index}, {length})"),
                false => index,
            };
            match printer.captures.buffers[slot].is_dense() {
                true => format!("{{{position}, {length}}}"),
                false => {
                    let stride = printer.field(FieldKind::Stride { buffer: slot, axis });
                    format!("{{{position}, {length}, {stride}}}")
                }
            }
        };
        let axes: Vec<String> = index.iter().enumerate().map(axis).collect();
        let (axes, ranges) = (axes.join(", "), printer.field(FieldKind::Ranges(slot)));
        Piece::atom(format!("load({elems}, {ranges}, {{{axes}}}, within)"))
    }

    fn unary(self, op: UnaryOp, x: NodeId) -> Piece {
        let normal = self.is_exact(self.i) && !self.is_range() && self.printer.normal[x.index()];
        match op {
            UnaryOp::Neg => self.prefix('-', x),
            UnaryOp::Not => self.prefix('!', x),
            UnaryOp::Detach => self.operand(x),
            UnaryOp::Unit if self.is_range() => self.call("unit", &[x]),
            UnaryOp::Unit => self.wrapped(self.call("unit", &[x])),
            UnaryOp::Log if normal => self.call("log_normal", &[x]),
            UnaryOp::Log2 if normal => self.call("log2_normal", &[x]),
            _ => {
                let exact = self.is_range() || self.decides[self.i];
                self.call(unary_name(op, exact, self.printer.fast_math), &[x])
            }
        }
    }

    fn prefix(self, mark: char, x: NodeId) -> Piece {
        let text = format!("{mark}{}", self.operand(x).within(PREFIX));
        Piece { text, tight: PREFIX, depth: 0 }
    }

    /// A division by a constant is a product where that gives the same bits, or near ones suffice.
    fn division(self, x: NodeId, y: NodeId) -> Piece {
        if let Some(inverse) = self.reciprocal(y) {
            let inverse = self.wrapped(float(inverse.to_bits())).within(14);
            let text = format!("{} * {inverse}", self.operand(x).factor());
            return Piece { text, tight: 13, depth: 0 };
        }
        if self.is_logarithm(x)
            && let Some(inverse) = self.usual_reciprocal(y)
        {
            let inverse = self.wrapped(float(inverse.to_bits())).text;
            let [x, y] = [x, y].map(|operand| self.operand(operand).text);
            return Piece::atom(format!("quotient({x}, {y}, {inverse})"));
        }
        self.binary(BinaryOp::Div, x, y)
    }

    /// What to multiply by instead of dividing by `y`: the same bits for a power of two.
    fn reciprocal(self, y: NodeId) -> Option<f32> {
        let Node::F32(bits) = *self.printer.program.graph().node(y) else { return None };
        let (value, inverse) = (f32::from_bits(bits), f32::from_bits(bits).recip());
        let near = self.printer.fast_math && !self.decides[self.i] && !self.is_range();
        let same = bits & 0x7f_ffff == 0 || near;
        (same && value.is_normal() && inverse.is_normal()).then_some(inverse)
    }

    /// A logarithm of what is positive, finite and not subnormal is 0 or far from where a quotient
    /// by a constant of usual size underflows or overflows.
    fn is_logarithm(self, x: NodeId) -> bool {
        let node = self.printer.program.graph().node(x);
        let Node::Unary(UnaryOp::Log | UnaryOp::Log2, of) = *node else { return false };
        self.is_exact(self.i) && !self.is_range() && self.printer.normal[of.index()]
    }

    /// The reciprocal of a constant of usual size.
    fn usual_reciprocal(self, y: NodeId) -> Option<f32> {
        let Node::F32(bits) = *self.printer.program.graph().node(y) else { return None };
        let value = f32::from_bits(bits);
        (1e-6..1e6).contains(&value.abs()).then(|| value.recip())
    }

    /// What integers are divided by, if that is a run-time scalar.
    fn divisor(self, op: BinaryOp, y: NodeId) -> Option<Piece> {
        let Node::Scalar(slot) = *self.printer.program.graph().node(y) else { return None };
        let divides = matches!(op, BinaryOp::Div | BinaryOp::Rem) && !self.is_range();
        if !divides || self.printer.ty(self.i) != Type::I32 {
            return None;
        }
        let scalar = self.printer.slots.scalars[slot as usize];
        Some(Piece::atom(self.printer.field(FieldKind::Divisor(scalar))))
    }

    fn binary(self, op: BinaryOp, x: NodeId, y: NodeId) -> Piece {
        let plain =
            self.printer.ty(self.i) == Type::F32 && !self.decides[self.i] && !self.is_range();
        if let Some(name) = binary_name(op, plain, self.printer.fast_math) {
            return self.call(name, &[x, y]);
        }
        let (mark, tight) = operator(op);
        // `a + b < c & d`: comparisons inside logic are easier to read in brackets.
        let (left, right) = match tight {
            6..=8 => (ATOM - 1, ATOM - 1),
            9 | 10 => (tight + 1, tight + 1),
            _ => (tight, tight + 1),
        };
        let by = self.divisor(op, y).unwrap_or_else(|| self.operand(y));
        let [left, right] = [(self.operand(x), left), (by, right)].map(|(piece, least)| {
            let chain = piece.tight == tight && matches!(tight, 6..=8);
            piece.within(if chain { tight } else { least })
        });
        Piece { text: format!("{left} {mark} {right}"), tight, depth: 0 }
    }

    fn select(self, cond: NodeId, then: NodeId, other: NodeId) -> Piece {
        // A literal would be a C++ int.
        let side = |x: NodeId| match self.printer.program.graph().node(x) {
            Node::I32(_) => self.of_type(self.operand(x).text),
            _ => self.operand(x),
        };
        let (cond, then, other) = (self.operand(cond), side(then), side(other));
        if self.is_range() {
            let (cond, then, other) = (cond.text, then.text, other.text);
            return Piece::atom(format!("select({cond}, {then}, {other})"));
        }
        let (cond, then) = (cond.within(TERNARY + 1), then.within(TERNARY + 1));
        let text = format!("{cond} ? {then} : {}", other.within(TERNARY));
        Piece { text, tight: TERNARY, depth: 0 }
    }

    fn cast(self, to: Type, x: NodeId) -> Piece {
        if to == self.printer.ty(x.index()) {
            return self.operand(x);
        }
        match to {
            Type::Bool => self.call("to_bool", &[x]),
            Type::I32 => self.call("to_int", &[x]),
            Type::F32 if self.is_range() => self.call("to_float", &[x]),
            Type::F32 => self.wrapped(self.call("to_float", &[x])),
        }
    }

    fn is_range(self) -> bool {
        self.printer.over == Over::Rectangle
    }

    /// Whether a node is a float that something depends on.
    fn is_exact(self, node: usize) -> bool {
        self.decides[node] && self.printer.ty(node) == Type::F32
    }

    /// Node `x` where this node reads it: an exact float is a plain one where nothing depends on
    /// the result.
    fn operand(self, x: NodeId) -> Piece {
        let piece = self.pieces[x.index()].clone();
        let plain = !self.is_range() && self.is_exact(x.index()) && !self.decides[self.i];
        if plain { unwrapped(piece) } else { piece }
    }

    fn call(self, name: &str, args: &[NodeId]) -> Piece {
        let args: Vec<String> = args.iter().map(|&x| self.operand(x).text).collect();
        Piece::atom(format!("{name}({})", args.join(", ")))
    }

    fn of_type(self, text: String) -> Piece {
        let name = self.printer.type_name(self.printer.ty(self.i), self.decides[self.i]);
        Piece::atom(format!("{name}({text})"))
    }

    /// A plain float that has to become an exact one, or a value that becomes a range.
    fn wrapped(self, piece: Piece) -> Piece {
        if self.is_range() || self.is_exact(self.i) { self.of_type(piece.text) } else { piece }
    }
}

/// The function that an operation of two operands is written as; the others are operators. `plain`:
/// of floats that nothing depends on.
fn binary_name(op: BinaryOp, plain: bool, fast_math: bool) -> Option<&'static str> {
    Some(match op {
        BinaryOp::Min if plain => "fminf",
        BinaryOp::Max if plain => "fmaxf",
        BinaryOp::Pow if plain => "powf",
        BinaryOp::Rem if plain => "remainder_of",
        BinaryOp::Div if plain && fast_math => "fast_divide",
        BinaryOp::Min => "min",
        BinaryOp::Max => "max",
        BinaryOp::Pow => "pow",
        BinaryOp::Mix => "mix",
        BinaryOp::Shl => "shift_left",
        BinaryOp::Shr => "shift_right",
        _ => return None,
    })
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
        BinaryOp::Min
        | BinaryOp::Max
        | BinaryOp::Pow
        | BinaryOp::Mix
        | BinaryOp::Shl
        | BinaryOp::Shr => unreachable!("written as calls"),
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
        UnaryOp::Neg | UnaryOp::Not | UnaryOp::Unit | UnaryOp::Detach => {
            unreachable!("written by the caller")
        }
    }
}
