"""Settings of every test process: one thread (tiny matmuls are faster so, and xdist runs a process a core); no network."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
