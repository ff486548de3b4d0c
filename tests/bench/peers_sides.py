"""The sides of ./run bench peers. Each holds the weights and the state of one case:

    steps(count) -> seconds   the next steps, as a trainer would pay for them: fp32 gradients in, fp32 weights updated
    all_weights() -> arrays   of all matrices, fp32 (Optax has none: its errors are not asked for)

All start from zero weights and have the same gradients, learning rate, weight decay and number of threads.
"""

import json
import os
import subprocess
import time

import numpy as np

LR = 0.02
WEIGHT_DECAY = 0.1
BETA = 0.95
ADAM_LR = 1e-3
ADAM_BETAS = (0.9, 0.95)
ADAM_EPS = 1e-8
COEFFICIENTS = (3.4445, -4.7750, 2.0315)
NS_STEPS = 5
EPS = 1e-7


class Worker:
    """The process that holds our CPU backend (peers_worker.cc says what it understands)."""

    def __init__(self, binary, threads):
        self.process = subprocess.Popen([binary, f"--threads={threads}"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.about = self._read()

    def ask(self, op, **fields):
        self.process.stdin.write(json.dumps({"op": op, **fields}) + "\n")
        self.process.stdin.flush()
        answer = self._read()
        if "error" in answer:
            raise RuntimeError(f"{op}: {answer['error']}")
        return answer

    def close(self):
        self.process.stdin.close()
        self.process.wait()

    def _read(self):
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError(f"the worker ended with status {self.process.wait()}")
        return json.loads(line)


class Ours:
    name = "ours"

    def __init__(self, worker, case, folder):
        self.worker, self.shapes, self.folder = worker, case.shapes, folder
        gradients = os.path.join(folder, "gradients")
        with open(gradients, "wb") as out:
            for gradient in case.gradients:
                gradient.tofile(out)
        if case.adamw:
            preset = "adamw"
            options = {"lr": ADAM_LR, "beta1": ADAM_BETAS[0], "beta2": ADAM_BETAS[1], "eps": ADAM_EPS, "weight_decay": WEIGHT_DECAY}
        else:
            preset, options = "muon_torch", {"lr": LR, "weight_decay": WEIGHT_DECAY}
        self.about = worker.ask("case", preset=preset, options={key: str(value) for key, value in options.items()},
                                shapes=case.shapes, gradients=gradients)
        os.remove(gradients)

    def steps(self, count):
        return self.worker.ask("steps", count=count)["seconds"]

    def all_weights(self):
        file = os.path.join(self.folder, "weights")
        self.worker.ask("weights", file=file)
        flat = np.fromfile(file, dtype=np.float32)
        os.remove(file)
        ends = np.cumsum([rows * cols for rows, cols in self.shapes])
        return [part.reshape(shape) for part, shape in zip(np.split(flat, ends[:-1]), self.shapes)]


class Torch:
    name = "torch"

    def __init__(self, case):
        import torch

        self.parameters = []
        for gradient in case.gradients:
            parameter = torch.nn.Parameter(torch.zeros(gradient.shape))
            parameter.grad = torch.from_numpy(gradient)
            self.parameters.append(parameter)
        if case.adamw:
            self.optimizer = torch.optim.AdamW(self.parameters, lr=ADAM_LR, betas=ADAM_BETAS, eps=ADAM_EPS, weight_decay=WEIGHT_DECAY, fused=True)
        else:
            self.optimizer = torch.optim.Muon(self.parameters, lr=LR, weight_decay=WEIGHT_DECAY, momentum=BETA, nesterov=True,
                                              ns_coefficients=COEFFICIENTS, eps=EPS, ns_steps=NS_STEPS)

    def steps(self, count):
        begin = time.perf_counter()
        for _ in range(count):
            self.optimizer.step()
        return time.perf_counter() - begin

    def all_weights(self):
        return [parameter.detach().numpy() for parameter in self.parameters]


class Optax:
    """fp32 throughout, its default. One jitted function for all matrices, with its arguments donated."""

    name = "optax"

    def __init__(self, case):
        import jax
        import optax

        optimizer = optax.contrib.muon(LR, weight_decay=WEIGHT_DECAY, beta=BETA, ns_coeffs=COEFFICIENTS, ns_steps=NS_STEPS, eps=EPS)

        def step(parameters, state, gradients):
            updates, state = optimizer.update(gradients, state, parameters)
            return optax.apply_updates(parameters, updates), state

        self.block = jax.block_until_ready
        self.step = jax.jit(step, donate_argnums=(0, 1))
        self.gradients = [jax.numpy.asarray(gradient) for gradient in case.gradients]
        self.parameters = [jax.numpy.zeros_like(gradient) for gradient in self.gradients]
        self.state = optimizer.init(self.parameters)
        self.block((self.parameters, self.state))

    def steps(self, count):
        begin = time.perf_counter()
        for _ in range(count):
            self.parameters, self.state = self.step(self.parameters, self.state, self.gradients)
            self.block((self.parameters, self.state))
        return time.perf_counter() - begin


def torch_gemm_gflops(dtype):
    """The best rate of torch's square products on its threads."""
    import torch

    best = 0
    for size in (512, 1024, 2048):
        a, b = (torch.randn(size, size).to(getattr(torch, dtype)) for _ in range(2))
        for _ in range(4):
            begin = time.perf_counter()
            torch.mm(a, b)
            best = max(best, 2e-9 * size**3 / (time.perf_counter() - begin))
    return best


def first_update(gradient, adamw):
    """The first update before scale and learning rate, in fp64, from the formulas: without history momentum is a multiple of the gradient."""
    g = gradient.astype(np.float64)
    if adamw:
        return g / (np.abs(g) + ADAM_EPS)
    g *= (1 - BETA) * (1 + BETA)  # the look-ahead from momentum (1 - BETA) g
    x = g.T if g.shape[0] > g.shape[1] else g
    x = x / max(np.linalg.norm(x), EPS)
    a, b, c = COEFFICIENTS
    for _ in range(NS_STEPS):
        gram = x @ x.T
        x = a * x + (b * gram + c * (gram @ gram)) @ x
    return x.T if g.shape[0] > g.shape[1] else x


def update_of(weights, adamw):
    """The update that took the weights away from zero."""
    rows, cols = weights.shape
    scale = ADAM_LR if adamw else LR * max(1, rows / cols) ** 0.5
    return weights.astype(np.float64) / -scale
