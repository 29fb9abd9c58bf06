#!/usr/bin/env bash
# The tests of the Python package that take longer than CI may: all of them, with 1,000 random programs
# beside PyTorch's vmap, for each version of torch that is named:
#
#     scripts/python-suite.sh                  torch 2.11.0, the version to match
#     scripts/python-suite.sh 2.10.0 2.15.0    these
#
# It ends in a table; the exit code is 1 when a version failed.
set -euo pipefail
cd "$(dirname "$0")/.."

cargo build -p foveate-py
cp target/debug/lib_native.so python/foveate/_native.abi3.so
log=$(mktemp)
trap 'rm -f "$log"' EXIT
status=0
table=
for torch in "${@:-2.11.0}"; do
    if ! env=$(scripts/python-env.sh "$torch"); then
        status=1
        table+=$(printf '%-10s %s' "$torch" "no environment: see above")$'\n'
        continue
    fi
    FOVEATE_PROGRAMS=1000 PYTHONPATH=python "$env/bin/python" -B -m pytest -q -p no:cacheprovider \
        python/tests 2>&1 | tee "$log" || status=1
    table+=$(printf '%-10s %s' "$torch" "$(tail -n 1 "$log")")$'\n'
done
printf '\n%-10s %s\n%s' torch result "$table"
exit $status
