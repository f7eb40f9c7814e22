"""PyTorch's large CPU tensors have their memory from a pool, whatever makes and frees them."""

import contextlib
import ctypes
import os
import random
import threading
import time
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
import torch

from teraplan.errors import FallbackRefusedError
from teraplan.runtime.cpu import allocator as cpu_allocator
from teraplan.runtime.cpu import native
from teraplan.runtime.cpu.device import CpuDevice
from teraplan.runtime.cpu.pool import CpuPool
from teraplan.runtime.process import process_memory
from teraplan.runtime.storage import Storage, default_directory
from teraplan.units import MIB
from teraplan.values.hardware import Tier
from tests.fakes.interrupts import InterruptAt


@pytest.fixture
def pool() -> Iterator[CpuPool]:
    serving = CpuPool()
    assert serving.serve() == ""
    yield serving
    serving.close()


def test_kernels_of_pytorch_take_their_memory_from_the_pool(pool: CpuPool) -> None:
    x = torch.randn(4, 16, 64, 64)
    convolved = torch.nn.functional.conv2d(x, torch.randn(16, 16, 3, 3), padding=1)
    assert pool.owns(x.data_ptr())
    assert pool.owns(convolved.data_ptr())
    assert not pool.owns(torch.empty(1000).data_ptr())
    assert pool.in_use_bytes == x.nbytes + convolved.nbytes
    del x, convolved
    assert pool.in_use_bytes == 0
    assert pool.waiting_bytes > 0


def test_a_tensor_that_grows_keeps_its_bytes(pool: CpuPool) -> None:
    tensor = torch.arange(MIB)
    tensor.resize_(3 * MIB)
    assert torch.equal(tensor[:MIB], torch.arange(MIB))
    assert pool.in_use_bytes == tensor.nbytes


def test_memory_comes_back_from_any_thread(pool: CpuPool) -> None:
    held = [torch.ones(MIB) for _ in range(3)]
    freeing = threading.Thread(target=held.clear)
    freeing.start()
    freeing.join()
    assert pool.in_use_bytes == 0
    assert pool.waiting_bytes == 12 * MIB


_IN_ANOTHER_THREAD = """
def ones(n: int) -> Tensor:
    return torch.ones([n])

def ones_of_another_thread(n: int) -> Tensor:
    return torch.jit.wait(torch.jit.fork(ones, n))
"""


def test_a_thread_that_python_does_not_know_asks_the_heap(pool: CpuPool) -> None:
    """It would wait for Python's lock, which may be held by who waits for it."""
    unit = torch.jit.CompilationUnit(_IN_ANOTHER_THREAD)
    tensor = unit.ones_of_another_thread(MIB)
    assert bool((tensor == 1).all())
    assert not pool.owns(tensor.data_ptr())
    assert pool.in_use_bytes == 0


