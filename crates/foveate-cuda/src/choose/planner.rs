//! Which configuration runs a problem on a device.
//!
//! Planning is pure: it needs a [`Profile`], not a GPU. For each kernel it enumerates tiles,
//! drops with a typed [`Refusal`] what the device cannot run, and ranks the rest: measured
//! choices first (`table`), then by modelled time (`model`). Every head dim up to
//! 256 in every dtype has a configuration on every profile; where nothing fits, the error has
//! every candidate with its bytes against the limit.

use std::fmt;

use super::class::{Class, MOST_ROWS, Sizes, Unmapped};
use super::options::{KernelOptions, TileOptions};
use super::pass::Pass;
use super::records::Record;
use super::{model, table};
use crate::compile::Candidate;
use crate::compile::config::{Config, Count, Elem, Family, HeadDims, Kernel, Tiles, TilesOf};
use crate::compile::resources::{Refusal, Resources, Warps, hopper};
use crate::error::CudaError;
use foveate_gpu::hopper::Need;
use foveate_gpu::profile::Profile;

/// Where a choice comes from, the one that counts most first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, serde::Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Origin {
    /// The user's [`KernelOptions`]; what they leave open is chosen as without them.
    User,
    /// A record of the tuner's: measured on this GPU, on a problem like this one.
    Record,
    /// The table of configurations that were measured when the kernels were written.
    Table,
    /// The model.
    Model,
}

/// A configuration that does not.
#[derive(Clone, Debug, PartialEq, Eq, serde::Serialize)]
pub struct Refused {
    /// The configuration.
    pub config: Config,
    /// Why.
    pub refusal: Refusal,
}

impl fmt::Display for Refused {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { config, refusal } = self;
        match refusal {
            // Of all its tiles.
            Refusal::Family { reason } => f.write_str(reason),
            Refusal::Shape { .. } | Refusal::Shared { .. } | Refusal::Registers { .. } => {
                write!(f, "{}: {refusal}", TilesOf(config))
            }
        }
    }
}

/// The choice for one kernel.
#[derive(Clone, Debug, PartialEq, serde::Serialize)]
pub struct Choice {
    /// What runs.
    pub chosen: Candidate,
    /// Why this one.
    pub origin: Origin,
    /// Why it copies operands row by row, where it does.
    pub copied: Vec<String>,
    /// How partial tiles get the mask, and why, where the family can read its bits.
    pub mask: Option<String>,
    /// What would run too, the best first.
    pub others: Vec<Candidate>,
    /// What cannot.
    pub refused: Vec<Refused>,
}

/// The choices for one problem.
#[derive(Clone, Debug, PartialEq, serde::Serialize)]
pub struct KernelPlan {
    /// The device.
    pub profile: Profile,
    /// Every kernel that a call launches, in order; the forward's first.
    pub kernels: Vec<Choice>,
    /// KV splits of a tile of queries in the forward; 1 without
    /// [`Kernel::Combine`].
    pub kv_splits: usize,
    /// All heads take turns at each tile of keys of the backward.
    #[serde(skip)]
    all_heads_in_turns: bool,
}

/// CTAs that a launch can have along its third axis.
const MAX_KV_SPLITS: usize = 65535;

/// Times the best modelled time from which on a candidate is not worth timing on compute capability
/// 9.0, whose rates are known; elsewhere nothing says how far the model is off.
const FAR_BEHIND: f64 = 1.5;

/// Candidates that a refusal lists; those that miss the least are the first.
const MOST_TOLD: usize = 3;

/// Head dims that every GPU has a configuration for, in the dtypes that it takes.
const EVERYWHERE: usize = 256;

impl KernelPlan {
    /// Plans the forward, and with `backward` the backward.
    ///
    /// # Errors
    /// When no configuration of a kernel fits, or none that `options` ask for: the message has
    /// every candidate with what it takes against the limit.
    pub fn new(
        profile: &Profile,
        class: &Class,
        sizes: &Sizes,
        backward: bool,
        options: &KernelOptions,
    ) -> Result<Self, CudaError> {
        Self::with_records(profile, class, sizes, backward, options, &|_| None)
    }

