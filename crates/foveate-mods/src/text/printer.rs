//! Programs to text.
//!
//! What is used more than once gets a `let`, so the text is as long as the graph, not as the
//! tree; so does what would nest too deep for the parser. Buffers and scalars keep their names
//! where those can be written and differ; others get new ones.

use std::collections::{HashMap, HashSet};

use super::words::{COMPARE, FROM_END, WORDS, function_name, operator};
use crate::ir::{Leaf, Node, NodeId, UnaryOp};
use crate::names::Names;
use crate::program::Program;
use crate::value::ScalarValue;

/// Deepest nesting of one expression; well below what the parser takes.
const MAX_DEPTH: usize = 20;

/// A node's text, how tightly its outermost operator binds, and how deep it nests.
#[derive(Clone, Debug)]
struct Piece {
    text: String,
    tight: u8,
    depth: usize,
}

/// Binds tighter than every operator.
const ATOM: u8 = 10;
const PREFIX: u8 = 8;

pub(super) fn print(program: &Program) -> (String, Names) {
    let graph = program.graph();
    let root = program.roots()[0];
    // A capture may be called like a named mask or score: formulas are printed, and captures come
    // first when they are read.
    let mut taken: HashSet<String> = Leaf::ALL.map(|l| l.name().to_owned()).into();
    taken.extend(WORDS.map(str::to_owned));
    // Where numbering goes on, by stem.
    let mut numbered: HashMap<String, usize> = HashMap::new();
    let mut names = Names::new();
    let mut fresh = |wanted: &str| {
        let plain: String =
            wanted.chars().map(|c| if c.is_alphanumeric() { c } else { '_' }).collect();
        let starts = plain.starts_with(|c: char| c.is_alphabetic() || c == '_');
        let stem = if starts { plain } else { format!("_{plain}") };
        let mut name = stem.clone();
        while !taken.insert(name.clone()) {
            let n = numbered.entry(stem.clone()).or_insert(1);
            *n += 1;
            name = format!("{stem}_{n}");
        }
        name
    };
    let buffers: Vec<String> = graph.buffers().iter().map(|b| fresh(b.name())).collect();
    for (name, buffer) in buffers.iter().zip(graph.buffers()) {
        names = names.buffer_as(name, buffer);
    }
    let scalars: Vec<String> = graph.scalars().iter().map(|s| fresh(&s.name)).collect();
    for (name, scalar) in scalars.iter().zip(graph.scalars()) {
        names = names.scalar(name, scalar.value);
    }

    let mut uses = vec![0usize; graph.nodes().len()];
    graph.nodes().iter().for_each(|n| n.for_each_operand(|x| uses[x.index()] += 1));
    let mut lets = String::new();
    let mut pieces: Vec<Piece> = Vec::with_capacity(graph.nodes().len());
    for (i, node) in graph.nodes().iter().enumerate() {
        let atom = |text: String| Piece { text, tight: ATOM, depth: 0 };
        let depth = {
            let mut deepest = 0;
            node.for_each_operand(|x| deepest = deepest.max(pieces[x.index()].depth));
            deepest + 1
        };
        let at = |x: &NodeId, tight: u8| {
            let piece = &pieces[x.index()];
            if piece.tight >= tight { piece.text.clone() } else { format!("({})", piece.text) }
        };
        let call = |name: &str, args: &[&NodeId]| {
            let args: Vec<String> = args.iter().map(|x| at(x, 0)).collect();
            Piece { text: format!("{name}({})", args.join(", ")), tight: ATOM, depth }
        };
        let piece = match node {
            Node::Leaf(leaf) => atom(leaf.name().to_owned()),
            Node::Bool(v) => atom(v.to_string()),
            Node::I32(v) => literal(v.to_string()),
            Node::F32(v) => literal(float(f32::from_bits(*v))),
            Node::Scalar(slot) => atom(scalars[*slot as usize].clone()),
            Node::Load { buffer, index, from_end } => {
                let index: Vec<String> = index.iter().map(|x| at(x, 0)).collect();
                let (buffer, index) = (&buffers[*buffer as usize], index.join(", "));
                let text = match from_end {
                    true => format!("{buffer}.{FROM_END}({index})"),
                    false => format!("{buffer}[{index}]"),
                };
                Piece { text, tight: ATOM, depth }
            }
            Node::Unary(op @ (UnaryOp::Neg | UnaryOp::Not), x) => {
                let mark = if *op == UnaryOp::Neg { '-' } else { '!' };
                Piece { text: format!("{mark}{}", at(x, PREFIX)), tight: PREFIX, depth }
            }
            Node::Unary(op, x) => call(function_name(Ok(*op)).expect("a function"), &[x]),
            Node::Binary(op, x, y) => match operator(*op) {
                Some((mark, tight)) => {
                    let text = format!("{} {mark} {}", at(x, left(tight)), at(y, tight + 1));
                    Piece { text, tight, depth }
                }
                None => call(function_name(Err(*op)).expect("a function"), &[x, y]),
            },
            Node::Select { cond, then, other } => {
                let (c, t, o) = (at(cond, 0), at(then, 0), at(other, 0));
                Piece { text: format!("if {c} {{ {t} }} else {{ {o} }}"), tight: 0, depth }
            }
            Node::Cast(ty, x) => call(&ty.to_string(), &[x]),
        };
        let id = NodeId(i as u32);
        let shared = uses[i] > 1 && piece.depth > 0;
        let named = id != root && (shared || piece.depth >= MAX_DEPTH);
        pieces.push(if named {
            let name = fresh("x");
            lets.push_str(&format!("let {name} = {}; ", piece.text));
            atom(name)
        } else {
            piece
        });
    }
    (lets + &pieces[root.index()].text, names)
}

/// What a left operand must bind like: comparisons do not chain, other operators do.
fn left(tight: u8) -> u8 {
    if tight == COMPARE { tight + 1 } else { tight }
}

fn literal(text: String) -> Piece {
    let tight = if text.starts_with('-') { PREFIX } else { ATOM };
    Piece { text, tight, depth: 0 }
}

fn float(v: f32) -> String {
    match ScalarValue::F32(v) {
        _ if v.is_nan() => "nan".to_owned(),
        _ if v.is_infinite() => if v > 0.0 { "inf" } else { "-inf" }.to_owned(),
        _ => format!("{v:?}"),
    }
}
