"""Threads of control that touch the data of a group of volumes, against management that must see none."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator


class Gate:
    """Threads of control that touch a group's data, against management that must see none."""

    def __init__(self) -> None:
        self._inside = 0
        self._closed = 0
        self._changed = asyncio.Condition()

    @contextlib.asynccontextmanager
    async def passing(self) -> AsyncIterator[None]:
        """For a thread's work; waits while the gate is closed."""
        async with self._changed:
            await self._changed.wait_for(lambda: not self._closed)
            self._inside += 1
        try:
            yield
        finally:
            async with self._changed:
                self._inside -= 1
                self._changed.notify_all()

    @contextlib.asynccontextmanager
    async def closed(self) -> AsyncIterator[None]:
        """Nobody is inside; those who come wait."""
        self._closed += 1
        try:
            async with self._changed:
                await self._changed.wait_for(lambda: not self._inside)
            yield
        finally:
            self._closed -= 1
            async with self._changed:
                self._changed.notify_all()
