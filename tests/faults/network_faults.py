"""Networks that are slow, break, or swallow everything; and peers that speak something else."""

import os
import re
import signal
import socket
import struct

import driver
import proxy

STEP_TIMEOUT = 3  # seconds
LIMIT = STEP_TIMEOUT + driver.SLACK
FLAGS = ("--steps=5", "--seed=9")

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"


def frame(kind, flags, stream, payload):
    return struct.pack(">I", len(payload))[1:] + struct.pack(">BBI", kind, flags, stream) + payload


def literal(name, value):
    """An HPACK header field, neither indexed nor compressed."""
    return b"\x00" + bytes([len(name)]) + name + bytes([len(value)]) + value


SETTINGS = frame(4, 0, 0, b"")


def call(method):
    """A connection and the headers of a call on it."""
    headers = [(b":method", b"POST"), (b":scheme", b"http"), (b":path", b"/stiefel.v1.Optimizer/" + method.encode()),
               (b":authority", b"x"), (b"content-type", b"application/grpc"), (b"te", b"trailers")]
    return PREFACE + SETTINGS + frame(1, 4, 1, b"".join(literal(name, value) for name, value in headers))


class NetworkFaults(driver.FaultTest):
    def garbage(self):
        """(name, bytes) to send to a port and hang up."""
        begun = call("OpenRun")
        noise = os.urandom(1 << 16)
        return [
            ("random bytes", noise),
            ("HTTP/1", b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"),
            ("half of the HTTP/2 preface", PREFACE[:11]),
            ("half of an HTTP/2 frame", PREFACE + SETTINGS[:5]),
            ("HTTP/2 frame of a size not allowed", PREFACE + b"\xff\xff\xff" + b"\x00" * 6 + noise[:1000]),
            ("random bytes after the preface", PREFACE + SETTINGS + noise),
            ("half of a gRPC message", begun + frame(0, 0, 1, b"\x00" + struct.pack(">I", 100) + noise[:50])),
            ("a gRPC message of 4 GiB", begun + frame(0, 0, 1, b"\x00\xff\xff\xff\xff" + noise[:100])),
            ("a message that does not parse", begun + frame(0, 1, 1, b"\x00" + struct.pack(">I", 64) + noise[:64])),
            ("a data stream of noise", call("Data") + frame(0, 0, 1, b"\x00" + struct.pack(">I", 4096) + noise[:4096])),
            ("a control stream of noise",
             call("Control") + frame(0, 0, 1, b"\x00" + struct.pack(">I", 512) + noise[:512])),
            ("an unknown method", call("Nothing") + frame(0, 1, 1, b"\x00\x00\x00\x00\x00")),
        ]

    # CASES D7: while a training runs, and it does not notice.
    def test_garbage_to_the_port(self):
        expected = self.undisturbed(1, 1, *FLAGS)
        servers = self.servers(1)
        trainer = self.trainer(servers, 0, 1, *FLAGS, "--hold=3:pushing", "--hold-close")
        trainer.await_hold(3, "pushing")
        host, port = servers[0].address.split(":")
        for name, data in self.garbage():
            with socket.create_connection((host, int(port)), timeout=driver.START) as peer:
                try:
                    peer.sendall(data)
                    peer.shutdown(socket.SHUT_WR)
                    peer.settimeout(driver.START)
                    answer = b""
                    while len(answer) < 1 << 16:
                        part = peer.recv(4096)
                        if not part:
                            break
                        answer += part
                    print(f"  {name}: {len(answer)} bytes, then the server hung up")
                except OSError:
                    print(f"  {name}: reset by the server")
            self.assertTrue(servers[0].running(), f"{name}: {servers[0].describe()}")
            self.assertEqual(servers[0].run_status()["open_step"], 3)
        trainer.go_on()
        self.assertEqual(trainer.await_event("finished")["weights_hash"], expected[0])
        self.assertEqual(driver.state_hashes(servers), expected[1])
        trainer.go_on()
        trainer.finish()
        self.stop_server(servers[0])

    def through_proxies(self, *flags, delay=0.0, holds=((), ())):
        """Two servers behind a proxy each, and two trainers."""
        servers = self.servers(2, "--grace-seconds=2")
        proxies = [proxy.Proxy(server.address, delay) for server in servers]
        for one in proxies:
            self.addCleanup(one.__exit__)
        addresses = [one.address for one in proxies]
        trainers = [self.trainer(addresses, rank, 2, *FLAGS, *flags, *holds[rank]) for rank in range(2)]
        return servers, proxies, trainers

    def finish_equal(self, servers, trainers, expected):
        for trainer in trainers:
            self.assertEqual(trainer.await_event("finished", driver.RUN)["weights_hash"], expected[0])
        self.assertEqual(driver.state_hashes(servers), expected[1])
        for server in servers:
            self.assertEqual(server.run_status()["committed_steps"], 5)
        for trainer in trainers:
            trainer.go_on()
        for trainer in trainers:
            trainer.finish()

    def test_200_ms_each_way(self):
        expected = self.undisturbed(2, 2, *FLAGS)
        servers, _, trainers = self.through_proxies("--hold-close", delay=0.2)
        self.finish_equal(servers, trainers, expected)

    # Every connection is reset in the middle of a step, at each of its points; all must be done once.
    def test_cut_in_mid_step(self):
        expected = self.undisturbed(2, 2, *FLAGS)
        points = ("begun", "pushing", "ended", "decided")
        holds = tuple(f"--hold={step}:{point}" for step, point in enumerate(points, 2))
        servers, proxies, trainers = self.through_proxies("--hold-close", holds=(holds, ()))
        for step, point in enumerate(points, 2):
            trainers[0].await_hold(step, point)
            for one in proxies:
                one.cut()
            trainers[0].go_on()
        self.finish_equal(servers, trainers, expected)
        print(f"  reconnects: {[trainer.events('finished')[0]['reconnects'] for trainer in trainers]}")
        drops = [event for trainer in trainers for event in trainer.events("outcome") if event["outcome"] == "drop"]
        self.assertEqual(drops, [], "a broken connection is no reason to drop")

    # Bytes are cut while they flow: 8 MiB a step, cut at moments that the traffic itself chooses.
    def test_cuts_while_chunks_flow(self):
        flags = ("--shapes=1024x1024,512x1024,33", "--chunk-bytes=65536", "--preset=sgd")
        expected = self.undisturbed(2, 2, *FLAGS, *flags)
        servers, proxies, trainers = self.through_proxies("--hold-close", *flags)
        cuts = 0
        threshold = 1 << 20
        while len(trainers[0].events("finished")) == 0 and cuts < 20 and trainers[0].running():
            if sum(one.passed[proxy.UP] for one in proxies) >= threshold:
                self.random.choice(proxies).cut()
                cuts += 1
                threshold = sum(one.passed[proxy.UP] for one in proxies) + self.random.randrange(1 << 20, 4 << 20)
            driver.time.sleep(0.001)
        self.finish_equal(servers, trainers, expected)
        reconnects = [trainer.events("finished")[0]["reconnects"] for trainer in trainers]
        print(f"  {cuts} cuts (random seed {self.seed}), reconnects {reconnects}")
        self.assertGreater(cuts, 4)

    def black_hole(self, *directions):
        servers, proxies, trainers = self.through_proxies(f"--step-timeout={STEP_TIMEOUT}",
                                                          holds=(("--hold=3:pushing",), ()))
        trainers[0].await_hold(3, "pushing")
        trainers[1].await_event("pushed", step=3)
        proxies[1].stall(*directions)
        trainers[0].go_on()
        for trainer in trainers:
            error = trainer.fail()
            print(f"  rank {trainer.rank} {error['call']}: {error['code']} after {error['elapsed_s']:.2f} s: "
                  f"{error['message']}")
            self.assertIn(error["code"], ("UNAVAILABLE", "DEADLINE_EXCEEDED"))
            self.assertIn(proxies[1].address, error["message"])
            self.assertLess(error["elapsed_s"], LIMIT)
        for server in servers:
            self.stop_server(server)

    # CASES E4, E12
    def test_black_hole(self):
        self.black_hole(proxy.UP, proxy.DOWN)

    def test_nothing_gets_to_the_server(self):
        self.black_hole(proxy.UP)

    def test_nothing_comes_back(self):
        self.black_hole(proxy.DOWN)

    # A hole that opens again before the deadline.
    def test_short_stall_changes_nothing(self):
        expected = self.undisturbed(2, 2, *FLAGS)
        servers, proxies, trainers = self.through_proxies("--hold-close", holds=(("--hold=3:pushing",), ()))
        trainers[0].await_hold(3, "pushing")
        trainers[1].await_event("pushed", step=3)
        proxies[1].stall(proxy.UP, proxy.DOWN)
        trainers[0].go_on()
        servers[0].await_run(lambda run: run["phase"] == "voted", "voted")
        proxies[1].stall()
        self.finish_equal(servers, trainers, expected)

    # CASES E4: a connect into a hole.
    def test_connect_into_a_black_hole(self):
        servers = self.servers(1)
        with proxy.Proxy(servers[0].address) as hole:
            hole.stall(proxy.UP, proxy.DOWN)
            error = self.trainer([hole.address], 0, 1, "--connect-timeout=3").fail()
            print(f"  {error['code']} after {error['elapsed_s']:.2f} s: {error['message']}")
            self.assertEqual(error["code"], "UNAVAILABLE")
            self.assertIn(hole.address, error["message"])
            self.assertLess(error["elapsed_s"], 3 + driver.SLACK)

    # CASES E10, E4: a server that is told to stop while its peers cannot be reached.
    def test_sigterm_behind_a_black_hole(self):
        servers, proxies, trainers = self.through_proxies(f"--step-timeout={STEP_TIMEOUT}",
                                                          holds=(("--hold=3:pushing",), ()))
        trainers[0].await_hold(3, "pushing")
        for one in proxies:
            one.stall(proxy.UP, proxy.DOWN)
        servers[0].signal(signal.SIGTERM)
        self.assertEqual(servers[0].exit_code(2 + driver.SLACK), 0, servers[0].describe())
        trainers[0].go_on()
        for trainer in trainers:
            self.assertTrue(re.search("|".join(one.address for one in proxies), trainer.fail()["message"]))


if __name__ == "__main__":
    driver.main()
