//! A kernel for each wrapper of `kernels/hopper/hopper.cuh`, which runs on a GPU of compute capability 9.0
//! and is compared with whole numbers that the host computes; and the two families of kernels against each
//! other.
//!
//! The host lays out what a wrapper reads and computes what it writes, both by the models of
//! `foveate-cuda/tests/layouts`, so that a fault lies in one wrapper. Sums are of small whole numbers, exact
//! in f32 in any order. Numbers differ from row to row, column to column and lane to lane: what goes elsewhere
//! changes a result.
//!
//! Each kernel is compiled from the files that kernels stand on, and has the instruction that it tries, or it would
//! pass without.

mod agreement;
mod loads;
mod pipelines;
mod products;
mod stores;

/// Where elements lie, shared with the host tests of the kernels.
#[path = "../../../../foveate-cuda/tests/layouts/mod.rs"]
mod layouts;

use std::sync::Arc;
use std::time::Duration;

use foveate_cuda::Engine;
use foveate_cuda::compile::config::Config;
use foveate_cuda::compile::source::probe_source;
use foveate_gpu::cubin::Opcode;
use foveate_gpu::driver::{Launch, TensorMap, default_timeout};
use foveate_gpu::kernel::{Expected, KernelSource};
use foveate_gpu::nvrtc::Compiled;
use foveate_gpu::tma::{MapTile, OperandMap};
use foveate_gpu::{DeviceTensor, GpuError};
use foveate_tensor::{DType, Layout};

use crate::gpu::checks::{Outcome, is_lost, on_gpu};

const AROUND: &str = include_str!("around.cu");
/// A kernel that takes longer hangs, as most that are wrong do.
const LIMIT: Duration = Duration::from_secs(20);

/// Numbers that a kernel writes.
#[derive(Clone, Debug, PartialEq)]
enum Numbers {
    Floats(Vec<f32>),
    Words(Vec<u32>),
}

/// A tensor that a kernel loads from by a tensor map.
#[derive(Clone, Debug)]
struct Mapped {
    dtype: DType,
    layout: Layout,
    tile: MapTile,
    bytes: Vec<u8>,
}

impl Mapped {
    /// The map of the tensor at an address.
    fn at(&self, address: u64) -> Result<OperandMap, GpuError> {
        let tensor = DeviceTensor { address, dtype: self.dtype, layout: self.layout };
        let map = OperandMap::of("the tensor", &tensor, &self.tile);
        map.map_err(|refusal| GpuError::argument(refusal.to_string()))
    }
}

/// A kernel `(map, input, out)` and what it is compared with.
struct Probe {
    name: String,
    source: Arc<str>,
    entry: &'static str,
    ctas: u32,
    threads: u32,
    shared_bytes: u32,
    mapped: Option<Mapped>,
    input: Vec<u8>,
    /// What out holds before, repeated.
    before: Vec<u32>,
    expected: Numbers,
    /// What element `i` of out is.
    place: Box<dyn Fn(usize) -> String>,
    /// Instructions, and how many of each there are at least.
    instructions: Vec<(Opcode, u32)>,
    /// Registers that roles ask for, the fewest first.
    registers: Vec<u32>,
}

impl Probe {
    /// A probe of one warpgroup and no tensor map; out holds NaN before.
    fn new(name: String, source: &Arc<str>, entry: &'static str, shared_bytes: usize) -> Self {
        Self {
            name,
            source: source.clone(),
            entry,
            ctas: 1,
            threads: 128,
            shared_bytes: shared_bytes as u32,
            mapped: None,
            input: Vec::new(),
            before: vec![u32::MAX],
            expected: Numbers::Words(Vec::new()),
            place: Box::new(|i| format!("word {i}")),
            instructions: Vec::new(),
            registers: Vec::new(),
        }
    }

