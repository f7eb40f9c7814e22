"""Steps in which every saved activation leaves the device as soon as it is saved."""

import contextlib
from collections.abc import Iterator

import pytest
import torch

from teraplan.runtime.engine.engine import Engine
from teraplan.runtime.engine.mover import Mover
from teraplan.runtime.engine.saved import Saved
from teraplan.runtime.session.budget_shares import BudgetShares

GARBAGE = 0xFF
"""Every float made of these bytes is NaN."""


@contextlib.contextmanager
def everything_leaves(*, poison: bool = False) -> Iterator[list[str]]:
    """Within it, steps without a plan keep nothing on the device; yields names as they leave.

    `poison`: whatever has left or was used up is overwritten, so that any later use of it shows.
    Only for programs whose results share no memory with saved activations.
    """
    left: list[str] = []
    finish, release = Mover.finish_leaving, Engine.release

    def finish_leaving(self: Mover, saved: Saved) -> None:
        tensor = saved.tensor
        finish(self, saved)
        if tensor is not None and saved.tensor is None:
            left.append(saved.name)
            if poison:
                _poison(tensor)

    def release_and_poison(self: Engine, key: int) -> None:
        view = self._views.get(key)
        tensor = view.saved.tensor if view is not None else None
        release(self, key)
        if poison and view is not None and tensor is not None and view.saved.tokens == 0:
            _poison(tensor)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(BudgetShares, "safe_limit", lambda *_: 0)
        patch.setattr(Mover, "finish_leaving", finish_leaving)
        patch.setattr(Engine, "release", release_and_poison)
        yield left


def _poison(tensor: torch.Tensor) -> None:
    storage = tensor.untyped_storage()
    raw = torch.empty(0, dtype=torch.uint8).set_(storage, 0, (storage.nbytes(),), (1,))
    raw.fill_(GARBAGE)
