"""Sizes and durations as people write them: ``"1G"``, ``"20s"``.

Sizes: a whole number of bytes, or a number with B, K, M, G, T (also KiB, MiB, ...), powers of 1024.
Durations: a number with us, ms, s, m or h; a bare number is refused, because its unit would be a guess.
"""

from __future__ import annotations

import re
from typing import Annotated, Any

from pydantic import BeforeValidator

_SIZE_FACTORS = {"": 1, "B": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([BKMGT]?)(?:i?B)?", re.IGNORECASE)
_DURATION_FACTORS_S = {"us": 0.000_001, "ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0}
_DURATION = re.compile(r"(\d+(?:\.\d+)?)\s*(us|ms|s|m|h)")


def parse_size(text: str | int) -> int:
    """``text`` in bytes. ValueError says what a size looks like."""
    if isinstance(text, int) and not isinstance(text, bool):
        size_bytes = text
    else:
        match = _SIZE.fullmatch(text.strip()) if isinstance(text, str) else None
        if match is None:
            raise ValueError(f'{text!r} is not a size; write bytes or a text such as "512M" or "1G"')
        number = float(match[1]) * _SIZE_FACTORS[match[2].upper()]
        size_bytes = int(number)
        if size_bytes != number:
            raise ValueError(f"{text!r} is not a whole number of bytes")
    if size_bytes <= 0:
        raise ValueError(f"a size is greater than zero, not {text!r}")
    return size_bytes


def parse_duration(text: str) -> float:
    """``text`` in seconds. ValueError says what a duration looks like."""
    match = _DURATION.fullmatch(text.strip()) if isinstance(text, str) else None
    if match is None:
        raise ValueError(f'{text!r} is not a duration; write a text such as "20s", "500ms" or "2m"')
    duration_s = float(match[1]) * _DURATION_FACTORS_S[match[2]]
    if duration_s <= 0:
        raise ValueError(f"a duration is greater than zero, not {text!r}")
    return duration_s


def plural(count: int, noun: str) -> str:
    """ "1 pair", "2 pairs"."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def format_size(size_bytes: float) -> str:
    """``size_bytes`` for a person: 1073741824 is "1 GiB", 1536 is "1.5 KiB"."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size_bytes < 1024:
            return f"{size_bytes:.4g} {unit}"
        size_bytes /= 1024
    return f"{size_bytes:.4g} TiB"


def format_value(value: float, unit: str) -> str:
    """A figure of a report for a person; ``unit``: ns, s, B, B/s, 1/s, % or 1."""
    match unit:
        case "ns":
            return format_duration(value * 1e-9) if value > 0 else f"{value:g}"
        case "s":
            return format_duration(value)
        case "B":
            return format_size(value)
        case "B/s":
            return f"{format_size(value)}/s"
        case "1/s":
            return f"{value:,.0f}"
        case "%":
            return f"{value:.1f} %"
        case _:
            return f"{value:,g}"


def format_duration(duration_s: float) -> str:
    """``duration_s`` for a person: 0.0000153 is "15.3 us", 75 is "75 s"."""
    for factor, unit in ((1e-6, "ns"), (1e-3, "us"), (1.0, "ms")):
        if duration_s < factor:
            return f"{duration_s / factor * 1000:.3g} {unit}"
    return f"{duration_s:.4g} s"


def _size(value: Any) -> int:
    return parse_size(value)


def _duration(value: Any) -> float:
    return parse_duration(value)


Size = Annotated[int, BeforeValidator(_size)]
DurationSeconds = Annotated[float, BeforeValidator(_duration)]
