"""What updates make on the way, by what their optimizer is told and where the parameters are."""

import pytest
import torch
import torch.optim.optimizer as torch_optimizer

from teraplan.runtime.state.updates.update_needs import (
    TEMPORARIES,
    num_temporaries,
    temporary_bytes,
)

WEIGHTS = [torch.nn.Parameter(torch.zeros(100)), torch.nn.Parameter(torch.zeros(20))]
TOGETHER = TEMPORARIES * 120 * 4


@pytest.mark.parametrize(
    ("options", "nbytes"),
    [
        ({}, 0),
        ({"foreach": True}, TOGETHER),
        ({"foreach": False}, 0),
    ],
)
def test_many_at_once_where_that_is_asked_for(options: dict[str, bool], nbytes: int) -> None:
    assert temporary_bytes(torch.optim.AdamW(WEIGHTS, **options)) == nbytes  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("options", "nbytes"),
    [
        ({}, TOGETHER),
        ({"fused": True}, 0),
        ({"foreach": False}, 0),
        ({"differentiable": True}, 0),
    ],
)
def test_many_at_once_where_pytorch_does_so_by_itself(
    options: dict[str, bool], nbytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As it does on a GPU."""
    monkeypatch.setattr(torch_optimizer, "_get_foreach_kernels_supported_devices", lambda: ["cpu"])
    assert temporary_bytes(torch.optim.AdamW(WEIGHTS, **options)) == nbytes  # type: ignore[arg-type]
    assert num_temporaries(torch.optim.SGD(WEIGHTS, lr=0.1)) == TEMPORARIES
    assert num_temporaries(torch.optim.SGD(WEIGHTS, lr=0.1, foreach=False)) == 0
