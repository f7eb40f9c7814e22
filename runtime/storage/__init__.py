"""Tensors on disk: written straight from their memory, read straight back, checked on the way.

    Storage.open(directories) -> put -> Record -> get -> Transfer -> wait

`session` is the public face, `store` one directory with its queue and threads, `arena` what a back
end has to be, `posix_arena` the default one; `lane` moves its bytes without Python's lock.
"""

from teraplan.runtime.storage.directories import default_directory
from teraplan.runtime.storage.session import Storage, StoreInfo
from teraplan.runtime.storage.transfers import Record, Transfer

__all__ = ["Record", "Storage", "StoreInfo", "Transfer", "default_directory"]
