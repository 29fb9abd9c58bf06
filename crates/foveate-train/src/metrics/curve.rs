//! The loss curve of a run, as SVG.

use std::io;
use std::path::Path;

use plotters::prelude::*;

use super::Record;

/// Draws training loss (faint, and smoothed over a fiftieth of the steps) and held-out loss
/// over the steps.
///
/// # Errors
/// When the picture cannot be written.
pub fn write_svg(path: &Path, title: &str, records: &[Record]) -> io::Result<()> {
    let train: Vec<(f64, f64)> = records
        .iter()
        .filter_map(|r| match r {
            Record::Step(m) => Some((m.step as f64, m.loss)),
            _ => None,
        })
        .collect();
    let held_out: Vec<(f64, f64)> = records
        .iter()
        .filter_map(|r| match r {
            Record::Eval(m) => Some((m.step as f64, m.held_out_loss)),
            _ => None,
        })
        .collect();
    let mut picture = String::new();
    draw(&mut picture, title, &train, &held_out).map_err(|e| io::Error::other(e.to_string()))?;
    let temporary = path.with_extension("tmp");
    crate::whole::write(&temporary, picture.as_bytes())?;
    std::fs::rename(&temporary, path)
}

type Drawn = Result<(), Box<dyn std::error::Error>>;

fn draw(into: &mut String, title: &str, train: &[(f64, f64)], held_out: &[(f64, f64)]) -> Drawn {
    const TRAIN: RGBColor = RGBColor(31, 78, 121);
    const HELD_OUT: RGBColor = RGBColor(200, 80, 20);
    let all = || train.iter().chain(held_out);
    let last = all().map(|p| p.0).fold(1.0, f64::max);
    let low = all().map(|p| p.1).fold(f64::INFINITY, f64::min);
    let high = all().map(|p| p.1).fold(f64::NEG_INFINITY, f64::max);
    let (low, high) = if low < high { (low, high) } else { (0.0, high.max(1.0)) };
    let margin = 0.05 * (high - low);

    let area = SVGBackend::with_string(into, (900, 520)).into_drawing_area();
    area.fill(&WHITE)?;
    let mut chart = ChartBuilder::on(&area)
        .caption(title, ("sans-serif", 20))
        .margin(16)
        .x_label_area_size(42)
        .y_label_area_size(58)
        .build_cartesian_2d(0.0..last, low - margin..high + margin)?;
    chart
        .configure_mesh()
        .x_desc("step")
        .y_desc("nats per token")
        .x_label_formatter(&|x| format!("{x:.0}"))
        .light_line_style(WHITE)
        .draw()?;
    chart.draw_series(LineSeries::new(train.iter().copied(), TRAIN.mix(0.25)))?;
    let smooth = smoothed(train);
    chart
        .draw_series(LineSeries::new(smooth, TRAIN.stroke_width(2)))?
        .label("training")
        .legend(|(x, y)| PathElement::new([(x, y), (x + 22, y)], TRAIN.stroke_width(2)));
    if !held_out.is_empty() {
        chart.draw_series(LineSeries::new(held_out.iter().copied(), HELD_OUT.stroke_width(2)))?;
        chart
            .draw_series(held_out.iter().map(|&p| Circle::new(p, 4, HELD_OUT.filled())))?
            .label("held out")
            .legend(|(x, y)| Circle::new((x + 11, y), 4, HELD_OUT.filled()));
    }
    chart.configure_series_labels().background_style(WHITE).border_style(BLACK.mix(0.3)).draw()?;
    area.present()?;
    Ok(())
}

fn smoothed(points: &[(f64, f64)]) -> Vec<(f64, f64)> {
    let window = (points.len() / 50).max(1);
    let mean = |i: usize| {
        let part = &points[i.saturating_sub(window)..(i + window + 1).min(points.len())];
        part.iter().map(|p| p.1).sum::<f64>() / part.len() as f64
    };
    points.iter().enumerate().map(|(i, p)| (p.0, mean(i))).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::metrics::EvalMetrics;

    #[test]
    fn a_curve_has_its_title_axes_and_points() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("loss.svg");
        let records: Vec<Record> = (1..=4)
            .map(|step| {
                let held_out_loss = 5.0 / step as f64;
                Record::Eval(EvalMetrics {
                    step,
                    unix_time: 0.0,
                    held_out_loss,
                    perplexity: 1.0,
                    labelled_tokens: 1,
                    seconds: 0.0,
                })
            })
            .collect();
        write_svg(&path, "loss of a test", &records).unwrap();
        let svg = std::fs::read_to_string(&path).unwrap();
        for part in ["loss of a test", "nats per token", "step", "held out"] {
            assert!(svg.contains(part), "{part}");
        }
        assert_eq!(svg.matches("<circle").count(), 4 + 1);
        write_svg(&path, "empty", &[]).unwrap();
    }
}
