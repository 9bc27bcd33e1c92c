"""`simulate(program, profile)`: the very instructions that run, timed by their costs, with finite slots."""

from __future__ import annotations

from collections import defaultdict

from ..costs import FORWARD, Link, Profile
from ..planner.plan import intervals
from .instruction import RECEIVES, SENDS, Edge, Instruction, Op
from .program import Program
from .timeline import Event, Message, Trace

_POSTED = 2  # messages that wait at the receiver beside those under way


def simulate(program: Program, profile: Profile, steps: int = 8) -> Trace:
    """When every rank would do what in the first `steps` steps of whole batches.

    A rank runs its instructions in their order. A sender waits while an edge's slots are full, a receiver for its
    message, an update for its all-reduce (which goes on beside other work), a barrier for all ranks.
    """
    return _Simulation(program, profile, steps).run()


class _Simulation:
    def __init__(self, program: Program, profile: Profile, steps: int) -> None:
        self.program, self.profile, self.steps = program, profile, steps
        self.clock = [0.0] * len(program.ranks)
        self.sent: dict[int, list[tuple[float, float]]] = defaultdict(list)  # by edge: sent, arrived
        self.taken: dict[int, list[float]] = defaultdict(list)
        self.joined: dict[tuple[int, ...], dict[int, float]] = defaultdict(dict)  # by step and gate: when a rank came
        self.reduced: dict[tuple[int, ...], float] = defaultdict(float)  # by group: its last all-reduce
        self.events: list[Event] = []

    def run(self) -> Trace:
        at = [0] * len(self.clock)
        moved = True
        while moved:
            moved = False
            for rank, own in enumerate(self.program.ranks):
                while at[rank] < self.steps * len(own) and self._run(rank, *divmod(at[rank], len(own))):
                    at[rank] += 1
                    moved = True
        messages = [
            Message(edge, step, *times) for edge, own in sorted(self.sent.items()) for step, times in enumerate(own)
        ]
        events = sorted(self.events, key=lambda e: (e.start, e.rank, e.step, e.index))
        return Trace(self.program, tuple(events), tuple(messages))

    def _run(self, rank: int, step: int, index: int) -> bool:
        """Whether the instruction's time is known by now; then it is over."""
        instruction, now = self.program.ranks[rank][index], self.clock[rank]
        begin = self._begin(rank, step, instruction)
        if begin is None:
            return False
        end = begin + self._seconds(rank, instruction)
        for edge in instruction.edges:
            if instruction.op in SENDS:
                self.sent[edge].append((end, end))  # what a link costs is spent at its two ends
            else:
                self.taken[edge].append(end)
        self.clock[rank] = end
        self.events.append(Event(rank, step, index, instruction, now, end))
        return True

    def _begin(self, rank: int, step: int, instruction: Instruction) -> float | None:
        """When an instruction can begin; None while that is not known."""
        now = self.clock[rank]
        if instruction.op in SENDS:
            for edge in instruction.edges:
                full = step - self.program.edges[edge].slots - _POSTED
                if full >= 0 and len(self.taken[edge]) <= full:
                    return None
                now = max(now, self.taken[edge][full] if full >= 0 else 0.0)
        elif instruction.op in RECEIVES or instruction.op is Op.LOAD:
            for edge in instruction.edges:
                if len(self.sent[edge]) <= step:
                    return None
                now = max(now, self.sent[edge][step][1])
        elif instruction.op is Op.BARRIER:
            gate = (step, -1)
            self.joined[gate].setdefault(rank, now)
            waiting = [r for r, own in enumerate(self.program.ranks) if any(i.op is Op.BARRIER for i in own)]
            return max(self.joined[gate].values()) if len(self.joined[gate]) == len(waiting) else None
        elif instruction.op is Op.ALL_REDUCE:
            self.joined[step, instruction.assignment, instruction.trains or 0][rank] = now
        elif instruction.op is Op.UPDATE:
            for i in instruction.after:
                before = self.program.ranks[rank][i]
                if before.op is Op.ALL_REDUCE:
                    done = self._reduce(step, before)
                    if done is None:
                        return None
                    now = max(now, done)
        return now

    def _reduce(self, step: int, gate: Instruction) -> float | None:
        """When an all-reduce is done: after the last rank has come, and the group's all-reduce before it."""
        ranks, block = self.program.plan.assignments[gate.assignment].ranks, gate.block or 0
        key = (step, gate.assignment, gate.trains or 0)
        if len(self.joined[key]) < len(ranks):
            return None
        done = (-1, *key)
        if done not in self.reduced:
            size = self.profile.blocks[block].gradient_bytes / len(self.program.trained_in(block))
            begin = max(*self.joined[key].values(), self.reduced[ranks])
            self.reduced[done] = self.reduced[ranks] = begin + self.profile.reduce_seconds(ranks, size)
        return self.reduced[done]

    def _seconds(self, rank: int, instruction: Instruction) -> float:
        """How long an instruction works, without waiting."""
        kind, op, block = self.profile.kind_of[rank], instruction.op, instruction.block or 0
        assignment, costs = self.program.plan.assignments[instruction.assignment], self.profile.blocks[block]
        rows = assignment.rows[assignment.ranks.index(rank)] if rank in assignment.ranks else 0
        if op is Op.LOAD and not instruction.edges:
            first = next(i for i in self.program.ranks[rank] if i.op is Op.LOAD)
            return self.profile.load if instruction is first else 0.0
        if op is Op.TEACHER_FORWARD:
            return costs.teacher[kind].at(rows)
        shared = len(self.program.trained_in(block))  # costs are of all candidates together
        if op in (Op.STUDENT_FORWARD, Op.STUDENT_BACKWARD):
            m, again = assignment.microbatches, assignment.recompute
            kept = costs.student_seconds(kind, rows, m) / m / shared
            if op is Op.STUDENT_FORWARD:
                return FORWARD * kept
            return costs.student_seconds(kind, rows, m, again) / m / shared - FORWARD * kept
        if op is Op.UPDATE:
            return costs.update[kind] / shared
        links = [self._moved(rank, self.program.edges[e]) for e in instruction.edges]
        # Messages of one instruction are under way together.
        return sum(size / link.bandwidth for link, size in links) + max(
            (link.latency for link, size in links if size), default=0.0
        )

    def _moved(self, rank: int, edge: Edge) -> tuple[Link, float]:
        """The link of a message, and its bytes."""
        assignments, link = self.program.plan.assignments, self.profile.link(edge.source, edge.target)
        target = assignments[edge.assignment]
        rows = target.rows[target.ranks.index(edge.target)]
        if edge.kind == "inputs":
            return link, self.profile.input_bytes * rows if rank == edge.source else 0.0
        source = next(a for a in assignments if edge.block in a.blocks)
        (a, b), (c, d) = (
            intervals(of.rows, sum(of.rows))[of.ranks.index(rank)]
            for of, rank in ((source, edge.source), (target, edge.target))
        )
        costs = self.profile.blocks[edge.block or 0]
        size = costs.boundary if edge.kind == "teacher" else costs.own_boundary
        return link, size * max(0, min(b, d) - max(a, c))
