#!/usr/bin/env python3
"""Writes the .pt files in this directory with torch.save(), and into torch_files.json what is in them.

    python3 tests/nn/golden/make_torch_files.py      # needs PyTorch
"""
import argparse
import json
import pathlib
from collections import OrderedDict, defaultdict

import numpy
import torch

HERE = pathlib.Path(__file__).parent


def counted(*shape, dtype=torch.float32):
    """0.25, 0.5, …: exact in every type."""
    count = 1
    for extent in shape:
        count *= extent
    return (torch.arange(1, count + 1, dtype=torch.float64) / 4).reshape(shape).to(dtype)


def model():
    net = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.BatchNorm1d(2))
    with torch.no_grad():
        for value in net.state_dict().values():
            value.copy_(counted(*value.shape) if value.is_floating_point() else torch.tensor(7))
    return net


def cases():
    net = model()
    state = net.state_dict()
    yield "zip", state, state, {}
    yield "legacy", state, state, {"_use_new_zipfile_serialization": False}
    yield "data_parallel", torch.nn.DataParallel(net).state_dict(), {"module." + k: v for k, v in state.items()}, {}
    tensor = {"half": counted(2, 3, dtype=torch.float16), "small": torch.tensor([6e-8, -6.1e-5, 65504], dtype=torch.float16)}
    yield "half", tensor, tensor, {}
    yield "half_legacy", tensor, tensor, {"_use_new_zipfile_serialization": False}
    tensor = {"bf16": counted(2, 3, dtype=torch.bfloat16)}
    yield "bf16", tensor, tensor, {}
    tensor = {"f64": counted(3, dtype=torch.float64), "i64": torch.tensor([-1, 2**40]), "i32": torch.tensor([-5], dtype=torch.int32),
              "u8": torch.tensor([0, 255], dtype=torch.uint8)}
    yield "types", tensor, tensor, {}
    base = counted(4, 6)
    tensor = OrderedDict(turned=base.t(), part=base[1:3, 1:6:2], row=base[2], one=base[3, 5], whole=base, spread=base[0, 0].expand(1, 1))
    yield "strided", tensor, tensor, {}
    yield "strided_legacy", tensor, tensor, {"_use_new_zipfile_serialization": False}
    tensor = {"none": torch.zeros(0, 4), "scalar": torch.tensor(2.5)}
    yield "empty", tensor, tensor, {}
    optimizer = torch.optim.AdamW(net.parameters())
    yield "wrapped", {"epoch": 3, "best": 0.5, "args": ["a", None, True, (1, -2, 2**40)], "state_dict": state,
                      "optimizer": optimizer.state_dict()}, state, {}
    yield "wrapped_model", {"model": dict(state)}, state, {}
    # Parameters that are views of one storage, with buffers between them in the dictionary.
    flat = model()
    torch.nn.utils.vector_to_parameters(torch.nn.utils.parameters_to_vector(flat.parameters()), flat.parameters())
    yield "flat", flat.state_dict(), flat.state_dict(), {}
    yield "list_legacy", {"state_dict": state, "queue": [counted(2), (counted(3, dtype=torch.int16),)]}, state, \
        {"_use_new_zipfile_serialization": False}
    yield "compiled", torch.compile(net).state_dict(), {"_orig_mod." + k: v for k, v in state.items()}, {}
    itself = [1]
    itself.append(itself)
    others = {"args": argparse.Namespace(lr=0.1, names={"a", "b"}), "best": numpy.float64(0.5), "loss": numpy.float32(2),
              "history": defaultdict(list, a=[1]), "rng": numpy.random.default_rng(1).bytes(300), "huge": 2**100,
              "itself": itself, "state_dict": state, "shorts": torch.zeros(2, dtype=torch.int16)}
    yield "others", others, state, {}
    yield "others_legacy", others, state, {"_use_new_zipfile_serialization": False}
    yield "protocol4", others, state, {"pickle_protocol": 4}
    yield "protocol5", others, state, {"pickle_protocol": 5}
    marked = model()
    for parameter in marked.parameters():
        parameter.note = "mine"
    tensor = {**dict(marked.named_parameters()), "plain": counted(2)}
    tensor["plain"].note = "mine"
    yield "attributes", tensor, tensor, {}
    torch.serialization.set_crc32_options(False)
    yield "unchecked", state, state, {}
    torch.serialization.set_crc32_options(True)
    yield "short", {"weight": torch.zeros(2, dtype=torch.int16)}, None, {}
    yield "namespace", argparse.Namespace(weight=counted(2)), None, {}
    parameters = dict(net.named_parameters())
    yield "parameters", parameters, parameters, {}
    yield "whole_model", net, None, {}
    yield "a_tensor", counted(3), None, {}
    yield "with_numbers", {"weight": counted(3), "epoch": 3}, None, {}


def main():
    facts = {}
    for name, saved, expected, options in cases():
        torch.save(saved, HERE / f"{name}.pt", **options)
        if expected is not None:
            facts[name] = [{"name": key, "dtype": str(value.dtype)[6:], "shape": list(value.shape),
                            "values": value.detach().double().flatten().tolist()} for key, value in expected.items()]
        else:
            facts[name] = "refused"
    text = json.dumps({"made by": f"torch {torch.__version__}", "files": facts}, separators=(",", ":"))
    (HERE / "torch_files.json").write_text(text.replace("],\"", "],\n\"") + "\n")


main()
