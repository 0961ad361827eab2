"""Debian packages as files: pinned by version and sha256, fetched from a mirror, unpacked without root.

    lock = read_lock(Path("images/qemu.lock"))
    fetch(lock.debs, progress)                    # into cache/debs, every byte checked against the lock
    for deb in lock.debs: unpack(deb, prefix)     # no dpkg, no maintainer script, nothing outside prefix

A lock is made by ``resolve``, which is the only part that needs apt: it runs apt-get with a state directory
of its own, so neither root nor the host's package lists are touched, and apt checks the archive's signatures
with the host's Debian keyring. Afterwards the digests in the lock are what is trusted.

The mirror is DPU_EMU_MIRROR (the base URL of a Debian archive), else the archive that the host's apt uses.
Files come through apt's downloader where the host has it, so that apt's proxies, credentials and certificates
apply; elsewhere through urllib, which reads the usual proxy variables.

Errors: EmuError, one line and its fix; MirrorLacks when the mirror does not have a file (any more).
Source: deb(5), sources.list(5), apt-get(8); Debian Policy 10.5 (symbolic links).
"""

from __future__ import annotations

import hashlib
import http.client
import io
import json
import lzma
import os
import re
import shutil
import subprocess
import tarfile
import tempfile
import urllib.error
import urllib.parse
import urllib.request
import zlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from pathlib import Path, PurePosixPath
from typing import IO, Any

import zstandard

from dpu.errors import EmuError
from emu import paths
from emu.progress import Progress

ARCHITECTURE = "amd64"
APT_HELPER = Path("/usr/lib/apt/apt-helper")
KEYRING = Path("/usr/share/keyrings/debian-archive-keyring.gpg")
APT_SOURCES = Path("/etc/apt")
_PARALLEL = 8
_TIMEOUT_S = 30
_CHUNK = 1 << 18


class MirrorLacks(EmuError):
    """The mirror answered that it does not have these packages' files."""

    def __init__(self, debs: Sequence[Deb], mirror: str) -> None:
        names = ", ".join(f"{deb.package} {deb.version}" for deb in debs[:3])
        more = f" and {len(debs) - 3} more" if len(debs) > 3 else ""
        super().__init__(
            f"the mirror {mirror} has no {names}{more}",
            "set DPU_EMU_MIRROR to a mirror or snapshot that has it",
        )
        self.debs = tuple(debs)


@dataclass(frozen=True, order=True)
class Deb:
    """One package file; ``size`` in bytes, ``filename`` its path below the mirror."""

    package: str
    version: str
    sha256: str
    size: int
    filename: str

    def __post_init__(self) -> None:
        if not re.fullmatch(r"[0-9a-f]{64}", self.sha256):
            raise EmuError(f"{self.package}: {self.sha256!r} is no sha256")
        if not _is_below(self.filename):
            raise EmuError(f"{self.package}: {self.filename!r} is no path below a mirror")


@dataclass(frozen=True)
class Lock:
    """The packages that were asked for, the suites they came from, and every file that this needs."""

    packages: tuple[str, ...]
    suites: tuple[str, ...]
    debs: tuple[Deb, ...]

    @property
    def digest(self) -> str:
        """16 hexadecimal digits that stand for the contents of all packages."""
        return digest(self.debs)


def digest(debs: Sequence[Deb]) -> str:
    """16 hexadecimal digits over the contents of ``debs``, in whatever order they are given."""
    lines = "".join(sorted(f"{deb.sha256}\n" for deb in debs))
    return hashlib.sha256(lines.encode()).hexdigest()[:16]


# Lock files


