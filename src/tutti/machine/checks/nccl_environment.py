"""Checks env.*: variables that are misspelt, renamed, left over from debugging, or invalid."""

import difflib
from collections.abc import Mapping

from tutti.machine.checks.cluster import Cluster
from tutti.machine.checks.finding import Findings, fail, host_check, machine_check, passed, warn
from tutti.machine.cpu_numa import parse_cpu_list
from tutti.machine.observation import Machine


def settings(machine: Machine) -> dict[str, str]:
    """Variables as NCCL sees them: the environment overrides nccl.conf files."""
    from_files = {k: v for each in machine.nccl_conf.values() for k, v in each.items()}
    return {**from_files, **machine.variables}


def shares_gpus(variables: Mapping[str, str]) -> bool:
    """Whether ranks share a GPU: tutti then sets variables that would be wrong otherwise."""
    return variables.get("TUTTI_RANKS_PER_GPU", "1") != "1" or "NCCL_HOSTID" in variables


# --- names ---------------------------------------------------------------------------------------


def _named(prefix: str, names: str) -> frozenset[str]:
    return frozenset(prefix + name for name in names.split())


# From NCCL's user guide and log messages, up to 2.30.
NCCL = _named(
    "NCCL_",
    """
    ALGO ALLOC_P2P_NET_LL_BUFFERS BUFFSIZE CGA_CLUSTER_SIZE CHECKS_DISABLE CHECK_POINTERS
    COLLNET_ENABLE COLLNET_NODE_THRESHOLD COLLTRACE COMM_BLOCKING COMM_ID
    COMM_SHRINK_SHARE_RESOURCES COMM_SPLIT_SHARE_RESOURCES CONF_FILE CONNECT_ROUND_ROBIN
    CREATE_THREAD_CONTEXT CROSS_NIC CTA_POLICY CUMEM_ENABLE CUMEM_HOST_ENABLE CUDA_PATH DEBUG
    DEBUG_FILE DEBUG_SUBSYS DEBUG_TIMESTAMP_FORMAT DEBUG_TIMESTAMP_LEVELS DMABUF_ENABLE
    DUMP_ENABLE ENV_PLUGIN GDRCOPY_ENABLE GDRCOPY_FIFO_ENABLE GDRCOPY_FLUSH_ENABLE
    GDR_FLUSH_DISABLE GIN_ENABLE GIN_PLUGIN GIN_TYPE GRAPH_DUMP_FILE GRAPH_DUMP_FILE_RANK
    GRAPH_FILE GRAPH_HELPER_DISABLE GRAPH_MIXING_SUPPORT GRAPH_REGISTER GRAPH_STREAM_ORDERING
    HOSTID IB_ADAPTIVE_ROUTING IB_ADDR_FAMILY IB_ADDR_RANGE IB_AR_THRESHOLD IB_CUDA_SUPPORT
    IB_DATA_DIRECT IB_DISABLE IB_ECE_ENABLE IB_FIFO_TC IB_GID_INDEX IB_HCA IB_IS_GLOBAL
    IB_MERGE_NICS IB_MERGE_VFS IB_MQP_RETRY_ALL IB_MQP_RETRY_CNT IB_MQP_RETRY_SLEEP_MSEC
    IB_OOO_RQ IB_PCI_RELAXED_ORDERING IB_PKEY IB_QPS_PER_CONNECTION
    IB_RECEIVER_SIDE_MATCHING_SCHEME IB_RETRY_CNT IB_RETURN_ASYNC_EVENTS IB_ROCE_VERSION_NUM
    IB_SL IB_SPLIT_DATA_ON_QPS IB_TC IB_TIMEOUT IB_USE_INLINE IB_WARN_RAIL_LOCAL
    IGNORE_CPU_AFFINITY IGNORE_DISABLED_P2P INSPECTOR_DUMP_DIR INSPECTOR_DUMP_MIN_SIZE_BYTES
    INSPECTOR_DUMP_THREAD_INTERVAL_MICROSECONDS INSPECTOR_ENABLE INSPECTOR_PROM_DUMP
    INSPECTOR_REQUIRE_KERNEL_TIMING L1_SHARED_MEMORY_CARVEOUT LAUNCH_MODE LAUNCH_ORDER_IMPLICIT
    LEGACY_CUDA_REGISTER LL128_BUFFSIZE LL128_C2C LL128_NTHREADS LL_BUFFSIZE LOCAL_REGISTER
    MAX_CTAS MAX_NCHANNELS MAX_P2P_NCHANNELS MEM_SYNC_DOMAIN MIN_CTAS MIN_NCHANNELS
    MIN_P2P_NCHANNELS MNNVL_CLIQUE_ID MNNVL_ENABLE MNNVL_UUID NCHANNELS_PER_NET_PEER NET
    NETDEVS_POLICY NET_DISABLE_INTRA NET_FORCE_FLUSH NET_GDR_C2C NET_GDR_LEVEL NET_GDR_READ
    NET_OVERHEAD NET_OPTIONAL_RECV_COMPLETION NET_PLUGIN NET_SHARED_BUFFERS NET_SHARED_COMMS
    NSOCKS_PERTHREAD NTHREADS NVB_DISABLE NVB_PRECONNECT NVLINK_UTIL_CENTRIC_SCHED_ENABLE
    NVLSTREE_MAX_CHUNKSIZE NVLS_CHUNKSIZE NVLS_ENABLE NVLS_NCHANNELS NVTX_DISABLE OOB_NET_ENABLE
    OOB_NET_IFNAME P2P_DIRECT_DISABLE P2P_DISABLE P2P_LEVEL P2P_LL_THRESHOLD P2P_NET_CHUNKSIZE
    P2P_NVL_CHUNKSIZE P2P_PCI_CHUNKSIZE P2P_PER_CHANNEL_THRESHOLD P2P_PXN_LEVEL P2P_READ_ENABLE
    P2P_SCHEDULE_GROUP_SIZE P2P_USE_CUDA_MEMCPY PARALLEL_INIT_DISABLE PAT_ENABLE PKT_SIZE
    PROFILER_PLUGIN PROFILE_DUMP_FILE PROFILE_EVENT_MASK PROGRESS_APPENDOP_FREQ PROTO
    PROXY_CPUSET PROXY_DUMP_SIGNAL PXN_C2C PXN_DISABLE RAS_ADDR RAS_ENABLE RAS_TIMEOUT_FACTOR
    RINGS RUNTIME_CONNECT SCATTER_CACHE_POLICY SETUP_COMM_CACHE SET_CPU_STACK_SIZE
    SET_STACK_SIZE SET_THREAD_NAME SHM_DISABLE SHM_LOCALITY SHM_MEMCPY_MODE SHM_USE_CUDA_MEMCPY
    SINGLE_PROC_MEM_REG_ENABLE SINGLE_RING_THRESHOLD SOCKET_FAMILY SOCKET_IFNAME SOCKET_INLINE
    SOCKET_MIN_TASKSIZE SOCKET_NTHREADS SOCKET_POLL_TIMEOUT_MSEC SOCKET_RECV_BUFFER
    SOCKET_RETRY_CNT SOCKET_RETRY_SLEEP_MSEC SOCKET_SEND_BUFFER STORK_ENABLE SYM_CTAS SYM_KERNEL
    THREAD_THRESHOLDS TOPO_DUMP_FILE TOPO_DUMP_FILE_RANK TOPO_FILE TREE_THRESHOLD
    TUNER_CONFIG_FILE TUNER_PLUGIN UID_STAGGER_RATE UID_STAGGER_THRESHOLD UNPACK_FIFO_SIZE
    USE_GDR VERSION WIN_ENABLE WIN_STRIDE WORK_ARGS_BYTES WORK_FIFO_BYTES WORK_FIFO_DEPTH
    """,
)

