"""Pipeline parallelism: each rank holds one or more stages of consecutive layers."""
