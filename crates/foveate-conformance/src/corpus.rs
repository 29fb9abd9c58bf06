//! The files of the corpus: tables of cases, expanded.
//!
//! A file is a list of `[[case]]` tables. A case with `grid` stands for the product of the lists
//! in it, one with `variants` for each table of the list; both override keys of the case, and the
//! values chosen are appended to its name.

use std::collections::BTreeMap;
use std::path::Path;

use serde::Deserialize;
use toml::{Table, Value};

use crate::case::Case;
use crate::error::CaseError;

/// The cases of every `.toml` file in `folder`, in the order of file names.
///
/// # Errors
/// When a file cannot be read, a key is unknown or ill-typed, or two cases have one name or say
/// the same.
pub fn load(folder: &Path) -> Result<Vec<Case>, CaseError> {
    let at = folder.display().to_string();
    let entries = std::fs::read_dir(folder).map_err(|e| CaseError::new(&at, e))?;
    let mut files: Vec<_> = entries.filter_map(|e| e.ok().map(|e| e.path())).collect();
    files.retain(|f| f.extension().is_some_and(|e| e == "toml"));
    files.sort();
    let mut seen: BTreeMap<String, String> = BTreeMap::new();
    let mut cases = Vec::new();
    for file in files {
        let at = file.display().to_string();
        let text = std::fs::read_to_string(&file).map_err(|e| CaseError::new(&at, e))?;
        for (case, content) in expanded(&at, &text)? {
            if let Some(other) = seen.insert(content, case.name.clone()) {
                let message = format!("`{}` says the same as `{other}`", case.name);
                return Err(CaseError::new(at, message));
            }
            cases.push(case);
        }
    }
    let mut names: Vec<&str> = cases.iter().map(|c| c.name.as_str()).collect();
    names.sort_unstable();
    match names.windows(2).find(|w| w[0] == w[1]) {
        None => Ok(cases),
        Some(w) => Err(CaseError::new(at, format!("two cases are called `{}`", w[0]))),
    }
}

/// The cases of one file's text.
///
/// # Errors
/// When the text is not TOML, or a key is unknown, missing or ill-typed.
pub fn parse(at: &str, text: &str) -> Result<Vec<Case>, CaseError> {
    Ok(expanded(at, text)?.into_iter().map(|(case, _)| case).collect())
}

/// Each case with its content but for name and reason, to tell cases apart by.
fn expanded(at: &str, text: &str) -> Result<Vec<(Case, String)>, CaseError> {
    #[derive(Deserialize)]
    #[serde(deny_unknown_fields)]
    struct File {
        case: Vec<Table>,
    }
    let file: File = toml::from_str(text).map_err(|e| CaseError::new(at, e))?;
    let mut cases = Vec::new();
    for mut table in file.case {
        let name = table.get("name").and_then(Value::as_str).unwrap_or("a case without name");
        let here = format!("{at}, `{name}`");
        let fail = |e: &dyn std::fmt::Display| CaseError::new(&here, e);
        let grid: Table = take(&mut table, "grid").map_err(|e| fail(&e))?.unwrap_or_default();
        let variants: Option<Vec<Table>> = take(&mut table, "variants").map_err(|e| fail(&e))?;
        let mut tables: Vec<Table> = match variants {
            None => vec![table],
            Some(all) => all.into_iter().map(|v| overridden(&table, v)).collect(),
        };
        for (key, values) in grid {
            let Value::Array(values) = values else {
                return Err(fail(&format!("grid key `{key}` is not a list")));
            };
            let with = |t: &Table, v: &Value| {
                let mut over = Table::new();
                over.insert("name".into(), format!("{key} {}", plain(v)).into());
                over.insert(key.clone(), v.clone());
                overridden(t, over)
            };
            tables = tables.iter().flat_map(|t| values.iter().map(move |v| with(t, v))).collect();
        }
        for table in tables {
            let mut content = table.clone();
            content.remove("name");
            content.remove("why");
            let case = Case::deserialize(Value::Table(table)).map_err(|e| fail(&e))?;
            cases.push((case, content.to_string()));
        }
    }
    Ok(cases)
}

fn take<T: for<'a> Deserialize<'a>>(
    table: &mut Table,
    key: &str,
) -> Result<Option<T>, toml::de::Error> {
    table.remove(key).map(T::deserialize).transpose()
}

/// `table` with the keys of `over`; its name is appended.
fn overridden(table: &Table, over: Table) -> Table {
    let mut table = table.clone();
    for (key, value) in over {
        let value = match (key.as_str(), table.get("name").and_then(Value::as_str)) {
            ("name", Some(name)) => format!("{name}: {}", plain(&value)).into(),
            _ => value,
        };
        table.insert(key, value);
    }
    table
}

fn plain(value: &Value) -> String {
    match value {
        Value::String(s) => s.clone(),
        Value::Array(items) => items.iter().map(plain).collect::<Vec<_>>().join("/"),
        other => other.to_string(),
    }
}
