//! What the blocks and products of a step take: those of the dry run, at the machine's rates.

use foveate_nn::{Account, ModelConfig, NotedBlock, ParameterState, Recomputation, Recompute};
use foveate_shard::simulate::Machine;
use foveate_shard::{MeshAxis, ProvenPlan};

/// Blocks of the stream between layers, whose tokens are cut over `tensor`.
const STREAM_BLOCKS: [&str; 7] = [
    "embed",
    "embed backward",
    "rms_norm",
    "add_rms_norm",
    "rms_norm again",
    "rms_norm backward",
    "add",
];

/// What a step is simulated from.
pub(super) struct Step<'a> {
    pub machine: &'a Machine,
    pub proven: &'a ProvenPlan,
    pub config: &'a ModelConfig,
    pub account: &'a Account,
    pub state: ParameterState,
    pub recompute: Recomputation,
    pub layers: usize,
    /// Live tiles of each stage, by place on `context`.
    pub tiles: &'a [Vec<u64>],
    /// Ranks that stand for those of their place on `context`.
    pub reps: &'a [usize],
}

/// Seconds of the blocks of a pass, attention left out.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Pass {
    pub embedding: f64,
    /// Of all layers.
    pub layers: f64,
}

/// How the stream between products moves over `tensor`, as a step on GPUs does it.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Moves {
    /// Each product takes the tokens of one rank: those of this one while others' come, or those of others
    /// first, each on its way while the next are computed.
    Beside,
    /// In one piece, for which the rank waits.
    Waited,
}

/// Products of a layer, forward.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Product {
    Qkv,
    Out,
    GateUp,
    Down,
}

impl Product {
    pub const ALL: [Self; 4] = [Self::Qkv, Self::Out, Self::GateUp, Self::Down];

    pub fn name(self) -> &'static str {
        match self {
            Self::Qkv => "qkv",
            Self::Out => "out",
            Self::GateUp => "gate, up",
            Self::Down => "down",
        }
    }

    /// Elements of its weight.
    pub fn weight(self, config: &ModelConfig) -> f64 {
        let wide = match self {
            Self::Qkv => config.qkv_width(),
            Self::Out => config.attention_width(),
            Self::GateUp => 2 * config.intermediate_size,
            Self::Down => config.intermediate_size,
        };
        config.hidden_size as f64 * wide as f64
    }

    /// What moves before and behind: tokens are gathered for weights that are cut by rows, and sums of what
    /// those give that are cut by columns go to the ranks that have the tokens. Backward the other way round.
    pub fn moves(self) -> [Option<Moves>; 2] {
        match self {
            Self::Qkv | Self::GateUp => [Some(Moves::Beside), None],
            Self::Out | Self::Down => [None, Some(Moves::Beside)],
        }
    }

    /// Those that a backward pass computes again.
    pub fn again(what: Recompute) -> &'static [Self] {
        match what {
            Recompute::None => &[],
            Recompute::Attention => &[Self::Qkv],
            Recompute::Mlp => &[Self::GateUp],
            Recompute::Full => &[Self::Qkv, Self::Out, Self::GateUp],
        }
    }
}

impl Step<'_> {
    pub fn tensor(&self) -> usize {
        self.mesh().size(MeshAxis::Tensor)
    }

    pub fn mesh(&self) -> &foveate_shard::Mesh {
        self.proven.plan().sharding.map().mesh()
    }

    fn seconds(&self, block: &NotedBlock) -> f64 {
        let name = block.block;
        let share = if STREAM_BLOCKS.contains(&name) { self.tensor() as f64 } else { 1.0 };
        match name {
            "loss" | "loss backward" => {
                let products = if name == "loss" { 2.0 } else { 6.0 };
                let logits = block.flops / (products * self.config.hidden_size as f64);
                // 16 bits, read and written.
                self.machine.product_seconds(block.flops)
                    + self.machine.moving_seconds("cross-entropy", 4.0 * logits)
            }
            _ if block.flops > 0.0 => self.machine.product_seconds(block.flops),
            _ => self.machine.moving_seconds(name, block.bytes / share),
        }
    }

    fn pass(&self, blocks: &[NotedBlock]) -> Pass {
        let mut pass = Pass::default();
        for block in blocks {
            match block.block {
                "attention" | "attention backward" => {}
                "embed" | "embed backward" => pass.embedding += self.seconds(block),
                _ => pass.layers += self.seconds(block),
            }
        }
        pass
    }

    /// What a layer computes again in its backward pass.
    pub fn again(&self, layer: usize) -> Recompute {
        match layer < self.recompute.layers {
            true => self.recompute.what,
            false => Recompute::None,
        }
    }

    /// Seconds for each element of a product's weight, forward, or of its two products backward.
    pub fn seconds_per_weight(&self, pass: Pass, backward: bool) -> f64 {
        let sum = |products: &[Product]| -> f64 {
            products.iter().map(|product| product.weight(self.config)).sum()
        };
        let each = if backward { 2.0 } else { 1.0 } * sum(&Product::ALL);
        let again = (0..self.layers).filter(|_| backward).map(|layer| self.again(layer));
        let all =
            self.layers as f64 * each + again.map(|what| sum(Product::again(what))).sum::<f64>();
        pass.layers / all
    }

    /// The blocks before the loss, the seconds of head and loss, and the blocks behind them.
    pub fn passes(&self) -> (Pass, f64, Pass) {
        let of_loss = |block: &NotedBlock| block.block.starts_with("loss");
        let blocks = &self.account.blocks;
        let first = blocks.iter().position(of_loss).unwrap_or(blocks.len());
        let last = blocks.iter().rposition(of_loss).map_or(blocks.len(), |last| last + 1);
        let head = blocks[first..last].iter().map(|block| self.seconds(block)).sum();
        (self.pass(&blocks[..first]), head, self.pass(&blocks[last..]))
    }
}
