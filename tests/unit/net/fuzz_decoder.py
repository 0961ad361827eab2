"""What a fuzzer calls: the frame decoder, and an endpoint behind it whose memory must stay as it is.

``python -m tests.unit.net.fuzz_decoder -max_total_time=60``; needs atheris (``pip install atheris``), which is for
Linux and CPython 3.11 to 3.13.
"""

from __future__ import annotations

import random
import sys

import atheris

with atheris.instrument_imports(include=["net"]):
    from net.errors import MrcError
    from net.mrc.datagram import Datagram
    from net.mrc.endpoint import Endpoint
    from net.mrc.frame import Frame, decode_frame, encode_frame
    from net.mrc.requestor import Identity

MEMORY = bytearray(64)
SEALED = bytes(MEMORY)


def once(data: bytes) -> None:
    """One input: refused with MrcError, or decoded, encoded again to the same fields, and taken in by an endpoint."""
    try:
        frame: Frame = decode_frame(data)
    except MrcError:
        return
    if not frame.trimmed:
        again = decode_frame(encode_frame(frame))
        assert again == frame, (again, frame)
    endpoint = Endpoint(random.Random(1))
    key = endpoint.register(MEMORY, 0)
    endpoint.connect(Identity(5, 1, 6), [0, 1], lambda ev: ev)
    message = frame.message._replace(bth=frame.message.bth._replace(dqp=frame.message.bth.dqp & 7))
    if all(getattr(header, "r_key", None) != key for header in message.headers):
        endpoint.step(1000, [Datagram(1, frame.entropy, message, frame.ecn == 3, frame.trimmed)])
        assert MEMORY == SEALED


if __name__ == "__main__":
    atheris.Setup(sys.argv, once)
    atheris.Fuzz()
