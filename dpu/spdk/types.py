"""What SPDK's methods answer, as typed dictionaries with SPDK's keys in SPDK's order.

``NotRequired``: left out by one of SPDK's own bdevs, or by ``dpud`` (dmrsl, wzsl, kas, min_kato, and what only SPDK's
threads have). Times are in ticks of the answer's ``tick_rate`` (per second) where nothing else is said.
Source: recorded answers of SPDK v26.05 (tests/conformance/spdk_rpc_vectors.json); PyPI spdk 26.9.
"""

from __future__ import annotations

from typing import Any, Literal, NotRequired, TypedDict

LogLevel = Literal["ERROR", "WARNING", "NOTICE", "INFO", "DEBUG"]
TraceFormat = Literal["text", "perfetto"]
ResetMode = Literal["all", "maxmin", "error", "none"]
IoType = Literal["read", "write", "unmap", "flush", "reset", "write_zeroes", "all", "clear"]
ErrorType = Literal["failure", "pending", "corrupt_data", "nomem", "nvme_failure"]
LatencyType = Literal["avg_read", "p99_read", "avg_write", "p99_write"]


class VersionFields(TypedDict):
    major: int
    minor: int
    patch: int
    suffix: str


class Version(TypedDict):
    version: str
    fields: VersionFields


class FrameworkSubsystem(TypedDict):
    subsystem: str
    depends_on: list[str]


class Call(TypedDict):
    method: str
    params: NotRequired[dict[str, Any]]


class LwThread(TypedDict):
    name: str
    id: int
    cpumask: str
    elapsed: int


class Reactor(TypedDict):
    lcore: int
    numa_id: NotRequired[int]
    tid: int
    busy: int
    idle: int
    in_interrupt: bool
    irq: NotRequired[int]
    sys: NotRequired[int]
    usr: NotRequired[int]
    lw_threads: list[LwThread]


class Reactors(TypedDict):
    tick_rate: int
    pid: int
    reactors: list[Reactor]


class ThreadStat(TypedDict):
    name: str
    id: int
    cpumask: str
    busy: int
    idle: int
    active_pollers_count: int
    timed_pollers_count: int
    paused_pollers_count: int


class ThreadStats(TypedDict):
    tick_rate: int
    threads: list[ThreadStat]


class Pool(TypedDict):
    cache: int
    main: int
    retry: int
    cache_size: int


class IobufStat(TypedDict):
    module: str
    small_pool: Pool
    large_pool: Pool


class Notification(TypedDict):
    type: str
    ctx: str
    id: int


class RateLimits(TypedDict):
    rw_ios_per_sec: int
    rw_mbytes_per_sec: int
    r_mbytes_per_sec: int
    w_mbytes_per_sec: int


class MemoryDomain(TypedDict):
    dma_device_type: str


class Bdev(TypedDict):
    """``name`` of a logical volume is its UUID; ``driver_specific`` has one key, after the kind of the bdev."""

    name: str
    aliases: list[str]
    product_name: str
    block_size: int
    num_blocks: int
    preferred_write_alignment: int
    preferred_write_granularity: int
    optimal_write_size: int
    preferred_unmap_alignment: int
    preferred_unmap_granularity: int
    uuid: str
    numa_id: NotRequired[int]
    assigned_rate_limits: RateLimits
    claimed: bool
    zoned: bool
    supported_io_types: dict[str, bool]
    memory_domains: NotRequired[list[MemoryDomain]]
    driver_specific: dict[str, dict[str, Any]]


class IoCounts(TypedDict):
    bytes_read: int
    num_read_ops: int
    bytes_written: int
    num_write_ops: int
    bytes_unmapped: int
    num_unmap_ops: int
    bytes_copied: int
    num_copy_ops: int
    read_latency_ticks: int
    max_read_latency_ticks: int
    min_read_latency_ticks: int
    write_latency_ticks: int
    max_write_latency_ticks: int
    min_write_latency_ticks: int
    unmap_latency_ticks: int
    max_unmap_latency_ticks: int
    min_unmap_latency_ticks: int
    copy_latency_ticks: int
    max_copy_latency_ticks: int
    min_copy_latency_ticks: int
    io_error: dict[str, int]


class BdevIoStat(IoCounts):
    name: str


class ChannelIoStat(IoCounts):
    thread_id: int


class IoStat(TypedDict):
    """``bdevs``; or, with ``per_channel``, ``name`` and ``channels``."""

    tick_rate: int
    ticks: int
    bdevs: NotRequired[list[BdevIoStat]]
    name: NotRequired[str]
    channels: NotRequired[list[ChannelIoStat]]


class Lvstore(TypedDict):
    uuid: str
    name: str
    base_bdev: str
    total_data_clusters: int
    free_clusters: int
    block_size: int
    cluster_size: int
    max_growable_size: int


class LvstoreName(TypedDict):
    name: str
    uuid: str


class Lvol(TypedDict):
    alias: str
    uuid: str
    name: str
    is_thin_provisioned: bool
    is_snapshot: bool
    is_clone: bool
    is_esnap_clone: bool
    is_degraded: bool
    num_allocated_clusters: int
    lvs: LvstoreName


class Transport(TypedDict):
    trtype: str
    max_queue_depth: int
    max_io_qpairs_per_ctrlr: int
    in_capsule_data_size: int
    max_io_size: int
    max_aq_depth: int
    iobuf_small_cache_size: int
    iobuf_large_cache_size: int
    dif_insert_or_strip: bool
    zcopy: bool
    abort_timeout_sec: int
    ack_timeout: int
    data_wr_pool_size: int
    disable_command_passthru: bool
    kas: NotRequired[int]
    min_kato: NotRequired[int]


class Address(TypedDict):
    """``traddr`` of VFIOUSER: a directory; the socket in it is called ``cntrl``."""

    trtype: str
    adrfam: NotRequired[str]
    traddr: str
    trsvcid: NotRequired[str]


class Listener(TypedDict):
    address: Address


class NewNamespace(TypedDict):
    """Parameter ``namespace`` of nvmf_subsystem_add_ns; ``nguid`` and ``eui64`` in hexadecimal digits."""

    bdev_name: str
    nsid: NotRequired[int]
    uuid: NotRequired[str]
    nguid: NotRequired[str]
    eui64: NotRequired[str]
    no_auto_visible: NotRequired[bool]


class Namespace(TypedDict):
    nsid: int
    bdev_name: str
    name: str
    nguid: str
    eui64: NotRequired[str]
    uuid: str


class Subsystem(TypedDict):
    """The discovery subsystem, which comes first, has the first five keys only."""

    nqn: str
    subtype: str
    listen_addresses: list[Address]
    allow_any_host: bool
    hosts: list[dict[str, Any]]
    serial_number: NotRequired[str]
    model_number: NotRequired[str]
    max_namespaces: NotRequired[int]
    passthrough: NotRequired[bool]
    min_cntlid: NotRequired[int]
    max_cntlid: NotRequired[int]
    dmrsl: NotRequired[int]
    wzsl: NotRequired[int]
    namespaces: NotRequired[list[Namespace]]


class Controller(TypedDict):
    cntlid: int
    hostnqn: str
    hostid: str
    num_io_qpairs: int


class PollGroup(TypedDict):
    name: str
    admin_qpairs: int
    io_qpairs: int
    current_admin_qpairs: int
    current_io_qpairs: int
    current_unassociated_qpairs: int
    pending_bdev_io: int
    completed_nvme_io: int
    transports: list[dict[str, Any]]


class NvmfStats(TypedDict):
    tick_rate: int
    poll_groups: list[PollGroup]
