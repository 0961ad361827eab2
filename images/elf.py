"""The little of ELF64 that the image builder needs: what an object asks for, and how to take a request away.

Use: ``needed(data)`` for the closure of libraries, ``section(data, ".modinfo")`` for kernel modules,
``detach(data, libraries)`` to make a program start without libraries of features that nobody uses here.

Limits: little-endian ELF64 only. Errors: ``ValueError`` for anything else.
Source: System V ABI (gABI 4.1, chapters 4 and 5), Linux Standard Base 5 (symbol versions), glibc ``elf.h``.
"""

from __future__ import annotations

import struct
from collections.abc import Collection

MAGIC = b"\x7fELF\x02\x01"

PT_LOAD, PT_DYNAMIC, PT_INTERP = 1, 2, 3
DT_NULL, DT_NEEDED, DT_STRTAB, DT_SYMTAB, DT_DEBUG = 0, 1, 5, 6, 21
DT_VERSYM, DT_VERNEED, DT_VERNEEDNUM = 0x6FFFFFF0, 0x6FFFFFFE, 0x6FFFFFFF

STB_GLOBAL, STB_WEAK = 1, 2
VER_NDX_GLOBAL = 1
VERSYM_HIDDEN = 0x8000

_DYN = struct.Struct("<qQ")  # d_tag, d_un
_VERNEED = struct.Struct("<HHIII")  # vn_version, vn_cnt, vn_file, vn_aux, vn_next
_VERNAUX = struct.Struct("<IHHII")  # vna_hash, vna_flags, vna_other, vna_name, vna_next
_SYM = struct.Struct("<IBBHQQ")  # st_name, st_info, st_other, st_shndx, st_value, st_size


def is_elf(data: bytes) -> bool:
    """Whether ``data`` starts as a little-endian ELF64 file does."""
    return data[:6] == MAGIC


