"""`module.` before names: DDP's where all names have it, else a module of the model's own."""

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.nn.parallel import DistributedDataParallel

import ucp

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")  # of torch, for saves and loads of one process

NOTE = "DistributedDataParallel added it"


def save(kind, state, path):
    if kind == "dcp":
        dcp.save(state, checkpoint_id=path, no_dist=True)
        return path
    torch.save(state, path.with_suffix(".pt"))
    return path.with_suffix(".pt")


class Mixed(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.module = torch.nn.Linear(2, 3)
        self.head = torch.nn.Linear(3, 1)

    def forward(self, x):
        return self.head(self.module(x))


def trained(model: torch.nn.Module) -> dict[str, object]:
    """As torch saves it since 2.6 from an optimizer that was given names."""
    optimizer = torch.optim.AdamW(model.named_parameters())
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    return {"model": model.state_dict(), "optimizer": optimizer.state_dict()}


@pytest.mark.parametrize("kind", ["torch", "dcp"])
def test_a_module_of_that_name_is_kept(tmp_path, kind):
    source = save(kind, trained(Mixed()), tmp_path / "source")
    checkpoint = ucp.open(source)
    assert list(checkpoint.atoms) == ["module.weight", "module.bias", "head.weight", "head.bias"]
    assert all("exp_avg" in atom.states for atom in checkpoint.atoms.values())
    assert not any(NOTE in note for note in checkpoint.index.notes)


@pytest.mark.parametrize("kind", ["torch", "dcp"])
@pytest.mark.parametrize("optimizer_of", ["wrapped", "inner"])
def test_ddp_is_removed_with_a_note(tmp_path, kind, optimizer_of):
    """Whether the optimizer was given the names of the wrapped model or of the one inside."""
    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        wrapped = DistributedDataParallel(Mixed())
        state = trained(wrapped)
        if optimizer_of == "inner":
            state["optimizer"] = trained(wrapped.module)["optimizer"]
        source = save(kind, state, tmp_path / "source")
    finally:
        torch.distributed.destroy_process_group()
    checkpoint = ucp.open(source)
    assert list(checkpoint.atoms) == ["module.weight", "module.bias", "head.weight", "head.bias"]
    assert all("exp_avg" in atom.states for atom in checkpoint.atoms.values())
    assert sum(NOTE in note for note in checkpoint.index.notes) == 1
