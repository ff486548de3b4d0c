"""./run bench chaos: a training run to which everything happens, against the same run left alone.

Optimizer servers and trainers of the byte-level language model run as processes of their own, every connection through a proxy. For some minutes trainers are
killed and frozen, servers frozen and replaced by new ones, connections cut and stalled at random; each fault is printed. Then all trainers are killed
once more and finish the run, and an undisturbed run of as many steps must end with the same weights and the same state, bit for bit.
"""

import argparse
import collections
import json
import pathlib
import random
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests/faults"))
import proxy  # noqa: E402

PLANNED_STEPS = 1_000_000  # Learning rates are planned for more than will be trained.
LAST_STEPS = 20  # After the last fault.
START_SECONDS = 60
END_SECONDS = 300
STILL_SECONDS = 120  # Without a step, the run is stuck.
STEP_TIMEOUT = 20  # A frozen process wakes well before.


def parse_args():
    parser = argparse.ArgumentParser(prog="./run bench chaos", description=__doc__.split("\n")[0],
                                     epilog=" ".join(__doc__.split("\n\n")[1].split()))
    parser.add_argument("--minutes", type=float, default=5, metavar="M", help="default: %(default)s")
    parser.add_argument("--seed", type=int, default=None, metavar="S", help="of faults and weights; default: drawn, and printed")
    parser.add_argument("--servers", type=int, default=3, metavar="N", help="default: %(default)s")
    parser.add_argument("--trainers", type=int, default=2, metavar="N", help="default: %(default)s")
    parser.add_argument("--preset", default="periodic_rowwise_muon", help="rule of the hidden matrices (default: %(default)s)")
    parser.add_argument("--json", type=pathlib.Path, metavar="FILE", help="also write the figures to this file")
    parser.add_argument("--logs", type=pathlib.Path, metavar="FOLDER", help="where to leave the logs of all processes if it fails")
    parser.add_argument("--server-binary", type=pathlib.Path, required=True, help=argparse.SUPPRESS)
    parser.add_argument("--trainer-binary", type=pathlib.Path, required=True, help=argparse.SUPPRESS)
    parser.add_argument("--ctl-binary", type=pathlib.Path, required=True, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.minutes <= 0 or args.servers < 1 or args.trainers < 1:
        parser.error("minutes, servers and trainers must be positive")
    if args.seed is None:
        args.seed = random.SystemRandom().randrange(1 << 31)
    return args


class ChaosError(Exception):
    pass


class Process:
    """A child whose output goes to a file."""

    def __init__(self, name, command, folder):
        self.name = name
        self.log = folder / f"{name.replace(' ', '-')}.log"
        with open(self.log, "ab") as output:
            self.popen = subprocess.Popen([str(part) for part in command], stdin=subprocess.DEVNULL, stdout=output,
                                          stderr=subprocess.STDOUT)
        self.thaw_at = None

    def tail(self):
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-15:])

    def running(self):
        return self.popen.poll() is None

    def freeze(self, until):
        self.popen.send_signal(signal.SIGSTOP)
        self.thaw_at = until

    def thaw(self):
        self.popen.send_signal(signal.SIGCONT)
        self.thaw_at = None

    def kill(self):
        if self.running():
            self.popen.kill()
        self.popen.wait()


