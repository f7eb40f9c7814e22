"""Code of ours that runs in the midst of the user's, which `torch.compile` may be compiling."""

from collections.abc import Callable
from typing import ParamSpec, TypeVar, cast

import torch

_P = ParamSpec("_P")
_R = TypeVar("_R")


def untraced(function: Callable[_P, _R], *, recursive: bool = True) -> Callable[_P, _R]:
    """`function`, which Dynamo calls without looking into it.

    Args:
        function: any.
        recursive: nor into what it calls; else it can find out whether Dynamo is at work.
    """
    made: object = torch.compiler.disable(  # type: ignore[no-untyped-call]
        function, recursive=recursive, reason="teraplan's own"
    )
    return cast("Callable[_P, _R]", made)