    /// What it may take of an SM: the registers that a launch of its threads has.
    fn planned(&self) -> Expected<'_> {
        Expected {
            name: &self.name,
            entry: self.entry,
            registers: (65_536 / self.threads / 8 * 8).min(255),
            local_bytes: 0,
            static_shared_bytes: 0,
            shared_bytes: Some(self.shared_bytes),
        }
    }

    /// How many words it writes.
    fn words(&self) -> usize {
        match &self.expected {
            Numbers::Floats(numbers) => numbers.len(),
            Numbers::Words(words) => words.len(),
        }
    }

    /// Whether the machine code has what the kernel tries.
    fn has_instructions(&self, compiled: &Compiled) -> Result<(), String> {
        let found =
            compiled.instructions(self.entry).ok_or("the compiled source has no such kernel")?;
        for (opcode, least) in &self.instructions {
            let count = found.count(*opcode);
            if count < *least {
                return Err(format!(
                    "the machine code has {count} of {opcode:?}, not {least} or more"
                ));
            }
        }
        let mut registers = found.registers;
        registers.sort_unstable();
        if registers != self.registers {
            return Err(format!("roles ask for {registers:?} registers, not {:?}", self.registers));
        }
        Ok(())
    }

    fn run(&self, engine: &Engine) -> Outcome {
        let arch = engine.device().info().arch().specific();
        let source = KernelSource { text: self.source.to_string(), arch };
        if let Err(wrong) = self.has_instructions(&*engine.compiled(&self.source, arch)?) {
            return Ok(Err(wrong));
        }
        let kernel = engine.kernel(&source, &self.planned())?;
        let queue = engine.queue();
        let upload =
            |bytes: &[u8]| queue.pool().upload(if bytes.is_empty() { &[0; 16] } else { bytes });
        let input = upload(&self.input)?;
        let before = self.before.iter().cycle().take(self.words());
        let out = upload(&before.flat_map(|word| word.to_le_bytes()).collect::<Vec<u8>>())?;
        let tensor = upload(self.mapped.as_ref().map_or(&[], |mapped| &mapped.bytes))?;
        let map = match &self.mapped {
            Some(mapped) => mapped.at(tensor.address())?.encode("the tensor", engine.device())?,
            None => TensorMap::UNUSED,
        };
        let launch = Launch::new([self.ctas, 1, 1], self.threads);
        // SAFETY: input and out have what the kernel reads and writes, by the host's model of it, the map
        // is that of the tensor, and all three go back to the pool of the same queue, behind the launch.
        unsafe { kernel.launch(queue, &launch, (map, input.address(), out.address())) }?;
        let mut bytes = vec![0; 4 * self.words()];
        out.read(&mut bytes, default_timeout().min(LIMIT))?;
        Ok(self.compare(&bytes))
    }

    /// Compares what the kernel wrote with what it should have written.
    fn compare(&self, bytes: &[u8]) -> Result<(), String> {
        let found = bytes.chunks_exact(4).map(|b| u32::from_le_bytes(b.try_into().expect("four")));
        let wrong: Vec<(usize, String)> = match &self.expected {
            Numbers::Floats(expected) => {
                let pairs = found.map(f32::from_bits).zip(expected).enumerate();
                let wrong = pairs.filter(|(_, (found, expected))| found != *expected);
                wrong
                    .map(|(i, (found, expected))| (i, format!("{found}, not {expected}")))
                    .collect()
            }
            Numbers::Words(expected) => {
                let wrong = found.zip(expected).enumerate().filter(|(_, (found, e))| found != *e);
                wrong.map(|(i, (found, e))| (i, format!("{found:#x}, not {e:#x}"))).collect()
            }
        };
        let Some((first, said)) = wrong.first() else { return Ok(()) };
        let (count, all) = (wrong.len(), self.words());
        Err(format!(
            "{count} of {all} numbers, the first of them {} is {said}",
            (self.place)(*first)
        ))
    }
}

/// The text of kernels that stand on what one of `config` stands on, with so much shared memory and these constants.
fn source(
    config: &Config,
    shared_bytes: usize,
    constants: &[(&str, usize)],
    text: &str,
) -> Arc<str> {
    let shared = [("PROBE_BYTES", shared_bytes)];
    let defines =
        shared.iter().chain(constants).map(|(name, value)| format!("#define {name} {value}\n"));
    let text = [defines.collect::<String>().as_str(), AROUND, text].join("\n");
    probe_source(config, &text).into()
}

/// Every probe.
fn all() -> Vec<Probe> {
    [products::all(), loads::all(), pipelines::all(), stores::all()].into_iter().flatten().collect()
}

