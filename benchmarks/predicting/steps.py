"""Seconds of others' steps: the work of a microbatch, the hardware, and what their frameworks do
with it.

One closed form for all rows at once.  It differs from `analysis.time` where frameworks differ from
scalec's programs: collectives and reductions are exposed by a part that the profile says, the host
issues layers at its own pace, and stages are cut as the framework does.
"""

from collections.abc import Mapping

import numpy as np
from attrs import fields, frozen

from scalec.compiler.analysis.hardware import Hardware
from scalec.compiler.analysis.link_traffic import HALVES
from scalec.compiler.analysis.time.collectives import TREE_RATE, Group, get_collective_seconds
from scalec.compiler.analysis.time.seconds import SHORT

from .batch import AXES, OPS, Array, Batch
from .work import PLACES

EMBEDDING, LAYER, HEAD, EMBEDDING_BACK, LAYER_BACK, HEAD_BACK = range(len(PLACES))

NARROW = ("fp8", "mxfp8", "nvfp4")

STALL = 1e-4
"""Seconds of a hop between nodes from which on the link is in a bad state."""

STEP, FAR_STEP = (
    getattr(fields(Hardware), name).default for name in ("link_latency", "network_latency")
)
"""Seconds of a step of a ring within a node and between nodes, in buckets that are sent beside
computation.
"""

RING = 0.26
"""The part by which the host issues a layer more slowly for each further rank of its ring of keys.

Functional tests of two ranks take 1.23, 1.26 and 1.30 times as long as tests without a ring on an
A100, an H100 and a GB200, whose steps the host paces (RESULTS.md).  They have sequence parallelism
besides, which the others have not.
"""

ONCE = np.array(1.0)
"""Calls of a collective that takes all at once."""

Numbers = Mapping[str, Array]
"""A framework's numbers, one for each row; or shared constants (`constants.toml`)."""


@frozen
class Steps:
    """Seconds of steps and their parts."""

    seconds: Array
    parts: Mapping[str, Array]


@frozen
class _Links:
    """Rates and latencies of each row's links, for a rank."""

    node: Array
    adapters: Array
    latency: Array
    far_latency: Array

    def moved(
        self, size: Array, ranks: Array, near: Array, at: Array | slice = slice(None)
    ) -> Array:
        """Seconds of half an all-reduce besides latency, of `size` bytes."""
        sent, away = size * (ranks - 1) / ranks, near < ranks
        across = np.where(away, sent / (self.adapters[at] * near), 0.0)
        return np.maximum(across, np.where(near > 1, sent / self.node[at], 0.0))


def steps(batch: Batch, framework: Numbers, shared: Numbers) -> Steps:
    """Seconds of the steps of a batch."""
    return _Pricing(batch, framework, shared).steps()


TOGETHER = 16
"""How little two that go on beside each other hold each other up: where both take as long, by 2 to
the power of 1 in this many parts, 4%.  The pace of neither is even, so that now the one is waited
for and now the other."""


def both(first: Array, second: Array) -> Array:
    """The time of two that go on beside each other: a little more than the longer."""
    most = np.maximum(np.maximum(first, second), 1e-12)
    return most * ((first / most) ** TOGETHER + (second / most) ** TOGETHER) ** (1 / TOGETHER)


