"""What the drivers of this folder share: child processes that always end, events with deadlines, and the test runner.

Nothing here sleeps until something has probably happened: it waits for a line, a status or an exit, up to a limit.
"""

import ctypes
import json
import os
import pathlib
import random
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
import unittest
from xml.sax.saxutils import quoteattr

ROOT = pathlib.Path(os.environ["TEST_SRCDIR"], os.environ["TEST_WORKSPACE"])
FULL = os.environ.get("STIEFEL_TEST_SCALE") == "full"
SERVER = ROOT / "server/stiefel-server"
CTL = ROOT / "cli/stiefelctl"
TRAINER = ROOT / "tests/faults/scripted_trainer"

# A sanitizer makes everything slower.
SANITIZED = 4 if any(mark in SERVER.read_bytes() for mark in (b"__asan_init", b"__tsan_init")) else 1
START = 30 * SANITIZED  # seconds for a server to listen, trainers to join, a status to come true
RUN = 60 * SANITIZED  # for a short training
SLACK = 8 * SANITIZED  # what a busy machine may add to a deadline
POLL = 0.02

_libc = ctypes.CDLL(None, use_errno=True)
_PR_SET_PDEATHSIG = 1


def die_with_parent():
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


class Child:
    """A child process; its output lines are kept, and can be waited for."""

    def __init__(self, command):
        self.command = [str(part) for part in command]
        self.lines = []
        self._changed = threading.Condition()
        self._ended = 0
        self.popen = subprocess.Popen(self.command, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                                      stderr=subprocess.PIPE, text=True, errors="replace", preexec_fn=die_with_parent)
        self._readers = [threading.Thread(target=self._read, args=(stream,), daemon=True)
                         for stream in (self.popen.stdout, self.popen.stderr)]
        for reader in self._readers:
            reader.start()

    def _read(self, stream):
        for line in stream:
            with self._changed:
                self.lines.append(line.rstrip("\n"))
                self._changed.notify_all()
        with self._changed:
            self._ended += 1
            self._changed.notify_all()

    def wait_for(self, find, what, timeout):
        """The first true find(line) over all lines so far and to come."""
        deadline = time.monotonic() + timeout
        seen = 0
        with self._changed:
            while True:
                while seen < len(self.lines):
                    found = find(self.lines[seen])
                    seen += 1
                    if found:
                        return found
                left = deadline - time.monotonic()
                if left <= 0 or self._ended == 2:
                    raise AssertionError(f"{self.describe()}: no {what} within {timeout} s")
                self._changed.wait(left)

    def exit_code(self, timeout):
        try:
            code = self.popen.wait(timeout)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"{self.describe()}: still running after {timeout} s") from None
        for reader in self._readers:
            reader.join(5)
        return code

    def describe(self):
        with self._changed:
            tail = "\n  ".join(self.lines[-60:])
        return f"{' '.join(self.command)}\n  {tail}\n"

    def running(self):
        return self.popen.poll() is None

    def signal(self, number):
        self.popen.send_signal(number)

    def kill(self):
        self.signal(signal.SIGKILL)
        self.popen.wait()

    def freeze(self):
        """Returns when every thread has stopped."""
        self.signal(signal.SIGSTOP)
        _, status = os.waitpid(self.popen.pid, os.WUNTRACED)
        assert os.WIFSTOPPED(status), status

    def thaw(self):
        self.signal(signal.SIGCONT)

    def end(self):
        if self.running():
            self.popen.kill()
        self.popen.wait()
        for stream in (self.popen.stdin, self.popen.stdout, self.popen.stderr):
            try:
                stream.close()
            except OSError:
                pass


class Server(Child):
    def __init__(self, *flags, listen="127.0.0.1:0"):
        super().__init__([SERVER, f"--listen={listen}", "--threads=1", *flags])

    def await_listening(self):
        self.address = self.wait_for(lambda line: re.search(r"listening on (\S+:\d+)", line), "address",
                                     START).group(1)
        return self.address

    def status(self, state_hash=False):
        command = [CTL, "status", self.address, "--json"] + (["--state-hash"] if state_hash else [])
        result = subprocess.run(command, capture_output=True, text=True, timeout=START)
        if result.returncode != 0:
            raise AssertionError(f"status of {self.address}: {result.stderr}")
        return json.loads(result.stdout)["servers"][0]

    def run_status(self, state_hash=False):
        """The run that it holds; None without one."""
        runs = self.status(state_hash)["runs"]
        return runs[0] if runs else None

    def await_run(self, true_of, what, timeout=START):
        deadline = time.monotonic() + timeout
        while True:
            run = self.run_status()
            if true_of(run):
                return run
            if time.monotonic() > deadline:
                raise AssertionError(f"server {self.address}: not {what} within {timeout} s: {run}")
            time.sleep(POLL)

    def resident(self, field="VmRSS"):
        """Bytes; field VmHWM: the most so far."""
        text = pathlib.Path(f"/proc/{self.popen.pid}/status").read_text()
        return int(re.search(rf"{field}:\s+(\d+) kB", text).group(1)) * 1024


