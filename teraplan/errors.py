"""Every error that teraplan raises on purpose.

TeraplanError
├── ConfigError (ValueError)        an option, variable or configuration file is wrong
├── FileFormatError (ValueError)    a plan, trace, run, hardware or rules file cannot be read
│   ├── PlanMismatchError           the plan was made for another program or machine
│   └── InvalidPlanError            the checker refuses the plan
├── InfeasibleBudgetError           no plan fits; names the site and the least budget that works
├── BudgetExceededError             the running step would need more memory than promised
├── StorageError (OSError)          a storage directory or file failed; names tensor, file, offset
│   ├── StorageFullError            no space left for spilled tensors
│   ├── StorageUnusableError        missing, read-only, not private, or not on a disk
│   ├── MappingError                the system refuses a mapping of memory, or a file of /proc
│   └── IntegrityError              the bytes that came back are not the bytes that left
├── ThreadLimitError (RuntimeError) the process may have no more threads
├── DeadlineError (TimeoutError)    a wait took longer than its deadline; names what it waited for
├── HostUpdateError                 an update on the host's cores failed; names it and why
├── UnsupportedError                the program does what this backend cannot do correctly
│   └── GradientGoneError           a gradient was used up in the backward, and is needed after it
└── FallbackRefusedError            `strict` is set and something would fall back

StateHasToMoveError is none of these: it is caught before anybody sees it.

A message says what happened, the numbers with their units, and what to do next.
"""

import copy
from typing import TypeVar

_OSError = TypeVar("_OSError", bound=OSError)


class TeraplanError(Exception):
    """Base of every error that teraplan raises on purpose."""


class ConfigError(TeraplanError, ValueError):
    """An option, an environment variable or a configuration file is wrong."""


class FileFormatError(TeraplanError, ValueError):
    """A file of ours cannot be read: not JSON, wrong fields, unknown version."""


class PlanMismatchError(FileFormatError):
    """The plan was made for other graphs, shapes, versions or hardware; names the field."""


class InvalidPlanError(FileFormatError):
    """The independent checker refuses the plan."""


class InfeasibleBudgetError(TeraplanError):
    """No plan fits in the budget.

    Attributes:
        least_budget_bytes: a device budget for which there is a plan: the smallest one where sums
            of bytes tell it, else perhaps a little more; 0 if unknown.
    """

    def __init__(self, message: str, *, least_budget_bytes: int = 0) -> None:
        super().__init__(message)
        self.least_budget_bytes = least_budget_bytes


class BudgetExceededError(TeraplanError):
    """The step would need more memory than its budget, and nothing more can leave."""


class StorageError(TeraplanError, OSError):
    """A storage directory or file failed."""


class StorageFullError(StorageError):
    """There is no space left for spilled tensors."""


class StorageUnusableError(StorageError):
    """A storage directory is missing, not writable, or not on a disk."""


class MappingError(StorageError):
    """The system refuses another mapping of memory, or an open file for it."""


class IntegrityError(StorageError):
    """The bytes that came back from storage are not the bytes that left."""


class ThreadLimitError(TeraplanError, RuntimeError):
    """The process may have no more threads."""


class DeadlineError(TeraplanError, TimeoutError):
    """A wait took longer than its deadline."""


class HostUpdateError(TeraplanError):
    """An update on the host's cores failed; the cause is the error of the optimizer's own step."""


class UnsupportedError(TeraplanError):
    """The program asks for something that this backend cannot do correctly."""


class GradientGoneError(UnsupportedError):
    """The program needs a gradient, or a parameter as it was, after an update in the backward."""


class FallbackRefusedError(TeraplanError):
    """`strict` is set, and a slower or smaller path would have been taken."""


class StateHasToMoveError(Exception):
    """A graph was compiled, or is about to run, for a training state that stays, and that is too
    much for the budget: it is compiled again for one that moves."""


def bare(error: _OSError) -> _OSError:
    """The error without its causes and their frames, which hold the user's tensors."""
    made = copy.copy(error)
    made.errno = error.errno
    return made
