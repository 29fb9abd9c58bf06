//! The kernels of a plan: configured, printed, compiled and loaded when they are first needed.

use std::collections::HashMap;
use std::sync::{Arc, LazyLock};

use foveate_problem::Dims;

use super::CudaPlan;
use super::call::Call;
use crate::choose::schedule::TileSize;
use crate::choose::{Choice, Class, KernelPlan, Pass, PassLaunch, PrintedMods, Records, Sizes};
use crate::compile::Candidate;
use crate::compile::codegen::{Extent, ModsSource, Options};
use crate::compile::config::{Config, Elem, Entry, Kernel};
use crate::compile::params::BlockListsParams;
use crate::compile::resources::{Resources, shared_bytes_of};
use crate::compile::source::{source, source_with_bounded_waits};
use crate::compile::spill_fallback::compile_one_that_fits;
use crate::error::CudaError;
use foveate_gpu::Queue;
use foveate_gpu::driver::{Function, Launch};
use foveate_gpu::sync::lock;

/// What was made so far.
#[derive(Clone, Debug, Default)]
pub(super) struct Kernels {
    /// The planner's answers.
    chosen: Vec<((Class, Sizes, bool), Arc<KernelPlan>)>,
    /// Printed mods by what they were printed for.
    printed: Vec<(PrintKey, Arc<Printed>)>,
    /// Kernels beside those of a pass, by entry point, text and bytes of shared memory.
    beside: HashMap<(Config, Entry, u64, usize), Function>,
    /// What runs in place of a configuration that was chosen, entry by entry and text by text.
    loaded: HashMap<(Config, Entry, u64), (Config, Function)>,
    /// Configurations that were chosen and add dq in order, with the texts of which every one spills.
    spilled_order: Vec<(Config, u64)>,
    /// What runs otherwise than it was planned.
    notes: Vec<String>,
}

/// Mods as text, and which of the different texts of this plan it is.
#[derive(Debug)]
pub(super) struct Printed {
    pub source: ModsSource,
    text: u64,
}

impl Printed {
    fn new(source: ModsSource) -> Self {
        let text = digest(source.text());
        Self { source, text }
    }
}

#[derive(Clone, Debug, PartialEq)]
struct PrintKey {
    mods: PrintedMods,
    checked: bool,
    extent: Extent,
}

/// Different problems whose choices and printed mods are kept.
const MOST_KEPT: usize = 64;

impl Kernels {
    /// Lets the planner choose again.
    pub fn forget_choices(&mut self) {
        self.chosen.clear();
    }

    /// Whether every kernel that adds dq in order was seen to spill where this configuration was chosen, with this text;
    /// without one, with any.
    fn spills_in_order(&self, chosen: &Config, text: Option<u64>) -> bool {
        let mut spilled = self.spilled_order.iter().filter(|(config, _)| config == chosen);
        spilled.any(|(_, with)| text.is_none_or(|text| text == *with))
    }

    /// What still holds when captured buffers and scalars have other values: everything but the
    /// printed mods, which carry those values.
    pub fn with_other_values(&self) -> Self {
        Self { printed: Vec::new(), ..self.clone() }
    }
}

/// What kernels are printed with that evaluate no mods.
static NOTHING: LazyLock<Arc<Printed>> =
    LazyLock::new(|| Arc::new(Printed::new(ModsSource::nothing())));

/// Queues a kernel of a plan. Addresses among its parameters are those of operands and
/// destinations that the pass has checked, or of allocations of the queue's pool.
pub(super) fn queue_kernel(
    function: &Function,
    queue: &Queue,
    grid: [u32; 3],
    threads: u32,
    parameters: &[&[u8]],
) -> Result<(), CudaError> {
    // SAFETY: `Accesses` has asked the driver whether operands and destinations are memory of
    // this device, and their strides keep kernels inside; whoever hands them over keeps them until
    // the work is done. Allocations go back to the pool of the same queue, behind this launch.
    unsafe { function.launch(queue.stream(), &Launch::new(grid, threads), parameters)? };
    Ok(())
}

/// A kernel ready for launches.
#[derive(Clone, Debug)]
pub(super) struct Ready {
    pub config: Config,
    pub function: Function,
    pub mods: Arc<Printed>,
}

