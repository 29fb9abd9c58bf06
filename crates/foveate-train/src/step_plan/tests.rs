//! Steps of models of all families on meshes: what is planned is what the trainer does.

use foveate_nn::{Architecture, Cpu, GroupTransferKind, ModelConfig, ProgramConfig, RankSums};
use foveate_shard::MeshAxis;
use foveate_shard::step::{EdgeKind, Moved};

use super::*;
use crate::ranks::PARAMETERS;

fn config(heads: [usize; 2], tied: bool, architecture: Architecture) -> ModelConfig {
    ModelConfig { num_hidden_layers: 3, ..crate::tensor::tests::config(heads, tied, architecture) }
}

fn recipe(sets: &[&str]) -> Recipe {
    let sets: Vec<String> = sets.iter().map(ToString::to_string).collect();
    Recipe::parse(include_str!("../../../../recipes/tiny.toml"), "tiny.toml", &sets).unwrap()
}

fn model(config: &ModelConfig, mesh: &Mesh, rank: usize, frozen: &str) -> Model {
    let tensor = mesh.size(MeshAxis::Tensor);
    let part = TensorPart::of(config, mesh.index(rank, MeshAxis::Tensor), tensor).unwrap();
    let attention = ProgramConfig { mask: "causal".to_owned(), ..Default::default() }.into();
    let is_frozen = |name: &str| !frozen.is_empty() && name.contains(frozen);
    Model::unfilled_part(Cpu::default(), config.clone(), &attention, &is_frozen, part).unwrap()
}

#[test]
fn what_is_planned_is_what_models_of_every_family_have_and_do() {
    let rich = Architecture {
        qkv_bias: true,
        head_norms: true,
        output_norms: true,
        ..Architecture::default()
    };
    for (heads, tied, architecture, frozen) in [
        ([4, 2], false, Architecture::default(), ""),
        ([6, 3], true, rich.clone(), ""),
        ([8, 2], false, rich, "layers.1"),
        ([4, 4], true, Architecture::default(), "embed"),
        ([4, 2], false, Architecture { packed_weights: true, ..Architecture::default() }, "norm"),
    ] {
        let config = config(heads, tied, architecture);
        for mesh in [[1, 2, 1, 1], [2, 1, 1, 2], [1, 3, 2, 1], [2, 2, 1, 2], [1, 2, 2, 4]] {
            let mesh = Mesh::new(mesh).unwrap();
            for reshard in ["always", "after_backward", "never"] {
                let set = format!("mesh.reshard={reshard}");
                let recipe = recipe(&[&set, "train.batch_rows=7", "data.len=29"]);
                let tensor = mesh.size(MeshAxis::Tensor);
                let first = model(&config, &mesh, 0, frozen);
                for what in Recompute::ALL {
                    let again = Recomputation { layers: 2, ..what.into() };
                    let shape = shape(&first, &recipe, again, tensor).unwrap();
                    let cuts = sharding(&first, &recipe, mesh).unwrap();
                    let plan = StepPlan::new(&cuts, &shape).unwrap();
                    let proven = plan.prove().unwrap_or_else(|e| panic!("{mesh}, {what:?}: {e}"));
                    moves(proven.plan(), first.layout(), recipe.mesh.reshard, &mesh);
                    for rank in 0..mesh.ranks() {
                        let model = model(&config, &mesh, rank, frozen);
                        let part = mesh.index_of(rank, &PARAMETERS);
                        let share = model.layout().share(part, mesh.size_of(&PARAMETERS));
                        assert_eq!(holds(proven.plan(), rank, &model, &share), Ok(()), "{mesh}");
                    }
                }
            }
        }
    }
}

/// Groups are gathered and reduced in the order, and beside the stages, of the trainer.
fn moves(plan: &StepPlan, layout: &ParameterLayout, reshard: Reshard, mesh: &Mesh) {
    if mesh.size_of(&PARAMETERS) == 1 {
        return;
    }
    let of_groups = plan.edges().filter_map(|edge| match (edge.moved, edge.kind) {
        (Moved::Elements { group, .. }, EdgeKind::AllGather) => {
            Some((group, GroupTransferKind::Gather, edge.beside.clone()))
        }
        (Moved::Elements { group, .. }, EdgeKind::ReduceScatter) => {
            Some((group, GroupTransferKind::Reduce, edge.beside.clone()))
        }
        _ => None,
    });
    let stage = |(group, backward): (usize, bool)| {
        let way = if backward { "backward" } else { "forward" };
        format!("{} {way}", layout.groups()[group].name)
    };
    let done = layout.transfers(reshard).into_iter();
    let done = done.map(|t| (t.group, t.kind, t.beside.map(stage)));
    assert_eq!(of_groups.collect::<Vec<_>>(), done.collect::<Vec<_>>());
}

/// Every rank gets the sums of all others, as the trainer has them.
#[test]
fn totals_are_as_long_as_the_sums_of_a_step() {
    let (config, recipe) = (config([4, 2], false, Architecture::default()), recipe(&[]));
    let mesh = Mesh::new([2, 2, 1, 2]).unwrap();
    let model = model(&config, &mesh, 0, "");
    let cuts = sharding(&model, &recipe, mesh).unwrap();
    let shape = shape(&model, &recipe, Recompute::None.into(), 2).unwrap();
    let plan = StepPlan::new(&cuts, &shape).unwrap();
    let totals: Vec<_> = plan.edges().filter(|edge| edge.moved == Moved::Totals).collect();
    assert_eq!(totals.len(), 1);
    let others = mesh.ranks() - 1;
    assert_eq!(plan.received(totals[0], 0), (others * size_of::<RankSums>()) as u64);
}

#[test]
fn a_model_that_has_something_else_than_was_proven_is_named() {
    let (config, recipe) = (config([4, 2], false, Architecture::default()), recipe(&[]));
    let mesh = Mesh::new([1, 2, 1, 2]).unwrap();
    let own = model(&config, &mesh, 3, "");
    let cuts = sharding(&own, &recipe, mesh).unwrap();
    let shape = shape(&own, &recipe, Recompute::None.into(), 2).unwrap();
    let plan = StepPlan::new(&cuts, &shape).unwrap();
    let [first, second] = [0, 1].map(|part| own.layout().share(part, 2));
    assert_eq!(holds(&plan, 3, &own, &second), Ok(()));
    let wrong = holds(&plan, 3, &own, &first).unwrap_err();
    assert!(wrong.starts_with("rank 3 has elements of embedding 0.."), "{wrong}");
    let wrong = holds(&plan, 2, &own, &second).unwrap_err();
    assert_eq!(wrong, "rank 2 has heads 2..4, and 0..2 are proven");
}
