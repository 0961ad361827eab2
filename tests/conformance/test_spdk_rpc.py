"""The control plane against what SPDK v26.05 answered, and against PyPI's client and command line.

``spdk_rpc_vectors.json`` holds recorded requests and answers. They are replayed in order on one daemon's
server and compared field by field. Values that a run makes (UUIDs and what is made of them) are bound at
first sight and must then stay the same. ``DEVIATIONS`` lists all that is allowed to differ, with its reason,
``MEASURED`` what is a number of the run, ``LEFT_OUT`` and ``LEFT_OUT_CALLS`` what is not replayed and why.
"""

from __future__ import annotations

import json
import re
import select
import socket
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from spdk.rpc.client import JSONRPCClient, JSONRPCException

from dpu.target import Target
from tests.support.daemon import NS_512, Daemon
from tests.support.nvme_driver import Nvme
from tests.support.rpc_host import FakeHost, serving

VECTORS = json.loads(Path(__file__).with_name("spdk_rpc_vectors.json").read_text())
NQN = "nqn.2026-11.x:a"
RECORDED_DIR = "/run/x"

# (method, path of keys) -> why ours differs. "*" is any index.
DEVIATIONS = {
    ("rpc_get_methods",): "the methods that there are; compared by test_our_methods_are_spdks",
    ("spdk_get_version", "version"): "names this program behind SPDK's release",
    ("spdk_get_version", "fields", "suffix"): "names this program",
    ("bdev_get_bdevs", "*", "supported_io_types", "zcopy"): "no client of ours can send it",
    ("bdev_get_bdevs", "*", "supported_io_types", "copy"): "no client of ours can send it",
    ("bdev_get_bdevs", "*", "driver_specific", "aio", "cache_mode"): "a key of ours",
    ("nvmf_get_subsystems", "*", "dmrsl"): "the controller's Identify has it",
    ("nvmf_get_subsystems", "*", "wzsl"): "the controller's Identify has it",
}


LIMIT = "the card's own limit"
DEVIATIONS |= {
    ("nvmf_get_transports", "*", "max_queue_depth"): LIMIT,
    ("nvmf_get_transports", "*", "max_io_qpairs_per_ctrlr"): LIMIT,
    ("nvmf_get_transports", "*", "max_io_size"): LIMIT,
    ("nvmf_get_transports", "*", "max_aq_depth"): LIMIT,
    ("nvmf_get_transports", "*", "disable_command_passthru"): "there is nothing to pass commands to",
    ("nvmf_get_transports", "*", "kas"): "the controller's Identify has it",
    ("nvmf_get_transports", "*", "min_kato"): "a PCIe controller needs no keep alive",
}

DEVIATIONS |= {
    ("bdev_lvol_get_lvstores", "*", "max_growable_size"): LIMIT,
    **{
        (f"bdev_get_bdevs of lvs0/{name}", "*", *key): why
        for name in ("thin0", "thick0", "snap0", "clone0")
        for *key, why in (
            ("supported_io_types", "flush", "a volume's metadata is not durable before a Flush"),
            ("memory_domains", "there are none"),
        )
    },
}

ZONES = "there are no zoned back ends"
DURABLE = "the same engine as aio's: it can flush and reset"
DEVIATIONS |= {
    ("bdev_get_bdevs of ur0", "*", "supported_io_types", "get_zone_info"): ZONES,
    ("bdev_get_bdevs of ur0", "*", "supported_io_types", "zone_management"): ZONES,
    ("bdev_get_bdevs of ur0", "*", "supported_io_types", "flush"): DURABLE,
    ("bdev_get_bdevs of ur0", "*", "supported_io_types", "reset"): DURABLE,
}

DEVIATIONS |= {
    ("framework_get_subsystems",): "the two that there are",
    ("framework_get_reactors", "reactors"): "the card's pollers; compared by test_reactors",
    ("log_get_flags",): "the parts that have something to say",
}

# Numbers that the run makes: compared by their kind, and by tests/conformance/test_iostat.py.
MEASURED = {
    ("framework_get_reactors", "tick_rate"),
    ("framework_get_reactors", "pid"),
    ("bdev_get_iostat", "tick_rate"),
    ("bdev_get_iostat", "ticks"),
    *(("bdev_get_iostat", "bdevs", "*", name) for name in ("bytes_read", "num_read_ops")),
    *(("bdev_get_iostat", "bdevs", "*", f"{start}read_latency_ticks") for start in ("", "max_", "min_")),
}

