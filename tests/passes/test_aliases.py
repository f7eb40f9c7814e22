"""Views are looked through from their base, and only views."""

import operator

import torch
from torch import fx

from teraplan.passes.aliases import base_of, is_view, uses_of

aten = torch.ops.aten


def _graph() -> tuple[fx.Graph, dict[str, fx.Node]]:
    graph = fx.Graph()
    nodes = {"x": graph.placeholder("x")}

    def call(name: str, target: object, *args: object) -> None:
        nodes[name] = graph.call_function(target, args)  # type: ignore[arg-type]

    call("sin", aten.sin.default, nodes["x"])
    call("view", aten.view.default, nodes["sin"], [2, 2])
    call("t", aten.t.default, nodes["view"])
    call("split", aten.split.Tensor, nodes["t"], 1)
    call("part", operator.getitem, nodes["split"], 0)
    call("cos", aten.cos.default, nodes["part"])
    call("norm", aten.native_layer_norm.default, nodes["sin"], [2], None, None, 1e-5)
    call("first", operator.getitem, nodes["norm"], 0)
    nodes["output"] = graph.output((nodes["t"], nodes["first"]))
    return graph, nodes


def test_views_and_their_bases() -> None:
    _, nodes = _graph()
    for name in ("view", "t", "split", "part"):
        assert is_view(nodes[name]), name
        assert base_of(nodes[name]) is nodes["sin"], name
    for name in ("x", "sin", "cos", "norm", "first"):
        assert not is_view(nodes[name]), name
        assert base_of(nodes[name]) is nodes[name], name


def test_uses_are_computations_through_any_number_of_views() -> None:
    _, nodes = _graph()
    assert set(uses_of(nodes["sin"])) == {nodes["cos"], nodes["norm"]}
    assert list(uses_of(nodes["x"])) == [nodes["sin"]]
    assert not list(uses_of(nodes["first"])), "the output is no use"


def test_a_view_of_no_node_is_its_own_base() -> None:
    graph = fx.Graph()
    node = graph.call_function(aten.view.default, (torch.ones(2), [2]))
    assert is_view(node)
    assert base_of(node) is node
