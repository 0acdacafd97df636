"""The harness that makes a real Kubernetes cluster on one Linux machine, without Docker, for tests and the demo."""
