"""The gate between threads of control and management."""

from __future__ import annotations

import asyncio

from dpu.volumes.gate import Gate


def test_closing_waits_for_those_inside_and_holds_up_those_who_come() -> None:
    async def run() -> list[str]:
        gate, seen, leave = Gate(), [], asyncio.Event()

        async def worker(name: str) -> None:
            async with gate.passing():
                seen.append(f"{name} in")
                await leave.wait()
                seen.append(f"{name} out")

        async def manager() -> None:
            async with gate.closed():
                seen.append("closed")
                other = asyncio.create_task(worker("second"))
                await asyncio.sleep(0)
                await asyncio.sleep(0)
                seen.append("opened")
            await other

        first = asyncio.create_task(worker("first"))
        await asyncio.sleep(0)
        closing = asyncio.create_task(manager())
        await asyncio.sleep(0)
        leave.set()
        await asyncio.gather(first, closing)
        return seen

    assert asyncio.run(run()) == ["first in", "first out", "closed", "opened", "second in", "second out"]
