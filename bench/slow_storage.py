"""Storage as slow as a benchmark wants: real files behind a limit of bandwidth."""

import pytest

from teraplan.runtime.storage import Storage
from tests.fakes.slow_link import link_of, plan_with_storage
from tests.fakes.throttled_stores import opening_limited


def slow_down_storage(bytes_per_s: int) -> None:
    """Let the storage of this process carry so much in all, and be taken for such, for good."""
    patch = pytest.MonkeyPatch()
    patch.setattr(Storage, "open", opening_limited(bytes_per_s))
    plan_with_storage(patch, link_of(bytes_per_s))