    /// The same where the tuner has records: `recorded` gives what was measured to be the best of
    /// a kernel, which comes before the planner's table and model.
    ///
    /// # Errors
    /// Those of [`Self::new`].
    pub fn with_records(
        profile: &Profile,
        class: &Class,
        sizes: &Sizes,
        backward: bool,
        options: &KernelOptions,
        recorded: &dyn Fn(Kernel) -> Option<Record>,
    ) -> Result<Self, CudaError> {
        let choose = |kernel| choose(profile, class, sizes, kernel, options, recorded(kernel));
        let mut forward = choose(Kernel::Forward)?;
        let kv_splits = options.kv_splits.unwrap_or_else(|| {
            let Candidate { config, occupancy, .. } = &forward.chosen;
            let of = |sizes: &Sizes| model::kv_splits(profile, config, occupancy.ctas, sizes);
            // With any it is another kernel, and lengths make as few of these as of tiles.
            match (of(sizes), of(&sizes.ranked())) {
                (splits, _) if sizes.has_few_queries() => splits,
                (_, 1) => 1,
                (splits, _) => splits.max(2),
            }
        });
        if !(1..=MAX_KV_SPLITS).contains(&kv_splits) {
            return Err(CudaError::argument(format!(
                "kv_splits is {kv_splits}; keys are split over 1 to {MAX_KV_SPLITS} CTAs"
            )));
        }
        let kv_split = kv_splits > 1;
        // What runs in place of a kernel has to take its operands, too.
        let family = forward.chosen.config.family;
        forward.others.retain(|c| c.config.family.stands_in_for(family));
        let all = forward.others.iter_mut().chain([&mut forward.chosen]);
        all.for_each(|c| c.config.kv_split = kv_split);
        let rest = Pass::Forward { kv_split }.kernels().into_iter().skip(1);
        let mut kernels = vec![forward];
        kernels.extend(rest.map(choose).collect::<Result<Vec<_>, _>>()?);
        if backward {
            let mut keys = choose(Kernel::Backward)?;
            // What runs in its place leaves dq to the same kernel.
            let separate_dq = keys.chosen.config.separate_dq;
            keys.others.retain(|c| separate_dq || !c.config.separate_dq);
            keys.others.iter_mut().for_each(|c| c.config.separate_dq = separate_dq);
            let all = Pass::backward(class, &keys.chosen.config).kernels().into_iter();
            let mut keys = Some(keys);
            let chosen = all.map(|kernel| match kernel.owns_keys() {
                true => Ok(keys.take().expect("a pass has a kernel once")),
                false => choose(kernel),
            });
            kernels.extend(chosen.collect::<Result<Vec<_>, _>>()?);
        }
        let mut plan =
            Self { profile: profile.clone(), kernels, kv_splits, all_heads_in_turns: false };
        let ordered = plan.config(Kernel::Backward).is_some_and(|config| config.ordered_dq);
        plan.all_heads_in_turns = ordered && class.is_sparse(Kernel::Backward, sizes);
        Ok(plan)
    }

    /// Whether dq of a backward has a kernel of its own: [`Kernel::BackwardDq`].
    pub fn separates_dq(&self) -> bool {
        self.config(Kernel::Backward).is_some_and(|config| config.separate_dq)
    }

    /// Whether query heads of a backward have dk and dv of their own: for [`Kernel::GroupSums`].
    pub fn splits_gqa(&self) -> bool {
        self.config(Kernel::Backward).is_some_and(|config| config.split_gqa)
    }

    /// How many of the `heads` of `kernel` take turns at each of the `tiles` that its CTAs own:
    /// heavy CTAs then come first whatever head they are of, so that light ones end the launch
    /// together. Enough heads for the device to be filled four times, and no more, for what those
    /// under way read to stay in the cache. Persistent kernels even items out as they take them: a forward of the
    /// Hopper family, and a backward that adds to `dq_accum`, which has that in the cache, too. Where there are more
    /// items, they have enough heads to fill the device once and a half, and a divisor of all, for the
    /// last to be as many. Where dq is added in order, four query heads or more at once, so that few of
    /// those that start together add to the same rows; all heads where the mask is sparse besides.
    pub fn interleaved_heads(&self, kernel: Kernel, heads: usize, tiles: usize) -> usize {
        if self.all_heads_in_turns && kernel == Kernel::Backward {
            return heads.max(1);
        }
        let at_once = self.profile.sms * self.choice(kernel).chosen.occupancy.ctas;
        let config = &self.choice(kernel).chosen.config;
        let evens_out = match kernel {
            Kernel::Forward => config.family == Family::Hopper,
            _ => kernel == Kernel::Backward && !config.separate_dq,
        };
        if evens_out && tiles * heads > 4 * at_once {
            let of_item = if config.split_gqa { 1 } else { config.group };
            let least = if config.ordered_dq { 4usize.div_ceil(of_item) } else { 1 };
            let mut even = (least..=heads).filter(|n| heads.is_multiple_of(*n));
            return even.find(|n| 2 * n * tiles >= 3 * at_once).unwrap_or(heads.max(1));
        }
        let turns = tiles * heads / (4 * at_once).max(1);
        heads.div_ceil(turns.max(1)).max(1)
    }

