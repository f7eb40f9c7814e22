"""What the probe runs in a process of its own: does kvikio move bytes here, and by which way?

Run as a script with "host" or "gds" and a directory; prints one line of JSON. It imports nothing
of teraplan. It may crash, and cuFile hangs for ever in guests without /proc/modules; that is why
it is not done in the training process.
"""

import ctypes
import importlib
import json
import mmap
import os
import sys
from types import ModuleType

_NBYTES = 16 << 20


def _host(kvikio: ModuleType, path: str) -> str:
    out, back = mmap.mmap(-1, _NBYTES), mmap.mmap(-1, _NBYTES)
    out.write(os.urandom(_NBYTES))
    with kvikio.CuFile(path, "r+") as file:
        file.pwrite(out, _NBYTES, 0, _NBYTES).get()
        file.pread(back, _NBYTES, 0, _NBYTES).get()
    return "" if out[:] == back[:] else "kvikio brought back other bytes than it wrote"


def _gds(kvikio: ModuleType, path: str) -> str:
    """Not run on a GPU yet."""
    code = ctypes.CDLL("libcuda.so.1").cuInit(0)
    if code != 0:
        return f"cuInit returned {code}"
    torch = importlib.import_module("torch")
    out = torch.randint(0, 256, (_NBYTES,), dtype=torch.uint8, device="cuda")
    back = torch.zeros_like(out)
    torch.cuda.synchronize()
    with (
        importlib.import_module("kvikio.statistics").SummaryMonitor() as monitor,
        kvikio.CuFile(path, "r+") as file,
    ):
        file.pwrite(out, _NBYTES, 0, _NBYTES).get()
        file.pread(back, _NBYTES, 0, _NBYTES).get()
        used = monitor.get().by_backend
    if not bool((out == back).all()):
        return "GDS brought back other bytes than it wrote"
    if "GDS" not in used or used["GDS"]["bytes_transferred"] < 2 * _NBYTES:
        return f"kvikio did not use GDS but {', '.join(map(str, used)) or 'nothing'}"
    return ""


def _main(way: str, directory: str) -> None:
    kvikio = importlib.import_module("kvikio")
    fd = os.open(directory, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
    os.ftruncate(fd, _NBYTES)
    reason = (_gds if way == "gds" else _host)(kvikio, f"/proc/self/fd/{fd}")
    sys.stdout.write(json.dumps({"version": kvikio.__version__, "reason": reason}) + "\n")


if __name__ == "__main__":
    _main(sys.argv[1], sys.argv[2])
