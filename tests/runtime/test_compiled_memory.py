"""What generated code takes, counted by hand. `tests/end_to_end` has it from Inductor."""

import dataclasses
import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch._inductor.codecache import PyCodeCache

from teraplan.runtime.compiled.compiled_memory import with_compiled_memory
from teraplan.units import KIB
from teraplan.values.graph_table import GraphMemory, GraphTable, Slot, key_of

Write = Callable[[str, str], None]

HEAD = """
import torch
from torch._C._dynamo.guards import assert_size_stride
from torch._inductor.select_algorithm import extern_kernels
from teraplan.ops import direct as teraplan_ops

aten = torch.ops.aten
empty_strided_cpu = torch._C._dynamo.guards._empty_strided_cpu
reinterpret_tensor = torch.ops.inductor._reinterpret_tensor

def never(*args):
    raise AssertionError("a kernel was called")

cpp_fused_sin_0 = type("Kernel", (), {"__call__": never})()

class Runner:
    def call(self, args):
"""
TAIL = """
call = Runner().call

def get_args():
    from torch._dynamo.testing import rand_strided
"""


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Write:
    """Load a module of these lines of `call` and of `get_args`, as Inductor does."""
    monkeypatch.setattr(PyCodeCache, "modules", [])

    def load(call: str, inputs: str) -> None:
        path = tmp_path / f"generated_{len(PyCodeCache.modules)}.py"
        body = "".join(f"        {line}\n" for line in call.strip().splitlines())
        given = "".join(f"    {line}\n" for line in inputs.strip().splitlines())
        path.write_text(HEAD + body + TAIL + given)
        spec = importlib.util.spec_from_file_location(path.stem, path)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        monkeypatch.setitem(sys.modules, path.stem, module)
        spec.loader.exec_module(module)
        PyCodeCache.modules.append(module)

    return load


def table(sizes: tuple[int, ...] = ()) -> GraphTable:
    slots = (Slot(name="sin", layer="", nbytes=KIB), Slot(name="view", layer="", nbytes=KIB))
    return GraphTable(graph="g", slots=slots, uncovered=(), sizes=sizes)


TEXT = table().to_json()
"""What the graphs carry."""


def both(memory: GraphMemory) -> tuple[int, int]:
    return memory.workspace_bytes, memory.least_bytes


FORWARD = f"""
primals_1, = args
args.clear()
buf0 = teraplan_ops.enter(primals_1, {TEXT!r}, [])
assert_size_stride(primals_1, (16, 16), (16, 1), 'input')
buf1 = empty_strided_cpu((16, 16), (16, 1), torch.float32)
cpp_fused_sin_0(primals_1, buf1)
buf2 = teraplan_ops.save(buf1, buf0, 0, [])
buf3 = teraplan_ops.save(reinterpret_tensor(buf1, (16, 8), (16, 1), 8), buf0, 1, [])
buf4 = empty_strided_cpu((16, 16), (16, 1), torch.float32)
extern_kernels.mm(primals_1, buf1, out=buf4)
del buf1
buf5 = reinterpret_tensor(buf4, (256, ), (1, ), 0); del buf4  # reuse
cpp_fused_sin_0(buf5)
return (buf5, buf2, buf3, )
"""
SQUARE = "rand_strided((16, 16), (16, 1), device='cpu', dtype=torch.float32)"
BACKWARD = f"""
primals_1, token_sin, token_view, tangents_1 = args
args.clear()
buf0 = teraplan_ops.enter_backward(primals_1, token_sin, {key_of(TEXT)!r})
buf1 = teraplan_ops.need(buf0, token_sin, 0, [16, 16], [16, 1], torch.float32)
buf2 = teraplan_ops.need(buf0, token_view, 1, [16, 8], [16, 1], torch.float32)
buf3 = empty_strided_cpu((16, 8), (8, 1), torch.float32)
extern_kernels.mm(tangents_1, buf2, out=buf3)
teraplan_ops.done(buf2, token_view, buf0, 1)
del buf2
teraplan_ops.done(buf1, token_sin, buf0, 0)
del buf1
buf4 = teraplan_ops.settle(buf3, buf0)
del buf3
buf5 = torch.ops.aten.sin.default(tangents_1)
del tangents_1
return (buf4, buf5, )
"""
TOKEN = "rand_strided((1, ), (1, ), device='cpu', dtype=torch.int64)"
INPUTS = f"""
primals_1 = {SQUARE}
token_sin = {TOKEN}
token_view = {TOKEN}
tangents_1 = {SQUARE}
return []
"""


