//! Cases run at the request of a script, so that it can alternate them with another
//! implementation's in one run.
//!
//! Each line of standard input is a request in JSON, each line of standard output its answer. A
//! request that fails is answered with `error` and the next one read.

use std::hint::black_box;
use std::io::BufRead;
use std::num::NonZeroUsize;
use std::path::PathBuf;

use foveate::DType;
use foveate_nn::{Blocks, Cpu, LinearShape, Matrix, NnError, Part, PartMut, matmul};
use rayon::prelude::*;
use serde::{Deserialize, Serialize};

use super::prepared::Prepared;
use super::timed;
use crate::bench::workload::Workload;
use crate::failure::Failure;
use crate::output::Output;

#[derive(Debug, Deserialize)]
#[serde(rename_all = "lowercase", deny_unknown_fields)]
enum Request {
    /// Make a workload ready.
    Prepare { work: Box<Workload> },
    /// Run the pass of the workload once. When it takes less than so many milliseconds, run it
    /// again and tell the time of that: it follows work, as calls of a training step do.
    Run { short_ms: f64 },
    /// Write the results of the last run to a file, as little-endian f32 one after the other.
    Write { file: PathBuf },
    /// Multiply two large f32 matrices on the same threads.
    Gemm,
    /// Multiply so many tokens with a weight, and as its gradients are: the product, the gradient of the
    /// tokens, that of the weight.
    Linear { tokens: NonZeroUsize, inputs: NonZeroUsize, outputs: NonZeroUsize },
    /// Read so many bytes on the same threads.
    Read { bytes: usize },
}