# Variables about communication in torch 2.11 to 2.15.
TORCH = _named(
    "TORCH_NCCL_",
    """
    ABORT_IN_DESTROY_PG ASYNC_ERROR_HANDLING AVOID_RECORD_STREAMS BCAST_UNIQUEID BLOCKING_WAIT
    COORD_CHECK_MILSEC CUDA_EVENT_CACHE DEBUG_INFO_PIPE_FILE DEBUG_INFO_TEMP_FILE DESYNC_DEBUG
    DUMP_ON_TIMEOUT ENABLE_MONITORING ENABLE_TIMING EXTRA_DUMP_ON_EXEC HEARTBEAT_TIMEOUT_SEC
    HIGH_PRIORITY LOG_CPP_STACK_ON_UNCLEAN_SHUTDOWN NAN_CHECK NONBLOCKING_TIMEOUT PROPAGATE_ERROR
    RANKS_PER_ROOT RETHROW_CUDA_ERRORS SHOW_EAGER_INIT_P2P_SERIALIZATION_WARNING
    SKIP_CHECK_FOR_EAGER_INIT TEARDOWN_ON_TIMEOUT TRACE_BUFFER_SIZE TRACE_CPP_STACK
    USE_COMM_NONBLOCKING USE_TENSOR_REGISTER_ALLOCATOR_HOOK WAIT_TIMEOUT_DUMP_MILSEC
    """,
) | _named(
    "TORCH_",
    """
    CPP_LOG_LEVEL DISABLE_SHARE_RDZV_TCP_STORE DISTRIBUTED_DEBUG
    DISTRIBUTED_PIPELINE_PER_EDGE_P2P DISTRIBUTED_USE_TORCHCOMMS DIST_INIT_BARRIER
    DIST_NAN_CHECK DIST_USE_NCCL2 FR_BUFFER_SIZE FR_CPP_STACK
    FR_DUMP_DYNAMIC_FILE_NAME FR_DUMP_ON_TIMEOUT FR_DUMP_TEMP_FILE FR_WAIT_TIMEOUT_DUMP_MILSEC
    GLOO_LAZY_INIT LOGS LOGS_OUT SHOW_CPP_STACKTRACES SYMMMEM SYMMMEM_IMPLICIT_POOL SYMMMEM_NBLOCKS
    SYMM_MEM_ALLOW_OVERLAPPING_DEVICES SYMM_MEM_DISABLE_MULTICAST SYMM_MEM_ENABLE_NATIVE_ASYNC_TP
    """,
)