class Run:
    """Servers, proxies and trainers of one training run."""

    def __init__(self, args, folder, name, through_proxies):
        self.args, self.folder, self.name = args, folder, name
        folder.mkdir()
        self.processes = []
        self.started = 0  # servers, in all
        self.servers = [self.start_server() for _ in range(args.servers)]
        self.direct = [self.await_address(server) for server in self.servers]
        self.proxies = [proxy.Proxy(address) for address in self.direct] if through_proxies else []
        self.addresses = [one.address for one in self.proxies] or self.direct
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.exchange = "127.0.0.1:%d" % free.getsockname()[1]
        self.trainers = []

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for process in reversed(self.processes):
            process.kill()
        for one in self.proxies:
            one.__exit__()

    def start(self, name, command):
        process = Process(name, command, self.folder)
        self.processes.append(process)
        return process

    def start_server(self):
        self.started += 1
        return self.start(f"server {self.started - 1}", [self.args.server_binary, "--listen=127.0.0.1:0", "--threads=1"])

    def await_address(self, server):
        deadline = time.monotonic() + START_SECONDS
        while time.monotonic() < deadline and server.running():
            match = re.search(r"listening on (127\.0\.0\.1:\d+)", server.log.read_text(errors="replace"))
            if match:
                return match.group(1)
            time.sleep(0.05)
        raise ChaosError(f"{server.name} does not listen:\n{server.tail()}")

    def start_trainers(self, stop_after=0):
        self.trainers = [self.start_trainer(rank, stop_after) for rank in range(self.args.trainers)]

    def start_trainer(self, rank, stop_after=0):
        args = self.args
        command = [args.trainer_binary, f"--rank={rank}", f"--world-size={args.trainers}",
                   f"--servers={','.join(self.addresses)}", f"--text={ROOT / '.cache' / 'king_james.txt'}", "--mode=weights",
                   "--rejoin", f"--preset={args.preset}", f"--seed={args.seed}", f"--steps={PLANNED_STEPS}", "--batch=256",
                   f"--step-timeout={STEP_TIMEOUT}", f"--evaluate-every={PLANNED_STEPS}", f"--exchange={self.exchange}"]
        if stop_after:
            command += [f"--stop-after={stop_after}", f"--json={self.folder / f'report-{rank}.json'}"]
        return self.start(f"trainer {rank}", command)

    def consumed(self):
        """The last decided step of the slowest server; None where one does not answer or holds no run."""
        steps = []
        for server, address in zip(self.servers, self.direct):
            if server.thaw_at is not None:
                return None
            result = subprocess.run([self.args.ctl_binary, "status", address, "--json"], capture_output=True, text=True,
                                    timeout=START_SECONDS)
            runs = json.loads(result.stdout)["servers"][0]["runs"] if result.returncode == 0 else []
            if not runs:
                return None
            steps.append(runs[0]["consumed_step"])
        return min(steps)

    def check_servers(self):
        for server in self.servers:
            if not server.running():
                raise ChaosError(f"{server.name} ended with status {server.popen.returncode}:\n{server.tail()}")

    def finish(self, stop_after):
        """The report of rank 0 after the last step. Trainers that fail start again."""
        deadline = time.monotonic() + END_SECONDS
        while any(trainer.popen.poll() != 0 for trainer in self.trainers):
            if time.monotonic() > deadline:
                raise ChaosError(f"{self.name}: not at step {stop_after} after {END_SECONDS} s:\n{self.trainers[0].tail()}")
            self.check_servers()
            for rank, trainer in enumerate(self.trainers):
                if trainer.popen.poll() not in (None, 0):
                    self.trainers[rank] = self.start_trainer(rank, stop_after)
            time.sleep(0.2)
        return json.loads((self.folder / "report-0.json").read_text())


class Chaos:
    """What is done to a run."""

    def __init__(self, run, seed):
        self.run = run
        self.random = random.Random(seed)
        self.begin = time.monotonic()
        self.step = 0
        self.stepped_at = self.begin
        self.counts = collections.Counter()
        self.stalled = {}  # proxy -> when it flows again
        self.refused_at = 0
        self.replacing = None  # (ctl, index of the old server, the new one, its address, its proxy)
        self.faults = [self.kill_trainer, self.freeze_trainer, self.freeze_server, self.cut, self.stall, self.replace]

    def say(self, what):
        print(f"  {time.monotonic() - self.begin:6.1f} s  step {self.step:6d}  {what}", flush=True)

    def seconds(self):
        return self.random.uniform(0.1, 4)

    def kill_trainer(self):
        rank = self.random.randrange(len(self.run.trainers))
        self.say(f"kill -9 of trainer {rank}, and a restart")
        self.run.trainers[rank].kill()
        self.run.trainers[rank] = self.run.start_trainer(rank)

    def freeze(self, process):
        if process.thaw_at is not None or not process.running():
            return
        length = self.seconds()
        self.say(f"{process.name} is frozen for {length:.1f} s")
        process.freeze(time.monotonic() + length)

    def freeze_trainer(self):
        self.freeze(self.random.choice(self.run.trainers))

    def freeze_server(self):
        self.freeze(self.random.choice(self.run.servers))

    def cut(self):
        index = self.random.randrange(len(self.run.proxies))
        self.say(f"all connections to server {index} are cut")
        self.run.proxies[index].cut()

    def stall(self):
        index = self.random.randrange(len(self.run.proxies))
        ways = self.random.choice([(proxy.UP,), (proxy.DOWN,), (proxy.UP, proxy.DOWN)])
        length = self.seconds()
        self.say(f"nothing passes {' and '.join(ways)} to server {index} for {length:.1f} s")
        self.run.proxies[index].stall(*ways)
        self.stalled[index] = time.monotonic() + length

    def replace(self):
        """A new server takes the place of one that is drained."""
        run = self.run
        if self.replacing:
            return
        index = self.random.randrange(len(run.servers))
        new = run.start_server()
        address = run.await_address(new)
        front = proxy.Proxy(address)
        self.say(f"{new.name} is to take the place of {run.servers[index].name}")
        through = next(direct for direct in run.direct if direct != run.direct[index]) if len(run.direct) > 1 else run.direct[index]
        ctl = run.start("stiefelctl", [run.args.ctl_binary, "replan", through, f"--add={front.address}",
                                       f"--drain={run.addresses[index]}", "--wait=60"])
        self.replacing = (ctl, index, new, address, front)

    def end_replacement(self):
        if not self.replacing or self.replacing[0].running():
            return
        ctl, index, new, address, front = self.replacing
        run, self.replacing = self.run, None
        if ctl.popen.returncode != 0:
            # It may still come about: both servers stay, and it is asked for again.
            if self.counts["refused"] == 0 or time.monotonic() - self.refused_at > 5:
                self.say(f"not replaced yet: {(ctl.tail().splitlines() or ['?'])[-1]}")
                self.refused_at = time.monotonic()
            self.counts["refused"] += 1
            self.replacing = (run.start("stiefelctl", ctl.popen.args), index, new, address, front)
            return
        old, old_front = run.servers[index], run.proxies[index]
        self.say(f"{new.name} has replaced {old.name}, which is told to stop")
        self.counts["replaced"] += 1
        run.servers[index], run.direct[index], run.proxies[index], run.addresses[index] = new, address, front, front.address
        self.stalled.pop(index, None)
        if old.thaw_at is not None:
            old.thaw()
        old.popen.terminate()
        try:
            if old.popen.wait(30) != 0:
                raise ChaosError(f"{old.name} ended with status {old.popen.returncode}:\n{old.tail()}")
        except subprocess.TimeoutExpired:
            raise ChaosError(f"{old.name} does not stop:\n{old.tail()}") from None
        old_front.__exit__()

    def end_faults(self, all_of_them=False):
        now = time.monotonic()
        for process in self.run.servers + self.run.trainers:
            if process.thaw_at is not None and (all_of_them or now >= process.thaw_at):
                process.thaw()
        for index, until in list(self.stalled.items()):
            if all_of_them or now >= until:
                self.run.proxies[index].stall()
                del self.stalled[index]

    def watch(self):
        """Nothing is over that should not be; trainers that gave up start again, as a launcher would do it."""
        self.end_replacement()
        self.run.check_servers()
        for rank, trainer in enumerate(self.run.trainers):
            if not trainer.running():
                last = trainer.tail().splitlines()[-1:] or ["nothing"]
                self.say(f"trainer {rank} gave up and starts again; it said: {last[0]}")
                self.counts["gave up"] += 1
                self.run.trainers[rank] = self.run.start_trainer(rank)
        step = self.run.consumed() if not self.stalled else None
        now = time.monotonic()
        if step is not None and step > self.step:
            self.step, self.stepped_at = step, now
        if now - self.stepped_at > STILL_SECONDS:
            tails = "\n".join(process.tail() for process in self.run.trainers + self.run.servers)
            raise ChaosError(f"no step for {STILL_SECONDS} s after step {self.step}:\n{tails}")

    def rage(self, seconds):
        next_fault = time.monotonic() + 2
        while time.monotonic() - self.begin < seconds:
            self.end_faults()
            self.watch()
            if time.monotonic() >= next_fault:
                fault = self.random.choice(self.faults)
                fault()
                self.counts[fault.__name__] += 1
                next_fault = time.monotonic() + self.random.expovariate(1 / 3)
            time.sleep(0.05)
        self.end_faults(all_of_them=True)