def read_lock(path: Path) -> Lock:
    """The lock in ``path``."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        debs = tuple(Deb(**deb) for deb in found["debs"])
        return Lock(tuple(found["packages"]), tuple(found["suites"]), debs)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise EmuError(f"cannot read the lock file {path}: {error}") from error


def write_lock(path: Path, lock: Lock) -> None:
    """Write ``lock`` as JSON with one line per package, so that a change shows as changed lines."""
    rows = ",\n".join(f"    {json.dumps(asdict(deb))}" for deb in sorted(lock.debs))
    head = f'{{\n  "packages": {json.dumps(lock.packages)},\n  "suites": {json.dumps(lock.suites)},\n'
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.write_text(f'{head}  "debs": [\n{rows}\n  ]\n}}\n', encoding="utf-8")
    temporary.replace(path)


# The mirror


def mirror() -> str:
    """The base URL of the Debian archive to use, without a slash at its end."""
    if own := os.environ.get("DPU_EMU_MIRROR"):
        if not own.startswith(("http://", "https://", "file:")):
            raise EmuError(f"DPU_EMU_MIRROR is {own!r}", "give an http, https or file URL of a Debian archive")
        return own.rstrip("/")
    for uri, suites, components in _apt_sources(APT_SOURCES):
        usable = uri.startswith(("http://", "https://", "file:")) and "main" in components
        if usable and any(suite in _DEBIAN_SUITES for suite in suites):
            return uri.rstrip("/")
    raise EmuError(
        "no Debian archive is known: the host's apt configuration names none",
        "set DPU_EMU_MIRROR to the base URL of a Debian mirror",
    )


_DEBIAN_SUITES = {
    *("stable", "oldstable", "testing", "unstable", "sid"),
    *("bullseye", "bookworm", "trixie", "forky", "duke"),
}


def _apt_sources(directory: Path) -> Iterator[tuple[str, list[str], list[str]]]:
    """(URI, suites, components) of every enabled binary source below an /etc/apt."""
    files = [directory / "sources.list", *sorted((directory / "sources.list.d").glob("*"))]
    for path in files:
        try:
            text = path.read_text(encoding="utf-8", errors="replace")
        except OSError:
            continue
        if path.suffix == ".list":
            yield from _one_line_sources(text)
        elif path.suffix == ".sources":
            yield from _deb822_sources(text)


def _one_line_sources(text: str) -> Iterator[tuple[str, list[str], list[str]]]:
    for line in text.splitlines():
        match = re.match(r"\s*deb\s+(?:\[[^\]]*\]\s*)?(\S+)\s+(\S+)\s+([^#]+)", line)
        if match:
            yield match[1], [match[2]], match[3].split()


def _deb822_sources(text: str) -> Iterator[tuple[str, list[str], list[str]]]:
    without_comments = "\n".join(line for line in text.splitlines() if not line.startswith("#"))
    for stanza in re.split(r"\n\s*\n", without_comments):
        fields: dict[str, list[str]] = {}
        for name, value in re.findall(r"^([\w-]+):((?:.*\n?)(?:[ \t]+.*\n?)*)", stanza, re.MULTILINE):
            fields[name.lower()] = value.split()
        if "deb" not in fields.get("types", []) or fields.get("enabled", ["yes"])[0].lower() == "no":
            continue
        for uri in fields.get("uris", []):
            yield uri, fields.get("suites", []), fields.get("components", [])


# Fetching


def deb_path(deb: Deb) -> Path:
    """Where ``deb`` is in the cache, present or not."""
    return paths.cache_dir("debs") / f"{deb.sha256}.deb"


def fetch(debs: Sequence[Deb], progress: Progress) -> list[Path]:
    """Bring ``debs`` into the cache; the network is used only for those that are not there yet."""
    cache = paths.cache_dir("debs")
    if _missing(debs):
        with paths.locked(cache):  # a second process finds what the first one fetched
            missing = _missing(debs)
            if missing:
                with tempfile.TemporaryDirectory(prefix="fetch-", dir=cache) as directory:
                    _download(missing, Path(directory), progress)
    return [deb_path(deb) for deb in debs]


def _missing(debs: Sequence[Deb]) -> list[Deb]:
    """Those not in the cache. A file gets its name there only after its digest was found right."""
    return [deb for deb in dict.fromkeys(debs) if not deb_path(deb).exists()]


def _download(debs: Sequence[Deb], directory: Path, progress: Progress) -> None:
    base = mirror()
    size = sum(deb.size for deb in debs)
    progress.step(f"Fetching {len(debs)} packages ({size / 1e6:.0f} MB) from {base}", size)
    targets = {f"{base}/{urllib.parse.quote(deb.filename)}": deb for deb in debs}
    download = _download_apt if _by_apt(base) else _download_urllib
    failed = download(targets, directory, progress)
    gone = []
    for deb in debs:
        part = directory / deb.sha256
        if deb.sha256 in failed:
            if _LACKS.search(failed[deb.sha256]):
                gone.append(deb)
            continue
        found = hashlib.file_digest(part.open("rb"), "sha256").hexdigest() if part.exists() else "nothing"
        if found != deb.sha256:
            failed[deb.sha256] = f"its sha256 is {found}, not {deb.sha256}"
            continue
        part.replace(deb_path(deb))
    # what was right is in the cache by now: a second try asks for the rest only
    for deb in debs:
        if deb.sha256 in failed and deb not in gone:
            raise EmuError(
                f"cannot fetch {deb.filename} from {base}: {failed[deb.sha256]}",
                "check network and proxy, or set DPU_EMU_MIRROR to another mirror",
            )
    if gone:
        raise MirrorLacks(gone, base)


def try_mirror(suite: str) -> str:
    """Ask the mirror for ``suite``'s release file, by the way that packages come: what goes wrong, or ""."""
    url = f"{mirror()}/dists/{suite}/InRelease"
    with tempfile.TemporaryDirectory(prefix="dpu-emu-") as directory:
        target = Path(directory) / "InRelease"
        try:
            if not _by_apt(url):
                _download_one(url, target)
                return ""
            done = subprocess.run(
                [*_apt_helper(), "download-file", url, str(target)],
                capture_output=True,
                text=True,
                env=_c_locale(),
                stdin=subprocess.DEVNULL,
            )
        except (OSError, http.client.HTTPException) as error:
            return str(error) or repr(error)
    reasons = _FAILED.findall(done.stderr)
    return reasons[0][1] if reasons else ""


