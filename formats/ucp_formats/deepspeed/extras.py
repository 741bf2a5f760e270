"""Everything in a DeepSpeed checkpoint that is no tensor of a parameter: the table of its extras, read and written.

Beside these a reader makes `optimizer_ds_config` and `optimizer_file`, where an optimizer file says something else or
more than the model states; `optimizer_state/GROUP/NAME`, states that cannot be given to single parameters; and
`universal_parameters`, what a universal checkpoint says of single parameters beside the tensor.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from ucp.contract.ranks import Checksums, make_rank_extras
from ucp.contract.run_extras import MODULE_STATE, ExtraRow, ExtraTable, ExtraValues
from ucp.core.index import TAG, Extra, Index
from ucp_formats.deepspeed.read.module import EMPTY_SHAPES, ModelStates
from ucp_formats.deepspeed.read.optimizer.saved import UnshardedOptimizer
from ucp_formats.deepspeed.read.run import SavedRun

ENGINE = "engine"
"""Steps, samples, world sizes, version, parallel dimensions."""
UNSTEPPED = "param_groups"
"""Groups of a torch optimizer without states, where it is not known which parameters their numbers are."""

_SPARSE = ("sparse_tensor_module_names", "csr_tensor_module_names")  # the second before 0.5.9
AS_FOUND: ExtraTable = {
    "lr_scheduler": ExtraRow(keys=("lr_scheduler",), rank_stage=3),
    "data_sampler": ExtraRow(keys=("data_sampler",), rank_stage=3),
    "random_ltd": ExtraRow(keys=("random_ltd",), rank_stage=3),
    "sparse_tensor_module_names": ExtraRow(keys=_SPARSE, rank_stage=3),
    "ds_config": ExtraRow(keys=("ds_config",), rank_stage=3),
    "universal_checkpoint_info": ExtraRow(keys=("universal_checkpoint_info",), rank_stage=3),
    "num_experts": ExtraRow(keys=("num_experts",), rank_stage=3),
}
"""Values of model-states files that are kept as they are."""

EXTRAS: ExtraTable = {
    **AS_FOUND,
    ENGINE: ExtraRow(
        keys=(
            *("global_steps", "global_samples", "skipped_steps", "dp_world_size", "mp_world_size"),
            *("checkpoint_parallel_dimensions", "ds_version"),
        ),
        rank_stage=3,
    ),
    # every key that DeepSpeed did not write itself
    "client_state": ExtraRow(rank_stage=3),
    "client_state/": ExtraRow(rank_stage=3),
    # the scaler object, or without ZeRO its numbers
    "loss_scaler": ExtraRow(keys=("loss_scaler",), rank_stage=1),
    # what else the optimizer file says, with `class`, `zero_stage` and `file_prefix`
    "optimizer": ExtraRow(rank_stage=1),
    UNSTEPPED: ExtraRow(rank_stage=3),
    # of each layer the start of names, of each stage the trained parameters; of universal checkpoints, True
    "pipeline": ExtraRow(rank_stage=3),
    # versions of modules; entries of the module that are no tensors
    "module_metadata": ExtraRow(rank_stage=3),
    MODULE_STATE: ExtraRow(rank_stage=3),
    # buffers of ranks that differ from rank 0's
    "buffer/": ExtraRow(rank_stage=3),
    TAG: ExtraRow(rank_stage=3),
}


class CarriedExtras(ExtraValues):
    """Extras of any source by the names that DeepSpeed's files give them; where it lacks some, defaults stand.

    `ranks`, `stage`: of the target.
    """

    def __init__(self, index: Index, *, ranks: int, stage: int) -> None:
        super().__init__(index, EXTRAS, same_ranks=ranks == index.topology.dp)
        self._stage = stage

    def client_state(self, rank: int = 0) -> dict[str, object]:
        """What the training script saved of its own, by key."""
        return {**self.mapping("client_state", rank), **dict(self.with_prefix("client_state/", rank))}

    def left_behind(self) -> tuple[str, ...]:
        """What of the extras does not go into the target, one line per reason."""
        lines = []
        if lost := self.without_rank(self._stage):
            why = "one file holds them for all" if self._same_ranks else "the number of ranks changes"
            lines.append(f"values of single ranks are left out, as {why} (rank 0's are kept): {', '.join(lost)}")
        if foreign := self.without_place():
            lines.append(f"DeepSpeed's files have no place for these extras: {', '.join(foreign)}")
        return tuple(lines)


_IN_ATOMS = (
    *("module", "buffer_names", "optimizer", "param_shapes", "frozen_param_shapes", "shared_params"),
    *("frozen_param_fragments", EMPTY_SHAPES, "ds_autoep_layers"),
)
_OPTIMIZER_IN_ATOMS = (
    *("base_optimizer_state", "single_partition_of_fp32_groups", "optimizer_state_dict"),
    *("fp32_flat_groups", "fp32_groups", "fp32_groups_flat"),
    # derived from these
    *("group_paddings", "param_alignment_paddings", "partition_count", "param_slice_mappings"),
    *("zero_stage", "ds_version", "universal_checkpoint_info"),
)
_SCALE_NUMBERS = ("dynamic_loss_scale", "cur_scale", "cur_iter", "last_overflow_iter", "scale_factor", "scale_window")


def model_extras(models: Mapping[int, ModelStates], checksums: Checksums) -> list[Extra]:
    """Extras out of model-states files (rank to file)."""
    roots = {rank: model.file.root for rank, model in models.items()}
    counts = EXTRAS[ENGINE].keys
    engine = {rank: {key: root[key] for key in counts if key in root} for rank, root in roots.items()}
    extras = make_rank_extras(ENGINE, engine, checksums)
    as_found = {key: name for name, row in AS_FOUND.items() for key in row.keys}
    for key, name in as_found.items():
        values = {rank: root[key] for rank, root in roots.items() if root.get(key) is not None}
        if values:
            extras += make_rank_extras(name, values, checksums)
    known = {*counts, *as_found, *_IN_ATOMS}
    client = {rank: {k: v for k, v in root.items() if k not in known} for rank, root in roots.items()}
    return extras + (make_rank_extras("client_state", client, checksums) if any(client.values()) else [])


def optimizer_extras(run: SavedRun, checksums: Checksums) -> list[Extra]:
    """Extras out of optimizer files."""
    files = run.optimizers
    scalers = {rank: file.saved.get("loss_scaler") for rank, file in files.items()}
    extras = make_rank_extras("loss_scaler", scalers, checksums) if any(v is not None for v in scalers.values()) else []
    facts = {
        "class": "BF16_Optimizer" if run.is_bf16_optimizer else "ZeRO-3" if run.stage == 3 else "ZeRO-1/2",
        "zero_stage": run.stage,
    }
    left = {
        rank: {**facts, "file_prefix": file.name.prefix, **_left(file.saved, ("loss_scaler",))}
        for rank, file in files.items()
    }
    extras += make_rank_extras("optimizer", left, checksums)
    config = run.model.file.root.get("ds_config")
    roots = {rank: file.file.root for rank, file in files.items()}
    configs = {rank: root["ds_config"] for rank, root in roots.items() if "ds_config" in root}
    if config is None and configs:
        extras += make_rank_extras("ds_config", configs, checksums)
    else:
        own = {rank: value for rank, value in configs.items() if not checksums.is_same(value, config)}
        extras += [Extra(name="optimizer_ds_config", value=value, rank=rank) for rank, value in own.items()]
    # keys beside optimizer_state_dict that no version known here writes
    known = ("optimizer_state_dict", "ds_config", "ds_version")
    unknown = {rank: {k: v for k, v in root.items() if k not in known} for rank, root in roots.items()}
    return extras + (make_rank_extras("optimizer_file", unknown, checksums) if any(unknown.values()) else [])


def unsharded_extras(optimizer: UnshardedOptimizer) -> list[Extra]:
    """Extras out of an optimizer without ZeRO."""
    saved, facts = optimizer.saved, {"class": optimizer.kind, "zero_stage": 0}
    of_torch = saved if optimizer.kind == "torch" else saved.get("optimizer_state_dict")
    inner = of_torch.items() if isinstance(of_torch, dict) else ()
    left = {str(key): value for key, value in inner if key not in ("state", "param_groups")}
    if optimizer.kind == "torch":
        return [Extra(name="optimizer", value={**facts, **left})]
    numbers = {key: saved[key] for key in _SCALE_NUMBERS if key in saved}
    scaler = [Extra(name="loss_scaler", value=numbers)] if "cur_scale" in numbers else []
    return [*scaler, Extra(name="optimizer", value={**facts, **_left(saved, tuple(numbers) if scaler else ()), **left})]


def universal_extras(saved: Mapping[object, object], info: Mapping[str, Mapping[str, object]]) -> list[Extra]:
    """Extras out of `zero/optimizer_state.pt`, and what files of parameters say beside the tensor."""
    scaler = saved.get("loss_scaler")
    extras = [Extra(name="loss_scaler", value=scaler)] if scaler is not None else []
    left = _left(saved, ("loss_scaler", "param_groups", "pipeline"))
    extras.append(Extra(name="optimizer", value={"class": "universal", **left}))
    special = {name: dict(own) for name, own in info.items() if own != {"cat_dim": 0}}
    return extras + ([Extra(name="universal_parameters", value=special)] if special else [])


def _left(saved: Mapping[object, object], taken: tuple[str, ...]) -> dict[str, object]:
    known = {*_OPTIMIZER_IN_ATOMS, *taken}
    return {str(key): value for key, value in saved.items() if key not in known}


def joined(saved: Sequence[Extra], made: Sequence[Extra]) -> tuple[Extra, ...]:
    """Extras of the files, and those made of what the user said, which hold where both have one of a name."""
    names = {extra.name for extra in made}
    kept = (replace(own, name=f"{own.name}.overruled") if own.name in names else own for own in saved)
    return (*kept, *made)
