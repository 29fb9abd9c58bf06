//! What ptxas says it did to `wgmma` and `setmaxnreg`.
//!
//! A kernel whose products it serialises, or whose `setmaxnreg` it drops, is right and slow: the log
//! of its compilation alone tells. The lines have codes from 7500 to 7599:
//!
//! ```text
//! ptxas info    : (C7510) Potential Performance Loss: wgmma.mma_async instructions are serialized due to ... in the function 'f'
//! ```

use std::fmt;

/// A line of the log about `wgmma` or `setmaxnreg`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Advisory {
    /// Its number, 7510 for `C7510`.
    pub code: u32,
    /// The kernel or the device function that it is about, where it says so.
    pub function: Option<String>,
    /// What it says.
    pub text: String,
}

/// What ptxas did.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AdvisoryKind {
    /// It waits after every product.
    Serialised,
    /// It dropped `setmaxnreg`: every warp keeps the registers of the launch.
    SetmaxnregDropped,
    /// It put a fence or a wait where the source has none, which may cost nothing.
    Inserted,
    /// What this crate does not know.
    Unknown,
}

/// Codes, what ptxas did, and why or what.
const KNOWN: [(u32, AdvisoryKind, &str); 15] = [
    (7504, AdvisoryKind::SetmaxnregDropped, ""),
    (7507, AdvisoryKind::SetmaxnregDropped, ""),
    (7508, AdvisoryKind::SetmaxnregDropped, ""),
    (7509, AdvisoryKind::Serialised, "an extern call"),
    (7510, AdvisoryKind::Serialised, "a call"),
    (7511, AdvisoryKind::Serialised, "too few registers for the products in flight"),
    (7512, AdvisoryKind::Serialised, "too few registers"),
    (7513, AdvisoryKind::Serialised, "operands written in flight"),
    (7514, AdvisoryKind::Serialised, "accumulators read in flight"),
    (7515, AdvisoryKind::Serialised, "accumulators written in flight"),
    (7516, AdvisoryKind::Serialised, "a stage that is not whole on every path"),
    (7517, AdvisoryKind::Inserted, "a wait"),
    (7518, AdvisoryKind::Serialised, "a wait in a divergent path"),
    (7519, AdvisoryKind::Inserted, "a fence"),
    (7520, AdvisoryKind::Serialised, "a fence in a divergent path"),
];

impl Advisory {
    fn known(&self) -> Option<(AdvisoryKind, &'static str)> {
        KNOWN.iter().find(|(code, ..)| *code == self.code).map(|&(_, kind, why)| (kind, why))
    }

    /// What ptxas did.
    pub fn kind(&self) -> AdvisoryKind {
        self.known().map_or(AdvisoryKind::Unknown, |(kind, _)| kind)
    }

    /// Whether the kernel is slower than its source says: everything but fences and waits that the
    /// source has not.
    pub fn is_slow(&self) -> bool {
        self.kind() != AdvisoryKind::Inserted
    }

    /// The advisories of a log, in its order.
    pub(super) fn of(log: &str) -> Vec<Self> {
        log.lines().filter_map(Self::of_line).collect()
    }

    fn of_line(line: &str) -> Option<Self> {
        let (_, rest) = line.split_once("(C75")?;
        let (digits, text) = rest.split_once(')')?;
        let two: u32 = (digits.len() == 2).then(|| digits.parse().ok())??;
        let text = text.trim();
        let text = text.strip_prefix("Potential Performance Loss: ").unwrap_or(text);
        let named = text.rsplit_once("function '").and_then(|(_, name)| name.split_once('\''));
        let function = named.map(|(name, _)| name.to_owned());
        Some(Self { code: 7500 + two, function, text: text.to_owned() })
    }
}

