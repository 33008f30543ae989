#!/usr/bin/env python3
"""Writes what torch's optimizers, schedules and DistributedSampler do, in golden/{optimizers,schedules,sampler}.safetensors.

    python3 tests/parity/make_training.py      # needs torch, safetensors, numpy

optimizers   NAME/PARAMETER (20, …): after each of 20 steps in f64, whose gradients and rates come from counter.py
schedules    NAME (200): the rate of each step
sampler      sizes (40, 7, 2): DistributedSampler's num_samples for N − 1, world − 1 and drop_last
             seen (40, 7, 2, 40): how often its ranks together see each sample in an unshuffled epoch
"""
import numpy as np
import torch
from torch.optim import lr_scheduler
from torch.utils.data import DistributedSampler

import counter
import golden

STEPS = 20
LENGTH = 200  # of a schedule
PARAMETERS = {"first.weight": (3, 5), "first.bias": (3,), "second.weight": (2, 17)}
OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=1),
    "sgd-decay": lambda p: torch.optim.SGD(p, lr=1, weight_decay=0.1),
    "sgd-momentum": lambda p: torch.optim.SGD(p, lr=1, momentum=0.9),
    "sgd-momentum-decay": lambda p: torch.optim.SGD(p, lr=1, momentum=0.9, weight_decay=0.01),
    "sgd-nesterov": lambda p: torch.optim.SGD(p, lr=1, momentum=0.8, nesterov=True),
    "sgd-nesterov-decay": lambda p: torch.optim.SGD(p, lr=1, momentum=0.9, weight_decay=0.05, nesterov=True),
    "adamw": lambda p: torch.optim.AdamW(p, lr=1),
    "adamw-betas": lambda p: torch.optim.AdamW(p, lr=1, betas=(0.8, 0.95), weight_decay=0.3),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=1),
    "rmsprop-momentum-decay": lambda p: torch.optim.RMSprop(p, lr=1, alpha=0.9, momentum=0.8, weight_decay=0.05),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=1),
    "adagrad-decay": lambda p: torch.optim.Adagrad(p, lr=1, eps=1e-6, weight_decay=0.1),
    "adamw-no-decay": lambda p: torch.optim.AdamW(p, lr=1, weight_decay=0),
    "adamw-eps": lambda p: torch.optim.AdamW(p, lr=1, eps=1e-2),
    "adam-decay": lambda p: torch.optim.Adam(p, lr=1, weight_decay=0.1),
    "nadam": lambda p: torch.optim.NAdam(p, lr=1),
    "nadam-decay": lambda p: torch.optim.NAdam(p, lr=1, betas=(0.8, 0.95), momentum_decay=0.1, weight_decay=0.1),
    # With momenta that differ from step to step, as a schedule's.
    "sgd-nesterov-cycled": lambda p: torch.optim.SGD(p, lr=1, momentum=0.9, nesterov=True),
    "adam-cycled": lambda p: torch.optim.Adam(p, lr=1),
    "adamw-cycled": lambda p: torch.optim.AdamW(p, lr=1),
    "adam-betas": lambda p: torch.optim.Adam(p, lr=1, betas=(0.8, 0.95), weight_decay=0.3),
}
CLIP_NORM = 4.0  # the gradients' norm is about 5, and 0.5 in every third step


def optimizers():
    rates = counter.uniform("rates", (STEPS,), -5, 0.0625)  # 1/32 … 3/32
    momenta = counter.uniform("momenta", (STEPS,), -3, 0.75)  # 5/8 … 7/8
    tensors = {}
    for name, make in OPTIMIZERS.items():
        for clipped in (False, True):
            case = name + ("-clipped" if clipped else "")
            parameters = {key: torch.nn.Parameter(torch.from_numpy(counter.initial("optimizers", key, shape)).double())
                          for key, shape in PARAMETERS.items()}
            optimizer = make(parameters.values())
            kept = {key: [] for key in parameters}
            for step in range(STEPS):
                for key, parameter in parameters.items():
                    gradient = counter.uniform(f"{key}/gradient/{step}", PARAMETERS[key], -3 if step % 3 == 2 else 0)
                    parameter.grad = torch.from_numpy(gradient).double()
                if clipped:
                    torch.nn.utils.clip_grad_norm_(parameters.values(), CLIP_NORM)
                group = optimizer.param_groups[0]
                group["lr"] = float(rates[step])
                if name.endswith("-cycled"):
                    momentum = float(momenta[step])
                    group.update({"betas": (momentum, 0.999)} if "betas" in group else {"momentum": momentum})
                optimizer.step()
                for key, parameter in parameters.items():
                    kept[key].append(parameter.detach().numpy().copy())
            for key, values in kept.items():
                tensors[f"{case}/{key}"] = np.stack(values).astype(np.float32)
    golden.save("optimizers", tensors)