def _by_apt(url: str) -> bool:
    return APT_HELPER.exists() and not url.startswith("file:")  # of those apt makes a mere symbolic link


def _apt_helper() -> list[str]:
    command = [str(APT_HELPER), "-o", "APT::Sandbox::User=root", "-o", "Acquire::Retries=1"]
    return [*command, *(f"-oAcquire::{scheme}::Timeout={_TIMEOUT_S}" for scheme in ("http", "https"))]


_FAILED = re.compile(r"^E: Failed to fetch (\S+)\s+(.*)$", re.MULTILINE)


# as HTTP (404, 410) and file URLs say it; a proxy's 403 is another matter
_LACKS = re.compile(r"^(HTTP Error )?(404|410)\b|^File not found|No such file")


def _download_apt(targets: dict[str, Deb], directory: Path, progress: Progress) -> dict[str, str]:
    """Fetch by apt's downloader; returns {sha256: what went wrong}."""
    command = [*_apt_helper(), "download-file"]
    for url, deb in targets.items():
        command += [url, str(directory / deb.sha256), f"SHA256:{deb.sha256}"]
    errors = directory / "errors"
    with errors.open("wb") as stderr:
        process = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=stderr,
            stdin=subprocess.DEVNULL,
            text=True,
            env=_c_locale(),
        )
        try:
            assert process.stdout is not None
            for line in process.stdout:
                match = re.match(r"Get:\d+ (\S+)", line)
                if match and match[1] in targets:
                    progress.advance(targets[match[1]].size)
            process.wait()
        finally:
            process.kill()
            process.wait()
    failed = {}
    for url, reason in _FAILED.findall(errors.read_text()):
        if url in targets:
            failed[targets[url].sha256] = reason.strip()
    return failed


def _download_urllib(targets: dict[str, Deb], directory: Path, progress: Progress) -> dict[str, str]:
    """Fetch without apt; returns {sha256: what went wrong}."""
    failed = {}
    with ThreadPoolExecutor(_PARALLEL) as pool:
        jobs = {pool.submit(_download_one, url, directory / deb.sha256): deb for url, deb in targets.items()}
        for job in as_completed(jobs):
            progress.advance(jobs[job].size)
            # HTTPException (a cut-off chunk, a bad status line) is no OSError
            error = job.exception()
            if error is not None:
                failed[jobs[job].sha256] = str(error) or repr(error)
    return failed


def _download_one(url: str, target: Path) -> None:
    with urllib.request.urlopen(url, timeout=_TIMEOUT_S) as response, target.open("wb") as out:
        shutil.copyfileobj(response, out, _CHUNK)


def _c_locale() -> dict[str, str]:
    return {**os.environ, "LC_ALL": "C", "LANGUAGE": ""}


# Unpacking


def members(deb: Deb) -> Iterator[tuple[tarfile.TarInfo, bytes]]:
    """Every member of the (fetched) package's data archive with its contents, in the archive's order.

    Names are relative, without "./" in front; the root directory is left out. A hard link (``islnk()``) has
    no contents of its own: ``linkname`` is the member that has. Names and hard links that lead out of the
    package are refused.
    """
    path = deb_path(deb)
    try:
        with _data_archive(path) as stream, tarfile.open(fileobj=stream, mode="r|") as archive:
            for info in archive:
                info.name = info.name.removeprefix("./").rstrip("/")
                if info.name in ("", "."):
                    continue
                if info.islnk():
                    info.linkname = info.linkname.removeprefix("./")
                for name in (info.name, info.linkname if info.islnk() else info.name):
                    if not _is_below(name):
                        raise EmuError(f"{deb.package}: member {name!r} leads out of the package; not unpacked")
                body = archive.extractfile(info) if info.isreg() else None
                yield info, body.read() if body else b""
    except (OSError, tarfile.TarError, lzma.LZMAError, zstandard.ZstdError, EOFError, zlib.error) as error:
        raise EmuError(
            f"cannot read the package {deb.package} ({path}): {error}", "delete that file and try again"
        ) from error


