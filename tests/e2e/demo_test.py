"""The demo with real servers and trainers: `demo_test.py DEMO SERVER TRAINER`."""

import json
import os
import pathlib
import random
import re
import signal
import subprocess
import sys
import tempfile
import unittest

DEMO, SERVER, TRAINER = sys.argv[1:4]
FOLDER = pathlib.Path(os.environ.get("TEST_TMPDIR") or tempfile.mkdtemp())
OK_LINE = re.compile(r"demo: ok steps=\d+ bits_per_byte=\d+\.\d+ skipped=0 copies=identical")


def made_up_text():
    """A few hundred words in random order: quick to learn a little of."""
    path = FOLDER / "text.txt"
    if not path.exists():
        rng = random.Random(1)
        words = ["".join(rng.choices("abcdefghijklmnopqrstuvwxyz", k=rng.randint(2, 9))) for _ in range(300)]
        path.write_text(" ".join(rng.choices(words, k=20000)))
    return path


def command(*args):
    return [sys.executable, DEMO, f"--server-binary={SERVER}", f"--trainer-binary={TRAINER}",
            f"--text={made_up_text()}", "--batch=96", *args]


def children(pid):
    return [int(child) for child in pathlib.Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def name_of(pid):
    return pathlib.Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")[0].decode()


class DemoTest(unittest.TestCase):
    def run_demo(self, *args):
        """Runs to a good end; the report."""
        report = FOLDER / "report.json"
        report.unlink(missing_ok=True)
        done = subprocess.run(command("--steps=7", f"--json={report}", *args), stdout=subprocess.PIPE,
                              stderr=subprocess.STDOUT, text=True, timeout=240)
        self.assertEqual(done.returncode, 0, done.stdout)
        self.assertRegex(done.stdout.splitlines()[-1], OK_LINE)
        result = json.loads(report.read_text())
        self.assertEqual(result["steps"], 7)
        self.assertTrue(result["copies_identical"])
        self.assertEqual(result["skipped"], 0)
        self.assertGreater(result["bytes_pushed_per_step"], 0)
        self.assertGreater(result["server_compute_ms_per_step"], 0)
        self.assertGreater(result["bits_per_byte"], 0)
        return result

    def test_number_of_servers_changes_no_bit(self):
        results = [self.run_demo(f"--servers={n}") for n in (1, 2, 3)]
        for key in ("state_hash", "weights_hash", "bits_per_byte"):
            values = [result[key] for result in results]
            print(f"{key} with 1, 2, 3 servers: {values}")
            self.assertEqual(len(set(values)), 1)

    def test_rows_and_replicated_learn_the_same(self):
        rows = self.run_demo("--layout=rows", "--trainers=3")
        replicated = self.run_demo("--layout=replicated", "--trainers=3")
        # Only the rounding of the mean differs.
        self.assertAlmostEqual(rows["bits_per_byte"], replicated["bits_per_byte"], delta=0.02)
        # Each rank pushes its share instead of everything.
        self.assertLess(rows["bytes_pushed_per_step"], replicated["bytes_pushed_per_step"] / 2)

    def test_delta_and_weights_mode_learn_the_same(self):
        delta = self.run_demo("--mode=delta")
        weights = self.run_demo("--mode=weights")
        self.assertAlmostEqual(delta["bits_per_byte"], weights["bits_per_byte"], delta=0.02)

    def test_every_preset_in_combination(self):
        for preset, wire, trainers in (("adamw", "bf16", 1), ("muon", "fp16", 2), ("periodic_rowwise_muon", "bf16", 3)):
            with self.subTest(preset=preset):
                self.run_demo(f"--preset={preset}", f"--wire={wire}", f"--trainers={trainers}", "--layout=rows")

    def test_options_of_the_rule(self):
        for preset, options in (("dion3", ["select_fraction=0.5", "lr=0.02"]), ("muonbp", ["tile=96", "period=2"]),
                                ("samuon_lite", ["gain=4", "warmup=3"])):
            with self.subTest(preset=preset):
                self.run_demo(f"--preset={preset}", *(f"--set={option}" for option in options))
        done = subprocess.run(command("--preset=muon", "--set=gain=nan"), stdout=subprocess.PIPE,
                              stderr=subprocess.STDOUT, text=True, timeout=120)
        self.assertEqual(done.returncode, 1)
        self.assertIn("gain", done.stdout)

    def test_unknown_preset_fails_and_says_so(self):
        done = subprocess.run(command("--preset=adamv"), stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                              text=True, timeout=120)
        self.assertEqual(done.returncode, 1)
        self.assertIn("adamv", done.stdout)
        self.assertTrue(done.stdout.splitlines()[-1].startswith("demo: failed"), done.stdout)

    def endless_demo(self):
        """A demo in the middle of its training, and its children."""
        demo = subprocess.Popen(command("--steps=1000000"), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        self.addCleanup(demo.stdout.close)
        for line in demo.stdout:
            if line.startswith("step 1/"):
                break
        return demo, children(demo.pid)

    def assert_failed_and_clean(self, demo, processes):
        lines = demo.stdout.read().splitlines()
        self.assertEqual(demo.wait(timeout=120), 1)
        self.assertTrue(lines[-1].startswith("demo: failed"), lines)
        for pid in processes:
            self.assertFalse(pathlib.Path(f"/proc/{pid}").exists(), f"process {pid} was left behind")
        return lines[-1]

    def test_killed_server_ends_the_demo(self):
        demo, processes = self.endless_demo()
        self.assertEqual(len(processes), 4)
        server = next(pid for pid in processes if name_of(pid) == SERVER)
        os.kill(server, signal.SIGKILL)
        self.assert_failed_and_clean(demo, processes)

    def test_killed_trainer_ends_the_demo(self):
        demo, processes = self.endless_demo()
        trainer = [pid for pid in processes if name_of(pid) == TRAINER][-1]
        os.kill(trainer, signal.SIGKILL)
        self.assertIn("trainer", self.assert_failed_and_clean(demo, processes))

    def test_interrupted_demo_cleans_up(self):
        demo, processes = self.endless_demo()
        demo.send_signal(signal.SIGTERM)
        self.assertIn("SIGTERM", self.assert_failed_and_clean(demo, processes))


if __name__ == "__main__":
    unittest.main(argv=sys.argv[:1], verbosity=2)
