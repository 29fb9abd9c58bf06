//! What a recipe takes of a GPU by the dry run of its step, and the nearest setting that fits.

use foveate_nn::{
    Account, AttentionConfig, Blocks, Cpu, Cutting, Dry, MemoryEstimate, Model, ModelConfig,
    NnError, Offload, ParameterLayout, ParameterState, Precision, Recomputation, Recompute,
    StepKind, Training,
};
use foveate_nn_cuda::logits_tokens_of;
use foveate_shard::Mesh;

use crate::graphs;
use crate::recipe::Recipe;

/// A GPU by what it has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GpuProfile {
    /// Its name.
    pub name: &'static str,
    /// Bytes of its memory as CUDA gives them (`cuDeviceTotalMem`, which `foveate doctor` shows): up to a GiB
    /// less than `nvidia-smi` says.
    pub bytes: u64,
}

const fn mib(mib: u64) -> u64 {
    mib << 20
}

impl GpuProfile {
    /// The one called `name`; case, spaces and hyphens do not matter.
    ///
    /// # Errors
    /// The names there are, in a line.
    pub fn named(name: &str) -> Result<Self, String> {
        let plain = |name: &str| name.to_lowercase().replace([' ', '-', '_'], "");
        let found = PROFILES.into_iter().find(|profile| plain(profile.name) == plain(name));
        found.ok_or_else(|| {
            let names = PROFILES.map(|profile| plain(profile.name)).join(", ");
            format!("recipes are planned for {names}, not for `{name}`; name a card, which need not be there")
        })
    }
}

/// GPUs that recipes are run dry for, with the memory that CUDA gives: the H200's as it was read on one, the others' by
/// published reports, which differ by up to 0.2 GiB from driver to driver.
pub const PROFILES: [GpuProfile; 4] = [
    GpuProfile { name: "H200", bytes: mib(143_155) },
    GpuProfile { name: "H100", bytes: mib(81_079) },
    GpuProfile { name: "L40S", bytes: mib(45_460) },
    GpuProfile { name: "RTX 4090", bytes: mib(24_080) },
];

/// What a GPU holds beside the arrays of a step: the context, kernels, their scratch and workspaces of
/// matrix products.
pub const BESIDE: u64 = 1 << 30;

/// What it holds more where passes are recorded: scratch of passes, which is no other work's then, and what the
/// driver keeps of graphs; 4 MiB were seen of a kind of pass, of which eight are kept.
const BESIDE_GRAPHS: u64 = 256 << 20;

/// What a run of a recipe holds beside the arrays of its steps, on one rank alone or on several.
pub fn beside(recipe: &Recipe, config: &ModelConfig, alone: bool) -> u64 {
    let recorded = graphs::wanted(recipe, config) && graphs::in_the_way(alone, recipe).is_none();
    BESIDE + if recorded { BESIDE_GRAPHS } else { 0 }
}

/// Bytes of host memory that a rank of `ranks` takes for a copy of what it saves, where steps go on while a
/// checkpoint is written: masters and moments of the parameters of `layout`, as `precision` keeps them.
pub fn save_copy_bytes(
    recipe: &Recipe,
    precision: Precision,
    layout: &ParameterLayout,
    ranks: usize,
) -> u64 {
    let moments = 1 + usize::from(recipe.optimizer.rule().keeps_squares());
    precision.copy_bytes(layout.elems(), layout.trained(), moments).div_ceil(ranks as u64)
}

/// What of a recipe decides the memory that it takes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Setting {
    /// What is kept of each parameter.
    pub state: ParameterState,
    /// Rows of a batch.
    pub rows: usize,
    /// What is computed again.
    pub recompute: Recomputation,
    /// Whether parameters are updated in the backward pass.
    pub in_backward: bool,
    /// Whether a step has one batch.
    pub one_batch: bool,
}

impl Setting {
    /// That of a recipe on a GPU; `auto` is everything again. On a CPU the state is f32 where the recipe says
    /// nothing.
    pub fn of(recipe: &Recipe) -> Self {
        Self {
            state: recipe.precision.state.unwrap_or(ParameterState::Exact),
            rows: recipe.train.batch_rows,
            recompute: recipe.train.recomputation().unwrap_or(Recomputation {
                offload: recipe.train.offload,
                ..Recompute::Full.into()
            }),
            in_backward: recipe.optimizer.in_backward,
            one_batch: recipe.train.accumulate == 1,
        }
    }

