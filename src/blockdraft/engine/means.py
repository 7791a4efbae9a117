"""A running mean that forgets."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class Mean:
    """The mean of about the last `memory` values: the older a value, the less it counts."""

    memory: float
    total: float = 0.0
    weight: float = 0.0

    def add(self, value: float) -> None:
        """Take in a value."""
        self.forget(self.memory - 1.0)
        self.total += value
        self.weight += 1.0

    def forget(self, weight: float) -> None:
        """Trust what is remembered no more than so many values."""
        if self.weight > weight:
            self.total *= weight / self.weight
            self.weight = weight

    def value(self, prior: float, strength: float) -> float:
        """The mean, where a prior counts as `strength` values."""
        return (self.total + prior * strength) / (self.weight + strength)
