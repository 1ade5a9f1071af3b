"""Fields that configurations of several models share: heads, rotary positions, windows, element
types.
"""

from collections.abc import Mapping
from math import log
from typing import cast

from attrs import evolve, frozen

from ...compiler.syntax.diagnostics import listing
from .config import NOT_NEGATIVE, PART, POSITIVE, TEXT, Config, Fields, Kind
from .plan_text import Model, number_text

LONGEST = 4096
"""The sequence length that a plan is written for, if the model takes one so long."""

PRECISIONS = {"float32": "fp32", "float64": "fp64", "bfloat16": "bf16", "float16": "bf16"}
"""The setting `precision` by the type that weights are stored in; bf16 keeps fp32 masters."""

STORED = Kind(
    f"one of {listing(PRECISIONS)}",
    lambda value: isinstance(value, str) and value.removeprefix("torch.") in PRECISIONS,
    "bfloat16",
)

GELU_TANH = ("gelu_pytorch_tanh", "gelu_new", "gelu_fast")
"""The names of one function."""

SCALINGS: dict[str, dict[str, str]] = {
    "default": {},
    "linear": {"factor": "factor"},
    "llama3": {
        "factor": "factor",
        "low_freq_factor": "low",
        "high_freq_factor": "high",
        "original_max_position_embeddings": "original",
    },
    "yarn": {
        "factor": "factor",
        "beta_slow": "low",
        "beta_fast": "high",
        "original_max_position_embeddings": "original",
    },
}
"""The types of rotary positions, and what the options of each are called in a plan."""

SHARE_ROTATED = "partial_rotary_factor"
ORIGINAL = "original_max_position_embeddings"

BETAS = {"beta_slow": 1.0, "beta_fast": 32.0}
"""The options that files of yarn may leave out."""


@frozen
class Rope:
    """Rotary positions."""

    theta: float
    scaling: str = ""
    """Other arguments of a `rope` with this `theta`."""
    dims: int = 0
    """How many dims of a head are rotated; 0 for all."""
    table: float = 1
    """A factor of cosines and sines."""
    temper: float = 1
    """A factor of attention's scale, in models that have it."""

    def scale(self, dim: int) -> str:
        """The argument of attention that gives scores the factor of cosines and sines, of heads
        that turn whole.

        Scores are products of a query and a key, both rotated, so they have its square.
        """
        if self.table == 1:
            return ""
        return f", scale={number_text(self.table**2 / dim**0.5)}"

    def get_replacements(self, last: str) -> dict[str, str]:
        """The replacement that adds `scaling` after `last`, the last argument that a model file
        gives `rope`.
        """
        return {f", {last})": f", {last}, {self.scaling})"} if self.scaling else {}


def model_of(
    config: Config,
    file: str,
    sizes: Mapping[str, float],
    *,
    limit: str = "max_position_embeddings",
    most: int = 2048,
    learned: bool = False,
    tied: bool | None = False,
    masked: bool = False,
    replaced: Mapping[str, str] = {},
    without: tuple[str, ...] = (),
) -> Model:
    """The model by the fields of all configurations.

    `limit` is the field of the most positions, `most` its default; sequences of `learned` positions
    have all of them.  `tied` is the default of `tie_word_embeddings`, None for models that do not
    read it; the other arguments are fields of `Model`.
    """
    std, seq = config.get_field("initializer_range", NOT_NEGATIVE, 0.02), config.size(limit, most)
    earlier = config.get_field("torch_dtype", STORED, "bfloat16", "bfloat16")
    precision = PRECISIONS[
        config.get_field("dtype", STORED, earlier, earlier).removeprefix("torch.")
    ]
    head = tied is not None and config.flag("tie_word_embeddings", tied)
    seq = seq if learned else min(LONGEST, seq)
    return Model(file, sizes, std, seq, precision, head, masked, replaced, without)


def head_dim(config: Config, default: int = 0) -> int:
    """The dims of a head; `default` is for models that do not derive them."""
    if config.has("head_dim") or default:
        return config.size("head_dim", default)
    config.take("head_dim")
    return config.quotient("hidden_size", "num_attention_heads")


def window(config: Config, default: int = 0) -> int:
    """How many tokens a query sees, 0 for all; `default` is for files without the field."""
    return config.size("sliding_window", default, null=0)


def positions(
    config: Config,
    dim: int,
    theta: str = "rope_theta",
    part: str = "",
    default: float = 1,
    base: float = 1e4,
    beside: bool = False,
    types: tuple[str, ...] = (*SCALINGS,),
) -> Rope:
    """Rotary positions of heads of `dim` dims; later files say in one field what earlier ones say
    in several.

    `theta` and `part` are fields of earlier files, `base` and `default` the values without them;
    without a name for `part` whole heads are rotated, else their first dims.  `beside` says that
    heads have further dims, which are not rotated; `types` are the types of scaled positions that
    the model may have.
    """
    rotary_fields = _rotary_table(config)
    config.hand_down(theta, rotary_fields, "rope_theta")
    config.hand_down(part or SHARE_ROTATED, rotary_fields, SHARE_ROTATED)
    config.hand_down(ORIGINAL, rotary_fields, ORIGINAL)
    rope = rope_of(rotary_fields, base, types)
    if not part:
        rotary_fields.must_be(SHARE_ROTATED, 1.0, 1, None)
        check_pairs(config, dim)
        if beside:
            refuse_factor(rotary_fields, rope)
        return rope
    share = rotary_fields.get_field(SHARE_ROTATED, PART, default)
    dims = int(dim * share)
    if dim and (dims == 0 or dims % 2):
        label = f"{dim} × {share:g} = {dim * share:g}"
        message = f"{dims} of the {dim} dims of a head cannot be rotated in pairs"
        rotary_fields.misfit(message, SHARE_ROTATED, label=label)
    if dims < dim:
        refuse_factor(rotary_fields, rope)
        return evolve(rope, dims=dims)
    return rope


