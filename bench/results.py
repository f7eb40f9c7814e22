"""Where measurements are kept: `bench/results/<machine>/<name>.json`, with what took them."""

import json
import os
import platform
import subprocess
from pathlib import Path

import torch

import teraplan

FOLDER = Path(__file__).parent / "results"


def write_results(name: str, data: dict[str, object]) -> Path:
    """Write one measurement; returns its path."""
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    machine = f"{device}-{os.cpu_count()}-cores".replace(" ", "-").lower()
    path = FOLDER / machine / f"{name}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    taken_on = {
        "commit": _commit(),
        "cpu": _cpu_name(),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "teraplan": teraplan.__version__,
        "torch": torch.__version__,
    }
    path.write_text(json.dumps(data | {"taken_on": taken_on}, indent=1, sort_keys=True) + "\n")
    print(f"written to {path.relative_to(FOLDER.parent.parent)}")
    return path


def _commit() -> str:
    done = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False
    )
    return done.stdout.strip()


def _cpu_name() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.machine()
