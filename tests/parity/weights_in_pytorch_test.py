#!/usr/bin/env python3
"""Weights from lockstep in PyTorch, and the other way round, with the packages that people use.

    weights_in_pytorch_test.py --lockstep build/lockstep --source DIRECTORY

Exit code 77 where torch, torchvision, transformers, safetensors or numpy is not installed.
"""
import argparse
import hashlib
import json
import os
import pathlib
import subprocess
import sys
import tempfile
import unittest

try:
    import numpy as np
    import safetensors.torch
    import torch
    import torch.nn.functional as F
    import torchvision
    import transformers
except ImportError as error:
    print(f"skipped: {error}")
    sys.exit(77)

import counter

ARGUMENTS = argparse.ArgumentParser()
ARGUMENTS.add_argument("--lockstep", required=True)
ARGUMENTS.add_argument("--source", type=pathlib.Path, required=True)
OPTIONS, REST = ARGUMENTS.parse_known_args()

TEXT = "The quick brown fox jumps over the lazy dog; " * 40
TINY_GPT = ["--layers", "2", "--heads", "2", "--width", "16", "--context", "8"]
NO_STEP = ["--steps", "1", "--lr", "0", "--weight-decay", "0"]  # parameters stay as they are


def sha256_of(parameters):
    """As lockstep has it: names and little-endian f32 bytes, in name order."""
    digest = hashlib.sha256()
    for name in sorted(parameters):
        digest.update(name.encode())
        digest.update(parameters[name].detach().contiguous().numpy().astype("<f4").tobytes())
    return digest.hexdigest()


