"""Actions that an interrupt must not leave half done."""

from collections.abc import Callable

from teraplan.errors import TeraplanError


def whole(action: Callable[[], None]) -> None:
    """Do all of `action`, also if an interrupt comes into it, which is raised afterwards.

    Python can raise one between any two of its instructions. Then the action is done once more, so
    that has to come to the same, whatever of it had been done. An error of ours is no interrupt.
    """
    try:
        action()
    except TeraplanError:
        raise
    except BaseException:
        action()
        raise
