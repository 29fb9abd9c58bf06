//! Machines as data: what a GPU computes in a second, and what its links carry.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::error::{ShardError, refused};
use crate::plan::Links;

/// The block that joins parts of attention, among the rates of memory.
pub const JOIN: &str = "join";

/// Machines that come with the crate, by name: the GPU, and how many of them a host has.
const KNOWN: [(&str, &str); 2] = [
    ("h100x8", include_str!("../../machines/h100x8.toml")),
    ("h200x8", include_str!("../../machines/h200x8.toml")),
];

/// GPUs, the hosts that they are in, and the network between these.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Machine {
    /// Its name.
    pub name: String,
    /// What was measured of it, and what is the maker's word.
    pub source: String,
    /// The GPU of a rank.
    pub gpu: Gpu,
    /// The host of some ranks.
    pub host: Host,
    /// From a rank to those of other hosts.
    pub network: Link,
}

/// What a GPU computes.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Gpu {
    /// Memory that a process can take, in GiB.
    pub memory_gib: f64,
    /// The maker's peak in 16 bits, dense, in TFLOP/s: what MFU is a share of.
    pub peak_tflops: f64,
    /// Matrix products of a step, in TFLOP/s.
    pub products_tflops: f64,
    /// The shortest time of a kernel, in microseconds.
    pub least_us: f64,
    /// Bytes that other blocks read and write in a second, in GB/s, by block; `default` for those
    /// that are not named.
    pub gbps: BTreeMap<String, f64>,
    /// Attention, by head dim.
    pub attention: Vec<AttentionRates>,
}

/// Attention of a head dim, by live entries: 4 operations forward and 10 backward for each number of
/// a head's vector.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct AttentionRates {
    /// Numbers of a head's vector.
    pub head_dim: usize,
    /// Mean live keys of a query, ascending.
    pub keys: Vec<f64>,
    /// TFLOP/s of the forward pass for each of `keys`; those between are interpolated over the
    /// logarithm of the keys.
    pub forward: Vec<f64>,
    /// TFLOP/s of the backward pass.
    pub backward: Vec<f64>,
}

/// Ranks that share a host.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Host {
    /// Their number.
    pub ranks: usize,
    /// From each rank to the others of the host.
    pub link: Link,
}

/// What connects a rank with others.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Link {
    /// GB/s that a rank sends, and at once receives.
    pub gbps: f64,
    /// Microseconds until the first byte arrives.
    pub latency_us: f64,
}

/// Which links a transfer takes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Span {
    /// Those of a host.
    Host,
    /// Those between hosts; what is faster inside hosts is left free for others.
    Network,
}

impl Machine {
    /// The name of the machine that stands for one of which nothing is known.
    pub const USUAL: &str = "h200x8";

    /// The machines that come with the crate.
    pub fn names() -> [&'static str; 2] {
        KNOWN.map(|(name, _)| name)
    }

