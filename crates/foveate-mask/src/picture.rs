//! Block masks to look at: in a terminal, and as SVG.
//!
//! Both draw a grid of cells. A cell stands for one tile, or for a block of tiles where the grid
//! would have too many cells; its shade is the share of full tiles, counting a partial tile as
//! half.

use std::fmt::Write;

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
                for (i, cell) in cells.iter_mut().enumerate() {
                    let from = tiles.start.max(i * per_column);
                    let to = tiles.end.min((i + 1) * per_column);
                    cell[kind] += to.saturating_sub(from) as f32;
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
    /// partial, `·` empty, and `▓` `░` for cells that stand for several tiles of several kinds.
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
                "each cell: {} queries x {} keys",
                q * self.tile().q as usize,
                kv * self.tile().kv as usize
            );
        }
        text
    }

    /// The mask as an SVG document: queries downwards, keys to the right; dark is full, light
    /// is partial. Masks of over 256 tiles a side are drawn in larger cells.
    pub fn to_svg(&self, title: &str) -> String {
        const CELLS: usize = 256;
        const SIDE: f64 = 640.0;
        const MARGIN: f64 = 40.0;
        let cells = Cells::of(self, CELLS, CELLS);
        let longest = self.q_len().max(self.kv_len()).max(1) as f64;
        let (width, height) =
            (SIDE * self.kv_len() as f64 / longest, SIDE * self.q_len() as f64 / longest);
        let step_x = SIDE * (cells.tiles[1] * self.tile().kv as usize) as f64 / longest;
        let step_y = SIDE * (cells.tiles[0] * self.tile().q as usize) as f64 / longest;
        let mut svg = String::new();
        let _ = write!(
            svg,
            "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {:.1} {:.1}\" \
             font-family=\"sans-serif\" font-size=\"13\">\n\
             <title>{title}</title>\n<rect width=\"100%\" height=\"100%\" fill=\"white\"/>\n\
             <text x=\"{MARGIN}\" y=\"16\">{title}</text>\n\
             <text x=\"{MARGIN}\" y=\"34\">keys 0..{} →</text>\n\
             <text transform=\"translate(26 {MARGIN}) rotate(90)\">queries 0..{} →</text>\n\
             <g transform=\"translate({MARGIN} {MARGIN})\" shape-rendering=\"crispEdges\">\n",
            width + 2.0 * MARGIN,
            height + 2.0 * MARGIN,
            self.kv_len(),
            self.q_len(),
            title = escaped(title),
        );
        for row in 0..cells.rows {
            let line = &cells.shares[row * cells.columns..][..cells.columns];
            let mut column = 0;
            while column < cells.columns {
                let share = line[column];
                let end = (column..cells.columns).find(|&c| line[c] != share);
                let end = end.unwrap_or(cells.columns);
                if share != [0.0; 2] {
                    let (x, y) = (column as f64 * step_x, row as f64 * step_y);
                    let _ = writeln!(
                        svg,
                        "<rect x=\"{x:.2}\" y=\"{y:.2}\" width=\"{:.2}\" height=\"{:.2}\" \
                         fill=\"#1f4e79\" fill-opacity=\"{:.2}\"/>",
                        (end as f64 * step_x).min(width) - x,
                        ((row + 1) as f64 * step_y).min(height) - y,
                        (share[0] + 0.45 * share[1]).clamp(0.05, 1.0),
                    );
                }
                column = end;
            }
        }
        let _ = write!(
            svg,
            "<rect width=\"{width:.1}\" height=\"{height:.1}\" fill=\"none\" stroke=\"#444\"/>\n\
             </g>\n</svg>\n"
        );
        svg
    }
}

fn escaped(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;").replace('"', "&quot;")
}
