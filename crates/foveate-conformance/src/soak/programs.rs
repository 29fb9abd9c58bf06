//! Random programs on random shapes, run by every backend and compared with the oracle: those of the
//! CPU, and those of a GPU where there is one, which may decline what they do not take.
//!
//! A round is a case of the corpus, in its own TOML, so that one that fails can be put into
//! `conformance/cases` as it is printed. Masks are any expressions of integers and bools, which
//! are exact everywhere. Scores are smooth in the score: where a derivative jumps, a rounding of
//! the score would decide between two right answers.

use foveate_conformance::{Backend, Outcome, backends, check, gpu_backends, parse};
use foveate_tensor::random::Random;

/// Rounds of programs; a single round prints its case.
pub fn rounds(print: bool) -> impl FnMut(u64) -> Result<(), String> {
    let backends = Backends { host: backends(), gpu: gpu_backends().unwrap_or_default() };
    move |seed| round(seed, &backends, print)
}

/// What is under test.
struct Backends {
    /// Take everything.
    host: Vec<Box<dyn Backend>>,
    /// May decline.
    gpu: Vec<Box<dyn Backend>>,
}

fn round(seed: u64, backends: &Backends, print: bool) -> Result<(), String> {
    let text = Draw::new(seed).case();
    if print {
        say!("{text}");
    }
    let wrong = failures(&text, &format!("soak {seed}"), backends)?;
    if wrong.is_empty() {
        return Ok(());
    }
    // The oracle allows a multiple of the error of a plain implementation, which by luck can be
    // small on these sizes. A fault is one on other data of the same program too.
    let mut repeated = 0;
    for again in 1..=3 {
        let name = format!("soak {seed}, again {again}");
        repeated += usize::from(!failures(&text, &name, backends)?.is_empty());
    }
    if repeated >= 2 { Err(wrong.join("; ").replace('\n', " ")) } else { Ok(()) }
}

/// What is wrong with a case on data drawn from `name`.
fn failures(text: &str, name: &str, backends: &Backends) -> Result<Vec<String>, String> {
    let mut cases = parse("soak", text).map_err(|e| e.to_string())?;
    cases[0].name = name.to_owned();
    let mut wrong = Vec::new();
    let both = [(&backends.host, false), (&backends.gpu, true)];
    for (backends, may_decline) in both.into_iter().filter(|(backends, _)| !backends.is_empty()) {
        for row in check(&cases[0], backends).map_err(|e| e.to_string())? {
            match row.outcome {
                Outcome::Failed(lines) => {
                    wrong.push(format!("{} failed: {}", row.backend, lines.join(", ")));
                }
                Outcome::Declined(reason) if !may_decline => {
                    wrong.push(format!("{} declined: {reason}", row.backend));
                }
                Outcome::Passed | Outcome::Declined(_) => {}
            }
        }
    }
    Ok(wrong)
}

/// Positions begin below this.
const MOST_OFFSET: usize = 50;

/// The sizes of a case, and what its program has asked for so far.
struct Draw {
    random: Random,
    seed: u64,
    dtype: &'static str,
    batch: usize,
    heads: [usize; 2],
    len: [usize; 2],
    /// Captured buffers and run-time scalars, as lines of TOML.
    captures: Vec<String>,
    /// Whether the score has something like tanh in it.
    tanh_like: bool,
}

impl Draw {
    fn new(seed: u64) -> Self {
        let mut random = Random::new(seed);
        let groups = 1 + random.below(3);
        let heads = [groups * (1 + random.below(3)), groups];
        let dtype = ["f32", "f32", "f32", "bf16", "f16"][random.below(5)];
        // Mostly small and dividing nothing, sometimes none. A mean over a few roundings of
        // 16-bit numbers says nothing.
        let len = [(); 2].map(|()| match (dtype, random.below(20)) {
            ("f32", 0) => random.below(2),
            (_, 1..=3) => 64 + random.below(120),
            ("f32", _) => 1 + random.below(64),
            _ => 32 + random.below(64),
        });
        let batch = 1 + random.below(2);
        Self { random, seed, dtype, batch, heads, len, captures: Vec::new(), tanh_like: false }
    }

    fn chance(&mut self, percent: usize) -> bool {
        self.random.below(100) < percent
    }

    fn pick<T: Copy>(&mut self, from: &[T]) -> T {
        from[self.random.below(from.len())]
    }

