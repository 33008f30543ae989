"""The words of the documents: the field's terms, not private ones, and no phrases that are hard to read.

  prose_test.py [--source DIR] [unittest's arguments]

RETIRED is the one table: a scope, a pattern, and what to write instead. Scopes are the prose of documents, and of the
sources comments, texts (help, errors), identifiers and file names; READERS says what each of them reads. Phrases are
retired in WORDS; identifiers and file names have rows of their own. FIELDS_OWN lists where a retired word is a term of
the field. In WORDS, no sentence has TOO_MANY of CLAUSE_WORDS.
"""
import argparse
import enum
import functools
import pathlib
import re
import sys
import unittest

sys.dont_write_bytecode = True
parser = argparse.ArgumentParser()
parser.add_argument("--source", type=pathlib.Path, default=pathlib.Path(__file__).resolve().parents[2])
places, others = parser.parse_known_args()
SOURCE = places.source.absolute()


class Scope(enum.Flag):
    PROSE = enum.auto()
    COMMENTS = enum.auto()
    TEXTS = enum.auto()
    IDENTIFIERS = enum.auto()
    FILE_NAMES = enum.auto()


# Where phrases are retired.
WORDS = Scope.PROSE | Scope.COMMENTS | Scope.TEXTS
# Words that are terms of the field in some places, which regular expressions of paths name.
FIELDS_OWN = [
    (r"houses?", r"data/cifar\.cpp", "CIFAR-100's name of a class"),
    (r"lanes?", r"base/hash|nn/ops/|comm/reduce|tests/soft_cuda/|tests/nn/", "of a warp or a vector register"),
    (r"told|tells?|telling", r"tests/data/bpe/", "in a text that is tokenized"),
]


def in_names(words):
    """File names with one of the words among theirs."""
    return rf"(?:\w+_)?(?:{words})s?(?:_\w+)?"


