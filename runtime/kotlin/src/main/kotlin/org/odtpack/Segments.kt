package org.odtpack

import ai.onnxruntime.*
import ai.onnxruntime.OrtSession.SessionOptions

/**
 * The models of a package that is trained segment by segment (docs/formats/package.md). Segments
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

    /** Memory of values between segments, as long as the longest so far, and the value in it. */
    private val rooms = HashMap<String, Pair<Tensor, Memory>>()
    private val forward = ArrayList<Part>()
    private val backward = ArrayList<Part>() // in the order in which they run
    private val last: Part
    private val lastEvaluated: Part?
    private val weights = HashMap<String, OnnxTensor>()

    init {
        val session = { path: String -> sessions.getOrPut(path) { openSession(env, path, options) } }
        try {
            val info = pack.manifest["segments"]
            mapWeights(env, info["weights"].given?.let(::pathOf), info, weights)
            for (json in info["segments"].list()) {
                val names = json["names"].given?.fields().orEmpty().mapValues { (_, each) -> each.text() }
                forward.add(Part(session(pathOf(json["forward"])), names, false))
                // Of those only the next run reads a value: others take its memory.
                val odd = forward.last().outputs.find { it.isCotangent }
                if (odd != null) wrongSegments("'${odd.name}' is a name of a gradient")
                json["backward"].given?.let { backward.add(0, Part(session(pathOf(it)), names, false)) }
            }
            last = Part(session(training), emptyMap())
            lastEvaluated = evaluation?.let { Part(session(it), emptyMap()) }
        } catch (error: Throwable) {
            close()
            throw error
        }
    }

    fun parts(training: Boolean): List<Part> = if (training) forward + last + backward else forward + lastEvaluated!!

    /** A weight, whose type and shape must be those that a model takes; null if there is none of that name. */
    fun weight(end: End): OnnxTensor? {
        val weight = weights[end.name] ?: return null
        val same = weight.info.onnxType == end.info.onnxType && weight.shape.contentEquals(end.info.shape)
        if (!same) wrongSegments("a model takes another '${end.name}' than the file of weights holds")
        return weight
    }

    fun hasWeight(name: String) = name in weights

    /** Memory between segments under a key: that of the last time, if it is large enough. */
    fun room(key: String, type: Type, shape: LongArray): Memory {
        val old = rooms[key]?.takeIf { (whole, _) -> whole.type == type && whole.count >= shape.count }
        if (old != null && old.second.tensor.shape.contentEquals(shape)) return old.second
        rooms.remove(key)?.second?.value?.close() // before there is more memory
        val whole = old?.first ?: zeros(type, shape)
        return Memory(whole.from(0, shape), env).also { rooms[key] = Pair(whole, it) }
    }

    override fun close() {
        sessions.values.forEach(OrtSession::close)
        rooms.values.forEach { it.second.value.close() }
        weights.values.forEach(OnnxTensor::close)
    }

    /** The path of a file of segments, which must be one of those that were checked. */
    private fun pathOf(json: Json): String {
        val name = json.text()
        if (pack.extra.none { it["path"].text() == name }) wrongSegments("'$name' is not a file of the package")
        return "${pack.folder}/$name"
    }
}
