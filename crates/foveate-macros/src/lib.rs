//! Rust syntax to Foveate mods: #[mask_mod], #[score_mod], mask_mod!, score_mod!
