//! Tiny checkpoints of every family beside transformers, which made them and computed their logits and
//! gradients: `scripts/families.py`. Without its folder there is nothing to compare with.

use std::env;
use std::fs;
use std::path::{Path, PathBuf};

use foveate_nn::{Batch, Gradients, Model, Recompute, Sampling};
use foveate_train::checkpoint::{
    Checksums, Snapshot, State, load_weights, read_config, remove_all, save,
};
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

/// The largest difference, of the largest number.
fn off(found: &[f32], expected: &[f32]) -> f32 {
    assert_eq!(found.len(), expected.len());
    let largest = expected.iter().fold(0f32, |most, x| most.max(x.abs()));
    let off = found.iter().zip(expected).fold(0f32, |most, (a, b)| most.max((a - b).abs()));
    assert!(off.is_finite());
    off / largest
}

#[test]
fn logits_and_every_gradient_are_those_of_transformers() {
    for folder in families().unwrap_or_default() {
        let name = folder.file_name().unwrap().to_string_lossy().into_owned();
        let config = read_config(&folder, Checksums::Verify).unwrap();
        let mut model = Model::unfilled(config.model.clone(), &config.attention).unwrap();
        let fresh = load_weights(&folder, &mut model, Checksums::Verify).unwrap();
        assert!(fresh.is_empty(), "{fresh:?}");
        let bytes = fs::read(folder.join("expected.safetensors")).unwrap();
        let expected = SafeTensors::deserialize(&bytes).unwrap();
        let tokens = tensor(&expected, "tokens", u32::from_le_bytes);
        let labels = tensor(&expected, "labels", i32::from_le_bytes);
        let labels: Vec<i32> =
            labels.into_iter().map(|l| if l < 0 { foveate_nn::IGNORE } else { l }).collect();

        // Longer positions than the text's decide nothing here but longrope's factors.
        let len = tokens.len();
        let mut generator = model.generator(len, Sampling::default()).unwrap();
        let logits_off = off(
            &generator.feed(&tokens).unwrap(),
            &tensor(&expected, "logits", f32::from_le_bytes),
        );
        assert!(logits_off < 1e-5, "{name}: logits are {logits_off:.1e} off");

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
        let mut gradients = Gradients::zeros(&model);
        model.forward_backward(&batch, &mut gradients, Recompute::Mlp).unwrap();
        let mut worst = 0f32;
        for p in model.parameters() {
            let wanted = tensor(&expected, &format!("gradient:{}", p.name), f32::from_le_bytes);
            let off = off(gradients.of(p), &wanted);
            assert!(off < 3e-5, "{name}: the gradient of {} is {off:.1e} off", p.name);
            worst = worst.max(off);
        }
        let compared = expected.names().into_iter().filter(|name| name.starts_with("gradient:"));
        assert_eq!(compared.count(), model.parameters().len(), "{name}");
        println!("{name}: logits {logits_off:.1e} off, gradients {worst:.1e}");

        // For transformers to read back.
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
        assert_eq!((again.model, again.attention), (config.model, config.attention), "{name}");
    }
}
