"""Legacy checkpoints of runs that never were: Megatron's files, cut from known tensors, to be changed before saving.

Cutting and flattening follow megatron-core's own code (cited at each place), not the rules that are under test.
"""

from __future__ import annotations

import math
import re
from argparse import Namespace
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

Tensors = dict[str, Tensor]

HIDDEN, HEADS, FFN, VOCAB, EXPERTS = 8, 4, 12, 16, 4


@dataclass(kw_only=True)
class FakeLegacy:
    """A run and its files."""

    kind: str = "gpt"
    tp: int = 1
    pp: int = 1
    vpp: int = 1
    ep: int = 1
    etp: int = 0
    dp: int = 2
    layers: int = 4
    optimizer: str = "whole"
    """"whole", "fp32", "none", or a generation of the distributed optimizer: "L1", "L2", "L3", "L3a"."""
    bucket: int | None = None
    tied: bool = False
    version: float = 3.0
    style: str = "mcore"
    """How keys are written: "mcore", "te", "grouped" or "legacy"."""
    dtype: torch.dtype = torch.bfloat16
    frozen: tuple[str, ...] = ()
    plain_norms: bool = False
    """Whether norms are all one."""
    per_layer: tuple[int, ...] = ()
    """Layers per chunk, in the order of the model; even when empty."""
    masters: Tensors = field(default_factory=dict)
    moments: dict[str, Tensors] = field(default_factory=dict)
    roots: dict[str, dict[str, Any]] = field(default_factory=dict)
    buffers: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.etp = self.etp or self.tp
        generator = torch.Generator().manual_seed(7)
        for name, shape in _shapes(self).items():
            noise = torch.randn(shape, generator=generator)
            self.masters[name] = torch.ones(shape) if self.plain_norms and "norm.weight" in name else noise
        for key in ("exp_avg", "exp_avg_sq"):
            self.moments[key] = {n: torch.randn(m.shape, generator=generator) for n, m in self.masters.items()}
        if self.optimizer == "fp32":
            self.dtype = torch.float32
        elif self.optimizer == "none":
            self.masters = {name: own.to(self.dtype).float() for name, own in self.masters.items()}
        for pp in range(self.pp):
            for tp, ep in self.writers():
                _add_rank(self, tp, pp, ep)

    @property
    def world(self) -> int:
        return self.tp * self.pp * self.dp

    @property
    def arguments(self) -> dict[str, Any]:
        return {
            "tensor_model_parallel_size": self.tp,
            "pipeline_model_parallel_size": self.pp,
            "virtual_pipeline_model_parallel_size": self.vpp if self.vpp > 1 else None,
            "expert_model_parallel_size": self.ep,
            "expert_tensor_parallel_size": self.etp,
            "context_parallel_size": 1,
            "data_parallel_size": self.dp,
            "world_size": self.world,
            "num_layers": self.layers,
            "hidden_size": HIDDEN,
            "ffn_hidden_size": FFN,
            "num_attention_heads": HEADS,
            "num_query_groups": HEADS,
            "group_query_attention": False,
            "kv_channels": HIDDEN // HEADS,
            "swiglu": self.kind != "gpt",
            "num_experts": EXPERTS if self.kind == "mixtral" else None,
            "normalization": "LayerNorm" if self.kind == "gpt" else "RMSNorm",
            "position_embedding_type": "learned_absolute" if self.kind == "gpt" else "rope",
            "add_bias_linear": self.kind == "gpt",
            "untie_embeddings_and_output_weights": not self.tied,
            "padded_vocab_size": VOCAB,
            "use_distributed_optimizer": self.optimizer.startswith("L"),
            "bf16": self.dtype is torch.bfloat16,
        }

    def writers(self) -> list[tuple[int, int]]:
        """Ranks (tp, ep) of one stage that save: the first of their dense or expert data-parallel group."""
        ranks = range(self.tp * self.dp)
        saving = [r for r in ranks if r // self.tp == 0 or r // (self.etp * self.ep) == 0]
        return list(dict.fromkeys((r % self.tp, r // self.etp % self.ep) for r in saving))

    def save(self, folder: Path, *, tracker: bool = True) -> Path:
        """Write everything below `folder`; gives the folder."""
        for name, root in self.roots.items():
            place = folder / "iter_0000010" / name
            place.mkdir(parents=True)
            torch.save(root, place / "model_optim_rng.pt")
            if name in self.buffers:
                torch.save(self.buffers[name], place / "distrib_optim.pt")
        if tracker:
            (folder / "latest_checkpointed_iteration.txt").write_text("10")
        return folder

    def expected(self, name: str, state: str = "weight") -> Tensor:
        return self.masters[name] if state == "weight" else self.moments[state][name]


@pytest.fixture
def fake_legacy() -> Callable[..., FakeLegacy]:
    """`fake_legacy(kind=..., tp=..., ...)`: a run with known tensors."""
    return FakeLegacy


def _shapes(run: FakeLegacy) -> dict[str, tuple[int, ...]]:
    """Global shapes in registration order (megatron-core 0.16, local spec)."""
    bias, gated = run.kind == "gpt", run.kind != "gpt"
    shapes: dict[str, tuple[int, ...]] = {"embedding.word_embeddings.weight": (VOCAB, HIDDEN)}
    if bias:
        shapes["embedding.position_embeddings.weight"] = (5, HIDDEN)

    def linear(name: str, rows: int, columns: int) -> None:
        shapes[f"{name}.weight"] = (rows, columns)
        if bias:
            shapes[f"{name}.bias"] = (rows,)

    def norm(name: str) -> None:
        shapes[f"{name}.weight"] = (HIDDEN,)
        if bias:
            shapes[f"{name}.bias"] = (HIDDEN,)

    wide = FFN * (2 if gated else 1)
    for layer in range(run.layers):
        at = f"decoder.layers.{layer}"
        norm(f"{at}.input_layernorm")
        linear(f"{at}.self_attention.linear_proj", HIDDEN, HIDDEN)
        linear(f"{at}.self_attention.linear_qkv", 3 * HIDDEN, HIDDEN)
        norm(f"{at}.pre_mlp_layernorm")
        if run.kind == "mixtral":
            shapes[f"{at}.mlp.router.weight"] = (EXPERTS, HIDDEN)
            for expert in range(EXPERTS):
                linear(f"{at}.mlp.experts.local_experts.{expert}.linear_fc1", wide, HIDDEN)
                linear(f"{at}.mlp.experts.local_experts.{expert}.linear_fc2", HIDDEN, FFN)
        else:
            linear(f"{at}.mlp.linear_fc1", wide, HIDDEN)
            linear(f"{at}.mlp.linear_fc2", HIDDEN, FFN)
    norm("decoder.final_layernorm")
    if not run.tied:
        shapes["output_layer.weight"] = (VOCAB, HIDDEN)
    return shapes


def cut(run: FakeLegacy, name: str, whole: Tensor, tp: int, etp: int) -> Tensor:
    """One rank's part (tensor_parallel/layers.py: ColumnParallelLinear, RowParallelLinear; mlp.py: gated MLP)."""
    parts, index = (run.etp, etp) if "local_experts" in name else (run.tp, tp)
    if "linear_fc1" in name and run.kind != "gpt":
        return torch.cat([half.chunk(parts)[index] for half in whole.chunk(2)])
    if name.endswith((".linear_proj.weight", ".linear_fc2.weight")):
        return whole.chunk(parts, dim=1)[index].contiguous()
    columns = (".linear_qkv.", ".linear_fc1.", "word_embeddings", "output_layer")
    return whole.chunk(parts)[index].contiguous() if any(part in name for part in columns) else whole


def _chunks(run: FakeLegacy, pp: int, ep: int) -> list[dict[str, str]]:
    """Local to global name, for every chunk of a stage (transformer_layer.py: get_transformer_layer_offset)."""
    count = run.pp * run.vpp
    sizes = run.per_layer or (run.layers // count,) * count
    found = []
    for vp in range(run.vpp):
        position = vp * run.pp + pp
        first = sum(sizes[:position])
        names = {}
        for name in run.masters:
            if name.startswith("embedding"):
                names |= {name: name} if position == 0 else {}
            elif name.startswith(("decoder.final", "output_layer")):
                names |= {name: name} if position == count - 1 else {}
            elif first <= int(name.split(".")[2]) < first + sizes[position]:
                local = _local(run, name, first, ep)
                names |= {} if local is None else {local: name}
        if run.tied and count > 1 and run.pp > 1 and position == count - 1:
            names["output_layer.weight"] = "embedding.word_embeddings.weight"
        found.append(names)
    return found


def _local(run: FakeLegacy, name: str, first: int, ep: int) -> str | None:
    parts = name.split(".")
    parts[2] = str(int(parts[2]) - first)
    if "local_experts" in parts:
        at = parts.index("local_experts") + 1
        each = EXPERTS // run.ep
        if not ep * each <= int(parts[at]) < (ep + 1) * each:
            return None
        parts[at] = str(int(parts[at]) - ep * each)
    return ".".join(parts)


def _add_rank(run: FakeLegacy, tp: int, pp: int, ep: int) -> None:
    rank = next(
        r
        for r in range(run.tp * run.dp)
        if r % run.tp == tp and r // run.etp % run.ep == ep and (r < run.tp or r < run.etp * run.ep)
    )
    etp = rank % run.etp
    chunks = _chunks(run, pp, ep)
    masters = [styled(run, {n: cut(run, g, run.masters[g], tp, etp) for n, g in own.items()}) for own in chunks]
    moments = {
        key: [styled(run, {n: cut(run, g, values[g], tp, etp) for n, g in own.items()}) for own in chunks]
        for key, values in run.moments.items()
    }
    name = f"mp_rank_{tp:02d}" + (f"_{pp:03d}" if run.pp > 1 else "") + (f"_{ep:03d}" if run.ep > 1 else "")
    root: dict[str, Any] = {
        "args": Namespace(**run.arguments, rank=rank + pp * run.tp * run.dp),
        "checkpoint_version": run.version,
        "iteration": 10,
        "rng_state": [{"np_rng_state": ("MT19937", rank), "torch_rng_state": torch.arange(4) + rank}],
    }
    for number, own in enumerate(masters):
        model: dict[str, Any] = {}
        for key, value in own.items():
            model[key] = value.to(run.dtype)
            if "linear" in key and key.endswith(".weight"):
                model[key.replace(".weight", "._extra_state")] = None
        root["model" if run.vpp == 1 else f"model{number}"] = nested(model) if run.style == "legacy" else model
    owns = (rank < run.tp, rank < run.etp * run.ep)
    if run.optimizer in ("whole", "fp32"):
        root["optimizer"] = _whole(run, masters, moments)
    elif run.optimizer != "none":
        root["optimizer"], run.buffers[name] = _distributed(run, masters, moments, owns, pp)
    run.roots[name] = root


_TE = {
    r"input_layernorm\.": "self_attention.linear_qkv.layer_norm_",
    r"local_experts\.(\d+)\.(linear_fc.)\.weight": r"\2.weight\1",
}
_TE_DENSE = {r"pre_mlp_layernorm\.": "mlp.linear_fc1.layer_norm_"}
_LEGACY = {
    r"^embedding\.": "language_model.embedding.",
    r"^decoder\.final_layernorm": "language_model.encoder.final_layernorm",
    r"^decoder\.": "language_model.encoder.",
    r"^output_layer\.": "word_embeddings_for_head.",
    r"self_attention\.linear_proj": "self_attention.dense",
    r"self_attention\.linear_qkv": "self_attention.query_key_value",
    r"pre_mlp_layernorm": "post_attention_layernorm",
    r"mlp\.linear_fc1": "mlp.dense_h_to_4h",
    r"mlp\.linear_fc2": "mlp.dense_4h_to_h",
}


def styled(run: FakeLegacy, own: Tensors) -> Tensors:
    """Local tensors as other module classes hold them, under their keys."""
    if run.style == "grouped":
        return _grouped(own)
    rules = {"te": {**_TE, **({} if run.kind == "mixtral" else _TE_DENSE)}, "legacy": _LEGACY}.get(run.style, {})
    return {_renamed(name, rules): value for name, value in own.items()}


def _renamed(name: str, rules: dict[str, str]) -> str:
    for pattern, text in rules.items():
        name = re.sub(pattern, text, name)
    return name


def _grouped(own: Tensors) -> Tensors:
    """transformer/moe/experts.py of 0.16: GroupedMLP keeps all experts in weight1 [h, n * f] and weight2 [n * f, h]."""
    found: Tensors = {}
    stacks: dict[str, list[Tensor]] = {}
    for name, value in own.items():
        match = re.fullmatch(r"(.*\.experts)\.local_experts\.\d+\.linear_fc([12])\.weight", name)
        if match is None:
            found[name] = value
        else:
            key = f"{match[1]}.weight{match[2]}"
            found.setdefault(key, value)
            stacks.setdefault(key, []).append(value.t())
    for key, values in stacks.items():
        packed = torch.stack(values).contiguous()
        found[key] = packed.view(packed.shape[1], -1) if key.endswith("1") else packed.view(-1, packed.shape[2])
    return found


def nested(model: dict[str, Any]) -> dict[str, Any]:
    """Keys of language_model and its modules as dicts in dicts; those of the encoder stay flat."""
    root: dict[str, Any] = {}
    for key, value in model.items():
        parts = key.split(".")
        depth = 2 if parts[1:2] == ["encoder"] else len(parts) - 1
        at = root
        for part in parts[:depth]:
            at = at.setdefault(part, {})
        at[".".join(parts[depth:])] = value
    return root


def _split(run: FakeLegacy, own: Tensors) -> list[list[str]]:
    """Names of the dense parameters, and of the experts where they are parallel, in registration order."""
    trained = [name for name in own if name not in run.frozen]
    if run.ep == 1:
        return [trained]
    return [[n for n in trained if ".experts." not in n], [n for n in trained if ".experts." in n]]


def _groups(run: FakeLegacy, *, experts: bool) -> list[dict[str, Any]]:
    common = {"lr": 0.1, "betas": (0.9, 0.95), "is_expert_parallel": experts, "weight_decay": 0.1}
    return [{**common, "wd_mult": 1.0}, {**common, "wd_mult": 0.0}]


def _whole(run: FakeLegacy, masters: list[Tensors], moments: dict[str, list[Tensors]]) -> Any:
    """optimizer.py: Float16OptimizerWithFloat16Params, FP32Optimizer; __init__.py: _get_param_groups."""
    members = []
    for member in range(2 if run.ep > 1 else 1):
        rows: list[list[tuple[int, str]]] = [[], []]
        for chunk, own in enumerate(masters):
            for name in _split(run, own)[member]:
                rows[own[name].dim() == 1 or name.endswith(".bias")].append((chunk, name))
        groups, state, number = _groups(run, experts=member == 1), {}, 0
        for group, row in zip(groups, rows, strict=True):
            group["params"] = list(range(number, number + len(row)))
            for chunk, name in row:
                own_state = {key: values[chunk][name] for key, values in moments.items()}
                state[number] = {"step": torch.tensor(3.0), **own_state}
                number += 1
        inner = {"state": state, "param_groups": groups}
        if run.optimizer == "fp32":
            members.append(inner)
        else:
            fp32 = [[masters[chunk][name] for chunk, name in row] for row in rows]
            members.append({"optimizer": inner, "fp32_from_fp16_params": fp32})
    return members if run.ep > 1 else members[0]


def _distributed(
    run: FakeLegacy,
    masters: list[Tensors],
    moments: dict[str, list[Tensors]],
    owns: tuple[bool, bool],
    pp: int,
) -> tuple[Any, Any]:
    """distrib_optimizer.py: get_parameter_state_dp_zero, of several years."""
    optimizers: list[Any] = []
    files: list[Any] = []
    for member in range(2 if run.ep > 1 else 1):
        groups = [{**group, "step": 3} for group in _groups(run, experts=member == 1)]
        optimizers.append({"optimizer": {"param_groups": groups}})
        dp = run.dp if member == 0 else run.dp * run.tp // (run.etp * run.ep)
        state: dict[Any, Any] = {}
        for chunk, own in enumerate(masters):
            names = _split(run, own)[member]
            values = {"param": own, **{key: moments[key][chunk] for key in moments}}
            bucket = run.bucket if pp == 0 and chunk == 0 else None
            state[chunk] = {_dtype_key(run): _flat(run, names, values, dp, bucket)}
        if run.optimizer in ("L3", "L3a"):
            state = {"buckets_coalesced": True, **state}
        files.append(state if owns[member] else None)
    return (optimizers, files) if run.ep > 1 else (optimizers[0], files[0])


def _dtype_key(run: FakeLegacy) -> Any:
    return torch.float32 if run.optimizer == "L1" else (run.dtype, torch.float32)


def _flat(run: FakeLegacy, names: list[str], values: dict[str, Tensors], dp: int, bucket: int | None) -> dict[str, Any]:
    """param_and_grad_buffer.py, core 0.16 (L3a), 0.7 (L3), 0.5 (L2); megatron/model/distributed.py of 2023 (L1)."""
    align = 64 if run.optimizer == "L3a" else 1
    multiple = math.lcm(dp, 128) if run.optimizer in ("L3", "L3a") else dp
    buckets: list[list[tuple[str, int]]] = [[]]
    begin = end = 0
    for name in reversed(names):
        start = -(-end // align) * align
        end = start + values["param"][name].numel()
        buckets[-1].append((name, start - begin))
        if bucket is not None and run.optimizer != "L1" and end - begin >= bucket:
            end = begin = -(-end // multiple) * multiple
            buckets.append([])
    buckets = [own for own in buckets if own]
    stored: dict[str, Any] = {}
    for key, own in values.items():
        pieces = []
        for placed in buckets:
            length = max(at + own[name].numel() for name, at in placed)
            padded = length if run.optimizer in ("L3", "L3a") else -(-length // multiple) * multiple
            flat = torch.zeros(padded)
            for name, at in placed:
                flat[at : at + own[name].numel()] = own[name].flatten()
            pieces.append(flat)
        stored[key] = pieces if run.optimizer == "L2" else torch.cat(pieces) if pieces else torch.zeros(0)
    if run.optimizer in ("L3", "L3a"):
        stored["numel_unpadded"] = stored["param"].numel()
    return stored
