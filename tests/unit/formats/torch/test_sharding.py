from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from ucp_formats.torch.sharding import TargetSharding

from ucp.contract.plugins import pattern
from ucp.core.index import Index
from ucp.core.layout import AxisLayout, Layout
from ucp.core.target import TargetOptions
from ucp.core.topology import Topology
from ucp.errors import UcpError
from ucp.testing.handmade import Shards, make_index

LLAMA = {
    "model.embed_tokens.weight": (16, 8),
    **{
        f"model.layers.{layer}.{name}.weight": shape
        for layer in range(2)
        for name, shape in {
            "input_layernorm": (8,),
            "self_attn.q_proj": (8, 8),
            "self_attn.k_proj": (4, 8),
            "self_attn.v_proj": (4, 8),
            "self_attn.o_proj": (8, 8),
            "post_attention_layernorm": (8,),
            "mlp.gate_proj": (12, 8),
            "mlp.up_proj": (12, 8),
            "mlp.down_proj": (8, 12),
        }.items()
    },
    "model.norm.weight": (8,),
    "lm_head.weight": (16, 8),
}


def index_of(folder: Path, shapes: dict[str, tuple[int, ...]]) -> Index:
    shards = Shards(folder)
    return make_index(
        folder, {(name, "weight"): shards.whole(np.zeros(own, np.float32)) for name, own in shapes.items()}
    )


def boxes(cuts: TargetSharding, index: Index, name: str) -> list[tuple[str, int]]:
    atom = index.atoms[name]
    return [(str(box), rank) for box, rank in cuts.chunks(atom, atom.global_shape)]


def test_a_family_says_what_tensor_parallelism_cuts(tmp_path):
    index = index_of(tmp_path, LLAMA)
    cuts = TargetSharding(index, Topology.parse("dp=2,tp=2"), TargetOptions())
    assert boxes(cuts, index, "model.layers.0.self_attn.q_proj.weight") == [
        ("[0:2, 0:8]", 0),
        ("[2:4, 0:8]", 2),
        ("[4:6, 0:8]", 1),
        ("[6:8, 0:8]", 3),
    ]
    assert boxes(cuts, index, "model.layers.0.self_attn.o_proj.weight") == [
        ("[0:4, 0:4]", 0),
        ("[4:8, 0:4]", 2),
        ("[0:4, 4:8]", 1),
        ("[4:8, 4:8]", 3),
    ]
    norm = boxes(cuts, index, "model.norm.weight")
    assert [own for own, _ in norm] == ["[0:4]", "[4:8]"]
    assert [rank // 2 for _, rank in norm] == [0, 1]  # of any tensor-parallel rank
    assert "family llama" in cuts.notes[0]


def test_without_a_rule_all_ranks_of_a_stage_hold_chunks(tmp_path):
    index = index_of(tmp_path, {"w": (8, 3)})
    cuts = TargetSharding(index, Topology.parse("dp=2,tp=2"), TargetOptions())
    assert boxes(cuts, index, "w") == [(f"[{2 * rank}:{2 * rank + 2}, 0:3]", rank) for rank in range(4)]
    assert "no rule says which dim tp=2" in cuts.notes[0]


def test_a_family_that_the_user_names_has_to_fit(tmp_path):
    index = index_of(tmp_path, LLAMA)
    with pytest.raises(UcpError, match="nosuch"):
        TargetSharding(index, Topology(tp=2), TargetOptions(family="nosuch"))


def test_a_recorded_layout_goes_before_a_family(tmp_path):
    index = index_of(tmp_path, {"w": (8, 4)})
    layout = Layout((AxisLayout("tp", 4, pattern("chunk", dim=1)),))
    index = replace(index, atoms={"w": replace(index.atoms["w"], layout=layout)})
    cuts = TargetSharding(index, Topology(tp=2), TargetOptions())
    assert boxes(cuts, index, "w") == [("[0:8, 0:2]", 0), ("[0:8, 2:4]", 1)]
    assert not cuts.notes


def test_a_stage_has_its_layers(tmp_path):
    index = index_of(tmp_path, LLAMA)
    cuts = TargetSharding(index, Topology.parse("dp=2,pp=2"), TargetOptions())
    stages = {name: {rank // 2 for _, rank in boxes(cuts, index, name)} for name in index.atoms}
    assert all(len(own) == 1 for own in stages.values())
    assert stages["model.embed_tokens.weight"] == stages["model.layers.0.mlp.down_proj.weight"] == {0}
    assert stages["lm_head.weight"] == {1}
    assert list(stages.values()) == sorted(stages.values(), key=min)