impl Ready {
    pub fn tile(&self) -> TileSize {
        TileSize::of(&self.config)
    }

    pub fn threads(&self) -> u32 {
        self.config.threads() as u32
    }
}

impl CudaPlan {
    /// What the kernels of every call have in common. Which gradients of captured buffers are
    /// wanted is the call's to say.
    pub(super) fn class(&self) -> Class {
        let gradient = self.gradient.as_ref().ok().and_then(|g| g.as_deref());
        Class {
            captures: false,
            deterministic: self.options.deterministic,
            ..Class::of(&self.spec, self.elem, &self.dims, gradient)
        }
    }

    /// The planner's choices for a class of kernels and sizes.
    ///
    /// # Errors
    /// When nothing fits the device.
    pub(super) fn chosen(
        &self,
        class: Class,
        sizes: Sizes,
        backward: bool,
    ) -> Result<Arc<KernelPlan>, CudaError> {
        let key = (class, sizes, backward);
        let found = {
            let kernels = lock(&self.kernels);
            kernels.chosen.iter().find(|(k, _)| *k == key).map(|(_, plan)| plan.clone())
        };
        if let Some(found) = found {
            return Ok(found);
        }
        let profile = self.engine.profile();
        let sizes = sizes.under(&self.spec, self.options.mean_kv_len);
        let records = Records::of_engine(&self.engine);
        let recorded = |kernel| (*records).as_ref()?.record(kernel, &key.0, &sizes, &self.spec);
        let options = &self.options.kernels;
        let plan = KernelPlan::with_records(profile, &key.0, &sizes, backward, options, &recorded)?;
        let plan = Arc::new(plan);
        let mut kernels = lock(&self.kernels);
        if kernels.chosen.len() >= MOST_KEPT {
            kernels.chosen.remove(0);
        }
        kernels.chosen.push((key, plan.clone()));
        Ok(plan)
    }

    /// The choices of a backward that is about to be launched. Where every kernel that adds dq in order
    /// spills, dq has a kernel of its own, as where there is no order, unless the user asked for it.
    ///
    /// # Errors
    /// Those of [`Self::chosen`] and of compiling.
    pub(super) fn chosen_backward(
        &self,
        class: Class,
        call: &Call<'_>,
    ) -> Result<Arc<KernelPlan>, CudaError> {
        let sizes = sizes(call.dims, call.sequences.longest());
        let chosen = self.chosen(class.clone(), sizes, true)?;
        let mut text = None;
        if let Some(keys) = chosen.config(Kernel::Backward).filter(|c| self.may_leave_order(c)) {
            let launches = Pass::backward(&class, keys).launches();
            let launch = launches.iter().find(|launch| launch.entry == Entry::Backward);
            let launch = launch.expect("a backward has it");
            self.kernel(&chosen, launch, call)?;
            let config = launch.entry.config(self.grouped(keys));
            text = Some(self.printed(launch.mods, call, &config)?.text);
        }
        self.settled(chosen, class, sizes, text)
    }

    /// The choices of a backward with a text, as far as kernels have been compiled: the calls before, with other
    /// texts, decide nothing. Without a text, those with any.
    pub(super) fn settled(
        &self,
        chosen: Arc<KernelPlan>,
        class: Class,
        sizes: Sizes,
        text: Option<u64>,
    ) -> Result<Arc<KernelPlan>, CudaError> {
        let keys = chosen.config(Kernel::Backward).map(|config| self.grouped(config));
        match keys.is_some_and(|keys| lock(&self.kernels).spills_in_order(&keys, text)) {
            true => self.chosen(Class { separate_dq: true, ..class }, sizes, true),
            false => Ok(chosen),
        }
    }

    fn may_leave_order(&self, config: &Config) -> bool {
        config.ordered_dq && self.options.kernels.backward.ordered_dq.is_none()
    }

