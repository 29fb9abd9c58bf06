//! What ran, on what, and how it went.

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::fmt;

/// How one case went on one backend.
#[derive(Clone, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Outcome {
    /// Every result is within its tolerance.
    Passed,
    /// What is wrong, one line for each result.
    Failed(Vec<String>),
    /// Why the backend does not take it.
    Declined(String),
}

impl Outcome {
    /// Its place among counts of those that passed, failed and were declined.
    pub fn column(&self) -> usize {
        match self {
            Self::Passed => 0,
            Self::Failed(_) => 1,
            Self::Declined(_) => 2,
        }
    }
}

/// One case on one backend.
#[derive(Clone, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct Row {
    /// Name of the case.
    pub case: String,
    /// Seed of its random data.
    pub seed: u64,
    /// Name of the backend.
    pub backend: Cow<'static, str>,
    /// How it went.
    pub outcome: Outcome,
}

/// Every case on every backend.
#[derive(Clone, Debug, Default)]
pub struct Report {
    /// In the order of the cases.
    pub rows: Vec<Row>,
}

impl Report {
    /// The rows that failed.
    pub fn failures(&self) -> impl Iterator<Item = &Row> {
        self.rows.iter().filter(|r| matches!(r.outcome, Outcome::Failed(_)))
    }

    /// The rows whose backend declined.
    pub fn declined(&self) -> impl Iterator<Item = &Row> {
        self.rows.iter().filter(|r| matches!(r.outcome, Outcome::Declined(_)))
    }
}

impl fmt::Display for Report {
    /// A table of backends, then each failure and each refusal.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut counts: BTreeMap<&str, [usize; 3]> = BTreeMap::new();
        for row in &self.rows {
            counts.entry(&row.backend).or_default()[row.outcome.column()] += 1;
        }
        writeln!(f, "{:<20} {:>8} {:>8} {:>8}", "backend", "passed", "failed", "declined")?;
        for (backend, [passed, failed, declined]) in counts {
            writeln!(f, "{backend:<20} {passed:>8} {failed:>8} {declined:>8}")?;
        }
        for Row { case, seed, backend, outcome } in &self.rows {
            match outcome {
                Outcome::Passed => {}
                Outcome::Declined(reason) => writeln!(f, "{backend} declined `{case}`: {reason}")?,
                Outcome::Failed(lines) => {
                    writeln!(f, "{backend} failed `{case}` (seed {seed}):")?;
                    for line in lines {
                        writeln!(f, "    {line}")?;
                    }
                }
            }
        }
        Ok(())
    }
}
