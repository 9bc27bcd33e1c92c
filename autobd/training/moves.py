"""When to move to another plan."""

from __future__ import annotations

from ..blocks import Split
from ..costs import Profile
from ..planner import Plan, replan
from ..program import Program, Trace
from ..runtime import statistics_note


class Moves:
    """Plans made anew at epoch ends.

    Arguments:
        strategy: as asked for; None or a plan of the user's own: never.

    Attributes:
        profile: what the last plan was made by; `notes`: what happened.
    """

    def __init__(self, split: Split, profile: Profile, strategy: str | Plan | None) -> None:
        self.profile, self.notes = profile, list[str]()
        self._split, self._strategy = split, strategy

    def look(self, program: Program, trace: Trace) -> Plan | None:
        """A plan to move to, by what the epoch has shown."""
        if not isinstance(self._strategy, str):
            return None
        found = replan(program.plan, self.profile, trace.work, self._strategy)
        if found is None:
            return None
        self.profile = found.profile
        self.notes += [f"planned again: {found.text}", *filter(None, [statistics_note(self._split, found.plan)])]
        return found.plan
