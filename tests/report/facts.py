"""A fact about a machine, as what shows one wants it."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Fact:
    name: str
    value: str
    status: str
    advice: str = ""
