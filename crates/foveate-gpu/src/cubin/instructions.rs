//! Instructions of a kernel, counted by what a fast kernel must or must not have.
//!
//! An instruction is 16 bytes, from Volta to Hopper. Its number is the low 12 bits: 9 that name it,
//! below 3 that say where its operands come from. NVIDIA documents neither, so the tests compile
//! kernels of one instruction for `sm_90a` and look for it.

use std::collections::BTreeMap;

/// Instructions that are counted, by NVIDIA's names for them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Opcode {
    /// `HGMMA`: `wgmma.mma_async` of 16-bit operands.
    Hgmma,
    /// `QGMMA`: `wgmma.mma_async` of 8-bit floats.
    Qgmma,
    /// `WARPGROUP.ARRIVE`: `wgmma.fence`.
    WarpgroupArrive,
    /// `WARPGROUP.DEPBAR`: `wgmma.wait_group`.
    WarpgroupDepbar,
    /// `UTMALDG`: a load by a tensor map.
    Utmaldg,
    /// `UTMASTG`: a store by a tensor map.
    Utmastg,
    /// `UTMAREDG`: a reduction by a tensor map.
    Utmaredg,
    /// `UBLKCP`: `cp.async.bulk` without a map.
    Ublkcp,
    /// `UBLKRED`: `cp.reduce.async.bulk` without a map.
    Ublkred,
    /// `USETMAXREG`: `setmaxnreg`.
    Usetmaxreg,
    /// `SYNCS.EXCH`: `mbarrier.init`.
    SyncsExch,
    /// `SYNCS.ARRIVE`: `mbarrier.arrive` and `expect_tx`.
    SyncsArrive,
    /// `SYNCS.PHASECHK`: `mbarrier.try_wait`, which the compiler may write twice, once before its loop.
    SyncsPhasechk,
    /// `STSM`: `stmatrix`.
    Stsm,
    /// `LDGSTS`: `cp.async`.
    Ldgsts,
    /// `BAR`: `bar.sync`, `bar.arrive`, `__syncthreads`.
    Bar,
    /// `LDL`: a load from local memory.
    Ldl,
    /// `STL`: a store to local memory.
    Stl,
    /// `HMMA`: `mma.sync` of 16-bit operands.
    Hmma,
    /// `MUFU`: `ex2`, `rcp`, `tanh` and their like.
    Mufu,
    /// `CALL`.
    Call,
}

/// Numbers of the instructions, 9 bits each; of mbarriers 12, which tell what 9 do not.
const NUMBERS: [(u16, Opcode); 21] = [
    (0x1f0, Opcode::Hgmma),
    (0x1f3, Opcode::Qgmma),
    (0x1c5, Opcode::WarpgroupArrive),
    (0x1b4, Opcode::Utmaldg),
    (0x1b5, Opcode::Utmastg),
    (0x1b6, Opcode::Utmaredg),
    (0x1ba, Opcode::Ublkcp),
    (0x1bb, Opcode::Ublkred),
    (0x1c8, Opcode::Usetmaxreg),
    (0x5b2, Opcode::SyncsExch),
    (0x9a7, Opcode::SyncsArrive),
    (0x5a7, Opcode::SyncsPhasechk),
    (0x044, Opcode::Stsm),
    (0x1ae, Opcode::Ldgsts),
    (0x11d, Opcode::Bar),
    (0x183, Opcode::Ldl),
    (0x187, Opcode::Stl),
    (0x03c, Opcode::Hmma),
    (0x108, Opcode::Mufu),
    // To an address, and relative.
    (0x143, Opcode::Call),
    (0x144, Opcode::Call),
];

/// What a kernel's machine code has.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Instructions {
    counts: BTreeMap<Opcode, u32>,
    /// Groups of products that each `WARPGROUP.DEPBAR` leaves in flight, in the order of the code.
    pub in_flight: Vec<u32>,
    /// Registers that each `USETMAXREG` asks for, in the order of the code.
    pub registers: Vec<u32>,
    /// `LDL` and `STL` between the first `HGMMA` or `QGMMA` and the last: of a kernel with roles, in those
    /// that multiply.
    pub local_among_products: u32,
    /// The same from the first one on, however many products follow.
    local_after_first: u32,
}

