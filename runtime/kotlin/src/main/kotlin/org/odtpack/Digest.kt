package org.odtpack

import java.io.ByteArrayOutputStream
import java.io.File
import java.nio.ByteBuffer
import java.security.MessageDigest

internal const val DIGEST_PREFIX = "sha256:"
internal const val DIGEST_TEXT_BYTES = 7 + 64
private const val DIGEST_BYTES = 32

private fun sha256() = MessageDigest.getInstance("SHA-256")

internal fun sha256(bytes: ByteBuffer): ByteArray = sha256().apply { update(bytes) }.digest()

internal fun sha256(file: File): ByteArray =
    sha256().apply { file.forEachBlock { bytes, size -> update(bytes, 0, size) } }.digest()

internal fun hex(digest: ByteArray): String = digest.joinToString("") { "%02x".format(it) }

/** The fields of the file's properties, by the types of their values. */
internal val PROPERTY_TYPES = listOf(Long::class, Float::class, String::class)

/**
 * What the digest of a whole checkpoint is made from: all that the file holds, in its order
 * (docs/formats/checkpoint.md).
 */
internal class Outline(
    private val nominal: Boolean,
    parameters: Map<String, Parameter>,
    optimizer: OptimizerState?,
    properties: Map<String, Any>,
) {
    private val bytes = ByteArrayOutputStream()
    private val tensors = ArrayList<Pair<Int, ByteBuffer>>() // and where their digests stand

    init {
        bytes.write("odtpack.checkpoint.1".toByteArray())
        bytes.write(if (nominal) 1 else 0)
        for (trainable in listOf(true, false)) {
            val own = parameters.filterValues { it.trainable == trainable }
            int(own.size)
            for ((name, each) in own) tensor(name, each.value)
        }
        int(optimizer?.groups.orEmpty().size)
        optimizer?.groups?.forEachIndexed { i, names -> group("group$i", names, optimizer) }
        for (type in PROPERTY_TYPES) {
            val own = properties.filterValues(type::isInstance)
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

    private fun group(name: String, parameters: List<String>, optimizer: OptimizerState) {
        text(name)
        long(optimizer.step)
        float(optimizer.rate)
        val owners = parameters.filter(optimizer.moments::containsKey)
        int(owners.size)
        for (owner in owners) {
            text(owner)
            val moments = optimizer.moments.getValue(owner)
            int(moments.size)
            moments.forEachIndexed { i, each -> tensor("momentum$i", each) }
        }
    }

    /** A tensor, whose elements are hashed later; in a nominal state it has none. */
    private fun tensor(name: String, tensor: Tensor) {
        val shape = if (nominal) LongArray(0) else tensor.shape
        text(name)
        int(tensor.type.code)
        int(shape.size)
        shape.forEach(::long)
        tensors.add(Pair(bytes.size(), if (nominal) ByteBuffer.allocate(0) else tensor.bytes()))
        bytes.write(ByteArray(DIGEST_BYTES))
    }

    private fun int(value: Int) = bytes.write(littleEndian(4).putInt(value).array())

    private fun long(value: Long) = bytes.write(littleEndian(8).putLong(value).array())

    private fun float(value: Float) = int((value + 0f).toRawBits()) // a negative zero counts as zero

    private fun text(text: String) {
        val encoded = text.toByteArray()
        int(encoded.size)
        bytes.write(encoded)
    }

    /** The digests as a file holds them: of each tensor that has a value, then of the whole. */
    fun digests(): List<String> {
        val all = bytes.toByteArray()
        val found = tensors.map { (at, elements) -> sha256(elements).also { it.copyInto(all, at) } }
        return ((if (nominal) emptyList() else found) + sha256(ByteBuffer.wrap(all))).map { DIGEST_PREFIX + hex(it) }
    }
}
