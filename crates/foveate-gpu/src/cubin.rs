//! Reading a constant out of a cubin, which is a 64-bit ELF file.
//!
//! A cubin is read from the cache, so any of its numbers may be wrong: every access is checked.

/// The value of the 4-byte constant called `name`; `None` when there is none.
pub fn constant(cubin: &[u8], name: &str) -> Option<i32> {
    let sections = Sections::of(cubin)?;
    (0..sections.count).find_map(|i| {
        let symbols = sections.at(i)?;
        // SHT_SYMTAB; its `link` is the section of its names.
        if symbols.kind != 2 {
            return None;
        }
        let names = sections.at(symbols.link)?;
        let end = symbols.offset.checked_add(symbols.size)?;
        let table = cubin.get(symbols.offset..end)?;
        table.chunks_exact(24).find_map(|symbol| {
            let at = names.offset.checked_add(u32_at(symbol, 0)? as usize)?;
            let found = cubin.get(at..)?.split(|&b| b == 0).next()? == name.as_bytes();
            if !found || u64_at(symbol, 16)? != 4 {
                return None;
            }
            let section = sections.at(u16_at(symbol, 6)? as usize)?;
            let value = section.offset.checked_add(u64_at(symbol, 8)?)?;
            Some(u32_at(cubin, value)? as i32)
        })
    })
}

/// The table of sections.
struct Sections<'a> {
    file: &'a [u8],
    offset: usize,
    each: usize,
    count: usize,
}

/// What a section is, and where.
struct Section {
    kind: u32,
    offset: usize,
    size: usize,
    link: usize,
}

impl<'a> Sections<'a> {
    fn of(file: &'a [u8]) -> Option<Self> {
        // A 64-bit little-endian ELF file.
        if file.get(..6)? != b"\x7fELF\x02\x01" {
            return None;
        }
        let each = u16_at(file, 58)? as usize;
        Some(Self { file, offset: u64_at(file, 40)?, each, count: u16_at(file, 60)? as usize })
    }

    fn at(&self, index: usize) -> Option<Section> {
        let start = self.offset.checked_add(index.checked_mul(self.each)?)?;
        let header = self.file.get(start..)?;
        Some(Section {
            kind: u32_at(header, 4)?,
            offset: u64_at(header, 24)?,
            size: u64_at(header, 32)?,
            link: u32_at(header, 40)? as usize,
        })
    }
}

fn bytes<const N: usize>(file: &[u8], at: usize) -> Option<[u8; N]> {
    file.get(at..at.checked_add(N)?)?.try_into().ok()
}

fn u16_at(file: &[u8], at: usize) -> Option<u16> {
    bytes(file, at).map(u16::from_le_bytes)
}

fn u32_at(file: &[u8], at: usize) -> Option<u32> {
    bytes(file, at).map(u32::from_le_bytes)
}

fn u64_at(file: &[u8], at: usize) -> Option<usize> {
    usize::try_from(u64::from_le_bytes(bytes(file, at)?)).ok()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::arch::Arch;
    use crate::nvrtc::Compiler;

    #[test]
    fn a_constant_is_read_out_of_a_cubin() {
        let compiler = match Compiler::get() {
            Ok(compiler) => compiler,
            Err(e) => return println!("skipped: {e}"),
        };
        let source = "extern \"C\" __device__ const int answer = 42;
                      extern \"C\" __global__ void f(int* x) { *x = answer; }";
        let cubin = compiler.compile(source, Arch::new((8, 0))).unwrap().cubin;
        assert_eq!(constant(&cubin, "answer"), Some(42));
        assert_eq!(constant(&cubin, "question"), None);
        // Cut short anywhere it is no file, or the constant is not reached: never a panic.
        for len in (0..cubin.len()).step_by(7) {
            assert!(matches!(constant(&cubin[..len], "answer"), None | Some(42)));
        }
    }

    #[test]
    fn what_is_no_cubin_has_no_constants() {
        assert_eq!(constant(b"", "x"), None);
        assert_eq!(constant(&[0xff; 200], "x"), None);
        let mut file = [0xff; 200];
        file[..6].copy_from_slice(b"\x7fELF\x02\x01");
        assert_eq!(constant(&file, "x"), None);
    }
}