impl Instructions {
    /// Counts the instructions of a kernel.
    pub(crate) fn of(code: &[u8]) -> Self {
        let mut found = Self::default();
        for instruction in code.chunks_exact(16) {
            let (low, high) = instruction.split_at(8);
            let [low, high] =
                [low, high].map(|half| half.try_into().expect("16 bytes are twice 8"));
            found.add(u64::from_le_bytes(low), u64::from_le_bytes(high));
        }
        found
    }

    /// Adds the instruction of these two words.
    fn add(&mut self, low: u64, high: u64) {
        /// Set in the second word of `WARPGROUP.DEPBAR`, and not of `WARPGROUP.ARRIVE`.
        const DEPBAR: u64 = 1 << 16;
        let number = (low & 0xfff) as u16;
        let found = NUMBERS.iter().find(|(n, _)| [number, number & 0x1ff].contains(n));
        let Some(&(_, mut opcode)) = found else { return };
        match opcode {
            Opcode::WarpgroupArrive if high & DEPBAR != 0 => {
                opcode = Opcode::WarpgroupDepbar;
                self.in_flight.push((high >> 8 & 0xff) as u32);
            }
            Opcode::Usetmaxreg => self.registers.push((low >> 32 & 0x1ff) as u32),
            Opcode::Hgmma | Opcode::Qgmma => self.local_among_products = self.local_after_first,
            Opcode::Ldl | Opcode::Stl
                if self.count(Opcode::Hgmma) + self.count(Opcode::Qgmma) > 0 =>
            {
                self.local_after_first += 1;
            }
            _ => {}
        }
        *self.counts.entry(opcode).or_default() += 1;
    }

    /// How many of an instruction there are.
    pub fn count(&self, opcode: Opcode) -> u32 {
        self.counts.get(&opcode).copied().unwrap_or(0)
    }

    /// The instructions that there are, each with its number.
    pub fn counts(&self) -> impl Iterator<Item = (Opcode, u32)> + '_ {
        self.counts.iter().map(|(&opcode, &count)| (opcode, count))
    }
}

#[cfg(test)]
mod tests {
    use super::Opcode::*;
    use super::*;
    use crate::arch::Arch;
    use crate::nvrtc::Compiler;

