"""A schedule for chrome://tracing and Perfetto (the Trace Event Format)."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from ..program import Trace
from .gantt import letter

_COLOURS = {"T": "thread_state_running", "F": "good", "B": "bad", "U": "yellow", "A": "olive", "R": "grey"}


def chrome_trace(traces: Mapping[str, Trace]) -> str:
    """The JSON of one or several traces, each as a process of its own, side by side.

    Arguments:
        traces: by name, such as "plan" and "run".
    """
    events: list[dict[str, Any]] = []
    for process, (name, trace) in enumerate(traces.items()):
        events.append({"ph": "M", "name": "process_name", "pid": process, "args": {"name": name}})
        for rank in {e.rank for e in trace.events}:
            label = f"rank {rank} ({trace.program.plan.devices[rank]})"
            events.append({"ph": "M", "name": "thread_name", "pid": process, "tid": rank, "args": {"name": label}})
        for event in trace.events:
            block = event.instruction.block
            what = event.instruction.op.value.replace("_", " ")
            events.append(
                {
                    "ph": "X",
                    "name": what if block is None else f"{what} {block}",
                    "cat": letter(event),
                    "pid": process,
                    "tid": event.rank,
                    "ts": event.start * 1e6,
                    "dur": event.seconds * 1e6,
                    "cname": _COLOURS.get(letter(event), "grey"),
                    "args": {"step": event.step, "block": block},
                }
            )
        for number, message in enumerate(trace.messages):
            edge = trace.program.edges[message.edge]
            flow = {"cat": edge.kind, "name": f"{edge.kind} {edge.block}", "id": f"{process}.{number}", "pid": process}
            events.append({**flow, "ph": "s", "tid": edge.source, "ts": message.sent * 1e6})
            events.append({**flow, "ph": "f", "bp": "e", "tid": edge.target, "ts": message.arrived * 1e6})
    return json.dumps({"traceEvents": events, "displayTimeUnit": "ms"})
