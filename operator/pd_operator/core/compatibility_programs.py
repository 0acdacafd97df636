"""Checks of the cache servers, the router, the images and the model as a whole."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from typing import Final

from packaging.version import InvalidVersion, Version

from pd_operator.core.capabilities import Check, Rule
from pd_operator.core.compatibility_case import Case, Finding, Predicate, whole
from pd_operator.core.compatibility_model import FIELD

DEFAULT_BLOCK: Final = 16  # vllm/config/cache.py DEFAULT_BLOCK_SIZE; larger defaults of backends are multiples of it
CHUNK: Final = "spec.lmcache.chunkSize"
VERSION_TAG: Final = r"v?(\d+\.\d+\.\d+)(?:[-.+].*)?"


def chunk_block(case: Case, rule: Rule) -> Iterator[Finding]:
    """The chunk is a multiple of the block of each role; for recurrent state the block is not known here."""
    block, *context = rule.names
    if case.spec.lmcache is None or case.recurrent:
        return
    spans = [whole(o, (block,), DEFAULT_BLOCK) * whole(o, tuple(context)) for o in case.roles]
    span = math.lcm(*spans)
    if case.spec.lmcache.chunk_size % span:
        said = any(o.flag(block, *context) for o in case.roles)
        having = (
            f"blocks hold {spans[0]} tokens on prefill and {spans[1]} on decode" if said else f"vLLM's block is {DEFAULT_BLOCK}"
        )
        yield Finding(CHUNK, str(case.spec.lmcache.chunk_size), having, f"a multiple of {span}")


def chunk_recurrent(case: Case, rule: Rule) -> Iterator[Finding]:
    """A chunk of which the block is not known."""
    if case.spec.lmcache is not None and case.recurrent:
        yield Finding(CHUNK, str(case.spec.lmcache.chunk_size), f"the model has {case.recurrent}", "")


def prefix_recurrent(case: Case, rule: Rule) -> Iterator[Finding]:
    """Prefix caching stays on for recurrent state."""
    for options in case.roles if case.recurrent else ():
        option = options.switch(rule.names[0])
        if option is not None and options.on(rule.names[0]) is False:
            yield Finding(option.field, option.shown, f"the model has {case.recurrent}", "prefix caching, or no spec.lmcache")


def context_cache(case: Case, rule: Rule) -> Iterator[Finding]:
    """Not both kinds of context parallelism in one engine."""
    prefill_names, decode_names = rule.names[:2], rule.names[2:]
    for options in case.roles:
        option = options.flag(*prefill_names)
        decode = whole(options, decode_names)
        if option is not None and whole(options, prefill_names) > 1 and decode > 1:
            yield Finding(option.field, option.shown, f"{decode_names[0]} is {decode}", "one of the two, or no spec.lmcache")


def server_memory(case: Case, rule: Rule) -> Iterator[Finding]:
    """No memory of sleep mode when the server opens it."""
    if case.spec.lmcache is None or case.spec.lmcache.transfer != "Server":
        return
    for options in case.roles:
        for name in rule.names:
            option = options.switch(name)
            if option is not None and options.on(name):
                yield Finding(option.field, option.shown, "spec.lmcache.transfer is Server", f"no {name}, or transfer Engine")


def cache_image(case: Case, rule: Rule) -> Iterator[Finding]:
    """The server runs from another image than the engine."""
    engine, server = case.images.get("engine", ""), case.images.get("lmcache", "")
    if case.spec.lmcache is not None and engine and server and engine != server:
        yield Finding("spec.lmcache.image", server, f"the engine runs from {engine}", "one image with both")


def fail_unseen(case: Case, rule: Rule) -> Iterator[Finding]:
    """Fail with a version for which it was not measured."""
    if case.spec.handoff.on_failure == "Fail":
        yield Finding("spec.handoff.onFailure", "Fail", "", "Recompute")


def image_tag(case: Case, rule: Rule) -> Iterator[Finding]:
    """A tag of a known repository names the version that the spec names."""
    spec, router = case.spec, case.upstream.router.version
    images = [("engine", spec.engine.image, spec.engine.version), ("router", spec.router.image, router)]
    if spec.lmcache is not None:
        images.append(("lmcache", spec.lmcache.image, spec.lmcache.version))
    for component, image, version in images:
        repository, _, tag = image.partition("@")[0].rpartition(":")
        match = re.fullmatch(VERSION_TAG, tag)
        known = any(repository == name or repository.endswith(f"/{name}") for name in rule.names)
        if known and match and not _same(match[1], version):
            having = f"spec.{component}.version is {version}"
            yield Finding(
                f"spec.{component}.image", image, having, f"an image of {version}, or spec.{component}.version: {match[1]}"
            )


def _same(tag: str, version: str) -> bool:
    try:
        return Version(tag).base_version == Version(version).base_version
    except InvalidVersion:
        return True  # refused elsewhere


def router_protocol(case: Case, rule: Rule) -> Iterator[Finding]:
    """A router that speaks the engine's handoff."""
    if case.spec.router.type not in rule.names:
        accepted = f"{', '.join(rule.names[:-1])} or {rule.names[-1]}"
        yield Finding("spec.router.type", case.spec.router.type, f"spec.engine.type is {case.spec.engine.type}", accepted)


def modalities(case: Case, rule: Rule) -> Iterator[Finding]:
    """A model of more than text."""
    if case.model is not None and case.model.modalities:
        having = f"its config.json has {' and '.join(case.model.modalities)}"
        yield Finding(FIELD, case.model.config_map, having, "")


def model_type(case: Case, rule: Rule) -> Iterator[Finding]:
    """A type that no table knows."""
    if case.model is not None and not case.model.known:
        yield Finding(FIELD, case.model.config_map, f"model_type is {case.model.model_type[:60]}", "")


PREDICATES: Final[Mapping[Check, Predicate]] = {
    Check.CHUNK_BLOCK: chunk_block,
    Check.CHUNK_RECURRENT: chunk_recurrent,
    Check.PREFIX_RECURRENT: prefix_recurrent,
    Check.CONTEXT_CACHE: context_cache,
    Check.SERVER_MEMORY: server_memory,
    Check.CACHE_IMAGE: cache_image,
    Check.FAIL_UNSEEN: fail_unseen,
    Check.IMAGE_TAG: image_tag,
    Check.ROUTER_PROTOCOL: router_protocol,
    Check.MODALITIES: modalities,
    Check.MODEL_TYPE: model_type,
}
