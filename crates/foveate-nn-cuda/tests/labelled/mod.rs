//! Steps over batches of which few tokens have a label.

use std::{env, fs, path::Path};

use foveate_gpu::trace::{self, Noted};
use foveate_nn::{Batch, Carrier, IGNORE, ModelConfig, Recompute, Recording};

use super::graphs::{launched, recorded};
use super::order::flow::flow;
use super::order::trouble;
use super::{LEN, ROWS, Steps, inside, model, on_ranks, sizes};

/// Rows of the loss of each batch among these launches.
fn rows_of_losses(lines: &[String]) -> Vec<usize> {
    let rows =
        |line: &String| line.strip_prefix("fv_cross_entropy [")?.split(',').next()?.parse().ok();
    lines.iter().filter_map(rows).collect()
}

#[test]
fn the_head_multiplies_labelled_rows_alone_in_the_memory_of_steps_that_multiply_all() {
    let name = "labelled::the_head_multiplies_labelled_rows_alone_in_the_memory_of_steps_that_multiply_all";
    if !inside(name) {
        return;
    }
    for batches in [1, 2] {
        let [shared, apart] = [false, true].map(|apart| {
            trace::start();
            let mut steps = Steps::sharing(batches, apart);
            let mut notes = trace::stop();
            for (number, labelled) in [11, 4, 0, 9, 11, 1].into_iter().enumerate() {
                steps.labelled = labelled;
                let lines = launched(|| {
                    let [of_step, read] = steps.run(Recompute::None);
                    let is_wait =
                        |n: &&Noted| matches!(n, Noted::Waited { .. } | Noted::Allocated { .. });
                    let waits: Vec<&Noted> = of_step.iter().filter(is_wait).collect();
                    assert!(number == 0 || waits.is_empty(), "step {number}: {waits:?}");
                    notes.extend(of_step.into_iter().chain(read));
                });
                // A multiple of an eighth of the batch, and the loss of all at once.
                let eighth = (ROWS * LEN).div_ceil(8);
                let rows = (6 * labelled).max(1).next_multiple_of(eighth).min(ROWS * LEN);
                assert_eq!(rows_of_losses(&lines), vec![rows; batches], "{labelled} of 11");
                let taken = lines.iter().filter(|line| line.starts_with("fv_embedding [")).count();
                assert_eq!(taken, batches * if rows < ROWS * LEN { 3 } else { 1 });
            }
            notes
        });
        assert_eq!(trouble(&shared), [""; 0], "{batches}");
        assert_eq!(flow(&shared), flow(&apart), "{batches}");
    }
}

#[test]
fn an_evaluation_multiplies_labelled_rows_alone_and_reads_what_it_wrote() {
    if !inside("labelled::an_evaluation_multiplies_labelled_rows_alone_and_reads_what_it_wrote") {
        return;
    }
    trace::start();
    let model = model();
    let numbers: Vec<i32> = (0..(ROWS * LEN) as i32).map(|i| i % LEN as i32).collect();
    let labels: Vec<i32> = numbers.iter().map(|&i| if i % 4 == 2 { i } else { IGNORE }).collect();
    let batch = Batch {
        rows: ROWS,
        len: LEN,
        tokens: &numbers.iter().map(|&i| i as u32).collect::<Vec<_>>(),
        labels: &labels,
        documents: &vec![0; ROWS * LEN],
        positions: &numbers,
        live_pairs: &[],
        order: &[],
    };
    let lines = launched(|| assert_eq!(model.loss(&batch).unwrap().live_pairs, None));
    // Sixteen labelled tokens, in two eighths of a batch of 66.
    assert_eq!(rows_of_losses(&lines), [18]);
    let copies = lines.iter().filter(|line| line.starts_with("fv_copy_rows")).count();
    let taken = lines.iter().filter(|line| line.starts_with("fv_embedding [")).count();
    assert_eq!((taken, copies), (2, 1));
    let lines = launched(|| drop(model.token_losses(&batch, None).unwrap()));
    assert_eq!(rows_of_losses(&lines), [ROWS * LEN]);
    assert_eq!(trouble(&trace::stop()), [""; 0]);
}

/// Of two ranks with 10 and 9 words the first alone has room for a row of 40 among the logits of 4 tokens.
#[test]
fn ranks_of_uneven_vocabularies_evaluate_the_same_rows() {
    if !inside("labelled::ranks_of_uneven_vocabularies_evaluate_the_same_rows") {
        return;
    }
    let made = |rank: &_| {
        let (config, attention) = sizes();
        let config = ModelConfig { vocab_size: 19, ..config };
        assert_eq!(config.hidden_size, 40);
        let steps = Steps::of_part_of((config, attention), rank);
        let batch = Batch {
            rows: 1,
            len: 4,
            tokens: &[1, 2, 3, 4],
            labels: &[IGNORE, IGNORE, 5, IGNORE],
            documents: &[0; 4],
            positions: &[0, 1, 2, 3],
            live_pairs: &[],
            order: &[],
        };
        steps.model.loss(&batch).unwrap();
        steps
    };
    on_ranks(2, made, Carrier::Auto, Recompute::None, 0, |_| {});
    for rank in 0..2 {
        let log = Path::new(&env::var_os("HOME").unwrap()).join(format!("launches-rank-{rank}"));
        let of_losses = |line: &String| line.contains("fv_cross_entropy_part [4, 1, 1]");
        let lines: Vec<String> = fs::read_to_string(log).unwrap().lines().map(Into::into).collect();
        assert_eq!(lines.iter().filter(|line| of_losses(line)).count(), 1, "rank {rank}");
    }
}

#[test]
fn graphs_are_of_as_many_labelled_rows_as_a_batch_has() {
    let name = "labelled::graphs_are_of_as_many_labelled_rows_as_a_batch_has";
    if !inside(name) {
        return;
    }
    trace::start();
    let mut steps = recorded(Steps::new());
    let (mut notes, mut replays) = (trace::stop(), [0; 3]);
    for number in 0..40 {
        // Two shares fill the same eighths, and one does not.
        steps.labelled = [8, 9, 4][number % 3];
        let lines = launched(|| notes.extend(steps.run(Recompute::None).into_iter().flatten()));
        replays[number % 3] += usize::from(lines.len() == 2 + 3);
        if lines.len() > 2 + 3 {
            let rows = rows_of_losses(&lines);
            assert!(rows.iter().all(|&rows| rows == [54, 54, 27][number % 3]), "{rows:?}");
        }
    }
    assert_eq!(steps.model.recording(), Recording::On);
    assert_eq!(trouble(&notes), [""; 0]);
    assert!(replays.iter().all(|&replays| replays > 2), "{replays:?}");
}