def _data_archive(path: Path) -> IO[bytes]:
    """The uncompressed data.tar of a .deb (deb(5): an ar archive with debian-binary, control and data)."""
    with path.open("rb") as file:
        if file.read(8) != b"!<arch>\n":
            raise tarfile.ReadError("no ar archive")
        while len(header := file.read(60)) == 60:
            name = header[:16].decode("ascii", "replace").rstrip().rstrip("/")
            try:
                size = int(header[48:58])
            except ValueError as error:
                raise tarfile.ReadError("damaged ar archive") from error
            if not name.startswith("data.tar"):
                file.seek(size + size % 2, io.SEEK_CUR)
                continue
            return _decompressed(name, io.BytesIO(file.read(size)))
    raise tarfile.ReadError("no data.tar in it")


def _decompressed(name: str, raw: io.BytesIO) -> IO[bytes]:
    if name == "data.tar.xz":
        return lzma.open(raw)
    if name == "data.tar.zst":
        return io.BufferedReader(zstandard.ZstdDecompressor().stream_reader(raw))
    if name == "data.tar":
        return raw
    raise tarfile.ReadError(f"unknown member {name}")


def unpack(deb: Deb, into: Path, exclude: Callable[[str], bool] | None = None) -> None:
    """Unpack the (fetched) ``deb`` below the directory ``into``, leaving out members that ``exclude(name)``.

    Owners, times and set-id bits are not kept. An absolute symbolic link is made relative to ``into``, as
    ``into`` is the root that the package means; one that leads out of ``into`` is refused, and nothing is
    ever written through a symbolic link that leads out.
    """
    try:
        into.mkdir(parents=True, exist_ok=True)
        root = into.resolve()
        for info, body in members(deb):
            if exclude is None or not exclude(info.name):
                _place(info, body, root, deb)
    except OSError as error:
        raise EmuError(f"cannot unpack {deb.package} into {into}: {error.strerror}") from error


def _place(info: tarfile.TarInfo, body: bytes, root: Path, deb: Deb) -> None:
    target = root / info.name
    _refuse_outside(root, target.parent, deb)
    target.parent.mkdir(parents=True, exist_ok=True)
    if info.isdir():
        # a directory in one package may be a symbolic link from another (usr-merge): keep it
        _refuse_outside(root, target, deb)
        target.mkdir(mode=0o755, exist_ok=True)
        return
    target.unlink(missing_ok=True)
    if info.isreg():
        _write(target, body, 0o755 if info.mode & 0o111 else 0o644)
    elif info.islnk():
        source = root / info.linkname
        _refuse_outside(root, source.parent, deb)
        target.hardlink_to(source)
    elif info.issym():
        link = _relative_link(info)
        _refuse_outside(root, target.parent / link, deb)
        target.symlink_to(link)
    else:
        raise EmuError(f"{deb.package}: {info.name} is a device or pipe; not unpacked")


def _write(target: Path, body: bytes, mode: int) -> None:
    fd = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, mode)
    with os.fdopen(fd, "wb") as file:
        file.write(body)


def _relative_link(info: tarfile.TarInfo) -> str:
    """A symbolic link's target as seen from the link; an absolute one starts at the package's root."""
    if not info.linkname.startswith("/"):
        return info.linkname
    return os.path.relpath(info.linkname.lstrip("/") or ".", PurePosixPath(info.name).parent)


def _refuse_outside(root: Path, path: Path, deb: Deb) -> None:
    real = path.resolve()
    if real != root and root not in real.parents:
        raise EmuError(f"{deb.package}: {path} leads out of {root}; not unpacked")


def _is_below(name: str) -> bool:
    return bool(name) and not name.startswith("/") and ".." not in name.split("/") and "\0" not in name


# Resolving: how a lock is made

