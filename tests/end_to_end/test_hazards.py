"""What could turn into wrong numbers: each gives the right ones, or an error that says why."""

import gc
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor, nn

from teraplan import backend
from teraplan.errors import UnsupportedError
from teraplan.runtime.cpu.device import CpuDevice
from teraplan.runtime.session.session import Session
from tests.end_to_end.evicting import everything_leaves
from tests.end_to_end.training import MLP, UNLIMITED, bits

OPTIONS = {"device_budget": UNLIMITED, "kernels": "aot_eager", "profile_steps": 1}


def compiled(function: Callable[..., object], **kwargs: object) -> Callable[..., Tensor]:
    """`function` under our backend."""
    return torch.compile(function, backend="teraplan", options=OPTIONS, **kwargs)  # type: ignore[call-overload,no-any-return]


def session() -> Session:
    """The only one."""
    (only,) = backend.sessions()
    return only


@pytest.fixture(
    params=[
        pytest.param(False, id="resident", marks=pytest.mark.slow),
        pytest.param(True, id="evicted"),
    ]
)
def left(request: pytest.FixtureRequest) -> Iterator[list[str] | None]:
    """The names of what has left where everything does; None where everything stays."""
    if not request.param:
        yield None
        return
    with everything_leaves() as names:
        yield names
        assert names, "nothing left the device"


def gradients(function: Callable[..., Tensor], *inputs: Tensor) -> list[Tensor]:
    """Of the sum of the function's result with respect to the inputs that ask for them."""
    leaves = [x for x in inputs if x.requires_grad]
    return list(torch.autograd.grad(function(*inputs).sum(), leaves))


def random(*shape: int, seed: int = 0, **kwargs: object) -> Tensor:
    """A leaf that requires a gradient."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, **kwargs).requires_grad_()  # type: ignore[call-overload,no-any-return]


def _same(function: Callable[..., Tensor], *inputs: Tensor) -> None:
    """Compiled and plain gradients are equal in every bit (the function has no fused sums)."""
    expected = gradients(function, *inputs)
    assert bits(gradients(compiled(function), *inputs)) == bits(expected)


def _chunks(x: Tensor, w: Tensor) -> Tensor:
    a, b, c = (x * w).chunk(3, dim=1)
    return torch.sin(a) * torch.cos(b) * torch.tanh(c)


def _not_contiguous(x: Tensor, w: Tensor) -> Tensor:
    y = (x * w).t()
    return torch.sin(y[::2]) * torch.cos(y[1::2])


def _overlapping(x: Tensor, w: Tensor) -> Tensor:
    y = x * w
    return torch.sin(y[:, :256]) * torch.cos(y[:, 100:356]) * torch.tanh(y[:, 128:])


def _expanded(x: Tensor, w: Tensor) -> Tensor:
    y = (x * w).sum(0, keepdim=True).expand(256, 384)
    return torch.sin(y) * x


@pytest.mark.parametrize("function", [_chunks, _not_contiguous, _overlapping, _expanded])
def test_saved_views(function: Callable[..., Tensor], left: list[str] | None) -> None:
    _same(function, random(256, 384), random(256, 384, seed=1))


def test_output_that_aliases_a_saved_tensor(left: list[str] | None) -> None:
    """The user goes on holding, reading and viewing it while its bytes are elsewhere."""

    def function(x: Tensor) -> tuple[Tensor, Tensor]:
        y = torch.tanh(x)
        return y, y.t()

    x = random(256, 256)
    expected = torch.tanh(x.detach())
    out, turned = compiled(function)(x)
    assert torch.equal(out, expected)
    assert torch.equal(turned, expected.t())
    torch.autograd.backward(out.sum() + turned.sum())
    assert torch.equal(out, expected)
    plain = random(256, 256)
    y, t = function(plain)
    torch.autograd.backward(y.sum() + t.sum())
    assert x.grad is not None
    assert plain.grad is not None
    assert torch.equal(x.grad, plain.grad)


def test_input_that_is_a_small_part_of_its_memory(left: list[str] | None) -> None:
    """A batch cut out of a dataset: the dataset does not travel with it."""
    data = torch.randn(64, 256, 256)
    weight = random(256, 256)
    function = compiled(lambda x, w: torch.sin(x @ w))
    for index in range(3):
        gradients(function, data[index], weight)
    engine = session().engine
    assert engine.managed_peak_bytes < data.nbytes / 8
    expected = gradients(lambda x, w: torch.sin(x @ w), data[5], weight)
    assert bits(gradients(function, data[5], weight)) == bits(expected)


def test_input_at_an_odd_address(left: list[str] | None) -> None:
    """As `torch.frombuffer` over a file's header gives one: 4 bytes beside an 8-byte boundary."""
    raw = bytearray(4 + 8 * 256 * 256)
    x = torch.frombuffer(raw, dtype=torch.float64, offset=4).view(256, 256)
    x.copy_(torch.randn(256, 256, dtype=torch.float64))
    assert x.data_ptr() % 8 == 4
    _same(lambda x, w: torch.sin(x * w), x, random(256, 256, dtype=torch.float64))


