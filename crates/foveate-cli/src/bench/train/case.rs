//! What is measured: a model, its attention, and batches of random tokens.

use std::path::Path;

use foveate::tensor::random::Random;
use foveate_nn::{
    AttentionConfig, AttentionProgram, IGNORE, ModelConfig, NnErrorKind, Offload, ProgramConfig,
    Recomputation, Recompute,
};
use foveate_train::checkpoint::Checksums;
use foveate_train::error::{TrainError, TrainErrorKind};
use foveate_train::pack::Packed;
use foveate_train::recipe::Recipe;

use super::{Args, word};
use crate::failure::Failure;
use crate::sizes::{self, Sizes};

/// A model and how it is trained.
#[derive(Debug)]
pub struct Case {
    pub name: String,
    /// Rows, length, batches of a step, state, recomputation and mesh.
    pub recipe: Recipe,
    pub config: ModelConfig,
    pub attention: AttentionConfig,
    pub documents: usize,
    /// Keys back that every other layer sees.
    pub window: Option<usize>,
    pub score: Option<String>,
    /// Fields of the recipe that options gave, each with its option, and those that `--set` did.
    options: Vec<(&'static str, &'static str)>,
    set: Vec<String>,
}

impl Case {
    pub fn of(args: &Args) -> Result<Self, Failure> {
        let recipe = match published(&args.model) {
            Some(sizes) => Recipe::parse(&sizes, &args.model, &args.set)?,
            None => of_file(args)?,
        };
        let mut case = Self::of_recipe(args, recipe)?;
        let Recipe { data, train, precision, optimizer, .. } = &mut case.recipe;
        data.len = args.len.unwrap_or(data.len);
        train.batch_rows = args.rows.unwrap_or(train.batch_rows);
        train.accumulate = args.accumulate.unwrap_or(train.accumulate);
        for (option, value) in
            [("len", data.len), ("rows", train.batch_rows), ("accumulate", train.accumulate)]
        {
            if value == 0 {
                return Err(Failure::usage(format!("--{option} is 0; it must be at least 1")));
            }
        }
        if args.documents == 0 || args.documents > data.len {
            let (documents, len) = (args.documents, data.len);
            let message =
                format!("--documents is {documents}; a row of {len} tokens has 1 to {len}");
            return Err(Failure::usage(message));
        }
        if optimizer.in_backward {
            return Err(Failure::usage("optimizer.in_backward is true").help(
                "bench train measures steps that update after the backward pass: leave it out",
            ));
        }
        if let Some(state) = &args.state {
            precision.state = Some(word("state", state)?);
        }
        if let Some(recompute) = &args.recompute {
            train.recompute = word("recompute", recompute)?;
        }
        if let Some(offload) = &args.offload {
            train.offload = word("offload", offload)?;
        }
        let longest = case.config.max_position_embeddings;
        case.config.max_position_embeddings = longest.max(data.len);
        case.attention = of_options(args, case.attention, &case.config)?;
        Ok(case)
    }

    fn of_recipe(args: &Args, recipe: Recipe) -> Result<Self, Failure> {
        let path = Path::new(&args.model);
        let wrong = |message: String| Failure::new(format!("{}: {message}", path.display()));
        let Sizes { config, attention, .. } =
            sizes::of_recipe(&recipe, path, Checksums::Verify, wrong)?;
        Ok(Self {
            name: args.model.clone(),
            config,
            attention: attention.unwrap_or_else(|| program(causal(args.documents))),
            documents: args.documents,
            window: args.window,
            score: args.score.clone(),
            options: [
                ("train.batch_rows", "--rows", args.rows.is_some()),
                ("precision.state", "--state", args.state.is_some()),
            ]
            .into_iter()
            .filter_map(|(field, option, is_given)| is_given.then_some((field, option)))
            .collect(),
            set: args.set.clone(),
            recipe,
        })
    }

    /// An error of steps, of the command line where that gave the field which is wrong.
    pub fn failure(&self, e: TrainError) -> Failure {
        let TrainErrorKind::Recipe { place, message, .. } = e.kind() else { return e.into() };
        match self.options.iter().find(|(field, _)| field == place) {
            Some((_, option)) => Failure::usage(format!("{option} {message}")),
            None => e.of_overrides(&self.set).into(),
        }
    }

    pub fn rows(&self) -> usize {
        self.recipe.train.batch_rows
    }

    pub fn len(&self) -> usize {
        self.recipe.data.len
    }

    pub fn accumulate(&self) -> usize {
        self.recipe.train.accumulate
    }

