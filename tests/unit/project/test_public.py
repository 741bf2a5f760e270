"""What `import ucp` gives."""

from __future__ import annotations

import inspect
import re
import subprocess
import sys
from pathlib import Path
from typing import get_type_hints

import numpy as np
import pytest
import torch

import ucp
from ucp.conversion.arguments import CompareArguments, ConvertArguments
from ucp.conversion.options import OPTIONS, ConvertOptions, make_options
from ucp.conversion.prepare import prepare
from ucp.core.tensor import TensorRef
from ucp.errors import IdleOptionError, MissingLibraryError, TopologyError, UsageError

FIXTURES = Path(__file__).parents[3] / "fixtures"
ZERO1 = {"to": "deepspeed", "topology": "dp=2,zero=1", "exclude": ["counter"]}
"""Asked of `source`, whose counter no optimizer group has."""
ONCE_BYTES_MOVE = {"resume", "overwrite", "fsync", "verify", "part", "finalize", "observer"}


def test_the_names_are_those_promised():
    assert dir(ucp) == sorted(ucp.__all__)
    assert all(getattr(ucp, name) is not None for name in ucp.__all__)
    with pytest.raises(AttributeError, match="no attribute 'loads'"):
        _ = ucp.loads


def test_the_module_is_the_command():
    """`python -m ucp` is the same as `ucp`, and says the version that the package has."""
    said = subprocess.run([sys.executable, "-m", "ucp", "--version"], capture_output=True, text=True, check=True)
    assert said.stdout == f"ucp {ucp.__version__}\n"


def test_tensors_ask_for_torch_only_when_they_are_read(source, monkeypatch):
    monkeypatch.setattr("ucp.live.checkpoint.find_spec", lambda name: None)
    checkpoint = ucp.open(source)
    name = next(iter(checkpoint.atoms))
    for asked in (lambda: checkpoint.read(name, "weight"), lambda: checkpoint.atoms[name].dtype("weight")):
        with pytest.raises(MissingLibraryError, match=r"'universal-checkpoint\[torch\]'"):
            asked()


def test_a_plan_is_asked_for_as_a_conversion_is():
    """With the same names, defaults and types, all of which become options in one place."""
    plan, convert = (inspect.signature(function).parameters for function in (ucp.plan, ucp.convert))
    assert list(plan) == [name for name in convert if name not in ONCE_BYTES_MOVE]
    assert all(convert[name] == parameter for name, parameter in plan.items() if name != "dst")
    assert set(convert) - set(OPTIONS) == {"src", "dst", "observer"}


def test_every_option_is_taken_and_every_argument_is_an_option():
    taken = [*inspect.get_annotations(CompareArguments), *inspect.get_annotations(ConvertArguments)]
    assert set(taken) == set(OPTIONS)


def test_a_plan_is_what_a_conversion_does(source, tmp_path):
    asked = {**ZERO1, "dtypes": {"exp_avg": "bfloat16"}}
    report = ucp.plan(source, **asked)
    done = ucp.convert(source, tmp_path / "out", **asked)
    alike = ("format", "to", "topology", "layout", "atoms", "nbytes_written", "nbytes_out", "references")
    alike += ("warnings", "casts", "notes", "dropped")
    assert {name: getattr(report, name) for name in alike} == {name: getattr(done, name) for name in alike}
    assert len(report.files) == done.files_out
    assert {path: (tmp_path / "out" / path).stat().st_size for path in report.files} == report.files


def test_what_is_refused_is_refused_before(source, tmp_path):
    for asked, error in (
        ({"to": "deepspeed", "topology": "tp=2,zero=1"}, TopologyError),
        ({"include": "nothing"}, UsageError),
        ({"family": "llama"}, IdleOptionError),
    ):
        with pytest.raises(error) as early:
            ucp.plan(source, **asked)
        with pytest.raises(error) as late:
            ucp.convert(source, tmp_path / "out", **asked)
        assert str(early.value) == str(late.value)


def test_what_is_planned_is_what_is_prepared(source):
    report, prepared = ucp.plan(source, workers=1), prepare(source, ConvertOptions(workers=1))
    assert report.source == prepared.job.index
    assert (report.tasks, report.workers, report.threads) == (len(prepared.job.tasks), 1, prepared.threads)
    assert report.projected_bytes == prepared.projected_bytes <= report.memory


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({"to": None}, "'to' .*; got None"),
        ({"layout": None}, "'layout' .*; got None"),
        ({"optimizer": "adam"}, "optimizer .*zero; got 'adam'"),
        ({"dtypes": "weight=bfloat16"}, "expected dtypes .*; got 'weight=bf"),
        ({"dtypes": {"weight": float}}, "STATE=DTYPE .*got weight="),
        ({"settings": ["a=b"]}, r"expected settings .*; got \['a=b'\]"),
        ({"settings": {"moe_layer_freq": [0, 1]}}, r"expected settings .* got \{'moe_layer_freq': \[0, 1"),
        ({"include": None}, "expected globs .*; got None"),
        ({"exclude": [1]}, r"expected globs .*; got \[1\]"),
    ],
)
def test_arguments_of_another_type_are_told(source, asked, said):
    with pytest.raises(UsageError, match=said):
        ucp.plan(source, **asked)


def test_settings_may_be_numbers():
    """As they are where they are known in Python; the command line has text."""
    options = make_options(to="megatron", settings={"heads": 32, "eps": 1e-06, "swiglu": True, "name": "x"})
    assert options.target.settings == {"heads": "32", "eps": "1e-06", "swiglu": "True", "name": "x"}


