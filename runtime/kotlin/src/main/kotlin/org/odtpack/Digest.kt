package org.odtpack

import java.io.ByteArrayOutputStream
import java.io.File
import java.nio.ByteBuffer
import java.nio.ByteOrder
import java.security.MessageDigest

internal const val DIGEST_PREFIX = "sha256:"
internal const val DIGEST_TEXT_BYTES = 7 + 64
private const val DIGEST_BYTES = 32

private fun sha256() = MessageDigest.getInstance("SHA-256")

internal fun sha256(bytes: ByteBuffer): ByteArray = sha256().apply { update(bytes) }.digest()

internal fun sha256(file: File): ByteArray =
    sha256().apply { file.forEachBlock { bytes, size -> update(bytes, 0, size) } }.digest()

/** A digest as a checkpoint holds it. */
internal fun digestText(digest: ByteArray): String = DIGEST_PREFIX + hex(digest)

internal fun hex(digest: ByteArray): String = digest.joinToString("") { "%02x".format(it) }

/**
 * What the digest of a whole checkpoint is made from, piece by piece, in the order of the file:
 * docs/formats/checkpoint.md.
 */
internal class Outline(private val nominal: Boolean) {
    private val bytes = ByteArrayOutputStream()
    private val tensors = ArrayList<Pair<Int, ByteBuffer>>() // and where their digests stand

    init {
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

    /** A tensor, whose elements are hashed later; in a nominal state it has none. */
    fun tensor(name: String, tensor: Tensor) {
        val shape = if (nominal) LongArray(0) else tensor.shape
        text(name)
        int(tensor.type.code)
        int(shape.size)
        shape.forEach(::long)
        tensors.add(Pair(bytes.size(), if (nominal) ByteBuffer.allocate(0) else tensor.bytes()))
        bytes.write(ByteArray(DIGEST_BYTES))
    }

    /** Whole numbers, fractions and texts, in the order of their names. */
    fun properties(properties: Map<String, Any>) {
        for (kind in listOf(Long::class, Float::class, String::class)) {
            val own = properties.filterValues(kind::isInstance)
            int(own.size)
            for ((name, value) in own) {
                text(name)
                when (value) {
                    is Long -> long(value)
                    is Float -> float(value)
                    else -> text(value as String)
                }
            }
        }
    }

    /** The digests as a file holds them: of each tensor that has a value, then of the whole. */
    fun digests(): List<String> {
        val all = bytes.toByteArray()
        val found = tensors.map { (at, elements) -> sha256(elements).also { it.copyInto(all, at) } }
        val texts = if (nominal) emptyList() else found.map(::digestText)
        return texts + digestText(sha256(ByteBuffer.wrap(all)))
    }

    private fun put(size: Int, write: ByteBuffer.() -> Unit) {
        val buffer = ByteBuffer.allocate(size).order(ByteOrder.LITTLE_ENDIAN)
        buffer.write()
        bytes.write(buffer.array())
    }
}
