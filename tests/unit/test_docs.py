"""The documents agree with the code: fields of files, links between documents, folders, targets."""

import dataclasses
import itertools
import json
import re
import subprocess
from pathlib import Path

import pytest

from teraplan.files import plan_file, run_file, trace_file
from teraplan.values.hardware import Budgets, Hardware, HostCores, Link
from teraplan.values.plan import HostUpdate, Migration, Prediction
from teraplan.values.run_record import RunRecord
from teraplan.values.step_trace import Fingerprint, Tensor, TensorKind, Update

REPO = Path(__file__).resolve().parents[2]
DOCUMENTS = sorted([*REPO.glob("*.md"), *REPO.glob("docs/*.md"), *REPO.glob("bench/*.md")])


def words_in_code(name: str) -> set[str]:
    """Everything that the document `docs/name` sets as code."""
    text = re.sub(r"```.*?```", "", (REPO / "docs" / name).read_text(), flags=re.DOTALL)
    return {word for code in re.findall(r"`([^`]+)`", text) for word in re.findall(r"\w+", code)}


def fields_of(*classes: type) -> set[str]:
    return {f.name for c in classes for f in dataclasses.fields(c) if f.name != "tensor_id"}


def test_trace_document_names_every_field() -> None:
    wanted = fields_of(Fingerprint, Tensor, Update) | {kind.value for kind in TensorKind}
    wanted |= {"kind", "backward", "graph", "call", "tensor", "duration_ns", "workspace_bytes"}
    wanted |= {"state_bytes", "graph_names", "sites", "tensors", "trace", "fingerprint"}
    assert wanted <= words_in_code("trace-file.md")


def test_plan_document_names_every_field() -> None:
    wanted = fields_of(Migration, HostUpdate, Prediction, Budgets, Hardware, HostCores, Link)
    wanted |= fields_of(RunRecord)
    assert wanted <= words_in_code("plan-file.md") | {"tier"}


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_a_sentence_goes_on_in_what_follows_it(document: Path) -> None:
    """What ends in the middle of a sentence has a table, a list or code below it."""
    blocks = document.read_text().split("\n\n")
    for block, after in itertools.pairwise(blocks):
        if re.search(r"(,|\b(or|and|of|the))$", block):
            assert after.startswith(("|", "- ", "1. ", "    ", "```")), block


def test_documented_versions_are_the_current_ones() -> None:
    assert (
        f"`{plan_file.SCHEMA}`, {plan_file.SCHEMA_VERSION}"
        in (REPO / "docs" / "plan-file.md").read_text()
    )
    assert run_file.SCHEMA in (REPO / "docs" / "plan-file.md").read_text()


def test_the_example_trace_can_be_read(tmp_path: Path) -> None:
    text = (REPO / "docs" / "trace-file.md").read_text()
    example = re.findall(r"```json\n(.*?)```", text, re.DOTALL)[0]
    path = tmp_path / "trace.json"
    path.write_text(example)
    trace = trace_file.read_trace(path)
    assert list(trace.periods()) == [(0, 1, 3)]
    trace_file.write_trace(trace, path)
    assert json.loads(path.read_text()) == json.loads(example)


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(REPO)))
def test_links_lead_somewhere(document: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)", document.read_text()):
        if not target.startswith("http"):
            assert (document.parent / target).exists(), f"{document.name}: {target}"


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(REPO)))
def test_files_that_are_named_exist(document: Path) -> None:
    text = document.read_text()
    for name in re.findall(r"`((?:teraplan|passes|runtime|bench|tests|docs)/[\w./]*)`", text):
        if not name.startswith("bench/results"):
            assert (REPO / name).exists(), f"{document.name}: {name}"


def test_make_lists_the_targets_that_the_readme_uses() -> None:
    listed = subprocess.run(
        ["make", "help"], cwd=REPO, capture_output=True, text=True, check=True
    ).stdout
    for target in re.findall(r"make ([a-z-]+)", (REPO / "README.md").read_text()):
        assert re.search(rf"make {target}\b", listed), target
