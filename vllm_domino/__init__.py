"""Serve Domino speculative-decoding drafters in vLLM from engines exported per device."""

__version__ = "0.1.0"
