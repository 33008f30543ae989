"""docker/ and what its documents say, without an engine and without a cluster. scripts/try-images builds and runs it.

  docker_test.py [--source DIR] [--build DIR] [unittest's arguments]
"""
import argparse
import copy
import json
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile
import unittest

sys.dont_write_bytecode = True
parser = argparse.ArgumentParser()
parser.add_argument("--source", type=pathlib.Path, default=pathlib.Path(__file__).resolve().parents[2])
parser.add_argument("--build", type=pathlib.Path)
places, others = parser.parse_known_args()
SOURCE, BUILD = places.source, (places.build or places.source / "build").absolute()
LOCKSTEP = str(BUILD / "lockstep")
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))

from commands import Dockerfile, commands_in, unknown_flags, words_of  # noqa: E402

DOCKERFILES = sorted((SOURCE / "docker").glob("*.Dockerfile"))
SCRIPTS = [*sorted((SOURCE / "docker/rootfs").glob("[!.]*")), *sorted((SOURCE / "docker/slurm").glob("*.sbatch"))]
SCRIPTS = [path for path in SCRIPTS if path.read_text().startswith("#!")]
DOCUMENTS = [SOURCE / "docs/docker.md", SOURCE / "docs/cluster.md"]


class Dockerfiles(unittest.TestCase):
    """Instruction by instruction. The last of them has PyTorch, and not the program."""

    def each(self):
        self.assertEqual([path.name for path in DOCKERFILES], ["cpu.Dockerfile", "cuda.Dockerfile", "pytorch.Dockerfile"])
        for path in DOCKERFILES:
            with self.subTest(path.name):
                yield path, Dockerfile(path)

    def test_what_they_copy_and_run_is_there(self):
        for _, file in self.each():
            copied = [text.split() for text in file.all("COPY")]
            self.assertTrue(copied)
            for words in copied:
                if not words[0].startswith("--from"):
                    for name in words[:-1]:
                        self.assertTrue((SOURCE / name).exists(), name)
            stages = {text.split()[-1] for text in file.all("FROM") if " AS " in text}
            for source in re.findall(r"(?:--from=|,from=)(\w+)", "\n".join(map(" ".join, file.instructions))):
                self.assertIn(source, stages)
            for script in re.findall(r"(?<![/\w])(?:docker|scripts)/[\w/.-]+", "\n".join(file.all("RUN"))):
                self.assertTrue((SOURCE / script).exists(), script)

    def test_nothing_they_need_is_ignored(self):
        ignored = [line for line in (SOURCE / ".dockerignore").read_text().splitlines() if line and line[0] not in "#!"]
        modules = [path.parent.name for path in SOURCE.glob("*/CMakeLists.txt")]
        self.assertIn("comm", modules)
        for needed in (*modules, "cmake", "CMakeLists.txt", "scripts", "docker/rootfs"):
            if needed != "tests":  # left out of builds without BUILD_TESTING
                self.assertNotIn(needed, ignored)

    def test_last_stages(self):
        for _, file in self.each():
            stage = file.last_stage()
            names = [name for name, _ in stage]
            self.assertGreater(names.index("USER"), max(i for i, name in enumerate(names) if name == "RUN"),
                               "nothing is installed as the user, and nothing runs as root")
            values = dict(stage)
            if "ENTRYPOINT" in values:
                self.assertEqual(values["USER"], "mpiuser")
                entry = json.loads(values["ENTRYPOINT"])
                self.assertEqual(entry[0], "/usr/bin/tini")
                self.assertTrue((SOURCE / "docker/rootfs" / pathlib.Path(entry[-1]).name).exists())
                self.assertEqual(unknown_flags(LOCKSTEP, json.loads(values["CMD"])), [])
            else:
                command = json.loads(values["CMD"])
                self.assertEqual(command[0], "torchrun")
                self.assertTrue((SOURCE / command[-1].replace("/opt/examples", "examples/pytorch")).exists())
            labels = re.findall(r"org\.opencontainers\.image\.(\w+)=", values["LABEL"])
            self.assertEqual(set(labels), {"title", "description", "version", "revision", "source", "licenses"})

    def test_version_is_the_projects(self):
        version = re.search(r"project\(lockstep VERSION (\S+)", (SOURCE / "CMakeLists.txt").read_text()).group(1)
        for _, file in self.each():
            self.assertTrue(any(f"VERSION={version}" in text.split() for text in file.all("ARG")), version)

    def test_what_both_say_alike(self):
        cpu, cuda, _ = (file for _, file in self.each())
        for name in ("ENTRYPOINT", "USER", "WORKDIR", "EXPOSE"):
            self.assertEqual(cpu.all(name), cuda.all(name))
        self.assertTrue(set(cpu.all("ENV")) <= set(cuda.all("ENV")))

    def test_packages_exist(self):
        text = (SOURCE / "docker/rootfs/install").read_text()
        packages = re.findall(r"^  ([a-z][a-z0-9 -]*?) *(?:#.*)?$", re.search(r"packages\+=\((.*?)\n\)", text,
                                                                               re.DOTALL).group(1), re.MULTILINE)
        packages = " ".join(packages).split()
        self.assertIn("tini", packages)
        if not shutil.which("apt-cache"):
            self.skipTest("no apt on this machine")
        known = subprocess.run(["apt-cache", "pkgnames"], stdout=subprocess.PIPE, text=True, check=True).stdout.split()
        if "libopenmpi-dev" not in known or "tini" not in known:
            self.skipTest("apt knows no packages: apt-get update")
        self.assertEqual([package for package in packages if package not in known], [])


