"""PyTorch's backend "lockstep" (bindings/c10d), built against the installed package and a PyTorch with Python: its operations,
PyTorch's own DDP and fully_shard over it, what failures look like, and launchers; and its wheel. Without PyTorch it ends with
77, which ctest takes for skipped.

  c10d_test.py [--source DIR] [--build DIR] [unittest's arguments]
"""
import json
import re
import shutil
import signal
import subprocess
import sys
import unittest

sys.dont_write_bytecode = True
import package  # noqa: E402
from package import BUILD, SOURCE, run  # noqa: E402

sys.path.insert(0, str(SOURCE / "tests/support"))
import job  # noqa: E402

SKIPPED = 77
PYTHON = BUILD / "peers/torch/bin/python"
PROGRAMS = SOURCE / "tests/install/c10d"
EXAMPLES = SOURCE / "examples/pytorch"
TORCHRUN = [PYTHON, "-B", "-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone"]


def needs(framework):
    there = PYTHON.exists() and subprocess.run([PYTHON, "-c", f"import importlib.util as u; exit(u.find_spec('{framework}') is None)"],
                                               capture_output=True).returncode == 0
    return unittest.skipUnless(there, f"no {framework} → build/peers/torch/bin/pip install {framework}")


class C10d(package.Case):
    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        if subprocess.run([PYTHON, "-c", "import numpy"], capture_output=True).returncode:
            raise AssertionError("PyTorch's environment is an old one, without NumPy → bench/peers/setup torch")
        cls.site = cls.here / "site"
        cls.package = cls.prefix / "share/lockstep/bindings/c10d"
        run([PYTHON, "-m", "pip", "install", "--no-deps", "--target", cls.site, cls.package], timeout=600)

    def environment(self, **more):
        return job.environment(PYTHONPATH=str(self.site), OMP_NUM_THREADS="1", GLOO_SOCKET_IFNAME="lo",
                               PYTHONWARNINGS="ignore", LOCKSTEP_JOB_SECRET="of the tests, 32 characters long", **more)

    def ranks(self, count, program, *arguments, hosts=None, codes=None):
        """What each rank has said, which must end with `codes`, 0 unless they are given. hosts: a letter for each."""
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        with job.started(count, [PYTHON, "-B", PROGRAMS / program, *arguments], self.environment(),
                         lambda rank: {"env": {"LOCKSTEP_HOST_NAME": hosts[rank]} if hosts else {}}, **pipes) as processes:
            said = [process.communicate(timeout=200) for process in processes]
        for rank, (process, (text, errors)) in enumerate(zip(processes, said)):
            self.assertEqual(process.returncode, codes[rank] if codes else 0, f"rank {rank}: {text}{errors}")
        self.errors = [errors for _, errors in said]
        return [text for text, _ in said]

    def test_operations(self):
        for count, hosts in ((1, None), (2, None), (3, None), (2, "ab"), (3, "aab")):
            with self.subTest(ranks=count, hosts=hosts):
                self.assertIn(f"{count} ranks: all operations are right", self.ranks(count, "collectives.py", hosts=hosts)[0])

    def test_training_as_over_gloo(self):
        for count, hosts in ((2, None), (3, None), (2, "ab")):
            with self.subTest(ranks=count, hosts=hosts):
                ours, gloos = ([json.loads(text) for text in self.ranks(count, "training.py", backend, hosts=hosts)]
                               for backend in ("lockstep", "gloo"))
                most = 0 if count <= 2 else 1e-5
                for rank, (our, other) in enumerate(zip(ours, gloos, strict=True)):
                    self.assertEqual(sorted(our), ["ddp", "sharded"])
                    for name, losses in our.items():
                        difference = max(abs(a - b) for a, b in zip(losses, other[name], strict=True))
                        print(f"{name} on {count} ranks: rank {rank}'s losses differ from Gloo's by at most {difference:.1e}, "
                              f"the last is {losses[-1]:.4f}")
                        self.assertLessEqual(difference, most, (name, losses, other[name]))
                        self.assertLess(losses[-1], losses[0])

    def test_what_moves_on_and_what_ends(self):
        beside = ("callbacks", "a_callback_waits_for_a_queued_one", "a_message_while_another_group_waits",
                  "a_message_beside_a_collective", "messages_of_callbacks", "from_any_rank_first", "two_threads", "options")
        for cases in ((*beside, "after_the_end"), ("left_under_way",)):
            for hosts in ("aa", "ab"):
                with self.subTest(cases=cases, hosts=hosts):
                    said = self.ranks(2, "progress.py", *cases, hosts=hosts)[0]
                    self.assertEqual(said.splitlines(), [f"{case} is right" for case in cases])
                    if "left_under_way" in cases:
                        self.assertIn("destroyed while sends or receives are under way", self.errors[0])

    def test_failures(self):
        for hosts in ("aa", "ab"):
            with self.subTest(hosts=hosts):
                late, _ = self.ranks(2, "failures.py", "late", hosts=hosts)
                self.assertEqual(len(re.findall(r"rank 0: allreduce #2 \(sum of .* timed out after .* waiting for rank 1 .*the "
                                                "timeout of init_process_group", late)), 2, late)
                dead, _ = self.ranks(2, "failures.py", "dead", hosts=hosts, codes=[0, -signal.SIGKILL])
                self.assertRegex(dead, r"rank 0: rank 1 \(host .*, pid \d+\) has ended")
                silent, _ = self.ranks(2, "failures.py", "silent", hosts=hosts)
                self.assertEqual(silent.count("rank 0: receiving from any rank timed out"), 2, silent)
                one, _ = self.ranks(2, "failures.py", "one_operation_late", hosts=hosts)
                self.assertRegex(one, r"rank 0: allreduce #2 .*timed out after")
                self.assertIn("rank 1 sends a message with tag 4 of 3 elements, and this rank receives a message with tag 3",
                              self.ranks(2, "failures.py", "another_tag", hosts=hosts)[0])
        for text in self.ranks(2, "failures.py", "other_sparse_shape"):
            self.assertIn("allreduce of sparse tensors whose shapes differ: rank 0's and rank 1's", text)
        for text in self.ranks(2, "failures.py", "different"):
            self.assertRegex(text, r"out of step: rank . .*sum of 100[01] f32.*sum of 100[01] f32")

    def test_ends_without_destroying_the_group(self):
        for case, hosts in (("left", "ab"), ("alone", "aa")):
            with self.subTest(case=case, hosts=hosts):
                self.assertEqual(self.ranks(2, "failures.py", case, hosts=hosts), ["rank 0: left\n", "rank 1: left\n"])

    def test_a_rank_that_never_comes(self):
        self.assertIn("waiting for rank 1, which has not joined", self.ranks(2, "failures.py", "absent")[0])

    def test_launchers(self):
        program = PROGRAMS / "launched.py"
        for argv in ([self.prefix / "bin/lockstep", "launch", "-n", "2", "--", PYTHON, "-B", program],
                     [*TORCHRUN, program]):
            done = run(argv, env=self.environment())
            self.assertIn("2 ranks have summed", done.stdout)

    def example(self, name, *arguments, launcher=TORCHRUN):
        return run([*launcher, EXAMPLES / name, *arguments], env=self.environment()).stdout

    def test_example_of_ddp(self):
        over = {backend: [float(loss) for loss in re.findall(r"loss ([\d.]+)", self.example("ddp.py", backend))]
                for backend in ("lockstep", "gloo")}
        self.assertEqual(len(over["gloo"]), 3)
        for ours, gloos in zip(over["lockstep"], over["gloo"], strict=True):
            self.assertLessEqual(abs(ours - gloos), 1e-6)

    def test_example_of_fsdp2(self):
        self.assertRegex(self.example("fsdp2.py", self.here / "checkpoint"), r"step 20: loss [01]\.\d+, saved")
        self.assertTrue((self.here / "checkpoint/.metadata").exists())

    @needs("pytorch_lightning")
    def test_example_of_lightning(self):
        self.assertRegex(self.example("lightning_ddp.py", launcher=[PYTHON, "-B"]), r"over lockstep: loss [12]\.\d+")

    @needs("accelerate")
    def test_example_of_accelerate(self):
        self.assertRegex(self.example("accelerate_loop.py"), r"epoch 3: loss [12]\.\d+ over lockstep")

    @needs("transformers")
    def test_example_of_transformers(self):
        self.assertRegex(self.example("transformers_trainer.py", self.here / "trainer"), r"over lockstep: loss [12]\.\d+")

    def test_another_pytorch_is_refused(self):
        other = self.here / "other"
        shutil.copytree(self.site, other)
        build = other / "lockstep_c10d/_build.py"
        build.write_text(re.sub(r'TORCH = "[^"]*"', 'TORCH = "2.1.0"', build.read_text()))
        said = subprocess.run([PYTHON, "-B", PROGRAMS / "launched.py"], capture_output=True, text=True, env={
            **self.environment(RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT="0"), "PYTHONPATH": str(other)})
        self.assertRegex(said.stderr, r"compiled for PyTorch 2\.1, and this is 2\.\d+.* → install its wheel for 2\.\d+")

    def test_without_pytorch_it_cannot_be_built(self):
        empty = self.here / "empty"
        run([PYTHON, "-m", "venv", empty])
        find = self.package / "wheel/find_torch.py"
        self.assertIn("has no PyTorch", run([empty / "bin/python", "-E", find], code=1).stderr)


