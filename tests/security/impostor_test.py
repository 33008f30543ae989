#!/usr/bin/env python3
"""Impostors at every port of a job: docs/security.md names these tests, one a threat. They speak the protocol as wire.py
has it, to the real program."""
import argparse
import os
import pathlib
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import unittest

import wire

sys.dont_write_bytecode = True
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "support"))
import job  # noqa: E402

OPTIONS = None
SECRET = "5f0c1e6a7b2d4938a1c0ffee00112233"
OTHER = "00000000000000000000000000000000"
JOB = ["train", "linear", "--data", "random:5,32", "--steps", "2", "--quiet", "--timeout-seconds", "60"]
WIRE_TEXT = "it does not know this job's secret"


def environment(**variables) -> dict:
    ours = {"CUDA_VISIBLE_DEVICES": "", "HWLOC_COMPONENTS": "-gl", "OMP_NUM_THREADS": "1",
            "OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    return job.environment(**ours | {name: str(value) for name, value in variables.items() if value is not None})


class Jobs(unittest.TestCase):
    """Ranks that are started by hand, and ended with the test."""

    def setUp(self):
        self.port = job.free_port()
        self.address = ("127.0.0.1", self.port)
        self.processes, self.connections = [], []

    def tearDown(self):
        for connection in self.connections:
            connection.close()
        for process in self.processes:
            if process.poll() is None:
                process.kill()
            process.communicate()

    def start(self, arguments, **variables):
        process = subprocess.Popen([OPTIONS.lockstep, *arguments], env=environment(**variables), text=True,
                                   stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        self.processes.append(process)
        return process

    def rank(self, rank, size=2, secret=SECRET, arguments=JOB, **variables):
        return self.start(arguments, **{"RANK": rank, "WORLD_SIZE": size, "MASTER_ADDR": "127.0.0.1",
                                        "MASTER_PORT": self.port, "LOCKSTEP_JOB_SECRET": secret} | variables)

    def connect(self) -> wire.Connection:
        """To rank 0's store, as soon as it listens."""
        for _ in range(600):
            try:
                self.connections.append(wire.Connection(self.address))
                return self.connections[-1]
            except ConnectionRefusedError:
                time.sleep(0.05)
        self.fail("rank 0 does not listen")

    def end(self, process, code=0):
        out, err = process.communicate(timeout=90)
        self.assertEqual(process.returncode, code, err)
        return out + err

    def refusals(self, port: int, identity: bytes, connect):
        """What strangers can try at a port without the secret. Each of them is refused or closed."""
        def refusal(action):
            connection = connect()
            try:
                action(connection)
            except wire.Refused as refused:
                return str(refused)
            finally:
                connection.close()
            self.fail("not refused")

        secret = SECRET.encode()
        with self.subTest("a wrong secret"):
            self.assertIn(WIRE_TEXT, refusal(lambda c: c.join(OTHER.encode(), port, identity)))
        with self.subTest("no secret"):
            self.assertIn(WIRE_TEXT, refusal(lambda c: c.join(b"", port, identity)))
        with self.subTest("the right secret, for another port"):
            self.assertIn(WIRE_TEXT, refusal(lambda c: c.join(secret, port % 3 + 1, identity)))
        with self.subTest("a replayed hello"):
            recorded = connect()
            nonce = b"r" * 32
            proof = wire.proof(secret, port, 0, nonce, recorded.challenge(nonce), identity)

            def replay(connection):
                connection.challenge(nonce)
                connection.say(wire.hello_frame(wire.PROVE, wire.text(identity) + wire.number(0) + wire.text(proof)))
                connection.read_hello_frame()
            self.assertIn(WIRE_TEXT, refusal(replay))
            recorded.close()
        with self.subTest("an oversized hello"):
            connection = connect()
            connection.say(wire.MAGIC + wire.number(0x7fffffff))
            self.assertEqual(connection.last_words(), b"")
            connection = connect()
            connection.challenge(b"n" * 32)
            connection.say(wire.number(1 << 20))
            self.assertEqual(connection.last_words(), b"")
        with self.subTest("another protocol"):
            connection = connect()
            connection.say(b"GET / HTTP/1.1\r\n\r\n")
            self.assertEqual(connection.last_words(), b"")
        with self.subTest("no hello"):
            self.assertEqual(connect().last_words(), b"")
        with self.subTest("one byte per second"):
            begin = time.monotonic()
            connection = connect()
            hello = wire.MAGIC + wire.hello_frame(wire.HELLO, wire.number(wire.VERSION) + wire.text(b"n" * 32))
            for byte in hello:
                try:
                    connection.say(bytes([byte]))
                    connection.socket.settimeout(1)
                    if connection.socket.recv(100) == b"":
                        break
                except TimeoutError:
                    continue
                except OSError:
                    break
                except wire.Refused:
                    break
            connection.close()
            self.assertLess(time.monotonic() - begin, len(hello) - 10)


class Store(Jobs):
    def test_strangers_are_refused_and_the_job_goes_on(self):
        first = self.rank(0)
        self.connect().close()
        self.refusals(wire.STORE, wire.identity_for_store(2, 1), self.connect)
        self.end(self.rank(1))
        said = self.end(first)
        self.assertIn(WIRE_TEXT, said)
        self.assertRegex(said, r"refused \d+ connections to MASTER_PORT from outside this job")
        self.assertNotIn(SECRET, said)

    def test_a_stranger_gives_up_with_code_0(self):
        """Without a word of the handshake, as the first version took it; and as whoever may join without a secret."""
        first = self.rank(0)
        connection = self.connect()
        body = wire.number(1) + wire.number(2) + wire.number(1) + wire.number(1) + wire.text("h") + wire.text("")
        connection.say(wire.MAGIC + wire.hello_frame(1, body) +
                       wire.hello_frame(wire.GIVE_UP, wire.number(0) + wire.text("all is well")))
        self.assertIn(b"version 1", connection.last_words())
        self.end(self.rank(1))
        self.end(first)

    def test_no_rank_ends_well_because_of_what_another_says(self):
        for secret, code in (None, 0), (None, 256), (SECRET, 0):
            with self.subTest(secret=secret is not None, code=code):
                self.port = job.free_port()
                self.address = ("127.0.0.1", self.port)
                first = self.rank(0, size=3, secret=secret)
                second = self.rank(1, size=3, secret=secret)
                liar = self.connect()
                liar.join((secret or "").encode(), wire.STORE, wire.identity_for_store(3, 2))
                for rank in range(2):  # both are here, and wait for the third
                    liar.get(f"rendezvous of the ranks/{rank}")
                liar.say(wire.store_frame(wire.GIVE_UP, wire.number(code) + wire.text("all is well")))
                for process in first, second:
                    _, err = process.communicate(timeout=60)
                    self.assertEqual(process.returncode, 4, err)
                    self.assertIn("rank 2", err)
                liar.close()

    def test_a_rank_tells_nothing_to_an_impostor_of_rank_0(self):
        for secret, kind, body in ((SECRET, None, b""),
                                   (None, wire.PEER_GAVE_UP, wire.number(0) + wire.text("all is well"))):
            with self.subTest(secret=secret is not None), socket.create_server(self.address) as server:
                server.settimeout(60)
                rank = self.rank(1, secret=secret)
                accepted, _ = server.accept()
                with accepted:
                    connection = wire.Connection.__new__(wire.Connection)
                    connection.socket = accepted
                    accepted.settimeout(20)
                    self.assertEqual(connection.read(8), wire.MAGIC)
                    _, hello = connection.read_hello_frame()
                    nonce, callers = b"i" * 32, hello[8:]
                    connection.say(wire.MAGIC + wire.hello_frame(wire.CHALLENGE, wire.text(nonce)))
                    _, prove = connection.read_hello_frame()
                    length = int.from_bytes(prove[:4], "little")
                    identity, answer = prove[4:4 + length], wire.number(0) + wire.text("here")
                    # It knows no secret: what it has is the empty one.
                    mine = wire.proof(b"", wire.STORE, 1, callers, nonce, identity, answer)
                    connection.say(wire.hello_frame(wire.WELCOME, wire.text(answer) + wire.text(mine)))
                    if kind is not None:
                        connection.say(wire.store_frame(kind, body))
                    _, err = rank.communicate(timeout=60)
                    self.assertEqual(rank.returncode, 2 if kind is None else 4, err)
                    self.assertIn("is not this job's rank 0" if kind is None else "exit code 0", err)
                    if kind is None:
                        self.assertEqual(connection.last_words(), b"")  # nothing but the hello

    def test_silent_strangers_delay_nobody(self):
        first = self.rank(0)
        for _ in range(300):
            self.connect()
        second = self.rank(1)
        for _ in range(200):
            self.connect()
        self.end(second)
        self.assertRegex(self.end(first), r"refused \d\d\d connections to MASTER_PORT from outside this job")

    def test_an_altered_frame_ends_the_job(self):
        first = self.rank(0)
        connection = self.connect()
        connection.join(SECRET.encode(), wire.STORE, wire.identity_for_store(2, 1))
        frame = bytearray(wire.store_frame(wire.SET, wire.text("key") + wire.text("value")))
        frame[-1] ^= 1
        connection.say(bytes(frame))
        said = self.end(first, 4)
        self.assertIn("its checksum is wrong", said)
        connection.close()

    def test_it_listens_at_its_own_address_alone(self):
        self.rank(0, LOCAL_RANK=0, LOCAL_WORLD_SIZE=1)
        self.connect().close()
        listening = [line.split()[1] for table in ("tcp", "tcp6")
                     for line in pathlib.Path(f"/proc/net/{table}").read_text().splitlines()[1:]
                     if line.split()[3] == "0A" and line.split()[1].endswith(f":{self.port:04X}")]
        self.assertEqual(listening, [f"0100007F:{self.port:04X}"])
        elsewhere = self.rank(0, MASTER_ADDR="192.0.2.1")
        self.assertIn("LOCKSTEP_LISTEN", self.end(elsewhere, 2))

    def test_a_job_without_a_secret_says_so_where_others_reach_it(self):
        first = self.rank(0, secret=None, LOCKSTEP_LISTEN="0.0.0.0")
        self.connect().close()
        self.end(self.rank(1, secret=None))
        self.assertIn("this job has no secret", self.end(first))
        # Nobody does without one who wanted one.
        self.assertIn("LOCKSTEP_JOB_SECRET in the environment has 0 characters", self.end(self.rank(0, secret=""), 2))


class Data(Jobs):
    def test_strangers_are_refused_at_the_data_port(self):
        """This test is rank 1 of a job on two hosts, and then one that calls in its place."""
        first = self.rank(0, LOCKSTEP_HOST_NAME="a")
        store = self.connect()
        store.join(SECRET.encode(), wire.STORE, wire.identity_for_store(2, 1))
        introduction = bytearray(store.get("rendezvous of the ranks/0"))
        introduction[0:64] = b"b".ljust(64, b"\0")
        store.set("rendezvous of the ranks/1", bytes(introduction))
        for name in "sharing memory, round 1", "sharing memory, round 2", "preparing connections":
            store.get(f"{name}/0")
            store.set(f"{name}/1", "")
        host, port = store.get("exchanging addresses/0").decode().split("\n")[1].split()
        store.set("exchanging addresses/1", "-1\n127.0.0.1 1\n")
        nonce = store.get("naming the job/0")
        store.set("naming the job/1", "")
        secret = wire.sign(SECRET.encode(), b"data connections " + nonce)
        identity = wire.number(1) + wire.number(0) + wire.number(0)  # from, to, for collectives
        address = (host, int(port))
        self.assertEqual(host, "127.0.0.1")  # the way to MASTER_ADDR, not every address of the host

        def refusal(with_secret, who=identity):
            connection = wire.Connection(address)
            try:
                connection.join(with_secret, wire.DATA, who)
            except wire.Refused as refused:
                return str(refused)
            finally:
                connection.close()
            self.fail("not refused")

        self.assertIn(WIRE_TEXT, refusal(OTHER.encode()))
        self.assertIn(WIRE_TEXT, refusal(SECRET.encode()))  # not even the job's: it is another for each rendezvous
        self.assertIn(WIRE_TEXT, refusal(b""))
        self.assertIn("no rank that this one waits for", refusal(secret, wire.number(7) + wire.number(0)))
        # A proof that was overheard.
        recorded = wire.Connection(address)
        proof = wire.proof(secret, wire.DATA, 0, b"r" * 32, recorded.challenge(b"r" * 32), identity)
        replayed = wire.Connection(address)
        replayed.challenge(b"r" * 32)
        replayed.say(wire.hello_frame(wire.PROVE, wire.text(identity) + wire.number(0) + wire.text(proof)))
        with self.assertRaisesRegex(wire.Refused, WIRE_TEXT):
            replayed.read_hello_frame()
        oversized = wire.Connection(address)
        oversized.say(wire.MAGIC + wire.number(0x7fffffff))
        self.assertEqual(oversized.last_words(), b"")
        silent = [wire.Connection(address) for _ in range(100)]
        self.assertEqual(silent[0].last_words(), b"")
        hello = wire.MAGIC + wire.hello_frame(wire.HELLO, wire.number(wire.VERSION) + wire.text(b"n" * 32))
        self.assertLess(wire.trickle(address, hello, 1), len(hello) - 10)

        right = wire.Connection(address)
        self.assertEqual(right.join(secret, wire.DATA, identity), b"")
        self.assertEqual(store.get("connecting the hosts/0"), b"")  # rank 0 has all that it waits for
        for connection in [recorded, replayed, oversized, right, store, *silent]:
            connection.close()
        _, err = first.communicate(timeout=60)
        self.assertEqual(first.returncode, 4, err)
        self.assertIn("was refused: " + WIRE_TEXT, err)


class Relay:
    """Between rank 1 and rank 0's store, which listens elsewhere: keeps what passes, and may alter a byte of it."""

    def __init__(self, address, to, alters=None):
        self._to, self._alters, self.seen = to, alters, {"up": b"", "down": b""}
        self._server = socket.create_server(address)
        self._thread = threading.Thread(target=self._accept, daemon=True)
        self._thread.start()

    def _accept(self):
        while True:
            try:
                near, _ = self._server.accept()
            except OSError:
                return
            far = socket.create_connection(self._to)
            for source, target, way in (near, far, "up"), (far, near, "down"):
                threading.Thread(target=self._pass, args=(source, target, way), daemon=True).start()

    def _pass(self, source, target, way):
        try:
            while data := bytearray(source.recv(1 << 16)):
                begin = len(self.seen[way])
                self.seen[way] += bytes(data)
                if self._alters and self._alters[0] == way and begin <= self._alters[1] < begin + len(data):
                    data[self._alters[1] - begin] ^= 1
                target.sendall(data)
            target.shutdown(socket.SHUT_WR)
        except OSError:
            source.close()
            target.close()

    def close(self):
        self._server.close()


class Encryption(Jobs):
    """Two ranks that take themselves for two hosts."""

    def both(self, flags, others=None, address=None, save=None, seconds=60, **variables):
        arguments = JOB[:-1] + [str(seconds), "--threads", "1"] + (["--save", save] if save else [])
        ranks = [self.rank(0, arguments=arguments + flags, LOCKSTEP_HOST_NAME="a", **variables)]
        port = {"MASTER_PORT": address[1]} if address else {}
        self.connect().close()
        others = flags if others is None else others
        ranks.append(self.rank(1, arguments=arguments + others, LOCKSTEP_HOST_NAME="b", **variables, **port))
        return ranks

    def test_training_computes_the_same_and_shows_nothing(self):
        files, seen = {}, {}
        for flags in [], ["--encrypt"]:
            with tempfile.TemporaryDirectory() as directory:
                relay_address = ("127.0.0.1", job.free_port())
                relay = Relay(relay_address, self.address)
                for process in self.both(flags, address=relay_address, save=f"{directory}/w"):
                    self.end(process)
                relay.close()
                files[bool(flags)] = pathlib.Path(f"{directory}/w").read_bytes()
                seen[bool(flags)] = relay.seen
        self.assertEqual(files[False], files[True])
        for way in "up", "down":
            self.assertIn(b"exchanging addresses", seen[False]["up"])
            self.assertNotIn(b"exchanging addresses", seen[True][way])
            self.assertIn(b"127.0.0.1 ", seen[False][way])
            self.assertNotIn(b"127.0.0.1 ", seen[True][way])
            self.assertGreater(len(seen[True][way]), len(seen[False][way]))

    def test_altered_bytes_end_the_job(self):
        """Each side finds it, and says so, wherever after the handshake it is."""
        for way, at in (("up", 600), ("down", 600), ("up", 290), ("down", 160)):
            with self.subTest(way=way, at=at):
                relay_address = ("127.0.0.1", job.free_port())
                relay = Relay(relay_address, self.address, alters=(way, at))
                ranks = self.both(["--encrypt"], address=relay_address)
                said = "".join(self.end(process, 4) for process in ranks)
                self.assertIn("was altered on its way, or comes from somebody else", said)
                relay.close()
                self.setUp()

    def test_one_rank_alone_does_not_encrypt(self):
        """Each way round: the one that differs is refused, and both logs name the flag."""
        for flags, others, why in (["--encrypt"], [], "without --encrypt, and the others with it"), (
                [], ["--encrypt"], "with --encrypt, and the others without it"):
            with self.subTest(flags=flags):
                first, second = self.both(flags, others, seconds=6)
                self.assertIn("has refused this process: it runs " + why, self.end(second, 2))
                self.assertIn("to MASTER_PORT was refused: it runs " + why, self.end(first, 5))
                self.setUp()

    def mpirun(self, *flags):
        """Two ranks that MPI joins, and that take themselves for two hosts; flags of each."""
        command, between = ["mpirun", "--oversubscribe"], []
        for rank, own in enumerate(flags):
            command += between + ["-n", "1", "-x", f"LOCKSTEP_HOST_NAME=host{rank}", OPTIONS.lockstep, *JOB, *own]
            between = [":"]
        process = subprocess.Popen(command, env=environment(), text=True, stdin=subprocess.DEVNULL,
                                   stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        self.processes.append(process)
        return process

    def test_ranks_that_mpi_joins(self):
        said = self.end(self.mpirun(["--encrypt"], ["--encrypt"]))
        self.assertIn("the keys come from random bits that MPI sends in clear", said)
        process = self.mpirun(["--encrypt"], [])
        out, err = process.communicate(timeout=90)
        self.assertNotEqual(process.returncode, 0, err)
        self.assertIn("rank 0 runs with --encrypt, and rank 1 without it", out + err)

    def test_nobody_in_between_turns_it_off(self):
        """The byte in the caller's proof that says whether it encrypts."""
        identity = wire.identity_for_store(2, 1)
        first = self.rank(0, arguments=JOB + ["--encrypt"])
        nonce = b"n" * 32
        for says, proves in (0, 1), (1, 0):
            connection = self.connect()
            challenge = connection.challenge(nonce)
            proof = wire.proof(SECRET.encode(), wire.STORE, 0, nonce, challenge, identity, encrypts=proves)
            connection.say(wire.hello_frame(wire.PROVE, wire.text(identity) + wire.number(says) + wire.text(proof)))
            with self.assertRaisesRegex(wire.Refused, WIRE_TEXT):
                connection.read_hello_frame()
        # One that joins as it should, and then speaks in clear.
        connection = self.connect()
        connection.join(SECRET.encode(), wire.STORE, identity, encrypts=1)
        connection.say(wire.store_frame(wire.SET, wire.text("key") + wire.text("value" * 10)))
        self.assertIn("comes from somebody else", self.end(first, 4))

    def test_what_cannot_be_encrypted_is_refused(self):
        for variables, flags, why in (
                ({"secret": None}, [], "this job has no secret that keys could be made of"),
                ({}, ["--backend", "nccl"], "NCCL (--backend nccl) does not encrypt"),
                ({}, ["--backend", "mpi"], "--backend mpi")):
            with self.subTest(why):
                ranks = [self.rank(rank, arguments=JOB + ["--encrypt"] + flags, **variables) for rank in range(2)]
                said = "".join(self.end(process, 2) for process in ranks)
                self.assertIn(why, said)
                self.setUp()
        said = self.end(self.start(["train", "linear", "--data", "random:5,32", "--steps", "1", "--encrypt"]))
        self.assertIn("--encrypt changes nothing: there is one rank", said)


INSIDE = """
import os, sys
sys.path.insert(0, sys.argv[1])
import impostor_test
impostor_test.inside()
"""


def inside():
    """A rank's program that turns on the launcher; but with the secret that its rank has it does nothing."""
    path = os.environ["LOCKSTEP_LAUNCHER"].removeprefix("unix:")
    case = unittest.FunctionTestCase(lambda: None)
    connect = lambda: wire.Connection(path)
    # "Rank 0 runs", "and has ended well": what the launcher would take from a wrapper.
    lies = (b"\x09\0\0\0\0" + b"\0" * 8 + b"h") + (b"\x0e\0\0\0\3" + b"\0" * 14)
    connection = connect()
    connection.say(lies)
    case.assertEqual(connection.last_words(), b"")
    for secret in b"", OTHER.encode():
        connection = connect()
        try:
            connection.join(secret, wire.LAUNCHER, b"")
            case.fail("not refused")
        except wire.Refused as refused:
            case.assertIn(WIRE_TEXT, str(refused))
    connection = connect()
    connection.say(wire.MAGIC + wire.number(0x7fffffff))
    case.assertEqual(connection.last_words(), b"")
    silent = [connect() for _ in range(200)]
    case.assertEqual(silent[0].last_words(), b"")
    hello = wire.MAGIC + wire.hello_frame(wire.HELLO, wire.number(wire.VERSION) + wire.text(b"n" * 32))
    case.assertLess(wire.trickle(path, hello, 1), len(hello) - 10)
    # Other users cannot even come to it.
    case.assertEqual(os.stat(os.path.dirname(path)).st_mode & 0o077, 0)
    print("all refused", flush=True)
    sys.exit(3)


SHOW = """
import glob, os, sys
secret = os.environ["LOCKSTEP_JOB_SECRET"]
assert len(secret) == 32
for name in glob.glob("/proc/[0-9]*/cmdline"):
    try:
        assert secret.encode() not in open(name, "rb").read(), name
    except OSError:
        pass
job = os.environ["LOCKSTEP_JOB"]
for directory, _, files in os.walk(job):
    for name in files:
        path = os.path.join(directory, name)
        if os.path.isfile(path) and not os.path.islink(path):
            assert secret.encode() not in open(path, "rb").read(), path
print("nowhere to be seen")
"""


class Launcher(Jobs):
    def test_strangers_are_refused_at_the_launchers_socket(self):
        here = str(pathlib.Path(__file__).parent)
        process = self.start(["launch", "-n", "1", "--", sys.executable, "-c", INSIDE, here])
        said = self.end(process, 3)
        self.assertIn("all refused", said)
        self.assertIn("rank 0 of 1", said)
        self.assertIn("a connection to the launcher's socket was refused: " + WIRE_TEXT, said)

    def test_the_secret_is_shown_nowhere(self):
        said = self.end(self.start(["launch", "-n", "2", "--", sys.executable, "-c", SHOW]))
        self.assertEqual(said.count("nowhere to be seen"), 2, said)

    def test_a_runs_files_do_not_have_it(self):
        with tempfile.TemporaryDirectory() as directory:
            flags = ["--metrics", f"{directory}/m.jsonl", "--trace", f"{directory}/t.json", "--save",
                     f"{directory}/w.safetensors", "--checkpoint-dir", f"{directory}/c"]
            both = [self.rank(rank, arguments=JOB + flags, LOCKSTEP_LOG_LEVEL="debug") for rank in range(2)]
            for process in both:
                self.assertNotIn(SECRET, self.end(process))
            files = [path for path in pathlib.Path(directory).rglob("*") if path.is_file()]
            self.assertGreater(len(files), 3)
            for path in files:
                self.assertNotIn(SECRET.encode(), path.read_bytes(), path)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--lockstep", required=True)
    OPTIONS, rest = parser.parse_known_args()
    signal.alarm(280)
    unittest.main(argv=[sys.argv[0], *rest], verbosity=2)
