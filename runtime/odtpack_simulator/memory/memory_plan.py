"""Predict the peak memory of training before anything runs, also with other settings.

Eleven phases are planned, and one more where gradients of several batches are added
up: loading the training model and the evaluation model, moving the parameters of the
checkpoint into one buffer, and the moments too where a training is resumed, a first
evaluation, the first training step, in which gradients take memory as they are written,
the steps after it, one run of the optimizer model, an evaluation in between, saving, and
exporting a model. A step is planned node by node as ONNX Runtime executes it; parameters,
gradients and moments lie in flat buffers that exist throughout, so the step's peak is
theirs, plus one batch, plus the sessions, plus the most that is alive at a node.

The plan is for the session options of the package. Where sessions have an arena, every
request of a training's life is played through it (:mod:`odtpack_simulator.memory.arena`):
loading, an evaluation, steps, an evaluation in between, and again without the first evaluation, as
in a process that resumes. Where free chunks lie differs, so of each phase the higher counts. What
the arena holds and does not use is an item of every phase from then on. Memory patterns are off.

Advice rests on plans with other settings. Changed are the three things that decide a training's
peak and that need no other model: how many samples are in memory at once, whether the optimizer
keeps state, and how many of the trained layers stay frozen. A smaller micro-batch is planned with
the package's own models, a frozen layer with the training model without its gradients, and the
optimizer without state with a model of plain SGD.
"""

import dataclasses
import itertools
import math
import operator
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Final

import onnx
import onnx.parser
from onnx import helper

from odtpack_runtime.checkpoint.parameters import Layout
from odtpack_runtime.files.scratch import scratch_folder
from odtpack_runtime.package.checks import read_model
from odtpack_runtime.package.manifest import Manifest
from odtpack_runtime.package.package import Package
from odtpack_runtime.package.records import SessionInfo
from odtpack_runtime.session.graph_signature import ORDER_PREFIX, RESET_NAME
from odtpack_runtime.session.native import count_operators
from odtpack_runtime.training.optimizer import state_layout
from odtpack_simulator.device.kits import Sharing
from odtpack_simulator.memory import planning, session_memory
from odtpack_simulator.memory.allocation import allocated_size
from odtpack_simulator.memory.arena import Arenas, SessionUse, sharing_of
from odtpack_simulator.memory.execution_order import Layer, drop_gradients, trained_layers
from odtpack_simulator.memory.planning import Item, MemoryPlan, Phase
from odtpack_simulator.memory.runtime_graph import Labels, RuntimeGraph, load_runtime_graph
from odtpack_simulator.result import PlannedChange, TimelinePoint

_PASSES: Final = 3  # Over the data, until an arena holds what batches of two sizes take in turn

LoadGraph = Callable[..., RuntimeGraph]
"""Reads a model as :func:`~odtpack_simulator.memory.runtime_graph.load_runtime_graph` does."""


def plan_memory(
    package: Package,
    shapes: Mapping[str, Sequence[int]],
    use: SessionUse | None = None,
    *,
    threads: int | None = None,
    evaluated: int | None = None,
    samples: Collection[int] = (),
    steps: int | None = None,
    load: LoadGraph = load_runtime_graph,
) -> MemoryPlan:
    """Plan the memory of training a package. Nothing is run.

    Args:
        package: The package.
        shapes: Shape of one batch of each user input.
        use: The sessions of a kit: :func:`~odtpack_simulator.memory.arena.session_use`; by default
            those that the package asks for, with steps of the training and the optimizer model.
        threads: Intra-operator threads of the sessions; the package's choice if None.
        evaluated: How many samples are evaluated, in batches of that size; None for a batch at
            least, 0 for an app that does not evaluate.
        samples: How many samples passes train on: what is left of each in the end makes a smaller
            batch, unless the models fix it. None for whole batches.
        steps: Optimizer steps of the whole training; None for many.
        load: Reads the models, so that who plans many times may read each once.

    Raises:
        OdtpackError: A model does not load, or a shape does not fit.
    """
    plans = plan_arenas(
        package,
        shapes,
        use or SessionUse(sharing_of(package.manifest.session), step_model=False),
        threads=threads,
        evaluated=evaluated,
        samples=samples,
        steps=steps,
        load=load,
    )
    return plans.plan(package.manifest.session, evaluates=evaluated != 0)


