package org.odtpack

import ai.onnxruntime.*
import java.io.*
import java.nio.*
import java.nio.channels.FileChannel

internal fun wrongSegments(problem: String): Nothing =
    fail("segments-invalid", "The package's segments are not valid: $problem.", "build the package again")

private const val ALIGNMENT = 64L

/**
 * The frozen weights of a network in segments where they lie in their file, read-only: pages that
 * the system can drop, and no memory of the process. They are added to [weights].
 *
 * @param path The file, which [segments] of the manifest describes; null if there are no weights.
 */
internal fun mapWeights(env: OrtEnvironment, path: String?, segments: Json, weights: MutableMap<String, OnnxTensor>) {
    val tensors = segments["tensors"].list(emptyList())
    if (path == null && tensors.isNotEmpty()) wrongSegments("the file of weights is missing")
    try {
        if (path != null) uninterrupted {
            weights.clear() // of an attempt that an interrupt ended
            RandomAccessFile(path, "r").use { mapAll(env, it.channel, tensors, weights) }
        }
    } catch (error: IOException) {
        fail("model-not-readable", "$path cannot be read: ${error.message}.")
    }
}

private fun mapAll(env: OrtEnvironment, file: FileChannel, tensors: List<Json>, to: MutableMap<String, OnnxTensor>) {
    var end = 0L
    for (json in tensors) {
        val name = json["name"].text()
        val type = Type.of(json["dtype"].text()).java ?: wrongSegments("nothing can hold the weight '$name'")
        val shape = json["shape"].wholes()
        val start = json["offset"].whole()
        val bytes = shape.fold(type.size.toDouble()) { all, axis -> all * axis }
        if (name in to) wrongSegments("two weights are called '$name'")
        if (start < end || start % ALIGNMENT != 0L) wrongSegments("the place of '$name'")
        if (shape.any { it < 0 } || bytes > file.size() - start) {
            wrongSegments("the weight '$name' ends after the file of weights")
        }
        if (bytes > Int.MAX_VALUE) fail("model-too-large", "'$name' takes more than one buffer of Java holds.")
        end = start + bytes.toLong()
        // Each by itself: the file may be longer than a buffer. An empty one has no pages.
        val memory = if (bytes == 0.0) ByteBuffer.allocateDirect(0)
        else file.map(FileChannel.MapMode.READ_ONLY, start, bytes.toLong())
        to[name] = OnnxTensor.createTensor(env, memory.order(ByteOrder.LITTLE_ENDIAN), shape, type)
    }
}
