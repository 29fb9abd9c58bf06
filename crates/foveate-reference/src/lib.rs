//! The f64 oracle of attention, forward and backward