    /// The choice for `kernel`, one of a pass of this plan.
    pub fn choice(&self, kernel: Kernel) -> &Choice {
        let choice = self.kernels.iter().find(|c| c.chosen.config.kernel == kernel);
        choice.expect("the planner plans every kernel of a pass")
    }

    /// What runs as `kernel`, when it does.
    pub fn config(&self, kernel: Kernel) -> Option<&Config> {
        self.kernels.iter().map(|c| &c.chosen.config).find(|c| c.kernel == kernel)
    }
}

/// The configuration of `kernel`, among all that fit: what was `recorded`, else what the table
/// has, else the best by model.
///
/// # Errors
/// Those of [`KernelPlan::new`].
pub fn choose(
    profile: &Profile,
    class: &Class,
    sizes: &Sizes,
    kernel: Kernel,
    options: &KernelOptions,
    recorded: Option<Record>,
) -> Result<Choice, CudaError> {
    let asked = options.of(kernel);
    asked.check()?;
    let pack_gqa = !asked.asks_for_hopper() && class.packs_gqa(kernel, sizes, asked.tile_q);
    let heads = if pack_gqa { class.group } else { 1 };
    let mut fitting = Vec::new();
    let mut refused = Vec::new();
    let mut all = candidates(kernel, &asked, sizes.ranked().queries * heads, heads);
    if class.dtype == Elem::E4m3 && kernel.has_tiles() {
        // Said once, not of every tile.
        if let Some(tiles) = all.first() {
            let config = class.config(kernel, *tiles);
            let reason = "portable: f8e4m3 operands; the hopper family takes them".to_owned();
            refused.push(Refused { config, refusal: Refusal::Family { reason } });
        }
        all.clear();
    }
    if Family::Hopper.has(kernel) && asked.allows(Family::Hopper) {
        match hopper_refusal(profile, class, options, kernel, pack_gqa) {
            None => all.extend(hopper_candidates(kernel, class, sizes, &asked)),
            Some(reason) => refused.push(Refused {
                config: class.config(kernel, HOPPER_TILES),
                refusal: Refusal::Family { reason: format!("hopper: {reason}") },
            }),
        }
    }
    refused.extend(refused_by_options(class, kernel, &asked));
    for tiles in all {
        let config = Config { pack_gqa, ..class.config(kernel, tiles) };
        match Resources::on(&config, profile) {
            Err(refusal) => refused.push(Refused { config, refusal }),
            Ok(resources) => fitting.push(Candidate {
                occupancy: resources.occupancy(profile),
                modelled_us: model::time_us(profile, &config, &resources, &sizes.ranked()),
                config,
                resources,
            }),
        }
    }
    fitting.sort_by(|a, b| a.modelled_us.total_cmp(&b.modelled_us));
    if fitting.is_empty() {
        return Err(nothing_fits(profile, class, kernel, &asked, &refused));
    }
    let at =
        |tiles: Option<Tiles>| fitting.iter().position(|c| tiles == Some(Tiles::of(&c.config)));
    let fills = |at: &usize| !model::leaves_idle(profile, &fitting[*at].config, sizes);
    let measured = |tiles: Option<Tiles>| at(tiles).filter(fills);
    let portable = table::of(profile, class, sizes, kernel);
    let hopper = measured_of_hopper(profile, class, sizes, kernel, &asked);
    let packed = at(table::of_packed(profile, class, sizes, kernel));
    // Where the usual tiles are too few, those of fewer queries.
    let fewer = hopper.map_or(&[][..], |_| table::of_few_queries(class, kernel));
    let fewer = fewer.iter().map(|tiles| with_mask_bits(*tiles, class, (sizes, kernel), &asked));
    let of_hopper: Vec<_> = hopper.into_iter().chain(fewer).map(Some).collect();
    let first = packed.or_else(|| of_hopper.iter().copied().find_map(measured));
    let first = first.or_else(|| measured(portable));
    let smallest = of_hopper.iter().rev().copied().find_map(at);
    let tile = smallest.map(|at| &fitting[at].config);
    let passed = match (hopper, tile) {
        (None, _) => Passed::Slower,
        (Some(_), None) => Passed::Unfit,
        (Some(_), Some(config)) => {
            Passed::Idle { tiles: model::ctas(config, sizes), sms: profile.sms }
        }
    };
    let unrecorded = first.unwrap_or(0);
    let recorded_tiles =
        recorded.map(|record| with_mask_bits(record.tiles, class, (sizes, kernel), &asked));
    let (at, origin) = match (at(recorded_tiles), first) {
        (Some(at), _) => (at, Origin::Record),
        (None, Some(at)) => (at, Origin::Table),
        (None, None) => (0, Origin::Model),
    };
    let origin = if asked == TileOptions::default() { origin } else { Origin::User };
    let family_without = fitting[unrecorded].config.family;
    let chosen = fitting.remove(at);
    let is_hopper = |c: &Candidate| c.config.family == Family::Hopper;
    if !is_hopper(&chosen) && fitting.iter().any(is_hopper) {
        let beaten = recorded.filter(|_| family_without == Family::Hopper);
        refused.extend(slower(origin, beaten, passed).map(|reason| Refused {
            config: class.config(kernel, HOPPER_TILES),
            refusal: Refusal::Family { reason },
        }));
    }
    put_measured_first(&mut fitting, &chosen.config, portable);
    let copied = match chosen.config.copied.any() {
        true => class.unmapped.iter().map(|of| of.reason.clone()).collect(),
        false => Vec::new(),
    };
    let mask = told_of_mask(class, sizes, &chosen.config, &asked);
    Ok(Choice { chosen, origin, copied, mask, others: fitting, refused })
}

