//! Masks and scores in Foveate's text form, with captured tensors and numbers by name.

use std::collections::HashMap;

use foveate::mods::text::{Names, parse_mask, parse_score};
use foveate::mods::{DynExpr, Node, NodeId, Program, Type};
use foveate::{AnyBuffer, MaskMod, Scalar, ScalarValue};
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;

use crate::capture::Capture;
use crate::dtype::Dtype;
use crate::expr::Expr;
use crate::value::{self, Number, Value};

/// Characters of a mask that an error shows.
const LONGEST_SHOWN: usize = 160;

/// The mask that `text` says, part of the trace that runs. Tensors and numbers are looked up by name, traced
/// values among the numbers: the element of a 0-d tensor, a captured integer of a graph; `heads` and `positions`
/// are what the mask is asked about.
#[pyfunction]
pub fn parse(
    text: &str,
    tensors: Vec<(String, Py<Capture>)>,
    numbers: Vec<(String, Bound<'_, PyAny>)>,
    heads: usize,
    positions: usize,
) -> PyResult<Expr> {
    let wrong = |what: &str| {
        let mut text = text.split_whitespace().collect::<Vec<_>>().join(" ");
        if let Some((at, _)) = text.char_indices().nth(LONGEST_SHOWN) {
            text.replace_range(at.., "...");
        }
        PyValueError::new_err(format!("mask `{text}`: {what}"))
    };
    // A coordinate comes before a captured buffer of its name; of numbers the text form says so itself.
    for (name, _) in &tensors {
        let as_number = Names::new().scalar(name.as_str(), ScalarValue::I32(0));
        if parse_mask("kv >= 0", &as_number).is_err() {
            return Err(wrong(&format!(
                "the text form gives `{name}` a meaning; call the tensor something else"
            )));
        }
    }
    let (mut scalars, mut traced) = (Vec::new(), HashMap::new());
    for (name, number) in &numbers {
        if let Ok(expr) = number.cast::<Expr>() {
            let expr = &expr.get().0.expr;
            scalars.push((name, stand_in(expr)));
            traced.insert(name.as_str(), expr.clone());
            continue;
        }
        let value = match value::number(number)? {
            Some(Number::Bool(v)) => ScalarValue::Bool(v),
            Some(Number::Int(v)) => ScalarValue::I32(
                v.try_into()
                    .map_err(|_| wrong(&format!("`{name}` is {v}, which does not fit 32 bits")))?,
            ),
            Some(Number::Float(v)) => ScalarValue::F32(v as f32),
            None => return Err(wrong(&format!("`{name}` must be a number"))),
        };
        scalars.push((name, value));
    }
    let names_but = |left_out: Option<&String>| {
        let mut names = Names::new().heads(heads).positions(positions);
        for (name, capture) in tensors.iter().filter(|(name, _)| Some(name) != left_out) {
            names = names.buffer_as(name, capture.get().buffer());
        }
        for (name, value) in scalars.iter().filter(|(name, _)| Some(*name) != left_out) {
            names = names.scalar(name.as_str(), *value);
        }
        names
    };
    let mask = parse_mask(text, &names_but(None)).map_err(|e| {
        let mut said = in_short(&e.to_string());
        for (name, capture) in &tensors {
            said =
                said.replace(&format!("`{}`", capture.get().buffer().name()), &format!("`{name}`"));
            said = said.replace(
                &format!("`{name}` cannot be bound: it holds f32, not i32"),
                &format!("`{name}` must hold integers, not floats; give `{name}.int()`"),
            );
        }
        wrong(&said)
    })?;
    let in_words =
        |name: &str| text.split(|c: char| !c.is_alphanumeric() && c != '_').any(|w| w == name);
    let given = tensors.iter().map(|(name, _)| name).chain(scalars.iter().map(|(name, _)| *name));
    for name in given.filter(|name| !in_words(name)) {
        // A named mask may read it, as `document` reads `doc`: the text cannot be parsed without it then.
        if parse_mask(text, &names_but(Some(name))).is_ok() {
            return Err(wrong(&format!("`{name}` is given, and the mask does not read it")));
        }
    }
    let expr = renamed(&mask, &traced);
    Ok(Expr(Value { expr, dtype: Dtype::Bool, range: None, learns: false }))
}

/// A scalar that a text reads in the place of a traced value, which is put there when it is read: of its type, and
/// of its value where it is a scalar.
fn stand_in(expr: &DynExpr) -> ScalarValue {
    let program = Program::build(std::slice::from_ref(expr));
    match (program.graph().nodes(), program.graph().scalars(), expr.ty()) {
        ([_], [scalar], _) => scalar.value,
        (_, _, Type::Bool) => ScalarValue::Bool(true),
        (_, _, Type::I32) => ScalarValue::I32(1),
        (_, _, Type::F32) => ScalarValue::F32(1.0),
    }
}

/// The mask or score that `text` says, as [`crate::traced::Traced`] prints it, of these captured buffers and
/// run-time scalars.
///
/// # Errors
/// When it is neither, or an integer does not fit 32 bits.
pub fn read<'a>(
    text: &str,
    buffers: impl Iterator<Item = &'a AnyBuffer>,
    scalars: &[(String, i64)],
    mask: bool,
) -> PyResult<Program> {
    let mut names = Names::new();
    for buffer in buffers {
        names = names.buffer(buffer);
    }
    for (name, value) in scalars {
        names = names.scalar(name, ScalarValue::I32(narrow(*value)?));
    }
    match mask {
        true => parse_mask(text, &names).map(|m| m.program().clone()),
        false => parse_score(text, &names).map(|s| s.program().clone()),
    }
    .map_err(|e| PyValueError::new_err(format!("program `{text}`: {}", in_short(&e.to_string()))))
}

