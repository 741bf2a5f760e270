"""The Trainer of transformers without DeepSpeed, for `test_trainer_files.py`; or with it, from a conversion.

plain_trainer.py order OUT.json MODEL...          names of each model's parameters, in its order
plain_trainer.py train OUT MODEL                  six steps, saved at the third: OUT/checkpoint-3, OUT/truth.safetensors
plain_trainer.py resume OUT MODEL CHECKPOINT      the last three, over DeepSpeed
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
import transformers

SIZES = {
    "hidden_size": 8,
    "intermediate_size": 12,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 4,
    "max_position_embeddings": 16,
    "pad_token_id": None,
}
BLOOM = {"hidden_size": 8, "n_layer": 2, "n_head": 2}
GPT2 = {"n_embd": 8, "n_layer": 2, "n_head": 2, "n_positions": 16, "resid_pdrop": 0, "embd_pdrop": 0, "attn_pdrop": 0}
ZERO = {
    "zero_optimization": {"stage": 1},
    "train_micro_batch_size_per_gpu": 2,
    "zero_allow_untested_optimizer": True,
    "gradient_clipping": 1.0,
}


def model_of(kind: str) -> Any:
    """A small model."""
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(kind, vocab_size=17, **{"gpt2": GPT2, "bloom": BLOOM}.get(kind, SIZES))
    return transformers.AutoModelForCausalLM.from_config(config)


class Saves(transformers.TrainerCallback):  # type: ignore[misc]
    """Keeps what the model and the optimizer hold when the checkpoint is saved."""

    def __init__(self, out: Path) -> None:
        self.out = out

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any, optimizer: Any, **_: Any) -> None:
        """After the third step."""
        from safetensors.torch import save_file

        if state.global_step == 3:
            optimizer = getattr(optimizer, "optimizer", optimizer)
            found = {}
            for name, param in model.named_parameters():
                own = {"weight": param, **optimizer.state[param]}
                found |= {f"{name}/{key}": value.detach().clone() for key, value in own.items()}
            save_file(found, self.out / "truth.safetensors")


def train(out: Path, kind: str, checkpoint: str | None) -> None:
    """Train from the start, or go on."""
    rows = [(torch.arange(6) * (at + 1)) % 17 for at in range(12)]
    more = {"deepspeed": ZERO} if checkpoint else {"save_steps": 3, "save_strategy": "steps"}
    args = transformers.TrainingArguments(
        output_dir=str(out), max_steps=6, per_device_train_batch_size=2, weight_decay=0.1, learning_rate=1e-2,
        use_cpu=True, report_to=[], disable_tqdm=True, logging_steps=1, **more,
    )  # fmt: skip
    data = [{"input_ids": row, "labels": row} for row in rows]
    out.mkdir(parents=True, exist_ok=True)
    trainer = transformers.Trainer(model=model_of(kind), args=args, train_dataset=data)
    if checkpoint is None:
        trainer.add_callback(Saves(out))
    trainer.train(resume_from_checkpoint=checkpoint)
    losses = {own["step"]: own["loss"] for own in trainer.state.log_history if "loss" in own}
    (out / "losses.json").write_text(json.dumps(losses))


if __name__ == "__main__":
    verb, where, *rest = sys.argv[1:]
    if verb == "order":
        with torch.device("meta"):
            orders = {kind: [name for name, _ in model_of(kind).named_parameters()] for kind in rest}
        Path(where).write_text(json.dumps(orders))
    else:
        train(Path(where), rest[0], rest[1] if verb == "resume" else None)