    /// The TOML of a case.
    fn case(&mut self) -> String {
        let dim = 1 + self.random.below(40);
        let dim_v = if self.chance(25) { 1 + self.random.below(40) } else { dim };
        let mut lines = if self.chance(25) { self.varlen() } else { self.dense() };
        if self.chance(80) {
            lines.push(format!("mask = {:?}", self.boolean(3)));
        }
        if self.chance(70) {
            lines.push(format!("score = {:?}", self.score()));
        }
        for (key, percent) in [
            ("sink = true", 20),
            ("d_lse = true", 20),
            ("gradients = \"f32\"", 15),
            ("scale = 0.2", 15),
            ("dropout = 0.3", 15),
        ] {
            if self.chance(percent) {
                lines.push(key.into());
            }
        }
        if self.chance(15) {
            lines.push("accumulate = true".into());
        }
        if self.tanh_like {
            lines.push("tanh_like = true".into());
        }
        lines.append(&mut self.captures);
        let Self { seed, dtype, batch, heads, len, .. } = self;
        format!(
            "[[case]]\nname = \"soak {seed}\"\nwhy = \"drawn at random\"\nbatch = {batch}\n\
             heads = {heads:?}\nlen = {len:?}\ndim = [{dim}, {dim_v}]\ndtype = {dtype:?}\n{}\n",
            lines.join("\n")
        )
    }

    /// Lines of operands with a batch axis.
    fn dense(&mut self) -> Vec<String> {
        let order = self.pick(&["bshd", "sbhd", "bhsd"]);
        let mut how = self.pick(&["", "", "cache ", "sliced ", "expanded ", "odd ", "columns "]);
        let mut lines = Vec::new();
        if self.chance(15) {
            how = self.pick(&["interleaved ", "stacked "]);
            self.len[1] = self.len[0];
        } else if self.chance(10) {
            lines.push("shared_kv = true".into());
        }
        if self.chance(15) {
            let [q, kv] = [(); 2].map(|()| self.random.below(MOST_OFFSET));
            lines.push(format!("offsets = [{q}, {kv}]"));
        }
        lines.push(format!("layout = \"{how}{order}\""));
        lines
    }

    /// Lines of packed sequences.
    fn varlen(&mut self) -> Vec<String> {
        self.batch = 1;
        let sequences = 1 + self.random.below(4);
        let [q, k] = self.len.map(|len| {
            let most = len / sequences + 2;
            (0..sequences).map(|_| self.random.below(most)).collect::<Vec<_>>()
        });
        self.len = [q.iter().sum(), k.iter().sum()];
        let layout = self.pick(&["thd", "sliced thd", "bhsd"]);
        vec![
            format!("layout = \"{layout}\""),
            format!("varlen = {{ q = {q:?}, k = {k:?} }}"),
            format!("tail = {}", self.random.below(6)),
        ]
    }

    /// An expression of type bool.
    fn boolean(&mut self, depth: usize) -> String {
        let n = 1 + self.random.below(30);
        let named = self.random.below(if depth == 0 { 10 } else { 20 });
        match named {
            0 => "causal".into(),
            1 => "causal_bottom_right".into(),
            2 => format!("window({n}, {})", self.random.below(20)),
            3 => format!("chunked({n})"),
            4 => format!("prefix({n})"),
            5 => format!("dilated({n}, {})", 1 + self.random.below(4)),
            6 => format!("global_tokens({})", n % 5),
            7 => {
                // Offsets move positions beyond the lengths.
                let positions = self.len[0].max(self.len[1]) + MOST_OFFSET;
                let ids = self.capture(&format!("shape = [{positions}], below = 4"));
                format!("document({ids})")
            }
            8 => {
                let flags = self.capture(&format!("shape = [{n}], chance = 0.6"));
                format!("{flags}[{}]", self.index(n))
            }
            9..=13 => {
                let (op, x) = (self.pick(&["<", "<=", ">", ">=", "==", "!="]), self.integer(depth));
                format!("({x} {op} {})", self.integer(depth))
            }
            14 => format!("!({})", self.boolean(depth - 1)),
            15 => {
                let (c, x) = (self.boolean(depth - 1), self.boolean(depth - 1));
                format!("(if {c} {{ {x} }} else {{ {} }})", self.boolean(depth - 1))
            }
            _ => {
                let (op, x) = (self.pick(&["&", "|", "^", "&&", "||"]), self.boolean(depth - 1));
                format!("({x} {op} {})", self.boolean(depth - 1))
            }
        }
    }

