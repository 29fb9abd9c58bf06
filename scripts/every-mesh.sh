#!/usr/bin/env bash
# Trains on every product of the four axes of a mesh that is 1, 2, 3, 4, 8 or 16 ranks, each by threads,
# by threads again and over TCP, and holds losses, moments and weights after five steps to those of one
# rank, and every repeat to the same bits; and changes one token on each of them, with every strategy: exactly
# the outputs that its mask allows change. Then it kills and stops ranks 200 times (scripts/kills.sh). This is the
# whole of which `.ci/run` makes a part; it takes about twenty minutes of processor time, and a second a kill.
#
#     scripts/every-mesh.sh [KILLS] [SEED]
set -euo pipefail
cd "$(dirname "$0")/.."
export FOVEATE_MESHES=all
cargo test -p foveate-train --lib -- --nocapture trainer::tests::meshes trainer::tests::probe
scripts/kills.sh "$@"
