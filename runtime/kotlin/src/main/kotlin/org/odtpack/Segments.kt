package org.odtpack

import ai.onnxruntime.NodeInfo
import ai.onnxruntime.OnnxTensor
import ai.onnxruntime.OnnxTensorLike
import ai.onnxruntime.OnnxValue
import ai.onnxruntime.OrtEnvironment
import ai.onnxruntime.OrtSession
import ai.onnxruntime.OrtSession.Result
import ai.onnxruntime.OrtSession.RunOptions
import ai.onnxruntime.OrtSession.SessionOptions
import ai.onnxruntime.TensorInfo

private const val COTANGENT = ".cotangent"
private const val GRADIENT = "_grad.accumulation.out"
private val ENDS = listOf(COTANGENT, "_grad.accumulation.buffer", GRADIENT)

/** An input or output of a segment's model: its name there, in the network, and what it is. */
internal class End(val own: String, val name: String, val info: TensorInfo) {
    val isCotangent get() = name.endsWith(COTANGENT)

    /** What the gradient goes with. */
    val stem get() = name.removeSuffix(COTANGENT)
    val type = Type.values().find { it.onnx == info.onnxType && it.java != null }
        ?: wrongSegments("'$name' is ${info.onnxType}")
}

/** A model as one segment sees it, which calls its inputs and outputs by [names]. */
internal class Part(val session: OrtSession, private val names: Map<String, String>) {
    val inputs = session.inputInfo.map { (own, node) -> end(own, node) }
    val outputs = session.outputInfo.map { (own, node) -> end(own, node) }

    private fun end(own: String, node: NodeInfo) = End(
        own, nameOf(own), node.info as? TensorInfo ?: wrongSegments("'$own' is not a tensor"),
    )

    /** What belongs to a value, such as its gradient, goes with it. */
    private fun nameOf(own: String): String {
        val end = ENDS.find(own::endsWith).orEmpty()
        val stem = own.removeSuffix(end)
        return (names[stem] ?: stem) + end
    }
}

/** Memory of a value between segments, as long as the longest so far, and the value in it. */
internal class Room(val memory: Tensor, val tensor: Tensor, val value: OnnxTensor)

/**
 * The sessions of a package that is trained segment by segment (docs/formats/package.md). Segments
 * that are alike share a model, so that neither memory nor the time of loading grows with depth.
 */
internal class Segments(
    private val env: OrtEnvironment,
    options: SessionOptions,
    private val pack: TrainingPackage,
    training: String,
    evaluation: String?,
) : AutoCloseable {
    private val sessions = HashMap<String, OrtSession>()
    private val rooms = HashMap<String, Room>()
    private var mapped: MappedWeights? = null
    val weights get() = mapped!!
    val forward = ArrayList<Part>()
    val backward = ArrayList<Part>() // in the order in which they run
    val last: Part
    val lastEvaluated: Part?

    init {
        val part = { path: String, names: Map<String, String> ->
            Part(sessions.getOrPut(path) { openSession(env, path, options) }, names)
        }
        try {
            val info = pack.manifest["segments"]
            val file = info["weights"].takeUnless { it.absent }
            mapped = MappedWeights(env, file?.let(::pathOf), info)
            for (json in info["segments"].list()) {
                val names = json["names"].let { if (it.absent) emptyMap() else it.fields() }
                    .mapValues { (_, each) -> each.text() }
                forward.add(part(pathOf(json["forward"]), names))
                // Of those only the next run reads a value: others take its memory.
                val odd = forward.last().outputs.find { it.isCotangent }
                if (odd != null) wrongSegments("'${odd.name}' is a name of a gradient")
                val back = json["backward"]
                if (!back.absent) backward.add(0, part(pathOf(back), names))
            }
            last = part(training, emptyMap())
            lastEvaluated = evaluation?.let { part(it, emptyMap()) }
        } catch (error: Throwable) {
            close()
            throw error
        }
    }

    /** Memory between segments under a key: that of the last time, if it is large enough. */
    fun room(key: String, type: Type, shape: LongArray): Room {
        val old = rooms.remove(key)?.takeIf { it.tensor.type == type }
        if (old != null && old.tensor.shape.contentEquals(shape)) {
            rooms[key] = old
            return old
        }
        old?.value?.close()
        val fitting = old?.memory?.takeIf { it.count >= shape.fold(1L, Long::times) }
        val memory = fitting ?: zeros(type, shape)
        val tensor = memory.from(0, shape)
        return Room(memory, tensor, tensor.onnx(env)).also { rooms[key] = it }
    }

    override fun close() {
        sessions.values.forEach(OrtSession::close)
        rooms.values.forEach { it.value.close() }
        mapped?.close()
        sessions.clear()
        rooms.clear()
    }

    /** The path of a file of segments, which must be one of those that were checked. */
    private fun pathOf(json: Json): String {
        val name = json.text()
        val listed = pack.manifest["files"]["extra"].list(emptyList())
        if (listed.none { it["path"].text() == name }) {
            wrongSegments("'$name' is not a file of the package")
        }
        return "${pack.folder}/$name"
    }
}

/**
 * Segments as one training or evaluation model, on [bound] memory. The segments are their maker's
 * to close.
 */
