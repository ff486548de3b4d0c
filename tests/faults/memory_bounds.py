"""What a server takes, against what `stiefelctl plan` says it may."""

import json
import pathlib
import subprocess

import driver

MIB = 1 << 20


def plan(folder, shapes, *flags):
    """The report of one server for a list of (rows, cols, copies), as JSON."""
    parameters = [{"name": f"p{number}.{copy}", "shape": [rows, cols]}
                  for number, (rows, cols, copies) in enumerate(shapes) for copy in range(copies)]
    model = pathlib.Path(folder, "model.json")
    model.write_text(json.dumps({"name": "faults", "default": {"preset": "muon", "push_dtype": "bf16"},
                                 "parameters": parameters}))
    result = subprocess.run([driver.CTL, "plan", model, "--servers=1", "--json", *flags], capture_output=True,
                            text=True, check=True, timeout=driver.START)
    return json.loads(result.stdout)["servers"][0]


def shapes_flag(shapes):
    return "--shapes=" + ",".join(f"{rows}x{cols}*{copies}" for rows, cols, copies in shapes)


class MemoryBounds(driver.FaultTest):
    def warm_server(self, *flags):
        """A server that has had a small run: code, threads and tables are there; and its resident bytes."""
        server = self.servers(1, "--matrices-in-flight=1", *flags)[0]
        self.trainer([server], 0, 1, "--run=warm", "--shapes=64x256", "--wire=bf16", "--steps=2").finish()
        return server, server.resident()

    # CASES E7: 64 trainers, threads of four processes, push as fast as they can what one thread takes in.
    def test_64_trainers_faster_than_the_server(self):
        trainers, window, shapes = 64, 4 * MIB, [(512, 1024, 6)]
        server, base = self.warm_server(f"--credit-window={window}", "--staging=double")
        bound = plan(self.folder.name, shapes, "--staging=double", "--in-flight=1", f"--trainers={trainers}",
                     f"--copies={trainers}", f"--window={window}")
        flags = (shapes_flag(shapes), "--wire=bf16", "--steps=2", "--same-gradients", "--data-streams=1",
                 "--step-timeout=60")
        processes = [self.own(driver.Trainer([server.address], first, trainers, f"--ranks={trainers // 4}", *flags))
                     for first in range(0, trainers, trainers // 4)]
        for process in processes:
            self.assertEqual(process.exit_code(3 * driver.RUN), 0, process.describe())
        hashes = {event["weights_hash"] for process in processes for event in process.events("finished")}
        self.assertEqual(len(hashes), 1)
        peak = server.resident("VmHWM")
        pushed = trainers * sum(rows * cols * copies * 2 for rows, cols, copies in shapes)
        print(f"\n  {trainers} trainers push {pushed / MIB:.0f} MiB a step: peak {peak / MIB:.0f} MiB, of which "
              f"{base / MIB:.0f} MiB before the run; plan: {bound['total_bytes'] / MIB:.0f} MiB (push "
              f"{bound['push_bytes'] / MIB:.0f}, streams {bound['stream_bytes'] / MIB:.0f}, workspace "
              f"{bound['workspace_bytes'] / MIB:.0f})")
        self.assertEqual(bound["push_bytes"], pushed)
        self.assertLessEqual(peak, bound["total_bytes"])

    def bytes_per_parameter(self, staging, limit, shapes):
        """Runs two steps with one trainer; returns the state hashes."""
        server, base = self.warm_server(f"--staging={staging}", f"--credit-window={8 * MIB}")
        bound = plan(self.folder.name, shapes, f"--staging={staging}", "--in-flight=1",
                     f"--window={8 * MIB}")
        trainer = self.trainer([server], 0, 1, shapes_flag(shapes), "--wire=bf16", "--steps=2", "--same-gradients",
                               "--data-streams=1", "--step-timeout=60", "--hold-close")
        trainer.await_event("finished", 2 * driver.RUN)
        hashes = driver.state_hashes([server])
        self.assertEqual(server.status()["declared_bytes"], bound["total_bytes"], "server and plan count differently")
        resident, peak = server.resident(), server.resident("VmHWM")
        trainer.go_on()
        trainer.finish()
        elements = sum(rows * cols * copies for rows, cols, copies in shapes)
        in_flight = bound["workspace_bytes"] + bound["stream_bytes"]
        print(f"\n  {staging}: {elements / 1e6:.0f} M parameters: resident {resident / MIB:.0f} MiB, peak "
              f"{peak / MIB:.0f} MiB; base {base / MIB:.0f} MiB, workspace and windows {in_flight / MIB:.0f} MiB")
        print(f"  bytes per parameter: {(resident - base) / elements:.2f} resident, "
              f"{(peak - base - in_flight) / elements:.2f} at the peak beside workspace and windows; "
              f"plan {bound['bytes_per_parameter']:.2f}, limit {limit}")
        self.assertLessEqual(bound["bytes_per_parameter"], limit)
        self.assertLessEqual(peak - base - in_flight, limit * elements)
        return hashes

    def test_bytes_per_parameter(self):
        shapes = [(256, 4096, 64 if driver.FULL else 32)]
        lazy = self.bytes_per_parameter("lazy", 9, shapes)
        double = self.bytes_per_parameter("double", 13, shapes)
        self.assertEqual(lazy, double)


if __name__ == "__main__":
    driver.main()
