"""JSON-RPC rules and parameter tables, with methods made for the test."""

from __future__ import annotations

import asyncio
import json
import logging
import uuid
from typing import Any

import pytest

from dpu.errors import RpcError
from dpu.rpc import dispatcher
from dpu.rpc.dispatcher import BadParam, Dispatcher, Method, Param, Then, decode, nearest
from dpu.rpc.framing import FramingError

UUID = "11111111-2222-3333-4444-555555555555"


async def echo(**params: Any) -> Any:
    return params


async def version() -> str:
    return "v"


async def refuse() -> None:
    raise RpcError(-19, "No such device")


async def fail() -> None:
    raise ZeroDivisionError


ECHO = (
    Param("count", dispatcher.u32, required=True),
    Param("flag", dispatcher.boolean, default=False),
    Param("text", dispatcher.string),
    Param("quiet", dispatcher.only(0), ignored=True),
    Param("inner", dispatcher.nested(Param("id", dispatcher.uuid, required=True))),
)
TABLE = {
    row.name: row
    for row in (
        Method("echo", echo, ECHO, dispatcher.INVALID_PARAMS),
        Method("version", version),
        Method("refuse", refuse),
        Method("fail", fail),
    )
}


def ask(request: Any, table: dict[str, Method] = TABLE) -> Any:
    text = request if isinstance(request, bytes) else json.dumps(request).encode()
    answer = asyncio.run(Dispatcher(table).answer(text))
    return json.loads(answer.text) if answer.text else None


def call(method: str, params: Any = None, **more: Any) -> Any:
    request = {"jsonrpc": "2.0", "id": 1, "method": method, **more}
    return ask(request if params is None else {**request, "params": params})


@pytest.mark.parametrize("identifier", [0, 1, -7, 1.5, "", "x", "é"])
def test_ids_come_back(identifier: Any) -> None:
    assert call("version", id=identifier) == {"jsonrpc": "2.0", "id": identifier, "result": "v"}


@pytest.mark.parametrize(
    "request_",
    [
        {"method": "version", "id": True},
        {"method": "version", "id": [1]},
        {"method": "version", "id": {}},
        {"method": ["version"], "id": 1},
        {"id": 1},
        {"method": "version", "id": 1, "params": 3},
        {"method": "version", "id": 1, "parms": {}},
        {"method": "version", "id": 1, "jsonrpc": 2.0},
        {"method": "version", "id": 1, "jsonrpc": "1.0"},
        [],
    ],
)
def test_invalid_requests(request_: Any) -> None:
    assert ask(request_) == {"jsonrpc": "2.0", "id": None, "error": {"code": -32600, "message": "Invalid request"}}


@pytest.mark.parametrize("method", ["version", "refuse", "fail", "nothing"])
def test_no_id_no_answer(method: str) -> None:
    assert ask({"method": method}) is None
    assert ask({"method": method, "id": None}) is None
    assert ask([{"method": method}, {"method": method}]) is None


def test_batch_answers_in_order_and_leaves_out_notifications() -> None:
    batch = [{"method": "version", "id": 3}, {"method": "version"}, 7, {"method": "refuse", "id": 4}]
    answers = ask(batch)
    assert [answer["id"] for answer in answers] == [3, None, 4]
    assert [answer.get("error", {}).get("code") for answer in answers] == [None, -32600, -19]


def test_null_params_are_no_params() -> None:
    assert ask({"method": "version", "id": 1, "params": None})["result"] == "v"


@pytest.mark.parametrize(
    "text", [b'{"a":}', b"{'a':1}", b'{"a":NaN}', b"[-Infinity]", b'{"a":"\xff"}', b'{"a":01}', b"[1,]", b'{"a":1']
)
def test_text_that_is_no_json(text: bytes) -> None:
    with pytest.raises(FramingError):
        ask(text)


def test_numbers_of_any_length_and_depth_do_no_harm() -> None:
    with pytest.raises(FramingError):
        ask(b'{"method":"version","id":' + b"9" * 100_000 + b"}")
    with pytest.raises(FramingError):
        ask(b"[" * 100_000 + b"]" * 100_000)
    assert ask(b'{"method":"version","id":1e999}')["error"]["code"] == -32600