class Trainer(Child):
    def __init__(self, servers, rank, world_size, *flags):
        super().__init__([TRAINER, f"--servers={','.join(servers)}", f"--rank={rank}", f"--world-size={world_size}",
                          *flags])
        self.rank = rank

    def events(self, name):
        with self._changed:
            lines = list(self.lines)
        return [event for event in map(parse, lines) if event.get("event") == name]

    def await_event(self, name, timeout=START, **fields):
        def find(line):
            event = parse(line)
            wanted = event.get("event") == name and all(event.get(key) == value for key, value in fields.items())
            return event if wanted else None

        return self.wait_for(find, f"event {name} {fields or ''}", timeout)

    def await_hold(self, step, point, timeout=START):
        return self.await_event("held", timeout, step=step, point=point)

    def go_on(self):
        self.popen.stdin.write("\n")
        self.popen.stdin.flush()

    def finish(self, timeout=RUN):
        """Its last event, after a good exit."""
        code = self.exit_code(timeout)
        if code != 0:
            raise AssertionError(f"exit status {code}: {self.describe()}")
        return self.events("finished")[-1]

    def fail(self, timeout=RUN):
        """Its last error event, after an exit with status 1."""
        code = self.exit_code(timeout)
        if code != 1:
            raise AssertionError(f"exit status {code}, not 1: {self.describe()}")
        return self.events("error")[-1]


def parse(line):
    try:
        return json.loads(line)
    except ValueError:
        return {}


class FaultTest(unittest.TestCase):
    """Ends whatever it started, however the test ends."""

    def setUp(self):
        self.children = []
        self.folder = tempfile.TemporaryDirectory(prefix="stiefel-faults-")
        self.addCleanup(self.folder.cleanup)
        self.addCleanup(self.end_children)
        self.seed = int.from_bytes(os.urandom(4), "big")
        self.random = random.Random(self.seed)

    def end_children(self):
        for child in reversed(self.children):
            child.end()
        self.children.clear()

    def own(self, child):
        self.children.append(child)
        return child

    def servers(self, count, *flags):
        servers = [self.own(Server(*flags)) for _ in range(count)]
        for server in servers:
            server.await_listening()
        return servers

    def trainer(self, servers, rank, world_size, *flags):
        addresses = [server if isinstance(server, str) else server.address for server in servers]
        return self.own(Trainer(addresses, rank, world_size, *flags))

    def trainers(self, servers, count, *flags):
        return [self.trainer(servers, rank, count, *flags) for rank in range(count)]

    def stop_server(self, server, within=15 * SANITIZED):
        server.signal(signal.SIGTERM)
        self.assertEqual(server.exit_code(within), 0, server.describe())

    def undisturbed(self, server_count, count, *flags):
        """Weights hash and, by matrix, state hashes of the same run left alone."""
        servers = self.servers(server_count)
        trainers = self.trainers(servers, count, "--hold-close", *flags)
        hashes = {trainer.await_event("finished", RUN)["weights_hash"] for trainer in trainers}
        self.assertEqual(len(hashes), 1, "ranks disagree without any fault")
        states = state_hashes(servers)
        for trainer in trainers:
            trainer.go_on()
        for trainer in trainers:
            trainer.finish()
        for server in servers:
            self.stop_server(server)
        return hashes.pop(), states

    def assert_unavailable(self, event, address, limit):
        """The error of a dead server: in time, and naming it."""
        print(f"  {event['call']}: {event['code']} after {event['elapsed_s']:.2f} s: {event['message']}")
        self.assertEqual(event["code"], "UNAVAILABLE", event)
        self.assertIn(address, event["message"])
        self.assertLess(event["elapsed_s"], limit, event)


def state_hashes(servers):
    """Matrix name -> hash, over all servers, once the decision that trainers have seen is recorded on all of them: the
    word of one server and the updates of all, sent before it, are enough for a trainer to go on."""
    deadline = time.monotonic() + START
    while len({server.run_status()["consumed_step"] for server in servers}) > 1:
        if time.monotonic() > deadline:
            raise AssertionError(f"servers are not at one step within {START} s")
        time.sleep(POLL)
    hashes = {}
    for server in servers:
        run = server.run_status(state_hash=True)
        for matrix in run["matrices"]:
            if matrix["owner"] == run["server_index"]:
                hashes[matrix["name"]] = matrix["state_hash"]
    return hashes


class _Result(unittest.TextTestResult):
    def __init__(self, *args):
        super().__init__(*args)
        self.seconds = {}

    def startTest(self, test):
        self._begin = time.monotonic()
        super().startTest(test)

    def stopTest(self, test):
        self.seconds[test.id()] = time.monotonic() - self._begin
        super().stopTest(test)


def _write_xml(path, result):
    failures = {test.id(): text for test, text in result.failures + result.errors}
    cases = []
    for name, seconds in result.seconds.items():
        case, method = name.rsplit(".", 1)
        failure = f"<failure message={quoteattr(failures[name])}/>" if name in failures else ""
        cases.append(f"<testcase classname={quoteattr(case)} name={quoteattr(method)} time=\"{seconds:.3f}\">"
                     f"{failure}</testcase>")
    pathlib.Path(path).write_text(f"<testsuites><testsuite>{''.join(cases)}</testsuite></testsuites>\n")


def main():
    """Runs the tests of the calling script; names on the command line choose some."""
    sys.stdout.reconfigure(line_buffering=True)
    loader = unittest.defaultTestLoader
    module = sys.modules["__main__"]
    suite = loader.loadTestsFromNames(sys.argv[1:], module) if sys.argv[1:] else loader.loadTestsFromModule(module)
    runner = unittest.TextTestRunner(stream=sys.stdout, verbosity=2, resultclass=_Result)
    result = runner.run(suite)
    if "XML_OUTPUT_FILE" in os.environ:
        _write_xml(os.environ["XML_OUTPUT_FILE"], result)
    sys.exit(0 if result.wasSuccessful() and result.testsRun else 1)
