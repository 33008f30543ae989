"""Inference in PyTorch on one thread, which measures on command.

Started by bench/infer in the peer's environment. Reads commands from stdin, one JSON object per line, and answers each
with one on what was stdout. {"do": "build", "model": M, "configuration": C}, then {"do": "run", "count": N} for image
models, which answers "result_ms", or {"do": "generate", "prompt": P, "tokens": N} for gpt and gpt2, which answers
"first_token_ms" and "token_ms".

Configurations of image models: eager, channels_last, freeze (torch.jit's freeze and optimize_for_inference, which fold
normalisations into convolutions), compile (torch.compile with freezing, which does too). Of gpt: eager (keys and values
in a cache that grows by torch.cat), static (in one that is there from the start) and compile (torch.compile of that).
"""
import json
import os
import sys
import time

IMAGES = {"resnet18": 224, "resnet50": 224, "resnet18-cifar": 32}


class Images:
    def __init__(self, torch, model: str, configuration: str):
        from models import ResNet

        self.torch = torch
        blocks = [3, 4, 6, 3] if model == "resnet50" else [2, 2, 2, 2]
        module = ResNet(blocks, model == "resnet50", model == "resnet18-cifar", 1000).eval()
        side = IMAGES[model]
        self.x = torch.rand(1, 3, side, side)
        if "channels_last" in configuration:
            module = module.to(memory_format=torch.channels_last)
            self.x = self.x.to(memory_format=torch.channels_last)
        if configuration.startswith("freeze"):
            module = torch.jit.optimize_for_inference(torch.jit.freeze(torch.jit.trace(module, self.x)))
        if configuration.startswith("compile"):
            import torch._inductor.config

            torch._inductor.config.freezing = True
            module = torch.compile(module)
        self.module = module
        self.run(5)

    def run(self, count: int) -> dict:
        times = []
        with self.torch.no_grad():
            for _ in range(count):
                begin = time.perf_counter()
                y = self.module(self.x)
                times.append(1e3 * (time.perf_counter() - begin))
        return {"result_ms": times, "size": list(y.shape)}


class Text:
    """Greedy generation with a key/value cache over the modules of models.py."""

    def __init__(self, torch, model: str, configuration: str):
        from models import Gpt

        self.torch = torch
        self.most = 1024 if model == "gpt2" else 256
        self.gpt = Gpt(12, 12, 768, self.most, 50257) if model == "gpt2" else Gpt(4, 4, 256, self.most, 256)
        self.gpt.eval()
        self.configuration = configuration
        heads, width = self.gpt.h[0].heads, self.gpt.wte.weight.shape[1]
        self.cache = [torch.zeros(2, 1, heads, self.most, width // heads) for _ in self.gpt.h]
        self.step = self.static_step
        if configuration == "compile":
            self.step = torch.compile(self.static_step, dynamic=False)
        self.generate(list(range(1, 9)), 4)

    def attend(self, block, x, read):
        n, t, c = x.shape
        q, k, v = (part.view(n, t, block.heads, -1).transpose(1, 2) for part in block.c_attn(block.ln_1(x)).split(c, 2))
        y = read(q, k, v)
        x = x + block.c_proj(y.transpose(1, 2).reshape(n, t, c))
        return x + block.c_out(self.torch.nn.functional.gelu(block.c_fc(block.ln_2(x)), approximate="tanh"))

    def prefill(self, tokens):
        """All of the prompt at once; fills both kinds of cache."""
        F, gpt = self.torch.nn.functional, self.gpt
        t = tokens.shape[1]
        x = gpt.wte(tokens) + gpt.wpe.weight[:t]
        self.grown = []
        for block, cache in zip(gpt.h, self.cache):
            def read(q, k, v, cache=cache):
                cache[0][:, :, :t], cache[1][:, :, :t] = k, v
                self.grown.append((k, v))
                return F.scaled_dot_product_attention(q, k, v, is_causal=True)
            x = self.attend(block, x, read)
        return gpt.lm_head(gpt.ln_f(x[:, -1]))

    def growing_step(self, token, at: int):
        F, gpt, torch = self.torch.nn.functional, self.gpt, self.torch
        x = gpt.wte(token) + gpt.wpe.weight[at:at + 1]
        for i, block in enumerate(gpt.h):
            def read(q, k, v, i=i):
                before = self.grown[i]
                k, v = torch.cat((before[0], k), 2), torch.cat((before[1], v), 2)
                self.grown[i] = (k, v)
                return F.scaled_dot_product_attention(q, k, v)
            x = self.attend(block, x, read)
        return gpt.lm_head(gpt.ln_f(x[:, -1]))

    def static_step(self, token, place, mask):
        F, gpt = self.torch.nn.functional, self.gpt
        x = gpt.wte(token) + gpt.wpe(place)
        for block, cache in zip(gpt.h, self.cache):
            def read(q, k, v, cache=cache):
                cache[0].index_copy_(2, place, k)
                cache[1].index_copy_(2, place, v)
                return F.scaled_dot_product_attention(q, cache[0], cache[1], attn_mask=mask)
            x = self.attend(block, x, read)
        return gpt.lm_head(gpt.ln_f(x[:, -1]))

    def generate(self, prompt: list, tokens: int) -> dict:
        torch, times = self.torch, []
        with torch.no_grad():
            last = time.perf_counter()
            logits = self.prefill(torch.tensor([prompt]))
            at = len(prompt)
            mask = torch.zeros(1, 1, 1, self.most, dtype=torch.bool)
            mask[..., :at] = True
            for made in range(tokens):
                token = int(logits.argmax(-1))
                now = time.perf_counter()
                times.append(1e3 * (now - last))
                last = now
                if made + 1 == tokens:
                    break
                given = torch.tensor([[token]])
                if self.configuration == "eager":
                    logits = self.growing_step(given, at)
                else:
                    mask[..., at] = True
                    logits = self.step(given, torch.tensor([at]), mask)
                at += 1
        return {"first_token_ms": times[:1], "token_ms": times[1:]}


def main() -> None:
    # Libraries print where they like: the answers' channel is ours alone.
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    task = None
    try:
        import torch

        torch.set_num_threads(1)
        torch.manual_seed(1)
        for line in sys.stdin:
            command = json.loads(line)
            do = command.pop("do")
            if do == "build":
                kind = Images if command["model"] in IMAGES else Text
                task = kind(torch, **command)
                answer = {"built": True}
            else:
                answer = getattr(task, do)(**command)
            answers.write(json.dumps(answer) + "\n")
    except (Exception, KeyboardInterrupt) as error:  # one line for the caller, whatever it was
        answers.write(json.dumps({"error": (f"{type(error).__name__}: {error}".splitlines() or [""])[0]}) + "\n")
        answers.flush()
        os._exit(1)
    answers.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
