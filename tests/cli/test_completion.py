"""What a shell is told to complete."""

from __future__ import annotations

import pytest
from click.shell_completion import BashComplete

from ucp_cli.verbs import cli


def complete(*words: str) -> list[str]:
    """Values for the last word."""
    *before, typed = words
    return [item.value for item in BashComplete(cli, {}, "ucp", "_UCP_COMPLETE").get_completions(list(before), typed)]


@pytest.mark.parametrize(
    ("words", "some"),
    [
        (("in",), {"inspect"}),
        (("convert", "--to", "deep"), {"deepspeed", "deepspeed-universal"}),
        (("convert", "--layout", "torch"), {"torch", "torch_dist"}),
        (("convert", "--drift", ""), {"error", "first", "mean"}),
        (("verify", "--family", "qwen"), {"qwen2", "qwen3", "qwen2-moe", "qwen3-moe"}),
        (("patterns", "show", "lla"), {"llama"}),
        (
            ("patterns", "show", "llama", "--style", "tor"),
            {
                "torch_dist",
                "torch_dist_keys",
                "torch_dist_layers",
                "torch_dist_singleton",
                "torchtitan",
                "torchtitan_0_2",
            },
        ),
        (("patterns", "l"), {"list"}),
    ],
)
def test_values(words: tuple[str, ...], some: set[str]) -> None:
    assert set(complete(*words)) == some
