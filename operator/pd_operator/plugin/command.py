"""What the commands of the plugin share: errors, arguments, and how a command asks the cluster."""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Coroutine
from typing import Any, TypeAlias, TypeVar

Commands: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"
T = TypeVar("T")


class PluginError(Exception):
    """Something that the user has to put right; the message says what."""


def kubeconfig_argument(parser: argparse.ArgumentParser) -> None:
    """--kubeconfig, the same for every command."""
    parser.add_argument("--kubeconfig", metavar="FILE", help="default: $KUBECONFIG, else ~/.kube/config")


def object_arguments(parser: argparse.ArgumentParser) -> None:
    """NAME, -n and -o of a command about one PDDeployment."""
    parser.add_argument("name", metavar="NAME", help="of the PDDeployment")
    parser.add_argument("-n", "--namespace", metavar="NAMESPACE", help="default: that of the kubeconfig's context, as kubectl")
    parser.add_argument("-o", "--output", choices=("text", "json"), default="text")
    kubeconfig_argument(parser)


def answer(reading: Coroutine[Any, Any, T]) -> T:
    """What a function of kube/read.py read.

    Raises:
        PluginError: the cluster cannot be read.
    """
    from pd_operator.kube.read import Unreadable  # noqa: PLC0415  slow imports that a saved snapshot does not need

    try:
        return asyncio.run(reading)
    except Unreadable as exc:
        raise PluginError(str(exc)) from exc
