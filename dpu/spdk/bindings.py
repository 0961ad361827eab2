"""One function per method of SPDK's JSON-RPC. To add a method, add a function.

Parameters and their units are SPDK's; None leaves one out. Bare of a word of its own, a function says what its name
says. Errors: RpcError with SPDK's code (-errno for bdevs, -32601 for a method that the target does not have), and
those of dpu.spdk.client.
Source: SPDK's JSON-RPC documentation; PyPI spdk 26.9; recorded calls (tests/conformance/spdk_rpc_vectors.json).
"""

from __future__ import annotations

from typing import Any, TypeVar, cast

from dpu.spdk.client import Client
from dpu.spdk.types import (
    Address,
    Bdev,
    Call,
    Controller,
    ErrorType,
    FrameworkSubsystem,
    IobufStat,
    IoStat,
    IoType,
    LatencyType,
    Listener,
    LogLevel,
    Lvol,
    Lvstore,
    NewNamespace,
    Notification,
    NvmfStats,
    Reactors,
    ResetMode,
    Subsystem,
    ThreadStats,
    TraceFormat,
    Transport,
    Version,
)

T = TypeVar("T")


class Spdk(Client):
    """The methods of a target at a socket."""

    def _do(self, result: type[T], method: str, /, **params: Any) -> T:
        given = {name: value for name, value in params.items() if value is not None}
        return cast(T, self.call(method, given))

    # -- the target as a whole

    def spdk_get_version(self) -> Version:
        return self._do(Version, "spdk_get_version")

    def rpc_get_methods(self, *, current: bool | None = None, include_aliases: bool | None = None) -> list[str]:
        """``current``: only those that the state of the target allows."""
        return self._do(list[str], "rpc_get_methods", current=current, include_aliases=include_aliases)

    def spdk_kill_instance(self, *, sig_name: str) -> bool:
        """End the target: SIGINT, SIGTERM, SIGQUIT."""
        return self._do(bool, "spdk_kill_instance", sig_name=sig_name)

    def framework_start_init(self) -> bool:
        """End the start-up state of ``--wait-for-rpc``."""
        return self._do(bool, "framework_start_init")

    def framework_wait_init(self) -> bool:
        """Return when the target is initialized."""
        return self._do(bool, "framework_wait_init")

    def framework_get_subsystems(self) -> list[FrameworkSubsystem]:
        """In the order in which they start."""
        return self._do(list[FrameworkSubsystem], "framework_get_subsystems")

    def framework_get_config(self, *, name: str, with_batches: bool | None = None) -> list[Call] | None:
        """The calls that make ``name`` what it is; None where it has no configuration."""
        return self._do(list[Call], "framework_get_config", name=name, with_batches=with_batches)

    def framework_get_reactors(self) -> Reactors:
        return self._do(Reactors, "framework_get_reactors")

    def thread_get_stats(self) -> ThreadStats:
        return self._do(ThreadStats, "thread_get_stats")

    def iobuf_get_stats(self) -> list[IobufStat]:
        return self._do(list[IobufStat], "iobuf_get_stats")

    def notify_get_types(self) -> list[str]:
        return self._do(list[str], "notify_get_types")

    def notify_get_notifications(self, *, id: int | None = None, max: int | None = None) -> list[Notification]:
        """From ``id`` on, at most ``max``."""
        return self._do(list[Notification], "notify_get_notifications", id=id, max=max)

    def log_get_level(self) -> str:
        return self._do(str, "log_get_level")

    def log_set_level(self, *, level: LogLevel) -> bool:
        return self._do(bool, "log_set_level", level=level)

    def log_get_print_level(self) -> str:
        return self._do(str, "log_get_print_level")

    def log_set_print_level(self, *, level: LogLevel) -> bool:
        return self._do(bool, "log_set_print_level", level=level)

    def log_get_flags(self) -> dict[str, bool]:
        return self._do(dict[str, bool], "log_get_flags")

    def log_set_flag(self, *, flag: str) -> bool:
        """ "all": every one."""
        return self._do(bool, "log_set_flag", flag=flag)

    def log_clear_flag(self, *, flag: str) -> bool:
        """ "all": every one."""
        return self._do(bool, "log_clear_flag", flag=flag)

    def dpu_get_stats(self) -> dict[str, Any]:
        """Ours: pollers, queues, stage times and latencies; not in SPDK."""
        return self._do(dict[str, Any], "dpu_get_stats")

    def dpu_upgrade(self, *, python: str | None = None, path: str | None = None) -> dict[str, str]:
        """Ours: have a worker of other code take over; ``path``: the directory with its package ``dpu``."""
        return self._do(dict[str, str], "dpu_upgrade", python=python, path=path)

    def dpu_trace_start(self, *, entries: int | None = None) -> bool:
        """Ours: trace every command, the newest ``entries`` of each poller."""
        return self._do(bool, "dpu_trace_start", entries=entries)

    def dpu_trace_stop(self) -> bool:
        """Ours."""
        return self._do(bool, "dpu_trace_stop")

    def dpu_trace_save(self, *, filename: str, format: TraceFormat | None = None) -> dict[str, int]:
        """Ours: write what was traced to a file of the daemon's; how many commands, how many older ones are lost."""
        return self._do(dict[str, int], "dpu_trace_save", filename=filename, format=format)

    def dpu_fault_add(
        self,
        *,
        action: str,
        name: str | None = None,
        bdev_name: str | None = None,
        method: str | None = None,
        metadata: bool | None = None,
        io_types: list[str] | None = None,
        **more: Any,
    ) -> str:
        """Ours: strike I/O of a bdev, calls of a method, or commits; ``more``: of dpu.faults.Fault. Its name."""
        return self._do(
            str,
            "dpu_fault_add",
            action=action,
            name=name,
            bdev_name=bdev_name,
            method=method,
            metadata=metadata,
            io_types=io_types,
            **more,
        )

    def dpu_fault_get(self, *, name: str | None = None) -> list[dict[str, Any]]:
        """Ours: what was asked for, and how many commands or calls have matched and were struck."""
        return self._do(list[dict[str, Any]], "dpu_fault_get", name=name)

    def dpu_fault_remove(self, *, name: str) -> bool:
        """Ours: what it holds or delays goes on."""
        return self._do(bool, "dpu_fault_remove", name=name)

    def dpu_fault_release(self, *, name: str) -> int:
        """Ours: let go what it holds or delays; how many commands. The fault stays."""
        return self._do(int, "dpu_fault_release", name=name)

    def dpu_journal_start(self, *, bdev_name: str) -> bool:
        """Ours: note what is overwritten and not flushed yet, so that power can be cut. Slow."""
        return self._do(bool, "dpu_journal_start", bdev_name=bdev_name)

    def dpu_journal_stop(self, *, bdev_name: str) -> bool:
        """Ours."""
        return self._do(bool, "dpu_journal_stop", bdev_name=bdev_name)

    def dpu_power_cut(
        self, *, bdev_name: str, seed: int | None = None, fail_controllers: bool | None = None
    ) -> dict[str, int]:
        """Ours: lose what was not flushed, or by ``seed`` a legal part of it; its controllers fail until a reset."""
        return self._do(
            dict[str, int], "dpu_power_cut", bdev_name=bdev_name, seed=seed, fail_controllers=fail_controllers
        )

    # -- bdevs

    def bdev_get_bdevs(self, *, name: str | None = None, timeout: int | None = None) -> list[Bdev]:
        """All, or one by name or alias; waits for that up to ``timeout`` milliseconds."""
        return self._do(list[Bdev], "bdev_get_bdevs", name=name, timeout=timeout)

    def bdev_get_iostat(
        self, *, names: list[str] | None = None, per_channel: bool | None = None, reset_mode: ResetMode | None = None
    ) -> IoStat:
        """``per_channel``: of the one in ``names``, by thread."""
        return self._do(IoStat, "bdev_get_iostat", names=names, per_channel=per_channel, reset_mode=reset_mode)

    def bdev_reset_iostat(self, *, name: str | None = None, mode: ResetMode | None = None) -> bool:
        return self._do(bool, "bdev_reset_iostat", name=name, mode=mode)

    def bdev_wait_for_examine(self) -> bool:
        return self._do(bool, "bdev_wait_for_examine")

    def bdev_examine(self, *, name: str) -> bool:
        return self._do(bool, "bdev_examine", name=name)

    def bdev_set_options(
        self,
        *,
        bdev_io_pool_size: int | None = None,
        bdev_io_cache_size: int | None = None,
        bdev_auto_examine: bool | None = None,
    ) -> bool:
        """Before framework_start_init."""
        return self._do(
            bool,
            "bdev_set_options",
            bdev_io_pool_size=bdev_io_pool_size,
            bdev_io_cache_size=bdev_io_cache_size,
            bdev_auto_examine=bdev_auto_examine,
        )

    def bdev_enable_histogram(self, *, name: str, enable: bool) -> bool:
        return self._do(bool, "bdev_enable_histogram", name=name, enable=enable)

    def bdev_get_histogram(self, *, name: str) -> dict[str, Any]:
        return self._do(dict[str, Any], "bdev_get_histogram", name=name)

    def bdev_malloc_create(
        self, *, num_blocks: int, block_size: int, name: str | None = None, uuid: str | None = None
    ) -> str:
        """``block_size`` in bytes; its name."""
        return self._do(str, "bdev_malloc_create", num_blocks=num_blocks, block_size=block_size, name=name, uuid=uuid)

    def bdev_malloc_delete(self, *, name: str) -> bool:
        return self._do(bool, "bdev_malloc_delete", name=name)

    def bdev_null_create(self, *, name: str, num_blocks: int, block_size: int, uuid: str | None = None) -> str:
        """``block_size`` in bytes; its name."""
        return self._do(str, "bdev_null_create", name=name, num_blocks=num_blocks, block_size=block_size, uuid=uuid)

    def bdev_null_resize(self, *, name: str, new_size: int) -> bool:
        """``new_size`` in MiB."""
        return self._do(bool, "bdev_null_resize", name=name, new_size=new_size)

    def bdev_null_delete(self, *, name: str) -> bool:
        return self._do(bool, "bdev_null_delete", name=name)

    def bdev_aio_create(
        self,
        *,
        filename: str,
        name: str,
        block_size: int | None = None,
        readonly: bool | None = None,
        fallocate: bool | None = None,
        uuid: str | None = None,
    ) -> str:
        """``block_size`` in bytes; its name."""
        return self._do(
            str,
            "bdev_aio_create",
            filename=filename,
            name=name,
            block_size=block_size,
            readonly=readonly,
            fallocate=fallocate,
            uuid=uuid,
        )

    def bdev_aio_rescan(self, *, name: str) -> bool:
        """Take the size that its file has now."""
        return self._do(bool, "bdev_aio_rescan", name=name)

    def bdev_aio_delete(self, *, name: str) -> bool:
        return self._do(bool, "bdev_aio_delete", name=name)

    def bdev_uring_create(
        self, *, filename: str, name: str, block_size: int | None = None, uuid: str | None = None
    ) -> str:
        """``block_size`` in bytes; its name."""
        return self._do(str, "bdev_uring_create", filename=filename, name=name, block_size=block_size, uuid=uuid)

    def bdev_uring_rescan(self, *, name: str) -> bool:
        """Take the size that its file has now."""
        return self._do(bool, "bdev_uring_rescan", name=name)

    def bdev_uring_delete(self, *, name: str) -> bool:
        return self._do(bool, "bdev_uring_delete", name=name)

    def bdev_set_qos_limit(
        self,
        *,
        name: str,
        rw_ios_per_sec: int | None = None,
        rw_mbytes_per_sec: int | None = None,
        r_mbytes_per_sec: int | None = None,
        w_mbytes_per_sec: int | None = None,
        **ours: int | None,
    ) -> bool:
        """0: no limit. ``ours``: of dpu.qos.Limits, not in SPDK: r_ios_per_sec, rw_ios_burst and others."""
        return self._do(
            bool,
            "bdev_set_qos_limit",
            name=name,
            rw_ios_per_sec=rw_ios_per_sec,
            rw_mbytes_per_sec=rw_mbytes_per_sec,
            r_mbytes_per_sec=r_mbytes_per_sec,
            w_mbytes_per_sec=w_mbytes_per_sec,
            **ours,
        )

    def bdev_error_create(self, *, base_name: str, uuid: str | None = None) -> bool:
        """Makes ``EE_`` and the name of its base."""
        return self._do(bool, "bdev_error_create", base_name=base_name, uuid=uuid)

    def bdev_error_inject_error(
        self,
        *,
        name: str,
        io_type: IoType,
        error_type: ErrorType,
        num: int | None = None,
        nvme_sct: int | None = None,
        nvme_sc: int | None = None,
        queue_depth: int | None = None,
        corrupt_offset: int | None = None,
        corrupt_value: int | None = None,
    ) -> bool:
        """``num``: so many commands."""
        return self._do(
            bool,
            "bdev_error_inject_error",
            name=name,
            io_type=io_type,
            error_type=error_type,
            num=num,
            nvme_sct=nvme_sct,
            nvme_sc=nvme_sc,
            queue_depth=queue_depth,
            corrupt_offset=corrupt_offset,
            corrupt_value=corrupt_value,
        )

    def bdev_error_delete(self, *, name: str) -> bool:
        return self._do(bool, "bdev_error_delete", name=name)

    def bdev_delay_create(
        self,
        *,
        base_bdev_name: str,
        name: str,
        avg_read_latency: int,
        p99_read_latency: int,
        avg_write_latency: int,
        p99_write_latency: int,
        uuid: str | None = None,
    ) -> str:
        """Latencies in microseconds; its name."""
        return self._do(
            str,
            "bdev_delay_create",
            base_bdev_name=base_bdev_name,
            name=name,
            avg_read_latency=avg_read_latency,
            p99_read_latency=p99_read_latency,
            avg_write_latency=avg_write_latency,
            p99_write_latency=p99_write_latency,
            uuid=uuid,
        )

    def bdev_delay_update_latency(self, *, delay_bdev_name: str, latency_type: LatencyType, latency_us: int) -> bool:
        return self._do(
            bool,
            "bdev_delay_update_latency",
            delay_bdev_name=delay_bdev_name,
            latency_type=latency_type,
            latency_us=latency_us,
        )

    def bdev_delay_delete(self, *, name: str) -> bool:
        return self._do(bool, "bdev_delay_delete", name=name)

    # -- logical volumes

    def bdev_lvol_create_lvstore(
        self,
        *,
        bdev_name: str,
        lvs_name: str,
        cluster_sz: int | None = None,
        clear_method: str | None = None,
        base_bdevs: list[str] | None = None,
        metadata_filename: str | None = None,
    ) -> str:
        """``cluster_sz`` in bytes; its UUID. The last two are ``dpud``'s alone."""
        return self._do(
            str,
            "bdev_lvol_create_lvstore",
            bdev_name=bdev_name,
            lvs_name=lvs_name,
            cluster_sz=cluster_sz,
            clear_method=clear_method,
            base_bdevs=base_bdevs,
            metadata_filename=metadata_filename,
        )

    def bdev_lvol_delete_lvstore(self, *, uuid: str | None = None, lvs_name: str | None = None) -> bool:
        return self._do(bool, "bdev_lvol_delete_lvstore", uuid=uuid, lvs_name=lvs_name)

    def bdev_lvol_rename_lvstore(self, *, old_name: str, new_name: str) -> bool:
        return self._do(bool, "bdev_lvol_rename_lvstore", old_name=old_name, new_name=new_name)

    def bdev_lvol_grow_lvstore(self, *, uuid: str | None = None, lvs_name: str | None = None) -> bool:
        """To the size of its bdev."""
        return self._do(bool, "bdev_lvol_grow_lvstore", uuid=uuid, lvs_name=lvs_name)

    def bdev_lvol_get_lvstores(self, *, uuid: str | None = None, lvs_name: str | None = None) -> list[Lvstore]:
        return self._do(list[Lvstore], "bdev_lvol_get_lvstores", uuid=uuid, lvs_name=lvs_name)

    def bdev_lvol_get_lvols(self, *, lvs_uuid: str | None = None, lvs_name: str | None = None) -> list[Lvol]:
        return self._do(list[Lvol], "bdev_lvol_get_lvols", lvs_uuid=lvs_uuid, lvs_name=lvs_name)

    def bdev_lvol_create(
        self,
        *,
        lvol_name: str,
        size_in_mib: int,
        lvs_name: str | None = None,
        uuid: str | None = None,
        thin_provision: bool | None = None,
        clear_method: str | None = None,
    ) -> str:
        """In the store ``lvs_name`` or ``uuid``; its UUID."""
        return self._do(
            str,
            "bdev_lvol_create",
            lvol_name=lvol_name,
            size_in_mib=size_in_mib,
            lvs_name=lvs_name,
            uuid=uuid,
            thin_provision=thin_provision,
            clear_method=clear_method,
        )

    def bdev_lvol_snapshot(self, *, lvol_name: str, snapshot_name: str) -> str:
        """Its UUID."""
        return self._do(str, "bdev_lvol_snapshot", lvol_name=lvol_name, snapshot_name=snapshot_name)

    def bdev_lvol_clone(self, *, snapshot_name: str, clone_name: str) -> str:
        """Its UUID."""
        return self._do(str, "bdev_lvol_clone", snapshot_name=snapshot_name, clone_name=clone_name)

    def bdev_lvol_resize(self, *, name: str, size_in_mib: int) -> bool:
        return self._do(bool, "bdev_lvol_resize", name=name, size_in_mib=size_in_mib)

    def bdev_lvol_inflate(self, *, name: str) -> bool:
        return self._do(bool, "bdev_lvol_inflate", name=name)

    def bdev_lvol_decouple_parent(self, *, name: str) -> bool:
        return self._do(bool, "bdev_lvol_decouple_parent", name=name)

    def bdev_lvol_rename(self, *, old_name: str, new_name: str) -> bool:
        return self._do(bool, "bdev_lvol_rename", old_name=old_name, new_name=new_name)

    def bdev_lvol_set_read_only(self, *, name: str) -> bool:
        return self._do(bool, "bdev_lvol_set_read_only", name=name)

    def bdev_lvol_delete(self, *, name: str) -> bool:
        return self._do(bool, "bdev_lvol_delete", name=name)

    # -- NVMe over vfio-user

    def nvmf_create_transport(
        self,
        *,
        trtype: str,
        disable_mappable_bar0: bool | None = None,
        disable_adaptive_irq: bool | None = None,
        disable_shadow_doorbells: bool | None = None,
        force_mappable_bar0: bool | None = None,
    ) -> bool:
        """The switches are VFIOUSER's; the last one is ``dpud``'s alone."""
        return self._do(
            bool,
            "nvmf_create_transport",
            trtype=trtype,
            disable_mappable_bar0=disable_mappable_bar0,
            disable_adaptive_irq=disable_adaptive_irq,
            disable_shadow_doorbells=disable_shadow_doorbells,
            force_mappable_bar0=force_mappable_bar0,
        )

    def nvmf_get_transports(self, *, trtype: str | None = None) -> list[Transport]:
        return self._do(list[Transport], "nvmf_get_transports", trtype=trtype)

    def nvmf_get_stats(self) -> NvmfStats:
        return self._do(NvmfStats, "nvmf_get_stats")

    def nvmf_create_subsystem(
        self,
        *,
        nqn: str,
        serial_number: str | None = None,
        model_number: str | None = None,
        max_namespaces: int | None = None,
        allow_any_host: bool | None = None,
    ) -> bool:
        return self._do(
            bool,
            "nvmf_create_subsystem",
            nqn=nqn,
            serial_number=serial_number,
            model_number=model_number,
            max_namespaces=max_namespaces,
            allow_any_host=allow_any_host,
        )

    def nvmf_delete_subsystem(self, *, nqn: str) -> bool:
        return self._do(bool, "nvmf_delete_subsystem", nqn=nqn)

    def nvmf_get_subsystems(self, *, nqn: str | None = None) -> list[Subsystem]:
        return self._do(list[Subsystem], "nvmf_get_subsystems", nqn=nqn)

    def nvmf_subsystem_add_ns(self, *, nqn: str, namespace: NewNamespace) -> int:
        """Its NSID."""
        return self._do(int, "nvmf_subsystem_add_ns", nqn=nqn, namespace=namespace)

    def nvmf_subsystem_set_ns_pool(self, *, nqn: str, lvs_name: str, thin_provision: bool | None = None) -> bool:
        """dpud only: what guests' Namespace Management makes namespaces of; "": nothing."""
        return self._do(bool, "nvmf_subsystem_set_ns_pool", nqn=nqn, lvs_name=lvs_name, thin_provision=thin_provision)

    def nvmf_ns_attach_controller(self, *, nqn: str, nsid: int, cntlid: int) -> bool:
        """dpud only."""
        return self._do(bool, "nvmf_ns_attach_controller", nqn=nqn, nsid=nsid, cntlid=cntlid)

    def nvmf_ns_detach_controller(self, *, nqn: str, nsid: int, cntlid: int) -> bool:
        """dpud only."""
        return self._do(bool, "nvmf_ns_detach_controller", nqn=nqn, nsid=nsid, cntlid=cntlid)

    def nvmf_subsystem_remove_ns(self, *, nqn: str, nsid: int) -> bool:
        return self._do(bool, "nvmf_subsystem_remove_ns", nqn=nqn, nsid=nsid)

    def nvmf_subsystem_add_listener(
        self,
        *,
        nqn: str,
        listen_address: Address,
        allow_unsealed_memory: bool | None = None,
        disable_msix: bool | None = None,
    ) -> bool:
        """``allow_unsealed_memory`` and ``disable_msix``: dpud only."""
        return self._do(
            bool,
            "nvmf_subsystem_add_listener",
            nqn=nqn,
            listen_address=listen_address,
            allow_unsealed_memory=allow_unsealed_memory,
            disable_msix=disable_msix,
        )

    def nvmf_subsystem_remove_listener(self, *, nqn: str, listen_address: Address) -> bool:
        return self._do(bool, "nvmf_subsystem_remove_listener", nqn=nqn, listen_address=listen_address)

    def nvmf_subsystem_get_listeners(self, *, nqn: str) -> list[Listener]:
        return self._do(list[Listener], "nvmf_subsystem_get_listeners", nqn=nqn)

    def nvmf_subsystem_get_controllers(self, *, nqn: str) -> list[Controller]:
        return self._do(list[Controller], "nvmf_subsystem_get_controllers", nqn=nqn)

    def nvmf_subsystem_add_host(self, *, nqn: str, host: str) -> bool:
        return self._do(bool, "nvmf_subsystem_add_host", nqn=nqn, host=host)
