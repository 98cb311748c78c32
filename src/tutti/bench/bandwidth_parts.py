"""The parts of `tutti bench bandwidth`, in the order in which they are measured."""

PARTS = ("pairs", "one_to_all", "all_to_all", "ring_vs_tree", "copies")
