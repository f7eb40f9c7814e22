"""Runs every benchmark of this folder, each in a process of its own."""

import subprocess
import sys
from pathlib import Path


def main() -> int:
    """Number of benchmarks that failed."""
    names = sorted(path.stem for path in Path(__file__).parent.glob("bench_*.py"))
    failed: list[str] = []
    for number, name in enumerate(names, 1):
        print(f"[{number}/{len(names)}] {name}", flush=True)
        if subprocess.run([sys.executable, "-m", f"bench.{name}"], check=False).returncode:
            failed.append(name)
    if failed:
        print(f"failed: {', '.join(failed)}")
    return len(failed)


if __name__ == "__main__":
    sys.exit(main())