class _Dynamic:
    """The dynamic section of one object and the tables it points at."""

    def __init__(self, data: bytes) -> None:
        if not is_elf(data):
            raise ValueError("not a little-endian ELF64 file")
        self.data = data
        e_phoff, e_phentsize, e_phnum = (
            struct.unpack_from("<Q", data, 32)[0],
            *struct.unpack_from("<HH", data, 54),
        )
        self.loads: list[tuple[int, int, int]] = []  # vaddr, offset, filesz
        self.offset = 0
        self.interpreter = ""
        for i in range(e_phnum):
            p_type, _, p_offset, p_vaddr, _, p_filesz = struct.unpack_from("<IIQQQQ", data, e_phoff + i * e_phentsize)
            if p_type == PT_LOAD:
                self.loads.append((p_vaddr, p_offset, p_filesz))
            elif p_type == PT_DYNAMIC:
                self.offset = p_offset
            elif p_type == PT_INTERP:
                self.interpreter = data[p_offset : p_offset + p_filesz].rstrip(b"\0").decode()
        self.entries: list[tuple[int, int]] = []
        if self.offset:
            for tag, value in _DYN.iter_unpack(data[self.offset :][: (len(data) - self.offset) // 16 * 16]):
                if tag == DT_NULL:
                    break
                self.entries.append((tag, value))
        self.tags = dict(self.entries)

    def at(self, vaddr: int) -> int:
        """File offset of the virtual address ``vaddr``."""
        for base, offset, size in self.loads:
            if base <= vaddr < base + size:
                return offset + vaddr - base
        raise ValueError(f"no segment holds {vaddr:#x}")

    def string(self, index: int) -> str:
        start = self.at(self.tags[DT_STRTAB]) + index
        return self.data[start : self.data.index(b"\0", start)].decode()

    def needed(self) -> list[str]:
        return [self.string(value) for tag, value in self.entries if tag == DT_NEEDED]


def needed(data: bytes) -> list[str]:
    """Names of the libraries that the object asks for, in order."""
    return _Dynamic(data).needed()


def interpreter(data: bytes) -> str:
    """Path of the loader that starts the program; empty for a library and for a static program."""
    return _Dynamic(data).interpreter


def section(data: bytes, name: str) -> bytes:
    """Contents of the section ``name``, empty when there is none."""
    if not is_elf(data):
        raise ValueError("not a little-endian ELF64 file")
    e_shoff = struct.unpack_from("<Q", data, 40)[0]
    e_shentsize, e_shnum, e_shstrndx = struct.unpack_from("<HHH", data, 58)
    headers = [struct.unpack_from("<IIQQQQ", data, e_shoff + i * e_shentsize) for i in range(e_shnum)]
    names = headers[e_shstrndx][4]
    for sh_name, _, _, _, sh_offset, sh_size in headers:
        start = names + sh_name
        if data[start : data.index(b"\0", start)] == name.encode():
            return data[sh_offset : sh_offset + sh_size]
    return b""


def detach(data: bytes, libraries: Collection[str]) -> bytes:
    """The same object, no longer asking for ``libraries``.

    Their DT_NEEDED entries and version requirements go, and every symbol that only they could define becomes
    a weak one, which the loader leaves at zero: the object starts, and a call into such a library is a
    SIGSEGV. For features that nobody uses in the guest (fio's ceph, gluster, nfs, rdma engines).

    Errors: ``ValueError`` when a library of the list is not asked for.
    """
    dynamic = _Dynamic(data)
    missing = sorted(set(libraries) - set(dynamic.needed()))
    if missing:
        raise ValueError(f"not asked for: {', '.join(missing)}")
    out = bytearray(data)

    kept = [(t, v) for t, v in dynamic.entries if t != DT_NEEDED or dynamic.string(v) not in libraries]
    dropped, requirements = _unlink_requirements(out, dynamic, libraries)
    for i in range(len(dynamic.entries) + 1):
        tag, value = kept[i] if i < len(kept) else (DT_NULL, 0)
        if tag == DT_VERNEED:
            value = requirements[0]
        elif tag == DT_VERNEEDNUM:
            value = requirements[1]
        _DYN.pack_into(out, dynamic.offset + 16 * i, tag, value)

    # The symbol table carries no length of its own; the version table has one entry per symbol and the
    # string table follows the symbols in every linker's output.
    symbols, versions = dynamic.at(dynamic.tags[DT_SYMTAB]), dynamic.at(dynamic.tags[DT_VERSYM])
    count = (dynamic.at(dynamic.tags[DT_STRTAB]) - symbols) // _SYM.size
    for i in range(1, count):
        name, info, other, shndx, value, size = _SYM.unpack_from(data, symbols + i * _SYM.size)
        version = struct.unpack_from("<H", data, versions + 2 * i)[0] & ~VERSYM_HIDDEN
        if shndx == 0 and info >> 4 == STB_GLOBAL and (version in dropped or version <= VER_NDX_GLOBAL):
            _SYM.pack_into(out, symbols + i * _SYM.size, name, STB_WEAK << 4 | info & 15, other, shndx, value, size)
            struct.pack_into("<H", out, versions + 2 * i, VER_NDX_GLOBAL)
    return bytes(out)


def _unlink_requirements(
    out: bytearray, dynamic: _Dynamic, libraries: Collection[str]
) -> tuple[set[int], tuple[int, int]]:
    """Take the libraries out of the list of version requirements.

    Returns the version indexes that went and (address of the first entry, number of entries) of what stays.
    """
    dropped: set[int] = set()
    kept: list[int] = []
    address = dynamic.tags[DT_VERNEED]
    for _ in range(dynamic.tags[DT_VERNEEDNUM]):
        _, aux_count, file, aux, following = _VERNEED.unpack_from(out, dynamic.at(address))
        if dynamic.string(file) in libraries:
            aux_address = address + aux
            for _ in range(aux_count):
                _, _, other, _, step = _VERNAUX.unpack_from(out, dynamic.at(aux_address))
                dropped.add(other & ~VERSYM_HIDDEN)
                aux_address += step
        else:
            kept.append(address)
        address += following
    for here, after in zip(kept, [*kept[1:], 0]):
        fields = _VERNEED.unpack_from(out, dynamic.at(here))
        _VERNEED.pack_into(out, dynamic.at(here), *fields[:4], after - here if after else 0)
    return dropped, (kept[0], len(kept))
