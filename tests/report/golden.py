"""Texts kept in tests/golden; TERAPLAN_UPDATE_GOLDEN=1 rewrites them, a person reads the diff."""

import os
from pathlib import Path

GOLDEN = Path(__file__).parent.parent / "golden"


def assert_golden(name: str, text: str) -> None:
    path = GOLDEN / name
    if os.environ.get("TERAPLAN_UPDATE_GOLDEN") == "1":
        path.write_text(text + "\n", encoding="utf-8")
    assert path.read_text(encoding="utf-8") == text + "\n"