def forward_with(lines: str) -> str:
    """`FORWARD` with these behind its `enter`."""
    head, tail = FORWARD.split("assert_size_stride", 1)
    return f"{head}{lines.strip()}\nassert_size_stride{tail}"


def test_tensors_count_from_where_they_are_made_to_where_they_are_dropped(write: Write) -> None:
    write(FORWARD, f"primals_1 = {SQUARE}")
    write(BACKWARD, INPUTS)
    found = with_compiled_memory(table(), TEXT)
    token = 8
    assert both(found.forward) == (2 * KIB + 2 * token,) * 2, "what is given is elsewhere"
    tangent = gradient = sine = KIB
    gradient //= 2
    fixed = max(tangent + gradient, gradient + tangent + sine)
    assert both(found.backward) == (fixed, fixed), "what came back is gone by then"
    assert both(found.backward_of_moving) == (tangent + sine, tangent + KIB + gradient)
    assert not found.sizes_vary and found.is_rehearsed


def test_with_everything_where_it_is_saved_activations_live_from_save_to_done(
    write: Write,
) -> None:
    write(FORWARD, f"primals_1 = {SQUARE}")
    write(BACKWARD, INPUTS)
    found = with_compiled_memory(table(), TEXT)
    saved = tangent = product = sine = KIB
    gradient = KIB // 2
    assert found.forward.kept_bytes == saved + product + 2 * 8
    assert found.backward.kept_bytes == tangent + max(saved + gradient, gradient + sine)
    assert found.backward_of_moving.kept_bytes == tangent + max(saved + gradient, sine)
    assert found.kept_bytes(KIB, state_moves=False) == found.backward.kept_bytes + KIB


def test_what_is_in_no_memory_of_the_process_is_said_by_the_graphs(write: Write) -> None:
    guessed = table()
    assert with_compiled_memory(guessed, TEXT).sizes_vary, "so a budget is refused later"
    write(FORWARD, f"primals_1 = {SQUARE}")
    assert with_compiled_memory(guessed, TEXT).forward == guessed.forward
    write(BACKWARD.replace("empty_strided_cpu", "empty_strided_somewhere"), INPUTS)
    assert with_compiled_memory(guessed, TEXT).sizes_vary


SIZED = """
primals_1, primals_2 = args
args.clear()
s77 = primals_1
buf0 = teraplan_ops.enter(primals_2, TEXT, [s77, 2*s77])
assert_size_stride(primals_2, (s77, 64), (64, 1), 'input')
buf1 = torch.ops.aten.cat.default([primals_2, primals_2])
buf2 = teraplan_ops.save(buf1, buf0, 0, [])
return (buf2, )
"""
BACK_SIZED = """
primals_1, token_sin = args
args.clear()
s77 = primals_1
buf0 = teraplan_ops.enter_backward(token_sin, token_sin, KEY)
buf1 = teraplan_ops.need(buf0, token_sin, 0, [2*s77, 64], [64, 1], torch.float32)
return (buf1, )
"""