def disturbed(args, folder):
    with Run(args, folder / "disturbed", "disturbed", through_proxies=True) as run:
        run.start_trainers()
        chaos = Chaos(run, args.seed)
        while chaos.step < 1:
            chaos.watch()
            time.sleep(0.05)
        chaos.say("training has begun")
        chaos.rage(60 * args.minutes)
        while chaos.replacing or (step := run.consumed()) is None:
            chaos.watch()
            time.sleep(0.05)
        last = step + LAST_STEPS
        chaos.step = step
        chaos.say(f"kill -9 of all trainers; the run ends after step {last}")
        for trainer in run.trainers:
            trainer.kill()
        run.start_trainers(last)
        return run.finish(last), last, chaos.counts


def undisturbed(args, folder, last):
    with Run(args, folder / "undisturbed", "undisturbed", through_proxies=False) as run:
        run.start_trainers(last)
        return run.finish(last)


def main():
    args = parse_args()
    print(f"chaos: {args.servers} servers, {args.trainers} trainers, {args.preset}, {args.minutes:g} minutes, seed {args.seed}",
          flush=True)
    (ROOT / ".cache").mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="stiefel-chaos-") as name:
        try:
            report, last, counts = disturbed(args, pathlib.Path(name))
            print(f"  the same {last} steps, undisturbed", flush=True)
            expected = undisturbed(args, pathlib.Path(name), last)
        except ChaosError as error:
            if args.logs:
                shutil.copytree(name, args.logs, dirs_exist_ok=True)
            print(f"chaos: failed: {error}", flush=True)
            return 1
    equal = all(report[key] == expected[key] for key in ("weights_hash", "state_hash")) and report["copies_identical"]
    faults = sum(count for kind, count in counts.items() if kind not in ("gave up", "replaced", "refused"))
    figures = {"faults": faults, "steps": last, "equal": equal, "seed": args.seed, "minutes": args.minutes,
               "by_kind": dict(counts), "weights_hash": report["weights_hash"], "undisturbed_weights_hash": expected["weights_hash"]}
    if args.json:
        args.json.write_text(json.dumps(figures, indent=2) + "\n")
    print(f"chaos: {'ok' if equal else 'failed'} faults={faults} steps={last} weights={report['weights_hash']} "
          f"undisturbed={expected['weights_hash']} equal={str(equal).lower()}", flush=True)
    return 0 if equal else 1


if __name__ == "__main__":
    sys.exit(main())
