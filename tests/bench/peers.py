"""./run bench peers: a Muon step, and an AdamW step, here and in torch and optax, in one run.

Every side updates fp32 weights from fp32 gradients on the same number of threads; each repeat lets all of them make their steps in turn, and the
ratios are formed within a repeat. Errors are those of the first update against fp64 Newton-Schulz (relative, Frobenius; of a list: over one matrix
of each shape). Ratios are peer / ours: above 1 ours is faster.
"""

import argparse
import gc
import json
import math
import os
import pathlib
import statistics
import sys
import tempfile
import time

ROOT = pathlib.Path(__file__).resolve().parents[2]
SHAPES = ["512x512", "1024x1024", "2048x2048", "1024x4096", "4096x1024", "768x3072"]
CASES = SHAPES + ["gpt2_124m", "adamw"]
ADAMW_SHAPE = (50257, 768)  # the embedding of GPT-2 124M
MEASURED_SECONDS = 0.2  # of each side in each repeat, at least
CASE_SECONDS = 120  # a case of long steps has fewer repeats, but
MIN_REPEATS = 3
IDLE_SECONDS = 0.02  # between sides: threads that wait by spinning come to rest
# Per element: gradient, two moments and weights read; moments and weights written.
ADAMW_BYTES = 28


class Case:
    def __init__(self, name):
        import numpy as np

        self.name = name
        self.adamw = name == "adamw"
        if name == "gpt2_124m":
            self.shapes = hidden_shapes()
        else:
            self.shapes = [ADAMW_SHAPE if self.adamw else tuple(int(size) for size in name.split("x"))]
        random = np.random.default_rng(1)
        self.gradients = [random.standard_normal(shape, dtype=np.float32) * np.float32(1e-3) for shape in self.shapes]


def hidden_shapes():
    """The matrices of GPT-2 124M that its model file puts under a Muon rule."""
    model = json.loads((ROOT / "plan/models/gpt2_124m.json").read_text())
    return [tuple(parameter["shape"]) for parameter in model["parameters"] if "preset" not in parameter]


def relative_errors(case, sides):
    """{side: error} of the step that all of them have made."""
    import numpy as np
    from peers_sides import first_update, update_of

    weights = {side.name: side.all_weights() for side in sides}
    squares = dict.fromkeys(weights, 0.0)
    norm = 0.0
    for shape in sorted(set(case.shapes)):
        index = case.shapes.index(shape)
        truth = first_update(case.gradients[index], case.adamw)
        norm += np.sum(truth**2)
        for name in weights:
            squares[name] += np.sum((update_of(weights[name][index], case.adamw) - truth) ** 2)
    return {name: math.sqrt(square / norm) for name, square in squares.items()}


def measure(sides, repeats):
    """{side: [seconds of a step, one for each repeat]}, with all sides in turn within a repeat. All have made their first step."""
    second = {side.name: side.steps(1) for side in sides}
    counts = {name: max(1, math.ceil(MEASURED_SECONDS / seconds)) for name, seconds in second.items()}
    repeats = min(repeats, max(MIN_REPEATS, int(CASE_SECONDS / sum(second.values()))))
    seconds = {side.name: [] for side in sides}
    for repeat in range(repeats):
        for offset in range(len(sides)):
            side = sides[(repeat + offset) % len(sides)]
            time.sleep(IDLE_SECONDS)
            seconds[side.name].append(side.steps(counts[side.name]) / counts[side.name])
    return seconds


class Rates:
    """What this machine reaches in plain products and copies: the floors that times are compared with."""

    def __init__(self, worker):
        self.worker = worker
        self.gflops = {}

    def gemm(self, dtype):
        """The best of our products and torch's so far, in GFLOP/s."""
        from peers_sides import torch_gemm_gflops

        torch_rate = torch_gemm_gflops({"fp32": "float32", "bf16": "bfloat16"}[dtype])
        own_rate = self.worker.ask("gemm", dtype=dtype)["gflops"]
        self.gflops[dtype] = max(self.gflops.get(dtype, 0), own_rate, torch_rate)
        return self.gflops[dtype]

    def memcpy(self, repeats):
        """Bytes read and written per second."""
        copies = [self.worker.ask("copy") for _ in range(repeats)]
        return statistics.median(2 * copy["bytes"] / copy["seconds"] for copy in copies)


def add_spread(entry, key, values):
    entry[key], entry[key + "_min"], entry[key + "_max"] = statistics.median(values), min(values), max(values)