impl fmt::Display for Advisory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { code, function, text } = self;
        match self.known() {
            Some((AdvisoryKind::Serialised, why)) => {
                write!(f, "wgmma serialised (C{code}, {why})")?
            }
            Some((AdvisoryKind::Inserted, what)) => write!(f, "{what} inserted (C{code})")?,
            Some((AdvisoryKind::SetmaxnregDropped | AdvisoryKind::Unknown, _)) | None => {
                return write!(f, "{text} (C{code})");
            }
        }
        function.as_ref().map_or(Ok(()), |name| write!(f, " in `{name}`"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::arch::Arch;
    use crate::nvrtc::Compiler;

    #[test]
    fn advisories_are_read_out_of_a_log() {
        let log = "\
ptxas info    : (C7519) warpgroup.arrive is injected in around line 33 by compiler to allow use of registers in GMMA in function '_Z4gemmRA4_fyy'
ptxas info    : (C7510) Potential Performance Loss: wgmma.mma_async instructions are serialized due to wgmma pipeline crossing function boundary at a function call in the function 'k'
ptxas info    : (C7508) Potential Performance Loss: 'setmaxnreg' ignored; unable to determine register count at entry.
ptxas info    : (C7599) what is new in the function 'k'
ptxas info    : (C7600) another matter
ptxas info    : (C75) no code
ptxas info    : Compiling entry function 'k' for 'sm_90a'
";
        let found = Advisory::of(log);
        let said: Vec<(String, bool)> =
            found.iter().map(|a| (a.to_string(), a.is_slow())).collect();
        let expected = [
            ("a fence inserted (C7519) in `_Z4gemmRA4_fyy`", false),
            ("wgmma serialised (C7510, a call) in `k`", true),
            ("'setmaxnreg' ignored; unable to determine register count at entry. (C7508)", true),
            ("what is new in the function 'k' (C7599)", true),
        ];
        assert_eq!(said, expected.map(|(text, slow)| (text.to_owned(), slow)));
        assert_eq!(found[1].function.as_deref(), Some("k"));
        assert!(found[1].text.starts_with("wgmma.mma_async instructions are serialized due to"));
        assert_eq!(found[2].function, None);
    }

    /// Products of one warpgroup, and what each does wrong.
    const PRODUCTS: &str = r#"
typedef unsigned u32; typedef unsigned long long u64;
__device__ void fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ void commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int N> __device__ void wait() { asm volatile("wgmma.wait_group.sync.aligned %0;" :: "n"(N) : "memory"); }
__device__ void product(float (&d)[4], u32 (&a)[4], u64 b) {
    asm volatile("{.reg .pred p; setp.ne.b32 p, 1, 0;"
        "wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 {%0, %1, %2, %3}, {%4, %5, %6, %7}, %8, p, 1, 1, 0;}"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
}
__device__ __noinline__ void called(float (&d)[4], u32 (&a)[4], u64 b) { product(d, a, b); }
"#;

    #[test]
    fn what_ptxas_does_to_products_and_registers_is_found() {
        let Ok(compiler) = Compiler::get().map_err(|e| println!("skipped: {e}")) else { return };
        let bodies = [
            ("fence(); product(d, a, b); commit(); wait<0>();", vec![]),
            ("fence(); called(d, a, b); commit(); wait<0>();", vec![7510, 7517, 7519]),
            (
                "for (int i = 0; i < n; i++) {
                    fence(); product(d, a, b); commit();
                    for (int j = 0; j < 4; j++) a[j] += i + n;
                    wait<1>();
                }
                wait<0>();",
                vec![7513],
            ),
            ("product(d, a, b); commit(); wait<0>();", vec![7519]),
        ];
        let hopper = Arch::new((9, 0)).specific();
        for (body, codes) in bodies {
            let source = format!(
                "{PRODUCTS}
                extern \"C\" __global__ void __launch_bounds__(128, 1) f(float* x, u64 b, int n) {{
                    float d[4] = {{x[0], x[1], x[2], x[3]}};
                    u32 a[4] = {{1, 2, 3, 4}};
                    {body}
                    for (int i = 0; i < 4; i++) x[4 * threadIdx.x + i] = d[i] + a[i];
                }}"
            );
            let compiled = compiler.compile(&source, hopper).unwrap();
            let mut found: Vec<u32> = compiled.advisories.iter().map(|a| a.code).collect();
            found.sort_unstable();
            found.dedup();
            assert_eq!(found, codes, "{}", compiled.log);
        }
        let source = "extern \"C\" __global__ void __launch_bounds__(256) f(float* x) {
            if (threadIdx.x < 128) asm volatile(\"setmaxnreg.dec.sync.aligned.u32 40;\");
            else { asm volatile(\"setmaxnreg.inc.sync.aligned.u32 232;\"); x[threadIdx.x] = 1; }
        }";
        let compiled = compiler.compile(source, hopper).unwrap();
        assert_eq!(compiled.advisories.len(), 1, "{}", compiled.log);
        assert_eq!(compiled.advisories[0].kind(), AdvisoryKind::SetmaxnregDropped);
        let fixed = source.replace("(256)", "(256, 1)");
        assert_eq!(compiler.compile(&fixed, hopper).unwrap().advisories, []);
    }
}
