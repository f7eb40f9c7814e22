"""Graphs that take gradients of what they compute themselves, by `torch.func.grad` and its like.

AOTAutograd traces through them, and so forward and backward are one graph, without a boundary at
which something would be saved. All that its backward needs stays in memory.
"""

from torch import fx

_TAKES_GRADIENTS = ("_autograd_grad", "_grad_increment_nesting")
"""What Dynamo writes for `torch.func.grad`, `vjp` and what is made of them."""


def takes_gradients(module: fx.GraphModule) -> bool:
    """True if a graph as Dynamo hands it over, or one within it, takes gradients."""
    graphs = (m.graph for m in module.modules() if isinstance(m, fx.GraphModule))
    names = (getattr(node.target, "__name__", "") for graph in graphs for node in graph.nodes)
    return any(name in _TAKES_GRADIENTS for name in names)
