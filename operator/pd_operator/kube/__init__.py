"""The only package that talks to the Kubernetes API: client, reflector, store, lease, events."""
