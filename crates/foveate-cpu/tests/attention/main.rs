//! The CPU backend against the oracle and against itself.

mod common;
mod misuse;
mod oracle;
mod reproducible;
mod small;