internal class SegmentedGraph(
    env: OrtEnvironment,
    private val segments: Segments,
    specs: List<Spec>,
    private val outputs: List<Spec>,
    private val bound: Map<String, Pair<Tensor, OnnxTensor>>,
    training: Boolean,
) : Model {
    private val returned = outputs.map { it.name }.toSet()

    /** Memory of the loss, which each step overwrites. */
    private val loss = zeros(outputs[0].type, longArrayOf()).onnx(env)
    private val runs = ArrayList<Run>()
    private val given = HashMap<String, OnnxTensorLike>()
    private var turn = false

    init {
        val made = specs.map { it.name }.toHashSet()
        segments.forward.mapTo(runs) { Run(it, made, false) }
        runs.add(Run(if (training) segments.last else segments.lastEvaluated!!, made, true))
        if (training) segments.backward.mapTo(runs) { Run(it, made, false) }
    }

    override fun run(
        feeds: Map<String, OnnxTensorLike>,
        wanted: Set<String>?,
        extra: Map<String, OnnxValue>,
        options: RunOptions?,
    ): Result {
        given.clear()
        given.putAll(feeds)
        var result: Result? = null
        try {
            for (run in runs) {
                if (run.isLast) result = run.start(wanted ?: returned, extra, options)
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

    override fun close() = loss.close()

    /** One run of a model: what never changes is bound once. */
    private inner class Run(private val part: Part, known: MutableSet<String>, val isLast: Boolean) {
        private val inputs = LinkedHashMap<String, OnnxTensorLike>()
        private val pinned = LinkedHashMap<String, OnnxValue>()
        private val taken = ArrayList<End>()
        private val made = ArrayList<End>()

        init {
            for (end in part.inputs) {
                when (end.name) {
                    in segments.weights -> {
                        inputs[end.own] = segments.weights.find(end.name, end.info)
                    }
                    in known -> taken.add(end)
                    else -> inputs[end.own] = memory(end)
                }
            }
            // The first of all results, whatever else is pinned.
            if (isLast) pinned[outputs[0].name] = loss
            val results = HashMap<String, End>()
            for (end in part.outputs) {
                when {
                    isLast && end.name in returned -> results[end.name] = end
                    end.name.endsWith(GRADIENT) -> pinned[end.own] = memory(end)
                    end.name in segments.weights || !known.add(end.name) -> {
                        wrongSegments("'${end.name}' is made twice")
                    }
                    else -> made.add(end)
                }
            }
            for (spec in if (isLast) outputs else emptyList()) {
                val type = results[spec.name]?.type
                    ?: mismatch("a model lacks an output of the manifest")
                if (type != spec.type) mismatch("the type of '${spec.name}'")
            }
        }

        fun start(
            wanted: Set<String>,
            extra: Map<String, OnnxValue>,
            options: RunOptions?,
        ): Result {
            val sizes = HashMap<String, Long>()
            for (end in taken) {
                val value = given.getValue(end.name)
                inputs[end.own] = value
                val symbols = end.info.dimensionNames
                (value.info as TensorInfo).shape.zip(symbols).forEach { (size, symbol) ->
                    if (symbol.isNotEmpty()) sizes[symbol] = size
                }
            }
            val unknown = ArrayList<End>()
            for (end in made) {
                val shape = shapeOf(end, sizes)
                if (shape == null) unknown.add(end)
                else pinned[end.own] = place(end, shape).value
            }
            val own = if (extra.isEmpty()) pinned else LinkedHashMap(pinned).apply { putAll(extra) }
            val asked = unknown.mapTo(LinkedHashSet(wanted)) { it.own } - own.keys
            val hint = "nothing was changed by it"
            val result = part.session.runOn(inputs, asked, own, options, hint)
            try {
                for (end in unknown) { // ONNX Runtime found memory for it
                    val found = result.get(end.own).get() as OnnxTensor
                    place(end, found.info.shape).tensor.copyFrom(found.byteBuffer)
                }
            } catch (error: Throwable) {
                result.close()
                throw error
            }
            return result
        }
    }

    /** A parameter, its gradient, or what else is bound under that name. */
    private fun memory(end: End) = memoryOf(
        end.name, end.info,
        bound[end.name] ?: wrongSegments("nothing gives '${end.name}' to a segment"),
    )

    /** The shape of what a run makes, as far as it follows from those of its inputs. */
    private fun shapeOf(end: End, sizes: Map<String, Long>): LongArray? {
        if (end.isCotangent) given[end.stem]?.let { return (it.info as TensorInfo).shape }
        val symbols = end.info.dimensionNames
        val shape = end.info.shape
        for (axis in shape.indices) {
            if (shape[axis] < 0) shape[axis] = sizes[symbols[axis]] ?: return null
        }
        return shape.takeIf { it.isNotEmpty() }
    }

    /** Give a value between segments its memory. */
    private fun place(end: End, shape: LongArray): Room {
        // The next run reads a cotangent, and makes the next one: two take turns.
        if (end.isCotangent) turn = !turn
        val key = if (end.isCotangent) "$COTANGENT $turn" else end.name
        return segments.room(key, end.type, shape).also { given[end.name] = it.value }
    }
}
