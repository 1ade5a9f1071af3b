"""Hardware read from files: of shipped GPUs by name, and a cluster's own, by hand or by `scalec
calibrate`.

A file has tables `[gpu]`, `[host]` and any number of `[[link]]`, `[[product]]`, `[[attention]]`,
`[[moved]]`, `[[collective]]`; docs/time.md describes them.  With `[cluster] gpu = "NAME"` it only
says where it differs from a shipped GPU.
"""

import tomllib
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NoReturn, cast

from attrs import evolve, frozen

from ...config.settings import Cluster
from ...ir import Program
from ...syntax.diagnostics import Diagnostics, PlanError, did_you_mean, listing, wrong
from ...syntax.limits import MAX_WRITTEN_BYTES
from ...syntax.limits import load as load_text
from ...syntax.source import Source, Span
from .description import KERNELS, Attention, Collective, Hardware, Measured, Moved, Product

FOLDER = Path(__file__).parent

TABLES: dict[str, tuple[Any, str]] = {
    "product": (Product, "products"),
    "attention": (Attention, "attention"),
    "moved": (Moved, "moved"),
    "collective": (Collective, "collectives"),
}
"""The tables of measured seconds: their rows, and the field of `Measured`."""

LINKS = {"node": ("link", "link_latency"), "adapters": ("network", "network_latency")}
"""The links of a file: the fields of `Hardware` with their bandwidth and latency."""

GPU = (
    "name",
    "peak",
    "memory",
    "sms",
    "held",
    "attention",
    "torch_attention",
    "kernel",
    "streamed",
    "contention",
)
HOST = ("op", "collective", "action", "synchronous")
NEEDED = ("name", "peak", "memory", "sms", "held", "attention", "link", "network")
"""The figures that every price needs."""

RATES = (*NEEDED, "streamed", "ranks_per_node")
"""The figures that are above 0: something is divided by each."""

MEASURED_ERROR = 0.05
"""The error to be expected of a step that is priced by a file of measured figures, where the file
says no other.
"""


def hardware(program: Program) -> Hardware | None:
    """The hardware of a plan's cluster: its own file's, or by data sheets; None where these do not
    know its GPU.

    Raises PlanError where the plan's file cannot be read or is not a description of hardware.
    """
    cluster = program.cluster
    described = _read_own_file(cluster) if cluster.hardware else find_shipped_gpu(cluster.gpu)
    if not described:
        return None
    return evolve(described, ranks_per_node=ranks_per_node(program))


@cache
def find_shipped_gpu(gpu: str) -> Hardware | None:
    """A shipped GPU by its name, on a node of eight; None where there is none of that name."""
    path = FOLDER / "gpus" / f"{gpu}.toml"
    if not gpu or "/" in gpu or not path.is_file():
        return None
    source = Source(str(path), path.read_text(encoding="utf-8"))
    return _Reader(str(path), source.whole()).read(source, name=gpu)


def load(path: Path, place: Span | None = None) -> Hardware:
    """The hardware that a file describes; `at` is the place that names it.  Raises PlanError."""
    span = place or Source(str(path), "").whole()
    try:
        text = load_text(path, span, most=MAX_WRITTEN_BYTES)
    except PlanError as error:
        raise wrong("E0418", error.diagnostics[0].message, span) from None
    return _Reader(str(path), span).read(text)


def check_hardware(cluster: Cluster, diagnostics: Diagnostics) -> None:
    """Checks that the file of a cluster describes hardware, of the GPU that the plan names."""
    with diagnostics.catch():
        described = _read_own_file(cluster)
        if cluster.gpu and described.name != cluster.gpu:
            message = (
                f"`{cluster.hardware}` describes {described.name}, but the plan's GPU is"
                f" {cluster.gpu}"
            )
            help = f"write `gpu = {described.name}`, or name another file"
            diagnostics.error("E0418", message, cluster.spans["hardware"], help=help)


