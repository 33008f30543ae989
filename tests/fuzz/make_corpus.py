#!/usr/bin/env python3
"""Writes tests/fuzz/corpus: small inputs of each kind, whole ones and some that are not. The standard library is enough.

Images and PyTorch's files are those of tests/data/golden and tests/nn/golden.
"""
import gzip
import hashlib
import io
import json
import pathlib
import struct
import tarfile
import zipfile

HERE = pathlib.Path(__file__).parent
GOLDEN = HERE.parent / "nn" / "golden"


def seed(target, name, content):
    directory = HERE / "corpus" / target
    directory.mkdir(parents=True, exist_ok=True)
    (directory / name).write_bytes(content.encode() if isinstance(content, str) else content)


def idx(*dims):
    count = 1
    for dim in dims:
        count *= dim
    return bytes([0, 0, 8, len(dims)]) + b"".join(struct.pack(">I", d) for d in dims) + bytes(i % 256 for i in range(count))


def safetensors(tensors, metadata=None):
    header, data = {}, b""
    if metadata:
        header["__metadata__"] = metadata
    for name, dtype, shape, content in tensors:
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [len(data), len(data) + len(content)]}
        data += content
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


def checkpoint_manifest(**changed):
    """As checkpoint/manifest.cpp writes it: what its digest is of is its text without that."""
    file = {"bytes": 100, "sha256": "a" * 64}
    manifest = {"format": "lockstep checkpoint 1", "written_by": "lockstep 0.1.0", "step": 7, "total_steps": 60,
                "epoch": 0, "cursor": 448, "optimizer_steps": 7, "world_size": 2, "run": {"model": "cnn", "seed": "1"},
                "settings": {"ranks": "2"}, "bucket_order": ["fc2.weight", "fc1.weight"],
                "files": {"optimizer.safetensors": file, "weights.safetensors": file}, **changed}
    manifest["sha256"] = hashlib.sha256(json.dumps(manifest, indent=1).encode()).hexdigest()
    return json.dumps(manifest, indent=1)


def pickled(value):
    """Text, a number, a dictionary, or bytes: a value that is pickled already."""
    if isinstance(value, str):
        return b"X" + struct.pack("<I", len(value)) + value.encode()
    if isinstance(value, dict):
        return b"}(" + b"".join(pickled(key) + pickled(content) for key, content in value.items()) + b"u"
    return value if isinstance(value, bytes) else b"K" + bytes([value])


def pickled_tensor(size):
    """The first elements of storage 0."""
    storage = b"(" + pickled("storage") + b"ctorch\nFloatStorage\n" + pickled("0") + pickled("cpu") + b"K\x04tQ"
    return b"ctorch._utils\n_rebuild_tensor_v2\n(" + storage + b"K\0K" + bytes([size]) + b"\x85K\x01\x85\x89NtR"


def torch_file(root):
    """As PyTorch wrote them before 1.6, with one storage of 4 floats."""
    head = b"\x80\x02\x8a\x0a\x6c\xfc\x9c\x46\xf9\x20\x6a\xa8\x50\x19.\x80\x02M\xe9\x03."
    parts = ({"little_endian": b"\x88"}, root, b"](" + pickled("0") + b"e")
    return head + b"".join(b"\x80\x02" + pickled(part) + b"." for part in parts) + struct.pack("<Q4f", 4, 1, 2, 3, 4)


def frame(kind, body):
    return struct.pack("<IB", len(body) + 1, kind) + body


def packed(text):
    return struct.pack("<I", len(text)) + text


def store_frame(kind, body):
    """As comm/tcp/wire.cpp sends them, with CRC-32C of length and content."""
    length, content = struct.pack("<I", len(body) + 1), bytes([kind]) + body
    crc = 0xffffffff
    for byte in length + content:
        crc ^= byte
        for _ in range(8):
            crc = (crc >> 1) ^ (0x82f63b78 if crc & 1 else 0)
    return length + struct.pack("<I", crc ^ 0xffffffff) + content


