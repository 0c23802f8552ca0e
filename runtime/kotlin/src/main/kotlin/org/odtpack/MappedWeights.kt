package org.odtpack

import ai.onnxruntime.OnnxTensor
import ai.onnxruntime.OrtEnvironment
import ai.onnxruntime.TensorInfo
import java.io.IOException
import java.io.RandomAccessFile
import java.nio.ByteBuffer
import java.nio.ByteOrder
import java.nio.channels.FileChannel

internal fun wrongSegments(problem: String): Nothing = fail(
    "segments-invalid", "The package's segments are not valid: $problem.", "",
    "build the package again",
)

private const val ALIGNMENT = 64L
/**
 * The frozen weights of a network in segments where they lie in their file, read-only: pages that
 * the system can drop, and no memory of the process.
 *
 * @param path The file, which [segments] of the manifest describes; null if there are no weights.
 */
internal class MappedWeights(
    private val env: OrtEnvironment,
    path: String?,
    segments: Json,
) : AutoCloseable {
    private val weights = HashMap<String, OnnxTensor>()

    init {
        try {
            val tensors = segments["tensors"].list(emptyList())
            if (path != null) RandomAccessFile(path, "r").use { read(it.channel, tensors) }
            else if (tensors.isNotEmpty()) wrongSegments("the file of weights is missing")
        } catch (error: IOException) {
            fail("model-not-readable", "$path cannot be read: ${error.message}.")
        }
    }

    operator fun contains(name: String) = name in weights

    /** A weight as a model takes it, whose type and shape must be these. */
    fun find(name: String, wanted: TensorInfo): OnnxTensor {
        val weight = weights.getValue(name)
        val same = weight.info.onnxType == wanted.onnxType &&
            weight.info.shape.contentEquals(wanted.shape)
        if (!same) wrongSegments("a model takes another '$name' than the file of weights holds")
        return weight
    }

    override fun close() {
        weights.values.forEach(OnnxTensor::close)
        weights.clear()
    }

    private fun read(file: FileChannel, tensors: List<Json>) {
        var end = 0L
        var part: ByteBuffer? = null // of the file, which may be longer than a buffer
        var first = 0L
        for (json in tensors) {
            val name = json["name"].text()
            val type = Type.of(json["dtype"].text())
            if (type.java == null) wrongSegments("nothing can hold the weight '$name'")
            val shape = json["shape"].list().map { it.whole() }.toLongArray()
            val start = json["offset"].whole()
            val bytes = shape.fold(type.size.toDouble()) { all, axis -> all * axis }
            if (start < end || start % ALIGNMENT != 0L) wrongSegments("the place of '$name'")
            if (shape.any { it < 0 } || bytes > file.size() - start) {
                wrongSegments("the weight '$name' ends after the file of weights")
            }
            val size = bytes.toLong()
            end = start + size
            if (part == null || end > first + part.capacity()) {
                val most = minOf(file.size() - start, Int.MAX_VALUE.toLong())
                if (size > most) {
                    fail("model-too-large", "'$name' takes more than one buffer of Java holds.")
                }
                part = file.map(FileChannel.MapMode.READ_ONLY, start, most)
                first = start
            }
            val own = part!!.duplicate()
            own.limit((end - first).toInt())
            own.position((start - first).toInt())
            val memory = own.slice().order(ByteOrder.LITTLE_ENDIAN)
            val tensor = OnnxTensor.createTensor(env, memory, shape, type.java!!)
            weights.put(name, tensor)?.let { wrongSegments("two weights are called '$name'") }
        }
    }
}