    /// The text of the machine that comes with the crate under `name`.
    pub fn text_of(name: &str) -> Option<&'static str> {
        KNOWN.iter().find(|(known, _)| *known == name).map(|(_, text)| *text)
    }

    /// The machine that comes with the crate and has GPUs which a driver calls `gpu`, such as `NVIDIA H200`; none of
    /// GPUs with other links, such as `NVIDIA H100 PCIe` and `NVIDIA GH200 480GB`.
    pub fn name_of_gpu(gpu: &str) -> Option<&'static str> {
        let gpu = gpu.to_lowercase();
        let has = |word: &str| gpu.split([' ', '-']).any(|of| of == word);
        if has("pcie") || has("nvl") {
            return None;
        }
        let is = |name: &&str| name.split_once('x').is_some_and(|(model, _)| has(model));
        Self::names().into_iter().find(is)
    }

    /// A machine as TOML, checked.
    ///
    /// # Errors
    /// What is not as [`Machine`] has it, and those of [`Self::checked`].
    pub fn from_toml(text: &str) -> Result<Self, ShardError> {
        let machine: Self = toml::from_str(text).map_err(|e| ShardError::new(e.message()))?;
        machine.checked()
    }

    /// Checks the numbers.
    ///
    /// # Errors
    /// When a rate, a size or a table is not positive, not finite, empty or not ascending, by name.
    pub fn checked(self) -> Result<Self, ShardError> {
        let Gpu { memory_gib, peak_tflops, products_tflops, ref gbps, .. } = self.gpu;
        let mut positive = vec![
            ("gpu.memory_gib".to_owned(), memory_gib),
            ("gpu.peak_tflops".to_owned(), peak_tflops),
            ("gpu.products_tflops".to_owned(), products_tflops),
            ("host.ranks".to_owned(), self.host.ranks as f64),
            ("host.link.gbps".to_owned(), self.host.link.gbps),
            ("network.gbps".to_owned(), self.network.gbps),
        ];
        positive.extend(gbps.iter().map(|(block, &rate)| (format!("gpu.gbps.{block}"), rate)));
        for rates in &self.gpu.attention {
            let AttentionRates { head_dim, keys, forward, backward } = rates;
            let at = format!("gpu.attention of head_dim {head_dim}");
            if keys.is_empty() || [forward.len(), backward.len()] != [keys.len(); 2] {
                return refused(format!("{at}: keys, forward and backward are equally many"));
            }
            if !keys.is_sorted_by(|a, b| a < b) {
                return refused(format!("{at}: keys are ascending"));
            }
            let all = [keys, forward, backward].into_iter().flatten();
            positive.extend(all.map(|&rate| (at.clone(), rate)));
        }
        if let Some((name, value)) = positive.iter().find(|(_, v)| !(v.is_finite() && *v > 0.0)) {
            return refused(format!("{name} is {value}; a positive number is expected"));
        }
        let times = [self.gpu.least_us, self.host.link.latency_us, self.network.latency_us];
        if let Some(time) = times.iter().find(|t| !(t.is_finite() && **t >= 0.0)) {
            return refused(format!("a time of {time} µs; 0 or more is expected"));
        }
        if !self.gpu.gbps.contains_key("default") {
            return refused("gpu.gbps has no `default`, for blocks that it does not name");
        }
        if self.gpu.attention.is_empty() {
            return refused("gpu.attention is empty; give the rates of a head dim");
        }
        Ok(self)
    }

    /// Seconds of a block that multiplies matrices.
    pub fn product_seconds(&self, flops: f64) -> f64 {
        self.at_least(flops / (self.gpu.products_tflops * 1e12))
    }

    /// Seconds of a block that moves bytes.
    pub fn moving_seconds(&self, block: &str, bytes: f64) -> f64 {
        let rates = &self.gpu.gbps;
        let rate = rates.get(block).or(rates.get("default")).copied().unwrap_or(f64::INFINITY);
        self.at_least(bytes / (rate * 1e9))
    }

    /// Seconds of attention over `entries` live entries of vectors of `head_dim` numbers, `keys` of
    /// them a query on average. Rates of the nearest head dim that is there.
    pub fn attention_seconds(
        &self,
        [entries, keys]: [f64; 2],
        head_dim: usize,
        backward: bool,
    ) -> f64 {
        let near = |rates: &&AttentionRates| rates.head_dim.abs_diff(head_dim);
        let Some(rates) = self.gpu.attention.iter().min_by_key(near) else { return 0.0 };
        let (each, table) = if backward { (10.0, &rates.backward) } else { (4.0, &rates.forward) };
        let rate = between(&rates.keys, table, keys);
        self.at_least(each * head_dim as f64 * entries / (rate * 1e12))
    }

    fn at_least(&self, seconds: f64) -> f64 {
        if seconds > 0.0 { seconds.max(self.gpu.least_us * 1e-6) } else { 0.0 }
    }

    /// What keys of other ranks go by.
    pub fn links(&self) -> Links {
        let mbps = |gbps: f64| (gbps * 1e3).round().max(1.0) as u64;
        Links {
            host_ranks: self.host.ranks,
            host: mbps(self.host.link.gbps),
            network: mbps(self.network.gbps),
            memory: mbps(
                self.gpu.gbps.get(JOIN).or(self.gpu.gbps.get("default")).copied().unwrap_or(1.0),
            ),
        }
    }

    fn host_of(&self, rank: usize) -> usize {
        rank / self.host.ranks
    }

    /// Seconds in which each of `members` gets what all hold together, `bytes`, or in which sums of
    /// so many bytes are cut over them: an all-gather or a reduce-scatter that fills the links of
    /// all members of a host.
    pub fn gather_seconds(&self, members: &[usize], bytes: f64) -> (f64, Span) {
        let ranks = members.len() as f64;
        let mut of_host = BTreeMap::<usize, usize>::new();
        members.iter().for_each(|&rank| *of_host.entry(self.host_of(rank)).or_default() += 1);
        let hosts = of_host.len() as f64;
        let fewest = of_host.values().min().copied().unwrap_or(1) as f64;
        if members.len() < 2 {
            return (0.0, Span::Host);
        }
        let steps = |n: f64| n.log2().ceil();
        let inside = bytes * (ranks - 1.0) / ranks / (self.host.link.gbps * 1e9);
        let mut latency = steps(ranks / hosts) * self.host.link.latency_us;
        let mut seconds = inside;
        if hosts > 1.0 {
            let outside = bytes * (1.0 - 1.0 / hosts) / (fewest * self.network.gbps * 1e9);
            seconds = inside.max(outside);
            latency += steps(hosts) * self.network.latency_us;
        }
        let span = if hosts > 1.0 { Span::Network } else { Span::Host };
        (seconds + latency * 1e-6, span)
    }

    /// Seconds in which `rank` sends or receives `parts`: peers and bytes.
    pub fn exchange_seconds(&self, rank: usize, parts: &[(usize, f64)]) -> (f64, Span) {
        let (mut inside, mut outside) = (0.0, 0.0);
        for &(peer, bytes) in parts {
            match self.host_of(peer) == self.host_of(rank) {
                true => inside += bytes,
                false => outside += bytes,
            }
        }
        let over = |bytes: f64, link: Link| match bytes > 0.0 {
            true => bytes / (link.gbps * 1e9) + link.latency_us * 1e-6,
            false => 0.0,
        };
        let span = if outside > 0.0 { Span::Network } else { Span::Host };
        (over(inside, self.host.link).max(over(outside, self.network)), span)
    }
}

