"""The rule of optimizer groups against real megatron-core: every argument that moves a parameter, in four releases."""

from __future__ import annotations

import functools
import json
import subprocess
import sys
from pathlib import Path

import pytest
from ucp_formats.megatron.groups import SavedGroup, assign_params, group_rule

from tests.integration.megatron.megatron_jobs import environment

pytestmark = [pytest.mark.integration, pytest.mark.slow, pytest.mark.timeout(900)]

LAYER = "decoder.layers.0."
EXPERT = f"{LAYER}mlp.experts.local_experts.0.linear_fc1.weight"
SHAPES = {
    "embedding.word_embeddings.weight": (8, 4),
    "embedding.position_embeddings.weight": (6, 4),
    f"{LAYER}input_layernorm.weight": (4,),
    f"{LAYER}self_attention.linear_qkv.weight": (12, 4),
    f"{LAYER}self_attention.linear_qkv.bias": (12,),
    f"{LAYER}self_attention.q_layernorm.weight": (2,),
    f"{LAYER}self_attention.k_layernorm.bias": (2,),
    f"{LAYER}self_attention.kv_layernorm.weight": (2,),
    f"{LAYER}mixer.conv1d.weight": (4, 1, 3),
    EXPERT: (6, 4),
    "output_layer.weight": (8, 4),
}
RATES: dict[str, object] = {"lr": 1e-3, "min_lr": 1e-4}
DECOUPLED: dict[str, object] = {**RATES, "decoupled_lr": 5e-4}
MUP: dict[str, object] = {**RATES, "use_mup": True, "hidden_size": 48, "mup_base_hidden_size": 16}
SINCE = {"apply_wd_to_qk_layernorm": "0.16", "embedding_init_method_std": "0.14", "use_mup": "0.17"}
"""Releases that know an argument: earlier ones save none of that name."""
ARGUMENTS: dict[str, dict[str, object]] = {
    "usual": RATES,
    "qk": {**RATES, "apply_wd_to_qk_layernorm": True},
    "embedding": {**RATES, "embedding_init_method_std": 0.5},
    "decoupled": DECOUPLED,
    "decoupled-min": {**DECOUPLED, "decoupled_min_lr": 1e-5, "apply_wd_to_qk_layernorm": True},
    "decoupled-same": {**RATES, "decoupled_lr": 1e-3},
    "mup": MUP,
    "mup-sgd": {**MUP, "optimizer": "sgd"},
    "mup-decoupled": {**MUP, **DECOUPLED},
}


CASES = [
    (release, name)
    for release in ("0.13.1", "0.15.3", "0.16.1", "0.19.2")
    for name, arguments in ARGUMENTS.items()
    if all(release > since for key, since in SINCE.items() if key in arguments)
]
Answer = list[tuple[dict[str, object], tuple[str, ...]]]


@functools.cache
def asked(release: str, folder: Path) -> dict[str, Answer]:
    """Arguments to the groups that a release makes with them: hyper-parameters and names."""
    folder.mkdir(exist_ok=True)
    question = {"shapes": SHAPES, "experts": [EXPERT], "arguments": list(ARGUMENTS.values())}
    (folder / "question.json").write_text(json.dumps(question))
    worker = Path(__file__).with_name("groups_worker.py")
    command = [sys.executable, str(worker), str(folder / "question.json"), str(folder / "answer.json")]
    subprocess.run(command, env=environment(release), check=True, timeout=600)
    answer = json.loads((folder / "answer.json").read_text())
    return {
        name: [(hyper, tuple(params)) for hyper, params in groups]
        for name, groups in zip(ARGUMENTS, answer, strict=True)
    }


@pytest.mark.parametrize(("release", "name"), CASES)
def test_parameters_are_in_the_groups_that_megatron_puts_them_in(
    release: str, name: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    groups = asked(release, tmp_path_factory.getbasetemp() / f"groups-{release}")[name]
    saved = [SavedGroup(chain=None, hyper=hyper) for hyper, _ in groups]
    rule = group_rule(ARGUMENTS[name], [hyper for hyper, _ in groups])
    found, left = assign_params(saved, SHAPES, {}, rule)
    assert left == []
    assert [group.params for group in found] == [params for _, params in groups]
    assert sum(len(params) for _, params in groups) == len(SHAPES)


@pytest.mark.parametrize(("release", "name"), [case for case in CASES if case[1] in ("qk", "embedding", "decoupled")])
def test_without_arguments_nothing_is_put_wrong(
    release: str, name: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    groups = asked(release, tmp_path_factory.getbasetemp() / f"groups-{release}")[name]
    saved = [SavedGroup(chain=None, hyper=hyper) for hyper, _ in groups]
    found, left = assign_params(saved, SHAPES, {}, group_rule({}, [hyper for hyper, _ in groups]))
    for group, (_, params) in zip(found, groups, strict=True):
        assert set(group.params) == set(params) - set(left)
