"""Bit ranges by name: one table per word, so that nobody shifts by hand.

Use: ``CC = Bits(EN=(0, 0), MPS=(7, 10)); CC.get(word, "MPS"); CC.encode(EN=1); CC.decode(word)``. A range is
(lowest bit, highest bit), both included, and carries the specification's field name.

Errors: a wrong name is a KeyError, a value that does not fit an assertion: both are ours, never a guest's.
"""

from __future__ import annotations


class Bits:
    """The fields of one word."""

    def __init__(self, **ranges: tuple[int, int]) -> None:
        self.ranges = ranges

    def get(self, word: int, name: str) -> int:
        """Field ``name`` of ``word``."""
        low, high = self.ranges[name]
        return word >> low & (1 << high - low + 1) - 1

    def encode(self, **values: int) -> int:
        """The word with these fields set and all others zero."""
        word = 0
        for name, value in values.items():
            low, high = self.ranges[name]
            assert 0 <= value < 1 << high - low + 1, (name, value)
            word |= value << low
        return word

    def decode(self, word: int) -> dict[str, int]:
        """Every field of ``word``."""
        return {name: self.get(word, name) for name in self.ranges}

    def mask(self, *names: str) -> int:
        """A word with all bits of these fields set (of every field when none is named)."""
        word = 0
        for name in names or self.ranges:
            low, high = self.ranges[name]
            word |= ((1 << high - low + 1) - 1) << low
        return word
