"""Target `torch`: one file of `torch.save`, for scripts that keep model and optimizer in a dict.

    DST/checkpoint.pt   {"model": {name: tensor}, "optimizer": {"state": {0: {...}}, "param_groups": [{...}]},
                         "lr_scheduler": {...}, "step": 3}

`torch.load(..., weights_only=True)` reads it. The optimizer is as `torch.optim.Optimizer.state_dict` gives it: states
by number, `params` a list of numbers, and beside it `param_names` (torch 2.6 and later, of optimizers that were given
names; others ignore it). Names that are tied are views of one storage.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import replace

from ucp.contract.optimizer import OptimizerPlan
from ucp.contract.protocols import Target
from ucp.contract.run_extras import LR_SCHEDULER, MODULE_STATE
from ucp.contract.sidecars import add_sidecars
from ucp.core.gaps import check_weights
from ucp.core.index import STEP, WEIGHT, AtomIndex, Extra, Index
from ucp.core.target import TargetOptions, TargetPlan, full_slice
from ucp.core.topology import Topology
from ucp.errors import UsageError
from ucp.io.pickle.values import GlobalName, Stub, walk
from ucp.io.torch_file.draft import FileDraft, target_plan
from ucp.io.torch_file.storage import NewTensor
from ucp.transfer.probe import Prober
from ucp_formats.torch.files.locate import NAME
from ucp_formats.torch.settings import (
    DECOUPLED,
    DECOUPLED_MEANING,
    check_options,
    checked_decoupled,
    count_tensor,
    decay_notes,
    rate_notes,
    settings_of,
)

_SETTINGS = {DECOUPLED: DECOUPLED_MEANING}


class TorchTarget(Target):
    """Target `torch`."""

    name = "torch"
    settings = _SETTINGS
    resumes = True
    scheduler = LR_SCHEDULER
    keeps_extras_of = ("torch", "dcp")

    def plan(self, index: Index, topology: Topology | None, options: TargetOptions) -> TargetPlan:
        """The one file. Raises UsageError, MissingStateError."""
        _check(topology, options)
        check_weights(index)
        with Prober() as prober:
            draft = _Drafting(index, options, prober)
            root = draft.root()
        plan = target_plan(index, [draft.file.finish(root)], notes=draft.notes)
        plan = replace(plan, casts=(*plan.casts, *draft.counts.casts), dropped=draft.dropped())
        return add_sidecars(index, plan)


def _check(topology: Topology | None, options: TargetOptions) -> None:
    if topology is not None and topology.ranks > 1:
        raise UsageError(f"one file holds the whole checkpoint for any number of ranks: drop --topology {topology}")
    check_options(options, {})


class _Drafting:
    """A checkpoint in the making."""

    def __init__(self, index: Index, options: TargetOptions, prober: Prober) -> None:
        self._index = index
        self._dtypes = options.dtypes
        self._decoupled = checked_decoupled(index, options)
        self.counts = OptimizerPlan(index, prober)
        self.file = FileDraft(NAME)
        self.notes: list[str] = []
        self._left: list[str] = []

    def root(self) -> dict[object, object]:
        """What the file holds."""
        tensors = {atom.name: self._tensor(atom, WEIGHT) for atom in self._index.atoms.values()}
        tensors |= {alias: tensors[name] for alias, name in self._index.aliases.items()}
        root: dict[object, object] = {"model": OrderedDict(tensors)}
        if self._index.groups:
            root["optimizer"] = self._optimizer()
        if self._index.step is not None:
            root[STEP] = self._index.step
        self._add_extras(root)
        return root

    def _optimizer(self) -> dict[str, object]:
        names = [name for group in self._index.groups for name in group.params]
        numbers = {name: number for number, name in enumerate(names)}
        states = {numbers[name]: own for name in names if (own := self._states(self._index.atoms[name]))}
        groups = [
            {
                **settings_of(group, is_decoupled=self._decoupled != "false"),
                "params": [numbers[name] for name in group.params],
                "param_names": list(group.params),
            }
            for group in self._index.groups
        ]
        self.notes += [*rate_notes(self._index), *decay_notes(self._index, self._decoupled)]
        self.notes.append(
            "the optimizer numbers its parameters in the order of param_names: a script that makes its groups in "
            "another order has to sort them"
        )
        return {"state": states, "param_groups": groups}

    def _states(self, atom: AtomIndex) -> dict[str, NewTensor]:
        return {state: self._tensor(atom, state) for state in atom.states if state != WEIGHT}

    def _tensor(self, atom: AtomIndex, name: str) -> NewTensor:
        state = atom.states[name]
        if atom.is_count(name) and name != WEIGHT:
            dtype, data = count_tensor(self._index, self.counts, atom.name, name)
            return self.file.known(dtype, (), data)
        dtype = atom.dtype_of(name, self._dtypes)
        return self.file.tensor(full_slice(atom.name, name, state, dtype=dtype))

    def _add_extras(self, root: dict[object, object]) -> None:
        """Extras of torch's own checkpoints; of others the scheduler, where it is plain values."""
        is_ours = (self._index.origin or self._index.format) in TorchTarget.keeps_extras_of
        of_ranks = {own.name for own in self._index.extras if own.rank is not None}
        for extra in (own for own in self._index.extras if not own.is_sidecar):
            is_kept = is_ours or (extra.name == LR_SCHEDULER and isinstance(extra.value, dict))
            module = root["model"]
            assert isinstance(module, dict)
            if extra.name.startswith(MODULE_STATE) and extra.name not in of_ranks and _is_plain(extra):
                module[extra.name.removeprefix(MODULE_STATE)] = self.file.carried(extra.value)
            elif extra.name not in of_ranks and is_kept and extra.name not in root and _is_plain(extra):
                root[extra.name] = self.file.carried(extra.value)
            elif extra.name != STEP:
                self._left.append(extra.name)

    def dropped(self) -> tuple[str, ...]:
        """Extras that are not written."""
        names = ", ".join(sorted(set(self._left)))
        return (f"extras of other ranks, of another framework, or of classes: {names}",) if names else ()


def _is_plain(extra: Extra) -> bool:
    """Whether `weights_only` unpickles it: no classes but those of plain values."""
    return not any(isinstance(own, Stub | GlobalName) for own in walk([extra.value]))
