"""DeepSpeed's aio, in an interpreter of its own: what it takes to move so many bytes.

    PYTHON bench/deepspeed_aio.py DIRECTORY NBYTES

reads "write NBYTES" or "read NBYTES" from standard input and answers each with a line of JSON. Run
as a script it imports nothing of teraplan, since the interpreter need not have it. Depth, block and
locked memory are what DeepSpeed's own tuner prefers on one disk; one thread, as is its default.
"""

import json
import resource
import subprocess
import sys
import time
from pathlib import Path
from types import TracebackType

MIB = 1 << 20
TENSOR_BYTES = 16 * MIB
RING_TENSORS = 16
NUM_IN_FLIGHT = 4


class Aio:
    """The other end of the pipe: DeepSpeed's aio in the process of the interpreter `python`."""

    patterns = ("write", "read")

    def __init__(self, python: str, directory: Path, nbytes: int) -> None:
        self._process = subprocess.Popen(
            [python, __file__, str(directory), str(nbytes)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._answer()  # it has been built and its file laid out

    def __enter__(self) -> "Aio":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        assert self._process.stdin is not None, "it was opened with a pipe"
        self._process.stdin.close()
        self._process.wait(timeout=60)

    def move(self, pattern: str, nbytes: int) -> dict[str, float]:
        """`seconds` and `cpu_s` that `pattern` takes; `nbytes` is a multiple of 16 MiB."""
        assert self._process.stdin is not None, "it was opened with a pipe"
        self._process.stdin.write(f"{pattern} {nbytes}\n")
        self._process.stdin.flush()
        return self._answer()

    def _answer(self) -> dict[str, float]:
        assert self._process.stdout is not None, "it was opened with a pipe"
        for line in self._process.stdout:  # DeepSpeed prints, too
            if line.startswith("@"):
                answer: dict[str, float] = json.loads(line[1:])
                return answer
        raise SystemExit("DeepSpeed's aio ended without an answer")


def _serve(directory: Path, nbytes: int) -> None:
    import torch
    from deepspeed.ops.op_builder import AsyncIOBuilder  # type: ignore[import-not-found]

    handle = (
        AsyncIOBuilder()
        .load(verbose=False)
        .aio_handle(
            block_size=MIB,
            queue_depth=32,
            single_submit=False,
            overlap_events=True,
            intra_op_parallelism=1,
        )
    )
    ring = [
        handle.new_cpu_locked_tensor(TENSOR_BYTES, torch.empty(0, dtype=torch.uint8))
        for _ in range(RING_TENSORS)
    ]
    for tensor in ring:
        tensor.random_(0, 256)
    path = directory / "deepspeed.bin"

    def move(pattern: str, nbytes: int) -> None:
        start = handle.async_pwrite if pattern == "write" else handle.async_pread
        num_running = 0
        for index in range(nbytes // TENSOR_BYTES):
            start(ring[index % RING_TENSORS], str(path), index * TENSOR_BYTES)
            num_running += 1
            if num_running == NUM_IN_FLIGHT:
                handle.wait()
                num_running = 0
        if num_running:
            handle.wait()

    move("write", nbytes)
    _say({})
    for line in sys.stdin:
        pattern, wanted = line.split()
        began_s, began_cpu_s = time.perf_counter(), _cpu_s()
        move(pattern, int(wanted))
        took_s = time.perf_counter() - began_s
        _say({"seconds": took_s, "cpu_s": _cpu_s() - began_cpu_s})


def _cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def _say(answer: dict[str, float]) -> None:
    print("@" + json.dumps(answer), flush=True)


if __name__ == "__main__":
    _serve(Path(sys.argv[1]), int(sys.argv[2]))
