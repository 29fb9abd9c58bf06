//! A plan in words: what was chosen, what it takes of the device, what was refused and why.

use std::fmt;

use super::planner::{Choice, KernelPlan, Origin, Refused};
use crate::compile::Candidate;
use crate::compile::config::{Count, Elem, Family, Kernel, TilesOf};
use crate::compile::resources::{Limit, Refusal};
use foveate_gpu::profile::Profile;

impl fmt::Display for KernelPlan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let p = &self.profile;
        writeln!(
            f,
            "device     {} ({}): {} SMs, {} B of shared memory a CTA, {} B per SM",
            p.name,
            p.arch(),
            p.sms,
            p.shared_per_block,
            p.shared_per_sm
        )?;
        if self.kv_splits > 1 {
            writeln!(f, "keys       {} KV splits for each tile of queries", self.kv_splits)?;
        }
        self.kernels.iter().try_for_each(|choice| {
            writeln!(f)?;
            choice.write(f, p)
        })
    }
}

/// How many of the next best are named.
const NEXT: usize = 3;

/// What happens to v before the copies of the Hopper family's forward, after a semicolon.
fn transposed(dtype: Elem) -> &'static str {
    if dtype == Elem::E4m3 { "; v transposed by a kernel before" } else { "" }
}

impl Choice {
    fn write(&self, f: &mut fmt::Formatter<'_>, profile: &Profile) -> fmt::Result {
        let limit = profile.shared_per_block;
        let Candidate { config, resources, occupancy, .. } = &self.chosen;
        let alone = self.others.is_empty() && self.refused.is_empty();
        let why = match self.origin {
            Origin::User => "asked for",
            _ if alone => "the only one",
            Origin::Record => "recorded by the tuner to be the best on this GPU",
            Origin::Table => "measured to be the best of its class",
            Origin::Model => "the best by model",
        };
        writeln!(f, "{}", config.kernel)?;
        // Tiles of the other family say so themselves; kernels without products are of none.
        let family = match config.family {
            Family::Portable if config.kernel.has_tiles() => "portable, ",
            Family::Portable | Family::Hopper => "",
        };
        writeln!(f, "  chosen     {family}{}; {why}", TilesOf(config))?;
        if config.family == Family::Hopper {
            let arch = config.family.arch(profile.arch());
            writeln!(f, "  compiled   for {arch}")?;
        }
        if config.pack_gqa {
            let (heads, queries) = (config.heads(), Count(config.queries(), "row"));
            writeln!(
                f,
                "  heads      packed GQA: {heads} query heads share a tile, {queries} of it each"
            )?;
        }
        write!(f, "  shared     {} of {limit} B", resources.shared_bytes)?;
        for (i, (what, bytes)) in resources.shared.iter().enumerate() {
            write!(f, "{} {what} {bytes}", if i == 0 { ":" } else { " +" })?;
        }
        write!(f, "\n  registers  at most {} a thread", resources.registers)?;
        for (i, (role, registers)) in resources.roles.iter().enumerate() {
            write!(
                f,
                "{} {registers} for {role}",
                if i == 0 { " at the launch, then" } else { "," }
            )?;
        }
        writeln!(f)?;
        self.write_consumers(f)?;
        self.write_copies(f)?;
        if let Some(mask) = &self.mask {
            writeln!(f, "  mask       {mask}")?;
        }
        let by = match occupancy.limit {
            Limit::Shared => "shared memory",
            Limit::Registers => "registers",
            Limit::Threads => "threads",
            Limit::Ctas => "their number",
        };
        let warps = occupancy.ctas * config.warps;
        let ctas = Count(occupancy.ctas, "CTA");
        writeln!(f, "  occupancy  {ctas} per SM, {warps} warps; limited by {by}")?;
        for other in self.others.iter().take(NEXT) {
            let bytes = other.resources.shared_bytes;
            writeln!(f, "  next       {}: {bytes} B of shared memory", TilesOf(&other.config))?;
        }
        if self.others.len() > NEXT {
            writeln!(f, "             and {} more that fit", self.others.len() - NEXT)?;
        }
        // Those that no device has the registers for say nothing about this one.
        let on_any = |r: &&Refused| matches!(r.refusal, Refusal::Registers { .. });
        // Of the many stages and widths of the Hopper family a few say enough.
        let hopper = |r: &&Refused| match r.config.family {
            Family::Hopper => true,
            Family::Portable => false,
        };
        let shared = |r: &&Refused| matches!(r.refusal, Refusal::Shared { .. }) && hopper(r);
        let told = self.refused.iter().filter(|r| !on_any(r) && !shared(r));
        // What is said of several configurations is said once.
        let mut lines: Vec<(String, usize)> = Vec::new();
        for refused in told.chain(self.refused.iter().filter(shared).take(NEXT)) {
            let line = refused.to_string();
            match lines.iter_mut().find(|(known, _)| *known == line) {
                Some((_, configurations)) => *configurations += 1,
                None => lines.push((line, 1)),
            }
        }
        for (line, configurations) in lines {
            match configurations {
                1 => writeln!(f, "  refused    {line}")?,
                many => writeln!(f, "  refused    {line} ({many} configurations)")?,
            }
        }
        let left = self.refused.iter().filter(shared).count().saturating_sub(NEXT);
        let registers = self.refused.iter().filter(on_any).count();
        for (n, what) in [
            (left, "more shared memory than a CTA can have, of the hopper family"),
            (registers, "more registers than a thread can have"),
        ] {
            if n > 0 {
                writeln!(f, "             and {n} for {what}")?;
            }
        }
        Ok(())
    }