def test_threads_that_take_and_free_while_memory_is_given_back_and_lent(pool: CpuPool) -> None:
    failures: list[str] = []
    stop = threading.Event()

    def work(number: int) -> None:
        chance, kept = random.Random(number), list[torch.Tensor]()
        while not stop.is_set():
            value = float(number * 1000 + len(kept))
            kept.append(torch.full((chance.randrange(1 << 14, 1 << 19),), value))
            if len(kept) > 6:
                gone = kept.pop(chance.randrange(len(kept)))
                if gone.numpy().min() != gone.numpy().max():
                    failures.append(f"thread {number}: another's bytes")
                    return

    threads = [threading.Thread(target=work, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    chance = random.Random(0)
    for _ in range(300):
        pool.shrink(chance.randrange(1 << 20))
        pool.slack_bytes = chance.randrange(4) << 20
        address = pool.lend(1 << 19)
        if address is not None:
            ctypes.memset(address, 255, 1 << 19)
            pool.hand_in(address, 1 << 19)
        pool.settle()
        time.sleep(0.002)
    stop.set()
    for thread in threads:
        thread.join()
    assert not failures
    assert pool.in_use_bytes == 0
    pool.trim()
    assert pool.held_bytes == 0


def test_each_pool_gets_its_own_back(pool: CpuPool) -> None:
    first = torch.ones(MIB)
    other = CpuPool()
    assert other.serve() == ""
    second = torch.ones(2 * MIB)
    assert (pool.in_use_bytes, other.in_use_bytes) == (4 * MIB, 8 * MIB)
    del first, second
    assert (pool.waiting_bytes, other.waiting_bytes) == (4 * MIB, 8 * MIB)
    other.close()


def test_after_a_pool_is_closed_its_tensors_live_on(pool: CpuPool) -> None:
    before = process_memory.resident_bytes()
    tensor = torch.full((16 * MIB,), 5.0)
    pool.close()
    assert not pool.owns(torch.ones(MIB).data_ptr())
    assert bool((tensor == 5.0).all())
    del tensor
    assert process_memory.resident_bytes() - before < 32 * MIB


def test_what_a_closed_pool_gave_is_not_used_again(pool: CpuPool) -> None:
    """The pool that serves next would not know of it."""
    before = torch.ones(MIB)
    pool.close()
    pool.serve()
    del before
    after = torch.ones(MIB)
    assert pool.owns(after.data_ptr())
    assert pool.in_use_bytes == 4 * MIB


class Interrupted(CpuPool):
    """Ctrl-C, just when PyTorch asks for memory."""

    def make(self, nbytes: int) -> bool:
        raise KeyboardInterrupt


def test_an_interrupt_is_raised_when_pytorch_has_returned() -> None:
    interrupted = Interrupted()
    assert interrupted.serve() == ""
    with pytest.raises(KeyboardInterrupt):
        torch.ones(MIB)
    interrupted.close()
    assert bool((torch.ones(MIB) == 1).all())


_FOLDER = str(Path(cpu_allocator.__file__).parent)


def _empty(at: int) -> tuple[torch.Tensor, bool]:
    """A tensor of more than 2 MiB, interrupted at the `at`-th line; whether there was such a line.

    Each is larger than all before, so that a block is made for it, with what waits.
    """
    interrupt, num = InterruptAt(at, _FOLDER), MIB // 2 + at * (16 << 10)
    try:
        with interrupt:
            tensor = torch.empty(num)
    except KeyboardInterrupt:
        tensor = torch.empty(num)
    return tensor, interrupt.has_come


def test_after_an_interrupt_anywhere_the_pool_is_right(pool: CpuPool) -> None:
    kept = {-k: torch.full((MIB // 2,), float(-k)) for k in range(6)}
    came, at = True, 0
    while came:
        at += 1
        del kept[at - 6]
        kept[at], came = _empty(at)
        kept[at].fill_(at)
        wrong = [value for value, one in kept.items() if not (one.numpy() == value).all()]
        assert not wrong, f"after interrupt {at}"
    assert 30 < at < 400
    kept.clear()
    assert pool.in_use_bytes == 0


def test_after_an_interrupt_no_memory_is_given_to_two_tensors(pool: CpuPool) -> None:
    came, at = True, 0
    while came:
        at += 1
        del (freed := [torch.ones(MIB + at * (16 << 10)) for _ in range(2)])[:]
        interrupt = InterruptAt(at, _FOLDER)
        with contextlib.suppress(KeyboardInterrupt), interrupt:
            pool.shrink(5 * MIB)
        came = interrupt.has_come
        freed += [torch.full((MIB // 2,), float(number)) for number in range(5)]
        assert pool.in_use_bytes == 10 * MIB
        values = [(float(t.numpy().min()), float(t.numpy().max())) for t in freed]
        assert values == [(k, k) for k in range(5)], f"after interrupt {at}"
    assert 10 < at < 400


class Counted(CpuPool):
    """How often it is asked."""

    num_asked = 0

    def make(self, nbytes: int) -> bool:
        self.num_asked += 1
        return super().make(nbytes)


def test_what_is_freed_serves_its_own_size_again_before_anybody_is_asked() -> None:
    counted = Counted()
    assert counted.serve() == ""
    kept = torch.full((MIB,), 1.0)
    freed = torch.full((MIB,), 2.0)
    address = freed.data_ptr()
    del freed
    again = torch.full((MIB,), 3.0)
    assert again.data_ptr() == address
    assert counted.num_asked == 2
    assert counted.in_use_bytes == kept.nbytes + again.nbytes
    del again
    other = torch.full((MIB // 2,), 4.0)
    assert counted.num_asked == 2
    assert other.data_ptr() != address + 4 * MIB, "a part of what has come back"
    assert counted.in_use_bytes + counted.waiting_bytes == 8 * MIB
    assert bool((kept == 1).all())
    assert bool((other == 4).all())
    counted.close()


class Nested(CpuPool):
    """The interpreter may collect garbage, and run anything, while a block is being taken."""

    def make(self, nbytes: int) -> bool:
        self.inner = torch.ones(MIB)
        return super().make(nbytes)


def test_a_tensor_made_while_a_block_is_taken_is_the_heap_s() -> None:
    nested = Nested()
    assert nested.serve() == ""
    outer = torch.full((MIB,), 2.0)
    assert nested.owns(outer.data_ptr())
    assert not nested.owns(nested.inner.data_ptr())
    assert bool((nested.inner == 1).all())
    assert bool((outer == 2).all())
    nested.close()


def test_a_forked_process_has_its_own_memory(pool: CpuPool) -> None:
    tensor = torch.full((MIB,), 3.0)
    child = os.fork()
    if child == 0:
        torch.set_num_threads(1)  # OpenMP's others are in the parent
        own = torch.ones(MIB)
        good = not pool.owns(own.data_ptr()) and bool((tensor == 3.0).all())
        del own, tensor
        os._exit(0 if good else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert bool((tensor == 3.0).all())
    assert pool.in_use_bytes == tensor.nbytes


def _no_compiler(*_: object) -> None:
    raise OSError("c++: command not found")


def test_without_a_compiler_the_heap_is_a_fallback_with_a_name(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(cpu_allocator, "_allocator", None)
    monkeypatch.setattr(cpu_allocator, "_failure", "")
    monkeypatch.setattr(native, "library", cache(native.library.__wrapped__))
    monkeypatch.setattr("torch._inductor.codecache.CppCodeCache.load", _no_compiler)
    storage = Storage.open([default_directory()], deadline_s=20.0)
    with pytest.raises(FallbackRefusedError, match=r"heap.*c\+\+: command not found"):
        CpuDevice(storage=storage, host_bytes=0, strict=True)
    device = CpuDevice(storage=storage, host_bytes=0)
    (fallback,) = device.fallbacks
    assert "c++: command not found" in fallback
    tensor = torch.arange(MIB)
    assert not device.pool.owns(tensor.data_ptr())
    copy = device.start_out(tensor.clone(), Tier.STORAGE, "t")
    copy.wait_out()
    memory, offset, _ = device.start_back(copy).wait()
    again = torch.empty(0, dtype=torch.int64).set_(memory, offset // 8, (MIB,), (1,))
    assert torch.equal(again, tensor)
    copy.drop()
    device.close()
