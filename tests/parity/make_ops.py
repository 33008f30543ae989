#!/usr/bin/env python3
"""Writes what single operators and their gradients come to, in golden/ops.safetensors.

    python3 tests/parity/make_ops.py      # needs torch, safetensors, numpy

Each is followed by the mean squared error against a target, in f64. Inputs, targets and parameters come from
counter.py: "OP/x" uniform in ±1, "OP/target" in ±1, parameters as counter.initial says.
"""
import torch
import torch.nn.functional as F
from torch import nn

import counter
import golden


class Attention(nn.Module):
    def __init__(self, heads):
        super().__init__()
        self.heads = heads

    def forward(self, qkv):
        n, t, c = qkv.shape
        q, k, v = (part.view(n, t, self.heads, -1).transpose(1, 2) for part in qkv.split(c // 3, 2))
        return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(n, t, c // 3)


def recurrent(kind, *sizes, lengths=None, **options):
    """A layer of torch's without the states that it also returns, over packed sequences where lengths are given."""

    class Layer(kind):
        def forward(self, x):
            if lengths is None:
                return super().forward(x)[0]
            packed = nn.utils.rnn.pack_padded_sequence(x, torch.tensor(lengths), True, enforce_sorted=False)
            return nn.utils.rnn.pad_packed_sequence(super().forward(packed)[0], True, total_length=x.shape[1])[0]

    return Layer(*sizes, batch_first=True, **options)


class Positions(nn.Embedding):
    def forward(self, x):
        return x + self.weight[: x.shape[1]]


class Conv1d(nn.Conv1d):
    """Of (N, T, C)."""

    def forward(self, x):
        return super().forward(x.transpose(1, 2)).transpose(1, 2)


class Both(nn.Module):
    """Attention without a mask over (N, T, 3 C), its heads turned by rotary positions as Hugging Face turns them."""

    def forward(self, qkv):
        n, t, c = qkv.shape
        q, k, v = (part.view(n, t, 3, -1).transpose(1, 2) for part in qkv.split(c // 3, 2))
        half = q.shape[-1] // 2
        angles = torch.arange(t).double()[:, None] * 10000.0 ** (-torch.arange(half).double() / half)
        cosine, sine = angles.cos().repeat(1, 2), angles.sin().repeat(1, 2)
        turned = [x * cosine + torch.cat((-x[..., half:], x[..., :half]), -1) * sine for x in (q, k)]
        return F.scaled_dot_product_attention(*turned, v).transpose(1, 2).reshape(n, t, c // 3)


class Scale(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(5, 1))

    def forward(self, x):
        return (x * self.weight + self.weight.square()).mean(2)


class Function(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.forward = function


def linear_gelu():
    return nn.Sequential(nn.Linear(6, 9), nn.GELU("tanh"))


OPS = {
    "linear": (lambda: nn.Linear(7, 3), (5, 7)),
    "linear-3d": (lambda: nn.Linear(7, 12), (2, 5, 7)),
    "linear-no-bias": (lambda: nn.Linear(33, 17, bias=False), (4, 33)),
    "linear-gelu": (linear_gelu, (3, 6)),
    "conv-3x3": (lambda: nn.Conv2d(3, 5, 3, padding=1), (2, 3, 6, 7)),
    "conv-3x3-stride-2": (lambda: nn.Conv2d(16, 32, 3, stride=2, padding=1, bias=False), (2, 16, 9, 8)),
    "conv-1x1-stride-2": (lambda: nn.Conv2d(16, 24, 1, stride=2, bias=False), (3, 16, 5, 5)),
    "conv-7x7-stride-2": (lambda: nn.Conv2d(3, 8, 7, stride=2, padding=3), (1, 3, 17, 15)),
    "conv-uneven": (lambda: nn.Conv2d(4, 3, (5, 2), stride=(2, 1), padding=(2, 1)), (2, 4, 9, 5)),
    "conv-groups": (lambda: nn.Conv2d(6, 9, 3, padding=1, groups=3), (2, 6, 6, 7)),
    "conv-depthwise": (lambda: nn.Conv2d(32, 32, 3, stride=2, padding=1, groups=32, bias=False), (2, 32, 9, 8)),
    "conv-depthwise-twice": (lambda: nn.Conv2d(5, 10, (5, 2), stride=(2, 1), padding=(2, 1), groups=5), (2, 5, 9, 5)),
    "max-pool-2": (lambda: nn.MaxPool2d(2), (2, 3, 6, 9)),
    "max-pool-3-stride-2": (lambda: nn.MaxPool2d(3, 2, 1), (2, 5, 8, 7)),
    "avg-pool-2": (lambda: nn.AvgPool2d(2), (2, 3, 6, 9)),
    "avg-pool-3-stride-2": (lambda: nn.AvgPool2d(3, 2, 1), (2, 5, 8, 7)),
    "adaptive-avg-pool-7": (lambda: nn.AdaptiveAvgPool2d(7), (2, 3, 3, 10)),
    "adaptive-avg-pool-uneven": (lambda: nn.AdaptiveAvgPool2d((4, 5)), (2, 5, 9, 3)),
    "batch-norm-2d": (lambda: nn.BatchNorm2d(6), (3, 6, 4, 5)),
    "batch-norm-2d-evaluated": (lambda: nn.BatchNorm2d(6).eval(), (3, 6, 4, 5)),
    "batch-norm-1d": (lambda: nn.BatchNorm1d(6), (9, 6)),
    "layer-norm": (lambda: nn.LayerNorm(24), (2, 5, 24)),
    "layer-norm-wide": (lambda: nn.LayerNorm(771), (3, 771)),
    "rms-norm": (lambda: nn.RMSNorm(24, eps=1e-6), (2, 5, 24)),
    "group-norm": (lambda: nn.GroupNorm(3, 6), (2, 6, 4, 5)),
    "conv1d": (lambda: Conv1d(3, 5, 3, stride=2, padding=1), (2, 9, 3)),
    "conv1d-groups": (lambda: Conv1d(6, 4, 3, stride=2, padding=1, groups=2), (2, 9, 6)),
    "conv-transpose-groups": (lambda: nn.ConvTranspose2d(6, 4, 3, 2, 1, output_padding=1, groups=2), (2, 6, 4, 5)),
    "conv-transpose": (lambda: nn.ConvTranspose2d(3, 5, 3, 2, 1, output_padding=1), (2, 3, 4, 5)),
    "conv-transpose-uneven": (
        lambda: nn.ConvTranspose2d(4, 3, (4, 2), (2, 1), (1, 0), output_padding=(1, 0), bias=False), (2, 4, 5, 3)),
    "rotary-attention": (lambda: Both(), (2, 13, 72)),
    "broadcast": (lambda: Scale(), (3, 5, 4)),
    "softmax": (lambda: nn.Softmax(1), (2, 7, 5)),
    "log-softmax": (lambda: nn.LogSoftmax(-1), (3, 50)),
    "amax": (lambda: Function(lambda x: x.amax((0, 2))), (3, 5, 4)),
    "pow": (lambda: Function(lambda x: x**3), (3, 50)),
    "clamp": (lambda: Function(lambda x: x.clamp(-0.4, 0.6)), (3, 50)),
    "sigmoid": (lambda: nn.Sigmoid(), (3, 50)),
    "tanh": (lambda: nn.Tanh(), (3, 50)),
    "relu": (lambda: nn.ReLU(), (3, 50)),
    "relu6": (lambda: Function(lambda x: F.relu6(10 * x)), (3, 50)),
    "silu": (lambda: nn.SiLU(), (3, 50)),
    "gelu-erf": (lambda: nn.GELU(), (3, 50)),
    "gelu-tanh": (lambda: nn.GELU("tanh"), (3, 50)),
    "flatten": (lambda: nn.Sequential(nn.Flatten(), nn.Linear(60, 4)), (2, 3, 4, 5)),
    "attention": (lambda: Attention(3), (2, 13, 72)),
    "attention-long": (lambda: Attention(2), (1, 150, 96)),
    "positions": (lambda: Positions(9, 8), (2, 7, 8)),
    "lstm": (lambda: recurrent(nn.LSTM, 5, 7, 2), (3, 6, 5)),
    "lstm-bidirectional": (lambda: recurrent(nn.LSTM, 5, 7, 2, bidirectional=True), (3, 6, 5)),
    "lstm-packed": (lambda: recurrent(nn.LSTM, 5, 7, 2, lengths=LENGTHS, bidirectional=True), (3, 6, 5)),
    "gru": (lambda: recurrent(nn.GRU, 5, 7, 2), (3, 6, 5)),
    "gru-wide": (lambda: recurrent(nn.GRU, 33, 65), (2, 4, 33)),
    "gru-no-bias": (lambda: recurrent(nn.GRU, 3, 9, 2, bias=False), (2, 5, 3)),
    "gru-bidirectional": (lambda: recurrent(nn.GRU, 5, 7, 3, bidirectional=True), (3, 6, 5)),
    "gru-packed": (lambda: recurrent(nn.GRU, 5, 7, 2, lengths=LENGTHS, bidirectional=True), (3, 6, 5)),
    "rnn-tanh": (lambda: recurrent(nn.RNN, 5, 7, 2), (3, 6, 5)),
    "rnn-relu": (lambda: recurrent(nn.RNN, 5, 37, 2, nonlinearity="relu"), (3, 6, 5)),
    "rnn-bidirectional": (lambda: recurrent(nn.RNN, 5, 7, 2, bidirectional=True), (3, 6, 5)),
    "rnn-packed": (lambda: recurrent(nn.RNN, 5, 7, lengths=LENGTHS), (3, 6, 5)),
}
LENGTHS = (4, 6, 1)
EMBEDDING = (11, 6, (3, 8))  # rows, features, tokens
CROSS_ENTROPY = {  # (…, classes), label_smoothing
    "cross-entropy": ((7, 10), 0.0),
    "cross-entropy-tokens": ((2, 5, 33), 0.0),
    "cross-entropy-smoothed": ((7, 10), 0.1),
}
SOFT_CROSS_ENTROPY = {  # shape, label_smoothing, whether with weights of the classes
    "soft-cross-entropy": ((7, 10), 0.0, False),
    "soft-cross-entropy-smoothed": ((5, 33), 0.1, False),
    "soft-cross-entropy-weighted": ((7, 10), 0.2, True),
}
IGNORED = {  # shape, label_smoothing, ignore_index, which every third label is
    "cross-entropy-ignored": ((7, 10), 0.0, -100),
    "cross-entropy-ignored-class": ((8, 5), 0.1, 2),
}


def tensor(values):
    return torch.from_numpy(values).double()


def record(made, name, module, x, y):
    target = tensor(counter.uniform(f"{name}/target", tuple(y.shape)))
    loss = F.mse_loss(y, target)
    loss.backward()
    made.add(f"{name}/output", y)
    made.add(f"{name}/loss", loss)
    if x.is_floating_point():
        made.add(f"{name}/gradient/x", x.grad)
    for key, parameter in module.named_parameters():
        made.add(f"{name}/gradient/{key}", parameter.grad)
    for key, buffer in module.named_buffers():
        if module.training and buffer.is_floating_point():
            made.add(f"{name}/after/{key}", buffer)


def fill(name, module):
    with torch.no_grad():
        for key, value in module.state_dict().items():
            if value.is_floating_point():
                value.copy_(tensor(counter.initial(name, key, tuple(value.shape))))


def main():
    made = golden.Golden("ops")
    for name, (make, shape) in OPS.items():
        module = make().double()
        fill(name, module)
        x = tensor(counter.uniform(f"{name}/x", shape)).requires_grad_()
        record(made, name, module, x, module(x))
    rows, features, shape = EMBEDDING
    table = nn.Embedding(rows, features).double()
    fill("embedding", table)
    x = torch.from_numpy(counter.below("embedding/x", shape, rows))
    record(made, "embedding", table, x, table(x))
    for name, (shape, smoothing) in CROSS_ENTROPY.items():
        x = (4 * tensor(counter.uniform(f"{name}/x", shape))).requires_grad_()
        labels = torch.from_numpy(counter.below(f"{name}/labels", shape[:-1], shape[-1]))
        loss = F.cross_entropy(x.flatten(0, -2), labels.flatten(), label_smoothing=smoothing)
        loss.backward()
        made.add(f"{name}/loss", loss)
        made.add(f"{name}/gradient/x", x.grad)
    for name, (shape, smoothing, weighted) in SOFT_CROSS_ENTROPY.items():
        x = (4 * tensor(counter.uniform(f"{name}/x", shape))).requires_grad_()
        targets = tensor(counter.uniform(f"{name}/targets", shape)).abs()
        targets /= targets.sum(-1, keepdim=True)
        weights = tensor(counter.uniform(f"{name}/weights", shape[-1:])).abs() if weighted else None
        loss = F.cross_entropy(x, targets, weights, label_smoothing=smoothing)
        loss.backward()
        made.add(f"{name}/loss", loss)
        made.add(f"{name}/gradient/x", x.grad)
    for name, (shape, smoothing, ignored) in IGNORED.items():
        x = (4 * tensor(counter.uniform(f"{name}/x", shape))).requires_grad_()
        labels = torch.from_numpy(counter.below(f"{name}/labels", shape[:-1], shape[-1]))
        labels[::3] = ignored
        loss = F.cross_entropy(x, labels, label_smoothing=smoothing, ignore_index=ignored)
        loss.backward()
        made.add(f"{name}/loss", loss)
        made.add(f"{name}/gradient/x", x.grad)
    made.save()


main()
