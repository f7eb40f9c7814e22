"""teraplan: a memory compiler for PyTorch training. Importing it imports no torch.

model.compile(backend="teraplan", options={"device_budget": "8GiB"})
...
print(teraplan.status())
"""

import sys
from typing import TYPE_CHECKING

from teraplan.errors import TeraplanError
from teraplan.status import Status

if TYPE_CHECKING:
    from teraplan import backend as _backend

__all__ = ["Status", "TeraplanError", "__version__", "status"]
__version__ = "0.1.0"


def status() -> Status:
    """What the compiled model that ran last does: coverage, budget, peaks, times, waits, paths."""
    loaded = sys.modules.get("teraplan.backend")
    if loaded is None:  # nothing has been compiled
        return Status(phase="idle")
    module: _backend = loaded  # type: ignore[valid-type]
    return module.current_status()  # type: ignore[no-any-return,attr-defined]