GLOO = _named(
    "GLOO_",
    """
    ASYNC_TIMEOUT_DEBUG DEVICE_TRANSPORT DISABLE_CONNECTION_RETRIES ENABLE_RANK_AS_SEQUENCE_NUMBER
    ENABLE_STORE_V2_API LOG_LEVEL SOCKET_IFNAME
    """,
)

OMP = _named(
    "OMP_",
    """
    AFFINITY_FORMAT ALLOCATOR CANCELLATION DEBUG DEFAULT_DEVICE DISPLAY_AFFINITY DISPLAY_ENV
    DYNAMIC MAX_ACTIVE_LEVELS MAX_TASK_PRIORITY NESTED NUM_TEAMS NUM_THREADS PLACES PROC_BIND
    SCHEDULE STACKSIZE TARGET_OFFLOAD TEAMS_THREAD_LIMIT THREAD_LIMIT TOOL TOOL_LIBRARIES
    WAIT_POLICY
    """,
)

KNOWN = NCCL | TORCH | GLOO | OMP

# Old name → new name; None: the variable has no effect any more.
RENAMED: dict[str, str | None] = {
    "NCCL_ASYNC_ERROR_HANDLING": "TORCH_NCCL_ASYNC_ERROR_HANDLING",
    "NCCL_BLOCKING_WAIT": "TORCH_NCCL_BLOCKING_WAIT",
    "NCCL_DESYNC_DEBUG": "TORCH_NCCL_DESYNC_DEBUG",
    "NCCL_ENABLE_TIMING": "TORCH_NCCL_ENABLE_TIMING",
    "NCCL_MIN_NRINGS": "NCCL_MIN_NCHANNELS",
    "NCCL_MAX_NRINGS": "NCCL_MAX_NCHANNELS",
    "NCCL_RINGS": None,
    "NCCL_TREE_THRESHOLD": None,
    "NCCL_LL_THRESHOLD": None,
    "NCCL_SINGLE_RING_THRESHOLD": None,
    "NCCL_IB_CUDA_SUPPORT": "NCCL_NET_GDR_LEVEL",
    "NCCL_GDR_LEVEL": "NCCL_NET_GDR_LEVEL",
    "NCCL_USE_GDR": "NCCL_NET_GDR_LEVEL",
    "TORCH_NCCL_TRACE_BUFFER_SIZE": "TORCH_FR_BUFFER_SIZE",
    "TORCH_NCCL_TRACE_CPP_STACK": "TORCH_FR_CPP_STACK",
    "TORCH_NCCL_DEBUG_INFO_TEMP_FILE": "TORCH_FR_DUMP_TEMP_FILE",
    "TORCH_NCCL_AVOID_RECORD_STREAMS": None,
    "PYTORCH_CUDA_ALLOC_CONF": "PYTORCH_ALLOC_CONF",
    "OMP_NESTED": "OMP_MAX_ACTIVE_LEVELS",
}

