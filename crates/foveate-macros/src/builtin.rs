//! The functions and methods that mods know, by name and number of operands.
//!
//! `f(x, y)` and `x.f(y)` are the same operation, so one table serves both.

/// Names as written, number of operands (receiver included), function of `trace`.
const TABLE: &[(&str, usize, &str)] = &[
    ("abs", 1, "abs"),
    ("ceil", 1, "ceil"),
    ("clamp", 3, "clamp"),
    ("cos", 1, "cos"),
    ("detach", 1, "detach"),
    ("eq", 2, "eq"),
    ("erf", 1, "erf"),
    ("exp", 1, "exp"),
    ("exp2", 1, "exp2"),
    ("floor", 1, "floor"),
    ("ge", 2, "ge"),
    ("gt", 2, "gt"),
    ("le", 2, "le"),
    ("ln", 1, "log"),
    ("log", 1, "log"),
    ("log2", 1, "log2"),
    ("lt", 2, "lt"),
    ("max", 2, "max"),
    ("min", 2, "min"),
    ("mix", 2, "mix"),
    ("ne", 2, "ne"),
    ("pow", 2, "pow"),
    ("powf", 2, "pow"),
    ("powi", 2, "powi"),
    ("recip", 1, "recip"),
    ("rem_euclid", 2, "rem"),
    ("rsqrt", 1, "rsqrt"),
    ("select", 3, "select"),
    ("sigmoid", 1, "sigmoid"),
    ("sin", 1, "sin"),
    ("sqrt", 1, "sqrt"),
    ("tanh", 1, "tanh"),
    ("to_f32", 1, "to_f32"),
    ("to_i32", 1, "to_i32"),
    ("unit", 1, "unit"),
];

/// The function of `trace` for `name` with `operands`; `Err` says how many it takes.
pub fn find(name: &str, operands: usize) -> Option<Result<&'static str, usize>> {
    let (_, takes, function) = TABLE.iter().find(|(n, ..)| *n == name)?;
    Some(if *takes == operands { Ok(function) } else { Err(*takes) })
}

/// Every name, for messages.
pub fn names() -> String {
    TABLE.iter().map(|(n, ..)| *n).collect::<Vec<_>>().join(", ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_table_is_sorted_and_without_duplicates() {
        assert!(TABLE.windows(2).all(|w| w[0].0 < w[1].0));
    }

    #[test]
    fn a_wrong_number_of_operands_says_the_right_one() {
        assert_eq!(find("tanh", 2), Some(Err(1)));
        assert_eq!(find("powf", 2), Some(Ok("pow")));
        assert_eq!(find("tan", 1), None);
    }
}
