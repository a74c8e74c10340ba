"""What answers at once loads nothing: `--help`, `--version`, `--check`, and a wrong flag."""

from __future__ import annotations

import subprocess
import sys
from importlib.metadata import version

import pytest

CODE = """
import sys
from spmd_encoder.__main__ import main
try:
    code = main(sys.argv[1:])
except SystemExit as end:
    code = end.code
heavy = {"torch", "transformers", "numpy", "PIL", "zmq", "msgspec", "asyncio", "fastapi", "uvicorn"}
print("loaded:", *sorted(heavy & sys.modules.keys()))
sys.exit(code)
"""


@pytest.mark.parametrize(
    ("argv", "code", "says"),
    [
        (["--help"], 0, "--max-batch-items"),
        (["--version"], 0, "spmd_encoder "),
        (["--check", "--tp-size", "1"], 0, '"tp_size": 1'),
        (["--check"], 0, f'"pyav": "{version("av")}"'),
        (["--no-such-flag"], 2, "--no-such-flag"),
    ],
)
def test_what_answers_at_once_loads_nothing(argv: list[str], code: int, says: str) -> None:
    done = subprocess.run([sys.executable, "-c", CODE, *argv], capture_output=True, text=True, check=False)
    assert done.returncode == code
    assert says in done.stdout + done.stderr
    assert done.stdout.splitlines()[-1].split() == ["loaded:"]
