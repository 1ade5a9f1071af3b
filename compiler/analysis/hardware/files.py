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
"""The figures without which nothing can be priced."""

RATES = (*NEEDED, "streamed", "ranks_per_node")
"""The figures that are above 0: something is divided by each."""

MEASURED_ERROR = 0.05
"""The error to be expected of a step that is priced by a file of measured figures, where that
says no other.
"""


def hardware(program: Program) -> Hardware | None:
    """The hardware of a plan's cluster: its own file's, or by data sheets; None where these do not
    know its GPU.

    Raises PlanError where the plan's file cannot be read or is not a description of hardware.
    """
    cluster = program.cluster
    found = _own(cluster) if cluster.hardware else named(cluster.gpu)
    return evolve(found, ranks_per_node=ranks_per_node(program)) if found else None


@cache
def named(gpu: str) -> Hardware | None:
    """A shipped GPU by its name, on a node of eight; None where there is none of that name."""
    path = FOLDER / "gpus" / f"{gpu}.toml"
    if not gpu or "/" in gpu or not path.is_file():
        return None
    source = Source(str(path), path.read_text(encoding="utf-8"))
    return _Reader(str(path), source.whole()).read(source, name=gpu)


def load(path: Path, at: Span | None = None) -> Hardware:
    """The hardware that a file describes; `at` is the place that names it.  Raises PlanError."""
    place = at or Source(str(path), "").whole()
    try:
        text = load_text(path, place, most=MAX_WRITTEN_BYTES)
    except PlanError as error:
        raise wrong("E0418", error.diagnostics[0].message, place) from None
    return _Reader(str(path), place).read(text)


def check_hardware(cluster: Cluster, found: Diagnostics) -> None:
    """The file of a cluster describes hardware, of the GPU that the plan names."""
    with found.catch():
        own = _own(cluster)
        if cluster.gpu and own.name != cluster.gpu:
            message = (
                f"`{cluster.hardware}` describes {own.name}, but the plan's GPU is {cluster.gpu}"
            )
            help = f"write `gpu = {own.name}`, or name another file"
            found.error("E0418", message, cluster.spans["hardware"], help=help)


