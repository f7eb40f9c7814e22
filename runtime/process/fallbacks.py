"""What the option `strict` refuses: to do something slower, or less, than what was asked for."""

from teraplan.errors import FallbackRefusedError


def allow(what: str, *, strict: bool) -> None:
    """`what`, one sentence, is about to be done in the place of something better.

    Raises:
        FallbackRefusedError: `strict` is set.
    """
    if strict:
        raise FallbackRefusedError(f"strict is set, and {what}")
