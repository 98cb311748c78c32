"""Checkpoints: asynchronous, crash-safe saving; verified loading in any layout and rank count."""

from tutti.train.checkpoint.load import Loaded
from tutti.train.checkpoint.save import Checkpoints

__all__ = ["Checkpoints", "Loaded"]
