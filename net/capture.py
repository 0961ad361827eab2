"""A pcap file of one link, written by a thread as frames pass.

Use: ``capture = Capture(tap, Path("link.pcap"))``; ``capture.close()``. Frames are those of net.wire_tap: wire bytes.
Limits: both directions are in one file, told apart by MAC; what the ring had no room for is counted in ``lost``.
Errors: NetError when the file cannot be written.
Source: pcap-savefile(5), nanosecond variant.
"""

from __future__ import annotations

import os
import select
import struct
import threading
from pathlib import Path

from net.errors import NetError
from net.wire_tap import NS_PER_S, Tap

_MAGIC_NS, _ETHERNET, _SNAP_BYTES = 0xA1B23C4D, 1, 1 << 16


class Capture:
    """``frames``: how many were written; ``lost``: how many were not, known after ``close``."""

    def __init__(self, tap: Tap, path: Path) -> None:
        self.path = path
        self.frames = 0
        self.lost = 0
        self._tap = tap
        try:
            self._file = path.open("wb")
        except OSError as error:
            tap.close()
            raise NetError(f"cannot write {path}: {error.strerror}", "give another file") from error
        self._file.write(struct.pack("=IHHiIII", _MAGIC_NS, 2, 4, 0, 0, _SNAP_BYTES, _ETHERNET))
        self._wake = os.eventfd(0, os.EFD_CLOEXEC)
        self._thread = threading.Thread(target=self._run, name=f"pcap-{path.name}", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while True:
            ready = select.select([self._tap.fileno(), self._wake], [], [])[0]
            while (frame := self._tap.take()) is not None:
                seconds, nanoseconds = divmod(frame.time_ns, NS_PER_S)
                size = len(frame.data)
                self._file.write(struct.pack("=IIII", seconds, nanoseconds, size, size) + frame.data)
                self.frames += 1
            self._file.flush()
            if self._wake in ready:
                return

    def close(self) -> None:
        """Everything that has passed is in the file."""
        if self._thread.is_alive():
            os.eventfd_write(self._wake, 1)
            self._thread.join()
            self.lost = self._tap.count_lost()
            self._tap.close()
            self._file.close()
            os.close(self._wake)