    /// The keys of a recipe in which it differs from `other`.
    fn beside(&self, other: &Self) -> String {
        let mut keys = Vec::new();
        let (own, others) = (self.recompute, other.recompute);
        if (own.what, own.layers) != (others.what, others.layers) {
            keys.push(format!("train.recompute = \"{}\"", own.what.name()));
        }
        if own.offload != others.offload {
            keys.push(format!("train.offload = \"{}\"", own.offload.name()));
        }
        if self.state != other.state {
            keys.push(format!("precision.state = \"{}\"", self.state.name()));
        }
        if self.rows != other.rows {
            keys.push(format!("train.batch_rows = {}", self.rows));
        }
        if self.in_backward != other.in_backward {
            keys.push("optimizer.in_backward = true".to_owned());
            keys.push("optimizer.clip_norm = 0".to_owned());
        }
        if self.one_batch && !other.one_batch {
            keys.push("train.accumulate = 1".to_owned());
        }
        keys.join(", ")
    }
}

/// A recipe with its model, to be run dry in any setting.
#[derive(Clone, Copy, Debug)]
pub struct Planned<'a> {
    /// The recipe.
    pub recipe: &'a Recipe,
    /// The sizes of its model.
    pub config: &'a ModelConfig,
    /// Its attention programs.
    pub attention: &'a AttentionConfig,
}

