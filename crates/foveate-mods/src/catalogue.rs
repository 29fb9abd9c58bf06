//! Masks and scores by name: what the text form calls, and the table that `--help` prints.
//!
//! One list holds name, signature, a line of documentation and the constructor, so that what is
//! documented is what can be called. Arguments are values or captured buffers; a buffer that is
//! not given is looked up under its usual name (`document` reads `doc`).

use crate::capture::{AnyBuffer, Buffer};
use crate::error::ModError;
use crate::expr::{DynExpr, Op};
use crate::masks;
use crate::names::Names;
use crate::parameter::{Parameter, argument};
use crate::program::{MaskMod, ScoreMod};
use crate::scores;
use crate::value::{Element, ScalarValue, Type};

/// An argument of a named mask or score, as written.
#[derive(Clone, Debug)]
pub enum Arg {
    /// An integer literal.
    Int(i64),
    /// A float literal.
    Float(f32),
    /// The name of a captured buffer.
    Buffer(AnyBuffer),
    /// Anything else.
    Expr(DynExpr),
}

/// A row of the table.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Entry {
    /// The name, without arguments.
    pub name: &'static str,
    /// How it is called, `name(arguments)`; an argument in brackets may be left out.
    pub signature: &'static str,
    /// What it does, in one line.
    pub doc: &'static str,
    /// True for a score, false for a mask.
    pub is_score: bool,
}

struct NamedCall<'a> {
    name: &'a str,
    signature: &'a str,
    args: &'a [Arg],
    names: &'a Names,
}

impl NamedCall<'_> {
    fn refuse<T>(&self, reason: impl std::fmt::Display) -> Result<T, ModError> {
        Err(argument(self.name, format!("{reason}; write `{}`", self.signature)))
    }

    fn at_most(&self, count: usize) -> Result<(), ModError> {
        match self.args.len() {
            given if given > count => {
                self.refuse(format!("takes at most {count} arguments, not {given}"))
            }
            _ => Ok(()),
        }
    }

    /// Argument `i` of a size: an integer, or an expression that is an i32.
    fn size(&self, i: usize) -> Result<Parameter<i32>, ModError> {
        match self.args.get(i) {
            Some(Arg::Expr(e)) if e.ty() == Type::I32 => Ok(e.clone().typed::<i32>()?.into()),
            _ => self.int(i).map(Parameter::from),
        }
    }

    fn optional_int(&self, i: usize) -> Result<Option<i32>, ModError> {
        match self.args.get(i) {
            None => Ok(None),
            Some(Arg::Int(v)) => match i32::try_from(*v) {
                Ok(v) => Ok(Some(v)),
                Err(_) => self.refuse(format!("argument {} does not fit an i32: {v}", i + 1)),
            },
            Some(Arg::Expr(e)) if e.ty() == Type::I32 => {
                self.refuse(format!("argument {} must be an integer written out", i + 1))
            }
            Some(_) => self.refuse(format!("argument {} must be an integer", i + 1)),
        }
    }

    fn int(&self, i: usize) -> Result<i32, ModError> {
        let found = self.optional_int(i)?;
        found.map_or_else(|| self.refuse(format!("argument {} is missing", i + 1)), Ok)
    }

    /// Argument `i`: a number, or an expression that is an f32.
    fn float(&self, i: usize) -> Result<Parameter<f32>, ModError> {
        match self.args.get(i) {
            Some(Arg::Float(v)) => Ok((*v).into()),
            Some(Arg::Int(v)) => Ok((*v as f32).into()),
            Some(Arg::Expr(e)) if e.ty() == Type::F32 => Ok(e.clone().typed::<f32>()?.into()),
            Some(_) => self.refuse(format!("argument {} must be a number", i + 1)),
            None => self.refuse(format!("argument {} is missing", i + 1)),
        }
    }

    fn ints(&self) -> Result<Vec<i32>, ModError> {
        (0..self.args.len()).map(|i| self.int(i)).collect()
    }

    /// Refuses documents that end before the positions do, and more of them than a table should hold
    /// where the number of positions is not known.
    fn check_documents(&self, lengths: &[i32]) -> Result<(), ModError> {
        const MOST: usize = 1 << 28;
        let all = lengths.iter().fold(0usize, |all, &n| all.saturating_add(n.max(0) as usize));
        match self.names.position_count() {
            // What is no length is said of the length itself.
            _ if lengths.iter().any(|&n| n < 0) => Ok(()),
            Some(positions) if all < positions => self.refuse(format!(
                "the documents have {all} positions in all, and there are {positions}"
            )),
            None if all > MOST => {
                self.refuse(format!("the documents have {all} positions in all, more than {MOST}"))
            }
            _ => Ok(()),
        }
    }

    /// Buffer argument `i`.
    fn given_buffer<T: Element>(&self, i: usize) -> Result<Buffer<T>, ModError> {
        match self.args.get(i) {
            Some(Arg::Buffer(buffer)) => Buffer::from_any(buffer.clone()),
            Some(_) => self.refuse(format!("argument {} must be a buffer", i + 1)),
            None => self.refuse(format!("argument {} is missing", i + 1)),
        }
    }

    /// Buffer argument `i`, or the one called `usual`.
    fn buffer<T: Element>(&self, i: usize, usual: &str) -> Result<Buffer<T>, ModError> {
        if i < self.args.len() {
            return self.given_buffer(i);
        }
        match self.names.get_buffer(usual) {
            Some(buffer) => Buffer::from_any(buffer.clone()),
            None => self.refuse(format!("no captured buffer is called `{usual}`")),
        }
    }

    /// The first argument is a buffer, or there are none.
    fn wants_buffer(&self) -> bool {
        matches!(self.args.first(), None | Some(Arg::Buffer(_)))
    }
}

