"""Makes code that Inductor generated take the memory of its CPU tensors from a pool.

Generated modules allocate through a name of their own, `empty_strided_cpu`, which they bind to
PyTorch's allocator. The first op of every instrumented graph is `enter`, called from the generated
function itself, so the module is found on the stack and the name bound anew. This holds for code
from a compile cache as well, and touches no module but those with our ops in them.
"""

import sys
from collections.abc import Callable

import torch

_NAME = "empty_strided_cpu"
_MAX_DEPTH = 16
"""The first call of a graph comes by way of PyTorch's checks of custom ops, ten frames deep."""


def take_memory_from(empty_strided: Callable[..., torch.Tensor]) -> bool:
    """Bind the allocator of the generated code that is calling an op; False if there is none."""
    frame = sys._getframe(1)
    for _ in range(_MAX_DEPTH):
        if frame.f_back is None:
            return False
        frame = frame.f_back
        if _NAME in frame.f_globals:
            frame.f_globals[_NAME] = empty_strided
            return True
    return False
