"""A whole trainer, leader included, from nothing but the stubs that protoc generates: the wire is plain gRPC and protobuf.

Runs the golden muon sequence (tests/vectors/rules.json, 3 x 5, four steps) against a real server and compares every delta; sends every chunk
twice and in two pieces, out of order; then checks that broken input is refused and that the run goes on.
usage: stub_trainer.py SERVER_BINARY VECTORS_JSON STUBS_DIR
"""

import json
import queue
import random
import struct
import subprocess
import sys
import threading

SERVER, VECTORS, STUBS = sys.argv[1:4]
sys.path.insert(0, STUBS)

import grpc  # noqa: E402
from stiefel.v1 import optimizer_pb2 as pb  # noqa: E402
from stiefel.v1 import optimizer_pb2_grpc as rpc  # noqa: E402
from stiefel.v1 import status_pb2 as status_pb  # noqa: E402
from stiefel.v1 import status_pb2_grpc as status_rpc  # noqa: E402

TIMEOUT = 30  # seconds; any wait beyond it fails the test


def crc32c(data):
    crc = 0xFFFFFFFF
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = (crc >> 1) ^ (0x82F63B78 & -(crc & 1))
    return crc ^ 0xFFFFFFFF


class Stream:
    """One bidirectional stream: a queue to write from, a queue that everything read lands in."""

    def __init__(self, method, read=None):
        self.out = queue.Queue()
        self.read = read or queue.Queue()
        self.call = method(iter(self.out.get, None))
        threading.Thread(target=self._pump, daemon=True).start()

    def _pump(self):
        try:
            for message in self.call:
                self.read.put(message)
        except grpc.RpcError as error:
            self.read.put(error)

    def send(self, message):
        self.out.put(message)

    def wait(self, kind):
        """The next message of this kind; others are passed over."""
        while True:
            message = self.read.get(timeout=TIMEOUT)
            if isinstance(message, Exception):
                raise message
            if kind is None or message.WhichOneof("kind") == kind:
                return message


class Trainer:
    def __init__(self, target, rows, cols, preset):
        self.channel = grpc.insecure_channel(target)
        self.stub = rpc.OptimizerStub(self.channel)
        self.status = status_rpc.StatusStub(self.channel)
        self.rows, self.cols = rows, cols
        self.incarnation = pb.Incarnation(generation=1, id=random.getrandbits(63))
        info = self.stub.GetServerInfo(pb.GetServerInfoRequest(), timeout=TIMEOUT)
        assert not info.runs, info
        parameter = pb.Parameter(name="w", shape=[rows, cols])
        parameter.rule.preset = preset
        opened = pb.OpenRunRequest(
            name="stub", run_uid=random.getrandbits(63) | 1, leader=self.incarnation, world_size=1, start_step=1,
            update_mode=pb.DELTA, parameters=[parameter], phases=[0], owners=[0], servers=[target], server_index=0,
            placement_epoch=1, software_version=info.software_version, protocol_version=info.protocol_version)
        assert not self.stub.OpenRun(opened, timeout=TIMEOUT).already_open
        assert self.stub.OpenRun(opened, timeout=TIMEOUT).already_open, "OpenRun is idempotent"
        block = pb.Rectangle(row_begin=0, row_end=rows, col_begin=0, col_end=cols)
        joined = self.stub.JoinRun(pb.JoinRunRequest(
            name="stub", rank=0, world_size=1, incarnation=self.incarnation, applied_step=0,
            push=[pb.PushBlock(parameter="w", rect=block)], pull=[pb.PullBlock(parameter="w", rect=block)],
            parameters=[parameter], protocol_version=info.protocol_version, wait_seconds=10), timeout=TIMEOUT)
        self.sender = pb.Sender(run_uid=joined.run_uid, placement_epoch=joined.placement_epoch, rank=0, incarnation=self.incarnation)
        self.control = Stream(self.stub.Control)
        self.control.send(pb.TrainerMessage(sender=self.sender, hello=pb.Hello()))
        self.updates = queue.Queue()  # of all data streams: the server uses whichever is free
        self.data = self.open_data(self.updates)

    def open_data(self, read=None):
        stream = Stream(self.stub.Data, read)
        stream.send(pb.Chunk(header=pb.ChunkHeader(type=pb.ChunkHeader.HELLO, sender=self.sender)))
        return stream

    def chunk(self, step, attempt, values, offset, **changes):
        payload = struct.pack("<%df" % len(values), *values)
        piece = pb.Piece(block=0, offset=offset, count=len(values), crc32c=crc32c(payload))
        for field, value in changes.items():
            setattr(piece, field, value)
        header = pb.ChunkHeader(type=pb.ChunkHeader.GRADIENT, sender=self.sender, step=step, attempt=attempt, pieces=[piece])
        return pb.Chunk(header=header, payload=payload)

    def begin(self, step, attempt=0):
        self.control.send(pb.TrainerMessage(sender=self.sender, begin_step=pb.BeginStep(step=step, attempt=attempt)))
        while True:
            credit = self.control.wait("credit").credit
            if credit.step == step and credit.attempt == attempt:
                return credit

    def finish(self, step, attempt=0):
        """Everything was sent: end the push, decide as the leader, and return the delta."""
        self.control.send(pb.TrainerMessage(sender=self.sender, end_push=pb.EndPush(step=step, attempt=attempt)))
        vote = self.control.wait("vote").vote
        assert (vote.step, vote.attempt, len(vote.matrices)) == (step, attempt, 1), vote
        outcome = pb.SKIP if vote.matrices[0].nonfinite_gradient else pb.COMMIT
        self.control.send(pb.TrainerMessage(sender=self.sender, decide=pb.Decide(step=step, attempt=attempt, outcome=outcome)))
        while True:
            decided = self.control.wait("decided").decided
            if decided.step == step:
                break
        assert decided.outcome == outcome, decided
        if outcome == pb.SKIP:
            return vote, None
        delta = [None] * (self.rows * self.cols)
        while None in delta:
            chunk = self.updates.get(timeout=TIMEOUT)
            if isinstance(chunk, Exception):
                raise chunk
            at = 0
            for piece in chunk.header.pieces:
                size = 4 * piece.count
                payload = chunk.payload[at:at + size]
                at += size
                assert piece.crc32c == crc32c(payload), "checksum of an update"
                if chunk.header.step == step and chunk.header.attempt == attempt:
                    delta[piece.offset:piece.offset + piece.count] = struct.unpack("<%df" % piece.count, payload)
        return vote, delta


