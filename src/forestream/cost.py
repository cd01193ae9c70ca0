"""What a pass costs and what it brings: seconds from a measured machine, tokens from measured acceptance.

Plain numbers: neither torch nor a model is needed. Three questions are answered. How long does a pass take on a machine
that was measured (`Profile`, `pass_seconds`)? How many tokens does a fixed draft tree bring, and which tree brings most
(`expected_tokens`, `best_static_tree`)? And when does drafting inside the model beat a second, small model that drafts
(`streaming_over_two_model`)?
"""

from __future__ import annotations

import heapq
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import MISSING, dataclass, fields
from math import inf
from typing import Any, Literal, Self

from forestream.config import JsonConfig, in_range, one_of, whole
from forestream.errors import ConfigError

# --- seconds ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Measured(JsonConfig):
    """Base of what was measured: every key without a default has to be there."""

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Self:
        """Build from a mapping.

        Raises:
            ConfigError: a key is unknown or missing, or a value is out of range.
        """
        needed = {field.name for field in fields(cls) if field.default is MISSING}
        if missing := sorted(needed - set(values)):
            raise ConfigError(f"{cls.__name__} lacks {', '.join(missing)}; expected every key: measure it again")
        return super().from_dict(values)


@dataclass(frozen=True)
class Curve(Measured):
    """Seconds by number of rows that go through together, from measurements at some numbers of rows.

    Attributes:
        points: (rows, seconds) pairs; rows are whole numbers from 1 and increase, seconds are above 0.

    Raises:
        ConfigError: there is no point, or one is out of range or out of order.
    """

    points: tuple[tuple[int, float], ...]

    def __post_init__(self) -> None:
        if not isinstance(self.points, tuple | list) or not self.points:
            raise ConfigError(f"points are {self.points!r}; expected one or more pairs of rows and seconds")
        points: list[tuple[int, float]] = []
        for point in self.points:
            if not isinstance(point, tuple | list) or len(point) != 2:
                raise ConfigError(f"a point is {point!r}; expected a pair of rows and seconds")
            rows, seconds = point
            whole("rows of a point", rows, 1)
            _above_zero("seconds of a point", seconds)
            if points and rows <= points[-1][0]:
                raise ConfigError(f"a point at {rows} rows follows one at {points[-1][0]}; sort points by their rows")
            points.append((rows, float(seconds)))
        object.__setattr__(self, "points", tuple(points))

    def __call__(self, rows: int) -> float:
        """Seconds for `rows` rows, 1 or more.

        Linear between neighbouring points; the first point's seconds below it; the last segment's slope beyond the last
        point, but never falling: a dip at the end is noise.
        """
        whole("rows", rows, 1)
        last = bisect_right(self.points, rows, key=lambda point: point[0]) - 1  # the last point that is not beyond
        if last < 0:
            return self.points[0][1]
        start, seconds = self.points[last]
        slope = 0.0
        if last + 1 < len(self.points):
            slope = _slope(self.points[last], self.points[last + 1])
        elif last > 0:
            slope = max(_slope(self.points[last - 1], self.points[last]), 0.0)
        return seconds + slope * (rows - start)


