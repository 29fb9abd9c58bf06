#!/usr/bin/env bash
# Trains on every product of the four axes of a mesh that is 1, 2, 3, 4, 8 or 16 ranks, each by threads,
# by threads again and over TCP, and holds losses, moments and weights after five steps to those of one
# rank, and every repeat to the same bits; and changes one token on each of them, with every strategy: exactly
# the outputs that its mask allows change. Takes about twenty minutes of processor time.
#
#     scripts/every-mesh.sh
set -euo pipefail
cd "$(dirname "$0")/.."
export FOVEATE_MESHES=all
cargo test -p foveate-train --lib -- --nocapture trainer::tests::meshes trainer::tests::probe