def gradient(step, rows, cols):
    """The golden gradients; s = step - 1."""
    s = step - 1
    return [(((7 * i + 3 * j * j + 5 + 11 * s + s * i * j) % 13) - 6) / 4 for i in range(rows) for j in range(cols)]


def golden(rows, cols, preset):
    for case in json.load(open(VECTORS))["cases"]:
        if (case["preset"], case["rows"], case["cols"]) == (preset, rows, cols):
            return case["deltas"]
    raise KeyError(preset)


def run(target):
    rows, cols = 3, 5
    trainer = Trainer(target, rows, cols, "muon")
    steps = golden(rows, cols, "muon")
    for step, expected in enumerate(steps, start=1):
        trainer.begin(step)
        values = gradient(step, rows, cols)
        pieces = [trainer.chunk(step, 0, values[8:], 8), trainer.chunk(step, 0, values[:8], 0)]
        for chunk in pieces + pieces:
            trainer.data.send(chunk)
        _, delta = trainer.finish(step)
        flat = [x for row in expected for x in row]
        largest = max(map(abs, flat))
        error = max(abs(a - b) for a, b in zip(delta, flat)) / largest
        print("step %d: largest error %.2e of the largest delta" % (step, error))
        assert error <= 2e-5, error

    # Bad input: each ends its own data stream with a clear status; the run goes on.
    step = len(steps) + 1
    trainer.begin(step)
    values = gradient(step, rows, cols)
    bad = {
        "OUT_OF_RANGE": trainer.chunk(step, 0, values, 1),
        "INVALID_ARGUMENT": trainer.chunk(step, 0, values[:4], 0, count=5),
        "DATA_LOSS": trainer.chunk(step, 0, values[:4], 0, crc32c=1),
        "FAILED_PRECONDITION": trainer.chunk(step + 1, 0, values, 0),
    }
    for code, chunk in bad.items():
        stream = trainer.open_data()
        stream.send(chunk)
        while True:
            answer = stream.read.get(timeout=TIMEOUT)
            if isinstance(answer, grpc.RpcError):
                break
        print("refused: %s: %s" % (answer.code().name, answer.details()))
        assert answer.code().name == code, (code, answer)

    # A non-finite gradient skips the step and changes nothing; the next step works.
    before = trainer.status.GetStatus(status_pb.GetStatusRequest(state_hash=True), timeout=TIMEOUT).runs[0].state_hash
    trainer.data.send(trainer.chunk(step, 0, [float("inf")] + values[1:], 0))
    vote, delta = trainer.finish(step)
    assert delta is None and vote.matrices[0].nonfinite_gradient == 1, vote
    print("skipped: " + vote.matrices[0].explanation)
    after = trainer.status.GetStatus(status_pb.GetStatusRequest(state_hash=True), timeout=TIMEOUT).runs[0]
    assert after.state_hash == before and after.skipped_steps == 1, after
    trainer.begin(step + 1)
    trainer.data.send(trainer.chunk(step + 1, 0, gradient(step + 1, rows, cols), 0))
    trainer.finish(step + 1)
    assert trainer.stub.CloseRun(pb.CloseRunRequest(sender=trainer.sender, applied_step=step + 1), timeout=TIMEOUT).run_ended
    print("stub trainer: ok")


def main():
    server = subprocess.Popen([SERVER, "--listen=127.0.0.1:0"], stdout=subprocess.PIPE, text=True)
    try:
        for line in server.stdout:
            if "listening on " in line:
                break
        threading.Thread(target=server.stdout.read, daemon=True).start()
        run(line.split("listening on ")[1].split()[0])
    finally:
        server.terminate()
        code = server.wait(timeout=TIMEOUT)
    assert code == 0, "the server ended with %d" % code


main()
