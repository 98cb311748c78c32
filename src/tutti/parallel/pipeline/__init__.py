"""Pipeline parallelism: each rank holds some consecutive layers of a model."""
