"""What this machine is: devices, links, NUMA, NICs. Imports no other room."""
