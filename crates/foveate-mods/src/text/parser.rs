//! Tokens to traced expressions, checked as they are read.

use std::collections::HashMap;

use super::lexer::{Token, error, tokens};
use super::words::{BINARY, COMPARE, FROM_END, OPERATORS, TYPES, UNARY, WORDS};
use crate::capture::{AnyBuffer, Scalar};
use crate::catalogue::{self, Arg};
use crate::error::{ModError, ModErrorKind};
use crate::expr::DynExpr;
use crate::ir::{BinaryOp, Leaf, UnaryOp};
use crate::names::{Names, nearest};
use crate::program::ScoreMod;
use crate::value::{ScalarValue, Type};

/// What a text is to be.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Wanted {
    Mask,
    Score,
}

/// Brackets, branches and prefixes inside each other. Deeper text is refused before it can
/// overflow the stack.
const MAX_DEPTH: usize = 80;

pub(super) fn parse(text: &str, names: &Names, wanted: Wanted) -> Result<DynExpr, ModError> {
    let mut reserved = Leaf::ALL.iter().map(|leaf| leaf.name()).chain(WORDS);
    if let Some(name) = reserved.find(|name| names.get_scalar(name).is_some()) {
        let reason = "the text form gives this name a meaning; call the scalar something else";
        return Err(ModErrorKind::Binding { name: name.into(), reason: reason.into() }.into());
    }
    let tokens = tokens(text)?;
    let score = DynExpr::leaf(Leaf::Score);
    let (lets, hidden) = (HashMap::new(), Vec::new());
    let mut parser = Parser { text, tokens, next: 0, names, lets, hidden, score, depth: 0, wanted };
    let value = parser.sequence()?;
    if *parser.token() != Token::End {
        return Err(parser.expected("an operator or the end"));
    }
    let ty = if wanted == Wanted::Mask { Type::Bool } else { Type::F32 };
    parser.as_type(
        value,
        ty,
        match wanted {
            Wanted::Mask => "a mask",
            Wanted::Score => "a score",
        },
    )
}

/// A parsed value and where it starts. Integer literals wait for a type.
#[derive(Clone, Debug)]
struct Value {
    at: usize,
    what: What,
}

#[derive(Clone, Debug)]
enum What {
    Literal(i64),
    Expr(DynExpr),
    Buffer(AnyBuffer),
}

struct Parser<'a> {
    text: &'a str,
    tokens: Vec<(usize, Token)>,
    next: usize,
    names: &'a Names,
    lets: HashMap<String, Value>,
    /// What each `let` of the open blocks hides, to be put back when its block closes.
    hidden: Vec<(String, Option<Value>)>,
    /// What `score` is here: the leaf, or the score before the last `then`.
    score: DynExpr,
    depth: usize,
    wanted: Wanted,
}

type Parsed = Result<Value, ModError>;

impl<'a> Parser<'a> {
    fn token(&self) -> &Token {
        &self.tokens[self.next].1
    }

    fn position(&self) -> usize {
        self.tokens[self.next].0
    }

    fn advance(&mut self) -> Token {
        let token = self.tokens[self.next].1.clone();
        self.next = (self.next + 1).min(self.tokens.len() - 1);
        token
    }

    fn eat(&mut self, mark: &str) -> bool {
        let found = matches!(self.token(), Token::Mark(m) if *m == mark);
        if found {
            self.advance();
        }
        found
    }

    fn eat_word(&mut self, word: &str) -> bool {
        let found = matches!(self.token(), Token::Name(n) if n == word);
        if found {
            self.advance();
        }
        found
    }

    fn need(&mut self, mark: &str) -> Result<(), ModError> {
        if self.eat(mark) { Ok(()) } else { Err(self.expected(&format!("`{mark}`"))) }
    }

    fn fail(&self, at: usize, message: impl Into<String>) -> ModError {
        error(self.text, at, message)
    }

    fn expected(&self, what: &str) -> ModError {
        let found = self.token().shown();
        self.fail(self.position(), format!("expected {what}, found {found}"))
    }

    /// The same error, at a place in the text.
    fn located(&self, at: usize, e: ModError) -> ModError {
        match e.kind() {
            ModErrorKind::Parse { .. } => e,
            kind => self.fail(at, kind.to_string()),
        }
    }

