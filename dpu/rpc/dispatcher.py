"""JSON-RPC 2.0 as SPDK speaks it: from the text of one request or batch to the text of its answer.

Use: ``await Dispatcher(methods).answer(text)``. No I/O; the only clock is each method's timeout.
Rules beside the standard's: a missing "jsonrpc" is accepted, another version than "2.0" is not; a request
without an id or with a null id gets no answer; an invalid request is answered with id null; text that is no
JSON closes the connection (FramingError).
Limits: what ``dpu.rpc.framing`` lets through; strings without NUL and lone surrogates; ids are strings or
numbers.
Errors of a method: ``RpcError`` is answered as it is; a timeout as -110, while the work goes on, so that no
change is left half made; anything else is our fault: logged, answered as -32603.
Source: JSON-RPC 2.0; recorded answers of SPDK v26.05 (tests/conformance/spdk_rpc_vectors.json).
"""

from __future__ import annotations

import asyncio
import difflib
import enum
import errno
import itertools
import json
import logging
import math
import re
import uuid as uuids
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from dpu.backends import os_error
from dpu.errors import RpcError
from dpu.rpc.framing import FramingError
from dpu.rpc.warnings import collecting

log = logging.getLogger(__name__)

INVALID_REQUEST = RpcError(-32600, "Invalid request")
METHOD_NOT_FOUND = RpcError(-32601, "Method not found")
INVALID_PARAMS = RpcError(-32602, "Invalid parameters")
DECODE_FAILED = RpcError(-32603, "spdk_json_decode_object failed")
INTERNAL_ERROR = RpcError(-32603, "Internal error")

TOO_EARLY = RpcError(-1, "Method may only be called after framework is initialized using framework_start_init RPC.")
TOO_LATE = RpcError(
    -1,
    "Method may only be called before framework is initialized. Use --wait-for-rpc command line parameter and then "
    "issue this RPC before the framework_start_init RPC.",
)

TIMEOUT_S = 30.0

_REQUEST_KEYS = {"jsonrpc", "id", "method", "params"}
_LOGGED_CHARS_MAX = 200
_NEAR = 0.75  # difflib's ratio for "ai" and "aio", and more than that of "raid" and "aio"


class BadParam(Exception):
    """Why a parameter is refused; goes to the log, the client gets the method's fixed answer."""


# -- parameter types: JSON value -> value, or BadParam


def boolean(value: Any) -> bool:
    if not isinstance(value, bool):
        raise BadParam("must be true or false")
    return value


def string(value: Any) -> str:
    if not isinstance(value, str) or "\0" in value or (not value.isascii() and not _encodable(value)):
        raise BadParam("must be a string without NUL")
    return value


def strings(value: Any) -> list[str]:
    if not isinstance(value, list):
        raise BadParam("must be an array of strings")
    return [string(one) for one in value]


