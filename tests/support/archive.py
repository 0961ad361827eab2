"""A Debian archive for tests: packages made from a few lines, served over HTTP on the loopback interface."""

from __future__ import annotations

import contextlib
import hashlib
import io
import tarfile
import threading
import urllib.parse
from collections import Counter
from collections.abc import Iterator, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from emu.debs import Deb

Member = tuple[tarfile.TarInfo, bytes]


def file(name: str, body: bytes = b"", mode: int = 0o644) -> Member:
    info = tarfile.TarInfo(name)
    info.mode, info.size = mode, len(body)
    return info, body


def special(name: str, kind: bytes, target: str = "") -> Member:
    """A directory, link or device; ``kind`` is one of tarfile's types."""
    info = tarfile.TarInfo(name)
    info.type, info.linkname, info.mode = kind, target, 0o755
    return info, b""


def deb_bytes(members: Sequence[Member]) -> bytes:
    """A .deb (deb(5)) with ``members`` as its data.tar.xz."""
    data = io.BytesIO()
    with tarfile.open(fileobj=data, mode="w:xz", preset=0) as archive:
        for info, body in members:
            archive.addfile(info, io.BytesIO(body))
    out = b"!<arch>\n"
    for name, body in (("debian-binary", b"2.0\n"), ("control.tar", b"x"), ("data.tar.xz", data.getvalue())):
        out += b"%-16s%-12d%-6d%-6d%-8s%-10d`\n" % (name.encode(), 0, 0, 0, b"100644", len(body))
        out += body + b"\n" * (len(body) % 2)
    return out


class Archive:
    """What the server has (``files``: path -> bytes) and what it was asked for (``asked``)."""

    def __init__(self) -> None:
        self.files: dict[str, bytes] = {}
        self.asked: Counter[str] = Counter()
        self.cut: set[str] = set()  # of these only half is sent
        self.go = threading.Event()
        self.go.set()

    def add(self, package: str, members: Sequence[Member], version: str = "1.0-1") -> Deb:
        """Make a package, put it on the server, and say how a lock names it."""
        body = deb_bytes(members)
        filename = f"pool/main/{package}_{version}_all.deb"
        self.files[f"/debian/{filename}"] = body
        return Deb(package, version, hashlib.sha256(body).hexdigest(), len(body), filename)


@contextlib.contextmanager
def serve(archive: Archive) -> Iterator[str]:
    """The archive's base URL, for as long as the context lasts."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            path = urllib.parse.unquote(self.path)
            archive.asked[path] += 1
            archive.go.wait(30)
            body = archive.files.get(path)
            if body is None:
                self.send_error(404)
                return
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body[: len(body) // 2] if path in archive.cut else body)

        def log_message(self, format: str, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/debian"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
