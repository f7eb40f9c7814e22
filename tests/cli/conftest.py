"""The files that most commands are tried on."""

from pathlib import Path

import pytest

from tests.cli.example_files import Files, write_files


@pytest.fixture
def files(tmp_path: Path) -> Files:
    return write_files(tmp_path)
