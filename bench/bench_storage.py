"""How close storage comes to the disk: the engine against fio on one directory, in turns.

    python -m bench.bench_storage [--directory DIR] [--gib 2] [--rounds 5] [--deepspeed PYTHON]

Every round runs each contender once, in the same order; a ratio is taken within a round, to the
best that fio reached there with O_DIRECT in any of its ways. Our memory lies on huge pages, as that
of tensors does; fio's can, too, where some are reserved (`sysctl vm.nr_hugepages=64`), and then
there is a second ratio, to the best of fio on huge pages. CPU time is user and system together,
of all threads. `one` is the engine with one thread per store, `default` with those that it has
here. Each contender has files of its own, of one length, and overwrites what it wrote before, as a
training step does after its first. `--deepspeed` names an interpreter in which DeepSpeed is
installed, for its aio beside ours.
"""

import argparse
import json
import mmap
import os
import random
import shutil
import statistics
import subprocess
import tempfile
import time
import zlib
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import xxhash

from bench.deepspeed_aio import Aio
from bench.results import write_results
from teraplan.runtime.process.pages import use_huge_pages
from teraplan.runtime.storage import Record, Storage, Transfer, default_directory
from teraplan.runtime.storage.memory import address_of, view
from teraplan.runtime.storage.workers import WORKERS as DEFAULT_WORKERS
from teraplan.runtime.storage.workers import Workers
from teraplan.units import GIB, MIB
from teraplan.values.run_record import Direction

