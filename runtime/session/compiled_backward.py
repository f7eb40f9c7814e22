"""What may be done with the backward of a compiled graph: run it again, not differentiate it.

Before 2.13 AOTAutograd refuses it only if the backward was given an input that requires a gradient.
With a token in the place of each saved activation it is given none, and the gradient would count as
a constant: a penalty on it would be left out of the sum without a word.
"""

from collections.abc import Sequence
from typing import Any

import torch

_IS_LOST = torch.__version__ < "2.13"


def refuse_double_backward(results: Sequence[Any]) -> None:
    """Let gradients that come through these results of a compiled graph say so when they are used.

    Raises:
        RuntimeError: (when a gradient is differentiated) as PyTorch raises it since 2.13.
    """
    if _IS_LOST:
        for node in {_compiled_node(result) for result in results} - {None}:
            node.register_hook(_refusing)


def let_it_run_again(results: Sequence[Any]) -> bool:
    """Let the backward of these results run with `retain_graph`; true if there is one.

    It was compiled to write over nothing that it is given (`donated_buffer=False`). AOTAutograd
    takes it to do so all the same, where it is not told when the backward runs.
    """
    nodes = {_compiled_node(result) for result in results} - {None}
    for node in nodes:
        metadata = getattr(getattr(type(node), "_forward_cls", None), "metadata", None)
        if metadata is not None and metadata.bw_donated_idxs is None:
            metadata.bw_donated_idxs = []
    return bool(nodes)


class _NotDifferentiable(torch.autograd.Function):
    """A gradient as it is."""

    @staticmethod
    def forward(ctx: Any, requires_grad: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:  # noqa: ANN401
        return gradient.detach()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:  # noqa: ANN401
        raise RuntimeError(
            "torch.compile with aot_autograd does not currently support double backward"
        )


def _compiled_node(result: Any) -> Any:  # noqa: ANN401
    """The backward of the graph that the result is of, under the views that AOTAutograd made."""
    node: Any = result.grad_fn if isinstance(result, torch.Tensor) else None
    while node is not None and type(node).__name__ != "CompiledFunctionBackward":
        node = node.next_functions[0][0] if node.next_functions else None
    return node


def _refusing(gradients: Sequence[torch.Tensor | None], _: object) -> Any:  # noqa: ANN401
    if not torch.is_grad_enabled() or any(g is not None and g.requires_grad for g in gradients):
        return None
    needs = torch.empty(0, device="cpu", requires_grad=True)
    refuse: Any = _NotDifferentiable.apply
    return tuple(None if g is None else refuse(needs, g) for g in gradients)
