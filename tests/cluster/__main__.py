"""python -m cluster up|status|kubeconfig|images|down: a Kubernetes cluster on this machine, for the demo and for tests."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from cluster import images, named, tools
from cluster.process import Processes, marked
from cluster.teardown import sweep

_DEFAULT = "dev"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m cluster", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    up = commands.add_parser("up", help="start a cluster; one that runs is left as it is, a broken one is made anew")
    up.add_argument("--nodes", type=int, default=2, help="real nodes, 0 to 2 (default 2; they need root)")
    up.add_argument("--kwok", type=int, default=0, help="fake nodes (default 0)")
    up.add_argument("--gpus", type=int, default=8, help="nvidia.com/gpu on each real node (default 8)")
    load = commands.add_parser("images", help="build images and import them into the real nodes")
    build = commands.add_parser(
        "build", help="build what tests need into the cache, so that no test waits for it: all tools, and images"
    )
    build.add_argument("images", nargs="*", default=[], help=f"images, of {', '.join(images.ALL)}; none unless named")
    load.add_argument(
        "images", nargs="*", default=[], help=f"of {', '.join(images.ALL)} (default: base, router, standin, operator)"
    )
    commands.add_parser("status", help="show components and nodes; the exit code is 1 when it is not up")
    commands.add_parser("kubeconfig", help="print the path of the administrator's kubeconfig")
    down = commands.add_parser("down", help="remove the cluster and everything it made")
    down.add_argument("--all", action="store_true", help="every named cluster, and what dead test sessions left")
    for command in (up, load, down, commands.choices["status"], commands.choices["kubeconfig"]):
        command.add_argument("--name", default=_DEFAULT, help=f"the cluster's name (default {_DEFAULT})")
    return parser


def main() -> int:
    options = _parser().parse_args()
    if options.command == "up":
        cluster = named.up(options.name, real=options.nodes, fake=options.kwok, gpus=options.gpus)
        print(f"export KUBECONFIG={cluster.kubeconfig}")
    elif options.command == "build":
        tools.tools(*tools.TOOLS)
        for name in options.images:
            images.ALL[name].build()
    elif options.command == "images":
        images.load(named.get(options.name), *(options.images or ("base", "router", "standin", "operator")))
    elif options.command == "status":
        return _status(options.name)
    elif options.command == "kubeconfig":
        print(named.get(options.name).kubeconfig)
    else:
        for name in named.names() if options.all else [options.name]:
            named.down(name)
        if options.all:
            sweep()
    return 0


def _status(name: str) -> int:
    trouble = named.problem(name)
    state = named.state_of(name)
    print(f"{name}: {'up' if trouble is None else trouble}")
    for process, pid in Processes(state).recorded().items():
        print(f"  {process:26} {'ended' if pid is None else f'pid {pid}, {_resident_mib(pid):.0f} MiB'}")
    print(f"  in all {len(marked(state))} processes, {sum(map(_resident_mib, marked(state))):.0f} MiB, pods not counted")
    if trouble is not None:
        return 1
    cluster = named.get(name)
    print(f"  kubeconfig {cluster.kubeconfig}")
    print(f"  real nodes: {', '.join(cluster.nodes) or 'none'}; KWOK nodes: {len(cluster.kwok_nodes)}")
    return 0


def _resident_mib(pid: int) -> float:
    try:
        pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    except OSError:  # it ended meanwhile
        return 0.0
    return pages * 4096 / 2**20


if __name__ == "__main__":
    try:
        sys.exit(main())
    except (RuntimeError, TimeoutError, ValueError) as error:
        sys.exit(f"error: {error}")
