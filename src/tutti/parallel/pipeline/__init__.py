"""Pipeline parallelism: consecutive layers of a model on different ranks."""