    /// What is computed again; none for the least that fits.
    pub fn recompute(&self) -> Option<Recomputation> {
        self.recipe.train.recomputation()
    }

    /// What is computed again, in words.
    pub fn told(&self, Recomputation { what, layers, offload }: Recomputation) -> String {
        let away = match offload {
            Offload::None => "",
            Offload::LayerInputs => ", inputs of layers in the host's memory",
        };
        match layers >= self.config.num_hidden_layers || what == Recompute::None {
            true => format!("{}{away}", what.name()),
            false => {
                let all = self.config.num_hidden_layers;
                format!("{} in {layers} of {all} layers{away}", what.name())
            }
        }
    }

    /// The masks of its programs.
    pub fn mask(&self) -> String {
        let programs = self.attention.programs().into_iter();
        programs.map(|(_, program)| program.mask.clone()).collect::<Vec<_>>().join("`, `")
    }

    /// Tokens of a step.
    pub fn tokens(&self) -> usize {
        self.rows() * self.len() * self.accumulate()
    }

    /// Rows of random tokens, other ones for every `number`.
    pub fn batch(&self, number: usize) -> Packed {
        let (rows, len) = (self.rows(), self.len());
        let vocab = self.config.vocab_size;
        let mut draw = Random::stream(number as u64, 0);
        let mut batch = Packed { rows, len, ..Packed::default() };
        for starts in self.starts(number) {
            for (document, (&start, end)) in
                starts.iter().zip(starts[1..].iter().copied().chain([len])).enumerate()
            {
                for i in start..end {
                    batch.documents.push(document as i32);
                    batch.positions.push((i - start) as i32);
                    batch.tokens.push(draw.below(vocab) as u32);
                    let has_next = i + 1 < end;
                    batch.labels.push(if has_next { draw.below(vocab) as i32 } else { IGNORE });
                }
            }
        }
        batch
    }

    /// Where the documents of each row of a batch start, in order. Those of batch 0 are cut at random, each row
    /// by a stream of its own, and peers cut theirs there. Other batches have the same documents in another
    /// order: as many live pairs, so that every step has as much to do, and peers' steps as much as these.
    pub fn starts(&self, number: usize) -> Vec<Vec<usize>> {
        let row = |row: usize| {
            let (mut draw, mut starts) = (Random::stream(0, 1 + row as u64), vec![0]);
            while starts.len() < self.documents {
                let at = draw.below(self.len());
                if let Err(place) = starts.binary_search(&at) {
                    starts.insert(place, at);
                }
            }
            let ends = starts[1..].iter().copied().chain([self.len()]);
            let mut lens: Vec<usize> =
                starts.iter().zip(ends).map(|(start, end)| end - start).collect();
            lens.rotate_left(number % self.documents);
            let ends = lens.iter().scan(0, |end, len| {
                *end += len;
                Some(*end)
            });
            ends.zip(&lens).map(|(end, len)| end - len).collect()
        };
        (0..self.rows()).map(row).collect()
    }
}

/// The mask of so many documents a row.
fn causal(documents: usize) -> &'static str {
    if documents > 1 { "causal & document" } else { "causal" }
}

/// The attention of a recipe where options say otherwise. What they cannot say is refused before ranks meet.
fn of_options(
    args: &Args,
    own: AttentionConfig,
    config: &ModelConfig,
) -> Result<AttentionConfig, Failure> {
    let (mut own, several) = match (own, &args.mask) {
        (AttentionConfig::Uniform(own), _) => (own, None),
        (AttentionConfig::Pattern { .. }, Some(_)) => (ProgramConfig::default(), None),
        (own, None) => (own.of_layer(0).1.clone(), Some(own)),
    };
    if let Some(mask) = &args.mask {
        let mask = mask.clone();
        readable("--mask", ProgramConfig { mask, score: None, ..own.clone() }, config)?;
    }
    if let Some(window) = args.window.filter(|window| !(1..=i32::MAX as usize).contains(window)) {
        let message = format!("--window is {window}; it must be 1 to {}", i32::MAX);
        return Err(Failure::usage(message));
    }
    if let Some(score) = &args.score {
        let score = Some(score.clone());
        readable("--score", ProgramConfig { mask: String::new(), score, ..own.clone() }, config)?;
    }
    if let Some(several) = several {
        let option = if args.window.is_some() { "--window" } else { "--score" };
        return match args.window.is_some() || args.score.is_some() {
            false => Ok(several),
            true => Err(Failure::usage(format!(
                "{option} changes one program of attention, and {} has {}",
                args.model,
                several.programs().len()
            ))
            .help(format!("give --mask, which takes the place of all, or leave {option} out"))),
        };
    }
    own.mask = args.mask.clone().unwrap_or(own.mask);
    own.score = args.score.clone().or(own.score);
    if args.mask.is_some() || args.score.is_some() {
        // What is read no longer is no parameter of the model.
        let read = readable("the recipe's attention", own.clone(), config)?;
        own.learned.retain(|name, _| read.captures().any(|buffer| buffer.name() == name));
    }
    Ok(attention(own, args.window))
}

