"""Epochs: data, the training loop, history."""

from .data import Batches, random_batches
from .history import History
from .loop import train, write_back
from .moves import Moves
from .own_rows import OwnRows
from .pair import ToPair
from .sizes import check_like

__all__ = ["Batches", "History", "Moves", "OwnRows", "ToPair", "check_like", "random_batches", "train", "write_back"]
