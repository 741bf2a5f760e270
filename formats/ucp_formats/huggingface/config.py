"""The `config.json` that the target writes, and the files that are published with the model (tokenizer, generation).

It comes from the folder that `--set config=DIR` names (`none`: weights alone), else from beside the checkpoint, else it
is made from the arguments of the run, by the tables `[[config.huggingface]]` of its family. The tensors must have the
sizes that it records.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from ucp.contract.model import CONFIG_EXTRA, family_of_type, run_arguments
from ucp.contract.sidecars import list_sidecars, sidecar_extra
from ucp.core.index import AtomIndex, Extra, Index
from ucp.core.tensor import DType, TensorRef
from ucp.errors import MisfitError, UsageError, format_count, format_list
from ucp.families.family import Family, distinct_shapes
from ucp.families.library import find_contradictions
from ucp.families.recipes import keep_rows
from ucp.families.styles import shape_conflicts
from ucp.families.toml.config import build_config
from ucp.io.json_text import NotJson, parsed
from ucp.transfer.probe import Prober
from ucp_formats.huggingface.locate import CONFIG

NONE = "none"
"""`--set config=none`: weights without a config.json."""

_PUBLISHED = re.compile(
    r"(?:tokenizer|chat_template|special_tokens_map|added_tokens|generation_config|(?:video_)?preprocessor_config|"
    r"processor_config|vocab|merges|spiece)[\w.-]*|.+\.(?:model|tiktoken|jinja)|"
    r"(?:configuration|modeling|modular|tokenization|processing|image_processing)_\w+\.py"
)
"""Names of files that are part of a model; other files beside a checkpoint belong to its training."""
_LAYER = re.compile(r"(?:^|\.)(?:layers|layer|h)\.(\d+)\.")
_STYLES = ("huggingface", "transformers")
"""Naming styles of transformers: on disk, and in memory."""
_PREFIXES = ("", "model.", "transformer.", "gpt_neox.")
"""Prefixes that names have in a model with a head, and lack in the same model without one."""
_MOST_CONFIG = 16 << 20
"""Bytes of a config.json, at most."""
_ROUTER, _DENSE = "decoder.layers.{layer}.mlp.router.weight", "decoder.layers.{layer}.mlp.linear_fc2.weight"
_EVEN = ("llama", "deepseek_v2")
"""Types of models whose hidden size must be a multiple of num_attention_heads (transformers 5.23,
`validate_architecture`)."""
_PADDED, _TRUE, _TOKENIZER = "padded_vocab_size", "vocab_size", "tokenizer_type"
_WITHOUT_END = "NullTokenizer"
"""The tokenizer whose `vocab_size` does not count the end-of-text token (megatron/training/tokenizer)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """A configuration of transformers."""

    values: Mapping[str, object]
    """The document."""
    where: str
    """Where it is from, for messages."""
    text: bytes = b""
    """Its bytes; empty if it was derived."""
    files: tuple[Extra, ...] = ()
    """Files that are published with it, as extras; empty if it came with the checkpoint."""

    def get(self, *keys: str) -> object:
        """Value of the first of `keys` that is set, in the document or in its `text_config`; None if none is."""
        inner = self.values.get("text_config")
        tables = (self.values, inner) if isinstance(inner, dict) else (self.values,)
        return next((table[key] for table in tables for key in keys if table.get(key) is not None), None)

    def render(self, dtype: DType | None) -> bytes:
        """The file, with `dtype` as the type of the weights; unchanged if it records that type, or none."""
        key = "dtype" if "dtype" in self.values or not self.text else "torch_dtype"
        if self.text and (dtype is None or self.values.get(key) in (None, dtype.value)):
            return self.text
        values = self.values if dtype is None else {**self.values, key: dtype.value}
        return (json.dumps(values, indent=2, sort_keys=True) + "\n").encode()


def is_published(name: str) -> bool:
    """Whether a file beside a checkpoint is part of the model.

    >>> is_published("tokenizer.json"), is_published("modeling_x.py"), is_published("zero_to_fp32.py")
    (True, True, False)
    """
    return _PUBLISHED.fullmatch(name) is not None


def read_config(folder: Path) -> ModelConfig:
    """The config.json at or in the path that the user gives, and files published with it. Raises UsageError."""
    folder = folder.parent if folder.name == CONFIG and folder.is_file() else folder
    path = folder / CONFIG
    if not path.is_file():
        raise UsageError(
            f"expected --set config=DIR, a folder with a config.json, or config={NONE}; got {folder}, which "
            f"{'has no config.json' if folder.is_dir() else 'is not a folder'}"
        )
    files = sorted(file for file in folder.iterdir() if file.is_file() and is_published(file.name))
    return _parse_config(_file_extra(path), str(path), [_file_extra(file) for file in files])


def carried_config(index: Index) -> ModelConfig | None:
    """The config.json that came with the checkpoint, if any. Raises UsageError for a damaged one."""
    for file in list_sidecars(index):
        if file.name == CONFIG:
            return _parse_config(sidecar_extra(file.name, file.ref.path, file.ref.nbytes), file.ref.path, [])
    for extra in index.extras:
        if extra.name == CONFIG_EXTRA and isinstance(extra.value, dict) and "model_type" in extra.value:
            return ModelConfig(values=extra.value, where=f"the config.json of {index.path}")
    return None