    /// `let`s and a value, then scores that follow it.
    fn sequence(&mut self) -> Parsed {
        let outer_lets = self.hidden.len();
        let outer_score = self.score.clone();
        let mut value = self.block()?;
        while matches!(self.token(), Token::Name(n) if n == "then") {
            let at = self.position();
            if self.wanted == Wanted::Mask {
                return Err(self.fail(at, "`then` joins scores; join masks with `&` or `|`"));
            }
            self.advance();
            self.score = self.as_type(value, Type::F32, "the score before `then`")?;
            let next = self.block()?;
            let next = self.as_type(next, Type::F32, "the score after `then`")?;
            value = Value { at, what: What::Expr(next) };
        }
        self.score = outer_score;
        for (name, before) in self.hidden.split_off(outer_lets).into_iter().rev() {
            match before {
                Some(value) => self.lets.insert(name, value),
                None => self.lets.remove(&name),
            };
        }
        Ok(value)
    }

    fn block(&mut self) -> Parsed {
        while self.eat_word("let") {
            let at = self.position();
            let Token::Name(name) = self.advance() else {
                return Err(self.fail(at, "expected a name after `let`"));
            };
            if Leaf::ALL.iter().any(|l| l.name() == name) {
                return Err(self.fail(at, format!("`{name}` is a coordinate; choose another name")));
            }
            if WORDS.contains(&name.as_str()) {
                return Err(self.fail(at, format!("`{name}` has a meaning; choose another name")));
            }
            self.need("=")?;
            let value = self.binary(0)?;
            self.need(";")?;
            let before = self.lets.insert(name.clone(), value);
            self.hidden.push((name, before));
        }
        self.binary(0)
    }

    /// A named mask or score of the catalogue, on the score as it is here.
    fn named(&self, at: usize, name: &str, args: &[Arg]) -> Option<Parsed> {
        let made = catalogue::resolve(name, args, self.names)?;
        Some(made.map_err(|e| self.located(at, e)).and_then(|e| self.here(at, e)))
    }

    /// `e`, which reads the leaf of the score, on the score as it is here.
    fn here(&self, at: usize, e: DynExpr) -> Parsed {
        if e.ty() == Type::Bool {
            return Ok(Value { at, what: What::Expr(e) });
        }
        let placed = ScoreMod::new(&e)?.at(&|leaf| match leaf {
            Leaf::Score => self.score.clone(),
            leaf => DynExpr::leaf(leaf),
        });
        Ok(Value { at, what: What::Expr(placed.dynamic().clone()) })
    }

    fn nested<T>(
        &mut self,
        f: impl FnOnce(&mut Self) -> Result<T, ModError>,
    ) -> Result<T, ModError> {
        if self.depth == MAX_DEPTH {
            let message = format!("nested over {MAX_DEPTH} deep; name parts of it with `let`");
            return Err(self.fail(self.position(), message));
        }
        self.depth += 1;
        let result = f(self);
        self.depth -= 1;
        result
    }

    /// Operators that bind at least as tightly as `least`.
    fn binary(&mut self, least: u8) -> Parsed {
        let mut left = self.cast()?;
        let mut compared = false;
        loop {
            let Token::Mark(mark) = *self.token() else { return Ok(left) };
            let found = OPERATORS.iter().find(|(m, ..)| *m == mark);
            let Some(&(_, tight, op, swapped)) = found.filter(|(_, t, ..)| *t >= least) else {
                return Ok(left);
            };
            if tight == COMPARE && compared {
                let message = "comparisons do not chain; write `a < b && b < c`";
                return Err(self.fail(self.position(), message));
            }
            compared = tight == COMPARE;
            let at = self.position();
            self.advance();
            let right = self.nested(|p| p.binary(tight + 1))?;
            let start = left.at;
            let (x, y) = if swapped { (right, left) } else { (left, right) };
            left = Value { at: start, what: What::Expr(self.join(at, mark, op, x, y)?) };
        }
    }

    fn cast(&mut self) -> Parsed {
        let mut value = self.prefix()?;
        while self.eat_word("as") {
            let at = self.position();
            let token = self.advance();
            let ty = TYPES.iter().find(|(n, _)| token == Token::Name((*n).to_owned()));
            let Some(&(_, ty)) = ty else {
                return Err(self.fail(at, "expected `bool`, `i32` or `f32` after `as`"));
            };
            value = self.convert(value, ty)?;
        }
        Ok(value)
    }

