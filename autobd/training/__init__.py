"""Epochs: data, the training loop, history."""

from .callbacks import Callback, Run
from .data import Batches, random_batches
from .finish import train_whole
from .history import History, Scored
from .loop import write_back
from .moves import Moves
from .own_rows import OwnRows
from .pair import ToPair
from .sizes import check_like
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
    "check_like",
    "random_batches",
    "train",
    "train_whole",
    "write_back",
]
