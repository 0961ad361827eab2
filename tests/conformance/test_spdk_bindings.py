"""The typed bindings against the recording of SPDK v26.05, field by field, and the same calls against a dpud.

A stand-in for SPDK's target answers with what was recorded; it sees exactly what the bindings send.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import os
import socket
import threading
import types
import typing
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal, NotRequired, Union, get_args, get_origin, is_typeddict

import pytest

from dpu.errors import EmuError, RpcError
from dpu.rpc.framing import Splitter
from dpu.spdk import Spdk
from emu.daemon import Dpu, DpuConfig
from tests.support.daemon import Daemon

VECTORS = json.loads(Path(__file__).with_name("spdk_rpc_vectors.json").read_text())
NQN = "nqn.2026-01.io.test:bindings"

# Recorded calls that the types do not let pass, which is what they are for; made by ``call``.
REFUSED_BY_TYPE = {7: "a parameter is missing", 9: "an unknown parameter", 68: "an unknown parameter"}
NO_BINDING = {
    "no_such_method": "there is none",
    "bdev_lvol_set_xattr": "SPDK has none of this name either",
}


class StandIn:
    """Accepts connections and answers each request with the next recorded answer."""

    def __init__(self, path: Path) -> None:
        self.path = str(path)
        self.seen: list[Any] = []
        self.answers: list[Any] = []
        self._sock = socket.socket(socket.AF_UNIX)
        self._sock.bind(self.path)
        self._sock.listen()
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        while True:
            try:
                connection, _ = self._sock.accept()
            except OSError:
                return
            with connection:
                splitter = Splitter()
                while data := connection.recv(65536):
                    splitter.feed(data)
                    while (text := splitter.next_value()) is not None:
                        request = json.loads(text)
                        self.seen.append(request)
                        answer = {**self.answers.pop(0), "id": request["id"]} if self.answers else None
                        if answer is None:
                            continue
                        connection.sendall(json.dumps(answer).encode())

    def close(self) -> None:
        self._sock.shutdown(socket.SHUT_RDWR)
        self._sock.close()
        self._thread.join(10)


@pytest.fixture
def stand_in(tmp_path: Path) -> Iterator[StandIn]:
    stand_in = StandIn(tmp_path / "spdk.sock")
    yield stand_in
    stand_in.close()


def mismatch(value: Any, hint: Any, at: str = "") -> str:
    """Why ``value`` is not of the type ``hint``, "" when it is. Keys of typed dictionaries must all be known."""
    origin = get_origin(hint)
    if hint is Any:
        return ""
    if hint is type(None):
        return "" if value is None else f"{at}: {value!r} is not null"
    if origin is NotRequired:
        return mismatch(value, get_args(hint)[0], at)
    if origin in (Union, types.UnionType):
        return "" if any(not mismatch(value, one) for one in get_args(hint)) else f"{at}: {value!r} is no {hint}"
    if origin is Literal:
        return "" if value in get_args(hint) else f"{at}: {value!r} is no {hint}"
    if origin is list:
        if not isinstance(value, list):
            return f"{at}: {value!r} is no list"
        return next(filter(None, (mismatch(one, get_args(hint)[0], f"{at}[{i}]") for i, one in enumerate(value))), "")
    if origin is dict:
        if not isinstance(value, dict):
            return f"{at}: {value!r} is no dict"
        return next(filter(None, (mismatch(one, get_args(hint)[1], f"{at}.{key}") for key, one in value.items())), "")
    if is_typeddict(hint):
        hints = typing.get_type_hints(hint, include_extras=True)
        optional = {name for name, one in hints.items() if get_origin(one) is NotRequired}
        if unknown := value.keys() - hints.keys():
            return f"{at}: unknown {sorted(unknown)}"
        if missing := hints.keys() - value.keys() - optional:
            return f"{at}: missing {sorted(missing)}"
        return next(filter(None, (mismatch(one, hints[key], f"{at}.{key}") for key, one in value.items())), "")
    return "" if type(value) is hint else f"{at}: {value!r} is no {hint}"


def result_type(method: str) -> Any:
    return typing.get_type_hints(getattr(Spdk, method))["return"]


def test_every_recorded_call(stand_in: StandIn) -> None:
    made = 0
    with Spdk(stand_in.path) as card:
        for row in VECTORS["calls"]:
            request, answer = row["request"], row["answer"]
            method, params = request["method"], request.get("params", {})
            stand_in.answers.append(answer)
            if method in NO_BINDING:
                assert not hasattr(Spdk, method)
            if request["id"] in REFUSED_BY_TYPE:
                with pytest.raises(TypeError):
                    inspect.signature(getattr(Spdk, method)).bind(card, **params)
            by_hand = method in NO_BINDING or request["id"] in REFUSED_BY_TYPE
            try:
                result = card.call(method, params) if by_hand else getattr(card, method)(**params)
            except RpcError as error:
                assert {"code": error.code, "message": error.message} == answer["error"]
            else:
                assert result == answer["result"]
                assert not (why := mismatch(result, result_type(method))), (method, why)
            sent = stand_in.seen.pop()
            assert sent.pop("jsonrpc") == "2.0" and isinstance(sent.pop("id"), int)
            assert sent == {key: value for key, value in request.items() if key != "id"}
            made += 1
    assert made == len(VECTORS["calls"]) > 130


def bindings() -> set[str]:
    prefixes = ("spdk_", "rpc_", "framework_", "thread_", "iobuf_", "notify_", "log_", "dpu_", "bdev_", "nvmf_")
    return {name for name in vars(Spdk) if name.startswith(prefixes)}


def life(card: Spdk, vfu: Path, image: Path) -> set[str]:
    """Everything that a card of ours and SPDK's target can both do; each answer is of its type, keys and all."""
    made: set[str] = set()

    def do(method: str, **params: Any) -> Any:
        result = getattr(card, method)(**params)
        assert not (why := mismatch(result, result_type(method))), (method, why)
        made.add(method)
        return result

    assert "bdev_malloc_create" in do("rpc_get_methods")
    assert do("spdk_get_version")["version"].startswith("SPDK v")
    assert do("framework_wait_init") is True
    with pytest.raises(RpcError) as error:
        card.framework_start_init()
    assert error.value.code == -1
    do("framework_get_subsystems")
    do("framework_get_reactors")
    do("log_get_level")
    do("log_get_print_level")
    for method in ("log_set_level", "log_set_print_level"):
        do(method, level="INFO")
    do("log_set_flag", flag="rpc")
    assert do("log_get_flags")["rpc"] is True
    do("log_clear_flag", flag="all")
    assert do("bdev_malloc_create", num_blocks=2048, block_size=512, name="m") == "m"
    assert do("bdev_null_create", name="n", num_blocks=2048, block_size=4096) == "n"
    assert do("bdev_aio_create", filename=str(image), name="f", block_size=512, fallocate=True) == "f"
    assert do("bdev_aio_rescan", name="f") is True
    do("bdev_aio_delete", name="f")
    assert do("bdev_uring_create", filename=str(image), name="u", block_size=512) == "u"
    assert do("bdev_uring_rescan", name="u") is True
    assert do("bdev_null_resize", name="n", new_size=16) is True
    assert card.bdev_get_bdevs(name="n")[0]["num_blocks"] == 4096
    with pytest.raises(RpcError) as error:
        card.bdev_aio_delete(name="u")  # each kind has its own
    assert error.value.code == -19
    assert [bdev["name"] for bdev in do("bdev_get_bdevs")] == ["m", "n", "u"]
    do("bdev_wait_for_examine")
    do("nvmf_create_transport", trtype="VFIOUSER")
    do("nvmf_create_subsystem", nqn=NQN, allow_any_host=True)
    assert do("nvmf_subsystem_add_ns", nqn=NQN, namespace={"bdev_name": "m", "eui64": "0011223344556677"}) == 1
    address = {"trtype": "VFIOUSER", "traddr": str(vfu), "trsvcid": "0"}
    do("nvmf_subsystem_add_listener", nqn=NQN, listen_address=address)
    assert [one["trtype"] for one in do("nvmf_get_transports")] == ["VFIOUSER"]
    assert do("nvmf_subsystem_get_listeners", nqn=NQN)[0]["address"]["traddr"] == str(vfu)
    with socket.socket(socket.AF_UNIX) as guest:
        guest.connect(str(vfu / "cntrl"))
        do("nvmf_subsystem_get_controllers", nqn=NQN)
    assert do("nvmf_get_subsystems")[1]["namespaces"][0]["bdev_name"] == "m"
    created = [
        call["method"] for call in do("framework_get_config", name="bdev") if call["method"].endswith("create")
    ]
    assert sorted(created) == ["bdev_malloc_create", "bdev_null_create", "bdev_uring_create"]
    assert {stat["name"] for stat in do("bdev_get_iostat")["bdevs"]} == {"m", "n", "u"}
    assert do("bdev_get_iostat", names=["n"], per_channel=True)["channels"] == []
    do("bdev_reset_iostat")
    do("bdev_set_qos_limit", name="m", rw_ios_per_sec=20000, r_mbytes_per_sec=100)
    assert do("bdev_get_bdevs", name="m")[0]["assigned_rate_limits"]["r_mbytes_per_sec"] == 100
    do("nvmf_subsystem_remove_listener", nqn=NQN, listen_address=address)
    do("nvmf_subsystem_remove_ns", nqn=NQN, nsid=1)
    do("nvmf_delete_subsystem", nqn=NQN)
    for kind, name in (("malloc", "m"), ("null", "n"), ("uring", "u")):
        do(f"bdev_{kind}_delete", name=name)
    volumes(do)
    answers = card.batch([("bdev_null_create", {"name": "a", "num_blocks": 8, "block_size": 512})] * 2)
    assert answers[0] == "a" and isinstance(answers[1], RpcError) and answers[1].code == -17
    assert card.batch([]) == []
    return made


