"""Names for an optimizer that numbers its parameters, as `torch.optim.Optimizer.state_dict` does.

The numbers count parameters group by group, in the order in which the optimizer was given them. Within a group that is
assumed to be the order of the model. The rest must follow from shapes and shards, which are the same for a parameter
and its states. A number without states may be a parameter of any shape: it was never stepped. The first rule that
leaves exactly one answer decides:

1. Each group is in the order of the model; names may be in no group. Several groups may not share a shape.
2. The same after buffers are removed by name; several groups may share shapes and interleave in any way.
3. Shapes alone.

>>> name_params([[0, 1]], {"0": (2,), "1": (3,)}, {"a": (2,), "drift": (7,), "b": (3,)}, shapes={}).names
{0: 'a', 1: 'b'}
>>> name_params([[0, 1, 2]], {"0": (2,), "2": (2,)}, dict.fromkeys("abc", (2,)), shapes={}).names
{0: 'a', 1: 'b', 2: 'c'}
>>> name_params([[0, 1]], {"0": (2,), "1": (2,)}, dict.fromkeys("abc", (2,)), shapes={})
Traceback (most recent call last):
ucp_formats.torch.state_dict.numbered.UnnamedError: shapes do not tell which parameter number 0 is
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

from ucp.contract.protocols import ParamOrder
from ucp.core.assign import ManyWaysError, Slots, bounds, possible_places
from ucp.errors import UnsupportedError, UsageError, format_list
from ucp.io.files import open_source
from ucp.io.json_text import NotJson, parsed
from ucp_formats.torch.state_dict.model_dict import bare_name

Number = int | str
"""Number of a parameter, or its name."""
Forms = Mapping[str, Hashable]
"""Name or number to shape and shards."""
Names = dict[Number, str]
Order = Sequence[Sequence[str]]
"""Names of the parameters of each group of an optimizer, or of all groups in one list."""

_EXPECTED = (
    '--param-order: expected a JSON list of names, or a list of such lists, such as [["emb.weight"], ["fc.bias"]]'
)
_BUFFERS = ("running_mean", "running_var", "num_batches_tracked", "inv_freq", "position_ids", "n_averaged")
"""Last parts of the names of buffers, which no optimizer has."""
_REMEDY = (
    "Give the order (--param-order FILE: JSON of the names in each of its groups), or load the checkpoint into a live "
    "model and optimizer, which know the order (ucp.load_into). An optimizer that is created with names, "
    "AdamW(model.named_parameters()), saves them"
)
_SORTED = (
    "Give the order of the model, since safetensors keeps names sorted (--shapes-from PATH: a file of torch.save, or a "
    "JSON of name to shape), or the order of the optimizer (--param-order FILE: JSON of the names in each of its "
    "groups)"
)
_PROVED = "the only order that shapes allow"
_MOST = 100_000
"""Most partial assignments that are examined: many groups of many equal layers can have more."""


class UnnamedError(UnsupportedError):
    """States of an optimizer cannot be assigned to parameters: the message says why."""

    def __init__(self, why: str, *, remedy: str = _REMEDY) -> None:
        super().__init__(why)
        self.remedy = remedy
        """What the user can do to name the parameters."""


@dataclass(frozen=True, slots=True)
class NumberedNames:
    """Parameter names for the numbers in an optimizer's state dict."""

    names: Names
    """Number to name."""
    how: str
    """For a note: the order in which names were assigned, and what it leaves unproved."""


def name_params(
    groups: Sequence[Sequence[Number]],
    states: Forms,
    model: Forms,
    *,
    shapes: Mapping[str, Sequence[int]],
    in_order: bool = True,
) -> NumberedNames:
    """Names for the numbers in `groups`.

    `states`: number to the form of its states, if it has any; `model`: name to form, in the order of the model if
    `in_order`. `shapes`: those of the model. Raises UnnamedError unless exactly one assignment fits.
    """
    forms = [[states.get(str(number)) for number in group] for group in groups]
    if in_order:
        names = _skip_unlisted(groups, forms, model)
        names = names or _take_all(groups, forms, model, shapes)
        if names:
            return NumberedNames(names, _model_order(names, states, model))
    return NumberedNames(_by_form(groups, forms, model, _REMEDY if in_order else _SORTED), _PROVED)