/// What the options leave out, of a family at once: one that has not what they ask for, and the one that they ask for
/// where it has no such kernel.
fn refused_by_options(class: &Class, kernel: Kernel, asked: &TileOptions) -> Vec<Refused> {
    let of = |tiles, reason| Refused {
        config: class.config(kernel, tiles),
        refusal: Refusal::Family { reason },
    };
    let mut refused = Vec::new();
    if asked.is_of_hopper() && asked.allows(Family::Portable) {
        let what = match asked.overlap {
            Some(true) => "overlap of its own",
            _ if asked.consumers.is_some() => "consumers",
            _ if asked.split_gqa == Some(true) => "gradients of keys for each query head",
            _ if asked.mask_bits == Some(true) => "mask bits",
            _ => "fixed order for dq",
        };
        let reason = format!("portable: it has no {what}; leave the option out");
        refused.push(of(Tiles::portable(64, 64, 4, 1), reason));
    }
    if let Some(family) = asked.family.filter(|family| !family.has(kernel)) {
        let reason = format!("{}: it has no such kernel", family.name());
        refused.push(of(Tiles { family, ..HOPPER_TILES }, reason));
    }
    refused
}

/// How partial tiles of a kernel of the Hopper family get the mask, and why.
fn told_of_mask(
    class: &Class,
    sizes: &Sizes,
    config: &Config,
    asked: &TileOptions,
) -> Option<String> {
    let told = config.family == Family::Hopper && config.mask && !config.kernel.makes_dq_alone();
    let how = if config.mask_bits { "partial by mask bits" } else { "partial by evaluation" };
    let steps = Count(class.mask_steps, "instruction");
    let why = match (asked.mask_bits, class.mask_bits_from(config.kernel)) {
        (Some(_), _) => "as asked for".to_owned(),
        (None, Some(from)) if class.mask_steps >= from && sizes.are_long() => {
            format!("a query sees {} keys or more, and bits were slower there", Sizes::LONG)
        }
        (None, Some(from)) => {
            format!("the mask takes {steps} a pair, and bits are made from {from} on")
        }
        (None, None) => "its kernel of this head dim reads no bits".to_owned(),
    };
    told.then(|| format!("{how}: {why}"))
}

