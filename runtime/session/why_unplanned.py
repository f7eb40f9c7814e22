"""When a step goes on without a plan though one was to be made, and why, for people."""

from teraplan.runtime.session.case import Case

OFF_PLAN = "steps go another way than the replayed plan, so they run without it; plan again"
_ALONE = (
    "a forward runs in it whose backward never does (an evaluation without torch.no_grad(), say), "
    "and no plan keeps what that saves under the budget"
)
_REMEDY = ". Evaluate under torch.no_grad(), or delete the loss"


def do_without_plan(case: Case, budget_bytes: int) -> bool:
    """Go on without a plan where no plan keeps to the budget; False if steps without one do not.

    What a forward has saved whose backward never runs leaves without a plan, but in a plan it has
    to stay until nobody can ask for it any more.
    """
    last, memory = case.last, case.memory
    if case.state_blocks or last is None or memory is None or not last.has_forwards_alone:
        return False
    if memory.most_bytes > budget_bytes:
        return False
    case.is_alone = True
    case.pause()
    return True


def tell_why_unplanned(case: Case) -> str:
    """Why no plan can be made of what was measured, once for each pause."""
    case.told_pauses = case.num_pauses + 1
    kind = f"steps of one kind (number {case.number}: the same graphs at the same sizes)"
    why = f"go without a plan: {_ALONE}" if case.is_alone else "were different every time"
    return (
        f"{kind} {why}; the next {case.pause_steps} of them run without a plan, then they are "
        f"measured again{_REMEDY if case.is_alone else ''}"
    )


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
        why = _ALONE if case.is_alone else "steps of this kind were different every time"
        return f"{why}; after {case.pause_steps - case.paused_steps} more they are measured again"
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
