"""What an engine keeps beside tensors: steps, samples, the schedule of rates, the loss scale.

A checkpoint of DeepSpeed has all of it, and it is set as `engine.load_checkpoint` sets it. Of other frameworks only the
step is known; what then stays at its initial value is told.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ucp.contract.optimizer import step_counts
from ucp.core.index import Index
from ucp.core.pickle_values import Stub
from ucp.live.match.findings import Findings
from ucp.transfer.probe import Prober
from ucp_formats.deepspeed.config import RunConfig, read_loss_scale


def resume(engine: Any, index: Index, findings: Findings) -> dict[str, str]:
    """Set what is not a tensor of a parameter; notes tell what was not there to be set."""
    extras = {extra.name: extra.value for extra in reversed(index.extras)}
    taken = {}
    for setting, name in ((_counts, "engine"), (_schedule, "lr_scheduler"), (_loss_scale, "loss_scaler")):
        what, note = setting(engine, index, extras)
        taken.update({name: what} if what else {})
        findings.notes.extend([note] if note else [])
    return taken


def _counts(engine: Any, index: Index, extras: Mapping[str, object]) -> tuple[str, str]:
    """What was set, and a note, either of them empty."""
    saved = extras.get("engine")
    if isinstance(saved, Mapping) and isinstance(saved.get("global_steps"), int):
        engine.global_steps = saved["global_steps"]
        engine.global_samples = saved.get("global_samples", saved["global_steps"] * engine.train_batch_size())
        engine.skipped_steps = saved.get("skipped_steps", 0)
        return "steps and samples of the engine", ""
    step, origin = index.step, "the step of the checkpoint"
    if step is None:
        with Prober() as prober:
            counts = step_counts(index, prober)
        step = int(counts[0]) if len(counts) == 1 and counts[0].is_integer() else None
        origin = "which the optimizer in the checkpoint counts for every parameter"
    if step is None:
        return "", f"engine.global_steps stays {engine.global_steps}: the checkpoint does not say its step"
    engine.global_steps = step
    engine.global_samples = step * engine.train_batch_size()
    return "", (
        f"engine.global_steps is {step}, {origin}; engine.global_samples was made of it and the batch size of this run"
    )


def _schedule(engine: Any, _index: Index, extras: Mapping[str, object]) -> tuple[str, str]:
    saved = extras.get("lr_scheduler")
    if engine.lr_scheduler is None:
        return "", ""
    if "engine" in extras and isinstance(saved, Mapping):
        engine.lr_scheduler.load_state_dict(saved)
        return f"scheduler {type(engine.lr_scheduler).__name__} of the engine", ""
    return "", "engine.lr_scheduler stays where it is: the checkpoint has no state of a scheduler of DeepSpeed"


def _loss_scale(engine: Any, _index: Index, extras: Mapping[str, object]) -> tuple[str, str]:
    optimizer = engine.optimizer
    scaler: Any = getattr(optimizer, "loss_scale_config", None)
    if scaler is not None:  # without ZeRO: no common base with the other, but the same names
        scaler = scaler if scaler.use_grad_scaling else None
    elif str(getattr(optimizer, "dtype", "")) == "torch.float16":
        scaler = getattr(optimizer, "loss_scaler", None)
    if scaler is None:
        return "", ""
    saved = extras.get("loss_scaler")
    scale = read_loss_scale(saved, RunConfig(raw={})) if saved is not None else {}
    is_dynamic = getattr(scaler, "dynamic_loss_scale", getattr(scaler, "dynamic", None))
    if not scale or scale.pop("dynamic") != is_dynamic:
        return "", "the loss scale stays as configured: the checkpoint has none of that kind"
    state = saved.state if isinstance(saved, Stub) and isinstance(saved.state, Mapping) else {}
    more = {str(name): number for name, number in state.items() if isinstance(number, int | float)}
    values = {**more, **scale} if is_dynamic else {"cur_scale": scale["cur_scale"]}
    for name, value in values.items():
        if hasattr(scaler, name):
            setattr(scaler, name, value)
    return "loss scale of the engine", ""
