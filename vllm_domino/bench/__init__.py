"""Measuring drafters in real vLLM servers. Imports no vLLM: servers are processes, reached over HTTP."""