/// What runs in place of a Hopper kernel that is not as planned was measured, too: the `portable`
/// choice, and before that what waits for its products where the assembler serialises `chosen`. First comes what
/// evaluates the mask where `chosen` reads its bits, and next what has fewer keys in a tile.
fn put_measured_first(others: &mut [Candidate], chosen: &Config, portable: Option<Tiles>) {
    let waiting = table::waits_rather_than_portable(chosen)
        .then(|| Tiles { overlap: false, ..Tiles::of(chosen) });
    let evaluating = chosen.mask_bits.then(|| Tiles { mask_bits: false, ..Tiles::of(chosen) });
    for tiles in [portable, waiting, table::narrower(chosen), evaluating] {
        if let Some(at) = others.iter().position(|c| tiles == Some(Tiles::of(&c.config))) {
            others[..=at].rotate_right(1);
        }
    }
}

/// The measured choice of the Hopper family; the order of dq and the items of the backward follow from the problem
/// or are as asked for.
fn measured_of_hopper(
    profile: &Profile,
    class: &Class,
    sizes: &Sizes,
    kernel: Kernel,
    asked: &TileOptions,
) -> Option<Tiles> {
    let tiles = table::of_hopper(class, sizes, kernel)?;
    let ordered_dq = asked.ordered_dq.unwrap_or(tiles.ordered_dq);
    let whole = class.config(kernel, tiles);
    let split_gqa =
        asked.split_gqa.unwrap_or_else(|| model::splits_gqa(profile, &whole, class, sizes));
    Some(with_mask_bits(Tiles { ordered_dq, split_gqa, ..tiles }, class, (sizes, kernel), asked))
}

/// Tiles of a table or a record, which they are in whatever the mask costs, with its bits or without.
fn with_mask_bits(
    tiles: Tiles,
    class: &Class,
    (sizes, kernel): (&Sizes, Kernel),
    asked: &TileOptions,
) -> Tiles {
    let wanted = asked.mask_bits.unwrap_or_else(|| class.has_mask_bits(kernel, sizes));
    Tiles { mask_bits: tiles.family == Family::Hopper && class.mask && wanted, ..tiles }
}

impl Choice {
    /// What can run, what was chosen first and then by model. Where query heads have no items of their own nothing
    /// adds up what they give, so that those which need it are left out.
    pub fn ranked(&self) -> impl Iterator<Item = &Candidate> {
        let split_gqa = self.chosen.config.split_gqa;
        let others = self.others.iter().filter(move |c| split_gqa || !c.config.split_gqa);
        std::iter::once(&self.chosen).chain(others)
    }

    /// The first `count` of these that a tuner should time: the chosen one and the others, but
    /// where the Hopper family is among them, so on compute capability 9.0 alone, not those that the
    /// model has far behind the best.
    pub fn worth_timing(&self, count: usize) -> impl Iterator<Item = &Candidate> {
        let all = || std::iter::once(&self.chosen).chain(&self.others);
        let best = all().map(|c| c.modelled_us).fold(f64::INFINITY, f64::min);
        let known = all().any(|c| c.config.family == Family::Hopper);
        let near = move |c: &&Candidate| !known || c.modelled_us <= FAR_BEHIND * best;
        // Of the mask's bits not time but its cost decides.
        let bits = self.chosen.config.mask_bits;
        let alike =
            move |c: &&Candidate| c.config.mask_bits == bits || c.config.family == Family::Portable;
        let others = self.others.iter().filter(near).filter(alike);
        std::iter::once(&self.chosen).chain(others).take(count.max(1))
    }
}

/// Why the table prefers a portable kernel where one of the Hopper family fits.
#[derive(Clone, Copy)]
enum Passed {
    /// It has none of the family's tiles for such a mask: the portable kernel was faster.
    Slower,
    /// It has some, which do not fit.
    Unfit,
    /// It has some, too few for all SMs.
    Idle { tiles: usize, sms: usize },
}

