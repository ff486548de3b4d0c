"""What can go wrong before the first step: addresses, ports, latecomers, crowds."""

import re
import socket
import threading

import driver

CONNECT = 3  # seconds
LIMIT = CONNECT + driver.SLACK


class StartupFaults(driver.FaultTest):
    def connect_error(self, address, rank=0, world_size=1, *flags):
        error = self.trainer([address], rank, world_size, f"--connect-timeout={CONNECT}", f"--join-timeout={CONNECT}",
                             *flags).fail()
        print(f"  {error['code']} after {error['elapsed_s']:.2f} s: {error['message']}")
        self.assertEqual(error["call"], "Connect")
        self.assertIn(address, error["message"])
        self.assertLess(error["elapsed_s"], LIMIT)
        return error

    # CASES D3
    def test_port_that_refuses(self):
        with socket.create_server(("127.0.0.1", 0)) as taken:
            address = "127.0.0.1:%d" % taken.getsockname()[1]
        self.assertEqual(self.connect_error(address)["code"], "UNAVAILABLE")

    # CASES D3: it takes every connection and says nothing.
    def test_port_that_never_answers(self):
        with socket.create_server(("127.0.0.1", 0)) as silent:
            address = "127.0.0.1:%d" % silent.getsockname()[1]
            self.assertEqual(self.connect_error(address)["code"], "UNAVAILABLE")

    # CASES D3: it takes every connection and ends it.
    def test_port_that_hangs_up(self):
        with socket.create_server(("127.0.0.1", 0)) as rude:
            def hang_up():
                while True:
                    try:
                        rude.accept()[0].close()
                    except OSError:
                        return

            threading.Thread(target=hang_up, daemon=True).start()
            self.assertEqual(self.connect_error("127.0.0.1:%d" % rude.getsockname()[1])["code"], "UNAVAILABLE")
            rude.shutdown(socket.SHUT_RDWR)

    # "invalid" never resolves (RFC 6761).
    def test_name_that_does_not_resolve(self):
        self.assertEqual(self.connect_error("server.invalid:7770")["code"], "UNAVAILABLE")

    def test_one_bad_name_in_a_list(self):
        server = self.servers(1)[0]
        error = self.trainer([server.address, "server.invalid:7770"], 0, 1, f"--connect-timeout={CONNECT}").fail()
        self.assertIn("server.invalid:7770", error["message"])
        self.assertLess(error["elapsed_s"], LIMIT)
        self.assertEqual(server.status()["runs"], [], "a run was opened on half of the servers")

    def test_address_without_a_port(self):
        error = self.trainer(["127.0.0.1"], 0, 1).fail()
        print(f"  {error['code']}: {error['message']}")
        self.assertEqual(error["code"], "INVALID_ARGUMENT")
        self.assertIn("127.0.0.1", error["message"])

    def test_port_in_use(self):
        address = self.servers(1)[0].address
        second = self.own(driver.Server(listen=address))
        self.assertEqual(second.exit_code(driver.START), 1, second.describe())
        print(f"  {second.lines[-1]}")
        self.assertIn(address, second.describe())

    def test_open_bind_needs_insecure(self):
        refused = self.own(driver.Server(listen="0.0.0.0:0"))
        self.assertEqual(refused.exit_code(driver.START), 1, refused.describe())
        print(f"  {refused.lines[-1]}")
        self.assertTrue(any("--insecure" in line for line in refused.lines), refused.describe())

        allowed = self.own(driver.Server("--insecure", listen="0.0.0.0:0"))
        allowed.await_listening()
        self.stop_server(allowed)

    def test_bad_flags(self):
        for flag, word in [("--threads=-1", "threads"), ("--credit-window=1", "credit window of 1 "),
                           ("--staging=maybe", "maybe"), ("--no-such-flag", "no-such-flag")]:
            server = self.own(driver.Server(flag))
            code = server.exit_code(driver.START)
            print(f"  {server.lines[0]}")
            self.assertGreater(code, 0, f"{flag} was taken, or crashed it: {server.describe()}")
            self.assertTrue(any(word in line for line in server.lines), server.describe())

    # CASES D10: the first waits, with a message for whoever asks, and goes on when the second comes.
    def test_latecomer_joins(self):
        servers = self.servers(2)
        first = self.trainer(servers, 0, 2)
        run = servers[1].await_run(lambda run: run is not None and run["ranks"][0]["joined"], "joined by rank 0")
        print(f"  awaited: {run['awaited']}")
        self.assertIn("1", run["awaited"])
        second = self.trainer(servers, 1, 2)
        self.assertEqual(first.finish()["weights_hash"], second.finish()["weights_hash"])

    # The other way round: nobody has opened the run yet.
    def test_leader_comes_last(self):
        servers = self.servers(2)
        follower = self.trainer(servers, 1, 2)
        follower.await_event("connecting")
        leader = self.trainer(servers, 0, 2)
        self.assertEqual(leader.finish()["weights_hash"], follower.finish()["weights_hash"])

    def test_rank_that_never_comes_is_named(self):
        servers = self.servers(2)
        error = self.trainer(servers, 0, 4, f"--join-timeout={CONNECT}").fail()
        print(f"  {error['code']} after {error['elapsed_s']:.2f} s: {error['message']}")
        self.assertEqual(error["code"], "DEADLINE_EXCEEDED")
        self.assertRegex(error["message"], r"1 of 4.*1, 2(,| and) 3")
        self.assertLess(error["elapsed_s"], LIMIT)

    def test_leader_that_never_comes_is_named(self):
        servers = self.servers(1)
        error = self.connect_error(servers[0].address, 1, 2)
        self.assertEqual(error["code"], "DEADLINE_EXCEEDED")

    # CASES D12
    def test_more_servers_than_matrices(self):
        servers = self.servers(8)
        trainers = self.trainers(servers, 2, "--shapes=64x96,96x64,17", "--hold-close")
        for trainer in trainers:
            trainer.await_event("finished", driver.RUN)
        owners = 0
        for server in servers:
            run = server.run_status()
            owners += any(matrix["owner"] == run["server_index"] for matrix in run["matrices"])
            self.assertEqual(run["committed_steps"], 4, run)
        self.assertLessEqual(owners, 3)
        for trainer in trainers:
            trainer.go_on()
        for trainer in trainers:
            trainer.finish()
        for server in servers:
            self.stop_server(server)

    # CASES D9, D19: everybody at once; one of a process of its own, the rest as threads of another.
    def test_32_trainers_at_once(self):
        servers = self.servers(2)
        crowd = self.trainer(servers, 1, 32, "--ranks=31", "--steps=2", "--data-streams=1")
        leader = self.trainer(servers, 0, 32, "--steps=2", "--data-streams=1")
        expected = leader.finish()["weights_hash"]
        self.assertEqual(crowd.exit_code(driver.RUN), 0, crowd.describe())
        hashes = [event["weights_hash"] for event in crowd.events("finished")]
        self.assertEqual(hashes, [expected] * 31)

    # CASES D9: a run after another, from all sides, on the same servers.
    def test_runs_in_a_row(self):
        servers = self.servers(2)
        hashes = set()
        for _ in range(4):
            trainers = self.trainers(servers, 2, "--steps=2")
            hashes.update(trainer.finish()["weights_hash"] for trainer in trainers)
        self.assertEqual(len(hashes), 1)

    # One server holds one live run; the other leader is told which.
    def test_second_run_is_refused_while_one_lives(self):
        servers = self.servers(1)
        first = self.trainer(servers, 0, 1, "--hold=2:before")
        first.await_hold(2, "before")
        second = self.trainer(servers, 0, 1, "--run=other", f"--join-timeout={CONNECT}")
        error = second.fail()
        print(f"  {error['code']}: {error['message']}")
        self.assertEqual(error["code"], "FAILED_PRECONDITION")
        self.assertTrue(re.search(r"faults.*other|other.*faults", error["message"]), error)
        first.go_on()
        first.finish()


if __name__ == "__main__":
    driver.main()