class _Pricing:
    def __init__(self, batch: Batch, framework: Numbers, shared: Numbers) -> None:
        self.batch, self.framework, self.shared = batch, framework, shared
        number = batch.number
        self.dp, self.tp, self.pp, self.microbatches = (
            number(it) for it in ("dp", "tp", "pp", "microbatches")
        )
        self.cp, self.chunks, self.per_node = number("cp"), number("vpp"), number("gpus_per_node")
        # gradients are sums over both, and frameworks share state out over both
        self.replicas = self.dp * self.cp
        self.zero = np.array([float(row["zero"] or 0) for row in batch.rows])
        self.memory = batch.on("memory_rate")
        self.kernel = batch.on("kernel")
        self.bf16 = np.array([it.product_rate("bf16") for it in batch.hardware]) * framework["rate"]
        self.links = _Links(
            batch.on("link"),
            batch.on("network") / self.per_node,
            batch.on("link_latency"),
            batch.on("network_latency"),
        )
        self.stalls = self.links.far_latency > STALL
        self.share = framework["traffic"] * np.where(
            batch.whether("compile", "yes"), shared["compiled"], 1.0
        )
        self.gradient = np.where(batch.whether("grad", "fp32"), 4.0, 2.0)

    def steps(self) -> Steps:
        compute = self._products() + self._attention() + self._moved()
        exposed, latency = self._collectives()
        forward, backward = (compute[:, at] + exposed[:, at] for at in (LAYER, LAYER_BACK))
        gathered = self._sharded(forward, backward)
        layer = forward + backward + gathered + self._accumulated(self.batch.params[:, 0])
        outer = compute + exposed
        embedding = (
            outer[:, EMBEDDING]
            + outer[:, EMBEDDING_BACK]
            + self._accumulated(self.batch.params[:, 1])
        )
        head = outer[:, HEAD] + outer[:, HEAD_BACK] + self._loss()
        layers, first, last = self._stages()
        device, ranks = np.zeros_like(layers), np.zeros_like(layers)
        places = zip(
            (first, layers, last), (embedding, layer, head), self._issued(latency), strict=True
        )
        for count, seconds, issued in places:
            device += count * seconds[:, None]
            ranks += count * both(seconds, issued)[:, None]
        ranks *= self._layers() >= 0
        slowest = ranks.max(1)
        bubble = (ranks.sum(1) - slowest) / self.chunks
        messages = self._messages()
        reduced = self._reduced(backward * layers.max(1), layers, first, last)
        update = self._update(layers, first, last)
        over = self.framework["step"]
        jitter = 1 + self.shared["jitter"] * np.log2(
            np.maximum(self.dp * self.tp * self.cp * self.pp / self.per_node, 1)
        )
        total = (self.microbatches * slowest + bubble + messages + reduced + update + over) * jitter
        most = layers.max(1) * self.microbatches
        waits = most * (exposed[:, LAYER] + exposed[:, LAYER_BACK])
        dp = reduced + most * gathered
        hosted = self.microbatches * (slowest - device.max(1))
        parts = {
            "tp": waits,
            "dp": dp,
            "bubble": bubble + messages,
            "host": hosted,
            "update": update,
            "step": over,
        }
        rest = total - sum(parts.values())
        return Steps(total, {"compute": rest, **parts})

    # ---- what a rank computes

    def _rate(self, field: str) -> Array:
        """Operations of a row's own element type, at the peak or as large products hold it."""
        types = [row["compute"] if row["compute"] in NARROW else "bf16" for row in self.batch.rows]
        pairs = zip(self.batch.hardware, types, strict=True)
        return np.array(
            [it.peak[type] if field == "peak" else it.product_rate(type) for it, type in pairs]
        )

    def _products(self) -> Array:
        it = self.batch.products
        _, m, n, k, count, _ = it.columns
        inside = (it.place == LAYER) | (it.place == LAYER_BACK)
        narrow = inside & self.batch.whether("compute", *NARROW)[it.row]
        held = np.where(
            narrow, (self._rate("held") * self.framework["rate"])[it.row], self.bf16[it.row]
        )
        memory, inputs = self.memory[it.row], count * (m * k + k * n)
        seconds = 2 * count * m * n * k / (held * self.batch.filled * k / (k + SHORT))
        seconds = np.maximum(seconds, 2 * (inputs + count * m * n) / memory) + self.kernel[it.row]
        seconds += np.where(narrow, self.shared["cast"] * inputs / memory, 0.0)
        return it.sums(seconds, len(self.batch.rows))

    def _attention(self) -> Array:
        it, of = self.batch.scores, self.batch.rows
        heads, length, pairs, width, backward, _ = it.columns
        factor = np.ones(len(of))
        for kernel in ("flash_triton", "flash_cudnn"):
            factor = np.where(self.batch.whether("attention", kernel), self.shared[kernel], factor)
        newer = np.array([not on.measured.attention for on in self.batch.hardware])
        factor = np.where(newer, self.shared["newer"], factor)
        fused = (
            2
            * heads
            * pairs
            * width
            * np.where(backward > 0, 5, 2)
            / (self.batch.score_rate * factor[it.row])
        )
        rate, memory, kernel = self.bf16[it.row], self.memory[it.row], self.kernel[it.row]
        scores, (of_keys, of_values) = heads * length * length, self.batch.score_filled
        products = [
            np.maximum(
                2 * scores * width / (rate * filled * k / (k + SHORT)) + kernel, 2 * scores / memory
            )
            for filled, k in ((of_keys, width), (of_values, length))
        ]
        bytes = (
            np.where(backward > 0, self.shared["scores_back"], self.shared["scores"])
            * self.framework["traffic"][it.row]
        )
        unfused = sum(products) * np.where(backward > 0, 2, 1) + scores * bytes / memory
        is_unfused = self.batch.whether("attention", "unfused")[it.row]
        return it.sums(np.where(is_unfused, unfused, fused + kernel), len(of))

    def _moved(self) -> Array:
        """Ops that only read and write; those of the loss by logits."""
        it = self.batch.moved
        bytes, kernels, _ = it.columns
        inside = np.where((it.place == HEAD) | (it.place == HEAD_BACK), 0.0, bytes)
        seconds = np.maximum(
            inside * self.share[it.row] / self.memory[it.row], self.kernel[it.row] * kernels
        )
        return it.sums(seconds, len(self.batch.rows))

    def _loss(self) -> Array:
        return self.shared["loss"] * self.share * self.batch.logits / self.memory

    def _accumulated(self, params: Array) -> Array:
        """Gradients of a microbatch are added up; of one alone they are made in place."""
        return (
            self.shared["accumulated"]
            * params
            / self.memory
            * np.where(self.microbatches > 1, 1.0, 0.5)
        )

    def _update(self, layers: Array, first: Array, last: Array) -> Array:
        own, copied = (
            self._params(layers, first, last),
            np.where(self.zero >= 1, self.replicas, 1.0),
        )
        cast = np.where(self.zero >= 3, own / copied, own)
        return (self.shared["update"] * own / copied + 6 * cast) / self.memory

    # ---- what it waits for

    def _collectives(self) -> tuple[Array, Array]:
        """Seconds of each place that the GPU waits for, and those of tp that delay it as the host
        does.

        The GPU waits for the latency of links between nodes.  Within a node it is the host's, and
        where links stall, for a GPU that is behind catches up meanwhile.  It waits for all of a
        ring of keys: published rows do not say which part of it is hidden.
        """
        it, links = self.batch.messages, self.links
        axis, op, size, ranks, near, _ = it.columns
        halves, away, at = np.where(op == OPS.index("all_reduce"), 2, 1), near < ranks, it.row
        seconds = halves * links.moved(size, ranks, near, at)
        around = size / np.where(away, links.adapters[at], links.node[at])
        seconds = np.where(op == OPS.index("rotate"), around, seconds)
        exposed = self.framework["exposed"] * np.where(
            self.batch.whether("overlap", "async"), self.shared["async"], 1.0
        )
        is_tp = axis == AXES.index("tp")
        latency = halves * (ranks - 1) * np.where(away, links.far_latency[at], links.latency[at])
        on_wire = away & ~self.stalls[at]
        waited = seconds * np.where(is_tp, exposed[at], 1.0) + np.where(
            is_tp & on_wire, latency, 0.0
        )
        issued = np.where(on_wire, 0.0, latency) + self.framework["collective"][at]
        rows = len(self.batch.rows)
        return it.sums(waited, rows), it.sums(np.where(is_tp, issued, 0.0), rows)

    def _over_dp(self, size: Array, op: str, calls: Array) -> Array:
        """A collective over dp and cp of `size` bytes, in several calls."""
        near = np.clip(np.floor(self.per_node / self.tp), 1, self.replicas)
        adapters = self._adapters(self.replicas / near, HALVES[op])
        slow = self.stalls & (op == "all_reduce")
        within = np.where(slow, self.links.latency, STEP)
        group = Group(
            self.replicas, near, self.links.node, adapters, within, FAR_STEP, self._tree()
        )
        each = get_collective_seconds(op, size / calls, group)
        return np.where(self.replicas > 1, calls * (each + self.framework["collective"]), 0.0)

    def _tree(self) -> Array:
        """The part of a ring's bandwidth that a tree holds: as the job's all-reduce over all,
        if that was measured.
        """
        measured = 1e9 * self.batch.number("allreduce_gbs") / self.per_node
        is_measured = np.array([bool(row["allreduce_gbs"]) for row in self.batch.rows])
        held = np.minimum(measured / self.links.adapters, TREE_RATE)
        return np.where(is_measured & ~self.stalls, held, TREE_RATE)

    def _adapters(self, nodes: Array, halves: int) -> Array:
        """The adapters of a rank to `nodes` nodes.

        A ring that stalls is slower by their number, as the job's all-reduce over all.  Half an
        all-reduce by itself holds twice its rate there.
        """
        all_nodes = self.batch.number("gpus") / self.per_node
        measured = (
            2
            / halves
            * 1e9
            * self.batch.number("allreduce_gbs")
            / self.per_node
            * all_nodes
            / nodes
        )
        return np.where(self.stalls, np.minimum(self.links.adapters, measured), self.links.adapters)

    def _sharded(self, forward: Array, backward: Array) -> Array:
        """Seconds that gathers and scatters of ZeRO 2 and 3 add to a layer."""
        params, slower = self.batch.params[:, 0], 1 + self.shared["sharded"]
        gather = self._over_dp(2 * params, "all_gather", ONCE)
        scatter = self._over_dp(self.gradient * params, "reduce_scatter", ONCE)
        whole = (
            both(forward * slower, gather)
            + both(backward * slower, gather + scatter)
            - forward
            - backward
        )
        scattered = both(backward * slower, scatter) - backward
        added = np.where(self.zero >= 3, whole, np.where(self.zero == 2, scattered, 0.0))
        return np.where(self.replicas > 1, added, 0.0)

    def _reduced(self, backward: Array, layers: Array, first: Array, last: Array) -> Array:
        """Exposed seconds of the reduction of gradients, and of the gather of parameters after
        the update.
        """
        most, sharded = self._params(layers, first, last), self.zero == 1
        by_tensor = (self.framework["per_tensor"] > 0) & sharded
        calls = np.where(
            by_tensor,
            6 * layers.max(1) + 2,
            np.maximum(self.gradient * most / self.framework["bucket"], 1),
        )
        sums = np.where(
            sharded,
            self._over_dp(self.gradient * most, "reduce_scatter", calls),
            self._over_dp(self.gradient * most, "all_reduce", calls),
        )
        beside = np.where(by_tensor, self.shared["beside_tensors"], self.framework["beside"])
        # a framework that begins to reduce when backward is over hides nothing, and so a smaller
        # reduction counts whole
        beside = np.where(self.batch.whether("overlap", "dp", "fsdp"), beside, 0.0)
        reduced = np.maximum(sums * (1 - beside), sums - beside * backward)
        gather = self._over_dp(2 * most, "all_gather", np.where(sharded, calls, layers.max(1) + 2))
        part = np.where(sharded, self.shared["gathered"], np.where(self.zero == 2, 0.5, 0.0))
        return np.where(self.zero <= 1, reduced, 0.0) + part * gather

    def _messages(self) -> Array:
        """Messages between stages that are waited for: a part of all, and those of the first
        microbatch.
        """
        split = np.where(self.batch.whether("sp", "yes"), self.tp, 1.0)
        size = 2 * self.batch.number("micro_batch") * self.batch.number("seq") / self.cp
        size = size * self.batch.number("hidden") / split
        away = self.dp * self.tp * self.cp >= self.per_node
        one = (
            size / np.where(away, self.links.adapters, self.links.node)
            + self.framework["collective"]
        )
        waited = self.microbatches * self.framework["messages"] + self.pp - 1
        return np.where(self.pp > 1, 2 * self.chunks * one * waited, 0.0)

    def _issued(self, latency: Array) -> list[Array]:
        """Seconds in which the host issues the embedding, a layer and the head: by the kernels
        that each starts.
        """
        layer = np.where(self.tp > 1, self.framework["host_tp"], self.framework["host"])
        layer = layer * np.where(self.batch.whether("recompute", "full"), 1.3, 1.0)
        back = len(PLACES) // 2  # from here on are the places of backward
        kernels, delays = (
            each[:, :back] + each[:, back:] for each in (self.batch.kernels, latency)
        )
        issued = layer[:, None] * kernels / kernels[:, LAYER : LAYER + 1]
        issued[:, LAYER] *= 1 + RING * (self.cp - 1)
        return [*(issued + delays).T]

    # ---- stages

    def _layers(self) -> Array:
        balanced = self.framework["balanced"][:, None] > 0
        return np.where(balanced, self.batch.layers_balanced, self.batch.layers)

    def _stages(self) -> tuple[Array, Array, Array]:
        """The layers of each rank of the pipeline, and whether it has the embedding, and the
        head.
        """
        layers, ranks = self._layers(), np.arange(self.batch.layers.shape[1])[None, :]
        return np.maximum(layers, 0.0), 1.0 * (ranks == 0), 1.0 * (ranks == self.pp[:, None] - 1)

    def _params(self, layers: Array, first: Array, last: Array) -> Array:
        """The most parameters of a rank; tied ones are on both ends of a pipeline."""
        inner, embedding, head = (self.batch.params[:, at : at + 1] for at in range(3))
        head = np.maximum(head, np.where(self.pp[:, None] > 1, embedding, 0.0))
        return (layers * inner + first * embedding + last * head).max(1)
