"""The extras of a DeepSpeed checkpoint, read and written: all values that are not tensors of parameters.

Readers also create extras that `EXTRAS` does not list: `optimizer_ds_config` and `optimizer_file` hold values of
optimizer files that the model-states files lack, `optimizer_state/GROUP/NAME` holds states that cannot be assigned to
single parameters, and `universal_parameters` holds what a universal checkpoint records of a parameter besides its
tensor.
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
"""Groups of a torch optimizer that never stepped: it is not known which parameters their numbers stand for."""

_SPARSE = ("sparse_tensor_module_names", "csr_tensor_module_names")  # the second name is that of versions before 0.5.9
AS_FOUND: ExtraTable = {
    "lr_scheduler": ExtraRow(keys=("lr_scheduler",), rank_stage=3),
    "data_sampler": ExtraRow(keys=("data_sampler",), rank_stage=3),
    "random_ltd": ExtraRow(keys=("random_ltd",), rank_stage=3),
    "sparse_tensor_module_names": ExtraRow(keys=_SPARSE, rank_stage=3),
    "ds_config": ExtraRow(keys=("ds_config",), rank_stage=3),
    "universal_checkpoint_info": ExtraRow(keys=("universal_checkpoint_info",), rank_stage=3),
    "num_experts": ExtraRow(keys=("num_experts",), rank_stage=3),
}
"""Values of model-states files that are kept unchanged."""

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
    # the scaler object, or only its numbers if the run had no ZeRO
    "loss_scaler": ExtraRow(keys=("loss_scaler",), rank_stage=1),
    # other values of the optimizer file, with `class`, `zero_stage` and `file_prefix`
    "optimizer": ExtraRow(rank_stage=1),
    UNSTEPPED: ExtraRow(rank_stage=3),
    # the name prefix of each layer and the trained parameters of each stage; True for universal checkpoints
    "pipeline": ExtraRow(rank_stage=3),
    # versions of modules; entries of the module that are not tensors
    "module_metadata": ExtraRow(rank_stage=3),
    MODULE_STATE: ExtraRow(rank_stage=3),
    # buffers of other ranks, if they differ from rank 0's
    "buffer/": ExtraRow(rank_stage=3),
    TAG: ExtraRow(rank_stage=3),
}


class CarriedExtras(ExtraValues):
    """Extras of any source, by the names that DeepSpeed gives them. `ranks`, `stage`: of the target run."""

    def __init__(self, index: Index, *, ranks: int, stage: int) -> None:
        super().__init__(index, EXTRAS, same_ranks=ranks == index.topology.dp)
        self._stage = stage

    def client_state(self, rank: int = 0) -> dict[str, object]:
        """Values that the training script saved, by key."""
        return {**self.mapping("client_state", rank), **dict(self.with_prefix("client_state/", rank))}

    def left_behind(self) -> tuple[str, ...]:
        """Extras that are not written, one line per reason."""
        lines = []
        if names := self.without_rank(self._stage):
            why = "one file holds the value for all ranks" if self._same_ranks else "the number of ranks changes"
            lines.append(f"only rank 0's value is kept, because {why}: {', '.join(names)}")
        if names := self.without_place():
            lines.append(f"DeepSpeed's files have no place for these extras: {', '.join(names)}")
        return tuple(lines)


_IN_ATOMS = (
    *("module", "buffer_names", "optimizer", "param_shapes", "frozen_param_shapes", "shared_params"),
    *("frozen_param_fragments", EMPTY_SHAPES, "ds_autoep_layers", "autoep_layers"),
)
_OPTIMIZER_IN_ATOMS = (
    *("base_optimizer_state", "single_partition_of_fp32_groups", "optimizer_state_dict"),
    *("fp32_flat_groups", "fp32_groups", "fp32_groups_flat"),
    # derived from the tensors above
    *("group_paddings", "param_alignment_paddings", "partition_count", "param_slice_mappings"),
    *("zero_stage", "ds_version", "universal_checkpoint_info", "ds_zero_partition_groups"),
)
SCALE_NUMBERS = ("dynamic_loss_scale", "cur_scale", "cur_iter", "last_overflow_iter", "scale_factor", "scale_window")


def model_extras(models: Mapping[int, ModelStates], checksums: Checksums) -> list[Extra]:
    """Extras of model-states files (rank to file)."""
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
    """Extras of optimizer files."""
    files = run.optimizers
    scalers = {rank: file.saved.get("loss_scaler") for rank, file in files.items()}
    extras = make_rank_extras("loss_scaler", scalers, checksums) if any(v is not None for v in scalers.values()) else []
    facts = {
        "class": "BF16_Optimizer" if run.is_bf16_optimizer else "ZeRO-3" if run.stage == 3 else "ZeRO-1/2",
        "zero_stage": run.stage,
    }
    optimizers = {
        rank: {**facts, "file_prefix": file.name.prefix, **_other_values(file.saved, ("loss_scaler",))}
        for rank, file in files.items()
    }
    extras += make_rank_extras("optimizer", optimizers, checksums)
    config = run.model.file.root.get("ds_config")
    roots = {rank: file.file.root for rank, file in files.items()}
    configs = {rank: root["ds_config"] for rank, root in roots.items() if "ds_config" in root}
    if config is None and configs:
        extras += make_rank_extras("ds_config", configs, checksums)
    else:
        differing = {rank: value for rank, value in configs.items() if not checksums.is_same(value, config)}
        extras += [Extra(name="optimizer_ds_config", value=value, rank=rank) for rank, value in differing.items()]
    # keys beside optimizer_state_dict that no known version writes
    known = ("optimizer_state_dict", "ds_config", "ds_version")
    unknown = {rank: {k: v for k, v in root.items() if k not in known} for rank, root in roots.items()}
    return extras + (make_rank_extras("optimizer_file", unknown, checksums) if any(unknown.values()) else [])


def unsharded_extras(optimizer: UnshardedOptimizer) -> list[Extra]:
    """Extras of an optimizer without ZeRO."""
    saved, facts = optimizer.saved, {"class": optimizer.kind, "zero_stage": 0}
    inner = saved if optimizer.kind == "torch" else saved.get("optimizer_state_dict")
    items = inner.items() if isinstance(inner, dict) else ()
    values = {str(key): value for key, value in items if key not in ("state", "param_groups")}
    if optimizer.kind == "torch":
        return [Extra(name="optimizer", value={**facts, **values})]
    numbers = {key: saved[key] for key in SCALE_NUMBERS if key in saved}
    scaler = [Extra(name="loss_scaler", value=numbers)] if "cur_scale" in numbers else []
    outer = _other_values(saved, tuple(numbers) if scaler else ())
    return [*scaler, Extra(name="optimizer", value={**facts, **outer, **values})]


def universal_extras(saved: Mapping[object, object], info: Mapping[str, Mapping[str, object]]) -> list[Extra]:
    """Extras of `zero/optimizer_state.pt`, and of `info`: what the files of a parameter record besides its tensor."""
    scaler = saved.get("loss_scaler")
    extras = [Extra(name="loss_scaler", value=scaler)] if scaler is not None else []
    values = _other_values(saved, ("loss_scaler", "param_groups", "pipeline"))
    extras.append(Extra(name="optimizer", value={"class": "universal", **values}))
    params = {name: dict(keys) for name, keys in info.items() if keys != {"cat_dim": 0}}
    return extras + ([Extra(name="universal_parameters", value=params)] if params else [])


def _other_values(saved: Mapping[object, object], keys: tuple[str, ...]) -> dict[str, object]:
    """Values of an optimizer file that are not in atoms and not among `keys`."""
    known = {*_OPTIMIZER_IN_ATOMS, *keys}
    return {str(key): value for key, value in saved.items() if key not in known}


def join_extras(saved: Sequence[Extra], stated: Sequence[Extra]) -> tuple[Extra, ...]:
    """Both kinds of extras; a saved extra with the name of a stated one is renamed to NAME.overruled.

    `stated`: extras that the reader made, among them what follows from a model family that the user chose.
    """
    names = {extra.name for extra in stated}
    return (
        *(replace(extra, name=f"{extra.name}.overruled") if extra.name in names else extra for extra in saved),
        *stated,
    )
