"""The reference model in megatron-core: its own modules, schedules, optimizers and checkpoints, in fp32 over gloo.

Needs megatron-core on PYTHONPATH, and `prepare` before anything of it is imported.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

FIXTURES = Path(__file__).resolve().parents[4] / "fixtures"
sys.path.insert(0, str(FIXTURES / "make" / "megatron"))

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from megatron_args import arguments  # noqa: E402
from megatron_cases import Case, Layout  # noqa: E402
from megatron_checkpoint import content_metadata, save  # noqa: E402
from megatron_load import steps_of  # noqa: E402
from megatron_model import build, initialize_parallel, load_mcore  # noqa: E402
from megatron_shims import install, kernels, patch_mcore  # noqa: E402
from megatron_state import local_states  # noqa: E402
from torch import Tensor, nn  # noqa: E402

from tests.integration.live.matrix.megatron_names import local_tensor  # noqa: E402
from tests.integration.live.reference.grid import Grid  # noqa: E402
from tests.integration.live.reference.run import ADAM  # noqa: E402
from tests.integration.live.reference.sizes import ROWS, SEQUENCE, Sizes, initial, tokens  # noqa: E402


def prepare() -> None:
    """Import megatron-core for a machine without a GPU."""
    install()
    with kernels():
        load_mcore()
    patch_mcore(fused_adam=False)
    from megatron.core.transformer.moe import moe_utils

    moe_utils.te_general_gemm = None  # 0.16 asks for it by name where there is no Transformer Engine
    _mark_norms_under_sequence_parallelism()


def _mark_norms_under_sequence_parallelism() -> None:
    """Torch's norms lack a mark that those of Transformer Engine have: sum gradients over tensor ranks."""
    from megatron.core.transformer.torch_norm import WrappedTorchNorm

    def make(_: type, config: Any, hidden_size: int, eps: float = 1e-5, **__: Any) -> nn.Module:
        norm = nn.RMSNorm(hidden_size, eps=eps)
        norm.weight.sequence_parallel = config.sequence_parallel  # type: ignore[assignment]  # a mark on a tensor
        return norm

    WrappedTorchNorm.__new__ = make  # type: ignore[method-assign]


