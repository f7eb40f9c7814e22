"""What Inductor's joint passes remember of where mutations are, which predates our ops."""

from torch import fx


def forget_mutation_regions(module: fx.GraphModule) -> None:
    """Drop that memory.

    With it Inductor's pattern matcher fused a matrix product with an addition across an op.
    """
    for node in module.graph.nodes:
        node.meta.pop("mutation_region_id", None)
