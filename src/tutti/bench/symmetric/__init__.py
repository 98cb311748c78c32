"""`tutti bench symmetric`: latency of one-sided operations and of the structures built on them."""
