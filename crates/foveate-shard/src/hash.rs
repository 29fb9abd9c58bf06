//! A hash that is the same in every process and on every platform: XXH3.

use xxhash_rust::xxh3::{Xxh3, xxh3_64};

/// Of 64-bit words.
pub(crate) fn words(words: impl IntoIterator<Item = u64>) -> u64 {
    let mut hash = Xxh3::new();
    words.into_iter().for_each(|word| hash.update(&word.to_le_bytes()));
    hash.digest()
}

/// Of bytes.
pub(crate) fn bytes(bytes: impl IntoIterator<Item = u8>) -> u64 {
    slice(&bytes.into_iter().collect::<Vec<_>>())
}

/// Of bytes that lie together.
pub(crate) fn slice(bytes: &[u8]) -> u64 {
    xxh3_64(bytes)
}
