#!/usr/bin/env python3
"""Writes what Hugging Face's BERT computes in golden/bert-*.safetensors: masked tokens and classes of sequences.

    python3 tests/parity/make_bert.py      # needs torch, transformers, safetensors, numpy

In f64, with samples of several lengths, two token types, and 20 steps of SGD. First weights and inputs come from
counter.py.
"""
import numpy as np
import torch
import torch.nn.functional as F
import transformers

import counter
import golden

SAMPLES, TOKENS, CHOSEN, CLASSES, STEPS, RATE = 3, 11, 4, 3, 20, 0.02
LENGTHS = [11, 7, 4]
SIZES = {"vocab_size": 37, "hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 40,
         "max_position_embeddings": 16, "type_vocab_size": 2, "hidden_dropout_prob": 0.0,
         "attention_probs_dropout_prob": 0.0, "pad_token_id": None}  # with one, its row has no gradient


def batch(case, step):
    tokens = counter.below(f"{case}/tokens/{step}", (SAMPLES, TOKENS), SIZES["vocab_size"])
    types = counter.below(f"{case}/types/{step}", (SAMPLES, TOKENS), 2)
    mask = (np.arange(TOKENS)[None, :] < np.array(LENGTHS)[:, None]).astype(np.int64)
    return {"input_ids": torch.from_numpy(tokens), "token_type_ids": torch.from_numpy(types),
            "attention_mask": torch.from_numpy(mask)}


def positions(case, step):
    """Of the tokens to be predicted: CHOSEN of each sample, all before its end."""
    chosen = counter.below(f"{case}/positions/{step}", (SAMPLES, CHOSEN), 1 << 20)
    return torch.from_numpy(chosen % np.array(LENGTHS)[:, None])


def masked_tokens(model, case, step):
    at = positions(case, step)
    logits = model(**batch(case, step)).logits
    logits = torch.gather(logits, 1, at[:, :, None].expand(-1, -1, logits.shape[-1]))
    labels = torch.from_numpy(counter.below(f"{case}/labels/{step}", (SAMPLES, CHOSEN), SIZES["vocab_size"]))
    return logits, F.cross_entropy(logits.flatten(0, 1), labels.flatten())


def classes(model, case, step):
    logits = model(**batch(case, step)).logits
    labels = torch.from_numpy(counter.below(f"{case}/labels/{step}", (SAMPLES,), CLASSES))
    return logits, F.cross_entropy(logits, labels)


def parameters_of(model):
    """Each once: the last layer's weights are the table of tokens, its bias is cls.predictions.bias."""
    for name, parameter in model.named_parameters():
        yield name.replace("cls.predictions.decoder.bias", "cls.predictions.bias"), parameter


def make(name, model_class, run, **sizes):
    config = transformers.BertConfig(**SIZES, **sizes)
    config._attn_implementation = "eager"
    model = model_class(config).double()
    made, start = golden.Golden(name), {}
    with torch.no_grad():
        for key, value in parameters_of(model):
            value.copy_(torch.from_numpy(counter.initial(name, key, tuple(value.shape))))
            start[key] = value.clone()
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE, momentum=0.9)
    for step in range(STEPS):
        logits, loss = run(model, name, step)
        optimizer.zero_grad()
        loss.backward()
        made.add(f"loss/{step}", loss)
        if step == 0:
            made.add("output", logits)
            for key, parameter in parameters_of(model):
                # Softmax does not change when all scores of a query do: the gradient is mere rounding.
                if not key.endswith("attention.self.key.bias"):
                    made.add(f"gradient/{key}", parameter.grad)
        optimizer.step()
    for key, value in parameters_of(model):
        if not key.endswith("attention.self.key.bias"):
            made.add(f"moved/{key}", value.detach() - start[key])
    made.save()


make("bert-masked", transformers.BertForMaskedLM, masked_tokens)
make("bert-classes", transformers.BertForSequenceClassification, classes, num_labels=CLASSES)
