"""What lies on the disk under `encrypt` cannot be read, and comes back all the same."""

import importlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from teraplan.errors import IntegrityError, StorageUnusableError
from teraplan.runtime.storage import Record, Storage
from teraplan.units import MIB

Bytes = NDArray[np.uint8]
Memory = Callable[..., Bytes]
ReadBack = Callable[[Storage, Record], Bytes]


@pytest.fixture
def storage(disk: Path) -> Iterator[Storage]:
    pytest.importorskip("cryptography")
    with Storage.open([disk], encrypt=True) as opened:
        yield opened


@pytest.mark.parametrize("nbytes", [4096, 100_003, 8 * MIB, 17 * MIB + 77])
def test_what_comes_back_is_what_left(
    storage: Storage, memory: Memory, read_back: ReadBack, nbytes: int
) -> None:
    tensor = memory(nbytes, 64, seed=1)
    before = tensor.copy()
    record = storage.put(tensor.ctypes.data, tensor.nbytes, owner=tensor, label="t")
    assert np.array_equal(read_back(storage, record), before)
    assert np.array_equal(tensor, before), "the tensor itself was encrypted"


def test_the_file_holds_noise(storage: Storage, memory: Memory) -> None:
    tensor = memory(4 * MIB)
    tensor[:] = np.frombuffer(b"a secret" * (MIB // 2), dtype=np.uint8)
    records = [
        storage.put(tensor.ctypes.data, tensor.nbytes, owner=tensor, label="t") for _ in range(2)
    ]
    for record in records:
        storage.wait(record.write, what="the test")
    blocks = []
    for record in records:
        with open(f"/proc/self/fd/{storage._opened[0].arena.fd}", "rb", buffering=0) as file:
            os.lseek(file.fileno(), record.places[0].offset, os.SEEK_SET)
            blocks.append(file.read(MIB))
    assert b"secret" not in blocks[0]
    assert blocks[0] != blocks[1], "equal contents can be told"
    assert len(set(blocks[0])) == 256
    assert storage.stores[0].path == "posix O_DIRECT, encrypted"


def test_a_flipped_bit_is_found(storage: Storage, memory: Memory, read_back: ReadBack) -> None:
    tensor = memory(MIB, 0, seed=1)
    record = storage.put(tensor.ctypes.data, tensor.nbytes, owner=tensor, label="act3")
    storage.wait(record.write, what="the test")
    with open(f"/proc/self/fd/{storage._opened[0].arena.fd}", "r+b", buffering=0) as file:
        file.seek(record.places[0].offset + 5000)
        byte = file.read(1)[0]
        file.seek(record.places[0].offset + 5000)
        file.write(bytes([byte ^ 1]))
    with pytest.raises(IntegrityError, match="act3"):
        read_back(storage, record)


def test_without_the_library_the_error_says_what_to_install(
    disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing(name: str) -> object:
        raise ImportError(name)

    monkeypatch.setattr(importlib, "import_module", missing)
    with pytest.raises(StorageUnusableError, match=r"pip install 'teraplan\[encrypt\]'"):
        Storage.open([disk], encrypt=True)
