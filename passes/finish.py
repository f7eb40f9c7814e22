"""What every graph module needs after its graph has been given ops."""

from torch import fx


def finish(module: fx.GraphModule) -> None:
    """Check the graph, and let the module run it.

    Inductor's joint passes remember where mutations are, which predates our ops: with that its
    pattern matcher fused a matrix product with an addition across an op.
    """
    for node in module.graph.nodes:
        node.meta.pop("mutation_region_id", None)
    module.graph.lint()
    module.recompile()