def _file_extra(path: Path) -> Extra:
    """A file as an extra; links, as in the cache of huggingface_hub, are followed."""
    return sidecar_extra(path.name, str(path.resolve()), path.stat().st_size)


def _parse_config(file: Extra, where: str, files: Sequence[Extra]) -> ModelConfig:
    ref = file.value
    assert isinstance(ref, TensorRef)
    if ref.nbytes > _MOST_CONFIG:
        raise UsageError(f"expected a config.json of at most {_MOST_CONFIG:,} bytes; {where} has {ref.nbytes:,}")
    with Prober() as prober:
        text = bytes(prober.window(ref, 0, ref.numel))
    try:
        values = parsed(text)
    except NotJson as error:
        raise UsageError(f"expected JSON in {where}; {error}. Name another folder with --set config=DIR") from error
    if not isinstance(values, dict) or not isinstance(values.get("model_type", ""), str):
        raise UsageError(f"expected a configuration of transformers, a JSON object with model_type, in {where}")
    return ModelConfig(values=values, where=where, text=text, files=tuple(files))


def check_config(
    config: ModelConfig, shapes: Mapping[str, tuple[int, ...]], family: Family | None, *, is_carried: bool
) -> None:
    """Raise MisfitError naming all that `config_conflicts` finds, or if the model of `config` is quantised.

    `is_carried`: whether it came with the checkpoint. If so, and no family is known, its sizes are not compared: it may
    record sizes that no tensor of the model has (`vocab_size` of a speech encoder without a head).
    """
    if config.get("quantization_config") is not None:
        raise MisfitError(
            f"{config.where} describes a quantised model (quantization_config), but weights are written unquantised: "
            "name a folder whose config.json has no quantization_config (--set config=DIR)"
        )
    general = () if is_carried else _general_conflicts(config, shapes)
    lines = [*general, *config_conflicts(config, shapes, family)]
    if lines:
        raise MisfitError(
            f"expected the tensors that {config.where} describes; got\n{format_list(dict.fromkeys(lines))}\nIt is from "
            "another model, or the tensors of the source have other names (convert them: --names SOURCE:huggingface). "
            f"Name the folder of this model with --set config=DIR, or write the weights alone (config={NONE})"
        )


def config_conflicts(
    config: ModelConfig, shapes: Mapping[str, tuple[int, ...]], family: Family | None
) -> Iterator[str]:
    """A line for every size, name and shape that keeps transformers from loading a model of `config`.

    `shapes`: of all tensors, by their names in transformers. `family`: the one that has all of the names; if None, the
    family of `model_type`, if there is one, is used for the names that it has.
    """
    family = family or family_of_type(config.get("model_type"))
    if family is None:
        return
    yield from _general_conflicts(config, shapes)
    yield from _family_conflicts(config, shapes, family)
    yield from shape_conflicts(family.bind(arguments=config.values, shapes=shapes), shapes, _STYLES[0])

    def is_expected(name: str) -> bool:
        """Whether transformers has the name, on disk or in memory, with or without a prefix."""
        full_names = [f"{prefix}{name}" for prefix in _PREFIXES]
        return any(True for full in full_names for style in _STYLES for _ in family.readings(full, style))

    foreign = [name for name in distinct_shapes(shapes) if family.rules_of(name) and not is_expected(name)]
    if foreign:
        yield f"names that transformers does not have for such a model: {', '.join(foreign[:4])}"


def _general_conflicts(config: ModelConfig, shapes: Mapping[str, tuple[int, ...]]) -> Iterator[str]:
    """Conflicts for models of any kind: sizes that no tensor has, and the number of layers."""
    lengths = {length for shape in shapes.values() for length in shape}
    for keys in (("vocab_size",), ("hidden_size", "n_embd", "d_model")):
        size = config.get(*keys)
        if isinstance(size, int) and size not in lengths:
            largest = max(shapes, key=lambda name: shapes[name], default="")
            yield f"{keys[0]} = {size}: no tensor has a dim of that size; {largest} is {list(shapes.get(largest, ()))}"
    layers, predicting = config.get("num_hidden_layers", "n_layer"), config.get("num_nextn_predict_layers")
    count = 1 + max((int(match[1]) for name in shapes if (match := _LAYER.search(name))), default=-1)
    most = layers + (predicting if isinstance(predicting, int) else 0) if isinstance(layers, int) else 0
    if count and isinstance(layers, int) and not layers <= count <= most:
        yield f"num_hidden_layers = {layers}: there are tensors of {format_count(count, 'layer')}"