/// Runs every probe, and every check of the families, whose name has `only` in it, and prints a line for each; whether
/// all passed.
pub fn run(only: &str) -> Result<bool, String> {
    let probes = all();
    let names = probes.iter().map(|probe| probe.name.clone());
    if !names.chain(agreement::all().map(|check| check.to_string())).any(|name| name.contains(only))
    {
        return Err(format!("no probe has `{only}` in its name"));
    }
    on_gpu("probes", |engine, checks| {
        if !engine.profile().runs_hopper() {
            let (major, minor) = engine.device().info().capability;
            say!(
                "probes declined: GPU 0 of capability {major}.{minor} runs no Hopper kernels; see foveate doctor"
            );
            return;
        }
        let mut failed: Option<String> = None;
        let mut say = |name: &str, check: &dyn Fn() -> Outcome| match &failed {
            _ if !name.contains(only) => {}
            Some(before) => checks
                .skip(name, format!("{before:?} failed, and this process with it; use --only")),
            None => {
                let outcome = check();
                failed = outcome.as_ref().err().filter(|e| is_lost(e)).map(|_| name.to_owned());
                checks.say(name, outcome);
            }
        };
        for probe in &probes {
            say(&probe.name, &|| probe.run(engine));
        }
        for check in agreement::all() {
            say(&check.to_string(), &|| check.run(engine));
        }
    })
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use foveate_gpu::Arch;
    use foveate_gpu::cache::Cache;
    use foveate_gpu::nvrtc::Compiler;

    use super::*;

    #[test]
    fn every_probe_compiles_as_it_is_written_and_has_what_it_tries() {
        let compiler = match Compiler::get() {
            Ok(compiler) => compiler,
            Err(e) => return println!("skipped: {e}"),
        };
        let cache = Cache::at(None);
        for probe in all() {
            let arch = Arch::new((9, 0)).specific();
            let name = &probe.name;
            let compiled = cache.compile(compiler, &probe.source, arch);
            let compiled = compiled.unwrap_or_else(|e| panic!("{name}: {e}"));
            assert_eq!(compiled.advisories, [], "{name}");
            assert_eq!(probe.planned().compare(&compiled).unwrap(), Ok(()), "{name}");
            assert_eq!(probe.has_instructions(&compiled), Ok(()), "{name}");
        }
    }

    #[test]
    fn a_probe_does_not_pass_without_the_instruction_that_it_tries() {
        let compiler = match Compiler::get() {
            Ok(compiler) => compiler,
            Err(e) => return println!("skipped: {e}"),
        };
        let matrices = stores::all().into_iter().find(|probe| probe.entry == "matrices");
        let Probe { source, .. } = matrices.expect("it is there");
        let lanes = Probe {
            instructions: vec![(Opcode::Stsm, 1)],
            ..Probe::new("lanes".into(), &source, "lanes", 0)
        };
        let arch = Arch::new((9, 0)).specific();
        let compiled = Cache::at(None).compile(compiler, &source, arch).unwrap();
        let said = "the machine code has 0 of Stsm, not 1 or more";
        assert_eq!(lanes.has_instructions(&compiled), Err(said.to_owned()));
        let lanes = Probe { instructions: Vec::new(), registers: vec![40, 232], ..lanes };
        let said = "roles ask for [] registers, not [40, 232]";
        assert_eq!(lanes.has_instructions(&compiled), Err(said.to_owned()));
    }

    #[test]
    fn probes_have_names_of_their_own_and_results_that_differ_from_what_was_there() {
        let all = all();
        let names: BTreeSet<&str> = all.iter().map(|probe| probe.name.as_str()).collect();
        assert_eq!(names.len(), all.len());
        for probe in &all {
            let before = probe.before.iter().cycle().take(probe.words());
            let before: Vec<u8> = before.flat_map(|word| word.to_le_bytes()).collect();
            let said = probe.compare(&before).unwrap_err();
            assert!(
                said.contains(" numbers, the first of them ") && said.contains(", not "),
                "{said}"
            );
            let right: Vec<u8> = match &probe.expected {
                Numbers::Floats(x) => x.iter().flat_map(|x| x.to_le_bytes()).collect(),
                Numbers::Words(x) => x.iter().flat_map(|x| x.to_le_bytes()).collect(),
            };
            assert_eq!(probe.compare(&right), Ok(()));
        }
    }
}