def _encodable(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def integer(low: int, high: int) -> Callable[[Any], int]:
    """A number without fraction; 1e3 is one too."""

    def parse(value: Any) -> int:
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            raise BadParam(f"must be a whole number from {low} to {high}")
        return value

    return parse


u32 = integer(0, 2**32 - 1)
u64 = integer(0, 2**64 - 1)
i32 = integer(-(2**31), 2**31 - 1)
limit = integer(0, 10**12)  # of rates and bursts; with it no time is more than 64 bits


def number(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise BadParam("must be a number")
    return float(value)


def uuid(value: Any) -> uuids.UUID:
    if not isinstance(value, str) or not re.fullmatch(r"[0-9a-fA-F]{8}(-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}", value):
        raise BadParam("must be a UUID like 01234567-89ab-cdef-0123-456789abcdef")
    return uuids.UUID(value)


def hexadecimal(byte_count: int) -> Callable[[Any], bytes]:
    def parse(value: Any) -> bytes:
        if not isinstance(value, str) or not re.fullmatch(rf"[0-9a-fA-F]{{{2 * byte_count}}}", value):
            raise BadParam(f"must be {2 * byte_count} hexadecimal digits")
        return bytes.fromhex(value)

    return parse


def one_of(*choices: str) -> Callable[[Any], str]:
    def parse(value: Any) -> str:
        if value not in choices:
            raise BadParam(f"must be one of {', '.join(choices)}")
        return str(value)

    return parse


def only(*values: Any) -> Callable[[Any], Any]:
    """A parameter of SPDK's that this target takes only where it changes nothing."""

    def parse(value: Any) -> Any:
        # Compared by type too: 0 is not false.
        if not any(type(value) is type(one) and value == one for one in values):
            raise BadParam(f"is not supported here, except as {json.dumps(values[0])}")
        return value

    return parse


@dataclass(frozen=True)
class Param:
    """One parameter. ``default`` is what the method gets when it is left out and not required.
    ``ignored``: checked, then not passed on."""

    name: str
    parse: Callable[[Any], Any]
    required: bool = False
    default: Any = None
    ignored: bool = False


def nested(*params: Param) -> Callable[[Any], dict[str, Any]]:
    """An object of its own table."""
    return lambda value: decode(params, value)


class _DuplicateKeys(dict[str, Any]):
    """A JSON object with a key given twice; SPDK refuses those, and so do we."""


def _pairs(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    return found if len(found) == len(pairs) else _DuplicateKeys(found)


def decode(params: Sequence[Param], given: Any) -> dict[str, Any]:
    """``given`` by its table: every value parsed, defaults filled in. BadParam names the key."""
    if not isinstance(given, dict):
        raise BadParam("must be an object")
    if isinstance(given, _DuplicateKeys):
        raise BadParam("has a key twice")
    known = {param.name: param for param in params}
    for key in given:
        if key not in known:
            near = difflib.get_close_matches(key, known, n=1)
            raise BadParam(f"{_short(key)}: unknown" + (f", did you mean {near[0]!r}?" if near else ""))
    values = {}
    for param in params:
        if param.name not in given:
            if param.required:
                raise BadParam(f"{param.name!r}: missing")
            value = param.default
        else:
            try:
                value = param.parse(given[param.name])
            except BadParam as problem:
                raise BadParam(f"{param.name!r}: {problem}, got {_short(given[param.name])}") from None
        if not param.ignored:
            values[param.name] = value
    return values


class When(enum.Flag):
    """States of the daemon in which a method may be called: before and after framework_start_init."""

    STARTUP = enum.auto()
    RUNTIME = enum.auto()
    ALWAYS = STARTUP | RUNTIME


@dataclass(frozen=True)
class Method:
    """One row of the method table.

    call: gets the decoded parameters as keywords. params: () means that the method takes none at all.
    bad_params: SPDK's answer when they do not decode. timeout_s: by the decoded parameters.
    """

    name: str
    call: Callable[..., Awaitable[Any]]
    params: tuple[Param, ...] = ()
    bad_params: RpcError = DECODE_FAILED
    timeout_s: Callable[[Mapping[str, Any]], float] = lambda params: TIMEOUT_S
    when: When = When.RUNTIME


@dataclass(frozen=True)
class Then:
    """A method's result with something to do once the answer is on its way."""

    result: Any
    action: Callable[[], None]


@dataclass(frozen=True)
class Answer:
    """``text``: b"" for no answer. ``actions``: to be called after it was sent."""

    text: bytes
    actions: tuple[Callable[[], None], ...] = ()


class Dispatcher:
    """``state``: tells in which of its two states the daemon is."""

    def __init__(
        self,
        methods: Mapping[str, Method],
        state: Callable[[], When] = lambda: When.RUNTIME,
        before: Callable[[str], Awaitable[None]] | None = None,
    ) -> None:
        """``before``: awaited before each call, with its method's name; its RpcError is the answer."""
        self.methods = methods
        self._state = state
        self._before = before
        self._late: set[asyncio.Task[Any]] = set()  # timed out, still at work

    async def answer(self, text: bytes) -> Answer:
        """FramingError when ``text`` is no JSON."""
        request = parse(text)
        actions: list[Callable[[], None]] = []
        if isinstance(request, list) and request:
            answers = [await self._one(item, actions) for item in request]
            reply: Any = [answer for answer in answers if answer is not None] or None
        else:
            reply = await self._one(request, actions)
        return Answer(b"" if reply is None else json.dumps(reply).encode() + b"\n", tuple(actions))

    async def _one(self, request: Any, actions: list[Callable[[], None]]) -> dict[str, Any] | None:
        if not _valid(request):
            return _error(None, INVALID_REQUEST)
        identifier = request.get("id")
        with collecting() as found:
            try:
                result = await self.call(request["method"], request.get("params"))
            except RpcError as error:
                return None if identifier is None else _error(identifier, error)
        if isinstance(result, Then):
            actions.append(result.action)
            result = result.result
        more = {"warnings": found} if found else {}
        return None if identifier is None else {"jsonrpc": "2.0", "id": identifier, "result": result, **more}

    async def call(self, name: str, given: Any = None) -> Any:
        """The result of one method; RpcError for everything that a client would get as an error."""
        method = self.methods.get(name)
        if method is None:
            near = nearest(name, self.methods)
            log.warning("method %s not found%s", _short(name), f", did you mean {near}?" if near else "")
            raise METHOD_NOT_FOUND
        if self._state() not in method.when:
            raise TOO_EARLY if When.RUNTIME in method.when else TOO_LATE
        if not method.params and given is not None:
            raise RpcError(INVALID_PARAMS.code, f"{name} method requires no parameters")
        try:
            params = decode(method.params, {} if given is None else given)
        except BadParam as problem:
            log.warning("%s: parameters refused: %s", name, problem)
            raise method.bad_params from None
        if self._before is not None:
            await self._before(name)
        return await self._run(method, params)

    async def _run(self, method: Method, params: dict[str, Any]) -> Any:
        task = asyncio.ensure_future(method.call(**params))
        # Never cancelled by a timeout or a client that left: a change is made whole or not at all.
        self._late.add(task)
        task.add_done_callback(self._late.discard)
        done, _ = await asyncio.wait({task}, timeout=method.timeout_s(params))
        if not done:
            log.error(
                "%s: no result in %g s; answered with a timeout, it goes on",
                method.name,
                method.timeout_s(params),
            )
            task.add_done_callback(_log_late)
            raise os_error(errno.ETIMEDOUT)
        try:
            result = task.result()
        except RpcError as error:
            log.debug("%s(%s): error %d %s", method.name, _short(params), error.code, error.message)
            raise
        except Exception:
            log.exception("%s failed", method.name)
            raise INTERNAL_ERROR from None
        log.debug("%s(%s): %s", method.name, _short(params), _short(result))
        return result


def nearest(name: str, methods: Iterable[str]) -> str:
    """The method meant by a slip of the finger, "" for none: each word is near, for most names share most words."""
    words = name.split("_")
    for method in difflib.get_close_matches(name, methods, n=3, cutoff=0.8):
        pairs = itertools.zip_longest(words, method.split("_"), fillvalue="")
        if all(difflib.SequenceMatcher(None, *pair).ratio() >= _NEAR for pair in pairs):
            return method
    return ""


def parse(text: bytes) -> Any:
    """JSON by the letter: UTF-8, no NaN, no Infinity."""
    try:
        return json.loads(text.decode(), object_pairs_hook=_pairs, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        raise FramingError(f"not JSON: {error}") from None


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a JSON value")


def _valid(request: Any) -> bool:
    if not isinstance(request, dict) or isinstance(request, _DuplicateKeys) or request.keys() - _REQUEST_KEYS:
        return False
    identifier = request.get("id")
    plain_id = identifier is None or (
        isinstance(identifier, (str, int, float))
        and not isinstance(identifier, bool)
        and not (isinstance(identifier, float) and not math.isfinite(identifier))
    )
    return (
        request.get("jsonrpc", "2.0") == "2.0"
        and isinstance(request.get("method"), str)
        and isinstance(request.get("params"), (dict, list, type(None)))
        and plain_id
    )


def _error(identifier: Any, error: RpcError) -> dict[str, Any]:
    return {"jsonrpc": "2.0", "id": identifier, "error": {"code": error.code, "message": error.message}}


def _log_late(task: asyncio.Task[Any]) -> None:
    if not task.cancelled() and (error := task.exception()) is not None:
        log.error("a call that had timed out ended with: %s", error)


def _short(value: Any) -> str:
    """For a log line: escaped, and cut."""
    text = ascii(value)
    return text if len(text) <= _LOGGED_CHARS_MAX else text[:_LOGGED_CHARS_MAX] + "..."