/// Why a portable kernel of this origin runs where one of the Hopper family could; `beaten` is a record that the
/// latter lost. Nothing where the user asked.
fn slower(origin: Origin, beaten: Option<Record>, passed: Passed) -> Option<String> {
    let reason = match (origin, beaten) {
        (Origin::User, _) => return None,
        (Origin::Model, _) => "the portable kernel is faster by model".to_owned(),
        (Origin::Record, Some(Record { us, planned_us: Some(planned), .. })) => {
            format!("{planned:.0} µs, portable: {us:.0} µs (record)")
        }
        (Origin::Record, _) => "a record prefers the portable kernel".to_owned(),
        (Origin::Table, _) => match passed {
            Passed::Slower => "the portable kernel was measured faster".to_owned(),
            Passed::Unfit => "the tiles that were measured do not fit".to_owned(),
            Passed::Idle { tiles, sms } => {
                let idle = sms.saturating_sub(tiles);
                format!("its {tiles} tiles leave {idle} of {sms} SMs idle")
            }
        },
    };
    Some(format!("hopper: {reason}"))
}

/// What stands for all tiles of the Hopper family where it is refused.
const HOPPER_TILES: Tiles = Tiles::hopper(2, 128, 2);

/// What driver and NVRTC lack of what the Hopper family needs.
pub(crate) fn unmet(profile: &Profile) -> Option<String> {
    let unmet: Vec<String> = profile.hopper_unmet.iter().map(Need::to_string).collect();
    (!unmet.is_empty()).then(|| unmet.join("; "))
}

/// Why the Hopper family does not run a kernel of this class at all.
fn hopper_refusal(
    profile: &Profile,
    class: &Class,
    options: &KernelOptions,
    kernel: Kernel,
    pack_gqa: bool,
) -> Option<String> {
    let (major, minor) = profile.capability;
    if profile.capability != (9, 0) {
        return Some(format!("compute capability {major}.{minor}; it runs on 9.0"));
    }
    if let Some(unmet) = unmet(profile) {
        return Some(unmet);
    }
    if let Some(reason) = hopper::refused_dtype(class.dtype, kernel) {
        return Some(reason.to_owned());
    }
    if let Some(reason) = hopper::refused_dims(kernel, class.dim, class.dim_v) {
        return Some(reason);
    }
    if pack_gqa {
        return Some(hopper::NO_PACKED_GQA.to_owned());
    }
    if let Some(splits) = options.kv_splits.filter(|n| kernel.shares_keys() && *n > 1) {
        return Some(format!("{splits} KV splits are asked for; it has one"));
    }
    if class.dtype == Elem::E4m3 && class.paged {
        return Some("keys of f8e4m3 in pages".to_owned());
    }
    let unmapped = class.unmapped.iter();
    if class.dtype == Elem::E4m3 {
        // Values are transposed before, and nothing else is copied row by row.
        return unmapped.map(|of| of.reason.clone()).next();
    }
    if kernel == Kernel::Forward {
        let align = match class.align {
            0 => "elements of out are apart".to_owned(),
            bytes => format!("rows of out are aligned to {bytes} B"),
        };
        let refusal = |of: &Unmapped| match of {
            Unmapped { by_copies: false, reason, .. } => Some(reason.clone()),
            _ if class.align >= hopper::LEAST_COPY => None,
            of => Some(format!("{}, and {align}; copies need 4", of.reason)),
        };
        return unmapped.filter_map(refusal).next();
    }
    // Where all operands have maps, it is what else a backward reads or writes.
    let aligned = || match class.align {
        16 => None,
        0 => Some("elements of out or of a gradient are apart".to_owned()),
        bytes => Some(format!("rows of out or of a gradient are aligned to {bytes} B, not to 16")),
    };
    unmapped.map(|of| of.reason.clone()).next().or_else(aligned)
}

