"""What `pip install` says where Rust is missing or too old."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def build(path):
    """The first step of an installation, with the programs of `path`."""
    code = "import foveate_build; foveate_build.get_requires_for_build_wheel()"
    environment = {**os.environ, "PATH": str(path), "PYTHONPATH": str(ROOT / "scripts/backend")}
    return subprocess.run([sys.executable, "-B", "-c", code], env=environment, capture_output=True, text=True)


def cargo(folder, says):
    program = folder / "cargo"
    program.write_text(f"#!/bin/sh\n{says}\n")
    program.chmod(0o755)
    return folder


@pytest.mark.parametrize("says, words", [
    (None, "and there is none: install it from https://rustup.rs"),
    ("exit 1", "and there is none"),
    ("echo 'cargo 1.79.0 (ffa9cf99a 2024-06-03)'", "and this is cargo 1.79.0 (ffa9cf99a 2024-06-03): install it"),
])
def test_a_missing_or_old_rust_is_one_sentence(tmp_path, says, words):
    pytest.importorskip("maturin")
    result = build(tmp_path if says is None else cargo(tmp_path, says))
    assert result.returncode != 0
    assert result.stderr.startswith("foveate is compiled with Rust 1.95 or newer") and words in result.stderr
    assert len(result.stderr.splitlines()) == 1


def test_a_rust_that_is_new_enough_goes_on_to_maturin(tmp_path):
    pytest.importorskip("maturin")
    result = build(cargo(tmp_path, "echo 'cargo 1.120.0 (ffa9cf99a 2027-06-03)'"))
    assert result.returncode == 0, result.stderr
