"""Epochs: data, the training loop, history."""

from .asked import asked_finish, asked_recalibration
from .callbacks import Callback, Run
from .data import Batches, random_batches
from .finish import finishing
from .history import History, Scored
from .loop import write_back
from .moves import Moves
from .own_rows import OwnRows
from .pair import ToPair
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
    "Scored",
    "Task",
    "TensorBoard",
    "ToPair",
    "Validation",
    "accuracy",
    "asked_finish",
    "asked_recalibration",
    "check_batch",
    "check_like",
    "finishing",
    "random_batches",
    "train",
    "write_back",
]
