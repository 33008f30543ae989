#!/usr/bin/env python3
"""Writes golden/weights/: files of weights as transformers, safetensors and torch.save() write them, and torchvision's
names.

    python3 tests/parity/make_weight_files.py      # needs torch, torchvision, transformers, safetensors, numpy

All of GPT-2 hold one tiny model, whose values counter.initial("weights", NAME, …) says under the names of the bare
model; all of conv hold Conv2d(3, 4, 3), BatchNorm2d(4) and Linear(4, 2) as "0", "1" and "2", num_batches_tracked 7.
"""
import json
import pathlib
import shutil

import safetensors
import safetensors.torch
import torch
import torchvision
import transformers

import counter

HERE = pathlib.Path(__file__).parent / "golden/weights"
CONTEXT = 6


def tiny_gpt2():
    config = transformers.GPT2Config(n_layer=2, n_head=2, n_embd=8, n_positions=CONTEXT, vocab_size=11, bos_token_id=0,
                                     eos_token_id=0)
    model = transformers.GPT2LMHeadModel(config)
    with torch.no_grad():
        for name, value in model.transformer.named_parameters():
            value.copy_(torch.from_numpy(counter.initial("weights", name, tuple(value.shape))))
    return model


def with_masks(state, dtype):
    """As transformers wrote them before 4.31: each layer's mask, and what it fills in for masked scores."""
    masked = dict(state)
    for layer in range(2):
        prefix = "transformer." if any(name.startswith("transformer.") for name in state) else ""
        mask = torch.ones(CONTEXT, CONTEXT, dtype=torch.uint8).tril().view(1, 1, CONTEXT, CONTEXT)
        masked[f"{prefix}h.{layer}.attn.bias"] = mask.to(dtype)
        masked[f"{prefix}h.{layer}.attn.masked_bias"] = torch.tensor(-1e4)
    return masked


def conv():
    model = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.BatchNorm2d(4), torch.nn.Linear(4, 2))
    with torch.no_grad():
        for name, value in model.state_dict().items():
            if name.endswith("num_batches_tracked"):
                value.fill_(7)
            else:
                value.copy_(torch.from_numpy(counter.initial("weights", name, tuple(value.shape))))
    return model


def save_pretrained(model, name, **options):
    """Without the configurations that it also writes."""
    model.save_pretrained(HERE / name, **options)
    for extra in (HERE / name).glob("*config.json"):
        extra.unlink()


def main():
    shutil.rmtree(HERE, ignore_errors=True)
    HERE.mkdir(parents=True)
    torch.manual_seed(0)

    gpt2 = tiny_gpt2()
    bare, full = gpt2.transformer.state_dict(), gpt2.state_dict()
    save = safetensors.torch.save_file
    save_pretrained(gpt2.transformer, "gpt2-bare")
    save_pretrained(gpt2, "gpt2-head")
    save_pretrained(gpt2, "gpt2-sharded", max_shard_size="4KB")
    save(with_masks(bare, torch.float32), HERE / "gpt2-masks.safetensors", {"format": "pt"})
    save(with_masks(bare, torch.bool), HERE / "gpt2-bool-masks.safetensors", {"format": "pt"})
    save({name: value.half() for name, value in bare.items()}, HERE / "gpt2-f16.safetensors")
    save({name: value.bfloat16() for name, value in bare.items()}, HERE / "gpt2-bf16.safetensors")
    save({name: value.double() for name, value in bare.items()}, HERE / "gpt2-f64.safetensors")
    safetensors.torch.save_model(gpt2, str(HERE / "gpt2-save-model.safetensors"))
    torch.save(full, HERE / "gpt2-tied.bin")
    torch.save(with_masks(full, torch.bool), HERE / "gpt2-tied-bool-masks.bin")
    torch.save(with_masks(bare, torch.uint8), HERE / "gpt2-legacy.bin", _use_new_zipfile_serialization=False)
    torch.save(torch.nn.DataParallel(gpt2).state_dict(), HERE / "gpt2-data-parallel.pt")

    model = conv()
    state = model.state_dict()
    save(state, HERE / "conv.safetensors")
    save({"module." + name: value for name, value in state.items()}, HERE / "conv-wrapped.safetensors")
    save({name: value for name, value in state.items() if "num_batches" not in name}, HERE / "conv-uncounted.safetensors")
    torch.save(model.to(memory_format=torch.channels_last).state_dict(), HERE / "conv-channels-last.pt")
    torch.save(torch.nn.DataParallel(model).state_dict(), HERE / "conv-data-parallel.pt")

    names = {"made by": f"torchvision {torchvision.__version__}"}
    for name in ("resnet18", "resnet34", "resnet50", "resnet101", "resnet152"):
        made = getattr(torchvision.models, name)()
        names[name] = {key: [str(value.dtype)[6:], *value.shape] for key, value in made.state_dict().items()}
    text = json.dumps(names, separators=(",", ":")).replace("],", "],\n")
    (HERE / "torchvision_names.json").write_text(text + "\n")
    versions = {package.__name__: package.__version__ for package in (torch, transformers, safetensors)}
    (HERE / "made_by.json").write_text(json.dumps(versions) + "\n")
    for path in HERE.rglob("*"):
        path.chmod(0o755 if path.is_dir() else 0o644)


main()
