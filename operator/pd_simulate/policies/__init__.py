"""Scaling policies: the operator's own and peers', each a function of a View."""
