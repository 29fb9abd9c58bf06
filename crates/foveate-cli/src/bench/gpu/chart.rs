//! Rates as a bar chart in SVG: a group of bars for each case, a bar for each engine.

use std::fmt::Write;

const LABELS: f64 = 330.0;
const BARS: f64 = 520.0;
const BAR: f64 = 11.0;
const GAP: f64 = 9.0;
const TOP: f64 = 40.0;
/// Told apart by people who do not see all colours, too.
const COLOURS: [&str; 6] = ["#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9"];

/// The chart of `cases`: a name, and each engine's TFLOP/s.
pub fn svg(cases: &[(String, Vec<(String, f64)>)]) -> String {
    let mut engines: Vec<&str> = Vec::new();
    for (engine, _) in cases.iter().flat_map(|(_, rates)| rates) {
        if !engines.contains(&engine.as_str()) {
            engines.push(engine);
        }
    }
    let colour = |engine: &str| {
        let at = engines.iter().position(|e| *e == engine).unwrap_or(0);
        COLOURS[at % COLOURS.len()]
    };
    let most = cases.iter().flat_map(|(_, r)| r).map(|(_, rate)| *rate).fold(1.0, f64::max);
    let bars: usize = cases.iter().map(|(_, rates)| rates.len()).sum();
    let height = TOP + bars as f64 * BAR + cases.len() as f64 * GAP + 10.0;
    let width = LABELS + BARS + 80.0;
    let mut out = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"{width}\" height=\"{height}\" \
         font-family=\"sans-serif\" font-size=\"10\">\n\
         <rect width=\"100%\" height=\"100%\" fill=\"white\"/>\n\
         <text x=\"8\" y=\"16\" font-size=\"12\">TFLOP/s by live area</text>\n"
    );
    let mut x = LABELS;
    for engine in &engines {
        // Writing to a string does not fail.
        let _ = writeln!(
            out,
            "<rect x=\"{x}\" y=\"8\" width=\"10\" height=\"10\" fill=\"{}\"/>\
             <text x=\"{}\" y=\"17\">{engine}</text>",
            colour(engine),
            x + 14.0
        );
        x += 30.0 + 7.0 * engine.len() as f64;
    }
    let mut y = TOP;
    for (case, rates) in cases {
        let _ = writeln!(out, "<text x=\"8\" y=\"{}\">{case}</text>", y + BAR - 2.0);
        for (engine, rate) in rates {
            let long = BARS * rate / most;
            let _ = writeln!(
                out,
                "<rect x=\"{LABELS}\" y=\"{y}\" width=\"{long:.1}\" height=\"{}\" fill=\"{}\"/>\
                 <text x=\"{:.1}\" y=\"{}\">{rate:.0}</text>",
                BAR - 2.0,
                colour(engine),
                LABELS + long + 4.0,
                y + BAR - 3.0
            );
            y += BAR;
        }
        y += GAP;
    }
    out + "</svg>\n"
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_longest_bar_fills_the_chart_and_every_engine_is_named_once() {
        let rates = |a: f64, b: f64| vec![("foveate".to_owned(), a), ("flex".to_owned(), b)];
        let drawn = svg(&[("one".into(), rates(300.0, 150.0)), ("two".into(), rates(100.0, 50.0))]);
        assert!(drawn.contains("width=\"520.0\"") && drawn.contains("width=\"260.0\""));
        assert_eq!(drawn.matches(">flex<").count(), 1);
        assert_eq!(drawn.matches("<rect x=\"330\"").count(), 5, "four bars and a legend");
    }
}
