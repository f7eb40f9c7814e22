"""What a part of a step may write, and what the user's optimizer then has."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from teraplan.runtime.state.updates.stand_in import (
    equal,
    parameters_of,
    stand_in,
    take_over,
    values_beside_state,
)


class Keeping(torch.optim.Optimizer):
    """Counts within containers, one of which has two names, and hands one list on each step."""

    def __init__(self, parameters: Iterable[Tensor]) -> None:
        super().__init__(parameters, {})
        self.stats: dict[str, Any] = {"all": {"steps": 0}, "each": [[0]]}
        self.now: list[int] = [0]
        self.before = self.now
        self.param_groups[0]["stats"] = self.stats

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        self.stats["all"]["steps"] += 1
        self.param_groups[0]["stats"]["each"][0][0] += 10
        self.before = self.now
        self.now = [*self.now, self.now[-1] + 1]


def _made() -> Keeping:
    return Keeping([torch.zeros(3), torch.zeros(3)])


def test_each_part_begins_with_what_there_was() -> None:
    optimizer = _made()
    before = values_beside_state(optimizer)
    parts = [stand_in(optimizer, {id(p)}) for p in parameters_of(optimizer)]
    for part in parts:
        part.step()
    assert equal(before, values_beside_state(optimizer)), "the parts share nothing with it"
    assert equal(*map(values_beside_state, parts)), "nor with each other"


def test_what_a_part_has_written_is_written_where_the_user_has_it() -> None:
    optimizer, alone = _made(), _made()
    stats = optimizer.stats
    for _ in range(3):
        alone.step()
        part = stand_in(optimizer, set(map(id, parameters_of(optimizer))))
        part.step()
        take_over(optimizer, part)
    assert equal(values_beside_state(alone), values_beside_state(optimizer))
    assert stats == {"all": {"steps": 3}, "each": [[30]]}
    assert optimizer.stats is optimizer.param_groups[0]["stats"] is stats
    assert (optimizer.before, optimizer.now) == ([0, 1, 2], [0, 1, 2, 3])