def hellos():
    """The first byte: what the rest is said to, and in pieces of which size."""
    nonce, proof = b"n" * 32, b"p" * 32
    whole = lambda choice: bytes([31 * 8 + choice])
    listened = b"lockstep" + frame(1, struct.pack("<I", 3) + packed(nonce))
    seed("hello", "caller", whole(0) + listened + frame(33, packed(b"me") + struct.pack("<I", 0) + packed(proof)))
    seed("hello", "caller_byte_by_byte", b"\0" + listened + frame(33, packed(b"me") + struct.pack("<I", 0) + packed(proof)))
    seed("hello", "first_version", whole(0) + b"lockstep" + frame(1, struct.pack("<4I", 1, 2, 1, 7) + packed(b"h") + packed(b"")))
    seed("hello", "too_long", whole(0) + b"lockstep" + struct.pack("<I", 0xffffffff))
    seed("hello", "listener", whole(1) + b"lockstep" + frame(32, packed(nonce)) + frame(34, packed(b"hi") + packed(proof)))
    seed("hello", "refused", whole(1) + b"lockstep" + frame(65, packed(b"no")))
    seed("hello", "store_set", whole(2) + store_frame(2, packed(b"key") + packed(b"value")))
    seed("hello", "store_give_up", whole(2) + store_frame(5, struct.pack("<I", 0) + packed(b"all is well")))
    seed("hello", "store_altered", whole(2) + store_frame(2, packed(b"key") + packed(b"value"))[:-1] + b"X")
    seed("hello", "identity", whole(3) + struct.pack("<3I", 2, 1, 7) + packed(b"host") + packed(b"job"))
    seed("hello", "wrapper", whole(4) + struct.pack("<IB", 9, 0) + struct.pack("<2i", 0, 7) + b"h" + struct.pack("<IBb", 1, 2, 9))
    seed("hello", "helper", whole(5) + struct.pack("<IBi", 4, 10, 1) + struct.pack("<IBqq", 16, 15, 1, 2))


