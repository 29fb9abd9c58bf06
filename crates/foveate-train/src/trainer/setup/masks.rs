//! What is told of a run's masks before its first step: those from which nothing, or too much, is learned.

use foveate::ScalarValue;
use foveate::mods::Point;
use foveate_nn::{AttentionConfig, AttentionProgram, ModelConfig, ProgramConfig};

/// The masks that let no query of a row of `len` tokens see any key.
pub(super) fn blind_masks(
    attention: &AttentionConfig,
    model: &ModelConfig,
    len: usize,
) -> Vec<String> {
    let blind = |program: &ProgramConfig| {
        let parsed = AttentionProgram::parse(program, model.num_attention_heads);
        parsed.is_ok_and(|parsed| parsed.sees_nothing(model, len))
    };
    let programs = attention.programs().into_iter().map(|(_, program)| program);
    programs.filter(|program| blind(program)).map(|program| program.mask.clone()).collect()
}

/// The masks that let most tokens of a document of `len` see the next one, which they are to predict.
pub(super) fn telling_masks(
    attention: &AttentionConfig,
    model: &ModelConfig,
    len: usize,
) -> Vec<String> {
    const ASKED: usize = 1000;
    let tells = |program: &ProgramConfig| {
        let parsed = AttentionProgram::parse(program, model.num_attention_heads);
        let Ok(program) = parsed.and_then(|parsed| parsed.over([1, len], &vec![0; len])) else {
            return false;
        };
        let sees = |&q: &usize| match &program.mask {
            None => true,
            Some(mask) => {
                let [q, kv, len] = [q, q + 1, len].map(|n| n as i32);
                let point = Point { q, kv, q_len: len, kv_len: len, ..Point::default() };
                mask.program().eval(&point).is_ok_and(|seen| seen == [ScalarValue::Bool(true)])
            }
        };
        let asked = || (0..len.saturating_sub(1)).step_by(len.div_ceil(ASKED));
        2 * asked().filter(sees).count() > asked().count()
    };
    let programs = attention.programs().into_iter().map(|(_, program)| program);
    programs.filter(|program| tells(program)).map(|program| program.mask.clone()).collect()
}
