package org.odtpack

import ai.onnxruntime.*
import ai.onnxruntime.OrtSession.*
import java.io.File

internal fun mismatch(reason: String): Nothing = fail("model-mismatch",
    "The package does not go with the checkpoint: $reason.", "use the models and the checkpoint of one package")

internal fun openSession(env: OrtEnvironment, path: String, options: SessionOptions): OrtSession {
    if (!File(path).isFile) fail("model-not-found", "There is no model $path.")
    try {
        return env.createSession(path, options)
    } catch (error: OrtException) {
        fail("model-not-loadable", "ONNX Runtime ${env.version} cannot load it: ${error.message}",
            "build the package for this ONNX Runtime", path)
    }
}

/** Run a model, whose error is one of ours. */
internal fun OrtSession.runOn(
    inputs: Map<String, OnnxTensorLike>,
    requested: Set<String>,
    pinned: Map<String, OnnxValue>,
    options: RunOptions?,
    hint: String,
): Result = try {
    run(inputs, requested, pinned, options)
} catch (error: OrtException) {
    val reason = error.message.orEmpty().lineSequence().first().removeSuffix(".")
    fail("run-failed", "ONNX Runtime failed in the middle of a step: $reason.", hint)
}

internal val OnnxTensorLike.shape: LongArray get() = (info as TensorInfo).shape

/** Memory that models read and write under a name, and the same as ONNX Runtime sees it. */
internal class Memory(val tensor: Tensor, env: OrtEnvironment) {
    val value = tensor.onnx(env)
}

internal const val COTANGENT = ".cotangent"
private const val GRADIENT = "_grad.accumulation.out"
private val ENDS = listOf(COTANGENT, "_grad.accumulation.buffer", GRADIENT)

/** An input or output of a model: its name there, in the network, and what it is. */
internal class End(val own: String, val name: String, val info: TensorInfo) {
    val isCotangent get() = name.endsWith(COTANGENT)

    /** Of what is made between segments, for which there must be memory. */
    fun madeType() = Type.of(info.onnxType) ?: wrongSegments("'$name' is ${info.onnxType.label}")

    /** What the gradient goes with. */
    val stem get() = name.removeSuffix(COTANGENT)
}

/**
 * A model of a network. In one of segments it may call values by other names, [names]; the one that
 * [returns] makes the outputs of the manifest.
 */
internal class Part(
    val session: OrtSession,
    private val names: Map<String, String>? = null,
    val returns: Boolean = true,
) {
    val inputs = ends(session.inputInfo)
    val outputs = ends(session.outputInfo)

    private fun ends(all: Map<String, NodeInfo>) = all.map { (own, node) ->
        val end = ENDS.find(own::endsWith).orEmpty() // what belongs to a value goes with it
        val stem = own.removeSuffix(end)
        val wrong = if (names == null) ::mismatch else ::wrongSegments
        End(own, (names?.get(stem) ?: stem) + end, node.info as? TensorInfo ?: wrong("'$own' is not a tensor"))
    }
}

/**
 * A training, step or evaluation model with the inputs and outputs of the manifest: one part, or those
 * of [segments], which run one after the other. Parameters and what is kept of them stand in [bound]
 * memory; [hint] says what to do after a run that failed. The sessions are their maker's to close.
 */