    /// An expression of type i32.
    fn integer(&mut self, depth: usize) -> String {
        let n = 1 + self.random.below(30);
        match self.random.below(if depth == 0 { 10 } else { 18 }) {
            0..=2 => "q".into(),
            3..=5 => "kv".into(),
            6 => self.pick(&["h", "h_kv", "b", "q_len", "kv_len"]).into(),
            7 => self.pick(&["0", "1", "2", "3", "7", "100", "2147483647", "-1", "-5"]).into(),
            8 => {
                let name = format!("n{}", self.captures.len());
                self.captures.push(format!("scalars.{name} = {n}"));
                name
            }
            9 => {
                let ids = self.capture(&format!("shape = [{n}], below = 9"));
                format!("{ids}[{}]", self.index(n))
            }
            10 => format!("abs({})", self.integer(depth - 1)),
            11 | 12 => {
                let (op, x) = (self.pick(&["min", "max"]), self.integer(depth - 1));
                format!("{op}({x}, {})", self.integer(depth - 1))
            }
            _ => {
                let (op, x) = (self.pick(&["+", "-", "*", "/", "%"]), self.integer(depth - 1));
                format!("({x} {op} {})", self.integer(depth - 1))
            }
        }
    }

    /// An index into `n` elements: reads out of range are errors, which is tested elsewhere.
    fn index(&mut self, n: usize) -> String {
        format!("min(max({}, 0), {})", self.integer(1), n - 1)
    }

    /// A captured buffer that is filled as `how` says; its name.
    fn capture(&mut self, how: &str) -> String {
        let name = format!("x{}", self.captures.len());
        self.captures.push(format!("buffers.{name} = {{ {how} }}"));
        name
    }

    /// A captured buffer of `n` floats, which may receive a gradient, read somewhere.
    fn weights(&mut self) -> String {
        let n = 1 + self.random.below(40);
        // Few elements get almost all of a gradient, which makes the rule of the mean luck.
        let learned = self.dtype == "f32" && self.chance(60);
        let name = self.capture(&format!("shape = [{n}], normal = 0.7, learned = {learned}"));
        format!("{name}[{}]", self.index(n))
    }

    /// An expression of type f32, smooth in the score.
    fn score(&mut self) -> String {
        let mut score = String::from("score");
        for _ in 0..1 + self.random.below(3) {
            let step = self.random.below(12);
            self.tanh_like |= matches!(step, 5..=7);
            score = match step {
                0 => format!("({score} * {})", self.pick(&["0.25", "-0.5", "1.5"])),
                1 => format!("({score} - 0.05 * f32(abs(q - kv)))"),
                2 | 3 => format!("({score} + {})", self.weights()),
                4 => format!("({score} * {})", self.weights()),
                5 => format!("(3.0 * tanh({score} / 3.0))"),
                6 => format!("({score} * sigmoid({}))", self.weights()),
                7 => format!("({score} + 0.5 * erf({score}))"),
                8 => format!("({score} + sin(f32(q - kv) * 0.3))"),
                9 => format!("sqrt({score} * {score} + 1.0)"),
                10 => format!("log({score} * {score} + 1.0)"),
                _ => {
                    let when = self.boolean(1);
                    format!("(if {when} {{ {score} }} else {{ {score} * 0.5 - 1.0 }})")
                }
            };
        }
        score
    }
}

#[cfg(test)]
mod tests {
    use foveate_conformance::{Prepared, Program};
    use foveate_problem::Dims;
    use foveate_tensor::DType;

    use super::*;

    /// A backend that takes nothing.
    struct Unable;

    impl Backend for Unable {
        fn name(&self) -> &'static str {
            "unable"
        }

        fn prepare(&self, _: &Program, _: &Dims, _: DType) -> Result<Box<dyn Prepared>, String> {
            Err("it is\nMonday".into())
        }
    }

    #[test]
    fn programs_are_cases_of_the_corpus_and_a_fault_that_stays_is_one_line() {
        let unable = || vec![Box::new(Unable) as Box<dyn Backend>];
        let host = Backends { host: unable(), gpu: Vec::new() };
        let gpu = Backends { host: Vec::new(), gpu: unable() };
        for seed in 0..20 {
            let fault = round(seed, &host, false).unwrap_err();
            assert_eq!(fault, "unable declined: it is Monday", "seed {seed}");
            assert_eq!(round(seed, &gpu, false), Ok(()), "seed {seed}");
        }
    }

    #[test]
    fn programs_have_every_kind_of_operand_mask_and_score() {
        let all: String = (0..400).map(|seed| Draw::new(seed).case()).collect();
        for part in [
            "varlen",
            "shared_kv",
            "offsets",
            "interleaved",
            "expanded",
            "columns",
            "sink = true",
            "dropout",
            "d_lse",
            "accumulate",
            "bf16",
            "f16",
            "document(",
            "window(",
            "learned",
            "tanh",
            "sqrt",
            "erf",
            "if ",
            " % ",
            " / ",
            "scalars.",
            "chance",
            "0, ",
            "h_kv",
        ] {
            assert!(all.contains(part), "no {part}");
        }
    }
}