#[derive(Debug, Serialize)]
#[serde(rename_all = "lowercase")]
enum Answer {
    /// The name of the workload that is ready.
    Ready(String),
    /// How long the work took.
    Ms(f64),
    /// How long each of the products took.
    Products([f64; 3]),
    /// Names and lengths of what the file holds.
    Written(Vec<(&'static str, usize)>),
    /// Rate of the product.
    Gflops(f64),
    /// Why the request failed.
    Error(String),
}

/// What the requests work on.
#[derive(Default)]
struct Server {
    prepared: Option<Prepared>,
    gemm: Option<Gemm>,
    linear: Option<Linear>,
    read: Vec<f32>,
}

/// Answers requests until there are no more.
pub fn serve(requests: impl BufRead, out: &mut Output) -> Result<(), Failure> {
    let mut server = Server::default();
    for line in requests.lines() {
        let line = line.map_err(|e| Failure::new(format!("a request cannot be read: {e}")))?;
        let answer = match serde_json::from_str(&line) {
            Ok(request) => server.answer(request).unwrap_or_else(|e| Answer::Error(e.message())),
            Err(e) => Answer::Error(format!("`{line}` is no request: {e}")),
        };
        out.json(&answer)?;
    }
    Ok(())
}

impl Server {
    fn answer(&mut self, request: Request) -> Result<Answer, Failure> {
        match request {
            Request::Prepare { work } => {
                // What was there is freed first: two large cases may not fit together.
                self.prepared = None;
                self.prepared = Some(Prepared::new(&work)?);
                Ok(Answer::Ready(work.name()))
            }
            Request::Run { short_ms } => {
                let prepared = ready(&mut self.prepared)?;
                let (mut ms, mut ran) = timed(|| prepared.run());
                if ran.is_ok() && ms < short_ms {
                    (ms, ran) = timed(|| prepared.run());
                }
                ran.map(|()| Answer::Ms(ms))
            }
            Request::Write { file } => write(&ready(&mut self.prepared)?.results(), &file),
            Request::Gemm => {
                let gemm = self.gemm.get_or_insert_with(Gemm::new);
                let (ms, ()) = timed(|| gemm.run());
                Ok(Answer::Gflops(Gemm::FLOPS / ms / 1e6))
            }
            Request::Linear { tokens, inputs, outputs } => {
                let sizes = [tokens, inputs, outputs].map(NonZeroUsize::get);
                let linear = match self.linear.take().filter(|linear| linear.sizes == sizes) {
                    Some(linear) => linear,
                    None => Linear::new(sizes)?,
                };
                Ok(Answer::Products(self.linear.insert(linear).run()?))
            }
            Request::Read { bytes } => {
                self.read.resize(bytes / 4, 1.0);
                let read = &self.read;
                Ok(Answer::Ms(timed(|| read_all(read)).0))
            }
        }
    }
}

fn ready(prepared: &mut Option<Prepared>) -> Result<&mut Prepared, Failure> {
    prepared.as_mut().ok_or_else(|| Failure::new("no workload is ready; ask for `prepare` first"))
}

fn write(results: &[(&'static str, Vec<f32>)], file: &PathBuf) -> Result<Answer, Failure> {
    let bytes: Vec<u8> =
        results.iter().flat_map(|(_, r)| r).flat_map(|x| x.to_le_bytes()).collect();
    std::fs::write(file, bytes)
        .map_err(|e| Failure::new(format!("{} cannot be written: {e}", file.display())))?;
    Ok(Answer::Written(results.iter().map(|(name, r)| (*name, r.len())).collect()))
}

/// Reads every element once: the sum goes nowhere.
fn read_all(data: &[f32]) {
    const PART: usize = 1 << 18;
    data.par_chunks(PART).for_each(|part| {
        let mut sums = [0.0f32; 64];
        for group in part.chunks_exact(64) {
            sums.iter_mut().zip(group).for_each(|(sum, x)| *sum += x);
        }
        black_box(sums);
    });
}

/// A product of square matrices.
struct Gemm {
    a: Vec<f32>,
    b: Vec<f32>,
    c: Vec<f32>,
}

impl Gemm {
    const N: usize = 1536;
    const FLOPS: f64 = 2.0 * (Self::N * Self::N * Self::N) as f64;

    fn new() -> Self {
        let n = Self::N * Self::N;
        Self { a: vec![0.5; n], b: vec![0.25; n], c: vec![0.0; n] }
    }

    fn run(&mut self) {
        const N: usize = Gemm::N;
        let (a, b) = (Matrix::rows(&self.a, N), Matrix::rows(&self.b, N));
        matmul([N, N, N], a, b, &mut self.c, N, false);
    }
}

/// A weight of a layer, tokens, and the gradients of both.
struct Linear {
    /// Tokens, inputs and outputs.
    sizes: [usize; 3],
    cpu: Cpu,
    x: Vec<f32>,
    y: Vec<f32>,
    weight: Vec<f32>,
    d_x: Vec<f32>,
    d_weight: Vec<f32>,
}

impl Linear {
    fn new(sizes: [usize; 3]) -> Result<Self, Failure> {
        let [tokens, inputs, outputs] = sizes;
        let mut cpu = Cpu::default();
        let mut array = |rows: usize, columns: usize| {
            let mut array = Vec::new();
            let elems = rows.saturating_mul(columns);
            cpu.resize("operand", &mut array, DType::F32, elems).map_err(failed)?;
            array.fill(0.5);
            Ok::<_, Failure>(array)
        };
        let (x, y, weight) =
            (array(tokens, inputs)?, array(tokens, outputs)?, array(inputs, outputs)?);
        let (d_x, d_weight) = (array(tokens, inputs)?, array(inputs, outputs)?);
        Ok(Self { sizes, cpu, x, y, weight, d_x, d_weight })
    }

    fn run(&mut self) -> Result<[f64; 3], Failure> {
        let Self { sizes: [tokens, inputs, outputs], cpu, x, y, weight, d_x, d_weight } = self;
        let shape = LinearShape { tokens: *tokens, inputs: *inputs, outputs: *outputs };
        let weight = || Part::whole(&*weight);
        let (forward, ran) = timed(|| cpu.linear(shape, Part::whole(x), weight(), None, None, y));
        ran.map_err(failed)?;
        let (of_x, ran) = timed(|| cpu.linear_backward_input(shape, y, weight(), d_x));
        ran.map_err(failed)?;
        let place = 0..d_weight.len();
        let d_weight = PartMut { array: d_weight, place, accumulate: true };
        let (of_weight, ran) = timed(|| cpu.linear_backward_weight(shape, y, x, d_weight));
        ran.map_err(failed)?;
        Ok([forward, of_x, of_weight])
    }
}

fn failed(error: NnError) -> Failure {
    Failure::new(error.to_string())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn requests_are_answered_and_wrong_ones_say_why() {
        let mut server = Server::default();
        let run = || Request::Run { short_ms: 1e3 };
        let refused = server.answer(run()).unwrap_err().message();
        assert_eq!(refused, "no workload is ready; ask for `prepare` first");
        let work = Workload::causal(2, 1, 19, 8);
        let request = serde_json::json!({ "prepare": { "work": work } });
        let request = serde_json::from_value(request).unwrap();
        let Answer::Ready(name) = server.answer(request).unwrap() else { panic!("it is ready") };
        assert_eq!(name, work.name());
        assert!(matches!(server.answer(run()).unwrap(), Answer::Ms(ms) if ms > 0.0));
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("results");
        let written = server.answer(Request::Write { file: file.clone() }).unwrap();
        let elems = 2 * 19 * 8;
        assert!(matches!(written, Answer::Written(of) if of == [("out", elems)]));
        assert_eq!(std::fs::metadata(file).unwrap().len(), 4 * elems as u64);
        let read = server.answer(Request::Read { bytes: 1 << 20 }).unwrap();
        assert!(matches!(read, Answer::Ms(ms) if ms > 0.0));
        let two = NonZeroUsize::new(2).unwrap();
        let linear = |tokens| Request::Linear { tokens, inputs: two, outputs: two };
        let Answer::Products(ms) = server.answer(linear(two)).unwrap() else {
            panic!("three times")
        };
        assert!(ms.iter().all(|&ms| ms > 0.0));
        assert!(server.answer(linear(NonZeroUsize::MAX)).unwrap_err().message().contains("memory"));
    }
}
