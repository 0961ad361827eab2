"""The one process of a lab that is up: parent of its QEMUs and daemons, and the socket that others ask.

    await supervise(scenario, config, progress, lambda lab: print("ready"))      # until SIGTERM or SIGINT

`emu up` runs it in a session of its own; emu/control.py is the other end of the socket and has the requests.
A guest that reboots gets its agent and its controllers back; a QEMU or dpud that ends stays ended: status says so.
Limits: an output that its caller does not read stops its program, not the lab.
Errors: those of the lab while it starts; later ones go to the caller whose request met them.
"""

from __future__ import annotations

import asyncio
import json
import math
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from qemu.qmp import QMPError

from dpu.errors import EmuError, UsageError
from emu.control import SOCKET, encode_error
from emu.guest import ExecResult
from emu.lab import Lab, LabConfig, prepare
from emu.paths import socket_path
from emu.progress import Progress, Told
from emu.run import run_in
from emu.scenario import Scenario, check_workloads
from emu.vm import Vm
from images.agent import FRAME_BYTES_MAX, RAW_BYTES_MAX, Parser, pack

_T = TypeVar("_T")
_UNREAD_BYTES_MAX = 16 * RAW_BYTES_MAX  # of a caller that is slower than its program


async def supervise(scenario: Scenario, config: LabConfig, progress: Progress, ready: Callable[[Lab], None]) -> None:
    """Start the lab of ``config``, call ``ready``, and serve until this task is cancelled; then end the lab.

    ``scenario``: whose lab it is, for its workloads.
    """
    platform = prepare(config, progress)
    async with Lab(config, platform, progress) as lab:
        assert lab.ledger is not None
        supervisor = Supervisor(lab, scenario)
        server = await asyncio.start_unix_server(supervisor.serve, socket_path(lab.ledger.directory, SOCKET))
        followers = [asyncio.ensure_future(supervisor.follow(vm)) for vm in lab.vms.values()]
        ready(lab)
        try:
            await asyncio.Event().wait()
        finally:
            server.close()
            for task in (*followers, *supervisor.callers):
                task.cancel()
            await asyncio.gather(*followers, *supervisor.callers, return_exceptions=True)


