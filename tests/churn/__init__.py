"""Many PDDeployments and somebody else's pods on one set of nodes: who comes and goes, every binding, and what would fit."""
