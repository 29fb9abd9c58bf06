//! Block masks to look at: in a terminal, and as SVG.
//!
//! Both draw a grid of cells. A cell stands for one tile, or for a block of tiles where the grid
//! would have too many cells; its shade is the share of full tiles, counting a partial tile as
//! half.

use std::fmt::Write;

use foveate_tensor::count::Count;

use crate::{BlockMask, Kind};

/// Shares of a picture's cells.
struct Cells {
    rows: usize,
    columns: usize,
    /// Share of full and of partial tiles of each cell, row by row.
    shares: Vec<[f32; 2]>,
    /// Tiles along a cell's side.
    tiles: [usize; 2],
}

impl Cells {
    fn of(mask: &BlockMask, max_rows: usize, max_columns: usize) -> Self {
        let per_row = mask.rows().div_ceil(max_rows).max(1);
        let per_column = mask.columns().div_ceil(max_columns).max(1);
        let rows = mask.rows().div_ceil(per_row);
        let columns = mask.columns().div_ceil(per_column);
        let mut shares = vec![[0.0; 2]; rows * columns];
        for row in 0..mask.rows() {
            let cells = &mut shares[row / per_row * columns..][..columns];
            for run in mask.row(row) {
                let tiles = run.first as usize..run.tiles().end as usize;
                let kind = usize::from(run.kind == Kind::Partial);
                let met = tiles.start / per_column..tiles.end.div_ceil(per_column);
                for i in met {
                    let from = tiles.start.max(i * per_column);
                    let to = tiles.end.min((i + 1) * per_column);
                    cells[i][kind] += (to - from) as f32;
                }
            }
        }
        for (i, cell) in shares.iter_mut().enumerate() {
            let side = |at: usize, per: usize, all: usize| per.min(all - at * per);
            let tiles = side(i / columns, per_row, mask.rows())
                * side(i % columns, per_column, mask.columns());
            cell.iter_mut().for_each(|x| *x /= tiles as f32);
        }
        Self { rows, columns, shares, tiles: [per_row, per_column] }
    }
}

impl BlockMask {
    /// The mask in at most `max_rows` lines of at most `max_columns` characters: `█` full, `▒`
    /// partial, `·` empty, and `▓` `░` for cells that stand for several tiles of several kinds. Below
    /// stands a legend.
    pub fn to_terminal(&self, max_rows: usize, max_columns: usize) -> String {
        let cells = Cells::of(self, max_rows.max(1), max_columns.max(1));
        let mut text = String::new();
        for row in cells.shares.chunks(cells.columns.max(1)) {
            text.extend(row.iter().map(|&[full, partial]| {
                if full >= 1.0 {
                    '█'
                } else if full + partial <= 0.0 {
                    '·'
                } else if full >= 0.5 {
                    '▓'
                } else if full == 0.0 && partial >= 1.0 || full > 0.0 {
                    '▒'
                } else {
                    '░'
                }
            }));
            text.push('\n');
        }
        let [q, kv] = cells.tiles;
        if cells.rows > 0 && cells.columns > 0 {
            let _ = writeln!(
                text,
                "queries downwards, keys to the right: █ full, ▒ partial, · empty{}",
                if q * kv > 1 { ", ▓ half full or more, ░ mostly empty" } else { " tiles" }
            );
            let _ = writeln!(
                text,
                "each cell: {} x {}",
                Count(q * self.tile().q as usize, "query"),
                Count(kv * self.tile().kv as usize, "key")
            );
        }
        text
    }

    /// The mask as an SVG document: queries downwards, keys to the right; dark is full, light is
    /// partial. Below stand a legend and the statistics ([`Self::stats`], which counts every point
    /// of partial tiles). Masks of over 256 tiles a side are drawn in larger cells.
    pub fn to_svg(&self, title: &str) -> String {
        let cells = Cells::of(self, MOST_CELLS, MOST_CELLS);
        let frame = Frame::of(self);
        let [per_row, per_column] = cells.tiles;
        let step_x = frame.x_of((per_column * self.tile().kv as usize) as f64);
        let step_y = frame.y_of((per_row * self.tile().q as usize) as f64);
        let mut svg = frame.opened(title);
        for row in 0..cells.rows {
            let line = &cells.shares[row * cells.columns..][..cells.columns];
            let mut column = 0;
            while column < cells.columns {
                let share = line[column];
                let end = (column..cells.columns).find(|&c| line[c] != share);
                let end = end.unwrap_or(cells.columns);
                if share != [0.0; 2] {
                    let (x, y) = (column as f64 * step_x, row as f64 * step_y);
                    let width = (end as f64 * step_x).min(frame.width) - x;
                    let height = ((row + 1) as f64 * step_y).min(frame.height) - y;
                    svg += &rect([x, y, width, height], shade(share));
                }
                column = end;
            }
        }
        svg += &format!("{}</g>\n", outline([0.0, 0.0, frame.width, frame.height]));
        svg += &frame.closed(self, cells.tiles);
        svg
    }
}

/// Cells along a side of a picture.
const MOST_CELLS: usize = 256;
/// The longer side of the frame, and the shorter one at least.
const SIDE: [f64; 2] = [640.0, 24.0];
/// Margins left of the frame, above it and right of it, for a title and the names of the axes.
const MARGIN: [f64; 3] = [48.0, 64.0, 24.0];
/// Margin below the frame, for the legend and the statistics.
const FOOT: f64 = 84.0;
/// Width of a picture at least, so that its texts fit.
const LEAST_WIDTH: f64 = 520.0;
/// Size of the letters, and how wide one is about.
const FONT: f64 = 13.0;
const LETTER: f64 = 7.0;

