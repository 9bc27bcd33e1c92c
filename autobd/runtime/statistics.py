"""Running statistics of student blocks whose batch is split: each replica or microbatch sees its own rows."""

from __future__ import annotations

from torch import nn
from torch.nn.modules.batchnorm import _NormBase

from ..blocks import Block, Split
from ..planner import Plan


def statistics_note(split: Split, plan: Plan) -> str | None:
    """What a user should know where student blocks with running statistics see a part of the batch; None where none
    do."""
    students = [(b, pair.student, split.student.model) for b, pair in enumerate(split.pairs)]
    students += [(c.block, c.student, c.split.student.model) for c in split.candidates]
    kept = {b for b, block, model in students if _statistics(block, model)}
    blocks = [b for a in plan.assignments if a.replicated or a.microbatches > 1 for b in a.blocks if b in kept]
    if not blocks:
        return None
    named = ", ".join(map(str, blocks))
    return (
        f"the batch is split over replicas or into microbatches in blocks {named}: batch norms there use their own "
        "rows, and the running statistics of the first replica are kept"
    )


def _statistics(block: Block, model: nn.Module) -> bool:
    layers = (model.get_submodule(str(n.target)) for n in block.graph.nodes if n.op == "call_module")
    return any(isinstance(layer, _NormBase) and layer.track_running_stats for layer in layers)
