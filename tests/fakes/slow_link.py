"""A machine whose storage is as slow or as fast as a test wants, as far as planning knows."""

import pytest

from teraplan.runtime import links
from teraplan.values.hardware import Link


def link_of(bytes_per_s: int, latency_ns: int = 100_000) -> Link:
    """A link that carries so much in all, in either direction."""
    return Link(
        out_bytes_per_s=bytes_per_s,
        back_bytes_per_s=bytes_per_s,
        out_while_back_bytes_per_s=bytes_per_s // 2,
        back_while_out_bytes_per_s=bytes_per_s // 2,
        latency_ns=latency_ns,
    )


def plan_with_storage(patch: pytest.MonkeyPatch, link: Link) -> None:
    """Let sessions believe that their storage is like `link`; what really moves does not change."""

    def storage_link(*_: object, **__: object) -> Link:
        return link

    patch.setattr(links, "storage_link", storage_link)
