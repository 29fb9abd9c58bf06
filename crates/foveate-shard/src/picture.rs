//! Pictures of plans: who computes what, and which keys come from elsewhere.

use std::fmt::Write;
use std::ops::Range;

use crate::plan::{Cells, ShardPlan};
use crate::plane::Planes;
use crate::ranges::Ranges;

/// Side of the plane in a picture, in pixels.
const SIDE: f64 = 720.0;
/// Rows of queries that are drawn at most.
const ROWS: usize = 512;
/// Left of the plane and above it.
const MARGIN: f64 = 40.0;

/// An SVG of the plane of queries (down) and keys (to the right) of the batch entries and heads of rank 0, over all
/// layers: live tiles in the colour of the rank that computes them, pale where their keys come from
/// another rank. The strip on the left shows which rank holds the queries.
pub fn to_svg(plan: &ShardPlan, planes: &Planes) -> String {
    let group = plan.context_group(0);
    let members: Vec<(usize, &Cells)> = group.iter().map(|&r| (r, &plan.ranks[r].own)).collect();
    let [q_len, kv_len] = [plan.whole.q_len, plan.whole.kv_len].map(|len| len.max(1) as f64);
    let side = planes.tile().q as usize;
    let (part, tiles) =
        (planes.part(&plan.ranks[0].own.batch, &plan.ranks[0].own.heads), planes.needs().len());
    let step = tiles.div_ceil(ROWS).max(1);
    let mut svg = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {:.0} {:.0}\" font-family=\"sans-serif\" \
         font-size=\"12\">\n<rect width=\"100%\" height=\"100%\" fill=\"white\"/>\n<text x=\"{MARGIN}\" \
         y=\"16\">{} queries down, {} keys to the right, {} ranks of context, {}</text>\n<rect x=\"{MARGIN}\" \
         y=\"{MARGIN}\" width=\"{SIDE}\" height=\"{SIDE}\" fill=\"none\" stroke=\"black\" \
         stroke-width=\"0.5\"/>\n",
        SIDE + 2.0 * MARGIN,
        SIDE + 2.0 * MARGIN,
        plan.whole.q_len,
        plan.whole.kv_len,
        group.len(),
        plan.strategy
    );
    for first in (0..tiles).step_by(step) {
        let rows = first..tiles.min(first + step);
        let queries = first * side..plan.whole.q_len.min(rows.end * side);
        let needs = part.keys(rows);
        for (place, (_, own)) in members.iter().enumerate() {
            for held in own.q.intersection(&Ranges::one(queries.clone())).as_slice() {
                let hue = 360 * place / members.len();
                let mut draw = |keys: Range<f64>, light: u32| {
                    let (y, height) = (held.start as f64 / q_len, held.len() as f64 / q_len);
                    let _ = writeln!(
                        svg,
                        "<rect x=\"{:.2}\" y=\"{:.2}\" width=\"{:.2}\" height=\"{:.2}\" \
                         fill=\"hsl({hue},70%,{light}%)\"/>",
                        MARGIN + keys.start * SIDE,
                        MARGIN + y * SIDE,
                        (keys.end - keys.start) * SIDE,
                        height * SIDE
                    );
                };
                draw(-0.02..-0.005, 45);
                for (keys, light) in
                    [(needs.difference(&own.kv), 82), (needs.intersection(&own.kv), 45)]
                {
                    for run in keys.as_slice() {
                        draw(run.start as f64 / kv_len..run.end as f64 / kv_len, light);
                    }
                }
            }
        }
    }
    svg + "</svg>\n"
}
