"""Processes and messages: start ranks, join those of torchrun, send tensors between them. Knows nothing of blocks."""

from .group import Group, open
from .message import EPOCH, SAVED, STEP, STOP, Header
from .peers import Peers
from .transport import Receiver, Sender
from .waiting import Lost

__all__ = ["EPOCH", "SAVED", "STEP", "STOP", "Group", "Header", "Lost", "Peers", "Receiver", "Sender", "open"]
