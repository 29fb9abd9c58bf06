//! What a pass launches, as data.
//!
//! Whoever has to know it reads this one table: the planner, which chooses a configuration for each
//! kernel; a plan, which launches them; compilation ahead of time; the tuner; and the list of
//! kernels that are checked without a GPU.

use foveate_mods::ScoreGradient;
use foveate_problem::Spec;

use super::class::Class;
use super::schedule::Axis;
use crate::compile::codegen::Mods;
use crate::compile::config::{Config, Entry, Kernel};
use crate::operands::Wanted;

/// A forward or a backward, as far as it decides what is launched.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Pass {
    /// `out`, `lse` and `max_score`.
    Forward {
        /// The keys of a tile of queries are split over CTAs, whose partial results are joined.
        kv_split: bool,
    },
    /// dq, dk, dv and the gradients of learned captured buffers and of the sink.
    Backward {
        /// Rows whose lse is too large to hold the sum of their weights get it from a pass of its
        /// own.
        row_weight_sum: bool,
        /// The gradient of the sink is asked for.
        sink: bool,
        /// Every sum is in a fixed order.
        deterministic: bool,
        /// dq has a kernel of its own; see [`Config::separate_dq`].
        separate_dq: bool,
        /// Query heads have dk and dv of their own, which are added up; see [`Config::split_gqa`].
        split_gqa: bool,
        /// Gradients that are asked for. Of some of them dq has a kernel of its own.
        wanted: Wanted,
    },
}

/// One launch of a pass.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PassLaunch {
    /// The entry point.
    pub entry: Entry,
    /// The mods that its source is printed with.
    pub mods: PrintedMods,
    /// The axis whose tiles its CTAs own.
    pub axis: Axis,
    /// It has a main loop over the tiles of the other axis: those in the block lists of the mask,
    /// where there is one.
    pub main_loop: bool,
    /// Its grid.
    pub grid: Grid,
}

/// The mods that a source is printed with.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum PrintedMods {
    /// None: the kernel evaluates nothing, and is one for all programs.
    Nothing,
    /// The mask alone, for block lists.
    Mask,
    /// Mask, score and dropout.
    Forward,
    /// Those and the derivative of the score.
    Backward,
}

/// How many CTAs a launch has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Grid {
    /// `[tiles, tile heads, KV splits]`: tiles of queries that several heads may share.
    TilesByHeadsByKvSplits,
    /// `[tiles, tile heads]`.
    TilesByTileHeads,
    /// `[tiles, query heads]`.
    TilesByHeads,
    /// `[tiles, key/value heads]`.
    TilesByKvHeads,
    /// `[query heads]`, of 1024 threads.
    Heads,
    /// CTAs of so many threads, one for each element of a captured buffer; a launch for each buffer.
    Elements {
        /// Threads of a CTA.
        threads: u32,
    },
}

impl PrintedMods {
    /// What is printed of a program whose score has the derivative `gradient`.
    pub fn of<'a>(self, spec: &'a Spec, gradient: Option<&'a ScoreGradient>) -> Mods<'a> {
        let mask = spec.mask.as_ref();
        let (score, dropout) = (spec.score.as_ref(), spec.dropout.as_ref());
        match self {
            Self::Nothing => Mods::default(),
            Self::Mask => Mods { mask, ..Mods::default() },
            Self::Forward => Mods { mask, score, gradient: None, dropout },
            Self::Backward => Mods { mask, score, gradient, dropout },
        }
    }
}

impl PassLaunch {
    /// Whether its main loop follows block lists when it is compiled with `config`.
    pub fn has_lists(&self, config: &Config) -> bool {
        self.main_loop && config.mask
    }
}

impl Pass {
    /// The pass that makes everything a problem of `class` can ask for, by a [`Kernel::Backward`] of `keys`.
    pub fn backward(class: &Class, keys: &Config) -> Self {
        Self::Backward {
            row_weight_sum: class.has_row_weight_sum(),
            sink: class.sink,
            deterministic: class.deterministic,
            separate_dq: keys.separate_dq,
            split_gqa: keys.split_gqa,
            wanted: Wanted { captures: class.captures, ..Wanted::ALL },
        }
    }

