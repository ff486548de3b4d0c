"""kill -9 at random moments of a step, and a restart: the step is finished or redone, never both."""

import re
import time

import driver
import proxy

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

    # The run is open on one server, and the leader dies before it reaches the other.
    def test_leader_killed_while_it_opens_the_run(self):
        flags = ("--seed=27", f"--steps={STEPS}", "--lease=2", "--hold-close")
        expected = self.undisturbed(2, 2, "--seed=27", f"--steps={STEPS}")
        servers = self.servers(2)
        proxies = [proxy.Proxy(server.address) for server in servers]
        for one in proxies:
            self.addCleanup(one.__exit__)
        addresses = [one.address for one in proxies]
        proxies[1].stall_at(proxy.UP, b"OpenRun")
        leader = self.trainer(addresses, 0, 2, *flags)
        other = self.trainer(addresses, 1, 2, *flags)
        servers[0].await_run(lambda run: run is not None, "open")
        leader.kill()
        self.assertIsNone(servers[1].run_status(), "the leader reached both servers")
        proxies[1].cut()
        proxies[1].stall()
        heir = self.trainer(addresses, 0, 2, *flags)
        for trainer in (heir, other):
            self.assertEqual(trainer.await_event("finished", driver.RUN)["weights_hash"], expected[0])
        self.assertEqual(driver.state_hashes(servers), expected[1])
        for trainer in (heir, other):
            trainer.go_on()
        for trainer in (heir, other):
            trainer.finish()

    def leader_frozen_between_votes_and_decision(self, addresses, servers, flags):
        """Both servers have voted on step 3; the leader is stopped before it could have heard the last vote."""
        leader = self.trainer(addresses, 0, 2, *flags, "--hold=3:ended")
        other = self.trainer(addresses, 1, 2, *flags, "--hold=3:pushing")
        leader.await_hold(3, "ended")
        other.await_hold(3, "pushing")
        for server in servers:
            server.await_run(lambda run: run["ranks"][0]["ended_push"] and not re.search(r"rank 0\b", run["awaited"]),
                             "done with rank 0")
        leader.freeze()
        other.go_on()
        for server in servers:
            server.await_run(lambda run: run["phase"] == "voted", "voted")
        return leader, other

    def finish_without_redo(self, servers, heir, other, expected):
        for trainer in (heir, other):
            self.assertEqual(trainer.await_event("finished", driver.RUN)["weights_hash"], expected[0])
        self.assertEqual(driver.state_hashes(servers), expected[1])
        step3 = [(event["attempt"], event["outcome"]) for event in other.events("outcome") if event["step"] == 3]
        self.assertEqual(step3, [(0, "commit")], "a voted step must be decided, not redone")
        self.assertEqual(heir.events("begun")[0]["step"], 4)
        for trainer in (heir, other):
            trainer.go_on()
        for trainer in (heir, other):
            trainer.finish()

    # PROTOCOL rules 6, 7 and 13.
    def test_votes_of_a_dead_leader_are_decided_by_its_successor(self):
        flags = ("--mode=weights", "--seed=25", f"--steps={STEPS}", "--lease=2", "--wait-retries=20", "--hold-close")
        expected = self.undisturbed(2, 2, "--mode=weights", "--seed=25", f"--steps={STEPS}")
        servers = self.servers(2)
        leader, other = self.leader_frozen_between_votes_and_decision(servers, servers, flags)
        leader.kill()
        heir = self.trainer(servers, 0, 2, *flags, "--applied=none")
        self.finish_without_redo(servers, heir, other, expected)

    # PROTOCOL rule 13: one server has the decision, the other has not.
    def test_half_a_decision_is_completed(self):
        flags = ("--mode=weights", "--seed=26", f"--steps={STEPS}", "--lease=2", "--wait-retries=20", "--hold-close")
        expected = self.undisturbed(2, 2, "--mode=weights", "--seed=26", f"--steps={STEPS}")
        servers = self.servers(2)
        proxies = [proxy.Proxy(server.address) for server in servers]
        for one in proxies:
            self.addCleanup(one.__exit__)
        addresses = [one.address for one in proxies]
        leader, other = self.leader_frozen_between_votes_and_decision(addresses, servers, flags)
        proxies[1].stall(proxy.UP)
        leader.thaw()
        servers[0].await_run(lambda run: run["consumed_step"] == 3, "told of the commit")
        self.assertEqual(servers[1].run_status()["phase"], "voted")
        leader.kill()
        proxies[1].cut()
        proxies[1].stall()
        heir = self.trainer(addresses, 0, 2, *flags, "--applied=none")
        self.finish_without_redo(servers, heir, other, expected)


if __name__ == "__main__":
    driver.main()
