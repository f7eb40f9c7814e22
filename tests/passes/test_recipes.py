"""What can be computed again, and that it has the bits of what it stands for."""

from collections.abc import Sequence

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from teraplan.passes.recipes import compile_recipe
from teraplan.values.graph_table import GraphTable, Recipe
from tests.passes.instrumented import instrumented

WIDTH = 256


def recipes(table: GraphTable) -> dict[str, Recipe]:
    return {slot.name: slot.recipe for slot in table.slots if slot.recipe is not None}


def leaf(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1)).requires_grad_()


def names(recipe: Recipe) -> list[str]:
    program = recipe.program
    return [part.split('"')[0] for part in program.split('["aten.')[1:]]


def activated(x: Tensor, first: Tensor, second: Tensor) -> Tensor:
    return (F.gelu(x @ first) @ second).square().sum()


def test_an_activation_function_between_two_products() -> None:
    inputs = (leaf(WIDTH, WIDTH), leaf(WIDTH, WIDTH), leaf(WIDTH, WIDTH))
    _, _, table = instrumented(activated, *inputs)
    (recipe,) = recipes(table).values()
    assert names(recipe) == ["gelu.default", "t.default"]
    (source,) = recipe.sources
    assert table.slots[source].recipe is None
    assert GraphTable.from_json(table.to_json()) == table


@pytest.mark.parametrize(
    ("width", "dtype", "may_be"),
    [
        (WIDTH, torch.float32, True),
        (WIDTH + 32, torch.float32, True),
        (WIDTH + 16, torch.float32, False),
        (WIDTH + 8, torch.float32, False),
        (WIDTH + 64, torch.bfloat16, True),
        (WIDTH + 32, torch.bfloat16, False),
    ],
)
def test_rounded_functions_need_full_vectors(width: int, dtype: torch.dtype, may_be: bool) -> None:
    inputs = (leaf(WIDTH, WIDTH), leaf(WIDTH, width), leaf(width, WIDTH))
    given = (x.detach().to(dtype).requires_grad_() for x in inputs)
    _, _, table = instrumented(activated, *given)
    assert bool(recipes(table)) == may_be


def test_exact_functions_need_no_full_vectors() -> None:
    def rectified(x: Tensor, first: Tensor, second: Tensor) -> Tensor:
        hidden = x @ first
        return ((hidden * hidden) @ second).sum()

    width = WIDTH + 8
    _, _, table = instrumented(rectified, leaf(WIDTH, WIDTH), leaf(WIDTH, width), leaf(width, 8))
    assert [names(recipe) for recipe in recipes(table).values()] == [["mul.Tensor", "t.default"]]


def test_nothing_random_is_computed_again() -> None:
    def dropped(x: Tensor, weight: Tensor) -> Tensor:
        noisy = torch.rand_like(x) * torch.sin(x)
        return (F.dropout(noisy @ weight, 0.5) @ weight).square().sum()

    _, _, table = instrumented(dropped, leaf(WIDTH, WIDTH), leaf(WIDTH, WIDTH))
    for recipe in recipes(table).values():
        assert not {"rand", "rand_like", "bernoulli", "native_dropout"} & {
            name.split(".")[0] for name in names(recipe)
        }


def test_no_product_and_no_sum_is_computed_again() -> None:
    def program(x: Tensor, weight: Tensor) -> Tensor:
        y = x @ weight
        z = torch.tanh(y - y.sum(1, keepdim=True)) @ weight
        return (torch.softmax(z, 1) @ weight).square().sum()

    _, _, table = instrumented(program, leaf(WIDTH, WIDTH), leaf(WIDTH, WIDTH))
    for recipe in recipes(table).values():
        assert not {"mm", "sum", "_softmax"} & {name.split(".")[0] for name in names(recipe)}


def test_what_the_user_gets_as_well_stays() -> None:
    def program(x: Tensor, first: Tensor, second: Tensor) -> Tensor:
        hidden = F.gelu(x @ first)
        return torch.cat([hidden, hidden @ second])

    inputs = (leaf(WIDTH, WIDTH), leaf(WIDTH, WIDTH), leaf(WIDTH, WIDTH))
    _, _, table = instrumented(program, *inputs)
    assert recipes(table)

    def returned(x: Tensor, first: Tensor, second: Tensor) -> tuple[Tensor, Tensor]:
        hidden = F.gelu(x @ first)
        return hidden, hidden @ second

    _, _, table = instrumented(returned, *inputs)  # type: ignore[arg-type]
    assert not recipes(table)


def follow(recipe: Recipe, inputs: Sequence[Tensor], *, fused: bool) -> Tensor:
    compiled = compile_recipe(recipe.program, fused=fused)
    shape, stride, dtype = compiled.result_layout
    assert [(tuple(x.shape), x.stride(), x.dtype) for x in inputs] == list(compiled.input_layouts)
    result = torch.empty_strided(shape, stride, dtype=dtype)
    with torch.no_grad():
        compiled.run([x.detach() for x in inputs], result)
    return result


@pytest.mark.parametrize("fused", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_recipe_gives_what_the_function_gives(fused: bool) -> None:
    def scaled(x: Tensor, first: Tensor, second: Tensor, factor: Tensor) -> Tensor:
        hidden = x @ first
        return ((hidden * factor - hidden.abs()) @ second).square().sum()

    inputs = (leaf(WIDTH, WIDTH), leaf(WIDTH, WIDTH), leaf(WIDTH, WIDTH), leaf(WIDTH))
    x, first, _, factor = (value.detach() for value in inputs)
    forward, _, table = instrumented(scaled, *inputs, fused=fused)
    ((name, recipe),) = recipes(table).items()
    hidden = x @ first
    save = next(node for node in forward.nodes if node.name == f"token_{name}")
    (source,), (beside,) = recipe.sources, save.args[3]
    assert (table.slots[source].name, beside.meta["val"].shape) == ("mm", factor.shape)
    result = follow(recipe, [hidden, factor], fused=fused)
    assert torch.equal(result, (hidden * factor - hidden.abs()).t())
