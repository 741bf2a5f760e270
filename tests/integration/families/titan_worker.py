"""Trains models of transformers, goes on in torchtitan from what `ucp convert --names` made of them, and goes back.

python titan_worker.py MODEL ...

Needs ucp, transformers and torchtitan 0.3. A model of the table of `make_hf_names` takes three steps of AdamW and is
saved by torch.distributed.checkpoint under its names in memory. Converted, torchtitan's model of the same sizes loads
it, weights and optimizer, in torchtitan's way; both then take two more steps. torchtitan's checkpoint of that is
converted back, loaded in transformers, and converted once more. A line of JSON for each: `model`, `largest` logit,
largest `difference` at once, `later`, after the two steps, and `back` in transformers, the difference with queries and
keys in Hugging Face's order (`unordered`), and `states`, how many tensors came back bit for bit.
"""

from __future__ import annotations

import json
import logging
import sys
import tempfile
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from unittest import mock

sys.path.insert(0, str(Path(__file__).parents[3] / "fixtures" / "make" / "huggingface"))
sys.path.insert(0, str(Path(__file__).parents[3] / "fixtures" / "make" / "styles"))

import titan_models
import torch
import torch.distributed.checkpoint as dcp
import transformers
from forward_worker import randomize
from make_hf_names import MODELS, built
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torchtitan.components.checkpoint_utils import (
    get_flat_optim_state_dict,
    init_optim_state,
    load_flat_optim_state_dict,
)

import ucp

Logits = Callable[[Tensor], Tensor]
SIZES = ("num_attention_heads", "num_key_value_heads", "head_dim")
"""What shapes do not tell, and it takes to bring queries, keys and values together; latent attention keeps them so."""


def main() -> None:
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    transformers.utils.logging.disable_progress_bar()
    with mock.patch.object(Tensor, "bfloat16", Tensor.float):  # torchtitan's experts compute so; here fp32 is compared
        for name in sys.argv[1:]:
            with tempfile.TemporaryDirectory() as folder:
                print(json.dumps({"model": name, **compare(name, Path(folder))}), flush=True)


def compare(name: str, root: Path) -> dict[str, float]:
    theirs = built(MODELS[name]).float()
    config = json.loads(theirs.config.to_json_string(use_diff=False))
    with torch.no_grad():
        randomize(theirs)
    run = Run(theirs, lambda tokens: theirs(input_ids=tokens).logits)
    for at in range(3):
        run.step(at)
    dcp.save(run.state(), checkpoint_id=root / "theirs")
    sizes = {key: config[key] for key in SIZES if "kv_lora_rank" not in config}
    converted(root / "theirs", root / "titan", "transformers:torchtitan", sizes, "torchtitan")
    other = titan_models.built(config, fused=False)
    other.init_states()
    own = TitanRun(other, other)
    own.load(root / "titan")
    report = {
        "largest": run.logits().abs().max().item(),
        "difference": (run.logits() - own.logits()).abs().max().item(),
    }
    report["unordered"] = (run.logits() - unordered(theirs, other, own)).abs().max().item()
    for at in (3, 4):
        run.step(at)
        own.step(at)
    report["later"] = (run.logits() - own.logits()).abs().max().item()
    dcp.save(own.state(), checkpoint_id=root / "titan-later")
    converted(root / "titan-later", root / "back", "torchtitan:transformers", sizes, "nested")
    run.load(root / "back")
    back = (run.logits() - own.logits()).abs().max().item()
    converted(root / "back", root / "again", "transformers:torchtitan", sizes, "torchtitan")
    return report | {"back": back, "states": equal_states(root / "titan-later", root / "again")}


@torch.no_grad()
def unordered(theirs: nn.Module, other: nn.Module, own: Run) -> Tensor:
    """torchtitan's logits with queries and keys as they are in Hugging Face; latent attention has none."""
    params, kept = dict(other.named_parameters()), {}
    for name, tensor in theirs.named_parameters():
        ours = name.removeprefix("model.").replace("self_attn.", "attention.qkv_linear.w").replace("_proj", "")
        if name.endswith(("q_proj.weight", "k_proj.weight")) and ours in params:
            kept[ours] = params[ours].clone()
            params[ours].copy_(tensor)
    found = own.logits()
    for ours, tensor in kept.items():
        params[ours].copy_(tensor)
    return found


def converted(source: Path, target: Path, names: str, sizes: Mapping[str, object], style: str) -> None:
    ucp.convert(source, target, to="dcp", names=names, settings={**sizes, "style": style})


def equal_states(one: Path, other: Path) -> int:
    """Tensors of two folders that are bit for bit the same. Raises SystemExit where one is not."""
    loaded = []
    for folder in (one, other):
        metadata = dcp.FileSystemReader(folder).read_metadata()
        keys = [key for key, own in metadata.state_dict_metadata.items() if hasattr(own, "size")]
        state = {key: torch.empty(metadata.state_dict_metadata[key].size) for key in keys}
        dcp.load(state, checkpoint_id=folder)
        loaded.append(state)
    if loaded[0].keys() != loaded[1].keys():
        raise SystemExit(f"other keys: {sorted(loaded[0].keys() ^ loaded[1].keys())}")
    for key, own in loaded[0].items():
        if not torch.equal(own, loaded[1][key]):
            raise SystemExit(f"{key} is other than it was")
    return len(loaded[0])


class Run:
    """A model of transformers and its optimizer, saved and loaded in the way that torch's documentation tells."""

    def __init__(self, model: nn.Module, logits: Logits) -> None:
        self.model, self.compute = model, logits
        self.optimizer = torch.optim.AdamW(self.params(), lr=1e-2, weight_decay=0.1)

    def params(self) -> Iterable[object]:
        """What the optimizer is made of."""
        return self.model.parameters()

    def logits(self) -> Tensor:
        """Of the same tokens each time."""
        self.model.eval()
        with torch.no_grad():
            return self.compute(tokens(99))

    def step(self, at: int) -> None:
        """One step of training."""
        self.model.train()
        rows = tokens(at)
        logits = self.compute(rows)
        nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), rows[:, 1:].flatten()).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def state(self) -> dict[str, object]:
        """What is saved and loaded."""
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optimizer": optimizer}

    def load(self, folder: Path) -> None:
        """Weights and optimizer."""
        state = self.state()
        dcp.load(state, checkpoint_id=folder)
        set_state_dict(self.model, self.optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])


class TitanRun(Run):
    """The same in torchtitan's way, with its own functions (`ModelWrapper`, `OptimizersContainer`)."""

    def params(self) -> Iterable[object]:
        """With names, by which its state is saved."""
        return self.model.named_parameters()

    def state(self) -> dict[str, object]:
        """What is saved and loaded: keys of the model at the top."""
        init_optim_state(self.optimizer)
        return {**self.model.state_dict(), "optimizer": get_flat_optim_state_dict(self.optimizer)}

    def load(self, folder: Path) -> None:
        """Weights and optimizer."""
        state = self.state()
        dcp.load(state, checkpoint_id=folder)
        load_flat_optim_state_dict(self.optimizer, state.pop("optimizer"))
        self.model.load_state_dict(state)


def tokens(seed: int) -> Tensor:
    return torch.randint(0, 64, (2, 12), generator=torch.Generator().manual_seed(seed))


if __name__ == "__main__":
    main()