# Prefixes of plugins, which have variables of their own.
_PLUGINS = (
    *("NCCL_TESTS_", "NCCL_OFI_", "NCCL_FASTRAK_", "NCCL_GPUDIRECTTCPX_", "NCCL_UCX_"),
    *("NCCL_SHARP_", "NCCL_PLUGIN_", "NCCL_IBEXT_", "NCCL_DEBUG_LOCATION"),
)


def closest_known(name: str) -> str | None:
    """The known variable that `name` is probably a misspelling of; None if none is close."""
    if name in KNOWN or name in RENAMED or name.startswith(_PLUGINS):
        return None
    if name.upper() in KNOWN:
        return name.upper()
    close = difflib.get_close_matches(name, KNOWN, n=1, cutoff=0.88)
    return close[0] if close else None


@machine_check(
    "env.misspelt",
    "variables one or two letters away from one that NCCL, torch, gloo or OpenMP reads",
    "a misspelt variable is silently ignored",
    "rename the variable, or unset it",
)
def misspelt(machine: Machine) -> Findings:
    for name, value in sorted(settings(machine).items()):
        if correct := closest_known(name):
            yield warn(
                "machine",
                f"{name} is set, but no library reads it",
                f"probably {correct}",
                f"unset {name}",
                f"export {correct}={value}",
                cure=f"rename it to {correct}, or unset it",
            )


@machine_check(
    "env.renamed",
    "variables that were renamed or no longer have an effect",
    "the old name is deprecated or ignored",
    "use the new name, or unset the variable",
)
def renamed(machine: Machine) -> Findings:
    for name, value in sorted(settings(machine).items()):
        if name not in RENAMED:
            continue
        new = RENAMED[name]
        if new is None:
            expected = "not set: it has no effect any more"
            yield warn("machine", f"{name}={value}", expected, f"unset {name}")
        else:
            commands = (f"unset {name}", f"export {new}={value}")
            yield warn("machine", f"{name}={value}", f"the new name {new}", *commands)


# --- values --------------------------------------------------------------------------------------

# Variable, value that disables a feature, effect.
_SWITCHES = (
    ("NCCL_P2P_DISABLE", "1", "GPUs of a host communicate through host memory"),
    ("NCCL_SHM_DISABLE", "1", "GPUs without peer access use the network even inside a host"),
    ("NCCL_IB_DISABLE", "1", "TCP is used instead of InfiniBand and RoCE"),
    ("NCCL_NVLS_ENABLE", "0", "NVSwitch does not reduce; all_reduce is up to 25 % slower"),
    ("NCCL_CUMEM_ENABLE", "0", "no symmetric memory windows and no NVLS registration"),
    ("NCCL_NET_GDR_LEVEL", "LOC", "NICs cannot access GPU memory directly"),
    ("NCCL_P2P_LEVEL", "LOC", "GPUs of a host communicate through host memory"),
    ("NCCL_RAS_ENABLE", "0", "NCCL RAS cannot report what a stuck job waits for"),
)
# Ranks that share a GPU need these; `tutti run --ranks-per-gpu` sets the first.
_FOR_SHARED_GPUS = ("NCCL_IB_DISABLE", "NCCL_P2P_DISABLE", "NCCL_SHM_DISABLE")


