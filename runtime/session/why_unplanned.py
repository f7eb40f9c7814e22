"""Why a step runs without a plan, for people."""

from teraplan.runtime.session.case import Case


def why_unplanned(case: Case, *, num_kinds: int, profile_steps: int) -> str:
    """What a plan for steps of this kind waits for; empty if there is one.

    Args:
        case: the kind.
        num_kinds: of kinds that were met.
        profile_steps: of a kind whose times are measured, beside one for memory.
    """
    if case.schedule is not None:
        return ""
    if not case.repeats:
        return (
            "steps of this kind were different every time; "
            f"after {case.pause_steps - case.paused_steps} more they are measured again"
        )
    if case.num_begun <= 1 and not case.is_first:
        behind = ", behind steps as the last ones" if case.in_turn else ""
        return (
            f"none before began with the same graph at the same sizes{behind}; "
            f"{num_kinds} kinds of steps so far, each planned for once it repeats"
        )
    if case.attempts:
        often = "once" if case.attempts == 1 else f"{case.attempts} times"
        return f"steps of this kind were different {often}; they are measured again"
    if case.memory is None:
        return "memory is measured in the first step that compiles nothing and makes no state"
    return f"times of {len(case.durations_ns)} of {profile_steps} steps have been measured"
