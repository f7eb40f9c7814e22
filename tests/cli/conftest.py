"""The files that commands are tried on."""

from pathlib import Path

import pytest

from teraplan.files.trace_file import write_trace
from tests.cli.example_files import Files, write_files
from tests.planning.synthetic import gpt_trace


@pytest.fixture
def files(tmp_path: Path) -> Files:
    return write_files(tmp_path)


@pytest.fixture
def trace(tmp_path: Path) -> str:
    write_trace(gpt_trace(4), tmp_path / "trace.json")
    return str(tmp_path / "trace.json")
