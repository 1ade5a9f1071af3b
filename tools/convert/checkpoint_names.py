"""The names, shapes and optimizer state of a plan's checkpoints under others' names: JSON for the
runtime's converter.

Names of other programs are data, `other_names.json`: each tensor of Hugging Face's files, and how
it is called there (torchtitan's by its models' state_dict_adapter.py).  Non-goals: reading and
writing such folders (the runtime).
"""

import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from attrs import evolve, frozen

from ...compiler.analysis.bucket_layout import get_stored_shape
from ...compiler.config.hf_names import HFWeight
from ...compiler.emit.hf_names import entry, own_name, repeats
from ...compiler.emit.model_classes import model_classes
from ...compiler.emit.naming import DTYPES
from ...compiler.ir import Buffer, Param, Program

OWN = "scalec"
"""The names of the plan's own parameters, which the program of torch alone has too."""

_INDEX = re.compile(r"\{[^}]*\}")


@frozen
class Table:
    """Names of another program.

    tensors      its tensors by the names in Hugging Face's files, `{}` for each index; the same
                 names where none are given.  A name that lacks the last index is a tensor of all
                 experts
    interleaved  its tensors whose heads' rows are pairs, `unless` it has a tensor of this name
    copies       tensors that it has beside others of the same values, where a plan ties the two
    """

    tensors: Mapping[str, str] = {}
    interleaved: tuple[str, ...] = ()
    unless: str = ""
    copies: Mapping[str, str] = {}


def tables() -> dict[str, Table]:
    """The tables that scalec has, by the name of the option."""
    content = json.loads(_FILE.read_text(encoding="utf-8"))
    return {name: table(entries) for name, entries in content.items()}


_FILE = Path(__file__).with_name("other_names.json")


def table(content: Mapping[str, Any]) -> Table:
    """The table of JSON content.  Raises TypeError or AttributeError for other content."""
    tensors: Mapping[str, str] = dict(content.get("tensors", {}).items())
    return Table(
        tensors,
        tuple(content.get("interleaved", ())),
        content.get("unless", ""),
        dict(content.get("copies", {}).items()),
    )


def find_unnamed_tensors(program: Program, table_of_names: Table) -> list[str]:
    """The tensors of Hugging Face's files that have no name in a table."""
    if not table_of_names.tensors:
        return []
    tensors = [weight.tensor for weight in program.names]
    return [tensor for tensor in tensors if _general(tensor) not in table_of_names.tensors]


def checkpoint_names(program: Program, table_of_names: Table | None) -> str:
    """The description of a plan's checkpoints in a folder whose names are a table's, or the plan's
    own.
    """
    patterns = model_classes(program).patterns
    shapes = {param.name: get_stored_shape(program, param) for param in program.params_and_buffers}
    copies: dict[str, str] = {}
    if table_of_names:
        names = tuple(_to_names_of_table(program, table_of_names))
        renamed = evolve(program, names=names)
        weights = {weight.param: _to_stacked_place(entry(weight, renamed)) for weight in names}
        tensors = {weight.tensor for weight in names}
        for copy, first in table_of_names.copies.items():
            if copy not in tensors and first in tensors:
                copies[copy] = first
    else:
        weights = dict[str, dict[str, Any]]()
        for param in program.params_and_buffers:
            tensor = own_name(patterns[param.name])
            weights[param.name] = {"tensor": tensor, "shape": shapes[param.name]}
            if isinstance(param, Buffer):
                weights[param.name]["wide"] = True
    return json.dumps(
        {
            "dtype": DTYPES[program.params[0].type.dtype].removeprefix("torch."),
            "repeats": repeats(program, patterns),
            "weights": {patterns[name]: place for name, place in weights.items()},
            "shapes": {patterns[name]: shape for name, shape in shapes.items()},
            "slots": program.train.optimizer.slots,
            "copies": copies,
            "scaled": program.train.precision == "fp16",
        }
    )


def _general(tensor: str) -> str:
    return _INDEX.sub("{}", tensor)


def _to_names_of_table(program: Program, table: Table) -> Iterable[HFWeight]:
    """The places of a plan's parameters in a folder with names of a table, which has them all."""
    if not table.tensors:
        return program.names
    params = {param.name: param for param in program.params_and_buffers}
    tensors = {table.tensors[_general(weight.tensor)] for weight in program.names}
    interleaved = () if table.unless in tensors else table.interleaved
    places = list[HFWeight]()
    for weight in program.names:
        places.append(_as_named(weight, params[weight.param], table, interleaved, program))
    return places


def _as_named(
    weight: HFWeight, param: Param, table: Table, interleaved: tuple[str, ...], program: Program
) -> HFWeight:
    name = table.tensors[_general(weight.tensor)]
    indices = iter(_INDEX.findall(weight.tensor))
    head = weight.interleaved
    if name in interleaved:
        head = program.valid(param.type.dims[-param.inner - 1])
    return evolve(weight, tensor=_INDEX.sub(lambda _: next(indices), name), interleaved=head)


def _to_stacked_place(place: dict[str, Any]) -> dict[str, Any]:
    """A place without an index for experts becomes one tensor of all of them."""
    if "each" not in place or f"{{{place['each'][0]}}}" in place["tensor"]:
        return place
    stacked = {key: value for key, value in place.items() if key != "each"}
    return stacked | {"shape": (place["each"][1], *place["shape"])}