@dataclass(frozen=True, kw_only=True)
class ArenaPlans:
    """A training that is planned but for its arena: with one it takes a small part of the time."""

    manifest: Manifest  # The package's
    layout: Layout  # Where parameters lie in the flat vectors
    sharing: Sharing  # How sessions allocate memory
    models: planning.Models  # Sessions and passes of the network
    first: Sequence[planning.Session]  # What is loaded in the place of its training sessions
    optimizer: planning.Session  # The session of the optimizer model
    update: planning.Pass | None  # Its pass; None where a step model updates the parameters
    heap: int | None  # Most bytes of small buffers at once, where there is no arena
    process: Item  # What a process takes that has loaded ONNX Runtime
    parameters: Sequence[Item]  # Parameters, and what is there as long as they are
    fed: Sequence[Item]  # What is there when something runs besides: all sessions, threads, a batch
    gradients: Sequence[Item]  # Gradients of parameters
    moments: Sequence[Item]  # What the optimizer keeps
    threads: int  # Intra-operator threads of a session
    once: bool  # Whether one optimizer step is the whole training

    @property
    def running(self) -> list[Item]:
        """What is there throughout a step, besides activations."""
        return [*self.fed, *self.models.afresh.kept, *self.gradients, *self.moments]

    def plan(
        self, session: SessionInfo | None, *, ballast: int = 0, evaluates: bool = True
    ) -> MemoryPlan:
        """Plan it with an arena; see :meth:`phases`."""
        # A single step is not resumed, and without arenas a phase hangs on none before it.
        both = evaluates and not self.once and self.heap is None
        lives = (
            self.phases(
                Arenas(self.sharing, session, ballast), evaluates=evaluates, resumed=resumed
            )
            for resumed in ((False, True) if both else (False,))
        )
        highest: dict[str, Phase] = {}
        for phase in itertools.chain.from_iterable(lives):
            known = highest.setdefault(phase.name, phase)
            if phase.nbytes > known.nbytes:
                highest[phase.name] = phase
        return MemoryPlan(tuple(highest.values()), self._timeline, *self._unknown)

    def phases(
        self, arenas: Arenas, *, evaluates: bool = True, resumed: bool = False
    ) -> Iterator[Phase]:
        """The phases in their order, one after the other; the arenas hold more and more."""
        # `evaluates`: Whether the app evaluates before it trains, and in between.
        # `resumed`: Whether the process goes on from a checkpoint: it does not evaluate first.
        life = planning.Life(arenas, self.heap, self._buffers)
        models, moments, running = self.models, self.moments, self.running
        # Load the sessions, place the parameters, or resume.
        base = [self.process, *self.parameters]
        loaded, placed, opened = (
            [
                *base,
                _threads(self.threads, len(each)),
                *(i for session in each for i in session.items),
            ]
            for each in itertools.accumulate(
                ((*self.first,), (*models.evaluation,), (self.optimizer,)), operator.add
            )
        )
        life.load(models.training)
        yield life.add("loading the training model", [*loaded, _loading(self.first)])
        life.load(models.evaluation)
        yield life.add("loading the evaluation model", [*placed, _loading(models.evaluation)])
        yield life.add("placing the parameters", [*placed, *planning.moved(self.layout, 1)])
        restored = [*opened, *moments, *planning.moved(self.layout, len(moments))]
        life.load([self.optimizer])
        yield life.add("resuming", restored)
        if evaluates and not resumed:
            # Training then keeps what an evaluation keeps.
            held = [*self.fed, *models.held_out[0].kept]
            for batch in models.held_out:
                yield life.run("first evaluation", held, batch)
        yield from self._passes(life, resumed=resumed, evaluates=evaluates)
        # Tensors are written from where they lie.
        saved = len(self.manifest.parameters) + len(moments) * len(self.layout.slots)
        tables = max(self.heap or 0, saved * session_memory.BYTES_PER_SAVED_TENSOR)
        yield life.add("saving", [*running, Item("checkpoint tables", tables, "activations")])
        yield life.add("exporting", [*running, *planning.exported(self.manifest)])

    def _passes(self, life: planning.Life, *, resumed: bool, evaluates: bool) -> Iterator[Phase]:
        """Make steps, with an evaluation in between."""
        # Moments are zeros at first, which take no memory before they are written: a step model
        # writes them in the first step.
        models, moments, running = self.models, self.moments, self.running
        adds, update = self.manifest.accumulation_steps > 1, self.update
        written = moments if update is None else ()
        ungraded = [*self.fed, *models.afresh.kept]
        # A step that adds to gradients is undone with a copy of them, from the first such step on.
        copy = adds * sum(item.nbytes for item in self.gradients)
        added = [*running, Item("copy of the accumulated gradients", copy, "gradients")]
        # Where batches differ, an arena still grows in later passes.
        for number in range(_PASSES if models.left and not self.once else 1):
            if resumed or number:  # the moments were read or written
                yield life.run("training step", running, models.afresh)
            elif self.heap is None or len(models.afresh.runs) > 1:
                yield life.run("first step", [*ungraded, *self.gradients, *written], models.afresh)
            else:
                first = models.afresh.runs[0].first_step(self.heap, self.gradients)
                yield life.add("first step", [*written, *ungraded, *first])
            if not self.once:
                if update is not None:
                    yield life.run("optimizer step", running, update)
                yield life.run("training step", running, models.afresh)
            if adds:
                yield life.run("accumulating step", added, models.adding)
            for batch in models.left:
                if update is not None and not adds:
                    yield life.run("optimizer step", added, update)
                yield life.run("accumulating step" if adds else "training step", added, batch)
            if update is not None:
                yield life.run("optimizer step", added, update)
            if evaluates:
                for batch in models.held_out:
                    yield life.run("evaluation", added, batch)
        if not self.once:
            yield life.run("training step", added, models.afresh)

    @cached_property
    def _buffers(self) -> dict[planning.Pass, list[Item]]:
        """What each pass needs at its peak."""
        models = self.models
        own = (models.afresh, models.adding, *models.left, *models.held_out)
        return {each: each.at_peak(self.heap) for each in filter(None, (*own, self.update))}

    @cached_property
    def _timeline(self) -> tuple[TimelinePoint, ...]:
        """Memory during each node of a step."""
        afresh = self.models.afresh
        base = sum(item.nbytes for item in (*self.running, *afresh.passing)) + (self.heap or 0)
        points: list[TimelinePoint] = []
        for run in afresh.runs:
            points += run.points(base, len(points))
        if self.update is not None:
            points += self.update.runs[0].points(base, len(points), "update")
        return tuple(points)

    @cached_property
    def _unknown(self) -> tuple[tuple[str, ...], bool]:
        """Tensors whose size depends on data, and whether the turns of a Loop do."""
        models = self.models
        work = (models.afresh, models.adding, *models.left, *models.held_out, self.update)
        plans = [run.plan for each in filter(None, work) for run in each.runs]
        names = dict.fromkeys(name for plan in plans for name in plan.unknown)
        return tuple(names), any(plan.unbounded for plan in plans)