class TestCheckpoint:
    def test_a_region_is_slices_or_a_box(self, source):
        checkpoint = ucp.open(source)
        name, atom = next((name, atom) for name, atom in checkpoint.atoms.items() if len(atom.global_shape) == 2)
        whole = checkpoint.read(name, "weight")
        for region in (np.s_[1:3], np.s_[1:3, :], np.s_[1:3, ...], np.s_[..., 1:2], np.s_[-2:, :-1], np.s_[5:2]):
            assert torch.equal(checkpoint.read(name, "weight", region), whole[region]), region
        box = ucp.Box((1, 0), (1, atom.global_shape[1]))
        assert torch.equal(checkpoint.read(name, "weight", box), whole[1:2])

    @pytest.mark.parametrize(
        "region", [np.s_[::2], np.s_[1], np.s_[:, :, :], np.s_[:, None], ucp.Box((0, 0), (1, 999))]
    )
    def test_regions_that_are_none(self, source, region):
        checkpoint = ucp.open(source)
        name = next(name for name, atom in checkpoint.atoms.items() if len(atom.global_shape) == 2)
        with pytest.raises(ValueError, match=re.escape(str(region))):
            checkpoint.read(name, "weight", region)

    def test_it_shows_what_it_is(self, source):
        checkpoint = ucp.open(source)
        assert str(source) in repr(checkpoint)
        assert len(repr(checkpoint)) < 300
        page = checkpoint._repr_html_()
        assert all(name in page for name in checkpoint.atoms)
        assert "<table>" in page

    def test_a_tensor_among_the_extras_is_read(self):
        checkpoint = ucp.open(FIXTURES / "megatron" / "gpt-tp2-pp2-torch" / "checkpoint")
        refs = [extra.value for extra in checkpoint.index.extras if isinstance(extra.value, TensorRef)]
        refs += [own for extra in checkpoint.index.extras for own in _tensors(extra.value)]
        assert refs
        assert all(tuple(checkpoint.tensor(ref).shape) == ref.shape for ref in refs)


def _tensors(value):
    own = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else ()
    return [ref for inner in own for ref in ([inner] if isinstance(inner, TensorRef) else _tensors(inner))]


def test_type_hints_can_be_looked_at():
    assert get_type_hints(ucp.convert)["return"] is ucp.ConvertReport
    assert all(get_type_hints(own) for own in (ucp.open, ucp.inspect, ucp.plan, ucp.verify, ucp.diff))


def test_an_extra_that_is_not_there_is_answered_with_those_that_are(source):
    with pytest.raises(KeyError, match=r"no extra 'nope'; there are "):
        ucp.open(source).extras["nope"]


@pytest.mark.parametrize(
    ("function", "misspelt", "meant"),
    [
        (ucp.convert, "topolgy", "topology"),
        (ucp.plan, "setings", "settings"),
        (ucp.open, "famly", "family"),
        (ucp.inspect, "shape_from", "shapes_from"),
        (ucp.verify, "agains", "against"),
        (ucp.diff, "extra", "extras"),
        (ucp.load_into, "optimiser", "optimizer"),
    ],
)
def test_a_misspelt_argument_names_the_function_and_the_nearest_argument(function, misspelt, meant):
    text = f"ucp.{function.__name__}() has no argument {misspelt!r}; did you mean {meant!r}?"
    with pytest.raises(TypeError, match=re.escape(text)):
        function("src", "dst", **{misspelt: None})


def test_help_begins_with_an_example_that_uses_every_verb():
    example = ucp.__doc__.split("`ucp.inspect`")[0]
    assert len(example.splitlines()) <= 14
    for verb in ("open", "convert", "plan", "verify", "diff", "load_into"):
        assert f"ucp.{verb}(" in example


def test_a_checkpoint_is_a_mapping_of_names_to_atoms():
    checkpoint = ucp.open(FIXTURES / "deepspeed/z3-dp4-bf16/checkpoint")
    assert list(checkpoint) == list(checkpoint.index.atoms)
    assert len(checkpoint) == len(checkpoint.index.atoms)
    name, atom = next(iter(checkpoint.items()))
    assert name in checkpoint
    assert "nope" not in checkpoint
    assert checkpoint[name] == atom
    assert checkpoint[name].states[0] == "weight"
    with pytest.raises(KeyError, match="no parameter 'nope'"):
        checkpoint["nope"]


def test_the_state_that_is_read_is_the_weight_unless_another_is_named():
    checkpoint = ucp.open(FIXTURES / "deepspeed/z3-dp4-bf16/checkpoint")
    name = next(name for name, atom in checkpoint.items() if "exp_avg" in atom.states)
    assert torch.equal(checkpoint.read(name), checkpoint.read(name, "weight"))
    assert not torch.equal(checkpoint.read(name), checkpoint.read(name, "exp_avg"))


def test_a_state_dict_has_every_weight_and_tied_names_share_their_tensor():
    checkpoint = ucp.open(FIXTURES / "huggingface/gpt2/model")
    tensors = checkpoint.state_dict()
    assert tensors.keys() == {*checkpoint, *checkpoint.index.aliases}
    assert checkpoint.index.aliases
    for name, stored in checkpoint.index.aliases.items():
        assert tensors[name] is tensors[stored]
    for name in checkpoint:
        assert torch.equal(tensors[name], checkpoint.read(name))
    with pytest.raises(KeyError, match=r"'exp_avg'; .* weight"):
        checkpoint.state_dict("exp_avg")


def test_a_box_is_made_by_either_name():
    assert ucp.Box.whole((2, 3)) == ucp.Box.full((2, 3)) == ucp.Box((0, 0), (2, 3))


@pytest.mark.parametrize(
    "call", [ucp.verify, ucp.experts, lambda path, **options: ucp.convert(path, f"{path}-out", **options)]
)
def test_an_observer_without_its_methods_is_refused(source, call):
    with pytest.raises(UsageError, match="observer"):
        call(source, observer=object())
