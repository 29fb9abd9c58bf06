"""The build backend: maturin, once there is a Rust that can compile the package.

Without it maturin would fetch a Rust of its own, and one that is too old would say so in the middle of
cargo's output.
"""

import re
import subprocess
import sys
from pathlib import Path

import maturin
from maturin import *  # noqa: F403 - a backend is its module's functions.

ROOT = Path(__file__).resolve().parents[2]


def needed() -> tuple[int, ...]:
    """The oldest Rust that compiles the workspace, as Cargo.toml has it."""
    found = re.search(r'^rust-version = "([\d.]+)"', (ROOT / "Cargo.toml").read_text(), re.MULTILINE)
    assert found, "Cargo.toml says rust-version"
    return tuple(map(int, found[1].split(".")))


def check_rust() -> None:
    """Ends with one sentence where cargo is missing or too old."""
    least = ".".join(map(str, needed()))
    how = "install it from https://rustup.rs; README.md tells how"
    try:
        said = subprocess.run(["cargo", "--version"], check=True, capture_output=True, text=True).stdout
    except (OSError, subprocess.CalledProcessError):
        sys.exit(f"foveate is compiled with Rust {least} or newer, and there is none: {how}")
    found = re.search(r"(\d+)\.(\d+)\.(\d+)", said)
    if found is None or tuple(map(int, found.groups())) < needed():
        sys.exit(f"foveate is compiled with Rust {least} or newer, and this is {said.strip()}: {how}")


def _checked(name):
    def hook(*args, **kwargs):
        check_rust()
        return getattr(maturin, name)(*args, **kwargs)

    return hook


for _name in ("get_requires_for_build_wheel", "get_requires_for_build_editable", "build_wheel", "build_editable"):
    if hasattr(maturin, _name):
        globals()[_name] = _checked(_name)
