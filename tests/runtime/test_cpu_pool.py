"""The pool of large CPU tensors, over real memory of this process."""

import contextlib
import ctypes
import random
import re
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch

from teraplan.runtime.cpu import allocator
from teraplan.runtime.cpu import pool as cpu_pool
from teraplan.runtime.cpu.page_pool import PagePool, _move
from teraplan.runtime.cpu.page_scraps import PageScraps, Piece
from teraplan.runtime.cpu.pool import CpuPool
from teraplan.runtime.process import pages, process_memory
from teraplan.runtime.process.pages import HUGE_PAGE_BYTES, use_huge_pages
from teraplan.units import MIB
from tests.fakes.interrupts import InterruptAt


@pytest.fixture
def pool() -> Iterator[CpuPool]:
    """Where PyTorch has the memory of large tensors from."""
    serving = CpuPool()
    assert serving.serve() == ""
    yield serving
    serving.close()


def _floats(nbytes: int, value: float) -> torch.Tensor:
    return torch.full((nbytes // 4,), value)


def _all_are(tensor: torch.Tensor, value: float) -> bool:
    """Without a tensor of truths, which would be the pool's, too."""
    return bool((tensor.numpy() == value).all())


def test_a_tensor_of_another_size_gets_the_pages_that_wait(pool: CpuPool) -> None:
    first = [_floats(48 * MIB, 1.0), _floats(80 * MIB, 2.0)]
    first.clear()
    assert pool.waiting_bytes == 128 * MIB
    before = process_memory.resident_bytes()
    second = _floats(128 * MIB, 3.0)
    assert process_memory.resident_bytes() - before < 32 * MIB
    assert pool.waiting_bytes == 0
    assert _all_are(second, 3.0)


def test_what_waits_and_what_is_used_stay_under_the_most_in_use(pool: CpuPool) -> None:
    chance, held, most = random.Random(0), list[torch.Tensor](), 0
    values: list[float] = []
    for number in range(400):
        if held and chance.random() < 0.5:
            at = chance.randrange(len(held))
            assert _all_are(held[at], values[at]), f"round {number}: overwritten"
            del held[at], values[at]
        else:
            nbytes = chance.choice((256 << 10, 1 * MIB, 3 * MIB, 4 * MIB, 5 * MIB + 4096, 9 * MIB))
            held.append(_floats(nbytes, float(number)))
            values.append(float(number))
        most = max(most, pool.in_use_bytes)
        assert pool.in_use_bytes + pool.waiting_bytes <= most
        assert pool.in_use_bytes >= sum(t.nbytes for t in held)
    for tensor, value in zip(held, values, strict=True):
        assert _all_are(tensor, value)


def test_slack_lets_blocks_wait_beside_new_ones(pool: CpuPool) -> None:
    _floats(8 * MIB, 1.0)
    pool.slack_bytes = 8 * MIB
    held = _floats(12 * MIB, 2.0)
    assert pool.waiting_bytes == 8 * MIB
    assert pool.slack_bytes == 0
    del held


def test_where_there_is_no_room_new_blocks_are_made_of_what_waits(pool: CpuPool) -> None:
    held = _floats(8 * MIB, 1.0)
    _floats(8 * MIB, 1.0)
    more = _floats(2 * MIB, 2.0)
    assert pool.waiting_bytes == 6 * MIB
    pool.shrink(4 * MIB)  # 4 MiB less than have been in use at once
    pool.room_bytes = 3 * MIB
    last = _floats(4 * MIB, 3.0)
    assert pool.waiting_bytes == 0, "a whole huge page"
    assert pool.room_bytes == 1 * MIB
    for tensor, value in ((held, 1.0), (more, 2.0), (last, 3.0)):
        assert _all_are(tensor, value)


def test_a_seam_between_waiting_and_fresh_memory_cuts_no_huge_page(pool: CpuPool) -> None:
    _floats(64 * MIB, 1.0)
    pool.slack_bytes = 57 * MIB
    tensor = _floats(74 * MIB, 2.0)  # 7 MiB of it have to come out of what waits
    assert pool.waiting_bytes == 56 * MIB
    assert _all_are(tensor, 2.0)


def test_what_is_held_less_goes_from_what_waits(pool: CpuPool) -> None:
    _floats(64 * MIB, 1.0)
    held = _floats(8 * MIB, 2.0)
    pool.lower(24 * MIB)
    assert pool.in_use_bytes + pool.waiting_bytes == 40 * MIB
    held = _floats(48 * MIB, 3.0)  # more than that is still to be had, if it is in use
    pool.lower(1 << 40)
    assert pool.waiting_bytes == 0
    assert _all_are(held, 3.0)


def test_shrinking_gives_memory_back_to_the_system(pool: CpuPool) -> None:
    _floats(128 * MIB, 1.0)
    before = process_memory.resident_bytes()
    assert pool.shrink(80 * MIB) == 80 * MIB
    assert pool.waiting_bytes == 48 * MIB
    assert before - process_memory.resident_bytes() >= 56 * MIB


def test_what_waits_is_lent_and_comes_back_as_it_is(pool: CpuPool) -> None:
    assert pool.lend(MIB) is None, "nothing waits"
    del (first := [_floats(6 * MIB, 1.0), _floats(3 * MIB, 2.0)])[:]
    before = process_memory.resident_bytes()
    lent = [pool.lend(nbytes) for nbytes in (5 * MIB, 2 * MIB + 4096)]
    assert pool.waiting_bytes == 2 * MIB - 4096
    target = pages.take(5 * MIB)
    assert lent[0] is not None
    pages.move(lent[0], target, 5 * MIB, keep_source=False)
    assert ctypes.c_float.from_address(target).value in (1.0, 2.0), "touched, and whole"
    pool.hand_in(target, 5 * MIB)
    assert lent[1] is not None
    pool.hand_in(lent[1], 2 * MIB + 4096)
    assert pool.waiting_bytes == 9 * MIB
    first.append(_floats(5 * MIB, 3.0))
    assert _all_are(first[0], 3.0)
    assert abs(process_memory.resident_bytes() - before) < MIB, "nothing was touched anew"


def test_what_is_unmapped_is_whole_pages() -> None:
    pool, start = PagePool(), pages.take(MIB)
    pool.give_piece(start, MIB)
    pool.shrink(1000)
    assert pool.nbytes == MIB - pages.PAGE_BYTES
    pool.shrink(MIB)
    assert pool.nbytes == 0
    with pytest.raises(OSError, match="unmapping 1000 bytes"):
        pages.release(1000, 1000)


def test_a_new_block_has_the_whole_huge_pages_that_wait_wherever_they_are() -> None:
    """Each of two ranges has two, between a MiB on both sides."""
    pool = PagePool()
    for _ in range(2):
        start = pages.take(8 * MIB)
        assert start % HUGE_PAGE_BYTES == 0
        _bytes_at(start, 8 * MIB).fill_(7)
        for end in (start, start + 7 * MIB):
            pages.release(end, MIB)
        pool.give_piece(start + MIB, 6 * MIB)
    pool.make(8 * MIB, 8 * MIB)
    assert pool.nbytes == 12 * MIB
    address = int(pool._library.take_block(pool.handle, 8 * MIB))
    assert bool((_bytes_at(address, 8 * MIB) == 7).all()), "some of it is fresh"
    assert pool.nbytes == 4 * MIB
    pool._library.free_block(address)
    pool.close()
    assert pool.nbytes == 0


def test_blocks_outlive_their_pool_and_then_go(pool: CpuPool) -> None:
    before = process_memory.resident_bytes()
    tensor = _floats(64 * MIB, 5.0)
    pool.close()
    assert _all_are(tensor, 5.0)
    del tensor
    assert process_memory.resident_bytes() - before < 32 * MIB


def test_the_last_to_leave_the_process_s_pool_closes_it() -> None:
    one, other = PagePool(), PagePool()
    shared, refusal = cpu_pool.join(one)
    assert refusal == ""
    assert cpu_pool.join(other)[0] is shared
    cpu_pool.leave(one)
    tensor = _floats(MIB, 6.0)
    assert shared.owns(tensor.data_ptr())
    cpu_pool.leave(other)
    assert not shared.owns(_floats(MIB, 6.0).data_ptr())
    assert _all_are(tensor, 6.0)


def test_moved_pages_keep_their_bytes() -> None:
    source, target = pages.take(4 * MIB), pages.take(6 * MIB)
    _bytes_at(source, 4 * MIB).fill_(7)
    pages.move(source, target + MIB, 3 * MIB, keep_source=False)
    assert bool((_bytes_at(target + MIB, 3 * MIB) == 7).all())
    assert bool((_bytes_at(source + 3 * MIB, MIB) == 7).all())
    pages.release(source + 3 * MIB, MIB)
    pages.release(target, 6 * MIB)


def test_a_move_that_the_kernel_refuses_leaves_usable_memory() -> None:
    target = pages.take(MIB)
    hole = pages.take(MIB)
    pages.release(hole, MIB)
    _move(Piece(hole, MIB, 1), target)
    assert bool((_bytes_at(target, MIB) == 0).all())
    pages.release(target, MIB)


def test_mapping_too_much_is_an_error_with_the_size() -> None:
    with pytest.raises(OSError, match=r"mapping \d+ bytes"):
        pages.take(1 << 62)


def test_scraps_keep_huge_pages_whole_while_they_can() -> None:
    scraps = PageScraps()
    scraps.add(Piece(HUGE_PAGE_BYTES - MIB, MIB + 2 * HUGE_PAGE_BYTES, 1))
    assert scraps.take_least(MIB) == [Piece(HUGE_PAGE_BYTES - MIB, MIB, 1)]
    assert scraps.take_least(MIB) == [Piece(2 * HUGE_PAGE_BYTES, HUGE_PAGE_BYTES, 1)]
    taken = scraps.take(MIB)
    assert taken == [Piece(2 * HUGE_PAGE_BYTES - MIB, MIB, 1)]
    assert scraps.nbytes == HUGE_PAGE_BYTES - MIB
    scraps.add(Piece(4 * HUGE_PAGE_BYTES, 2 * HUGE_PAGE_BYTES, 1))
    least = scraps.take_least(HUGE_PAGE_BYTES)
    assert [piece.nbytes for piece in least] == [HUGE_PAGE_BYTES - MIB, HUGE_PAGE_BYTES]
    assert scraps.nbytes == HUGE_PAGE_BYTES


def test_pieces_that_wait_make_place_for_whole_huge_pages(pool: CpuPool) -> None:
    small = [_floats(MIB, 1.0) for _ in range(32)]
    small.clear()
    before, huge_before = process_memory.resident_bytes(), _huge_bytes()
    large = _floats(16 * MIB, 2.0)
    assert pool.in_use_bytes + pool.waiting_bytes == 32 * MIB
    assert process_memory.resident_bytes() - before < 4 * MIB
    assert _all_are(large, 2.0)
    if _huge_bytes() == huge_before:
        pytest.skip("this kernel gives no huge pages")
    assert _huge_bytes_around(large) >= 16 * MIB


def test_state_comes_to_lie_on_huge_pages() -> None:
    mode = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    if not mode.exists():
        pytest.skip("this kernel has no transparent huge pages")
    tensor = torch.arange(8 * MIB)
    before = _huge_bytes()
    use_huge_pages([(tensor.data_ptr(), tensor.nbytes)])
    if _huge_bytes() == before:
        pytest.skip("this kernel does not collapse pages when asked to (Linux 6.1 does)")
    assert _huge_bytes_around(tensor) > tensor.nbytes // 2
    assert torch.equal(tensor, torch.arange(8 * MIB))


def _bytes_at(address: int, nbytes: int) -> torch.Tensor:
    memory = (ctypes.c_char * nbytes).from_address(address)
    return torch.frombuffer(memory, dtype=torch.uint8)


def _huge_bytes_around(tensor: torch.Tensor) -> int:
    """Of the mappings that a tensor is in: elsewhere the kernel makes some of its own accord."""
    start, end = tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes
    found, inside = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        mapping = re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line)
        if mapping is not None:
            inside = int(mapping[1], 16) < end and int(mapping[2], 16) > start
        elif inside and line.startswith("AnonHugePages:"):
            found += int(line.split()[1]) * 1024
    return found


def _huge_bytes() -> int:
    text = Path("/proc/self/smaps_rollup").read_text()
    found = re.search(r"AnonHugePages:\s+(\d+) kB", text)
    assert found is not None
    return int(found[1]) * 1024


def test_no_interrupt_whose_traceback_is_kept_keeps_the_lock(pool: CpuPool) -> None:
    """As notebooks keep it: what a context manager has begun is not undone before it is gone."""

    def calls(frame: FrameType, event: str, arg: object) -> Any:  # noqa: ANN401  a trace function
        code = frame.f_code
        return (
            returns
            if (code.co_filename, code.co_name) == (contextlib.__file__, "__enter__")
            else None
        )

    def returns(frame: FrameType, event: str, arg: object) -> Any:  # noqa: ANN401
        if event == "return":
            sys.settrace(None)
            raise KeyboardInterrupt
        return returns

    kept: list[BaseException] = []
    for change in (pool.trim, partial(pool.lower, 1), partial(pool.shrink, 1)):
        sys.settrace(calls)
        try:
            change()
        except KeyboardInterrupt as error:
            kept.append(error)
        finally:
            sys.settrace(None)
        assert not allocator.lock.locked(), f"{len(kept)} interrupts"


def test_an_interrupt_at_any_line_leaves_the_lock_free(pool: CpuPool) -> None:
    folder = str(Path(cpu_pool.__file__).parent)
    for change in (pool.trim, partial(pool.lower, 1), partial(pool.shrink, 1)):
        num_lines = 0
        for at in range(1, 1000):
            watch = InterruptAt(at, folder)
            with contextlib.suppress(KeyboardInterrupt), watch:
                change()
            assert not allocator.lock.locked(), f"line {at}"
            if not watch.has_come:
                break
            num_lines = at
        assert 10 < num_lines < 999
