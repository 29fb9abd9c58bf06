#!/usr/bin/env bash
# Kills and stops ranks of a run of three, at random moments, and holds what the run reaches in the
# end to what it reaches undisturbed. Takes about a second a kill; the seed is printed.
#
#     scripts/kills.sh [NUMBER] [SEED]
set -euo pipefail
cd "$(dirname "$0")/.."
export FOVEATE_KILLS=${1:-200} FOVEATE_SEED=${2:-$(date +%s)}
cargo test --workspace --all-features --test ranks -- --nocapture ranks_that_are_killed
