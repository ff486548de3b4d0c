"""Servers that are drained, added, or told to stop while trainers are in the middle of a run: nothing is lost."""

import signal
import subprocess

import driver

FLAGS = ("--steps=8", "--seed=21")


class MoveFaults(driver.FaultTest):
    def ctl(self, *arguments):
        return self.own(driver.Child([driver.CTL, *arguments]))

    def begin(self, servers, steps=FLAGS, world_size=2):
        """Trainers that have applied two steps and hold before the third."""
        trainers = self.trainers(servers, world_size, "--hold=3:before", "--hold-close", *steps)
        for trainer in trainers:
            trainer.await_hold(3, "before")
        return trainers

    def go_on(self, trainers, server):
        """Once the leader, which is between two steps, has begun the move: it ends when the other ranks begin theirs."""
        server.await_run(lambda run: run["phase"] == "moving", "moving")
        for trainer in trainers:
            trainer.go_on()

    def finish(self, trainers, servers, expected, states):
        """As in a run left alone."""
        for trainer in trainers:
            self.assertEqual(trainer.await_event("finished", driver.RUN)["weights_hash"], expected, trainer.describe())
        self.assertEqual(driver.state_hashes(servers), states)
        for trainer in trainers:
            trainer.go_on()
        for trainer in trainers:
            trainer.finish()

    def test_drain(self):
        expected, states = self.undisturbed(3, 2, *FLAGS)
        servers = self.servers(3)
        trainers = self.begin(servers)
        drain = self.ctl("drain", servers[1].address)
        self.go_on(trainers, servers[0])
        self.assertEqual(drain.exit_code(driver.RUN), 0, drain.describe())
        self.assertIn("placement 2", " ".join(drain.lines))
        self.stop_server(servers[1])
        self.finish(trainers, [servers[0], servers[2]], expected, states)

    def test_sigterm_drains_to_peers(self):
        expected, states = self.undisturbed(2, 2, *FLAGS)
        servers = self.servers(2, "--grace-seconds=30")
        trainers = self.begin(servers)
        servers[0].signal(signal.SIGTERM)
        self.go_on(trainers, servers[1])
        self.assertEqual(servers[0].exit_code(driver.RUN), 0, servers[0].describe())
        self.finish(trainers, [servers[1]], expected, states)

    def test_add_and_replace(self):
        expected, states = self.undisturbed(2, 2, *FLAGS)
        servers = self.servers(3)
        trainers = self.begin(servers[:2])
        replan = self.ctl("replan", servers[1].address, f"--add={servers[2].address}", f"--drain={servers[0].address}")
        self.go_on(trainers, servers[1])
        self.assertEqual(replan.exit_code(driver.RUN), 0, replan.describe())
        self.finish(trainers, servers[1:], expected, states)

    def test_without_a_leader_nothing_moves(self):
        servers = self.servers(1)
        result = subprocess.run([driver.CTL, "drain", servers[0].address], capture_output=True, text=True,
                                timeout=driver.START)
        self.assertEqual(result.returncode, 1)
        self.assertIn("no run", result.stderr)


if __name__ == "__main__":
    driver.main()
