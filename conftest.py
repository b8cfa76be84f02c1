"""Settings of every test process: one thread (tiny matmuls are faster so, and xdist runs a process a core); no network; signals
as a shell's foreground has them, also where the tests are started in its background or under nohup, which ignore some.
"""

import os
import signal

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

if hasattr(signal, "SIGHUP") and signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_xdist_auto_num_workers() -> int:
    """For `-n auto`: one more than there are cores, since many tests wait for a process or a compiler."""
    return (os.cpu_count() or 1) + 1
