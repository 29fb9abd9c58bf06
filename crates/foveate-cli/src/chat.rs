//! `foveate render-chat`, which the other commands start: the process in which chat templates render.

use std::sync::Arc;

use signal_hook::consts::{SIGINT, SIGTERM};
use signal_hook::flag;

use crate::failure::Failure;

/// What this program is called with to render chat templates.
pub const RENDERER: &[&str] = &["render-chat"];

/// Render a chat template for the process that started this one
#[derive(Debug, clap::Args)]
#[command(hide = true)]
pub struct Args {}

/// Renders until its input ends.
pub fn run(_: &Args) -> Result<(), Failure> {
    // A terminal and a scheduler signal all processes of a job: whoever started this one decides.
    for signal in [SIGINT, SIGTERM] {
        flag::register(signal, Arc::default()).map_err(failed)?;
    }
    #[cfg(unix)]
    foveate_train::chat::serve().map_err(failed)?;
    Ok(())
}

fn failed(error: std::io::Error) -> Failure {
    Failure::new(format!("chat templates cannot be rendered: {error}"))
}