@dataclass(frozen=True)
class Profile(Measured):
    """One model on one machine, measured part by part; `forestream profile` writes it.

    Attributes:
        model, dtype, device, processor, threads, compile: what was measured, and how it ran.
        layers: N_L, decoder layers in all.
        stream_layers: N_s, the top ones that carry streams, 1 to N_L.
        layer: one decoder layer, seconds by rows.
        head: final norm and LM head, seconds by rows.
        overhead: seconds of a plain pass outside of its layers and head.
        draft_overhead: seconds that a speculative pass spends beyond that: on drafting, verifying and committing.
        draft_head: the streams' head where it is a smaller one, of a draft vocabulary; None where it is `head`.

    Raises:
        ConfigError: a value is out of range.
    """

    model: str
    dtype: str
    device: str
    processor: str
    threads: int
    compile: str
    layers: int
    stream_layers: int
    layer: Curve
    head: Curve
    overhead: float
    draft_overhead: float
    draft_head: Curve | None = None

    def __post_init__(self) -> None:
        for name in ("model", "dtype", "device", "processor", "compile"):
            if not isinstance(value := getattr(self, name), str):
                raise ConfigError(f"{name} is {value!r}; expected text")
        for name in ("layer", "head", *(() if self.draft_head is None else ("draft_head",))):
            if not isinstance(value := getattr(self, name), Curve):
                raise ConfigError(
                    f"{name} is {value!r}; expected a curve, an object with points [[rows, seconds], ...]"
                )
        whole("threads", self.threads, 1)
        whole("layers", self.layers, 1)
        whole("stream_layers", self.stream_layers, 1, self.layers)
        for name in ("overhead", "draft_overhead"):
            value = getattr(self, name)
            in_range(name, value, 0.0)
            if value == inf:
                raise ConfigError(f"{name} is {value!r}; expected a finite number from 0")

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Self:
        curves = {name: values[name] for name in ("layer", "head", "draft_head") if isinstance(values.get(name), dict)}
        return super().from_dict({**values, **{name: Curve.from_dict(curve) for name, curve in curves.items()}})


def plain_seconds(profile: Profile) -> float:
    """Seconds of a plain pass: one row through all layers and the head."""
    return profile.overhead + profile.layers * profile.layer(1) + profile.head(1)


def pass_seconds(
    profile: Profile,
    nodes: int,
    streams: int,
    carriers: Literal["fused", "deferred"],
    kept: int | None = None,
    carried: int | None = None,
    missed: bool = False,
) -> float:
    """Seconds of a pass over a draft tree, drafting and verifying included.

        overhead + draft overhead + (N_L - N_s) layer(nodes) + head(kept) + draft head(G)
            + N_s layer(kept (1 + G))                  fused
            + N_s layer(kept) + N_s layer(G)           deferred
            + N_s layer(kept + carried G)              fused, where few nodes carry streams
            + N_s layer(G)                             where it ended at none of these
            + head(nodes)                              the exit scorer, where branches are pruned

    Args:
        nodes: of the tree that is offered, root included.
        streams: G; with 0 nothing is drafted and the terms in G fall away.
        carriers: whether the streams ride in the same pass, or follow in a second one of the stream layers.
        kept: nodes that survive pruning, 1 to `nodes`; None prunes nothing.
        carried: nodes that carry fused streams, at least 1; None: all that survive.
        missed: whether the pass ended at a node without them, so that streams follow in a second pass after all.

    Raises:
        ConfigError: an argument is out of range.
    """
    whole("nodes", nodes, 1)
    whole("streams", streams, 0)
    one_of("carriers", carriers, ("fused", "deferred"))
    survivors = nodes
    seconds = profile.overhead + profile.draft_overhead
    if kept is not None:
        whole("kept", kept, 1, nodes)
        survivors = kept
        seconds += profile.head(nodes)
    if carried is not None:
        whole("carried", carried, 1)
    riding = 0 if carriers == "deferred" else survivors if carried is None else min(carried, survivors)
    seconds += (profile.layers - profile.stream_layers) * profile.layer(nodes)
    seconds += profile.stream_layers * profile.layer(survivors + riding * streams)
    seconds += profile.head(survivors)
    if streams:
        seconds += (profile.draft_head or profile.head)(streams)
        if carriers == "deferred" or missed:
            seconds += profile.stream_layers * profile.layer(streams)
    return seconds


def tokens_per_second(tokens_per_pass: float, seconds: float) -> float:
    """Decoding speed at `tokens_per_pass` and `seconds` per pass."""
    in_range("tokens_per_pass", tokens_per_pass, 0.0)
    _above_zero("seconds", seconds)
    return tokens_per_pass / seconds