    fn prefix(&mut self) -> Parsed {
        let at = self.position();
        if self.eat("-") {
            let x = self.nested(Self::prefix)?;
            if let What::Literal(v) = x.what {
                return Ok(Value { at, what: What::Literal(-v) });
            }
            let x = self.expr(x)?;
            return self.unary(at, UnaryOp::Neg, x);
        }
        if self.eat("!") {
            let x = self.nested(Self::prefix)?;
            let x = self.expr(x)?;
            return self.unary(at, UnaryOp::Not, x);
        }
        self.postfix()
    }

    fn postfix(&mut self) -> Parsed {
        let mut value = self.primary()?;
        loop {
            let at = self.position();
            if !self.eat(".") {
                return Ok(value);
            }
            let Token::Name(name) = self.advance() else {
                return Err(self.fail(at, "expected a function after `.`"));
            };
            self.need("(")?;
            let mut args = vec![value];
            self.arguments(")", &mut args)?;
            value = self.call(at + 1, &name, args)?;
        }
    }

    fn primary(&mut self) -> Parsed {
        let at = self.position();
        let constant = |v| Ok(Value { at, what: What::Expr(DynExpr::constant(v)) });
        match self.token().clone() {
            Token::Int(v) => {
                self.advance();
                Ok(Value { at, what: What::Literal(v) })
            }
            Token::Float(v) => {
                self.advance();
                constant(ScalarValue::F32(v))
            }
            Token::Mark("(") => {
                self.advance();
                let value = self.nested(Self::sequence)?;
                self.need(")")?;
                Ok(Value { at, ..value })
            }
            Token::Name(name) => {
                self.advance();
                match name.as_str() {
                    "true" => constant(ScalarValue::Bool(true)),
                    "false" => constant(ScalarValue::Bool(false)),
                    "inf" => constant(ScalarValue::F32(f32::INFINITY)),
                    "nan" => constant(ScalarValue::F32(f32::NAN)),
                    "if" => self.nested(|p| p.branch(at)),
                    _ if self.eat("(") => {
                        let mut args = Vec::new();
                        self.nested(|p| p.arguments(")", &mut args))?;
                        self.call(at, &name, args)
                    }
                    _ if self.eat("[") => self.nested(|p| p.indexed(at, &name)),
                    _ => self.name(at, &name),
                }
            }
            _ => Err(self.expected("a value")),
        }
    }

    fn branch(&mut self, at: usize) -> Parsed {
        let cond = self.binary(0)?;
        let cond = self.as_type(cond, Type::Bool, "the condition of `if`")?;
        self.need("{")?;
        let then = self.sequence()?;
        self.need("}")?;
        if !self.eat_word("else") {
            return Err(self.expected("`else`: an `if` is a value, it needs both sides"));
        }
        let other = if self.eat_word("if") {
            let at = self.position();
            self.nested(|p| p.branch(at))?
        } else {
            self.need("{")?;
            let other = self.sequence()?;
            self.need("}")?;
            other
        };
        let other_at = other.at;
        let (then, other) = self.matched(then, other)?;
        let made = DynExpr::select(cond, then, other);
        let made = made.map_err(|e| self.located(other_at, e))?;
        Ok(Value { at, what: What::Expr(made) })
    }

    fn arguments(&mut self, close: &str, into: &mut Vec<Value>) -> Result<(), ModError> {
        if self.eat(close) {
            return Ok(());
        }
        loop {
            into.push(self.nested(|p| p.binary(0))?);
            if self.eat(close) {
                return Ok(());
            }
            if !self.eat(",") {
                return Err(self.expected(&format!("`,` or `{close}`")));
            }
            if self.eat(close) {
                return Ok(());
            }
        }
    }

    fn indexed(&mut self, at: usize, name: &str) -> Parsed {
        let Some(buffer) = self.names.get_buffer(name).cloned() else {
            return Err(self.fail(at, self.no_buffer(name)));
        };
        let mut index = Vec::new();
        self.arguments("]", &mut index)?;
        self.load(at, &buffer, index, false)
    }

