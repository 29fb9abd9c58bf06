//! Numbers of things in sentences.

use std::fmt;

/// `1 chunk`, `2 chunks`: a number of things, of which the name of one is given.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Count<'a>(pub usize, pub &'a str);

impl fmt::Display for Count<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self(n, one) = self;
        match (n, one.strip_suffix('y')) {
            (1, _) => write!(f, "1 {one}"),
            (_, Some(stem)) if !one.ends_with("ey") => write!(f, "{n} {stem}ies"),
            _ => write!(f, "{n} {one}s"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::Count;

    #[test]
    fn one_thing_is_not_several() {
        let said = [(0, "chunk"), (1, "query"), (2, "query"), (3, "key")];
        let said = said.map(|(n, one)| Count(n, one).to_string());
        assert_eq!(said, ["0 chunks", "1 query", "2 queries", "3 keys"]);
    }
}
