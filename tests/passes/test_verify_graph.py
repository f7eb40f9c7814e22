"""Each promise of `insert_sites`, broken on purpose, is found."""

from collections.abc import Callable

import pytest
import torch
from torch import fx

from teraplan import ops
from teraplan.passes.verify_graph import verify_pair
from tests.passes.instrumented import Pair, instrumented
from tests.passes.test_insert_sites import chain, square


@pytest.fixture
def pair() -> Pair:
    return instrumented(chain, square(), square(1))


def nodes(graph: fx.Graph, op: object) -> list[fx.Node]:
    return [node for node in graph.nodes if node.target is op]


def test_what_insert_sites_makes_is_accepted(pair: Pair) -> None:
    verify_pair(*pair)


def test_graphs_without_slots_are_accepted() -> None:
    import dataclasses

    _, _, table = instrumented(chain, square(), square(1))
    verify_pair(fx.Graph(), fx.Graph(), dataclasses.replace(table, slots=()))


def _save_twice(forward: fx.Graph, backward: fx.Graph) -> None:
    first, second = nodes(forward, ops.save)[:2]
    second.update_arg(2, first.args[2])


def _save_early(forward: fx.Graph, backward: fx.Graph) -> None:
    save = nodes(forward, ops.save)[-1]
    saved = save.args[0]
    assert isinstance(saved, fx.Node)
    with forward.inserting_after(save):
        forward.call_function(torch.ops.aten.cos.default, (saved,))


def _need_missing(forward: fx.Graph, backward: fx.Graph) -> None:
    first, second = nodes(backward, ops.need)[:2]
    second.update_arg(2, first.args[2])


def _done_missing(forward: fx.Graph, backward: fx.Graph) -> None:
    backward.erase_node(nodes(backward, ops.done)[0])


def _use_after_done(forward: fx.Graph, backward: fx.Graph) -> None:
    done = nodes(backward, ops.done)[0]
    used = done.args[0]
    assert isinstance(used, fx.Node)
    with backward.inserting_after(done):
        view = backward.call_function(torch.ops.aten.t.default, (used,))
    with backward.inserting_after(view):
        backward.call_function(torch.ops.aten.cos.default, (view,))


@pytest.mark.parametrize(
    ("damage", "match"),
    [
        (_save_twice, "each slot is saved once"),
        (_save_early, "uses what .* has saved"),
        (_need_missing, "each slot is needed once"),
        (_done_missing, "each slot is done once"),
        (_use_after_done, "comes after"),
    ],
)
def test_damage_is_found_and_shown(
    pair: Pair, damage: Callable[[fx.Graph, fx.Graph], None], match: str
) -> None:
    forward, backward, table = pair
    damage(forward, backward)
    with pytest.raises(AssertionError, match=match) as caught:
        verify_pair(forward, backward, table)
    assert str(caught.value).count("\n") >= 3, "the nodes around it are shown"
