#!/usr/bin/env python3
"""Writes a small vocabulary of GPT-2's kind, vocab.json and merges.txt, and into golden.json what Hugging Face's
tokenizers make of some texts with it.

    python3 tests/data/bpe/make_bpe.py      # needs: pip install tokenizers
"""
import json
import pathlib

import tokenizers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

HERE = pathlib.Path(__file__).parent
END = "<|endoftext|>"

# What the merges are learnt from: enough for words of several merges, and for merges across the bytes of a character.
LESSON = """
The river bends before it reaches the town, and the town's bridges bend with it. They've stood there for 400 years; it's
said that they'll stand for 400 more. "Who'd have built them?" asked the miller. "I'm told that we did," said the mason,
"and we're going to mend them, though we've neither lime nor stone." In 1842 the water rose 3.5 metres in 12 hours.

Der Fluß biegt sich vor der Stadt; die Brücken biegen sich mit. Où est le café ? Là-bas, près de l'église où l'été
s'achève. Ποταμός, γέφυρα, πόλη. Река, мост, город. 川 橋 町 川 橋 町. 😀 😀 🌉

    for bridge in bridges:
        if bridge.stands():
            count += 1      # there are four
"""

TEXTS = [
    "",
    "a",
    " ",
    "The river bends before it reaches the town.",
    "they've, it's, I'm, we're, they'll, who'd, don't; IT'S, They'Ve; 's 't 're 've 'm 'll 'd; ''s",
    "400 years, 3.5 metres, 12hours, x2y3, ½ ⅷ ٣٤ ²",
    "  two  blanks   three \t tab\n\nlines \r\n end  ",
    " leading and trailing ",
    "\n",
    "   \n   x",
    "café CAFÉ cafe\u0301 Straße ποταμός город 川橋町 橋",
    "😀😀 🌉👩‍👩‍👧‍👦🏳️‍🌈 \u200b\ufeff",
    "no\u00a0break \u2003em\u3000ideographic\u0085next\u2028line\u1680ogham\u180emongolian",
    "!?... --- ***bold*** (a+b)*c == d[e]->f; https://example.org/a?b=c&d=%20",
    END + " is a text here" + END,
    "\u0000\u0001\u007f\u0080\u009f\u00ad\u00ff\u0100\u07ff\u0800\uffff\U0010ffff",
    "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa" * 8,
    "bridgebridgesbridgebendsbend" * 3,
    "_under_score__ CamelCase snake_case1 1st",
    LESSON,
]


def main():
    trained = Tokenizer(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trained.train_from_iterator([LESSON], trainers.BpeTrainer(
        vocab_size=480, initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()), show_progress=False))
    vocabulary, merges = map(pathlib.Path, trained.model.save(str(HERE)))
    # GPT-2 has it last.
    tokens = json.loads(vocabulary.read_text("utf-8"))
    tokens[END] = len(tokens)
    vocabulary.write_text(json.dumps(tokens, ensure_ascii=False) + "\n", "utf-8")

    reader = Tokenizer(models.BPE.from_file(str(vocabulary), str(merges)))
    reader.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    reader.decoder = decoders.ByteLevel()
    reader.add_special_tokens([END])
    cases = []
    for text in TEXTS:
        numbers = reader.encode(text).ids
        assert reader.decode(numbers, skip_special_tokens=False) == text, text
        cases.append({"text": text, "tokens": numbers})
    (HERE / "golden.json").write_text(json.dumps({"tokenizers": tokenizers.__version__, "cases": cases}) + "\n")


main()
