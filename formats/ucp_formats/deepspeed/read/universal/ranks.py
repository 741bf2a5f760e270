"""Model-states files of a universal checkpoint: the converter copies those of every model-parallel rank.

`zero/` has whole parameters, whatever the run was. The model-states files are still those of the run: each
tensor-parallel rank's has its own cuts of frozen parameters and buffers, and a pipeline's has no module at all, as
files of layers are not copied.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from ucp.contract.problems import Problems
from ucp.contract.protocols import SourceOptions
from ucp.contract.rank_extras import Checksums
from ucp.errors import UnsupportedError
from ucp.io.pickle.fields import Shape
from ucp_formats.deepspeed.names import Role
from ucp_formats.deepspeed.read.extras import model_extras
from ucp_formats.deepspeed.read.model_states import ModelStates
from ucp_formats.deepspeed.read.module import ModulePart, read_module
from ucp_formats.deepspeed.read.optimizer.part import OptimizerPart
from ucp_formats.deepspeed.read.ranks.merge import RankPart, Rules, merge
from ucp_formats.deepspeed.read.ranks.mesh import Merged, Mesh
from ucp_formats.deepspeed.read.ranks.parallel import tensor_rules
from ucp_formats.deepspeed.read.run import degrees, model_parallel_size
from ucp_formats.deepspeed.tp.universal_info import TensorShapes

__all__ = ["UniversalRanks", "universal_ranks"]


@dataclass(frozen=True, slots=True, kw_only=True)
class UniversalRanks:
    """The files of all ranks."""

    where: str
    """Folder, for messages."""
    models: Mapping[int, Mapping[int, ModelStates]]
    """Model-parallel rank to data-parallel rank to model-states file; the latter is 0 but for ZeRO-3."""
    tp: int
    """Tensor-parallel ranks."""
    pp: int
    """Pipeline stages."""
    rules: Rules
    """How tensors lie over tensor-parallel ranks."""

    @property
    def first(self) -> ModelStates:
        """Model states of rank 0."""
        return self.models[0][0]

    @property
    def groups(self) -> tuple[dict[str, Shape], ...]:
        """`param_shapes` of all stages together, with the shapes that tensor-parallel rank 0 holds."""
        stages = [files[0].groups for mp, files in self.models.items() if mp % self.tp == 0]
        if len({len(own) for own in stages}) > 1:
            raise UnsupportedError(
                f"expected as many parameter groups on each pipeline stage of {self.where}; got "
                f"{', '.join(str(len(own)) for own in stages)}, and optimizer_state.pt has those of the first stage "
                "only. Read the original checkpoint instead"
            )
        return tuple(
            {name: shape for own in group for name, shape in own.items()} for group in zip(*stages, strict=True)
        )

    def known_shapes(self) -> dict[str, Shape]:
        """Shapes of whole parameters, as far as the files say them."""
        if not self.models or any(0 not in files for files in self.models.values()):
            return {}  # a problem that is told of already
        local = {mp: {**files[0].frozen, **files[0].trained} for mp, files in self.models.items()}
        if self.tp == 1 or sorted(local) != list(range(self.tp * self.pp)):
            return {name: shape for own in local.values() for name, shape in own.items()}
        held: dict[str, list[Shape]] = {}
        for mp in sorted(local):
            for name, shape in local[mp].items():
                held.setdefault(name, []).append(shape)
        complete = {
            name: TensorShapes(local=tuple(own[: self.tp])) for name, own in held.items() if len(own) >= self.tp
        }
        return {name: layout.global_shape for name, layout in self.rules.layouts(complete).items()}

    def module(self, checksums: Checksums) -> Merged:
        """The module of all ranks, and the extras of their files."""
        parts = []
        for mp, models in self.models.items():
            optimizer = OptimizerPart(extras=model_extras(models, checksums))
            module = _module(models, checksums)
            parts.append(RankPart(mp=mp, tp=mp % self.tp, order=mp // self.tp, module=module, optimizer=optimizer))
        return merge(parts, self.rules, checksums, self.where, Mesh(tp=self.tp, pp=self.pp))


def _module(models: Mapping[int, ModelStates], checksums: Checksums) -> ModulePart:
    if models[0].module is None:
        note = "files of layers are not part of a universal checkpoint: buffers and frozen parameters are not in it"
        return ModulePart(notes=[note])
    return read_module(models, models[0].trained, checksums, sharded=models[0].name.role is Role.SHARDED_MODEL)


def universal_ranks(
    found: Iterable[ModelStates], where: str, problems: Problems, options: SourceOptions
) -> UniversalRanks:
    """Those of `found`; what is missing goes to `problems`. `options`: what the user says of the layout.

    ucp writes a file for stages 1 and 2 and one for stage 3; the first says more and is taken.
    """
    by_role: dict[Role, dict[int, dict[int, ModelStates]]] = {Role.MODEL: {}, Role.SHARDED_MODEL: {}}
    for model in found:
        by_role[model.name.role].setdefault(model.name.mp, {})[model.name.dp] = model
    models = by_role[Role.MODEL] or by_role[Role.SHARDED_MODEL]
    chosen = [model for own in models.values() for model in own.values()]
    size = model_parallel_size(chosen, [model.name for model in chosen])
    prefix = "" if by_role[Role.MODEL] or not models else "zero_pp_rank_0_"
    lost = [mp for mp in range(size) if 0 not in models.get(mp, {})]
    problems.missing += [f"{prefix}mp_rank_{mp:02d}_model_states.pt" for mp in lost]
    tp, pp = degrees(chosen, size, [], problems)
    if all(model.module is None and model.degrees is None for model in chosen):
        tp, pp = 1, size  # older than the record; the names of layers would tell, but are not here
    infos = {model.name.name: (model.file, model.file.root.get("universal_checkpoint_info")) for model in chosen}
    rules = tensor_rules(infos, where, options)
    return UniversalRanks(where=where, models=dict(sorted(models.items())), tp=tp, pp=pp, rules=rules)