/// The value of a table at `x`, straight over the logarithm, level outside.
fn between(xs: &[f64], ys: &[f64], x: f64) -> f64 {
    let Some(after) = xs.iter().position(|&known| known >= x) else {
        return ys.last().copied().unwrap_or(f64::INFINITY);
    };
    if after == 0 {
        return ys[0];
    }
    let [x0, x1] = [xs[after - 1], xs[after]].map(f64::ln);
    let share = (x.ln() - x0) / (x1 - x0);
    ys[after - 1] + share * (ys[after] - ys[after - 1])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_usual_machine_has_the_links_that_plans_go_by_and_gpus_name_theirs() {
        let of = |name: &str| Machine::from_toml(Machine::text_of(name).unwrap()).unwrap();
        let usual = Links { memory: Links::default().memory, ..of(Machine::USUAL).links() };
        assert_eq!(usual, Links::default());
        assert_eq!(Machine::names().map(|name| of(name).host.ranks), [8, 8]);
        for (gpu, name) in [
            ("NVIDIA H100 80GB HBM3", Some("h100x8")),
            ("NVIDIA H200", Some("h200x8")),
            ("NVIDIA GH200 480GB", None),
            ("NVIDIA H100 PCIe", None),
            ("NVIDIA H200 NVL", None),
            ("NVIDIA GeForce RTX 4090", None),
        ] {
            assert_eq!(Machine::name_of_gpu(gpu), name);
        }
    }

    #[test]
    fn tables_are_read_between_their_entries_and_kept_outside() {
        let (xs, ys) = ([1.0, 4.0, 16.0], [10.0, 20.0, 60.0]);
        for (x, y) in [(0.5, 10.0), (1.0, 10.0), (2.0, 15.0), (8.0, 40.0), (99.0, 60.0)] {
            assert!((between(&xs, &ys, x) - y).abs() < 1e-12, "{x}");
        }
    }
}
