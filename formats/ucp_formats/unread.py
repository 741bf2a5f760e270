"""Advice for files that are recognised by name but not read: checkpoints of other libraries, and incomplete ones.

It is used only if no format recognises a path, so that such a file beside a checkpoint never hides the checkpoint.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class _Kind:
    description: str
    """What it is, with its article."""
    globs: tuple[str, ...]
    """Patterns of the name of the file, or of an entry of the folder; one must match."""
    advice: str
    """What to do with it."""


_KINDS = (
    _Kind(
        "a LoRA adapter (peft)",
        ("adapter_config.json", "adapter_model.*"),
        "Keep it unchanged, since it is the same for every parallel layout, or merge it into its model with peft",
    ),
    _Kind(
        "a folder of safetensors files with unknown names",
        ("*.safetensors",),
        "Pass one of the files; those of one model have names such as model-00001-of-00003.safetensors",
    ),
    _Kind(
        "a Hugging Face model for TensorFlow or JAX",
        ("tf_model*.h5", "flax_model*.msgpack"),
        "Load it with transformers 4 (from_pretrained with from_tf=True or from_flax=True), save it with "
        "save_pretrained, and pass that",
    ),
    _Kind(
        "a GGUF model (llama.cpp)",
        ("*.gguf",),
        "Its weights are quantised: pass the Hugging Face model that it was made from",
    ),
    _Kind(
        "an orbax checkpoint (JAX)",
        ("_CHECKPOINT_METADATA", "manifest.ocdbt", "*.orbax-checkpoint-tmp-*"),
        "Load it in JAX and save its arrays in a format of the framework that will continue the training",
    ),
    _Kind(
        "an optimizer without its model",
        ("optimizer.pt", "optimizer.bin"),
        "Pass the folder that holds the weights beside it (model.safetensors or pytorch_model.bin)",
    ),
    _Kind("a NeMo archive", ("*.nemo",), "Unpack it with tar and pass the folder with the weights in it"),
)


def remedy(path: Path) -> str | None:
    """What `path` is, and what to do about it; None if that is not known either.

    >>> remedy(Path("llama.gguf")).partition(",")[0]
    'It looks like a GGUF model (llama.cpp)'
    """
    entries = list(path.iterdir()) if path.is_dir() else [path]
    for kind in _KINDS:
        if any(entry.match(glob) for glob in kind.globs for entry in entries):
            return f"It looks like {kind.description}, which is not read. {kind.advice}"
    return None
