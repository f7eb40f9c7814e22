"""Which share of an optimizer's updates the host's cores do, from rates measured in training.

The step of the optimizer runs as one: device and host begin at its start, and it ends when both are
done. Let y be the part of the updates' bytes that is on the host. Then it takes

    on the device            (1 - y) W / D
    on the host's cores      y W / U
    out of the device        y (G + P) / B_out
    back to the device       y P / B_back

and the least over y of the highest of these lines is the share: the lines of `update_split` that do
not depend on when in a step gradients are there, with the parameters' way out besides. State that
does not fit on the device has to be on the host in any case, whatever that costs.
"""

from dataclasses import dataclass

from teraplan.planners.updates.update_split import Line, best_part
from teraplan.values.hardware import Link


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateRates:
    """Bytes that updates read and write per second (`Update.work_bytes`), one place at a time."""

    device_bytes_per_s: float
    host_bytes_per_s: float


def share_on_host(
    *, work_bytes: int, gradient_bytes: int, parameter_bytes: int, rates: UpdateRates, link: Link
) -> float:
    """The share, 0 to 1, with which the optimizer's step is predicted to be shortest.

    Args:
        work_bytes: read and written by all updates.
        gradient_bytes: of all gradients.
        parameter_bytes: of all parameters.
        rates: of device and host.
        link: between them.
    """
    device_ns = work_bytes * 1e9 / rates.device_bytes_per_s
    out_bytes = gradient_bytes + parameter_bytes
    return best_part(
        [
            Line(at_none=device_ns, slope=-device_ns),
            Line(at_none=0.0, slope=work_bytes * 1e9 / rates.host_bytes_per_s),
            Line(at_none=0.0, slope=out_bytes * 1e9 / link.out_while_back_bytes_per_s),
            Line(at_none=0.0, slope=parameter_bytes * 1e9 / link.back_while_out_bytes_per_s),
        ]
    )
