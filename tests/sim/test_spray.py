"""The compiled simulation of queues and spray is the event simulation, to the packet; and it holds at full size."""

from __future__ import annotations

import contextlib
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import pytest

from net.errors import SimError
from net.sim import spray
from net.sim.network import Network, Packet, Settings, Stage, Step, percentile
from net.sim.spray import SpraySettings, destinations, run
from net.sim.sweep import sweep
from net.switch.model import Cause
from net.topology import Topology, clos

SIXTY_FOUR = Topology(planes=1, t0_per_plane=8, t1_per_plane=8, hosts_per_t0=8)
SIZE = 4000
SLOT_PS = SIZE * 80


@dataclass
class Slotted:
    """An engine that sends in the slots and by the uplinks that the compiled one draws."""

    host: int
    dst: int
    settings: SpraySettings
    sent: int = 0
    slot: int = 0
    received: int = 0
    place: int = 0
    pace: int = 0

    def step(self, now_ps: int, received: Sequence[Packet]) -> Step:
        self.received += len(received)
        send = []
        settings, fabric = self.settings, self.settings.fabric
        if not received and now_ps == self.slot * SLOT_PS and self.slot < settings.slots:
            chance = round(settings.load * (1 << 32))
            if spray.sends(settings.seed, self.host, self.slot, chance):
                kind, uplinks = spray.SPRAYS.index(settings.spray), fabric.t1_per_plane
                if not self.sent:
                    self.place, self.pace = spray.walk(settings.seed, self.host, uplinks, kind)
                ev, self.place = spray.uplink(
                    settings.seed, self.host, self.slot, self.place, self.pace, uplinks, kind
                )
                send.append(Packet(self.host, self.dst, ev, SIZE, ect=False, trimmable=False))
                self.sent += 1
            self.slot += 1
        return Step(send, self.slot * SLOT_PS if self.slot < settings.slots else None)


@pytest.mark.parametrize("kind", spray.SPRAYS)
@pytest.mark.parametrize(("load", "trim", "seed"), [(0.9, 40, 1), (1.0, 6, 2)])
def test_queues_are_those_of_the_event_simulation(kind: str, load: float, trim: int, seed: int) -> None:
    """64 NICs: the same histogram at every stage, the same losses, packet by packet.

    What one drops above its limit the other trims: both are gone.
    """
    settings = SpraySettings(SIXTY_FOUR, 150, load, kind, delay=3, trim=trim, seed=seed)
    ours = run(settings)
    network = Network(
        SIXTY_FOUR,
        Settings(
            delay_ps=3 * SLOT_PS,
            packet_bytes=SIZE,
            ecn_bytes=None,
            trim_bytes=None,
            last_hop_trim_bytes=None,
            limit_bytes=trim * SIZE,
        ),
        seed,
    )
    engines = [Slotted(host, int(dst), settings) for host, dst in enumerate(destinations(SIXTY_FOUR, seed))]
    for engine in engines:
        network.attach(engine.host, engine)
    network.run()
    assert sum(engine.sent for engine in engines) == ours.sent > 64 * 150 * load * 0.9
    for stage in (Stage.UP, Stage.DOWN, Stage.LAST):
        assert ours.depths[stage] == network.depths[stage], stage
        assert ours.trimmed[stage] == network.counters(stage)[Cause.LIMIT]
    assert ours.received == sum(engine.received for engine in engines)
    assert kind != "single path" or ours.trimmed[Stage.UP] > 0


def test_every_packet_is_somewhere() -> None:
    result = run(SpraySettings(clos(1, 16), 100, 0.9, "random", trim=8, seed=3))
    assert result.sent == result.received + sum(result.trimmed.values())
    for stage, depths in result.depths.items():
        assert sum(count for depth, count in depths.items() if depth > 8) == result.trimmed[stage]


def test_round_robin_walks_over_all_uplinks() -> None:
    for uplinks in (8, 6, 5):
        place, step = spray.walk(1, 9, uplinks, 1)
        seen: Counter[int] = Counter()
        for slot in range(3 * uplinks):
            chosen, place = spray.uplink(1, 9, slot, place, step, uplinks, 1)
            seen[chosen] += 1
        assert seen == dict.fromkeys(range(uplinks), 3)


