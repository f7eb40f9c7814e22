"""The name that somebody may have meant who wrote one that does not exist."""

import difflib
from collections.abc import Iterable

_NEAR = 0.5
"""Of names that are less alike than this none is suggested."""


def nearest(name: str, known: Iterable[str]) -> str | None:
    """The one of `known` that is most like `name`; None if none is near."""
    near = difflib.get_close_matches(name, list(known), n=1, cutoff=_NEAR)
    return near[0] if near else None
