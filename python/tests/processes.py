"""Code in a process of its own."""

import os
import subprocess
import sys


def run(code, **environment):
    """The end of a process that ran ``code``, with this environment beside the usual one."""
    environment = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1", **environment}
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment)