def plan_arenas(
    package: Package,
    shapes: Mapping[str, Sequence[int]],
    use: SessionUse,
    *,
    threads: int | None = None,
    evaluated: int | None = None,
    samples: Collection[int] = (),
    steps: int | None = None,
    load: LoadGraph = load_runtime_graph,
) -> ArenaPlans:
    """Plan all but the arena. Arguments and errors as of :func:`plan_memory`."""
    manifest = package.manifest
    threads = threads or manifest.threads
    level = manifest.session.optimization_level if manifest.session else "all"
    layout = planning.flat_layout(manifest)
    contract = planning.optimizer_contract(package)
    kernels = 0
    if use.native:
        counts = count_operators(manifest.operators.by_model())
        each = zip(counts, session_memory.BYTES_PER_KERNEL, strict=True)
        kernels = session_memory.BYTES_OF_LIBRARY + sum(count * nbytes for count, nbytes in each)

    def opened(name: str, path: Path, sizes: Mapping[str, Sequence[int]]) -> planning.Session:
        graph = load(path, sizes, threads=threads, level=level, native=use.native)
        nbytes = session_memory.session_bytes(path, graph, is_segment=manifest.segments is not None)
        nbytes += kernels
        return planning.Session(name, graph, nbytes, arena=use.sharing != "none")

    optimizer = opened("optimizer", package.optimizer_model, planning.vectors(contract, layout))
    update = planning.Pass(
        (
            planning.Run(
                optimizer,
                optimizer.plan(threads, (), {}),
                Labels(optimizer.graph, later="update/", gradient=True),
            ),
        )
    )
    is_whole = use.step_model and package.step_model is not None
    # Sizes of batches, the largest first. Where a smaller one takes the memory that a larger one
    # gave back, without an arena, it does not count.
    batch = _batch(manifest, shapes)
    cut = use.sharing != "none" and manifest.fixed_batch is None
    left = sorted({count % batch for count in samples} - {0}, reverse=True) if cut else []
    whole = min(batch, evaluated or batch)
    rest = [evaluated % whole] if cut and evaluated and evaluated % whole else []

    def of(size: int) -> Mapping[str, Sequence[int]]:
        return {n: (size, *s[1:]) if s and s[0] == batch else s for n, s in shapes.items()}

    trained, held_out = [shapes, *map(of, left)], [*map(of, (whole, *rest))]
    if manifest.segments is None:
        path = package.step_model if is_whole and package.step_model else package.training_model
        models = _one_model(
            manifest,
            [opened("training", path, sizes) for sizes in trained],
            [opened("evaluation", package.eval_model, sizes) for sizes in held_out],
            threads,
        )
    else:
        models = planning.plan_segments(
            package, manifest.segments, trained, held_out, threads, opened
        )
    first = models.training
    if use.switches and package.step_model is not None:
        first = (opened("training", package.step_model, shapes),)
    sessions = [*models.training, *models.evaluation, optimizer]
    ran = sessions if not is_whole else sessions[:-1]
    # With one thread there is no other that could wake.
    woken = sum(threads > 1 and session_memory.divides_work(each.graph) for each in ran)
    scratch = session_memory.scratch_bytes([each.graph for each in ran], threads)
    process = Item("ONNX Runtime and Python", session_memory.LOADED_BYTES, "session")
    flat = [(p.name, p.role, planning.flat_bytes(p)) for p in manifest.parameters]
    parameters = [Item(name, nbytes, "parameters") for name, _, nbytes in flat]
    # What a step whose loss is not finite is undone with.
    statistics = sum(nbytes for _, role, nbytes in flat if role == "state")
    work = [models.afresh, *models.held_out, *(() if is_whole else (update,))]
    ends = models.afresh.ends + models.held_out[0].ends
    bindings = values = 0
    if manifest.segments is not None:
        bindings = session_memory.BYTES_OF_SEGMENT_RUNS + ends * session_memory.BYTES_PER_BINDING
        bindings += len(parameters) * session_memory.BYTES_PER_SEGMENTED_PARAMETER
    elif use.native:
        bindings = ends * session_memory.BYTES_PER_BOUND - session_memory.BYTES_OF_SMALL_NETWORK
        values = max(each.values for each in work) + min(0, bindings)
    parameters.append(Item("bindings", max(0, bindings), "session"))
    if use.weights_bytes:
        parameters.append(Item("frozen weights in memory", use.weights_bytes, "parameters"))
    return ArenaPlans(
        manifest=manifest,
        layout=layout,
        sharing=use.sharing,
        models=models,
        first=first,
        optimizer=optimizer,
        update=None if is_whole else update,
        heap=max(each.heap for each in work) if use.sharing == "none" else None,
        process=process,
        parameters=parameters,
        fed=[
            *(process, _threads(threads, len(sessions), woken)),
            *(item for session in sessions for item in session.items),
            *parameters,
            *(
                Item(
                    spec.name,
                    allocated_size(math.prod(shapes[spec.name]) * spec.dtype.itemsize),
                    "inputs",
                )
                for spec in manifest.input_specs()
            ),
            Item("copy of the running statistics", statistics, "parameters"),
            Item("values of a run", max(0, values), "session"),
            Item("native kernels at work", scratch, "session"),
        ],
        gradients=[
            Item(f"{planning.GRADIENT}{name}", nbytes, "gradients")
            for name, role, nbytes in flat
            if role == "trainable" and not is_whole
        ],
        moments=[
            Item(
                f"moment {index + 1} of all parameters",
                state_layout(layout, contract, index).nbytes,
                "optimizer_state",
            )
            for index in range(len(contract.state))
        ],
        threads=threads,
        once=steps == 1,
    )


