"""What messages recommend exists: flags of the commands that print them, environment variables, subcommands, programs.

  remedies_test.py PROGRAM [--source DIR] [unittest's arguments]

It reads the texts of the sources. Which of them a command prints is a matter of its file: COMMANDS_OF. Whether a remedy
helps is not looked at; tests/invocations provokes many of them, and looks whether the command takes what they name.
"""
import argparse
import functools
import pathlib
import re
import subprocess
import sys
import unittest

sys.dont_write_bytecode = True
parser = argparse.ArgumentParser()
parser.add_argument("program", type=pathlib.Path)
parser.add_argument("--source", type=pathlib.Path, default=pathlib.Path(__file__).resolve().parents[2])
places, others = parser.parse_known_args()
SOURCE = places.source.absolute()

BENCH = ("bench step", "bench dp-vs-ddp", "bench allreduce", "bench reduce", "bench send-recv", "bench scaling")
COMMANDS = ("train", "eval", "infer", "export onnx", "launch", *BENCH, "checkpoint", "inspect", "devices", "doctor", "simulate", "plan",
            "version")
# The commands that print the texts of a file: the first pattern that its path has at its beginning. A flag in a text is one
# of each of them, of one of those with | between. Other files' texts may name any command's.
COMMANDS_OF = [
    (r"inference/export\.", ("export onnx",)),
    (r"inference/|data/vocabulary\.", ("infer",)),
    (r"launcher/(?!mpirun_command)|cli/launch_command", ("launch|train",)),  # and of the program that is launched
    (r"cli/checkpoint_command", ("checkpoint",)),
    (r"bench/(collective|rivals)", ("bench allreduce|bench reduce|bench send-recv",)),
    (r"bench/scaling|cli/scaling_command", ("bench scaling",)),
    (r"doctor/|cli/doctor_command", ("doctor|train",)),
    (r"simulate/", ("simulate",)),
    (r"bench/(dp_vs_ddp|step)\.", None),  # of the command that has the file's name
    (r"trainer/evaluation\.", ("eval",)),
    (r"trainer/(build|run_weights|metrics)\.|data/|session/|nn/(?!optim/|ops/cuda/)|checkpoint/model", ("train", "eval")),
    (r"trainer/|sampler/|ddp/|checkpoint/|comm/|nn/", ("train",)),
]
# Flags in texts that are for one of those commands alone: a training's.
TRAININGS = {"trainer/build.cpp": {"--epochs", "--freeze", "--recompute", "--stateful", "--global-batch", "--comm-hook"},
             "session/memory.cpp": {"--optimizer"}}
# Those of other programs, whose names are in the texts.
OTHERS = {"--mpi": "srun", "--memory": "container", "--ulimit": "docker", "--gpus": "docker", "--shm-size": "docker",
          "--ipc": "docker", "--build": "cmake", "--target": "cmake", "--cpus": "docker", "--cpuset-cpus": "docker", "--pids-limit": "docker", "--gpu-reset": "nvidia-smi",
          "--map-by": "", "--oversubscribe": ""}  # the last two are words of mpirun's command line
# Variables that other programs and libraries read.
VARIABLES = {"COMP_WORDS", "CUDA_DEVICE_ORDER", "CUDA_VISIBLE_DEVICES", "CUDNN_LOGDEST_DBG", "CUDNN_LOGLEVEL_DBG",
             "GOMP_SPINCOUNT", "GOMP_STACKSIZE", "LD_LIBRARY_PATH", "NCCL_DEBUG", "NCCL_SOCKET_IFNAME", "OMP_STACKSIZE",
             "OMP_THREAD_LIMIT", "OMPI_MCA_plm_rsh_agent"}
NO_VARIABLES = {"DCMAKE_CUDA_ARCHITECTURES", "LOCKSTEP_FLAG_NAME", "MPI_COMM_NULL", "MPI_THREAD_MULTIPLE", "PRETTY_NAME"}
PROGRAMS = {"lockstep", "ip", "openssl", "ulimit"}
VERBS = {"after", "asks", "cannot", "handshake", "itself", "joins", "needs", "next", "session", "takes", "then", "there",
         "was"}  # that follow the project's name in sentences

TOKEN = re.compile(r'"((?:\\.|[^"\\\n])*)"|\'(?:\\.|[^\'\\\n])+\'|//[^\n]*|/\*.*?\*/', re.DOTALL)
FLAG = re.compile(r"(?<![\w-])--[a-z][a-z0-9-]+(?![{])")


def texts_of(source):
    """Texts with their lines; neighbours are one."""
    found, end = [], None
    for match in TOKEN.finditer(source):
        if match[1] is None:
            continue
        if end is not None and not source[end:match.start()].strip():
            found[-1][1] += match[1]
        else:
            found.append([source.count("\n", 0, match.start()) + 1, match[1]])
        end = match.end()
    return found


