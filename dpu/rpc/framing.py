"""Cut a byte stream into JSON values: SPDK's framing has neither lengths nor delimiters between requests.

Use: ``splitter.feed(data)``, then ``splitter.next_value()`` until it is None: whole top-level objects and
arrays. Only brackets and strings are looked at; the text of a value is judged by the JSON parser that gets
it.
Limits: REQUEST_BYTES_MAX per value, DEPTH_MAX nested brackets.
Errors: FramingError where no value can follow; SPDK closes such a connection without an answer, as there is
no point at which to go on.
Source: RFC 8259; SPDK's jsonrpc server (nesting limit 64).
"""

from __future__ import annotations

import re

REQUEST_BYTES_MAX = 1 << 20
DEPTH_MAX = 64

_WHITESPACE = b" \t\r\n"
_OUTSIDE_STRING = re.compile(rb'["{}\[\]]')
# The inside of a string: plain bytes and escaped ones. Possessive, so that it neither backtracks nor piles
# up.
_STRING_BODY = re.compile(rb'(?:[^"\\]++|\\.)*+', re.DOTALL)


class FramingError(Exception):
    """The stream does not hold JSON requests (any more): close the connection."""


class Splitter:
    """Push parser. Holds at most one unfinished value, and scans each byte once."""

    def __init__(self) -> None:
        self._buffer = bytearray()
        self._scanned = 0  # bytes of the buffer already looked at
        self._depth = 0
        self._in_string = False

    @property
    def pending_bytes(self) -> int:
        """Bytes of an unfinished value."""
        return len(self._buffer)

    def feed(self, data: bytes) -> None:
        """Take the next bytes of the stream."""
        self._buffer += data

    def next_value(self) -> bytes | None:
        """The next whole value, None when more bytes are needed. FramingError ends the use of this
        splitter."""
        end = self._scan()
        if end is None:
            if len(self._buffer) > REQUEST_BYTES_MAX:
                raise FramingError(f"a request is longer than {REQUEST_BYTES_MAX} bytes")
            return None
        value = bytes(self._buffer[:end])
        del self._buffer[:end]
        self._scanned = 0
        return value

    def _scan(self) -> int | None:
        """Where the first value of the buffer ends; None when it is not there yet."""
        if self._depth == 0 and not self._start():
            return None
        while self._scanned < len(self._buffer):
            if self._in_string:
                body = _STRING_BODY.match(self._buffer, self._scanned)
                assert body is not None, "the pattern matches the empty string too"
                self._scanned = body.end()
                if self._buffer[self._scanned : self._scanned + 1] != b'"':
                    break  # the end, or a backslash whose byte has not come yet
                self._scanned += 1
                self._in_string = False
                continue
            found = _OUTSIDE_STRING.search(self._buffer, self._scanned)
            if found is None:
                self._scanned = len(self._buffer)
                break
            self._scanned = found.end()
            mark = found[0]
            if mark == b'"':
                self._in_string = True
            elif mark in b"{[":
                self._depth += 1
                if self._depth > DEPTH_MAX:
                    raise FramingError(f"a request is nested deeper than {DEPTH_MAX}")
            else:
                self._depth -= 1
                if self._depth == 0:
                    if self._scanned > REQUEST_BYTES_MAX:
                        raise FramingError(f"a request is longer than {REQUEST_BYTES_MAX} bytes")
                    return self._scanned
        return None

    def _start(self) -> bool:
        """Drop white space; True when a value has begun."""
        skip = len(self._buffer) - len(self._buffer.lstrip(_WHITESPACE))
        del self._buffer[:skip]
        if not self._buffer:
            return False
        if self._buffer[0] not in b"{[":
            raise FramingError("a request starts neither with { nor with [")
        return True
