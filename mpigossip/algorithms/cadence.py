"""Cadences: rules that decide whether a step stays local, gossips, or averages globally."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, Literal, NamedTuple

from mpigossip.algorithms.base import NoState
from mpigossip.config import BuilderSpec, JobError
from mpigossip.config.limits import (
    AboveZero,
    Count,
    NotNegative,
    Period,
    Positive,
    Share,
    Text,
    between,
)
from mpigossip.config.structure import Limit
from mpigossip.mixing.base import ExchangeKind

LongPeriod = Annotated[int, between(2, 10**6, "must be at least 2, at most 10^6")]
ByNode = Annotated[tuple[Period, ...], Limit(bool, "must name a number for each node")]
ModuleNames = Annotated[
    tuple[Text, ...],
    Limit(lambda v: len(v) > 1, "must name the modules of at least two fragments"),
]


LENIENT = 1 + 1e-9
"""Factor that corrects the rounding error of a quotient before it is rounded down."""


class FragmentSchedule(NamedTuple):
    """Steps at which P fragments are sent, and steps at which received fragments are applied.

    In each period of H steps, counted from 1, fragment p = 0 … P − 1 is sent at step ⌊(p + 1) H/P⌋.
    It is applied τ ≤ ⌊H/P⌋ steps later, so that at most one exchange is open at any time.
    """

    period: int = 1
    """Period H, in steps."""
    fragments: int = 1
    """Number of fragments P ≤ H."""
    delay: int = 0
    """Number of steps τ from sending a fragment to applying it."""
    modules: tuple[str, ...] = ()
    """For each fragment, the names of its modules, separated by commas; empty if the model is
    divided into fragments of equal size.
    """

    @property
    def setting(self) -> str:
        """Value of `cadence.fragments` as text."""
        return f"[{', '.join(map(repr, self.modules))}]" if self.modules else str(self.fragments)

    @property
    def is_whole_model(self) -> bool:
        """True if the whole model is sent at once and received in the same step."""
        return self.fragments == 1 and not self.delay

    def due(self, index: int) -> int | None:
        """Return the index of the fragment that is sent at step ``index``; None if there is none.

        Steps are counted from 0.
        """
        position = index % self.period + 1
        fragment = -(-position * self.fragments // self.period) - 1
        return fragment if (fragment + 1) * self.period // self.fragments == position else None

    def arriving(self, index: int) -> int | None:
        """Return the index of the fragment that is applied at step ``index``.

        The fragment was sent τ = ``delay`` steps before. The result is None if no fragment was
        sent then, or if τ = 0.
        """
        return self.due(index - self.delay) if 0 < self.delay <= index else None


class Cadence(NamedTuple):
    """Rule that decides what each step exchanges, with the same result on nodes of equal state.

    The state is a NamedTuple of plain numbers. It is written to checkpoints by field name.
    """

    init: Callable[[], Any]
    """Function () -> state that makes the first state."""
    kind: Callable[[Any, int], ExchangeKind]
    """Function (state, steps since the start) -> `ExchangeKind` of the next step. The start is the
    step at which the state was made, or the first step of the run, see ``counts_from_run``.
    """
    observe: Callable[..., Any]
    """Function (state, step, measured) -> state that is called once per step. In a GLOBAL step, the
    dict ``measured`` holds the values of ``measures``, which are equal on all nodes; in other steps
    it is empty.
    """
    measures: frozenset = frozenset()
    """Measurements that ``observe`` needs at GLOBAL steps: "variance" (‖mixed − sent‖²), "loss"."""
    kinds: frozenset = frozenset({ExchangeKind.GOSSIP})
    """All kinds of exchange that ``kind`` can return."""
    warning: Callable[[Any], str] = lambda state: ""
    """Function (state) -> warning for the user, or "" if there is none."""
    fragment_schedule: FragmentSchedule = FragmentSchedule()
    """Steps at which fragments of the model are sent and applied; default: the whole model."""
    periods: tuple[int, ...] = ()
    """Number of local steps of each node in a period, if nodes differ; otherwise empty."""
    longest_round: int = 1
    """Largest number of periods that a member trains before it exchanges (`mpigossip join`)."""
    counts_from_run: bool = False
    """True if ``kind`` gets the number of steps since the first step of the run, also if the state
    was made later. It can then recognize the last step of the run.
    """

    @property
    def is_adaptive(self) -> bool:
        """True if the kind of a step depends on more than its number."""
        return self.init is not NoState

    @property
    def local_fraction(self) -> float:
        """Number of local steps of a node, averaged over nodes, as a fraction of the largest."""
        return sum(self.periods) / (max(self.periods) * len(self.periods)) if self.periods else 1.0

    def idle_nodes(self, index: int, nodes: Sequence[int]) -> tuple[int, ...]:
        """Return which of the given nodes make no local step at step ``index``.

        In a period of H = max H_i steps, node i makes H_i local steps. They are spread evenly, and
        the last step of the period is always one of them.

        :param index: number of steps since the start
        :param nodes: numbers of the nodes
        :return: positions of the idle nodes in ``nodes``
        """
        if not self.periods:
            return ()
        period = max(self.periods)
        before = index % period
        steps = [self.periods[node] for node in nodes]
        active = [(before + 1) * n // period > before * n // period for n in steps]
        return tuple(i for i, is_active in enumerate(active) if not is_active)


def fixed_schedule(kind: Callable[[int], ExchangeKind], *kinds: ExchangeKind) -> Cadence:
    """Return a cadence that depends on the step number alone.

    :param kind: function that is called with the number of steps since the start and returns the
        kind of the exchange
    :param kinds: all kinds that this function returns
    """
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
    """Never exchange: the n nodes train separately."""
    return fixed_schedule(lambda index: ExchangeKind.LOCAL, ExchangeKind.LOCAL)


def _each(period: int, last: ExchangeKind, others: ExchangeKind) -> Cadence:
    """Return a cadence with ``last`` at every ``period``-th step and ``others`` in between."""
    if period == 1:
        return fixed_schedule(lambda index: last, last)
    return fixed_schedule(lambda index: others if (index + 1) % period else last, last, others)


def _in_turn(
    kind: ExchangeKind, period: int | ByNode, fragments: int | ModuleNames, delay: int
) -> Cadence:
    """Return a cadence that exchanges each fragment once per ``period`` and is otherwise local.

    :param kind: kind of the exchanges
    :param period: H in steps, or the number of local steps of each node in a period
    :param fragments: number of fragments, or the modules of each
    :param delay: number of steps from sending a fragment to applying it
    """
    periods: tuple[int, ...] = () if isinstance(period, int) else period
    longest = period if isinstance(period, int) else max(period)
    if isinstance(fragments, int):
        schedule = FragmentSchedule(longest, fragments, delay)
    else:
        schedule = FragmentSchedule(longest, len(fragments), delay, fragments)
    if schedule.is_whole_model:
        return _each(longest, kind, ExchangeKind.LOCAL)._replace(periods=periods)
    kinds = kind, ExchangeKind.LOCAL
    cadence = fixed_schedule(lambda index: kinds[schedule.due(index) is None], *kinds)
    return cadence._replace(fragment_schedule=schedule, periods=periods)


def every(
    *,
    period: Literal["auto"] | Period | ByNode = 4,
    fragments: Positive | ModuleNames = 1,
    delay: Count = 0,
    shortest: Period = 4,
    longest: Period = 32,
) -> Cadence:
    """Gossip at every ``period``-th step; the steps in between are local.

    If ``period`` is a list with a number H_i for each node i, all nodes exchange at every max
    H_i-th step. In between, node i makes H_i local steps, spread evenly, and is idle in the other
    steps, so that slow nodes keep pace. The loss that is minimized then weights the data of each
    node by its share of all local steps.

    With P = ``fragments`` > 1, each fragment of the model is exchanged once per period H, at its
    own offset (Streaming DiLoCo, arXiv 2501.18512), so that a step sends at most 1/P of the model.
    If ``fragments`` is a list, each entry names the modules or parameters of a fragment, separated
    by commas, as in ``["embedding,head", "blocks.0", "blocks.1"]``. Each parameter has to be in
    exactly one fragment. All messages have the size of the largest fragment.

    The exchange of a fragment stays open for τ = ``delay`` steps. It is then applied as x ← γ ·
    mixed + (1 − γ) · x, with γ = ``algorithm.blend`` and with the local steps made meanwhile in x.

    If ``period`` is "auto", which only members can use (`mpigossip join`), the H of each member
    follows its speed up to ``longest``, so that the rounds of members take similar times. The
    slowest member makes ``shortest`` steps; the others make a multiple of it.

    :param period: H in steps, or a list of H_i for each node; "auto": H of members follows speed
    :param fragments: P, number of fragments of equal size, or a list with the modules of each
    :param delay: τ in steps, at most ⌊H/P⌋
    :param shortest: smallest H of a member with period = "auto", and steps in a chunk
    :param longest: largest H of a member with period = "auto", at least ``shortest``
    :raises JobError: if ``longest`` is smaller than ``shortest``
    """
    if period == "auto":
        if longest < shortest:
            raise JobError(
                f"cadence.longest = {longest}: is smaller than cadence.shortest = {shortest}; give "
                "at least this number"
            )
        cadence = _in_turn(ExchangeKind.GOSSIP, shortest, fragments, delay)
        return cadence._replace(longest_round=max(1, longest // shortest))
    return _in_turn(ExchangeKind.GOSSIP, period, fragments, delay)


def periods_of(options: Mapping[str, Any]) -> tuple[int, ...]:
    """Return the H of each node if the options of `[cadence]` give a list of them; otherwise ().

    :param options: settings of the section by name
    """
    period = options.get("period")
    is_list = isinstance(period, Sequence) and not isinstance(period, str)
    return tuple(period) if is_list else ()


def period_of(options: Mapping[str, Any]) -> int:
    """Return the period H of the options of `[cadence]`, in steps.

    For H = "auto", this is the smallest H; for a list with the H of each node, the largest; and
    without an H, 1.

    :param options: settings of the section by name
    """
    period = options.get("period", 1)
    if period == "auto":
        return int(options.get("shortest", 4))
    return int(max(periods_of(options), default=period))


def cpsgd(
    *, period: Period | ByNode = 8, fragments: Positive | ModuleNames = 1, delay: Count = 0
) -> Cadence:
    """Average over all nodes at every ``period``-th step, as periodic averaging does.

    :param period: number of steps, or a list with a number for each node, as in :func:`every`
    :param fragments: number of fragments, or the modules of each, as in :func:`every`
    :param delay: number of steps for which an exchange stays open, as in :func:`every`
    """
    return _in_turn(ExchangeKind.GLOBAL, period, fragments, delay)


def gossip_pga(*, period: Period = 6) -> Cadence:
    """Gossip, but average over all nodes at every ``period``-th step.

    This is Gossip-PGA (Chen et al., ICML 2021).
    """
    return _each(period, ExchangeKind.GLOBAL, ExchangeKind.GOSSIP)


def halves(*, length: Positive | None = None) -> Cadence:
    """Alternate between ``length`` local steps and ``length`` gossip steps, as DeFacto needs.

    :param length: number of steps; None: the period of the graph, which the job inserts, or 1
    """
    half = length or 1
    return fixed_schedule(
        lambda index: ExchangeKind.GOSSIP if index // half % 2 else ExchangeKind.LOCAL,
        ExchangeKind.LOCAL,
        ExchangeKind.GOSSIP,
    )


class Varying(NamedTuple):
    """State of :func:`adpsgd`: the current period, and the measured variance that determines it."""

    period: int
    since: int
    """Number of steps since the last global average."""
    rates: float
    """Sum of the learning rates of the steps since the last global average."""
    level: float
    """Mean of the samples of S/lr, where S is the variance between nodes at a global average."""
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
    """Average over all nodes periodically, with a period that follows the measured variance.

    This is ADPSGD (Jiang & Agrawal 2020). Each global average measures the variance S = (1/n) Σ_i
    ‖x̄ − x_i‖² of the models x_i around their mean x̄. At first the period is constant, and C, the
    mean of S/lr, is sampled. Afterwards, the period grows by one if S < low · lr · C and shrinks by
    one if S > high · lr · C.

    lr is the mean learning rate of the steps *since the last average*, because S depends on these
    steps alone. If lr were the current rate, the first average after a drop of the rate would
    compare an S that arose at the old rate with a threshold for the new rate, and shorten the
    period without reason.

    :param period: number of steps at the start
    :param sampling: fraction of ``total`` during which C is sampled
    :param skip: fraction of the sampling steps, from the first, that is left out of C. If a network
        learns nothing at first, its nodes hardly diverge, and a C sampled there is too small: in a
        test with LeNet, the period then fell to 1
    :param low: factor of the lower threshold
    :param high: factor of the upper threshold
    :param total: number of steps of the run; None: the number of steps in all epochs of the job,
        even if `run.steps` ends the run earlier. A custom loop has to pass a number
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
        # At a learning rate of 0, nodes do not diverge, so S/lr means nothing.
        if step.index < first_sample or not rates:
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
            f"the period of adpsgd has fallen to {state.period}, below the initial {period}: nodes "
            f"diverge faster than during sampling (‖x̄ − x_i‖²/lr was {state.level:.2g}); "
            "increase cadence.sampling or cadence.skip to sample later, or decrease schedule.lr"
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
    """State of :func:`gossip_aga`: the current period, and the loss at the first averages."""

    period: int
    since: int
    """Number of steps since the last global average."""
    first_loss: float
    """Running mean of the losses at the first averages."""
    samples: int