    fn load(&self, at: usize, buffer: &AnyBuffer, index: Vec<Value>, from_end: bool) -> Parsed {
        let index = index
            .into_iter()
            .map(|i| self.as_type(i, Type::I32, "an index"))
            .collect::<Result<Vec<_>, _>>()?;
        let made = DynExpr::read(buffer, index, from_end).map_err(|e| self.located(at, e))?;
        Ok(Value { at, what: What::Expr(made) })
    }

    fn name(&mut self, at: usize, name: &str) -> Parsed {
        if let Some(value) = self.lets.get(name) {
            return Ok(Value { at, what: value.what.clone() });
        }
        let what = if let Some(leaf) = Leaf::ALL.into_iter().find(|l| l.name() == name) {
            if leaf == Leaf::Score && self.wanted == Wanted::Mask {
                return Err(self.fail(at, "a mask cannot read the score"));
            }
            let score = leaf == Leaf::Score;
            What::Expr(if score { self.score.clone() } else { DynExpr::leaf(leaf) })
        } else if let Some(value) = self.names.get_scalar(name) {
            What::Expr(DynExpr::scalar(Scalar { name: name.to_owned(), value }))
        } else if let Some(buffer) = self.names.get_buffer(name) {
            What::Buffer(buffer.clone())
        } else if let Some(made) = self.named(at, name, &[]) {
            return made;
        } else {
            return Err(self.unknown(at, name));
        };
        Ok(Value { at, what })
    }

    fn call(&mut self, at: usize, name: &str, args: Vec<Value>) -> Parsed {
        let count = |n: usize| -> Result<(), ModError> {
            if args.len() == n {
                return Ok(());
            }
            let s = if n == 1 { "" } else { "s" };
            Err(self.fail(at, format!("`{name}` takes {n} argument{s}, not {}", args.len())))
        };
        if let Some(&(_, op)) = UNARY.iter().find(|(n, _)| *n == name) {
            count(1)?;
            let [x] = take(args);
            let ty = match op {
                UnaryOp::Abs | UnaryOp::Detach | UnaryOp::Unit => Type::I32,
                _ => Type::F32,
            };
            let x = self.literal_as(x, ty)?;
            return self.unary(at, op, x);
        }
        if let Some(&(_, op)) = BINARY.iter().find(|(n, _)| *n == name) {
            count(2)?;
            let [x, y] = take(args);
            return Ok(Value { at, what: What::Expr(self.join(at, name, op, x, y)?) });
        }
        if let Some(&(_, ty)) = TYPES.iter().find(|(n, _)| *n == name) {
            count(1)?;
            let [x] = take(args);
            return self.convert(Value { at, ..x }, ty);
        }
        if name == FROM_END {
            let mut args = args.into_iter();
            let buffer = match args.next() {
                Some(Value { what: What::Buffer(buffer), .. }) => buffer,
                _ => {
                    let message = "`from_end` takes a captured buffer and its indices, as in \
                                   `bias.from_end(q - kv)`";
                    return Err(self.fail(at, message));
                }
            };
            return self.load(at, &buffer, args.collect(), true);
        }
        if name == "select" {
            count(3)?;
            let [cond, x, y] = take(args);
            let cond = self.as_type(cond, Type::Bool, "the condition of `select`")?;
            let (x, y) = self.matched(x, y)?;
            let made = DynExpr::select(cond, x, y).map_err(|e| self.located(at, e))?;
            return Ok(Value { at, what: What::Expr(made) });
        }
        let args: Vec<Arg> = args.into_iter().map(argument).collect();
        self.named(at, name, &args).unwrap_or_else(|| Err(self.unknown(at, name)))
    }

    fn unary(&self, at: usize, op: UnaryOp, x: DynExpr) -> Parsed {
        let made = DynExpr::unary(op, x).map_err(|e| self.located(at, e))?;
        Ok(Value { at, what: What::Expr(made) })
    }

    fn join(
        &self,
        at: usize,
        name: &str,
        op: BinaryOp,
        x: Value,
        y: Value,
    ) -> Result<DynExpr, ModError> {
        let (x, y) = self.matched(x, y)?;
        if x.ty() != y.ty() {
            let message = format!(
                "`{name}` takes two values of one type, not {} and {}; convert one with \
                 `as i32` or `as f32`",
                x.ty(),
                y.ty()
            );
            return Err(self.fail(at, message));
        }
        if matches!(name, "&&" | "||") && x.ty() != Type::Bool {
            return Err(self.fail(at, format!("`{name}` takes bool, not {}", x.ty())));
        }
        DynExpr::binary(op, x, y).map_err(|e| match e.kind() {
            ModErrorKind::Type { expected, found, .. } => {
                self.fail(at, format!("`{name}` takes {expected}, not {found}"))
            }
            _ => self.located(at, e),
        })
    }

