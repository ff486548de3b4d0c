"""Servers that die, freeze, or are told to stop while trainers are in the middle of a step."""

import signal

import driver

STEP_TIMEOUT = 3  # seconds
LIMIT = STEP_TIMEOUT + driver.SLACK


class ServerFaults(driver.FaultTest):
    def start_step(self, server_count, trainer_count, step, *flags):
        """Trainers of which the last holds in the middle of its pushes, and the others wait for the outcome."""
        servers = self.servers(server_count, "--grace-seconds=2")
        flags += (f"--step-timeout={STEP_TIMEOUT}", "--steps=6")
        trainers = [self.trainer(servers, rank, trainer_count, *flags) for rank in range(trainer_count - 1)]
        trainers.append(self.trainer(servers, trainer_count - 1, trainer_count, f"--hold={step}:pushing", *flags))
        trainers[-1].await_hold(step, "pushing")
        for trainer in trainers[:-1]:
            trainer.await_event("pushed", step=step)
        return servers, trainers

    # CASES D1
    def test_killed_server_is_named_within_the_deadline(self):
        servers, trainers = self.start_step(2, 2, 3)
        servers[1].kill()
        trainers[1].go_on()
        for trainer in trainers:
            self.assert_unavailable(trainer.fail(), servers[1].address, LIMIT)
        self.assertTrue(servers[0].running())
        self.stop_server(servers[0])

    # CASES D1, D13, E4: nothing tells the clients that a frozen process is gone.
    def test_frozen_server_is_named_and_survives_waking(self):
        servers, trainers = self.start_step(2, 2, 3)
        servers[1].freeze()
        trainers[1].go_on()
        for trainer in trainers:
            self.assert_unavailable(trainer.fail(), servers[1].address, LIMIT)
        servers[1].thaw()
        run = servers[1].run_status()
        self.assertEqual(run["committed_steps"], 2, run)
        for server in servers:
            self.stop_server(server)

    def test_server_frozen_before_a_step_begins(self):
        servers = self.servers(2, "--grace-seconds=2")
        trainers = self.trainers(servers, 2, f"--step-timeout={STEP_TIMEOUT}", "--steps=6", "--hold=3:before")
        for trainer in trainers:
            trainer.await_hold(3, "before")
        servers[0].freeze()
        for trainer in trainers:
            trainer.go_on()
        for trainer in trainers:
            self.assert_unavailable(trainer.fail(), servers[0].address, LIMIT)
        servers[0].thaw()
        for server in servers:
            self.stop_server(server)

    def lose_a_server(self, *flags):
        """Two servers and two trainers at step 3; server 1 is killed and comes back, empty, at the same address."""
        servers = self.servers(2, "--grace-seconds=2")
        flags += (f"--step-timeout={STEP_TIMEOUT}", "--steps=6", "--lease=2")
        trainers = [self.trainer(servers, rank, 2, *flags, "--hold=4:before") for rank in range(2)]
        for trainer in trainers:
            trainer.await_hold(4, "before")
        servers[1].kill()
        back = self.own(driver.Server("--grace-seconds=2", listen=servers[1].address))
        back.await_listening()
        return [servers[0], back], trainers, flags

    # DESIGN section 10: back empty, it is refused, by trainers that go on ...
    def test_server_back_empty_is_named_by_those_who_go_on(self):
        servers, trainers, _ = self.lose_a_server()
        for trainer in trainers:
            trainer.go_on()
        for trainer in trainers:
            event = trainer.fail()
            print(f"  {event['call']}: {event['code']} after {event['elapsed_s']:.2f} s: {event['message']}")
            self.assertIn(servers[1].address, event["message"])
            self.assertLess(event["elapsed_s"], LIMIT)
        self.assertEqual(servers[0].run_status()["consumed_step"], 3)
        self.assertIsNone(servers[1].run_status())

    # ... and by new ones: nobody may take a part of the state as it was at the start for that of step 3.
    def refuses_new_trainers(self, *restart_flags, flags=()):
        servers, trainers, flags = self.lose_a_server(*flags)
        for trainer in trainers:
            trainer.kill()
        heirs = [self.trainer(servers, rank, 2, *flags, *restart_flags, "--join-timeout=6") for rank in range(2)]
        event = heirs[0].fail()
        print(f"  rank 0 {event['call']}: {event['code']} after {event['elapsed_s']:.2f} s: {event['message']}")
        self.assertEqual(event["code"], "FAILED_PRECONDITION", event)
        self.assertIn(servers[1].address, event["message"])
        self.assertIn("step 3", event["message"])
        heirs[1].fail()
        self.assertEqual(servers[0].run_status()["consumed_step"], 3)
        self.assertIsNone(servers[1].run_status())

    def test_server_back_empty_is_refused_in_weights_mode(self):
        self.refuses_new_trainers("--applied=none", flags=("--mode=weights",))

    def test_server_back_empty_is_refused_in_delta_mode(self):
        self.refuses_new_trainers("--applied=3")

    # A pause below every deadline is nobody's business.
    def test_short_freeze_changes_nothing(self):
        flags = ("--steps=5", "--seed=11")
        expected, states = self.undisturbed(2, 2, *flags)
        servers = self.servers(2)
        trainers = self.trainers(servers, 2, "--hold=3:ended", "--hold-close", *flags)
        for trainer in trainers:
            trainer.await_hold(3, "ended")
        servers[1].freeze()
        for trainer in trainers:
            trainer.go_on()
        # The other server's part of step 3 is voted, and the step still undecided.
        servers[0].await_run(lambda run: run["phase"] == "voted", "voted")
        servers[1].thaw()
        for trainer in trainers:
            self.assertEqual(trainer.await_event("finished")["weights_hash"], expected)
        self.assertEqual(driver.state_hashes(servers), states)
        for trainer in trainers:
            trainer.go_on()
        for trainer in trainers:
            trainer.finish()

    # CASES E10
    def test_sigterm_with_16_open_streams(self):
        servers, trainers = self.start_step(1, 4, 2, "--data-streams=3")
        servers[0].signal(signal.SIGTERM)
        self.assertEqual(servers[0].exit_code(2 + driver.SLACK), 0, servers[0].describe())
        trainers[-1].go_on()
        for trainer in trainers:
            self.assert_unavailable(trainer.fail(), servers[0].address, LIMIT)

    # A voted step is decided before the server goes: it is committed on both.
    def test_sigterm_finishes_a_voted_step(self):
        servers = self.servers(2, "--no-drain-to-peers")
        trainers = self.trainers(servers, 2, "--steps=3", "--hold=2:ended", "--hold-close")
        for trainer in trainers:
            trainer.await_hold(2, "ended")
            trainer.go_on()
        for trainer in trainers:
            trainer.await_event("outcome", step=2, outcome="commit")
        servers[0].signal(signal.SIGTERM)
        self.assertEqual(servers[0].exit_code(10 + driver.SLACK), 0, servers[0].describe())
        consumed = servers[1].run_status()["consumed_step"]
        for trainer in trainers:
            outcomes = [event["step"] for event in trainer.events("outcome") if event["outcome"] == "commit"]
            self.assertEqual(outcomes, list(range(1, consumed + 1)), trainer.describe())

    # CASES D12
    def test_idle_server_exits_at_once(self):
        server = self.servers(1)[0]
        self.assertEqual(server.status()["runs"], [])
        self.stop_server(server, within=driver.SLACK)


if __name__ == "__main__":
    driver.main()
