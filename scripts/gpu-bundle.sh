#!/bin/sh
# Builds gpu-bundle/: what a GPU machine without Rust needs to check and time the GPU engine.
# There, `gpu-bundle/run.sh all` runs everything. FOVEATE_PROFILE=dev builds faster and runs slower.
set -eu
cd "$(dirname "$0")/.."

profile=${FOVEATE_PROFILE:-release}
folder=$profile
[ "$profile" = dev ] && folder=debug
cargo build --profile "$profile" -p foveate-conformance -p foveate-cli --bins

into=gpu-bundle
mkdir -p "$into"
rm -rf "$into/bin" "$into/cases" "$into/benches"
mkdir "$into/bin"
for program in foveate-conformance foveate; do
    strip -o "$into/bin/$program" "${CARGO_TARGET_DIR:-target}/$folder/$program"
done
# Tests that use the GPU that they find: of blocks, and of every family beside transformers.
tests() {
    name=$1
    shift
    found=$(cargo test --profile "$profile" "$@" --no-run 2>&1 | sed -n 's/.*Executable.*(\(.*\))$/\1/p')
    strip -o "$into/bin/$name" "$found"
}
tests foveate-nn-cuda-tests -p foveate-nn-cuda --lib
tests foveate-families-tests -p foveate-train --test families
gzip -9 "$into/bin/foveate-families-tests"
cp -r conformance/cases "$into/cases"
cp -r benches "$into/benches"
cp scripts/gpu-run.sh "$into/run.sh"
cp scripts/gpu-measure.sh "$into/measure.sh"
cp scripts/gpu_runs.py scripts/gpu_kills.py "$into/"
cp scripts/gpu_train.py "$into/train.py"
cp scripts/gpu_shard.py "$into/shard.py"
cp scripts/gpu_links.py "$into/links.py"
cp scripts/families.py "$into/families.py"

kib=$(du -sk "$into/bin" "$into/cases" "$into/benches" "$into/run.sh" | awk '{ n += $1 } END { print n }')
echo "$into: $((kib / 1024)) MiB"
[ "$kib" -lt $((60 * 1024)) ] || { echo "error: over 60 MiB" >&2; exit 1; }