class Wheel(package.WithFiles):
    def fresh(self, name, what):
        """The Python of a new environment that has `what` installed, and sees PyTorch."""
        environment = self.here / name
        run([PYTHON, "-m", "venv", environment])
        places = run([PYTHON, "-c", "import sysconfig; print(sysconfig.get_path('platlib'))"]).stdout
        next(environment.glob("lib/python*/site-packages")).joinpath("torch.pth").write_text(places)
        python = environment / "bin/python"
        run([python, "-m", "pip", "install", "--no-deps", what], timeout=900)
        return python

    def test_it_is_one_word(self):
        wheel = run([SOURCE / "scripts/build-wheel"], timeout=900).stdout.splitlines()[-1]
        self.assertRegex(wheel, r"/lockstep_c10d-[\d.]+-[\d.]+torch-cp\d+-cp\d+-manylinux_\d+_\d+_x86_64\.whl$")
        sdist = run([SOURCE / "scripts/build-wheel", "--sdist"], timeout=300).stdout.splitlines()[-1]
        for name, what in (("of_wheel", wheel), ("of_sdist", sdist)):
            python = self.fresh(name, what)
            env = job.environment(OMP_NUM_THREADS="1", GLOO_SOCKET_IFNAME="lo", PYTHONWARNINGS="ignore")
            done = run([python, "-B", "-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone",
                        PROGRAMS / "launched.py"], env=env)
            self.assertIn("2 ranks have summed", done.stdout)
            info = run([python, "-c", "import lockstep_c10d as c; print(c.__version__, c.info()['problem'] or 'usable')"], env=env)
            self.assertRegex(info.stdout, r"^\d+\.\d+\.\d+ usable\n$")


if __name__ == "__main__":
    if not PYTHON.exists():
        print("skipped: PyTorch is not there → bench/peers/setup torch")
        sys.exit(SKIPPED)
    unittest.main(argv=[sys.argv[0], *package.others])
