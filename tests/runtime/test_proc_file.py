"""Files of /proc/self that cannot be opened or read are named, as all that fails is."""

import resource
from pathlib import Path

import pytest

from teraplan.errors import MappingError
from teraplan.runtime.process.proc_file import ProcFile


def test_one_that_cannot_be_read() -> None:
    """Nothing is mapped at the first page."""
    with pytest.raises(
        MappingError, match=r"/proc/self/mem, .* cannot be read: Input/output error$"
    ):
        ProcFile("/proc/self/mem").read(8)


def test_one_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(MappingError, match=r"cannot be opened: No such file or directory$"):
        ProcFile(str(tmp_path / "none")).read(8)


def test_too_few_descriptors_say_what_to_do() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, hard))
    try:
        with pytest.raises(MappingError, match=r"Too many open files; raise the limit .*ulimit -n"):
            ProcFile("/proc/self/statm").read(8)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
