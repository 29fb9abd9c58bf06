//! Tiny checkpoints of every family beside transformers, which made them and computed their logits and
//! gradients: `scripts/families.py`. Without its folder there is nothing to compare with.

use std::env;
use std::fs;
use std::path::{Path, PathBuf};

use foveate_nn::{Batch, Blocks, Model, ParameterState, Recompute, Sampling};
use foveate_nn_cuda::Cuda;
use foveate_train::checkpoint::{
    CheckpointConfig, Checksums, Snapshot, State, load_weights, read_config, remove_all, save,
};
use foveate_train::device::{DeviceChoice, DeviceOptions, OnDevice};
use foveate_train::recipe::SaveDtype;
use safetensors::SafeTensors;

fn families() -> Option<Vec<PathBuf>> {
    let Some(folder) = env::var_os("FOVEATE_FAMILIES") else {
        println!("skipped: FOVEATE_FAMILIES does not name the folder of scripts/families.py");
        return None;
    };
    // Relative to where the workspace is, as the script takes it.
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..").join(folder);
    let mut all: Vec<PathBuf> =
        fs::read_dir(&folder).unwrap().map(|entry| entry.unwrap().path()).collect();
    all.sort();
    assert!(all.len() >= 10, "{} has {} families", folder.display(), all.len());
    Some(all)
}

/// A tensor of four bytes an element.
fn tensor<T>(file: &SafeTensors<'_>, name: &str, from: fn([u8; 4]) -> T) -> Vec<T> {
    let words = file.tensor(name).unwrap().data().chunks_exact(4);
    words.map(|word| from(word.try_into().unwrap())).collect()
}

/// How far numbers are from those of transformers, of the largest one and in the mean of their squares.
#[derive(Clone, Copy, Debug)]
struct Off {
    most: f32,
    mean: f32,
}

fn off(found: &[f32], expected: &[f32]) -> Off {
    assert_eq!(found.len(), expected.len());
    let largest = expected.iter().fold(0f32, |most, x| most.max(x.abs()));
    let squares = |of: &mut dyn Iterator<Item = f32>| of.map(|x| f64::from(x).powi(2)).sum::<f64>();
    let apart = || found.iter().zip(expected).map(|(a, b)| a - b);
    let mean = (squares(&mut apart()) / squares(&mut expected.iter().copied())).sqrt() as f32;
    let most = apart().fold(0f32, |most, x| most.max(x.abs())) / largest;
    assert!(most.is_finite() && mean.is_finite(), "{most} {mean}");
    Off { most, mean }
}

/// A family on a device, held to transformers: what is off by how much.
struct Held<'a> {
    folder: &'a Path,
    config: &'a CheckpointConfig,
    file: &'a SafeTensors<'a>,
}

impl OnDevice for Held<'_> {
    /// Logits, and the gradient of each parameter, by the names of the file.
    type Output = Vec<(String, Off)>;

    fn run<B: Blocks>(self, blocks: B, _: Option<String>) -> Self::Output {
        let Self { folder, config, file } = self;
        let mut model =
            Model::unfilled_on(blocks, config.model.clone(), &config.attention).unwrap();
        let fresh = load_weights(folder, &mut model, Checksums::Verify).unwrap();
        assert!(fresh.is_empty(), "{fresh:?}");
        let tokens = tensor(file, "tokens", u32::from_le_bytes);
        let labels = tensor(file, "labels", i32::from_le_bytes);
        let labels: Vec<i32> =
            labels.into_iter().map(|l| if l < 0 { foveate_nn::IGNORE } else { l }).collect();
        let expected = |name: &str| tensor(file, name, f32::from_le_bytes);

        // Longer positions than the text's decide nothing here but longrope's factors.
        let len = tokens.len();
        let mut generator = model.generator(len, Sampling::default()).unwrap();
        let logits = generator.feed(&tokens).unwrap();
        let mut found = vec![("logits".to_owned(), off(&logits, &expected("logits")))];

        let positions: Vec<i32> = (0..len as i32).collect();
        let batch = Batch {
            rows: 1,
            len,
            tokens: &tokens,
            labels: &labels,
            documents: &vec![0; len],
            positions: &positions,
            live_pairs: &[],
            order: &[],
        };
        let mut gradients = model.gradients().unwrap();
        model.forward_backward(&batch, &mut gradients, Recompute::Mlp).unwrap();
        for p in model.parameters() {
            let mut values = vec![f32::NAN; p.elems()];
            model.download(&gradients.array, p.place.start, &mut values).unwrap();
            let name = format!("gradient:{}", p.name);
            found.push((name.clone(), off(&values, &expected(&name))));
        }
        let names = file.names();
        let compared = names.iter().filter(|name| name.starts_with("gradient:"));
        assert_eq!(compared.count(), model.parameters().len(), "{}", folder.display());
        found
    }
}

