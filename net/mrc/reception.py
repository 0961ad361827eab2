"""From frames to datagrams for an engine's step, one at a time; successors of a middle packet go straight to memory.

Most of a long write are middle packets in order: after one of them the engine says where the next ones would go, as
long as nobody is to be told of them (Endpoint.ahead), and a Follower knows their frames by all bytes that are not
payload, so they are neither taken apart nor judged one by one. What is anything else goes the ordinary way, which
is what this must be equal to (DPU_EMU_MRC_BURSTS=0: everything does).

Use: ``engine.run(now_ns, Reception(addressing, engine).datagrams(read))``; ``read`` gives the bytes behind an
Ethernet header, to be looked at until the next call only, or None.
Errors: none; ``refused`` counts frames that are no MRC for this host, by reason.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterator

from net.errors import MrcError
from net.mrc.datagram import Addressing, Datagram
from net.mrc.endpoint import Endpoint

Read = Callable[[], "bytes | memoryview | None"]


class Reception:
    """``follows``: whether there may be short cuts; not where datagrams wait before the engine hears them."""

    def __init__(self, addressing: Addressing, engine: Endpoint, *, follows: bool = True) -> None:
        self.refused: Counter[str] = Counter()
        self._addressing = addressing
        self._engine = engine
        self._follows = follows and os.environ.get("DPU_EMU_MRC_BURSTS") != "0"

    def datagrams(self, read: Read) -> Iterator[Datagram]:
        """Until there are no frames; each datagram is to be done with before the next is asked for."""
        following = None
        while (data := following or read()) is not None:
            following = None
            try:
                datagram = self._addressing.decode(data)
            except MrcError as error:
                self.refused[error.reason.value] += 1
            else:
                yield datagram
                if self._follows:
                    following = self._place_successors(read, data, datagram)

    def _place_successors(
        self, read: Read, data: bytes | memoryview, datagram: Datagram
    ) -> bytes | memoryview | None:
        """The first frame that is none."""
        memory = self._engine.ahead(datagram)
        follower = None if memory is None else self._addressing.follower(data, datagram)
        if memory is None or follower is None:
            return None
        size, placed = len(datagram.message.payload), 0
        following = None
        while placed < len(memory) and (following := read()) is not None:
            payload = follower.payload(following)
            if payload is None:
                break
            memory[placed : placed + size] = payload
            placed += size
        self._engine.took(datagram, placed // size)
        return following if placed < len(memory) else None
