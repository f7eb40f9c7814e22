"""What the process holds beside tensors: counted without leaving anything behind."""

import gc
import mmap
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from teraplan.runtime.cpu.device import CpuDevice
from teraplan.runtime.cpu.malloc import Malloc
from teraplan.runtime.process import process_memory
from teraplan.runtime.storage import Storage, default_directory
from teraplan.units import MIB

NUM_OBJECTS = 2_000_000
"""A list of these takes 16 MiB."""


@pytest.fixture
def device() -> Iterator[CpuDevice]:
    with Storage.open([default_directory()]) as storage:
        opened = CpuDevice(storage=storage, host_bytes=0)
        yield opened
        opened.close()


def _resident_after_trim() -> int:
    gc.collect()
    Malloc().trim()
    return process_memory.resident_bytes()


@pytest.mark.parametrize("name", [b"donn\xe9es.bin", b"x\xe2\x80\xa8y [heap]"])
def test_names_of_mapped_files_may_be_any_bytes(name: bytes, tmp_path: Path) -> None:
    """Not in UTF-8, with a Unicode line in it, or like the heap's."""
    before = process_memory.heap_range()
    with open(os.path.join(os.fsencode(tmp_path), name), "w+b") as file:
        file.truncate(1 << 16)
        with mmap.mmap(file.fileno(), 1 << 16):
            start, nbytes = process_memory.heap_range()
    assert start == before[0]
    assert before[1] <= nbytes < before[1] + 64 * MIB


@pytest.mark.slow
def test_what_counts_all_tensors_leaves_nothing_in_the_process(device: CpuDevice) -> None:
    objects: list[list[int]] = [[] for _ in range(NUM_OBJECTS)]
    for counts in (device.run_fast, lambda: device.hold_less(0), device.overhead_bytes):
        before = _resident_after_trim()
        counts()
        assert process_memory.resident_bytes() - before < 6 * MIB
    assert len(objects) == NUM_OBJECTS


def test_planning_leaves_nothing_in_the_process(device: CpuDevice) -> None:
    before = _resident_after_trim()
    made = [bytearray(b"x" * 100_000) for _ in range(200)]
    made.append(made)  # type: ignore[arg-type]  # a cycle, which is collected some time
    del made
    device.give_back_heap(cycles=True)
    assert process_memory.resident_bytes() - before < 6 * MIB
    assert process_memory.peak_bytes() - before < 6 * MIB


def test_tensors_are_no_overhead_and_other_memory_is(device: CpuDevice) -> None:
    before = device.overhead_bytes()
    tensor = torch.ones(10 * MIB)
    assert abs(device.overhead_bytes() - before) < 6 * MIB
    other = bytearray(b"x" * (40 * MIB))
    assert abs(device.overhead_bytes() - before - 40 * MIB) < 6 * MIB
    assert len(other) == tensor.nbytes
