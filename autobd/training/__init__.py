"""Epochs: data, the training loop, history."""

from .data import Batches, random_batches
from .history import History, Scored
from .loop import write_back
from .moves import Moves
from .own_rows import OwnRows
from .pair import ToPair
from .sizes import check_like
from .task import Task
from .train import train
from .validation import Validation, accuracy

__all__ = [
    "Batches",
    "History",
    "Moves",
    "OwnRows",
    "Scored",
    "Task",
    "ToPair",
    "Validation",
    "accuracy",
    "check_like",
    "random_batches",
    "train",
    "write_back",
]
