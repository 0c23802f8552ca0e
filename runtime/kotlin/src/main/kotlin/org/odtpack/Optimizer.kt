package org.odtpack

import ai.onnxruntime.OnnxTensor
import ai.onnxruntime.OrtEnvironment
import ai.onnxruntime.OrtSession
import ai.onnxruntime.OrtSession.RunOptions
import kotlin.math.sqrt

/** An optimizer model and what it carries; continues the state's optimizer if there is one. */
internal class Optimizer(
    private val env: OrtEnvironment,
    private val session: OrtSession,
    manifest: Json,
    private val state: State,
    private val trainable: List<Spec>,
) : AutoCloseable {
    private class Vector(val name: String, val axes: Set<Long>, memory: () -> Tensor?) {
        val whole by lazy(memory)
        val parts = ArrayList<Tensor>() // one tensor for each parameter
    }

    private class Group(
        val names: List<String>,
        val scale: Double,
        val rate: Tensor,
        val decay: Tensor,
    )

    private val layout = manifest["layout"]
    private val inputs = layout["inputs"].list().map { it.text() }
    private val mode = layout["run"].text("chunks")
    private val flat = state.flat!!
    private val vectors = arrayListOf(
        Vector("params", setOf(0, 1)) { flat },
        Vector("gradients", setOf(0, 1)) { state.gradients },
    )
    private val listed = manifest["groups"].list(emptyList())

    /** The learning rate of each group, with its scale. */
    private val rates = zeros(Type.FLOAT, longArrayOf(maxOf(listed.size, 1).toLong()))
    private val groups = ArrayList<Group>()
    private val step = zeros(Type.INT64, longArrayOf(1))
    private val norm = zeros(flat.type, longArrayOf(1))
    private val runs = ArrayList<Pair<Map<String, OnnxTensor>, Map<String, OnnxTensor>>>()

    /** What it carries, which is the state's until another session is made on that. */
    val own: OptimizerState

    init {
        val taken = session.inputNames
        (taken - inputs + (inputs - taken)).firstOrNull()?.let { odd(it) }
        if (trainable.isEmpty()) fail("nothing-trainable", "The checkpoint has nothing to train.")
        for (entry in layout["state"].list(emptyList())) {
            val axes = entry["axes"].let { list ->
                if (list.absent) setOf(0L, 1L) else list.list().map { it.whole() }.toSet()
            }
            vectors.add(
                Vector(entry["name"].text(), axes) {
                    if (mode == "parameters") null else zeros(flat.type, flat.shape)
                },
            )
        }
        for (group in listed) {
            val names = group["parameters"].list().map { it.text() }
            addGroup(names, group["learning_rate_scale"].number(), group["weight_decay"].number())
        }
        if (groups.isEmpty()) addGroup(trainable.map { it.name }, 1.0, 0.0)
        own = placeState(manifest["optimizer"]["kind"].text())
        state.optimizer = own
        setRate(own.rate)
    }

    /** Bind the model to the vectors, gradients among them, unless that was done. */
    fun prepare() {
        if (runs.isNotEmpty()) return
        if (mode == "parameters") trainable.forEachIndexed(::addParameterRun) else addFlatRuns()
    }

    /** Refuse a step or a save where another session has the moments and the step count. */
    fun requireOwn() {
        if (state.optimizer != null && state.optimizer !== own) {
            fail(
                "optimizer-mismatch", "A later session has the state's moments and step count.", "",
                "make the steps with that one",
            )
        }
    }

    fun step(options: RunOptions?) {
        prepare()
        prepareStep()
        if ("gradient_norm" in inputs) norm.setReal(0, gradientNorm())
        for ((inputs, outputs) in runs) {
            session.runOn(
                inputs, emptySet(), outputs, options,
                "load the last checkpoint: parameters may hold part of the step",
            ).close()
        }
        advance()
    }

    /** Set the number of the step to be made. */
    fun prepareStep() = step.data.putLong(0, own.step + 1)

    /** Count a step. */
    fun advance() = ++own.step

    /** What a step model reads besides batch, parameters and vectors, as it calls them. */
    fun scalars() = mapOf("update.learning_rate" to rates, "update.step" to step)

    /** What is kept of each parameter, by the names "PARAMETER.VECTOR". */
    fun kept(): Map<String, Tensor> = own.moments.flatMap { (name, moments) ->
        moments.mapIndexed { i, each -> "$name.${vectors[i + 2].name}" to each }
    }.toMap()

    /** Refuse a rate that is not one, also in a group and as float32. */
    fun checkRate(rate: Double) {
        val good = rate >= 0 && (groups.map { it.scale } + 1.0).all { (rate * it).toFloat().isFinite() }
        if (!good) {
            fail(
                "bad-learning-rate", "The learning rate is $rate.", "",
                "pass a finite number of at least 0, such as 0.001",
            )
        }
    }

    fun setRate(rate: Float) {
        checkRate(rate.toDouble())
        own.rate = rate
        for (group in groups) group.rate.setReal(0, rate.toDouble() * group.scale)
    }

    override fun close() {
        runs.flatMap { it.first.values }.toSet().forEach(OnnxTensor::close)
    }

    private fun addGroup(names: List<String>, scale: Double, decay: Double) {
        val one = longArrayOf(1)
        val weight = zeros(flat.type, one).apply { setReal(0, decay) }
        groups.add(Group(names, scale, rates.from(groups.size.toLong(), one), weight))
    }

    /** Give every moment its place, and take over those of the loaded state. */
    private fun placeState(kind: String): OptimizerState {
        val loaded = state.optimizer ?: OptimizerState(0, 0.001f, emptyMap(), emptyList())
        val old = loaded.moments
        val kept = vectors.drop(2)
        val count = old.values.firstOrNull()?.size ?: 0
        val placed = trainable.associate { spec ->
            spec.name to kept.map { vector ->
                val cut = matrixOf(spec.shape).first
                val shape = LongArray(spec.shape.size) { axis ->
                    if ((if (axis < cut) 0L else 1L) in vector.axes) spec.shape[axis] else 1
                }
                val part = vector.whole?.from(spec.offset, shape) ?: zeros(flat.type, shape)
                part.also(vector.parts::add)
            }
        }
        val same = count == kept.size && (loaded.kind.isEmpty() || loaded.kind == kind) &&
            placed.all { (name, moments) ->
                moments.indices.all { moments[it].shape.contentEquals(old[name]?.get(it)?.shape) }
            }
        val idle = old.values.flatten().all { moment ->
            (0 until moment.data.capacity()).all { moment.data.get(it) == 0.toByte() }
        }
        // The reference saves one moment per parameter with SGD, and never uses it.
        if (!same && !(idle && (loaded.step == 0L || count == 1 && kept.isEmpty()))) {
            fail(
                "optimizer-mismatch", "The checkpoint holds the state of another optimizer.", "",
                "use the optimizer it was saved with, or a checkpoint without optimizer state",
            )
        }
        if (same) {
            for ((name, moments) in placed) {
                moments.forEachIndexed { i, each -> each.copyFrom(old.getValue(name)[i].bytes()) }
            }
        }
        return OptimizerState(
            loaded.step, loaded.rate, if (kept.isEmpty()) emptyMap() else placed,
            groups.map { it.names }, kind,
        )
    }

    private fun groupOf(spec: Spec) = groups.first { spec.name in it.names }

    /** Ranges of parameters of one group, in one piece or cut into chunks. */
    private fun addFlatRuns() {
        val chunk = layout["chunk_elements"].whole(131072).coerceAtLeast(1)
        val owners = trainable.map(::groupOf)
        var next = 0
        while (next < trainable.size) {
            val first = next++
            while (next < trainable.size && owners[next] === owners[first]) next++
            val stop = trainable.getOrNull(next)?.offset ?: flat.shape[0]
            var at = trainable[first].offset
            while (at < stop) {
                val size = if (mode == "whole") stop - at else minOf(chunk, stop - at)
                val slices = vectors.associate { it.name to it.whole!!.from(at, longArrayOf(size)) }
                addRun(slices, owners[first])
                at += size
            }
        }
    }

    private fun addParameterRun(index: Int, spec: Spec) {
        val (rows, columns) = matrixOf(spec.shape).second
        if (rows * columns == 0L) return
        val slices = vectors.associate { vector ->
            val shape = longArrayOf(
                if (0L in vector.axes) rows else 1, if (1L in vector.axes) columns else 1,
            )
            val part = vector.whole?.from(spec.offset, spec.shape) ?: vector.parts[index]
            vector.name to part.reshaped(shape)
        }
        val factored = zeros(Type.BOOL, longArrayOf(1))
        factored.data.put(0, if (spec.shape.size > 1) 1 else 0)
        addRun(slices + ("factored" to factored), groupOf(spec))
    }

    private fun addRun(slices: Map<String, Tensor>, group: Group) {
        val all = slices + mapOf(
            "learning_rate" to group.rate, "weight_decay" to group.decay, "gradient_norm" to norm,
            "step" to step,
        )
        val bound = inputs.associateWith { name ->
            (all[name] ?: odd(name)).onnx(env)
        }
        val outputs = vectors.filter { it.name != "gradients" }.associate { vector ->
            "${vector.name}.out" to (bound[vector.name] ?: odd(vector.name))
        }
        runs.add(bound to outputs)
    }

    private fun odd(name: String): Nothing =
        mismatch("the models and the manifest do not agree on '$name'")

    /** The L2 norm of all gradients, squared and summed in float64. */
    private fun gradientNorm(): Double = state.gradients.let { all ->
        sqrt((0 until all.count.toInt()).sumOf { at -> all.real(at).let { it * it } })
    }
}

/**
 * The first axis of a parameter's columns, and its rows and columns: of all cuts between two axes
 * the first with the fewest of them together.
 */
private fun matrixOf(shape: LongArray): Pair<Int, Pair<Long, Long>> {
    val product = { sizes: List<Long> -> sizes.fold(1L, Long::times) }
    val cuts = (1 until shape.size).map {
        Pair(it, Pair(product(shape.take(it)), product(shape.drop(it))))
    }
    return cuts.minByOrNull { (_, sides) -> sides.first + sides.second }
        ?: Pair(0, Pair(1L, product(shape.toList())))
}
