#!/usr/bin/env bash
# Runs other projects' tests of flex_attention on Foveate, in both modes of `foveate.testing.upstream`:
#
#     scripts/upstream.sh                  clones the projects into a folder of its own
#     scripts/upstream.sh --from FOLDER    takes FOLDER/pytorch, FOLDER/Liger-Kernel, ...; those that are there
#
# Nothing of them is kept. TORCH names the version of PyTorch (2.11.0). A file has 20 minutes in a mode
# (SECONDS_EACH). It ends in the tables of all runs; the exit code is 1 when one failed or did not end.
set -euo pipefail
cd "$(dirname "$0")/.."

files=(
    "pytorch pytorch/pytorch test/inductor/test_flex_attention.py test/inductor/test_flex_decoding.py"
    "Liger-Kernel linkedin/Liger-Kernel test/transformers/test_flex_attention.py"
    "torchtitan pytorch/torchtitan tests/unit_tests/test_flex_attention.py"
    "attention-gym meta-pytorch/attention-gym test/test_block_diffusion.py test/test_causal_block_mask.py
        test/test_document_mask.py test/test_global_sliding_window.py test/test_graphormer.py test/test_jetspec.py
        test/test_merge_attention.py test/test_mods.py test/test_natten.py test/test_sandwich.py
        test/test_shared_prefix.py test/test_shared_prefix_split_attention.py test/test_vsa.py"
)

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
from=$work
if [ "${1:-}" = --from ]; then
    from=$(cd "$2" && pwd)
elif [ $# != 0 ]; then
    echo "scripts/upstream.sh [--from FOLDER]; not $1" >&2 && exit 2
fi
env=$(scripts/python-env.sh "${TORCH:-2.11.0}")
cargo build -p foveate-py
cp target/debug/lib_native.so python/foveate/_native.abi3.so

status=0
for project in "${files[@]}"; do
    read -r -d '' -a words <<<"$project" || true
    checkout=$from/${words[0]}
    if [ "$from" = "$work" ] && ! git clone --quiet --depth 1 "https://github.com/${words[1]}" "$checkout"; then
        echo "${words[0]}: could not be cloned" >>"$work/tables"
        status=1
    fi
    [ -d "$checkout" ] || continue
    for file in "${words[@]:2}"; do
        for mode in eager compiled; do
            log=$work/log
            printf '\n== %s, %s\n' "$file" $mode
            ran=0
            PYTHONPATH=$PWD/python:$checkout:$checkout/src timeout "${SECONDS_EACH:-1200}" "$env/bin/python" -B \
                -m foveate.testing.upstream --$mode "$checkout/$file" >"$log" 2>&1 || ran=$?
            tail -n 40 "$log"
            [ $ran = 0 ] || status=1
            row=$(sed -n '/^file  /{n;p;}' "$log" | tail -n 1)
            printf '%-9s %s\n' $mode "${row:-${file##*/}: did not end, exit code $ran}" >>"$work/tables"
        done
    done
done
printf '\n%-9s %-44s %6s %7s %7s %6s %10s\n' mode file tests passed failed other "own skips"
cat "$work/tables"
exit $status