def test_a_plane_of_8192_nics() -> None:
    """Radix 128: in turn no queue to speak of, at random short ones, one path collides and loses a quarter."""
    results = {kind: run(SpraySettings(clos(1, 128), 120, 0.9, kind, seed=1)) for kind in spray.SPRAYS}
    assert percentile(results["round robin"].depths[Stage.UP], 0.99) <= 8
    assert sum(results["round robin"].trimmed.values()) == 0
    in_turn, chance = (percentile(results[kind].depths[Stage.UP], 0.99) for kind in ("round robin", "random"))
    assert in_turn < chance < 40
    single = results["single path"]
    assert single.received < 0.9 * single.sent


def _job(seed: int) -> int:
    return run(SpraySettings(SIXTY_FOUR, 20, seed=seed)).received


def test_a_sweep_has_results_in_order_and_tells_progress() -> None:
    seen: list[tuple[int, int]] = []
    pooled = sweep(_job, [1, 2, 3], 2, lambda done, total: seen.append((done, total)))
    assert pooled == [_job(seed) for seed in (1, 2, 3)] == sweep(_job, [1, 2, 3])
    assert seen == [(1, 3), (2, 3), (3, 3)]


@pytest.mark.parametrize("dask", [False, True])
def test_a_sweep_ends_with_the_first_exception(dask: bool, cluster: Callable[[], str]) -> None:
    seen: list[tuple[int, int]] = []
    with pytest.raises(ValueError, match="three"):
        place = cluster() if dask else None
        sweep(_breaks, list(range(20)), 2, lambda done, total: seen.append((done, total)), dask=place)
    assert len(seen) < 20


def _breaks(job: int) -> int:
    if job == 3:
        raise ValueError("three")
    return job


@pytest.fixture
def cluster() -> Iterator[Callable[[], str]]:
    """Starts a Dask scheduler with two workers and says where it listens; skips where Dask is not installed."""
    with contextlib.ExitStack() as stack:

        def start() -> str:
            distributed = pytest.importorskip("distributed", reason="pip install 'dpu-emu[dask]'")
            local = distributed.LocalCluster(
                n_workers=2, threads_per_worker=1, processes=False, dashboard_address=None, protocol="tcp"
            )
            address: str = stack.enter_context(local).scheduler_address
            return address

        yield start


def test_a_sweep_on_a_dask_cluster_is_the_same(cluster: Callable[[], str]) -> None:
    seen: list[tuple[int, int]] = []
    found = sweep(_job, [1, 2, 3], progress=lambda done, total: seen.append((done, total)), dask=cluster())
    assert found == sweep(_job, [1, 2, 3]) and seen == [(1, 3), (2, 3), (3, 3)]


def test_a_cluster_that_is_not_there_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "distributed", None)
    with pytest.raises(SimError, match=r"pip install 'dpu-emu\[dask\]'"):
        sweep(_job, [1], dask="tcp://127.0.0.1:1")


def test_a_scheduler_that_does_not_answer_is_named() -> None:
    dask = pytest.importorskip("dask", reason="pip install 'dpu-emu[dask]'")
    with dask.config.set({"distributed.comm.timeouts.connect": "200ms"}):
        with pytest.raises(SimError, match="no Dask scheduler at tcp"):
            sweep(_job, [1], dask="tcp://127.0.0.1:1")
    with pytest.raises(SimError, match="no Dask scheduler at nonsense"):
        sweep(_job, [1], dask="nonsense://x")


def test_mistakes_name_the_fix() -> None:
    for wrong, fix in (
        ({"spray": "none"}, "give one of"),
        ({"load": 1.5}, "at most 1"),
        ({"trim": 255}, "trim 0 to 254"),
        ({"fabric": Topology(1, 2, 2, 2, 10, 20)}, "alike"),
    ):
        with pytest.raises(SimError, match=fix):
            SpraySettings(**{"fabric": SIXTY_FOUR, **wrong})  # type: ignore[arg-type]
