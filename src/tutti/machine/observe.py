"""observe(): this host as a Machine, from /sys, /proc and the GPU driver. It never fails."""

import platform
from datetime import UTC, datetime
from pathlib import Path

from tutti.machine import system
from tutti.machine.cpus import read_cpus
from tutti.machine.files import Files
from tutti.machine.limits import read_limits
from tutti.machine.machine import Machine
from tutti.machine.nics import read_nics, read_rdma
from tutti.machine.numa import read_memory, read_numa
from tutti.machine.nvml import read_accelerators
from tutti.machine.pci import read_pci


def observe(root: Path = Path("/")) -> Machine:
    """What this host is, right now. `root` is where /sys and /proc are, for tests."""
    unknown: dict[str, str] = {}
    files = Files(unknown, root)
    pci = read_pci(files)
    versions = system.read_versions(files)
    accelerators, peers = read_accelerators(files, pci, versions)
    return Machine(
        host=platform.node(),
        observed_at=datetime.now(UTC).isoformat(timespec="seconds"),
        name_resolution=system.read_name_resolution(),
        system=system.read_system(files),
        kernel=platform.release(),
        architecture=platform.machine(),
        product=system.read_product(files),
        virtualisation=system.read_virtualisation(files),
        container=system.read_container(files),
        cpus=read_cpus(files),
        numa=read_numa(files),
        memory=read_memory(files),
        accelerators=accelerators,
        peers=peers,
        pci=pci,
        nics=read_nics(files),
        rdma=read_rdma(files),
        limits=read_limits(files),
        iommu_groups=_iommu_groups(files),
        kernel_parameters=system.read_kernel_parameters(files),
        kernel_modules=system.read_kernel_modules(files),
        sysctls=system.read_sysctls(files),
        nccl_conf=system.read_nccl_conf(files),
        variables=system.read_variables(),
        versions=versions,
        xids=system.read_xids(files),
        unknown=unknown,
    )


def _iommu_groups(files: Files) -> int | None:
    if not files.exists("/sys/kernel/iommu_groups"):
        files.unknown["iommu_groups"] = "/sys/kernel/iommu_groups is hidden"
        return None
    return len(files.names("/sys/kernel/iommu_groups"))