class MegatronRun:
    """A job of megatron-core on this rank. Collective."""

    def __init__(self, sizes: Sizes, grid: Grid, kind: str, *, seed: str = "", lr: float | None = None) -> None:
        self.sizes, self.grid, self.kind = sizes, grid, kind
        self.at = grid.at(dist.get_rank())
        self.args = _arguments(sizes, grid, kind, lr or sizes.lr)
        _initialize_once(self.args)
        self.job = build(self.args, functools.partial(self._initialize, initial(sizes, seed=seed)))
        self.config = self.job.modules[0].config
        self._train_as_megatron()

    @property
    def model(self) -> list[nn.Module]:
        """The chunks, wrapped."""
        return list(self.job.chunks)

    @property
    def optimizer(self) -> Any:
        """Megatron's."""
        return self.job.optimizer

    def named(self, modules: list[nn.Module]) -> Iterator[tuple[str, nn.Parameter]]:
        """Parameters under names with the numbers of the whole model."""
        numbers = self.grid.layers(self.sizes.layers, stage=self.at.pp)
        first = self.at.dp % self.grid.ep * (self.sizes.experts // self.grid.ep)
        for module, layers in zip(modules, numbers, strict=True):
            for name, param in module.named_parameters():
                words = name.split(".")
                if "layers" in words:
                    words[2] = str(layers[int(words[2])])
                if "local_experts" in words:
                    words[6] = str(int(words[6]) + first)
                yield ".".join(words), param

    @torch.no_grad()
    def _initialize(self, whole: dict[str, Tensor], modules: list[nn.Module]) -> None:
        for name, param in self.named(modules):
            param.copy_(local_tensor(name, whole.__getitem__, self.sizes, self.grid, rank=self.at.tp))

    def _train_as_megatron(self) -> None:
        """What `train` of megatron/training/training.py sets."""
        from megatron.core.distributed import finalize_model_grads

        self.config.finalize_model_grads_func = finalize_model_grads

    def step(self, at: int) -> float:
        """Take a step; the mean loss of the global batch before it."""
        from megatron.core.pipeline_parallel import get_forward_backward_func

        rows = tokens(at).chunk(self.grid.dp)[self.at.dp]
        batches = rows.chunk(min(len(rows), self.grid.pp))
        for chunk in self.job.chunks:
            chunk.zero_grad_buffer()
        self.job.optimizer.zero_grad()
        made = get_forward_backward_func()(
            forward_step_func=_forward,
            data_iterator=[iter(batches) for _ in self.job.chunks] if self.grid.vpp > 1 else iter(batches),
            model=self.job.chunks,
            num_microbatches=len(batches),
            seq_length=SEQUENCE,
            micro_batch_size=len(batches[0]),
            forward_only=False,
        )
        self.job.optimizer.step()
        self.job.scheduler.step(increment=ROWS)
        total = torch.zeros(())
        if made and not self.at.tp:
            total += sum(own["loss"] for own in made) / len(batches) / self.grid.dp
        dist.all_reduce(total)
        return float(total)

    def save(self, folder: Path, step: int) -> None:
        """As Megatron's `save_checkpoint`."""
        from tests.integration.megatron.megatron_worker import collect_results_without_another_interpreter

        collect_results_without_another_interpreter()
        self.args.iteration = step
        self.args.consumed_train_samples = step * ROWS
        save(self.job, folder, content_metadata(_SHARDING.get(self.kind), singleton=False, version="0.16.1"))

    def states(self) -> Iterator[tuple[str, str, Tensor]]:
        """Name in the whole model, state, and what this rank and its data-parallel peers hold of it."""
        states = local_states(self.job.optimizer)
        for name, param in self.named(self.job.modules):
            yield name, "model", param.detach()
            for state, own in states[id(param)].items():
                yield name, state, own

    def steps(self) -> set[float]:
        """What the optimizer counts."""
        return steps_of(self.job)

    def expected(self, name: str, state: str, whole: dict[str, dict[str, Tensor]]) -> Tensor:
        """The part of whole tensors, by state and name of Hugging Face, that `states` should give."""
        of = whole["weight" if state == "model" else state]
        return local_tensor(name, of.__getitem__, self.sizes, self.grid, rank=self.at.tp)


def _initialize_once(args: Any) -> None:
    from megatron.core import parallel_state

    if not parallel_state.model_parallel_is_initialized():
        initialize_parallel(args)


_SHARDING = {"full": "fully_reshardable", "dp": "dp_reshardable"}


def _arguments(sizes: Sizes, grid: Grid, kind: str, lr: float) -> Any:
    layout = Layout(tp=grid.tp, pp=grid.pp, vpp=grid.vpp, dp=grid.dp, ep=grid.ep)
    case = Case(
        model="mixtral" if sizes.experts else "llama",
        layout=layout,
        format="torch" if kind in ("torch", "torch-zero") else "torch_dist",
        sharding=_SHARDING.get(kind),
        distributed=kind not in ("torch", "plain"),
        proves="a row of the matrix of load_into",
    )
    args = arguments(case)
    own = {"num_layers": sizes.layers, "encoder_num_layers": sizes.layers, "hidden_size": sizes.hidden}
    own |= {"ffn_hidden_size": sizes.ffn, "moe_ffn_hidden_size": sizes.ffn if sizes.experts else None}
    own |= {"num_experts": sizes.experts or None, "num_attention_heads": sizes.heads, "kv_channels": sizes.head_dim}
    own |= {"num_query_groups": sizes.groups, "vocab_size": sizes.vocabulary, "padded_vocab_size": sizes.vocabulary}
    own |= {"norm_epsilon": 1e-5, "bf16": False, "params_dtype": torch.float32}
    own |= {"lr": lr, "min_lr": 0.0, "lr_warmup_iters": 0, "lr_decay_style": "constant", "adam_beta2": ADAM["betas"][1]}
    own |= {"sequence_parallel": grid.tp > 1 and grid.ep > 1, "rank": dist.get_rank(), "local_rank": dist.get_rank()}
    vars(args).update(own)
    if grid.vpp > 1:
        args.num_layers_per_virtual_pipeline_stage = sizes.layers // grid.pp // grid.vpp
    return args


def _forward(batches: Iterator[Tensor], model: nn.Module) -> Any:
    rows = next(batches)
    length = rows.shape[1] - 1
    mask = torch.triu(torch.ones(length, length, dtype=torch.bool), 1)[None, None]
    positions = torch.arange(length).expand(len(rows), length)
    losses = model(rows[:, :-1], positions, mask, labels=rows[:, 1:])

    def loss(made: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        mean = made.mean()
        return mean, {"loss": mean.detach().clone()}

    return losses, loss