class Apptainer(unittest.TestCase):
    """docker/apptainer.def, which does in both stages what the Dockerfile for CPUs does."""

    def setUp(self):
        text = (SOURCE / "docker/apptainer.def").read_text()
        self.stages = []
        for stage in text.split("\nBootstrap: ")[1:]:
            parts = re.split(r"^%(.*)\n", stage, flags=re.MULTILINE)
            self.stages.append((dict(re.findall(r"^(\w+): (.*)$", "Bootstrap: " + parts[0], re.MULTILINE)),
                                dict(zip(parts[1::2], parts[2::2]))))
        self.dockerfile = Dockerfile(SOURCE / "docker/cpu.Dockerfile")

    def test_stages(self):
        (first, build), (second, final) = self.stages
        self.assertEqual([first["Stage"], second["Stage"]], ["build", "final"])
        for header in (first, second):
            self.assertIn(f"BASE={header['From']}", self.dockerfile.all("ARG"))
            self.assertEqual(header["Bootstrap"], "docker")
        self.assertEqual(set(build), {"files", "post"})
        self.assertEqual(set(final), {"files from build", "post", "environment", "runscript", "test", "labels", "help"})

    def test_files(self):
        lines = [line.split() for line in self.stages[0][1]["files"].splitlines() if line]
        self.assertEqual([to for _, to in lines], [f"/src/{name}" for name, _ in lines], "one file or directory a line")
        modules = {path.parent.name for path in SOURCE.glob("*/CMakeLists.txt")} - {"tests"}
        needed = {*modules, "cmake", "include", "packaging", "docker", "CMakeLists.txt", "LICENSE", "scripts/lib/deps.sh"}
        self.assertEqual({name for name, _ in lines}, needed)

    def test_it_builds_as_the_dockerfile_does(self):
        def words(text):
            return set(re.sub(r"\\\n|&&|\$REVISION|\"|unknown", " ", text).split())

        runs = self.dockerfile.all("RUN")
        self.assertEqual(words(self.stages[0][1]["post"]) - {"cd", "/src"}, words(" ".join(runs[:-1])))
        self.assertIn(runs[-1], self.stages[1][1]["post"])
        self.assertEqual(words(self.stages[1][1]["environment"].split("\n", 1)[1]) - {"export"},
                         words(self.dockerfile.all("ENV")[0]))

    def test_its_scripts(self):
        for section in ("post", "environment", "runscript", "test"):
            text = self.stages[1][1][section]
            done = subprocess.run(["sh", "-n"], input=text, capture_output=True, text=True, timeout=60)
            self.assertEqual((done.returncode, done.stderr), (0, ""), section)
        for section in ("runscript", "test", "help"):
            for line in self.stages[1][1][section].replace("lockstep trains", "").splitlines():
                words = words_of(line.split("#")[0].replace("set --", "lockstep").replace("; fi", "").replace(
                    "lockstep.sif train", "lockstep train"))
                self.assertEqual(unknown_flags(LOCKSTEP, words), [], line)