def refuse_factor(rotary_fields: Fields, rope: Rope) -> None:
    """Adds a mistake where cosines and sines have a factor that attention's scale cannot stand
    for.
    """
    if rope.table == 1:
        return
    message = f"cosines and sines are scaled by {rope.table:g}"
    help = (
        "a plan scales whole scores of attention; here only a part of them comes from what is"
        " rotated"
    )
    rotary_fields.wrong("E0801", message, "attention_factor", "mscale", "factor", help=help)


def check_pairs(config: Config, dim: int) -> None:
    """Whole heads of `dim` dims are rotated, in pairs."""
    if dim % 2:
        message = f"heads of {dim} dims cannot be rotated in pairs"
        config.misfit(
            message, "head_dim", "num_attention_heads", "hidden_size", label=f"{dim} is odd"
        )


def _rotary_table(config: Config) -> Fields:
    """The table of rotary positions, by the later name of the field or the earlier one."""
    names = [name for name in ("rope_parameters", "rope_scaling") if config.has(name)]
    later, earlier = config.table("rope_parameters"), config.table("rope_scaling")
    if len(names) > 1:
        config.misfit("rotary positions are given twice", *names)
        earlier.drop()
    return earlier if names == ["rope_scaling"] else later


def rope_of(rotary_fields: Fields, theta: float, types: tuple[str, ...] = (*SCALINGS,)) -> Rope:
    """Rotary positions by a table of fields, of one of some types; `theta` is for tables without
    it.
    """
    theta = rotary_fields.number("rope_theta", theta)
    field = "rope_type" if rotary_fields.has("rope_type") else "type"
    kind = rotary_fields.get_field(field, TEXT, "default")
    rotary_fields.take("type")
    if kind not in types:
        help = f"a plan is written for {listing(types)}"
        rotary_fields.wrong("E0801", f"rotary positions of type `{kind}`", field, help=help)
        rotary_fields.drop()
        return Rope(theta)
    numbers = _scaling_numbers(rotary_fields, kind)
    if not numbers:
        return Rope(theta)
    arguments = [f"scaling={kind}"]
    arguments += [f"{name}={number_text(number)}" for name, number in numbers.items()]
    table, temper = 1.0, 1.0
    if kind == "yarn":
        table, temper = _yarn_factors(rotary_fields, numbers["factor"])
    return Rope(theta, ", ".join(arguments), table=table, temper=temper)


def _scaling_numbers(rotary_fields: Fields, kind: str) -> dict[str, float]:
    """The options of a type of rotary positions, by the names that a plan has for them."""
    field_by_option = {option: field for field, option in SCALINGS[kind].items()}
    if "original" not in field_by_option:
        rotary_fields.take(ORIGINAL)  # which scaled positions alone have
    numbers: dict[str, float] = {}
    for option, field in field_by_option.items():
        numbers[option] = rotary_fields.number(field, BETAS.get(field))
    if "low" in numbers and not numbers["low"] < numbers["high"]:
        rotary_fields.misfit(
            "the low factor has to be below the high one",
            field_by_option["low"],
            field_by_option["high"],
            label=f"{numbers['low']:g} is not below {numbers['high']:g}",
        )
    return numbers


def _yarn_factors(rotary_fields: Fields, factor: float) -> tuple[float, float]:
    """The factor of cosines and sines by yarn; and the factor of attention's scale, in models that
    have it.
    """
    rotary_fields.must_be("truncate", True, None)
    mscale = rotary_fields.get_field("mscale", NOT_NEGATIVE, 0, 0)
    mscale_all_dim = rotary_fields.get_field("mscale_all_dim", NOT_NEGATIVE, 0, 0)
    if mscale and mscale_all_dim:
        default = _yarn_scale(factor, mscale) / _yarn_scale(factor, mscale_all_dim)
    else:
        default = _yarn_scale(factor, 1) / _yarn_scale(factor, 0)
    table = rotary_fields.get_field("attention_factor", POSITIVE, default, default)
    return table, _yarn_scale(factor, mscale_all_dim) ** 2


def _yarn_scale(factor: float, share: float) -> float:
    return 0.1 * share * log(max(factor, 1)) + 1


def check_layers(config: Config, count: float, *pattern: str) -> None:
    """Layers alternate in their attention as `pattern` says, if the configuration says anything
    of it.
    """
    layer_types: object = config.take("layer_types")
    if layer_types is None:
        return
    layers = cast("list[object]", layer_types) if isinstance(layer_types, list) else []
    alternates = len(layers) == count
    for i, kind in enumerate(layers):
        if kind != pattern[i % len(pattern)]:
            alternates = False
    if not alternates:
        help = f"a plan is written for {', '.join(pattern)}, in turn"
        config.wrong("E0801", "the layers alternate differently", "layer_types", help=help)
