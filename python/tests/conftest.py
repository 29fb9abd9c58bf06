"""Runs tests on another device: ``pytest --device cuda python/tests/test_dot_product.py`` makes every tensor that says no
device, and every generator, there. ``test_cuda*.py`` need no option."""

import pytest
import torch


def pytest_addoption(parser):
    parser.addoption("--device", default="cpu", help="where tensors are made that say no device")


def pytest_configure(config):
    device = torch.device(config.getoption("--device"))
    if device.type == "cpu":
        return
    if device.type != "cuda" or not torch.cuda.is_available():
        raise pytest.UsageError(f"--device {device}: torch finds no such device")

    class Generator(torch.Generator):
        def __new__(cls, on=device):
            return super().__new__(cls, on)

    torch.set_default_device(device)
    torch.Generator = Generator
