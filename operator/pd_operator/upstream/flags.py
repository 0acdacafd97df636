"""Command lines: merging defaults of ours with arguments of the user."""

from __future__ import annotations

from collections.abc import Sequence


def flag_of(arg: str) -> str:
    """The flag that an argument sets: `--kv_transfer_config.kv_role=x` -> `--kv-transfer-config`; "" for a value.

    vLLM's FlexibleArgumentParser takes underscores for dashes and dotted keys for JSON options
    (vllm-project/vllm vllm/utils/argparse_utils.py), so the same flag has several spellings.
    """
    if not arg.startswith("-") or arg.lstrip("-")[:1].isdigit():
        return ""
    name = arg.split("=", 1)[0]
    return name.split(".", 1)[0].replace("_", "-") if name.startswith("--") else name


def with_defaults(defaults: Sequence[tuple[str, ...]], user: Sequence[str]) -> list[str]:
    """Arguments of ours that the user may replace, followed by the user's own."""
    taken = {flag_of(arg) for arg in user}
    return [word for option in defaults if option[0] not in taken for word in option] + list(user)


def value_of(flag: str, args: Sequence[str]) -> str:
    """The value of a flag where it stands last, as `--flag=v` or `--flag v`; "" without one."""
    found = ""
    for index, arg in enumerate(args):
        if flag_of(arg) == flag:
            following = args[index + 1] if index + 1 < len(args) else ""
            found = arg.split("=", 1)[1] if "=" in arg else ("" if flag_of(following) else following)
    return found
