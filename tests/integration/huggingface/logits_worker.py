"""What transformers computes from a model, and megatron-core from what it loaded of the conversion of that model.

python logits_worker.py save NAME MODEL
python logits_worker.py compare NAME MODEL LOADED

Needs ucp and transformers, and megatron-core on PYTHONPATH. NAME: of the table of `make_hf_names`. LOADED: the
tensors that ranks of megatron-core held after they loaded it (`megatron_load.py --dump`). Prints JSON: the `largest`
logit, and the largest `difference`.
"""

from __future__ import annotations

import json
import logging
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "families"))

import torch
import transformers
from forward_worker import built, gpt_model, install, kernels, logits, patch_mcore, randomize, start
from make_hf_names import MODELS
from safetensors.torch import load_file


@torch.no_grad()
def main() -> None:
    logging.disable(logging.WARNING)
    transformers.utils.logging.disable_progress_bar()
    what, name, folder = sys.argv[1], sys.argv[2], Path(sys.argv[3])
    if what == "save":
        model = built(MODELS[name]).float()
        randomize(model)
        model.to(torch.bfloat16).save_pretrained(folder)  # the type that Megatron trains in
        return
    tokens = torch.randint(0, 64, (2, 12), generator=torch.Generator().manual_seed(5))
    theirs = built(MODELS[name]).float().eval()
    theirs.load_state_dict(load_file(folder / "model.safetensors"), strict=not theirs.config.tie_word_embeddings)
    wanted = theirs(input_ids=tokens).logits
    install()
    with kernels():
        from megatron_model import load_mcore

        load_mcore()
    patch_mcore(fused_adam=False)
    start()
    loaded = {key: own for key, own in load_file(sys.argv[4]).items() if key.endswith("/weight")}
    whole = {key.removesuffix("/weight"): own for key, own in loaded.items()}
    config = json.loads((folder / "config.json").read_text())
    found = logits(gpt_model(MODELS[name].family, config, whole), whole, tokens)
    print(json.dumps({"largest": wanted.abs().max().item(), "difference": (found - wanted).abs().max().item()}))


if __name__ == "__main__":
    main()
