"""How long an operation takes on a device: the roofline model.

    time = max(flops / (peak * 0.70), bytes / (memory bandwidth * 0.80)), at least 4 us

70 % of the peak: TERAIO's throughput on Llama-3-8B in FP32 is 42 TFLOPS of an H100 NVL's 60 (6
flops per parameter and token; from the axis of its figure 7). 80 % of memory bandwidth and the
least time of one kernel are assumed. What the model lacks: it knows no shapes that a kernel is bad
at, no fusion beyond what the list of operations says, no caches and no clocks.
"""

from dataclasses import dataclass

from teraplan.errors import ConfigError
from teraplan.library.machines import Processor


@dataclass(frozen=True, slots=True, kw_only=True)
class Roofline:
    """Times of operations on one device."""

    processor: Processor
    flops_part: float = 0.70
    memory_part: float = 0.80
    least_ns: int = 4000

    def nanoseconds(self, flops: float, nbytes: float, dtype: str) -> int:
        """Time of an operation that computes `flops` in `dtype` and reads and writes `nbytes`.

        Raises:
            ConfigError: if there are any, and the speed of the device in `dtype` is not known.
        """
        peak = self.processor.flops_per_s.get(dtype)
        if peak is None and flops:
            known = ", ".join(sorted(self.processor.flops_per_s))
            raise ConfigError(f'no speed for "{dtype}" is given for this device; it has {known}')
        computing = flops / (peak * self.flops_part) if peak is not None else 0.0
        moving = nbytes / (self.processor.memory_bytes_per_s * self.memory_part)
        return max(self.least_ns, round(max(computing, moving) * 1e9))
