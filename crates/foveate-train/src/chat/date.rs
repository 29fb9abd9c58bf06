//! The date as templates ask for it: Python's `strftime`, in UTC, without a locale.

/// A moment, in seconds since 1970.
#[derive(Clone, Copy)]
pub(super) struct Moment(pub u64);

const DAYS: [&str; 7] =
    ["Sunday", "Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday"];
const MONTHS: [&str; 12] = [
    "January",
    "February",
    "March",
    "April",
    "May",
    "June",
    "July",
    "August",
    "September",
    "October",
    "November",
    "December",
];

impl Moment {
    /// The moment as `format` says. `%-d` has no leading zero, as where Python runs on Linux.
    ///
    /// # Errors
    /// A directive that is not known.
    pub fn written(self, format: &str) -> Result<String, String> {
        let (day, second) = (self.0 / 86_400, self.0 % 86_400);
        let (year, month, of_month, of_year) = date(day);
        let (weekday, hour) = (day + 4, second / 3600);
        let (weekday, month_name) = (DAYS[weekday as usize % 7], MONTHS[month as usize - 1]);
        let mut text = String::new();
        let mut rest = format.chars();
        while let Some(c) = rest.next() {
            if c != '%' {
                text.push(c);
                continue;
            }
            let mut directive = rest.next();
            let is_plain = directive == Some('-');
            if is_plain {
                directive = rest.next();
            }
            let (number, width) = match directive {
                Some('Y') => (year, 4),
                Some('y') => (year % 100, 2),
                Some('m') => (month, 2),
                Some('d') => (of_month, 2),
                Some('j') => (of_year, 3),
                Some('H') => (hour, 2),
                Some('I') => ((hour + 11) % 12 + 1, 2),
                Some('M') => (second / 60 % 60, 2),
                Some('S') => (second % 60, 2),
                Some(name) => {
                    text.push_str(match name {
                        'B' => month_name,
                        'b' => &month_name[..3],
                        'A' => weekday,
                        'a' => &weekday[..3],
                        'p' => ["AM", "PM"][usize::from(hour >= 12)],
                        '%' => "%",
                        _ => return Err(format!("strftime_now knows no %{name}")),
                    });
                    continue;
                }
                None => return Err("strftime_now is given a format that ends with %".to_owned()),
            };
            let width = if is_plain { 0 } else { width };
            text.push_str(&format!("{number:0width$}"));
        }
        Ok(text)
    }
}

/// Year, month, day of the month and of the year of a day counted from the first of 1970, by the Gregorian calendar.
fn date(mut day: u64) -> (u64, u64, u64, u64) {
    let is_leap =
        |year: u64| year.is_multiple_of(4) && !year.is_multiple_of(100) || year.is_multiple_of(400);
    // 400 years have 146,097 days.
    let mut year = 1970 + day / 146_097 * 400;
    day %= 146_097;
    while day >= 365 + u64::from(is_leap(year)) {
        day -= 365 + u64::from(is_leap(year));
        year += 1;
    }
    let of_year = day + 1;
    let february = 28 + u64::from(is_leap(year));
    let lengths = [31, february, 31, 30, 31, 30, 31, 31, 30, 31, 30, 31];
    let mut month = 1;
    for length in lengths {
        if day < length {
            break;
        }
        day -= length;
        month += 1;
    }
    (year, month, day + 1, of_year)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Python's words for the same moments in UTC.
    #[test]
    fn moments_are_written_as_python_writes_them() {
        for (seconds, format, wanted) in [
            (0, "%d %B %Y", "01 January 1970"),
            (1_722_000_000, "%d %b %Y, %A %H:%M:%S", "26 Jul 2024, Friday 13:20:00"),
            (1_709_164_800, "%Y-%m-%d %j %a", "2024-02-29 060 Thu"),
            (951_782_400, "%-d.%-m.%y", "29.2.00"),
            (4_107_542_399, "%d %B %Y %I %p %%", "28 February 2100 11 PM %"),
            (1_767_225_599, "%Y-%m-%d %I:%M:%S %p", "2025-12-31 11:59:59 PM"),
            (43_200, "%I %p", "12 PM"),
            (13_000_000_000, "%F", "strftime_now knows no %F"),
        ] {
            let written = Moment(seconds).written(format).unwrap_or_else(|wrong| wrong);
            assert_eq!(written, wanted, "{seconds} {format}");
        }
    }
}
