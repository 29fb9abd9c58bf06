//! The mean number of live keys a query: a window, documents and a causal mask differ in it. The
//! fewer they are, the more weigh prologue, epilogue and what a tile covers beyond the mask.
//!
//! A mask's share of pairs is sampled on the host, by bounds: no list of tiles is made, and nothing
//! waits for a device. What a mask reads in device memory is not known: it is sampled as if all
//! elements were the same, so that documents are one, lengths are whole, and a window is a window.
//! The caller who knows more states the length.

use foveate_mods::{
    AnyBuffer, Bounds, Cover, Head, Machine, MaskBits, MaskMod, Program, ScalarValue, TileProgram,
    Type,
};
use foveate_problem::Spec;

use super::class::Sizes;
use crate::compile::config::Kernel;

impl Sizes {
    /// The same under the mask of `spec`, whose queries have `stated` live keys on average. Where
    /// nothing is stated, the mask is sampled.
    pub fn under(self, spec: &Spec, stated: Option<usize>) -> Self {
        if let Some(keys) = stated {
            return Self { mean_kv_len: keys.min(self.keys), ..self };
        }
        let share = spec.mask.as_ref().map_or(1.0, |mask| live_share(mask, &self));
        Self { mean_kv_len: (share * self.keys as f64).round() as usize, ..self }
    }

    /// Live rows of the axis of the main loop for each row that a CTA of `kernel` owns, on average:
    /// live keys of a query, or in the backward live queries of a key, over all heads of its
    /// group.
    pub fn mean_loop_len(&self, kernel: Kernel) -> f64 {
        if !kernel.owns_keys() {
            return self.mean_kv_len as f64;
        }
        let heads = self.heads_q / self.heads_kv.max(1);
        self.mean_kv_len as f64 * (self.queries * heads) as f64 / self.keys.max(1) as f64
    }
}

/// Queries whose keys are counted.
const SAMPLES: usize = 64;
/// Keys that are evaluated together where bounds decide nothing.
const TOGETHER: usize = 64;
/// Times that this is done for one query, at most; what is left undecided then is taken to be like
/// its middle.
const MOST_STRETCHES: usize = 4096;

/// What all elements in device memory are taken for: of these, that which lets most pairs through.
const ELEMENTS: [i32; 3] = [0, 1, i32::MAX];

/// The share of pairs that `mask` lets through.
fn live_share(mask: &MaskMod, sizes: &Sizes) -> f64 {
    let program = mask.program();
    if !program.graph().buffers().iter().any(AnyBuffer::is_on_device) {
        return sampled_share(program, sizes);
    }
    let constant = |buffer: &AnyBuffer, x: i32| match buffer.ty() {
        Type::Bool => ScalarValue::Bool(x != 0),
        Type::I32 => ScalarValue::I32(x),
        Type::F32 => ScalarValue::F32(x as f32),
    };
    let shares = ELEMENTS.map(|x| {
        let known = |b: &AnyBuffer| b.is_on_device().then(|| constant(b, x));
        sampled_share(&program.with_constants(known), sizes)
    });
    shares.into_iter().fold(0.0, f64::max)
}

/// The share of pairs that a mask lets through, from a sample of queries, batch entries and heads:
/// some hundred evaluations of bounds for a mask that they decide.
fn sampled_share(mask: &Program, sizes: &Sizes) -> f64 {
    let Sizes { batch, heads_q, heads_kv, .. } = *sizes;
    // Sizes are rounded up, past what an index can be.
    let [queries, keys] = [sizes.queries, sizes.keys].map(|len| len.min(i32::MAX as usize));
    if batch == 0 || heads_q == 0 || queries == 0 || keys == 0 {
        return 1.0;
    }
    let samples = SAMPLES.min(queries);
    let mut counter = Counter {
        bounds: Bounds::new(mask),
        machine: TileProgram::compile(mask).machine(1, TOGETHER),
        bits: MaskBits::default(),
        left: 0,
    };
    let live: u64 = (0..samples)
        .map(|i| {
            let q = (2 * i + 1) * queries / (2 * samples);
            let h = i % heads_q;
            let head = Head {
                b: (i % batch) as i32,
                h: h as i32,
                h_kv: (h * heads_kv / heads_q) as i32,
                q_len: queries as i32,
                kv_len: keys as i32,
            };
            counter.machine.set_head(head);
            counter.left = MOST_STRETCHES;
            counter.live(&head, q as i32, 0..keys as i32)
        })
        .sum();
    live as f64 / (samples * keys) as f64
}

struct Counter {
    bounds: Bounds,
    machine: Machine,
    bits: MaskBits,
    /// Stretches of this query that may still be evaluated.
    left: usize,
}