class Scripts(unittest.TestCase):
    """The scripts in the images and the job scripts for Slurm, run with stand-ins."""

    def setUp(self):
        self.scratch = pathlib.Path(self.enterContext(tempfile.TemporaryDirectory()))

    def enterContext(self, context):  # unittest has it since Python 3.11
        value = context.__enter__()
        self.addCleanup(context.__exit__, None, None, None)
        return value

    def run_script(self, *command, **environment):
        return subprocess.run([str(word) for word in command], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                              stderr=subprocess.STDOUT, text=True, timeout=60, check=False,
                              env={"PATH": f"{self.scratch}:{os.environ['PATH']}", **environment})

    def stand_in(self, name: str, text: str) -> None:
        path = self.scratch / name
        path.write_text("#!/bin/bash\n" + text)
        path.chmod(0o755)

    def test_syntax(self):
        self.assertGreaterEqual(len(SCRIPTS), 5)
        for script in SCRIPTS:
            shell = script.read_text().splitlines()[0].removeprefix("#!").strip()
            done = self.run_script(shell, "-n", script)
            self.assertEqual((done.returncode, done.stdout), (0, ""), script)
            if script.suffix != ".sbatch":
                self.assertTrue(os.access(script, os.X_OK), script)

    def test_shellcheck(self):
        if not shutil.which("shellcheck"):
            self.skipTest("shellcheck is not installed")
        done = self.run_script("shellcheck", *SCRIPTS)
        self.assertEqual(done.returncode, 0, done.stdout)

    def test_entrypoint_becomes_the_command(self):
        done = self.run_script(SOURCE / "docker/rootfs/entrypoint", "sh", "-c", "echo $$ $PPID; exit 7")
        self.assertEqual(done.returncode, 7)
        self.assertEqual(len(done.stdout.split()), 2, done.stdout)

    def test_entrypoint_finds_a_place_to_write(self):
        done = self.run_script(SOURCE / "docker/rootfs/entrypoint", "sh", "-c", "echo $TMPDIR", TMPDIR="/nowhere")
        self.assertTrue(pathlib.Path(done.stdout.strip()).is_dir(), done.stdout)
        done = self.run_script(SOURCE / "docker/rootfs/entrypoint", "sh", "-c", "echo $TMPDIR", TMPDIR=str(self.scratch))
        self.assertEqual(done.stdout.strip(), str(self.scratch))

    def test_entrypoint_names_a_user_without_a_name(self):
        self.stand_in("id", 'case "$*" in -un) exit 1 ;; -u) echo 12345 ;; -g) echo 54321 ;; esac')
        done = self.run_script(SOURCE / "docker/rootfs/entrypoint", "/bin/cat", TMPDIR=str(self.scratch))
        state = next(self.scratch.glob("entrypoint.*"))
        self.assertIn("mpiuser:*:12345:54321::/home/mpiuser:/bin/sh\n", (state / "passwd").read_text())
        self.assertIn("root:", (state / "passwd").read_text())
        self.assertIn(":54321:\n", (state / "group").read_text())
        self.assertEqual(state.stat().st_mode & 0o777, 0o700)
        self.assertEqual(done.returncode, 0, done.stdout)

    def test_sshd_wants_keys(self):
        self.stand_in("getent", f"echo mpiuser:x:1000:1000::{self.scratch}/home:/bin/sh")
        done = self.run_script(SOURCE / "docker/rootfs/entrypoint", "sshd", TMPDIR=str(self.scratch))
        self.assertEqual(done.returncode, 2)
        self.assertRegex(done.stdout, r"entrypoint: sshd: neither .*/home/\.ssh/authorized_keys nor .* → mount ")
        self.assertEqual(len(done.stdout.splitlines()), 1)

    def run_batch(self, script: pathlib.Path, *arguments, code: int = 0, **variables):
        self.stand_in("srun", f'printf "%s\\n" "$@" >{self.scratch}/srun.said; exit {code}')
        self.stand_in("scontrol", f'echo "$@" >{self.scratch}/scontrol.said')
        done = self.run_script("bash", script, *arguments, SLURM_CPUS_PER_TASK="3", SLURM_JOB_ID="41", **variables)
        self.assertEqual(done.returncode, code, done.stdout)
        return (self.scratch / "srun.said").read_text().splitlines()

    # Those whose ranks srun starts.
    SRUN_SCRIPTS = [SOURCE / "docker/slurm" / name for name in ("cpu.sbatch", "gpu.sbatch")]

    def test_batch_scripts(self):
        for script in self.SRUN_SCRIPTS:
            with self.subTest(script.name):
                words = self.run_batch(script)
                self.assertIn("--mpi=pmix", words)
                self.assertIn("--cpus-per-task=3", words)
                self.assertEqual(unknown_flags(LOCKSTEP, words), [])
                self.assertIn("digits", words)
                # What 75 asks for, to be started again, needs a checkpoint to resume from.
                saving = ["--checkpoint-dir", "lockstep-41", "--resume", "auto"]
                self.assertEqual(words[-4:], saving)
                words = self.run_batch(script, "mlp", "--data", "a b", code=143)
                self.assertEqual(words[words.index("lockstep"):], ["lockstep", "train", "mlp", "--data", "a b", *saving])
                for own in (["--checkpoint-dir", "mine"], ["--checkpoint-dir=mine", "--resume=auto"]):
                    words = self.run_batch(script, "mlp", *own)
                    self.assertEqual(words[words.index("lockstep"):], ["lockstep", "train", "mlp", *own])
                self.assertFalse((self.scratch / "scontrol.said").exists())
                # 75 always, failures that need not repeat a few times.
                for code, restarts in ((75, 0), (75, 1000), (137, 0), (4, 4), (5, 1), (1, 1)):
                    self.run_batch(script, code=code, SLURM_RESTART_COUNT=str(restarts))
                    self.assertEqual((self.scratch / "scontrol.said").read_text(), "requeue 41\n")
                    (self.scratch / "scontrol.said").unlink()
                for code, restarts in ((0, 0), (2, 0), (3, 0), (6, 0), (7, 0), (127, 0), (130, 0), (137, 5), (4, 5)):
                    self.run_batch(script, code=code, SLURM_RESTART_COUNT=str(restarts))
                    self.assertFalse((self.scratch / "scontrol.said").exists(), code)

    def run_restarts(self, *arguments, launcher="exit 0", code=0):
        """What is said to the launcher; `launcher`: what it does."""
        self.stand_in("scontrol", f"""if [ $1 = show ]; then printf 'n1\\nn2\\n'; else echo "$@" >{self.scratch}/scontrol.said; fi""")
        self.stand_in("lockstep", f'printf "%s\\n" "$@" >{self.scratch}/lockstep.said; {launcher}')
        done = self.run_script("bash", SOURCE / "docker/slurm/restarts.sbatch", *arguments, SLURM_NTASKS_PER_NODE="2",
                               SLURM_JOB_NODELIST="n[1-2]", SLURM_JOB_ID="41", TMPDIR=str(self.scratch))
        self.assertEqual(done.returncode, code, done.stdout)
        self.assertEqual(list(self.scratch.glob("tmp.*")), [], "the agent's file")
        return (self.scratch / "lockstep.said").read_text().splitlines()

    def test_restarts_inside_an_allocation(self):
        words = self.run_restarts()
        self.assertEqual(words[:3], ["launch", "--hosts", "n1:2,n2:2"])
        self.assertIn("--global-batch", words)  # which another number of ranks needs
        self.assertEqual(words[-4:], ["--checkpoint-dir", "lockstep-41", "--resume", "auto"])
        dashes = words.index("--")
        self.assertEqual(unknown_flags(LOCKSTEP, ["lockstep", *words[:dashes]]), [])
        self.assertEqual(unknown_flags(LOCKSTEP, words[dashes + 1:]), [])
        self.assertEqual(self.run_restarts("mlp", "--data", "a b", code=4, launcher="exit 4")[dashes + 1:-4],
                         ["lockstep", "train", "mlp", "--data", "a b"])
        self.assertFalse((self.scratch / "scontrol.said").exists())
        # The signal ahead of the end of the time reaches the launcher, and its code is the job's.
        self.run_restarts(launcher="trap 'sleep 0.2; exit 75' TERM; sleep 0.3; kill -TERM $PPID; "
                                   "sleep 20 >/dev/null 2>&1 & wait", code=75)
        self.assertEqual((self.scratch / "scontrol.said").read_text(), "requeue 41\n")

    def test_the_agent_inside_an_allocation(self):
        self.stand_in("srun", f'printf "%s\\n" "$@" >{self.scratch}/srun.said')
        self.run_restarts(launcher="$OMPI_MCA_plm_rsh_agent n2 \"'/a b/lockstep' _host\"")
        words = (self.scratch / "srun.said").read_text().splitlines()
        self.assertIn("--nodelist=n2", words)
        self.assertIn("--overlap", words)
        self.assertEqual(words[-3:], ["bash", "-c", "'/a b/lockstep' _host"])

    # Options of sbatch and what their values look like, as in its manual.
    BATCH_OPTIONS = {"job-name": r"\w+", "nodes": r"\d+", "ntasks-per-node": r"\d+", "cpus-per-task": r"\d+",
                     "gpus-per-node": r"(\w+:)?\d+", "time": r"\d\d:\d\d:\d\d", "output": r"[\w.%-]+",
                     "open-mode": r"append|truncate", "requeue": None, "no-kill": None, "signal": r"([BR]+:)?[A-Z0-9]+(@\d+)?"}

    def test_batch_options(self):
        for script in sorted((SOURCE / "docker/slurm").glob("*.sbatch")):
            lines = script.read_text().splitlines()
            last = max(i for i, line in enumerate(lines) if line.startswith("#SBATCH"))
            self.assertTrue(all(line.startswith("#") for line in lines[:last]), "sbatch stops at the first command")
            for line in lines:
                if not line.startswith("#SBATCH"):
                    continue
                name, _, value = line.removeprefix("#SBATCH --").partition("=")
                self.assertIn(name, self.BATCH_OPTIONS, line)
                pattern = self.BATCH_OPTIONS[name]
                self.assertTrue(value == "" if pattern is None else re.fullmatch(pattern, value), line)

    def test_hostfile(self):
        lines = (SOURCE / "docker/ssh/hostfile.example").read_text().splitlines()
        hosts = [line for line in lines if line and not line.startswith("#")]
        self.assertGreaterEqual(len(hosts), 2)
        for line in hosts:
            self.assertRegex(line, r"^[\w.-]+ slots=[1-9]\d*$")


