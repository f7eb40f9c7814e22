"""Optimizer state that the program has in hand, in a state_dict or as it is, while it moves."""

import copy
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import teraplan
from teraplan.backend import sessions
from tests.end_to_end.moving import STEPS, WIDTH, adamw, check, model, moving, states, training
from tests.end_to_end.training import MLP, Run


def test_a_state_dict_that_is_loaded_again_and_again() -> None:
    """`load_state_dict` takes the very tensors: the next load has what updates made of it."""
    saved: list[dict[str, Any]] = []

    def between(net: MLP, optimizer: torch.optim.Optimizer, step: int) -> None:
        if step == 0:
            saved[:] = copy.deepcopy([net.state_dict(), optimizer.state_dict()])
        else:
            net.load_state_dict(saved[0])
            optimizer.load_state_dict(saved[1])

    check(training(adamw, between=between))


@pytest.mark.slow
@pytest.mark.parametrize("as_view", [False, True])
def test_state_from_before_it_moves(as_view: bool) -> None:
    """Read and written by the program after each step; as a view, it keeps that from moving."""
    held: list[Tensor] = []

    def warm(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        trained = list(parameters)
        optimizer = adamw(trained)
        for parameter in trained:
            parameter.grad = torch.ones_like(parameter) * 1e-3
        optimizer.step()
        optimizer.zero_grad()
        held[:] = [s.view(-1) if as_view else s for s in states(optimizer)[:4]]
        return optimizer

    def between(net: MLP, optimizer: torch.optim.Optimizer, step: int) -> None:
        for state, kept in zip(states(optimizer), held, strict=False):
            kept.mul_(0.5)
            assert state.data_ptr() == kept.data_ptr()

    check(training(warm, between=between), least=True)
    stays = [text for text in teraplan.status().fallbacks if "stays in memory" in text]
    large = [kept for kept in held if kept.numel() > 1]
    assert len(stays) == (len(large) if as_view else 0)
    assert all("of an optimizer (192x192, 144.00 KiB)" in text for text in stays)


def test_state_loaded_into_a_new_optimizer_moves_before_its_first_step() -> None:
    """Not behind it: the step would write to all of it where it lies, beside what moves."""
    found: list[bool] = []

    def before(optimizer: torch.optim.Optimizer, *_: object) -> None:
        large = [state for state in states(optimizer) if state.numel() > WIDTH]
        found.append(all(moving().arena.block_of(state) is not None for state in large))

    def program(this: Run) -> None:
        net = model()
        this.compile(net)
        optimizer = adamw(net.parameters())
        for step in range(STEPS):
            if step == 2:
                saved = copy.deepcopy(optimizer.state_dict())
                optimizer = adamw(net.parameters())
                optimizer.load_state_dict(saved)
                if this.options["training_state"] == "moves":
                    optimizer.register_step_pre_hook(before)
            loss = net(*net.batch(step))
            torch.autograd.backward(loss)
            optimizer.step()
            this.record(loss, net, others=states(optimizer))
            optimizer.zero_grad()

    check(program)
    assert found and all(found)


def test_state_that_safetensors_has_loaded_moves(tmp_path: Path) -> None:
    """Each tensor is a view of one that nobody can reach."""
    safetensors = pytest.importorskip("safetensors.torch")
    found: list[bool] = []

    def between(net: MLP, optimizer: torch.optim.Optimizer, step: int) -> None:
        is_moving = any(session.keeper.state is not None for session in sessions())
        if step == 3 and is_moving:
            large = [state for state in states(optimizer) if state.numel() > WIDTH]
            found.extend(moving().arena.block_of(state) is not None for state in large)
        if step != 2:
            return
        groups, state = optimizer.state_dict()["param_groups"], optimizer.state_dict()["state"]
        named = {f"{i}.{name}": t.clone() for i, one in state.items() for name, t in one.items()}
        safetensors.save_file(named, tmp_path / "state.safetensors")
        loaded: dict[int, dict[str, Tensor]] = {}
        for name, tensor in safetensors.load_file(tmp_path / "state.safetensors").items():
            number, key = name.split(".")
            loaded.setdefault(int(number), {})[key] = tensor
        optimizer.load_state_dict({"state": loaded, "param_groups": groups})

    check(training(adamw, between=between))
    assert found and all(found)
