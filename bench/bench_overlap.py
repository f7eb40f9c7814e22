"""What a computation loses beside I/O at full speed: our engine, and fio, each in turns.

    python -m bench.bench_overlap [--directory DIR] [--rounds 3] [--seconds 2]

The computation is a product of matrices on so many threads, over and over. Its rate beside I/O is
compared with its rate alone in the same round. What fio's run costs is what the disk costs anyway:
the engine may cost 5 % more than the share of all cores that fio takes.
"""

import argparse
import json
import os
import statistics
import subprocess
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from bench.bench_storage import Ring, require_fio
from bench.results import write_results
from teraplan.runtime.storage import Record, Storage, default_directory
from teraplan.units import MIB

WIDTH = 1024
RECORD_BYTES = 16 * MIB
NUM_IN_FLIGHT = 8
ALLOWED_LOSS = 0.05
"""Of the computation's rate, beyond the share of the CPU that fio takes."""


def compute(seconds: float) -> float:
    """Products of matrices per second."""
    left, right = (torch.rand(WIDTH, WIDTH) for _ in range(2))
    out = torch.empty(WIDTH, WIDTH)
    number, began_s = 0, time.perf_counter()
    while time.perf_counter() - began_s < seconds:
        torch.mm(left, right, out=out)
        number += 1
    return number / (time.perf_counter() - began_s)


@contextmanager
def engine(directory: Path) -> Iterator[Callable[[], float]]:
    """Within this, the engine writes and reads without a pause; calls tell bytes moved so far."""
    stop = threading.Event()
    source, landing = Ring(), Ring()

    def feed(storage: Storage) -> None:
        flying: deque[Record] = deque()
        while not stop.is_set():
            address = source.take(RECORD_BYTES)
            flying.append(storage.put(address, RECORD_BYTES, owner=None, label="beside"))
            if len(flying) == NUM_IN_FLIGHT:
                record = flying.popleft()
                read = storage.get(record, landing.take(RECORD_BYTES), owner=None)
                storage.wait(read, what="the bench")
                storage.drop(record)

    with Storage.open([directory], without_python=True) as storage:
        feeder = threading.Thread(target=feed, args=(storage,))
        feeder.start()
        time.sleep(0.3)
        try:
            yield lambda: float(
                sum(info.written_bytes + info.read_bytes for info in storage.stores)
            )
        finally:
            stop.set()
            feeder.join()


@contextmanager
def fio(directory: Path, seconds: float) -> Iterator[list[float]]:
    """Within this, fio writes and reads; afterwards the list has GB/s and the CPU's share."""
    command = [
        *("fio", "--output-format=json", f"--directory={directory}", "--ioengine=psync"),
        *("--bs=8m", "--direct=1", "--size=512m", "--time_based", "--thread", "--overwrite=1"),
        *(f"--runtime={seconds + 0.6:.1f}", "--group_reporting"),
        *("--name=read", "--rw=read", "--name=write", "--rw=write"),
    ]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    time.sleep(0.5)
    found: list[float] = []
    yield found
    text, _ = process.communicate(timeout=120)
    jobs = json.loads(text[text.index("{") :])["jobs"]
    moved = sum(job[rw]["io_bytes"] for job in jobs for rw in ("read", "write"))
    cpu_ms = sum((job["usr_cpu"] + job["sys_cpu"]) / 100 * job["job_runtime"] for job in jobs)
    ms = max(job[rw]["runtime"] for job in jobs for rw in ("read", "write"))
    found += [moved / ms / 1e6, cpu_ms / ms / (os.cpu_count() or 1)]


def one_round(directory: Path, seconds: float) -> dict[str, float]:
    """Rates of the computation relative to alone, GB/s beside it, and fio's share of the CPU."""
    alone = compute(seconds)
    with engine(directory) as moved:
        before, began_s = moved(), time.perf_counter()
        beside_engine = compute(seconds)
        engine_rate = (moved() - before) / (time.perf_counter() - began_s) / 1e9
    with fio(directory, seconds) as found:
        beside_fio = compute(seconds)
    alone = (alone + compute(seconds)) / 2
    return {
        "beside_engine": beside_engine / alone,
        "beside_fio": beside_fio / alone,
        "engine_gb_per_s": engine_rate,
        "fio_gb_per_s": found[0],
        "fio_cpu_share": found[1],
        "loss": 1 - beside_engine / alone,
        "allowed_loss": ALLOWED_LOSS + found[1],
    }


def main() -> None:
    """Measures, prints medians, writes the file."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--directory", type=Path)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=2)
    options = parser.parse_args()
    require_fio()
    results: dict[str, object] = {}
    parent = options.directory or default_directory()
    for threads in sorted({1, os.cpu_count() or 1}):
        torch.set_num_threads(threads)
        with tempfile.TemporaryDirectory(prefix="teraplan-bench-", dir=parent) as directory:
            with fio(Path(directory), 0.5):  # lays out its files
                pass
            rounds = [one_round(Path(directory), options.seconds) for _ in range(options.rounds)]
        medians = {name: round(statistics.median(r[name] for r in rounds), 3) for name in rounds[0]}
        results[f"{threads} threads"] = medians
        print(f"{threads} threads: {medians}")
    write_results("overlap", results)


if __name__ == "__main__":
    main()