impl Planned<'_> {
    /// What a step takes of a GPU with `bytes` of memory: arrays, and [`beside`] as its process.
    ///
    /// # Errors
    /// Those of [`Planned::account`].
    pub fn memory(&self, setting: &Setting, bytes: u64) -> Result<MemoryEstimate, NnError> {
        let account = self.account(setting, bytes)?;
        Ok(MemoryEstimate { process: beside(self.recipe, self.config, true), ..account.memory() })
    }

    /// The setting of the recipe on a GPU with `bytes` of memory, where `auto` is the least that fits.
    ///
    /// # Errors
    /// Those of [`Planned::account`].
    pub fn setting_on(&self, bytes: u64) -> Result<Setting, NnError> {
        let own = Setting::of(self.recipe);
        if self.recipe.train.recomputation().is_some() {
            return Ok(own);
        }
        let (layers, offload) = (self.config.num_hidden_layers, own.recompute.offload);
        let total = |recompute| {
            self.memory(&Setting { recompute, ..own }, bytes).map(|memory| memory.total())
        };
        let recompute = least_that_fits(layers, Some(bytes), offload, total)?;
        Ok(Setting { recompute, ..own })
    }

    /// What a step does and holds on a GPU with `bytes` of memory.
    ///
    /// # Errors
    /// When what is frozen cannot be.
    pub fn account(&self, setting: &Setting, bytes: u64) -> Result<Account, NnError> {
        let precision = setting.state.into();
        let logits = logits_tokens_of(bytes, self.config.vocab_size, precision);
        self.account_on(&Dry::new(precision, logits).sharing(), setting)
    }

    /// What a rank's step does and holds on a GPU with `bytes` of memory, its rows being those of `setting` and its
    /// tokens of a row those of the recipe: the part of the model and of its parameters that a rank of `mesh` has,
    /// what it gathers and sends of those of others. It is the rank with the largest part.
    ///
    /// # Errors
    /// Those of [`Planned::account`], and a model that cannot be cut over `tensor`.
    pub fn account_of_rank(
        &self,
        setting: &Setting,
        bytes: u64,
        mesh: &Mesh,
    ) -> Result<Account, NnError> {
        let (precision, cutting) = (setting.state.into(), self.recipe.mesh.cutting(mesh));
        let vocab = self.config.vocab_size.div_ceil(cutting.tensor);
        let blocks = Dry::new(precision, logits_tokens_of(bytes, vocab, precision)).sharing();
        self.account_cut(&blocks, setting, cutting)
    }

    /// What a GPU's run takes of the host for the copy of what is saved, where steps go on beside its saves: none where
    /// the recipe says that they do not.
    ///
    /// # Errors
    /// Those of [`Planned::account`].
    pub fn save_copy(&self, setting: &Setting) -> Result<Option<u64>, NnError> {
        let Self { recipe, config, attention } = *self;
        if recipe.train.async_save == Some(false) || recipe.train.save_every == 0 {
            return Ok(None);
        }
        let frozen = |name: &str| recipe.optimizer.is_frozen(name);
        let model = Model::unfilled_with(Cpu::default(), config.clone(), attention, &frozen)?;
        Ok(Some(save_copy_bytes(recipe, setting.state.into(), model.layout(), 1)))
    }

    /// The model of a run on the CPU, without values: its moments are kept as the recipe's state says, and nothing is
    /// trained that the recipe freezes.
    ///
    /// # Errors
    /// Those of [`Model::unfilled_with`].
    pub fn model_on_cpu(&self) -> Result<Model, NnError> {
        let frozen = |name: &str| self.recipe.optimizer.is_frozen(name);
        let blocks = cpu(self.recipe.precision.state.unwrap_or_default());
        Model::unfilled_with(blocks, self.config.clone(), self.attention, &frozen)
    }

    /// What a step takes of this machine's memory on its CPU, with `beside` bytes more in the process.
    ///
    /// # Errors
    /// Those of [`Planned::account`].
    pub fn memory_on_cpu(&self, setting: &Setting, beside: u64) -> Result<MemoryEstimate, NnError> {
        let memory = self.account_on(&cpu(setting.state), setting)?.memory();
        Ok(MemoryEstimate { process: memory.process + beside, ..memory })
    }

    fn account_on<B: Blocks>(&self, blocks: &B, setting: &Setting) -> Result<Account, NnError> {
        self.account_cut(blocks, setting, Cutting::WHOLE)
    }

    fn account_cut<B: Blocks>(
        &self,
        blocks: &B,
        setting: &Setting,
        cutting: Cutting,
    ) -> Result<Account, NnError> {
        let optimizer = &self.recipe.optimizer;
        self.config.dry_run_on(
            blocks,
            self.attention,
            &|name| optimizer.is_frozen(name),
            setting.rows,
            self.recipe.data.len,
            StepKind::Training(self.training(setting, cutting)),
        )
    }

    /// How a step of `setting` trains, with parameters cut as `cutting` says.
    pub fn training(&self, setting: &Setting, cutting: Cutting) -> Training {
        Training {
            recompute: setting.recompute,
            in_backward: setting.in_backward,
            one_batch: setting.one_batch,
            squares: self.recipe.optimizer.rule().keeps_squares(),
            cutting,
        }
    }

    /// The setting that takes at most `bytes` and is nearest to `from`, in words, with what it takes:
    /// more is computed again before inputs of layers go to the host, before less is kept of each parameter,
    /// before rows are fewer, before a step has one batch, whose gradients may be bf16, before parameters are
    /// updated in the backward pass. None where nothing fits. Of the memory of the host it takes at most
    /// `host`, where that is known.
    ///
    /// # Errors
    /// Those of [`Planned::memory`].
    pub fn nearest(
        &self,
        from: &Setting,
        bytes: u64,
        host: Option<u64>,
    ) -> Result<Option<(String, MemoryEstimate)>, NnError> {
        let own = Precision::from(from.state);
        // What rounds gradients of a step takes one batch.
        let is_less = |state: ParameterState, alone: bool| {
            let precision = Precision::from(state);
            state == from.state
                || precision.weights == own.weights
                    && precision.bytes_per_parameter() < own.bytes_per_parameter()
                    && (alone || precision.gradients == own.gradients)
        };
        let away = Recomputation { offload: Offload::LayerInputs, ..Recompute::Full.into() };
        let host = host.unwrap_or(u64::MAX);
        let modes = modes(from.recompute).chain([away]).collect::<Vec<_>>();
        self.nearest_of(from, [bytes, host], &modes, is_less, |setting| self.memory(setting, bytes))
    }

    /// [`Planned::nearest`] where a step takes what [`Planned::memory_on_cpu`] says.
    ///
    /// # Errors
    /// Those of [`Planned::memory_on_cpu`].
    pub fn nearest_on_cpu(
        &self,
        from: &Setting,
        bytes: u64,
        beside: u64,
    ) -> Result<Option<(String, MemoryEstimate)>, NnError> {
        let is_less = |state, _| state == from.state || state == ParameterState::Int8Moments;
        let modes = modes(from.recompute).collect::<Vec<_>>();
        self.nearest_of(from, [bytes, 0], &modes, is_less, |setting| {
            self.memory_on_cpu(setting, beside)
        })
    }

    /// [`Planned::nearest`] among what may be computed again, in its order, and the states that are `less`, of
    /// a step with one batch or any, by what `memory` says of a setting: of the device, and of the host.
    fn nearest_of(
        &self,
        from: &Setting,
        [bytes, host]: [u64; 2],
        modes: &[Recomputation],
        less: impl Fn(ParameterState, bool) -> bool,
        memory: impl Fn(&Setting) -> Result<MemoryEstimate, NnError>,
    ) -> Result<Option<(String, MemoryEstimate)>, NnError> {
        for (in_backward, alone) in
            [(from.in_backward, from.one_batch), (from.in_backward, true), (true, true)]
        {
            let states = ParameterState::ALL.into_iter().filter(|&state| less(state, alone));
            let states: Vec<ParameterState> = states.collect();
            let mut rows = from.rows;
            loop {
                for (&state, &recompute) in
                    states.iter().flat_map(|state| modes.iter().map(move |mode| (state, mode)))
                {
                    let one_batch = alone;
                    let setting = Setting { state, rows, recompute, in_backward, one_batch };
                    let memory = memory(&setting)?;
                    if memory.total() <= bytes && memory.host <= host {
                        return Ok(Some((setting.beside(from), memory)));
                    }
                }
                if rows == 1 {
                    break;
                }
                rows = rows.div_ceil(2);
            }
        }
        Ok(None)
    }
}