JSON_TYPES = {"object": dict, "array": list, "string": str, "boolean": bool, "integer": int, "number": (int, float)}


def schema_problems(value, schema: dict, where: str = "") -> list:
    """Of a value and a schema of schemas.json, as strictly as `kubectl apply` looks: a field that the schema does not have is
    one."""
    where = where or "it"
    if schema.get("left-out"):
        return [f"{where}: the schema leaves this out → tests/docker/derive_schema.py"]
    if schema.get("x-kubernetes-int-or-string"):
        ok = isinstance(value, (int, str)) and not isinstance(value, bool)
        return [] if ok else [f"{where}: {value!r} is neither a number nor text"]
    kind = schema.get("type")
    if kind and (not isinstance(value, JSON_TYPES[kind]) or (kind in ("integer", "number") and isinstance(value, bool))):
        return [f"{where}: {value!r} is no {kind}"]
    if "enum" in schema and value not in schema["enum"]:
        return [f"{where}: {value!r} is none of {', '.join(schema['enum'])}"]
    found = []
    if isinstance(value, dict):
        found += [f"{where}: lacks {name}" for name in schema.get("required", []) if name not in value]
        fields, others = schema.get("properties"), schema.get("additionalProperties")
        for name, inner in value.items():
            if fields is not None and name in fields:
                found += schema_problems(inner, fields[name], f"{where}.{name}")
            elif others is not None:
                found += schema_problems(inner, others, f"{where}.{name}")
            elif fields is not None:
                found.append(f"{where}: there is no field {name}")
    elif isinstance(value, list):
        for i, inner in enumerate(value):
            found += schema_problems(inner, schema.get("items", {}), f"{where}[{i}]")
    return found