def run_case(name, worker, rates, repeats, folder):
    from peers_sides import Optax, Ours, Torch

    case = Case(name)
    ours, torch = Ours(worker, case, folder), Torch(case)
    for side in (ours, torch):
        side.steps(1)
    errors = relative_errors(case, (ours, torch))
    sides = [ours, torch]
    if not case.adamw:
        sides.append(Optax(case))
        sides[-1].steps(1)  # compiles
    seconds = measure(sides, repeats)
    entry = {"case": name}
    for side in ("ours", "torch", "optax"):
        if side not in seconds:
            entry[side + "_ms"] = entry["ratio_" + side] = None
            continue
        add_spread(entry, side + "_ms", [1e3 * value for value in seconds[side]])
        if side != "ours":
            add_spread(entry, "ratio_" + side, [theirs / own for theirs, own in zip(seconds[side], seconds["ours"])])
    entry["error_ours"], entry["error_torch"] = errors["ours"], errors["torch"]
    entry["flop_share"] = None
    if case.adamw:
        elements = ADAMW_SHAPE[0] * ADAMW_SHAPE[1]
        entry["memcpy_share"] = ADAMW_BYTES * elements / (1e-3 * entry["ours_ms"]) / rates.memcpy(repeats)
    else:
        dtype = ours.about["dtype"]
        entry["gflop"], entry["peak_gflops"] = ours.about["gflop"], rates.gemm(dtype)
        entry["flop_share"] = entry["gflop"] / entry["peak_gflops"] / (1e-3 * entry["ours_ms"])
    entry["ours"] = f"{', '.join(ours.about['methods'])} on {worker.about['instruction_set']}"
    entry["torch"], entry["optax"] = peers_in_words(case)
    return entry


def peers_in_words(case):
    import jax
    import torch

    products = "fp32" if case.adamw else "bf16"
    in_torch = f"torch {torch.__version__} {products} on {torch.backends.cpu.get_cpu_capability()}"
    return in_torch, None if case.adamw else f"optax fp32 on XLA {jax.__version__}"


def show(entry):
    def spread(key):
        if entry[key] is None:
            return "-"
        return f"{entry[key]:.4g} ({entry[key + '_min']:.4g}-{entry[key + '_max']:.4g})"

    if entry["case"] == "adamw":
        share = f"{100 * entry['memcpy_share']:.0f} % of memcpy's bandwidth"
    else:
        share = f"{100 * entry['flop_share']:.0f} % of the flop floor ({entry['gflop']:.4g} GFLOP at {entry['peak_gflops']:.4g} GFLOP/s)"
    print(f"{entry['case']}: ours {spread('ours_ms')} ms, {share}, error {entry['error_ours']:.3g}")
    print(f"  torch {spread('torch_ms')} ms, error {entry['error_torch']:.3g}: ratio {spread('ratio_torch')}  [{entry['ours']} | {entry['torch']}]")
    if entry["optax_ms"] is not None:
        print(f"  optax {spread('optax_ms')} ms: ratio {spread('ratio_optax')}  [{entry['ours']} | {entry['optax']}]")
    sys.stdout.flush()


def parse_arguments():
    parser = argparse.ArgumentParser(prog="./run bench peers", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--worker", required=True, help=argparse.SUPPRESS)
    parser.add_argument("--cases", default=",".join(CASES), help="comma-separated (default: %(default)s); any ROWSxCOLS is one")
    parser.add_argument("--repeats", type=int, default=7, help="of each case (default: %(default)s); fewer, at least 3, where steps are long")
    parser.add_argument("--threads", type=int, default=0, help="of every side; 0: all processors (default)")
    parser.add_argument("--json", help="also write the figures to this file")
    arguments = parser.parse_args()
    arguments.cases = arguments.cases.split(",")
    for case in arguments.cases:
        sizes = case.split("x")
        if case not in CASES and not (len(sizes) == 2 and all(size.isdigit() and int(size) > 0 for size in sizes)):
            parser.error(f"--cases: '{case}' is neither ROWSxCOLS nor one of {', '.join(CASES)}")
    if arguments.repeats < 1:
        parser.error(f"--repeats: {arguments.repeats} is below 1")
    processors = len(os.sched_getaffinity(0))
    if not 0 <= arguments.threads <= processors:
        parser.error(f"--threads: {arguments.threads} is not from 0 to {processors}, the processors here")
    arguments.threads = arguments.threads or processors
    return arguments


def limit_threads(threads):
    """Before any of the libraries is loaded: each sizes its pool by what it then sees."""
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:threads])
    for variable in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
        os.environ[variable] = str(threads)
    os.environ["JAX_PLATFORMS"] = "cpu"


def main():
    arguments = parse_arguments()
    limit_threads(arguments.threads)
    from peers_sides import Worker

    worker = Worker(arguments.worker, arguments.threads)
    rates = Rates(worker)
    print(f"{worker.about['device']}, {arguments.threads} threads, {arguments.repeats} repeats: median (min-max); ratios are peer / ours")
    entries = []
    with tempfile.TemporaryDirectory(prefix="stiefel-peers-") as folder:
        for name in arguments.cases:
            entries.append(run_case(name, worker, rates, arguments.repeats, folder))
            show(entries[-1])
            gc.collect()
    worker.close()
    if arguments.json:
        pathlib.Path(arguments.json).write_text(json.dumps(entries, indent=2) + "\n")


if __name__ == "__main__":
    main()
