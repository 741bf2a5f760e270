"""Asks real megatron-core for the optimizer groups of parameters, and writes them down with names.

    PYTHONPATH=.mcore/0.16.1 python groups_worker.py QUESTION.json ANSWER.json

QUESTION.json is `{"shapes": {name: shape}, "experts": [name], "arguments": [{argument: value}]}`; the answer holds, for
each set of arguments, a list of `[hyper-parameters, names]`. Arguments become what megatron/training/training.py makes
of them: a condition on the embedding in 0.14 and 0.15, overrides since 0.16.
"""

from __future__ import annotations

import dataclasses
import inspect
import json
import logging
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[3] / "fixtures" / "make" / "megatron"))

import torch
import torch.distributed as dist
from megatron_model import load_mcore
from megatron_shims import install, kernels

ENDS = ("embedding.word_embeddings.weight", "output_layer.weight")


def main() -> None:
    logging.disable(logging.WARNING)
    install()
    with kernels():
        load_mcore()
    question = json.loads(Path(sys.argv[1]).read_text())
    with tempfile.TemporaryDirectory() as scratch:
        dist.init_process_group("gloo", init_method=f"file://{scratch}/store", rank=0, world_size=1)
        answer = [groups_of(question, arguments) for arguments in question["arguments"]]
        dist.destroy_process_group()
    Path(sys.argv[2]).write_text(json.dumps(answer))


def groups_of(question: dict[str, Any], arguments: dict[str, Any]) -> list[Any]:
    """Groups of one set of arguments."""
    chunk = _Chunk(question, arguments)
    names = {id(param): name for name, param in chunk.params.items()}
    return [
        [{key: value for key, value in group.items() if key != "params"}, [names[id(own)] for own in group["params"]]]
        for group in _groups(chunk, arguments)
    ]


class _Chunk:
    """A chunk of the model, as far as groups are made of it: named parameters with the attributes that modules set."""

    def __init__(self, question: dict[str, Any], arguments: dict[str, Any]) -> None:
        self.ddp_config = SimpleNamespace(use_custom_fsdp=False)
        self.params = {name: torch.nn.Parameter(torch.empty(shape)) for name, shape in question["shapes"].items()}
        for name, param in self.params.items():
            if name in ENDS:
                param.is_embedding_or_output_parameter = True
            if arguments.get("use_mup") and (name in ENDS or name.startswith("embedding.")):
                param.is_embedding_parameter = True
            if name in question["experts"]:
                param.allreduce = False

    def named_parameters(self) -> list[tuple[str, torch.nn.Parameter]]:
        return list(self.params.items())


def _groups(chunk: _Chunk, arguments: dict[str, Any]) -> list[dict[str, Any]]:
    from megatron.core import optimizer
    from megatron.core.optimizer import OptimizerConfig, _get_param_groups

    known = {own.name for own in dataclasses.fields(OptimizerConfig)}
    config = OptimizerConfig(**{key: value for key, value in arguments.items() if key in known})
    if "config_overrides" not in inspect.signature(_get_param_groups).parameters:
        rates = {key: arguments.get(key) for key in ("lr", "min_lr", "decoupled_lr", "decoupled_min_lr")}
        if "default_skip_embedding_weight_decay" in inspect.signature(_get_param_groups).parameters:
            rates["default_skip_embedding_weight_decay"] = arguments.get("embedding_init_method_std") is not None
        return _get_param_groups([chunk], None, None, 1.0, **rates)
    overrides = optimizer.get_standard_config_overrides(config=config)
    if arguments.get("use_mup") and hasattr(optimizer, "get_mup_config_overrides"):
        width = arguments["hidden_size"] / arguments["mup_base_hidden_size"]
        overrides |= optimizer.get_mup_config_overrides(config, width, config.optimizer)
    return _get_param_groups([chunk], config, overrides)


if __name__ == "__main__":
    main()
