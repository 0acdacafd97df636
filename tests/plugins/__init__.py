"""Plugins and small programs of the test suite and the Makefile."""