def ranks_per_node(program: Program) -> int:
    """The number of ranks on a node, as the plan says or as its nodes share them."""
    cluster: Cluster = program.cluster
    return cluster.gpus_per_node or max(program.ranks // cluster.nodes, 1)


def _own(cluster: Cluster) -> Hardware:
    return load(own_file(cluster), cluster.spans["hardware"])


def own_file(cluster: Cluster) -> Path:
    """The path of a cluster's own file, which is named from where the plan is."""
    assert cluster.hardware, "hardware: a cluster without a file"
    return Path(cluster.spans["hardware"].path).parent / cluster.hardware


@frozen
class _Reader:
    """Reads one file; `span` is where mistakes are told."""

    path: str
    span: Span

    def read(self, source: Source, name: str = "") -> Hardware:
        try:
            given = tomllib.loads(source.text)
        except tomllib.TOMLDecodeError as error:
            self._wrong(f"`{self.path}` is not TOML: {error}")
        known = ("cluster", "gpu", "host", "link", *TABLES)
        self._known("", given, known)
        figures: dict[str, Any] = (
            {"name": name} if name else {"source": Path(self.path).name, "error": MEASURED_ERROR}
        )
        figures["span"] = self.span
        figures |= self._cluster(given.get("cluster", {}))
        base = figures.pop("base", None)
        figures |= self._figures("gpu", given.get("gpu", {}), GPU)
        figures |= self._figures("host", given.get("host", {}), HOST)
        for link in self._list("link", given):
            figures |= self._link(link)
        own = {
            name: self._rows(it, self._list(it, given))
            for it, (_, name) in TABLES.items()
            if it in given
        }
        figures["measured"] = evolve(base.measured if base else Measured(), **own)
        if base:
            return evolve(base, **figures)
        missing = [key for key in NEEDED if key not in figures]
        if missing:
            self._wrong(
                f"`{self.path}` lacks {listing(missing)}",
                'give them, or `gpu = "NAME"` in `[cluster]`',
            )
        return Hardware(**figures)

    def _cluster(self, given: Mapping[str, Any]) -> dict[str, Any]:
        self._known("cluster", given, ("gpu", "source", "error"))
        found = {key: given[key] for key in ("source", "error") if key in given}
        if "gpu" in given:
            base = named(str(given["gpu"]))
            if base is None:
                names = sorted(path.stem for path in (FOLDER / "gpus").glob("*.toml"))
                self._wrong(
                    f"`{self.path}`: there is no GPU `{given['gpu']}`",
                    did_you_mean(str(given["gpu"]), names),
                )
            found["base"] = base
        return found

    def _figures(
        self, table: str, given: Mapping[str, Any], known: Sequence[str]
    ) -> dict[str, Any]:
        self._known(table, given, (*known, "source"))
        told = ((key, value) for key, value in given.items() if key != "source")
        return {key: self._figure(f"{table}.{key}", key, value) for key, value in told}

    def _figure(self, where: str, key: str, value: Any) -> Any:
        if key == "name":
            return str(value)
        if key == "torch_attention":
            if value not in KERNELS:
                self._wrong(f"`{self.path}`: `{where}` is one of {listing(KERNELS)}, not {value!r}")
            return value
        if key not in ("peak", "held"):
            each = [value]
        elif isinstance(value, dict) and value:
            each = list(cast(dict[str, Any], value).values())
        else:
            self._wrong(
                f"`{self.path}`: `{where}` takes a number for each element type, as in {{ bf16"
                f" = 1e12 }}"
            )
        least = "above 0" if key in RATES else "of at least 0"
        if not all(
            isinstance(it, int | float) and (it > 0 or (it == 0 and key not in RATES))
            for it in each
        ):
            self._wrong(f"`{self.path}`: `{where}` takes numbers {least}, not {value!r}")
        return cast(Any, value)

    def _link(self, given: Mapping[str, Any]) -> dict[str, Any]:
        self._known("link", given, ("name", "ranks", "bandwidth", "latency"))
        if given.get("name") not in LINKS:
            self._wrong(
                f"`{self.path}`: `link.name` is one of {listing(LINKS)}, not {given.get('name')!r}"
            )
        bandwidth, latency = LINKS[given["name"]]
        names = {"bandwidth": bandwidth, "latency": latency}
        names |= {"ranks": "ranks_per_node"} if given["name"] == "node" else {}
        return {
            own: self._figure(f"link.{key}", own, given[key])
            for key, own in names.items()
            if key in given
        }

    def _rows(self, table: str, given: Sequence[Mapping[str, Any]]) -> tuple[Any, ...]:
        row, _ = TABLES[table]
        for it in given:
            self._known(table, it, (*row._fields, "source"))
            if missing := [key for key in row._fields if key not in it]:
                self._wrong(f"`{self.path}`: a `[[{table}]]` lacks {listing(missing)}")
            numbers = [it[key] for key in row._fields if row.__annotations__[key] is not str]
            if not all(isinstance(value, int | float) and value > 0 for value in numbers):
                self._wrong(f"`{self.path}`: numbers of a `[[{table}]]` are above 0")
        return tuple(row(**{key: it[key] for key in row._fields}) for it in given)

    def _list(self, table: str, given: Mapping[str, Any]) -> list[Any]:
        found = given.get(table, [])
        if not isinstance(found, list):
            self._wrong(f"`{self.path}`: `[{table}]` is a list of tables: write `[[{table}]]`")
        return cast(list[Any], found)

    def _known(self, table: str, given: Any, known: Sequence[str]) -> None:
        where = f"`[{table}]`" if table else "the file"
        if not isinstance(given, dict):
            self._wrong(f"`{self.path}`: {where} is a table")
        for key in cast(dict[str, Any], given):
            if key not in known:
                self._wrong(
                    f"`{self.path}`: {where} has no `{key}`",
                    did_you_mean(key, known) or listing(known),
                )

    def _wrong(self, message: str, help: str = "") -> NoReturn:
        raise wrong("E0418", message, self.span, help=help)