@machine_check(
    "env.switched_off",
    "transports and features that a variable disables",
    "such variables are often left from debugging and cost most of the bandwidth",
    "unset the variable and measure again with tutti bench collectives",
)
def switched_off(machine: Machine) -> Findings:
    variables = settings(machine)
    for name, off, effect in _SWITCHES:
        if variables.get(name, "").upper() != off:
            continue
        if name in _FOR_SHARED_GPUS and shares_gpus(variables):
            continue
        source = " (in nccl.conf)" if name not in machine.variables else ""
        yield warn("machine", f"{name}={off}{source}: {effect}", "not set", f"unset {name}")


_PINNED = (
    *("NCCL_ALGO", "NCCL_PROTO", "NCCL_MIN_NCHANNELS", "NCCL_MAX_NCHANNELS", "NCCL_NTHREADS"),
    *("NCCL_BUFFSIZE", "NCCL_MIN_CTAS", "NCCL_MAX_CTAS"),
)


@machine_check(
    "env.pinned",
    "algorithm, protocol, channels, threads or buffers fixed for all message sizes",
    "NCCL chooses by size and topology; LL128 corrupts data where the hardware does not support it",
    "unset the variable unless a measurement on this machine shows a gain",
)
def pinned(machine: Machine) -> Findings:
    variables = settings(machine)
    for name in _PINNED:
        if name not in variables:
            continue
        value = variables[name]
        if name == "NCCL_PROTO" and "LL128" in value.upper() and not value.startswith("^"):
            observed = f"NCCL_PROTO={value} forces LL128, which corrupts data on some machines"
            expected = "not set: NCCL uses LL128 only where it is safe"
            yield fail("machine", observed, expected, f"unset {name}")
        else:
            observed = f"{name}={value} for all message sizes"
            expected = "not set: NCCL chooses by size and topology"
            yield warn("machine", observed, expected, f"unset {name}")


# Variable, values, cost.
_COSTLY = (
    ("CUDA_LAUNCH_BLOCKING", ("1",), "the host waits for every kernel, so nothing overlaps"),
    ("TORCH_DISTRIBUTED_DEBUG", ("DETAIL",), "every collective is first compared across all ranks"),
    ("TORCH_NCCL_BLOCKING_WAIT", ("1", "TRUE"), "every collective blocks the host"),
    ("TORCH_NCCL_NAN_CHECK", ("1", "TRUE"), "the input of every collective is scanned for NaN"),
    ("TORCH_NCCL_DESYNC_DEBUG", ("1", "TRUE"), "every collective is logged to the store"),
    ("NCCL_CHECK_POINTERS", ("1",), "every pointer is checked at every call"),
    (
        "NCCL_CHECKS_DISABLE",
        ("1",),
        "a wrong argument crashes or hangs instead of raising an error",
    ),
)


@machine_check(
    "env.debugging",
    "debugging variables that slow down every step",
    "they are easily left set after debugging",
    "unset the variable in production",
)
def debugging(machine: Machine) -> Findings:
    variables = settings(machine)
    for name, values, cost in _COSTLY:
        if variables.get(name, "").upper() in values:
            observed = f"{name}={variables[name]}: {cost}"
            yield warn("machine", observed, "not set in production", f"unset {name}")
    level = variables.get("NCCL_DEBUG", "").upper()
    if level in ("INFO", "TRACE") and "NCCL_DEBUG_FILE" not in variables:
        yield warn(
            "machine",
            f"NCCL_DEBUG={level} without NCCL_DEBUG_FILE: all ranks write to the same output",
            "NCCL_DEBUG=WARN, or one log file per process",
            "export NCCL_DEBUG=WARN",
            cure="set NCCL_DEBUG=WARN, or NCCL_DEBUG_FILE=nccl.%h.%p.log",
        )


