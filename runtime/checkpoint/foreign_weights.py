"""Errors about files of weights that do not fit the plan: they say what is there, and what to do.

Non-goals: reading weights (`hf_weights`).
"""

from collections.abc import Collection, Mapping
from pathlib import Path

from ...formats.known import get_format_words
from ..errors import RunError, quote_first_names

Shape = tuple[int, ...]


def unreadable(file: Path, error: Exception) -> RunError:
    """The error of a file that is no safetensors."""
    format_name = get_format_words(file)
    if not format_name:
        return RunError(f"cannot read weights from {file}: {error}")
    advice: tuple[str, ...] = ()
    if "torch.save" in format_name or "pickle" in format_name:
        advice = _to_safetensors(file.parent)
    elif "HTML" in format_name:
        advice = ("a download that failed leaves such a file: download it once more",)
    return RunError(f"cannot read weights from {file}: it is {format_name}", *advice)


def missing(folder: Path) -> RunError:
    """The error of a folder without model.safetensors and without an index of such files."""
    names = sorted(path.name for path in folder.iterdir())
    weights = [name for name in names if name.endswith(".safetensors")]
    pickles = list[str]()
    for name in names:
        if name.startswith("pytorch_model") or name.endswith((".pth", ".pt")):
            pickles.append(name)
    if len(weights) == 1:
        return _make_error(
            folder,
            f"it has {quote_first_names(weights)} in place of `model.safetensors`",
            "name that file by --init",
        )
    if weights:
        lacks = "`model.safetensors.index.json`, which says where each tensor is"
        return _make_error(
            folder,
            f"it has {quote_first_names(weights)}, and lacks {lacks}",
            "download that file, too",
        )
    if pickles:
        return _make_error(
            folder,
            f"it has {quote_first_names(pickles)} and no safetensors",
            *_to_safetensors(folder),
        )
    if any(name.startswith(("step-", "rank-")) or name == "checkpoints" for name in names):
        advice = (
            "write a model's files by `train.py --export DIR`, or go on with the run by --resume"
        )
        return _make_error(folder, "it has checkpoints of a run, and no model.safetensors", advice)
    content = quote_first_names(names) if names else "nothing"
    return _make_error(folder, f"it has no model.safetensors: there is {content}")


def _make_error(folder: Path, why: str, *advice: str) -> RunError:
    return RunError(f"cannot read weights from {folder}: {why}", *advice)


def _to_safetensors(folder: Path) -> tuple[str, ...]:
    return (
        "a pickle can run any code; where you trust it, write safetensors of it:",
        "from transformers import AutoModelForCausalLM",
        f'AutoModelForCausalLM.from_pretrained({str(folder)!r}).save_pretrained("safe")',
    )


def lacking_names(
    path: Path,
    lacking: Mapping[str, str],
    shapes: Mapping[str, Shape],
    file_shapes: Mapping[str, Shape],
) -> RunError:
    """The error for tensors that the files lack; `lacking` has the parameter of each.

    `shapes` are the shapes of all tensors that the plan needs, `file_shapes` the shapes of the
    tensors in the files.
    """
    params = quote_first_names([*dict.fromkeys(lacking.values())])
    line = f"{path} has no {quote_first_names([*lacking])}, which the plan needs for {params}"
    if prefix := _prefix_of_files(lacking, file_shapes):
        why = (
            f"its names are the plan's behind the prefix `{prefix}`; without it they are the"
            " plan's:"
        )
        return RunError(line, why, *_advise_renaming(path, f"name.removeprefix({prefix!r})"))
    if prefix := _prefix_of_plan(lacking, file_shapes):
        why = f"its names lack the prefix `{prefix}` of the plan's; with it they are the plan's:"
        return RunError(line, why, *_advise_renaming(path, f"{prefix!r} + name"))
    (first, head), *others = lacking.items()
    twins = list[str]()
    for name, shape in file_shapes.items():
        if name in shapes and shape == shapes[first]:
            twins.append(name)
    if twins and not others and len(shapes[first]) == 2:
        why = f"its model seems to tie `{head}` to `{twins[0]}`, which has the same shape"
        return RunError(line, f"{why}: use that one's parameter in the plan in place of `{head}`")
    return RunError(line)


def _prefix_of_files(lacking: Collection[str], file_names: Collection[str]) -> str:
    """The prefix that all these names have in the files; "" if there is none."""
    first = next(iter(lacking))
    for file_name in file_names:
        if file_name.endswith(f".{first}"):
            prefix = file_name.removesuffix(first)
            if all(prefix + name in file_names for name in lacking):
                return prefix
    return ""


def _prefix_of_plan(lacking: Collection[str], file_names: Collection[str]) -> str:
    """The prefix of all these names that they lack in the files; "" if there is none."""
    words = next(iter(lacking)).split(".")
    for count in range(1, len(words)):
        prefix = ".".join(words[:count]) + "."
        if all(
            name.startswith(prefix) and name.removeprefix(prefix) in file_names for name in lacking
        ):
            return prefix
    return ""


def _advise_renaming(path: Path, name: str) -> tuple[str, ...]:
    return (
        "from safetensors.torch import load_file, save_file",
        f"save_file({{{name}: value for name, value in load_file({str(path)!r}).items()}},"
        ' "renamed.safetensors")',
    )
