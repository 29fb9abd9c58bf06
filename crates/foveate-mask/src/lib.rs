//! Block masks: the live tiles of a mask as runs per row of tiles