_CHOICES: dict[str, tuple[str, ...]] = {
    "NCCL_DEBUG": ("VERSION", "WARN", "INFO", "ABORT", "TRACE"),
    "TORCH_DISTRIBUTED_DEBUG": ("OFF", "INFO", "DETAIL"),
    "CUDA_DEVICE_ORDER": ("FASTEST_FIRST", "PCI_BUS_ID"),
    "NCCL_SOCKET_FAMILY": ("AF_INET", "AF_INET6"),
    "NCCL_LAUNCH_MODE": ("PARALLEL", "GROUP"),
    "GLOO_DEVICE_TRANSPORT": ("TCP", "TCP_TLS", "UV", "IBVERBS"),
}
_NUMBERS = (
    *("_DISABLE", "_ENABLE", "_TIMEOUT", "_RETRY_CNT", "_GID_INDEX", "_NCHANNELS", "_NTHREADS"),
)


@machine_check(
    "env.values",
    "values that are out of range or of the wrong type",
    "NCCL reads NCCL_P2P_DISABLE=true as 0",
    "set a valid value",
)
def invalid_values(machine: Machine) -> Findings:
    variables = settings(machine)
    for name, value in sorted(variables.items()):
        allowed = _CHOICES.get(name)
        if allowed and value.upper() not in allowed:
            yield warn("machine", f"{name}={value}", f"one of {', '.join(allowed)}")
        # NCCL parses the leading digits: `true` is 0, the opposite of what was meant.
        is_number = name.startswith("NCCL_") and name.endswith(_NUMBERS)
        if is_number and not value.lstrip("-").isdecimal():
            cure = "use a number: 1 for yes, 0 for no"
            yield fail("machine", f"{name}={value} is read as 0", "a number", cure=cure)
        if value != value.strip() or value[:1] in ("'", '"'):
            observed = f"{name}={value!r} contains quotes or spaces"
            cure = "remove quotes and spaces from the value"
            yield warn("machine", observed, "a value without quotes and spaces", cure=cure)
    timeout = variables.get("NCCL_IB_TIMEOUT", "20")
    if timeout.isdecimal() and not 14 <= int(timeout) <= 22:
        seconds = 4.096e-6 * 2 ** min(int(timeout), 31)
        observed = f"NCCL_IB_TIMEOUT={timeout}: a packet is given up after {seconds:.3g} s"
        yield warn("machine", observed, "14 to 22 (default 20)", "export NCCL_IB_TIMEOUT=20")
    retries = variables.get("NCCL_IB_RETRY_CNT", "7")
    if retries.isdecimal() and int(retries) < 7:
        observed = f"NCCL_IB_RETRY_CNT={retries}"
        yield warn("machine", observed, "7, the default", "unset NCCL_IB_RETRY_CNT")


