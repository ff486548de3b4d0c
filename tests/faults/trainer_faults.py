"""Trainers that freeze, come twice, or push what is not a number, while the others go on."""

import re

import driver

STEP_TIMEOUT = 3  # seconds
LIMIT = STEP_TIMEOUT + driver.SLACK
FLAGS = ("--steps=5", "--seed=5")


class TrainerFaults(driver.FaultTest):
    def frozen_rank(self, frozen, point, flags=FLAGS):
        """Freezes a rank in step 3 and waits until the other has heard who is missing; returns the outcome or error."""
        servers = self.servers(2)
        flags += (f"--step-timeout={STEP_TIMEOUT}", "--lease=30", "--wait-retries=3", "--hold-close", "--drops=100")
        trainers = [self.trainer(servers, rank, 2, *flags, *([f"--hold=3:{point}"] if rank == frozen else []))
                    for rank in range(2)]
        trainers[frozen].await_hold(3, point)
        trainers[frozen].freeze()
        other = trainers[1 - frozen]
        other.await_event("pushed", step=3)
        return servers, trainers, other

    def finish_equal(self, servers, trainers, expected, flags=FLAGS):
        for trainer in trainers:
            self.assertEqual(trainer.await_event("finished", driver.RUN)["weights_hash"], expected[0])
        self.assertEqual(driver.state_hashes(servers), expected[1])
        for server in servers:
            run = server.run_status()
            self.assertEqual((run["committed_steps"], run["skipped_steps"]), (5, 0))
        for trainer in trainers:
            trainer.go_on()
        for trainer in trainers:
            trainer.finish()

    # The leader lives, so the attempt is dropped at the deadline, naming rank 1, again and again; the step is done once
    # rank 1 is back.
    def test_frozen_rank_1_is_named(self):
        expected = self.undisturbed(2, 2, *FLAGS)
        servers, trainers, other = self.frozen_rank(1, "pushing")
        drop = other.await_event("outcome", LIMIT + driver.START, step=3, outcome="drop")
        print(f"  rank 0: drop after {drop['elapsed_s']:.2f} s: {drop['reason']}")
        self.assertRegex(drop["reason"], r"rank 1\b")
        self.assertLess(drop["elapsed_s"], LIMIT)
        trainers[1].thaw()
        trainers[1].go_on()
        self.finish_equal(servers, trainers, expected)

    # Nobody can decide while the leader is frozen: the wait ends with its number.
    def test_frozen_leader_is_named(self):
        expected = self.undisturbed(2, 2, *FLAGS)
        servers, trainers, other = self.frozen_rank(0, "pushing")
        error = other.await_event("error", LIMIT + driver.START, call="Wait")
        print(f"  rank 1: {error['code']} after {error['elapsed_s']:.2f} s: {error['message']}")
        self.assertEqual(error["code"], "DEADLINE_EXCEEDED")
        self.assertRegex(error["message"], r"rank 0\b|leader")
        self.assertLess(error["elapsed_s"], LIMIT)
        trainers[0].thaw()
        trainers[0].go_on()
        self.finish_equal(servers, trainers, expected)

    # Everything is pushed and voted; only the decision is missing.
    def test_leader_frozen_after_the_votes(self):
        expected = self.undisturbed(2, 2, *FLAGS)
        servers = self.servers(2)
        flags = FLAGS + (f"--step-timeout={3 * STEP_TIMEOUT}", "--lease=30", "--wait-retries=3", "--hold-close")
        leader = self.trainer(servers, 0, 2, "--hold=3:ended", *flags)
        other = self.trainer(servers, 1, 2, "--hold=3:pushing", *flags)
        leader.await_hold(3, "ended")
        other.await_hold(3, "pushing")
        for server in servers:
            server.await_run(lambda run: run["ranks"][0]["ended_push"] and not re.search(r"rank 0\b", run["awaited"]),
                             "done with rank 0")
        leader.freeze()
        other.go_on()  # its last bytes must be there before the deadline, also on a machine with other work
        for server in servers:
            server.await_run(lambda run: run["phase"] == "voted", "voted")
        error = other.await_event("error", LIMIT + driver.START, call="Wait")
        print(f"  rank 1: {error['code']} after {error['elapsed_s']:.2f} s: {error['message']}")
        self.assertEqual(error["code"], "DEADLINE_EXCEEDED")
        self.assertRegex(error["message"], r"rank 0\b|leader")
        leader.thaw()
        leader.go_on()
        self.finish_equal(servers, [leader, other], expected)
        self.assertEqual(other.events("outcome")[2]["attempt"], 0, "a voted attempt was redone")

    # Its lease has ended, but nobody took its place: it may go on.
    def test_frozen_beyond_its_lease(self):
        expected = self.undisturbed(2, 2, *FLAGS)
        servers = self.servers(2)
        flags = FLAGS + (f"--step-timeout={STEP_TIMEOUT}", "--lease=2", "--drops=100", "--hold-close")
        leader = self.trainer(servers, 0, 2, *flags)
        other = self.trainer(servers, 1, 2, "--hold=3:pushing", *flags)
        other.await_hold(3, "pushing")
        other.freeze()
        servers[0].await_run(lambda run: not run["ranks"][1]["live"], "without rank 1's lease")
        other.thaw()
        other.go_on()
        self.finish_equal(servers, [leader, other], expected)

    def second_process(self, rank):
        """A second process of a rank: refused while the first lives, welcome once it is dead."""
        servers = self.servers(2)
        flags = FLAGS + ("--mode=weights", "--lease=5", "--hold-close")
        trainers = [self.trainer(servers, number, 2, *flags, "--hold=3:pushing") for number in range(2)]
        for trainer in trainers:
            trainer.await_hold(3, "pushing")
        second = self.trainer(servers, rank, 2, *flags, "--applied=none", "--join-timeout=2")
        error = second.fail()
        print(f"  rank {rank}: {error['code']} after {error['elapsed_s']:.2f} s: {error['message']}")
        self.assertEqual(error["code"], "ALREADY_EXISTS")
        self.assertRegex(error["message"], rf"rank {rank}\b|leader")
        self.assertLess(error["elapsed_s"], 2 + driver.SLACK)
        return servers, trainers, flags

    def test_second_process_of_rank_1(self):
        expected = self.undisturbed(2, 2, *FLAGS, "--mode=weights")
        servers, trainers, flags = self.second_process(1)
        trainers[1].kill()
        trainers[1] = self.trainer(servers, 1, 2, *flags, "--applied=none")
        trainers[0].go_on()
        self.finish_equal(servers, trainers, expected)

    def test_second_leader(self):
        expected = self.undisturbed(2, 2, *FLAGS, "--mode=weights")
        servers, trainers, flags = self.second_process(0)
        trainers[0].kill()
        trainers[0] = self.trainer(servers, 0, 2, *flags, "--applied=none")
        trainers[1].go_on()
        self.finish_equal(servers, trainers, expected)

    # The refused process does not disturb the first.
    def test_refused_process_harms_nobody(self):
        expected = self.undisturbed(2, 2, *FLAGS, "--mode=weights")
        servers, trainers, _ = self.second_process(0)
        for trainer in trainers:
            trainer.go_on()
        self.finish_equal(servers, trainers, expected)
        self.assertEqual(trainers[0].events("finished")[0]["dropped"], 0)

    def superseded(self, rank):
        """A rank frozen beyond its lease and replaced: when it wakes it is told to stop, and changes nothing."""
        expected = self.undisturbed(2, 2, *FLAGS, "--mode=weights")
        servers = self.servers(2)
        flags = FLAGS + ("--mode=weights", "--lease=2", f"--step-timeout={STEP_TIMEOUT}", "--drops=100",
                         "--wait-retries=20", "--hold-close")
        trainers = [self.trainer(servers, number, 2, *flags, *(["--hold=3:pushing"] if number == rank else []))
                    for number in range(2)]
        old = trainers[rank]
        old.await_hold(3, "pushing")
        old.freeze()
        trainers[rank] = self.trainer(servers, rank, 2, *flags, "--applied=none", "--hold=4:pushing")
        trainers[rank].await_hold(4, "pushing")
        old.thaw()
        old.go_on()
        error = old.fail()
        print(f"  the old rank {rank}: {error['code']} after {error['elapsed_s']:.2f} s: {error['message']}")
        self.assertEqual(error["code"], "FAILED_PRECONDITION")
        trainers[rank].go_on()
        self.finish_equal(servers, trainers, expected)

    def test_replaced_rank_1_is_fenced(self):
        self.superseded(1)

    def test_replaced_leader_is_fenced(self):
        self.superseded(0)

    # One infinity of one rank: the step is skipped everywhere, explained, and the next is good. CASES A6.
    def test_infinity_skips_the_step_on_all(self):
        servers = self.servers(2)
        trainers = [self.trainer(servers, 0, 2, *FLAGS, "--hold=3:before", "--hold=4:before", "--hold-close"),
                    self.trainer(servers, 1, 2, *FLAGS, "--hold=3:before", "--hold=4:before", "--hold-close",
                                 "--inf-at=3")]
        for trainer in trainers:
            trainer.await_hold(3, "before")
        before = driver.state_hashes(servers)
        for trainer in trainers:
            trainer.go_on()
        for trainer in trainers:
            skip = trainer.await_event("outcome", step=3, outcome="skip")
            self.assertRegex(skip["reason"], r"p0.*rank 1")
            trainer.await_hold(4, "before")
        print(f"  {skip['reason']}")
        self.assertEqual(driver.state_hashes(servers), before)
        for trainer in trainers:
            trainer.go_on()
        hashes = {trainer.await_event("finished")["weights_hash"] for trainer in trainers}
        self.assertEqual(len(hashes), 1)
        run = servers[0].run_status()
        self.assertEqual((run["committed_steps"], run["skipped_steps"]), (4, 1))
        for trainer in trainers:
            trainer.go_on()
        for trainer in trainers:
            trainer.finish()

    # CASES D4: the only trainer dies; the run is kept for the takeover timeout, then another may begin.
    def test_abandoned_run_is_released(self):
        servers = self.servers(1)
        first = self.trainer(servers, 0, 1, "--hold=2:pushing", "--lease=1", "--takeover-timeout=4")
        first.await_hold(2, "pushing")
        first.kill()
        servers[0].await_run(lambda run: not run["ranks"][0]["live"], "without a live rank")
        error = self.trainer(servers, 0, 1, "--run=other", "--join-timeout=1").fail()
        print(f"  {error['code']}: {error['message']}")
        self.assertEqual(error["code"], "FAILED_PRECONDITION")
        self.assertRegex(error["message"], r"\d s\b|second")
        servers[0].await_run(lambda run: run is None, "released")
        self.trainer(servers, 0, 1, "--run=other").finish()


if __name__ == "__main__":
    driver.main()
