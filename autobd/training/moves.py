"""When to move to another plan."""

from __future__ import annotations

from ..blocks import Split
from ..costs import Profile
from ..errors import PlanError
from ..planner import plan, replan
from ..program import Program, Trace, again
from ..runtime import statistics_note


class Moves:
    """Programs made anew at epoch ends, by what the epoch has shown.

    Arguments:
        strategy: as asked for.

    Attributes:
        profile: what the last plan was made by; `notes`: what happened.
    """

    def __init__(self, split: Split, profile: Profile, strategy: str) -> None:
        self.profile, self.notes = profile, list[str]()
        self._split, self._strategy = split, strategy

    def look(self, program: Program, trace: Trace, stopped: frozenset[int]) -> Program | None:
        """What to go on with, without the students of the blocks and candidates that have stopped; None: as before."""
        if stopped != program.stopped:
            whole = [b for b in range(len(self._split)) if stopped.issuperset(program.trained_in(b))]
            self.profile = self.profile.untrained(whole)
            try:
                return again(program, self._split, stopped=stopped, plan=plan(self.profile, self._strategy))
            except PlanError:  # ranks would wait for each other
                return again(program, self._split, stopped=stopped)
        try:
            found = replan(program.plan, self.profile, trace.work, self._strategy)
            if found is None:
                return None
            new = again(program, self._split, plan=found.plan)
        except PlanError:  # by the measured times nothing fits, or ranks would wait for each other: what runs goes on
            return None
        self.profile = found.profile
        self.notes += [f"planned again: {found.text}", *filter(None, [statistics_note(self._split, found.plan)])]
        return new