@host_check(
    "env.threads",
    "OMP_NUM_THREADS against CPUs and ranks",
    "by default every rank starts one thread per CPU, and the threads compete for the CPUs",
    "set it to CPUs / ranks (torchrun sets 1, tutti run sets the quotient)",
)
def omp_threads(cluster: Cluster, host: int) -> Findings:
    machine = cluster.machines[host]
    ranks = max(1, cluster.ranks_on(host))
    own, cpus = len(parse_cpu_list(machine.cpus.allowed)), cluster.cpus_on(host)
    if isinstance(machine.limits.cgroup_cpus, int | float):
        cpus = min(cpus, max(1, round(machine.limits.cgroup_cpus)))
    value = machine.variables.get("OMP_NUM_THREADS", "")
    threads = value.split(",")[0]
    share = max(1, cpus // ranks)
    command = f"export OMP_NUM_THREADS={share}"
    if value and not threads.isdecimal():
        yield warn("machine", f"OMP_NUM_THREADS={value}", "a number", command)
    elif not value and ranks > 1 and len(machine.accelerators) > 1 and ranks * own > cpus:
        observed = f"OMP_NUM_THREADS is not set: {ranks} ranks start {own} threads each"
        yield warn("machine", observed, f"{share}: {cpus} CPUs / {ranks} ranks", command)
    elif value and int(threads) * ranks > 2 * cpus:
        observed = f"OMP_NUM_THREADS={value} × {ranks} rank{'s' * (ranks > 1)} on {cpus} CPUs"
        yield warn("machine", observed, f"at most {share}", command)
    else:
        yield passed(f"OMP_NUM_THREADS={value or '(not set)'}, {cpus} CPUs")


@machine_check(
    "env.allocator",
    "expandable segments together with NCCL's tensor registration",
    "a segment that grows cannot stay registered with NCCL",
    "use only one of the two",
)
def allocator(machine: Machine) -> Findings:
    variables = settings(machine)
    conf = variables.get("PYTORCH_ALLOC_CONF") or variables.get("PYTORCH_CUDA_ALLOC_CONF") or ""
    expandable = "expandable_segments:true" in conf.lower().replace(" ", "")
    hook = variables.get("TORCH_NCCL_USE_TENSOR_REGISTER_ALLOCATOR_HOOK", "0").upper()
    if expandable and hook in ("1", "TRUE"):
        yield warn(
            "machine",
            "expandable_segments:True and TORCH_NCCL_USE_TENSOR_REGISTER_ALLOCATOR_HOOK=1",
            "only one of the two: a segment that grows cannot stay registered",
            "unset TORCH_NCCL_USE_TENSOR_REGISTER_ALLOCATOR_HOOK",
        )


@machine_check(
    "env.devices",
    "CUDA_DEVICE_MAX_CONNECTIONS and CUDA_DEVICE_ORDER",
    "a single hardware queue prevents overlap; by default CUDA numbers different GPUs by speed",
    "unset the first; set the second to PCI_BUS_ID if GPUs differ",
)
def cuda_devices(machine: Machine) -> Findings:
    variables = settings(machine)
    if variables.get("CUDA_DEVICE_MAX_CONNECTIONS") == "1":
        yield warn(
            "machine",
            "CUDA_DEVICE_MAX_CONNECTIONS=1: compute and communication share one hardware queue",
            "not set, unless tensor parallelism on GPUs before Blackwell needs it; it slows FSDP",
            "unset CUDA_DEVICE_MAX_CONNECTIONS",
        )
    models = {each.name for each in machine.accelerators}
    if len(models) > 1 and variables.get("CUDA_DEVICE_ORDER") != "PCI_BUS_ID":
        yield warn(
            "machine",
            f"{len(models)} GPU models, and CUDA_DEVICE_ORDER is not PCI_BUS_ID",
            "CUDA numbers GPUs as nvidia-smi does",
            "export CUDA_DEVICE_ORDER=PCI_BUS_ID",
            cure="set CUDA_DEVICE_ORDER=PCI_BUS_ID",
        )


@machine_check(
    "env.files",
    "/etc/nccl.conf and ~/.nccl.conf against the environment",
    "NCCL applies these files without logging it",
    "keep each setting in one place",
)
def nccl_conf_files(machine: Machine) -> Findings:
    for path, values in sorted(machine.nccl_conf.items()):
        overridden = [
            name for name in values if machine.variables.get(name, values[name]) != values[name]
        ]
        for name in sorted(overridden):
            observed = (
                f"{path} has {name}={values[name]}, the environment {machine.variables[name]}"
            )
            yield warn("machine", observed, "one value (the environment takes precedence)")
        if not overridden:
            pairs = ", ".join(f"{k}={v}" for k, v in sorted(values.items()))
            yield passed(f"{path} sets {pairs}")


CHECKS = (
    *(misspelt, renamed, switched_off, pinned, debugging, invalid_values, omp_threads),
    *(allocator, cuda_devices, nccl_conf_files),
)
