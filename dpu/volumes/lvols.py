"""The groups of a target and their volumes, by SPDK's bdev_lvol calls: a part of dpu.target.

Use: ``target.lvols``; its async methods stand behind the RPCs. A group is in the target's stored configuration by the
names of its back ends and the path of its database; its volumes are in that database only, and in ``target.bdevs``.
A group is found again (SPDK: examined) when the last of its back ends has been made (``examine``).

A group on files has its database beside the first of them, FILE.lvs; one on block devices where ``metadata_filename``
says; one in memory in the daemon's own directory.

Errors: RpcError with SPDK's codes. A group that cannot be loaded is told in the log, and the rest goes on.
Source: SPDK's lvol module; recorded answers of SPDK v26.05 (tests/conformance/spdk_rpc_vectors.json).
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import os
import stat
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from dpu.backends import Backend, FileBackend, MemoryBackend, os_error
from dpu.killpoint import killpoint
from dpu.layout import BACKINGS, CLUSTER_SHIFTS
from dpu.volumes.data import Files, Label
from dpu.volumes.group import NAME_BYTES_MAX, Group, clusters_of, database_of, refused
from dpu.volumes.store import StoreError, remove
from dpu.volumes.volume import DELETION, Volume

if TYPE_CHECKING:
    from dpu.target import Target

log = logging.getLogger(__name__)

CLUSTER_BYTES = 1 << 20  # unless the call says otherwise
_KEY = "volumes/"


class Lvols:
    """``groups``: by UUID."""

    def __init__(self, target: Target) -> None:
        self._target = target
        self.groups: dict[str, Group] = {}
        self._taken: set[str] = set()  # names of back ends that a group is being made of
        self._waiting: dict[str, dict[int, Backend]] = {}  # back ends of groups of which others are still missing

    # ------------------------------------------------------------------------------------------ stored configuration

    def to_config(self) -> list[dict[str, Any]]:
        return [
            {"uuid": group.uuid, "path": group.path, "bases": [base.name for base in group.bases]}
            for group in self.groups.values()
        ]

    def from_config(self, rows: list[dict[str, Any]], fds: dict[str, int]) -> None:
        """Adopt the groups of a dead worker. ``fds``: what is stashed; ours is taken out of it."""
        for row in rows:
            bases = [self._target.bdevs[name] for name in row["bases"]]
            try:
                group = _opened(Group.adopt, self._target.host, row["path"], bases, fds[_KEY + row["uuid"]])
            except (OSError, StoreError) as error:
                log.error("group %s is lost until its bdevs are made anew: %s", row["uuid"], error)
                continue
            del fds[_KEY + row["uuid"]]
            self._add(group)
        for key in [key for key in fds if key.startswith(_KEY)]:
            os.close(fds.pop(key))
            self._target.host.unstash(key)
        with contextlib.suppress(FileNotFoundError):  # what a dead daemon has left, or a group that is gone
            directory = self._target.host.directory
            ours = {group.path for group in self.groups.values()}
            for name in os.listdir(directory):
                path = os.path.join(directory, name)
                if path.endswith(".lvs") and path not in ours:
                    remove(path)

    async def start(self) -> None:
        """Look after what was adopted."""
        for group in self.groups.values():
            try:
                await group.label()
            except OSError as error:
                log.error("group %s: its labels cannot be written: %s", group.name, error)
            group.start()

    async def commit(self) -> None:
        """The daemon is to end: let nothing that was completed wait for a commit."""
        for group in self.groups.values():
            try:
                await group.commit()
            except OSError as error:
                log.error("group %s: %s", group.name, error)

    def _add(self, group: Group) -> None:
        self.groups[group.uuid] = group
        for volume in group.volumes.values():
            self._target.bdevs[volume.name] = volume

    # ------------------------------------------------------------------------------------------------------- finding

    def find(self, alias: str) -> Volume | None:
        """A volume by ``store/volume``."""
        for group in self.groups.values():
            if (
                alias.startswith(group.name + "/")
                and (volume := group.find(alias[len(group.name) + 1 :])) is not None
            ):
                return volume
        return None

    def group_on(self, base: Backend) -> Group | None:
        """The group that has this back end."""
        return next((group for group in self.groups.values() if any(one is base for one in group.bases)), None)

    def claims(self, backend: Backend) -> bool:
        """Whether a back end is, or is becoming, a part of a group."""
        return backend.name in self._taken or self.group_on(backend) is not None

    def _volume(self, name: str) -> Volume:
        backend = self._target.find_bdev(name)
        if not isinstance(backend, Volume):
            raise os_error(errno.ENODEV)
        return backend

    def _group(self, uuid: str | None, name: str | None) -> Group:
        """By one of the two; -22 for both or none, -19 when there is none such."""
        if (uuid is None) == (name is None):
            raise os_error(errno.EINVAL)
        for group in self.groups.values():
            if name == group.name or (uuid is not None and uuid.lower() == group.uuid):
                return group
        raise os_error(errno.ENODEV)

    # -------------------------------------------------------------------------------------------------------- groups

    async def create_store(
        self,
        *,
        bdev_name: str,
        lvs_name: str,
        cluster_sz: int | None = None,
        clear_method: str = "unmap",
        base_bdevs: Sequence[str] = (),
        metadata_filename: str | None = None,
    ) -> str:
        """``cluster_sz``: bytes, a power of two. ``base_bdevs``: more back ends, one after the other. Its UUID."""
        target = self._target
        found = [target.find_bdev(name) for name in (bdev_name, *base_bdevs)]
        bases = [base for base in found if base is not None]
        if len(bases) < len(found):
            raise os_error(errno.ENODEV)
        if any(target._claimed(base) for base in bases) or any(lvs_name == one.name for one in self.groups.values()):
            raise os_error(errno.EPERM)
        cluster_bytes = cluster_sz if cluster_sz is not None else CLUSTER_BYTES
        problem = _problem(bases, lvs_name, cluster_bytes)
        if problem:
            log.error("bdev_lvol_create_lvstore: %s", problem)
            raise os_error(errno.EINVAL)
        self._taken |= {base.name for base in bases}
        try:
            for base in bases:
                await self._refuse_labelled(base)
            path = metadata_filename or self._path_for(bases[0], lvs_name)
            clear = clear_method != "none"
            group = await asyncio.to_thread(
                _opened, Group.create, target.host, path, lvs_name, bases, cluster_bytes, clear=clear
            )
            await self._install(group)
            killpoint("group_stored")
            try:
                await group.label()
            except OSError:
                await self._remove(group)
                raise
            return group.uuid
        except OSError as error:
            log.error("group %s: %s", lvs_name, error)
            raise os_error(error.errno or errno.EIO) from error
        finally:
            self._taken -= {base.name for base in bases}

    async def _refuse_labelled(self, base: Backend) -> None:
        """-17 when there is a group on a back end already, one that could not be loaded."""
        try:
            label = await asyncio.to_thread(Label.read, Files(), base.fd)
        except OSError:
            label = None  # damaged: nothing is lost
        if label is not None:
            raise os_error(
                errno.EEXIST,
                f"bdev {base.name} belongs to group {label.uuid}, which is not here (the log says why); "
                "to give it up for good, write zeroes to the first 4096 bytes",
            )

    def _path_for(self, base: Backend, name: str) -> str:
        if isinstance(base, FileBackend):
            if stat.S_ISBLK(os.fstat(base.fd).st_mode):
                raise os_error(errno.EINVAL, f"{base.path} is a device; say metadata_filename, a file on a disk")
            return database_of(base)
        directory = self._target.host.directory
        os.makedirs(directory, 0o700, exist_ok=True)
        return os.path.join(directory, f"{base.uuid}.lvs")

    async def _install(self, group: Group) -> None:
        """Store that the group is there."""
        target = self._target
        try:
            async with target._lock:
                target.host.stash(_KEY + group.uuid, group.area.fd)
                try:
                    with target._change():
                        self._add(group)
                except BaseException:
                    target.host.unstash(_KEY + group.uuid)
                    raise
        except BaseException:
            group.release()
            raise
        group.start()
        target._bdev_added.set()

    async def delete_store(self, *, uuid: str | None = None, lvs_name: str | None = None) -> bool:
        group = self._group(uuid, lvs_name)
        with group.closing(DELETION):
            try:
                await asyncio.to_thread(group.erase)
            except OSError as error:
                raise refused(error.errno or errno.EIO) from error
            killpoint("labels_erased")
            await self._remove(group)
        return True

    async def _remove(self, group: Group) -> None:
        async with self._target._lock:
            await self.leave(group)
        await asyncio.to_thread(group.remove)

    async def leave(self, group: Group, gone: Sequence[Backend] = ()) -> None:
        """Take a group and its volumes out of the configuration, with its namespaces and what else is ``gone``.

        The target's lock is held.
        """
        await self._target._remove_bdevs([*group.volumes.values(), *gone], group)
        self._target.host.unstash(_KEY + group.uuid)
        await group.close()

    async def rename_store(self, *, old_name: str, new_name: str) -> bool:
        group = self._group(None, old_name)
        if new_name != old_name:
            if not 0 < len(new_name.encode()) <= NAME_BYTES_MAX:
                raise refused(errno.EINVAL)
            if any(new_name == one.name for one in self.groups.values()):
                raise refused(errno.EEXIST)
            await group.rename_group(new_name)
        return True

    async def grow_store(self, *, uuid: str | None = None, lvs_name: str | None = None) -> bool:
        await self._group(uuid, lvs_name).extend()
        return True

    async def get_stores(self, *, uuid: str | None = None, lvs_name: str | None = None) -> list[dict[str, Any]]:
        named = uuid is not None or lvs_name is not None
        return [group.describe() for group in ([self._group(uuid, lvs_name)] if named else self.groups.values())]

    async def get_lvols(self, *, lvs_uuid: str | None = None, lvs_name: str | None = None) -> list[dict[str, Any]]:
        named = lvs_uuid is not None or lvs_name is not None
        groups = [self._group(lvs_uuid, lvs_name)] if named else self.groups.values()
        return [volume.describe_lvol() for group in groups for volume in group.volumes.values()]

    async def examine(self, base: Backend) -> None:
        """Load the group that a new back end belongs to, if this is the last of its back ends."""
        if not isinstance(base, FileBackend):
            return
        try:
            label = await asyncio.to_thread(Label.read, Files(), base.fd)
            if label is None:
                return
            if label.uuid in self.groups:
                raise StoreError(
                    f"group {label.uuid} is there already: this is a copy of its back end {label.number}"
                )
            waiting = self._waiting.setdefault(label.uuid, {})
            waiting[label.number] = base
            if len(waiting) < label.count:
                missing = label.count - len(waiting)
                log.info("bdev %s: group %s waits for %d more back ends", base.name, label.uuid, missing)
                return
            del self._waiting[label.uuid]
            bases = [waiting[number] for number in range(label.count)]
            first = bases[0]
            path = label.metadata or (database_of(first) if isinstance(first, FileBackend) else "")
            group = await asyncio.to_thread(_opened, Group.load, self._target.host, path, bases)
            if any(group.name == one.name for one in self.groups.values()):
                group.release()
                raise StoreError(
                    f"there is a group {group.name!r} already", "rename that one, and make the bdev anew"
                )
            await self._install(group)
            log.info("group %s: %d volumes found on bdev %s", group.name, len(group.volumes), base.name)
        except (OSError, StoreError) as error:
            log.error("bdev %s: its group of volumes cannot be used: %s", base.name, error)

    def forget(self, base: Backend) -> None:
        """A back end that waited for others of its group is gone."""
        for waiting in self._waiting.values():
            for number in [number for number, one in waiting.items() if one is base]:
                del waiting[number]

    # ------------------------------------------------------------------------------------------------------- volumes

    def store_named(self, name: str) -> Group | None:
        """By name or UUID."""
        return next((group for group in self.groups.values() if name in (group.name, group.uuid)), None)

    def add(self, volume: Volume) -> None:
        """A new volume, or one that is known already."""
        if volume.name not in self._target.bdevs:
            self._added(volume)

    def _added(self, volume: Volume) -> str:
        self._target.bdevs[volume.name] = volume
        self._target._bdev_added.set()
        return volume.name

    async def create(
        self,
        *,
        lvol_name: str,
        size_in_mib: int,
        thin_provision: bool = False,
        uuid: str | None = None,
        lvs_name: str | None = None,
    ) -> str:
        group = self._group(uuid, lvs_name)
        return self._added(await group.create_volume(lvol_name, size_in_mib << 20, thin=thin_provision))

    async def snapshot(self, *, lvol_name: str, snapshot_name: str) -> str:
        volume = self._volume(lvol_name)
        return self._added(await volume.store.snapshot(volume, snapshot_name))

    async def clone(self, *, snapshot_name: str, clone_name: str) -> str:
        volume = self._volume(snapshot_name)
        return self._added(await volume.store.clone(volume, clone_name))

    async def rename(self, *, old_name: str, new_name: str) -> bool:
        volume = self._volume(old_name)
        await volume.store.rename(volume, new_name)
        return True

    async def resize(self, *, name: str, size_in_mib: int) -> bool:
        volume = self._volume(name)
        await volume.store.resize(volume, size_in_mib << 20)
        return True

    async def inflate(self, *, name: str) -> bool:
        volume = self._volume(name)
        await volume.store.inflate(volume)
        return True

    async def decouple_parent(self, *, name: str) -> bool:
        volume = self._volume(name)
        await volume.store.decouple(volume)
        return True

    async def set_read_only(self, *, name: str) -> bool:
        volume = self._volume(name)
        await volume.store.set_read_only(volume)
        return True

    async def delete(self, *, name: str) -> bool:
        """Its namespaces go first; a kill after that leaves the volume."""
        volume, target = self._volume(name), self._target
        with volume.store.deleting(volume):
            async with target._lock:
                await target._remove_users(volume)
            await volume.store.delete(volume)
            del target.bdevs[volume.name]
            target._drop_marks(volume)
            target.iostat.keep(target.bdevs)
        return True


def _problem(bases: Sequence[Backend], name: str, cluster_bytes: int) -> str:
    """Why there can be no such group, or ""."""
    if not 0 < len(name.encode()) <= NAME_BYTES_MAX:
        return f"the name is to have 1 to {NAME_BYTES_MAX} bytes"
    if cluster_bytes not in (1 << shift for shift in CLUSTER_SHIFTS):
        return "cluster_sz is to be a power of two from 4096 to 64 MiB"
    if len({base.name for base in bases}) < len(bases) or len(bases) > BACKINGS:
        return f"up to {BACKINGS} different bdevs"
    for base in bases:
        if not isinstance(base, (FileBackend, MemoryBackend)) or base.readonly:
            return f"bdev {base.name} cannot hold volumes"
        if clusters_of(base, cluster_bytes) < 1:
            return f"bdev {base.name} is shorter than two clusters"
    if len({(isinstance(base, MemoryBackend), base.block_size) for base in bases}) > 1:
        return "all bdevs are to be memory, or none, with blocks of one size"
    return ""


def _opened(make: Any, *arguments: Any, **more: Any) -> Group:
    """In a thread: errors of SQLite as OSError."""
    try:
        group: Group = make(*arguments, **more)
        return group
    except (OSError, StoreError):
        raise
    except Exception as error:
        raise OSError(errno.EIO, str(error)) from error
