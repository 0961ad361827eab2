"""What one controller sees of its subsystem, and what its guest changes there.

Use: ``View(target, subsystem, cntlid, client)``, one for each client; it satisfies dpu.nvme's SubsystemView. Before
each admin command ``sequence`` is set to that of its in-flight entry, which is how a command that a killed worker has
done already is known again (``Target.attach`` and the others).
"""

from __future__ import annotations

from collections.abc import Sequence

from dpu.nvme.interfaces import Life, NamespaceInfo
from dpu.target import Command, Subsystem, Target


class View:
    """``client``: the number of the connection, which no other one ever has."""

    def __init__(self, target: Target, subsystem: Subsystem, cntlid: int, client: int) -> None:
        self.sequence = 0
        self._target = target
        self._subsystem = subsystem
        self._cntlid = cntlid
        self._client = client

    @property
    def nqn(self) -> str:
        return self._subsystem.nqn

    @property
    def serial(self) -> str:
        return self._subsystem.serial

    @property
    def model(self) -> str:
        return self._subsystem.model

    @property
    def max_namespaces(self) -> int:
        return self._subsystem.max_namespaces

    def namespaces(self) -> list[NamespaceInfo]:
        return self._subsystem.namespaces(self._cntlid)

    def allocated(self) -> list[NamespaceInfo]:
        return self._subsystem.namespaces()

    def cntlids(self, nsid: int | None = None) -> list[int]:
        found = self._subsystem.cntlids
        if nsid is None:
            return found
        namespace = self._subsystem.by_nsid[nsid]
        return [cntlid for cntlid in found if namespace.attached(cntlid)]

    def life(self) -> Life:
        return self._subsystem.lives.get(self._cntlid, Life())

    def capacity(self) -> tuple[int, int]:
        return self._target.capacity(self._subsystem)

    async def create(self, blocks: int, block_size: int, *, private: bool) -> int:
        return await self._target.create_namespace(
            self._subsystem, blocks, block_size, private, Command(self._client, self.sequence)
        )

    async def delete(self, nsids: Sequence[int]) -> None:
        await self._target.delete_namespaces(self._subsystem, nsids, Command(self._client, self.sequence))

    async def attach(self, nsid: int, cntlids: Sequence[int], attached: bool) -> None:
        await self._target.attach(self._subsystem, nsid, cntlids, attached, Command(self._client, self.sequence))

    async def format(self, nsid: int, block_size: int) -> None:
        await self._target.format(self._subsystem, nsid, block_size, Command(self._client, self.sequence))
