"""Target `torch`: one file of `torch.save`, for scripts that keep model and optimizer in a dict; or one per rank.

    DST/checkpoint.pt   {"model": {name: tensor}, "optimizer": {"state": {0: {...}}, "param_groups": [{...}]},
                         "lr_scheduler": {...}, "step": 3}

`torch.load(..., weights_only=True)` reads it. The optimizer is as `torch.optim.Optimizer.state_dict` gives it: states
by number, `params` a list of numbers, and beside it `param_names` (torch 2.6 and later, for optimizers that were given
names; others ignore it). Tied parameters share one storage.

If a rule of the user's says that data-parallel ranks have parts of a parameter, each rank has such a file,
`checkpoint_rank_0.pt` and so on, with its part of the parameter and of its states, and the full tensor of all others.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import replace

from ucp.contract.optimizer import OptimizerPlan
from ucp.contract.protocols import Target
from ucp.contract.registry import lay_out_cuts
from ucp.contract.run_extras import LR_SCHEDULER
from ucp.contract.sidecars import add_sidecars
from ucp.core.gaps import check_weights
from ucp.core.index import STEP, WEIGHT, AtomIndex, Index
from ucp.core.layout import Layout, locate_shard
from ucp.core.target import TargetOptions, TargetPlan, full_slice
from ucp.core.topology import Topology
from ucp.errors import UsageError
from ucp.io.pickle.values import GlobalName, Stub, walk
from ucp.io.torch_file.draft import FileDraft, make_target_plan
from ucp.io.torch_file.storage import NewTensor
from ucp.transfer.probe import Prober
from ucp_formats.torch.extras import extra_paths
from ucp_formats.torch.files.locate import NAME
from ucp_formats.torch.settings import (
    DECOUPLED,
    DECOUPLED_HELP,
    check_options,
    count_tensor,
    decoupled_option,
    setting_notes,
    settings_of,
)

_SETTINGS = {DECOUPLED: DECOUPLED_HELP}


class TorchTarget(Target):
    """Target `torch`."""

    name = "torch"
    settings = _SETTINGS
    resumes = True
    scheduler = LR_SCHEDULER
    keeps_extras_of = ("torch", "dcp")

    def plan(self, index: Index, topology: Topology | None, options: TargetOptions) -> TargetPlan:
        """The file, or one for each rank. Raises UsageError, MissingStateError, TopologyError."""
        cuts = {} if topology is None else lay_out_cuts(index, options.patterns, topology.dp)
        ranks = topology.dp if topology is not None and cuts else 1
        if topology is not None and topology.ranks > ranks:
            raise UsageError(f"one file holds the whole checkpoint for any number of ranks: drop --topology {topology}")
        check_options(options, {})
        check_weights(index)
        with Prober() as prober:
            drafts = [_TorchDraft(index, options, prober, cuts, rank) for rank in range(ranks)]
            files = [draft.file.finish(draft.root()) for draft in drafts]
        plan = make_target_plan(index, files, notes=drafts[0].notes, topology=topology if cuts else None)
        plan = replace(plan, casts=(*plan.casts, *drafts[0].counts.casts), dropped=drafts[0].dropped)
        return add_sidecars(index, plan)


class _TorchDraft:
    """The file while it is laid out."""

    def __init__(
        self, index: Index, options: TargetOptions, prober: Prober, cuts: Mapping[str, Layout], rank: int
    ) -> None:
        self._index = index
        self._dtypes = options.dtypes
        self._decoupled = decoupled_option(index, options)
        self.counts = OptimizerPlan(index, prober)
        self._cuts, self._rank = cuts, rank
        self.file = FileDraft(f"checkpoint_rank_{rank}.pt" if cuts else NAME)
        self.notes: list[str] = []
        self.dropped: tuple[str, ...] = ()

    def root(self) -> dict[object, object]:
        """What the file holds."""
        tensors: dict[object, object] = {atom.name: self._tensor(atom, WEIGHT) for atom in self._index.atoms.values()}
        tensors |= {alias: tensors[name] for alias, name in self._index.aliases.items()}
        model = OrderedDict(tensors)
        root: dict[object, object] = {"model": model}
        if self._index.groups:
            root["optimizer"] = self._optimizer()
        if self._index.step is not None:
            root[STEP] = self._index.step
        self._add_extras(root, model)
        return root

    def _optimizer(self) -> dict[str, object]:
        names = [name for group in self._index.groups for name in group.params]
        numbers = {name: number for number, name in enumerate(names)}
        states = {}
        for name, number in numbers.items():
            atom = self._index.atoms[name]
            if of_param := {state: self._tensor(atom, state) for state in atom.states if state != WEIGHT}:
                states[number] = of_param
        groups = [
            {
                **settings_of(group, is_decoupled=self._decoupled != "false"),
                "params": [numbers[name] for name in group.params],
                "param_names": list(group.params),
            }
            for group in self._index.groups
        ]
        self.notes += setting_notes(self._index, self._decoupled)
        if states:
            self.notes.append(
                "the optimizer's load_state_dict matches states to parameters by position, not by name: give the "
                f"optimizer its parameters in the order that param_names lists in each group of {NAME}"
            )
        return {"state": states, "param_groups": groups}

    def _tensor(self, atom: AtomIndex, name: str) -> NewTensor:
        state = atom.states[name]
        if atom.is_count(name) and name != WEIGHT:
            dtype, data = count_tensor(self._index, self.counts, atom.name, name)
            return self.file.add_known(dtype, (), data)
        dtype = atom.dtype_of(name, self._dtypes)
        full = full_slice(atom.name, name, state, dtype=dtype)
        layout = self._cuts.get(atom.name)
        if layout is None or state.global_shape != atom.global_shape:
            return self.file.add_slice(full)
        part = locate_shard(layout, atom.global_shape, coords={"dp": self._rank})
        pairs = tuple(region.pair for region in part.regions)
        return self.file.add_slice(replace(full, pairs=pairs, local_shape=part.local_shape, stop=part.numel), layout)

    def _add_extras(self, root: dict[object, object], model: dict[object, object]) -> None:
        """Add extras that have a place, if `weights_only` unpickles them: no objects of classes."""
        of_ranks = {extra.name for extra in self._index.extras if extra.rank is not None}
        dropped = set()
        for extra, path in extra_paths(self._index, TorchTarget.keeps_extras_of, ("model",)):
            is_plain = not any(isinstance(value, Stub | GlobalName) for value in walk([extra.value]))
            if path is not None and is_plain and extra.name not in of_ranks and (len(path) > 1 or path[0] not in root):
                (root if len(path) == 1 else model)[path[-1]] = self.file.copy_extra(extra.value)
            elif extra.name != STEP:
                dropped.add(extra.name)
        if dropped:
            names = ", ".join(sorted(dropped))
            kinds = "values of a single rank, entries of another framework, objects of Python classes"
            self.dropped = (f"extras that do not belong in this file ({kinds}): {names}",)
