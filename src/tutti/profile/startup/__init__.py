"""The folder that `tutti profile -- COMMAND` puts on PYTHONPATH; see sitecustomize.py."""
