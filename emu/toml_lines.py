"""Which line of a TOML document a key stands on.

:mod:`tomllib` gives values without positions, and an error message without a line is half a message.
The document must have passed tomllib: nothing is checked here, keys and brackets are only followed.
"""

from __future__ import annotations

from collections.abc import Mapping

Path = tuple[str | int, ...]


def key_lines(text: str) -> dict[Path, int]:
    """Line (1-based) of every key, table and array element of ``text``.

    A path is keys and array indexes from the top: ``("workload", 0, "type")``.
    """
    return _Scanner(text).scan()


def line_of(lines: Mapping[Path, int], path: Path) -> int:
    """Line of ``path`` or of the nearest thing around it (1 for the document itself)."""
    while path and path not in lines:
        path = path[:-1]
    return lines.get(path, 1)


class _Scanner:
    def __init__(self, text: str) -> None:
        self.text = text + "\n"
        self.at = 0
        self.lines: dict[Path, int] = {}
        self.array_lengths: dict[Path, int] = {}  # of [[arrays of tables]]

    def scan(self) -> dict[Path, int]:
        table: Path = ()
        while self._skip_blank():
            if self._peek() == "[":
                table = self._header()
            else:
                self._pair(table)
        return self.lines

    def _peek(self) -> str:
        return self.text[self.at : self.at + 1]

    def _mark(self, path: Path) -> None:
        self.lines.setdefault(path, self.text.count("\n", 0, self.at) + 1)

    def _skip_blank(self, also: str = "") -> bool:
        """Skips white space, comments and the characters of ``also``. False at the end of the text."""
        while self.at < len(self.text):
            if self._peek() == "#":
                self.at = self.text.index("\n", self.at)
            elif self._peek() in " \t\r\n" + also:
                self.at += 1
            else:
                return True
        return False

    def _header(self) -> Path:
        """``[a.b]`` or ``[[a.b]]``; the path has the index of the array's newest element."""
        start = self.at
        is_array = self.text.startswith("[[", self.at)
        self.at += 2 if is_array else 1
        keys = self._keys("]")
        self.at += 2 if is_array else 1
        end, self.at = self.at, start
        path: Path = ()
        for position, key in enumerate(keys):
            path += (key,)
            self._mark(path)
            if is_array and position == len(keys) - 1:
                self.array_lengths[path] = self.array_lengths.get(path, 0) + 1
            if path in self.array_lengths:
                path += (self.array_lengths[path] - 1,)
            self._mark(path)
        self.at = end
        return path

    def _keys(self, end: str) -> list[str]:
        """A dotted key up to ``end``, which stays unread."""
        keys: list[str] = []
        while self._skip_blank(".") and self._peek() != end:
            if self._peek() in "\"'":
                keys.append(self._string())
            else:
                start = self.at
                while self._peek().isalnum() or self._peek() in "-_":
                    self.at += 1
                keys.append(self.text[start : self.at])
        return keys

    def _pair(self, table: Path) -> None:
        start = self.at
        path = table + tuple(self._keys("="))
        end, self.at = self.at, start
        for depth in range(len(table) + 1, len(path) + 1):
            self._mark(path[:depth])
        self.at = end + 1
        self._value(path)

    def _value(self, path: Path) -> None:
        self._skip_blank()
        if self._peek() == "[":
            self.at += 1
            index = 0
            while self._skip_blank(",") and self._peek() != "]":
                self._mark((*path, index))
                self._value((*path, index))
                index += 1
            self.at += 1
        elif self._peek() == "{":
            self.at += 1
            while self._skip_blank(",") and self._peek() != "}":
                self._pair(path)
            self.at += 1
        elif self._peek() in "\"'":
            self._string()
        else:
            while self._peek() not in ",]}#\n":
                self.at += 1

    def _string(self) -> str:
        """Skips one string of any of the four kinds; returns what stands between its quotes."""
        quote = self._peek()
        delimiter = quote * 3 if self.text.startswith(quote * 3, self.at) else quote
        start = self.at = self.at + len(delimiter)
        while not self.text.startswith(delimiter, self.at):
            self.at += 2 if quote == '"' and self._peek() == "\\" else 1
        content = self.text[start : self.at]
        self.at += len(delimiter)
        if len(delimiter) == 3:  # up to two quotes may stand before the closing three
            while self._peek() == quote:
                self.at += 1
        return content