def test_conjugated_complex_numbers(left: list[str] | None) -> None:
    def function(x: Tensor, w: Tensor) -> Tensor:
        y = (x * w).conj()
        return (y * torch.sin(y) * x.conj()).abs()

    inputs = [random(128, 128, seed=s, dtype=torch.complex64) for s in (0, 1)]
    _same(function, *inputs)


@pytest.mark.parametrize("mutated_by", ["add_", "copy_", "view"])
def test_input_changed_between_forward_and_backward(
    mutated_by: str, left: list[str] | None
) -> None:
    """Either the error, or, where the old bytes are safe elsewhere, the right numbers."""
    x = torch.randn(256, 256)
    weight = random(256, 256)
    function = lambda x, w: torch.sin(x * w)  # noqa: E731
    expected = gradients(function, x.clone(), weight)
    loss = compiled(function)(x, weight).sum()
    if mutated_by == "add_":
        x.add_(1)
    elif mutated_by == "copy_":
        x.copy_(torch.zeros(256, 256))
    else:
        x[0].zero_()
    try:
        (got,) = torch.autograd.grad(loss, [weight])
    except (UnsupportedError, RuntimeError) as error:
        assert "modified" in str(error)
        return
    assert torch.equal(got, expected[0])


def test_input_changed_after_a_forward_whose_backward_never_runs(left: list[str] | None) -> None:
    """The first forward's loss is only looked at; the second has to see the new values."""
    x = torch.randn(256, 256)
    weight = random(256, 256)
    function = lambda x, w: torch.sin(x * w)  # noqa: E731
    step = compiled(function)
    kept = step(x, weight).sum()
    x.add_(1.0)
    expected = gradients(function, x, weight)
    assert bits(gradients(step, x, weight)) == bits(expected)
    assert torch.isfinite(kept)


def test_backward_twice(left: list[str] | None) -> None:
    """With retain_graph=True: what is saved is there until autograd lets go of it."""
    weight = random(256, 256)
    x = torch.randn(256, 256)
    function = lambda x, w: torch.sin(x * w)  # noqa: E731
    expected = gradients(function, x, weight)
    loss = compiled(function)(x, weight).sum()
    for retain in (True, True, False):
        got = torch.autograd.grad(loss, [weight], retain_graph=retain)
        assert bits(got) == bits(expected)
    assert held() == (False, False, False)


def test_a_graph_that_is_kept_after_its_backward_ends_with_its_loss(
    left: list[str] | None,
) -> None:
    weight = random(256, 256)
    step = compiled(lambda w: torch.sin(w * w))
    loss = step(weight).sum()
    torch.autograd.backward(loss, retain_graph=True)
    waits, *_ = held()
    assert not waits, "the step cannot end"
    del loss
    assert held() == (False, False, False)


@torch.library.custom_op("teraplan_tests::fail_once", mutates_args=())
def _fail_once(x: Tensor) -> Tensor:
    if _failures:
        raise _failures.pop()
    return x.clone()


_failures: list[Exception] = []
_fail_once.register_fake(torch.empty_like)
_fail_once.register_autograd(lambda _, gradient: _fail_once(gradient))


def test_a_backward_that_failed_half_way_can_be_repeated(left: list[str] | None) -> None:
    weight = random(256, 256)
    function = lambda w: torch.sin(_fail_once(torch.sin(w)))  # noqa: E731
    expected = gradients(function, weight)
    loss = compiled(function)(weight).sum()
    _failures.append(_UserError())
    with pytest.raises(_UserError):
        torch.autograd.grad(loss, [weight], retain_graph=True)
    assert bits(torch.autograd.grad(loss, [weight])) == bits(expected)
    assert held() == (False, False, False)


def test_hooks_that_copy_what_is_saved_are_refused() -> None:
    weight = random(256, 256)
    step = compiled(lambda w: torch.sin(w))
    with torch.autograd.graph.saved_tensors_hooks(torch.clone, lambda x: x):
        loss = step(weight).sum()
    assert held() == (False, False, False)
    with pytest.raises(UnsupportedError, match="has been copied, by hooks for saved tensors"):
        torch.autograd.grad(loss, [weight])
    with torch.autograd.graph.save_on_cpu():
        loss = step(weight).sum()
    assert bits(torch.autograd.grad(loss, [weight])) == bits(gradients(torch.sin, weight))


