"""Mapped doorbells: who gets them, what the page is, and the transport's options."""

from __future__ import annotations

import contextlib
import os
import shutil
import struct
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.conformance.test_kill_points import connected
from tests.support import nvme_driver as nv
from tests.support.daemon import NS_512, Daemon, RpcError
from tests.support.nvme_driver import PAGE, Nvme

Connect = Callable[..., Nvme]


def test_doorbells_are_mapped_for_a_client_without_json_only(connect: Connect) -> None:
    mapped = connect(capabilities={})
    assert mapped.doorbells is not None
    mapped.close()
    trapped = connect(capabilities=None)
    assert trapped.doorbells is None


def test_mapped_page_holds_the_doorbells_and_cannot_be_resized(connect: Connect) -> None:
    """BAR0 0x1000 .. 0x2000 (sparse-mmap capability); a client that could shrink the file would end the worker."""
    nvme = connect(capabilities={})
    bar0 = nvme.regions[0]
    assert bar0.windows == ((0x1000, 0x1000),) and bar0.flags & 4
    for size in (0, 0x1000, 0x10000):
        with pytest.raises(PermissionError):
            os.ftruncate(bar0.fds[0], size)
    nvme.enable()
    queue = nvme.create_queue_pair(1, 8)
    before = nvme.doorbell_writes
    nvme.write(queue, NS_512, 0, bytes(PAGE))
    assert nvme.doorbell_writes > before and nvme.doorbells is not None and nvme.doorbells[2] == queue.tail
    # A doorbell may come as a message all the same.
    nvme.doorbells, page = None, nvme.doorbells
    assert nvme.read(queue, NS_512, 0, PAGE) == bytes(PAGE)
    nvme.doorbells = page


def test_shadow_doorbells_are_not_offered_beside_mapped_ones(connect: Connect) -> None:
    """OACS bit 8 (Base figure 275) and the command itself."""
    for options, offered in (({"capabilities": {}}, 0), ({"capabilities": None}, 1)):
        nvme = connect(**options)
        nvme.enable()
        assert struct.unpack_from("<H", nvme.identify(1), 256)[0] >> 8 & 1 == offered
        assert struct.unpack_from("<I", nvme.get_log(5, PAGE), 4 * nv.DBBUF_CONFIG)[0] & 1 == offered
        page = nvme.ram.alloc(2 * PAGE)
        completion = nvme.try_admin(nv.DBBUF_CONFIG, prp1=page, prp2=page + PAGE)
        assert completion.status == (nv.OK if offered else nv.INVALID_OPCODE)
        nvme.close()


@pytest.mark.parametrize(
    "options, json, mapped, shadow",
    [
        ({"force_mappable_bar0": True}, True, True, False),
        ({"disable_mappable_bar0": True}, False, False, True),
        ({"disable_mappable_bar0": True, "disable_shadow_doorbells": True}, True, False, False),
    ],
)
def test_transport_options(options: dict[str, bool], json: bool, mapped: bool, shadow: bool) -> None:
    directory = Path(tempfile.mkdtemp(prefix="dpu-m-"))
    with contextlib.ExitStack() as stack:
        stack.callback(shutil.rmtree, directory, ignore_errors=True)
        daemon = stack.enter_context(Daemon(directory))
        with pytest.raises(RpcError):
            params = {"trtype": "VFIOUSER", "disable_mappable_bar0": True, "force_mappable_bar0": True}
            daemon.rpc("nvmf_create_transport", params)
        daemon.rpc("nvmf_create_transport", {"trtype": "VFIOUSER", **options})
        target = daemon.add_subsystem("nqn.2026-01.io.test:options", [daemon.add_memory("m")])
        daemon.kill_worker()  # the next one knows them too
        with connected(target, capabilities=None if json else {}) as nvme:
            assert (nvme.doorbells is not None) == mapped
            nvme.enable()
            assert struct.unpack_from("<H", nvme.identify(1), 256)[0] >> 8 & 1 == shadow
            queue = nvme.create_queue_pair(1, 8)
            nvme.write(queue, 1, 3, b"\x5a" * 512)
            assert nvme.read(queue, 1, 3, 512) == b"\x5a" * 512