def main():
    hellos()
    seed("idx", "images", idx(2, 3, 4))
    seed("idx", "labels", idx(5))
    seed("idx", "images.gz", gzip.compress(idx(2, 3, 4), mtime=0))
    seed("idx", "labels.gz", gzip.compress(idx(5), mtime=0))
    seed("idx", "huge", bytes([0, 0, 8, 3]) + b"\xff" * 12)

    seed("safetensors", "two", safetensors([("a", "F32", [2, 1], bytes(8)), ("b.c", "I64", [], bytes(8))], {"format": "pt"}))
    seed("safetensors", "types", safetensors([(t, t, [1], bytes(w)) for t, w in (("BF16", 2), ("F64", 8), ("U8", 1), ("I32", 4))]))
    seed("safetensors", "empty", safetensors([]))
    seed("safetensors", "long_header", struct.pack("<Q", 1 << 62) + b"{}")

    seed("index", "one", '{"metadata": {"total_size": 2}, "weight_map": {"w": "a.safetensors"}}')
    seed("index", "outside", '{"weight_map": {"w": "../a.safetensors"}}')
    seed("index", "missing", '{"weight_map": {"w": "a.safetensors", "v": "b.safetensors"}}')

    for path in sorted(GOLDEN.glob("*.pt")):
        if zipfile.is_zipfile(path) and path.stem != "unchecked":  # Python's reader asks for checksums
            with zipfile.ZipFile(path) as archive:
                name = next(n for n in archive.namelist() if n.endswith("/data.pkl"))
                seed("pickle", path.stem, archive.read(name))
    state = {"weight": pickled_tensor(4), "bias": pickled_tensor(1)}
    kept = pickled(state) + b"q\0"
    seed("torch", "checkpoint", torch_file({"epoch": 3, "model": {"state_dict": state}, "optimizer": {"state": {"a": state}},
                                            "best": pickled_tensor(1)}))
    seed("torch", "average", torch_file({"state_dict": state, "state_dict_ema": state}))
    seed("torch", "shared", torch_file({"model": kept, "net": b"h\0", "other": {"again": b"h\0"}}))
    seed("torch", "several", torch_file({"generator": state, "discriminator": {"weight": pickled_tensor(2)}}))
    seed("pickle", "system", b"\x80\x02cos\nsystem\nX\x04\x00\x00\x00true\x85R.")

    seed("pickle", "itself", b"\x80\x02}q\0(X\x01\0\0\0ah\0u.")
    seed("pickle", "python2", b"\x80\x02ccollections\nOrderedDict\n](](U\x01aK\x01ee\x85R.")
    seed("pickle", "objects", b"\x80\x04\x95\x20\0\0\0\0\0\0\0(\x8c\x02os\x8c\x06system\x93)\x81}b\x8f(K\x01\x90(K\x02\x91\x8e\x01\0\0\0\0\0\0\0x"
         b"C\x01y\x8b\x01\0\0\0z20(N1t.")

    seed("text", "ascii", "To be, or not to be.\n")
    seed("text", "wide", "é ß € 𝄞 \u0000 \u07ff \u0800 \uffff \U0010ffff")
    seed("text", "broken", b"ok \xc3 \xed\xa0\x80 \xf4\x90\x80\x80")

    seed("tokens", "whole", b"".join(struct.pack("<H", i % 1000) for i in range(60)))
    seed("tokens", "too_large", b"".join(struct.pack("<H", 65535 - i) for i in range(60)))
    seed("tokens", "odd", bytes(41))
    seed("tokens", "wide", b"".join(struct.pack("<I", i % 1000) for i in range(60)))
    seed("tokens", "llmc", struct.pack("<3I1012x", 20240520, 1, 60) + b"".join(struct.pack("<H", i) for i in range(60)))

    golden = HERE.parent / "data" / "bpe"
    files = [(golden / name).read_bytes() for name in ("vocab.json", "merges.txt")]
    seed("bpe", "golden", b"\0".join([*files, "The bridges bend, they've 12 towns: caf\u00e9 \U0001f309".encode()]))
    byte_tokens = json.dumps({chr(c): i for i, c in enumerate(
        [*range(33, 127), *range(161, 173), *range(174, 256), *range(256, 324)])}).encode()
    seed("bpe", "bytes", b"\0".join([byte_tokens[:-1] + b', "an": 256}', b"a n\n", b"  any text "]))
    seed("bpe", "no_merge", b"\0".join([byte_tokens, b"a b\n", b"ab"]))
    seed("bpe", "nested", b'{"a": [[0]]}\0\0')
    whole = {"model": {"type": "BPE", "vocab": json.loads(byte_tokens[:-1] + b', "an": 256}'), "merges": ["a n"]},
             "pre_tokenizer": {"type": "ByteLevel"}, "added_tokens": [{"id": 257, "content": "<x>"}]}
    seed("bpe", "whole", json.dumps(whole).encode() + b"\0\0any <x> text")
    whole["model"]["merges"] = [["a", "n"]]
    seed("bpe", "pairs", json.dumps(whole).encode() + b"\0\0any text")

    seed("csv", "plain", "label,text\ngood,a b\nbad,\"c, \"\"d\"\"\"\n")
    seed("csv", "lines", "a,b\r\n\"1\n2\",\"\"\r\n\n,\n")
    seed("csv", "open", "a,\"b\nc")
    seed("csv", "beside", "\"a\"b,c\n")
    seed("csv", "utf16", "label,text,id\na,b c,1\n".encode("utf-16"))
    seed("csv", "gzip", gzip.compress(b",text,label\n0,b c,a\n", mtime=0))

    rows = "".join(f"{i},{'ab'[i % 2]},{i % 3}\n" for i in range(24))
    seed("csv", "numbers", "y,kind,n\n" + rows)
    seed("csv", "semicolons", "y;kind;n\r\n" + rows.replace(",", ";").replace("\n", "\r\n").replace("5;b;2", "oops;?;"))

    def npy(kind, shape, content, version=1):
        header = f"{{'descr': '{kind}', 'fortran_order': False, 'shape': {shape}, }}".encode()
        header += b" " * (-(10 + len(header) + 1) % 64) + b"\n"
        return b"\x93NUMPY" + bytes([version, 0]) + struct.pack("<H" if version == 1 else "<I", len(header)) + header + content

    seed("npy", "labels", npy("<i8", "(3,)", struct.pack("<3q", 0, 2, 1)))
    seed("npy", "numbers", npy("<f4", "(2, 3)", struct.pack("<6f", *range(6))))
    seed("npy", "bytes", npy("|u1", "(2, 2, 2, 3)", bytes(range(24)), version=2))
    seed("npy", "huge", npy("<f8", "(4611686018427387904, 4)", b""))
    seed("npy", "records", b"\x93NUMPY\x01\x00\x30\x00{'descr': [('a', '<f4')], 'shape': (1,), }      \n")

    seed("npy", "safetensors", safetensors([("x", "I32", [3], struct.pack("<3i", 0, 2, 1))]))

    def tar(kind, *members):
        out = io.BytesIO()
        with tarfile.open(fileobj=out, mode="w", format=kind) as archive:
            for name, content in members:
                info = tarfile.TarInfo(name)
                info.size = len(content)
                archive.addfile(info, io.BytesIO(content))
        used = out.getvalue().rstrip(b"\0")
        return used + bytes(-len(used) % 512 + 512)

    sample = [("a/0.cls", b"1\n"), ("a/0.png", b"\x89PNG"), ("b" * 120 + "/1.jpg", b"\xff\xd8"), ("b" * 120 + "/1.cls", b"0")]
    seed("tar", "ustar", tar(tarfile.USTAR_FORMAT, *sample))
    seed("tar", "gnu", tar(tarfile.GNU_FORMAT, *sample))
    seed("tar", "pax", tar(tarfile.PAX_FORMAT, ("\u00e4.cls", b"2"), ("\u00e4.png", b""), *sample))
    seed("tar", "cut", tar(tarfile.GNU_FORMAT, *sample)[:2600])

    special = "[PAD]\n[UNK]\n[CLS]\n[SEP]\n[MASK]\n"
    seed("word_pieces", "plain", (special + "a\n##b\nab\n\0Ab abb, b \u00e2\u4e2d").encode())
    seed("word_pieces", "twice", (special + "a\na\n\0a").encode())
    seed("word_pieces", "cased", (special + "A\n##\u00c4\n\0A\u00c4 a").encode())
    seed("word_pieces", "broken", special.encode() + b"\xff\n\0\xff")

    special_tokens = {str(i): {"content": name, "special": True, "normalized": False}
                      for i, name in enumerate(special.split())}
    config = {"do_lower_case": True, "strip_accents": None, "cls_token": "[CLS]", "mask_token": {"content": "[MASK]"},
              "added_tokens_decoder": special_tokens}
    bert_cutting = {"normalizer": {"type": "BertNormalizer", "lowercase": True, "strip_accents": None},
                    "pre_tokenizer": {"type": "BertPreTokenizer"}}
    byte_level = {"normalizer": None, "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": True}}
    for name, *files in [
            ("config", config), ("bert", config, {"model": {"type": "WordPiece"}, **bert_cutting}, {"<x>": 5}),
            ("gpt2", {"add_bos_token": False}, {"model": {"type": "BPE"}, **byte_level,
                                                "added_tokens": [{"id": 0, "content": "[PAD]"}]}),
            ("twice", {}, {}, {"[PAD]": 3})]:
        seed("tokenizer_files", name, b"\0".join(json.dumps(file).encode() for file in files))

    image = {"height": 8, "width": 8, "channels": 1, "mean": [0, 0, 0], "std": [1, 1, 1], "cropped": False}
    base = {"tokens": False, "data": "digits train", "seed": 1, "version": "0.1.0"}
    llama = {"model_type": "llama", "num_attention_heads": 4, "max_position_embeddings": 16, "hidden_act": "silu",
             "rms_norm_eps": 1e-6, "rope_scaling": None, "mlp_bias": False}
    seed("config_json", "llama", json.dumps({**llama, "rope_parameters": {"rope_theta": 5e5, "rope_type": "default"}}))
    seed("config_json", "old", json.dumps({**llama, "rope_theta": 500.0}))
    seed("config_json", "gpt2", json.dumps({"model_type": "gpt2", "n_head": 2, "activation_function": "gelu_new"}))
    seed("config_json", "bert", json.dumps({"model_type": "bert", "num_attention_heads": 12, "hidden_act": "gelu"}))
    gpt = {"name": "gpt", "sample": [4], "classes": 3, "layers": 1, "heads": 2, "width": 4, "context": 4}
    header = json.dumps({"event": "scaling", "format": 1, "settings": {"models": "m"}, "machine": {"CPU": "c"}}) + "\n"
    job = json.dumps({"event": "job", "round": 1, "mode": "weak", "model": "m", "ranks": 2, "batch": 4, "step_ms": 1.5,
                      "samples_per_s": 9, "compute_ms": 1, "exposed_comm_ms": -0.1, "peak_memory_bytes": 1, "backend": "shm",
                      "device": "cpu", "precision": "f32"}) + "\n"
    seed("scaling", "cut", header + job + job[:40])
    seed("scaling", "twice", header + job + job)
    seed("metadata", "cnn", json.dumps({"model": {"name": "cnn", "sample": [8, 8, 1], "classes": 10}, "image": image,
                                        **base}))
    seed("metadata", "gpt", json.dumps({"model": gpt, **base, "tokens": True, "characters": "ab\u00e9"}))
    bert = {"name": "bert", "sample": [4], "classes": 2, "vocabulary": 6, "layers": 1, "heads": 2, "width": 4, "inner": 0,
            "context": 8, "token-types": 2}
    pieces = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "a"]
    seed("metadata", "bert", json.dumps({"model": bert, **base, "tokens": True, "word_pieces": pieces}))
    seed("metadata", "untied", json.dumps({"model": {**gpt, "tied": False}, **base, "tokens": True}))
    seed("metadata", "mlp", json.dumps({"model": {"name": "mlp", "sample": [5], "classes": 2, "hidden": [3, 4]},
                                        "class_names": ["no", "yes"], **base}))
    columns = [{"name": "x", "mean": 1.5, "deviation": 2.0}, {"name": "c", "categories": ["a", "b"]}]
    seed("metadata", "table", json.dumps({"model": {"name": "mlp", "sample": [1], "classes": 1, "categories": [3], "hidden": [4]},
                                          **base, "table": {"columns": columns, "target": {"name": "y", "mean": 0.0, "deviation": 1.0}}}))
    seed("metadata", "huge", json.dumps({"model": {**gpt, "sample": [1 << 24, 1 << 24]}, **base}))

    seed("checkpoint", "manifest", checkpoint_manifest())
    seed("checkpoint", "data", checkpoint_manifest(data={"class names": '["a", "b"]', "digests": '["0123456789abcdef"]'}))
    seed("checkpoint", "negative", checkpoint_manifest(step=-1))
    seed("checkpoint", "huge", checkpoint_manifest(step=1 << 63, world_size=1 << 40))
    seed("checkpoint", "types", checkpoint_manifest(run=[], files="none"))
    seed("checkpoint", "changed", checkpoint_manifest().replace("448", "449"))
    first, second = (f"optimizer-0000{part}-of-00002.safetensors" for part in (0, 1))
    in_parts = {"format": "lockstep checkpoint 2"}
    slices = {first: {"fc1.weight": [0, 2048]}, second: {"fc1.weight": [2048, 7], "fc2.weight": [0, 10]}}
    seed("checkpoint", "parts", checkpoint_manifest(**in_parts, moments=slices))
    seed("checkpoint", "parts-of-none", checkpoint_manifest(**in_parts, moments={}))
    seed("checkpoint", "parts-elsewhere", checkpoint_manifest(**in_parts, moments={"../" + first: {}}))
    seed("checkpoint", "parts-of-others", checkpoint_manifest(**in_parts, moments={first: {}}))
    seed("checkpoint", "parts-huge", checkpoint_manifest(**in_parts, moments={first: {"a": [1 << 63, -1]}, second: {}}))
    seed("checkpoint", "parts-deep", checkpoint_manifest(**in_parts, moments={first: {"a": [[1], 2, 3]}, second: {}}))
    seed("checkpoint", "receipt", "a" * 64 + " 100\n")

    seed("config", "flags", 'data = "digits"\nbatch = 32\nlr = 0.1\nquiet = true\nhidden = [3, 4]\nbetas = "0.9,0.999"\n')
    seed("config", "others", '# a comment\nhosts = "a,b"\nb = 1_000\n"data" = \'\'\'x\'\'\'\nlr = 1e-3\n')
    seed("config", "kinds", "data = 1979-05-27T07:32:00Z\n[table]\na.b = [[1], {c = inf}]\n")
    seed("config", "wrong", 'data = "\\u00e9\\U0001F600"\nbach = 3\n')

    seed("options", "flags", "cnn\n--data\ndigits\n--batch=3\n--quiet\n")
    seed("options", "lists", "--hidden\n1,2\n--hidden=3\n--no_such\n-b\n5\nmlp\n\nQUIET=1\nDATA=x\n")
    seed("options", "odd", "--\n--data=\n-\n--hosts\n--qui\n---\n=\n")

    header = "<BBHiqd"  # kind, ranks, bytes of text, number, step, seconds
    seed("status", "missing", struct.pack(header, 5, 2, 0, 0, 0, 0.0) + struct.pack("<2i", 1, 5))
    seed("status", "saving", struct.pack(header, 2, 0, 3, 0, 0, 0.0) + b"x y")
    seed("status", "defers", struct.pack(header, 1, 0, 0, 0, 0, 1.5))
    seed("status", "checkpointed", struct.pack(header, 10, 0, 0, 0, 120, 0.0))
    seed("status", "line", b"checkpointed 120\n")

    line = "GET /metrics HTTP/1.1\r\n"
    seed("http", "scrape", line + "Host: localhost:9100\r\nAccept: */*\r\nAuthorization: Bearer 0123456789abcdef\r\n\r\n")
    seed("http", "twice", line + "Authorization: a\nauthorization: b\n\n")
    seed("http", "odd", "GET /a b?c HTTP/1.2\r\n:\r\n folded\r\n\r\n")
    seed("http", "endless", line + "A: " + 9000 * "b")

    # Magic, version, operations, rank, ranks, pid, attempt, two times, host; then the state; then records.
    head = struct.pack("<8sIIiiiiqq64s", b"lkflight", 1, 1024, 1, 4, 4711, 0, 10**18, 10**9, b"host-a").ljust(256, b"\0")
    state = struct.pack("<QqqqQI16ii", 2 << 56 | 2 * 10**6, 12, 3 * 10**9, 10**8, 2, 2, 0, 3, *14 * [0], 11)
    state += struct.pack("<qQii", 2 * 10**9, 77, 4712, 0) + 15 * 24 * b"\0" + struct.pack("<Q", 64)
    record = "<QQQqqqQQ"  # number, sequence, bytes, step, issued, completed, what, number
    records = 64 * b"\0" + struct.pack(record, 1, 1, 64, 12, 10**9, 2 * 10**9, 1 << 16 | 4 << 8, 1)
    records += struct.pack(record, 2, 2, 64, 12, 10**9, 0, 3 << 32 | 1 << 16 | 4 << 8 | 4, 2)
    seed("flight", "whole", head + state.ljust(768, b"\0") + records)
    seed("flight", "header", head)
    seed("flight", "other", head.replace(b"lkflight\1", b"lkflight\2"))

    run = {"event": "run", "schema": 1, "command": "c", "lockstep": "0", "model": "m", "parameters": 7, "data": "d",
           "planned_steps": 2, "ranks": [{"host": "h", "device": "cpu"}], "git": {"commit": "a", "branch": "b"},
           "settings": {"lr": {"value": "0.1", "from": "default"}}, "unix_s": 1.5}
    events = [run, {"event": "data", "name": "d train", "samples": 9, "classes": 2},
              {"event": "step", "step": 1, "epoch": 1, "loss": 0.5, "lr": 0.1, "grad_norm": None, "step_ms": 2.5,
               "comm_wait_ms": 0.0, "samples_per_s": 12.8, "samples": 32, "memory_bytes": 4096, "unix_s": 1.75},
              {"event": "eval", "step": 1, "epoch": 1, "split": "val", "loss": 0.25, "accuracy": None, "ema": True},
              {"event": "checkpoint", "step": 1, "bytes": 4096, "write_ms": 1.5, "held_up_ms": 0.5},
              {"event": "warning", "text": "w", "unix_s": 2}, {"event": "restart", "attempt": 1, "cause": "c"},
              {"event": "resume", "step": 1, "world_size": 2},
              {"event": "final", "steps": 1, "wall_s": 3.5, "loss": 0.25, "accuracy": 0.5, "params_sha256": "ab",
               "peak_memory_bytes": [4096], "best": {"metric": "loss", "value": 0.25, "step": 1}}]
    lines = [json.dumps(event, separators=(",", ":")) for event in events]
    seed("metrics", "whole", "".join(line + "\n" for line in lines))
    seed("metrics", "steps", (lines[2] + "\n") * 5 + lines[2][:40])
    seed("metrics", "table", "event,step,epoch,split,loss,accuracy,lr,wall_s,own\nstep,1,1,,0.5,,0.1,,\n"
         "eval,1,1,val,0.5,0.25,,,7\nfinal,1,,,0.5,0.25,,2,\n")

    spans = [("data", 1, 0, 9), ("step", 0, 10, 90), ("fc linear", 1, 10, 20), ("fc linear backward", 1, 30, 30),
             ("allreduce", 1000, 50, 20), ("wait for bucket", 1, 60, 10), ("optimizer", 1, 80, 10)]
    trace = '{"displayTimeUnit":"ms","traceEvents":[{"name":"lockstep","ph":"M","pid":0,"tid":0,"args":{}},\n'
    trace += '{"name":"process_name","ph":"M","pid":0,"tid":0,"args":{"name":"rank 0 (host h)"}},\n'
    for step in (1, 2):
        for name, row, begin, took in spans:
            trace += (f'{{"name":"{name}","pid":0,"tid":{row},"ts":{100 * step + begin}.5,"ph":"X","dur":{took}.25,'
                      f'"args":{{"step":{step}}}}},\n')
    seed("trace", "whole", trace + "]}\n")
    seed("trace", "cut", trace[:-30])

    gradient = {"name": "w", "count": 12, "dtype": "f32", "rows": 3, "ready_ms": 1.5}
    profile = {"kind": "step profile", "format": 1, "model": "m", "batch": 8, "precision": "f32", "device": "cpu",
               "threads": 1, "ranks": 1, "version": "0", "backward_ms": 2.5, "update_ms": 0.5, "copy_bytes_per_s": 1e10,
               "flops_per_step": 1e9, "memory_bytes": 1000, "slot_alignment": 64,
               "gradients": [gradient, {**gradient, "name": "b", "rows": 1}], "step_ms": [3, 3.25]}
    seed("simulate", "profile", json.dumps(profile))
    seed("simulate", "cut", json.dumps(profile)[:200])
    seed("simulate", "times", "".join(json.dumps({"collective": "allreduce", "bytes": n, "time_us": n / 1000, "world_size": 2})
                                      + "\n" for n in (8, 1024, 1048576)))


main()
