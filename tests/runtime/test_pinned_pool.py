"""The pool of pinned host memory: exact sizes, full use, returns from anywhere, pins and forks."""

import gc
import os
import threading
import weakref
from collections.abc import Callable

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from teraplan.runtime.process.pinned_pool import Lease, PinnedPool
from teraplan.units import MIB

PAGE = 4096


class Pins:
    """Stands for the device's registry of host memory."""

    def __init__(self, reason: str = "") -> None:
        self.reason = reason
        self.registered: dict[int, int] = {}

    def pin(self, address: int, nbytes: int) -> str:
        if not self.reason:
            self.registered[address] = nbytes
        return self.reason

    def unpin(self, address: int) -> None:
        del self.registered[address]


def pool_of(nbytes: int, **options: object) -> PinnedPool:
    return PinnedPool(nbytes, pin=None, **options)  # type: ignore[arg-type]


def test_takes_exactly_what_it_was_given_and_no_power_of_two() -> None:
    pins = Pins()
    pool = PinnedPool(33 * MIB, pin=pins.pin, unpin=pins.unpin, slab_bytes=8 * MIB)
    pool.prepare()
    assert sum(pins.registered.values()) == 33 * MIB == pool.mapped_bytes
    assert all(address % PAGE == 0 for address in pins.registered)
    pool.close()
    pool.close()
    assert not pins.registered


def test_memory_is_mapped_only_when_needed() -> None:
    pins = Pins()
    pool = PinnedPool(8 * MIB, pin=pins.pin, unpin=pins.unpin, slab_bytes=2 * MIB)
    assert not pins.registered
    first = pool.try_take(MIB)
    second = pool.try_take(3 * MIB)  # longer than a slab: one of its own size
    assert first is not None
    assert second is not None
    assert sorted(pins.registered.values()) == [2 * MIB, 3 * MIB]


def test_leases_do_not_overlap_and_come_back_by_their_end() -> None:
    pool = pool_of(4 * PAGE)
    leases = [pool.try_take(PAGE) for _ in range(4)]
    addresses = {lease.parts[0].address for lease in leases if lease is not None}
    assert len(addresses) == 4
    assert pool.try_take(1) is None
    assert pool.free_bytes == 0
    leases.pop(1)
    again = pool.try_take(10)
    assert again is not None
    assert again.parts[0].address in addresses
    assert again.parts[0].nbytes == 10 == again.parts[0].tensor.nbytes
    assert pool.most_bytes == 4 * PAGE


def test_free_neighbours_merge() -> None:
    pool = pool_of(8 * PAGE)
    leases = [pool.try_take(PAGE) for _ in range(8)]
    for index in (3, 5, 4, 2):
        leases[index] = None
    assert pool.try_take(4 * PAGE) is not None


def test_a_large_lease_is_gathered_from_scattered_memory() -> None:
    pool = pool_of(8 * PAGE, slab_bytes=4 * PAGE)
    leases = [pool.try_take(PAGE) for _ in range(8)]
    for index in (0, 2, 4, 6, 7):
        leases[index] = None
    assert pool.try_take(5 * PAGE) is None
    lease = pool.try_take(5 * PAGE - 100, in_one_part=False)
    assert lease is not None
    assert sum(part.nbytes for part in lease.parts) == 5 * PAGE - 100 == lease.nbytes
    assert pool.free_bytes == 0
    del lease
    assert pool.free_bytes == 5 * PAGE


def test_best_fit_leaves_the_long_stretches_whole() -> None:
    pool = pool_of(8 * PAGE)
    leases = [pool.try_take(n * PAGE) for n in (1, 1, 1, 4, 1)]
    leases[1] = leases[3] = None
    assert pool.try_take(PAGE) is not None
    assert pool.try_take(4 * PAGE) is not None


def test_refused_pinning_is_named_and_the_memory_works() -> None:
    pins = Pins("not permitted")
    pool = PinnedPool(MIB, pin=pins.pin, unpin=pins.unpin)
    lease = pool.try_take(100)
    assert lease is not None
    lease.parts[0].tensor.fill_(7)
    assert "pageable: not permitted" in pool.why_not_pinned
    pool.close()  # unregisters nothing


