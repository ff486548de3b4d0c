"""Many steps through everything that happens to a long run at once: chunks sent twice and in other orders, connections cut,
trainers killed and restarted. Each step counts once, and nothing piles up."""

import time

import driver
import proxy

STEPS = 10000 if driver.FULL else 300 // driver.SANITIZED
RESTARTS = 60 if driver.FULL else 6 // min(driver.SANITIZED, 2)
CUTS = 200 if driver.FULL else 10
PATIENCE = 1200 if driver.FULL else 2 * driver.RUN
FLAGS = ("--shapes=40x64,64x40,33", "--preset=periodic_rowwise_muon", "--seed=31", f"--steps={STEPS}",
         "--chunk-bytes=4096", "--data-streams=2")
MAX_GROWTH = 8 << 20  # bytes of a server's memory between a quarter of the run and its end


class ExactlyOnce(driver.FaultTest):
    def start(self, addresses, rank):
        return self.trainer(addresses, rank, 2, *FLAGS, "--shuffle", "--twice", "--wait-retries=1000", "--drops=1000",
                            "--lease=5", "--step-timeout=30", "--hold-close",
                            f"--snapshot={self.folder.name}/snapshot-{rank}")

    def test_every_step_counts_once(self):
        expected = self.undisturbed(2, 2, *FLAGS)
        servers = self.servers(2)
        proxies = [proxy.Proxy(server.address) for server in servers]
        for one in proxies:
            self.addCleanup(one.__exit__)
        addresses = [one.address for one in proxies]
        trainers = [self.start(addresses, rank) for rank in range(2)]

        # What is done, by the step from which on it may happen.
        faults = sorted([(self.random.randrange(1, STEPS), "restart") for _ in range(RESTARTS)] +
                        [(self.random.randrange(1, STEPS), "cut") for _ in range(CUTS)])
        early = None
        deadline = time.monotonic() + PATIENCE
        while faults or not all(trainer.events("finished") for trainer in trainers):
            if time.monotonic() > deadline:
                self.fail(f"not done within {PATIENCE} s: {[trainer.describe() for trainer in trainers]}")
            for trainer in trainers:
                self.assertTrue(trainer.running(), trainer.describe())
            run = servers[0].run_status()
            step = run["consumed_step"] if run else 0
            if early is None and step >= STEPS // 4:
                early = [server.resident() for server in servers]
            while faults and faults[0][0] <= step:
                self.do(faults.pop(0)[1], addresses, proxies, trainers)
            time.sleep(0.01)

        ends = [trainer.await_event("finished") for trainer in trainers]
        self.assertEqual([end["weights_hash"] for end in ends], [expected[0]] * 2)
        self.assertEqual(driver.state_hashes(servers), expected[1])
        runs = [server.run_status() for server in servers]
        late = [server.resident() for server in servers]
        growth = [(after - before) / 2**20 for before, after in zip(early, late)]
        print(f"\n  {STEPS} steps, {RESTARTS} trainers killed, {CUTS} connections cut, seed {self.seed}: "
              f"chunks twice {[run['chunks_duplicate'] for run in runs]}, stale {[run['chunks_stale'] for run in runs]}, "
              f"sent out of order {[end['reordered'] for end in ends]}, attempts dropped "
              f"{[run['dropped_attempts'] for run in runs]}; state as undisturbed")
        print(f"  servers' memory: {[round(after / 2**20, 1) for after in late]} MiB at the end, "
              f"{[round(one, 2) for one in growth]} more than after a quarter of the steps")
        for run in runs:
            self.assertEqual((run["consumed_step"], run["committed_steps"], run["skipped_steps"]), (STEPS, STEPS, 0))
            self.assertGreater(run["chunks_duplicate"], STEPS)
        self.assertLess(max(growth) * 2**20, MAX_GROWTH)
        for trainer in trainers:
            trainer.go_on()
        for trainer in trainers:
            trainer.finish()

    def do(self, fault, addresses, proxies, trainers):
        if fault == "cut":
            self.random.choice(proxies).cut()
            return
        rank = self.random.randrange(2)
        if trainers[rank].events("finished"):
            return
        trainers[rank].kill()
        trainers[rank] = self.start(addresses, rank)


if __name__ == "__main__":
    driver.main()