class Supervisor:
    """Serves the requests of a lab."""

    def __init__(self, lab: Lab, scenario: Scenario) -> None:
        self.lab = lab
        self.scenario = scenario
        self._working = False  # workloads run
        self.callers: set[asyncio.Task[Any]] = set()
        self._there = {name: asyncio.Event() for name in lab.vms}  # cleared from a guest's reset until it is back
        for event in self._there.values():
            event.set()
        self._started_s = time.monotonic()

    async def follow(self, vm: Vm) -> None:
        """After each reset of the guest, find its agent and its controllers again."""
        with vm.qmp.listener("RESET") as resets:
            while True:
                await resets.get()
                self._there[vm.name].clear()
                try:
                    await vm.come_back()
                except (EmuError, OSError, QMPError) as error:
                    print(f"{vm.name} is not back: {error}", flush=True)
                    if not vm.running:
                        return
                finally:
                    self._there[vm.name].set()

    # -- one caller

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self.callers.add(task)
        try:
            frames = _frames(reader)
            async for fields, raw in frames:
                try:
                    code = await self._answer(fields, raw, frames, writer)
                    writer.write(pack({"code": code}))
                except EmuError as error:
                    writer.write(pack({"error": encode_error(error)}))
                await writer.drain()
        except OSError:
            pass  # the caller is gone
        finally:
            self.callers.discard(task)
            writer.close()

    async def _answer(self, fields: dict[str, Any], raw: bytes, frames: _Frames, writer: asyncio.StreamWriter) -> int:
        match fields:
            case {"op": "status"}:
                _write_json(writer, self.status())
            case {"op": "scenario"}:
                about = {"name": self.scenario.name, "folder": str(self.scenario.folder.absolute())}
                _write_json(writer, {**about, "document": self.scenario.document})
            case {"op": "run", "workloads": list(workloads), "folder": str(folder), "out": str(out)}:
                await _for_caller(self._run(workloads, Path(folder), Path(out), writer), _listen(frames))
            case {"op": "type", "vm": str(vm)}:
                await self._vm(vm).type(raw)
            case {"op": "exec", "vm": str(vm), "argv": list(argv), "stdin": bool(stdin)}:
                return await self._exec(self._vm(vm), argv, stdin, fields.get("tty"), frames, writer)
            case _:
                raise EmuError("this supervisor does not know that request", "use the emu that started the lab")
        return 0

    def _vm(self, name: str) -> Vm:
        if name not in self.lab.vms:
            raise UsageError(f"lab {self.lab.config.claim} has no VM {name}", f"it has: {', '.join(self.lab.vms)}")
        vm = self.lab.vms[name]
        if not vm.running:
            raise EmuError(f"{name} has ended", "`emu down` and `emu up` start it again")
        return vm

    async def _exec(
        self, vm: Vm, argv: list[str], stdin: bool, tty: Any, frames: _Frames, writer: asyncio.StreamWriter
    ) -> int:
        pieces: asyncio.Queue[bytes] = asyncio.Queue()

        async def input() -> AsyncIterator[bytes]:
            while piece := await pieces.get():
                yield piece
                writer.write(pack({"more": True}))

        def forward(stream: int, data: bytes) -> Any:
            writer.write(pack({"stream": stream}, data))
            return writer.drain() if writer.transport.get_write_buffer_size() > _UNREAD_BYTES_MAX else None

        async def run() -> ExecResult:
            await self._there[vm.name].wait()
            source = input() if stdin else None
            return await vm.exec(
                argv, timeout_s=math.inf, input=source, on_output=forward, keep_output=False, tty=tty
            )

        return (await _for_caller(run(), _listen(frames, pieces.put_nowait))).code

    async def _run(self, tables: list[Any], folder: Path, out: Path, writer: asyncio.StreamWriter) -> None:
        """Workloads, one after the other; the report is in ``out``."""
        if self._working:
            raise UsageError(f"lab {self.lab.config.claim} runs workloads already", "wait for their end")
        workloads = check_workloads(self.scenario.document, tables, folder, lambda path: "workload")
        progress = Told(lambda told: writer.write(pack({"stream": 1}, json.dumps(told).encode())))
        self._working = True
        try:
            for there in self._there.values():
                await there.wait()
            await run_in(self.lab, replace(self.scenario, workloads=workloads), progress, out)
        finally:
            self._working = False

    # -- status

    def status(self) -> dict[str, Any]:
        """What `emu status --json` shows of one lab."""
        lab = self.lab
        assert lab.ledger is not None
        return {
            "state": "up",
            "seconds": round(time.monotonic() - self._started_s, 1),
            "directory": str(lab.ledger.directory),
            "out": str(lab.out),
            "accelerator": lab.platform.accel.name,
            "fabric": _fabric_status(lab),
            "vms": {name: _vm_status(vm) for name, vm in lab.vms.items()},
            "dpus": {
                name: {
                    "state": "running" if dpu.running else "ended",
                    "pid": dpu.pid,
                    "rpc": str(dpu.rpc_socket),
                    "log": str(dpu.log),
                    "worker_restarts": len(dpu.restarts_ms()),
                    "controllers": {one.name: str(dpu.socket(one.name)) for one in dpu.config.controllers},
                }
                for name, dpu in lab.dpus.items()
            },
        }


async def _for_caller(work: Coroutine[Any, Any, _T], listening: Coroutine[Any, Any, None]) -> _T:
    """What ``work`` returns; when the caller goes, which ends ``listening``, it is cancelled."""
    tasks = asyncio.ensure_future(work), asyncio.ensure_future(listening)
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        if not tasks[0].done():
            raise ConnectionResetError("the caller is gone")
        return tasks[0].result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _listen(frames: _Frames, take: Callable[[bytes], None] = lambda piece: None) -> None:
    """Until the caller goes; ``take`` gets what it sends."""
    async for _, piece in frames:
        take(piece)


def _write_json(writer: asyncio.StreamWriter, value: Any) -> None:
    text = json.dumps(value).encode()
    for start in range(0, len(text), RAW_BYTES_MAX):
        writer.write(pack({"stream": 1}, text[start : start + RAW_BYTES_MAX]))


def _fabric_status(lab: Lab) -> dict[str, Any] | None:
    """``name``: for `emu fabric --name`."""
    if lab.fabric_name is None:
        return None
    topology = lab.fabric.topology
    numbers = {"planes": topology.planes, "hosts": topology.hosts, "links": topology.link_count}
    return {"name": lab.fabric_name, "engine": lab.fabric.settings.engine, **numbers}


def _vm_status(vm: Vm) -> dict[str, Any]:
    return {
        "state": "running" if vm.running else "ended",
        "pid": vm.process.pid,
        "vcpus": vm.config.vcpus,
        "memory_mib": vm.config.memory_mib,
        "restored": vm.restored,
        "console": str(vm.paths.console),
        "controllers": {one.id: {"name": one.controller, "namespaces": list(one.namespaces)} for one in vm.attached},
    }


_Frames = AsyncIterator[tuple[dict[str, Any], bytes]]


async def _frames(reader: asyncio.StreamReader) -> _Frames:
    parser = Parser()
    while data := await reader.read(FRAME_BYTES_MAX):
        for frame in parser.feed(data):
            yield frame
