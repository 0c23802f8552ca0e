package org.odtpack

import java.io.ByteArrayOutputStream
import java.nio.ByteBuffer
import java.nio.ByteOrder
import java.security.MessageDigest

internal const val DIGEST_PREFIX = "sha256:"
internal const val DIGEST_TEXT_BYTES = 7 + 64

internal fun sha256(bytes: ByteBuffer): ByteArray =
    MessageDigest.getInstance("SHA-256").run {
        update(bytes)
        digest()
    }

/** A digest as a checkpoint holds it. */
internal fun digestText(digest: ByteArray): String =
    DIGEST_PREFIX + digest.joinToString("") { "%02x".format(it.toInt() and 0xFF) }

/**
 * What the digest of a whole checkpoint is made from, piece by piece, in the order of the file:
 * docs/formats/checkpoint.md.
 */
internal class Outline {
    private val bytes = ByteArrayOutputStream()

    fun begin(nominal: Boolean) {
        bytes.write("odtpack.checkpoint.1".toByteArray())
        bytes.write(if (nominal) 1 else 0)
    }

    fun int(value: Int) = put(4) { putInt(value) }

    fun long(value: Long) = put(8) { putLong(value) }

    fun float(value: Float) = put(4) { putFloat(value + 0f) } // a negative zero counts as zero

    fun text(text: String) {
        val encoded = text.toByteArray()
        int(encoded.size)
        bytes.write(encoded)
    }

    /** A tensor; [elements] are none in a nominal state. Returns the digest as text. */
    fun tensor(name: String, code: Int, shape: LongArray, elements: ByteBuffer): String {
        val digest = sha256(elements)
        text(name)
        int(code)
        int(shape.size)
        shape.forEach(::long)
        bytes.write(digest)
        return digestText(digest)
    }

    fun add(other: Outline) = other.bytes.writeTo(bytes)

    fun whole(): String = digestText(sha256(ByteBuffer.wrap(bytes.toByteArray())))

    private fun put(size: Int, write: ByteBuffer.() -> Unit) {
        val buffer = ByteBuffer.allocate(size).order(ByteOrder.LITTLE_ENDIAN)
        buffer.write()
        bytes.write(buffer.array())
    }
}
