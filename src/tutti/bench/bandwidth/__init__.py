"""`tutti bench bandwidth`: the speed of links, for each pair of ranks and for all ranks at once."""

# The parts that --only takes, in the order in which they are measured.
PARTS = ("pairs", "one_to_all", "all_to_all", "ring_vs_tree", "copies")
