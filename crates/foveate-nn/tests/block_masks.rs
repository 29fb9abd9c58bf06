//! How many block masks a batch builds, counted; the counter is the process's, so that this program has
//! one test.

use foveate_mask::built;
use foveate_nn::{Batch, Gradients, Model, ModelConfig, ProgramConfig, Recompute};

#[test]
fn a_batch_builds_the_block_masks_of_its_attention_and_none_for_its_metrics() {
    let (rows, len) = (3, 96);
    let config = ModelConfig {
        vocab_size: 16,
        hidden_size: 16,
        intermediate_size: 32,
        num_hidden_layers: 3,
        num_attention_heads: 2,
        num_key_value_heads: Some(1),
        head_dim: Some(8),
        rms_norm_eps: 1e-5,
        rope_theta: 10_000.0,
        rope_scaling: None,
        rope_pairing: Default::default(),
        max_position_embeddings: len,
        architecture: Default::default(),
        tie_word_embeddings: true,
    };
    let attention = ProgramConfig { mask: "causal & document".into(), ..Default::default() }.into();
    let model = Model::new(config, &attention, 1).unwrap();
    let n = rows * len;
    let tokens: Vec<u32> = (0..n).map(|i| (i * 7 % 16) as u32).collect();
    let labels: Vec<i32> = (0..n).map(|i| (i * 5 % 16) as i32).collect();
    let positions: Vec<i32> = (0..n).map(|i| (i % len) as i32).collect();
    let mut gradients = Gradients::zeros(&model);
    for cut in [40, 70] {
        let documents: Vec<i32> = (0..n).map(|i| i32::from(i % len >= cut)).collect();
        let batch = Batch {
            rows,
            len,
            tokens: &tokens,
            labels: &labels,
            documents: &documents,
            positions: &positions,
            live_pairs: &[],
            order: &[],
        };
        let before = built();
        model.loss(&batch).unwrap();
        // One mask for each row's documents, for the tiles of the forward pass.
        assert_eq!(built() - before, rows);
        let before = built();
        let found = model.forward_backward(&batch, &mut gradients, Recompute::None).unwrap();
        let masks = built() - before;
        // The backward pass may have tiles of another size. All layers share a batch's masks, and so
        // does the count of live pairs.
        assert!(masks == rows || masks == 2 * rows, "{masks} masks");
        let live: usize = [cut, len - cut].into_iter().map(|n| rows * n * (n + 1) / 2).sum();
        assert_eq!(found.live_pairs, Some(live as f64));
    }
}
