"""A schedule as text: one line for each rank, one letter for each moment."""

from __future__ import annotations

from ..program import Event, Op, Trace
from ..tables import quantity

_LETTERS = {
    Op.TEACHER_FORWARD: "T",
    Op.STUDENT_FORWARD: "F",
    Op.STUDENT_BACKWARD: "B",
    Op.UPDATE: "U",
    Op.ALL_REDUCE: "A",
    Op.RELAY: "R",
    Op.RELAY_STUDENT: "R",
    Op.SCATTER: "R",
    Op.STUDENT_BOUNDARY: "F",
}
_LEGEND = "T teacher, F student forward, B backward, U update, A all-reduce, R relay, . waiting"


def letter(event: Event) -> str:
    """What an instruction is shown as; receiving, loading and barriers are waiting."""
    return _LETTERS.get(event.instruction.op, ".")


def steady(trace: Trace, steps: int = 2) -> tuple[float, float]:
    """From when to when some steps in the middle of a trace are; all of it if there are few."""
    ends = list(trace.finished.values())
    middle = (len(ends) - steps) // 2
    if middle > 0:
        return ends[middle - 1], ends[middle - 1 + steps]
    return 0.0, max((e.end for e in trace.events), default=0.0)


def idle(trace: Trace, begin: float, end: float) -> dict[int, float]:
    """The share of a stretch of time in which each rank that has something to do waits."""
    working = dict.fromkeys((r for r, own in enumerate(trace.program.ranks) if own), 0.0)
    for event in trace.events:
        if letter(event) != ".":
            working[event.rank] += max(0.0, min(event.end, end) - max(event.start, begin))
    return {rank: 1 - work / (end - begin) if end > begin else 0.0 for rank, work in working.items()}


def gantt(trace: Trace, width: int = 96, steps: int = 2) -> str:
    """Two steps once the pipeline is full, and how long each rank waits in them.

    Arguments:
        width: letters in a line; each is what its moment's middle holds.
    """
    begin, end = steady(trace, steps)
    if end <= begin:
        return "nothing to show"
    waits, lines = idle(trace, begin, end), []
    for rank, waiting in waits.items():
        line = ["."] * width
        for event in trace.events:
            if event.rank == rank:
                first = round((event.start - begin) / (end - begin) * width)
                last = round((event.end - begin) / (end - begin) * width)
                for i in range(max(first, 0), min(last, width)):
                    line[i] = letter(event)
        lines.append(f"rank {rank:<3} {''.join(line)} {waiting:4.0%} waiting")
    return "\n".join([f"{quantity(end - begin, 's')}: {_LEGEND}", *lines])
