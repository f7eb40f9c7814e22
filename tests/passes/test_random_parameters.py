"""Mutating ops around each parameter's uses keep their place: what moving parameters will need.

The ops are the test's own, lowered as ours are. A parameter holds NaN except between `acquire`
before its first use and `release` after its last one, so any kernel on the wrong side is seen.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor, fx
from torch._functorch import config as functorch_config
from torch._inductor import config as inductor_config
from torch._inductor.compile_fx import compile_fx
from torch._inductor.custom_graph_pass import CustomGraphPass

from teraplan import ops
from teraplan.passes import lowering
from teraplan.passes.aliases import uses_of
from tests.passes.random_graphs import SLOW_CASES, random_program

LIBRARY: Any = torch.library.Library("teraplan_test", "DEF")  # type: ignore[no-untyped-call]
LIBRARY.define("start(Tensor like) -> Tensor")
LIBRARY.define("bring(Tensor(a!) p, Tensor(b!) chain, int slot) -> ()")
LIBRARY.define("let_go(Tensor(a!) p, Tensor(b!) chain, int slot) -> ()")
start = torch.ops.teraplan_test.start.default
acquire = torch.ops.teraplan_test.bring.default
release = torch.ops.teraplan_test.let_go.default

Order = list[tuple[str, int]]


@dataclass(slots=True)
class _Parameters:
    """Where the parameters' values are while the parameters hold none, and what has been done."""

    values: list[Tensor] = field(default_factory=list[Tensor])
    executed: Order = field(default_factory=list[tuple[str, int]])

    def acquire(self, p: Tensor, chain: Tensor, slot: int) -> None:
        self.executed.append(("acquire", slot))
        p.copy_(self.values[slot])

    def release(self, p: Tensor, chain: Tensor, slot: int) -> None:
        self.executed.append(("release", slot))
        p.fill_(float("nan"))


PARAMETERS = _Parameters()


def _empty(like: Tensor) -> Tensor:
    return like.new_empty(0, dtype=torch.uint8)


for _name, _kernel in (
    ("start", _empty),
    ("bring", PARAMETERS.acquire),
    ("let_go", PARAMETERS.release),
):
    LIBRARY.impl(_name, _kernel, "CompositeExplicitAutograd")
    setattr(ops.direct, _name, _kernel)  # our lowering calls no dispatcher
torch.library.register_fake("teraplan_test::start", _empty, lib=LIBRARY)
for _name in ("bring", "let_go"):
    torch.library.register_fake(f"teraplan_test::{_name}", lambda p, c, s: None, lib=LIBRARY)


class _Bracket(CustomGraphPass):
    """Inserts both ops around the uses of each parameter, all in one chain."""

    def __init__(self, positions: dict[int, int]) -> None:
        self.positions = positions
        self.planned: Order = []

    def __call__(self, graph: fx.Graph) -> None:
        order = {node: i for i, node in enumerate(graph.nodes)}
        inputs = list(graph.find_nodes(op="placeholder"))
        spans = []
        for position, slot in self.positions.items():
            users = inputs[position].users
            uses = sorted(uses_of(inputs[position]), key=order.__getitem__)
            if uses:
                spans.append((slot, inputs[position], min(users, key=order.__getitem__), uses[-1]))
        with graph.inserting_after(inputs[-1]):
            chain = graph.call_function(start, (inputs[0],))
        chain.meta["val"] = _empty(inputs[0].meta["val"])
        for slot, parameter, first, last in spans:
            with graph.inserting_before(first):
                before = graph.call_function(acquire, (parameter, chain, slot))
            with graph.inserting_after(last):
                after = graph.call_function(release, (parameter, chain, slot))
            before.meta["val"] = after.meta["val"] = None
        self.planned = [
            ("acquire" if node.target is acquire else "release", int(node.args[2]))
            for node in graph.nodes
            if node.target in (acquire, release)
        ]

    def uuid(self) -> None:
        return None


def compiled_with_ops(
    function: Callable[..., Tensor], x: Tensor, parameters: Sequence[Tensor], *, peak: bool
) -> tuple[Tensor, Order]:
    """The function's result with parameters that are away most of the time; the planned order."""
    for op, mutated in ((start, ()), (acquire, (0, 1)), (release, (0, 1))):
        lowering._register(op, mutated)
    passes: list[_Bracket] = []

    def backend(gm: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        identities = [id(parameter) for parameter in parameters]
        passes.append(
            _Bracket(
                {i: identities.index(id(v)) for i, v in enumerate(inputs) if id(v) in identities}
            )
        )
        patches = {
            "post_grad_custom_post_pass": passes[-1],
            "reorder_for_peak_memory": peak,
            "fx_graph_cache": False,
            **lowering.INDUCTOR_CONFIG,
        }
        result: Any = compile_fx(gm, list(inputs), config_patches=patches)
        return result  # type: ignore[no-any-return]

    with (
        torch.no_grad(),
        functorch_config.patch(enable_autograd_cache=False),
        inductor_config.patch(compile_threads=1),
    ):
        result: Tensor = torch.compile(function, backend=backend, fullgraph=True)(x, *parameters)
    return result, passes[0].planned


def check(seed: int, *, peak: bool = True) -> None:
    torch._dynamo.reset()
    torch.set_num_threads(1)
    program = random_program(seed)
    expected = program.function(program.x, *program.parameters)
    PARAMETERS.values[:] = [p.clone() for p in program.parameters]
    PARAMETERS.executed.clear()
    away = [torch.full_like(p, float("nan")) for p in program.parameters]
    result, planned = compiled_with_ops(program.function, program.x, away, peak=peak)
    assert len(planned) >= 2
    assert PARAMETERS.executed == planned
    torch.testing.assert_close(result, expected, atol=1e-3, rtol=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1])
def test_ops_around_parameters_keep_their_place(seed: int) -> None:
    check(seed)


@pytest.mark.slow
@pytest.mark.parametrize(("seed", "peak"), SLOW_CASES)
def test_more_graphs(seed: int, peak: bool) -> None:
    check(seed, peak=peak)


@pytest.mark.slow
def test_the_fuzzer_sees_the_hole_that_our_lowering_closes(monkeypatch: pytest.MonkeyPatch) -> None:
    """With Inductor's stock fallback some of these graphs are wrong: the test is able to fail."""
    from torch._inductor.lowering import fallback_handler, register_lowering

    def stock(op: torch._ops.OpOverload, mutated: tuple[int, ...]) -> None:
        handler = fallback_handler(op, add_to_fallback_set=False)  # type: ignore[no-untyped-call]
        register_lowering(op, type_promotion_kind=None)(handler)

    monkeypatch.setattr(lowering, "_register", stock)
    with pytest.raises(AssertionError):
        for seed in range(6):
            check(seed)
