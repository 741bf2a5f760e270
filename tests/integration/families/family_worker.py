"""Runs inside a job of megatron-core: writes where the framework itself says every parameter of a rank lies.

python family_worker.py FOLDER MODEL:LAYOUT ...

One JSON file per rank, FOLDER/MODEL:LAYOUT/RANK.json: coordinates, arguments, and for every tensor of the model, in the
order of its state dict, its local shape and its pieces: offsets in the whole, sizes, first element and strides in the
local tensor. The pieces are those of Megatron's own ShardedTensors and their factories.
"""

from __future__ import annotations

import json
import logging
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[3] / "fixtures" / "make" / "megatron"))

import torch.distributed as dist
from megatron_args import arguments
from megatron_cases import Case, Layout
from megatron_model import build, initialize_parallel, load_mcore
from megatron_ranks import run_ranks
from megatron_shims import install, kernels, patch_mcore
from megatron_state import Placement, initialize, placements
from torch import nn

PLAIN = (bool, int, float, str, type(None))


def main() -> None:
    logging.disable(logging.WARNING)
    install()
    with kernels():
        load_mcore()
    folder = Path(sys.argv[1])
    for name in sys.argv[2:]:
        model, layout = name.split(":")
        case = Case(model=model, layout=Layout.parse(layout), proves="where parameters lie")
        run_ranks(case.layout.world, describe, case, folder / name)


def describe(case: Case, folder: Path) -> None:
    from megatron.core import parallel_state

    patch_mcore(fused_adam=False)
    args = arguments(case)
    args.rank = args.local_rank = dist.get_rank()
    initialize_parallel(args)
    job = build(args, initialize)
    report = {
        "coords": {
            "tp": parallel_state.get_tensor_model_parallel_rank(),
            "ep": parallel_state.get_expert_model_parallel_rank(),
            "etp": parallel_state.get_expert_tensor_parallel_rank(),
        },
        "axes": {"tp": case.layout.tp, "ep": case.layout.ep, "etp": case.layout.expert_tp},
        "arguments": {key: value for key, value in vars(args).items() if isinstance(value, PLAIN)},
        "tensors": [told(own) for own in placements(job.modules)],
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{args.rank}.json").write_text(json.dumps(report))


def told(own: Placement) -> dict[str, object]:
    local = own.tensor.detach()
    return {
        "name": own.name,
        "parameter": isinstance(own.tensor, nn.Parameter),
        "local_shape": list(local.shape),
        "global_shape": list(own.shape),
        "pieces": [
            {
                "offsets": list(piece.offsets),
                "sizes": list(piece.local.shape),
                "start": piece.local.storage_offset() - local.storage_offset(),
                "strides": list(piece.local.stride()),
            }
            for piece in own.pieces(local)
        ],
    }


if __name__ == "__main__":
    main()
