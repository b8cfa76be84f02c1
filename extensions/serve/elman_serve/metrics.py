"""What `/metrics` tells."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram


class Metrics:
    """Counters of one server, in a registry of their own."""

    def __init__(self) -> None:
        self.registry = registry = CollectorRegistry()
        self.requests = Counter(
            "elman_requests", "Requests by path and HTTP status.", ["path", "status"], registry=registry
        )
        self.read = Counter("elman_prompt_tokens", "Tokens of prompts that the model has read.", registry=registry)
        self.written = Counter("elman_written_tokens", "Tokens of texts, as `usage` counts them.", registry=registry)
        self.hits = Counter("elman_prefix_hits", "Prompts that continued a kept state.", registry=registry)
        self.reused = Counter(
            "elman_prefix_reused_tokens", "Tokens of prompts that were not read again.", registry=registry
        )
        self.gone = Counter("elman_cancelled", "Texts whose client went away.", registry=registry)
        self.slots = Gauge("elman_slots_used", "Texts that are being written.", registry=registry)
        self.waiting = Gauge("elman_waiting", "Prompts that wait for a slot.", registry=registry)
        self.prefixes = Gauge("elman_prefix_states", "States of prefixes that are kept.", registry=registry)
        self.prefix_bytes = Gauge("elman_prefix_state_bytes", "Bytes of the states that are kept.", registry=registry)
        buckets = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
        self.first = Histogram(
            "elman_first_token_seconds", "From a request to its first token.", buckets=buckets, registry=registry
        )
        self.step = Histogram(
            "elman_step_seconds", "One token of every running text.", buckets=buckets, registry=registry
        )
