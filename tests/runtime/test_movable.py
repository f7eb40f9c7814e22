"""Which memory nobody else has."""

import pytest
import torch
from torch import Tensor

from teraplan.runtime.state.memory.movable import is_last_view


def test_the_last_view_of_what_nobody_has() -> None:
    assert is_last_view({"a": torch.ones(4).view(2, 2)}, "a")
    assert not is_last_view({"a": torch.ones(4)}, "a")
    assert not is_last_view({"a": 1}, "a")


@pytest.mark.parametrize("held", ["base", "tensor", "another view", "state_dict"])
def test_a_view_that_somebody_else_has_too(held: str) -> None:
    base = torch.ones(4)
    tensors: dict[str, object] = {"a": base.view(2, 2)}
    others: dict[str, object] = {
        "base": base,
        "tensor": tensors["a"],
        "another view": base[:2],
        "state_dict": dict(tensors),
    }
    kept = others.pop(held)
    del others, base
    assert not is_last_view(tensors, "a")
    del kept
    assert is_last_view(tensors, "a")
    assert isinstance(tensors["a"], Tensor)