/// Runs every family on a device in a state, and holds each tensor to what `within` says of its name, what is
/// off and what the same is off in bf16 by transformers.
fn hold(device: DeviceChoice, state: ParameterState, within: impl Fn(&str, Off, f32) -> bool) {
    for folder in families().unwrap_or_default() {
        let name = folder.file_name().unwrap().to_string_lossy().into_owned();
        let config = read_config(&folder, Checksums::Verify).unwrap();
        let bytes = fs::read(folder.join("expected.safetensors")).unwrap();
        let file = SafeTensors::deserialize(&bytes).unwrap();
        let options = DeviceOptions { state: Some(state), ..device.into() };
        let found = options.run(Held { folder: &folder, config: &config, file: &file }).unwrap();
        let in_bf16 =
            |what: &str| tensor(&file, &format!("bf16_off:{what}"), f32::from_le_bytes)[0];
        let bad = |(what, off): &&(String, Off)| !within(what, *off, in_bf16(what));
        let wrong: Vec<_> = found.iter().filter(bad).collect();
        let state = state.name();
        assert!(wrong.is_empty(), "{name} on {device} in {state}: {wrong:?}");
        let most = found[1..].iter().fold(0f32, |most, (_, off)| most.max(off.most));
        let ratios = found.iter().map(|(what, off)| off.mean / in_bf16(what));
        println!(
            "{name} on {device} in {state}: logits {:.1e} off, gradients {most:.1e}; at most {:.1e} times as far \
             off as transformers is in bf16",
            found[0].1.most,
            ratios.fold(0f32, f32::max),
        );
    }
}

#[test]
fn logits_and_every_gradient_are_those_of_transformers() {
    hold(DeviceChoice::Cpu, ParameterState::F32, |what, off, _| {
        off.most < if what == "logits" { 1e-5 } else { 3e-5 }
    });
}

/// In f32, and in bf16 at most twice as far off as transformers in bf16: it has its own order of rounding, and
/// a text of few tokens has few numbers to take means of.
#[test]
fn logits_and_every_gradient_are_those_of_transformers_on_a_gpu() {
    if let Err(e) = Cuda::available(0) {
        return println!("skipped: {e}");
    }
    let gpu = DeviceChoice::Cuda(0);
    hold(gpu, ParameterState::F32, |_, off, _| off.most < 1e-4);
    hold(gpu, ParameterState::Exact, |_, off, in_bf16| off.mean < 2.0 * in_bf16);
}

/// For transformers to read back.
#[test]
fn every_family_is_saved_as_it_was_read() {
    for folder in families().unwrap_or_default() {
        let config = read_config(&folder, Checksums::Verify).unwrap();
        let mut model = Model::unfilled(config.model.clone(), &config.attention).unwrap();
        load_weights(&folder, &mut model, Checksums::Verify).unwrap();
        let saved = folder.join("saved");
        remove_all(&saved).unwrap();
        let elems = model.layout().elems();
        let snapshot = Snapshot {
            model: &model,
            attention: &config.attention,
            moments: &foveate_nn::Moments::zeros(elems),
            state: &State::default(),
            dtype: SaveDtype::F32,
            tokenizer: &config.tokenizer,
            origin: Some(&folder),
            chat_template: None,
        };
        let place = save(&saved, &snapshot, 1).unwrap();
        let again = read_config(&place, Checksums::Verify).unwrap();
        assert_eq!((again.model, again.attention), (config.model, config.attention));
    }
}
