"""Runs the benchmarks of this folder, each in a process of its own."""

import argparse
import subprocess
import sys
from pathlib import Path


def main() -> int:
    """Number of benchmarks that failed."""
    known = sorted(path.stem.removeprefix("bench_") for path in _folder.glob("bench_*.py"))
    parser = argparse.ArgumentParser(prog="python -m bench", description=__doc__)
    parser.add_argument(
        "names", nargs="*", metavar="NAME", help=f"of {', '.join(known)}; without any, all of them"
    )
    names = parser.parse_args().names or known
    if unknown := sorted(set(names) - set(known)):
        parser.error(f"there is no benchmark {', '.join(unknown)}; choose of {', '.join(known)}")
    failed: list[str] = []
    for number, name in enumerate(names, 1):
        print(f"[{number}/{len(names)}] {name}", flush=True)
        if subprocess.run([sys.executable, "-m", f"bench.bench_{name}"], check=False).returncode:
            failed.append(name)
    if failed:
        print(f"failed: {', '.join(failed)}")
    return len(failed)


_folder = Path(__file__).parent

if __name__ == "__main__":
    sys.exit(main())