internal class Graph(
    env: OrtEnvironment,
    parts: List<Part>,
    private val specs: List<Spec>,
    private val outputs: List<Spec>,
    private val bound: Map<String, Memory>,
    private val segments: Segments? = null,
    private val hint: String = "nothing was changed by it",
) : AutoCloseable {
    private val returned = outputs.associateBy { it.name }

    /** Memory of a scalar loss, which each step overwrites. */
    private val loss = if (outputs[0].shape.isEmpty()) zeros(outputs[0].type, longArrayOf()).onnx(env) else null
    private val given = HashMap<String, OnnxTensorLike>() // what the user gave, and parts made of it
    private var turn = false
    private val runs: List<Run>

    init {
        val known = specs.map { it.name }.toHashSet()
        runs = parts.map { Run(it, known) }
    }

    /**
     * Run on the user's inputs, which were checked; [wanted] are the outputs to return, null for
     * all of them, and [extra] has memory of the caller's for some.
     */
    fun run(
        feeds: Map<String, OnnxTensorLike>,
        wanted: Set<String>? = null,
        extra: Map<String, OnnxValue> = emptyMap(),
        options: RunOptions?,
    ): Result {
        given.putAll(feeds)
        var result: Result? = null
        try {
            for (run in runs) {
                if (run.part.returns) result = run.start(wanted ?: returned.keys, extra, options)
                else run.start(emptySet(), emptyMap(), options).close()
            }
        } catch (error: Throwable) {
            result?.close()
            throw error
        } finally {
            given.clear()
        }
        return result!!
    }

    override fun close() {
        loss?.close()
    }

    /** One run of a model: what never changes is bound once. */
    private inner class Run(val part: Part, known: MutableSet<String>) {
        private val inputs = LinkedHashMap<String, OnnxTensorLike>()
        private val pinned = LinkedHashMap<String, OnnxValue>()
        private val taken = ArrayList<End>()
        private val made = ArrayList<End>()

        init {
            for (end in part.inputs) {
                val weight = segments?.weight(end)
                if (weight != null) inputs[end.own] = weight
                else if (end.name in known) taken.add(end)
                else inputs[end.own] = memory(end)
            }
            val missing = returned.keys.toHashSet()
            // The first of all results, whatever else is pinned.
            if (part.returns && loss != null) pinned[outputs[0].name] = loss
            for (end in part.outputs) {
                val spec = returned[end.name].takeIf { part.returns }
                when {
                    spec != null -> {
                        missing.remove(end.name)
                        checkType(end, spec)
                    }
                    segments != null && !end.name.endsWith(GRADIENT) -> {
                        val isNew = !segments.hasWeight(end.name) && known.add(end.name)
                        if (!isNew) wrongSegments("'${end.name}' is made twice")
                        end.madeType()
                        made.add(end)
                    }
                    end.name.startsWith("update.order.") -> {} // it only orders nodes
                    else -> pinned[end.own] = memory(end)
                }
            }
            if (segments == null) {
                for (end in taken) checkType(end, specs.first { it.name == end.name })
                if (taken.size < specs.size) mismatch("a model lacks an input of the manifest")
            }
            if (part.returns && missing.isNotEmpty()) mismatch("a model lacks an output of the manifest")
        }

        fun start(wanted: Set<String>, extra: Map<String, OnnxValue>, options: RunOptions?): Result {
            val sizes = HashMap<String, Long>()
            for (end in taken) {
                val value = given.getValue(end.name)
                inputs[end.own] = value
                if (made.isEmpty()) continue
                value.shape.zip(end.info.dimensionNames).forEach { (size, symbol) -> sizes[symbol] = size }
            }
            sizes.remove("") // has no name
            val unknown = made.filter { end ->
                val shape = shapeOf(end, sizes)
                if (shape != null) pinned[end.own] = place(end, shape).value
                shape == null
            }
            val own = if (extra.isEmpty()) pinned else LinkedHashMap(pinned).apply { putAll(extra) }
            val asked = unknown.mapTo(LinkedHashSet(wanted)) { it.own } - own.keys
            try {
                val result = part.session.runOn(inputs, asked, own, options, hint)
                undoing(result::close) {
                    for (end in unknown) { // ONNX Runtime found memory for it
                        val found = result.get(end.own).get() as OnnxTensor
                        place(end, found.shape).tensor.copyFrom(found.byteBuffer)
                    }
                }
                return result
            } finally {
                for (end in taken) inputs.remove(end.own)
            }
        }
    }

    private fun checkType(end: End, spec: Spec) {
        if (end.info.onnxType != spec.type.onnx) mismatch("the type of '${spec.name}'")
    }

    /** A parameter, its gradient, or what else is bound under that name. */
    private fun memory(end: End): OnnxTensor {
        val found = bound[end.name] ?: if (segments != null) wrongSegments("nothing gives '${end.name}' to a segment")
            else mismatch("'${end.name}' belongs to no parameter")
        val own = found.tensor
        if (end.info.onnxType != own.type.onnx || !end.info.shape.allows(own.shape)) {
            mismatch("'${end.name}' is ${own.description} in the checkpoint")
        }
        return found.value
    }

    /** The shape of what a run makes, as far as it follows from those of its inputs. */
    private fun shapeOf(end: End, sizes: Map<String, Long>): LongArray? {
        if (end.isCotangent) given[end.stem]?.let { return it.shape }
        val symbols = end.info.dimensionNames
        val shape = end.info.shape
        for (axis in shape.indices) {
            if (shape[axis] < 0) shape[axis] = sizes[symbols[axis]] ?: return null
        }
        return shape.takeIf { it.isNotEmpty() }
    }

    /** Give a value between segments its memory. */
    private fun place(end: End, shape: LongArray): Memory {
        // The next run reads a cotangent, and makes the next one: two take turns.
        if (end.isCotangent) turn = !turn
        val key = if (end.isCotangent) "$COTANGENT $turn" else end.name
        return segments!!.room(key, end.madeType(), shape).also { given[end.name] = it.value }
    }
}