# Phrases are whole words in any case. Patterns of identifiers are whole identifiers, those of file names whole names
# without their ending.
RETIRED = [
    # Private words
    (WORDS, r"rooms?", "module"),
    (WORDS, r"arrows?", "dependency, include"),
    (WORDS, r"houses?", "layering, modules"),
    (WORDS, r"seats?|desks?", "rank control block, node control block"),
    (WORDS, r"door ?bells?|bells?|l(?:ie|ies|ying) down|g(?:et|ets|etting) up", "wakeup pipe, announce or end sleep"),
    (WORDS, r"rosters?", "intra-host synchronisation"),
    (WORDS, r"lanes?", "channel"),
    (WORDS, r"visitors?", "pending peer"),
    (WORDS, r"turn(?:s|ed|ing)? away", "reject"),
    (WORDS, r"verdicts?", "abort reason, root cause"),
    (WORDS, r"look(?:s|ed|ing)? around", "check peers"),
    (WORDS, r"whereabouts|roll calls?", "rank progress, progress exchange"),
    (WORDS, r"ledgers?", "operation log"),
    (WORDS, r"long enough bytes", "preferred bucket size"),
    (WORDS, r"ready order", "rebuilt buckets"),
    (WORDS, r"record(?:ed|ing) (?:of )?steps?|c(?:ome|omes|oming|ame) again", "CUDA graph, repeats"),
    (WORDS, r"late results?|readbacks?", "asynchronous scalars"),
    (WORDS, r"siblings?", "stream of its own"),
    (WORDS, r"forg[eo]t(?:s|ten|ting)? (?:the |a |all )?gradients?", "clear the gradient"),
    (WORDS, r"asides?", "saved preactivation"),
    (WORDS, r"recipes?", "factory"),
    (WORDS, r"damage[ds]?", "corrupt"),
    (WORDS, r"made[- ]up", "synthetic"),
    (WORDS, r"foreign (?:bytes|data|files?)", "untrusted input"),
    (WORDS, r"(?:model|checkpoint) cards?|adopt(?:s|ed|ing)? (?:a |the )?cards?", "metadata, checkpoint manifest"),
    (WORDS, r"own names?|left[- ]behind", "local addresses, stale directories"),
    # Phrases
    (WORDS, r"behind", "after"),
    (WORDS, r"in front(?: of)?", "before"),
    (WORDS, r"held (?:to|against)|holds? \w+(?: \w+)? against", "checked against, compared with"),
    (WORDS, r"judg(?:e|es|ed|ing)", "evaluate, measure"),
    (WORDS, r"told|tells?|telling", "given, sent, reported"),
    (WORDS, r"go(?:es|ing)? on|went on|gone on", "resume, continue"),
    (WORDS, r"t(?:ake|akes|aken|aking|ook) turns|in turns", "alternate"),
    (WORDS, r"len(?:d|ds|t|ding)", "share"),
    (WORDS, r"meets?|meetings?|met", "rendezvous, connect"),
    (WORDS, r"counsels?", "hint, remedy"),
    (WORDS, r"(?<!rank[ ])(?:\d(?:[\d,.]*\d)?|one|two|batch) (?:(?!(?:in|of|on|within|than) )[\w/-]+ ){0,2}an? "
            r"(?:rank|step|host|line|class|input|operation|primitive|device|core|second|worker|link|slice|channel|pair)"
            r"|an? [\w-]+ an? (?:rank|step|host|line|class|second)", "per rank, per step"),
    (WORDS, r"master of", "every process does the same work; none gathers outputs or losses"),
    (WORDS, r"leav(?:e|es|ing) nothing behind|nothing (?:is|was) left", "clean up"),
    (WORDS, r"course of the (?:learning )?rate", "learning-rate schedule"),
    (WORDS, r"does not answer since", "last heard from at"),
    # Names
    (Scope.IDENTIFIERS, r"[Ss]eats?|[Dd]esks?", "RankControlBlock, NodeControlBlock"),
    (Scope.IDENTIFIERS, r"DoorBells?|door_bells?_?|lie_down|get_up", "WakeupPipes, announce_sleep, end_sleep"),
    (Scope.IDENTIFIERS, r"[Rr]oster_?", "IntraHostSync"),
    (Scope.IDENTIFIERS, r"Lane|lane_talk", "Channel, PeerProgress"),
    (Scope.IDENTIFIERS, r"kContribute|kPublish|publish", "reduce-scatter, all-gather"),
    (Scope.IDENTIFIERS, r"Calls|Visitors?|turn_away", "PeerConnector, PendingPeer, reject"),
    (Scope.IDENTIFIERS, r"MeetingPoint|HostMeeting|k?RollCall|Whereabouts", "Rendezvous, ProgressExchange"),
    (Scope.IDENTIFIERS, r"[Vv]erdict|judge", "AbortReason, RootCause, find_root_cause"),
    (Scope.IDENTIFIERS, r"look_around", "check_peers"),
    (Scope.IDENTIFIERS, r"[Ll]edger_?", "OpLog"),
    (Scope.IDENTIFIERS, r"long_enough_bytes", "preferred_bucket_bytes"),
    (Scope.IDENTIFIERS, r"agree_on", "run_collectively"),
    (Scope.IDENTIFIERS, r"adopt_ready_order|settle_unreached", "rebuild_buckets, mark_unused"),
    (Scope.IDENTIFIERS, r"RecordedSteps?|recorded_steps?_?", "StepGraphs"),
    (Scope.IDENTIFIERS, r"LateResults?|Readback", "AsyncScalars"),
    (Scope.IDENTIFIERS, r"sibling|piece_bytes", "make_stream, cache_block_bytes"),
    (Scope.IDENTIFIERS, r"forget_gradient|gradient_written|aside", "clear_grad, mark_grad_valid, saved_preactivation"),
    (Scope.IDENTIFIERS, r"decide|kGo", "compute_update_scale, kApply"),
    (Scope.IDENTIFIERS, r"Recipe|read_changed|damaged|made_up", "Factory, read_augmented, corrupt, synthetic"),
    (Scope.IDENTIFIERS, r"CheckpointCard|adopt_card|is_told_otherwise",
     "CheckpointManifest, apply_metadata, is_not_a_setting"),
    (Scope.IDENTIFIERS, r"Ending|own_names|left_behind", "ExitStatus, local_addresses, stale_dirs"),
    (Scope.IDENTIFIERS, r"Came|Gone|Looked|look_here|LetGo", "ConnectionOpened, ConnectionClosed, FileReply, CloseConnection"),
    (Scope.IDENTIFIERS, r"Lack|claim_mention|mention_stall|put_away", "UnsupportedReason, claim_stall_warning, exclude_host"),
    (Scope.IDENTIFIERS, r"WorkLog|Feed|feed_|spread_rows|take_rows|number_rows",
     "OpProfile, InputStager, broadcast_rows, index_select, row_indices"),
    (Scope.IDENTIFIERS, r"SeenGpu|see_gpus|GpuSight|MoreState|MutedGroup|measure_way",
     "VisibleGpu, list_visible_gpus, VisibleGpus, ExtraState, BypassGroup, measure_mode"),
    (Scope.IDENTIFIERS, r"RecordedMemory|kRecorded|forward_behind|mark_unreached|kCard|kJudged|find_damage",
     "GraphMemory, kGraph, forward_after, mark_unused, kMetadataKey, kEvaluated, find_corruption"),
    (Scope.FILE_NAMES, in_names("muted"), "as the type is called"),
    (Scope.FILE_NAMES, in_names("seat|desk|bell|roster|lane|visitor|meeting"), "as the type is called"),
    (Scope.FILE_NAMES, in_names("verdict|judge|whereabouts|ledger|recipe|sibling"), "as the type is called"),
    (Scope.FILE_NAMES, in_names("recorded_step|late_result|readback|card|ending|own_name|left_behind"),
     "as the type is called"),
]

