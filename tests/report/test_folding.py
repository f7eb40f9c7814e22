import pytest
from hypothesis import given
from hypothesis import strategies as st

from teraplan.report.folding import (
    by_template,
    layer_fold,
    merge_numbers,
    name_template,
    node_label,
    number_ranges,
    text_template,
)
from teraplan.report.table import aligned, shorten, to_ascii


def test_equal_layers_become_one() -> None:
    (fold,) = layer_fold(f"blocks.{block}.mlp" for block in range(12))
    assert str(fold) == "blocks.*.mlp \N{MULTIPLICATION SIGN}12"
    assert fold.count == 12


def test_a_fold_shows_which_layers_where_others_exist() -> None:
    every = [f"blocks.{block}.mlp" for block in range(12)]
    known = by_template(every)
    assert [fold.label for fold in layer_fold(every[:6], known)] == ["blocks.{0-5}.mlp"]
    assert [fold.label for fold in layer_fold([every[3]], known)] == ["blocks.3.mlp"]
    assert [fold.label for fold in layer_fold(every, known)] == ["blocks.*.mlp"]


def test_two_numbers_in_a_name() -> None:
    every = [f"stages.{stage}.blocks.{block}" for stage in range(3) for block in range(4)]
    folds = layer_fold(every[:8], by_template(every))
    assert [fold.label for fold in folds] == ["stages.{0-1}.blocks.{0-3}"]


def test_names_without_numbers_stay_apart() -> None:
    assert [str(fold) for fold in layer_fold(["embed", "head", "embed"])] == ["embed", "head"]


@pytest.mark.slow
@given(st.lists(st.from_regex(r"[a-z]{1,3}(\.(\d{1,2}|[a-z]{1,2})){0,3}", fullmatch=True)))
def test_a_fold_loses_no_name(names: list[str]) -> None:
    folds = layer_fold(names)
    assert sorted(name for fold in folds for name in fold.names) == sorted(set(names))
    assert all(len({name_template(name) for name in fold.names}) == 1 for fold in folds)


@given(st.lists(st.text("ab1.*/_"), min_size=1), st.lists(st.text("ab1.*/_")))
def test_any_names_can_be_folded(names: list[str], others: list[str]) -> None:
    folds = layer_fold(names, by_template([*names, *others]))
    assert sum(fold.count for fold in folds) == len(set(names))


@pytest.mark.parametrize(
    ("numbers", "text"), [([4], "4"), ([0, 1, 2, 3, 7], "{0-3,7}"), ([2, 1], "{1-2}")]
)
def test_number_ranges(numbers: list[int], text: str) -> None:
    assert number_ranges(numbers) == text


@pytest.mark.parametrize(
    ("name", "layer", "label"),
    [
        ("g0.c2/gelu_3", "blocks.3.mlp", "gelu"),
        ("blocks.3.mlp.weight", "blocks.3.mlp", "weight"),
        ("g0.c2/blocks.3.mlp.fc1.weight", "blocks.3.mlp", "fc1.weight"),
        ("g0.c2/add_1_2", "", "add"),
    ],
)
def test_node_label(name: str, layer: str, label: str) -> None:
    assert node_label(name, layer) == label


def test_call_numbers_fold() -> None:
    assert name_template("g0.c12/gelu") == "g0.c*/gelu"


def test_reasons_that_differ_in_numbers_are_one() -> None:
    reasons = ["idle 7.5 ms, saves 10", "idle 12 ms, saves 10"]
    assert text_template(reasons[0]) == text_template(reasons[1])
    assert merge_numbers(reasons) == "idle 7.5-12 ms, saves 10"


@pytest.mark.parametrize(
    ("reasons", "merged"),
    [
        (
            ["idle 914.00 ms at site 36", "idle 1.00 s at site 36"],
            "idle 914.00 ms-1.00 s at site 36",
        ),
        (["3 MiB", "2.5 MiB", "4 MiB"], "2.5-4 MiB"),
        (["2 of 3 sites"], "2 of 3 sites"),
        (["5 seconds", "6 seconds"], "5-6 seconds"),
        ([""], ""),
    ],
)
def test_quantities_are_compared_with_their_units(reasons: list[str], merged: str) -> None:
    assert len({text_template(reason) for reason in reasons}) == 1
    assert merge_numbers(reasons) == merged


def test_times_and_sizes_are_different_reasons() -> None:
    assert text_template("5 ms") != text_template("5 MiB")


def test_columns_line_up() -> None:
    assert aligned([("a", "1"), ("bbb", "22", "x")], "<>") == ["a     1", "bbb  22  x"]
    assert aligned([]) == []


def test_shorten_leaves_out_the_middle() -> None:
    assert shorten("abcdefghij", 7) == "abc…hij"
    assert shorten("abc", 7) == "abc"


def test_ascii_replaces_what_it_does_not_know() -> None:
    assert to_ascii("1 → 2 Ω") == "1 -> 2 ?"
