"""Epochs: data, the training loop, history."""

from .asked import (
    asked_finish,
    asked_recalibration,
    asked_recipe,
    check_candidates,
    check_options,
    with_block_input,
)
from .callbacks import Callback, Run
from .checkpoint import Checkpoint, asked_checkpoint, asked_resume
from .choice import Score, Scores, check_budget
from .data import Batches, random_batches
from .history import History, Scored
from .loop import write_back
from .moves import Moves
from .own_rows import OwnRows
from .pair import ToPair
from .signals import in_order, signals
from .sizes import check_batch, check_like
from .stages import Stages
from .task import Task
from .tensorboard import TensorBoard
from .validation import Validation, accuracy

__all__ = [
    "Batches",
    "Callback",
    "Checkpoint",
    "History",
    "Moves",
    "OwnRows",
    "Run",
    "Score",
    "Scored",
    "Scores",
    "Stages",
    "Task",
    "TensorBoard",
    "ToPair",
    "Validation",
    "accuracy",
    "asked_checkpoint",
    "asked_finish",
    "asked_recalibration",
    "asked_recipe",
    "asked_resume",
    "check_batch",
    "check_budget",
    "check_candidates",
    "check_like",
    "check_options",
    "in_order",
    "random_batches",
    "signals",
    "with_block_input",
    "write_back",
]
