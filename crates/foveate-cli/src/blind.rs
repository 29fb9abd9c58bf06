//! The warning of a mask that lets no query see any key, which is most often a typo.

use foveate::mask::sees_nothing;

use crate::output::tell;
use crate::problem::Given;

/// Warns of `mask`, as it is written.
pub fn warn(mask: &str) {
    tell!("warning: the mask `{}` lets no query see any key", shortened(mask));
}

/// Warns where the mask of a problem given by its sizes sees nothing.
pub fn check(given: &Given) {
    let dims = given.problem.dims();
    let heads = [dims.batch, dims.heads_q, dims.heads_kv];
    let blind = |mask: &&foveate::MaskMod| sees_nothing(mask, heads, [dims.len_q, dims.len_k]);
    given.spec.mask.as_ref().filter(blind).iter().for_each(|mask| warn(&mask.to_string()));
}

/// The beginning of a text, as far as a line shows it.
fn shortened(text: &str) -> String {
    match text.char_indices().nth(80) {
        None => text.to_owned(),
        Some((end, _)) => format!("{}...", &text[..end]),
    }
}