@pytest.mark.parametrize(
    ("sizes", "nbytes"), [((4, 8), 2 * KIB), ((6, 12), 3 * KIB), ((6, 13), None)]
)
@pytest.mark.parametrize("is_view", [False, True])
def test_sizes_are_those_of_the_call(
    write: Write, sizes: tuple[int, ...], nbytes: int | None, is_view: bool
) -> None:
    traced = table((4, 8))
    text = traced.to_json()
    where = "device='cpu', dtype=torch.float32)"
    batch = f"primals_2 = rand_strided((4, 64), (64, 1), {where}"
    if is_view:
        batch = f"_shared_storage_0 = rand_strided((65*s77, ), (1, ), {where}\n"
        batch += "primals_2 = torch.as_strided(_shared_storage_0, (s77, 64), (65, 1))"
    write(SIZED.replace("TEXT", repr(text)), f"{batch}\nprimals_1 = 4")
    back = BACK_SIZED.replace("KEY", repr(key_of(text)))
    write(back, f"primals_1 = 4\ntoken_sin = {TOKEN}")
    found = with_compiled_memory(table(sizes), text)
    if nbytes is None:
        assert found.sizes_vary, "sizes that do not fit together are not those of this code"
    else:
        assert both(found.forward) == (nbytes + 8,) * 2
        assert both(found.backward) == (0, nbytes)


def test_what_follows_from_values_counts_as_one_and_no_loop_runs_for_ever(write: Write) -> None:
    values = """
buf6 = torch.ops.aten.nonzero.default(primals_1)
u0 = buf6.size(0)
buf7 = empty_strided_cpu((u0, 256), (256, 1), torch.float32)
u1 = buf7.sum().item()
"""
    write(forward_with(values), f"primals_1 = {SQUARE}")
    write(BACKWARD, INPUTS)
    assert both(with_compiled_memory(table(), TEXT).forward) == (3 * KIB + 16 + 2 * 8,) * 2
    loop = "while primals_1.sum().item():\n    pass"
    write(forward_with(loop), f"primals_1 = {SQUARE}")
    assert with_compiled_memory(table(), TEXT).sizes_vary


def test_random_numbers_are_those_of_the_training(write: Write) -> None:
    seeds = """
buf6 = empty_strided_cpu((1, ), (1, ), torch.int64)
aten.randint.low_out(-9223372036854775808, 9223372036854775807, [1], out=buf6)
"""
    write(forward_with(seeds), f"primals_1 = {SQUARE}")
    write(BACKWARD, INPUTS)
    before = torch.get_rng_state()
    assert with_compiled_memory(table(), TEXT).is_rehearsed
    assert torch.equal(torch.get_rng_state(), before)


def test_what_a_checkpoint_runs_with_a_random_state_counts(write: Write) -> None:
    """As it is generated for attention: saved with what was drawn before, and drawn again."""
    saving = """
buf6 = torch.ops.higher_order.run_and_save_rng_state(torch.ops.aten.bernoulli.p, primals_1, 0.5)
buf7 = buf6[0]
buf8 = buf6[1]
del buf6
buf9 = torch.ops.higher_order.run_with_rng_state(buf7, torch.ops.aten.bernoulli.p, primals_1, 0.5)
del buf7
"""
    write(forward_with(saving), f"primals_1 = {SQUARE}")
    write(BACKWARD, INPUTS)
    before = torch.get_rng_state()
    found = with_compiled_memory(table(), TEXT)
    assert found.is_rehearsed
    assert both(found.forward) == (5056 + 2 * KIB,) * 2  # the state, and what was drawn twice
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize(
    ("channels", "groups", "dilation", "copies"),
    [(1, 8, 1, 4), (1, 8, 2, 2), (8, 1, 1, 0), (2, 4, 1, 0)],
)
def test_the_backward_of_a_depthwise_convolution_copies_what_it_reads(
    write: Write, channels: int, groups: int, dilation: int, copies: int
) -> None:
    image = "rand_strided((1, 8, 8, 8), (512, 1, 64, 8), device='cpu', dtype=torch.float32)"
    weight = f"rand_strided((8, {channels}, 3, 3), (9, 9, 3, 1), device='cpu', dtype=torch.float32)"
    twice = f"[{dilation}, {dilation}]"
    rest = f"None, [1, 1], {twice}, {twice}, False, [0, 0], {groups}, [True, False, False]"
    call = f"""
primals_1, primals_2, token_sin = args
args.clear()
buf0 = teraplan_ops.enter_backward(primals_1, token_sin, {key_of(TEXT)!r})
buf1 = torch.ops.aten.convolution_backward.default(primals_1, primals_1, primals_2, {rest})
return buf1
"""
    write(FORWARD, f"primals_1 = {SQUARE}")
    write(call, f"primals_1 = {image}\nprimals_2 = {weight}\ntoken_sin = {TOKEN}")
    found = with_compiled_memory(table(), TEXT)
    assert both(found.backward) == ((1 + copies) * 2 * KIB,) * 2


