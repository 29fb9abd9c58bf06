#!/usr/bin/env bash
# Builds the wheel and the source distribution of the Python package into target/wheels, and checks them:
#
#     scripts/wheel.sh            for this machine
#     scripts/wheel.sh aarch64    for aarch64-unknown-linux-gnu, by zig's linker
#
# The wheel is of CPython's stable ABI (3.10 and newer). With zig, which pip installs (ziglang), it is
# manylinux_2_28; without, it is of the glibc that this machine has, and the script says so. It is at most
# 12 MB, and installs and runs in an environment of its own, as the source distribution does with
# --sdist (which compiles the package once more). A wheel for aarch64 runs under qemu-aarch64 on x86-64:
# the package's tests of masks, scores, block masks, varlen and pages, beside torch's.
set -euo pipefail
cd "$(dirname "$0")/.."

most=$((12 * 1000 * 1000))
out=target/wheels
sdist=
arch=$(uname -m)
for argument in "$@"; do
    case $argument in
    --sdist) sdist=yes ;;
    x86_64 | aarch64) arch=$argument ;;
    *) echo "scripts/wheel.sh [x86_64|aarch64] [--sdist]; not $argument" >&2 && exit 2 ;;
    esac
done

if ! env=$(scripts/python-env.sh); then
    exit 1
fi
rm -rf "$out"
options=(--release --out "$out")
if [ "$arch" != "$(uname -m)" ]; then
    options+=(--target "$arch-unknown-linux-gnu")
fi
if "$env/bin/python" -c "import ziglang" 2>/dev/null ||
    timeout 300 "$env/bin/python" -m pip install --quiet --disable-pip-version-check ziglang >&2; then
    PATH=$env/bin:$PATH "$env/bin/maturin" build "${options[@]}" --zig --compatibility manylinux_2_28
else
    echo "without ziglang: a wheel for the glibc of this machine" >&2
    "$env/bin/maturin" build "${options[@]}"
fi
"$env/bin/maturin" sdist --out "$out"

for file in "$out"/*; do
    bytes=$(stat -c %s "$file")
    echo "$file: $bytes bytes"
    if [ "$bytes" -gt $most ]; then
        echo "$file has more than $most bytes" >&2
        exit 1
    fi
done

# Installs $1 in an environment of its own, beside the torch of the test environment, and calls attention.
works() {
    local fresh
    fresh=$(mktemp -d)
    python3 -m venv "$fresh"
    "$env/bin/python" -c "import sysconfig; print(sysconfig.get_path('purelib'))" \
        >"$("$fresh/bin/python" -c "import sysconfig; print(sysconfig.get_path('purelib'))")/torch.pth"
    "$fresh/bin/python" -m pip install --quiet --disable-pip-version-check "$1"
    (cd "$fresh" && "$fresh/bin/python" -c "
import torch, foveate
q = torch.randn(1, 2, 64, 16, requires_grad=True)
foveate.flex_attention(q, q, q, block_mask=foveate.Mask.causal()).sum().backward()
assert foveate.__file__.startswith('$fresh'), foveate.__file__
")
    rm -rf "$fresh"
    echo "installs and runs: $1"
}

# Runs tests with $1 under an emulator, but for two: an assertion of qemu's own may end a process of several
# threads that forks.
emulated() {
    local root
    if ! root=$(scripts/emulated-python.sh); then
        echo "did not run, for want of an emulated Python: $1" >&2
        return
    fi
    python3 -m pip install --quiet --disable-pip-version-check --no-deps --upgrade --only-binary=:all: \
        --platform "manylinux_2_28_$arch" --python-version 3.10 --target "$root/site" "$1"
    PYTHONPATH=$root/site PYTHONDONTWRITEBYTECODE=1 qemu-aarch64 -L "$root" "$root/usr/bin/python3" -m pytest \
        -q -p no:cacheprovider -k "not forked and not workers" python/tests/test_{masks,flex,varlen,paged}.py
    echo "installs and runs under qemu-aarch64: $1"
}

if [ "$arch" = "$(uname -m)" ]; then
    works "$out"/*.whl
elif [ "$arch" = aarch64 ]; then
    emulated "$out"/*.whl
fi
if [ -n "$sdist" ]; then
    works "$out"/*.tar.gz
fi
