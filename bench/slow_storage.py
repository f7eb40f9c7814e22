"""Storage as slow as a benchmark wants: real files behind a limit of bandwidth."""

from teraplan.hardware import Link
from teraplan.runtime import links
from teraplan.runtime.storage import Storage
from tests.fakes.slow_link import link_of
from tests.fakes.throttled_stores import Pipe, limit


def slow_down_storage(bytes_per_s: int) -> None:
    """Let the storage of this process carry so much in all, and be taken for such."""
    opened, pipe = Storage.open, Pipe(bytes_per_s)

    def slow_storage(*args: object, **options: object) -> Storage:
        storage = opened(*args, **options)  # type: ignore[arg-type]
        for store in storage.traffic.stores:
            limit(store, pipe)
        return storage

    def storage_link(*_: object, **__: object) -> Link:
        return link_of(bytes_per_s)

    setattr(Storage, "open", slow_storage)  # noqa: B010  type checkers: a class method
    links.storage_link = storage_link
