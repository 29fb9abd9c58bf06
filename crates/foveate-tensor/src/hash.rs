//! A hash that is the same in every process and on every platform.

/// FNV-1a, 64 bits: tiny, stable, good enough where equality is checked behind it.
#[derive(Clone, Copy, Debug)]
pub struct Fnv(u64);

impl Default for Fnv {
    fn default() -> Self {
        Self(0xCBF2_9CE4_8422_2325)
    }
}

impl Fnv {
    /// Of some bytes.
    pub fn of(bytes: &[u8]) -> u64 {
        let mut hash = Self::default();
        hash.bytes(bytes);
        hash.value()
    }

    /// Goes on with some bytes.
    pub fn bytes(&mut self, bytes: &[u8]) {
        for byte in bytes {
            self.0 = (self.0 ^ u64::from(*byte)).wrapping_mul(0x0000_0100_0000_01B3);
        }
    }

    /// Goes on with the bytes of a number, the least first.
    pub fn word(&mut self, word: u64) {
        self.bytes(&word.to_le_bytes());
    }

    /// The hash of all so far.
    pub fn value(self) -> u64 {
        self.0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hashes_are_those_of_the_published_vectors() {
        let published = [
            ("", 0xcbf2_9ce4_8422_2325),
            ("a", 0xaf63_dc4c_8601_ec8c),
            ("foobar", 0x8594_4171_f739_67e8),
        ];
        for (text, wanted) in published {
            assert_eq!(Fnv::of(text.as_bytes()), wanted, "{text:?}");
        }
        let mut hash = Fnv::default();
        hash.word(u64::from_le_bytes(*b"ab cd ef"));
        assert_eq!(hash.value(), Fnv::of(b"ab cd ef"));
    }
}
