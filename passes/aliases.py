"""Which nodes of a functional FX graph share memory: views, looked at from their base."""

import operator
from collections.abc import Iterator

from torch import fx


def is_view(node: fx.Node) -> bool:
    """True if the node's result aliases its first argument (for `split`: each part does)."""
    if node.op != "call_function":
        return False
    if node.target is operator.getitem:
        source = node.args[0]
        return isinstance(source, fx.Node) and is_view(source)
    return getattr(node.target, "is_view", False) is True


def base_of(node: fx.Node) -> fx.Node:
    """The node whose memory `node` looks at: itself if it is no view."""
    while is_view(node):
        argument = node.args[0]
        if not isinstance(argument, fx.Node):
            return node
        node = argument
    return node


def uses_of(node: fx.Node) -> Iterator[fx.Node]:
    """All nodes that compute with `node`'s value or with a view of it; no views, no output."""
    for user in node.users:
        if user.op == "output":
            continue
        if is_view(user):
            yield from uses_of(user)
        else:
            yield user
