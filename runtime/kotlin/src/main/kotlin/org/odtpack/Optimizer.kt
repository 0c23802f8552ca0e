package org.odtpack

import ai.onnxruntime.*
import ai.onnxruntime.OrtSession.RunOptions
import kotlin.math.sqrt

internal const val UPDATED = ".update.out"
internal const val HALF_A_STEP = "load the last checkpoint: parameters may hold part of the step"

/** An optimizer model and what it carries; continues the state's optimizer if there is one. */
internal class Optimizer(
    private val env: OrtEnvironment,
    private val session: OrtSession,
    manifest: Manifest,
    private val state: State,
    private val trainable: List<Spec>,
) : AutoCloseable {
    /** Of the length of all parameters, unless the model runs on each parameter by itself. */
    private class Vector(val name: String, val axes: Set<Long>, memory: () -> Tensor?) {
        val whole by lazy(memory)
    }

    private class Group(val names: List<String>, val scale: Double, val rate: Tensor, val decay: Tensor)

    private val layout = manifest["layout"]
    private val inputs = layout["inputs"].texts()
    private val mode = layout["run"].text("chunks")
    private val flat = state.flat!!
    private val kept = layout["state"].list(emptyList()).map { entry ->
        Vector(entry["name"].text(), entry["axes"].given?.wholes()?.toSet() ?: BOTH) {
            if (mode == "parameters") null else zeros(flat.type, flat.shape)
        }
    }
    private val vectors = listOf(Vector("params", BOTH) { flat }, Vector("gradients", BOTH) { state.gradients }) + kept

    /** The learning rate of each group, with its scale. */
    private val rates: Tensor
    private val groups: List<Group>
    private val step = scalar(Type.INT64)
    private val norm = scalar(flat.type)
    private val runs = ArrayList<Pair<Map<String, OnnxTensor>, Map<String, OnnxTensor>>>()

    /** What it carries, which is the state's until another session is made on that. */
    val own: OptimizerState

    init {
        val taken = session.inputNames
        (taken - inputs + (inputs - taken)).firstOrNull()?.let(::odd)
        if (trainable.isEmpty()) fail("nothing-trainable", "The checkpoint has nothing to train.")
        val listed = manifest["groups"].list(emptyList()).map {
            Triple(it["parameters"].texts(), it["learning_rate_scale"].number(), it["weight_decay"].number())
        }.ifEmpty { listOf(Triple(trainable.map { it.name }, 1.0, 0.0)) }
        rates = zeros(Type.FLOAT, longArrayOf(listed.size.toLong()))
        groups = listed.mapIndexed { i, (names, scale, decay) ->
            Group(names, scale, rates.from(i.toLong(), longArrayOf(1)), scalar(flat.type, decay))
        }
        own = placeState(manifest["optimizer"]["kind"].text())
        state.optimizer = own
        setRate(own.rate)
    }

    /** Bind the model to the vectors, gradients among them, unless that was done. */
    fun prepare() {
        if (runs.isNotEmpty()) return
        if (mode == "parameters") trainable.forEach(::addParameterRun) else addFlatRuns()
    }

    /** Refuse a step or a save where another session has the moments and the step count. */
    fun requireOwn() {
        if (state.optimizer != null && state.optimizer !== own) {
            fail("optimizer-mismatch", "A later session has the state's moments and step count.",
                "make the steps with that one, or with a new one if it is closed")
        }
    }

    fun step(options: RunOptions?) {
        prepare()
        prepareStep()
        if ("gradient_norm" in inputs) norm[0] = gradientNorm()
        for ((inputs, outputs) in runs) session.runOn(inputs, emptySet(), outputs, options, HALF_A_STEP).close()
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
        moments.mapIndexed { i, each -> "$name.${kept[i].name}" to each }
    }.toMap()

    /** Refuse a rate that is not one, also in a group and as float32. */
    fun checkRate(rate: Double) {
        val good = rate >= 0 && (groups.map { it.scale } + 1.0).all { (rate * it).toFloat().isFinite() }
        if (good) return
        fail("bad-learning-rate", "The learning rate is $rate.", "pass a finite number of at least 0, such as 0.001")
    }

    fun setRate(rate: Float) {
        checkRate(rate.toDouble())
        own.rate = rate
        for (group in groups) group.rate[0] = rate.toDouble() * group.scale
    }

    override fun close() = runs.flatMap { it.first.values }.toSet().forEach(OnnxTensor::close)

    /** Give every moment its place, and take over those of the loaded state. */
    private fun placeState(kind: String): OptimizerState {
        val loaded = state.optimizer ?: OptimizerState(0, 0.001f, emptyMap(), emptyList())
        val old = loaded.moments
        val placed = trainable.associate { spec ->
            spec.name to kept.map { vector ->
                val cut = matrixOf(spec.shape).first
                val shape = LongArray(spec.shape.size) { axis ->
                    if ((if (axis < cut) 0L else 1L) in vector.axes) spec.shape[axis] else 1
                }
                vector.whole?.from(spec.offset, shape) ?: zeros(flat.type, shape)
            }
        }
        val count = old.values.firstOrNull()?.size ?: 0
        val same = count == kept.size && (loaded.kind.isEmpty() || loaded.kind == kind) &&
            placed.all { (name, moments) ->
                moments.indices.all { moments[it].shape.contentEquals(old[name]?.get(it)?.shape) }
            }
        val idle = old.values.flatten().all { moment ->
            (0 until moment.data.capacity()).all { moment.data.get(it) == 0.toByte() }
        }
        // The reference saves one moment per parameter with SGD, and never uses it.
        if (!same && !(idle && (loaded.step == 0L || count == 1 && kept.isEmpty()))) {
            fail("optimizer-mismatch", "The checkpoint holds the state of another optimizer.",
                "use the optimizer it was saved with, or a checkpoint without optimizer state")
        }
        for ((name, moments) in if (same) placed else emptyMap()) {
            moments.forEachIndexed { i, each -> each.copyFrom(old.getValue(name)[i].bytes()) }
        }
        val moments = if (kept.isEmpty()) emptyMap() else placed
        return OptimizerState(loaded.step, loaded.rate, moments, groups.map { it.names }, kind)
    }

    private fun groupOf(spec: Spec) = groups.first { spec.name in it.names }

    /** Ranges of parameters of one group, in one piece or cut into chunks. */
    private fun addFlatRuns() {
        val chunk = layout["chunk_elements"].whole(131072).coerceAtLeast(1)
        val owners = trainable.map(::groupOf)
        val starts = trainable.indices.filter { it == 0 || owners[it] !== owners[it - 1] }
        for ((i, first) in starts.withIndex()) {
            val stop = starts.getOrNull(i + 1)?.let { trainable[it].offset } ?: flat.shape[0]
            var at = trainable[first].offset
            while (at < stop) {
                val size = if (mode == "whole") stop - at else minOf(chunk, stop - at)
                addRun(vectors.associate { it.name to it.whole!!.from(at, longArrayOf(size)) }, owners[first])
                at += size
            }
        }
    }

    private fun addParameterRun(spec: Spec) {
        val (rows, columns) = matrixOf(spec.shape).second
        if (rows * columns == 0L) return
        val parts = listOf(flat, state.gradients).map { it.from(spec.offset, spec.shape) }
        val slices = vectors.zip(parts + own.moments[spec.name].orEmpty()) { vector, part ->
            val shape = longArrayOf(if (0L in vector.axes) rows else 1, if (1L in vector.axes) columns else 1)
            vector.name to part.reshaped(shape)
        }.toMap()
        val factored = scalar(Type.BOOL, if (spec.shape.size > 1) 1.0 else 0.0)
        addRun(slices + ("factored" to factored), groupOf(spec))
    }

    private fun addRun(slices: Map<String, Tensor>, group: Group) {
        val all = slices + mapOf("learning_rate" to group.rate, "weight_decay" to group.decay,
            "gradient_norm" to norm, "step" to step)
        val bound = inputs.associateWith { name -> (all[name] ?: odd(name)).onnx(env) }
        val outputs = vectors.map { it.name }.filter { it != "gradients" }
            .associate { "$it.out" to (bound[it] ?: odd(it)) }
        runs.add(bound to outputs)
    }

    private fun odd(name: String): Nothing = mismatch("the models and the manifest do not agree on '$name'")

    /** The L2 norm of all gradients, squared and summed in float64. */
    private fun gradientNorm(): Double = state.gradients.let { all ->
        sqrt((0 until all.count.toInt()).sumOf { at -> all.real(at).let { it * it } })
    }

    private companion object {
        val BOTH = setOf(0L, 1L)
    }
}

/**
 * The first axis of a parameter's columns, and its rows and columns: of all cuts between two axes
 * the first with the fewest of them together.
 */
private fun matrixOf(shape: LongArray): Pair<Int, Pair<Long, Long>> {
    val cuts = (1 until shape.size).map { cut ->
        Pair(cut, Pair(shape.copyOfRange(0, cut).count, shape.copyOfRange(cut, shape.size).count))
    }
    return cuts.minByOrNull { (_, sides) -> sides.first + sides.second } ?: Pair(0, Pair(1L, shape.count))
}
