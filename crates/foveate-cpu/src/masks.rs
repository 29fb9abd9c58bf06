//! Which tiles are live.

use std::ops::Range;

/// The live tiles of a head.
#[derive(Clone, Debug)]
pub struct Live {
    /// Columns of tiles.
    pub tiles: usize,
    /// Whether the mask decides inside each.
    pub partial: bool,
}

impl Live {
    /// Numbers of full and of partial tiles of a row.
    pub fn kinds(&self, _row: usize) -> [usize; 2] {
        if self.partial { [0, self.tiles] } else { [self.tiles, 0] }
    }

    /// Number of live tiles of a row inside `range`.
    pub fn count(&self, _row: usize, range: &Range<usize>) -> usize {
        range.end.min(self.tiles).saturating_sub(range.start)
    }

    /// The live tiles of a row inside `range`, left to right, and whether the mask decides
    /// inside.
    pub fn tiles(
        &self,
        _row: usize,
        range: &Range<usize>,
    ) -> impl Iterator<Item = (usize, bool)> + use<> {
        let partial = self.partial;
        (range.start..range.end.min(self.tiles)).map(move |t| (t, partial))
    }
}