class Weights(unittest.TestCase):
    def setUp(self):
        self.holder = tempfile.TemporaryDirectory()
        self.directory = pathlib.Path(self.holder.name)
        (self.directory / "text").write_text(TEXT)

    def tearDown(self):
        self.holder.cleanup()

    def lockstep(self, *arguments, fails=False):
        environment = os.environ | {"CUDA_VISIBLE_DEVICES": ""}
        done = subprocess.run([OPTIONS.lockstep, *map(str, arguments)], cwd=self.directory, env=environment, text=True,
                              stdin=subprocess.DEVNULL, capture_output=True, timeout=120)
        if fails:
            self.assertNotEqual(done.returncode, 0)
            return done.stderr
        self.assertEqual(done.returncode, 0, done.stdout + done.stderr)
        return done.stdout

    def train(self, *arguments):
        """The run's last event, and the state that it saved."""
        (self.directory / "saved").unlink(missing_ok=True)
        self.lockstep("train", *arguments, "--save", "saved", "--metrics", "metrics.jsonl", "--quiet")
        events = [json.loads(line) for line in (self.directory / "metrics.jsonl").read_text().splitlines()]
        return events[-1], safetensors.torch.load_file(self.directory / "saved")

    def expect_strict(self, model, event, state):
        model.load_state_dict(state, strict=True)
        self.assertEqual(sha256_of(dict(model.named_parameters())), event["params_sha256"])

    def peers(self):
        sys.path.insert(0, str(OPTIONS.source / "bench/peers/torch"))
        import models
        return models

    # From lockstep.

    def test_torchvisions_resnets_load_ours(self):
        for name in ("resnet18", "resnet34", "resnet50"):
            event, state = self.train(name, "--data", "random:3x32x32,4", "--batch", "4", "--steps", "2")
            model = getattr(torchvision.models, name)(num_classes=10)
            self.expect_strict(model, event, state)
            self.assertEqual(model.bn1.num_batches_tracked.item(), 2)

    def test_peers_load_ours(self):
        for name, make, data in (("linear", "Linear", "random:5,8"), ("mlp", "Mlp", "random:1x28x28,8"),
                                 ("cnn", "Cnn", "random:1x28x28,8")):
            self.expect_strict(getattr(self.peers(), make)(),
                               *self.train(name, "--data", data, "--classes", "10", "--batch", "4", "--steps", "3"))

    def test_pytorch_loads_what_is_saved_for_it(self):
        arguments = ["cnn", "--data", "random:1x28x28,8", "--batch", "4", "--steps", "3"]
        event, state = self.train(*arguments)
        for name in ("saved.pt", "saved.pth", "saved.bin"):
            self.lockstep("train", *arguments, "--save", name, "--quiet")
            for options in ({}, {"mmap": True}):
                loaded = torch.load(self.directory / name, weights_only=True, **options)
                self.assertEqual(list(loaded), list(state))
                for key, value in state.items():
                    self.assertTrue(torch.equal(loaded[key], value), f"{name}: {key}")
                self.expect_strict(self.peers().Cnn(), event, loaded)

    def gpt2_config(self):
        return transformers.GPT2Config(n_layer=2, n_head=2, n_embd=16, n_positions=8, vocab_size=len(set(TEXT)),
                                       bos_token_id=0, eos_token_id=0)

    def test_from_pretrained_loads_ours_and_finds_the_same_loss(self):
        characters = sorted(set(TEXT))
        tokens = [characters.index(c) for c in TEXT]
        validation = tokens[len(tokens) - len(tokens) // 10:]
        rows = (len(validation) - 1) // 8
        x, labels = (torch.tensor(validation[i:i + 8 * rows]).view(rows, 8) for i in (0, 1))
        for name in ("gpt", "llama"):
            event, state = self.train(name, *TINY_GPT, "--data", "text:text", "--steps", "30", "--lr", "0.01")
            self.lockstep("train", name, *TINY_GPT, "--data", "text:text", "--steps", "30", "--lr", "0.01", "--quiet",
                          "--save", f"{name}/")
            model, report = transformers.AutoModelForCausalLM.from_pretrained(
                self.directory / name, output_loading_info=True)
            self.assertFalse(report["missing_keys"] or report["unexpected_keys"] or report["mismatched_keys"], report)
            self.expect_strict(model.transformer if name == "gpt" else model, event, state)
            with torch.no_grad():
                loss = F.cross_entropy(model.eval()(x).logits.flatten(0, 1), labels.flatten()).item()
            self.assertLess(loss, 0.9 * np.log(len(characters)))  # it has learnt something
            self.assertAlmostEqual(loss, event["loss"], delta=1e-4 * loss)

    def test_the_committed_file_loads_in_transformers(self):
        state = safetensors.torch.load_file(OPTIONS.source / "tests/parity/golden/weights/lockstep_wrote.safetensors")
        config = transformers.GPT2Config(n_layer=2, n_head=2, n_embd=8, n_positions=6, vocab_size=11, bos_token_id=0,
                                         eos_token_id=0)
        model = transformers.GPT2Model(config)
        model.load_state_dict(state, strict=True)
        for name, value in model.named_parameters():
            np.testing.assert_array_equal(value.detach().numpy(), counter.initial("weights", name, tuple(value.shape)))

    # To lockstep: after a step that moves no parameter, what it saves is what it was given.

    def expect_read(self, file, expected, *arguments):
        event, state = self.train(*arguments, "--weights", file, *NO_STEP)
        for name, value in expected.items():
            self.assertTrue(torch.equal(state[name], value), f"{file}: {name}")
        self.assertEqual(event["params_sha256"], sha256_of({name: state[name] for name in expected}))

    def test_we_load_torchvisions_resnet18(self):
        model = torchvision.models.resnet18(num_classes=10)
        expected = {name: value.detach() for name, value in model.named_parameters()}
        state = model.state_dict()
        torch.save(state, self.directory / "zip.pth")
        torch.save(state, self.directory / "legacy.pth", _use_new_zipfile_serialization=False)
        torch.save({"epoch": 3, "state_dict": torch.nn.DataParallel(model).state_dict()}, self.directory / "wrapped.pt")
        torch.save(model.half().state_dict(), self.directory / "half.pth")
        model.float()
        safetensors.torch.save_file(state, self.directory / "safe")
        uncounted = {name: value for name, value in state.items() if "num_batches_tracked" not in name}
        torch.save(uncounted, self.directory / "old.pth")
        for file in ("zip.pth", "legacy.pth", "wrapped.pt", "safe", "old.pth"):
            self.expect_read(file, expected, "resnet18", "--data", "random:3x32x32,4", "--batch", "4")
        rounded = {name: value.half().float() for name, value in expected.items()}
        self.expect_read("half.pth", rounded, "resnet18", "--data", "random:3x32x32,4", "--batch", "4")

    def test_mobilenet_both_ways(self):
        for multiplier in (1.0, 0.35):
            model = torchvision.models.mobilenet_v2(num_classes=10, width_mult=multiplier)
            torch.save(model.state_dict(), self.directory / "theirs.pth")
            arguments = ["mobilenet-v2", "--data", "random:3x32x32,4", "--batch", "4"]
            if multiplier != 1.0:
                arguments += ["--width-multiplier", str(multiplier)]
            self.expect_read("theirs.pth", dict(model.named_parameters()), *arguments)
            event, state = self.train(*arguments, "--steps", "1", "--lr", "1e-3")
            self.expect_strict(model, event, state)

    def test_we_load_transformers_gpt2(self):
        model = transformers.GPT2LMHeadModel(self.gpt2_config())
        model.save_pretrained(self.directory / "whole")
        model.save_pretrained(self.directory / "shards", max_shard_size="8KB")
        torch.save(model.state_dict(), self.directory / "pytorch_model.bin")
        expected = {name: value.detach() for name, value in model.transformer.named_parameters()}
        self.assertTrue((self.directory / "shards/model.safetensors.index.json").exists())
        for file in ("whole/model.safetensors", "shards/model.safetensors.index.json", "pytorch_model.bin"):
            self.expect_read(file, expected, "gpt", *TINY_GPT, "--data", "text:text")

    def test_we_load_what_save_model_makes_of_gpt2(self):
        """Tensors that are one are written once: the table of tokens as lm_head.weight."""
        model = transformers.GPT2LMHeadModel(self.gpt2_config())
        safetensors.torch.save_model(model, str(self.directory / "once"))
        expected = {name: value.detach() for name, value in model.transformer.named_parameters()}
        self.expect_read("once", expected, "gpt", "--heads", "2", "--data", "text:text")

    def test_we_load_a_gpt2_with_a_head_of_its_own(self):
        config = self.gpt2_config()
        config.tie_word_embeddings = False
        model = transformers.GPT2LMHeadModel(config).eval()
        torch.save(model.state_dict(), self.directory / "untied.bin")
        expected = {name.removeprefix("transformer."): value.detach() for name, value in model.named_parameters()}
        self.assertFalse(torch.equal(expected["lm_head.weight"], expected["wte.weight"]))
        self.expect_read("untied.bin", expected, "gpt", "--heads", "2", "--data", "text:text")

    def test_we_load_llama_by_its_config(self):
        for tied in (False, True):
            config = transformers.LlamaConfig(
                num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, hidden_size=32, bos_token_id=0,
                intermediate_size=48, max_position_embeddings=16, vocab_size=50, eos_token_id=0, rope_theta=500.0,
                rms_norm_eps=1e-6, tie_word_embeddings=tied)
            model = transformers.LlamaForCausalLM(config).eval()
            model.save_pretrained(self.directory / f"llama-{tied}")
            tokens = torch.randint(50, (6 * 16 + 1,))
            tokens.short().numpy().tofile(self.directory / "tokens.bin")
            with torch.no_grad():
                logits = model(tokens[:-1].view(6, 16)).logits
            expected = torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[1:])
            event = json.loads(self.lockstep("eval", "llama", "--weights", f"llama-{tied}/model.safetensors", "--data",
                                             "tokens:tokens.bin", "--split", "all", "--json"))
            self.assertAlmostEqual(event["loss"], expected.item(), delta=1e-5)

    def test_we_load_compiled_and_flattened_models(self):
        model = torchvision.models.resnet18(num_classes=10)
        torch.nn.utils.vector_to_parameters(torch.nn.utils.parameters_to_vector(model.parameters()), model.parameters())
        expected = {name: value.detach() for name, value in model.named_parameters()}
        data = ["resnet18", "--data", "random:3x32x32,4", "--batch", "4"]
        torch.save(model.state_dict(), self.directory / "flat.pth")
        self.expect_read("flat.pth", expected, *data)
        torch.save(torch.compile(model).state_dict(), self.directory / "compiled.pth")
        self.expect_read("compiled.pth", expected, *data)

    # Prefixes, against what PyTorch says.

    def test_prefixes_are_refused_in_pytorchs_words(self):
        model = self.peers().Linear()
        state = torch.nn.DataParallel(model).state_dict()
        torch.save(state, self.directory / "wrapped.pt")
        linear = ["linear", "--data", "random:5,8", "--classes", "10"]
        self.expect_read("wrapped.pt", dict(model.named_parameters()), *linear)
        ours = self.lockstep("train", *linear, "--weights", "wrapped.pt", "--keep-prefix", *NO_STEP, fails=True)
        with self.assertRaises(RuntimeError) as theirs:
            model.load_state_dict(state)
        for part in ("Missing key(s) in state_dict: ", "Unexpected key(s) in state_dict: "):
            keys = str(theirs.exception).split(part)[1].split(". ")[0].strip()
            self.assertIn(keys, ours)


unittest.main(argv=[sys.argv[0], *REST])
