"""Pipeline parallelism: the layers of a model, one after the other, on different ranks."""