    /// What kernels of one instruction are written with.
    const PRELUDE: &str = r#"
typedef unsigned u32; typedef unsigned short u16; typedef unsigned long long u64;
struct alignas(64) Map { u64 words[16]; };
__device__ __noinline__ float called(float x) { for (int i = 0; i < 99; i++) x = x * x + 0.5f; return x; }
#define PRODUCT(types, k, operands) \
    asm volatile("{.reg .pred p; setp.ne.b32 p, %5, 0;" \
        "wgmma.mma_async.sync.aligned.m64n8k" k ".f32." types " {%0, %1, %2, %3}, %4, %4, p, 1, 1" operands ";}" \
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]) : "l"(l), "r"(n));
"#;

    /// The body of a kernel, and what its machine code has. `s` is an address in shared memory, `g`
    /// one in device memory, `m` that of a tensor map, `n` and `l` are numbers.
    const KERNELS: &[(&str, &[(Opcode, u32)])] = &[
        (
            r#"asm volatile("wgmma.fence.sync.aligned;"); PRODUCT("bf16.bf16", "16", ", 0, 1")
               asm volatile("wgmma.commit_group.sync.aligned; wgmma.wait_group.sync.aligned 0;");"#,
            &[(Hgmma, 1), (WarpgroupArrive, 1), (WarpgroupDepbar, 1)],
        ),
        (
            r#"asm volatile("wgmma.fence.sync.aligned;"); PRODUCT("e4m3.e4m3", "32", "")
               asm volatile("wgmma.commit_group.sync.aligned; wgmma.wait_group.sync.aligned 0;");"#,
            &[(Qgmma, 1), (WarpgroupArrive, 1), (WarpgroupDepbar, 1)],
        ),
        (
            r#"asm volatile("wgmma.fence.sync.aligned;");
               asm volatile("{.reg .pred p; setp.ne.b32 p, %6, 0; wgmma.mma_async.sync.aligned.m64n8k16.f32.f16.f16"
                   " {%0, %1, %2, %3}, {%4, %4, %4, %4}, %5, p, 1, 1, 1;}"
                   : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]) : "r"(n), "l"(l), "r"(n));
               asm volatile("wgmma.commit_group.sync.aligned; wgmma.wait_group.sync.aligned 0;");"#,
            &[(Hgmma, 1), (WarpgroupArrive, 1), (WarpgroupDepbar, 1)],
        ),
        (
            r#"asm volatile("cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes"
                   " [%0], [%1, {%2, %2, %2, %2}], [%3];" :: "r"(s), "l"(m), "r"(n), "r"(s + 8));"#,
            &[(Utmaldg, 1)],
        ),
        (
            r#"asm volatile("cp.async.bulk.tensor.5d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster"
                   " [%0], [%1, {%2, %2, %2, %2, %2}], [%3], %4;" :: "r"(s), "l"(m), "r"(n), "r"(s + 8), "h"((u16)n));"#,
            &[(Utmaldg, 1)],
        ),
        (
            r#"asm volatile("cp.async.bulk.tensor.4d.global.shared::cta.bulk_group [%1, {%2, %2, %2, %2}], [%0];"
                   :: "r"(s), "l"(m), "r"(n));"#,
            &[(Utmastg, 1)],
        ),
        (
            r#"asm volatile("cp.reduce.async.bulk.tensor.4d.global.shared::cta.add.bulk_group"
                   " [%1, {%2, %2, %2, %2}], [%0];" :: "r"(s), "l"(m), "r"(n));"#,
            &[(Utmaredg, 1)],
        ),
        (
            r#"asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
                   :: "r"(s), "l"(g), "r"(n), "r"(s + 8));"#,
            &[(Ublkcp, 1)],
        ),
        (
            r#"asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%1], [%0], %2;" :: "r"(s), "l"(g), "r"(n));"#,
            &[(Ublkcp, 1)],
        ),
        (
            r#"asm volatile("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%1], [%0], %2;"
                   :: "r"(s), "l"(g), "r"(n));"#,
            &[(Ublkred, 1)],
        ),
        (r#"asm volatile("setmaxnreg.dec.sync.aligned.u32 24;");"#, &[(Usetmaxreg, 1)]),
        (r#"asm volatile("mbarrier.init.shared::cta.b64 [%0], 2;" :: "r"(s));"#, &[(SyncsExch, 1)]),
        (
            r#"asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" :: "r"(s), "r"(n));"#,
            &[(SyncsArrive, 1)],
        ),
        (
            r#"asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" :: "r"(s));"#,
            &[(SyncsArrive, 1)],
        ),
        (
            r#"asm volatile("{.reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2; selp.f32 %0, 1.0, 2.0, p;}"
                   : "=f"(d[0]) : "r"(s), "r"(n));"#,
            &[(SyncsPhasechk, 1)],
        ),
        (
            r#"asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %1, %1, %1};" :: "r"(s), "r"(n));"#,
            &[(Stsm, 1)],
        ),
        (
            r#"asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" :: "r"(s), "l"(g));"#,
            &[(Ldgsts, 1)],
        ),
        (
            r#"asm volatile("bar.sync 1, 64;"); asm volatile("bar.arrive %0, 64;" :: "r"(n)); __syncthreads();"#,
            &[(Bar, 3)],
        ),
        (
            r#"asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %4, %4, %4}, {%4, %4}, {%0, %1, %2, %3};"
                   : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]) : "r"(n));"#,
            &[(Hmma, 1)],
        ),
        (r#"asm volatile("ex2.approx.ftz.f32 %0, %1;" : "=f"(d[0]) : "f"(d[1]));"#, &[(Mufu, 1)]),
        (r#"asm volatile("rcp.approx.ftz.f32 %0, %1;" : "=f"(d[0]) : "f"(d[1]));"#, &[(Mufu, 1)]),
        (
            r#"asm volatile("tanh.approx.f32 %0, %1;" : "=f"(d[0]) : "f"(__int_as_float(n)));"#,
            &[(Mufu, 1)],
        ),
        (r#"d[0] = called(d[1]);"#, &[(Call, 1)]),
        (
            r#"volatile float local[99]; local[n] = d[0]; d[1] = local[n + 1];"#,
            &[(Ldl, 1), (Stl, 1)],
        ),
        (r#"d[0] += d[1] * d[2];"#, &[]),
    ];

    #[test]
    fn kernels_of_one_instruction_have_that_one() {
        let Ok(compiler) = Compiler::get().map_err(|e| println!("skipped: {e}")) else { return };
        let mut source = PRELUDE.to_owned();
        for (i, (body, _)) in KERNELS.iter().enumerate() {
            source += &format!(
                "extern \"C\" __global__ void __launch_bounds__(128, 1) f{i}(float* x, u64 g, u64 l, u32 n, \
                 const __grid_constant__ Map map) {{
                    extern __shared__ float shared[];
                    const u32 s = (u32)__cvta_generic_to_shared(shared);
                    const u64 m = (u64)&map;
                    float d[4] = {{x[0], x[1], x[2], x[3]}};
                    {body}
                    for (int i = 0; i < 4; i++) x[4 * threadIdx.x + i] = d[i];
                }}\n"
            );
        }
        let compiled = compiler.compile(&source, Arch::new((9, 0)).specific()).unwrap();
        for (i, (body, expected)) in KERNELS.iter().enumerate() {
            let found = compiled.instructions(&format!("f{i}")).unwrap();
            assert_eq!(found.counts().collect::<Vec<_>>(), *expected, "{body}");
        }
        assert_eq!(compiled.instructions("another"), None);
        let all: std::collections::BTreeSet<_> = KERNELS
            .iter()
            .flat_map(|(_, expected)| expected.iter().map(|(opcode, _)| *opcode))
            .collect();
        let numbered = NUMBERS.iter().map(|(_, opcode)| *opcode).chain([WarpgroupDepbar]);
        assert_eq!(all, numbered.collect(), "every instruction that is counted is tried");
    }

    #[test]
    fn local_memory_counts_between_the_first_product_and_the_last() {
        const PRODUCT: u64 = 0x1f0;
        const LOAD: u64 = 0x183;
        const STORE: u64 = 0x187;
        const OTHER: u64 = 0x108;
        let count = |code: &[u64]| {
            let words = code.iter().flat_map(|low| [low.to_le_bytes(), [0; 8]]);
            Instructions::of(&words.flatten().collect::<Vec<u8>>()).local_among_products
        };
        assert_eq!(count(&[LOAD, PRODUCT, STORE, LOAD, OTHER, PRODUCT, STORE]), 2);
        assert_eq!(count(&[LOAD, PRODUCT, STORE]), 0);
        assert_eq!(count(&[PRODUCT, LOAD, 0x1f3, STORE, PRODUCT]), 2);
        assert_eq!(count(&[LOAD, STORE]), 0);
    }

    #[test]
    fn waits_say_what_they_leave_in_flight_and_setmaxnreg_how_many_registers() {
        let Ok(compiler) = Compiler::get().map_err(|e| println!("skipped: {e}")) else { return };
        let wait = |groups| {
            format!("asm volatile(\"wgmma.wait_group.sync.aligned {groups};\" ::: \"memory\");\n")
        };
        let waits: String = [7, 2, 0, 1].map(wait).concat();
        let set = |how, registers| {
            format!("asm volatile(\"setmaxnreg.{how}.sync.aligned.u32 {registers};\");")
        };
        let source = format!(
            "extern \"C\" __global__ void __launch_bounds__(384, 1) f(float* x, int n) {{
                if (threadIdx.x < 128) {{ {} x[n] = 1; }}
                else if (threadIdx.x < 256) {{ {} {waits} x[n] = 2; }}
                else {{ {} x[n] = 3; }}
            }}",
            set("dec", 24),
            set("inc", 240),
            set("inc", 256),
        );
        let compiled = compiler.compile(&source, Arch::new((9, 0)).specific()).unwrap();
        let mut found = compiled.instructions("f").unwrap();
        found.in_flight.sort_unstable();
        found.registers.sort_unstable();
        assert_eq!(found.in_flight, [0, 1, 2, 7]);
        assert_eq!(found.registers, [24, 240, 256]);
    }
}
