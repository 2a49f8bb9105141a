"""Learning rates: warm-up, milestones, cosine, linear scaling with the batch."""

import math
from collections.abc import Callable

from mpigossip import config


def full_rate(section: config.Schedule, samples_per_step: int) -> tuple[float, str]:
    """The learning rate behind the warm-up, and what a user is told of it."""
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
    """Return the learning rate as a function of the step, from 0; it is always above 0.

    With scale "linear" the full rate is lr × samples_per_step / reference_batch (samples of all
    nodes together), else lr. During the warm-up of W = warmup_epochs × steps_per_epoch steps it
    grows linearly, from lr (from 0 where the full rate isn't above lr), to the full rate at step
    W − 1; with warmup_lr it stays at that, unscaled. After that

    * "constant": full
    * "milestones": full × factor^(milestones that the epoch has reached)
    * "cosine": final + (full − final)(1 + cos π(k − W)/(total_steps − W))/2

    Steps past the end have the rate of the last one. Goyal et al., "Accurate, large minibatch
    SGD" (2017), sections 2.1 and 2.2; Loshchilov and Hutter, "SGDR" (ICLR 2017), equation 5.
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