def step_graphs(
    package: Package, shapes: Mapping[str, Sequence[int]], threads: int = 1
) -> list[RuntimeGraph]:
    """The graphs that a batch runs through in training, as often as it does, with no step model."""

    def opened(name: str, path: Path, sizes: Mapping[str, Sequence[int]]) -> planning.Session:
        return planning.Session(name, load_runtime_graph(path, sizes, threads=threads), 0)

    segments = package.manifest.segments
    if segments is None:
        return [opened("training", package.training_model, shapes).graph]
    models = planning.plan_segments(package, segments, [shapes], [shapes], threads, opened)
    return [run.session.graph for run in models.afresh.runs]


def _one_model(
    manifest: Manifest,
    training: Sequence[planning.Session],
    evaluation: Sequence[planning.Session],
    threads: int,
) -> planning.Models:
    """The passes of a package with one training model."""
    additional = {output.name for output in manifest.outputs if output.role != "loss"}
    # Outputs that only order the nodes of a step model are neither fetched nor bound.
    fresh = additional | {n for n in training[0].graph.outputs if n.startswith(ORDER_PREFIX)}
    returned = additional | {output.name for output in manifest.evaluation_outputs}
    names = {p.name for p in manifest.parameters}

    def trained(session: planning.Session, reset: bool) -> planning.Pass:
        labels = Labels(session.graph, names, shown=manifest.module_names(), later="grad/")
        plan = session.plan(threads, fresh, {RESET_NAME: reset})
        return planning.Pass((planning.Run(session, plan, labels),))

    # A step starts its gradients afresh; only the further batches of a step add to them.
    last = manifest.accumulation_steps == 1
    afresh = trained(training[0], True)
    return planning.Models(
        training=(training[0],),
        evaluation=(evaluation[0],),
        afresh=afresh,
        adding=afresh if last else trained(training[0], False),
        left=tuple(trained(session, last) for session in training[1:]),
        held_out=tuple(
            planning.Pass((planning.Run(session, session.plan(threads, returned, {})),))
            for session in evaluation
        ),
    )


