"""Epochs: data, the training loop, history."""

from .asked import asked_finish, asked_recalibration, check_candidates
from .callbacks import Callback, Run
from .choice import Score, Scores, check_budget
from .data import Batches, random_batches
from .finish import finishing
from .history import History, Scored
from .loop import write_back
from .moves import Moves
from .own_rows import OwnRows
from .pair import ToPair
from .settle import judged, settle
from .sizes import check_batch, check_like
from .task import Task
from .tensorboard import TensorBoard
from .train import train
from .validation import Validation, accuracy

__all__ = [
    "Batches",
    "Callback",
    "History",
    "Moves",
    "OwnRows",
    "Run",
    "Score",
    "Scored",
    "Scores",
    "Task",
    "TensorBoard",
    "ToPair",
    "Validation",
    "accuracy",
    "asked_finish",
    "asked_recalibration",
    "check_batch",
    "check_budget",
    "check_candidates",
    "check_like",
    "finishing",
    "judged",
    "random_batches",
    "settle",
    "train",
    "write_back",
]
