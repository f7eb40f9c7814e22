"""Which operation a node calls, whatever its overload."""

from torch import fx
from torch._ops import OpOverload, OpOverloadPacket


def packet_of(node: fx.Node) -> OpOverloadPacket | None:
    """Such as `torch.ops.aten.add`; None if the node calls no operator."""
    return node.target.overloadpacket if isinstance(node.target, OpOverload) else None
