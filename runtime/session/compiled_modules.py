"""Modules that are to run under a configuration, also those of which no graph is compiled yet.

Dynamo hands over one graph at a time, and the first one has a small part of the parameters where
users compile block by block, or where the graph breaks.
"""

import os
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn
from torch._dynamo.eval_frame import OptimizeContext, OptimizedModule

from teraplan.config import Config
from teraplan.errors import ConfigError
from teraplan.runtime.process import census


def compiled_modules(config: Config) -> Iterator[nn.Module]:
    """All modules that users have compiled under `config`. Walks all objects."""
    return (module for module, found in _compiled() if found == config)


def configs_of(parameters: Iterable[torch.Tensor]) -> Iterator[Config]:
    """What modules with some of these parameters are compiled under. Walks all objects."""
    known = set(map(id, parameters))
    return (
        config
        for module, config in _compiled()
        if not known.isdisjoint(map(id, module.parameters()))
    )


def _compiled() -> Iterator[tuple[nn.Module, Config]]:
    for module in census.modules():
        context = _context(module)
        config = None if context is None else _config(context)
        if config is not None:
            yield module, config


def _context(module: nn.Module) -> OptimizeContext | None:
    """What runs the module's frames through Dynamo; None if it was not compiled."""
    own = vars(module)
    if isinstance(module, OptimizedModule):
        held = [own.get("dynamo_ctx")]
    else:  # `module.compile(...)`
        cells = getattr(own.get("_compiled_call_impl"), "__closure__", None) or ()
        held = [cell.cell_contents for cell in cells]
    return next((value for value in held if isinstance(value, OptimizeContext)), None)


def _config(context: OptimizeContext) -> Config | None:
    """What the module is compiled under; None if that is by another backend, or impossible."""
    backend: Any = context.callback
    while hasattr(backend, "_torchdynamo_orig_backend"):
        backend = backend._torchdynamo_orig_backend
    if getattr(backend, "compiler_name", None) != "teraplan":
        return None
    kwargs: dict[str, dict[str, object]] = getattr(backend, "kwargs", {})
    try:
        return Config.resolve(kwargs.get("options"), os.environ)
    except ConfigError:  # raised where that module is called
        return None