def volumes(do: Callable[..., Any]) -> None:
    """The life of a group and its volumes."""
    do("bdev_malloc_create", num_blocks=65536, block_size=512, name="base")
    group = do("bdev_lvol_create_lvstore", bdev_name="base", lvs_name="old", cluster_sz=1 << 20)
    assert do("bdev_lvol_rename_lvstore", old_name="old", new_name="lvs") is True
    do("bdev_lvol_grow_lvstore", lvs_name="lvs")
    assert do("bdev_lvol_get_lvstores", uuid=group)[0]["name"] == "lvs"
    volume = do("bdev_lvol_create", lvol_name="a", size_in_mib=4, uuid=group, thin_provision=True)
    snapshot = do("bdev_lvol_snapshot", lvol_name="lvs/a", snapshot_name="s")
    do("bdev_lvol_clone", snapshot_name=snapshot, clone_name="c")
    do("bdev_lvol_rename", old_name="lvs/c", new_name="d")
    do("bdev_lvol_resize", name="lvs/d", size_in_mib=8)
    do("bdev_lvol_decouple_parent", name="lvs/d")
    do("bdev_lvol_inflate", name="lvs/d")
    do("bdev_lvol_set_read_only", name="lvs/d")
    assert do("bdev_get_bdevs", name="lvs/d")[0]["num_blocks"] == 16384
    about = {one["name"]: one for one in do("bdev_lvol_get_lvols", lvs_name="lvs")}
    assert about.keys() == {"a", "s", "d"} and about["a"]["uuid"] == volume and about["a"]["is_clone"]
    do("bdev_lvol_delete", name="lvs/d")
    do("bdev_lvol_delete_lvstore", lvs_name="lvs")
    do("bdev_malloc_delete", name="base")