    /// Its launches, in order.
    pub fn launches(self) -> Vec<PassLaunch> {
        use PrintedMods::{Backward, Forward, Nothing};
        let of_queries = |entry, mods, main_loop, grid| {
            Some(PassLaunch { entry, mods, axis: Axis::Queries, main_loop, grid })
        };
        match self {
            Self::Forward { kv_split } => {
                let forward =
                    of_queries(Entry::Forward, Forward, true, Grid::TilesByHeadsByKvSplits);
                let combine = of_queries(Entry::Combine, Nothing, false, Grid::TilesByTileHeads);
                [forward, combine.filter(|_| kv_split)].into_iter().flatten().collect()
            }
            Self::Backward {
                row_weight_sum,
                sink,
                deterministic,
                separate_dq,
                split_gqa,
                wanted,
            } => {
                let by_heads = Grid::TilesByHeads;
                let delta = of_queries(Entry::Delta, Nothing, false, by_heads);
                let sums = of_queries(Entry::RowWeightSum, Backward, false, by_heads);
                let of_sink = of_queries(Entry::SinkGradient, Nothing, false, Grid::Heads);
                let keys = PassLaunch {
                    entry: Entry::Backward,
                    mods: Backward,
                    axis: Axis::Keys,
                    main_loop: true,
                    grid: Grid::TilesByKvHeads,
                };
                let of_groups =
                    PassLaunch { entry: Entry::GroupSums, mods: Nothing, main_loop: false, ..keys };
                let of_captures = of_queries(
                    Entry::CaptureSums,
                    Backward,
                    false,
                    Grid::Elements { threads: 256 },
                );
                let dq = match separate_dq {
                    true => of_queries(Entry::BackwardDq, Backward, true, by_heads),
                    false => of_queries(Entry::Dq, Nothing, false, by_heads),
                };
                let all = [
                    delta,
                    sums.filter(|_| row_weight_sum),
                    of_sink.filter(|_| sink),
                    Some(keys).filter(|_| wanted.by_keys() || wanted.q && !separate_dq),
                    Some(of_groups).filter(|_| split_gqa && (wanted.k || wanted.v)),
                    of_captures.filter(|_| deterministic && wanted.captures),
                    dq.filter(|_| wanted.q),
                ];
                all.into_iter().flatten().collect()
            }
        }
    }

    /// The kernels whose entry points it launches, each once, in order.
    pub fn kernels(self) -> Vec<Kernel> {
        let mut kernels = Vec::new();
        for launch in self.launches() {
            let kernel = launch.entry.kernel();
            if !kernels.contains(&kernel) {
                kernels.push(kernel);
            }
        }
        kernels
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::compile::codegen::ModsSource;
    use crate::compile::config::Elem;
    use crate::compile::source::source;

    /// What a plan queues before the launches of a pass, where a launch needs its results.
    const HELPERS: [Entry; 6] = [
        Entry::BlockLists,
        Entry::DqRanks,
        Entry::MaskBits,
        Entry::RangeTable,
        Entry::Sequences,
        Entry::TransposeValues,
    ];

    /// The passes that differ.
    fn passes() -> Vec<Pass> {
        let backward = (0..512).map(|bits| {
            let [row_weight_sum, sink, deterministic, separate, captures, q, k, v, split_gqa] =
                [1, 2, 4, 8, 16, 32, 64, 128, 256].map(|bit| bits & bit != 0);
            let wanted = Wanted { q, k, v, captures };
            let separate_dq = deterministic || separate;
            Pass::Backward { row_weight_sum, sink, deterministic, separate_dq, split_gqa, wanted }
        });
        let forward = [false, true].map(|kv_split| Pass::Forward { kv_split });
        forward.into_iter().chain(backward).collect()
    }

    #[test]
    fn every_entry_point_is_launched_by_a_pass_or_is_a_helper() {
        let launched: Vec<Entry> =
            passes().into_iter().flat_map(Pass::launches).map(|launch| launch.entry).collect();
        for entry in Entry::ALL {
            assert_ne!(launched.contains(&entry), HELPERS.contains(&entry), "{}", entry.name());
        }
        for kernel in Kernel::ALL {
            let own = kernel.entry();
            assert_eq!(own.kernel(), kernel);
            assert_ne!(launched.contains(&own), HELPERS.contains(&own), "{kernel}");
        }
    }

    #[test]
    fn a_pass_launches_an_entry_point_once_and_has_a_main_loop() {
        for pass in passes() {
            let launches = pass.launches();
            for (i, launch) in launches.iter().enumerate() {
                let again = launches[..i].iter().any(|before| before.entry == launch.entry);
                assert!(!again, "{pass:?}: {launch:?}");
                let on_keys = launch.axis == Axis::Keys && launch.main_loop;
                assert_eq!(on_keys, launch.entry.kernel().owns_keys(), "{pass:?}: {launch:?}");
            }
            let made = |wanted: Wanted| wanted.q || wanted.by_keys();
            let works = !matches!(pass, Pass::Backward { wanted, .. } if !made(wanted));
            assert_eq!(launches.iter().any(|launch| launch.main_loop), works, "{pass:?}");
        }
    }

    /// A kernel that takes `Mods` and is printed without any would read past its parameters.
    #[test]
    fn kernels_take_mods_exactly_where_their_launch_prints_some() {
        for launch in passes().into_iter().flat_map(Pass::launches) {
            let kernel = launch.entry.kernel();
            let text = source(&Config::new(kernel, Elem::Bf16, 64, 64), &ModsSource::nothing());
            let name = launch.entry.name();
            let declared = text.match_indices(&format!("{name}(")).find_map(|(at, _)| {
                let parameters = text[at..].split(')').next().expect("a split has a first part");
                text[..at].trim_end().ends_with([')', 'd']).then_some(parameters)
            });
            let declared = declared.unwrap_or_else(|| panic!("{name} is not declared"));
            // It shares the file of a kernel that evaluates mods, and evaluates none itself.
            let printed = launch.mods != PrintedMods::Nothing && launch.entry != Entry::CaptureSums;
            assert_eq!(declared.contains("Mods "), printed, "{declared}");
        }
    }
}
