"""The restricted profile of the Pod Security Standards, as far as a pod template can break it.

Source: kubernetes.io/docs/concepts/security/pod-security-standards (restricted, with all of baseline). The real admission plugin
has the last word in the integration tests; this one names the field within milliseconds.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

VOLUMES = {
    "configMap",
    "csi",
    "downwardAPI",
    "emptyDir",
    "ephemeral",
    "image",
    "persistentVolumeClaim",
    "projected",
    "secret",
}
SECCOMP = ("RuntimeDefault", "Localhost")


def violations(pod: Mapping[str, Any]) -> list[str]:
    """What is not allowed in a pod spec; empty when all is well."""
    return [*_pod(pod), *(v for kind in ("initContainers", "containers") for c in pod.get(kind, []) for v in _container(pod, c))]


def _pod(pod: Mapping[str, Any]) -> Iterator[str]:
    for key in ("hostNetwork", "hostPID", "hostIPC"):
        if pod.get(key):
            yield key
    for volume in pod.get("volumes", []):
        if not set(volume) - {"name"} <= VOLUMES:
            yield f"volume {volume['name']}: {sorted(set(volume) - {'name'} - VOLUMES)}"
    if pod.get("securityContext", {}).get("sysctls"):
        yield "sysctls"


def _container(pod: Mapping[str, Any], container: Mapping[str, Any]) -> Iterator[str]:
    name, mine = container["name"], container.get("securityContext", {})
    both = {**pod.get("securityContext", {}), **mine}
    if mine.get("privileged"):
        yield f"{name}: privileged"
    if mine.get("allowPrivilegeEscalation") is not False:
        yield f"{name}: allowPrivilegeEscalation"
    capabilities = mine.get("capabilities", {})
    if "ALL" not in capabilities.get("drop", []) or set(capabilities.get("add", [])) - {"NET_BIND_SERVICE"}:
        yield f"{name}: capabilities"
    if both.get("runAsNonRoot") is not True or both.get("runAsUser") == 0:
        yield f"{name}: runs as root"
    if both.get("seccompProfile", {}).get("type") not in SECCOMP:
        yield f"{name}: seccompProfile"
    if mine.get("procMount", "Default") != "Default" or "seLinuxOptions" in both:
        yield f"{name}: procMount or seLinuxOptions"
    if any(port.get("hostPort") for port in container.get("ports", [])):
        yield f"{name}: hostPort"
    hooks = [container.get(p, {}) for p in ("livenessProbe", "readinessProbe", "startupProbe")]
    if any(hook.get(kind, {}).get("host") for hook in hooks for kind in ("httpGet", "tcpSocket")):
        yield f"{name}: host of a probe"
