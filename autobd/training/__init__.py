"""Epochs: data, the training loop, history."""

from .data import Batches, declared_input, random_batches
from .history import History
from .loop import train

__all__ = ["Batches", "History", "declared_input", "random_batches", "train"]