    /// Two operands; a literal takes the other's type.
    fn matched(&self, x: Value, y: Value) -> Result<(DynExpr, DynExpr), ModError> {
        let of = |v: &Value| match &v.what {
            What::Expr(e) => e.ty(),
            _ => Type::I32,
        };
        let (tx, ty) = (of(&x), of(&y));
        Ok((self.literal_as(x, ty)?, self.literal_as(y, tx)?))
    }

    fn literal_as(&self, value: Value, ty: Type) -> Result<DynExpr, ModError> {
        match value.what {
            What::Literal(v) if ty == Type::F32 => {
                Ok(DynExpr::constant(ScalarValue::F32(v as f32)))
            }
            _ => self.expr(value),
        }
    }

    fn expr(&self, value: Value) -> Result<DynExpr, ModError> {
        match value.what {
            What::Expr(e) => Ok(e),
            What::Literal(v) => match i32::try_from(v) {
                Ok(v) => Ok(DynExpr::constant(ScalarValue::I32(v))),
                Err(_) => Err(self.fail(value.at, format!("{v} does not fit an i32"))),
            },
            What::Buffer(buffer) => {
                let axes = buffer.shape().len();
                let message = format!(
                    "`{}` is a buffer; index its axes ({axes}) with `[...]`",
                    buffer.name()
                );
                Err(self.fail(value.at, message))
            }
        }
    }

    fn as_type(&self, value: Value, ty: Type, role: &str) -> Result<DynExpr, ModError> {
        let at = value.at;
        let e = self.literal_as(value, ty)?;
        if e.ty() == ty {
            return Ok(e);
        }
        Err(self.fail(at, format!("{role} is {ty}, but this is {}", e.ty())))
    }

    fn convert(&self, value: Value, ty: Type) -> Parsed {
        let at = value.at;
        let e = self.literal_as(value, ty)?;
        Ok(Value { at, what: What::Expr(e.cast(ty)) })
    }

    fn no_buffer(&self, name: &str) -> String {
        let is = if self.lets.contains_key(name) {
            Some("the name of a value")
        } else if Leaf::ALL.iter().any(|l| l.name() == name) {
            Some("a coordinate")
        } else {
            self.names.get_scalar(name).map(|_| "a run-time scalar")
        };
        if let Some(is) = is {
            return format!("`{name}` is {is}; only captured buffers are indexed with `[...]`");
        }
        let known: Vec<&str> = self.names.buffer_names().collect();
        if known.is_empty() {
            return format!("there is no captured buffer `{name}`; none is given");
        }
        let near = nearest(name, known.iter().copied());
        let hint = near.map_or(String::new(), |n| format!("; did you mean `{n}`?"));
        format!("there is no captured buffer `{name}`; given are {}{hint}", known.join(", "))
    }

    fn unknown(&self, at: usize, name: &str) -> ModError {
        let mut known: Vec<&str> = vec!["select", "then", "let", "if"];
        known.extend(Leaf::ALL.iter().map(|l| l.name()));
        known.extend(UNARY.iter().map(|f| f.0).chain(BINARY.iter().map(|f| f.0)));
        let named: Vec<&str> = catalogue::names().collect();
        known.extend(named);
        known.extend(self.names.iter().chain(self.lets.keys().map(String::as_str)));
        let near = nearest(name, known);
        let hint = near.map_or(String::new(), |n| format!("; did you mean `{n}`?"));
        self.fail(at, format!("there is no `{name}`{hint}"))
    }
}

fn take<const N: usize>(args: Vec<Value>) -> [Value; N] {
    args.try_into().expect("the count was checked")
}

fn argument(value: Value) -> Arg {
    match value.what {
        What::Literal(v) => Arg::Int(v),
        What::Buffer(b) => Arg::Buffer(b),
        What::Expr(e) => match e.constant_value() {
            Some(ScalarValue::F32(v)) => Arg::Float(v),
            _ => Arg::Expr(e),
        },
    }
}
