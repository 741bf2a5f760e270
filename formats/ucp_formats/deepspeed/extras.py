"""Everything in a DeepSpeed checkpoint that is no tensor of a parameter: the table of its extras.

Beside these a reader makes `optimizer_ds_config` and `optimizer_file`, where an optimizer file says something else or
more than the model states; `optimizer_state/GROUP/NAME`, states that cannot be given to single parameters; and
`universal_parameters`, what a universal checkpoint says of single parameters beside the tensor.
"""

from __future__ import annotations

from ucp.contract.extras import ExtraRow, ExtraTable, ExtraValues
from ucp.contract.run_extras import MODULE_STATE
from ucp.core.index import TAG, Index

__all__ = ["AS_FOUND", "ENGINE", "EXTRAS", "UNSTEPPED", "CarriedExtras"]

ENGINE = "engine"
"""Steps, samples, world sizes, version, parallel dimensions."""
UNSTEPPED = "param_groups"
"""Groups of a torch optimizer without states, where it is not known which parameters their numbers are."""

AS_FOUND: ExtraTable = {
    "lr_scheduler": ExtraRow(keys=("lr_scheduler",), rank_stage=3),
    "data_sampler": ExtraRow(keys=("data_sampler",), rank_stage=3),
    "random_ltd": ExtraRow(keys=("random_ltd",), rank_stage=3),
    # the second name before 0.5.9
    "sparse_tensor_module_names": ExtraRow(
        keys=("sparse_tensor_module_names", "csr_tensor_module_names"), rank_stage=3
    ),
    "ds_config": ExtraRow(keys=("ds_config",), rank_stage=3),
    "universal_checkpoint_info": ExtraRow(keys=("universal_checkpoint_info",), rank_stage=3),
    "num_experts": ExtraRow(keys=("num_experts",), rank_stage=3),
}
"""Values of model-states files that are kept as they are."""

EXTRAS: ExtraTable = {
    **AS_FOUND,
    ENGINE: ExtraRow(
        keys=(
            "global_steps",
            "global_samples",
            "skipped_steps",
            "dp_world_size",
            "mp_world_size",
            "checkpoint_parallel_dimensions",
            "ds_version",
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
        return {**self.mapping("client_state", rank), **dict(self.below("client_state/", rank))}

    def left_behind(self) -> tuple[str, ...]:
        """What of the extras does not go into the target, one line per reason."""
        lines = []
        if lost := self.without_rank(self._stage):
            why = "one file holds them for all" if self._same_ranks else "the number of ranks changes"
            lines.append(f"values of single ranks are left out, as {why} (rank 0's are kept): {', '.join(lost)}")
        if foreign := self.without_place():
            lines.append(f"DeepSpeed's files have no place for these extras: {', '.join(foreign)}")
        return tuple(lines)
