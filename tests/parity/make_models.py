#!/usr/bin/env python3
"""Writes what whole models compute in three steps of training, in golden/*.safetensors.

    python3 tests/parity/make_models.py [NAME…]      # needs torch, torchvision, transformers, safetensors, numpy

The models are torchvision's and Hugging Face's own, and those of bench/peers/torch that are made of torch's layers.
They compute in f64, so what differs from f32 here is lockstep's rounding. Inputs and first weights come from
counter.py, under names that begin with the model's and a salt. The salt is the one out of SALTS at which no ReLU's
argument and no maximum's lead comes close to 0: there the gradient jumps, and f32 and f64 may take different sides.
"""
import importlib.util
import pathlib
import sys
import unittest.mock

import numpy as np
import torch
import torch.nn.functional as F
import torchvision
import transformers

import counter
import golden

SALTS = 40
STEPS = 3
RULES = {
    "sgd": lambda p, lr: torch.optim.SGD(p, lr=20 * lr, momentum=0.9, weight_decay=0.01, nesterov=True),
    # A large eps: with a small one the first steps are signs of gradients, those of mere rounding too.
    "adamw": lambda p, lr: torch.optim.AdamW(p, lr=lr, betas=(0.9, 0.99), eps=1e-3, weight_decay=0.1),
}


