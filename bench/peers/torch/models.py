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


class Tabular(nn.Module):
    """Of a table without categories."""

    def __init__(self):
        super().__init__()
        self.numbers, self.bn1 = nn.Linear(16, 128, bias=False), nn.BatchNorm1d(128)
        self.fc2, self.bn2 = nn.Linear(128, 64, bias=False), nn.BatchNorm1d(64)
        self.fc3 = nn.Linear(64, 10)

    def forward(self, x):
        x = F.relu(self.bn1(self.numbers(x)))
        return self.fc3(F.relu(self.bn2(self.fc2(x))))


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


def convolution(inputs: int, outputs: int, kernel: int, stride: int) -> nn.Conv2d:
    return nn.Conv2d(inputs, outputs, kernel, stride=stride, padding=kernel // 2, bias=False)


class Block(nn.Module):
    """Of a residual network: two 3 × 3 convolutions, or, when it is a bottleneck, 1 × 1, 3 × 3 and 1 × 1."""

    def __init__(self, inputs: int, width: int, stride: int, bottleneck: bool):
        super().__init__()
        outputs = 4 * width if bottleneck else width
        plan = ([(inputs, width, 1, 1), (width, width, 3, stride), (width, outputs, 1, 1)] if bottleneck else
                [(inputs, width, 3, stride), (width, width, 3, 1)])
        self.convs = nn.ModuleList(convolution(*layer) for layer in plan)
        self.norms = nn.ModuleList(nn.BatchNorm2d(layer[1]) for layer in plan)
        self.downsample = None
        if stride != 1 or inputs != outputs:
            self.downsample = nn.Sequential(convolution(inputs, outputs, 1, stride), nn.BatchNorm2d(outputs))

    def forward(self, x):
        y = x
        for i, (conv, norm) in enumerate(zip(self.convs, self.norms)):
            y = norm(conv(y))
            if i + 1 < len(self.convs):
                y = F.relu(y)
        return F.relu(y + (x if self.downsample is None else self.downsample(x)))


class ResNet(nn.Module):
    def __init__(self, blocks: list, bottleneck: bool, small_images: bool, classes: int = 10):
        super().__init__()
        self.conv1 = convolution(3, 64, 3, 1) if small_images else convolution(3, 64, 7, 2)
        self.bn1 = nn.BatchNorm2d(64)
        self.pool = nn.Identity() if small_images else nn.MaxPool2d(3, 2, 1)
        layers, inputs = [], 64
        for i, count in enumerate(blocks):
            width = 64 << i
            for j in range(count):
                layers.append(Block(inputs, width, 2 if i > 0 and j == 0 else 1, bottleneck))
                inputs = 4 * width if bottleneck else width
        self.layers = nn.Sequential(*layers)
        self.fc = nn.Linear(inputs, classes)

    def forward(self, x):
        x = self.layers(self.pool(F.relu(self.bn1(self.conv1(x)))))
        return self.fc(x.mean((2, 3)))


class Vgg11(nn.Module):
    def __init__(self, classes: int = 10):
        super().__init__()
        layers, inputs = [], 3
        for width in (64, 0, 128, 0, 256, 256, 0, 512, 512, 0, 512, 512, 0):
            if width == 0:
                layers.append(nn.MaxPool2d(2))
                continue
            layers += [nn.Conv2d(inputs, width, 3, padding=1), nn.ReLU(inplace=True)]
            inputs = width
        self.features = nn.Sequential(*layers)
        self.avgpool = nn.AdaptiveAvgPool2d(7)
        self.classifier = nn.Sequential(nn.Linear(512 * 7 * 7, 4096), nn.ReLU(inplace=True), nn.Dropout(),
                                        nn.Linear(4096, 4096), nn.ReLU(inplace=True), nn.Dropout(),
                                        nn.Linear(4096, classes))

    def forward(self, x):
        return self.classifier(self.avgpool(self.features(x)).flatten(1))


def activated(inputs: int, outputs: int, kernel: int, stride: int, groups: int = 1) -> nn.Sequential:
    conv = nn.Conv2d(inputs, outputs, kernel, stride=stride, padding=kernel // 2, groups=groups, bias=False)
    return nn.Sequential(conv, nn.BatchNorm2d(outputs), nn.ReLU6(inplace=True))


class InvertedResidual(nn.Module):
    def __init__(self, inputs: int, outputs: int, stride: int, expansion: int):
        super().__init__()
        inner = expansion * inputs
        self.adds = stride == 1 and inputs == outputs
        self.conv = nn.Sequential(*([activated(inputs, inner, 1, 1)] if expansion > 1 else []),
                                  activated(inner, inner, 3, stride, inner), convolution(inner, outputs, 1, 1),
                                  nn.BatchNorm2d(outputs))

    def forward(self, x):
        return x + self.conv(x) if self.adds else self.conv(x)


class MobileNetV2(nn.Module):
    def __init__(self, classes: int = 10):
        super().__init__()
        layers, inputs = [activated(3, 32, 3, 2)], 32
        for expansion, width, count, stride in ((1, 16, 1, 1), (6, 24, 2, 2), (6, 32, 3, 2), (6, 64, 4, 2), (6, 96, 3, 1),
                                                (6, 160, 3, 2), (6, 320, 1, 1)):
            for i in range(count):
                layers.append(InvertedResidual(inputs, width, stride if i == 0 else 1, expansion))
                inputs = width
        self.features = nn.Sequential(*layers, activated(inputs, 1280, 1, 1))
        self.classifier = nn.Sequential(nn.Dropout(0.2), nn.Linear(1280, classes))

    def forward(self, x):
        return self.classifier(self.features(x).mean((2, 3)))


class GptBlock(nn.Module):
    def __init__(self, heads: int, width: int):
        super().__init__()
        self.heads = heads
        self.ln_1, self.ln_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.c_attn, self.c_proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.c_fc, self.c_out = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        n, t, c = x.shape
        q, k, v = (part.view(n, t, self.heads, -1).transpose(1, 2) for part in self.c_attn(self.ln_1(x)).split(c, 2))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.c_proj(y.transpose(1, 2).reshape(n, t, c))
        return x + self.c_out(F.gelu(self.c_fc(self.ln_2(x)), approximate="tanh"))


class Gpt(nn.Module):
    def __init__(self, layers: int, heads: int, width: int, context: int, vocabulary: int):
        super().__init__()
        self.wte, self.wpe = nn.Embedding(vocabulary, width), nn.Embedding(context, width)
        self.h = nn.ModuleList(GptBlock(heads, width) for _ in range(layers))
        self.ln_f = nn.LayerNorm(width)
        self.lm_head = nn.Linear(width, vocabulary, bias=False)
        self.lm_head.weight = self.wte.weight
        for parameter in self.parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, tokens):
        x = self.wte(tokens) + self.wpe(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.h:
            x = block(x)
        return self.lm_head(self.ln_f(x))


class BertBlock(nn.Module):
    def __init__(self, heads: int, width: int):
        super().__init__()
        self.heads = heads
        self.query, self.key, self.value = (nn.Linear(width, width) for _ in range(3))
        self.projection, self.inner, self.outer = nn.Linear(width, width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.attention_norm, self.norm = nn.LayerNorm(width, eps=1e-12), nn.LayerNorm(width, eps=1e-12)

    def forward(self, x):
        n, t, c = x.shape
        q, k, v = (part(x).view(n, t, self.heads, -1).transpose(1, 2) for part in (self.query, self.key, self.value))
        y = F.scaled_dot_product_attention(q, k, v)
        x = self.attention_norm(x + self.projection(y.transpose(1, 2).reshape(n, t, c)))
        return self.norm(x + self.outer(F.gelu(self.inner(x))))


class Bert(nn.Module):
    """Predicts masked tokens. Its inputs are tokens, and after them the positions of those that are to be predicted."""

    def __init__(self, layers: int, heads: int, width: int, positions: int, vocabulary: int, context: int):
        super().__init__()
        self.context = context
        self.words, self.positions, self.types = (nn.Embedding(rows, width) for rows in (vocabulary, positions, 2))
        self.norm = nn.LayerNorm(width, eps=1e-12)
        self.blocks = nn.ModuleList(BertBlock(heads, width) for _ in range(layers))
        self.dense, self.dense_norm = nn.Linear(width, width), nn.LayerNorm(width, eps=1e-12)
        self.decoder = nn.Linear(width, vocabulary)
        self.decoder.weight = self.words.weight
        for parameter in self.parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, inputs):
        tokens, masked = inputs[:, :self.context], inputs[:, self.context:]
        positions = torch.arange(self.context, device=inputs.device)
        x = self.norm(self.words(tokens) + self.positions(positions) + self.types(torch.zeros_like(tokens)))
        for block in self.blocks:
            x = block(x)
        x = x.gather(1, masked.unsqueeze(-1).expand(-1, -1, x.shape[-1]))
        return self.decoder(self.dense_norm(F.gelu(self.dense(x))))


class Recurrent(nn.Module):
    def __init__(self, kind: type, layers: int, width: int, vocabulary: int):
        super().__init__()
        self.encoder, self.decoder = nn.Embedding(vocabulary, width), nn.Linear(width, vocabulary)
        self.rnn = kind(width, width, layers, batch_first=True)

    def forward(self, tokens):
        return self.decoder(self.rnn(self.encoder(tokens))[0])


def loss_of(logits, labels):
    """Mean cross entropy. Logits of tokens go there as rows, as nanoGPT and Hugging Face write it: of (N, classes, T)
    PyTorch takes a slower way, which copies all of them, too."""
    return F.cross_entropy(logits.view(-1, logits.shape[-1]), labels.view(-1))


def image_batch(samples: int):
    """What `random:1x28x28` stands for: synthetic pixels and labels."""
    return torch.rand(samples, 1, 28, 28), torch.randint(10, (samples,))


def vector_batch(numbers: int):
    return lambda samples: (torch.rand(samples, numbers), torch.randint(10, (samples,)))


def colour_batch(size: int):
    return lambda samples: (torch.rand(samples, 3, size, size), torch.randint(10, (samples,)))


def token_batch(context: int, vocabulary: int):
    return lambda samples: (torch.randint(vocabulary, (samples, context)), torch.randint(vocabulary, (samples, context)))


def masked_batch(context: int, masked: int, vocabulary: int):
    def batch(samples: int):
        positions = torch.stack([torch.randperm(context - 2)[:masked].sort().values + 1 for _ in range(samples)])
        tokens = torch.randint(vocabulary, (samples, context))
        return torch.cat((tokens, positions), 1), torch.randint(vocabulary, (samples, masked))

    return batch


@dataclasses.dataclass(frozen=True)
class Model:
    make: Callable[[], nn.Module]
    batch: Callable[[int], tuple]  # samples of one rank: inputs and labels


GPT2_TOKENS = 50257
GPT2_ROWS = 50304  # padded to a multiple of 64, as nanoGPT does: products with an odd number of columns are slow


def gpt2(context: int) -> Model:
    return Model(lambda: Gpt(12, 12, 768, context, GPT2_ROWS), token_batch(context, GPT2_TOKENS))


MODELS = {
    "linear": Model(Linear, vector_batch(5)),
    "mlp": Model(Mlp, image_batch),
    "tabular": Model(Tabular, vector_batch(16)),
    "cnn": Model(Cnn, image_batch),
    "resnet18-cifar": Model(lambda: ResNet([2, 2, 2, 2], False, True), colour_batch(32)),
    "resnet18": Model(lambda: ResNet([2, 2, 2, 2], False, False), colour_batch(224)),
    "resnet50": Model(lambda: ResNet([3, 4, 6, 3], True, False), colour_batch(224)),
    "vgg11": Model(Vgg11, colour_batch(224)),
    "mobilenet-v2": Model(MobileNetV2, colour_batch(224)),
    "bert": Model(lambda: Bert(4, 4, 256, 512, 256, 128), masked_batch(128, 19, 256)),
    "rnn": Model(lambda: Recurrent(nn.RNN, 2, 256, 256), token_batch(128, 256)),
    "lstm": Model(lambda: Recurrent(nn.LSTM, 2, 256, 256), token_batch(128, 256)),
    "gru": Model(lambda: Recurrent(nn.GRU, 2, 256, 256), token_batch(128, 256)),
    "gpt": Model(lambda: Gpt(4, 4, 256, 128, 256), token_batch(128, 256)),
    "gpt2": gpt2(256),
    "gpt2-1024": gpt2(1024),  # for GPUs: bench/gpu_check/peers.py
}
