"""The kernel of the guest: vmlinux cut out of a bzImage, and the index that modprobe wants.

A vmlinux with a PVH note boots 1.3 s (TCG) sooner than its bzImage: nothing is decompressed in the guest.
Sources: Linux Documentation/arch/x86/boot.rst (setup_sects, payload_offset, payload_length);
modprobe's files as in kmod's depmod.d(5) and busybox modutils.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Mapping

import zstandard

from dpu.errors import EmuError
from images import elf

ZSTD_MAGIC = b"\x28\xb5\x2f\xfd"


def vmlinux(bzimage: bytes) -> bytes:
    """The ELF kernel inside ``bzimage``. Errors: EmuError when it is not a zstd-compressed bzImage."""
    if bzimage[0x202:0x206] != b"HdrS":
        raise EmuError("the kernel package holds no bzImage", "choose an x86-64 kernel package in images/guest.toml")
    setup_sectors = bzimage[0x1F1] or 4
    offset, length = struct.unpack_from("<II", bzimage, 0x248)
    start = (setup_sectors + 1) * 512 + offset
    payload = bzimage[start : start + length]
    if not payload.startswith(ZSTD_MAGIC):
        raise EmuError("the kernel is not compressed with zstd", "use a Debian kernel of 6.12 or later")
    # The payload's last four bytes are its length, behind the zstd frame: a decompressor object stops before.
    data = zstandard.ZstdDecompressor().decompressobj().decompress(payload)
    if not elf.is_elf(data):
        raise EmuError("what the kernel unpacks to is no ELF file", "use a Debian kernel of 6.12 or later")
    return data


def module_name(path: str) -> str:
    """``kernel/drivers/md/dm-mod.ko.xz`` -> ``dm_mod``: modules are known by underscores."""
    return path.rpartition("/")[2].partition(".ko")[0].replace("-", "_")


def module_info(data: bytes) -> dict[str, list[str]]:
    """The ``.modinfo`` section of a module: key -> values, in order."""
    info: dict[str, list[str]] = {}
    for item in elf.section(data, ".modinfo").split(b"\0"):
        if item:
            key, _, value = item.decode("utf-8", "replace").partition("=")
            info.setdefault(key, []).append(value)
    return info


def dependencies(info: Mapping[str, list[str]]) -> list[str]:
    """Names of the modules that must be loaded first; soft ones ("pre:") too."""
    names = [name for value in info.get("depends", []) for name in value.split(",") if name]
    for soft in info.get("softdep", []):
        before = soft.partition("pre:")[2].partition("post:")[0]
        names += [name for name in before.split() if ":" not in name]
    return [name.replace("-", "_") for name in names]


def modprobe_index(modules: Mapping[str, bytes]) -> dict[str, str]:
    """``modules.dep`` and ``modules.alias`` for ``modules`` (path below lib/modules/VERSION -> contents)."""
    paths = {module_name(path): path for path in modules}
    infos = {name: module_info(modules[path]) for name, path in paths.items()}

    def order(name: str, seen: list[str]) -> list[str]:
        for other in dependencies(infos[name]):
            if other in infos and other not in seen:
                order(other, seen)
        seen.append(name)
        return seen

    dep = [
        f"{paths[name]}:{''.join(' ' + paths[n] for n in reversed(order(name, [])[:-1]))}\n" for name in sorted(paths)
    ]
    alias = [f"alias {a} {name}\n" for name in sorted(paths) for a in infos[name].get("alias", [])]
    return {"modules.dep": "".join(dep), "modules.alias": "".join(alias)}


def closure(wanted: Iterable[str], paths: Iterable[str], read: Callable[[str], bytes]) -> dict[str, bytes]:
    """The modules among ``paths`` that ``wanted`` names and those they need, each with what ``read`` gives.

    Errors: EmuError naming a wanted module that is not there. A dependency that is not there is built in.
    """
    known = {module_name(path): path for path in paths}
    chosen: dict[str, bytes] = {}
    todo = [name.replace("-", "_") for name in wanted]
    if missing := [name for name in todo if name not in known]:
        raise EmuError(f"the kernel has no module {missing[0]}", "correct 'modules' in images/guest.toml")
    while todo:
        path = known.get(todo.pop())
        if path is not None and path not in chosen:
            chosen[path] = read(path)
            todo += dependencies(module_info(chosen[path]))
    return chosen
