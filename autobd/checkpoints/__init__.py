"""Where a training is, on disk: written whole or not at all."""

from .store import Draft, Saved, clear, prune, saved

__all__ = ["Draft", "Saved", "clear", "prune", "saved"]