/** Check what a caller asks for, and its memory: outputs of parameters have memory of their own. */
internal fun checkOutputs(outputs: List<Spec>, wanted: Set<String>, pinned: Map<String, OnnxValue>) {
    (wanted + pinned.keys).find { name -> outputs.none { it.name == name } }?.let {
        fail("unknown-output", "The model has no output '$it'.")
    }
    for ((name, value) in pinned) {
        if (value.isClosed) fail("output-type", "The value for the output '$name' is closed.")
    }
}

/** Check a batch against the inputs of the model, as Python does, with the same codes. */
internal fun checkBatch(specs: List<Spec>, feeds: Map<String, OnnxTensorLike>) {
    val lacks = specs.find { feeds[it.name] == null }?.name // Java may have null
    if (feeds.size != specs.size || lacks != null) {
        fail("input-count", "The batch has the inputs ${feeds.keys - lacks}.",
            "pass " + specs.joinToString { "${it.name}: ${it.description}" })
    }
    val sizes = HashMap<String, Pair<Long, String>>()
    for (spec in specs) {
        val value = feeds.getValue(spec.name)
        val shape = value.shape
        val found = "its shape is ${shape.contentToString()}"
        val refuse = { code: String, problem: String ->
            fail(code, "Input '${spec.name}' must be ${spec.description}, and $problem.")
        }
        if (value.isClosed) refuse("input-type", "it is closed")
        val type = (value.info as TensorInfo).onnxType
        if (type != spec.type.onnx) refuse("input-type", "its elements are ${type.label}")
        if (!spec.shape.allows(shape)) refuse("input-shape", found)
        for ((axis, wanted) in spec.shape.withIndex()) {
            if (shape[axis] == 0L && wanted != 0L) refuse("empty-batch", "it is empty: $found")
            val symbol = spec.symbols[axis]
            val (size, owner) = sizes.getOrPut(symbol) { Pair(shape[axis], spec.name) }
            val same = symbol.isEmpty() || size == shape[axis]
            if (!same) refuse("input-sizes-differ", "'$symbol' is $size in '$owner': $found")
        }
    }
    for (spec in specs) {
        val tokens = spec.name == "input_ids" || spec.name == "decoder_input_ids"
        if (spec.type != Type.INT64 || spec.classCount == 0L && !tokens) continue
        val labels = (feeds.getValue(spec.name) as OnnxTensor).longBuffer
        for (i in 0 until labels.remaining()) {
            val label = labels.get(i)
            if (tokens && label < 0) { // ONNX's Gather counts it from the end of its table
                fail("bad-prompt", "Input '${spec.name}' holds $label, and tokens are numbered from 0.",
                    "pass the numbers that the tokenizer gives: -100 is for labels only")
            }
            if (spec.classCount == 0L || label in 0 until spec.classCount || label == spec.ignored) continue
            fail("label-out-of-range", "Element $i of '${spec.name}' is $label, and the classes are " +
                "numbered 0 to ${spec.classCount - 1}.",
                "number the classes from 0, or set ignore_index for labels to skip")
        }
    }
}
