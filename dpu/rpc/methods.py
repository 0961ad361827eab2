"""The method table: one row per RPC, SPDK's names, parameters and answers.

Use: ``dispatcher(target)``. To add an RPC, add a row.
Parameters of SPDK's that this target cannot follow are taken where they change nothing (``only``), so that
``spdk-rpc``, which sends them with their neutral values, works. ``_hint`` marks those that tune SPDK's own
memory and have no counterpart here; they are taken with any value.
Ours beside SPDK's: ``dpu_get_stats``, ``dpu_upgrade``, ``dpu_trace_*``, ``nvmf_ns_attach_controller`` and its
opposite, ``cache_mode`` of ``bdev_aio_create``, ``base_bdevs`` and ``metadata_filename`` of
``bdev_lvol_create_lvstore``.
Source: SPDK's JSON-RPC documentation; PyPI ``spdk`` 26.9 for what a client sends; recorded answers for the
rest.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Mapping
from importlib import metadata
from typing import Any

from dpu.backends import FileBackend, MemoryBackend, NullBackend, UringBackend
from dpu.errors import EmuError, RpcError
from dpu.faults import NUMBERS as FAULT_NUMBERS
from dpu.iostat import RESET_MODES
from dpu.qos import LIMIT_NAMES
from dpu.rpc.dispatcher import (
    INVALID_PARAMS,
    TIMEOUT_S,
    Dispatcher,
    Method,
    Param,
    Then,
    When,
    boolean,
    hexadecimal,
    i32,
    integer,
    limit,
    nested,
    number,
    one_of,
    only,
    string,
    strings,
    u32,
    u64,
    uuid,
)
from dpu.rpc.logs import FLAGS, LEVELS
from dpu.target import CNTLID_MAX, Target, Transport, invalid
from dpu.trace import ENTRIES, FORMATS
from dpu.upgrade import UPGRADE_S_MAX, probe

# The SPDK release whose dialect this is.
SPDK_MAJOR, SPDK_MINOR = 26, 5

LONG_S = 24 * 3600.0
_STOP_SIGNALS = ("SIGINT", "SIGTERM", "SIGQUIT")


def _name() -> Param:
    return Param("name", string, required=True)


def _neutral(name: str, *values: Any) -> Param:
    """SPDK has it, we do not: taken with a value that changes nothing."""
    return Param(name, only(*values), ignored=True)


def _hint(name: str) -> Param:
    """Tunes memory or timers that SPDK has and we do not: checked as a number, then not used."""
    return Param(name, i32, ignored=True)


_whole = integer(0, 2**62)
_BDEV_NAME = Param("bdev_name", string, required=True)
_LEVEL = Param("level", one_of(*LEVELS), required=True)
_FLAG = Param("flag", one_of(*FLAGS, "all"), required=True)
_TGT_NAME = Param("tgt_name", only("nvmf_tgt"), ignored=True)
_NQN = Param("nqn", string, required=True)
_STORE = (Param("uuid", string), Param("lvs_name", string))
_RENAME = (Param("old_name", string, required=True), Param("new_name", string, required=True))
_ATTACHMENT = (
    _NQN,
    Param("nsid", u32, required=True),
    Param("cntlid", integer(1, CNTLID_MAX), required=True),
    _TGT_NAME,
)
_GEOMETRY = (
    Param("num_blocks", u64, required=True),
    Param("block_size", u32, required=True),
    Param("uuid", uuid),
    _neutral("physical_block_size", 0, 512, 4096),
    _neutral("md_size", 0),
    _neutral("dif_type", 0),
    _neutral("dif_is_head_of_md", False),
    _neutral("dif_pi_format", 0),
)
_ADDRESS = nested(
    Param("trtype", string, required=True),
    Param("traddr", string, required=True),
    Param("trsvcid", string, default=""),
    Param("adrfam", string, ignored=True),
)


def dispatcher(target: Target) -> Dispatcher:
    """What answers requests to ``target``."""

    def state() -> When:
        return When.RUNTIME if target.initialized else When.STARTUP

    return Dispatcher(_method_table(target, state), state, target.strike_call)


def _method_table(target: Target, state: Callable[[], When]) -> dict[str, Method]:
    """The rows, bound to ``target``."""
    table: dict[str, Method] = {}
    lvols = target.lvols

    async def get_methods(current: bool, include_aliases: bool) -> list[str]:
        return [row.name for row in table.values() if not current or state() in row.when]

    async def get_framework_subsystems() -> list[dict[str, Any]]:
        return [{"subsystem": "bdev", "depends_on": []}, {"subsystem": "nvmf", "depends_on": ["bdev"]}]

    async def get_config(name: str, with_batches: bool) -> list[dict[str, Any]]:
        return target.saved(name)

    async def get_reactors() -> dict[str, Any]:
        return {"tick_rate": target.host.clock()[0], "pid": os.getpid(), "reactors": target.host.reactors()}

    async def get_level() -> str:
        return target.logs.level

    async def get_print_level() -> str:
        return target.logs.print_level

    async def set_level(level: str) -> bool:
        return await target.set_logs(level=level)

    async def set_print_level(level: str) -> bool:
        return await target.set_logs(print_level=level)

    async def get_flags() -> dict[str, bool]:
        return {flag: flag in target.logs.flags for flag in FLAGS}

    async def set_flag(flag: str) -> bool:
        return await target.set_logs(flags=target.logs.flags | _flags(flag))

    async def clear_flag(flag: str) -> bool:
        return await target.set_logs(flags=target.logs.flags - _flags(flag))

    async def get_version() -> dict[str, Any]:
        suffix = f"-dpu-emu-{metadata.version('dpu-emu')}"
        return {
            "version": f"SPDK v{SPDK_MAJOR}.{SPDK_MINOR:02}{suffix}",
            "fields": {"major": SPDK_MAJOR, "minor": SPDK_MINOR, "patch": 0, "suffix": suffix},
        }

    async def kill_instance(sig_name: str) -> Then:
        if sig_name not in _STOP_SIGNALS:
            raise invalid(f"spdk_kill_instance takes {', '.join(_STOP_SIGNALS)}, got {sig_name!r}")
        return Then(True, target.host.stop)

    async def upgrade(python: str, path: str) -> Then:
        try:
            other = await probe(python, path)
            await target.host.prepare(other.command, other.environment)
        except EmuError as error:
            raise RpcError(-errno.EINVAL, str(error)) from error
        except OSError as error:
            raise RpcError(-errno.EIO, f"the other code's worker did not come up: {error}") from error
        return Then({"version": other.version, "code": other.code}, target.host.change_over)

    async def get_stats() -> dict[str, Any]:
        return target.host.stats()

    async def get_faults(name: str | None) -> list[dict[str, Any]]:
        return target.get_faults(name)

    async def get_bdevs(name: str | None, timeout: int) -> list[dict[str, Any]]:
        return await target.get_bdevs(name, timeout)

    async def wait_for_examine() -> bool:
        return True  # no bdev is made of another's contents, so none is being examined

    async def get_iostat(names: list[str] | None, per_channel: bool, reset_mode: str) -> dict[str, Any]:
        return target.get_iostat(names, per_channel, reset_mode)

    async def reset_iostat(name: str | None, mode: str) -> bool:
        return target.reset_iostat(name, mode)

    async def delete_null(name: str) -> bool:
        return await target.delete_bdev(name, NullBackend)

    async def delete_memory(name: str) -> bool:
        return await target.delete_bdev(name, MemoryBackend)

    async def delete_file(name: str) -> bool:
        return await target.delete_bdev(name, FileBackend)

    async def create_uring(**parameters: Any) -> str:
        return await target.create_file(**parameters, kind=UringBackend)

    async def delete_uring(name: str) -> bool:
        return await target.delete_bdev(name, UringBackend)

    async def rescan_file(name: str) -> bool:
        return await target.rescan_file(name, FileBackend)

    async def rescan_uring(name: str) -> bool:
        return await target.rescan_file(name, UringBackend)

    async def create_transport(trtype: str, **options: bool) -> bool:
        return await target.create_transport(trtype, Transport(**options))

    async def get_transports(trtype: str | None) -> list[dict[str, Any]]:
        return target.get_transports(trtype)

    async def get_subsystems(nqn: str | None) -> list[dict[str, Any]]:
        return target.get_subsystems(nqn)

    async def get_controllers(nqn: str) -> list[dict[str, Any]]:
        return target.get_controllers(nqn)

    async def add_namespace(nqn: str, namespace: dict[str, Any]) -> int:
        return await target.add_namespace(nqn=nqn, **namespace)

    async def attach_namespace(nqn: str, nsid: int, cntlid: int) -> bool:
        return await target.attach_namespace(nqn, nsid, cntlid, attached=True)

    async def detach_namespace(nqn: str, nsid: int, cntlid: int) -> bool:
        return await target.attach_namespace(nqn, nsid, cntlid, attached=False)

    async def add_listener(nqn: str, listen_address: dict[str, str], **options: bool) -> bool:
        return await target.add_listener(nqn=nqn, **listen_address, options=options)

    async def get_listeners(nqn: str) -> list[dict[str, Any]]:
        return target.get_listeners(nqn)

    async def remove_listener(nqn: str, listen_address: dict[str, str]) -> bool:
        return await target.remove_listener(nqn=nqn, **listen_address)

    rows = [
        Method("spdk_get_version", get_version, when=When.ALWAYS),
        Method(
            "rpc_get_methods",
            get_methods,
            (Param("current", boolean, default=False), Param("include_aliases", boolean, default=False)),
            INVALID_PARAMS,
            when=When.ALWAYS,
        ),
        Method(
            "spdk_kill_instance",
            kill_instance,
            (Param("sig_name", string, required=True),),
            INVALID_PARAMS,
            when=When.ALWAYS,
        ),
        Method("framework_start_init", target.start_init, when=When.STARTUP),
        Method("framework_wait_init", target.wait_init, when=When.ALWAYS),
        Method("framework_get_subsystems", get_framework_subsystems, when=When.ALWAYS),
        Method(
            "framework_get_config",
            get_config,
            (Param("name", string, required=True), Param("with_batches", boolean, default=False)),
            INVALID_PARAMS,
            when=When.ALWAYS,
        ),
        Method("framework_get_reactors", get_reactors),
        Method("log_get_level", get_level, when=When.ALWAYS),
        Method("log_set_level", set_level, (_LEVEL,), INVALID_PARAMS, when=When.ALWAYS),
        Method("log_get_print_level", get_print_level, when=When.ALWAYS),
        Method("log_set_print_level", set_print_level, (_LEVEL,), INVALID_PARAMS, when=When.ALWAYS),
        Method("log_get_flags", get_flags, when=When.ALWAYS),
        Method("log_set_flag", set_flag, (_FLAG,), INVALID_PARAMS, when=When.ALWAYS),
        Method("log_clear_flag", clear_flag, (_FLAG,), INVALID_PARAMS, when=When.ALWAYS),
        Method("dpu_get_stats", get_stats),
        Method(
            "dpu_upgrade",
            upgrade,
            (Param("python", string, default=""), Param("path", string, default="")),
            timeout_s=lambda params: UPGRADE_S_MAX,
        ),
        Method("dpu_trace_start", target.trace_start, (Param("entries", u32, default=ENTRIES),)),
        Method("dpu_trace_stop", target.trace_stop),
        Method(
            "dpu_trace_save",
            target.trace_save,
            (Param("filename", string, required=True), Param("format", one_of(*FORMATS), default="text")),
        ),
        Method(
            "dpu_fault_add",
            target.add_fault,
            (
                Param("name", string),
                Param("action", string, required=True),
                Param("bdev_name", string),
                Param("method", string),
                Param("metadata", boolean),
                Param("io_types", strings),
                *(Param(name, _whole) for name in FAULT_NUMBERS),
                Param("code", i32),
                Param("dnr", boolean),
                Param("probability", number),
                Param("distribution", string),
            ),
        ),
        Method("dpu_fault_remove", target.remove_fault, (_name(),)),
        Method("dpu_fault_release", target.release_fault, (_name(),)),
        Method("dpu_journal_start", target.start_journal, (_BDEV_NAME,)),
        Method("dpu_journal_stop", target.stop_journal, (_BDEV_NAME,)),
        Method(
            "dpu_power_cut",
            target.cut_power,
            (_BDEV_NAME, Param("seed", _whole), Param("fail_controllers", boolean, default=True)),
        ),
        Method("dpu_fault_get", get_faults, (Param("name", string),)),
        Method(
            "bdev_get_bdevs",
            get_bdevs,
            (Param("name", string), Param("timeout", u32, default=0)),
            timeout_s=_get_bdevs_timeout_s,
        ),
        Method(
            "bdev_malloc_create",
            target.create_memory,
            (
                Param("name", string),
                *_GEOMETRY,
                _neutral("optimal_io_boundary", 0),
                _neutral("md_interleave", False),
                _neutral("numa_id", -1),
            ),
        ),
        Method(
            "bdev_set_qos_limit",
            target.set_limits,
            (_name(), *(Param(name, limit) for name in LIMIT_NAMES)),
        ),
        Method("bdev_wait_for_examine", wait_for_examine),
        Method(
            "bdev_get_iostat",
            get_iostat,
            (
                Param("names", strings),
                Param("per_channel", boolean, default=False),
                Param("reset_mode", one_of(*RESET_MODES), default="none"),
            ),
        ),
        Method(
            "bdev_reset_iostat",
            reset_iostat,
            (Param("name", string), Param("mode", one_of(*RESET_MODES), default="all")),
        ),
        Method("bdev_malloc_delete", delete_memory, (_name(),)),
        Method(
            "bdev_null_create",
            target.create_null,
            (
                _name(),
                *_GEOMETRY,
                _neutral("preferred_write_alignment", 0),
                _neutral("preferred_write_granularity", 0),
                _neutral("optimal_write_size", 0),
                _neutral("preferred_unmap_alignment", 0),
                _neutral("preferred_unmap_granularity", 0),
            ),
        ),
        Method("bdev_null_delete", delete_null, (_name(),)),
        Method("bdev_null_resize", target.resize_null, (_name(), Param("new_size", u64, required=True))),
        Method(
            "bdev_aio_create",
            target.create_file,
            (
                _name(),
                Param("filename", string, required=True),
                Param("block_size", u32),
                Param("readonly", boolean, default=False),
                Param("fallocate", boolean, default=False),
                Param("uuid", uuid),
                _neutral("nowait", False),
                Param("cache_mode", one_of("direct", "buffered")),
            ),
        ),
        Method("bdev_aio_delete", delete_file, (_name(),)),
        Method(
            "bdev_lvol_create_lvstore",
            lvols.create_store,
            (
                Param("bdev_name", string, required=True),
                Param("lvs_name", string, required=True),
                Param("cluster_sz", u32),
                Param("clear_method", one_of("none", "unmap", "write_zeroes"), default="unmap"),
                _hint("num_md_pages_per_cluster_ratio"),
                _hint("md_page_size"),
                Param("base_bdevs", strings, default=()),
                Param("metadata_filename", string),
            ),
            timeout_s=_long,
        ),
        Method("bdev_lvol_delete_lvstore", lvols.delete_store, _STORE, timeout_s=_long),
        Method("bdev_lvol_rename_lvstore", lvols.rename_store, _RENAME),
        Method("bdev_lvol_grow_lvstore", lvols.grow_store, _STORE),
        Method("bdev_lvol_get_lvstores", lvols.get_stores, _STORE),
        Method("bdev_lvol_get_lvols", lvols.get_lvols, (Param("lvs_uuid", string), Param("lvs_name", string))),
        Method(
            "bdev_lvol_create",
            lvols.create,
            (
                Param("lvol_name", string, required=True),
                Param("size_in_mib", u64, required=True),
                Param("thin_provision", boolean, default=False),
                *_STORE,
                Param("clear_method", one_of("none", "unmap", "write_zeroes", "default"), ignored=True),
            ),
            timeout_s=_long,
        ),
        Method(
            "bdev_lvol_snapshot",
            lvols.snapshot,
            (Param("lvol_name", string, required=True), Param("snapshot_name", string, required=True)),
        ),
        Method(
            "bdev_lvol_clone",
            lvols.clone,
            (Param("snapshot_name", string, required=True), Param("clone_name", string, required=True)),
        ),
        Method("bdev_lvol_rename", lvols.rename, _RENAME),
        Method(
            "bdev_lvol_resize", lvols.resize, (_name(), Param("size_in_mib", u64, required=True)), timeout_s=_long
        ),
        Method("bdev_lvol_inflate", lvols.inflate, (_name(),), timeout_s=_long),
        Method("bdev_lvol_decouple_parent", lvols.decouple_parent, (_name(),), timeout_s=_long),
        Method("bdev_lvol_set_read_only", lvols.set_read_only, (_name(),)),
        Method("bdev_lvol_delete", lvols.delete, (_name(),), timeout_s=_long),
        Method("bdev_aio_rescan", rescan_file, (_name(),)),
        Method(
            "bdev_uring_create",
            create_uring,
            (
                _name(),
                Param("filename", string, required=True),
                Param("block_size", u32),
                Param("uuid", uuid),
            ),
        ),
        Method("bdev_uring_delete", delete_uring, (_name(),)),
        Method("bdev_uring_rescan", rescan_uring, (_name(),)),
        Method(
            "nvmf_create_transport",
            create_transport,
            (
                Param("trtype", string, required=True),
                Param("disable_mappable_bar0", boolean, default=False),
                Param("force_mappable_bar0", boolean, default=False),
                Param("disable_adaptive_irq", boolean, default=False),
                Param("disable_shadow_doorbells", boolean, default=False),
                _TGT_NAME,
                _neutral("zcopy", False),
                _neutral("dif_insert_or_strip", False),
                # These have other transports than ours; spdk-rpc sends their defaults to every transport.
                Param("no_srq", boolean, ignored=True),
                Param("c2h_success", boolean, ignored=True),
                Param("no_wr_batching", boolean, ignored=True),
                Param("disable_command_passthru", boolean, ignored=True),
                _hint("max_queue_depth"),
                _hint("max_io_qpairs_per_ctrlr"),
                _hint("in_capsule_data_size"),
                _hint("max_io_size"),
                _hint("io_unit_size"),
                _hint("max_aq_depth"),
                _hint("num_shared_buffers"),
                _hint("buf_cache_size"),
                _hint("iobuf_small_cache_size"),
                _hint("iobuf_large_cache_size"),
                _hint("num_cqe"),
                _hint("max_srq_depth"),
                _hint("sock_priority"),
                _hint("acceptor_backlog"),
                _hint("acceptor_poll_rate"),
                _hint("abort_timeout_sec"),
                _hint("ack_timeout"),
                _hint("control_msg_num"),
                _hint("data_wr_pool_size"),
                _hint("kas"),
                _hint("min_kato"),
            ),
            INVALID_PARAMS,
        ),
        Method("nvmf_get_transports", get_transports, (Param("trtype", string), _TGT_NAME), INVALID_PARAMS),
        Method(
            "nvmf_create_subsystem",
            target.create_subsystem,
            (
                _NQN,
                Param("serial_number", string),
                Param("model_number", string),
                Param("max_namespaces", u32, default=0),
                Param("allow_any_host", boolean, default=False),
                _TGT_NAME,
                _neutral("ana_reporting", False),
                _neutral("passthrough", False),
                _neutral("min_cntlid", 1),
                _neutral("max_cntlid", 65519),
                Param("enable_nssr", boolean, ignored=True),
                Param("dmrsl", u64, ignored=True),
                Param("wzsl", u32, ignored=True),
                Param("admin_label", string, ignored=True),
            ),
            INVALID_PARAMS,
        ),
        Method("nvmf_delete_subsystem", target.delete_subsystem, (_NQN, _TGT_NAME), INVALID_PARAMS),
        Method("nvmf_get_subsystems", get_subsystems, (Param("nqn", string), _TGT_NAME), INVALID_PARAMS),
        Method("nvmf_subsystem_get_controllers", get_controllers, (_NQN, _TGT_NAME), INVALID_PARAMS),
        Method(
            "nvmf_subsystem_add_ns",
            add_namespace,
            (
                _NQN,
                Param(
                    "namespace",
                    nested(
                        Param("bdev_name", string, required=True),
                        Param("nsid", u32, default=0),
                        Param("uuid", uuid),
                        Param("nguid", hexadecimal(16)),
                        Param("eui64", hexadecimal(8)),
                        Param("no_auto_visible", boolean, default=False),
                        _hint("anagrpid"),
                    ),
                    required=True,
                ),
                _TGT_NAME,
            ),
            INVALID_PARAMS,
        ),
        Method(
            "nvmf_subsystem_remove_ns",
            target.remove_namespace,
            (_NQN, Param("nsid", u32, required=True), _TGT_NAME),
            INVALID_PARAMS,
        ),
        Method(
            "nvmf_subsystem_set_ns_pool",
            target.set_pool,
            (
                _NQN,
                Param("lvs_name", string, required=True),
                Param("thin_provision", boolean, default=False),
                _TGT_NAME,
            ),
            INVALID_PARAMS,
        ),
        Method("nvmf_ns_attach_controller", attach_namespace, _ATTACHMENT, INVALID_PARAMS),
        Method("nvmf_ns_detach_controller", detach_namespace, _ATTACHMENT, INVALID_PARAMS),
        Method(
            "nvmf_subsystem_add_listener",
            add_listener,
            (
                _NQN,
                Param("listen_address", _ADDRESS, required=True),
                _TGT_NAME,
                _neutral("secure_channel", False),
                _neutral("ana_state", "optimized"),
                _neutral("numa_id", -1),
                Param("sock_impl", string, ignored=True),
                Param("allow_unsealed_memory", boolean, default=False),
                Param("disable_msix", boolean, default=False),
            ),
            INVALID_PARAMS,
        ),
        Method("nvmf_subsystem_get_listeners", get_listeners, (_NQN, _TGT_NAME), INVALID_PARAMS),
        Method(
            "nvmf_subsystem_remove_listener",
            remove_listener,
            (_NQN, Param("listen_address", _ADDRESS, required=True), _TGT_NAME),
            INVALID_PARAMS,
        ),
    ]
    table.update((row.name, row) for row in rows)
    return table


def _long(params: Mapping[str, Any]) -> float:
    """Of calls that may copy or clear much: the client decides how long it waits."""
    return LONG_S


def _flags(name: str) -> frozenset[str]:
    return frozenset(FLAGS if name == "all" else [name])


def _get_bdevs_timeout_s(params: Mapping[str, Any]) -> float:
    waits_ms: int = params["timeout"]
    return TIMEOUT_S + waits_ms / 1000
