"""Stand-ins for vLLM and LMCache: the same command lines, ports, HTTP answers and metrics, without models or accelerators."""
