"""Cadences: whether a step stays local, gossips, or averages globally."""

import math
from collections.abc import Callable, Sequence
from typing import Annotated, Any, NamedTuple

from mpigossip.algorithms.base import NoState
from mpigossip.config import BuilderSpec
from mpigossip.config.limits import Count, NotNegative, Period, Positive, Share
from mpigossip.config.toml import Limit
from mpigossip.mixing.base import ExchangeKind

ByNode = Annotated[tuple[Period, ...], Limit(bool, "must name a number for each node")]


class FragmentSchedule(NamedTuple):
    """Steps at which P fragments are sent, and at which what was received is applied.

    Of a period of H steps, counted from 1, fragment p = 0 … P − 1 is sent at step ⌊(p + 1) H/P⌋,
    and applied τ ≤ ⌊H/P⌋ steps later: no two exchanges are open at once.
    """

    period: int = 1
    """H"""
    fragments: int = 1
    """P ≤ H"""
    delay: int = 0
    """τ"""

    @property
    def is_whole_model(self) -> bool:
        """Return whether the whole model is sent at once, and waited for."""
        return self.fragments == 1 and not self.delay

    def due(self, index: int) -> int | None:
        """Return the fragment that is sent at step ``index``, counted from 0."""
        place = index % self.period + 1
        fragment = -(-place * self.fragments // self.period) - 1
        return fragment if (fragment + 1) * self.period // self.fragments == place else None

    def arriving(self, index: int) -> int | None:
        """Return the fragment that was sent τ steps before step ``index``, where τ > 0."""
        return self.due(index - self.delay) if 0 < self.delay <= index else None


class Cadence(NamedTuple):
    """Decides what each step exchanges, equally on all nodes.

    The state is a NamedTuple of plain numbers, checkpointed by name.
    """

    init: Callable[[], Any]
    """() -> state"""
    kind: Callable[[Any, int], ExchangeKind]
    """(state, steps since start) -> Kind"""
    observe: Callable[..., Any]
    """(state, step, measured: dict) -> state; once a step, with the same numbers everywhere"""
    measures: frozenset = frozenset()
    """measurements that it needs at GLOBAL steps: "variance" (‖mixed − sent‖²), "loss" """
    kinds: frozenset = frozenset({ExchangeKind.GOSSIP})
    """the kinds that it can give"""
    warning: Callable[[Any], str] = lambda state: ""
    """(state) -> a warning for the user, or "" """
    fragment_schedule: FragmentSchedule = FragmentSchedule()
    """fragments of its exchanges, and the steps at which they are applied"""
    periods: tuple[int, ...] = ()
    """local steps of each node in a period, where they differ"""

    @property
    def local_fraction(self) -> float:
        """Mean number of local steps of a node, as a fraction of the largest."""
        return sum(self.periods) / (max(self.periods) * len(self.periods)) if self.periods else 1.0

    def idle_nodes(self, index: int, nodes: Sequence[int]) -> tuple[int, ...]:
        """Return the indexes in ``nodes`` of those that make no local step at a step since start.

        Of a period's H = max H_i steps node i makes H_i, evenly spread, and the last one always.
        """
        if not self.periods:
            return ()
        period = max(self.periods)
        before = index % period
        steps = [self.periods[node] for node in nodes]
        made = [(before + 1) * own // period > before * own // period for own in steps]
        return tuple(place for place, does in enumerate(made) if not does)


def fixed_schedule(kind: Callable[[int], ExchangeKind], *kinds: ExchangeKind) -> Cadence:
    """A cadence that depends on the step's number alone and gives these kinds."""
    return Cadence(
        NoState,
        lambda state, index: kind(index),
        lambda state, step, measured: state,
        kinds=frozenset(kinds),
    )


def always() -> Cadence:
    """Gossip at every step."""
    return fixed_schedule(lambda index: ExchangeKind.GOSSIP, ExchangeKind.GOSSIP)


def globally() -> Cadence:
    """Average over all nodes at every step, as parallel SGD does."""
    return fixed_schedule(lambda index: ExchangeKind.GLOBAL, ExchangeKind.GLOBAL)


def never() -> Cadence:
    """No exchange at all: n separate trainings."""
    return fixed_schedule(lambda index: ExchangeKind.LOCAL, ExchangeKind.LOCAL)


def _each(period: int, last: ExchangeKind, others: ExchangeKind) -> Cadence:
    """``last`` at every period-th step, ``others`` between."""
    if period == 1:
        return fixed_schedule(lambda index: last, last)
    return fixed_schedule(lambda index: others if (index + 1) % period else last, last, others)


def _in_turn(kind: ExchangeKind, period: int | ByNode, fragments: int, delay: int) -> Cadence:
    """Exchanges of a kind at every ``period``-th step of each fragment, local steps between."""
    own: tuple[int, ...] = () if isinstance(period, int) else period
    longest = period if isinstance(period, int) else max(period)
    schedule = FragmentSchedule(longest, fragments, delay)
    if schedule.is_whole_model:
        return _each(longest, kind, ExchangeKind.LOCAL)._replace(periods=own)
    kinds = kind, ExchangeKind.LOCAL
    made = fixed_schedule(lambda index: kinds[schedule.due(index) is None], *kinds)
    return made._replace(fragment_schedule=schedule, periods=own)


def every(*, period: Period | ByNode = 4, fragments: Positive = 1, delay: Count = 0) -> Cadence:
    """Gossip at every ``period``-th step, local steps between.

    ``period`` as a list, H_i of each node i: all exchange at every max H_i-th step, and node i
    makes H_i of these steps, evenly spread, and rests in the others. So nodes that are slow keep
    pace; what is minimized weighs each node's data by its share of all steps.

    The model in P = ``fragments``: each is exchanged once in the period H, at an offset of its own
    (Streaming DiLoCo, arXiv 2501.18512), so that a step sends 1/P of it at most. The exchange of
    a fragment stays open for τ = ``delay`` steps, at most ⌊H/P⌋, and is then applied as
    x ← α · mixed + (1 − α) · x, α = ``algorithm.blend``, x with the local steps made meanwhile.
    """
    return _in_turn(ExchangeKind.GOSSIP, period, fragments, delay)


def cpsgd(*, period: Period | ByNode = 8, fragments: Positive = 1, delay: Count = 0) -> Cadence:
    """Periodic averaging with a constant period: a global average at every ``period``-th step.

    A ``period`` for each node, ``fragments`` and ``delay`` as in :func:`every`.
    """
    return _in_turn(ExchangeKind.GLOBAL, period, fragments, delay)


def gossip_pga(*, period: Period = 6) -> Cadence:
    """Gossip-PGA (Chen et al., ICML 2021): gossip, and a global average at every period-th step."""
    return _each(period, ExchangeKind.GLOBAL, ExchangeKind.GOSSIP)


def halves(*, length: Positive | None = None) -> Cadence:
    """``length`` local steps, then ``length`` gossip steps; unset: the graph's period (DeFacto)."""
    half = length or 1
    return fixed_schedule(
        lambda index: ExchangeKind.GOSSIP if index // half % 2 else ExchangeKind.LOCAL,
        ExchangeKind.LOCAL,
        ExchangeKind.GOSSIP,
    )


class Varying(NamedTuple):
    """The present period, the steps of it so far, and the variance that it is adapted to."""

    period: int
    since: int
    """steps since the last global average"""
    rates: float
    """sum of the learning rates of these steps"""
    level: float
    """mean of the samples"""
    samples: int


def adpsgd(
    *,
    period: Period = 4,
    sampling: Share = 0.25,
    skip: Share = 0.5,
    low: NotNegative = 0.7,
    high: NotNegative = 1.3,
    total: Positive | None = None,
) -> Cadence:
    """ADPSGD (Jiang & Agrawal 2020): periodic averaging, the period by the measured variance.

    At a global average S = (1/n) Σ_i ‖x̄ − x_i‖² is measured. In the first ``sampling`` share of
    ``total`` steps (unset: the run's) the period stays, and C is the mean of S/lr, but for the
    ``skip`` share of these steps, with which it begins: where a network first learns nothing, as
    LeNet on a plateau, its nodes hardly part, and with a C from there the period fell to 1. Later
    S < low · lr · C lengthens the period by one, S > high · lr · C shortens it. lr is the mean
    rate of the steps *since the last average*, all that S depends on: with the present rate, the
    first average after a drop of the rate would compare a spread made at the old rate with a
    threshold of the new one, and shorten the period for nothing.
    """
    last_sample = sampling * (total or 0)
    first_sample = skip * last_sample

    def kind(state: Varying, index: int) -> ExchangeKind:
        return ExchangeKind.LOCAL if state.since + 1 < state.period else ExchangeKind.GLOBAL

    def observe(state: Varying, step, measured) -> Varying:
        since = state.since + 1
        rates = state.rates + step.lr
        if step.kind is not ExchangeKind.GLOBAL:
            return state._replace(since=since, rates=rates)
        ratio = measured["variance"] * since / (rates or 1.0)
        period = state.period
        if step.index < first_sample or not rates:  # at rate 0 nodes don't part
            return state._replace(since=0, rates=0.0)
        if step.index < last_sample or not state.samples:
            samples = state.samples + 1
            level = state.level + (ratio - state.level) / samples
            return Varying(period, 0, 0.0, level, samples)
        period += (ratio < low * state.level) - (ratio > high * state.level)
        return Varying(max(period, 1), 0, 0.0, state.level, state.samples)

    def warning(state: Varying) -> str:
        if state.period >= period:
            return ""
        return (
            f"the period of adpsgd has fallen to {state.period}, below its start, {period}: nodes "
            f"part faster than while it was sampled (‖x̄ − x_i‖²/lr was {state.level:.2g}); a "
            "larger cadence.sampling or cadence.skip samples later, a smaller schedule.lr parts "
            "them less"
        )

    return Cadence(
        lambda: Varying(period, 0, 0.0, 0.0, 0),
        kind,
        observe,
        measures=frozenset({"variance"}),
        kinds=frozenset({ExchangeKind.LOCAL, ExchangeKind.GLOBAL}),
        warning=warning,
    )


class ByLoss(NamedTuple):
    """The present period, the steps of it so far, and the loss of the first averages."""

    period: int
    since: int
    """steps since the last global average"""
    first_loss: float
    """running mean of the losses at the first averages"""
    samples: int


def gossip_aga(*, period: Period = 4, warmup: Positive = 4, longest: Positive = 64) -> Cadence:
    """Gossip-AGA (Chen et al., ICML 2021): Gossip-PGA with a period that grows as the loss falls.

    At a global average, F the mean loss of all nodes: in the first ``warmup`` ones F₀ ← ½ (F₀ + F)
    (F₀ = F at the first), later the period becomes ⌈``period`` · F₀/F⌉, at most ``longest``.
    """

    def kind(state: ByLoss, index: int) -> ExchangeKind:
        return ExchangeKind.GOSSIP if state.since + 1 < state.period else ExchangeKind.GLOBAL

    def observe(state: ByLoss, step, measured) -> ByLoss:
        if step.kind is not ExchangeKind.GLOBAL:
            return state._replace(since=state.since + 1)
        loss = measured["loss"]
        samples = state.samples
        if samples < warmup:
            first = 0.5 * (state.first_loss + loss) if samples else loss
            return ByLoss(state.period, 0, first, samples + 1)
        grown = math.ceil(period * state.first_loss / loss) if loss > 0 else longest
        return ByLoss(min(max(grown, 1), longest), 0, state.first_loss, samples)

    return Cadence(
        lambda: ByLoss(period, 0, 0.0, 0),
        kind,
        observe,
        measures=frozenset({"loss"}),
        kinds=frozenset({ExchangeKind.GOSSIP, ExchangeKind.GLOBAL}),
    )


BUILDERS: dict[str, BuilderSpec | Callable[..., Cadence]] = {
    "always": always,
    "global": globally,
    "never": never,
    "every": every,
    "cpsgd": cpsgd,
    "adpsgd": BuilderSpec(adpsgd, follows={"total": lambda known: known.total}),
    "gossip-pga": gossip_pga,
    "gossip-aga": gossip_aga,
    "halves": BuilderSpec(halves, follows={"length": lambda known: known.graph.period}),
}
"""Every cadence by name: builder(*, option=…) -> Cadence."""
