"""What all tests share: tests marked `gpu` are skipped, with the reason, where there is no GPU."""

import functools
import gc

import pytest

# To compile makes millions of objects, and hardly any garbage that matters here.
gc.set_threshold(10_000, 10, 10)

_LONGEST = ("test_demo", "test_a_process_that_trains")


@functools.cache
def why_no_gpu() -> str:
    """The reason why tests marked `gpu` cannot run here, "" if they can."""
    import torch

    if torch.version.cuda is None:
        return f"torch {torch.__version__} is built without CUDA"
    if not torch.cuda.is_available():
        return "no CUDA device is visible"
    return ""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The longest tests come first: at the end one process would be alone with them."""
    items.sort(key=lambda item: not any(name in item.nodeid for name in _LONGEST))


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skips a test marked `gpu` where there is none."""
    if item.get_closest_marker("gpu") and why_no_gpu():
        pytest.skip(why_no_gpu())
