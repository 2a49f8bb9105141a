"""Learning rates with warm-up, milestones or cosine, scaled with the batch; weights of mixing."""

import math
from collections.abc import Callable

from mpigossip import config


def full_rate(section: config.Schedule, samples_per_step: int) -> tuple[float, str]:
    """Return the learning rate after the warm-up, and a text that describes it.

    :param section: section `[schedule]`
    :param samples_per_step: samples of all nodes in a step
    """
    full = section.lr
    why = "not scaled"
    if section.scale == "linear":
        full *= samples_per_step / section.reference_batch
        scaled = f"{samples_per_step} samples / {section.reference_batch}"
        why = f"schedule.lr = {section.lr:g} x {scaled}"
    return full, f"{full:.4g}, {section.name} ({why})"


def schedule(
    section: config.Schedule, steps_per_epoch: int, total_steps: int, samples_per_step: int
) -> Callable[[int], float]:
    """Return the learning rate, which is always above 0, as a function of the step, from 0 on.

    In the formulas, lr and the like are settings of `[schedule]`. If ``scale`` is "linear", the
    full rate is lr × samples_per_step / reference_batch; otherwise it is lr. The warm-up has W =
    warmup_epochs × steps_per_epoch steps, rounded. At its step k, the rate is begin + (full −
    begin)(k + 1)/W, where begin is lr, or 0 if the full rate isn't above lr. If warmup_lr is set,
    the rate is warmup_lr, unscaled, during the whole warm-up. After the warm-up, the rate depends
    on ``name``:

    * "constant": full
    * "milestones": full × factor^(number of milestones that the epoch has reached)
    * "cosine": final_lr + (full − final_lr)(1 + cos π(k − W)/(total_steps − W))/2 at step k

    From step total_steps on, the rate has its value at step total_steps − 1. Sources: Goyal et al.,
    "Accurate, large minibatch SGD" (2017), sections 2.1 and 2.2; Loshchilov and Hutter, "SGDR"
    (ICLR 2017), equation 5.

    :param section: section `[schedule]`
    :param steps_per_epoch: number of steps per epoch
    :param total_steps: number of steps of all epochs
    :param samples_per_step: samples of all nodes in a step
    """
    full, _ = full_rate(section, samples_per_step)
    begin = section.lr if full > section.lr else 0.0
    warm = round(section.warmup_epochs * steps_per_epoch)
    last = max(total_steps - 1, 0)

    def rate(step: int) -> float:
        step = min(step, last)
        if step < warm and section.warmup_lr is not None:
            return section.warmup_lr
        if step < warm:
            return begin + (full - begin) * (step + 1) / warm
        if section.name == "milestones":
            reached = sum(step >= epoch * steps_per_epoch for epoch in section.milestones)
            return full * section.factor**reached
        if section.name == "cosine":
            progress = (step - warm) / max(total_steps - warm, 1)
            low = section.final_lr
            return low + (full - low) * (1 + math.cos(math.pi * progress)) / 2
        return full

    return rate
