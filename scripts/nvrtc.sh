#!/usr/bin/env bash
# Puts NVRTC under target/ from its wheel, for machines without a CUDA toolkit, and prints the
# folder to name in FOVEATE_CUDA_LIBRARIES:
#
#     export FOVEATE_CUDA_LIBRARIES=$(scripts/nvrtc.sh)
#
# A folder that is already named stays. Where the wheel cannot be had (no network, no pip) it prints
# an empty line and says why, and tests that compile kernels say that they are skipped; where the
# variable CI is set it fails instead.
set -euo pipefail
cd "$(dirname "$0")/.."

if [ -n "${FOVEATE_CUDA_LIBRARIES:-}" ]; then
    echo "$FOVEATE_CUDA_LIBRARIES"
    exit
fi

version=13.0.88
site=target/nvrtc-$version
if ! ls "$site"/nvidia/*/lib/libnvrtc.so.13 >/dev/null 2>&1; then
    rm -rf "$site" "$site.part"
    if ! python3 -m pip install --quiet --disable-pip-version-check --no-deps \
        --target "$site.part" "nvidia-cuda-nvrtc==$version" >&2; then
        echo "no NVRTC: nvidia-cuda-nvrtc $version could not be installed under target/" >&2
        [ -z "${CI:-}" ] || exit 1
        echo
        exit
    fi
    mv "$site.part" "$site"
fi
cd "$site"/nvidia/*/lib
pwd
