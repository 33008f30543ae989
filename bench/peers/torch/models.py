"""The models of `lockstep bench step`, as their users would write them in PyTorch.

Adding one: a class with the layers and names of nn/models/, and a line in MODELS.
"""
import dataclasses
from typing import Callable

import torch
import torch.nn.functional as F
from torch import nn


class Linear(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(5, 10)

    def forward(self, x):
        return self.fc(x.flatten(1))


class Mlp(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc1 = nn.Linear(784, 1024)
        self.fc2 = nn.Linear(1024, 1024)
        self.fc3 = nn.Linear(1024, 10)

    def forward(self, x):
        x = F.relu(self.fc1(x.flatten(1)))
        return self.fc3(F.relu(self.fc2(x)))


class Cnn(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(1, 32, 3, padding=1)
        self.conv2 = nn.Conv2d(32, 64, 3, padding=1)
        self.fc1 = nn.Linear(64 * 7 * 7, 128)
        self.fc2 = nn.Linear(128, 10)

    def forward(self, x):
        x = F.max_pool2d(F.relu(self.conv1(x)), 2)
        x = F.max_pool2d(F.relu(self.conv2(x)), 2)
        return self.fc2(F.relu(self.fc1(x.flatten(1))))


def image_batch(samples: int):
    """What `random:1x28x28` stands for: made-up pixels and labels."""
    return torch.rand(samples, 1, 28, 28), torch.randint(10, (samples,))


def vector_batch(samples: int):
    return torch.rand(samples, 5), torch.randint(10, (samples,))


@dataclasses.dataclass(frozen=True)
class Model:
    make: Callable[[], nn.Module]
    batch: Callable[[int], tuple]  # samples of one rank: inputs and labels


MODELS = {
    "linear": Model(Linear, vector_batch),
    "mlp": Model(Mlp, image_batch),
    "cnn": Model(Cnn, image_batch),
}
