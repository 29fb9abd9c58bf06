#!/usr/bin/env bash
# Kills and stops ranks of a run of three, at random moments, on one disk and on two, and holds what the run
# reaches in the end to what it reaches undisturbed. Takes about a second a kill; the seed is printed.
#
#     scripts/kills.sh [NUMBER] [SEED]
set -euo pipefail
cd "$(dirname "$0")/.."
export FOVEATE_KILLS=${1:-200} FOVEATE_SEED=${2:-$(date +%s)}
killed=(ranks_that_are_killed ranks_on_local_disks_that_are_killed)
cargo test --workspace --all-features --test ranks --test disks -- --nocapture "${killed[@]}"
