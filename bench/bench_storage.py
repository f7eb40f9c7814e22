"""How close storage comes to the disk: the engine against fio on one directory, in turns.

    python -m bench.bench_storage [--directory DIR] [--gib 2] [--rounds 3]

Every round runs each contender once, in the same order; a ratio is taken within a round, to the
best that fio reached there with O_DIRECT in any of its ways. CPU time is user and system together,
of all threads. `one` and `three` are the engine with so many workers per store.
"""

import argparse
import json
import mmap
import os
import random
import statistics
import subprocess
import tempfile
import time
import zlib
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import xxhash

from bench.results import write_results
from teraplan.run_record import Direction
from teraplan.runtime.storage import Record, Storage, Transfer, default_directory
from teraplan.runtime.storage.memory import address_of, view
from teraplan.units import GIB, MIB

FIO_WAYS = (
    ("libaio", "1m", 32, 1),
    ("psync", "4m", 1, 4),
)
"""Engine, block, depth, jobs: the best two of a wider search on one machine."""
FIO_PATTERNS = ("write", "read", "both")
PATTERNS = (*FIO_PATTERNS, "planned")
WORKERS = {
    "one": (Direction.BACK,),
    "three": (Direction.BACK, Direction.OUT, Direction.BACK),
}
RING_BYTES = 256 * MIB
PREFETCHED = 4
"""Reads in flight at once; together they are far smaller than the ring that they land in."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Took:
    """What moving so many bytes took."""

    nbytes: int
    seconds: float
    cpu_s: float

    @property
    def rate(self) -> float:
        """GB/s."""
        return self.nbytes / self.seconds / 1e9

    @property
    def cpu_per_gb(self) -> float:
        """Seconds of CPU time for each GB."""
        return self.cpu_s / (self.nbytes / 1e9)


def fio(directory: Path, way: tuple[str, str, int, int], pattern: str, nbytes: int) -> Took:
    """What fio takes for `pattern`: write, read, or both at once, half each."""
    engine, block, depth, jobs = way
    share = nbytes // jobs // MIB // 16 * 16
    command = [
        *("fio", "--output-format=json", f"--directory={directory}", f"--ioengine={engine}"),
        *(f"--bs={block}", f"--iodepth={depth}", f"--numjobs={jobs}", "--direct=1"),
        *("--fallocate=none", "--overwrite=1", "--group_reporting", "--thread"),
    ]
    if pattern == "both":
        for rw in ("read", "write"):
            command += [f"--name=half-{rw}", f"--rw={rw}", f"--size={share // 2}m"]
            command += [f"--filename_format=file.{rw}.$jobnum"]
    else:
        command += ["--name=all", f"--rw={pattern}", f"--size={share}m"]
        command += ["--filename_format=file.$jobnum"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    found = json.loads(done.stdout[done.stdout.index("{") :])["jobs"]
    moved = sum(job[rw]["io_bytes"] for job in found for rw in ("read", "write"))
    ms = max(job[rw]["runtime"] for job in found for rw in ("read", "write"))
    # In per cent of the time of all jobs together; without fio's own start.
    cpu = sum((job["usr_cpu"] + job["sys_cpu"]) / 100 * job["job_runtime"] for job in found)
    return Took(nbytes=moved, seconds=ms / 1e3, cpu_s=cpu / 1e3)


class Ring:
    """Touched, page-aligned memory that tensors are cut from."""

    def __init__(self) -> None:
        self._block = mmap.mmap(-1, RING_BYTES)
        content = os.urandom(16 * MIB)
        for _ in range(RING_BYTES // len(content)):
            self._block.write(content)
        self._start, self._next = address_of(self._block), 0

    def take(self, nbytes: int) -> int:
        """Address of the next `nbytes`."""
        if self._next + nbytes > RING_BYTES:
            self._next = 0
        address = self._start + self._next
        self._next += -(-nbytes // 4096) * 4096
        return address


def sizes_of(pattern: str, nbytes: int) -> list[int]:
    """Tensors of 16 MiB; as a plan has them, from 256 KiB to 48 MiB."""
    if pattern != "planned":
        return [16 * MIB] * (nbytes // (16 * MIB))
    chance, sizes = random.Random(3), list[int]()
    while sum(sizes) < nbytes:
        sizes.append(int(256 * 1024 * 2 ** chance.uniform(0, 7.5)))
    return sizes


def ours(storage: Storage, ring: Ring, landing: Ring, pattern: str, nbytes: int) -> Took:
    """What the engine takes for `pattern`."""
    if pattern == "planned":
        return _planned(storage, ring, landing, nbytes)
    kept = _write(storage, ring, sizes_of(pattern, nbytes // (2 if pattern == "both" else 1)))
    for record in kept:
        storage.wait(record.write, what="the bench")
    more = [] if pattern == "read" else sizes_of(pattern, sum(record.nbytes for record in kept))
    with _measured() as took:
        written = _write(storage, ring, more)
        reads = [] if pattern == "write" else kept
        _finish(storage, landing, written, reads)
    _drop(storage, [*kept, *written])
    return took(sum(more) + sum(record.nbytes for record in reads))


def _planned(storage: Storage, ring: Ring, landing: Ring, nbytes: int) -> Took:
    """A forward writes all, a backward reads in the opposite order and frees."""
    sizes = sizes_of("planned", nbytes // 2)
    _drop(storage, _write(storage, ring, sizes))  # extents that have been written before
    with _measured() as took:
        records = _write(storage, ring, sizes)
        records.reverse()
        flying: deque[tuple[Record, Transfer]] = deque()
        for record in [*records, *([None] * PREFETCHED)]:
            if record is not None:
                read = storage.get(record, landing.take(record.nbytes), owner=None)
                flying.append((record, read))
            if flying and (record is None or len(flying) > PREFETCHED):
                oldest, read = flying.popleft()
                storage.wait(read, what="the bench")
                storage.drop(oldest)
    return took(2 * sum(sizes))


def _write(storage: Storage, ring: Ring, sizes: Sequence[int]) -> list[Record]:
    return [
        storage.put(ring.take(nbytes), nbytes, owner=None, label=f"t{index}")
        for index, nbytes in enumerate(sizes)
    ]


def _finish(
    storage: Storage, landing: Ring, written: Sequence[Record], reads: Sequence[Record]
) -> None:
    transfers = [storage.get(r, landing.take(r.nbytes), owner=None) for r in reads]
    for transfer in [record.write for record in written] + transfers:
        storage.wait(transfer, what="the bench")


def _drop(storage: Storage, records: Sequence[Record]) -> None:
    for record in records:
        storage.wait(record.write, what="the bench")
        storage.drop(record)


@contextmanager
def _measured() -> Iterator[Callable[[int], Took]]:
    cpu_s, began_s = time.process_time(), time.perf_counter()
    took: list[float] = []

    def result(nbytes: int) -> Took:
        return Took(nbytes=nbytes, seconds=took[0], cpu_s=took[1])

    yield result
    took += [time.perf_counter() - began_s, time.process_time() - cpu_s]


def checksum_rates() -> dict[str, float]:
    """GB/s of each checksum that is installed, over a chunk of 8 MiB in one thread."""
    ring = Ring()
    content = view(ring.take(8 * MIB), 8 * MIB)
    ways: dict[str, Callable[[memoryview], object]] = {
        "xxh3_64": xxhash.xxh3_64_intdigest,
        "zlib.crc32": zlib.crc32,
    }
    rates: dict[str, float] = {}
    for name, way in ways.items():
        way(content)
        began_s = time.perf_counter()
        for _ in range(20):
            way(content)
        rates[name] = 20 * 8 * MIB / (time.perf_counter() - began_s) / 1e9
    return rates


def one_round(directory: Path, rings: tuple[Ring, Ring], nbytes: int) -> dict[str, dict[str, Took]]:
    """Every contender in every pattern: pattern -> contender -> what it took."""
    found: dict[str, dict[str, Took]] = {pattern: {} for pattern in PATTERNS}
    for pattern in PATTERNS:
        for way in FIO_WAYS if pattern in FIO_PATTERNS else ():
            found[pattern][f"fio {way[0]}"] = fio(directory, way, pattern, nbytes)
        for name, workers in WORKERS.items():
            for checksum in (True, False) if name == "one" and pattern in FIO_PATTERNS else (True,):
                label = f"{name}{'' if checksum else ', no checksum'}"
                with Storage.open([directory], checksum=checksum, workers=workers) as storage:
                    found[pattern][label] = ours(storage, *rings, pattern, nbytes)
    return found


def table(rounds: Sequence[dict[str, dict[str, Took]]]) -> list[dict[str, object]]:
    """Medians over the rounds, and ratios to fio's best of the same round."""
    rows: list[dict[str, object]] = []
    for pattern in PATTERNS:
        for name in rounds[0][pattern]:
            all_took = [one[pattern][name] for one in rounds]
            row: dict[str, object] = {
                "pattern": pattern,
                "contender": name,
                "gb_per_s": round(statistics.median(t.rate for t in all_took), 2),
                "cpu_s_per_gb": round(statistics.median(t.cpu_per_gb for t in all_took), 3),
            }
            # The planned pattern reads and writes; fio's is both at once.
            best = [
                _best_of_fio(one["both" if pattern == "planned" else pattern]) for one in rounds
            ]
            ratios = [t.rate / b.rate for t, b in zip(all_took, best, strict=True)]
            cpus = [t.cpu_per_gb / b.cpu_per_gb for t, b in zip(all_took, best, strict=True)]
            row["rate_to_best_fio"] = round(statistics.median(ratios), 2)
            row["cpu_to_best_fio"] = round(statistics.median(cpus), 2)
            rows.append(row)
    return rows


def _best_of_fio(found: dict[str, Took]) -> Took:
    return max((t for name, t in found.items() if name.startswith("fio")), key=lambda t: t.rate)


def main() -> None:
    """Measures, prints the table, writes the file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--directory", type=Path)
    parser.add_argument("--gib", type=float, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    nbytes, rings = int(options.gib * GIB), (Ring(), Ring())
    parent = options.directory or default_directory()
    with tempfile.TemporaryDirectory(prefix="teraplan-bench-", dir=parent) as directory:
        for pattern in ("write", "both"):  # lays out fio's files
            for way in FIO_WAYS:
                fio(Path(directory), way, pattern, nbytes)
        rounds = [one_round(Path(directory), rings, nbytes) for _ in range(options.rounds)]
    rows = table(rounds)
    for row in rows:
        print("  ".join(f"{value!s:>22}" for value in row.values()))
    rates = checksum_rates()
    print({name: f"{rate:.1f} GB/s" for name, rate in rates.items()})
    write_results(
        "storage",
        {"rows": rows, "checksum_gb_per_s": rates, "gib": options.gib, "rounds": options.rounds},
    )


if __name__ == "__main__":
    main()
