#!/usr/bin/env bash
# Prints the name of the nightly toolchain that Miri and the listing of the public API need, and
# installs it where it is missing:
#
#     cargo "+$(scripts/nightly.sh)" miri test -p foveate-tensor
#
# It is pinned, so that only a change of this file changes what Miri finds and how the API reads.
# Where it cannot be had, the last line says why.
set -euo pipefail

name=nightly-2026-05-20
if ! command -v rustup >/dev/null; then
    echo "no rustup to install $name with" >&2
    exit 1
fi
if ! rustup component list --toolchain "$name" --installed 2>/dev/null | grep -q '^miri'; then
    if ! timeout 300 rustup toolchain install "$name" --profile minimal --no-self-update \
        --component miri --component rust-src >&2; then
        echo "$name with Miri could not be installed" >&2
        exit 1
    fi
fi
echo "$name"