@pytest.mark.parametrize(
    "params",
    [
        {},
        {"count": -1},
        {"count": 2**32},
        {"count": "1"},
        {"count": True},
        {"count": 1.5},
        {"count": None},
        {"count": 1, "flag": 0},
        {"count": 1, "flag": "yes"},
        {"count": 1, "text": 5},
        {"count": 1, "text": "a\0b"},
        {"count": 1, "text": "\ud800"},
        {"count": 1, "quiet": 1},
        {"count": 1, "quiet": False},
        {"count": 1, "cuont": 1},
        {"count": 1, "inner": {}},
        {"count": 1, "inner": {"id": "11111111222233334444555555555555"}},
        {"count": 1, "inner": {"id": UUID, "x": 1}},
        [],
        [1],
    ],
)
def test_parameters_refused(params: Any) -> None:
    assert call("echo", params)["error"] == {"code": -32602, "message": "Invalid parameters"}


def test_parameters_taken() -> None:
    assert decode(ECHO, {"count": 1e3, "text": "ü", "quiet": 0, "inner": {"id": UUID}}) == {
        "count": 1000,
        "flag": False,
        "text": "ü",
        "inner": {"id": uuid.UUID(UUID)},
    }
    assert type(decode(ECHO, {"count": 1.0})["count"]) is int


def test_a_key_given_twice_is_refused() -> None:
    answer = ask(b'{"method":"echo","id":1,"params":{"count":1,"count":2}}')
    assert answer["error"]["code"] == -32602
    assert ask(b'{"method":"version","id":1,"id":2}')["error"]["code"] == -32600


@pytest.mark.parametrize(
    ("params", "told"),
    [
        ({"count": 1, "flga": True}, ["'flga'", "unknown", "'flag'"]),
        ({}, ["'count'", "missing"]),
        ({"count": "x"}, ["'count'", "whole number", "'x'"]),
        ({"count": 1, "inner": {"id": "no"}}, ["'inner'", "'id'", "UUID"]),
        ({"count": 1, "text": 1, "x" * 10_000: 1}, ["unknown"]),
        ({"count": 1, "a\nb": 1}, [r"a\nb"]),
    ],
)
def test_the_log_says_which_key(params: Any, told: list[str], caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        call("echo", params)
    (message,) = [record.getMessage() for record in caplog.records if "echo" in record.getMessage()]
    assert all(word in message for word in told), message
    assert len(message) < 500 and "\n" not in message


def test_the_log_names_the_nearest_method(caplog: pytest.LogCaptureFixture) -> None:
    assert call("verzion")["error"] == {"code": -32601, "message": "Method not found"}
    assert "version" in caplog.text


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("bdev_malloc_crate", "bdev_malloc_create"),
        ("bdev_get_bdev", "bdev_get_bdevs"),
        ("bdev_ai_create", "bdev_aio_create"),
        ("bdev_raid_create", ""),
        ("bdev_lvol_create", ""),
        ("nvmf_subsystem_add_host", ""),
        ("", ""),
    ],
)
def test_only_a_near_method_is_suggested(name: str, meant: str) -> None:
    known = ["bdev_malloc_create", "bdev_get_bdevs", "bdev_aio_create", "bdev_null_create", "nvmf_subsystem_add_ns"]
    assert nearest(name, known) == meant


def test_our_fault_is_logged_and_answered(caplog: pytest.LogCaptureFixture) -> None:
    assert call("fail")["error"]["code"] == -32603
    assert "ZeroDivisionError" in caplog.text


def test_a_timeout_is_answered_and_the_work_goes_on() -> None:
    async def scenario() -> None:
        gate, ended = asyncio.Event(), asyncio.Event()

        async def slow() -> None:
            await gate.wait()
            ended.set()

        rows = {"slow": Method("slow", slow, timeout_s=lambda params: 0.01)}
        answer = json.loads((await Dispatcher(rows).answer(b'{"method":"slow","id":1}')).text)
        assert answer["error"] == {"code": -110, "message": "Connection timed out"}
        gate.set()
        await asyncio.wait_for(ended.wait(), 10)

    asyncio.run(scenario())


def test_what_follows_an_answer_comes_with_it() -> None:
    done = []

    async def last() -> Then:
        return Then(True, lambda: done.append(1))

    answer = asyncio.run(Dispatcher({"last": Method("last", last)}).answer(b'{"method":"last","id":1}'))
    assert json.loads(answer.text)["result"] is True and not done
    answer.actions[0]()
    assert done


def test_hexadecimal() -> None:
    parse = dispatcher.hexadecimal(8)
    assert parse("00a0DEADbeef0001") == bytes.fromhex("00a0deadbeef0001")
    for wrong in ("00a0deadbeef00", "00a0deadbeef000g", 5, "00a0-deadbeef-001"):
        with pytest.raises(BadParam):
            parse(wrong)
