//! Every product of the four axes beside one rank: losses, moments and weights after five steps.
//!
//! `scripts/every-mesh.sh` takes the meshes of 1, 2, 3, 4, 8 and 16 ranks, and connects ranks by TCP, too.

use foveate_shard::MeshAxis;

use super::ranks::{all_well, by_tcp, values};
use super::*;

/// Programs in which a rank that counts heads, rows or tokens from 0 comes to something else.
const PROGRAMS: [(&str, &str); 3] = [
    (
        "a learned bias, slopes and a mask by head",
        "attention={ mask = \"causal & document & (h % 3 < 1 | q - kv < 9)\", \
         score = \"score + bias[h, max(min(q - kv, 3), 0)] - slopes[h] * ((q - kv) as f32)\", \
         learned = { bias = { shape = [16, 4], init = 0.1, std = 0.5 } }, \
         buffers = { slopes = { shape = [16], values = [0.5, 0.25, 0.125, 0.0625, 0.5, 0.25, 0.125, \
         0.0625, 0.5, 0.25, 0.125, 0.0625, 0.5, 0.25, 0.125, 0.0625] } } }",
    ),
    (
        "a prefix of each row, capped",
        "attention={ mask = \"prefix & document\", score = \"softcap(5)\", buffers = { prefixes = { \
         shape = [16], values = [2, 9, 20, 0, 5, 31, 7, 1, 4, 12, 3, 18, 0, 6, 2, 8] } } }",
    ),
    (
        "windows and all of a document in turn",
        "attention={ layers = [\"local\", \"global\"], programs = { local = { mask = \
         \"causal & document & sliding_window(5)\" }, global = { mask = \"causal & document\" } } }",
    ),
];

const SIZES: [&str; 9] = [
    "model.num_attention_heads=16",
    "model.num_key_value_heads=4",
    "model.head_dim=4",
    "model.intermediate_size=40",
    "data.len=32",
    "train.steps=5",
    "train.save_every=0",
    // With a smaller one an element whose gradient is rounding alone takes a whole step.
    "optimizer.eps=1e-4",
    "optimizer.lr=1e-2",
];

/// What a run came to.
#[derive(PartialEq)]
struct Came {
    losses: Vec<f64>,
    held_out: Vec<f64>,
    /// Moments are sums of the gradients of all steps, and of their squares.
    mean: Vec<f64>,
    square: Vec<f64>,
    weights: Vec<f64>,
}

const WHAT: [&str; 5] = ["losses", "held-out losses", "mean moments", "square moments", "weights"];

impl Came {
    fn of(recipe: &Recipe, (summary, log): &(Summary, Log)) -> Self {
        let read = checkpoint::read_config(&summary.checkpoint, Checksums::Verify).unwrap();
        let mut model = Model::unfilled(read.model, &read.attention).unwrap();
        let rule = recipe.optimizer.rule();
        let state =
            checkpoint::load_state(&summary.checkpoint, &mut model, &rule, Checksums::Verify);
        let (moments, state) = state.unwrap();
        assert_eq!((state.step, log.losses.len()), (5, 5));
        let wide = |values: &[f32]| values.iter().map(|&x| f64::from(x)).collect();
        Self {
            losses: values(&log.losses),
            held_out: values(&log.held_out),
            mean: wide(&moments.mean),
            square: wide(&moments.square),
            weights: wide(model.weights()),
        }
    }

    fn all(&self) -> [&[f64]; 5] {
        [&self.losses, &self.held_out, &self.mean, &self.square, &self.weights]
    }

    fn bits(&self) -> Vec<u64> {
        self.all().iter().flat_map(|values| values.iter().map(|x| x.to_bits())).collect()
    }
}

/// Whether every mesh is asked for.
pub(super) fn whole() -> bool {
    std::env::var_os("FOVEATE_MESHES").is_some_and(|of| of == "all")
}

/// Every product of the four axes that is `ranks`.
pub(super) fn meshes(ranks: usize) -> Vec<[usize; 4]> {
    let divides = |n: usize| (1..=n).filter(move |d| n.is_multiple_of(*d));
    divides(ranks)
        .flat_map(|replicate| divides(ranks / replicate).map(move |shard| [replicate, shard]))
        .flat_map(|[replicate, shard]| {
            let left = ranks / replicate / shard;
            divides(left).map(move |context| [replicate, shard, context, left / context])
        })
        .collect()
}

