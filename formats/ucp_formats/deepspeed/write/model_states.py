"""The model-states file of DeepSpeed: the module, and every other value of a run except its optimizer.

Keys and their order are those of `_common_checkpoint_state` (runtime/engine.py, 0.19.8). The keys of the client state
are at the top level too.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence

from ucp.contract.layouts import Chunks
from ucp.contract.run_extras import MODULE_STATE
from ucp.core.index import WEIGHT, AtomIndex, Index, Kind
from ucp.core.tensor import DType
from ucp.io.pickle.values import TorchSize
from ucp.io.torch_file.storage import NewTensor
from ucp_formats.deepspeed.read.module import EMPTY_SHAPES
from ucp_formats.deepspeed.read.stacks import INFO, LAYERS
from ucp_formats.deepspeed.write.optimizer.groups import is_optimized
from ucp_formats.deepspeed.write.run import EMULATED, AtomDraft, RunFacts

Module = OrderedDict[object, object]
"""A state_dict of a module: name to tensor."""


def module_tensors(draft: AtomDraft, facts: RunFacts, kinds: Iterable[Kind] = Kind) -> Module:
    """The module with full tensors; tied names share one tensor."""
    wanted = frozenset(kinds)
    module: Module = OrderedDict()
    for atom in facts.index.atoms.values():
        if atom.kind in wanted:
            module[atom.name] = draft.full(atom.name, WEIGHT, facts.module_dtype(atom))
    return _add_rest(draft, facts, module, 0)


def placeholders(draft: AtomDraft, facts: RunFacts, rank: int) -> Module:
    """The module as stage 3 saves it: the buffers of `rank`, an empty tensor for each parameter but stacked experts.

    One empty tensor per type serves all parameters, which keeps the files of thousands of ranks small.
    """
    buffers = dict(facts.extras.with_prefix("buffer/", rank))
    empty: dict[DType, NewTensor] = {}
    module: Module = OrderedDict()
    for atom in (atom for name, atom in facts.index.atoms.items() if name not in facts.stacks.counts):
        if atom.name in buffers:
            module[atom.name] = draft.copy_extra(buffers[atom.name])
        elif atom.kind is Kind.BUFFER:
            module[atom.name] = draft.full(atom.name, WEIGHT, facts.module_dtype(atom))
        else:
            dtype = facts.module_dtype(atom)
            module[atom.name] = empty.setdefault(dtype, draft.add_tensor(dtype, (0,)))
    return _add_rest(draft, facts, module, rank)


def _add_rest(draft: AtomDraft, facts: RunFacts, module: Module, rank: int) -> Module:
    """Add tied names, entries that are not tensors, and module versions, which torch keeps as an attribute."""
    module.update({alias: module[name] for alias, name in facts.index.aliases.items() if name in module})
    module.update((name, draft.copy_extra(value)) for name, value in facts.extras.with_prefix(MODULE_STATE, rank))
    metadata = facts.extras.get("module_metadata")
    if metadata is not None:
        vars(module)["_metadata"] = metadata
    return module


def _list_unowned(index: Index) -> list[AtomIndex]:
    """Parameters that the optimizer does not update: frozen, or without elements."""
    return [atom for atom in index.atoms.values() if atom.kind is not Kind.BUFFER and not is_optimized(atom)]


def has_frozen(index: Index) -> bool:
    """Whether there is a frozen parameter with elements.

    If there is none, no frozen parameters are written: the source may have been saved without them, and a loader that
    finds one in the file requires all of the model's.
    """
    return any(0 not in atom.global_shape for atom in _list_unowned(index))


def frozen_shapes(index: Index) -> OrderedDict[object, object]:
    """Shapes of the parameters that the optimizer does not update."""
    return OrderedDict((atom.name, TorchSize(atom.global_shape)) for atom in _list_unowned(index))


def frozen_fragments(draft: AtomDraft, facts: RunFacts, rank: int) -> OrderedDict[object, object]:
    """Values of the parameters that the optimizer does not update: full under stage 2, a rank's chunk under stage 3."""
    fragments: OrderedDict[object, object] = OrderedDict()
    for atom in _list_unowned(facts.index):
        dtype = facts.module_dtype(atom)
        if facts.stage < 3:
            fragments[atom.name] = draft.full(atom.name, WEIGHT, dtype)
        else:
            chunks = Chunks({atom.name: atom.states[WEIGHT].numel}, facts.ranks)
            stored = draft.ranges(chunks, chunks.axes(), rank)
            fragments[atom.name] = draft.flat(WEIGHT, dtype, chunks.lengths(rank).start, stored)
    return fragments


def shapes(index: Index, groups: Iterable[Sequence[str]]) -> list[object]:
    """`param_shapes`: name to shape, one mapping per flat buffer, in the order of the buffer."""
    return [OrderedDict((name, TorchSize(index.atoms[name].global_shape)) for name in names) for names in groups]


def model_state(draft: AtomDraft, facts: RunFacts, rank: int, values: Mapping[str, object]) -> dict[str, object]:
    """The dict that the file of `rank` holds.

    `values`: `module`; what only AutoEP has (`record_layers`); those keys among `optimizer`, `param_shapes`,
    `frozen_param_shapes`, `shared_params` and `frozen_param_fragments` that the stage saves (the others are written as
    None); and `EMPTY_SHAPES` where needed.
    """
    extras, index = facts.extras, facts.index
    engine = extras.mapping("engine", rank)
    optional = {name: extras.get(name, rank) for name in ("sparse_tensor_module_names", "num_experts")}
    if facts.rules is not None:
        optional[INFO] = dict(facts.rules.for_degree(facts.tp))
    state: dict[str, object] = {
        "module": values["module"],
        "buffer_names": [atom.name for atom in index.atoms.values() if atom.kind is Kind.BUFFER],
        "optimizer": values.get("optimizer"),
        "param_shapes": values.get("param_shapes"),
        "frozen_param_shapes": values.get("frozen_param_shapes"),
        "shared_params": values.get("shared_params"),
        "frozen_param_fragments": values.get("frozen_param_fragments"),
        **({EMPTY_SHAPES: values[EMPTY_SHAPES]} if EMPTY_SHAPES in values else {}),
        "lr_scheduler": extras.get("lr_scheduler", rank),
        "data_sampler": extras.get("data_sampler", rank),
        "random_ltd": extras.get("random_ltd", rank),
        "skipped_steps": engine.get("skipped_steps", 0),
        "global_steps": engine.get("global_steps", index.step or 0),
        **({"global_samples": engine["global_samples"]} if "global_samples" in engine else {}),
        "dp_world_size": facts.ranks,
        "mp_world_size": facts.tp * facts.pp,
        "checkpoint_parallel_dimensions": {"pp_degree": facts.pp, "tp_degree": facts.tp},
        "ds_config": facts.config.with_stage(facts.stage),
        "ds_version": EMULATED,
        **{name: value for name, value in optional.items() if value is not None},
        **{name: values[name] for name in ("num_experts", LAYERS, INFO) if name in values},
        **extras.client_state(rank),
    }
    carried = draft.copy_extra({key: value for key, value in state.items() if key not in values})
    assert isinstance(carried, dict)
    return {key: values[key] if key in values else carried[key] for key in state}
