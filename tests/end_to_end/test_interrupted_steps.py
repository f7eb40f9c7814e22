"""Interrupts in the midst of our code, after which training goes on with the same bits."""

import sys
from collections.abc import Callable
from contextlib import nullcontext
from types import CodeType

import pytest
import torch

from teraplan.runtime.engine.engine import Engine
from teraplan.runtime.session.session import Session
from tests.end_to_end.moving import adamw, model, run_moving, states
from tests.end_to_end.training import MLP, UNLIMITED, Program, Run, assert_same, tight, unlimited
from tests.fakes.interrupts import InterruptAt

COUNTED, FIRST, STEPS = 5, 8, 32
"""Steps under a plan: from the first on, lines are counted, from the second on interrupted."""
OURS = Session._begin_step.__code__.co_filename.removesuffix("session/session.py")


def training(begin: CodeType, came: list[int], *, interrupted: bool) -> Program:
    """A step's forward is run again if an interrupt came while the step was beginning."""

    def program(this: Run) -> None:
        net = model()
        this.compile(net)
        optimizer = adamw(net.parameters())
        num_lines = sys.maxsize
        for step in range(STEPS):
            at = 1 + (step - FIRST) * num_lines // (STEPS - FIRST) if step >= FIRST else 0
            watch = InterruptAt(at, OURS, within=begin)
            try:
                with watch if interrupted else nullcontext():
                    loss = net(*net.batch(step))
            except KeyboardInterrupt:
                came.append(at)
                loss = net(*net.batch(step))
            if interrupted and COUNTED <= step < FIRST:
                num_lines = min(num_lines, watch.num_lines)
            torch.autograd.backward(loss)
            optimizer.step()
            this.record(loss, net, others=states(optimizer))
            optimizer.zero_grad()

    return program


@pytest.mark.slow
@pytest.mark.parametrize("begin", [Session._begin_step, Engine.begin_step])
def test_where_one_step_ends_and_the_next_begins(begin: Callable[..., None]) -> None:
    came: list[int] = []
    reference = run_moving(training(begin.__code__, came, interrupted=False), policy="belady")
    assert not came
    interrupted = run_moving(training(begin.__code__, came, interrupted=True), policy="belady")
    assert len(came) > (STEPS - FIRST) // 2, "some steps begin in fewer lines"
    assert came[-1] > 20
    assert_same(reference, interrupted)
    assert interrupted.final.phase == "planned"


@pytest.mark.slow
def test_a_backward_whose_traceback_is_kept() -> None:
    """As notebooks keep it, and with it the graph, whose saved activations are in use for good."""
    done = Engine.done.__wrapped__.__code__  # type: ignore[attr-defined]
    kept: list[BaseException] = []

    def program(this: Run) -> None:
        net = MLP()
        this.compile(net)
        optimizer = torch.optim.AdamW(net.parameters())
        for step in range(12):
            if len(this.recorded) == 6 and this.options["device_budget"] != UNLIMITED:
                with InterruptAt(1, OURS, within=done):
                    try:
                        torch.autograd.backward(net(*net.batch(step)))
                    except KeyboardInterrupt as error:
                        kept.append(error)
                optimizer.zero_grad()
            loss = net(*net.batch(step))
            torch.autograd.backward(loss)
            optimizer.step()
            this.record(loss, net)
            optimizer.zero_grad()

    reference = unlimited(program)
    limited = tight(program, reference, 0.3)
    assert kept
    assert_same(reference, limited)