    /// Who multiplies in a kernel of the Hopper family, and what runs beside products.
    fn write_consumers(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let config = &self.chosen.config;
        if config.family != Family::Hopper || !config.kernel.has_tiles() {
            return Ok(());
        }
        let consumers = config.warps / 4 - 1;
        let (tile_q, tile_kv) = (config.tile_q, config.tile_kv);
        let wide = config.is_wide_backward();
        let each = match config.kernel {
            Kernel::Backward if wide => {
                format!("one sums dv, one dk; {tile_kv} keys by {tile_q} queries a step")
            }
            Kernel::Backward => {
                format!("{} keys by {tile_q} queries a step each", tile_kv / consumers)
            }
            _ => format!("{} queries by {tile_kv} keys a step each", tile_q / consumers),
        };
        writeln!(f, "  consumers  {consumers}: {each}")?;
        let overlap = match config.kernel {
            Kernel::Backward if wide => {
                "the arithmetic of one consumer beside products of the other"
            }
            _ if !config.overlap => "none: a step waits for its products before their arithmetic",
            Kernel::Forward => {
                "softmax beside P V of the step before, where the mask need not be evaluated"
            }
            Kernel::Backward => {
                "P beside dq and dk of the step before, where the mask need not be evaluated"
            }
            _ => "P beside dP of the step, where the mask need not be evaluated",
        };
        writeln!(f, "  overlap    {overlap}")
    }

    /// What copies the operands of a kernel of the Hopper family, and where its sums go.
    fn write_copies(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let config = &self.chosen.config;
        match (config.family, config.kernel) {
            (Family::Hopper, Kernel::Backward) => {
                let dq = match (config.separate_dq, config.ordered_dq) {
                    (true, _) => "",
                    (false, true) => "; dq by bulk reductions, in the order of tiles of keys",
                    (false, false) => "; dq by bulk reductions, in no fixed order",
                };
                writeln!(f, "  copies     q, k, v and d_out by tensor maps{dq}")?;
            }
            (Family::Hopper, Kernel::BackwardDq) => {
                writeln!(f, "  copies     q, k, v and d_out by tensor maps")?;
            }
            (Family::Hopper, Kernel::Forward) if self.copied.is_empty() => {
                writeln!(f, "  copies     q, k and v by tensor maps{}", transposed(config.dtype))?;
            }
            (Family::Hopper, Kernel::Forward) => {
                let reasons = self.copied.join("; ");
                writeln!(f, "  copies     hopper by copies: {reasons}")?;
            }
            (Family::Portable, Kernel::Forward | Kernel::Backward | Kernel::BackwardDq)
            | (
                Family::Portable | Family::Hopper,
                Kernel::Sequences
                | Kernel::TransposeValues
                | Kernel::BlockLists
                | Kernel::RangeTable
                | Kernel::Combine
                | Kernel::RowWeightSum
                | Kernel::Delta
                | Kernel::Dq
                | Kernel::GroupSums,
            ) => {}
        }
        Ok(())
    }
}