def test_a_backward_after_its_session_was_closed(left: list[str] | None) -> None:
    weight = random(256, 256)
    loss = compiled(lambda w: torch.sin(w))(weight).sum()
    session().close()
    with pytest.raises(UnsupportedError, match="session has been closed"):
        torch.autograd.grad(loss, [weight])


def test_double_backward_is_refused() -> None:
    weight = random(256, 256)
    loss = compiled(lambda w: torch.sin(w).pow(2).sum())(weight)
    (first,) = torch.autograd.grad(loss, [weight], create_graph=True)
    with pytest.raises(RuntimeError, match="does not currently support double backward"):
        torch.autograd.backward(first.sum())


def _train(model: nn.Module, step: Callable[..., Tensor], steps: range) -> list[str]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    seen = []
    for number in steps:
        torch.autograd.backward(step(*MLP().batch(number)))
        seen.append(bits([*model.parameters(), *(p.grad for p in model.parameters())]))
        optimizer.step()
        optimizer.zero_grad()
    return seen


class _UserError(Exception):
    pass


@pytest.mark.slow
@pytest.mark.parametrize("where", ["before backward", "in backward", "in forward"])
def test_training_goes_on_after_an_exception(where: str, left: list[str] | None) -> None:
    torch.manual_seed(0)
    plain = MLP()
    torch.manual_seed(0)
    model = MLP()
    step = compiled(model)
    expected = _train(plain, plain, range(4))
    got = _train(model, step, range(2))

    def fail(*_: object) -> None:
        raise _UserError

    def broken_step() -> None:
        loss = step(*MLP().batch(99))
        if where == "before backward":
            raise _UserError
        if where == "in forward":
            step(torch.randn(3, 64, 64), "no argument of this model")
        torch.autograd.backward(loss * 1)

    hook = None
    if where == "in backward":  # a hook of a parameter runs between two graphs' backwards
        weight = model.layers[2].get_parameter("weight")
        hook = weight.register_hook(fail)  # type: ignore[no-untyped-call]
    with pytest.raises((_UserError, TypeError, RuntimeError)):
        broken_step()
    if hook is not None:
        hook.remove()
    model.zero_grad()
    gc.collect()
    assert session().engine.mover.managed_bytes == 0
    assert got + _train(model, step, range(2, 4)) == expected


class _TwoGraphs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(64, 64), nn.Linear(64, 64)

    def forward(self, x: Tensor, hook: Callable[[Tensor], None] | None = None) -> Tensor:
        x = torch.tanh(self.first(x))
        torch._dynamo.graph_break()
        if hook is not None:
            x.register_hook(hook)  # type: ignore[no-untyped-call]
        return torch.tanh(self.second(x)).square().mean()


def test_exception_in_the_middle_of_backward(left: list[str] | None) -> None:
    """The second graph's activations are used up, the first one's never will be."""

    def fail(_: Tensor) -> None:
        raise _UserError

    torch.manual_seed(0)
    plain = _TwoGraphs()
    torch.manual_seed(0)
    model = _TwoGraphs()
    step = compiled(model)
    expected = _train(plain, plain, range(3))
    got = _train(model, step, range(2))
    with pytest.raises(_UserError):
        torch.autograd.backward(step(*MLP().batch(5), fail))
    model.zero_grad()
    gc.collect()
    assert session().engine.mover.managed_bytes == 0
    assert got + _train(model, step, range(2, 3)) == expected


def held() -> tuple[bool, bool, bool]:
    """Whether a backward is waited for, and whether memory and files hold anything for it."""
    engine, device = session().engine, session().device
    assert isinstance(device, CpuDevice)
    return not engine.idle, engine.mover.managed_bytes > 0, device.storage.bytes_in_use > 0


def test_a_dropped_forward_frees_everything(left: list[str] | None) -> None:
    model = MLP()
    step = compiled(model)
    for number in range(3):
        loss = step(*MLP().batch(number))
        assert held() == (True, left is None, left is not None)
        del loss
        assert held() == (False, False, False)


@pytest.mark.slow
def test_an_output_kept_for_ever_stops_no_step(left: list[str] | None) -> None:
    """A user logs losses with their graphs: memory grows, as it does without us; steps go on."""
    model = MLP()
    step = compiled(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    kept = [step(*MLP().batch(100))]
    for number in range(9):
        torch.autograd.backward(step(*MLP().batch(number)))
        optimizer.step()
        optimizer.zero_grad()
    assert session().steps >= 4
    assert kept