    /// The kernel of a launch, as it was `chosen`, printed for the lengths of a call's sequences.
    pub(super) fn kernel(
        &self,
        chosen: &KernelPlan,
        launch: &PassLaunch,
        call: &Call<'_>,
    ) -> Result<Ready, CudaError> {
        let entry = launch.entry;
        let choice = chosen.choice(entry.kernel());
        let wanted = |config: &Config| entry.config(self.grouped(config));
        let config = wanted(&choice.chosen.config);
        let mods = self.printed(launch.mods, call, &config)?;
        let key = (config, entry, mods.text);
        let found = lock(&self.kernels).loaded.get(&key).cloned();
        if let Some((config, function)) = found {
            let mods = match config == key.0 {
                true => mods,
                false => self.printed(launch.mods, call, &config)?,
            };
            return Ok(Ready { config, function, mods });
        }
        let selected =
            compile_one_that_fits(self.engine.profile(), choice.ranked(), |candidate| {
                let config = wanted(&candidate.config);
                let mods = self.printed(launch.mods, call, &config)?;
                let arch = config.family.arch(self.engine.device().info().arch());
                let compiled = self.engine.compiled(&source(&config, &mods.source), arch)?;
                Ok((config, mods, compiled))
            })?;
        let order_spills = !selected.holds && self.may_leave_order(&key.0);
        let note = if order_spills { selected.without_order() } else { selected.note };
        let (config, mods, mut compiled) = selected.made;
        if self.forced.bounded_waits
            && let Some(text) = source_with_bounded_waits(&config, &mods.source)
        {
            let arch = config.family.arch(self.engine.device().info().arch());
            compiled = self.engine.compiled(&text, arch)?;
        }
        let bytes = shared_bytes_of(entry, &selected.candidate.resources);
        let function = self.engine.load(&compiled, entry.name(), bytes)?;
        let function = function.labelled(format!("{} ({config})", entry.name()));
        let mut kernels = lock(&self.kernels);
        if order_spills {
            kernels.spilled_order.push((key.0.clone(), key.2));
        }
        kernels.loaded.insert(key, (config.clone(), function.clone()));
        if let Some(note) = note.filter(|n| !kernels.notes.contains(n)) {
            kernels.notes.push(note);
        }
        drop(kernels);
        Ok(Ready { config, function, mods })
    }

    /// Every kernel addresses heads, which may come in groups.
    fn grouped(&self, config: &Config) -> Config {
        Config { group: self.dims.group(), ..config.clone() }
    }

