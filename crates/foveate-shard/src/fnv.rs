//! A hash that is the same in every process and on every platform.

/// FNV-1a of 64-bit words.
pub(crate) fn hash(words: impl IntoIterator<Item = u64>) -> u64 {
    bytes(words.into_iter().flat_map(u64::to_le_bytes))
}

/// FNV-1a of bytes.
pub(crate) fn bytes(bytes: impl IntoIterator<Item = u8>) -> u64 {
    let step = |hash: u64, byte: u8| (hash ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01b3);
    bytes.into_iter().fold(0xcbf2_9ce4_8422_2325, step)
}