def peers():
    path = pathlib.Path(__file__).parents[2] / "bench/peers/torch/models.py"
    spec = importlib.util.spec_from_file_location("peers", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def small_resnet18(classes):
    """torchvision's, with the stem for small images."""
    model = torchvision.models.resnet18(num_classes=classes)
    model.conv1 = torch.nn.Conv2d(3, 64, 3, padding=1, bias=False)
    model.maxpool = torch.nn.Identity()
    return model


class Gpt2(torch.nn.Module):
    """Hugging Face's, called as the others are, with the names of its files."""

    def __init__(self, **sizes):
        super().__init__()
        config = transformers.GPT2Config(resid_pdrop=0, embd_pdrop=0, attn_pdrop=0, **sizes)
        self.transformer = transformers.GPT2LMHeadModel(config)

    def named_parameters(self, *args, **kwargs):
        for name, parameter in super().named_parameters(*args, **kwargs):
            yield name.removeprefix("transformer.transformer."), parameter

    def forward(self, tokens):
        return self.transformer(tokens).logits


class Llama(torch.nn.Module):
    def __init__(self, **sizes):
        super().__init__()
        config = transformers.LlamaConfig(bos_token_id=0, eos_token_id=0, rms_norm_eps=1e-5, **sizes)
        self.llama = transformers.LlamaForCausalLM(config)
        # Its angles are f32 otherwise.
        half = config.hidden_size // config.num_attention_heads // 2
        inverse = 10000.0 ** (-torch.arange(half).double() / half)
        rotary = self.llama.model.rotary_emb

        def angles(x, position_ids):
            angle = (position_ids[..., None].double() * inverse).repeat(1, 1, 2)
            return angle.cos().to(x.dtype), angle.sin().to(x.dtype)

        rotary.forward = angles

    def named_parameters(self, *args, **kwargs):
        for name, parameter in super().named_parameters(*args, **kwargs):
            yield name.removeprefix("llama."), parameter

    def named_buffers(self, *args, **kwargs):
        return iter(())  # those angles

    def forward(self, tokens):
        return self.llama(tokens).logits


class Text(torch.nn.Module):
    """As in PyTorch's example of a word language model: an embedding, recurrent layers, a line to the vocabulary."""

    def __init__(self, kind, vocabulary, width, layers):
        super().__init__()
        self.encoder = torch.nn.Embedding(vocabulary, width)
        self.rnn = kind(width, width, layers, batch_first=True)
        self.decoder = torch.nn.Linear(width, vocabulary)

    def forward(self, tokens):
        return self.decoder(self.rnn(self.encoder(tokens))[0])


class Rows(torch.nn.Module):
    """Recurrent layers that read the rows of grey images, both ways, and a line from what they leave to the classes."""

    def __init__(self, kind, pixels, width, layers, classes):
        super().__init__()
        self.rnn = kind(pixels, width, layers, batch_first=True, bidirectional=True)
        self.decoder = torch.nn.Linear(2 * width, classes)

    def forward(self, images):
        last = self.rnn(images[:, 0])[1]
        last = last[0] if isinstance(last, tuple) else last
        return self.decoder(torch.cat((last[-2], last[-1]), 1))


def images(*shape):
    return lambda name: torch.from_numpy(counter.uniform(name, shape)).double()


def tokens(*shape, bound):
    return lambda name: torch.from_numpy(counter.below(name, shape, bound))


# How each is made, its inputs, classes, the shape of labels; the distance of its batch norms' biases from 0, which
# keeps most arguments of ReLUs away from 0; and a rate at which three steps do not diverge, since that would amplify
# all rounding.
MODELS = {
    "linear": (lambda: peers().Linear(), images(6, 5), 10, (6,), 0.0, 1e-3),
    "mlp": (lambda: peers().Mlp(), images(4, 1, 28, 28), 10, (4,), 0.0, 1e-3),
    "tabular": (lambda: peers().Tabular(), images(6, 16), 10, (6,), 1.5, 1e-3),
    "cnn": (lambda: peers().Cnn(), images(3, 1, 28, 28), 10, (3,), 0.0, 1e-3),
    "resnet18": (lambda: torchvision.models.resnet18(num_classes=7), images(4, 3, 48, 48), 7, (4,), 1.5, 1e-3),
    "resnet50": (lambda: torchvision.models.resnet50(num_classes=7), images(3, 3, 48, 48), 7, (3,), 3.0, 2e-5),
    "resnet18-cifar": (lambda: small_resnet18(10), images(3, 3, 16, 16), 10, (3,), 1.5, 1e-3),
    "mobilenet-v2": (lambda: torchvision.models.mobilenet_v2(num_classes=7, width_mult=0.35, dropout=0.0),
                     images(4, 3, 48, 48), 7, (4,), 3.0, 1e-3),
    "vit": (lambda: torchvision.models.VisionTransformer(24, 8, 2, 3, 24, 96, num_classes=7), images(3, 3, 24, 24), 7,
            (3,), 0.0, 1e-3),
    "gpt": (lambda: Gpt2(n_layer=2, n_head=2, n_embd=24, n_positions=16, vocab_size=37, bos_token_id=0, eos_token_id=0),
            tokens(2, 11, bound=37), 37, (2, 11), 0.0, 1e-3),
    "llama": (lambda: Llama(num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, hidden_size=24,
                            intermediate_size=40, max_position_embeddings=16, vocab_size=37),
              tokens(2, 11, bound=37), 37, (2, 11), 0.0, 1e-3),
    "lstm": (lambda: Text(torch.nn.LSTM, 29, 16, 2), tokens(3, 9, bound=29), 29, (3, 9), 0.0, 1e-3),
    "gru": (lambda: Text(torch.nn.GRU, 29, 16, 2), tokens(3, 9, bound=29), 29, (3, 9), 0.0, 1e-3),
    "rnn": (lambda: Text(torch.nn.RNN, 29, 16, 2), tokens(3, 9, bound=29), 29, (3, 9), 0.0, 1e-3),
    "gru-rows": (lambda: Rows(torch.nn.GRU, 7, 12, 2, 5), images(4, 1, 6, 7), 5, (4,), 0.0, 1e-3),
    "lstm-rows": (lambda: Rows(torch.nn.LSTM, 7, 12, 2, 5), images(4, 1, 6, 7), 5, (4,), 0.0, 1e-3),
}


class TooNear(Exception):
    pass


class Margins:
    """The smallest distance from a jump of the gradient, in units of its tensor's root mean square."""

    def __init__(self, wanted):
        self.least = np.inf
        relu, clip, max_pool = F.relu, F.hardtanh, F.max_pool2d

        def near(distances, values):
            self.least = min(self.least, (distances.min() / values.square().mean().sqrt()).item())
            if self.least < wanted:
                raise TooNear

        def watched_relu(x, inplace=False):
            near(x.detach().abs(), x.detach())
            return relu(x)

        def watched_clip(x, low=-1.0, high=1.0, inplace=False):  # ReLU6's
            near(torch.minimum((x.detach() - low).abs(), (x.detach() - high).abs()), x.detach())
            return clip(x, low, high)

        def watched_max_pool(x, kernel, stride=None, padding=0, *args, **kwargs):
            padded = F.pad(x.detach(), [padding] * 4, value=-np.inf)
            windows = padded.unfold(2, kernel, stride or kernel).unfold(3, kernel, stride or kernel).flatten(4)
            first, second = windows.topk(2).values.unbind(-1)
            near((first - second)[first > 0], x.detach())  # a ReLU before it makes the others' gradients 0
            return max_pool(x, kernel, stride, padding, *args, **kwargs)

        self.patches = [unittest.mock.patch.object(F, "relu", watched_relu),
                        unittest.mock.patch.object(F, "hardtanh", watched_clip),
                        unittest.mock.patch.object(F, "max_pool2d", watched_max_pool)]

    def __enter__(self):
        for patch in self.patches:
            patch.start()
        return self

    def __exit__(self, *unused):
        for patch in self.patches:
            patch.stop()


def state_of(model):
    yield from model.named_parameters()
    yield from ((name, buffer) for name, buffer in model.named_buffers() if not name.endswith("num_batches_tracked"))


def train(name, salt, dtype, add, wanted=0.0):
    """Calls `add` with every result; returns the margin, or raises TooNear where it is less than wanted."""
    make, inputs, classes, labels_shape, norm_bias, lr = MODELS[name]
    case = f"{name}.{salt}"

    def batch(step):
        x = inputs(f"{case}/x/{step}")
        labels = torch.from_numpy(counter.below(f"{case}/labels/{step}", labels_shape, classes))
        return x.to(dtype) if x.is_floating_point() else x, labels

    with Margins(wanted) as margins:
        for rule, optimizer_of in RULES.items():
            model = make().to(dtype)
            start = {}
            with torch.no_grad():
                for key, value in state_of(model):
                    value.copy_(torch.from_numpy(counter.initial(case, key, tuple(value.shape), norm_bias)))
                    start[key] = value.detach().clone()
            optimizer = optimizer_of(model.parameters(), lr)
            for step in range(STEPS):
                x, labels = batch(step)
                logits = model(x)
                loss = F.cross_entropy(logits.reshape(-1, classes), labels.flatten())
                optimizer.zero_grad()
                loss.backward()
                add(f"{rule}/loss/{step}", loss)
                if rule == "sgd" and step == 0:
                    add("output", logits)
                    for key, parameter in model.named_parameters():
                        add(f"gradient/{key}", parameter.grad)
                optimizer.step()
            for key, value in state_of(model):
                add(f"{rule}/moved/{key}", value.detach() - start[key])
            model.eval()
            with torch.no_grad():
                add(f"{rule}/evaluated", model(batch(0)[0]))
    return margins.least


def main():
    torch.manual_seed(0)
    for name in sys.argv[1:] or MODELS:
        margin, salt = 0.0, None
        for candidate in range(SALTS):
            try:
                margin, salt = train(name, candidate, torch.float64, lambda *unused: None, margin), candidate
            except TooNear:
                pass
            if margin == np.inf:
                break
        made, reference, worst = golden.Golden(name), {}, {}
        made.extra["salt"] = np.array([salt])

        def keep(key, value):
            if key.startswith("gradient/") and value.abs().max() < 1e-12:
                return  # 0 but for rounding: what a bias adds, the next normalisation takes away again
            made.add(key, value)
            reference[key] = value.detach().clone()

        def compare(key, value):
            if key not in reference:
                return
            error = ((value - reference[key]).abs().max() / reference[key].abs().max()).item()
            kind = "/".join(key.split("/")[:2]) if "moved" in key else key.split("/")[0]
            worst[kind] = max(worst.get(kind, 0), error)

        train(name, salt, torch.float64, keep)
        train(name, salt, torch.float32, compare)
        for rule in RULES:
            made.extra[f"{rule}/moved"] = np.array([worst[f"{rule}/moved"]])
        made.save()
        errors = ", ".join(f"{kind} {error:.1e}" for kind, error in worst.items())
        print(f"  salt {salt}: margin {margin:.1e}; PyTorch itself in f32 errs by {errors}")


main()
