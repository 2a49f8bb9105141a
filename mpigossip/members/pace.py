"""Members of unequal speed: number of chunks in a round, and weights of an average.

Both are pure functions. The numbers of chunks are in the records of rounds, so that a replay
computes the same averages.
"""

from collections.abc import Iterable


def chunks_of_round(own_s: float, others_s: Iterable[float], longest: int) -> int:
    """Return the number of chunks that a member trains in its next round.

    A member whose chunk takes t seconds trains k = max(1, min(K, ⌊T/t + ½⌋)) chunks, where T is the
    number of seconds that the slowest member needs for a chunk. The rounds of all members then take
    about T seconds.

    :param own_s: seconds t that this member needs for a chunk; 0: unknown, so that it trains one
    :param others_s: seconds that other members need for a chunk; 0: unknown
    :param longest: largest number K of chunks in a round
    """
    if not own_s:
        return 1
    slowest = max((own_s, *others_s))
    return max(1, min(longest, int(slowest / own_s + 0.5)))


def peer_weight(own: int, peer: int) -> float:
    """Return the weight of the peer's model x_j in the average (1 − w) x_i + w x_j.

    w = w_j/(w_i + w_j), where w_i = n_i · n_i/s_i follows from the n_i samples and s_i steps of the
    round after which x_i was published. This is the rule of Decoupled DiLoCo (arXiv 2604.21428),
    with samples for tokens. The batches of all members are equal, so that n_i/s_i is the same for
    all members, and w_i is proportional to the number of chunks in the round.

    If every member i always has the same w_i, the averages are a reversible Markov chain: repeated
    averaging leads to the mean of the models with weights in proportion to w_i.

    :param own: number of chunks in the last round of this member, at least 1
    :param peer: number of chunks in the round of the peer's model, at least 1
    :return: w; ½ if both rounds are equally long
    """
    return peer / (own + peer)
