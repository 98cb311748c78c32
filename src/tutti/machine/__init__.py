"""Description of this machine: devices, links between devices, NUMA nodes and NICs."""
