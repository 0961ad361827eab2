"""Typed Python bindings for SPDK's JSON-RPC, over PyPI's ``spdk`` client: one function per method.

    with Spdk("/run/dpu.sock") as card:
        card.bdev_malloc_create(num_blocks=2048, block_size=512, name="disk")
        print(card.bdev_get_bdevs(name="disk")[0]["num_blocks"])

The same calls work against ``dpud`` and a real SPDK target; what one of them lacks is RpcError -32601.
(``pyspdk`` on PyPI is of SPDK 17.07 and dead; ``spdk`` is its living successor.)
"""

from __future__ import annotations

from dpu.spdk.bindings import Spdk
from dpu.spdk.client import Client

__all__ = ["Client", "Spdk"]
