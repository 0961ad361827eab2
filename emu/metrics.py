"""``bdev_get_iostat`` as OpenMetrics text, for Prometheus and whatever else reads it.

    emu metrics card=/tmp/my/rpc                            # once, to standard output
    emu metrics card=/tmp/my/rpc --listen 127.0.0.1:9464    # http://127.0.0.1:9464/metrics

It is a process of its own that asks over JSON-RPC at each scrape, so nothing that a scraper does comes near I/O; and
it serves SPDK's targets as well as ours.

Metrics, with the labels ``dpu`` and ``bdev`` and, where it matters, ``op`` (read, write, unmap, copy):
dpu_bdev_ios_total, dpu_bdev_io_bytes_total, dpu_bdev_io_latency_seconds_total (sum over I/Os),
dpu_bdev_io_latency_max_seconds and _min_seconds (since the last bdev_reset_iostat), dpu_bdev_io_errors_total by
``status``; and dpu_up per DPU: 0 when it did not answer.

Limits: a DPU has ANSWER_S seconds to answer; the others' figures are told without it.
Errors: EmuError when the address cannot be listened on.
Source: the OpenMetrics specification 1.0; SPDK's JSON-RPC documentation, bdev_get_iostat.
"""

from __future__ import annotations

from collections.abc import Mapping
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from dpu.errors import EmuError, RpcError
from dpu.spdk import Client

CONTENT_TYPE = "application/openmetrics-text; version=1.0.0; charset=utf-8"
ANSWER_S = 5.0  # Prometheus itself gives up after 10

_OPS = {"read": "bytes_read", "write": "bytes_written", "unmap": "bytes_unmapped", "copy": "bytes_copied"}

Stats = Mapping[str, Mapping[str, Any] | None]
"""The answer of bdev_get_iostat by DPU; None for one that did not answer."""


def ask(sockets: Mapping[str, str]) -> Stats:
    """bdev_get_iostat of each DPU; ``sockets``: RPC sockets by name."""
    return {name: call(path, "bdev_get_iostat") for name, path in sockets.items()}


def call(path: str, method: str) -> Mapping[str, Any] | None:
    """One RPC without parameters to the socket ``path``; None when it is not answered."""
    try:
        with Client(path, timeout_s=ANSWER_S) as client:
            answer: Mapping[str, Any] = client.call(method)
            return answer
    except (EmuError, RpcError):
        return None


def render(stats: Stats) -> str:
    """The exposition of all DPUs."""
    bdevs = [(dpu, answer, bdev) for dpu, answer in stats.items() if answer for bdev in answer["bdevs"]]

    def by_op(name: str, field: Mapping[str, str], suffix: str = "", ticks: bool = False) -> list[str]:
        return [
            _sample(
                name + suffix,
                {"dpu": dpu, "bdev": bdev["name"], "op": op},
                bdev[field[op]] / answer["tick_rate"] if ticks else bdev[field[op]],
            )
            for dpu, answer, bdev in bdevs
            for op in _OPS
        ]

    lines = _family("dpu_up", "gauge", "", "Whether the DPU answered.")
    lines += [_sample("dpu_up", {"dpu": dpu}, int(answer is not None)) for dpu, answer in stats.items()]
    lines += _family("dpu_bdev_ios", "counter", "", "I/Os completed.")
    lines += by_op("dpu_bdev_ios", {op: f"num_{op}_ops" for op in _OPS}, "_total")
    lines += _family("dpu_bdev_io_bytes", "counter", "bytes", "Data of them.")
    lines += by_op("dpu_bdev_io_bytes", _OPS, "_total")
    for which, suffix, text in (
        ("", "_total", "Their latencies, summed."),
        ("max_", "", "The greatest latency."),
        ("min_", "", "The smallest latency."),
    ):
        name = f"dpu_bdev_io_latency_{which}seconds"
        lines += _family(name, "counter" if suffix else "gauge", "seconds", text)
        lines += by_op(name, {op: f"{which}{op}_latency_ticks" for op in _OPS}, suffix, ticks=True)
    lines += _family("dpu_bdev_io_errors", "counter", "", "I/Os that failed.")
    for dpu, _, bdev in bdevs:
        for status, count in bdev["io_error"].items():
            labels = {"dpu": dpu, "bdev": bdev["name"], "status": status}
            lines.append(_sample("dpu_bdev_io_errors_total", labels, count))
    return "\n".join([*lines, "# EOF"]) + "\n"


def _family(name: str, kind: str, unit: str, text: str) -> list[str]:
    return [f"# TYPE {name} {kind}", *([f"# UNIT {name} {unit}"] if unit else []), f"# HELP {name} {text}"]


def _sample(name: str, labels: Mapping[str, str], value: float) -> str:
    pairs = ",".join(f'{key}="{_escaped(text)}"' for key, text in labels.items())
    return f"{name}{{{pairs}}} {value}"


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


def server(sockets: Mapping[str, str], address: str) -> ThreadingHTTPServer:
    """An HTTP server on ``address`` ("[HOST:]PORT"; a host of 127.0.0.1 if none), not yet serving."""
    host, _, port = address.rpartition(":")

    class Handler(BaseHTTPRequestHandler):
        timeout = 30  # of a client that says nothing

        def do_GET(self) -> None:
            if self.path.partition("?")[0] != "/metrics":
                self.send_error(HTTPStatus.NOT_FOUND, "it is /metrics")
                return
            body = render(ask(sockets)).encode()
            self.send_response(HTTPStatus.OK)
            self.send_header("Content-Type", CONTENT_TYPE)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: Any) -> None:
            pass

    try:
        return ThreadingHTTPServer((host or "127.0.0.1", int(port)), Handler)
    except (OSError, OverflowError, ValueError) as error:
        raise EmuError(
            f"cannot listen on {address}: {error}", "give --listen [HOST:]PORT with a free port"
        ) from error