_APT_CONF = """\
#clear APT::Update;
#clear DPkg;
#clear APT::Default-Release;
APT::Architecture "{architecture}";
APT::Architectures {{ "{architecture}"; }};
APT::Get::List-Cleanup "true";
APT::Sandbox::User "{user}";
Acquire::Languages "none";
Acquire::ForceHash "SHA256";
Dir::State "{root}/state";
Dir::State::status "{root}/status";
Dir::Cache "{root}/cache";
Dir::Etc::sourcelist "{root}/sources.list";
Dir::Etc::sourceparts "/dev/null";
Dir::Etc::preferences "/dev/null";
Dir::Etc::preferencesparts "/dev/null";
Dir::Log "{root}/log";
"""


def resolve(
    packages: Sequence[str], suites: Sequence[str], progress: Progress, recommends: bool = False
) -> list[Deb]:
    """What ``packages`` ("name", "name/suite" or "name=version") need on the mirror as of now.

    Everything is counted, libc included, as if nothing was installed. A backports suite, when it is the last
    of ``suites``, is preferred to the others. Needs apt-get and the network.
    """
    apt = shutil.which("apt-get")
    if apt is None:
        raise EmuError("apt-get is not there, and without it no package set can be resolved", "use a Debian host")
    if not KEYRING.exists():
        raise EmuError(
            f"the Debian keyring {KEYRING} is not there, so the archive's signature cannot be checked",
            "apt-get install debian-archive-keyring",
        )
    base = mirror()
    root = paths.cache_dir("apt", hashlib.sha256(f"{base} {suites}".encode()).hexdigest()[:16])
    with paths.locked(root):
        _write_apt_state(root, base, suites)
        progress.step(f"Reading the package lists of {', '.join(suites)} from {base}")
        _run_apt([apt, "-c", str(root / "apt.conf"), "update"], suites)
        progress.step(f"Resolving {', '.join(packages)}")
        command = [apt, "-c", str(root / "apt.conf"), "install", "--print-uris", "-qq", "-y"]
        command.append("--install-recommends" if recommends else "--no-install-recommends")
        if suites[-1].endswith("-backports"):
            command += ["-t", suites[-1]]
        found = _run_apt([*command, *packages], suites)
    debs = [_parse_uri_line(line, base) for line in found.splitlines() if line.startswith("'")]
    if not debs:
        raise EmuError(f"apt-get resolved {', '.join(packages)} to nothing")
    return sorted(debs)


def _write_apt_state(root: Path, base: str, suites: Sequence[str]) -> None:
    for directory in ("state/lists/partial", "cache/archives/partial", "log"):
        (root / directory).mkdir(parents=True, exist_ok=True)
    (root / "status").touch()
    sources = "".join(f"deb [signed-by={KEYRING}] {base} {suite} main\n" for suite in suites)
    (root / "sources.list").write_text(sources)
    # as root, apt would otherwise download as _apt, who cannot enter root's cache directory
    user = "root" if os.geteuid() == 0 else ""
    (root / "apt.conf").write_text(_APT_CONF.format(architecture=ARCHITECTURE, root=root, user=user))


def _run_apt(command: Sequence[str], suites: Sequence[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True, env=_c_locale(), stdin=subprocess.DEVNULL)
    said = done.stderr.strip().splitlines()
    if "NO_PUBKEY" in done.stderr:
        raise EmuError(
            f"the host's Debian keyring does not know the key that signs {', '.join(suites)}",
            "apt-get install debian-archive-keyring (your release's update of it has the newer keys)",
        )
    # "update" ends with 0 also when a list could not be had
    if done.returncode or any(line.startswith(("E:", "W: Failed to fetch")) for line in said):
        worst = next((line for line in said if line.startswith(("E:", "W:"))), f"exit code {done.returncode}")
        raise EmuError(f"apt-get failed: {worst}", "check network, proxy and DPU_EMU_MIRROR")
    return done.stdout


def _parse_uri_line(line: str, base: str) -> Deb:
    """'URL' name_version_architecture.deb size SHA256:digest"""
    match = re.fullmatch(r"'(\S+)' (\S+?)_(\S+)_\w+\.deb (\d+) SHA256:([0-9a-f]{64})", line.strip())
    if not match or not match[1].startswith(f"{base}/"):
        raise EmuError(f"apt-get printed a line that was not understood: {line}")
    filename = urllib.parse.unquote(match[1].removeprefix(f"{base}/"))
    return Deb(match[2], urllib.parse.unquote(match[3]), match[5], int(match[4]), filename)


def origin(debs: Sequence[Deb]) -> list[dict[str, Any]]:
    """Versions and digests of ``debs``, for a report."""
    return [{"package": deb.package, "version": deb.version, "sha256": deb.sha256} for deb in sorted(debs)]