def _threads(threads: int, opened: int, woken: int = 0) -> Item:
    """What the threads of open sessions take, of which some did work."""
    each = opened * session_memory.BYTES_PER_THREAD
    each += woken * session_memory.BYTES_PER_RUNNING_THREAD
    return Item("threads", (threads - 1) * each, "session")


def _loading(sessions: Sequence[planning.Session]) -> Item:
    """The most that one of several sessions takes while it is loaded."""
    return max((session.loading for session in sessions), key=lambda item: item.nbytes)


MEMORY_CHECKS: Final = frozenset(
    {"memory_limit", "peak_memory", "memory_headroom", "low_memory_warning", "steps_done"}
)
"""Checks that say that a training takes too much memory."""

_MOST_SIZES: Final = 6
_LARGE_SHARE: Final = 0.5
"""Of the trained elements: a parameter above it may be worth freezing by itself."""


_Freeze = tuple[str, frozenset[str]]
"""Names of parameters to freeze, and what they are, in words."""


def plan_changes(
    package: Package,
    shapes: Mapping[str, Sequence[int]],
    use: SessionUse,
    threads: int | None = None,
    evaluated: int | None = None,
    samples: Collection[int] = (),
    steps: int | None = None,
) -> list[PlannedChange]:
    """The peak of a package with each change that is open to it, and with several at once."""
    # What is frozen already is not among them, nor is a micro-batch where the models fix their
    # batch, nor SGD where the optimizer keeps nothing.
    # `use`: Packages with fewer gradients or another optimizer are planned without the step model
    # all the same.
    # Returns: Single changes first, those of a kind from the least to the most; then combinations.
    # The last one is the most that can be done.
    with scratch_folder("changes") as folder:
        data: dict[str, Any] = {"evaluated": evaluated, "samples": samples, "steps": steps}
        variants = _Variants(package, shapes, Path(folder), use, threads, data)
        sizes = list(_micro_batches(package.manifest, shapes))
        # Whether the optimizer keeps something for each parameter.
        stateless = bool(planning.optimizer_contract(package).state)
        freezes = list(variants.freezes())
        size, freeze = sizes[-1] if sizes else None, freezes[-1] if freezes else None
        wanted: list[tuple[int | None, _Freeze | None, bool]] = [
            *((each, None, False) for each in sizes),
            *((None, each, False) for each in freezes),
            (None, None, stateless),
            # Two of the three to the full, then all of them.
            (size, freeze, False),
            (size, None, stateless),
            (None, freeze, stateless),
            (size, freeze, stateless),
        ]
        found = (variants.planned(*each) for each in dict.fromkeys(wanted) if any(each))
        return [each for each in found if each is not None]