/// What a CPU keeps where a recipe names this state.
pub(crate) fn cpu(state: ParameterState) -> Cpu {
    match state {
        ParameterState::Int8Moments => Cpu::with_int8_moments(),
        _ => Cpu::default(),
    }
}

/// [`save_copy_bytes`] of one rank on a CPU.
pub fn save_copy_bytes_on_cpu(recipe: &Recipe, layout: &ParameterLayout) -> u64 {
    let state = recipe.precision.state.unwrap_or_default();
    save_copy_bytes(recipe, cpu(state).precision(), layout, 1)
}

/// What may be computed again: what is given, and all modes with inputs of layers where they are.
fn modes(given: Recomputation) -> impl Iterator<Item = Recomputation> {
    let offload = given.offload;
    let all = Recompute::ALL.into_iter();
    [given].into_iter().chain(all.map(move |what| Recomputation { offload, ..what.into() }))
}

/// What is computed again where `there` bytes are there: nothing, else attention, gate and up, or all of
/// as few layers as make `bytes` fit; all of all layers where nothing does. `offload` waits in the memory of
/// the host.
///
/// # Errors
/// Those of `bytes`.
pub fn least_that_fits<E>(
    layers: usize,
    there: Option<u64>,
    offload: Offload,
    bytes: impl Fn(Recomputation) -> Result<u64, E>,
) -> Result<Recomputation, E> {
    let all = |what: Recompute| Recomputation { offload, ..what.into() };
    let Some(there) = there else { return Ok(all(Recompute::None)) };
    for what in Recompute::ALL {
        if bytes(all(what))? > there {
            continue;
        }
        if what == Recompute::None {
            return Ok(all(what));
        }
        // More layers take less.
        let (mut too_few, mut enough) = (0, layers);
        while enough - too_few > 1 {
            let middle = (too_few + enough) / 2;
            match bytes(Recomputation { layers: middle, ..all(what) })? > there {
                true => too_few = middle,
                false => enough = middle,
            }
        }
        return Ok(Recomputation { layers: enough, ..all(what) });
    }
    Ok(all(Recompute::Full))
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;

    #[test]
    fn as_little_is_computed_again_as_fits() {
        // 10 layers of 10 bytes; of each attention gives back 2, gate and up 5, everything 9.
        let bytes = |again: Recomputation| {
            let less = match again.what {
                Recompute::None => 0,
                Recompute::Attention => 2,
                Recompute::Mlp => 5,
                Recompute::Full => 9,
            };
            Ok::<u64, NnError>(100 - less * again.layers.min(10) as u64)
        };
        let found = |there| least_that_fits(10, Some(there), Offload::None, bytes).unwrap();
        let of = |what: Recompute, layers| Recomputation { layers, ..what.into() };
        assert_eq!(found(100), Recompute::None.into());
        assert_eq!(found(99), of(Recompute::Attention, 1));
        assert_eq!(found(80), of(Recompute::Attention, 10));
        assert_eq!(found(79), of(Recompute::Mlp, 5));
        assert_eq!(found(49), of(Recompute::Full, 6));
        assert_eq!(found(1), Recompute::Full.into());
        assert_eq!(
            least_that_fits(10, None, Offload::None, bytes).unwrap(),
            Recompute::None.into()
        );
        let away = Recomputation { offload: Offload::LayerInputs, ..of(Recompute::Mlp, 5) };
        assert_eq!(least_that_fits(10, Some(79), away.offload, bytes).unwrap(), away);
    }

    #[test]
    fn a_step_of_one_batch_is_told_by_its_key_alone_where_that_suffices() {
        let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../../recipes/smollm-135m.toml");
        let mut recipe = Recipe::load(Path::new(path), &[]).unwrap();
        let config = recipe.model_config(0).unwrap().unwrap();
        let attention = recipe.attention.clone().unwrap();
        (recipe.train.batch_rows, recipe.train.accumulate) = (1, 4);
        let planned = Planned { recipe: &recipe, config: &config, attention: &attention };
        // Nothing is narrower, and nothing more can be computed again or wait on the host.
        let own = Setting {
            state: ParameterState::Int8Moments,
            recompute: Recomputation { offload: Offload::LayerInputs, ..Recompute::Full.into() },
            ..Setting::of(&recipe)
        };
        let alone = Setting { one_batch: true, ..own };
        let there = planned.memory(&alone, 24 << 30).unwrap().total();
        assert!(planned.memory(&own, there).unwrap().total() > there);
        let (told, takes) = planned.nearest(&own, there, None).unwrap().unwrap();
        assert_eq!(told, "train.accumulate = 1");
        assert!(takes.total() <= there);
    }

    #[test]
    fn a_recipe_that_does_not_fit_a_cpu_is_told_values_that_do() {
        let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../../recipes/smollm-135m.toml");
        let mut recipe = Recipe::load(Path::new(path), &[]).unwrap();
        let config = recipe.model_config(0).unwrap().unwrap();
        let attention = recipe.attention.clone().unwrap();
        recipe.train.batch_rows = 8;
        recipe.train.accumulate = 4;
        let planned = Planned { recipe: &recipe, config: &config, attention: &attention };
        let own = Setting {
            state: ParameterState::F32,
            recompute: Recompute::None.into(),
            ..Setting::of(&recipe)
        };
        let beside = 5 << 20;
        let total = |setting: &Setting| planned.memory_on_cpu(setting, beside).unwrap().total();
        assert_eq!(total(&own), planned.memory_on_cpu(&own, 0).unwrap().total() + beside);
        let again = Setting { recompute: Recompute::Full.into(), ..own };
        let few = Setting { rows: 1, ..again };
        let narrow = Setting { state: ParameterState::Int8Moments, ..few };
        for (there, keys) in [
            (total(&own) - 1, "train.recompute = "),
            (total(&again), "train.recompute = \"full\""),
            (total(&few), "train.batch_rows = "),
            (
                total(&narrow),
                "train.recompute = \"full\", precision.state = \"int8_moments\", train.batch_rows = 1",
            ),
        ] {
            let (told, takes) = planned.nearest_on_cpu(&own, there, beside).unwrap().unwrap();
            assert!(told.contains(keys) && takes.total() <= there, "{told}, not {keys}");
        }
        let less = planned.nearest_on_cpu(&own, 100 << 20, beside).unwrap();
        assert_eq!(less, None);
    }
}