type Maker<M> = fn(&NamedCall<'_>) -> Result<M, ModError>;
/// Signature (the name stands before the parenthesis), most arguments, documentation, maker.
type Row<M> = (&'static str, usize, &'static str, Maker<M>);

const MASKS: &[Row<MaskMod>] = &[
    ("full", 0, "every query sees every key", |_| Ok(masks::full())),
    ("causal", 0, "q >= kv, aligned at the top left", |_| Ok(masks::causal())),
    ("causal_bottom_right", 0, "q + kv_len - q_len >= kv: the last query sees all", |_| {
        Ok(masks::causal_bottom_right())
    }),
    ("window(left, [right])", 2, "q - left <= kv <= q + right; right is 0 when left out", |c| {
        masks::window(c.size(0)?, if c.args.len() > 1 { c.size(1)? } else { 0.into() })
    }),
    ("sliding_window(size)", 1, "0 <= q - kv < size: the last `size` keys", |c| {
        masks::sliding_window(c.size(0)?)
    }),
    (
        "prefix([n | lengths])",
        1,
        "kv < n or causal; n a number or buffer `prefixes` [batch]",
        |c| {
            if c.wants_buffer() {
                masks::prefix_lm_per_batch(&c.buffer(0, "prefixes")?)
            } else {
                masks::prefix_lm(c.size(0)?)
            }
        },
    ),
    (
        "document([ids], [kv_ids])",
        2,
        "same document id, of buffer `doc` [len] or [batch, len]",
        |c| {
            let ids = c.buffer(0, "doc")?;
            if c.args.len() < 2 {
                return masks::document(&ids);
            }
            masks::document_pair(&ids, &c.buffer(1, "kv_doc")?)
        },
    ),
    ("documents(length, …)", usize::MAX, "same document, of documents with these lengths", |c| {
        let lengths = c.ints()?;
        c.check_documents(&lengths)?;
        masks::document_lengths_within(&lengths, c.names.position_count().unwrap_or(usize::MAX))
    }),
    ("chunked(size)", 1, "q and kv in the same chunk of `size` positions", |c| {
        masks::chunked(c.size(0)?)
    }),
    ("dilated(reach, step)", 2, "every `step`-th key up to `reach` away", |c| {
        masks::dilated(c.size(0)?, c.size(1)?)
    }),
    ("global_tokens(n)", 1, "the first n positions see all and are seen by all", |c| {
        masks::global_tokens(c.size(0)?)
    }),
    (
        "blocks(counts, tiles, queries, keys)",
        4,
        "the tiles that `counts` and `tiles` list for each row",
        |c| {
            let (counts, tiles) = (c.given_buffer(0)?, c.given_buffer(1)?);
            let list = masks::BlockLists { counts: &counts, tiles: &tiles };
            masks::blocks((c.int(2)?, c.int(3)?), list)
        },
    ),
    (
        "neighbourhood(size, …, kernel, …)",
        6,
        "neighbourhood attention on a grid of 1 to 3 axes: sizes, then odd kernels",
        |c| {
            let ints = c.ints()?;
            let (sizes, kernels) = ints.split_at(ints.len() / 2);
            masks::neighbourhood(sizes, kernels)
        },
    ),
];

const SCORES: &[Row<ScoreMod>] = &[
    ("soft_cap(cap)", 1, "cap * tanh(score / cap); also `softcap`", |c| {
        scores::soft_cap(c.float(0)?)
    }),
    ("alibi([heads])", 1, "score - slope[h] * |q - kv|; heads is the problem's or given", |c| {
        let heads = match c.names.head_count().filter(|_| c.args.is_empty()) {
            Some(heads) => Ok(heads),
            None => usize::try_from(c.int(0)?),
        };
        match (heads, c.names.head_count()) {
            (Ok(given), Some(heads)) if given < heads => {
                c.refuse(format!("there are slopes of {given} heads, and the problem has {heads}"))
            }
            (Ok(heads), _) => scores::alibi(heads),
            (Err(_), _) => c.refuse("the number of heads cannot be negative"),
        }
    }),
    ("relative_bias([table])", 1, "score + rel_bias[h, clamp(q - kv) + max]", |c| {
        scores::relative_bias(&c.buffer(0, "rel_bias")?)
    }),
    (
        "t5([max_distance])",
        1,
        "T5's bidirectional buckets, buffer `t5_bias` [buckets, heads]",
        |c| scores::t5_buckets(&c.buffer(1, "t5_bias")?, true, c.optional_int(0)?.unwrap_or(128)),
    ),
    (
        "t5_causal([max_distance])",
        1,
        "T5's decoder buckets, buffer `t5_bias` [buckets, heads]",
        |c| scores::t5_buckets(&c.buffer(1, "t5_bias")?, false, c.optional_int(0)?.unwrap_or(128)),
    ),
    ("bias([tensor])", 1, "score + attn_bias[b, h, q, kv], axes of length 1 broadcast", |c| {
        scores::additive_bias(&c.buffer(0, "attn_bias")?)
    }),
    ("temperature([values])", 1, "score / temperatures[h]", |c| {
        scores::temperature(&c.buffer(0, "temperatures")?)
    }),
    ("head_scale([values])", 1, "score * head_scales[h]", |c| {
        scores::head_scale(&c.buffer(0, "head_scales")?)
    }),
    ("head_bias([values])", 1, "score + head_biases[h]", |c| {
        scores::head_bias(&c.buffer(0, "head_biases")?)
    }),
];

/// Other spellings, and the names they stand for.
const ALIASES: &[(&str, &str)] =
    &[("softcap", "soft_cap"), ("prefix_lm", "prefix"), ("neighborhood", "neighbourhood")];

fn name_of(signature: &'static str) -> &'static str {
    signature.split('(').next().expect("split gives one part at least")
}

fn make<M>(
    rows: &[Row<M>],
    name: &str,
    args: &[Arg],
    names: &Names,
) -> Option<Result<M, ModError>> {
    let name = ALIASES.iter().find(|(alias, _)| *alias == name).map_or(name, |(_, name)| name);
    let (signature, most, _, maker) = rows.iter().find(|row| name_of(row.0) == name)?;
    let call = NamedCall { name, signature, args, names };
    Some(call.at_most(*most).and_then(|()| maker(&call)))
}

/// The mask (bool) or score (f32) called `name`, as an expression over the coordinates (for a
/// score, over `score` too); `None` when there is none. A name without arguments is the same as a
/// call with none.
///
/// The inner error says which argument is wrong and how the call is written.
pub fn resolve(name: &str, args: &[Arg], names: &Names) -> Option<Result<DynExpr, ModError>> {
    let mask = || make(MASKS, name, args, names).map(|m| m.map(|m| m.expr().dynamic().clone()));
    let score = || make(SCORES, name, args, names).map(|m| m.map(|m| m.expr().dynamic().clone()));
    mask().or_else(score)
}

/// Every name there is, other spellings included.
pub fn names() -> impl Iterator<Item = &'static str> {
    entries().map(|entry| entry.name).chain(ALIASES.iter().map(|(alias, _)| *alias))
}

/// Every named mask, then every named score.
pub fn entries() -> impl Iterator<Item = Entry> {
    let entry =
        |signature, doc, is_score| Entry { name: name_of(signature), signature, doc, is_score };
    let masks = MASKS.iter().map(move |row| entry(row.0, row.2, false));
    masks.chain(SCORES.iter().map(move |row| entry(row.0, row.2, true)))
}

impl DynExpr {
    /// The value of a constant.
    pub(crate) fn constant_value(&self) -> Option<ScalarValue> {
        match self.node().op {
            Op::Const(v) => Some(v),
            _ => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::expr;
    use crate::text::{parse_mask, parse_score};

    fn captured() -> Names {
        let floats = |name: &str, shape: &[usize]| {
            let elems = vec![0.5; shape.iter().product()];
            Buffer::learned(name, shape, elems).expect("the shape fits").any().clone()
        };
        let names = Names::new().heads(2);
        let names = names.buffer(Buffer::vector("doc", vec![0, 0, 1]).any());
        let names = names.buffer(Buffer::vector("prefixes", vec![2]).any());
        let names = names.buffer(&floats("rel_bias", &[2, 3])).buffer(&floats("t5_bias", &[8, 2]));
        let per_head = ["temperatures", "head_scales", "head_biases"];
        let names = per_head.iter().fold(names, |n, name| n.buffer(&floats(name, &[2])));
        let ints = |name: &str, shape: &[usize], elems| {
            Buffer::new(name, shape, elems).expect("the shape fits").any().clone()
        };
        let names = names.buffer(&ints("counts", &[1, 1, 2], vec![1, 2]));
        let names = names.buffer(&ints("tiles", &[1, 1, 2, 2], vec![0, 9, 1, 0]));
        names.buffer(&floats("attn_bias", &[1, 2, 3, 3]))
    }

    #[test]
    fn every_entry_can_be_written_and_read_back() {
        let names = captured();
        for entry in entries() {
            let args = match entry.name {
                "window" | "sliding_window" | "chunked" | "global_tokens" | "soft_cap" => "(3)",
                "dilated" => "(4, 2)",
                "documents" => "(1, 2)",
                "neighbourhood" => "(4, 5, 3, 3)",
                "blocks" => "(counts, tiles, 2, 3)",
                _ => "",
            };
            let text = format!("{}{args}", entry.name);
            if entry.is_score {
                let score = parse_score(&text, &names).unwrap_or_else(|e| panic!("{e}"));
                let (printed, names) = score.program().text();
                assert_eq!(parse_score(&printed, &names).unwrap(), score, "{text}: {printed}");
            } else {
                let mask = parse_mask(&text, &names).unwrap_or_else(|e| panic!("{e}"));
                let (printed, names) = mask.program().text();
                assert_eq!(parse_mask(&printed, &names).unwrap(), mask, "{text}: {printed}");
            }
        }
    }

    #[test]
    fn names_and_aliases_make_what_they_say() {
        let names = captured();
        assert_eq!(parse_mask("window(256)", &names).unwrap(), masks::window(256, 0).unwrap());
        assert_eq!(parse_score("softcap(30)", &names).unwrap(), scores::soft_cap(30.0).unwrap());
        assert_eq!(parse_score("alibi", &names).unwrap(), scores::alibi(2).unwrap());
        assert_eq!(parse_score("alibi(3)", &names).unwrap(), scores::alibi(3).unwrap());
        let both =
            masks::causal() & masks::document(&Buffer::vector("doc", vec![0, 0, 1])).unwrap();
        assert_eq!(parse_mask("causal & document", &names).unwrap(), both);
    }

    #[test]
    fn a_wrong_argument_shows_how_the_call_is_written() {
        let names = captured();
        for (text, says) in [
            ("window()", "argument 1 is missing; write `window(left, [right])`"),
            ("window(0.5)", "argument 1 must be an integer"),
            ("window(4000000000)", "4000000000 does not fit an i32"),
            ("neighbourhood(q, 3)", "argument 1 must be an integer written out"),
            ("window(-1)", "left must be at least 0, not -1"),
            ("causal(1)", "takes at most 0 arguments, not 1"),
            ("document(1)", "argument 1 must be a buffer"),
            (
                "blocks(counts)",
                "argument 2 is missing; write `blocks(counts, tiles, queries, keys)`",
            ),
            ("blocks(counts, tiles, 0, 4)", "blocks: a tile has positive sides, not 0x4"),
            ("document(rel_bias)", "`rel_bias` cannot be bound: it holds f32, not i32"),
        ] {
            let error = parse_mask(text, &names).expect_err(text).to_string();
            assert!(error.contains(says), "{error}");
        }
        for (text, says) in [
            ("soft_cap(0)", "cap must be a positive number, not 0"),
            ("soft_cap(1 - 3.5)", "cap must be a positive number, not -2.5"),
            ("soft_cap(firm)", "cap must be a positive number, not -1"),
            ("soft_cap(q)", "argument 1 must be a number; write `soft_cap(cap)`"),
        ] {
            let names = names.clone().scalar("firm", ScalarValue::F32(-1.0));
            let error = parse_score(text, &names).expect_err(text).to_string();
            assert!(error.contains(says), "{error}");
        }
    }

    #[test]
    fn a_table_is_as_long_as_what_reads_it_and_no_longer_than_memory() {
        let of = |heads| Names::new().heads(heads);
        for (text, names, says) in [
            (
                "alibi(4)",
                of(8),
                "there are slopes of 4 heads, and the problem has 8; write `alibi(",
            ),
            ("alibi(2000000000)", of(8), "the number of heads must be at most 1048576"),
            ("alibi", of(2_000_000_000), "at most 1048576, not 2000000000"),
        ] {
            let error = parse_score(text, &names).expect_err(text).to_string();
            assert!(error.contains(says), "{error}");
        }
        for (text, names, says) in [
            (
                "documents(3, 4)",
                Names::new().positions(64),
                "have 7 positions in all, and there are 64",
            ),
            ("documents(2000000000)", Names::new(), "have 2000000000 positions in all, more than"),
        ] {
            let error = parse_mask(text, &names).expect_err(text).to_string();
            assert!(error.contains(says), "{error}");
        }
        assert!(parse_score("alibi(16)", &of(8)).is_ok());
        assert!(parse_mask("documents(60, 2000000000)", &Names::new().positions(64)).is_ok());
    }

    #[test]
    fn sizes_and_caps_may_be_scalars_and_expressions() {
        let buffer = Buffer::vector("reach", vec![3, 5]);
        let names = captured()
            .buffer(buffer.any())
            .scalar("w", ScalarValue::I32(7))
            .scalar("firm", ScalarValue::F32(30.0));
        let mask = |text| parse_mask(text, &names).unwrap_or_else(|e| panic!("{e}"));
        let w = || expr::scalar("w", 7);
        assert_eq!(mask("window(w)"), masks::window(w(), 0).unwrap());
        let of_head = buffer.at([expr::h()]);
        assert_eq!(mask("window(w * 2, reach[h])"), masks::window(w() * 2, &of_head).unwrap());
        assert_eq!(mask("sliding_window(w)"), mask("q >= kv && q - kv < w"));
        assert_eq!(mask("prefix(reach[b])"), mask("kv < reach[b] || q >= kv"));
        for call in ["chunked(w)", "dilated(w, 2)", "dilated(8, w)", "global_tokens(w)"] {
            let scalar = |name: &str, value| expr::scalar(name, value);
            let made = match call {
                "chunked(w)" => masks::chunked(w()),
                "dilated(w, 2)" => masks::dilated(w(), scalar("step", 2)),
                "dilated(8, w)" => masks::dilated(scalar("reach", 8), w()),
                _ => masks::global_tokens(w()),
            };
            assert_eq!(mask(call), made.unwrap(), "{call}");
        }
        let wider = mask("window(w)").map(|p| p.set_scalar("w", ScalarValue::I32(9))).unwrap();
        assert_eq!(wider, masks::window(9, 0).unwrap());
        let capped = parse_score("soft_cap(firm)", &names).unwrap();
        assert_eq!(capped, scores::soft_cap(expr::scalar("firm", 30.0f32)).unwrap());
    }
}
