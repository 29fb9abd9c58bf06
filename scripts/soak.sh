#!/usr/bin/env bash
# Looks for faults at random for ten minutes: random programs and shapes against the oracle, training
# runs killed at random moments, damaged files and what is no file in their place (devices, pipes,
# links), wrong command lines, some with a full disk for their output.
#
#     scripts/soak.sh [--seconds N] [--seed N] [--only programs|kills|damage|commands]
#
# A fault is one line, with the seed that replays it; the exit code is then 1. FOVEATE_PROFILE names
# the profile that is built and run: dev where it is not set, or release.
set -euo pipefail
cd "$(dirname "$0")/.."

profile=${FOVEATE_PROFILE:-dev}
folder=$profile
[ "$profile" = dev ] && folder=debug
cargo build --quiet --profile "$profile" -p foveate-conformance -p foveate-cli --bins
programs=${CARGO_TARGET_DIR:-target}/$folder
exec "$programs/foveate-conformance" soak --foveate "$programs/foveate" "$@"