def _family_conflicts(config: ModelConfig, shapes: Mapping[str, tuple[int, ...]], family: Family) -> Iterator[str]:
    yield from find_contradictions(family, arguments=config.values, shapes=shapes)
    sizes = family.bind(arguments=config.values, shapes=shapes).values
    rows = {"q_proj": ("heads", "num_attention_heads"), "k_proj": ("groups", "num_key_value_heads")}
    for name, shape in shapes.items():
        size, key = rows.get(name.removesuffix(".weight").rpartition(".")[2], ("", ""))
        has_sizes = size in sizes and "head_dim" in sizes and not sizes.get("mla")
        if has_sizes and shape[0] != sizes[size] * sizes["head_dim"]:
            yield f"{key} = {sizes[size]}, with {sizes['head_dim']} rows each: {name} is {list(shape)}"
            break
    key = "moe_intermediate_size" if "moe_intermediate_size" in config.values else "intermediate_size"
    width, recorded = family.bind(shapes=shapes).values.get("expert_ffn"), config.get(key)
    if None not in (width, recorded) and recorded != width:
        yield f"{key} = {recorded}: experts have {width}"
    vocabulary = config.get("vocab_size")
    for name, shape in shapes.items():
        is_padded = any(rule.padded == 0 for rule in family.rules_of(name))
        if is_padded and vocabulary not in (None, shape[0]):
            yield f"vocab_size = {vocabulary}: {name} is {list(shape)}"


def derive_config(
    family: Family, shapes: Mapping[str, tuple[int, ...]], arguments: Mapping[str, object], where: str
) -> ModelConfig:
    """The configuration of a model, from the arguments that a run recorded.

    `family`: bound to the model. `shapes`: of the written tensors, by name in any style. `where`: the checkpoint, for
    messages. Raises MisfitError naming all arguments that are not recorded or have no counterpart.
    """
    parts = family.configs.get(_STYLES[0], ())
    if not any(part.family == family.name and "model_type" in part.fixed for part in parts):
        raise MisfitError(
            f"no config.json can be made for a model of the family {family.name}: name a folder that has one "
            f"(--set config=DIR), or write the weights alone (--set config={NONE})"
        )
    values, lines = build_config(parts, {**arguments, **family.values, **_sizes(family, shapes)})
    if lines:
        raise MisfitError(
            f"expected the arguments of a model that transformers has ({values.get('model_type')}); those in {where} "
            f"do not fit:\n{format_list(lines)}\nName a folder with the config.json of the model (--set config=DIR), "
            f"or write the weights alone (--set config={NONE})"
        )
    return ModelConfig(values=values, where=f"the arguments that {where} records")


def refusal_note(config: ModelConfig) -> str | None:
    """Why transformers will refuse to load `config`; None if it will not refuse."""
    hidden, heads = config.get("hidden_size"), config.get("num_attention_heads")
    if config.get("model_type") in _EVEN and isinstance(hidden, int) and isinstance(heads, int) and hidden % heads:
        return (
            "from_pretrained of transformers 5 will refuse this model: it requires the hidden_size of a "
            f"{config.get('model_type')} to be a multiple of num_attention_heads; these are {hidden} and {heads} in "
            f"{config.where}. The weights are complete, for programs that read safetensors themselves"
        )
    return None


def _sizes(family: Family, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, object]:
    """Sizes from the tensors: rows of the vocabulary, and layers without experts."""
    sizes: dict[str, object] = {}
    layers: dict[str, set[int]] = {_ROUTER: set(), _DENSE: set()}
    for name, shape in shapes.items():
        parsed_name = family.read(name)
        if parsed_name is not None and parsed_name.rule.padded == 0:
            sizes["written_vocab"] = shape[0]
        if parsed_name is not None and parsed_name.rule.name.text in layers:
            layers[parsed_name.rule.name.text].add(parsed_name.fields["layer"])
    dense = sorted(layers[_DENSE] - layers[_ROUTER])
    sizes["dense_layers"] = dense
    if dense == list(range(len(dense))):
        sizes["leading_dense"] = len(dense)
    return sizes


def without_padding(index: Index, family: Family | None, config: ModelConfig | None) -> Index:
    """`index` with a note, and with embeddings cut to the true vocabulary, if the run padded the vocabulary.

    The true size is the one in `config` if there is one, else the one that the run recorded; without it, all rows stay.
    """
    arguments = run_arguments(index)
    if family is None or _PADDED not in arguments:
        return index
    rows = arguments.get(_TRUE) if config is None else config.get(_TRUE)
    if config is None and isinstance(rows, int) and arguments.get(_TOKENIZER) == _WITHOUT_END:
        rows += 1
    padded = [name for name in index.atoms if any(rule.padded == 0 for rule in family.rules_of(name))]
    if not isinstance(rows, int):
        note = f"the true size of the vocabulary is not recorded: {', '.join(padded)} may end with rows of padding"
        return replace(index, notes=(*index.notes, note))
    shortened: dict[str, AtomIndex] = {}
    for name, atom in ((name, index.atoms[name]) for name in padded):
        if 0 < rows < atom.global_shape[0]:
            shortened[name] = keep_rows(atom, rows)
    if not shortened:
        return index
    padding = format_count(index.atoms[next(iter(shortened))].global_shape[0] - rows, "row")
    note = f"{padding} of padding left out after the {rows:,} of the vocabulary: {', '.join(shortened)}"
    return replace(index, atoms={**index.atoms, **shortened}, notes=(*index.notes, note))