def test_who_waits_is_told_of_every_return() -> None:
    told: list[int] = []
    pool = pool_of(MIB, on_return=lambda: told.append(1))
    lease = pool.try_take(100)
    assert not told
    del lease
    assert told == [1]


def test_a_lease_outlives_its_pool() -> None:
    pool = pool_of(MIB)
    lease = pool.try_take(100)
    assert lease is not None
    pool.close()
    del pool
    gc.collect()
    lease.parts[0].tensor.fill_(3)
    assert int(lease.parts[0].tensor.sum()) == 300


def test_a_lease_may_end_inside_the_pool_itself() -> None:
    """A garbage collection in the middle of `try_take` must not dead-lock."""
    pool = pool_of(MIB)
    lease: list[Lease | None] = [pool.try_take(PAGE)]
    original = pool._take_back

    def end_it_there() -> None:
        original()
        lease[0] = None

    pool._take_back = end_it_there  # type: ignore[method-assign]
    taken: list[object] = []
    thread = threading.Thread(target=lambda: taken.append(pool.try_take(PAGE)), daemon=True)
    thread.start()
    thread.join(10)
    assert taken
    assert pool.free_bytes == MIB - PAGE


def test_no_weak_reference_gives_out_a_lease_whose_memory_is_back() -> None:
    """Another thread could copy from it what somebody else has put there meanwhile."""
    weak: list[weakref.ref[Lease]] = []
    seen: list[Lease | None] = []
    pool = pool_of(MIB, on_return=lambda: seen.extend(reference() for reference in weak))
    lease = pool.try_take(PAGE)
    assert lease is not None
    weak.append(weakref.ref(lease))
    del lease
    assert seen == [None]


def test_a_forked_child_leaves_the_pages_alone() -> None:
    pins = Pins()
    pool = PinnedPool(MIB, pin=pins.pin, unpin=pins.unpin)
    lease = pool.try_take(PAGE)
    assert lease is not None
    lease.parts[0].tensor.fill_(5)
    child = os.fork()
    if child == 0:
        pool.close()
        del lease
        gc.collect()
        os._exit(0 if len(pins.registered) == 1 else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert int(lease.parts[0].tensor.float().mean()) == 5


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 40), st.booleans(), st.integers(0, 99)), max_size=60))
def test_accounting_holds_for_any_order(steps: list[tuple[int, bool, int]]) -> None:
    pool = pool_of(64 * PAGE, slab_bytes=16 * PAGE)
    held: list[Lease] = []
    for units, in_one_part, victim in steps:
        free = pool.free_bytes
        lease = pool.try_take(units * 1000, in_one_part=in_one_part)
        if lease is None:
            assert in_one_part or -(-units * 1000 // PAGE) * PAGE > free
            if held:
                held.pop(victim % len(held))
            continue
        held.append(lease)
        del lease
        parts = sorted((p.address, p.nbytes) for one in held for p in one.parts)
        ends = [address + nbytes for address, nbytes in parts]
        assert all(end <= start for end, (start, _) in zip(ends, parts[1:], strict=False))
        assert pool.free_bytes == 64 * PAGE - sum(-(-x.nbytes // PAGE) * PAGE for x in held)
    held.clear()
    assert pool.free_bytes == 64 * PAGE


def test_many_threads() -> None:
    pool = pool_of(32 * PAGE, slab_bytes=8 * PAGE)

    def work(size: int) -> Callable[[], None]:
        def body() -> None:
            for _ in range(300):
                lease = pool.try_take(size * PAGE)
                if lease is not None:
                    lease.parts[0].tensor.fill_(size)
                    assert int(lease.parts[0].tensor[-1]) == size

        return body

    threads = [threading.Thread(target=work(size)) for size in (1, 2, 3, 5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert pool.free_bytes == 32 * PAGE


@pytest.mark.parametrize("granule", [512, PAGE])
def test_sizes_are_rounded_to_the_granule(granule: int) -> None:
    pool = pool_of(MIB, granule_bytes=granule)
    lease = pool.try_take(1)
    assert lease is not None
    assert pool.in_use_bytes == granule
