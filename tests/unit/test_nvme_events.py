"""Asynchronous events (NVMe Base 2.0, 5.2): parking, the limit, masking, arming again."""

from __future__ import annotations

from tests.support.nvme_host import CC_ENABLE, Host

NOTICE = 0x02 | 0x00 << 8 | 0x04 << 16  # Notice, Namespace Attribute Changed, log page 04h
TEMPERATURE = 0x01 | 0x01 << 8 | 0x02 << 16
BAD_REGISTER = 0x00 | 0x00 << 8 | 0x01 << 16
BAD_VALUE = 0x00 | 0x01 << 8 | 0x01 << 16


def want_notices(host: Host, bits: int = 1 << 8) -> None:
    assert host.code(0x09, cdw={10: 0x0B, 11: bits}) == 0


def park(host: Host) -> int:
    assert host.submit(0x0C) is None
    return host.tokens


def at_once(host: Host) -> int:
    result = host.submit(0x0C)
    assert result is not None
    assert result.code == 0
    return result.dw0


def reported(host: Host) -> list[tuple[int, int, int]]:
    found = [(token, completion.status, completion.dw0) for token, completion in host.plane.completed]
    host.plane.completed.clear()
    return found


def test_requests_are_parked_up_to_the_limit() -> None:
    host = Host()
    tokens = [park(host) for _ in range(4)]
    assert host.controller.parked_tokens == tokens
    result = host.submit(0x0C)
    assert result is not None
    assert result.code == 0x105
    assert reported(host) == []


def test_a_namespace_change_is_reported_once_until_the_log_is_read() -> None:
    host = Host()
    want_notices(host)
    first, second = park(host), park(host)
    host.controller.namespace_changed(1)
    assert reported(host) == [(first, 0, NOTICE)]
    host.controller.namespace_changed(3)
    assert reported(host) == [], "masked"
    host.log(0x04, 4096, rae=True)
    host.controller.namespace_changed(1)
    assert reported(host) == [], "RAE keeps it masked"
    host.log(0x04, 4096)
    assert reported(host) == [], "what the log told needs no event"
    host.controller.namespace_changed(3)
    assert reported(host) == [(second, 0, NOTICE)]


def test_an_event_waits_for_a_request() -> None:
    host = Host()
    want_notices(host)
    host.controller.namespace_changed(1)
    host.controller.namespace_changed(3)
    assert at_once(host) == NOTICE
    park(host)
    assert reported(host) == []


def test_reading_the_log_first_takes_the_event_back() -> None:
    host = Host()
    want_notices(host)
    host.controller.namespace_changed(1)
    host.log(0x04, 4096)
    park(host)
    assert reported(host) == []


def test_no_notice_that_was_not_asked_for() -> None:
    host = Host()
    park(host)
    host.controller.namespace_changed(1)
    assert reported(host) == []
    assert host.log(0x04, 4)[0] == 1, "the log knows all the same"


def test_doorbell_errors_are_reported_and_logged() -> None:
    host = Host()
    first, second = park(host), park(host)
    host.controller.doorbell_error(7, no_queue=True)
    assert reported(host) == [(first, 0, BAD_REGISTER)]
    host.controller.doorbell_error(7, no_queue=False)
    assert reported(host) == [], "one event of a type until its log is read"
    log = host.log(0x01, 128)
    assert log[8:12] == bytes([7, 0, 0xFF, 0xFF])  # SQID 7, no command
    host.controller.doorbell_error(7, no_queue=False)
    assert reported(host) == [(second, 0, BAD_VALUE)]


def test_a_flood_of_errors_stays_small() -> None:
    host = Host()
    for _ in range(10_000):
        host.controller.doorbell_error(1, no_queue=True)
        host.controller.doorbell_error(1, no_queue=False)
    dump = host.controller.dump()
    assert len(dump["errors"]["errors"]) == 64
    assert len(dump["events"]["waiting"]) == 2
    assert at_once(host) == BAD_REGISTER


def test_temperature_events() -> None:
    host = Host()
    first, second = park(host), park(host)
    assert host.code(0x09, cdw={10: 0x04, 11: 300}) == 0
    assert reported(host) == [], "not asked for"
    want_notices(host, bits=1 << 1)
    assert reported(host) == [(first, 0, TEMPERATURE)]
    host.log(0x02, 512)
    assert host.code(0x09, cdw={10: 0x04, 11: 343}) == 0
    assert reported(host) == []
    assert host.code(0x09, cdw={10: 0x04, 11: 310 | 1 << 20}) == 0
    assert reported(host) == [(second, 0, TEMPERATURE)]


def test_types_are_masked_one_by_one() -> None:
    host = Host()
    want_notices(host)
    park(host), park(host)
    host.controller.namespace_changed(1)
    host.controller.doorbell_error(7, no_queue=True)
    assert [dw0 for _, _, dw0 in reported(host)] == [NOTICE, BAD_REGISTER]


def test_a_reset_forgets_requests_events_and_masks() -> None:
    host = Host()
    want_notices(host)
    host.controller.namespace_changed(1)
    park_none = at_once(host)
    assert park_none == NOTICE
    park(host)
    host.controller.doorbell_error(1, no_queue=True)
    reported(host)
    host.write32(0x14, 0)
    host.write32(0x14, CC_ENABLE)
    assert host.controller.parked_tokens == []
    tokens = [park(host) for _ in range(4)]
    want_notices(host)
    host.controller.namespace_changed(3)
    assert reported(host) == [(tokens[0], 0, NOTICE)]
    assert host.log(0x04, 8) == bytes([3, 0, 0, 0, 0, 0, 0, 0])