def rates_of(make, lr, of="lr"):
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=lr, momentum=0.9)
    schedule = make(optimizer)
    rates = []
    for _ in range(LENGTH):
        rates.append(optimizer.param_groups[0][of])
        optimizer.step()
        schedule.step()
    return np.array(rates)


def after_warmup(steps, then):
    """torch's own: from lr / steps to lr in that many steps, then the other one from its start."""
    def make(optimizer):
        rise = lr_scheduler.LinearLR(optimizer, start_factor=1 / steps, end_factor=1, total_iters=steps - 1)
        return lr_scheduler.SequentialLR(optimizer, [rise, then(optimizer)], milestones=[steps])
    return make


def schedules():
    def constant(optimizer):
        return lr_scheduler.LambdaLR(optimizer, lambda step: 1)

    def cosine(steps, least):
        return lambda optimizer: lr_scheduler.CosineAnnealingLR(optimizer, T_max=steps, eta_min=least)

    def step(steps):
        return lambda optimizer: lr_scheduler.StepLR(optimizer, step_size=steps // 3, gamma=0.1)

    def linear(steps, end):
        return lambda optimizer: lr_scheduler.LinearLR(optimizer, start_factor=1, end_factor=end, total_iters=steps)

    def restarts(first, longer):
        return lambda optimizer: lr_scheduler.CosineAnnealingWarmRestarts(optimizer, T_0=first, T_mult=longer, eta_min=0.01)

    def multi_step(milestones, gamma):
        return lambda optimizer: lr_scheduler.MultiStepLR(optimizer, milestones=milestones, gamma=gamma)

    def polynomial(power):
        return lambda optimizer: lr_scheduler.PolynomialLR(optimizer, total_iters=LENGTH, power=power)

    def one_cycle(most, share, start, end):
        return lambda optimizer: lr_scheduler.OneCycleLR(optimizer, max_lr=most, total_steps=LENGTH, pct_start=share,
                                                         div_factor=start, final_div_factor=end, base_momentum=0.8,
                                                         max_momentum=0.95)

    golden.save("schedules", {
        "one-cycle": rates_of(one_cycle(0.3, 0.3, 25, 1e4), 0.3),
        "one-cycle-momentum": rates_of(one_cycle(0.3, 0.4, 25, 1e4), 0.3, of="momentum"),
        "one-cycle-of-three-quarters": rates_of(one_cycle(0.5, 0.75, 4, 10), 0.5),
        "cosine-restarts-of-4": rates_of(restarts(50, 1), 0.3),
        "cosine-restarts-of-140": rates_of(restarts(20, 2), 0.3),
        "step-of-4-stages": rates_of(lambda o: lr_scheduler.StepLR(o, step_size=50, gamma=0.5), 0.5),
        "multi-step": rates_of(multi_step([100, 150], 0.1), 0.5),
        "multi-step-warmup-5": rates_of(after_warmup(5, multi_step([39, 117, 156], 0.5)), 0.5),
        "exponential": rates_of(lambda o: lr_scheduler.ExponentialLR(o, gamma=0.05 ** (1 / LENGTH)), 0.3),
        "polynomial": rates_of(polynomial(2.5), 0.3),
        "constant": rates_of(constant, 0.1),
        "constant-warmup-5": rates_of(after_warmup(5, constant), 0.1),
        "cosine": rates_of(cosine(LENGTH, 0), 0.3),
        "cosine-min": rates_of(cosine(LENGTH, 0.02), 0.3),
        "cosine-warmup-5-min": rates_of(after_warmup(5, cosine(LENGTH - 5, 0.01)), 0.3),
        "cosine-warmup-2": rates_of(after_warmup(2, cosine(LENGTH - 2, 0)), 1.5),
        "step-of-198": rates_of(step(198), 0.5),
        "step-warmup-5": rates_of(after_warmup(5, step(LENGTH - 5)), 0.5),
        "linear": rates_of(linear(LENGTH, 0), 0.3),
        "linear-end": rates_of(linear(LENGTH, 0.25), 0.3),
        "linear-warmup-5-end": rates_of(after_warmup(5, linear(LENGTH - 5, 0.1)), 0.5),
    })


def sampler():
    most, worlds = 40, 7
    sizes = np.zeros((most, worlds, 2), np.int64)
    seen = np.zeros((most, worlds, 2, most), np.uint8)
    for n in range(1, most + 1):
        for world in range(1, worlds + 1):
            for drop_last in (False, True):
                at = (n - 1, world - 1, int(drop_last))
                for rank in range(world):
                    one = DistributedSampler(range(n), world, rank, shuffle=False, drop_last=drop_last)
                    samples = list(one)
                    assert len(samples) == one.num_samples
                    sizes[at] = one.num_samples
                    for sample in samples:
                        seen[at][sample] += 1
    golden.save("sampler", {"sizes": sizes, "seen": seen})


optimizers()
schedules()
sampler()