impl Counter {
    /// Keys of `kv` that query `q` sees.
    fn live(&mut self, head: &Head, q: i32, kv: std::ops::Range<i32>) -> u64 {
        match self.bounds.cover(head, q..q + 1, kv.clone()) {
            Cover::Empty => 0,
            Cover::Full => kv.len() as u64,
            Cover::Undecided if kv.len() <= TOGETHER => self.evaluated(q, kv),
            Cover::Undecided if self.left == 0 => {
                let first = kv.start + (kv.len() / 2) as i32 - (TOGETHER / 2) as i32;
                let live = self.evaluated(q, first..first + TOGETHER as i32);
                live * kv.len() as u64 / TOGETHER as u64
            }
            Cover::Undecided => {
                let middle = kv.start + (kv.len() / 2) as i32;
                self.live(head, q, kv.start..middle) + self.live(head, q, middle..kv.end)
            }
        }
    }

    /// The same of a stretch of keys, one by one.
    fn evaluated(&mut self, q: i32, kv: std::ops::Range<i32>) -> u64 {
        self.left = self.left.saturating_sub(1);
        self.machine.set_tile(q..q + 1, kv);
        self.machine.mask_bits(None, &mut self.bits);
        self.bits.count()
    }
}

#[cfg(test)]
mod tests {
    use foveate_mods::{Buffer, expr, masks};

    use super::*;

    const SIZES: Sizes =
        Sizes { batch: 2, heads_q: 16, heads_kv: 4, queries: 8192, keys: 8192, mean_kv_len: 8192 };

    #[test]
    fn the_share_of_a_mask_is_close_to_what_it_lets_through() {
        let ids = (0..8192).map(|i| i / 512).collect();
        let documents = masks::document(&Buffer::vector("doc", ids)).unwrap() & masks::causal();
        let window = masks::sliding_window(1024).unwrap();
        for (mask, share) in [(masks::causal(), 0.5), (window, 0.117), (documents, 0.0313)] {
            let found = live_share(&mask, &SIZES);
            assert!((found / share - 1.0).abs() < 0.08, "{found} for {share}");
        }
        // Sizes are rounded up: a mask is asked for positions after the last, too.
        let ids = (0..8000).map(|i| i / 512).collect();
        let documents = masks::document(&Buffer::vector("doc", ids)).unwrap() & masks::causal();
        let found = live_share(&documents, &SIZES);
        assert!((found / 0.0313 - 1.0).abs() < 0.08, "{found}");
        assert_eq!(live_share(&masks::causal(), &Sizes { queries: 0, ..SIZES }), 1.0);
        let few = live_share(&masks::causal(), &Sizes { queries: 3, keys: 3, ..SIZES });
        assert_eq!(few, 6.0 / 9.0);
    }

    #[test]
    fn what_lies_in_device_memory_hides_no_window_and_makes_no_mask_empty() {
        let ids = Buffer::<i32>::on_device("doc", &[8192]).unwrap();
        let lengths = Buffer::<i32>::on_device("lengths", &[2]).unwrap();
        let seen = Buffer::<bool>::on_device("seen", &[2, 8192]).unwrap();
        let documents = masks::document(&ids).unwrap();
        let window = masks::sliding_window(1024).unwrap();
        let not_padding = MaskMod::new(seen.at([expr::b(), expr::kv()]).dynamic()).unwrap();
        let short = MaskMod::new(expr::kv().lt(lengths.at([expr::b()])).dynamic()).unwrap();
        for (mask, share) in [
            (documents.clone(), 1.0),
            (documents.clone() & masks::causal(), 0.5),
            (documents & window.clone(), 0.117),
            (not_padding & window, 0.117),
            (short & masks::causal(), 0.5),
        ] {
            let found = live_share(&mask, &SIZES);
            assert!((found / share - 1.0).abs() < 0.08, "{found} for {share}");
        }
    }

    #[test]
    fn a_long_mask_that_bounds_do_not_decide_is_sampled() {
        let even = MaskMod::new(((expr::q() + expr::kv()) % 2).eq(0).dynamic()).unwrap();
        let len = i32::MAX as usize;
        let sizes = Sizes { queries: len, keys: len, mean_kv_len: len, ..SIZES };
        let began = std::time::Instant::now();
        let found = live_share(&even, &sizes);
        assert!((found / 0.5 - 1.0).abs() < 0.01, "{found}");
        // Minutes, where every key is asked for.
        assert!(began.elapsed().as_secs() < 30, "{:?}", began.elapsed());
    }

    #[test]
    fn a_key_is_seen_by_as_many_queries_as_its_share_of_all_heads_of_its_group() {
        let spec = |mask| Spec { mask, score: None, scale: None, dropout: None };
        let causal = Sizes { queries: 4096, ..SIZES }.under(&spec(Some(masks::causal())), None);
        assert!((causal.mean_loop_len(Kernel::Forward) / 2048.0 - 1.0).abs() < 0.02, "{causal:?}");
        assert!((causal.mean_loop_len(Kernel::Backward) / 4096.0 - 1.0).abs() < 0.02, "{causal:?}");
        let full = SIZES.under(&spec(None), None);
        assert_eq!(
            (full.mean_loop_len(Kernel::Forward), full.mean_loop_len(Kernel::Backward)),
            (8192.0, 32768.0)
        );
        // As long as a sequence can be.
        let len = 1 << 31;
        let longest = Sizes { queries: len, keys: len, mean_kv_len: len, ..SIZES };
        assert_eq!(longest.mean_loop_len(Kernel::Backward), 4.0 * len as f64);
    }
}