@functools.cache
def all_texts():
    """(path, line, text) of the product's sources."""
    found = []
    for directory in sorted(path.parent for path in SOURCE.glob("*/CMakeLists.txt")):
        if directory.name in ("tests", "examples", "bindings") or (directory / "CMakeCache.txt").exists():
            continue
        for path in sorted(directory.rglob("*")):
            name = path.relative_to(SOURCE).as_posix()
            if path.suffix in (".h", ".cpp", ".cu", ".cuh") and not re.match(r"bench/(peers|libtorch|adapters)/", name):
                found += [(name, line, text) for line, text in texts_of(path.read_text())]
    return found


@functools.cache
def flags_of(command):
    if "|" in command:
        return set.union(*map(flags_of, command.split("|")))
    said = subprocess.run([places.program, *command.split(), "--help"], stdout=subprocess.PIPE, text=True, check=True).stdout
    return set(re.findall(r"(?<![\w-])--[a-z][a-z0-9-]*", said)) | {"--help", "--version"}


def commands_of(name):
    for pattern, commands in COMMANDS_OF:
        if re.match(pattern, name):
            return commands or tuple(one for one in BENCH if one.endswith(pathlib.Path(name).stem.replace("_", "-")))
    return ()


def wrong_flags(name, text):
    """The flags in a file's text that a command that prints it does not have."""
    wrong = []
    for match in FLAG.finditer(text):
        flag, before = match[0], text[:match.start()]
        if flag in OTHERS and OTHERS[flag] in text:
            continue
        if flag in TRAININGS.get(name, ()):
            continue
        # Given by the user, or of the command that the text names.
        if match.start() == 0 or re.search(r"(leave|without) (--[\w-]+ and )?$", before):
            commands = ()
        elif named := re.findall(r"lockstep (train|eval|infer|launch|bench step)\b", before):
            commands = named[-1:]
        else:
            commands = commands_of(name)
        known = set.intersection(*map(flags_of, commands)) if commands else flags_of("|".join(COMMANDS))
        if flag not in known:
            wrong.append(flag)
    return wrong


class Remedies(unittest.TestCase):
    def test_flags(self):
        self.assertGreater(sum("--" in text for _, _, text in all_texts()), 200)
        for name, line, text in all_texts():
            for flag in wrong_flags(name, text):
                with self.subTest(f"{name}:{line}"):
                    self.fail(f"{name}:{line}: {' or '.join(commands_of(name)) or 'no command'} has no {flag}: {text}")

    def test_variables(self):
        whole = {text for _, _, text in all_texts()}
        flags = {"LOCKSTEP_" + flag[2:].upper().replace("-", "_") for command in COMMANDS for flag in flags_of(command)}
        named = {variable: f"{name}:{line}" for name, line, text in all_texts()
                 for variable in re.findall(r"\b(?:[A-Z][A-Z0-9]*(?:_[A-Z0-9]+)+|OMPI_MCA_[a-z_]+[a-z])\b", text)
                 if text != variable}
        self.assertGreater(len(named), 20)
        for variable, place in named.items():
            known = variable in whole or variable in flags or variable in VARIABLES | NO_VARIABLES
            self.assertTrue(known, f"{place}: nobody reads {variable}")

    def test_commands(self):
        listed = subprocess.run([places.program, "--help"], stdout=subprocess.PIPE, text=True, check=True).stdout
        subcommands = set(re.findall(r"^  ([a-z]+) ", listed, re.MULTILINE))
        self.assertIn("train", subcommands)
        for name, line, text in all_texts():
            for word in re.findall(r"\blockstep ([a-z]+)", text):
                self.assertIn(word, subcommands | VERBS, f"{name}:{line}: {text}")
            for command in re.findall(r"`([^`]+)`", text):
                self.assertIn(command.split()[0], PROGRAMS, f"{name}:{line}: {text}")

    def test_the_checks_find_mistakes(self):
        self.assertEqual(texts_of('f("a"\n  "b", \'"\');  // "c"\ng("d");'), [[1, "ab"], [3, "d"]])
        self.assertEqual(wrong_flags("inference/x.cpp", "give --max-length 3, or --context 3"), ["--max-length"])
        self.assertEqual(wrong_flags("data/x.cpp", "give --reset-head"), ["--reset-head"])
        self.assertEqual(wrong_flags("data/x.cpp", "use lockstep train --reset-head"), [])
        self.assertEqual(wrong_flags("base/x.cpp", "srun --mpi, --no-such"), ["--no-such"])


if __name__ == "__main__":
    unittest.main(argv=[sys.argv[0], *others])