/// A captured integer as programs hold it.
///
/// # Errors
/// When it does not fit.
pub fn narrow(value: i64) -> PyResult<i32> {
    i32::try_from(value).map_err(|_| {
        PyValueError::new_err(format!("a captured integer is {value}, which does not fit 32 bits"))
    })
}

/// The first line of an error of the text form: below it the others show the text, which is said already.
fn in_short(message: &str) -> String {
    message.lines().next().unwrap_or_default().to_owned()
}

/// The mask with run-time scalars of this trace, or the `traced` values of their names: two named masks may have
/// one of the same name, and a plan sets scalars by name.
fn renamed(mask: &MaskMod, traced: &HashMap<&str, DynExpr>) -> DynExpr {
    let program: &Program = mask.program();
    let graph = program.graph();
    let scalar = |s: &Scalar| match traced.get(s.name.as_str()) {
        Some(expr) => expr.clone(),
        None => value::scalar(s.value),
    };
    let scalars: Vec<_> = graph.scalars().iter().map(scalar).collect();
    let mut made: Vec<DynExpr> = Vec::with_capacity(graph.nodes().len());
    for node in graph.nodes() {
        let of = |id: &NodeId| made[id.index()].clone();
        let expr = match node {
            Node::Leaf(leaf) => Ok(DynExpr::leaf(*leaf)),
            Node::Bool(v) => Ok(DynExpr::constant(ScalarValue::Bool(*v))),
            Node::I32(v) => Ok(DynExpr::constant(ScalarValue::I32(*v))),
            Node::F32(v) => Ok(DynExpr::constant(ScalarValue::F32(f32::from_bits(*v)))),
            Node::Scalar(slot) => Ok(scalars[*slot as usize].clone()),
            Node::Load { buffer, index, from_end } => {
                let buffer = &graph.buffers()[*buffer as usize];
                let index = index.iter().map(of).collect();
                match from_end {
                    true => DynExpr::load_from_end(buffer, index),
                    false => DynExpr::load(buffer, index),
                }
            }
            Node::Unary(op, x) => DynExpr::unary(*op, of(x)),
            Node::Binary(op, x, y) => DynExpr::binary(*op, of(x), of(y)),
            Node::Select { cond, then, other } => DynExpr::select(of(cond), of(then), of(other)),
            Node::Cast(ty, x) => Ok(of(x).cast(*ty)),
        };
        made.push(expr.expect("the nodes of a program are well-typed"));
    }
    made[program.roots()[0].index()].clone()
}
