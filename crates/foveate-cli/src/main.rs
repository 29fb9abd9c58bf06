//! The `foveate` command.

fn main() {}
