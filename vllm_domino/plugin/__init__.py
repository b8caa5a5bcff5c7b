"""Everything that touches vLLM, and nothing else does (DESIGN C6)."""