class Manifests(unittest.TestCase):
    """The MPIJobs and the TrainJob, against the schemas and against what the controllers do with them."""

    @classmethod
    def setUpClass(cls):
        import yaml  # Debian: python3-yaml
        cls.schemas = json.loads((pathlib.Path(__file__).resolve().parent / "schemas.json").read_text())
        cls.schema = cls.schemas["MPIJob"]["schema"]
        cls.documents = [(path.name, document) for path in sorted((SOURCE / "docker/kubernetes").glob("*.yaml"))
                         for document in yaml.safe_load_all(path.read_text())]
        cls.jobs = {name: document for name, document in cls.documents if document["kind"] == "MPIJob"}
        cls.runtime, cls.train_job = (document for name, document in cls.documents if name == "trainjob.yaml")

    def test_schema(self):
        self.assertEqual([name for name, _ in self.documents],
                         ["mpijob-gpu.yaml", "mpijob-restarts.yaml", "mpijob.yaml", "trainjob.yaml", "trainjob.yaml"])
        for name, document in self.documents:
            known = self.schemas[document["kind"]]
            self.assertEqual(schema_problems(document, known["schema"]), [], name)
            self.assertEqual(document["apiVersion"], known["apiVersion"])

    def test_the_schema_finds_mistakes(self):
        def spoil(change):
            job = copy.deepcopy(self.jobs["mpijob.yaml"])
            change(job["spec"], job["spec"]["mpiReplicaSpecs"]["Worker"]["template"]["spec"])
            return schema_problems(job, self.schema)

        def rename(fields, old, new):
            fields[new] = fields.pop(old)

        self.assertEqual(spoil(lambda job, pod: rename(job, "slotsPerWorker", "slotPerWorker")),
                         ["it.spec: there is no field slotPerWorker"])
        self.assertEqual(spoil(lambda job, pod: job.update(slotsPerWorker="2")), ["it.spec.slotsPerWorker: '2' is no integer"])
        self.assertEqual(len(spoil(lambda job, pod: job.update(mpiImplementation="Open MPI"))), 1)
        self.assertIn("there is no field mountpath", spoil(
            lambda job, pod: rename(pod["containers"][0]["volumeMounts"][0], "mountPath", "mountpath"))[1])
        self.assertEqual(spoil(lambda job, pod: job.pop("mpiReplicaSpecs")), ["it.spec: lacks mpiReplicaSpecs"])
        self.assertEqual(len(spoil(lambda job, pod: pod["containers"][0].pop("name"))), 1)
        self.assertIn("is no array", spoil(lambda job, pod: pod["containers"][0].update(args="sshd"))[0])
        self.assertIn("leaves this out", spoil(lambda job, pod: pod.update(affinity={"nodeAffinity": {}}))[0])
        job = copy.deepcopy(self.train_job)
        job["spec"]["trainer"]["arg"] = job["spec"]["trainer"].pop("args")
        self.assertEqual(schema_problems(job, self.schemas["TrainJob"]["schema"]), ["it.spec.trainer: there is no field arg"])

    def check_pods(self, name, launcher, worker):
        for pod in (launcher, worker):
            # The keys and the environment are added to the first container.
            self.assertEqual(len(pod["containers"]), 1, name)
            container = pod["containers"][0]
            self.assertNotIn("command", container, "it would take the entry point's place")
            self.assertTrue(pod["securityContext"]["runAsNonRoot"])
            self.assertFalse(container["securityContext"]["allowPrivilegeEscalation"])
            mounted = {mount["name"] for mount in container["volumeMounts"]}
            self.assertEqual(mounted, {volume["name"] for volume in pod["volumes"]})
            self.assertIn("/tmp", [mount["mountPath"] for mount in container["volumeMounts"]])
        container = worker["containers"][0]
        self.assertEqual(container["args"], ["sshd"])
        self.assertEqual(container["readinessProbe"]["tcpSocket"]["port"], container["ports"][0]["containerPort"])

    def test_what_the_controller_makes_of_it(self):
        for name, job in self.jobs.items():
            spec = job["spec"]
            self.assertEqual(spec["sshAuthMountPath"], "/home/mpiuser/.ssh", name)
            launcher, worker = (spec["mpiReplicaSpecs"][role]["template"]["spec"] for role in ("Launcher", "Worker"))
            self.check_pods(name, launcher, worker)
            self.assertEqual(unknown_flags(LOCKSTEP, launcher["containers"][0]["args"]), [], name)
            gpus = worker["containers"][0]["resources"]["limits"].get("nvidia.com/gpu")
            self.assertIn(gpus, (None, spec["slotsPerWorker"]), "a rank for each GPU")

    # Kubeflow Trainer puts keys and host file into containers named "node" of the replicated jobs "node" and "launcher",
    # and the TrainJob's arguments into that of the one that is labelled as the trainer.
    def test_what_the_trainer_makes_of_it(self):
        policy = self.runtime["spec"]["mlPolicy"]["mpi"]
        self.assertEqual(policy["sshAuthMountPath"], "/home/mpiuser/.ssh")
        replicated = {job["name"]: job["template"] for job in self.runtime["spec"]["template"]["spec"]["replicatedJobs"]}
        self.assertEqual(set(replicated), {"launcher", "node"})
        launcher, worker = (replicated[name]["spec"]["template"]["spec"] for name in ("launcher", "node"))
        self.check_pods("trainjob.yaml", launcher, worker)
        self.assertEqual({pod["containers"][0]["name"] for pod in (launcher, worker)}, {"node"})
        label = {"trainer.kubeflow.org/trainjob-ancestor-step": "trainer"}
        self.assertEqual(replicated["launcher"]["metadata"]["labels"], label)
        words = self.train_job["spec"]["trainer"]["args"]
        self.assertEqual(unknown_flags(LOCKSTEP, words), [])
        self.assertEqual(words[words.index("--hostfile") + 1], "/etc/mpi/hostfile")
        self.assertEqual(self.train_job["spec"]["runtimeRef"]["name"], self.runtime["metadata"]["name"])
        self.assertEqual(self.train_job["spec"]["runtimeRef"]["kind"], self.runtime["kind"])

    def test_the_job_that_resumes(self):
        job = self.jobs["mpijob-restarts.yaml"]["spec"]
        launcher, worker = (job["mpiReplicaSpecs"][role] for role in ("Launcher", "Worker"))
        words = launcher["template"]["spec"]["containers"][0]["args"]
        value_of = lambda flag: words[words.index(flag) + 1]
        self.assertEqual(value_of("--resume"), "auto")
        self.assertIn("--global-batch", words)
        # What one worker holds, so that the loss of the other one is no end.
        self.assertEqual(value_of("--min-ranks"), str(job["slotsPerWorker"] * (worker["replicas"] - 1)))
        mounts = {mount["mountPath"]: mount["name"] for mount in worker["template"]["spec"]["containers"][0]["volumeMounts"]}
        place = "/" + value_of("--checkpoint-dir").split("/")[1]
        volume = next(one for one in worker["template"]["spec"]["volumes"] if one["name"] == mounts[place])
        self.assertIn("persistentVolumeClaim", volume)
        for replicas in (launcher, worker):
            self.assertEqual(replicas["restartPolicy"], "OnFailure")
        self.assertGreater(job["runPolicy"]["backoffLimit"], 0)


