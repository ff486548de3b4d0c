"""kill -9 at random moments of a step, and a restart: the step is finished or redone, never both."""

import time

import driver

COUNT = 10 if driver.FULL else 4
STEPS = 5
POINTS = ("before", "begun", "pushing", "ended", "decided", "applied", "saved")


class TakeoverFaults(driver.FaultTest):
    def kill_and_restart(self, rank, point, delay, expected, flags, restart_flags):
        """Kills `rank` in step 3, `delay` seconds after `point` at the earliest; the run must end as if undisturbed."""
        servers = self.servers(2)
        flags += (f"--steps={STEPS}", "--step-timeout=20", "--lease=2", "--wait-retries=20", "--hold-close")
        victim = self.trainer(servers, rank, 2, *flags, *restart_flags[:1], f"--hold=3:{point}")
        other = self.trainer(servers, 1 - rank, 2, *flags)
        victim.await_hold(3, point)
        if point in ("ended", "decided", "applied", "saved"):
            victim.go_on()  # Its last moments are its own: a race is the point here.
        time.sleep(delay)
        victim.kill()
        heir = self.trainer(servers, rank, 2, *flags, *restart_flags)
        trainers = [heir, other]
        ends = [trainer.await_event("finished", driver.RUN) for trainer in trainers]
        self.assertEqual([end["weights_hash"] for end in ends], [expected[0]] * 2,
                         f"rank {rank} killed at {point}")
        self.assertEqual(driver.state_hashes(servers), expected[1])
        for server in servers:
            run = server.run_status()
            self.assertEqual((run["consumed_step"], run["committed_steps"], run["skipped_steps"]), (STEPS, STEPS, 0))
        commits = [event["step"] for event in other.events("outcome") if event["outcome"] == "commit"]
        self.assertEqual(commits, list(range(1, STEPS + 1)), "the surviving rank saw another history")
        dropped = [event["step"] for event in other.events("outcome") if event["outcome"] == "drop"]
        begun = [event["step"] for event in heir.events("begun")]
        print(f"    rank {rank} killed {delay * 1e3:.1f} ms after 3:{point}: attempts dropped of steps {dropped}; "
              f"the successor began steps {begun}")
        for trainer in trainers:
            trainer.go_on()
        for trainer in trainers:
            trainer.finish()
        self.end_children()
        return bool(dropped)

    def kill_at_random(self, rank, flags, restart_flags):
        expected = self.undisturbed(2, 2, *flags, f"--steps={STEPS}")
        print(f"\n  {COUNT} kills of rank {rank}, {' '.join(flags)}, random seed {self.seed}")
        redone = 0
        for number in range(COUNT):
            # Every point has its turn; the moment after it is drawn.
            point = POINTS[(number + self.random.randrange(len(POINTS))) % len(POINTS)]
            delay = self.random.random() * 0.02
            with self.subTest(point=point, delay=delay):
                redone += self.kill_and_restart(rank, point, delay, expected, flags, restart_flags(number))
        print(f"  {COUNT} kills: {redone} with a step redone, {COUNT - redone} without, all as if undisturbed")

    def test_leader_killed_in_weights_mode(self):
        self.kill_at_random(0, ("--mode=weights", "--seed=21"), lambda _: ("--applied=none",))

    def test_rank_1_killed_in_weights_mode(self):
        self.kill_at_random(1, ("--mode=weights", "--seed=22"), lambda _: ("--applied=none",))

    def snapshots(self, number):
        return (f"--snapshot={self.folder.name}/snapshot-{number}",)

    def test_leader_killed_in_delta_mode(self):
        self.kill_at_random(0, ("--mode=delta", "--seed=23"), self.snapshots)

    def test_rank_1_killed_in_delta_mode(self):
        self.kill_at_random(1, ("--mode=delta", "--seed=24"), self.snapshots)


if __name__ == "__main__":
    driver.main()
