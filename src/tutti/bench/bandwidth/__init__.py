"""`tutti bench bandwidth`: link bandwidth of each pair of ranks, and of all ranks at once."""

# The names of parts that --only accepts, in the order of measurement.
PARTS = ("pairs", "one_to_all", "all_to_all", "ring_vs_tree", "copies")