FIO_WAYS = (
    ("libaio", "1m", 4, 1, "malloc"),
    ("libaio", "1m", 32, 1, "malloc"),
    ("io_uring", "1m", 4, 1, "malloc"),
    ("psync", "4m", 1, 4, "malloc"),
)
FIO_WAYS_ON_HUGE_PAGES = (
    ("libaio", "1m", 4, 1, "shmhuge"),
    ("libaio", "1m", 16, 1, "shmhuge"),
    ("psync", "8m", 1, 2, "shmhuge"),
)
"""Engine, block, depth, jobs, memory: the best of wider searches. Much in flight is memory that fio
touches for the first time, which costs it a quarter of its rate on one machine."""
_ON_HUGE_PAGES = " on huge pages"
_RESERVED_HUGE_PAGES, _LEAST_HUGE_PAGES = Path("/proc/sys/vm/nr_hugepages"), 32
FIO_PATTERNS = ("write", "read", "both")
PATTERNS = (*FIO_PATTERNS, "planned")
WORKERS = {
    "default": DEFAULT_WORKERS,
    "one": Workers((Direction.BACK,)),
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


def fio(directory: Path, way: tuple[str, str, int, int, str], pattern: str, nbytes: int) -> Took:
    """What fio takes for `pattern`: write, read, or both at once, half each."""
    engine, block, depth, jobs, memory = way
    share = nbytes // jobs // MIB // 16 * 16
    command = [
        *("fio", "--output-format=json", f"--directory={directory}", f"--ioengine={engine}"),
        *(f"--bs={block}", f"--iodepth={depth}", f"--numjobs={jobs}", "--direct=1"),
        *("--fallocate=none", "--overwrite=1", "--group_reporting", "--thread"),
        *(f"--filename_format={engine}.{block}.{depth}.{memory}.$jobnum", f"--mem={memory}"),
    ]
    if pattern == "both":
        for rw, offset in (("read", 0), ("write", share // 2)):
            command += [f"--name={rw}", f"--rw={rw}", f"--offset={offset}m"]
            command += [f"--size={share // 2}m"]
    else:
        command += ["--name=all", f"--rw={pattern}", f"--size={share}m"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    found = json.loads(done.stdout[done.stdout.index("{") :])["jobs"]
    moved = sum(job[rw]["io_bytes"] for job in found for rw in ("read", "write"))
    ms = max(job[rw]["runtime"] for job in found for rw in ("read", "write"))
    # In per cent of the time of all jobs together; without fio's own start.
    cpu = sum((job["usr_cpu"] + job["sys_cpu"]) / 100 * job["job_runtime"] for job in found)
    return Took(nbytes=moved, seconds=ms / 1e3, cpu_s=cpu / 1e3)


class Ring:
    """Touched memory that tensors are cut from, on huge pages as those of a training on the CPU."""

    def __init__(self) -> None:
        self._block = mmap.mmap(-1, RING_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        use_huge_pages([(address_of(self._block), RING_BYTES)])
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


class Engine:
    """Our storage with so many workers. Its file is as long from the start as it will ever be."""

    def __init__(
        self,
        directory: Path,
        rings: tuple[Ring, Ring],
        nbytes: int,
        *,
        workers: str,
        checksum: bool,
    ) -> None:
        self.name = workers + ("" if checksum else ", no checksum")
        self._ring, self._landing = rings
        self._nbytes = nbytes
        self._storage = Storage.open(
            [directory], checksum=checksum, workers=WORKERS[workers], without_python=True
        )
        self._kept = self._write(sizes_of("write", nbytes))

    def close(self) -> None:
        """Deletes the file."""
        self._storage.close()

    def move(self, pattern: str) -> Took:
        """What `pattern` takes."""
        if pattern == "planned":
            return self._move_planned()
        half = len(self._kept) // 2
        old = {"read": 0, "both": half, "write": len(self._kept)}[pattern]
        sizes, reads = [record.nbytes for record in self._kept[:old]], self._kept[old:]
        self._drop(self._kept[:old])
        with _measured() as took:
            written = self._write(sizes)
            transfers = [self._get(record) for record in reads]
            for transfer in [record.write for record in written] + transfers:
                self._storage.wait(transfer, what="the bench")
        self._kept = written + reads
        return took(sum(record.nbytes for record in self._kept))

    def _move_planned(self) -> Took:
        """A forward writes all, a backward reads in the opposite order and frees."""
        self._drop(self._kept)
        sizes = sizes_of("planned", self._nbytes // 2)
        with _measured() as took:
            records = self._write(sizes)
            records.reverse()
            flying: deque[tuple[Record, Transfer]] = deque()
            for record in [*records, *([None] * PREFETCHED)]:
                if record is not None:
                    flying.append((record, self._get(record)))
                if flying and (record is None or len(flying) > PREFETCHED):
                    oldest, read = flying.popleft()
                    self._storage.wait(read, what="the bench")
                    self._storage.drop(oldest)
        self._kept = self._write(sizes_of("write", self._nbytes))
        return took(2 * sum(sizes))

    def _write(self, sizes: Sequence[int]) -> list[Record]:
        return [
            self._storage.put(self._ring.take(nbytes), nbytes, owner=None, label=f"t{index}")
            for index, nbytes in enumerate(sizes)
        ]

    def _get(self, record: Record) -> Transfer:
        return self._storage.get(record, self._landing.take(record.nbytes), owner=None)

    def _drop(self, records: Sequence[Record]) -> None:
        for record in records:
            self._storage.wait(record.write, what="the bench")
            self._storage.drop(record)


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


def one_round(
    directory: Path, engines: Sequence[Engine], peer: Aio | None, nbytes: int
) -> dict[str, dict[str, Took]]:
    """Every contender in every pattern: pattern -> contender -> what it took."""
    found: dict[str, dict[str, Took]] = {pattern: {} for pattern in PATTERNS}
    for pattern in PATTERNS:
        if pattern in FIO_PATTERNS:
            for way in (*FIO_WAYS, *(FIO_WAYS_ON_HUGE_PAGES if has_huge_pages() else ())):
                on = "" if way in FIO_WAYS else _ON_HUGE_PAGES
                name = f"fio {way[0]} {way[1]} x {way[2] * way[3]}{on}"
                found[pattern][name] = fio(directory, way, pattern, nbytes)
        for engine in engines:
            found[pattern][engine.name] = engine.move(pattern)
        if peer is not None and pattern in peer.patterns:
            found[pattern]["DeepSpeed aio"] = Took(nbytes=nbytes, **peer.move(pattern, nbytes))
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
            peers = [one["both" if pattern == "planned" else pattern] for one in rounds]
            has_both = any(name.endswith(_ON_HUGE_PAGES) for name in peers[0])
            for on in ("", _ON_HUGE_PAGES) if has_both else ("",):
                best = [_best_of_fio(one, on) for one in peers]
                ratios = [t.rate / b.rate for t, b in zip(all_took, best, strict=True)]
                cpus = [t.cpu_per_gb / b.cpu_per_gb for t, b in zip(all_took, best, strict=True)]
                key = on.replace(" ", "_")
                row[f"rate_to_best_fio{key}"] = round(statistics.median(ratios), 2)
                row[f"cpu_to_best_fio{key}"] = round(statistics.median(cpus), 2)
            rows.append(row)
    return rows


def _best_of_fio(found: dict[str, Took], on: str) -> Took:
    of_fio = {name: took for name, took in found.items() if name.startswith("fio")}
    ways = [took for name, took in of_fio.items() if name.endswith(_ON_HUGE_PAGES) == bool(on)]
    return max(ways, key=lambda took: took.rate)


def has_huge_pages() -> bool:
    """Whether fio can have its memory on some that are reserved."""
    return int(_RESERVED_HUGE_PAGES.read_text()) >= _LEAST_HUGE_PAGES


def require_fio() -> None:
    """End with a message where fio is not installed."""
    if shutil.which("fio") is None:
        raise SystemExit("fio, which this compares with, is not installed: apt-get install fio")


def main() -> None:
    """Measures, prints the table, writes the file."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--directory", type=Path)
    parser.add_argument("--gib", type=float, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--deepspeed", help="interpreter in which DeepSpeed is installed")
    options = parser.parse_args()
    require_fio()
    nbytes = int(options.gib * GIB)
    parent = options.directory or default_directory()
    with ExitStack() as stack:
        place = stack.enter_context(
            tempfile.TemporaryDirectory(prefix="teraplan-bench-", dir=parent)
        )
        rounds = _measure_rounds(stack, Path(place), nbytes, options)
    rows = table(rounds)
    for row in rows:
        print("  ".join(f"{value!s:>22}" for value in row.values()))
    if not has_huge_pages():
        print("fio on huge pages is not compared: none are reserved (sysctl vm.nr_hugepages=64)")
    rates = checksum_rates()
    print({name: f"{rate:.1f} GB/s" for name, rate in rates.items()})
    write_results(
        "storage",
        {
            "rows": rows,
            "checksum_gb_per_s": rates,
            "gib": options.gib,
            "rounds": options.rounds,
            "default_workers": [len(threads) for threads in DEFAULT_WORKERS],
            "deepspeed": "measured" if options.deepspeed else "not installed: no interpreter named",
        },
    )


def _measure_rounds(
    stack: ExitStack, directory: Path, nbytes: int, options: argparse.Namespace
) -> list[dict[str, dict[str, Took]]]:
    peer: Aio | None = None
    if options.deepspeed:
        peer = stack.enter_context(Aio(options.deepspeed, directory, nbytes))
    else:
        print("DeepSpeed's aio is not compared: name its interpreter with --deepspeed")
    for pattern in ("write", "both"):  # lays out fio's files
        for way in FIO_WAYS:
            fio(directory, way, pattern, nbytes)
    rings, engines = (Ring(), Ring()), list[Engine]()
    for workers, checksum in (*((name, True) for name in WORKERS), ("default", False)):
        engines.append(Engine(directory, rings, nbytes, workers=workers, checksum=checksum))
        stack.callback(engines[-1].close)
    return [one_round(directory, engines, peer, nbytes) for _ in range(options.rounds)]


if __name__ == "__main__":
    main()