def _model_order(names: Names, states: Forms, model: Forms) -> str:
    """Words for the order of the model, with parameters of one shape, whose order in the optimizer is not proved."""
    stepped_forms = {model[name] for number, name in names.items() if str(number) in states}
    alike: dict[Hashable, list[str]] = {form: [] for form in model.values() if form in stepped_forms}
    for name, form in model.items():
        if form in alike and not _is_buffer(name):
            alike[form].append(name)
    doubtful = [name for group in alike.values() if len(group) > 1 for name in group]
    if not doubtful:
        return _PROVED
    first, second, *rest = doubtful
    more = f" (and {len(rest):,} more)" if rest else ""
    return (
        f"the order of the model; shapes cannot tell {first} from {second}{more}: if the script listed them in "
        "another order, their moments are exchanged; if so, pass the order with --param-order FILE"
    )


def order_params(
    groups: Sequence[Sequence[Number]],
    states: Forms,
    model: Forms,
    order: Order,
    *,
    shapes: Mapping[str, Sequence[int]],
) -> NumberedNames:
    """Names that the user gives for `groups`: a list for each, or one for all. Raises UsageError if they do not fit.

    `shapes`: those of parameters by name, and of states by number.
    """
    numbers = [number for group in groups for number in group]
    names = [name for group in order for name in group]
    sizes, list_sizes = [len(group) for group in groups], [len(names) for names in order]
    if sizes != list_sizes and list_sizes != [sum(sizes)]:
        raise UsageError(
            f"--param-order: expected names for optimizer groups of {sizes} parameters (a list for each group, or one "
            f"list for all); got lists of {list_sizes}"
        )
    problems = [f"{name} is not in the model" for name in names if name not in model]
    problems += [f"{name} is listed {count} times" for name, count in Counter(names).items() if count > 1]
    for number, name in zip(numbers, names, strict=True):
        form = states.get(str(number))
        if form is not None and name in model and form != model[name]:
            actual, expected = list(shapes[str(number)]), list(shapes[name])
            sharded = ", sharded in another way" if actual == expected else ""
            problems.append(
                f"number {number} has states of shape {actual}, and --param-order gives it {name} of shape "
                f"{expected}{sharded}"
            )
    if problems:
        raise UsageError(f"--param-order does not fit this checkpoint:\n{format_list(problems)}")
    return NumberedNames(
        dict(zip(numbers, names, strict=True)), "the order of --param-order, or of the optimizer passed to load_into"
    )


def _skip_unlisted(
    groups: Sequence[Sequence[Number]], forms: Sequence[Sequence[Hashable]], model: Forms
) -> Names | None:
    """Names of every group in the order of the model; None if that leaves a choice."""
    if len(groups) > 1:
        kinds = [set(group) for group in forms]
        if None in set().union(*kinds) or sum(map(len, kinds)) != len(set().union(*kinds)):
            return None
    names: Names = {}
    for group, group_forms in zip(groups, forms, strict=True):
        candidates = [name for name, form in model.items() if len(groups) == 1 or form in group_forms]
        by_form: dict[Hashable, list[int]] = {None: [*range(len(candidates))]}
        for position, name in enumerate(candidates):
            by_form.setdefault(model[name], []).append(position)
        extremes = bounds([by_form.get(form, []) for form in group_forms])
        if extremes is None or extremes[0] != extremes[1]:
            return None
        names |= zip(group, (candidates[position] for position in extremes[0]), strict=True)
    return names