/// The program of a text, which `option` gave.
fn readable(
    option: &str,
    text: ProgramConfig,
    config: &ModelConfig,
) -> Result<AttentionProgram, Failure> {
    AttentionProgram::parse(&text, config.num_attention_heads).map_err(|e| match e.kind() {
        NnErrorKind::Text { error, .. } => Failure::of_text(option, error),
        _ => Failure::usage(format!("{option}: {e}")),
    })
}

/// One program for all layers, or where there is a window two in turns.
fn attention(far: ProgramConfig, window: Option<usize>) -> AttentionConfig {
    let Some(window) = window else { return far.into() };
    let near = ProgramConfig { mask: near(&far.mask, window), ..far.clone() };
    let programs = [("near", near), ("far", far)];
    AttentionConfig::Pattern {
        layers: programs.iter().map(|(name, _)| (*name).to_owned()).collect(),
        programs: programs.map(|(name, program)| (name.to_owned(), program)).into(),
    }
}

/// What of `mask` is no more than `window` keys back.
fn near(mask: &str, window: usize) -> String {
    let mask = if mask.is_empty() { String::new() } else { format!("({mask}) & ") };
    format!("{mask}sliding_window({window})")
}

fn program(mask: &str) -> AttentionConfig {
    ProgramConfig { mask: mask.into(), ..ProgramConfig::default() }.into()
}

/// The recipe in `args`.
fn of_file(args: &Args) -> Result<Recipe, Failure> {
    let path = Path::new(&args.model);
    if !path.exists() {
        let message = format!("--model {}: there is no such recipe", args.model);
        return Err(Failure::usage(message).help("name a file, or one of 135m, 1b, 3b and 8b"));
    }
    Ok(Recipe::load(path, &args.set)?)
}

/// A recipe of the sizes of SmolLM-135M, Llama-3.2-1B and -3B, and Llama-3.1-8B.
fn published(name: &str) -> Option<String> {
    let [hidden, wide, layers, heads, kv, dim, vocab] = match name {
        "135m" => [576, 1536, 30, 9, 3, 64, 49_152],
        "1b" => [2048, 8192, 16, 32, 8, 64, 128_256],
        "3b" => [3072, 8192, 28, 24, 8, 128, 128_256],
        "8b" => [4096, 14_336, 32, 32, 8, 128, 128_256],
        _ => return None,
    };
    let small = name == "135m";
    let theta = if small { 10_000.0 } else { 500_000.0 };
    let (len, tied) = (if small { 2048 } else { 8192 }, name != "8b");
    Some(format!(
        "[run]\ndir = 'bench'\n[data]\nfiles = []\nlen = {len}\n[train]\nbatch_rows = 1\naccumulate = 1\n\
         [model]\nvocab_size = {vocab}\nhidden_size = {hidden}\nintermediate_size = {wide}\n\
         num_hidden_layers = {layers}\nnum_attention_heads = {heads}\nnum_key_value_heads = {kv}\n\
         head_dim = {dim}\nrms_norm_eps = 1e-5\nrope_theta = {theta:.1}\ntie_word_embeddings = {tied}\n"
    ))
}

#[cfg(test)]
pub mod tests {
    use clap::Parser;

    use super::*;

    #[derive(Parser)]
    struct Command {
        #[command(flatten)]
        args: Args,
    }

    /// The case of a command line.
    pub fn case(args: &[&str]) -> Result<Case, Failure> {
        Case::of(&Command::parse_from([&["bench"], args].concat()).args)
    }

    #[test]
    fn published_sizes_have_their_published_parameter_counts() {
        let counts = ["135m", "1b", "3b", "8b"]
            .map(|name| case(&["--model", name]).unwrap().config.parameter_count());
        assert_eq!(counts, [134_515_008, 1_235_814_400, 3_212_749_824, 8_030_261_248]);
    }