FAULTS = "needs its own stage on the data path"
LEFT_OUT = {
    **dict.fromkeys(
        [
            "bdev_error_create",
            "bdev_error_inject_error",
            "bdev_error_delete",
            "bdev_delay_create",
            "bdev_delay_update_latency",
            "bdev_delay_delete",
        ],
        FAULTS,
    ),
    "nvmf_get_stats": "its figures are of SPDK's poll groups; dpu_get_stats has ours",
    "thread_get_stats": "its figures are of SPDK's threads; dpu_get_stats has ours",
    "iobuf_get_stats": "there are no such buffer pools",
    "nvmf_subsystem_add_host": "a vfio-user client does not say who it is, so there is nobody to admit",
    "bdev_examine": "no bdev is made of what is on another one",
    "bdev_get_histogram": "SPDK's encoding of its own buckets; dpu_get_stats has the latencies of each queue",
    "bdev_enable_histogram": "histograms are always on",
    "bdev_set_options": "tunes SPDK's own memory pools",
    "notify_get_types": "nobody can wait for a notification; a client asks for the state instead",
    "notify_get_notifications": "as notify_get_types",
}
LEFT_OUT_CALLS = {
    67: "SPDK counts what it writes to its bdevs by itself, and lists them by name",
    3: "rpc_get_methods once more, with parameters; ours is compared by test_our_methods_are_spdks",
    75: "below SPDK's least rate, which is not ours",
    78: "SPDK refuses because of the call above it, of which it has not recovered",
    80: "an error bdev",
    91: "a delay bdev",
}


class Wire:
    """A client of a few lines: what goes out is exactly what a test says."""

    def __init__(self, path: str) -> None:
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(30)
        self.sock.connect(path)
        self.text = ""

    def send(self, text: str) -> None:
        self.sock.sendall(text.encode())

    def answer(self) -> Any:
        """The next value; EOFError when the server closed."""
        while True:
            try:
                value, end = json.JSONDecoder().raw_decode(self.text.lstrip())
                self.text = self.text.lstrip()[end:]
                return value
            except json.JSONDecodeError:
                data = self.sock.recv(65536)
                if not data:
                    raise EOFError(self.text) from None
                self.text += data.decode()

    def call(self, request: Any) -> Any:
        self.send(json.dumps(request, indent=2))
        return self.answer()


class Comparison:
    """Recorded against ours. ``bound``: run-made value as recorded -> as we make it."""

    def __init__(self, method: str, bound: dict[str, str], name: str = "") -> None:
        self.method = method
        self.name = name
        self.bound = bound
        self.differences: list[str] = []
        self.met: set[tuple[str, ...]] = set()

    def compare(self, recorded: Any, ours: Any, path: tuple[str, ...] = ()) -> None:
        for method in (self.method, f"{self.method} of {self.name}"):
            if (method, *path) in DEVIATIONS:
                self.met.add((method, *path))
                return
        if (self.method, *path) in MEASURED:
            assert type(ours) is type(recorded) and ours >= 0, path
            return
        if isinstance(recorded, dict) and isinstance(ours, dict):
            for key in {**recorded, **ours}:
                absent = object()
                self.compare(recorded.get(key, absent), ours.get(key, absent), (*path, key))
        elif isinstance(recorded, list) and isinstance(ours, list) and len(recorded) == len(ours):
            for left, right in zip(recorded, ours):
                self.compare(left, right, (*path, "*"))
        elif (made := _made(recorded)) and (mine := _made(ours)):
            if self.bound.setdefault(made, mine) != mine:
                self.differences.append(f"{path}: {recorded} is {self.bound[made]} elsewhere, here {ours}")
        elif type(recorded) is not type(ours) or recorded != ours:
            self.differences.append(f"{path}: recorded {recorded!r}, ours {ours!r}")


def _made(value: Any) -> str:
    """A UUID or NGUID as bare digits, "" for anything else."""
    digits = value.replace("-", "").lower() if isinstance(value, str) else ""
    return digits if re.fullmatch(r"[0-9a-f]{32}", digits) else ""


@pytest.fixture
def served(tmp_path: Path) -> Iterator[tuple[str, FakeHost, Target]]:
    with serving(tmp_path) as served:
        yield served


@pytest.fixture
def client(served: tuple[str, FakeHost, Target]) -> Iterator[JSONRPCClient]:
    with JSONRPCClient(served[0], timeout=30) as client:
        yield client


