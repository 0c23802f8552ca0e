package org.odtpack

import ai.onnxruntime.OnnxTensor
import ai.onnxruntime.OnnxTensorLike
import ai.onnxruntime.OnnxValue
import ai.onnxruntime.OrtEnvironment
import ai.onnxruntime.OrtException
import ai.onnxruntime.OrtSession
import ai.onnxruntime.OrtSession.Result
import ai.onnxruntime.OrtSession.RunOptions
import ai.onnxruntime.OrtSession.SessionOptions
import ai.onnxruntime.NodeInfo
import ai.onnxruntime.TensorInfo
import java.io.File

internal fun mismatch(reason: String): Nothing = fail(
    "model-mismatch", "The package does not go with the checkpoint: $reason.", "",
    "use the models and the checkpoint of one package",
)

internal fun openSession(env: OrtEnvironment, path: String, options: SessionOptions): OrtSession {
    if (!File(path).isFile) fail("model-not-found", "There is no model $path.")
    try {
        return env.createSession(path, options)
    } catch (error: OrtException) {
        fail(
            "model-not-loadable", "ONNX Runtime ${env.version} cannot load it: ${error.message}",
            path, "build the package for this ONNX Runtime",
        )
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
    fail("run-failed", "ONNX Runtime failed in the middle of a step: $reason.", "", hint)
}

/** A model with the inputs and outputs of the manifest, whose parameters stand in bound memory. */
internal interface Model : AutoCloseable {
    /**
     * Run on the user's inputs, which were checked; [wanted] are the outputs to return, null for
     * all of them, and [extra] has memory of the caller's for some.
     */
    fun run(
        feeds: Map<String, OnnxTensorLike>,
        wanted: Set<String>?,
        extra: Map<String, OnnxValue>,
        options: RunOptions?,
    ): Result
}

/**
 * A training, step or evaluation model whose parameters and what is kept of them stand in bound
 * memory; [hint] says what to do after a run that failed. The session is its maker's to close.
 */
internal class Graph(
    env: OrtEnvironment,
    private val session: OrtSession,
    specs: List<Spec>,
    private val outputs: List<Spec>,
    private val bound: Map<String, Pair<Tensor, OnnxTensor>>,
    private val hint: String = "nothing was changed by it",
) : Model {
    private val inputs = LinkedHashMap<String, OnnxTensorLike>()
    private val pinned = LinkedHashMap<String, OnnxValue>()
    private val requested = LinkedHashSet<String>()

    /** Memory of a scalar loss, which each step overwrites. */
    private val loss =
        if (outputs[0].shape.isEmpty()) zeros(outputs[0].type, longArrayOf()).onnx(env) else null

    init {
        // The first of all results, whatever else is pinned.
        if (loss != null) pinned[outputs[0].name] = loss
        val mine = specs.associateBy { it.name }
        for ((name, info) in session.inputInfo) {
            if (!isUsers(info, mine[name])) inputs[name] = memory(name, info)
        }
        val results = outputs.associateBy { it.name }
        for ((name, info) in session.outputInfo) {
            if (name.startsWith("update.order.")) continue // it only orders the nodes
            if (!isUsers(info, results[name])) pinned[name] = memory(name, info)
        }
        requested.addAll(outputs.map { it.name } - pinned.keys)
        val complete = session.inputNames.containsAll(mine.keys) &&
            session.outputNames.containsAll(results.keys)
        if (!complete) mismatch("a model lacks an input or output of the manifest")
    }

    override fun run(
        feeds: Map<String, OnnxTensorLike>,
        wanted: Set<String>?,
        extra: Map<String, OnnxValue>,
        options: RunOptions?,
    ): Result {
        inputs.putAll(feeds)
        val own = if (extra.isEmpty()) pinned else LinkedHashMap(pinned).apply { putAll(extra) }
        val all = wanted ?: requested
        val asked = if (all.any(own::containsKey)) all - own.keys else all
        try {
            return session.runOn(inputs, asked, own, options, hint)
        } finally {
            feeds.keys.forEach(inputs::remove)
        }
    }

    override fun close() {
        loss?.close()
    }

    private fun isUsers(info: NodeInfo, spec: Spec?): Boolean {
        if (spec == null) return false
        val type = (info.info as? TensorInfo)?.onnxType
        if (type != spec.type.onnx) mismatch("the type of '${spec.name}'")
        return true
    }

    private fun memory(name: String, node: NodeInfo) = memoryOf(
        name, node.info as? TensorInfo ?: mismatch("'$name' is not a tensor"),
        bound[name] ?: mismatch("'$name' belongs to no parameter"),
    )
}

/** What is bound under a name, if it is what a model takes. */
internal fun memoryOf(name: String, info: TensorInfo, found: Pair<Tensor, OnnxTensor>): OnnxTensor {
    val (own, value) = found
    val shape = info.shape
    val fits = shape.isEmpty() || shape.size == own.shape.size &&
        shape.indices.all { shape[it] < 0 || shape[it] == own.shape[it] }
    if (info.onnxType != own.type.onnx || !fits) {
        mismatch("'$name' is ${own.description} in the checkpoint")
    }
    return value
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
        fail(
            "input-count", "The batch has the inputs ${feeds.keys - lacks}.", "",
            "pass " + specs.joinToString { "${it.name}: ${it.description}" },
        )
    }
    val sizes = HashMap<String, Long>()
    for (spec in specs) {
        val info = feeds.getValue(spec.name).info as TensorInfo
        val shape = info.shape
        val refuse = { code: String, problem: String ->
            fail(code, "Input '${spec.name}' must be ${spec.description}, and $problem.")
        }
        if (feeds.getValue(spec.name).isClosed) refuse("input-type", "it is closed")
        val type = info.onnxType
        if (type != spec.type.onnx) refuse("input-type", "its elements are $type")
        if (!spec.fits(shape)) refuse("input-shape", "its shape is ${shape.contentToString()}")
        for ((axis, wanted) in spec.shape.withIndex()) {
            if (shape[axis] == 0L && wanted != 0L) refuse("empty-batch", "it is empty")
            val symbol = spec.symbols[axis]
            if (symbol.isNotEmpty() && sizes.getOrPut(symbol) { shape[axis] } != shape[axis]) {
                refuse("input-sizes-differ", "'$symbol' is ${sizes[symbol]} in an input before")
            }
        }
    }
    for (spec in specs) {
        val tokens = spec.name == "input_ids" || spec.name == "decoder_input_ids"
        if (spec.type != Type.INT64 || spec.classCount == 0L && !tokens) continue
        val labels = (feeds.getValue(spec.name) as OnnxTensor).longBuffer
        for (i in 0 until labels.remaining()) {
            val label = labels.get(i)
            if (tokens && label < 0) { // ONNX's Gather counts it from the end of its table
                fail("bad-prompt", "Input '${spec.name}' holds $label, and tokens are numbered from 0.")
            }
            if (spec.classCount == 0L) continue
            if (label in 0 until spec.classCount || label == spec.ignored) continue
            fail(
                "label-out-of-range", "Element $i of '${spec.name}' is $label, and the classes are " +
                    "numbered 0 to ${spec.classCount - 1}.",
            )
        }
    }
}
