"""Time and state of every optimizer: the table of docs/optimizers.md.

    python -m benchmarks.optimizers
    python -m benchmarks.optimizers --optimizer adamw --millions 20

Each step is the whole call of ``Optimizer.step``, the gradient norm included, on one thread.
The smaller network stays in the last-level cache with its gradients and moments, the larger
one does not. A time is the fastest of the given number of steps.
"""

import timeit

import onnxruntime

from odtpack import optimizers
from odtpack.build import build_package
from scripts.harness import head, options, row, scratch
from tests import zoo
from tests.packaging_tools import batch, open_training

CASES: dict[str, optimizers.Optimizer] = {
    "sgd": optimizers.SGD(),
    "sgd momentum": optimizers.SGD(momentum=0.9),
    "sgd nesterov": optimizers.SGD(momentum=0.9, nesterov=True),
    "lion": optimizers.Lion(weight_decay=0.1),
    "adam": optimizers.Adam(),
    "adamw": optimizers.AdamW(),
    "adamw decay": optimizers.AdamW(weight_decay=0.1),
    "adamw pytorch": optimizers.AdamW(formula="pytorch", weight_decay=0.1),
    "adafactor": optimizers.Adafactor(),
}


def measure(optimizer: optimizers.Optimizer, width: int, steps: int) -> tuple[float, float, float]:
    """Millions of parameters, bytes of state of one, milliseconds of a step per million."""
    model = zoo.mlp((width, width, width))
    with scratch() as folder:
        build_package(model, folder, loss="cross_entropy", optimizer=optimizer)
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = 1
        state, module, stepper = open_training(folder, options)
        module(*batch(model, 4))
        seconds = min(timeit.repeat(stepper.step, number=1, repeat=steps))
    count = module.get_parameters_size()
    kept = sum(m.nbytes for own in state.optimizer.moments.values() for m in own)
    return count / 1e6, kept / count, seconds * 1e9 / count


def main() -> None:
    given = options(__doc__, optimizer=[*CASES], millions=[1.0, 20.0], steps=30)
    print(head("optimizer", "parameters:", "state/param:", "ms/million:"))
    for name in given.optimizer:
        for millions in given.millions:
            width = round((millions * 5e5) ** 0.5)
            count, kept, taken = measure(CASES[name], width, given.steps)
            print(row(name, f"{count:.1f} M", f"{kept:.3f} B", f"{taken:.2f}"), flush=True)


if __name__ == "__main__":
    main()
