"""The Python samples of the documentation run, page by page, on a checkpoint that real DeepSpeed wrote.

A remark behind an expression that is a Python value is what the expression gives.
"""

from __future__ import annotations

import ast
import doctest
import re
import shutil
from collections.abc import Iterable, Iterator
from functools import partial
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[3]
CHECKPOINT = ROOT / "fixtures/deepspeed/z2-dp2-client-state/checkpoint"
BLOCK = re.compile(r"^( *)```python\n(.*?)^ *```", re.DOTALL | re.MULTILINE)
REMARK = re.compile(r"\s+# ([\[({'\"\d].*|True|False|None)$")
"""A value behind an expression. Example: `report.atoms  # 16`."""

HERE = {"dp=8": "dp=1", "dp=2,tp=2": "dp=1"}
"""What a page says of its reader's run, and this one is."""
PREFIXED = 'rename=lambda name: "model." + name'
"""In a sample that is for a checkpoint of other names."""


def pages() -> list[str]:
    found = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]
    return sorted(str(page.relative_to(ROOT)) for page in found if BLOCK.search(page.read_text()))


def blocks(page: str) -> Iterator[str]:
    for indent, text in BLOCK.findall((ROOT / page).read_text()):
        for said, here in HERE.items():
            text = text.replace(said, here)  # noqa: PLW2901  # the sample as it is run
        yield re.sub(f"^{indent}", "", text, flags=re.MULTILINE)


def run(block: str, names: dict[str, object]) -> int:
    """Statements that were run; values behind expressions are compared."""
    lines = block.splitlines()
    tree = ast.parse(block)
    for statement in tree.body:
        code = ast.get_source_segment(block, statement)
        remark = REMARK.match(lines[(statement.end_lineno or 0) - 1][statement.end_col_offset or 0 :])
        if isinstance(statement, ast.Expr) and remark:
            got = repr(eval(code or "", names))
            same = doctest.OutputChecker().check_output(remark[1] + "\n", got + "\n", doctest.ELLIPSIS)
            assert same, f"{code} is {got}; the page says {remark[1]}"
        else:
            exec(compile(ast.Module([statement], []), "<sample>", "exec"), names)
    return len(tree.body)


@pytest.fixture
def names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, object]]:
    """What the pages take for granted: a checkpoint in `ckpt`, a model, optimizer and names of a Llama."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(ROOT / "fixtures" / "make" / "deepspeed")
    from deepspeed_model import TinyModel

    shutil.copytree(CHECKPOINT / "global_step3", "ckpt/global_step1000")
    Path("ckpt/latest").write_text("global_step1000")
    store = f"file://{tmp_path / 'store'}"
    alone = partial(torch.distributed.init_process_group, init_method=store, rank=0, world_size=1)
    monkeypatch.setattr(torch.distributed, "init_process_group", alone)
    monkeypatch.setattr(torch.optim, "AdamW", partial(grouped, torch.optim.AdamW))
    made = partial(TinyModel, frozenset({"scalar"}))
    model = made()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1.0)
    for trained in (own for own in model.parameters() if own.requires_grad):
        trained.grad = torch.ones_like(trained)
    optimizer.step()
    scheduler = torch.optim.lr_scheduler.ConstantLR(optimizer)
    yield {"MyModel": made, "model": model, "optimizer": optimizer, "scheduler": scheduler, **llama()}
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def grouped(
    made: type[torch.optim.Optimizer], parameters: Iterable[torch.nn.Parameter], lr: float
) -> torch.optim.Optimizer:
    """The groups of the run that saved `CHECKPOINT`, where a page has the one of a simple run."""
    trained = [own for own in parameters if own.requires_grad]
    split = [[own for own in trained if (own.ndim < 2) is few] for few in (False, True)]
    return made([{"params": own, "lr": lr} for own in split])


def llama() -> dict[str, object]:
    """Names, shapes and arguments as Hugging Face and Megatron have them."""
    layer = {
        "input_layernorm.weight": (4096,),
        "self_attn.q_proj.weight": (4096, 4096),
        "self_attn.k_proj.weight": (4096, 4096),
        "self_attn.v_proj.weight": (4096, 4096),
        "self_attn.o_proj.weight": (4096, 4096),
        "post_attention_layernorm.weight": (4096,),
        "mlp.gate_proj.weight": (11008, 4096),
        "mlp.up_proj.weight": (11008, 4096),
        "mlp.down_proj.weight": (4096, 11008),
    }
    shapes = {f"model.layers.{number}.{name}": shape for number in range(4) for name, shape in layer.items()}
    shapes |= {
        "model.embed_tokens.weight": (32000, 4096),
        "model.norm.weight": (4096,),
        "lm_head.weight": (32000, 4096),
    }
    arguments = {"num_layers": 4, "hidden_size": 4096, "num_attention_heads": 32, "ffn_hidden_size": 11008}
    name = "decoder.layers.3.mlp.linear_fc2.weight"
    return {
        "names": list(shapes),
        "shapes": shapes,
        "arguments": arguments,
        "canonical_names": [name, "decoder.final_layernorm.weight"],
        "name": name,
    }


@pytest.mark.parametrize("page", pages())
@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors")
def test_the_samples_of_a_page_run(page: str, names: dict[str, object]) -> None:
    assert sum(run(block, names) for block in blocks(page) if PREFIXED not in block) > 1


def test_the_pages_with_samples_are_known() -> None:
    assert {"docs/how-to/load-into-a-model.md", "docs/reference/python.md"} <= set(pages())


def test_a_wrong_remark_is_found() -> None:
    run("[1, 2]  # [1, 2]\n3  # whatever is written here\n", {})
    with pytest.raises(AssertionError, match=r"page says \[1, 3\]"):
        run("[1, 2]  # [1, 3]\n", {})
