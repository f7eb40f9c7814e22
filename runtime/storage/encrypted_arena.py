"""An arena whose file holds nothing that can be read: AES-256-XTS under a key that only lives here.

    memory -> bounce buffer, encrypted -> inner arena -> disk
    disk -> inner arena -> memory, decrypted in place

The key is drawn for each file and is never stored, so what is on the disk is noise as soon as the
process has ended, however it ended. XTS hides contents; that they are the right ones is what the
checksum is for. Each worker has a bounce buffer of one chunk, made when the file is opened.
"""

import importlib
import mmap
import secrets
from queue import SimpleQueue
from typing import Protocol, cast

from teraplan.errors import StorageUnusableError
from teraplan.runtime.storage.arena import Arena
from teraplan.runtime.storage.extents import GRANULE_BYTES
from teraplan.runtime.storage.memory import address_of, view
from teraplan.runtime.storage.transfers import CHUNK_BYTES

_KEY_BYTES = 64
"""Two keys of 256 bits, as XTS has it."""


class _Context(Protocol):
    def update_into(self, data: memoryview, buf: memoryview) -> int: ...


class _Cipher(Protocol):
    def encryptor(self) -> _Context: ...
    def decryptor(self) -> _Context: ...


class EncryptedArena(Arena):
    """`inner`, with everything encrypted that passes. Owns it."""

    def __init__(self, inner: Arena, *, num_workers: int) -> None:
        super().__init__(inner.fd)
        if inner.takes_device_memory:
            raise StorageUnusableError(
                "what goes from the device straight to the disk cannot be encrypted; leave "
                "encrypt or GPUDirect Storage out"
            )
        self.path = f"{inner.path}, encrypted"
        self.memory_alignment = inner.memory_alignment
        self.block_bytes = max(inner.block_bytes, GRANULE_BYTES)
        self._inner = inner
        self._key = secrets.token_bytes(_KEY_BYTES)
        self._ciphers = _library()
        self._buffers: SimpleQueue[mmap.mmap] = SimpleQueue()
        for _ in range(num_workers):
            buffer = mmap.mmap(-1, CHUNK_BYTES)
            buffer[::GRANULE_BYTES] = bytes(
                CHUNK_BYTES // GRANULE_BYTES
            )  # touched before it is used
            self._buffers.put(buffer)

    def write(self, address: int, nbytes: int, offset: int) -> None:
        """Encrypts into a buffer and writes that."""
        buffer = self._buffers.get()
        try:
            target = address_of(buffer)
            context = self._cipher(offset).encryptor()
            context.update_into(view(address, nbytes), view(target, nbytes))
            self._inner.write(target, nbytes, offset)
        finally:
            self._buffers.put(buffer)

    def read(self, address: int, nbytes: int, offset: int) -> None:
        """Reads into memory and decrypts it there."""
        self._inner.read(address, nbytes, offset)
        content = view(address, nbytes)
        self._cipher(offset).decryptor().update_into(content, content)

    def close(self) -> None:
        """Closes the file and forgets the key."""
        self._key = b""
        self._inner.close()

    def forget(self) -> None:
        """In a forked child: closes the child's copy of the descriptor."""
        self._inner.forget()

    def _cipher(self, offset: int) -> _Cipher:
        # Chunks are written and read whole, so the offset tells which data unit of XTS it is.
        tweak = (offset // GRANULE_BYTES).to_bytes(16, "little")
        cipher, aes, xts = self._ciphers
        return cast("_Cipher", cipher(aes(self._key), xts(tweak)))  # type: ignore[operator]


def _library() -> tuple[object, object, object]:
    try:
        ciphers = importlib.import_module("cryptography.hazmat.primitives.ciphers")
    except ImportError as error:
        raise StorageUnusableError(
            "encrypt needs the package cryptography; pip install 'teraplan[encrypt]'"
        ) from error
    return ciphers.Cipher, ciphers.algorithms.AES, ciphers.modes.XTS
