//! Reading constants and machine code out of a cubin, which is a 64-bit ELF file.
//!
//! A cubin is read from the cache, so any of its numbers may be wrong: every access is checked.

mod instructions;

pub use instructions::{Instructions, Opcode};

/// The value of the 4-byte constant called `name`; `None` when there is none.
pub(crate) fn constant(cubin: &[u8], name: &str) -> Option<i32> {
    let symbols = symbols(cubin);
    let found = symbols.into_iter().find(|s| s.name == name && s.contents.len() == 4)?;
    Some(u32_at(found.contents, 0)? as i32)
}

/// A kernel's machine code.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct KernelCode<'a> {
    /// Name of the entry point.
    pub name: &'a str,
    /// Its instructions, and those of functions that it calls.
    pub code: &'a [u8],
}

/// The kernels of a cubin.
pub(crate) fn kernels(cubin: &[u8]) -> Vec<KernelCode<'_>> {
    // Of an entry point the symbol says so. It spans the functions that were not inlined.
    const ENTRY: u8 = 0x10;
    let entries = symbols(cubin).into_iter().filter(|s| s.other & ENTRY != 0);
    entries.map(|Symbol { name, contents, .. }| KernelCode { name, code: contents }).collect()
}

/// A name in the file, and the bytes that it names.
struct Symbol<'a> {
    name: &'a str,
    /// What kind of thing it is, by NVIDIA's numbers.
    other: u8,
    contents: &'a [u8],
}

/// The symbols whose bytes are in the file.
fn symbols(cubin: &[u8]) -> Vec<Symbol<'_>> {
    let Some(sections) = Sections::of(cubin) else { return Vec::new() };
    let table = (0..sections.count).find_map(|i| {
        let symbols = sections.at(i)?;
        // SHT_SYMTAB; its `link` is the section of its names.
        (symbols.kind == 2).then_some(symbols)
    });
    let read = |symbol: &[u8], names: &Section| {
        let name = names.offset.checked_add(u32_at(symbol, 0)? as usize)?;
        let name = cubin.get(name..)?.split(|&b| b == 0).next()?;
        let section = sections.at(u16_at(symbol, 6)? as usize)?;
        let start = section.offset.checked_add(u64_at(symbol, 8)?)?;
        Some((str::from_utf8(name).ok()?, symbol[5], start, u64_at(symbol, 16)?))
    };
    let all = || {
        let table = table?;
        let names = sections.at(table.link)?;
        let end = table.offset.checked_add(table.size)?;
        let entries = cubin.get(table.offset..end)?.chunks_exact(24);
        let found = entries.filter_map(|symbol| {
            let (name, other, start, len) = read(symbol, &names)?;
            Some(Symbol { name, other, contents: cubin.get(start..start.checked_add(len)?)? })
        });
        Some(found.collect())
    };
    all().unwrap_or_default()
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
    fn constants_and_kernels_are_read_out_of_a_cubin() {
        let compiler = match Compiler::get() {
            Ok(compiler) => compiler,
            Err(e) => return println!("skipped: {e}"),
        };
        let source = "extern \"C\" __device__ const int answer = 42;
                      extern \"C\" __global__ void f(int* x) { *x = answer; }";
        let cubin = compiler.compile(source, Arch::new((8, 0))).unwrap().cubin;
        assert_eq!(constant(&cubin, "answer"), Some(42));
        assert_eq!(constant(&cubin, "question"), None);
        let [kernel] = kernels(&cubin)[..] else { panic!("{:?}", kernels(&cubin)) };
        assert_eq!((kernel.name, kernel.code.len() % 16), ("f", 0));
        // Cut short anywhere it is no file, or the constant is not reached: never a panic.
        for len in (0..cubin.len()).step_by(7) {
            assert!(matches!(constant(&cubin[..len], "answer"), None | Some(42)));
            assert!(kernels(&cubin[..len]).iter().all(|kernel| kernel.name == "f"));
        }
    }

    #[test]
    fn what_is_no_cubin_has_nothing() {
        let mut file = [0xff; 200];
        file[..6].copy_from_slice(b"\x7fELF\x02\x01");
        for bytes in [&b""[..], &[0xff; 200], &file] {
            assert_eq!((constant(bytes, "x"), kernels(bytes)), (None, vec![]));
        }
    }
}
