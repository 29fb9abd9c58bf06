#!/usr/bin/env bash
# Makes an environment for the Python package's tests under target/ and prints its folder:
#
#     env=$(scripts/python-env.sh)            torch 2.11.0, the version to match
#     env=$(scripts/python-env.sh 2.10.0)     another version of torch
#
# An environment that is there stays. Torch's wheel for Linux brings NVIDIA's libraries, 2.5 GB in all,
# which nothing here uses. Where packages cannot be had, the last line says why. The libraries that
# foveate plugs into are installed too, and their tests are skipped where they cannot be.
set -euo pipefail
cd "$(dirname "$0")/.."

torch=${1:-2.11.0}
env=$PWD/target/python/torch-$torch
if ! [ -e "$env/complete" ]; then
    rm -rf "$env"
    mkdir -p "$(dirname "$env")"
    if ! { python3 -m venv "$env" && timeout 420 "$env/bin/python" -m pip install --quiet \
        --disable-pip-version-check "torch==$torch" numpy "maturin>=1.9,<2" pytest; } >&2; then
        echo "torch $torch, maturin and pytest could not be installed under target/" >&2
        exit 1
    fi
    touch "$env/complete"
fi
doors=(transformers==5.23.0 torchtune==0.6.1 torchao==0.14.1 torchtitan==0.2.2)
if [ "$(cat "$env/doors" 2>/dev/null)" != "${doors[*]}" ]; then
    if timeout 300 "$env/bin/python" -m pip install --quiet --disable-pip-version-check "torch==$torch" "${doors[@]}" >&2; then
        echo "${doors[*]}" >"$env/doors"
    else
        echo "${doors[*]} could not be installed beside torch $torch" >&2
    fi
fi
echo "$env"
