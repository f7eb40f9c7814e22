"""What messages call a parameter."""

import torch
from torch import nn

from teraplan.runtime.process.names import all_described, described


def test_a_parameter_has_its_name_in_the_whole_model() -> None:
    whole = nn.ModuleDict({"layers": nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 2, bias=False))})
    first = whole["layers"][0]  # type: ignore[index]
    assert described(first.weight) == "layers.0.weight, 3x2"
    assert all_described([first.bias, torch.ones(4, 5)]) == ["layers.0.bias, 3", "4x5"]


def test_a_compiled_model_does_not_show_in_names() -> None:
    net = nn.Linear(2, 3)
    compiled = torch.compile(net, backend="eager")
    assert next(name for name, _ in compiled.named_parameters()) == "_orig_mod.weight"  # type: ignore[attr-defined]
    assert described(net.weight) == "weight, 3x2"


def test_one_number_without_a_module() -> None:
    assert described(torch.tensor(1.0)) == "one number"
    assert all_described([]) == []