/// The f32 rule: as far off as ten times what another order of the same sums on one rank is, and some
/// roundings of the largest number.
#[test]
fn every_product_of_axes_comes_to_what_one_rank_comes_to() {
    let whole = whole();
    let (numbers, programs) = match whole {
        true => (&[1, 2, 3, 4, 8, 16][..], &PROGRAMS[..]),
        false => (&[1, 4][..], &PROGRAMS[..1]),
    };
    let mut count = 0;
    // Of each kind: off in parts of what is allowed, off, and by which mesh.
    let mut worst = [(); 5].map(|()| (0.0f64, 0.0f64, String::new()));
    for (about, program) in programs {
        let sets = |more: &[&'static str]| [&SIZES[..], &[*program], more].concat();
        let alone = |more: &[&'static str]| {
            let place = Place::new();
            let recipe = place.recipe(&sets(more));
            Came::of(&recipe, &place.run(&recipe, Start::New).unwrap())
        };
        let one = alone(&["train.batch_rows=16"]);
        let other = alone(&["train.batch_rows=4", "train.accumulate=4"]);
        for mesh in numbers.iter().flat_map(|&ranks| meshes(ranks)) {
            let [replicate, shard, context, tensor] = mesh;
            let ranks = mesh.iter().product();
            let mesh = format!(
                "mesh={{ replicate = {replicate}, shard = {shard}, context = {context}, \
                 tensor = {tensor} }}"
            );
            let run = |tcp: bool| {
                let place = Place::new();
                let recipe = [&sets(&["train.batch_rows=16"])[..], &[&mesh]].concat();
                let recipe = place.recipe(&recipe);
                let runs = match tcp {
                    true => by_tcp(ranks, &place, &recipe),
                    false => all_well(ranks, &place, &recipe, Start::New),
                };
                assert!(runs.iter().all(|(_, log)| *log == runs[0].1), "all ranks see the same");
                Came::of(&recipe, &runs[0])
            };
            let found = run(false);
            let again = [false, true].into_iter().take(if whole { 2 } else { 0 });
            for tcp in again {
                assert!(run(tcp).bits() == found.bits(), "{about}, {mesh}: other bits, TCP: {tcp}");
            }
            if ranks == 1 {
                assert!(found.bits() == one.bits(), "{about}: other bits on a mesh of one rank");
            }
            for (i, what) in WHAT.iter().enumerate() {
                let [found, one, other] = [&found, &one, &other].map(|came| came.all()[i]);
                assert_eq!(found.len(), one.len());
                let most = |a: &[f64], b: &[f64]| {
                    a.iter().zip(b).map(|(a, b)| (a - b).abs()).fold(0.0, f64::max)
                };
                let largest = one.iter().fold(0.0f64, |most, x| most.max(x.abs()));
                let allowed = 10.0 * most(other, one) + 4.0 * f64::from(f32::EPSILON) * largest;
                let off = most(found, one);
                assert!(off <= allowed, "{about}, {mesh}: {what} are {off} off of {allowed}");
                if off / allowed > worst[i].0 {
                    worst[i] = (off / allowed, off, format!("{mesh}, {about}"));
                }
            }
            count += 1;
        }
    }
    println!("{count} runs beside one rank, by {} programs", programs.len());
    for (what, (of, off, mesh)) in WHAT.iter().zip(worst) {
        println!("{what}: at most {off:.2e} off, {of:.2} of what is allowed: {mesh}");
    }
}

#[test]
fn products_of_axes_are_all_there() {
    for (ranks, products) in [(1, 1), (2, 4), (3, 4), (4, 10), (8, 20), (16, 35)] {
        let mut meshes = meshes(ranks);
        assert!(meshes.iter().all(|mesh| mesh.iter().product::<usize>() == ranks));
        meshes.sort_unstable();
        meshes.dedup();
        assert_eq!(meshes.len(), products, "{} axes, {ranks} ranks", MeshAxis::ALL.len());
    }
}