GENERATED = re.compile(r"<!-- bench/compare: begin .*?<!-- bench/compare: end -->", re.DOTALL)  # the program's words
TOKEN = re.compile(r"""(?P<text>"(?:\\.|[^"\\\n])*")|(?P<character>'(?:\\.|[^'\\\n])+')|"""
                   r"(?P<comment>//[^\n]*|/\*.*?\*/)", re.DOTALL)
SCRIPT_TOKEN = re.compile(r"""(?P<comment>\"{3}.*?\"{3}|(?<!\S)\#[^\n]*)|"""
                          r"""(?P<text>"(?:\\.|[^"\\\n])*"|'(?:\\.|[^'\\\n])*')""", re.DOTALL)


def token_of(path):
    return TOKEN if path.suffix in (".h", ".cuh", ".cpp", ".cu") else SCRIPT_TOKEN


def blank(match):
    return " " + "\n" * match[0].count("\n")


def prose_of(text):
    """Without blocks of code, code in backticks, and addresses of links; lines keep their numbers."""
    text = GENERATED.sub(blank, text)
    text = re.sub(r"^```.*?^```$", blank, text, flags=re.MULTILINE | re.DOTALL)
    text = re.sub(r"`[^`]*`", blank, text)
    return re.sub(r"\]\([^)]*\)", blank, text)


def code_of(text):
    """Without comments and texts."""
    return TOKEN.sub(blank, re.sub(r"^#include.*", blank, text, flags=re.MULTILINE))


def only(kind, text, token):
    """The tokens of a kind, at their places; code between them is no space, so that sentences end there. So does a
    comment's that stands beside code: the one below begins in another column."""
    text = re.sub(r"^#include.*", blank, text, flags=re.MULTILINE)
    end, last_column, parts = 0, None, []
    for match in token.finditer(text):
        if match[kind]:
            between = text[end:match.start()]
            column = match.start() - text.rfind("\n", 0, match.start())
            apart = between.strip() or kind == "comment" and column != last_column
            parts += ["\0" if apart else " ", "\n" * between.count("\n"), match[kind]]
            end, last_column = match.end(), column
    return "".join(parts)


def texts_of(text, token=TOKEN):
    """Without quotes, so that neighbours are one, and line feeds."""
    return re.sub(r"""\\[nrt]|["']""", blank, only("text", text, token))


def comments_of(text, token=TOKEN):
    """Without code in backticks, and the stars of blocks."""
    return re.sub(r"""//+|(?<=\n)[ \t]*\*(?=\s)|\#+|\"{3}|`[^`\n]*`""", blank, only("comment", text, token))