/// Every candidate of the Hopper family, with the overlap within a warpgroup before those without.
/// Tiles that it has not got are refused where the family is asked for, and else not its own.
fn hopper_candidates(
    kernel: Kernel,
    class: &Class,
    sizes: &Sizes,
    asked: &TileOptions,
) -> Vec<Tiles> {
    let pick = |given: Option<usize>, usual: &[usize]| {
        given.map_or_else(|| usual.to_vec(), |value| vec![value])
    };
    let overlaps = asked.overlap.map_or(vec![true, false], |value| vec![value]);
    let bits = match asked.mask_bits {
        // Without a mask it says nothing.
        Some(bits) => vec![bits && class.mask],
        None if class.has_mask_bits(kernel, sizes) => vec![true, false],
        None => vec![false],
    };
    let variants = |tiles: Tiles| -> Vec<Tiles> {
        let of = |mask_bits: bool| {
            let of = move |overlap: &bool| Tiles { overlap: *overlap, mask_bits, ..tiles };
            overlaps.iter().map(of).collect::<Vec<_>>()
        };
        bits.iter().flat_map(|bits| of(*bits)).collect()
    };
    if kernel.owns_keys() {
        let mut usual = Tiles::hopper_backward(64, 2);
        let wide = usual.are_wide_backward(kernel, class.dim.max(class.dim_v));
        if wide {
            usual = Tiles::hopper_wide_backward(2);
        }
        let sides: &[usize] = if wide { &[64] } else { &[64, 128] };
        let (warps, tile_kv) =
            (asked.warps.unwrap_or(usual.warps), asked.tile_kv.unwrap_or(usual.tile_kv));
        let own = warps == usual.warps && tile_kv == usual.tile_kv;
        if !own && !asked.asks_for_hopper() {
            return Vec::new();
        }
        let ordered_dq = asked.ordered_dq.unwrap_or_else(|| class.orders_dq(kernel, sizes));
        let splits = match asked.split_gqa {
            Some(split) => vec![split],
            None if class.can_split_gqa(kernel) => vec![false, true],
            None => vec![false],
        };
        let mut all = Vec::new();
        for tile_q in pick(asked.tile_q, sides) {
            for stages in pick(asked.stages, &[2, 3]) {
                let tiles = Tiles::hopper_backward(tile_q, stages);
                for split_gqa in splits.clone() {
                    let tiles = Tiles { warps, tile_kv, ordered_dq, split_gqa, ..tiles };
                    all.extend(variants(tiles));
                }
            }
        }
        return all;
    }
    let (consumers, keys): (&[usize], &[usize]) = match kernel.makes_dq_alone() {
        true => (&[2], &[32, 48, 64, 80, 96, 112, 128]),
        false if class.dtype == Elem::E4m3 => (&[1, 2, 3], &[64, 128, 192, 256]),
        false => (&[1, 2, 3], &[64, 80, 96, 112, 128, 144, 160, 176]),
    };
    let own = |tiles: &Tiles| {
        asked.tile_q.is_none_or(|rows| rows == tiles.tile_q)
            && asked.warps.is_none_or(|warps| warps == tiles.warps)
    };
    let mut sides: Vec<Tiles> = consumers.iter().map(|&n| Tiles::hopper(n, 0, 0)).collect();
    sides.retain(own);
    if sides.is_empty() && asked.asks_for_hopper() {
        let Tiles { tile_q, warps, .. } = HOPPER_TILES;
        let (tile_q, warps) = (asked.tile_q.unwrap_or(tile_q), asked.warps.unwrap_or(warps));
        sides.push(Tiles { tile_q, warps, ..HOPPER_TILES });
    }
    let mut all = Vec::new();
    for side in sides {
        for tile_kv in pick(asked.tile_kv, keys) {
            for stages in pick(asked.stages, &[2, 3, 4]) {
                all.extend(variants(Tiles { tile_kv, stages, ..side }));
            }
        }
    }
    all
}

