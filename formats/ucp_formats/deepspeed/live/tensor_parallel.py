"""Tensor parallelism of an engine: of a client's `mpu` (Megatron-DeepSpeed), of a pipeline's grid, or AutoTP's."""

from __future__ import annotations

import importlib

from ucp.errors import UsageError
from ucp.live.run.mesh import RunMesh
from ucp_formats.deepspeed.live.handles import Engine

__all__ = ["is_tensor_parallel"]


def is_tensor_parallel(engine: Engine, mesh: RunMesh) -> bool:
    """Whether ranks share a copy of a layer. Raises UsageError where `mesh` says otherwise than the engine."""
    said = importlib.import_module("deepspeed.utils.bwc")
    ranks = int(said.bwc_tensor_model_parallel_world_size(engine.mpu))
    if ranks == 1:
        return False
    rank = int(said.bwc_tensor_model_parallel_rank(engine.mpu))
    if mesh.degree("tp") != ranks:
        got = f"one with tp={mesh.degree('tp')}" if mesh.topology is not None else "none"
        raise UsageError(f'expected a topology with tp={ranks}, as the engine has it, such as "tp={ranks}"; got {got}')
    if mesh.coords["tp"] != rank:
        raise UsageError(
            f"expected this rank at tp={rank}, as the engine has it; the topology puts it at tp={mesh.coords['tp']}, "
            "as Megatron numbers ranks. Pass a torch DeviceMesh that says the order of this run"
        )
    return True
