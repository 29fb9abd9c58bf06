//! What is wrong with the results of a backend.

use foveate_reference::{NonFinite, Rule, Tolerance};
use foveate_tensor::{DType, Data, Float, Layout, Slice, TensorRef, indices};

/// A line for each result that is wrong.
pub(crate) struct Mismatches {
    rule: Rule,
    lines: Vec<String>,
}

impl Mismatches {
    /// None so far.
    pub fn new(rule: Rule) -> Self {
        Self { rule, lines: Vec::new() }
    }

    /// The lines.
    pub fn into_lines(self) -> Vec<String> {
        self.lines
    }

    /// Compares a result with the oracle's (`gold`), allowing the multiple of the plain
    /// implementation's error (`low`) that the rule gives.
    pub fn compare(
        &mut self,
        name: &str,
        dtype: DType,
        non_finite: NonFinite,
        [gold, low, ours]: [&[f64]; 3],
    ) {
        self.compare_with(name, dtype, non_finite, [gold, low, ours], std::iter::empty());
    }

    /// [`Self::compare`], allowing the mean error of each of `others` where that of `low` is too small.
    pub fn compare_with(
        &mut self,
        name: &str,
        dtype: DType,
        non_finite: NonFinite,
        [gold, low, ours]: [&[f64]; 3],
        mut others: impl Iterator<Item = Vec<f64>>,
    ) {
        let tolerance = Tolerance { dtype, rule: self.rule, non_finite };
        let mut found = tolerance.measure(gold, low, ours);
        while found.mean > found.mean_allowed
            && let Some(other) = others.next()
        {
            found = tolerance.or_mean(found, gold, &other);
        }
        if !found.passes() {
            self.lines.push(format!("{name}: {found}"));
        }
    }

    /// Compares everything outside `layouts` with the NaN it held before.
    pub fn outside(&mut self, name: &str, data: &Data, layouts: &[Layout]) {
        let mut inside = vec![false; data.len()];
        for layout in layouts {
            indices(layout.shape).for_each(|index| inside[layout.at(index)] = true);
        }
        let all = Slice::from(data);
        let written = (0..data.len()).find(|&i| !inside[i] && !all.get_f64(i).is_nan());
        if let Some(at) = written {
            self.lines.push(format!("{name}: element {at} lies outside the view and was written"));
        }
    }
}

/// Values rounded to f16.
pub(crate) fn rounded_to_f16(values: &[f64]) -> Vec<f64> {
    values.iter().map(|&x| <half::f16 as Float>::from_f64(x).to_f64()).collect()
}

/// The elements of a view, row-major.
pub(crate) fn row_major(view: &TensorRef<'_>) -> Vec<f64> {
    indices(view.shape()).map(|index| view.get_f64(index)).collect()
}