def speedup(profile: Profile, tokens_per_pass: float, seconds: float) -> float:
    """Decoding speed over that of plain passes, one token each; 1 where tokens_per_pass = `break_even_tokens`."""
    return tokens_per_second(tokens_per_pass, seconds) * plain_seconds(profile)


def break_even_tokens(profile: Profile, seconds: float) -> float:
    """Tokens that a pass of `seconds` has to bring to be as fast as plain passes: its seconds over theirs."""
    _above_zero("seconds", seconds)
    return seconds / plain_seconds(profile)


# --- against two models -------------------------------------------------------------------------------------------


def two_model_tokens(gamma: int, alpha: float) -> float:
    """Expected tokens per target pass when a second model drafts: 1 + alpha + alpha^2 + ... + alpha^gamma.

    That is (1 - alpha^(gamma + 1)) / (1 - alpha), and gamma + 1 where alpha is 1.

    Args:
        gamma: tokens drafted per target pass, 0 or more. Not the G of streams.
        alpha: chance that a draft is accepted once those before it were, 0 to 1.
    """
    whole("gamma", gamma, 0)
    in_range("alpha", alpha, 0.0, 1.0)
    return float(sum(alpha**depth for depth in range(gamma + 1)))


def two_model_seconds(gamma: int, draft_cost: float, target_cost: float) -> float:
    """Latency per target pass when a second model drafts: gamma draft passes, one after the other, and the target's.

    Costs are of one pass, above 0, in seconds or any other unit that both share.
    """
    whole("gamma", gamma, 0)
    _above_zero("draft_cost", draft_cost)
    _above_zero("target_cost", target_cost)
    return gamma * draft_cost + target_cost


def streaming_over_two_model(
    *, cost_ratio: float, acceptance_ratio: float, gamma: int = 4, pass_cost: float = 1.0
) -> float:
    """Speed of Speculative Streaming over that of two-model decoding (eq. 6's comparison); above 1 streaming wins.

    With T tokens per target pass, and C the cost of one pass, the seconds per token are

        two models   (gamma C_draft + C_target) / T_two
        streaming    C_ss / T_ss

    and the first over the second, with C_target as the unit, is

        (gamma / cost_ratio + 1) / pass_cost * acceptance_ratio

    Args:
        cost_ratio: C_target / C_draft, above 0; large where the draft model is small.
        acceptance_ratio: T_ss / T_two, 0 or more.
        gamma: tokens that the draft model writes per target pass, 0 or more. Not the G of streams.
        pass_cost: C_ss / C_target, above 0; 1 where streams ride along for free.

    Raises:
        ConfigError: an argument is out of range.
    """
    _above_zero("cost_ratio", cost_ratio)
    in_range("acceptance_ratio", acceptance_ratio, 0.0)
    _above_zero("pass_cost", pass_cost)
    return two_model_seconds(gamma, 1 / cost_ratio, 1.0) / pass_cost * acceptance_ratio


def break_even_acceptance(*, cost_ratio: float, theirs: float, gamma: int = 4, pass_cost: float = 1.0) -> float:
    """Tokens per pass, T_ss, at which streaming is as fast as two models that bring `theirs`, T_two, per target pass.

        T_ss = T_two * pass_cost / (gamma / cost_ratio + 1)

    With `theirs` = 1 it is the ratio of the two. Other arguments and errors as in `streaming_over_two_model`.
    """
    _above_zero("theirs", theirs)
    return theirs / streaming_over_two_model(
        cost_ratio=cost_ratio, acceptance_ratio=1.0, gamma=gamma, pass_cost=pass_cost
    )


# --- tokens of a fixed tree -----------------------------------------------------------------------------------------