/// Every candidate of the portable family for so many `rows` of queries, of which one tile holds `heads` or
/// more. A value that the user gives stands in for all of its kind.
pub(super) fn candidates(
    kernel: Kernel,
    asked: &TileOptions,
    rows: usize,
    heads: usize,
) -> Vec<Tiles> {
    let pick = |given: Option<usize>, usual: &[usize]| {
        given.map_or_else(|| usual.to_vec(), |value| vec![value])
    };
    if !asked.allows(Family::Portable) || asked.is_of_hopper() {
        return Vec::new();
    }
    // A pass over rows: a thread or a few of them for each, nothing to choose.
    let row_tile_q = if rows <= 16 { 16 } else { 64 };
    let forward = match kernel {
        Kernel::Forward => true,
        Kernel::Backward | Kernel::BackwardDq => false,
        // Its tiles fit every device at every head dim, and have 16 rows for a warp.
        Kernel::RowWeightSum => return vec![Tiles::portable(row_tile_q, 32, row_tile_q / 16, 1)],
        Kernel::Combine
        | Kernel::Delta
        | Kernel::Dq
        | Kernel::BlockLists
        | Kernel::RangeTable
        | Kernel::Sequences
        | Kernel::TransposeValues => return vec![Tiles::portable(row_tile_q, 64, 4, 1)],
        // Rows of keys: few of them, so that there are CTAs for all SMs.
        Kernel::GroupSums => return vec![Tiles::portable(row_tile_q, 16, 4, 1)],
    };
    let mut all = Vec::new();
    let shortest = rows.next_multiple_of(16).max(16);
    for tile_q in pick(asked.tile_q, &[16, 32, 64, 96, MOST_ROWS]) {
        // A tile of which half would be empty is not one to consider.
        if asked.tile_q.is_none() && (tile_q >= 2 * shortest || tile_q < heads) {
            continue;
        }
        for tile_kv in pick(asked.tile_kv, &[16, 32, 48, 64, 96, 128]) {
            for warps in pick(asked.warps, if forward { &[1, 2, 4, 8] } else { &[2, 4, 8] }) {
                let tiles = |stages| Tiles::portable(tile_q, tile_kv, warps, stages);
                let slices = tile_q / 16;
                // The forward's warps own 16 or 32 queries each. Of the backward, divisions that
                // are not even are no candidates unless they are asked for.
                let usual = || match forward {
                    true => slices == warps || slices == 2 * warps,
                    false => Warps::divide(warps, tile_q, tile_kv, true).is_some(),
                };
                if asked.warps.is_some() || usual() {
                    all.extend(pick(asked.stages, &[1, 2]).into_iter().map(tiles));
                }
            }
        }
    }
    all
}

fn nothing_fits(
    profile: &Profile,
    class: &Class,
    kernel: Kernel,
    asked: &TileOptions,
    refused: &[Refused],
) -> CudaError {
    let dtype = class.dtype.name();
    let dims = HeadDims(class.dim, class.dim_v);
    let what = match *asked == TileOptions::default() {
        true => String::new(),
        false => format!(" with the options given ({asked})"),
    };
    let of_family = |r: &Refused| matches!(r.refusal, Refusal::Family { .. });
    let all_of_family = refused.iter().all(of_family);
    let asks_of_family = !asked.allows(Family::Portable) || asked.is_of_hopper();
    if all_of_family && !asks_of_family && class.dtype != Elem::E4m3 {
        return CudaError::argument(format!(
            "there is no {kernel} tile{what} that a usual number of warps divides evenly; sides are \
             multiples of 16, and asking for warps as well allows other divisions"
        ));
    }
    // What is said of several configurations is said once.
    let mut reasons: Vec<String> = Vec::new();
    let mut said: Vec<String> = Vec::new();
    for refused in refused {
        let reason = match &refused.refusal {
            Refusal::Shape { reason } | Refusal::Family { reason } => reason.clone(),
            Refusal::Shared { .. } | Refusal::Registers { .. } => refused.to_string(),
        };
        if !said.contains(&reason) {
            reasons.push(refused.to_string());
            said.push(reason);
        }
    }
    if all_of_family {
        let reasons = reasons.join("; ");
        let place = match what.is_empty() {
            true => String::new(),
            false => format!(" runs on {}", profile.name),
        };
        let help = match what.is_empty() || reasons.contains("leave the option out") {
            true => "",
            false => ". Others may: leave the options out",
        };
        return CudaError::argument(format!(
            "no {kernel} kernel for {dtype} at head dim {dims}{what}{place}: {reasons}{help}"
        ));
    }
    let mut message = format!(
        "no {kernel} kernel for {dtype} at head dim {dims}{what} fits {}, where a CTA can have {} \
         B of shared memory: {}",
        profile.name,
        profile.shared_per_block,
        reasons[..MOST_TOLD.min(reasons.len())].join("; ")
    );
    if reasons.len() > MOST_TOLD {
        message += &format!("; and {} more, of larger tiles", reasons.len() - MOST_TOLD);
    }
    if class.dim.max(class.dim_v) > EVERYWHERE {
        message += &format!(". Head dims up to {EVERYWHERE} fit every GPU");
    }
    CudaError::argument(message)
}
