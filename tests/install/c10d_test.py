"""PyTorch's backend "lockstep" (bindings/c10d), built against the installed package and a PyTorch with Python: its operations,
PyTorch's own DDP and fully_shard over it, what failures look like, and launchers. Without PyTorch it ends with 77, which
ctest takes for skipped.

  c10d_test.py [--source DIR] [--build DIR] [unittest's arguments]
"""
import json
import re
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


class C10d(package.Case):
    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        if subprocess.run([PYTHON, "-c", "import numpy"], capture_output=True).returncode:
            raise AssertionError("PyTorch's environment is an old one, without NumPy → bench/peers/setup torch")
        cls.site = cls.here / "site"
        build = cls.prefix / "share/lockstep/bindings/c10d/build.py"
        cls.built = run([PYTHON, "-W", "ignore", build, "--out", cls.site], timeout=600).stdout

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
                     [PYTHON, "-B", "-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone", program]):
            done = run(argv, env=self.environment())
            self.assertIn("2 ranks have summed", done.stdout)

    def test_what_cannot_be_built(self):
        build = self.prefix / "share/lockstep/bindings/c10d/build.py"
        for argv, wanted in (([PYTHON, "-W", "ignore", build, "--prefix", self.here / "nothing"], "no lockstep with the component comm"),
                             ([sys.executable, "-I", build], "has no PyTorch")):
            if "no PyTorch" in wanted and subprocess.run([sys.executable, "-I", "-c", "import torch"],
                                                         capture_output=True).returncode == 0:
                continue
            self.assertIn(wanted, run(argv, code=1).stderr)


if __name__ == "__main__":
    if not PYTHON.exists():
        print("skipped: PyTorch is not there → bench/peers/setup torch")
        sys.exit(SKIPPED)
    unittest.main(argv=[sys.argv[0], *package.others])
