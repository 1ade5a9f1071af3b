"""Inputs of a model, and whether the plan's data has them."""

from ..analysis.vocabulary import tables
from ..config.settings import FOLDER, Data
from ..ir import DATA_DIMS, Program
from ..syntax import tree
from ..syntax.diagnostics import Diagnostics, Note
from .data_files import largest_vocabulary

INPUTS = ("tokens", "labels", "documents")
"""The runtime's inputs, in its order; the last only where the model takes it."""


def get_inputs(model: tree.Model, diagnostics: Diagnostics) -> tuple[tree.Input, ...]:
    """The model's inputs; where the model has any others, tokens and labels."""
    written: list[tuple[str, tuple[str, ...]]] = []
    for model_input in model.inputs:
        written.append((model_input.name.name, tuple(map(str, model_input.dims))))
    expected = [(name, DATA_DIMS) for name in INPUTS]
    if written in (expected, expected[:-1]):
        return model.inputs
    span = model.inputs[0].span.to(model.inputs[-1].span)
    help = (
        "write `(tokens[batch, seq], labels[batch, seq])`, or add `documents[batch, seq]`"
        " after these two"
    )
    message = "a model's inputs are tokens, labels and, optionally, documents"
    diagnostics.error("E0213", message, span, "others", help=help)
    dims = tuple(tree.Name(dim, span) for dim in DATA_DIMS)
    diagnostics.doubt(INPUTS[-1], *(name for name, _ in written))
    return tuple(tree.Input(tree.Name(name, span), dims, span) for name in INPUTS[:-1])


def check_data(model: tree.Model, program: Program, diagnostics: Diagnostics) -> None:
    """Whether data and inputs fit; `program` has the model's ops."""
    data = program.train.data
    _check_documents(model, program, data, diagnostics)
    _check_masks(data, diagnostics)
    _check_ids(program, data, diagnostics)


def _check_documents(
    model: tree.Model, program: Program, data: Data, diagnostics: Diagnostics
) -> None:
    """The model takes documents if, and only if, data has a separator; then the loss depends on
    them.
    """
    documents = None
    for model_input in model.inputs:
        if model_input.name.name == INPUTS[-1]:
            documents = model_input
            break
    span = data.spans["separator"]
    if documents and not any(documents.name.name in op.inputs for op in program.ops):
        help = "pass them to attention, `documents=documents`, or leave them out"
        message = "the loss does not depend on `documents`"
        diagnostics.error("E0212", message, documents.span, help=help)
    elif documents and data.separator is None and data.kind != FOLDER:
        help = 'name the token that ends a document, for instance `separator = "\\n"`, or by its id'
        notes = [Note(documents.span, "the model is given documents")]
        message = f"`data {data.kind}` needs `separator`"
        diagnostics.error("E0402", message, span, notes=notes, help=help)
    elif data.separator is not None and not documents:
        help = (
            "add `documents[batch, seq]` to the model's inputs, and `documents=documents` to"
            " its attention"
        )
        notes = [Note(model.name.span, "this model")]
        message = "a separator ends documents, but the model has no input `documents`"
        diagnostics.error("E0409", message, span, notes=notes, help=help)


def _check_masks(data: Data, diagnostics: Diagnostics) -> None:
    """Both settings of masked tokens, or none."""
    if data.masked is not None and data.mask_token is None:
        present, lacking = "masked", "mask_token"
        help = "name the token that replaces hidden ones, for instance by its id"
    elif data.masked is None and data.mask_token is not None:
        present, lacking = "mask_token", "masked"
        help = "set the fraction of tokens that are hidden, for instance `masked = 15%`"
    else:
        return
    message = f"`data {data.kind}` has `{present}`, and needs `{lacking}`"
    diagnostics.error("E0402", message, data.spans[present], help=help)


def _check_ids(program: Program, data: Data, diagnostics: Diagnostics) -> None:
    """The tokens of settings are in the model's vocabulary."""
    vocab_size = min(map(program.valid, tables(program).values()), default=0)
    if not vocab_size and diagnostics.in_part:
        return
    if data.kind == FOLDER:
        _check_folder_ids(vocab_size, data, diagnostics)
    for name, token, id in (
        ("separator", data.separator, data.separator_id),
        ("mask_token", data.mask_token, data.mask_id),
    ):
        if isinstance(token, str) and data.kind != "text":
            diagnostics.error(
                "E0404", f"`{name}` must be a token id unless tokens are bytes", data.spans[name]
            )
        elif id is not None and id >= vocab_size:
            diagnostics.error(
                "E0405",
                f"`{name}` is {id}, and the vocabulary {vocab_size}",
                data.spans[name],
                "no token",
            )


def _check_folder_ids(vocab_size: int, data: Data, diagnostics: Diagnostics) -> None:
    """The vocabulary of the folders' tokenizer is not larger than the model's."""
    largest, folder = largest_vocabulary(data)
    if largest > vocab_size:
        message = (
            f"{folder} has ids of a vocabulary of {largest:,}, and the model's is {vocab_size:,}"
        )
        help = "is it the model's own tokenizer? the model's `vocab` has to be as large"
        diagnostics.error("E0405", message, data.spans["files"], help=help)