/// Where the mask lies in the picture.
struct Frame {
    width: f64,
    height: f64,
    /// Picture units a query and a key.
    scale: [f64; 2],
    lengths: [usize; 2],
}

impl Frame {
    fn of(mask: &BlockMask) -> Self {
        let lengths = [mask.q_len(), mask.kv_len()];
        let longest = lengths[0].max(lengths[1]).max(1) as f64;
        let [height, width] =
            lengths.map(|n| (SIDE[0] * n as f64 / longest).max(if n > 0 { SIDE[1] } else { 0.0 }));
        let scale = [height / lengths[0].max(1) as f64, width / lengths[1].max(1) as f64];
        Self { width, height, scale, lengths }
    }

    fn x_of(&self, keys: f64) -> f64 {
        keys * self.scale[1]
    }

    fn y_of(&self, queries: f64) -> f64 {
        queries * self.scale[0]
    }

    /// The document up to the inside of the frame: title and names of the axes.
    fn opened(&self, title: &str) -> String {
        let [left, top, right] = MARGIN;
        let width = (left + self.width + right).max(LEAST_WIDTH);
        let height = top + self.height + FOOT;
        let [queries, keys] = self.lengths;
        let most = ((width - left - right) / LETTER) as usize;
        let shown = match title.char_indices().nth(most) {
            Some((end, _)) => format!("{}…", &title[..end]),
            None => title.to_owned(),
        };
        let mut svg = format!(
            "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {width:.1} {height:.1}\" \
             font-family=\"sans-serif\" font-size=\"{FONT}\">\n<title>{}</title>\n\
             <rect width=\"100%\" height=\"100%\" fill=\"white\"/>\n",
            escaped(title)
        );
        svg += &text([left, 22.0], " font-weight=\"bold\"", &shown);
        svg += &text([left, top - 12.0], "", &format!("keys 0..{keys} →"));
        let turned = format!("transform=\"translate({} {top}) rotate(90)\"", left - 12.0 - FONT);
        let _ = writeln!(svg, "<text {turned}>queries 0..{queries} →</text>");
        let _ = writeln!(
            svg,
            "<g transform=\"translate({left} {top})\" shape-rendering=\"crispEdges\">"
        );
        svg
    }

    /// The legend, the statistics and the end of the document.
    fn closed(&self, mask: &BlockMask, [per_row, per_column]: [usize; 2]) -> String {
        let (left, y) = (MARGIN[0], MARGIN[1] + self.height + 18.0);
        let mut svg = String::new();
        let legend = [("full", [1.0, 0.0]), ("partial", [0.0, 1.0]), ("empty", [0.0, 0.0])];
        for (i, (name, share)) in legend.into_iter().enumerate() {
            let x = left + 90.0 * i as f64;
            let swatch = [x, y, FONT, FONT];
            svg += &rect(swatch, shade(share));
            svg += &outline(swatch);
            svg += &text([x + FONT + 6.0, y + 11.0], "", name);
        }
        if per_row * per_column > 1 {
            let cell = format!("a cell is {per_row} x {per_column} tiles, shaded by their share");
            svg += &text([left + 270.0, y + 11.0], "", &cell);
        }
        let stats = mask.stats();
        let share = |n: u64| 100.0 * n as f64 / stats.tiles.max(1) as f64;
        let (full, partial) = (share(stats.full), share(stats.partial));
        let tiles = format!(
            "{} of {} x {}: {full:.1} % full, {partial:.1} % partial, {:.1} % empty",
            Count(stats.tiles as usize, "tile"),
            mask.tile().q,
            mask.tile().kv,
            share(stats.tiles - stats.full - stats.partial),
        );
        let pairs = format!(
            "{} of {} pairs are live, {:.2} % are masked",
            stats.live_entries,
            stats.entries,
            100.0 * stats.sparsity()
        );
        svg += &text([left, y + 34.0], "", &tiles);
        svg += &text([left, y + 52.0], "", &pairs);
        svg + "</svg>\n"
    }
}

/// How dark a cell of these shares of full and partial tiles is.
fn shade([full, partial]: [f32; 2]) -> f32 {
    match full + partial {
        0.0 => 0.0,
        _ => (full + 0.45 * partial).clamp(0.05, 1.0),
    }
}

fn rect([x, y, width, height]: [f64; 4], opacity: f32) -> String {
    format!(
        "<rect x=\"{x:.2}\" y=\"{y:.2}\" width=\"{width:.2}\" height=\"{height:.2}\" \
         fill=\"#1f4e79\" fill-opacity=\"{opacity:.2}\"/>\n"
    )
}

fn outline([x, y, width, height]: [f64; 4]) -> String {
    format!(
        "<rect x=\"{x:.1}\" y=\"{y:.1}\" width=\"{width:.1}\" height=\"{height:.1}\" \
         fill=\"none\" stroke=\"#444\"/>\n"
    )
}

fn text([x, y]: [f64; 2], style: &str, said: &str) -> String {
    format!("<text x=\"{x:.1}\" y=\"{y:.1}\"{style}>{}</text>\n", escaped(said))
}

fn escaped(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;").replace('"', "&quot;")
}
