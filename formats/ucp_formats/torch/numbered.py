"""Names for an optimizer that numbers its parameters, as `torch.optim.Optimizer.state_dict` does.

The numbers count parameters group by group, in the order in which the optimizer was given them. Within a group that is
the order of the model, as far as anybody writes it. A parameter and its states have one shape and are cut alike, which
has to fit, and to leave no choice. Of several groups it leaves none where each has shapes of its own (matrices that
decay, vectors that do not).

>>> named_by_number([[0, 1]], {"0": (2,), "1": (3,)}, {"a": (2,), "drift": (7,), "b": (3,)}, "somewhere")
{0: 'a', 1: 'b'}
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence

from ucp.errors import UnsupportedError

__all__ = ["named_by_number"]

_SORTED = (
    "; safetensors keeps names sorted: --shapes-from PATH names what has them in the order of the model, a file of "
    "torch.save or a JSON of name to shape"
)


def named_by_number(
    groups: Sequence[Sequence[int | str]],
    states: Mapping[str, Hashable],
    model: Mapping[str, Hashable],
    where: str,
    *,
    in_order: bool = True,
) -> dict[int | str, str]:
    """Number to name. `states`: number to the shape and cuts of a state; `model`: the same of names, in its order.

    `in_order`: whether it is in its order, or sorted (safetensors).

    Raises UnsupportedError where more than one assignment fits, or none.
    """
    ordered = _each_in_order(groups, states, model) if in_order else None
    if ordered is not None:
        return ordered
    numbers = [number for group in groups for number in group]
    wanted = [states.get(str(number)) for number in numbers]
    by_form: dict[Hashable, list[str]] = {}
    for name, form in model.items():
        by_form.setdefault(form, []).append(name)
    named: dict[int | str, str] = {}
    for number, own in zip(numbers, wanted, strict=True):
        names = by_form.get(own, [])
        if len(names) != 1 or names[0] in named.values():
            raise UnsupportedError(
                f"{where}: the optimizer numbers its parameters, and shapes do not tell which parameter number "
                f"{number} is. Save with torch.distributed.checkpoint.state_dict.get_state_dict, which gives names, or "
                "give the optimizer names (AdamW(model.named_parameters()))" + ("" if in_order else _SORTED)
            )
        named[number] = names[0]
    return named


def _each_in_order(
    groups: Sequence[Sequence[int | str]], states: Mapping[str, Hashable], model: Mapping[str, Hashable]
) -> dict[int | str, str] | None:
    """Names of every group in the order of the model, where groups share no form; None where that leaves a choice."""
    forms = [{states.get(str(number)) for number in group} for group in groups]
    if sum(map(len, forms)) != len(set().union(*forms)):
        return None
    named: dict[int | str, str] = {}
    for group, own in zip(groups, forms, strict=True):
        rest = {name: form for name, form in model.items() if len(groups) == 1 or form in own}
        found = _in_order([states.get(str(number)) for number in group], rest)
        if found is None:
            return None
        named |= zip(group, found, strict=True)
    return named


def _in_order(wanted: Sequence[Hashable], model: Mapping[str, Hashable]) -> list[str] | None:
    """Names in the order of the model whose forms are `wanted`, if that leaves no choice; None otherwise.

    Names may be left out (buffers, frozen parameters). There is no choice where taking the first that fits each time
    gives what taking the last does.
    """
    first = _first_that_fit(wanted, list(model), model)
    last = _first_that_fit(wanted[::-1], list(model)[::-1], model)
    return first if first is not None and last is not None and first == last[::-1] else None


def _first_that_fit(
    wanted: Sequence[Hashable], names: Sequence[str], model: Mapping[str, Hashable]
) -> list[str] | None:
    found = []
    rest = iter(names)
    for form in wanted:
        name = next((own for own in rest if model[own] == form), None)
        if name is None:
            return None
        found.append(name)
    return found
