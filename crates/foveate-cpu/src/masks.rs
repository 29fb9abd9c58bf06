//! Which tiles are live.

/// The live tiles of a head.
#[derive(Clone, Debug)]
pub struct Live {
    pub tiles: usize,
}

impl Live {
    /// Number of live tiles in a row of query tiles.
    pub fn tiles_in(&self, _row: usize) -> usize {
        self.tiles
    }

    /// Number of live tiles in a range of columns, all rows together.
    pub fn tiles_among(&self, range: &std::ops::Range<usize>) -> usize {
        range.len()
    }

    /// The live tiles of a row inside `range`, left to right, and whether the mask decides
    /// inside.
    pub fn tiles(
        &self,
        _row: usize,
        range: &std::ops::Range<usize>,
    ) -> impl Iterator<Item = (usize, bool)> + use<> {
        range.clone().map(|t| (t, false))
    }
}
