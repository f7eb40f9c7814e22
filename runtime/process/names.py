"""What people call a parameter: its name in the largest module that has it.

A parameter does not know it. All modules of the process are asked, so this is for messages.
"""

from collections.abc import Iterable

import torch

from teraplan.runtime.process import census

_OF_COMPILED = "_orig_mod."
"""What `torch.compile(model)` puts before the names of the model."""


def described(tensor: torch.Tensor) -> str:
    """Name and shape, such as "layers.0.weight, 256x256"; the shape if no module has it."""
    return all_described([tensor])[0]


def all_described(tensors: Iterable[torch.Tensor]) -> list[str]:
    """`described` of each. Walks all objects once."""
    wanted = list(tensors)
    names = _names(wanted)
    shapes = ["x".join(map(str, t.shape)) or "one number" for t in wanted]
    return [
        ", ".join(filter(None, (names.get(id(t)), s))) for t, s in zip(wanted, shapes, strict=True)
    ]


def _names(tensors: list[torch.Tensor]) -> dict[int, str]:
    """By identity. A part of a model has shorter names than the model, and the same parameters."""
    wanted = set(map(id, tensors))
    names: dict[int, str] = {}
    for module in census.modules() if wanted else ():
        for name, parameter in module.named_parameters():
            if id(parameter) in wanted and len(name) > len(names.get(id(parameter), "")):
                names[id(parameter)] = name
    return {key: name.replace(_OF_COMPILED, "") for key, name in names.items()}
