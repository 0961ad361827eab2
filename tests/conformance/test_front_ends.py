"""The front ends beside trapped doorbells in short: verified load, kills of the worker, mistakes of the guest.

Their rows of the long conformance tests are marked slow (tests/support/front_ends.py).
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.conformance.test_kill_points import connected, running
from tests.support import front_ends
from tests.support import nvme_driver as nv
from tests.support.daemon import NS_512, NS_FILE, Daemon
from tests.support.front_ends import FrontEnd
from tests.support.load import Load
from tests.support.nvme_driver import Nvme

Connect = Callable[..., Nvme]
OTHERS = [one for one in front_ends.ALL if one is not front_ends.TRAPPED]


@pytest.fixture(scope="module", params=OTHERS, ids=lambda one: one.name)
def front_end(request: pytest.FixtureRequest) -> FrontEnd:
    row: FrontEnd = request.param
    return row


def test_verified_load(connect: Connect) -> None:
    """Two queues, both kinds of namespace, every operation; then the controller is reset and used again."""
    nvme = connect()
    for turn in range(2):
        nvme.enable()
        loads = [
            Load(nvme, nvme.create_queue_pair(qid, 32), nsid, depth=24, seed=turn)
            for qid, nsid in ((1, NS_512), (2, NS_FILE))
        ]
        for _ in range(4):
            for load in loads:
                load.run(100)
        for load in loads:
            load.finish()


def test_kills_between_commands(connect: Connect, daemon: Daemon) -> None:
    nvme = connect()
    nvme.enable()
    load = Load(nvme, nvme.create_queue_pair(1, 64), NS_512, depth=32)
    for _ in range(3):
        load.run(150)
        daemon.kill_worker()
    load.run(150)
    load.finish()


@pytest.mark.parametrize(
    "point",
    [
        "executed:150",
        pytest.param("sqe_copied:150", marks=pytest.mark.slow),
        pytest.param("cqe_written:150", marks=pytest.mark.slow),
        pytest.param("admin_after_save:5", marks=pytest.mark.slow),
    ],
)
def test_kill_points(front_end: FrontEnd, point: str) -> None:
    with (
        running(point, listener=front_end.listener) as (_, target, death),
        connected(target, **front_end.connect) as nvme,
    ):
        nvme.enable()
        load = Load(nvme, nvme.create_queue_pair(1, 64), NS_512, depth=32)
        load.run(20_000 if point.count(":150") else 50, until=death)
        for turn in range(5):
            nvme.identify(1)
            nvme.delete_sq(nvme.create_queue_pair(2, 4 + turn))
            nvme.delete_cq(nvme.cqs[2])
        assert death(), f"the worker never came to {point}"
        load.run(100)
        load.finish()


def test_bad_doorbell_values_are_events(connect: Connect) -> None:
    """Base 2.0 5.2.1, figure 146: "Invalid Doorbell Write Value" is error event 01h, in the error log."""
    nvme = connect()
    nvme.enable()
    queue = nvme.create_queue_pair(1, 8)
    for index in (2, 3):
        event = nvme.aer()
        nvme.doorbell(index, 8)
        if index == 3:  # a CQ's head is looked at when there is something to complete
            nvme.submit(queue, nv.FLUSH, nsid=NS_512)
        nvme.wait(event)
        assert event.completion is not None and event.completion.dw0 & 0xFFFF == 0x0100
        nvme.get_log(1, 64)
        nvme.doorbell(index, 0)
    nvme.wait(*queue.outstanding.values())
