"""`tutti bench bandwidth`: links between ranks, one pair at a time and all together."""

# The parts that --only takes, in the order in which they are measured.
PARTS = ("pairs", "one_to_all", "all_to_all", "ring_vs_tree", "copies")
