"""Runs contenders in turns, one step each, so that what the machine does hits all of them alike.

Every other round goes the other way, so that none is always the one behind a certain other.

A contender whose turn it is not is stopped (SIGSTOP): some have threads that spin, some would still
be writing.
"""

import dataclasses
import json
import signal
import statistics
import subprocess
from collections.abc import Sequence
from typing import Any

from bench.contender import Contender


class Runner:
    """A contender in a process of its own."""

    def __init__(self, contender: Contender) -> None:
        self.contender = contender
        self._process = subprocess.Popen(
            [
                contender.interpreter,
                "-m",
                contender.module,
                json.dumps(dataclasses.asdict(contender)),
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.answers: list[dict[str, Any]] = []
        self._read()

    def step(self) -> None:
        """Take one step."""
        self._tell("step")
        self.answers.append(self._read())

    def end(self) -> dict[str, Any]:
        """The contender's last words."""
        self._tell("end")
        last = self._read()
        self._process.send_signal(signal.SIGCONT)
        self._process.wait(timeout=60)
        return last

    def kill(self) -> None:
        """End it if it has not ended, stopped or not."""
        self._process.kill()
        self._process.wait()

    @property
    def step_ns(self) -> list[int]:
        """Times of the steps so far."""
        return [answer["step_ns"] for answer in self.answers]

    def _tell(self, what: str) -> None:
        assert self._process.stdin is not None
        self._process.send_signal(signal.SIGCONT)
        self._process.stdin.write(what + "\n")
        self._process.stdin.flush()

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith("@"):
                answer: dict[str, Any] = json.loads(line[1:])
                self._process.send_signal(signal.SIGSTOP)
                return answer
        raise SystemExit(f"{self.contender.name} ended without an answer")


def race(contenders: Sequence[Contender], rounds: int) -> dict[str, dict[str, Any]]:
    """Per contender: step times, ratio of step rates to the first's, peak, losses, status.

    The ratio is the median over rounds of the first's step time over this one's in the same round.
    """
    runners: list[Runner] = []
    try:
        return _race(runners, contenders, rounds)
    finally:
        for runner in runners:
            runner.kill()


def _race(
    runners: list[Runner], contenders: Sequence[Contender], rounds: int
) -> dict[str, dict[str, Any]]:
    for contender in contenders:
        print(f"  warming up: {contender.name}", flush=True)
        runners.append(Runner(contender))
    for number in range(rounds):
        for runner in runners if number % 2 == 0 else reversed(runners):
            runner.step()
        times = "  ".join(f"{r.step_ns[-1] / 1e9:.2f}" for r in runners)
        print(f"  round {number + 1}/{rounds}: {times} s", flush=True)
    first = runners[0].step_ns
    results: dict[str, dict[str, Any]] = {}
    for runner in runners:
        last = runner.end()
        rates = [base / own for base, own in zip(first, runner.step_ns, strict=True)]
        results[runner.contender.name] = {
            "median_step_ns": int(statistics.median(runner.step_ns)),
            "min_step_ns": min(runner.step_ns),
            "step_ns": runner.step_ns,
            "relative_rate": statistics.median(rates),
            "peak_bytes": max(answer["peak_bytes"] for answer in runner.answers),
            "process_peak_bytes": max(a["process_peak_bytes"] for a in runner.answers),
            "losses": [answer["loss"] for answer in runner.answers],
            "parameters": last.get("parameters", ""),
            "status": last["status"],
        }
    return results