@pytest.fixture(params=["server", "dpud"])
def bare(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """The socket of a card without any configuration: the server in this process, and the whole daemon."""
    if request.param == "server":
        with serving(tmp_path) as (path, _, _):
            yield path
        return
    with tempfile.TemporaryDirectory(prefix="dpu-t-") as directory, Daemon(Path(directory)) as daemon:
        yield daemon.rpc_path
        assert daemon.alive()


def test_recorded_calls(bare: str, tmp_path: Path) -> None:
    (tmp_path / "vfu" / "rpc").mkdir(parents=True)
    (tmp_path / "aio.img").write_bytes(bytes(16384 * 4096))
    wire = Wire(bare)
    bound: dict[str, str] = {}
    differences: list[str] = []
    met: set[tuple[str, ...]] = set()

    def place(text: str) -> str:
        return text.replace(RECORDED_DIR, str(tmp_path))

    def request_of(row: dict[str, Any]) -> Any:
        text = place(json.dumps(row["request"]))
        for theirs, ours in bound.items():
            text = text.replace(str(uuid.UUID(theirs)), str(uuid.UUID(ours)))
        return json.loads(text)

    for row in VECTORS["calls"]:
        request = request_of(row)
        recorded = json.loads(place(json.dumps(row["answer"])))
        method, number = request["method"], request["id"]
        if method in LEFT_OUT:
            unknown = {"jsonrpc": "2.0", "id": number, "error": {"code": -32601, "message": "Method not found"}}
            assert wire.call(request) == unknown, f"{method} is there now: replay it"
            continue
        if number in LEFT_OUT_CALLS:
            continue
        ours = wire.call(request)
        assert "jsonrpc" in ours
        comparison = Comparison(method, bound, request.get("params", {}).get("name", ""))
        comparison.compare(recorded.pop("result", None), ours.pop("result", None))
        comparison.compare(recorded, ours, ("answer",))
        met |= comparison.met
        differences += [f"call {number} ({method}) {text}" for text in comparison.differences]
        if method == "nvmf_subsystem_add_listener" and ours.get("error") is None:
            assert (tmp_path / "vfu" / "rpc" / "cntrl").is_socket()
    assert not differences, "\n".join(differences)
    assert met == set(DEVIATIONS), "a deviation that is none any more"


@pytest.fixture(params=["server", "dpud"])
def card(request: pytest.FixtureRequest) -> str:
    if request.param == "dpud":
        return str(request.getfixturevalue("daemon").rpc_path)
    return str(request.getfixturevalue("served")[0])


@pytest.mark.parametrize("row", VECTORS["raw"], ids=lambda row: row["note"])
def test_recorded_streams(row: dict[str, Any], card: str) -> None:
    wire = Wire(card)
    wire.send(row["sent"])
    if row.get("closed"):
        with pytest.raises(EOFError) as end:
            wire.answer()
        assert end.value.args == ("",)
        return
    answer = {"id": "after"}
    if not row.get("silence"):
        answer = wire.answer()
        comparison = Comparison("", {})
        recorded = _without_version(row["answer"])
        comparison.compare(recorded, _without_version(answer))
        assert not comparison.differences
    if row["note"] == "two requests back to back":
        assert wire.answer()["id"] == 2
    # And nothing more came: the next thing to come is the answer to the next request.
    assert wire.call({"id": "after", "method": "rpc_get_methods"})["id"] == "after"


def _without_version(answer: Any) -> Any:
    if isinstance(answer, list):
        return [_without_version(one) for one in answer]
    return {key: isinstance(value, dict) if key == "result" else value for key, value in answer.items()}


def test_reactors(daemon: Daemon) -> None:
    """The recorded keys that mean something here, and times of a thread that there is."""
    recorded = next(row for row in VECTORS["calls"] if row["request"]["method"] == "framework_get_reactors")
    theirs = recorded["answer"]["result"]["reactors"][0]
    answer = daemon.rpc("framework_get_reactors")
    (ours,) = answer["reactors"]
    assert theirs.keys() - ours.keys() == {"numa_id", "irq", "sys", "usr"} and not ours.keys() - theirs.keys()
    (thread,) = ours["lw_threads"]
    assert thread.keys() == theirs["lw_threads"][0].keys()
    assert answer["pid"] == daemon.worker_pid() and Path(f"/proc/{answer['pid']}/task/{ours['tid']}").exists()
    again = daemon.rpc("framework_get_reactors")["reactors"][0]
    passed = again["lw_threads"][0]["elapsed"] - thread["elapsed"]
    assert passed > 0 and again["busy"] + again["idle"] == again["lw_threads"][0]["elapsed"]
    assert 0 <= again["busy"] - ours["busy"] <= passed + answer["tick_rate"] // 100


def test_our_methods_are_spdks(client: JSONRPCClient) -> None:
    """Names from the recorded rpc_get_methods, but for those of ours."""
    recorded = next(
        row["answer"]["result"] for row in VECTORS["calls"] if row["request"]["method"] == "rpc_get_methods"
    )
    ours = {"dpu_get_stats", "dpu_upgrade", "dpu_trace_start", "dpu_trace_stop", "dpu_trace_save"}
    ours |= {f"dpu_fault_{verb}" for verb in ("add", "get", "release", "remove")}
    ours |= {"dpu_journal_start", "dpu_journal_stop", "dpu_power_cut"}
    ours |= {"nvmf_ns_attach_controller", "nvmf_ns_detach_controller", "nvmf_subsystem_set_ns_pool"}
    assert set(client.rpc_get_methods()) - set(recorded) == ours


def test_a_call_that_waits_holds_up_neither_calls_nor_io(daemon: Daemon, nvme: Nvme) -> None:
    """One call waits for a bdev for a minute; what is done meanwhile is what ends it."""
    queue = nvme.create_queue_pair(1, 32)
    wire = Wire(daemon.rpc_path)
    wire.send(json.dumps({"id": 1, "method": "bdev_get_bdevs", "params": {"name": "late", "timeout": 60_000}}))
    for number in range(20):
        nvme.write(queue, NS_512, number, bytes([number]) * 512, block=512)
        assert nvme.read(queue, NS_512, number, 512, block=512) == bytes([number]) * 512
        assert len(daemon.rpc("bdev_get_bdevs")) == 4
    assert not select.select([wire.sock], [], [], 0)[0], "it has not been answered"
    daemon.rpc("bdev_null_create", {"name": "late", "num_blocks": 8, "block_size": 512})
    assert wire.answer()["result"][0]["name"] == "late"
    daemon.rpc("bdev_null_delete", {"name": "late"})


# -- PyPI's client


def test_client_drives_a_whole_life(
    client: JSONRPCClient, served: tuple[str, FakeHost, Target], tmp_path: Path
) -> None:
    directory = tmp_path / "vfu"
    directory.mkdir()
    image = tmp_path / "disk.img"
    image.write_bytes(bytes(1 << 20))
    assert client.bdev_malloc_create(num_blocks=2048, block_size=512, name="m") == "m"
    assert client.bdev_aio_create(filename=str(image), name="f", block_size=512, cache_mode="buffered") == "f"
    (row,) = client.bdev_get_bdevs(name="f")
    assert row["driver_specific"]["aio"]["cache_mode"] == "buffered"
    client.nvmf_create_transport(trtype="VFIOUSER")
    client.nvmf_create_subsystem(nqn=NQN, allow_any_host=True, serial_number="S")
    assert client.nvmf_subsystem_add_ns(nqn=NQN, namespace={"bdev_name": "m"}) == 1
    assert client.nvmf_subsystem_add_ns(nqn=NQN, namespace={"bdev_name": "f"}) == 2
    address = {"trtype": "VFIOUSER", "traddr": str(directory), "trsvcid": "0"}
    client.nvmf_subsystem_add_listener(nqn=NQN, listen_address=address)
    with socket.socket(socket.AF_UNIX) as guest:
        guest.connect(str(directory / "cntrl"))
    served[1].rows = [{"subnqn": NQN, "cntlid": 1, "hostnqn": "", "hostid": "", "num_io_qpairs": 0}]
    assert client.nvmf_subsystem_get_controllers(nqn=NQN)[0]["cntlid"] == 1
    assert client.dpu_get_stats() == {"pollers": 1}
    client.bdev_malloc_delete(name="m")
    (_, ours) = client.nvmf_get_subsystems()
    assert [one["nsid"] for one in ours["namespaces"]] == [2]
    client.nvmf_delete_subsystem(nqn=NQN)
    client.bdev_aio_delete(name="f")
    assert client.bdev_get_bdevs() == [] and not (directory / "cntrl").exists()
    stored = json.loads(served[1].kept.config)
    assert stored["bdevs"] == [] and stored["subsystems"] == []


def test_client_batch(served: tuple[str, FakeHost, Target]) -> None:
    with JSONRPCClient(served[0], timeout=30, batch_mode=True) as client:
        results, errors = client.call_batch(
            [
                {"method": "bdev_null_create", "params": {"name": "a", "num_blocks": 8, "block_size": 512}},
                {"method": "bdev_null_create", "params": {"name": "a", "num_blocks": 8, "block_size": 512}},
                {"method": "bdev_null_delete", "params": {"name": "a"}},
            ]
        )
    assert results == ["a", True] and [error["code"] for error in errors] == [-17]


def test_client_sees_errors(client: JSONRPCClient) -> None:
    with pytest.raises(JSONRPCException, match="No such device"):
        client.bdev_null_delete(name="none")


@pytest.mark.parametrize("signal", ["SIGTERM", "SIGINT", "SIGQUIT"])
def test_kill_instance_answers_then_stops(signal: str, served: tuple[str, FakeHost, Target]) -> None:
    wire = Wire(served[0])
    assert wire.call({"id": 1, "method": "spdk_kill_instance", "params": {"sig_name": signal}})["result"] is True
    assert served[1].stopped.wait(10)


def test_kill_instance_with_other_signals_does_not_stop(client: JSONRPCClient, served: Any) -> None:
    for signal in ("SIGKILL", "SIGHUP", "15", ""):
        with pytest.raises(JSONRPCException, match="Invalid parameters"):
            client.spdk_kill_instance(sig_name=signal)
    assert not served[1].stopped.is_set()


# -- PyPI's command line


def spdk_rpc(path: str, *words: str) -> subprocess.CompletedProcess[str]:
    program = str(Path(sys.executable).with_name("spdk-rpc"))
    return subprocess.run([program, "-s", path, *words], capture_output=True, text=True, check=False, timeout=60)


def test_command_line(served: tuple[str, FakeHost, Target], tmp_path: Path) -> None:
    """Every command with what ``spdk-rpc`` adds by itself; then one that fails."""
    directory = tmp_path / "vfu"
    directory.mkdir()
    image = tmp_path / "disk.img"
    image.write_bytes(bytes(1 << 20))
    for words, output in [
        ("spdk_get_version", None),
        ("rpc_get_methods", None),
        ("bdev_malloc_create -b m 16 4096", "m"),
        ("bdev_malloc_create 1 512", "Malloc0"),
        ("bdev_null_create n 64 512", "n"),
        (f"bdev_aio_create {image} f 512", "f"),
        ("bdev_get_bdevs", None),
        ("bdev_get_bdevs -b n -t 100", None),
        ("nvmf_create_transport -t VFIOUSER -M -S", ""),
        (f"nvmf_create_subsystem {NQN} -a -s SERIAL -d Model -m 8", ""),
        (f"nvmf_subsystem_add_ns {NQN} m -n 3 -g 00112233445566778899AABBCCDDEEFF -e 0011223344556677", "3"),
        (f"nvmf_subsystem_add_ns {NQN} f", "1"),
        (f"nvmf_subsystem_add_listener {NQN} -t VFIOUSER -a {directory} -s 0", ""),
        ("nvmf_get_subsystems", None),
        (f"nvmf_get_subsystems {NQN}", None),
        (f"nvmf_subsystem_get_controllers {NQN}", None),
        (f"nvmf_subsystem_remove_ns {NQN} 3", ""),
        (f"nvmf_subsystem_remove_listener {NQN} -t VFIOUSER -a {directory} -s 0", ""),
        (f"nvmf_delete_subsystem {NQN}", ""),
        ("bdev_malloc_delete m", ""),
        ("bdev_null_delete n", ""),
        ("bdev_aio_delete f", ""),
    ]:
        run = spdk_rpc(served[0], *words.split())
        assert run.returncode == 0, (words, run.stdout, run.stderr)
        if output is not None and not words.startswith("nvmf"):
            assert run.stdout.strip() == output, words
    assert served[2].transport is not None and served[2].transport.disable_shadow_doorbells
    run = spdk_rpc(served[0], "bdev_null_delete", "n")
    assert run.returncode == 1 and "No such device" in run.stdout
    assert spdk_rpc(served[0], "spdk_kill_instance", "SIGTERM").returncode == 0
    assert served[1].stopped.wait(10)