def gossip_aga(*, period: Period = 4, warmup: Positive = 4, longest: Positive = 64) -> Cadence:
    """Gossip, and average over all nodes with a period that grows as the loss falls.

    This is Gossip-AGA (Chen et al., ICML 2021). F is the mean loss of all nodes at a global
    average. At the first ``warmup`` averages, F₀ ← ½ (F₀ + F), with F₀ = F at the first of them.
    Afterwards, the period becomes ⌈``period`` · F₀/F⌉, at least 1 and at most ``longest``, or
    ``longest`` if F ≤ 0.

    :param period: number of steps at the start
    :param warmup: number of global averages that determine F₀
    :param longest: largest period, in steps
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


class ByRate(NamedTuple):
    """State of :func:`qsr`: the present period, and the learning rate of the step before."""

    period: int
    since: int
    """Number of steps since the last exchange."""
    rate: float


def qsr(
    *,
    period: LongPeriod = 4,
    alpha: AboveZero = 0.0175,
    kind: Literal["global", "gossip"] = "global",
    total: Positive | None = None,
) -> Cadence:
    """Exchange with a period that grows as the square of the inverse learning rate.

    This is the quadratic synchronization rule, QSR (Gu et al., ICLR 2024, arXiv 2310.14423):

    H = max(H₀, ⌊(α/η)²⌋),

    where η is the learning rate of the first step of a period and H its number of steps. The last
    step of a period exchanges, and so does the last step of the run. The learning rate is the same
    on all nodes, and so is H, without a message. In a custom loop, all ranks have to use the same
    schedule of the rate: otherwise, they exchange at different steps and wait for each other until
    the time limit.

    The first period has H₀ steps. A period in which the learning rate rises ends after H₀ steps, or
    with the next step if it is longer already. H is therefore not long in a warm-up, which begins
    at low rates, and becomes H₀ again if a schedule restarts. The paper keeps the H of the largest
    rate during a warm-up instead; both are H₀ if α² ≤ H₀ η² at the largest rate η.

    (α/η)² is rounded down after a relative increase by 1e-9, so that α = 0.3 and η = 0.1 give 9.

    :param period: H₀ in steps, at least 2, because a step is chosen to be local or not before its
        learning rate is known, and the rate of the first step determines H
    :param alpha: α, in units of the learning rate. The paper uses 0.2 to 0.25 for SGD with peak
        rates of 0.8 to 1.6, and 0.01 to 0.0175 for AdamW with a peak rate of 0.008
    :param kind: "global": average over all nodes; "gossip": make a round along the graph
    :param total: number of steps of the run; None: the number of steps in all epochs of the job,
        even if `run.steps` ends the run earlier, and in a custom loop no step is known to be the
        last one
    """
    exchange = ExchangeKind.GLOBAL if kind == "global" else ExchangeKind.GOSSIP

    def length(rate: float) -> int:
        limit = 10**9
        return limit if rate * limit <= alpha else max(period, int((alpha / rate) ** 2 * LENIENT))

    def kind_of(state: ByRate, index: int) -> ExchangeKind:
        is_last = state.since + 1 >= state.period or index + 1 == total
        return exchange if is_last else ExchangeKind.LOCAL

    def observe(state: ByRate, step, measured) -> ByRate:
        rate = float(step.lr)
        if step.kind is not ExchangeKind.LOCAL:
            return ByRate(period, 0, rate)
        if rate > state.rate:
            return ByRate(period, state.since + 1, rate)
        chosen = state.period if state.since else length(rate)
        return ByRate(chosen, state.since + 1, rate)

    return Cadence(
        lambda: ByRate(period, 0, 0.0),
        kind_of,
        observe,
        kinds=frozenset({ExchangeKind.LOCAL, exchange}),
        counts_from_run=True,
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
    "qsr": BuilderSpec(qsr, follows={"total": lambda known: known.total}),
    "halves": BuilderSpec(halves, follows={"length": lambda known: known.graph.period}),
}
"""Builder of each cadence, by its name in `cadence.name`: builder(*, option=…) -> Cadence."""
