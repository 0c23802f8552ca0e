package org.odtpack

import java.io.ByteArrayOutputStream
import java.nio.ByteBuffer

// Messages of onnx.proto, as far as parts of models are put together and taken apart: a field goes by
// the tag in front of it, and messages that are concatenated are one message.

/** A number, or what stands in front of so many bytes. */
internal fun field(tag: Int, value: Long): ByteArray {
    val bytes = ByteArrayOutputStream()
    bytes.write(tag)
    var rest = value
    while (rest >= 0x80) {
        bytes.write((rest or 0x80).toInt())
        rest = rest ushr 7
    }
    bytes.write(rest.toInt())
    return bytes.toByteArray()
}

internal fun nested(tag: Int, content: ByteArray): ByteArray = field(tag, content.size.toLong()) + content

internal fun ByteArrayOutputStream.put(tag: Int, content: ByteArray) = write(nested(tag, content))

internal fun ByteBuffer.each(tag: Int): List<ByteBuffer> =
    fields(duplicate()).filter { it.tag == tag }.map { it.content }

internal fun ByteBuffer.texts(tag: Int): List<String> =
    each(tag).map { Charsets.UTF_8.decode(it.duplicate()).toString() }

internal fun ByteBuffer.text(tag: Int): String = texts(tag).lastOrNull().orEmpty()

internal fun ByteBuffer.toBytes() = ByteArray(remaining()).also { duplicate().get(it) }

/** A field of a message: its tag, its bytes with tag and length, and without. */
internal class Field(val tag: Int, val whole: ByteBuffer, val content: ByteBuffer)

internal fun fields(message: ByteBuffer): List<Field> {
    fun bad(): Nothing = fail("model-not-loadable", "A file of the package is not an ONNX model.")
    fun number(): Long {
        var number = 0L
        for (shift in 0 until 64 step 7) {
            if (!message.hasRemaining()) bad()
            val byte = message.get().toLong()
            number = number or (byte and 0x7F shl shift)
            if (byte >= 0) return number
        }
        bad()
    }
    val found = ArrayList<Field>()
    while (message.hasRemaining()) {
        val start = message.position()
        val tag = number()
        val length = when ((tag % 8).toInt()) {
            0 -> 0L.also { number() }
            1 -> 8L
            2 -> number()
            5 -> 4L
            else -> 0L
        }
        val content = message.position()
        if (length !in 0..message.remaining()) bad()
        val end = content + length.toInt()
        message.position(end)
        val known = if (tag in 0..Int.MAX_VALUE) tag.toInt() else -1
        found.add(Field(known, message.part(start, end - start), message.part(content, end - content)))
    }
    return found
}
