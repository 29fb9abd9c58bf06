//! Rust syntax to Foveate mods.
//!
//! Two attributes for functions, `#[mask_mod]` and `#[score_mod]`, and two macros behind
//! `foveate::closure::{mask_mod!, score_mod!}` for closures. All four read the same body, an
//! ordinary Rust expression, and write the calls of `foveate_mods::trace` that record it. Use them
//! through the crate `foveate` or `foveate-mods`; the manual is `docs/masks-and-scores.md`.
//!
//! ```
//! use foveate_macros::mask_mod;
//! use foveate_mods::{Buffer, MaskMod, expr};
//!
//! #[mask_mod]
//! fn same_document(q: i32, kv: i32, doc: &Buffer<i32>) -> bool {
//!     doc[q] == doc[kv]
//! }
//!
//! let doc = Buffer::vector("doc", vec![0, 0, 1]);
//! let traced = doc.at([expr::q()]).eq(doc.at([expr::kv()]));
//! assert_eq!(same_document(&doc), MaskMod::new(traced.dynamic())?);
//! # Ok::<(), foveate_mods::ModError>(())
//! ```
//!
//! What the attribute writes:
//!
//! ```text
//! fn same_document(doc: &Buffer<i32>) -> MaskMod {
//!     mask(eq(index(get(&doc), [q()]), index(get(&doc), [kv()])))
//! }
//! ```
//!
//! Nothing is type-checked here: the functions of `trace` are generic over small traits, and
//! Rust checks the calls. This crate refuses only what has no meaning in a mod (loops,
//! assignments, `return`, …), each with what to write instead.
//!
//! `signature` sorts parameters into coordinates and captures, `body` translates expressions,
//! `builtin` knows the functions and methods of mods, `crate_path` finds the crate to name.

use proc_macro::TokenStream;

mod body;
mod builtin;
mod crate_path;
mod signature;

use signature::Kind;

/// Makes a function over coordinates into one that makes a mask.
///
/// Parameters called `b`, `h`, `h_kv`, `q`, `kv`, `q_len`, `kv_len` are coordinates (i32), any of
/// them in any order. All others are captures and stay parameters: `&Buffer<T>`, numbers (run-time
/// scalars named after the parameter; `#[constant] n: i32` makes one part of the structure),
/// mods, functions over expressions. A number whose name looks like a misspelt coordinate
/// (`k: i32`) is an error; `#[scalar] k: i32` is a number of that name.
///
/// ```
/// use foveate_macros::mask_mod;
/// use foveate_mods::{Buffer, MaskMod};
///
/// #[mask_mod]
/// fn same_document(q: i32, kv: i32, doc: &Buffer<i32>) -> bool {
///     doc[q] == doc[kv]
/// }
/// let mask: MaskMod = same_document(&Buffer::vector("doc", vec![0, 0, 1]));
/// ```
///
/// The body: arithmetic (integer `/` rounds down, `%` is the Euclidean remainder), comparison,
/// `&&`, `||`, `!`, `if`/`else`, `let`, blocks, closures with typed parameters, `as i32`,
/// `as f32`, `doc[q]`, `bias[h][q]` or `bias[[h, q]]` (in the closure macros also `bias[h, q]`, which Rust
/// itself refuses in a function), the functions and methods of
/// expressions (`score.tanh()`, `min(q, kv)`), constants by path, and calls of other mods:
/// `other(q, kv)`, `same_document(doc)(q, kv)`.
/// Both branches of an `if` and both sides of `&&` are always evaluated; nothing can trap.
///
/// What Rust's types do not show (a buffer with another number of axes than the body indexes, a
/// captured expression that reads the score) makes a mask that holds the error, with the place
/// of the body. `MaskMod::check` says it, and planning returns it.
///
/// `#[mask_mod(crate = path)]` names the crate when it was renamed in `Cargo.toml`.
#[proc_macro_attribute]
pub fn mask_mod(args: TokenStream, item: TokenStream) -> TokenStream {
    signature::function(Kind::Mask, args.into(), item.into()).into()
}

/// Makes a function over the score and coordinates into one that makes a score function.
///
/// As [`macro@mask_mod`], with the parameter `score` (f32) and an f32 as result.
///
/// ```
/// use foveate_macros::score_mod;
/// use foveate_mods::ScoreMod;
///
/// #[score_mod]
/// fn soft_cap(score: f32, cap: f32) -> f32 {
///     cap * (score / cap).tanh()
/// }
/// let score: ScoreMod = soft_cap(30.0);
/// ```
#[proc_macro_attribute]
pub fn score_mod(args: TokenStream, item: TokenStream) -> TokenStream {
    signature::function(Kind::Score, args.into(), item.into()).into()
}

/// What `closure::mask_mod!` calls: `[crate path] |coordinates| body`.
#[proc_macro]
pub fn mask_closure(input: TokenStream) -> TokenStream {
    signature::closure(Kind::Mask, input.into()).into()
}

/// What `closure::score_mod!` calls: `[crate path] |score, coordinates| body`.
#[proc_macro]
pub fn score_closure(input: TokenStream) -> TokenStream {
    signature::closure(Kind::Score, input.into()).into()
}
