"""Epochs: data, the training loop, history."""

from .data import Batches, random_batches
from .history import History
from .loop import train

__all__ = ["Batches", "History", "random_batches", "train"]