def _take_all(
    groups: Sequence[Sequence[Number]],
    forms: Sequence[Sequence[Hashable]],
    model: Forms,
    shapes: Mapping[str, Sequence[int]],
) -> Names | None:
    """Names if the groups, each in the order of the model, interleave in only one way; else None.

    Every number with states must get the same name in all ways to interleave the groups, whichever names are in no
    group. If a number without states can get several names, `_by_decay` decides.
    """
    parameters = {name: form for name, form in model.items() if not _is_buffer(name)}
    params = parameters if len(parameters) >= sum(map(len, groups)) else model
    try:
        levels = possible_places(
            [[Slots(tuple(group)) for group in forms]], [[*params.values()]], most=_MOST + len(params)
        )
    except ManyWaysError:
        levels = None
    if levels is None:
        return None
    names: Names = {}
    is_certain = True
    for name, places in zip(params, levels, strict=True):
        if len(places) > 1 and any(place and forms[place[0]][place[1]] is not None for place in places):
            return None
        is_certain = is_certain and len(places) == 1
        names |= {groups[place[0]][place[1]]: name for place in places if place}
    return names if is_certain else _by_decay(groups, forms, params, shapes)


def _by_decay(
    groups: Sequence[Sequence[Number]],
    forms: Sequence[Sequence[Hashable]],
    model: Forms,
    shapes: Mapping[str, Sequence[int]],
) -> Names | None:
    """Names if a usual rule for weight decay divides all parameters into two groups; None unless one answer fits."""
    rules: tuple[Callable[[str], bool], ...] = (
        lambda name: len(shapes.get(name, ())) > 1,
        lambda name: not _is_bias(name) and not _is_norm(name),
        lambda name: not _is_bias(name),
    )
    answers: list[list[str]] = []
    for rule in rules if len(groups) == 2 else ():
        decayed, others = [name for name in model if rule(name)], [name for name in model if not rule(name)]
        for first, second in ((decayed, others), (others, decayed)):
            is_sized = len(first) == len(groups[0]) and len(second) == len(groups[1])
            fits = is_sized and all(
                form in (None, model[name]) for form, name in zip(chain(*forms), [*first, *second], strict=True)
            )
            if fits and [*first, *second] not in answers:
                answers.append([*first, *second])
    return dict(zip(chain(*groups), answers[0], strict=True)) if len(answers) == 1 else None


def _is_buffer(name: str) -> bool:
    return name.rpartition(".")[2] in _BUFFERS


def _is_bias(name: str) -> bool:
    return name.rpartition(".")[2] == "bias"


def _is_norm(name: str) -> bool:
    """Whether a parameter belongs to a normalisation layer, by the names that transformers and scripts use.

    >>> [_is_norm(name) for name in ("h.0.ln_1.weight", "model.norm.weight", "h.0.attn.weight")]
    [True, True, False]
    """
    parts = name.lower().split(".")
    return any("norm" in part or part.startswith("ln") for part in parts)


def _by_form(
    groups: Sequence[Sequence[Number]], forms: Sequence[Sequence[Hashable]], model: Forms, remedy: str
) -> Names:
    """Names if no two parameters share a form. Raises UnnamedError with that remedy."""
    by_form: dict[Hashable, list[str]] = {}
    for name, form in model.items():
        by_form.setdefault(form, []).append(name)
    names: Names = {}
    for number, form in zip(chain(*groups), chain(*forms), strict=True):
        candidates = by_form.pop(form, [])
        if len(candidates) != 1:
            raise UnnamedError(f"shapes do not tell which parameter number {number} is", remedy=remedy)
        names[number] = candidates[0]
    return names


def read_order(option: Path | ParamOrder | None) -> ParamOrder | None:
    """Names in the order of the optimizer, as the user or a file gives them.

    The file is JSON: a list for each group, or one list for all. Raises MissingFileError, UsageError.
    """
    groups = _read_json(option) if isinstance(option, Path) else option
    return None if groups is None else tuple(tuple(map(bare_name, names)) for names in groups)


def _read_json(path: Path) -> ParamOrder:
    with open_source(str(path)) as file:
        data = file.read(0, file.nbytes)
    try:
        document = parsed(data)
    except NotJson as error:
        raise UsageError(f"{_EXPECTED}; {path} is not JSON: {error}") from error
    groups = [document] if _is_names(document) else document
    if not isinstance(groups, list) or not groups or not all(map(_is_names, groups)):
        raise UsageError(f"{_EXPECTED}; {path} holds another document")
    return tuple(map(tuple, groups))


def _is_names(value: object) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(name, str) for name in value)