def expected_tokens(parents: Sequence[int], ranks: Sequence[int], accept: Sequence[Sequence[float]]) -> float:
    """Expected tokens per pass of a fixed draft tree: 1 for the main stream's own, and each node's chance to be right.

    A node's chance is the product of accept[depth - 1][rank] along its path; the root's is 1.

    Args:
        parents: -1 for node 0, the root; parents precede their children.
        ranks: which of its stream's candidates a node takes, 0 the most probable; the root's entry counts for nothing.
        accept: accept[d - 1][r], 0 to 1: how often the candidate of rank r at depth d is the main stream's choice,
            given that its parent was accepted.

    Raises:
        ConfigError: parents form no tree, two siblings have the same rank, or `accept` has no entry for a node.
    """
    _check_table(accept)
    if not parents or parents[0] != -1:
        raise ConfigError(f"parents are {tuple(parents)}; expected -1 for node 0, the root")
    if len(ranks) != len(parents):
        raise ConfigError(f"{len(ranks)} ranks for a tree of {len(parents)} nodes; expected one per node")
    depths, chances, taken = [0], [1.0], set()
    for node in range(1, len(parents)):
        parent, rank = parents[node], ranks[node]
        if not 0 <= parent < node:
            raise ConfigError(f"node {node} has parent {parent}; expected a node from 0 to {node - 1}")
        if (parent, rank) in taken:
            raise ConfigError(f"children of node {parent} have rank {rank} twice; siblings must differ")
        depth = depths[parent]
        if depth >= len(accept) or not 0 <= rank < len(accept[depth]):
            raise ConfigError(
                f"node {node} has rank {rank} at depth {depth + 1}; accept has no such entry (its rows have "
                f"{', '.join(str(len(row)) for row in accept) or 'no'} ranks)"
            )
        taken.add((parent, rank))
        depths.append(depth + 1)
        chances.append(chances[parent] * accept[depth][rank])
    return sum(chances)


def best_static_tree(accept: Sequence[Sequence[float]], nodes: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The tree of `nodes` nodes, root included, with the most expected tokens, as (parents, ranks).

    Best first, which is optimal because no node is likelier than its parent. Siblings are taken by falling chance,
    whatever the order of the row; exact ties go to the lowest rank, then to the earliest parent. The tree is smaller
    where `accept` (as in `expected_tokens`) has no more entries; the root's rank is 0.

    Raises:
        ConfigError: `nodes` is below 1, or an entry is not within 0 to 1.
    """
    whole("nodes", nodes, 1)
    _check_table(accept)
    # Sorting keeps equal chances in the order of their ranks.
    orders = [sorted(range(len(row)), key=row.__getitem__, reverse=True) for row in accept]
    parents, ranks, depths, chances = [-1], [0], [0], [1.0]
    # What may come next: -chance, rank, parent (together they break ties), and the place of the rank in its order.
    heap: list[tuple[float, int, int, int]] = []

    def offer(parent: int, place: int) -> None:
        depth = depths[parent]
        if depth < len(orders) and place < len(orders[depth]):
            rank = orders[depth][place]
            heapq.heappush(heap, (-chances[parent] * accept[depth][rank], rank, parent, place))

    offer(0, 0)
    while heap and len(parents) < nodes:
        cost, rank, parent, place = heapq.heappop(heap)
        parents.append(parent)
        ranks.append(rank)
        depths.append(depths[parent] + 1)
        chances.append(-cost)
        offer(parent, place + 1)
        offer(len(parents) - 1, 0)
    return tuple(parents), tuple(ranks)


def _check_table(accept: Sequence[Sequence[float]]) -> None:
    for depth, row in enumerate(accept, start=1):
        for rank, chance in enumerate(row):
            in_range(f"accept at depth {depth}, rank {rank},", chance, 0.0, 1.0)


def _slope(first: tuple[int, float], second: tuple[int, float]) -> float:
    return (second[1] - first[1]) / (second[0] - first[0])


def _above_zero(name: str, value: float) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < inf:
        raise ConfigError(f"{name} is {value!r}; expected a finite number above 0")
