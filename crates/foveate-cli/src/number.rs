//! Whole numbers of the command line.

use std::num::{IntErrorKind, ParseIntError};
use std::str::FromStr;

/// Reads a whole number of the type that an option has.
///
/// # Errors
/// What was expected instead; whoever calls names the option and the text.
pub fn number<T: FromStr<Err = ParseIntError>>(text: &str) -> Result<T, String> {
    text.trim().parse().map_err(|e: ParseIntError| match e.kind() {
        IntErrorKind::PosOverflow | IntErrorKind::NegOverflow => "it is out of range".to_owned(),
        IntErrorKind::Zero => "at least 1 is expected".to_owned(),
        _ if text.trim().parse::<i64>().is_ok_and(|n| n < 0) => "at least 0 is expected".to_owned(),
        _ => "a number is expected, such as 16".to_owned(),
    })
}

/// Reads a time in seconds, as long as an hour at most.
///
/// # Errors
/// What was expected instead.
pub fn seconds(text: &str) -> Result<f64, String> {
    match text.trim().parse() {
        Ok(seconds) if (0.0..=3600.0).contains(&seconds) => Ok(seconds),
        _ => Err("seconds from 0 to 3600 are expected, such as 0.5".to_owned()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_no_number_is_answered_with_one() {
        assert_eq!((number(" 7 "), number("-7")), (Ok(7usize), Ok(-7i32)));
        for wrong in ["1/0", "x", "", "1.5"] {
            let said = number::<usize>(wrong).unwrap_err();
            assert_eq!(said, "a number is expected, such as 16", "{wrong}");
        }
        assert_eq!(number::<usize>("-3").unwrap_err(), "at least 0 is expected");
        assert_eq!(number::<usize>(&"9".repeat(30)).unwrap_err(), "it is out of range");
        assert_eq!(number::<std::num::NonZeroUsize>("0").unwrap_err(), "at least 1 is expected");
        assert_eq!(seconds("0.5"), Ok(0.5));
        for wrong in ["nan", "inf", "-1", "1e9", "", "x"] {
            assert!(seconds(wrong).unwrap_err().starts_with("seconds from 0"), "{wrong}");
        }
    }
}