@pytest.fixture
def image(tmp_path: Path) -> Path:
    path = tmp_path / "disk.img"
    path.write_bytes(bytes(1 << 20))
    return path


def test_the_same_calls_against_a_dpud(daemon: Daemon, image: Path) -> None:
    vfu = daemon.directory / "vfu"
    vfu.mkdir()
    with Spdk(daemon.rpc_path) as card:
        made = life(card, vfu, image)
        there = set(card.rpc_get_methods())
        assert there <= bindings(), "a method of the card without a binding"
        ours = {name for name in there if name.startswith("dpu_")}
        ours |= {
            "nvmf_ns_attach_controller",
            "nvmf_ns_detach_controller",
            "nvmf_subsystem_set_ns_pool",
        }  # see test_namespaces.py
        assert there - made == {"framework_start_init", "spdk_kill_instance"} | ours
        assert card.dpu_get_stats()["controllers"] == []
        assert card.dpu_trace_start(entries=16) and card.dpu_trace_stop()
        saved = card.dpu_trace_save(filename=str(daemon.directory / "trace"), format="perfetto")
        assert saved == {"commands": 0, "lost": 0}


def test_the_same_calls_against_spdk(socket_dir: Path, image: Path) -> None:
    if not os.environ.get("SPDK_DIR"):
        pytest.skip("SPDK_DIR is not set: no SPDK to run")
    place = socket_dir / "spdk"
    (place / "vfu").mkdir(parents=True)

    async def main() -> None:
        dpu = Dpu(DpuConfig("card", engine="spdk"), place, place, place)
        await dpu.start()
        try:
            with Spdk(dpu.rpc_socket) as card:
                await asyncio.to_thread(life, card, place / "vfu", image)
        finally:
            await dpu.stop()

    asyncio.run(main())


def test_kill_instance_ends_the_daemon(tmp_path_factory: pytest.TempPathFactory) -> None:
    with Daemon(tmp_path_factory.mktemp("d")) as daemon, Spdk(daemon.rpc_path) as card:
        assert card.spdk_kill_instance(sig_name="SIGTERM") is True
        assert daemon.process is not None and daemon.process.wait(60) == 0


def test_nobody_there(tmp_path: Path) -> None:
    with (
        Spdk(tmp_path / "none") as card,
        pytest.raises(EmuError, match=r"bdev_get_bdevs at .*/none: Error while") as e,
    ):
        card.bdev_get_bdevs()
    assert "is the daemon running" in e.value.hint


def test_no_answer_in_time_then_a_new_connection(stand_in: StandIn) -> None:
    with Spdk(stand_in.path, timeout_s=0.05) as card:
        with pytest.raises(EmuError, match=r"spdk_get_version at .*: Timeout while waiting"):
            card.spdk_get_version()
        stand_in.answers.append({"jsonrpc": "2.0", "result": ["x"]})
        card.timeout_s = 30
        assert card.rpc_get_methods() == ["x"]


def test_abort_from_another_thread(stand_in: StandIn) -> None:
    card = Spdk(stand_in.path)
    ended: list[str] = []

    def wait() -> None:
        with pytest.raises(EmuError) as error:
            card.spdk_get_version()
        ended.append(error.value.message)

    waiter = threading.Thread(target=wait)
    waiter.start()
    while not stand_in.seen:
        waiter.join(0.01)
    card.abort()
    waiter.join(30)
    assert ended and ended[0].startswith("spdk_get_version at")
