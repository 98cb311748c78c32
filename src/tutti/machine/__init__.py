"""The hardware and software of a machine: devices, links, NUMA nodes, NICs and checks."""