    #[test]
    fn every_other_layer_sees_a_window() {
        let (mask, score) = ("causal & document".into(), Some("softcap(30)".into()));
        let attention =
            attention(ProgramConfig { mask, score, ..ProgramConfig::default() }, Some(8));
        let near = "(causal & document) & sliding_window(8)";
        for (layer, mask) in [near, "causal & document", near].into_iter().enumerate() {
            let (_, program) = attention.of_layer(layer);
            assert_eq!((&*program.mask, program.score.as_deref()), (mask, Some("softcap(30)")));
            AttentionProgram::parse(program, 4).unwrap();
        }
    }

    #[test]
    fn options_change_what_they_name_of_a_recipes_attention() {
        let learned = concat!(env!("CARGO_MANIFEST_DIR"), "/../../recipes/learned-bias.toml");
        let of = |options: &[&str]| case(&[&["--model", learned], options].concat()).unwrap();
        let (own, biased) = ("causal & document", "softcap(30) then relative_bias");
        for (options, masks, score) in [
            (&[][..], [own, own], biased),
            (&["--window", "16"], ["(causal & document) & sliding_window(16)", own], biased),
            (&["--score", "softcap(5)"], [own, own], "softcap(5)"),
            (&["--mask", "causal"], ["causal", "causal"], biased),
            (&["--mask", "", "--window", "4"], ["sliding_window(4)", ""], biased),
        ] {
            let case = of(options);
            for (layer, mask) in masks.into_iter().enumerate() {
                let (_, program) = case.attention.of_layer(layer);
                assert_eq!((&*program.mask, program.score.as_deref()), (mask, Some(score)));
                assert_eq!(program.learned.len(), usize::from(score == biased), "{options:?}");
            }
        }
        let set = "attention={ layers = [\"a\", \"b\"], programs = { a = { mask = \"causal\" }, \
                   b = { mask = \"sliding_window(9)\" } } }";
        let two = |options: &[&str]| case(&[&["--model", "135m", "--set", set], options].concat());
        assert_eq!(two(&[]).unwrap().attention.programs().len(), 2);
        assert_eq!(two(&["--mask", "causal"]).unwrap().mask(), "causal");
        for options in [["--window", "8"], ["--score", "softcap(5)"]] {
            let told = format!("{:?}", two(&options).unwrap_err());
            assert!(told.contains("135m has 2") && told.contains("give --mask"), "{told}");
        }
    }

    #[test]
    fn documents_fill_their_rows_and_know_no_next_token_at_their_ends() {
        let case =
            case(&["--model", "135m", "--rows", "3", "--len", "57", "--documents", "5"]).unwrap();
        assert_eq!(case.mask(), "causal & document");
        let packed = case.batch(2);
        let batch = foveate_train::trainer::batch(&packed);
        batch.validate(&case.config).unwrap();
        for row in 0..3 {
            let cells = row * 57..(row + 1) * 57;
            let (documents, positions) = (&batch.documents[cells.clone()], &batch.positions[cells]);
            assert_eq!((documents[0], documents[56]), (0, 4));
            for i in 1..57 {
                let same = documents[i] == documents[i - 1];
                assert_eq!(positions[i], if same { positions[i - 1] + 1 } else { 0 });
                assert_eq!(batch.labels[row * 57 + i - 1] == IGNORE, !same);
            }
        }
        assert_ne!(case.starts(2)[0], case.starts(2)[1]);
        assert_ne!(case.starts(2), case.starts(3));
        let keys = |number| -> f64 {
            case.batch(number).positions.iter().map(|&p| f64::from(p + 1)).sum()
        };
        assert_eq!([1, 2, 3].map(keys), [keys(0); 3]);
    }

    #[test]
    fn fields_of_a_recipe_hold_for_published_sizes_too() {
        let set = ["train.recompute=mlp", "train.recompute_layers=7", "mesh.shard=2"];
        let args = set.iter().flat_map(|set| ["--set", set]).chain(["--model", "8b"]);
        let case = case(&args.collect::<Vec<_>>()).unwrap();
        assert_eq!(case.told(case.recompute().unwrap()), "mlp in 7 of 32 layers");
        let away = Recomputation { offload: Offload::LayerInputs, ..case.recompute().unwrap() };
        let told = "mlp in 7 of 32 layers, inputs of layers in the host's memory";
        assert_eq!(case.told(away), told);
        assert_eq!((case.rows(), case.len(), case.config.max_position_embeddings), (1, 8192, 8192));
    }

    #[test]
    fn what_is_not_measured_is_refused() {
        let set = ["--set", "train.accumulate=1", "--set", "optimizer.in_backward=true"];
        let failure = case(&set).unwrap_err();
        assert!(format!("{failure:?}").contains("optimizer.in_backward"), "{failure:?}");
    }
}
