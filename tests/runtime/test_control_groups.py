"""Limits of control groups, in trees of files as Linux has them."""

from collections.abc import Mapping
from pathlib import Path

from teraplan.runtime.process.control_groups import GroupMemory, limited_groups


def _limits(tmp_path: Path, groups: str, files: Mapping[str, str]) -> list[GroupMemory]:
    of_process, root = tmp_path / "cgroup", tmp_path / "fs"
    of_process.write_text(groups)
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return list(limited_groups(of_process, root))


def _second(folder: str, limit: str, usage: int, cache: int) -> dict[str, str]:
    stat = f"anon {usage - cache}\ninactive_file {cache}\n"
    files = {"memory.max": f"{limit}\n", "memory.current": f"{usage}\n", "memory.stat": stat}
    return {f"{folder}/{name}": text for name, text in files.items()}


def test_all_groups_from_the_own_one_up_count(tmp_path: Path) -> None:
    files = {
        **_second("slice/job", "max", 300, 100),
        **_second("slice", "1000", 500, 100),
        **_second("other", "10", 10, 0),
    }
    (group,) = _limits(tmp_path, "0::/slice/job\n", files)
    assert group == GroupMemory(limit_bytes=1000, usage_bytes=400)
    assert group.free_bytes == 600, "what the page cache has is given back"


def test_the_first_version_has_a_tree_for_memory(tmp_path: Path) -> None:
    files = {
        "memory/job/memory.limit_in_bytes": "2048\n",
        "memory/job/memory.usage_in_bytes": "4096\n",
        "memory/job/memory.stat": "cache 9\ntotal_inactive_file 1024\n",
    }
    (group,) = _limits(tmp_path, "9:name=systemd:/x\n4:cpu,memory:/job\n", files)
    assert (group.limit_bytes, group.free_bytes) == (2048, 0)


def test_a_container_sees_its_own_group_at_the_root(tmp_path: Path) -> None:
    (group,) = _limits(tmp_path, "0::/docker/7f3a\n", _second(".", "64", 16, 0))
    assert group.free_bytes == 48


def test_without_control_groups_there_is_no_limit(tmp_path: Path) -> None:
    assert not _limits(tmp_path, "", {})
    assert not list(limited_groups(tmp_path / "none", tmp_path))