def ranks_per_node(program: Program) -> int:
    """The number of ranks on a node, as the plan says or as its nodes share them."""
    cluster: Cluster = program.cluster
    return cluster.gpus_per_node or max(program.ranks // cluster.nodes, 1)


def _read_own_file(cluster: Cluster) -> Hardware:
    return load(own_file(cluster), cluster.spans["hardware"])


def own_file(cluster: Cluster) -> Path:
    """The path of a cluster's own file; the plan names it relative to its own folder."""
    assert cluster.hardware, "hardware: a cluster without a file"
    return Path(cluster.spans["hardware"].path).parent / cluster.hardware


@frozen
class _Reader:
    """Reads one file; `span` is the place that diagnostics point to."""

    path: str
    span: Span

    def read(self, source: Source, name: str = "") -> Hardware:
        try:
            document = tomllib.loads(source.text)
        except tomllib.TOMLDecodeError as error:
            self._wrong(f"`{self.path}` is not TOML: {error}")
        self._check_keys("", document, ("cluster", "gpu", "host", "link", *TABLES))
        figures: dict[str, Any] = {"source": Path(self.path).name, "error": MEASURED_ERROR}
        if name:  # a shipped GPU
            figures = {"name": name}
        figures["span"] = self.span
        figures |= self._cluster(document.get("cluster", {}))
        base = figures.pop("base", None)
        figures |= self._figures("gpu", document.get("gpu", {}), GPU)
        figures |= self._figures("host", document.get("host", {}), HOST)
        for link in self._list("link", document):
            figures |= self._link(link)
        measured: dict[str, tuple[Any, ...]] = {}
        for table, (_, field) in TABLES.items():
            if table in document:
                measured[field] = self._rows(table, self._list(table, document))
        figures["measured"] = evolve(base.measured if base else Measured(), **measured)
        if base:
            return evolve(base, **figures)
        missing = [key for key in NEEDED if key not in figures]
        if missing:
            self._wrong(
                f"`{self.path}` lacks {listing(missing)}",
                'give them, or `gpu = "NAME"` in `[cluster]`',
            )
        return Hardware(**figures)

    def _cluster(self, table: Mapping[str, Any]) -> dict[str, Any]:
        self._check_keys("cluster", table, ("gpu", "source", "error"))
        figures = {key: table[key] for key in ("source", "error") if key in table}
        if "gpu" in table:
            base = find_shipped_gpu(str(table["gpu"]))
            if base is None:
                names = sorted(path.stem for path in (FOLDER / "gpus").glob("*.toml"))
                self._wrong(
                    f"`{self.path}`: there is no GPU `{table['gpu']}`",
                    did_you_mean(str(table["gpu"]), names),
                )
            figures["base"] = base
        return figures

    def _figures(self, name: str, table: Mapping[str, Any], known: Sequence[str]) -> dict[str, Any]:
        self._check_keys(name, table, (*known, "source"))
        figures: dict[str, Any] = {}
        for key, value in table.items():
            if key != "source":
                figures[key] = self._figure(f"{name}.{key}", key, value)
        return figures

    def _figure(self, where: str, key: str, value: Any) -> Any:
        if key == "name":
            return str(value)
        if key == "torch_attention":
            if value not in KERNELS:
                self._wrong(f"`{self.path}`: `{where}` is one of {listing(KERNELS)}, not {value!r}")
            return value
        if key not in ("peak", "held"):
            numbers = [value]
        elif isinstance(value, dict) and value:
            numbers = list(cast(dict[str, Any], value).values())
        else:
            self._wrong(
                f"`{self.path}`: `{where}` takes a number for each element type, as in {{ bf16"
                f" = 1e12 }}"
            )
        for number in numbers:
            is_number = isinstance(number, int | float)
            if not is_number or not (number > 0 or (number == 0 and key not in RATES)):
                least = "above 0" if key in RATES else "of at least 0"
                self._wrong(f"`{self.path}`: `{where}` takes numbers {least}, not {value!r}")
        return cast(Any, value)

    def _link(self, table: Mapping[str, Any]) -> dict[str, Any]:
        self._check_keys("link", table, ("name", "ranks", "bandwidth", "latency"))
        if table.get("name") not in LINKS:
            self._wrong(
                f"`{self.path}`: `link.name` is one of {listing(LINKS)}, not {table.get('name')!r}"
            )
        bandwidth, latency = LINKS[table["name"]]
        field_by_key = {"bandwidth": bandwidth, "latency": latency}
        if table["name"] == "node":
            field_by_key["ranks"] = "ranks_per_node"
        figures: dict[str, Any] = {}
        for key, field in field_by_key.items():
            if key in table:
                figures[field] = self._figure(f"link.{key}", field, table[key])
        return figures

    def _rows(self, name: str, tables: Sequence[Mapping[str, Any]]) -> tuple[Any, ...]:
        row, _ = TABLES[name]
        for table in tables:
            self._check_keys(name, table, (*row._fields, "source"))
            missing = [key for key in row._fields if key not in table]
            if missing:
                self._wrong(f"`{self.path}`: a `[[{name}]]` lacks {listing(missing)}")
            numbers = [table[key] for key in row._fields if row.__annotations__[key] is not str]
            if not all(isinstance(value, int | float) and value > 0 for value in numbers):
                self._wrong(f"`{self.path}`: numbers of a `[[{name}]]` are above 0")
        return tuple(row(*map(table.__getitem__, row._fields)) for table in tables)

    def _list(self, name: str, document: Mapping[str, Any]) -> list[Any]:
        tables = document.get(name, [])
        if not isinstance(tables, list):
            self._wrong(f"`{self.path}`: `[{name}]` is a list of tables: write `[[{name}]]`")
        return cast(list[Any], tables)

    def _check_keys(self, name: str, table: Any, known: Sequence[str]) -> None:
        where = f"`[{name}]`" if name else "the file"
        if not isinstance(table, dict):
            self._wrong(f"`{self.path}`: {where} is a table")
        for key in cast(dict[str, Any], table):
            if key not in known:
                self._wrong(
                    f"`{self.path}`: {where} has no `{key}`",
                    did_you_mean(key, known) or listing(known),
                )

    def _wrong(self, message: str, help: str = "") -> NoReturn:
        raise wrong("E0418", message, self.span, help=help)
