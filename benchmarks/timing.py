"""Times of work on a GPU, between two CUDA events, and work recorded as a CUDA graph."""

from __future__ import annotations

from collections.abc import Callable

import torch

WARM = 3
"""Calls that do not count."""


def milliseconds(
    call: Callable[[], object], repeats: int, ahead_ms: float = 2, before: Callable[[], object] = lambda: None
) -> list[float]:
    """Of each of so many calls, sorted.

    Args:
        ahead_ms: how long the GPU is kept busy before each, so that the host gets ahead and its launches are not in the time.
        before: called before each.
    """
    times = []
    for _ in range(WARM + repeats):
        before()
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(int(ahead_ms * 2e6))  # clocks
        begin.record()
        call()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end))
    return sorted(times[WARM:])


def captured(call: Callable[[], object], times: int = 1) -> torch.cuda.CUDAGraph:
    """So many calls as a CUDA graph, after two that let libraries choose and allocate."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(2):
            call()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(times):
            call()
    return graph
