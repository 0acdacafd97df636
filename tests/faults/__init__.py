"""A proxy in front of a real API server that injects what real networks and servers do: 410, 429, 5xx, cut and silent watches."""
