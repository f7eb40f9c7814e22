"""Trains one small GPT twice, with unlimited and with little memory, and compares every bit.

    python -m bench.demo [--output demo-output]

Exit code 0 if losses, parameters and optimizer state are equal and the budget was kept, else 1.
"""

import argparse
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from bench.demo.outcome import Outcome
from bench.demo.verdict import kept, problems, table
from teraplan.units import format_nbytes

SHARE = 0.3
"""How much of the memory beside the training state the second run may use."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run both, compare, draw; the process's exit code."""
    parser = argparse.ArgumentParser(description="\n".join((__doc__ or "").splitlines()[:3]))
    parser.add_argument("--output", type=Path, default=Path("demo-output"))
    parser.add_argument("--device", default=None, help="default: a GPU if there is one")
    parser.add_argument("--tiny", action="store_true", help="a model that trains in seconds")
    wanted = parser.parse_args(arguments)
    device = wanted.device or ("cuda" if torch.cuda.is_available() else "cpu")
    common = ["--device", device, *(["--tiny"] if wanted.tiny else [])]
    output: Path = wanted.output
    output.mkdir(parents=True, exist_ok=True)

    print(f"training on {device}, twice; the first step of each run compiles (about a minute)")
    print("\n1. as much memory as it likes")
    unlimited = run("unlimited", "1000%", output, common)
    beside = unlimited.unlimited_peak_bytes - unlimited.state_bytes
    budget_bytes = unlimited.state_bytes + int(SHARE * beside)
    print(
        f"\n2. {format_nbytes(budget_bytes)} instead of "
        f"{format_nbytes(unlimited.unlimited_peak_bytes)}: the training state and {SHARE:.0%} "
        "of the rest; what does not fit goes to storage and comes back"
    )
    limited = run("budget", str(budget_bytes), output, common)
    text = table(unlimited, limited)
    (output / "summary.txt").write_text(text + "\n")
    print(f"\n{text}\n")
    print("\n".join(f"storage    {store}" for store in limited.stores))
    draw(limited, output)
    return report(unlimited, limited)


def run(name: str, device_budget: str, output: Path, common: Sequence[str]) -> Outcome:
    """The outcome of one run, in a process of its own."""
    report, file = output / name, output / f"{name}.json"
    file.unlink(missing_ok=True)
    command = [sys.executable, "-m", "bench.demo.train", *common]
    command += ["--name", name, "--device-budget", device_budget]
    command += ["--report", str(report), "--outcome", str(file)]
    code = subprocess.run(command, check=False).returncode
    if code != 0:
        raise SystemExit(f"the run {name} ended with exit code {code}: {' '.join(command)}")
    return Outcome.read(file)


def draw(limited: Outcome, output: Path) -> None:
    """Draw the plan and the run, and say where everything is."""
    pictures = {"plot": output / "step.png", "timeline": output / "timeline.json.gz"}
    source = limited.run_path if Path(limited.run_path).is_file() else limited.plan_path
    for command, picture in pictures.items():
        arguments = ["-m", "teraplan", command, source, "-o", str(picture)]
        done = subprocess.run(
            [sys.executable, *arguments], check=False, capture_output=True, text=True
        )
        if done.returncode != 0:
            print(f"no {picture}: {done.stderr.strip()}")
    print(f"plan       {limited.plan_path}   (python -m teraplan show {limited.plan_path})")
    print(f"trace      {limited.trace_path}")
    print(f"run        {limited.run_path}")
    print(f"picture    {pictures['plot']}")
    print(f"timeline   {pictures['timeline']}   (open it at https://ui.perfetto.dev)")


def report(unlimited: Outcome, limited: Outcome) -> int:
    """Print the verdict; the process's exit code."""
    print()
    found = problems(unlimited, limited)
    if found:
        print("NOT as promised:")
        print("\n".join(f"  {problem}" for problem in found))
        return 1
    print(
        f"equal in every bit: {len(unlimited.losses)} losses, {unlimited.num_parameters:,} "
        f"parameters ({unlimited.parameters}) and the optimizer's state; {kept(limited)}"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
