"""A Triton backend named `cpu` that compiles nothing, for tests under `TRITON_INTERPRET=1`.

vLLM's V2 model runner asks Triton for an active driver before it starts. The interpreter runs every kernel in Python,
so the driver only has to answer questions about the device. The folder above, on PYTHONPATH, is the installation:
the dist-info beside this package carries the entry point by which Triton finds it.
"""
