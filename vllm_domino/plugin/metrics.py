"""Prometheus counters of the drafter, in the process that drafts.

vLLM's `/metrics` is served by another process, which sees only what the engine core sends it (its own
`vllm:spec_decode_*` counters work unchanged). Set VLLM_DOMINO_METRICS_PORT to have the drafting process serve these.
"""

from __future__ import annotations

import os
from contextlib import suppress

from prometheus_client import Counter, Histogram, start_http_server

PORT_VARIABLE = "VLLM_DOMINO_METRICS_PORT"
DRAFT_FAILURES = Counter("vllm_domino:draft_failures", "Draft steps that failed and went on without drafts")
DRAFT_SECONDS = Histogram(
    "vllm_domino:draft_seconds",
    "Host time of one draft step (on a GPU: of enqueueing it)",
    buckets=(0.0005, 0.001, 0.002, 0.004, 0.008, 0.016, 0.032, 0.064, 0.128, 0.256),
)


def serve_metrics() -> None:
    """Start the exporter when asked to; a second drafting process on the same port goes without."""
    port = os.environ.get(PORT_VARIABLE)
    if port:
        with suppress(OSError):
            start_http_server(int(port))
