"""OpenMetrics: what the official parser reads is what bdev_get_iostat said, of SPDK's recorded answer and live."""

from __future__ import annotations

import http.client
import json
import socket
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families

from dpu.errors import EmuError
from emu import metrics

# SPDK's field -> the sample that has it, and its label ``op``.
NAMES = {
    "bytes_read": ("dpu_bdev_io_bytes_total", "read"),
    "num_read_ops": ("dpu_bdev_ios_total", "read"),
    "bytes_written": ("dpu_bdev_io_bytes_total", "write"),
    "num_write_ops": ("dpu_bdev_ios_total", "write"),
    "bytes_unmapped": ("dpu_bdev_io_bytes_total", "unmap"),
    "num_unmap_ops": ("dpu_bdev_ios_total", "unmap"),
    "bytes_copied": ("dpu_bdev_io_bytes_total", "copy"),
    "num_copy_ops": ("dpu_bdev_ios_total", "copy"),
    **{
        f"{start}{op}_latency_ticks": (f"dpu_bdev_io_latency_{metric}", op)
        for op in ("read", "write", "unmap", "copy")
        for start, metric in (("", "seconds_total"), ("max_", "max_seconds"), ("min_", "min_seconds"))
    },
}


def iostat(name: str = "Malloc0", **io_error: int) -> dict[str, Any]:
    """An answer with a different number in every field."""
    numbers = {key: 1000 + number for number, key in enumerate(NAMES)}
    return {"tick_rate": 2_596_200_000, "ticks": 5, "bdevs": [{"name": name, **numbers, "io_error": io_error}]}


def values(text: str) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    found: dict[tuple[str, frozenset[tuple[str, str]]], float] = {}
    for family in text_string_to_metric_families(text):
        assert family.documentation
        for sample in family.samples:
            key = (sample.name, frozenset(sample.labels.items()))
            assert key not in found
            found[key] = sample.value
    return found


def assert_equal(found: dict[tuple[str, frozenset[tuple[str, str]]], float], dpu: str, answer: Any) -> int:
    """Every number of ``answer`` is there; returns how many samples that are."""
    count = 0
    for bdev in answer["bdevs"]:
        for key, (name, op) in NAMES.items():
            expected = bdev[key] / answer["tick_rate"] if key.endswith("_ticks") else bdev[key]
            labels = frozenset({"dpu": dpu, "bdev": bdev["name"], "op": op}.items())
            assert found[name, labels] == pytest.approx(expected, rel=1e-12), key
        for status, errors in bdev["io_error"].items():
            labels = frozenset({"dpu": dpu, "bdev": bdev["name"], "status": status}.items())
            assert found["dpu_bdev_io_errors_total", labels] == errors
        count += len(NAMES) + len(bdev["io_error"])
        assert set(bdev) - {"name", "io_error"} == set(NAMES)  # nothing is left out
    return count


def test_every_number_is_there_once() -> None:
    answer = iostat(failed=3, miscompare=1)
    found = values(metrics.render({"card": answer, "gone": None}))
    assert len(found) == assert_equal(found, "card", answer) + 2
    assert found["dpu_up", frozenset({("dpu", "card")})] == 1
    assert found["dpu_up", frozenset({("dpu", "gone")})] == 0


def test_what_spdk_answered() -> None:
    vectors = json.loads((Path(__file__).parents[1] / "conformance/spdk_rpc_vectors.json").read_text())
    answers = [
        call["answer"]["result"]
        for call in vectors["calls"]
        if call["request"].get("method") == "bdev_get_iostat" and "bdevs" in call["answer"].get("result", {})
    ]
    assert answers
    for answer in answers:
        found = values(metrics.render({"spdk": answer}))
        assert len(found) == assert_equal(found, "spdk", answer) + 1


def test_names_are_escaped() -> None:
    answer = iostat('a"b\\c\nd')
    assert_equal(values(metrics.render({"x": answer})), "x", answer)


def test_no_bdevs() -> None:
    assert len(values(metrics.render({"card": {"tick_rate": 1, "ticks": 1, "bdevs": []}}))) == 1


@contextmanager
def target(path: Path, answer: dict[str, Any]) -> Iterator[None]:
    """A JSON-RPC server with one answer."""
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(path))
    listener.listen()

    def serve() -> None:
        while True:
            try:
                peer, _ = listener.accept()
            except OSError:
                return
            with peer:
                request = json.loads(peer.recv(65536))
                assert request["method"] == "bdev_get_iostat"
                peer.sendall(json.dumps({"jsonrpc": "2.0", "id": request["id"], "result": answer}).encode())

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    try:
        yield
    finally:
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()
        thread.join()


def test_it_is_served(tmp_path: Path) -> None:
    answer = iostat()
    sockets = {"card": str(tmp_path / "rpc"), "gone": str(tmp_path / "nothing")}
    with target(tmp_path / "rpc", answer), metrics.server(sockets, "127.0.0.1:0") as server:
        serving = threading.Thread(target=server.serve_forever)
        serving.start()
        try:
            with closing(http.client.HTTPConnection("127.0.0.1", server.server_address[1])) as connection:
                connection.request("GET", "/metrics")
                response = connection.getresponse()
                text = response.read().decode()
                assert (response.status, response.headers["Content-Type"]) == (200, metrics.CONTENT_TYPE)
            found = values(text)
            assert len(found) == assert_equal(found, "card", answer) + 2
            with closing(http.client.HTTPConnection("127.0.0.1", server.server_address[1])) as connection:
                connection.request("GET", "/other")
                assert connection.getresponse().status == 404
        finally:
            server.shutdown()
            serving.join()


def test_an_address_that_cannot_be_had() -> None:
    with metrics.server({}, "127.0.0.1:0") as server:
        for address in (f"127.0.0.1:{server.server_address[1]}", "nine", "1.2.3:x", "70000"):
            with pytest.raises(EmuError, match=f"cannot listen on {address}"):
                metrics.server({}, address)
