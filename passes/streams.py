"""Graphs that compute on several streams, which the migration ops do not know of."""

from torch import fx

from teraplan.errors import UnsupportedError


def require_one_stream(graph: fx.Graph) -> None:
    """Do nothing if all of `graph` runs on the stream that is current when it is called.

    Since PyTorch 2.13 Dynamo traces `with torch.cuda.stream(...)`, and notes at each node within
    the number of that stream. An op between two of them would copy before the one has computed.

    Raises:
        UnsupportedError: a node runs on another stream; names it.
    """
    for node in graph.nodes:
        stream = (node.meta.get("custom") or {}).get("stream")
        if stream:  # 0 is the current one
            raise UnsupportedError(
                f"{node.name} runs on a stream of its own in a compiled graph, and what moves is "
                "copied in the order of the current stream; have torch.compiler.disable around "
                "what uses torch.cuda.stream, or compile without teraplan"
            )