BRANCHES = """
if primals_1.any().item():
    buf6 = empty_strided_cpu((256, ), (1, ), torch.float32)
else:
    buf6 = empty_strided_cpu((512, ), (1, ), torch.float32)
"""


def test_the_larger_of_two_branches_counts(write: Write) -> None:
    write(forward_with(BRANCHES), f"primals_1 = {SQUARE}")
    write(BACKWARD, INPUTS)
    found = with_compiled_memory(table(), TEXT)
    assert found.is_rehearsed
    assert both(found.forward) == (4 * KIB + 2 * 8,) * 2


def test_what_is_found_to_be_so_is_no_branch(write: Write) -> None:
    wanted = "assert not primals_1.isnan().any().item()"
    write(forward_with(wanted), f"primals_1 = {SQUARE}")
    write(BACKWARD, INPUTS)
    assert with_compiled_memory(table(), TEXT).is_rehearsed


def test_small_activations_are_there_from_the_beginning_of_the_backward(write: Write) -> None:
    write(FORWARD, f"primals_1 = {SQUARE}")
    write(BACKWARD, INPUTS)
    without = both(with_compiled_memory(table(), TEXT).backward)
    given = BACKWARD.replace("tangents_1 = args", "tangents_1, rsqrt = args")
    write(given, INPUTS + f"rsqrt = {SQUARE}")
    assert both(with_compiled_memory(table(), TEXT).backward) == tuple(n + KIB for n in without)


def test_views_of_one_memory_count_once(write: Write) -> None:
    """Such as inputs and targets of a language model, or slices that both are small and stay."""
    shared = "rand_strided((512,), (1,), device='cpu', dtype=torch.float32)"
    square = "torch.as_strided(_shared_storage_0, (16, 16), (32, 1))"
    write(FORWARD, f"_shared_storage_0 = {shared}\nprimals_1 = {square}")
    write(BACKWARD, INPUTS)
    plain = with_compiled_memory(table(), TEXT)
    assert plain.is_rehearsed
    assert both(plain.forward) == (2 * KIB + 2 * 8,) * 2, "what is given is elsewhere"
    views = f"_shared_storage_0 = {shared}\nrsqrt = {square}\nslice_1 = {square}\nreturn []"
    given = BACKWARD.replace("tangents_1 = args", "tangents_1, rsqrt, slice_1 = args")
    write(given, INPUTS.replace("return []", views))
    found = with_compiled_memory(table(), TEXT)
    assert both(found.backward) == tuple(n + 2 * KIB for n in both(plain.backward))


def test_after_many_sizes_others_follow_from_them(write: Write) -> None:
    """To rehearse a graph takes tenths of a second, and there may be hundreds of sizes."""
    traced = table((4, 8))
    text = traced.to_json()
    batch = "rand_strided((4, 64), (64, 1), device='cpu', dtype=torch.float32)"
    write(SIZED.replace("TEXT", repr(text)), f"primals_1 = 4\nprimals_2 = {batch}")
    write(BACK_SIZED.replace("KEY", repr(key_of(text))), f"primals_1 = 4\ntoken_sin = {TOKEN}")

    def at(rows: int) -> GraphTable:
        said = GraphMemory(workspace_bytes=1000 * rows, least_bytes=1000 * rows)
        sized = dataclasses.replace(table((rows, 2 * rows)), forward=said, backward=said)
        return with_compiled_memory(sized, text)

    assert all(at(rows).is_rehearsed for rows in range(1, 17))
    assert not at(1000).is_rehearsed
    assert both(at(1000).forward) == pytest.approx((512 * 1000,) * 2, rel=0.01)
    assert at(8).is_rehearsed