class Documents(unittest.TestCase):
    """The commands in docs/docker.md and docs/cluster.md."""

    def lines(self):
        for document in DOCUMENTS:
            lines = commands_in(document.read_text())
            self.assertGreater(len(lines), 5, document)
            for line in lines:
                with self.subTest(document.name, line=line):
                    yield line

    def test_flags(self):
        for line in self.lines():
            self.assertEqual(unknown_flags(LOCKSTEP, words_of(line)), [])

    def test_files(self):
        texts = [path.read_text() for path in (*DOCUMENTS, *DOCKERFILES)]
        named = set(re.findall(r"(?<![\w/.:-])(?:docker|scripts|docs|tests)/[\w/.-]*\w", "\n".join(texts)))
        self.assertGreater(len(named), 8)
        self.assertEqual(sorted(name for name in named if not (SOURCE / name).exists()), [])

    def test_builds(self):
        comments = "\n".join(line.removeprefix("#") for path in DOCKERFILES for line in path.read_text().splitlines()
                             if line.startswith("#"))
        builds = [words_of(line) for line in
                  (*self.lines(), *re.sub(r"\\\n", " ", comments).splitlines()) if line.split()[:2] == ["docker", "build"]]
        self.assertGreater(len(builds), 4)
        for words in builds:
            path = SOURCE / words[words.index("-f") + 1]
            file = Dockerfile(path)
            for before, word in zip(words, words[1:]):
                if before == "--build-arg":
                    self.assertIn(word.partition("=")[0], file.arguments(), words)
                if before == "--build-context":
                    self.assertIn(f"scratch AS {word.partition('=')[0]}", "\n".join(file.all("FROM")), words)

    def test_the_checks_find_mistakes(self):
        self.assertEqual(unknown_flags(LOCKSTEP, words_of("mpirun lockstep train cnn --lr 1 --epoch 2 --data=x")),
                         ["`lockstep train` has no --epoch"])
        self.assertEqual(unknown_flags(LOCKSTEP, words_of("lockstep launch -n 2 --lr 1 -- lockstep trian cnn")),
                         ["`lockstep launch` has no --lr", "there is no `lockstep trian`"])
        self.assertEqual(commands_in("text `a`\n```\nb \\\n  --c # d\n# e\n```\n"), ["b --c"])


if __name__ == "__main__":
    unittest.main(argv=[sys.argv[0], *others])