def documents():
    names = [SOURCE / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")]
    return names + sorted((SOURCE / "docs").glob("*.md")) + sorted(SOURCE.glob("*/README.md"))


def sources():
    """Public headers, modules, tests and examples."""
    top = [path.parent for path in SOURCE.glob("*/CMakeLists.txt") if not (path.parent / "CMakeCache.txt").exists()]
    return [path for directory in [SOURCE / "include", *sorted(top)] for path in sorted(directory.rglob("*"))
            if path.suffix in (".h", ".cuh", ".cpp", ".cu")]


def scripts():
    """What has comments after #: Python, shells, CMake, images, manifests. Not this file, which has all the words."""
    top = {path.parent for path in SOURCE.glob("*/CMakeLists.txt") if not (path.parent / "CMakeCache.txt").exists()}
    return [path for directory in sorted(top | {SOURCE / name for name in ("cmake", "docker", "scripts")})
            for path in sorted(directory.rglob("*")) if path.is_file() and path != pathlib.Path(__file__).resolve()
            and (path.name == "CMakeLists.txt" or path.suffix in (".py", ".cmake", ".yaml", ".Dockerfile", ".sbatch")
                 or path.suffix == "" and path.read_bytes()[:2] == b"#!")]


# Sentences that a reader reads twice: too many clauses.
CLAUSE_WORDS = re.compile(r"(?<!\w)(?:that|which|who|where|what)(?!\w)", re.IGNORECASE)
TOO_MANY = 4
# Between sentences: punctuation before a space; an empty line; the titles of notes; the marks of list items, headings
# and quotes; cells of tables; code between two comments or texts. In texts also the arrow between an error and its
# remedy.
SENTENCE_END = re.compile("|".join([
    r"""(?<!\be\.g)(?<!\bi\.e)(?<!\bcf)(?<!\bal)[.!?][*_)\]"'’”]*(?=\s|\0|$)""", r"\n[ \t]*(?=\n)", r"\0",
    r"(?:^|\n)[ \t]*Note \[[^\]]*\][ \t]*(?=\n)", r"\n[ \t]*(?:[-+*>]+|\d+\.|#+)[ \t]", r"\n(?=[ \t]*\|)",
    r"(?<=[ \t])\|"]))
ARROW = re.compile(r"→")


def long_sentences(text, scope):
    """Line numbers, how many of the words, and the beginnings of sentences that have too many."""
    ends = [(match.start(), match.end()) for match in SENTENCE_END.finditer(text)]
    if scope is Scope.TEXTS:
        ends = sorted(ends + [(match.start(), match.end()) for match in ARROW.finditer(text)])
    found, begin = [], 0
    for end, following in [*ends, (len(text), len(text))]:
        sentence = text[begin:end]
        count = len(CLAUSE_WORDS.findall(sentence))
        if count >= TOO_MANY:
            at = begin + len(sentence) - len(sentence.lstrip())
            found.append((text.count("\n", 0, at) + 1, count, " ".join(sentence.split())))
        begin = max(following, begin)
    return found


READERS = {
    Scope.PROSE: lambda: ((path, prose_of(path.read_text())) for path in documents()),
    Scope.COMMENTS: lambda: ((path, comments_of(path.read_text(), token_of(path))) for path in sources() + scripts()),
    Scope.TEXTS: lambda: ((path, texts_of(path.read_text(), token_of(path))) for path in sources() + scripts()),
    Scope.IDENTIFIERS: lambda: ((path, code_of(path.read_text())) for path in sources()),
    Scope.FILE_NAMES: lambda: ((path, path.stem) for path in sources()),
}


@functools.cache
def read(scope):
    return list(READERS[scope]())


@functools.cache
def compiled(scope, pattern):
    if scope in Scope.IDENTIFIERS | Scope.FILE_NAMES:
        return re.compile(rf"(?<!\w)(?:{pattern})(?!\w)")
    return re.compile(rf"(?<![\w-])(?:{pattern})(?![\w-])".replace(" ", r"\s+"), re.IGNORECASE)


def found_in(text, scope, retired, name=""):
    """Line numbers, words and what to write instead, in the file of that name."""
    patterns = [f"(?:{pattern})" for scopes, pattern, _ in retired if scope in scopes]
    if not compiled(scope, "|".join(patterns)).search(text):  # in one pass: nearly all files have none
        return []
    own = {word for word, where, _ in FIELDS_OWN if re.match(where, name)}
    found = []
    for scopes, pattern, instead in retired:
        if scope in scopes and pattern not in own:
            for match in compiled(scope, pattern).finditer(text):
                found.append((text.count("\n", 0, match.start()) + 1, " ".join(match[0].split()), instead))
    return sorted(found)


class Words(unittest.TestCase):
    def test_retired_words(self):
        for scope in READERS:
            if any(scope in scopes for scopes, _, _ in RETIRED):
                wrong = [f"{name}:{line}: {word} → {instead}" for path, text in read(scope)
                         for name in (str(path.relative_to(SOURCE)),)
                         for line, word, instead in found_in(text, scope, RETIRED, name)]
                with self.subTest(scope.name):
                    if wrong:
                        self.fail("\n".join(["", *wrong]))

    def test_long_sentences(self):
        for scope in WORDS:
            wrong = [f"{path.relative_to(SOURCE)}:{line}: {count} of that, which, who, where, what: {sentence}"
                     for path, text in read(scope) for line, count, sentence in long_sentences(text, scope)]
            with self.subTest(scope.name):
                if wrong:
                    self.fail("\n".join(["", *wrong]))

    def words(self, text, scope=Scope.PROSE, retired=RETIRED):
        return [(line, word) for line, word, _ in found_in(text, scope, retired)]

    def test_prose(self):
        text = ("a `room` and [b](room.md)\n```\nroom\n```\ntwo\n`room\nroom` c\n"
                "<!-- bench/compare: begin (x) -->\nroom\n<!-- bench/compare: end -->\nThe Rooms")
        self.assertEqual(self.words(prose_of(text)), [(11, "Rooms")])
        self.assertEqual(self.words("the same step takes\n  turns with it"), [(1, "takes turns")])
        self.assertEqual(self.words("mushrooms, a lane-less row, which samples a rank takes"), [])
        self.assertEqual(self.words("batch 64 a rank"), [(1, "batch 64 a rank")])

    def test_sources(self):
        text = '#include "a/seat.h"\nSeat seat;  // a seat\nsay("a seat", \'"\', my_seat, Seats{});\n'
        retired = [(~Scope.PROSE, r"[Ss]eat", "")]
        self.assertEqual(self.words(code_of(text), Scope.IDENTIFIERS, retired), [(2, "Seat"), (2, "seat")])
        self.assertEqual(self.words(comments_of(text), Scope.COMMENTS, retired), [(2, "seat")])
        self.assertEqual(self.words(texts_of(text), Scope.TEXTS, retired), [(3, "seat")])
        self.assertEqual(self.words("seat", Scope.FILE_NAMES, retired), [(1, "seat")])
        text = 'f("goes "\n  "on\\ntold", "goes", "on");\nint a;  // goes\nint b;  // on\n// it `told` goes\n// on\n'
        self.assertEqual(self.words(comments_of(text), Scope.COMMENTS), [(5, "goes on")])
        self.assertEqual(self.words(texts_of(text), Scope.TEXTS), [(1, "goes on"), (2, "told")])

    def test_sentences(self):
        planted = "What that is, and\nwhich of them,\nthose know who wrote it"
        whole = " ".join(planted.split())

        def found(text, scope):
            return [(line, sentence) for line, _, sentence in long_sentences(text, scope)]

        self.assertEqual(found(prose_of(f"Short.\n\n{planted}.\n"), Scope.PROSE), [(3, whole)])
        self.assertEqual(found(prose_of(f"- {planted}"), Scope.PROSE), [(1, "- " + whole)])
        commented = "int a;\n" + "".join(f"  /// {line}\n" for line in planted.split("\n")) + "int b;"
        self.assertEqual(found(comments_of(commented), Scope.COMMENTS), [(2, whole)])
        in_c = "/* " + planted.replace("\n", "\n * ") + ". */ int b;"
        self.assertEqual(found(comments_of(in_c), Scope.COMMENTS)[0][0], 1)
        in_python = "a = 1\n" + "".join(f"# {line}\n" for line in planted.split("\n"))
        self.assertEqual(found(comments_of(in_python, SCRIPT_TOKEN), Scope.COMMENTS), [(2, whole)])
        texts = "f(" + "\n  ".join(f'"{line} "' for line in planted.split("\n")) + ");"
        self.assertEqual(found(texts_of(texts), Scope.TEXTS), [(1, whole)])

        two = "what that is", "which who wrote"
        code = "\n```\ncode\n```\n"
        for between in (".\n", ". ", "!) ", "\n\n", "\n- ", "\n  * ", "\n2. ", "\n## ", code, " | ", "\n| "):
            with self.subTest(between=between):
                self.assertEqual(found(prose_of(between.join(two)), Scope.PROSE), [])
        for between in (", ", " — ", "\n", " e.g. ", ": ", "; ", " `code` "):
            with self.subTest(between=between):
                self.assertEqual(len(found(prose_of(between.join(two)), Scope.PROSE)), 1)
        self.assertEqual(found(comments_of(f"int a;  // {two[0]}\nint b;  // {two[1]}\n"), Scope.COMMENTS), [])
        self.assertEqual(found(comments_of(f"int a;  // {two[0]}\n// {two[1]}\nint b;\n"), Scope.COMMENTS), [])
        self.assertEqual(found(comments_of(f"// {two[0]}\n//\n// {two[1]}\n"), Scope.COMMENTS), [])
        self.assertEqual(found(texts_of(f'f("{two[0]}", "{two[1]}"); g("{two[0]} → {two[1]}");'), Scope.TEXTS), [])
        self.assertEqual(found("whatever, somewhere: whichever_that, that_is, nowhere", Scope.TEXTS), [])

    def test_all_scopes_have_something_to_read(self):
        self.assertEqual(list(READERS), list(Scope))
        for scope in READERS:
            with self.subTest(scope.name):
                self.assertGreater(sum(bool(text.strip()) for _, text in read(scope)), 10)


if __name__ == "__main__":
    unittest.main(argv=[sys.argv[0], *others])
