#!/usr/bin/env python3
"""Makes golden.json: texts and what Hugging Face's tokenizers (pip install tokenizers) makes of them, with a small
vocabulary in lower case without accents and with one that keeps both."""
import json
import pathlib
import unicodedata

import tokenizers
from tokenizers import BertWordPieceTokenizer

HERE = pathlib.Path(__file__).parent
SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
TEXTS = [
    "Hello, World!", "", "   ", "don't can't it's", "$100 + 20% = ^120^ `code` ~tilde~ <a@b.c> [MASK] #tag ##tag",
    "\u0130stanbul \u00c0\u00c9\u00ce\u00f5\u00fc na\u00efve fa\u00e7ade", "\u2014 \u201cquoted\u201d \u2026 \u00a1hola! \u00bfqu\u00e9?",
    "\ufb01ne \u00bd km\u00b2 \u2103 \u212b", "\u65e5\u672c\u8a9e\u30c6\u30ad\u30b9\u30c8 \ud55c\uad6d\uc5b4 \u4e2d\u6587\u5b57abc",
    "emoji \U0001f600\U0001f44d\U0001f3fd zero\u200bwidth soft\u00adhyphen \ufeffmark", "\u00c5A\u030a \u1e9e \u00df \u01c4 \u0149 \u01f0 \u0390",
    "\u03a3\u03af\u03c3\u03c5\u03c6\u03bf\u03c2 \u03a3\u0391\u03a3 \u03a9", "\u0660\u0661\u0662 \u0939\u093f\u0928\u094d\u0926\u0940 \u0e44\u0e17\u0e22",
    "tab\there\u00a0nbsp\u3000ideographic\u2003em\r\nline\x0bvertical\x0cfeed\x1fcontrol\x00nul\x7fdel\x85next",
    "unknown\ufffdreplacement \ue000private \U0001f9ff", "a" * 100 + " b", "a" * 101 + " b",
    "words wording worded words", "w\u0301 a\u0327\u0301", "x\u20dd 1\u20e3", "3.14-15/92_65:35;89",
]


def characters(text: str, cased: bool) -> set:
    return {c for c in (text if cased else unicodedata.normalize("NFD", text).lower()) if not c.isspace() and c.isprintable()}


def vocabulary(cased: bool) -> list:
    # Some signs are left out, so that words with them are unknown.
    alphabet = sorted(set().union(*(characters(text, cased) for text in TEXTS)) - {"\u20dd", "\ud55c", "~"})
    pieces = SPECIAL + alphabet + ["##" + c for c in alphabet if unicodedata.category(c)[0] != "P"]
    for word in ("word", "##s", "##ing", "##ed", "hello", "wor", "##ld", "quoted", "tab", "12", "##20", "can", "don"):
        pieces.append(word)
    return list(dict.fromkeys(pieces + (["World", "Hello", "WORD"] if cased else [])))


def main():
    golden = {"tokenizers": tokenizers.__version__, "cases": []}
    for cased in (False, True):
        pieces = vocabulary(cased)
        tokenizer = BertWordPieceTokenizer({piece: i for i, piece in enumerate(pieces)}, lowercase=not cased,
                                           strip_accents=not cased, handle_chinese_chars=True, clean_text=True)
        golden["cased" if cased else "uncased"] = pieces
        for text in TEXTS:
            golden["cases"].append({"cased": cased, "text": text,
                                    "tokens": tokenizer.encode(text, add_special_tokens=False).ids})
    (HERE / "golden.json").write_text(json.dumps(golden, ensure_ascii=True, separators=(",", ":")) + "\n")


if __name__ == "__main__":
    main()
