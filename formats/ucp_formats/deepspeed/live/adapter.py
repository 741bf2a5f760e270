"""The adapter of DeepSpeed engines (0.19.8), ZeRO 0 to 3: loads a checkpoint into one in place, or saves one.

At every stage, values are loaded into the fp32 masters of this rank. Then DeepSpeed's own functions compute the 16-bit
weights from the masters. An engine owns its optimizer, so users do not pass it; `optimizer=False` loads only weights
(masters and 16-bit), and leaves moments, steps and learning rates unchanged.

A DeepSpeed checkpoint has every value that an engine keeps besides tensors (steps, samples, learning rate schedule,
loss scale). They are set as `engine.load_checkpoint` sets them. Checkpoints of other frameworks have only the step; for
each value that stays unchanged there is a note.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from ucp.contract.optimizer import read_step_counts
from ucp.core.index import Index
from ucp.core.topology import Topology
from ucp.errors import UnsupportedError, UsageError, format_list
from ucp.io.pickle.values import Stub
from ucp.live.adapters import FrameworkState, LiveModel, LiveRequest, LiveRun
from ucp.live.match.items import Findings
from ucp.live.model.module import dtype_of
from ucp.live.parts import LiveTensor
from ucp.live.run.mesh import RunMesh
from ucp.transfer.probe import Prober
from ucp_formats.deepspeed.config import RunConfig, read_loss_scale
from ucp_formats.deepspeed.extras import ENGINE, SCALE_NUMBERS
from ucp_formats.deepspeed.live.buffers import locate_chunk, make_full_part
from ucp_formats.deepspeed.live.wrappers import Master, NamedModule, Wrapped, name_module, unwrap_optimizer

if TYPE_CHECKING:
    pass


def resume(engine: Any, index: Index, findings: Findings) -> dict[str, str]:
    """Set the engine's values that are not tensors; add a note for each that the checkpoint lacks."""
    extras = {extra.name: extra.value for extra in reversed(index.extras)}
    restored = {}
    for setting, name in (
        (_restore_counts, "engine"),
        (_restore_schedule, "lr_scheduler"),
        (_restore_loss_scale, "loss_scaler"),
    ):
        what, note = setting(engine, index, extras)
        restored.update({name: what} if what else {})
        findings.notes.extend([note] if note else [])
    return restored


def _restore_counts(engine: Any, index: Index, extras: Mapping[str, object]) -> tuple[str, str]:
    """Set the step counts of the engine; return a description of what was set, or else a note."""
    saved = extras.get("engine")
    if isinstance(saved, Mapping) and isinstance(saved.get("global_steps"), int):
        engine.global_steps = saved["global_steps"]
        engine.global_samples = saved.get("global_samples", saved["global_steps"] * engine.train_batch_size())
        engine.skipped_steps = saved.get("skipped_steps", 0)
        return "steps and samples of the engine", ""
    step, origin = index.step, "the step of the checkpoint"
    if step is None:
        with Prober() as prober:
            counts = read_step_counts(index, prober)
        step = int(counts[0]) if len(counts) == 1 and counts[0].is_integer() else None
        origin = "the step of every parameter in the checkpoint's optimizer"
    if step is None:
        return "", f"engine.global_steps stays {engine.global_steps}: the checkpoint does not record its step"
    engine.global_steps = step
    engine.global_samples = step * engine.train_batch_size()
    return "", (
        f"engine.global_steps is {step}, {origin}; engine.global_samples is computed from it and this run's batch size"
    )


def _restore_schedule(engine: Any, _index: Index, extras: Mapping[str, object]) -> tuple[str, str]:
    saved = extras.get("lr_scheduler")
    if engine.lr_scheduler is None:
        return "", ""
    if "engine" in extras and isinstance(saved, Mapping):
        engine.lr_scheduler.load_state_dict(saved)
        return f"scheduler {type(engine.lr_scheduler).__name__} of the engine", ""
    return "", "engine.lr_scheduler is unchanged: the checkpoint has no state of a DeepSpeed scheduler"


