"""A machine whose storage is as slow as a test wants, as far as planning knows."""

import pytest

from teraplan.hardware import Link
from teraplan.runtime import links


def link_of(bytes_per_s: int) -> Link:
    """A link that carries so much in all, in either direction."""
    return Link(
        out_bytes_per_s=bytes_per_s,
        back_bytes_per_s=bytes_per_s,
        out_while_back_bytes_per_s=bytes_per_s // 2,
        back_while_out_bytes_per_s=bytes_per_s // 2,
        latency_ns=100_000,
    )


def plan_with_slow_storage(patch: pytest.MonkeyPatch, bytes_per_s: int) -> None:
    """Let sessions believe that their storage carries so much; what really moves is not slowed."""

    def storage_link(*_: object, **__: object) -> Link:
        return link_of(bytes_per_s)

    patch.setattr(links, "storage_link", storage_link)