@dataclasses.dataclass
class _Variants:
    """The package with changes, planned; models that several of them share are read once."""

    package: Package
    shapes: Mapping[str, Sequence[int]]
    folder: Path
    use: SessionUse
    threads: int | None
    data: dict[str, Any]  # What plan_memory knows of them
    graphs: dict[object, RuntimeGraph] = dataclasses.field(default_factory=dict)
    without: dict[frozenset[str], Path] = dataclasses.field(default_factory=dict)

    @cached_property
    def training(self) -> onnx.ModelProto:
        """The training model."""
        return read_model(self.package.training_model)

    def freezes(self) -> Iterator[_Freeze]:
        """What could be frozen besides what is: the first layers, up to all but the last."""
        if self.package.manifest.segments is not None:
            return  # each has its own gradients
        graph = self.training.graph
        if any(tensor.data_location == onnx.TensorProto.EXTERNAL for tensor in graph.initializer):
            return  # what is written elsewhere would not find its data
        layers = trained_layers(graph, self.package.manifest)
        count = len(layers)
        if count < 2:
            return
        largest = max((p for layer in layers for p in layer), key=lambda p: _elements((p,)))
        prefixes = sorted({1, count // 3, 2 * count // 3, count - 1} - {0})
        large = _elements((largest,)) >= _LARGE_SHARE * sum(map(_elements, layers))
        if large and largest not in layers[0]:
            yield f"'{largest.name}'", frozenset({largest.name})
        for length in prefixes:
            names = frozenset(p.name for layer in layers[:length] for p in layer)
            last = layers[length - 1][0].name
            title = f"the first {length} of {count} trained layers (up to '{last}')"
            yield (title if length > 1 else f"the first trained layer ('{last}')"), names

    def planned(
        self, size: int | None, freeze: _Freeze | None, stateless: bool
    ) -> PlannedChange | None:
        """The peak with these changes; None where the plan knows no bound."""
        package, shapes = self.package, dict(self.shapes)
        manifest = package.manifest
        if size is not None:
            batch = _batch(manifest, shapes)
            shapes = {name: (size, *shape[1:]) for name, shape in shapes.items()}
            steps = manifest.accumulation_steps * batch // size
            manifest = dataclasses.replace(manifest, accumulation_steps=steps)
        if freeze is not None:
            frozen = freeze[1]
            parameters = tuple(
                dataclasses.replace(p, role="frozen", offset=None) if p.name in frozen else p
                for p in manifest.parameters
            )
            manifest = dataclasses.replace(manifest, parameters=parameters, groups=())
            if frozen not in self.without:
                model = onnx.ModelProto()
                model.CopyFrom(self.training)
                drop_gradients(model.graph, frozen)
                path = self.folder / f"{len(self.without)}.onnx"
                onnx.save(model, str(path))
                self.without[frozen] = path
            package = dataclasses.replace(package, training_model=self.without[frozen])
        if stateless:
            package = dataclasses.replace(package, optimizer_model=self._plain_sgd(manifest))
        use = self.use
        if freeze is not None or stateless or manifest.accumulation_steps != 1:
            use = use._replace(step_model=False, switches=False)
        plan = plan_memory(
            dataclasses.replace(package, manifest=manifest),
            shapes,
            use,
            threads=self.threads,
            load=self._load,
            **self.data,
        )
        if plan.unbounded:
            return None
        return PlannedChange(
            micro_batch=size,
            freeze=None if freeze is None else freeze[0][:1000],
            stateless_optimizer=stateless,
            peak_bytes=plan.peak.nbytes,
        )

    def _load(
        self, model: Path, shapes: Mapping[str, Sequence[int]], **settings: Any
    ) -> RuntimeGraph:
        key = model, tuple((name, tuple(shape)) for name, shape in sorted(shapes.items()))
        if key not in self.graphs:
            self.graphs[key] = load_runtime_graph(model, shapes, **settings)
        return self.graphs[key]

    def _plain_sgd(self, manifest: Manifest) -> Path:
        """A model of ``p - rate * g`` over flat vectors."""
        trained = [p.dtype for p in manifest.parameters if p.role == "trainable"]
        dtype = "double" if trained[:1] == ["float64"] else "float"
        path = self.folder / f"sgd-{dtype}.onnx"
        if path.exists():
            return path
        rate = "learning_rate" if dtype == "float" else "rate"
        cast = "" if dtype == "float" else "rate = Cast <to = 11> (learning_rate)"
        model = onnx.parser.parse_model(
            f"""<ir_version: {manifest.ir_version}, opset_import: ["": {manifest.opsets[""]}]>
            optimizer (float[1] learning_rate, int64[1] step, {dtype}[n] params,
                       {dtype}[n] gradients) => ({dtype}[n] "params.out") {{
                {cast}
                change = Mul (gradients, {rate})
                "params.out" = Sub (params, change)
            }}"""
        )
        helper.set_model_props(model, {"odtpack.optimizer": "sgd", "odtpack.state": "[]"})
        onnx.save(model, str(path))
        return path


def _elements(layer: Layer) -> int:
    return sum(math.prod(p.shape) for p in layer)


def _batch(manifest: Manifest, shapes: Mapping[str, Sequence[int]]) -> int:
    """Samples in one batch."""
    return next((shapes[item.name][0] for item in manifest.inputs if shapes[item.name]), 1)


def _micro_batches(manifest: Manifest, shapes: Mapping[str, Sequence[int]]) -> Iterator[int]:
    """Smaller batches that make up the same one, each about half of the one before, down to 1."""
    if any(isinstance(item.shape[0], int) for item in manifest.inputs if item.shape):
        return  # the models fix it
    batch = _batch(manifest, shapes)
    divisors = [size for size in range(1, batch) if batch % size == 0]
    left = batch
    for number in range(_MOST_SIZES):
        smaller = [size for size in divisors if size <= left // 2]
        if not smaller:
            return
        left = smaller[-1] if number < _MOST_SIZES - 1 else 1
        yield left
