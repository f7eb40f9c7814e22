"""StepTrace <-> JSON.

    {"schema": "teraplan.trace", "schema_version": 4, "trace": {
        "fingerprint": {...}, "state_bytes": n,
        "graph_names": ["g0", ...],
        "sites": {"kind": "esnd...", "backward": "fffb...",     one letter per site
                  "graph": [...], "call": [...],                 graph: index into graph_names
                  "tensor": [...],                               1 + tensor id, 0 for none
                  "duration_ns": [...], "workspace_bytes": [...]},
        "tensors": [{"name": ..., "windows": [[2, 2], [5, 6]], ...}, ...],
        "updates": [{"start": 5, "end": 6, "ready": 5, "parameters": ["w"], ...}, ...]}}

Sites are columns because there may be 250 000 of them; tensors are one object per line.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

from teraplan.errors import FileFormatError
from teraplan.files.json_files import Node, load_object, write_object
from teraplan.values.step_trace import (
    Fingerprint,
    Recompute,
    Site,
    SiteKind,
    StepTrace,
    Tensor,
    TensorKind,
    Update,
    wrong_updates,
)

SCHEMA = "teraplan.trace"
MAX_STEP_NS = 1 << 51
"""Computation of a step, with all that can be computed again: 26 days."""
MAX_STEP_BYTES = 1 << 60
"""Of a step, with state, workspace and what computing again takes."""
# 1 (2026-11): first version.
# 2 (2026-11): tensors have `changed_in`; in version 1 it is not known.
# 3 (2026-11): `updates`, and tensors have `recompute`; older versions have none.
# 4 (2026-11): the fingerprint has `chunk_bytes`; in older versions it is not known.
SCHEMA_VERSION = 4
READABLE_VERSIONS = (1, 2, 3, 4)

_LETTERS = {SiteKind.ENTER: "e", SiteKind.SAVE: "s", SiteKind.NEED: "n", SiteKind.DONE: "d"}
_KINDS = {letter: kind for kind, letter in _LETTERS.items()}
_SITE_COLUMNS = (
    "kind",
    "backward",
    "graph",
    "call",
    "tensor",
    "duration_ns",
    "workspace_bytes",
)
_TENSOR_FIELDS = (
    "name",
    "kind",
    "nbytes",
    "shape",
    "dtype",
    "layer",
    "windows",
    "persistent",
    "changed_in",
    "recompute",
)
_UPDATE_SITES = ("start", "end", "ready")
_UPDATE_TENSORS = ("parameters", "gradients", "states")
_RECOMPUTE_FIELDS = ("duration_ns", "sources", "temporary_bytes")
_FINGERPRINT_FIELDS = ("graphs", "shapes", "torch_version", "kernels", "device", "chunk_bytes")


def write_trace(trace: StepTrace, path: Path) -> None:
    """Writes `trace` to `path`, whole or not at all.

    Raises:
        FileFormatError: if two tensors have one name, since the file tells them by name.
    """
    write_object(
        {"schema": SCHEMA, "schema_version": SCHEMA_VERSION, "trace": encode_trace(trace)}, path
    )


def read_trace(path: Path) -> StepTrace:
    """The trace in the file at `path`.

    Raises:
        FileFormatError: if the file is not such a file; names the field.
    """
    root = load_object(path, SCHEMA, READABLE_VERSIONS)
    return decode_trace(root.only(("schema", "schema_version", "trace")).get("trace"))


def encode_trace(trace: StepTrace) -> dict[str, object]:
    """The JSON object of `trace`, for a file of its own or within a plan."""
    counts = Counter(tensor.name for tensor in trace.tensors)
    name, count = counts.most_common(1)[0] if counts else ("", 0)
    if count > 1:
        raise FileFormatError(f'trace: "{name}" names {count} tensors; names must be unique')
    graph_names = sorted({site.graph for site in trace.sites})
    graph_ids = {name: index for index, name in enumerate(graph_names)}
    sites = trace.sites
    return {
        "fingerprint": _encode_fingerprint(trace.fingerprint),
        "state_bytes": trace.state_bytes,
        "graph_names": graph_names,
        "sites": {
            "kind": "".join(_LETTERS[site.kind] for site in sites),
            "backward": "".join("b" if site.backward else "f" for site in sites),
            "graph": [graph_ids[site.graph] for site in sites],
            "call": [site.call for site in sites],
            "tensor": [0 if site.tensor_id is None else site.tensor_id + 1 for site in sites],
            "duration_ns": [site.duration_ns for site in sites],
            "workspace_bytes": [site.workspace_bytes for site in sites],
        },
        "tensors": [
            {
                "name": tensor.name,
                "kind": tensor.kind.value,
                "nbytes": tensor.nbytes,
                "shape": list(tensor.shape),
                "dtype": tensor.dtype,
                "layer": tensor.layer,
                "windows": [list(window) for window in tensor.windows],
                "persistent": tensor.persistent,
                "changed_in": None if tensor.changed_in is None else list(tensor.changed_in),
                "recompute": _encode_recompute(tensor.recompute, trace.tensors),
            }
            for tensor in trace.tensors
        ],
        "updates": [
            {name: getattr(update, name) for name in _UPDATE_SITES}
            | {
                name: [trace.tensors[i].name for i in getattr(update, name)]
                for name in _UPDATE_TENSORS
            }
            for update in trace.updates
        ],
    }


def _encode_recompute(
    recompute: Recompute | None, tensors: Sequence[Tensor]
) -> dict[str, object] | None:
    if recompute is None:
        return None
    return {
        "duration_ns": recompute.duration_ns,
        "sources": [tensors[source].name for source in recompute.sources],
        "temporary_bytes": recompute.temporary_bytes,
    }


def _encode_fingerprint(fingerprint: Fingerprint) -> dict[str, object]:
    return {
        "graphs": list(fingerprint.graphs),
        "shapes": fingerprint.shapes,
        "torch_version": fingerprint.torch_version,
        "kernels": fingerprint.kernels,
        "device": fingerprint.device,
        "chunk_bytes": fingerprint.chunk_bytes,
    }


def decode_trace(node: Node) -> StepTrace:
    """The trace that a JSON object encodes."""
    node.only(("fingerprint", "state_bytes", "graph_names", "sites", "tensors", "updates"))
    tensor_nodes = node.get("tensors").items()
    sites = _decode_sites(node, len(tensor_nodes))
    ids = {tensor.get("name").text(): i for i, tensor in enumerate(tensor_nodes)}
    tensors = tuple(_decode_tensor(tensor, len(sites), ids) for tensor in tensor_nodes)
    names: set[str] = set()
    for tensor, tensor_node in zip(tensors, tensor_nodes, strict=True):
        if tensor.name in names:
            raise tensor_node.get("name").fail(f'"{tensor.name}" names two tensors')
        names.add(tensor.name)
    trace = StepTrace(
        fingerprint=_decode_fingerprint(node.get("fingerprint")),
        state_bytes=node.get("state_bytes").integer(),
        sites=sites,
        tensors=tensors,
    )
    _require_countable(trace, node)
    return _with_updates(trace, node.get("updates").items()) if node.has("updates") else trace


def _require_countable(trace: StepTrace, node: Node) -> None:
    """Raise FileFormatError if the step is longer, or has more bytes, than can be counted with."""
    what, why = excess(trace)
    if what == "durations":
        raise node.get("sites").get("duration_ns").fail(why)
    if what == "sizes":
        raise node.get("tensors").fail(why)


def excess(trace: StepTrace) -> tuple[str, str]:
    """What of a step is too much to be counted with, "durations" or "sizes", and how; or ""."""
    again = [t.recompute for t in trace.tensors if t.recompute is not None]
    duration_ns = trace.duration_ns + sum(r.duration_ns for r in again)
    if duration_ns > MAX_STEP_NS:
        return "durations", f"add up to {duration_ns} ns, at most {MAX_STEP_NS}"
    workspace = max((site.workspace_bytes for site in trace.sites), default=0)
    nbytes = sum(t.nbytes for t in trace.tensors) + sum(r.temporary_bytes for r in again)
    total = trace.state_bytes + workspace + nbytes
    if total > MAX_STEP_BYTES:
        return "sizes", f"add up to {total} bytes with state, at most {MAX_STEP_BYTES}"
    return "", ""


def _with_updates(trace: StepTrace, nodes: Sequence[Node]) -> StepTrace:
    ids = {tensor.name: index for index, tensor in enumerate(trace.tensors)}
    trace = replace(trace, updates=tuple(_decode_update(node, ids) for node in nodes))
    for number, why in wrong_updates(trace):
        raise nodes[number].fail(why)
    return trace


def _decode_update(node: Node, ids: dict[str, int]) -> Update:
    node.only((*_UPDATE_SITES, *_UPDATE_TENSORS))

    def tensors(field: str) -> tuple[int, ...]:
        items = node.get(field).items()
        for item in items:
            if item.text() not in ids:
                raise item.fail(f'"{item.text()}" is no tensor of the trace')
        return tuple(ids[item.text()] for item in items)

    return Update(
        **{name: node.get(name).integer() for name in _UPDATE_SITES},
        parameters=tensors("parameters"),
        gradients=tensors("gradients"),
        states=tensors("states"),
    )


def _decode_fingerprint(node: Node) -> Fingerprint:
    node.only(_FINGERPRINT_FIELDS)
    known = node.has("chunk_bytes") and not node.get("chunk_bytes").is_null()
    return Fingerprint(
        graphs=tuple(item.text() for item in node.get("graphs").items()),
        shapes=node.get("shapes").text(),
        torch_version=node.get("torch_version").text(),
        kernels=node.get("kernels").text(),
        device=node.get("device").text(),
        chunk_bytes=node.get("chunk_bytes").integer() if known else None,
    )


def _letters(node: Node, allowed: str, length: int | None = None) -> str:
    letters = node.text(max_length=1 << 26)
    if length is not None and len(letters) != length:
        raise node.fail(f"has {len(letters)} letters, expected {length}")
    unknown = set(letters) - set(allowed)
    if unknown:
        raise node.fail(f'has the letter "{min(unknown)}", expected only {", ".join(allowed)}')
    return letters


def _decode_sites(trace: Node, num_tensors: int) -> tuple[Site, ...]:
    graph_names = [item.text() for item in trace.get("graph_names").items()]
    node = trace.get("sites").only(_SITE_COLUMNS)
    kinds = _letters(node.get("kind"), "".join(_KINDS))
    length = len(kinds)
    if length and not graph_names:
        raise trace.get("graph_names").fail("is empty, but there are sites")
    columns = zip(
        kinds,
        _letters(node.get("backward"), "fb", length),
        node.get("graph").integers(length, limit=max(len(graph_names) - 1, 0)),
        node.get("call").integers(length),
        node.get("tensor").integers(length, limit=num_tensors),
        node.get("duration_ns").integers(length),
        node.get("workspace_bytes").integers(length),
        strict=True,
    )
    return tuple(
        Site(
            kind=_KINDS[kind],
            graph=graph_names[graph],
            call=call,
            backward=backward == "b",
            tensor_id=tensor - 1 if tensor else None,
            duration_ns=duration_ns,
            workspace_bytes=workspace_bytes,
        )
        for kind, backward, graph, call, tensor, duration_ns, workspace_bytes in columns
    )


def _decode_tensor(node: Node, num_sites: int, ids: dict[str, int]) -> Tensor:
    node.only(_TENSOR_FIELDS)
    kind = node.get("kind")
    if kind.text() not in {k.value for k in TensorKind}:
        raise kind.fail(f'"{kind.text()}" is not one of {", ".join(TensorKind)}')
    windows_node = node.get("windows")
    windows: list[tuple[int, int]] = []
    for item in windows_node.items():
        start, end = item.integers(2, limit=num_sites)
        windows.append((start, end))
    if not windows:
        raise windows_node.fail("is empty; a tensor is touched at least once")
    if any(start > end for start, end in windows) or any(
        left[1] > right[0] for left, right in pairwise(windows)
    ):
        raise windows_node.fail("are not ascending ranges [start, end] that do not overlap")
    return Tensor(
        name=node.get("name").text(),
        kind=TensorKind(kind.text()),
        nbytes=node.get("nbytes").integer(),
        shape=node.get("shape").integers(),
        dtype=node.get("dtype").text(),
        layer=node.get("layer").label(),
        windows=tuple(windows),
        persistent=node.get("persistent").flag(),
        changed_in=_decode_changes(node, len(windows)),
        recompute=_decode_recompute(node, ids),
    )


def _decode_recompute(tensor: Node, ids: dict[str, int]) -> Recompute | None:
    if not tensor.has("recompute") or tensor.get("recompute").is_null():
        return None
    node = tensor.get("recompute").only(_RECOMPUTE_FIELDS)
    sources: list[int] = []
    for item in node.get("sources").items():
        if item.text() not in ids:
            raise item.fail(f'"{item.text()}" is no tensor of this trace')
        if item.text() == tensor.get("name").text():
            raise item.fail("is the tensor itself; a tensor is computed again from others")
        sources.append(ids[item.text()])
    return Recompute(
        duration_ns=node.get("duration_ns").integer(),
        sources=tuple(sources),
        temporary_bytes=node.get("temporary_bytes").integer(),
    )


def _decode_changes(tensor: Node, num_windows: int) -> tuple[int, ...] | None:
    if not tensor.has("changed_in") or tensor.get("changed_in").is_null():
        return None
    node = tensor.get("changed_in")
    changes = node.integers(limit=num_windows - 1)
    if any(left >= right for left, right in pairwise(changes)):
        raise node.fail("are not ascending numbers of windows")
    return changes