    /// The candidate of a choice that runs, as far as it has been compiled.
    pub(super) fn running<'a>(&self, choice: &'a Choice) -> &'a Candidate {
        let first = self.grouped(&choice.chosen.config);
        let kernels = lock(&self.kernels);
        let runs = kernels.loaded.iter().find(|((config, ..), _)| *config == first);
        let runs = runs.map(|(_, (config, _))| config);
        let mut runs = choice.ranked().filter(|c| runs == Some(&self.grouped(&c.config)));
        runs.next().unwrap_or(&choice.chosen)
    }

    /// What runs otherwise than it was planned, and why; of kernels that have been needed so far.
    pub fn notes(&self) -> Vec<String> {
        lock(&self.kernels).notes.clone()
    }

    /// The mask as the kernel that makes block lists evaluates it.
    pub(super) fn printed_mask(
        &self,
        call: &Call<'_>,
        tile: TileSize,
    ) -> Result<Arc<Printed>, CudaError> {
        let config = Config::block_lists(BlockListsParams::THREADS, call.checked);
        let at = Config { tile_q: tile.q, tile_kv: tile.kv, ..config };
        self.printed(PrintedMods::Mask, call, &at)
    }

    /// The kernel that makes block lists of a printed mask, with so many bytes of shared memory.
    pub(super) fn list_kernel(
        &self,
        call: &Call<'_>,
        mask: &Printed,
        shared_bytes: usize,
    ) -> Result<Function, CudaError> {
        let config = Config::block_lists(BlockListsParams::THREADS, call.checked);
        self.beside(Entry::BlockLists, config, mask, shared_bytes)
    }

    /// The kernel that ranks what they say, in the same source.
    pub(super) fn rank_kernel(
        &self,
        call: &Call<'_>,
        tile: TileSize,
    ) -> Result<Function, CudaError> {
        let config = Config::block_lists(BlockListsParams::THREADS, call.checked);
        self.beside(Entry::DqRanks, config, &*self.printed_mask(call, tile)?, 0)
    }

    /// The kernel that writes the mask's bits of partial tiles, in the same source, and its mask.
    pub(super) fn mask_bits_kernel(
        &self,
        call: &Call<'_>,
        tile: TileSize,
    ) -> Result<(Function, Arc<Printed>), CudaError> {
        let config = Config::block_lists(BlockListsParams::THREADS, call.checked);
        let printed = self.printed_mask(call, tile)?;
        Ok((self.beside(Entry::MaskBits, config, &printed, 0)?, printed))
    }

    /// A kernel that evaluates no mods, and is one for all programs.
    pub(super) fn plain_kernel(&self, config: Config) -> Result<Function, CudaError> {
        let taken = Resources::of(&config).expect("its one configuration can be");
        self.beside(config.kernel.entry(), config, &NOTHING, taken.shared_bytes)
    }

    fn beside(
        &self,
        entry: Entry,
        config: Config,
        mods: &Printed,
        shared_bytes: usize,
    ) -> Result<Function, CudaError> {
        let key = (config, entry, mods.text, shared_bytes);
        if let Some(function) = lock(&self.kernels).beside.get(&key) {
            return Ok(function.clone());
        }
        let text = source(&key.0, &mods.source);
        let compiled = self.engine.compiled(&text, self.engine.device().info().arch())?;
        let function = self.engine.load(&compiled, entry.name(), shared_bytes as u32)?;
        lock(&self.kernels).beside.insert(key, function.clone());
        Ok(function)
    }

    fn printed(
        &self,
        mods: PrintedMods,
        call: &Call<'_>,
        config: &Config,
    ) -> Result<Arc<Printed>, CudaError> {
        if mods == PrintedMods::Nothing {
            return Ok(NOTHING.clone());
        }
        let Call { dims, checked, .. } = *call;
        let extent = Extent::of(dims, call.sequences.longest(), config);
        let key = PrintKey { mods, checked, extent };
        let found = {
            let kernels = lock(&self.kernels);
            kernels.printed.iter().find(|(k, _)| *k == key).map(|(_, printed)| printed.clone())
        };
        if let Some(printed) = found {
            return Ok(printed);
        }
        let gradient = match mods {
            PrintedMods::Backward => self.differentiable()?.map(|g| &**g),
            PrintedMods::Nothing | PrintedMods::Mask | PrintedMods::Forward => None,
        };
        let options = Options {
            extent,
            fast_math: self.elem != Elem::F32,
            checked,
            deterministic: self.options.deterministic,
        };
        let source = ModsSource::new(mods.of(&self.spec, gradient), &options)?;
        let printed = Arc::new(Printed::new(source));
        let mut kernels = lock(&self.kernels);
        if kernels.printed.len() >= MOST_KEPT {
            kernels.printed.remove(0);
        }
        kernels.printed.push((key, printed.clone()));
        Ok(printed)
    }
}

/// A number for a text, to tell the texts of one plan apart.
fn digest(text: &str) -> u64 {
    use std::hash::{DefaultHasher, Hash, Hasher};
    let mut hasher = DefaultHasher::new();
    text.hash(&mut hasher);
    hasher.finish()
}

/// The sizes that choices depend on; of the longest sequence's queries and keys.
pub(super) fn sizes(dims: &Dims, [queries, keys]: [usize; 2]) -> Sizes {
    Sizes::of(&Dims { len_q: queries, len_k: keys, ..*dims })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_spills_in_order_with_one_text_does_not_with_another() {
        let chosen = Config::new(Kernel::Backward, Elem::Bf16, 128, 128);
        let other = Config { stages: chosen.stages + 1, ..chosen.clone() };
        let mut kernels = Kernels::default();
        assert!(!kernels.spills_in_order(&chosen, None));
        kernels.spilled_order.push((chosen.clone(), 7));
        assert!(kernels.spills_in_order(&chosen, Some(7)));
        assert!(!kernels.spills_in_order(&chosen, Some(8)), "a call before decides");
        // A description tells what calls so far have come to.
        assert!(kernels.spills_in_order(&chosen, None));
        assert!(
            !kernels.spills_in_order(&other, None) && !kernels.spills_in_order(&other, Some(7))
        );
    }
}
