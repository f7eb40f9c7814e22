"""The kvikio back ends: host memory through its thread pool, and device memory through GDS.

Rules that kvikio does not enforce and that end in crashes when broken: the buffer must live until
`get`, `get` is called once per future, a file is closed only when idle, a forked child touches
nothing. Here a worker issues one transfer and stays with it until it has ended, in one function.
"""

import errno
import importlib
import os
from types import ModuleType

from teraplan.runtime.storage.arena import Arena, ShortTransferError
from teraplan.runtime.storage.extents import GRANULE_BYTES
from teraplan.runtime.storage.memory import view

_NUM_THREADS = 4
# Page-aligned memory; from other addresses kvikio copies through a bounce buffer of its own.
_PAGE_BYTES = 4096


class _KvikioArena(Arena):
    """What both share: the file is opened again through /proc, as it has no name."""

    def __init__(self, fd: int, kvikio: ModuleType) -> None:
        super().__init__(fd)
        self._file = kvikio.CuFile(f"/proc/self/fd/{fd}", "r+")

    def write(self, address: int, nbytes: int, offset: int) -> None:
        """Writes by one task of kvikio's thread pool, and waits for it."""
        buffer = self._buffer(address, nbytes)
        try:
            got = self._file.pwrite(buffer, nbytes, offset, nbytes).get()
        except RuntimeError as error:
            raise _with_errno(error, nbytes) from error
        if got != nbytes:
            raise ShortTransferError(nbytes, got)

    def read(self, address: int, nbytes: int, offset: int) -> None:
        """Reads by one task of kvikio's thread pool, and waits for it."""
        buffer = self._buffer(address, nbytes)
        try:
            got = self._file.pread(buffer, nbytes, offset, nbytes).get()
        except RuntimeError as error:
            raise _with_errno(error, nbytes) from error
        if got != nbytes:
            raise ShortTransferError(nbytes, got)

    def close(self) -> None:
        """Closes kvikio's descriptors and ours."""
        self._file.close()
        super().close()

    def _buffer(self, address: int, nbytes: int) -> object:
        raise NotImplementedError


class KvikioHostArena(_KvikioArena):
    """Host memory with O_DIRECT by kvikio's POSIX engine: as fast as ours, a little less CPU."""

    path = "kvikio host"
    memory_alignment = _PAGE_BYTES
    block_bytes = GRANULE_BYTES

    @classmethod
    def open(cls, fd: int) -> "KvikioHostArena":
        """An arena on `fd`. Call it only when the probe has proved that kvikio works."""
        kvikio = importlib.import_module("kvikio")
        defaults = importlib.import_module("kvikio.defaults")
        defaults.set({"auto_direct_io_read": True, "auto_direct_io_write": True})
        _at_least_threads(defaults)
        with defaults.set({"compat_mode": kvikio.CompatMode.ON}):  # opening never touches cuFile
            return cls(fd, kvikio)

    @property
    def is_direct(self) -> bool:
        """Whether kvikio could open the file with O_DIRECT; else it goes through the page cache."""
        return bool(self._file.is_direct_io_supported())

    def _buffer(self, address: int, nbytes: int) -> object:
        return view(address, nbytes)


class KvikioGdsArena(_KvikioArena):
    """Device memory straight to and from the disk. Not run on a GPU yet."""

    path = "kvikio GDS"
    memory_alignment = 1
    block_bytes = 1
    takes_device_memory = True

    @classmethod
    def open(cls, fd: int) -> "KvikioGdsArena":
        """An arena on `fd`. Call it only when the probe has proved that GDS works."""
        kvikio = importlib.import_module("kvikio")
        _at_least_threads(importlib.import_module("kvikio.defaults"))
        return cls(fd, kvikio)

    def checksum(self, address: int, nbytes: int) -> int:
        """Sum of the bytes' 64-bit words, taken on the device; the order of words is not seen."""
        torch = importlib.import_module("torch")
        content = torch.as_tensor(self._buffer(address, nbytes), device="cuda")
        if address % 8:
            content = content.clone()  # the same bytes must give the same sum wherever they lie
        whole = nbytes // 8 * 8
        total = content[:whole].view(torch.int64).sum() + content[whole:].sum(dtype=torch.int64)
        return int(total.item()) & (1 << 64) - 1

    def _buffer(self, address: int, nbytes: int) -> object:
        return _DeviceBytes(address, nbytes)


class _DeviceBytes:
    """Device memory as CUDA libraries exchange it."""

    def __init__(self, address: int, nbytes: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (nbytes,),
            "typestr": "|u1",
            "data": (address, False),
            "version": 3,
        }


def _at_least_threads(defaults: ModuleType) -> None:
    # One pool serves the whole process: never make it smaller than somebody else set it.
    if defaults.get("num_threads") < _NUM_THREADS:
        defaults.set("num_threads", _NUM_THREADS)


def _with_errno(error: RuntimeError, nbytes: int) -> OSError:
    """kvikio's exceptions carry the system's words, but not its number."""
    text = str(error)
    if text.rstrip().endswith("EOF"):
        return ShortTransferError(nbytes, 0)
    for code in errno.errorcode:
        if os.strerror(code) in text:
            return OSError(code, os.strerror(code))
    return OSError(errno.EIO, text)