def _restore_loss_scale(engine: Any, _index: Index, extras: Mapping[str, object]) -> tuple[str, str]:
    scaler = _find_scaler(engine)
    if scaler is None:
        return "", ""
    saved = extras.get("loss_scaler")
    scale = read_loss_scale(saved, RunConfig(raw={})) if saved is not None else {}
    is_dynamic = getattr(scaler, "dynamic_loss_scale", getattr(scaler, "dynamic", None))
    if not scale or scale.pop("dynamic") != is_dynamic:
        return "", "the loss scale stays as configured: the checkpoint has none of the same kind (dynamic or static)"
    state = saved.state if isinstance(saved, Stub) and isinstance(saved.state, Mapping) else {}
    numbers = {str(name): number for name, number in state.items() if isinstance(number, int | float)}
    values = {**numbers, **scale} if is_dynamic else {"cur_scale": scale["cur_scale"]}
    for name, value in values.items():
        if hasattr(scaler, name):
            setattr(scaler, name, value)
    return "loss scale of the engine", ""


def _find_scaler(engine: Any) -> Any:
    """The loss scaler, if gradients are scaled: without ZeRO of another class, whose fields have the same names."""
    optimizer = engine.optimizer
    config = getattr(optimizer, "loss_scale_config", None)
    if config is not None:
        return config if config.use_grad_scaling else None
    is_scaled = str(getattr(optimizer, "dtype", "")) == "torch.float16"
    return getattr(optimizer, "loss_scaler", None) if is_scaled else None


def _read_state(engine: Any) -> FrameworkState:
    """What the engine saves beside tensors, under the names that the reader of its files gives them (`EXTRAS`)."""
    optimizer, scaler = engine.optimizer, _find_scaler(engine)
    counts = {key: getattr(engine, key) for key in ("global_steps", "global_samples", "skipped_steps")}
    ranks = {"dp_world_size": engine.seq_dp_world_size, "mp_world_size": engine.mp_world_size}
    extras: dict[str, object] = {
        ENGINE: {**counts, **ranks, "ds_version": importlib.import_module("deepspeed").__version__},
        "ds_config": engine.config,
        "optimizer": {"class": type(optimizer).__name__, "clip_grad": engine.gradient_clipping()},
    }
    if engine.lr_scheduler is not None:
        extras["lr_scheduler"] = engine.lr_scheduler.state_dict()
    if scaler is not None:
        is_config = not hasattr(scaler, "dynamic")  # of which DeepSpeed saves only numbers
        extras["loss_scaler"] = {key: getattr(scaler, key) for key in SCALE_NUMBERS} if is_config else scaler
    if engine.has_moe_layers:
        extras["num_experts"] = engine.num_experts
    pp = engine.module.topology().get_dim("pipe") if engine.pipeline_parallelism else 1
    used = {getattr(param, "group_name", "") for param in engine.module.parameters()}  # other engines made others
    ep = max((group.size() for name, group in engine.expert_parallel_group.items() if name in used), default=1)
    dp, tp, stage = engine.seq_dp_world_size, engine.mp_world_size // pp, engine.zero_optimization_stage()
    topology = Topology(dp=dp, tp=tp, pp=pp, ep=ep, zero=stage)
    return FrameworkState(origin="deepspeed", extras=extras, step=engine.global_steps, topology=topology)


def _refuse(engine: Any) -> None:
    """Raise UnsupportedError that lists every unsupported feature of the engine."""
    optimizer = engine.optimizer
    known = (
        (
            getattr(optimizer, "swap_optimizer", False),
            "offload_optimizer to NVMe: its states are in swap files; set device cpu, or none",
        ),
        (
            getattr(optimizer, "params_in_nvme_and_cpu", False),
            "offload_param to NVMe: weights are in swap files; set device cpu, or none",
        ),
        (
            getattr(optimizer, "zero_hpz_partition_size", 1) > 1,
            "zero_hpz_partition_size (secondary copies of weights): set it to 1 while resuming",
        ),
        (getattr(optimizer, "zenflow", False), "ZenFlow: it keeps additional optimizer states on the CPU"),
        (
            getattr(optimizer, "partial_offload", 1.0) < 1.0,
            "offload_optimizer.ratio below 1 (Twin-Flow): some states belong to a second optimizer; set it to 1",
        ),
        (
            getattr(optimizer, "offloaded_states", ()),
            "states that engine.offload_states moved away: call engine.reload_states() first",
        ),
    )
    reasons = [why for is_met, why in known if is_met]
    if reasons:
        raise UnsupportedError(
            f"expected an engine that holds each tensor in memory, in one place; got\n{format_list(reasons)}\n"
            "Or write files that engine.load_checkpoint reads: ucp convert SRC DST --to deepspeed"
        )


