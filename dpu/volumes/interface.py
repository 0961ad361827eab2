"""How the data path and control's side of volumes speak with each other.

* A back end whose ``kind`` is ``Kind.VOLUME`` is a :class:`VolumeNamespace`: the data path reads its ``area`` and
  ``number``, and asks its ``store`` when tables cannot answer.
* Control's side asks the worker through :class:`VolumeHost`.

A write of a thread of control (dpu.nvme.io) holds ``area.gate``; a management call that must see none holds it whole.
"""

from __future__ import annotations

from contextlib import AbstractAsyncContextManager
from typing import Protocol

from dpu.backends import Backend, MemoryBackend
from dpu.volumes.area import Area


class VolumeStore(Protocol):
    """Control's side of a group. No method may be waited for inside ``VolumeHost.quiet``: commands wait for it."""

    def look(self, poller: int) -> None:
        """Pools of this poller are low, or its log is half full: begin to refill and to drain. Does not wait."""

    async def room(self, poller: int) -> bool:
        """Put something into both pools of a poller and drain its log; False when the group is full.

        The command that found one of them empty, or the log full, is executed again after it.
        """

    async def make_writable(self, volume: int, first: int, count: int) -> None:
        """Let the volume own these clusters: allocate those that are not mapped, copy those that are shared.

        OSError: ENOSPC when the group is full, else that of the back end. Calls for one cluster wait for each other.
        """

    async def commit(self, volume: int) -> None:
        """Make durable what was completed before: data, then the map. OSError when it cannot be."""


class VolumeNamespace(Protocol):
    """A back end of kind VOLUME, beside what every back end has."""

    area: Area
    number: int  # in area.volumes
    store: VolumeStore


class VolumeHost(Protocol):
    """What the worker does for control's side."""

    @property
    def poller_count(self) -> int:
        """Pollers are numbered from 0, as their areas are."""

    def memory_of(self, backend: MemoryBackend) -> int:
        """Address of a memory back end."""

    async def volume_changed(self, volume: Backend) -> None:
        """A volume has another size, or is read-only now: let its namespaces be so.

        Returns when nothing that was begun with the old values is under way.
        """

    def quiet(self, area: Area) -> AbstractAsyncContextManager[None]:
        """Inside, no command on the group's volumes is being executed, by a poller or by control.

        Commands that wait for the store are not being executed: they begin anew after it.
        """

    async def grace(self) -> None:
        """Every pass of every poller that was under way has ended: what it has counted is in the logs."""

    async def settled_volumes(self, area: Area) -> None:
        """Everything that was begun before has ended, io_uring requests and threads too; nothing is held up.

        What was unmapped before is then used by nobody.
        """
