"""A naive model of volumes: a number per block, and whether the volume alone owns a cluster.

Written from the text of issue 4 and of NVM Command Set 1.0, not from the product. A block's number is what its 8-byte
words hold; 0 is never written or erased.
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class ModelVolume:
    cluster_blocks: int
    blocks: list[int]
    thick: bool = False
    own: set[int] = field(default_factory=set)
    shared: set[int] = field(default_factory=set)

    def write(self, lba: int, count: int, value: int) -> None:
        self.blocks[lba : lba + count] = [value] * count
        self._own(lba, count)

    def _own(self, lba: int, count: int) -> None:
        clusters = set(range(lba // self.cluster_blocks, (lba + count - 1) // self.cluster_blocks + 1))
        self.own |= clusters
        self.shared -= clusters

    def _pieces(self, lba: int, count: int) -> list[tuple[int, int, int]]:
        """(cluster, first block, blocks) of a range."""
        pieces, end = [], lba + count
        while lba < end:
            cluster = lba // self.cluster_blocks
            size = min(end, (cluster + 1) * self.cluster_blocks) - lba
            pieces.append((cluster, lba, size))
            lba += size
        return pieces

    def zero(self, lba: int, count: int) -> None:
        """Write Zeroes: what is shared as a whole leaves, of what is shared in part a copy is made."""
        self.blocks[lba : lba + count] = [0] * count
        for cluster, _, size in self._pieces(lba, count):
            if cluster in self.shared:
                self.shared.discard(cluster)
                if size < self.cluster_blocks:
                    self.own.add(cluster)

    def deallocate(self, lba: int, count: int) -> None:
        for cluster, first, size in self._pieces(lba, count):
            whole = size == self.cluster_blocks
            if cluster in self.shared and not whole:
                continue  # advice that is not taken
            self.blocks[first : first + size] = [0] * size
            if whole:
                self.shared.discard(cluster)
                if not self.thick:
                    self.own.discard(cluster)

    def copy(self, source: int, target: int, count: int) -> None:
        self.blocks[target : target + count] = self.blocks[source : source + count]
        self._own(target, count)

    def snapshot(self) -> ModelVolume:
        """Another volume with the same blocks; from now on both share them."""
        self.shared |= self.own
        self.own = set()
        return ModelVolume(self.cluster_blocks, list(self.blocks), own=set(), shared=set(self.shared))