def _is_tensor_parallel(engine: Any, mesh: RunMesh) -> bool:
    """Whether layers are split over ranks. Raises UsageError if `mesh` contradicts the engine."""
    bwc = importlib.import_module("deepspeed.utils.bwc")
    ranks = int(bwc.bwc_tensor_model_parallel_world_size(engine.mpu))
    if ranks == 1:
        return False
    rank = int(bwc.bwc_tensor_model_parallel_rank(engine.mpu))
    if mesh.degree("tp") != ranks:
        got = f"one with tp={mesh.degree('tp')}" if mesh.topology is not None else "none"
        raise UsageError(f'expected a topology with the engine\'s tp={ranks}, for example "tp={ranks}"; got {got}')
    if mesh.coords["tp"] != rank:
        raise UsageError(
            f"expected this rank at tp={rank}, where the engine has it; the topology puts it at "
            f"tp={mesh.coords['tp']}, because it orders ranks as Megatron does. Pass a torch DeviceMesh with the order "
            "of this run instead"
        )
    return True


class DeepSpeedAdapter:
    """Describes engines of DeepSpeed."""

    name = "deepspeed"

    def claims(self, request: LiveRequest) -> bool:
        """Whether the user passed an engine, its module or its optimizer."""
        if "deepspeed.runtime.engine" not in sys.modules:
            return False
        from torch import nn

        passed = (request.model, request.optimizer)
        params = request.model.parameters() if isinstance(request.model, nn.Module) else ()
        return any(type(item).__module__.startswith("deepspeed.runtime.") for item in passed) or any(
            hasattr(param, mark) for param in params for mark in ("ds_id", "_hp_mapping")
        )

    def describe(self, request: LiveRequest) -> LiveRun:
        """What the engine holds. Raises UsageError without an engine, UnsupportedError for unsupported features."""
        engine = _find_engine(request)
        _refuse(engine)
        is_cut = _is_tensor_parallel(engine, request.mesh)
        named = name_module(engine.module, engine.expert_parallel_group)
        wrapped = unwrap_optimizer(engine.optimizer, named)
        model = _describe_model(named, wrapped)
        read = partial(_read_state, engine)
        run = LiveRun(model=model, finish=wrapped.finish, has_global_parts=not is_cut, state=read)
        if request.optimizer is False:
            return run
        return replace(run, optimizer=wrapped.optimizer, resume=partial(resume, engine))


def _find_engine(request: LiveRequest) -> Any:
    """The engine, passed as model or as optimizer; the other argument must belong to it. Raises UsageError."""
    kind = sys.modules["deepspeed.runtime.engine"].DeepSpeedEngine
    engines = [item for item in (request.model, request.optimizer) if isinstance(item, kind)]
    if not engines:
        raise UsageError(
            "expected the engine that deepspeed.initialize returned; got only its module or its optimizer, but an "
            "engine keeps masters, steps and copies of a weight in several objects. Pass the engine as the model"
        )
    engine: Any = engines[0]
    if request.model not in (engine, engine.module):
        raise UsageError("expected the engine, or the module inside it, as the model; got another module")
    if request.optimizer not in (None, False, engine, engine.optimizer):
        raise UsageError(
            "expected the optimizer of the engine, or none; got another. Leave it out: an engine has its own"
        )
    return engine


def _describe_model(named: NamedModule, wrapped: Wrapped) -> LiveModel:
    """The master of each tensor, if it has one; else the rank's shard of it."""
    tensors, handles, marked = [], {}, {}
    tensor: Any  # with the attributes that DeepSpeed adds
    for tensor, names in named.tensors.items():
        master = wrapped.masters.get(tensor)
        if master is None and hasattr(tensor, "ds_id"):
            chunk = locate_chunk(tensor, tensor.ds_process_group)
            master = Master(memory=tensor.ds_tensor.narrow(0, 0, chunk.numel), part=chunk.part)
        elif master is None:
            master = Master(memory=tensor, part=make_full_part(tensor))
        tensors.append(LiveTensor(names=names, dtype=dtype_of(master.memory), part=master.part))
        handles[names[0]], marked[names[0]] = master.memory, tensor
    return LiveModel(tensors=tuple(tensors), handles=handles, owners={}, notes=named.notes, marked_params=marked)
