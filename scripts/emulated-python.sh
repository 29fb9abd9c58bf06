#!/usr/bin/env bash
# Makes an aarch64 Python with torch and pytest under target/, for an x86-64 machine with qemu-user, and
# prints its folder:
#
#     root=$(scripts/emulated-python.sh)
#     PYTHONPATH=$root/site qemu-aarch64 -L $root $root/usr/bin/python3 -c "import torch"
#
# The interpreter and its libraries are packages for arm64 of this machine's own sources, of Debian that is,
# unpacked and not installed; torch is 2.10.0, whose wheel for aarch64 is the last that needs no library of
# NVIDIA's. 350 MB are downloaded, once. Where that or qemu-aarch64 is missing, the last line says so.
set -euo pipefail
cd "$(dirname "$0")/.."

torch=2.10.0
root=$PWD/target/emulated-aarch64
wheels=(torch==$torch numpy==2.3.5 markupsafe==3.0.4 typing_extensions sympy mpmath networkx jinja2 filelock fsspec
    pytest pluggy iniconfig packaging pygments)

if ! command -v qemu-aarch64 >/dev/null; then
    echo "no qemu-aarch64: apt-get install qemu-user" >&2
    exit 1
fi

# Packages for arm64 and all that they need, with lists and a state of their own.
unpack() {
    local apt=$root.part/apt
    mkdir -p "$apt"/lists/partial "$apt"/cache/archives/partial
    : >"$apt/status"
    local options=(-q -y -o APT::Architecture=arm64 -o APT::Architectures=arm64 -o "Dir::State::Lists=$apt/lists"
        -o "Dir::State::status=$apt/status" -o "Dir::Cache=$apt/cache" -o APT::Sandbox::User=)
    apt-get "${options[@]}" update
    apt-get "${options[@]}" install --download-only --no-install-recommends python3-minimal libpython3-stdlib libstdc++6
    for package in "$apt"/cache/archives/*.deb; do
        dpkg -x "$package" "$root.part"
    done
    rm -rf "$apt"
}

if ! [ -e "$root/complete" ]; then
    rm -rf "$root" "$root.part"
    if ! unpack >&2; then
        echo "Python for aarch64 could not be unpacked under target/" >&2
        exit 1
    fi
    version=$(readlink "$root.part/usr/bin/python3")
    version=${version#python}
    platforms=()
    for glibc in 2_28 2_27 2_17; do
        platforms+=(--platform "manylinux_${glibc}_aarch64")
    done
    if ! python3 -m pip install --quiet --disable-pip-version-check --no-deps --only-binary=:all: "${platforms[@]}" \
        --python-version $version --implementation cp --target "$root.part/site" "${wheels[@]}" >&2; then
        echo "torch $torch for aarch64 could not be installed under target/" >&2
        exit 1
    fi
    mv "$root.part" "$root"
    touch "$root/complete"
fi
echo "$root"
